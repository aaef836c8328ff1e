"""Launchers on several machines exchange failures and never block on an unresponsive store."""

from __future__ import annotations

import math
import socket
import threading
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest

from deepseek_zero.cli import peers
from deepseek_zero.cli.peers import PeerWatch
from deepseek_zero.cli.ranks import Outcome

PATIENCE = 20.0  # in seconds; the test process may be suspended for a while


class Clock:
    """A clock that stands still until a test moves it; it replaces the launchers' clock."""

    now = 1000.0


class Table:
    """A store that all nodes share."""

    def __init__(self) -> None:
        self.texts: dict[str, str] = {}


class Line:
    """One node's connection to the store.

    A test can cut it, which blocks all calls, or break it, which makes them raise an error.
    """

    made: ClassVar[list[Line]] = []  # by the current test

    def __init__(self, table: Table) -> None:
        self.made.append(self)
        self._texts = table.texts
        self.is_open, self.is_waited_for, self.is_broken = (
            threading.Event(),
            threading.Event(),
            False,
        )
        self.is_open.set()

    def cut(self) -> None:
        """Block all calls, and return when the node waits in one."""
        self.is_waited_for.clear()
        self.is_open.clear()
        assert self.is_waited_for.wait(PATIENCE)

    def _pass(self) -> dict[str, str]:
        if not self.is_open.is_set():
            self.is_waited_for.set()
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
    monkeypatch.setattr(Clock, "now", Clock.now)
    monkeypatch.setattr(
        peers, "time", SimpleNamespace(monotonic=lambda: Clock.now, sleep=time.sleep)
    )
    yield
    for line in Line.made:  # ends the threads that would otherwise poll until the last test
        line.is_broken = True
        line.is_open.set()
    Line.made.clear()
    assert within(
        PATIENCE, lambda: all(each.name != "deepseek-zero-peers" for each in threading.enumerate())
    )


def two(dead_after: float) -> tuple[list[PeerWatch], list[Line]]:
    table = Table()
    lines = [Line(table), Line(table)]
    watches = [PeerWatch(line, node, 2, [node], dead_after) for node, line in enumerate(lines)]
    assert within(
        PATIENCE, lambda: all(1 - node in watch._seen for node, watch in enumerate(watches))
    )
    return watches, lines


def cut_off_second(watches: list[PeerWatch], lines: list[Line]) -> None:
    """Cut the second node's connection, and wait until the first node has read its writes."""
    lines[1].cut()
    assert within(
        PATIENCE, lambda: watches[0]._seen[1][0] == lines[0]._texts[f"{peers.ALIVE_KEY}/1"]
    )


def pass_time(seconds: float, watches: list[PeerWatch]) -> None:
    """Move the clock slowly enough that the threads of `watches` keep up.

    The connections of these nodes must be open.
    """
    until, step = Clock.now + seconds, 1.5 * peers.ASK_SECONDS
    while Clock.now < until:
        Clock.now += step
        assert within(PATIENCE, lambda: all(watch._answered == Clock.now for watch in watches))


def within(seconds: float, found: Callable[[], object]) -> object:
    until = time.monotonic() + seconds
    while not (value := found()) and time.monotonic() < until:
        time.sleep(0.01)
    return value


def test_a_failure_is_reported_to_other_ranks_and_the_first_one_is_kept() -> None:
    (first, second), _ = two(10.0)
    assert first.failure_of_others() is second.failure_of_others() is None
    second.report_failure(Outcome(3, "rank 1 failed", "why"))
    first.report_failure(Outcome(4, "rank 0 failed", "later"))
    assert within(PATIENCE, first.failure_of_others) == Outcome(
        3, f"rank 1 failed, on {socket.gethostname()}", "why"
    )


def test_the_end_of_the_store_after_all_ranks_finished_is_no_failure() -> None:
    (first, second), lines = two(10.0)
    assert not first.all_finished()
    time.sleep(0.1)
    assert not first.all_finished()
    lines[1].cut()  # otherwise, it could already report its end
    assert not second.all_finished(), "only now"
    lines[1].is_open.set()
    assert within(PATIENCE, first.all_finished) and within(PATIENCE, second.all_finished)
    (first, second), lines = two(10.0)
    assert not second.all_finished()
    lines[1].is_broken = True
    assert within(PATIENCE, second.all_finished) and second.failure_of_others() is None


def test_the_end_of_the_launcher_with_the_store_is_reported_with_host_and_ranks() -> None:
    (_, second), lines = two(10.0)
    lines[1].is_broken = True
    ended = Outcome(1, f"{socket.gethostname()} (rank 0) has ended", peers.ENDED_STORY)
    assert within(PATIENCE, second.failure_of_others) == ended
    unheard = Line(Table())
    unheard.is_broken = True
    third = PeerWatch(unheard, 1, 2, [1], 10.0)
    assert within(PATIENCE, third.failure_of_others) == Outcome(
        1, "node 0, which holds the store, has ended", peers.ENDED_STORY
    )


def test_a_silent_machine_is_logged_and_then_lost_by_name_on_both_sides(
    caplog: pytest.LogCaptureFixture,
) -> None:
    (first, second), lines = two(0.5)
    cut_off_second([first, second], lines)
    for _ in range(3):
        pass_time(0.12, [first])
        assert first.failure_of_others() is second.failure_of_others() is None
    pass_time(0.2, [first])
    heard = first.failure_of_others(), second.failure_of_others()
    for node, lost in zip((1, 0), heard, strict=True):
        assert lost is not None and lost.exit_code == 1
        assert (
            lost.headline == f"HostLost: {socket.gethostname()} (rank {node}) silent for 0.5 s"
            and lost.is_silence
        )
    assert sum("silent for 0.2 s" in line for line in caplog.messages) == 2
    second.report_failure(Outcome(1, "nobody hears this", ""))  # does not wait for an answer
    lines[1].is_open.set()


def test_a_cut_shorter_than_the_limit_logs_two_lines_and_is_no_failure(
    caplog: pytest.LogCaptureFixture,
) -> None:
    watches, lines = two(5.0)
    cut_off_second(watches, lines)
    for _ in range(2):
        pass_time(0.2, watches[:1])
        assert not any(watch.failure_of_others() for watch in watches)
    lines[1].is_open.set()
    for node, watch in enumerate(watches):
        assert within(
            PATIENCE, lambda watch=watch, node=node: watch._seen[1 - node][1] == Clock.now
        )  # type: ignore[misc]
        assert within(PATIENCE, lambda watch=watch: watch._answered == Clock.now)  # type: ignore[misc]
        assert not watch.failure_of_others()
    said = [line for line in caplog.messages if line.startswith(socket.gethostname())]
    assert [("silent" in line, "again" in line) for line in said] == [(True, False)] * 2 + [
        (False, True)
    ] * 2
    assert not any(watch.failure_of_others() for watch in watches)


def test_a_launcher_that_was_suspended_reports_no_rank_as_silent(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    watches, _ = two(5.0)
    monkeypatch.setattr(peers, "ASK_SECONDS", 3600.0)
    assert within(
        PATIENCE,
        lambda: not any(watch._has_news.is_set() or watch._poll_started for watch in watches),
    )
    Clock.now += 60.0
    assert not any(watch.failure_of_others() for watch in watches)
    monkeypatch.setattr(peers, "ASK_SECONDS", 0.02)
    for watch in watches:
        watch._has_news.set()
    assert within(
        PATIENCE,
        lambda: all(watch._seen[1 - node][1] == Clock.now for node, watch in enumerate(watches)),
    )
    assert not any(watch.failure_of_others() for watch in watches)


def test_inf_waits_for_ever() -> None:
    watches, lines = two(float("inf"))
    cut_off_second(watches, lines)
    pass_time(0.6, watches[:1])
    assert not any(watch.failure_of_others() for watch in watches)


def test_ranks_that_are_stopped_are_named_elsewhere_too(caplog: pytest.LogCaptureFixture) -> None:
    (_, second), _ = two(10.0)
    second.stopped = {1}
    assert within(PATIENCE, lambda: f"rank 1 on {socket.gethostname()} is stopped" in caplog.text)
    second.stopped = ()
    assert within(PATIENCE, lambda: f"rank 1 on {socket.gethostname()} continues" in caplog.text)
    assert caplog.text.count("is stopped") == 1


def test_a_machine_whose_launcher_disappeared_counts_as_ended() -> None:
    (first, second), lines = two(10.0)
    lines[0].set(f"{peers.GONE}/1", "ended")
    lost = within(PATIENCE, first.failure_of_others)
    assert isinstance(lost, Outcome) and not lost.is_silence
    assert lost.headline == f"{socket.gethostname()} (rank 1) has ended"
    (first, second), lines = two(10.0)
    second.report_failure(Outcome(3, "rank 1 failed", "why"))
    lines[0].set(f"{peers.GONE}/1", "ended")
    assert within(PATIENCE, first.failure_of_others) == Outcome(
        3, f"rank 1 failed, on {socket.gethostname()}", "why"
    )
    (first, second), lines = two(10.0)
    assert not second.all_finished()
    assert within(PATIENCE, lambda: f"{peers.FINISHED_KEY}/1" in lines[0]._texts)
    lines[0].set(f"{peers.GONE}/1", "ended")
    assert not within(0.2, first.failure_of_others), "it said before that all went well"


def test_a_node_may_appear_while_the_silence_of_the_others_is_checked() -> None:
    class Entry(tuple[Any, ...]):
        def __iter__(self) -> Iterator[Any]:
            watch._seen[2] = ("", 0.0)  # as the thread does
            return super().__iter__()

    watch = PeerWatch.__new__(PeerWatch)
    watch._failure_elsewhere = watch._poll_started = None
    watch._answered = 0.0
    watch._dead_after = math.inf
    watch._logged_silent = set()
    watch._names = {}
    watch._seen = {1: Entry(("", 0.0))}  # type: ignore[dict-item]
    assert watch.failure_of_others() is None
