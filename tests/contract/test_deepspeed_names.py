"""docs/reference/deepspeed-names.md says what the drop-in says, and the drop-in raises from the same table."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest

import deepseek_zero
from deepseek_zero.base.errors import UnknownNameError
from deepseek_zero.compat.deepspeed import missing
from deepseek_zero.compat.deepspeed.names_page import render

ROOT = Path(__file__).resolve().parents[2]


def test_the_page_is_what_the_generator_writes(as_deepspeed: None) -> None:
    page = (ROOT / "docs" / "reference" / "deepspeed-names.md").read_text(encoding="utf-8")
    assert page == render(), "run scripts/deepspeed_names"


def test_each_absent_name_raises_what_the_table_says(as_deepspeed: None) -> None:
    seen = 0
    for module in missing.MISSING.keys() - {missing.ENGINE}:
        stand_in = importlib.import_module(module)
        for name, row in missing.missing_names(module).items():
            assert not hasattr(stand_in, name), f"{module}.{name}"
            with pytest.raises(UnknownNameError) as caught:
                getattr(stand_in, name)
            assert row.reason[1:] in str(caught.value) and f"{module}.{name}" in str(caught.value)
            assert not row.reason.endswith(".")
            seen += 1
    assert seen > 100


def test_what_only_the_drop_in_has_is_told_to_those_who_ask_the_package(as_deepspeed: None) -> None:
    top = set(importlib.import_module("deepspeed").__dir__()) - {"checkpoint"}  # a room of ours has that name, too
    assert {name for name in top if not hasattr(deepseek_zero, name)} == missing.IN_THE_DROPIN
