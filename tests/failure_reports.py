"""A pytest plugin for scripts/test: writes the id and output of each failed test to a file."""

from __future__ import annotations

import json
import os

import pytest

FILE = "DEEPSEEK_ZERO_TEST_FAILURES"  # the environment variable with the file's path


class FailureReports:
    """Append one JSON line per failed report: {"test": id, "output": text}."""

    def __init__(self, file: str) -> None:
        self.file = file

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if not report.failed:
            return
        sections = [f"--- {title} ---\n{text}" for title, text in report.sections]
        output = "\n".join([report.longreprtext, *sections])
        with open(self.file, "a", encoding="utf-8") as failures:
            failures.write(json.dumps({"test": report.nodeid, "output": output}) + "\n")


def pytest_configure(config: pytest.Config) -> None:
    # Removed so that neither workers nor tests that start pytest write to the file.
    file = os.environ.pop(FILE, None)
    if file is not None:
        config.pluginmanager.register(FailureReports(file))
