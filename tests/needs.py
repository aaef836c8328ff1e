"""Requirements of a test on the machine.

Without a requirement the test is skipped; with MUST_RUN set, as in CI, it fails.
"""

from __future__ import annotations

import os

import pytest

MUST_RUN = "DEEPSEEK_ZERO_TESTS_MUST_RUN"


def need(is_there: bool, what: str) -> None:
    """Skip or fail the test if the requirement is missing. For fixtures and the top of a test."""
    if is_there:
        return
    if os.environ.get(MUST_RUN):
        pytest.fail(f"this test needs {what}, and {MUST_RUN} is set", pytrace=False)
    pytest.skip(f"needs {what}")
