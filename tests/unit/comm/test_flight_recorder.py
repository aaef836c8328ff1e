"""A rank whose wait times out names the responsible rank from the records of the other ranks."""

from __future__ import annotations

import json
import time
from dataclasses import asdict

import pytest

from deepseek_zero.base.launch import STORE
from deepseek_zero.comm import flight_recorder
from deepseek_zero.comm.bootstrap import Hosts
from deepseek_zero.comm.flight_recorder import FlightRecorder, Position
from tests.in_process import Texts


@pytest.mark.parametrize(
    ("lines", "named"),
    [
        (
            {"raised/1": "PeerError: rank 2 raised", "raised/2": "ValueError: mine"},
            "rank 2 raised an error",
        ),
        (
            {"raised/1": "PeerError: rank 2 has ended", "ended/2": "its program finished"},
            "rank 2 has ended",
        ),
        (
            {"raised/1": "HostLost: h1 silent", "raised/2": "ValueError: mine"},
            "rank 1 raised an error .*: HostLost",
        ),
        (
            {"raised/1": "PeerError: rank 2 is gone"},
            "rank 1 raised an error .*: PeerError: rank 2 is gone",
        ),
        ({}, None),
    ],
)
def test_ranks_that_raised_because_of_another_are_listed_last(
    lines: dict[str, str], named: str | None
) -> None:
    recorder = FlightRecorder(Hosts(0, ("one host",) * 3), Texts(lines))
    error = recorder.find_failure("rank 0 waits", "engine 0")
    if error is None or named is None:
        assert error is named
    else:
        with pytest.raises(type(error), match=named):
            raise error


class Silent(Texts):
    """A store for which the kernel reports 11 s without an answer from rank 4's host."""

    def silences(self) -> dict[int, float]:
        return {2: 0.5, 4: 11.0}


@pytest.mark.parametrize(
    ("limit", "lines_of_2"), [(60.0, {"gone/2": "its process has ended"}), (0.1, {})]
)
def test_the_store_stays_until_other_ranks_have_recorded_their_end(
    limit: float, lines_of_2: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(flight_recorder, "STAY_SECONDS", limit)
    # Rank 1 is on this host, so no rank reads the store for it.
    said = Silent({"raised/3": "HostLost: h2 silent", **lines_of_2})
    began = time.monotonic()
    FlightRecorder(
        Hosts(0, ("h0", "h0", "h1", "h1", "h2")), said, dead_after=10.0
    ).stay_for_others()
    assert time.monotonic() - began < 30.0


@pytest.mark.parametrize(("rank", "is_ours", "lines"), [(0, False, 1), (1, False, 0), (0, True, 0)])
def test_one_rank_of_a_host_logs_a_silent_rank_once_unless_the_launcher_does(
    rank: int,
    is_ours: bool,
    lines: int,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setenv("MASTER_PORT", "29501")
    monkeypatch.setenv(STORE, f"10.77.0.1:29500/{29501 if is_ours else 29500}")
    said, silences = Texts(), {2: 0.1, 3: 0.1, 4: 5.1}
    monkeypatch.setattr(said, "silences", lambda: silences, raising=False)
    hosts = Hosts(rank, ("a", "a", "b", "b", "c"), ("h0", "h0", "h1", "h1", "h2"))
    recorder = FlightRecorder(hosts, said, dead_after=60.0)

    def told(**now: float) -> list[str]:
        caplog.clear()
        silences.update({int(each[1:]): seconds for each, seconds in now.items()})
        assert recorder.find_lost_host(reads_store=False) is None
        return caplog.messages

    assert told() == ["h2 (rank 4) silent for 5 s"] * lines
    assert told(_2=6.0) == [], "of rank 3, on the same host, there are signs"
    assert told(_3=5.5, _4=9.0) == ["h1 (ranks 2, 3) silent for 5 s"] * lines
    assert told(_2=7.0, _3=7.0, _4=0.2) == ["h2 (rank 4) answers again"] * lines
    assert told() == []
    assert told(_3=0.4) == ["h1 (ranks 2, 3) answers again"] * lines
    assert told() == [] and not recorder.logged_silent


def position(sequence: int, ranks: list[int]) -> Position:
    log = {"engine 1/rows": {str(sequence): f"agree on {sequence}"}}
    return Position("engine 1/rows", sequence, ranks, {"engine 1/rows": sequence + 1}, log)


@pytest.mark.parametrize(
    ("waiting", "me", "absent"),
    [
        ({}, 0, "rank 1, rank 2"),
        ({1: 5}, 0, "rank 2"),
        ({0: 5}, 1, None),  # rank 0 reports it
        ({1: 4, 2: 4}, 0, None),  # they are in another collective, which raises an error elsewhere
        ({1: 4}, 0, "rank 2"),
    ],
)
def test_the_lowest_rank_that_waits_names_those_that_are_in_no_collective(
    waiting: dict[int, int], me: int, absent: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    lines = {
        f"waiting/{rank}": json.dumps(asdict(position(at, [0, 1, 2])))
        for rank, at in waiting.items()
    }
    recorder = FlightRecorder(Hosts(me, ("one host",) * 4), Texts(lines))
    told = []
    for seconds in (1.0, 4.9, 5.1, 6.0, 9.0, 10.3, 15.0):
        caplog.clear()
        recorder.log_absent_ranks(position(5, [0, 1, 2]), "engine 1", seconds)
        told += [seconds] if caplog.text else []
        if caplog.text:
            assert f"rank {me} has waited {seconds:.0f} s in 'agree on 5'." in caplog.text
            assert f"Not in a collective of an engine: {absent}." in caplog.text
    assert told == ([] if absent is None else [5.1, 10.3])
