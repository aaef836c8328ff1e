"""Whom a rank names that waits in vain, by the lines of the others."""

from __future__ import annotations

import pytest

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
