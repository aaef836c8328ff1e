"""Whom a rank names that waits in vain, by the lines of the others."""

from __future__ import annotations

import time

import pytest

from deepseek_zero.comm import flight_recorder
from deepseek_zero.comm.bootstrap import Hosts
from deepseek_zero.comm.flight_recorder import FlightRecorder
from tests.in_process import Texts


@pytest.mark.parametrize(
    ("lines", "named"),
    [
        ({"raised/1": "PeerError: rank 2 raised", "raised/2": "ValueError: mine"}, "rank 2 raised an error"),
        ({"raised/1": "PeerError: rank 2 has ended", "ended/2": "its program finished"}, "rank 2 has ended"),
        ({"raised/1": "HostLost: h1 silent", "raised/2": "ValueError: mine"}, "rank 1 raised an error .*: HostLost"),
        ({"raised/1": "PeerError: rank 2 is gone"}, "rank 1 raised an error .*: PeerError: rank 2 is gone"),
        ({}, None),
    ],
)
def test_who_raised_because_of_another_rank_is_named_last(lines: dict[str, str], named: str | None) -> None:
    recorder = FlightRecorder(Hosts(0, ("one host",) * 3), Texts(lines))
    error = recorder.find_failure("rank 0 waits", "engine 0")
    if error is None or named is None:
        assert error is named
    else:
        with pytest.raises(type(error), match=named):
            raise error


class Silent(Texts):
    """Lines of which the kernel says that rank 4's host answers nothing."""

    def silences(self) -> dict[int, float]:
        return {2: 0.5, 4: 11.0}


@pytest.mark.parametrize(("limit", "lines_of_2"), [(60.0, {"gone/2": "its process has ended"}), (0.1, {})])
def test_the_board_stays_until_the_others_have_said_why_they_end_or_cannot(
    limit: float, lines_of_2: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(flight_recorder, "STAY_SECONDS", limit)
    said = Silent({"raised/3": "HostLost: h2 silent", **lines_of_2})  # of rank 1, on this host, nobody asks
    began = time.monotonic()
    FlightRecorder(Hosts(0, ("h0", "h0", "h1", "h1", "h2")), said, dead_after=10.0).stay_for_others()
    assert time.monotonic() - began < 30.0
