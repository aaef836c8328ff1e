"""Ranks agree on a store prefix that no earlier start has used."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest
import torch.distributed as dist

from deepseek_zero.base import restarts
from deepseek_zero.base.errors import PeerError
from deepseek_zero.base.restarts import ROOT, agree_on_prefix, separate_starts

SOON = timedelta(seconds=20)


def agree(store: Any, size: int, late: dict[int, float] | None = None) -> list[str]:
    """Let `size` ranks agree on a prefix, each in its own thread.

    `late` maps a rank to the seconds after which it starts.
    """

    def one(rank: int) -> str:
        time.sleep((late or {}).get(rank, 0.0))
        return agree_on_prefix(store, rank, size, SOON)

    with ThreadPoolExecutor(size) as threads:
        return list(threads.map(one, range(size)))


@pytest.mark.parametrize("late", [{}, {0: 0.1}, {2: 0.1}])
def test_every_start_has_a_prefix_of_its_own(late: dict[int, float]) -> None:
    store = dist.HashStore()
    starts = [agree(store, 3, late) for _ in range(3)]
    assert all(len(set(prefixes)) == 1 for prefixes in starts)
    assert len({prefixes[0] for prefixes in starts}) == 3


@pytest.mark.parametrize("size", [2, 3])
def test_the_remains_of_an_interrupted_start_are_harmless(size: int) -> None:
    store = dist.HashStore()
    before = f"{ROOT}/of an earlier start"
    store.set(f"{ROOT}/leader", before)
    store.set(f"{before}/complete", "1")
    for rank in range(1, size):
        store.set(f"{ROOT}/hello/{rank}", "an old nonce")
        store.set(f"{ROOT}/answer/an old nonce", before)
        store.set(f"{before}/joined/{rank}", "1")
    prefixes = agree(store, size, {0: 0.05})
    assert len(set(prefixes)) == 1 and prefixes[0] != before


def test_a_world_of_one_rank_waits_for_no_reply() -> None:
    store = dist.HashStore()
    assert agree_on_prefix(store, 0, 1, SOON) != agree_on_prefix(store, 0, 1, SOON)


def test_the_rank_0_of_an_earlier_start_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    store = dist.HashStore()
    told: list[BaseException] = []

    def old() -> None:
        try:
            agree_on_prefix(store, 0, 2, SOON)
        except PeerError as error:
            told.append(error)

    thread = threading.Thread(target=old)
    thread.start()
    while not store.check([f"{ROOT}/leader"]):
        time.sleep(0.001)
    assert len(set(agree(store, 2, {1: 0.5}))) == 1
    thread.join()
    assert "another process has started as rank 0" in str(told[0])


def test_a_second_rendezvous_of_rank_0_does_not_take_ranks_from_the_first() -> None:
    """Rank 1 makes its last check after rank 0 has started the second rendezvous.

    By then, rank 0 has answered the old nonce again.
    """
    inner = dist.HashStore()

    class Delayed:
        """A store that delays rank 1 between reading the answer and checking for completion."""

        def __getattr__(self, name: str) -> Any:
            return getattr(inner, name)

        def check(self, keys: list[str]) -> bool:
            if keys[0].endswith("/complete"):
                time.sleep(0.2)
            return bool(inner.check(keys))

    def leader() -> list[str]:
        return [agree_on_prefix(inner, 0, 2, SOON) for _ in range(2)]

    def follower() -> list[str]:
        return [agree_on_prefix(Delayed(), 1, 2, SOON) for _ in range(2)]

    with ThreadPoolExecutor(2) as threads:
        first, second = threads.submit(leader), threads.submit(follower)
        assert first.result() == second.result()


@pytest.mark.parametrize(
    ("rank", "missing"),
    [(0, "ranks 1, 2 did not join"), (1, "rank 1 received no answer from rank 0")],
)
def test_a_rank_that_waits_in_vain_gets_an_error_with_the_missing_rank(
    rank: int, missing: str
) -> None:
    with pytest.raises(dist.DistStoreError, match=missing):
        agree_on_prefix(dist.HashStore(), rank, 3, timedelta(seconds=0.05))


def test_the_rendezvous_of_torch_has_a_fresh_prefix_only_if_an_agent_keeps_the_store(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for _ in range(2):
        separate_starts()
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    said = {"RANK": 0, "WORLD_SIZE": 1, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": server.port}
    for name, value in said.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.setenv(restarts.AGENT_STORE, "True")
    for url in ("env://", f"tcp://127.0.0.1:{server.port}?rank=0&world_size=1"):
        for value in (b"first", b"second"):
            store, rank, size = next(dist.rendezvous(url))
            assert (rank, size) == (0, 1)
            assert not store.check(["address"])
            store.set("address", value)
    assert not server.check(["address"])
    monkeypatch.setenv(restarts.AGENT_STORE, "False")
    monkeypatch.setenv("MASTER_PORT", "0")
    store, _, _ = next(dist.rendezvous("env://"))
    assert isinstance(store, dist.TCPStore)
