"""Authenticated connections between the processes of a job, and their services.

| file | what it holds |
|---|---|
| `tls.py` | TLS 1.3 with one certificate, which every process makes from the job's secret |
| `channel.py` | the job's secret, the handshake that proves it, dialing, `Listener` |
| `key_value_store.py` | a table in rank 0's process, and its client; detects lost hosts |
| `store.py` | a `torch.distributed.Store` over that table: the rendezvous of ranks and launchers |
| `link.py` | the messages between two ranks of different hosts |
| `links.py` | serves the connections of a rank to other hosts, and replaces broken ones |

The design notes are docs/design/sockets.md (sockets, secret, TLS), failure-detection.md (lost
hosts) and starting-ranks.md (the launcher's store). This package does not depend on collectives,
engines or transports. From `comm` it imports the identity of messages (`ids.py`), the exchange of
texts before there are connections (`bootstrap.py`), and the names of a wait that every transport
uses (`transports/base.py`).

The package is frozen: bugs are fixed here, but features are not added.

`Links` loads on first use, because a job on one host does not need it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ...base.lazy import loads_on_first_use

if TYPE_CHECKING:
    from .links import Links

__all__ = ["Links"]

if not TYPE_CHECKING:  # A type checker would accept any name
    __getattr__ = loads_on_first_use(__name__, {"links": "Links"})
