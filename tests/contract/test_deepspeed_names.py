"""docs/reference/deepspeed-names.md matches the drop-in.

The drop-in raises from the same table.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import ModuleType

import deepseek_zero
from deepseek_zero.base.errors import UnknownNameError
from deepseek_zero.compat.deepspeed import missing
from deepseek_zero.compat.deepspeed.module_stub import homes, look_up, public_names

ROOT = Path(__file__).resolve().parents[2]


def test_the_page_is_what_the_generator_writes() -> None:
    command = [sys.executable, str(ROOT / "scripts" / "deepspeed_names"), "--check"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert not done.returncode, done.stderr


def test_no_name_is_both_provided_and_missing() -> None:
    for module in missing.MISSING.keys() - {missing.ENGINE}:
        both = homes(module).keys() & missing.missing_names(module).keys()
        assert not both, f"{module}: {sorted(both)}"


def test_each_documented_name_can_be_imported_or_raises_an_error_with_the_reason(
    as_deepspeed: None,
) -> None:
    seen = 0
    for module in missing.MISSING.keys() - {missing.ENGINE}:
        for name, reason in missing.missing_names(module).items():
            try:
                found = look_up(module, name)
            except UnknownNameError as error:  # the inventory does not have this older name
                assert reason[1:] in str(error) and f"{module}.{name}" in str(error)
            else:
                assert isinstance(found, ModuleType) or callable(found), f"{module}.{name}"
            assert not reason.endswith(".")
            seen += 1
    assert seen > 100


def test_names_of_the_drop_in_only_raise_an_error_in_the_package(as_deepspeed: None) -> None:
    assert set(public_names("deepspeed")) >= missing.IN_THE_DROPIN
    assert not [name for name in missing.IN_THE_DROPIN if hasattr(deepseek_zero, name)]
