"""Authenticated connections between the processes of a job, and what is served over them.

| file | what it holds |
|---|---|
| `tls.py` | TLS 1.3 with one certificate, which every process makes from the job's secret |
| `channel.py` | the job's secret, the handshake that proves it, dialing, `Listener` |
| `key_value_store.py` | a table in rank 0's process, and its client; detects lost hosts |
| `store.py` | a `torch.distributed.Store` over that table: the rendezvous of ranks and launchers |
| `links.py` | tensors between ranks of different hosts; replaces a connection that breaks |

The decisions are 0102 (sockets and secret) and 0108 (lost hosts, the launcher's store, TLS).  This
package knows no collective, engine or transport: of `comm` it imports the identity of messages
(`ids.py`), the exchange of texts before there are connections (`bootstrap.py`), and the two names
of a wait that every transport uses (`transports/base.py`).

The package is frozen: bugs are repaired here, features are not added.
"""
