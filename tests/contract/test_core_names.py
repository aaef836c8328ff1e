"""The core has no names of features; features are files of extensions/, which it does not import.

The core is every file of sharding/ and optim/, and planner/spec.py.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parents[2] / "src" / "deepseek_zero"
CORE = [
    *sorted((PACKAGE / "sharding").rglob("*.py")),
    *sorted((PACKAGE / "optim").rglob("*.py")),
    PACKAGE / "planner" / "spec.py",
]
WORDS = (
    "delayed",
    "speculative",
    "deferred",
    "feedback",
    "replica",
    "secondary",
    "one_bit",
    "differences",
    "symmetric",
    "extent",
    "adaptive",
)


@pytest.mark.parametrize("path", CORE, ids=lambda path: path.relative_to(PACKAGE).as_posix())
def test_a_core_file_names_no_feature(path: Path) -> None:
    found = named_features(ast.parse(path.read_text(encoding="utf-8")))
    assert not found, f"{path.name} names features: move them to extensions/ ({found})"


@pytest.mark.parametrize(
    "code",
    [
        "delayed = 1",
        "group.delayed_grad",
        "def apply(*, is_delayed): ...",
        "apply(delayed=True)",
        "def _delay_ed(): ...",
        "class DelayedUpdate: ...",
        "from .delayed_update import Update",
        "import extensions.delayed_update",
        "from x import DelayedUpdate",
        "from x import Update as Delayed",
        "lambda delayed: None",
        "try: ...\nexcept OSError as delayed: ...",
        "match x:\n    case {**delayed}: ...",
        "match x:\n    case [*delayed]: ...",
        "match x:\n    case Update(delayed=1): ...",
        "match x:\n    case delayed: ...",
        "def apply():\n    global delayed",
        "value: Delayed | None",
    ],
)
def test_every_kind_of_identifier_is_found(code: str) -> None:
    assert list(named_features(ast.parse(code))) == ["delayed"]


@pytest.mark.parametrize(
    "code", ['"delayed"', "# delayed", "delay = late", 'x["one_bit"]', "Placement.REPLICATE"]
)
def test_texts_and_other_names_are_no_identifiers(code: str) -> None:
    assert not named_features(ast.parse(code))


def named_features(tree: ast.AST) -> dict[str, list[str]]:
    """Return the identifiers that contain a feature's keyword, by keyword.

    Underscores and case are ignored.
    """
    found: dict[str, list[str]] = {}
    for name in sorted(set(_identifiers(tree))):
        # REPLICATE is a placement as in PyTorch's DTensor, not a feature.
        plain = name.replace("_", "").lower().replace("replicate", "")
        for word in WORDS:
            if word.replace("_", "") in plain:
                found.setdefault(word, []).append(name)
    return found


def _identifiers(tree: ast.AST) -> Iterator[str]:
    """Yield every identifier of a file, including keywords, imports and patterns."""
    for node in ast.walk(tree):
        for field, value in ast.iter_fields(node):
            is_text = isinstance(node, ast.Constant) or field == "type_comment"
            values = value if isinstance(value, list) else [value]
            if not is_text:
                yield from (each for each in values if isinstance(each, str))
