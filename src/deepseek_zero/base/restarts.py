"""A fresh key prefix for every start of the ranks under torchrun.

torchrun's agent keeps one key-value store for all restarts of its ranks. Without a new prefix, a
rank of a second start reads the addresses of the first start, connects to processes that have
ended, and fails (pytorch#135712). `separate_starts` replaces torch's rendezvous, so every process
group uses the prefix of this start, including groups that the program creates with
`torch.distributed.init_process_group`.

The ranks agree on the prefix with nonces, because restart counters differ between the agents of
several hosts:

    rank r   draws a nonce and writes it under "hello/r"
    rank 0   draws the prefix and writes it under "answer/NONCE" for each nonce that it finds
    rank r   writes "PREFIX/joined/r"
    rank 0   writes "PREFIX/complete" when all ranks have joined

Values of an earlier start do no harm: no rank waits for the answer to an old nonce, and no rank
joins an old prefix.
"""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from .device import replace_rendezvous
from .errors import PeerError

AGENT_STORE = "TORCHELASTIC_USE_AGENT_STORE"  # "True": the ranks use a store that outlives them
MEETING = timedelta(minutes=30)  # torch's own limit for a rendezvous
ROOT = "deepseek_zero/start"
# seconds between two reads of the store
SHORTEST_PAUSE = 1e-3
LONGEST_PAUSE = 0.25

Rendezvous = Callable[..., Iterator[tuple[Any, int, int]]]


def separate_starts() -> None:
    """Make every rendezvous of this process agree on a fresh prefix.

    It has an effect only if an agent keeps the store. It does not communicate, and further calls
    have no effect.
    """
    if not dist.is_available():
        return
    for scheme in ("env", "tcp"):
        replace_rendezvous(scheme, _with_fresh_prefix)


def _with_fresh_prefix(original: Rendezvous) -> Rendezvous:
    def rendezvous(
        url: str, timeout: timedelta = MEETING, **options: Any
    ) -> Iterator[tuple[Any, int, int]]:
        for store, rank, size in original(url, timeout=timeout, **options):
            if os.environ.get(AGENT_STORE) == "True" and rank >= 0 and size > 0:
                prefix = agree_on_prefix(store, rank, size, min(timeout, MEETING))
                store = dist.PrefixStore(prefix, store)  # type: ignore[attr-defined]  # public
            yield store, rank, size

    return rendezvous


def agree_on_prefix(store: Any, rank: int, size: int, timeout: timedelta) -> str:
    """Return a prefix that no earlier start has used, the same on all ranks.

    Args:
        store: The key-value store that outlives the ranks.
        rank: World rank of this process.
        size: The number of ranks.
        timeout: Maximum time to wait for the other ranks.

    Returns:
        A prefix of keys in the store.

    Raises:
        DistStoreError: A rank did not join in time.
        PeerError: A later start of the same ranks has begun.

    Note:
        Collective: every rank must call it.
    """
    deadline = time.monotonic() + timeout.total_seconds()
    return _lead(store, size, deadline) if rank == 0 else _follow(store, rank, deadline)


def _lead(store: Any, size: int, deadline: float) -> str:
    prefix = f"{ROOT}/{secrets.token_hex(8)}"
    leader = f"{ROOT}/leader"
    store.set(leader, prefix)
    missing = set(range(1, size))
    pauses = _pauses()
    while True:
        for rank in sorted(missing):
            hello = f"{ROOT}/hello/{rank}"
            if store.check([f"{prefix}/joined/{rank}"]):
                missing.remove(rank)
            elif store.check([hello]):
                nonce = store.get(hello).decode()
                store.set(f"{ROOT}/answer/{nonce}", prefix)
        if store.get(leader).decode() != prefix:
            raise PeerError(
                "another process has started as rank 0 of this job.",
                "A restart has replaced the ranks to which this process belongs.",
                "nothing, if the job was restarted; else start only one process as rank 0.",
            )
        if not missing:
            store.set(f"{prefix}/complete", "1")
            return prefix
        _sleep(
            next(pauses), deadline, f"ranks {', '.join(map(str, sorted(missing)[:8]))} did not join"
        )


def _follow(store: Any, rank: int, deadline: float) -> str:
    nonce = secrets.token_hex(8)
    answer = f"{ROOT}/answer/{nonce}"
    store.set(f"{ROOT}/hello/{rank}", nonce)
    joined = ""
    pauses = _pauses()
    while True:
        prefix = store.get(answer).decode() if store.check([answer]) else ""
        # Read this key after the answer: rank 0 may complete this agreement and begin another one
        # between the two, and it would then answer the same nonce once more.
        if joined and store.check([f"{joined}/complete"]):
            return joined
        if prefix != joined:
            store.set(f"{prefix}/joined/{rank}", "1")
            joined = prefix
        _sleep(next(pauses), deadline, f"rank {rank} received no answer from rank 0")


def _pauses() -> Iterator[float]:
    pause = SHORTEST_PAUSE
    while True:
        yield pause
        pause = min(1.5 * pause, LONGEST_PAUSE)


def _sleep(seconds: float, deadline: float, problem: str) -> None:
    if time.monotonic() > deadline:
        raise dist.DistStoreError(f"{problem} before the time limit of the rendezvous")
    time.sleep(seconds)
