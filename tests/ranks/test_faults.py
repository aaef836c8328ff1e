"""Some rows of the fault table (tests/faults.py), each injected once between two hosts.

Each host has one rank. The other rows are run manually. A cut connection, a stopped flight recorder
and strangers have cheaper tests (test_lost_hosts.py, test_sockets_between_hosts.py).
"""

from __future__ import annotations

import pytest

from tests import faults

OPTIONS = faults.parsed(["--each", "1", "--dead-after", "4"])
LOAD = 3.0  # scales the time limits, which assume an idle machine


def keeps_its_promises(row: str) -> None:
    for measure in faults.play(row, OPTIONS):
        assert measure.took <= LOAD * measure.bound, measure


@pytest.mark.slow  # one minute for both
@pytest.mark.parametrize("row", ["kill-rank", "kill-agent"])
def test_a_killed_process_is_named_on_the_other_host_and_nothing_remains(row: str) -> None:
    keeps_its_promises(row)


@pytest.mark.slow  # `make slow`
def test_a_stopped_rank_and_a_bad_link_are_named_without_a_change_of_results(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(faults, "UNDISTURBED", {})
    keeps_its_promises("stopped-rank")
    assert min(map(len, faults.UNDISTURBED.values())) > faults.STEPS, (
        "what the next row's losses are compared with"
    )
    keeps_its_promises("loss-and-delay")
