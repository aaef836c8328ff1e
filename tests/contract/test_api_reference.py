"""The API reference has an entry for every public name and for no other."""

from __future__ import annotations

import re
from importlib import import_module
from pathlib import Path

import pytest

from tests.public_names import PUBLIC_MODULES, public_names

FOLDER = Path(__file__).resolve().parents[2] / "docs" / "reference" / "api"
MODULES = [name for names in PUBLIC_MODULES.values() for name in names]


@pytest.mark.parametrize("name", MODULES)
def test_a_page_lists_the_public_names_of_its_module_with_a_summary(name: str) -> None:
    page = (FOLDER / f"{name}.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `(\w+)` \| (.+) \|$", page, re.MULTILINE)
    assert [row[0] for row in rows] == public_names(import_module(name)), (
        "run scripts/api_reference"
    )


def test_every_module_has_a_page_and_a_line_in_the_index() -> None:
    index = (FOLDER / "README.md").read_text(encoding="utf-8")
    assert re.findall(r"^\| \[([\w.]+)\]\(\1\.md\) \|", index, re.MULTILINE) == MODULES
    assert {path.stem for path in FOLDER.glob("*.md")} == {*MODULES, "README"}


def test_the_pinned_names_are_in_the_reference() -> None:
    pinned = Path(__file__).with_name("public_names.txt").read_text(encoding="utf-8").split()
    page = (FOLDER / "deepseek_zero.md").read_text(encoding="utf-8")
    assert [name for name in pinned if f"| `{name}` |" not in page] == []
