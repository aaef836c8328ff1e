"""Tiles are loaded and stored in order, within the limits of prefetch and write-behind."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from deepseek_zero.base.work import Work
from deepseek_zero.optim.tile_memory import PrefetchSettings, StorageRange, TilePrefetcher
from deepseek_zero.tiers.tier import Storage


class Transfer:
    def __init__(self, log: list[str], word: str) -> None:
        self.log, self.word = log, word

    def wait(self) -> None:
        self.log.append(self.word)

    def is_done(self) -> bool:
        return True


class Recorded(Storage):
    """A storage that logs its calls."""

    def __init__(self, log: list[str]) -> None:
        super().__init__(torch.zeros(100))
        self.log = log

    def fetch(self, low: int, high: int) -> Work:
        self.log.append(f"fetch {low}")
        return Transfer(self.log, f"here {low}")

    def store(self, low: int, high: int) -> Work:
        self.log.append(f"store {low}")
        return Transfer(self.log, f"gone {low}")

    def evict(self, low: int, high: int) -> None:
        self.log.append(f"drop {low}")


def story(settings: PrefetchSettings, *, changes: bool = True) -> list[str]:
    log: list[str] = []
    storage = Recorded(log)

    def touched(tile: int) -> Iterator[StorageRange]:
        yield StorageRange(storage, tile, tile + 1, changes)

    flow = TilePrefetcher(range(4), touched, settings)
    while (tile := flow.next()) is not None:
        log.append(f"update {tile}")
        flow.release(tile)
    return log


def test_without_prefetch_and_write_behind_transfers_are_sequential() -> None:
    each = [[f"fetch {n}", f"here {n}", f"update {n}", f"store {n}", f"gone {n}"] for n in range(4)]
    assert story(PrefetchSettings(0, 0)) == [word for words in each for word in words]


@pytest.mark.parametrize("ahead", [0, 1, 2, 9])
@pytest.mark.parametrize("behind", [0, 1, 2, 9])
def test_no_more_than_the_limit_is_in_flight(ahead: int, behind: int) -> None:
    fetched = updated = left = gone = 0
    for word in story(PrefetchSettings(ahead, behind)):
        kind = word.split()[0]
        fetched, updated = fetched + (kind == "fetch"), updated + (kind == "update")
        left, gone = left + (kind == "store"), gone + (kind == "gone")
        if kind == "update":
            assert fetched == min(4, updated + ahead)
            assert left - gone <= behind
    assert (fetched, updated, left) == (4, 4, 4)


def test_states_that_were_only_read_are_dropped() -> None:
    assert [word for word in story(PrefetchSettings(), changes=False) if "store" in word] == []
    assert [word for word in story(PrefetchSettings(), changes=False) if "drop" in word] == [
        f"drop {n}" for n in range(4)
    ]
