"""What a test needs of the machine: without it the test is skipped, and under MUST_RUN, which CI
sets, it fails.
"""

from __future__ import annotations

import os

import pytest

MUST_RUN = "DEEPSEEK_ZERO_TESTS_MUST_RUN"


def need(is_there: bool, what: str) -> None:
    """Go on if it is there.  Called by a fixture or at the top of a test."""
    if is_there:
        return
    if os.environ.get(MUST_RUN):
        pytest.fail(f"this test needs {what}, and {MUST_RUN} is set", pytrace=False)
    pytest.skip(f"needs {what}")
