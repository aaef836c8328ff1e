"""A test with a missing requirement is skipped locally and fails in CI."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.needs import MUST_RUN, need

CI = Path(__file__).parents[3] / ".ci" / "run"


def test_a_missing_requirement_skips_a_test_and_fails_it_in_ci(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    need(True, "nothing")
    monkeypatch.delenv(MUST_RUN, raising=False)
    with pytest.raises(pytest.skip.Exception, match="needs root"):
        need(False, "root")
    monkeypatch.setenv(MUST_RUN, "1")
    with pytest.raises(pytest.fail.Exception, match="needs root"):
        need(False, "root")


def test_ci_leaves_nothing_out() -> None:
    assert f"export {MUST_RUN}=1" in CI.read_text(encoding="utf-8")
