"""Authenticated connections between the processes of a job, and what is served over them.

| file | what it holds |
|---|---|
| `tls.py` | TLS 1.3 with one certificate, which every process makes from the job's secret |
| `channel.py` | the job's secret, the handshake that proves it, dialing, `Listener` |
| `key_value_store.py` | a table in rank 0's process, and its client; detects lost hosts |
| `store.py` | a `torch.distributed.Store` over that table: the rendezvous of ranks and launchers |
| `link.py` | the messages of two ranks of different hosts |
| `links.py` | serves the connections of a rank to other hosts; replaces one that breaks |

The design notes are docs/design/sockets.md (sockets, secret, TLS), failure-detection.md (lost
hosts) and starting-ranks.md (the launcher's store).  This package knows no collective, engine or
transport: of `comm` it imports the identity of messages (`ids.py`), the exchange of texts before
there are connections (`bootstrap.py`), and the two names of a wait that every transport uses
(`transports/base.py`).

The package is frozen: bugs are repaired here, features are not added.

`Links` loads on first use: a job on one host needs none.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ...base.lazy import loads_on_first_use

if TYPE_CHECKING:
    from .links import Links

__all__ = ["Links"]

if not TYPE_CHECKING:  # a type checker would take any name for one of these
    __getattr__ = loads_on_first_use(__name__, {"links": "Links"})
