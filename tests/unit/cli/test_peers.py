"""What launchers of several machines hear of each other, and that none of them waits for a store that is silent."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import ClassVar

import pytest

from deepseek_zero.cli import peers
from deepseek_zero.cli.peers import PeerWatch
from deepseek_zero.cli.ranks import Outcome


class Table:
    """A store that all nodes share."""

    def __init__(self) -> None:
        self.texts: dict[str, str] = {}


class Line:
    """One node's way to it, which can be cut, so that who asks waits, or broken."""

    made: ClassVar[list[Line]] = []  # by a test

    def __init__(self, table: Table) -> None:
        self.made.append(self)
        self._texts = table.texts
        self.is_open, self.is_broken = threading.Event(), False
        self.is_open.set()

    def _pass(self) -> dict[str, str]:
        self.is_open.wait()
        if self.is_broken:
            raise RuntimeError("gone")
        return self._texts

    def set(self, key: str, value: str) -> None:
        self._pass()[key] = value

    def get(self, key: str) -> bytes:
        return self._pass()[key].encode()

    def check(self, keys: list[str]) -> bool:
        return set(keys) <= self._pass().keys()

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        return self._pass().setdefault(key, desired).encode()


@pytest.fixture(autouse=True)
def in_haste(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name, value in {"ASK_SECONDS": 0.02, "FAREWELL_SECONDS": 0.2, "TELL_AFTER": 0.2}.items():
        monkeypatch.setattr(peers, name, value)
    yield
    for line in Line.made:  # or their threads would ask for as long as the tests run
        line.is_broken = True
        line.is_open.set()
    Line.made.clear()
    assert within(5.0, lambda: all(each.name != "deepseek-zero-peers" for each in threading.enumerate()))


def two(dead_after: float) -> tuple[list[PeerWatch], list[Line]]:
    table = Table()
    lines = [Line(table), Line(table)]
    watches = [PeerWatch(line, node, 2, [node], dead_after) for node, line in enumerate(lines)]
    time.sleep(0.1)
    return watches, lines


def within(seconds: float, found: Callable[[], object]) -> object:
    until = time.monotonic() + seconds
    while not (value := found()) and time.monotonic() < until:
        time.sleep(0.01)
    return value


def test_a_failure_is_told_to_the_others_and_the_first_one_stays() -> None:
    (first, second), _ = two(10.0)
    assert first.heard_failure() is second.heard_failure() is None
    second.tell_failure(Outcome(3, "rank 1 failed", "why"))
    first.tell_failure(Outcome(4, "rank 0 failed", "later"))
    assert within(1.0, first.heard_failure) == Outcome(3, f"rank 1 failed, on {socket.gethostname()}", "why")


def test_all_have_finished_when_each_has_and_a_store_that_goes_then_is_no_failure() -> None:
    (first, second), lines = two(10.0)
    assert not first.all_finished()
    time.sleep(0.1)
    assert not first.all_finished()
    assert not second.all_finished(), "only now"
    assert within(1.0, first.all_finished) and within(1.0, second.all_finished)
    (first, second), lines = two(10.0)
    assert not second.all_finished()
    lines[1].is_broken = True
    assert within(1.0, second.all_finished) and second.heard_failure() is None


def test_a_store_that_is_gone_is_a_failure() -> None:
    (_, second), lines = two(10.0)
    lines[1].is_broken = True
    assert within(1.0, second.heard_failure) == Outcome(1, "node 0, which holds the store, is gone")


def test_a_silent_machine_is_told_then_lost_by_name_on_both_sides(caplog: pytest.LogCaptureFixture) -> None:
    (first, second), lines = two(0.5)
    lines[1].is_open.clear()
    began = time.monotonic()
    heard: tuple[Outcome | None, Outcome | None] = (None, None)
    while not all(heard) and time.monotonic() < began + 2.0:
        heard = first.heard_failure(), second.heard_failure()
        time.sleep(0.01)
    for node, lost in zip((1, 0), heard, strict=True):
        assert lost is not None and lost.exit_code == 1
        assert lost.headline == f"HostLost: {socket.gethostname()} (rank {node}) silent for 0.5 s" and lost.is_silence
    assert 0.4 < time.monotonic() - began < 1.5
    assert sum("silent for 0.2 s" in line for line in caplog.messages) == 2
    second.tell_failure(Outcome(1, "nobody hears this", ""))  # and it does not wait for that
    lines[1].is_open.set()


def test_a_cut_that_heals_in_time_is_two_lines_and_no_failure(caplog: pytest.LogCaptureFixture) -> None:
    (first, second), lines = two(5.0)
    lines[1].is_open.clear()
    assert not within(0.5, lambda: first.heard_failure() or second.heard_failure())
    lines[1].is_open.set()
    assert not within(0.3, lambda: first.heard_failure() or second.heard_failure())
    said = [line for line in caplog.messages if line.startswith(socket.gethostname())]
    assert [("silent" in line, "again" in line) for line in said] == [(True, False)] * 2 + [(False, True)] * 2
    assert not within(0.2, lambda: first.heard_failure() or second.heard_failure())


def test_inf_waits_for_ever() -> None:
    (first, _), lines = two(float("inf"))
    lines[1].is_open.clear()
    assert not within(0.6, first.heard_failure)
    lines[1].is_open.set()


def test_ranks_that_are_stopped_are_named_elsewhere_too(caplog: pytest.LogCaptureFixture) -> None:
    (_, second), _ = two(10.0)
    second.stopped = {1}
    assert within(1.0, lambda: f"rank 1 on {socket.gethostname()} is stopped" in caplog.text)
    second.stopped = ()
    assert within(1.0, lambda: f"rank 1 on {socket.gethostname()} runs again" in caplog.text)
    assert caplog.text.count("is stopped") == 1


def test_a_machine_whose_launcher_is_gone_without_a_word_has_ended() -> None:
    (first, second), lines = two(10.0)
    lines[0].set(f"{peers.GONE}/1", "ended")
    lost = within(1.0, first.heard_failure)
    assert isinstance(lost, Outcome) and not lost.is_silence
    assert lost.headline == f"{socket.gethostname()} (rank 1) has ended"
    (first, second), lines = two(10.0)
    second.tell_failure(Outcome(3, "rank 1 failed", "why"))
    lines[0].set(f"{peers.GONE}/1", "ended")
    assert within(1.0, first.heard_failure) == Outcome(3, f"rank 1 failed, on {socket.gethostname()}", "why")
    (first, second), lines = two(10.0)
    assert not second.all_finished()
    assert within(1.0, lambda: f"{peers.FINISHED_KEY}/1" in lines[0]._texts)
    lines[0].set(f"{peers.GONE}/1", "ended")
    assert not within(0.2, first.heard_failure), "it said before that all went well"
