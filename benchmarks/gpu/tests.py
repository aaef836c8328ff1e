"""Part 2 of scripts/gpu: run tests/gpu with plain pytest.

Every failing test is a result, and so is the total.
"""

from __future__ import annotations

import sys
from collections import Counter

import pytest

from benchmarks.gpu.results import Result, write_result


class OutcomeReporter:
    """Counts outcomes and reports each failure immediately."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        """Write the name of a test to the log before it runs, in case it does not end in time."""
        print(f"\n{nodeid}", flush=True)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call" or report.outcome != "passed":
            self.counts[report.outcome] += 1
        if report.failed:
            text = str(getattr(report.longrepr, "reprcrash", report.longrepr))
            write_result(Result(report.nodeid, "FAILED", why=" ".join(text.split())[-500:]))

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self.counts["failed"] += 1
            write_result(
                Result(report.nodeid, "FAILED", why=" ".join(report.longreprtext.split())[-500:])
            )


def main() -> None:
    plugin = OutcomeReporter()
    code = pytest.main(
        ["-q", "-p", "no:cacheprovider", "-p", "no:xdist", "-p", "no:timeout", "tests/gpu"],
        [plugin],
    )
    is_good = code == pytest.ExitCode.OK
    why = "" if is_good else f"pytest ended with {code!r}"
    write_result(Result("tests/gpu", "ok" if is_good else "FAILED", dict(plugin.counts), why))


if __name__ == "__main__":
    sys.exit(main())
