"""Every file below tests/unit is named after the source file or the package that it tests."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
UNIT = ROOT / "tests" / "unit"
# Folders that tests/unit mirrors: `a/test_b.py` tests `a/b.py`, the script `a/b` or the package
# `a/b` of one of them.
SOURCES = (ROOT / "src" / "deepseek_zero", ROOT / "src", ROOT)
HELPERS = {  # modules that tests import
    "attention/dense.py": "dense attention as a reference",
    "parallel/tiny.py": "small models of transformers",
    "pipeline/held.py": "checks the memory that a stage holds",
}


def without_source(paths: Iterable[Path]) -> Iterator[str]:
    """Yield each path below tests/unit that names neither a source nor a helper module."""
    for path in paths:
        if path.as_posix() in HELPERS:
            continue
        source = path.parent / path.stem.removeprefix("test_")
        candidates = [
            folder / name for folder in SOURCES for name in (source, source.with_suffix(".py"))
        ]
        is_test = path.name.startswith("test_")
        if not is_test or not any(candidate.exists() for candidate in candidates):
            yield path.as_posix()


def test_every_unit_test_file_names_its_source() -> None:
    paths = [path.relative_to(UNIT) for path in sorted(UNIT.rglob("*.py"))]
    assert len(paths) > 100
    assert list(without_source(paths)) == []


@pytest.mark.parametrize("name", HELPERS)
def test_every_listed_helper_exists(name: str) -> None:
    assert (UNIT / name).is_file()


@pytest.mark.parametrize(
    ("path", "is_found"),
    [
        ("sharding/test_buffer.py", True),
        ("test_config.py", True),
        ("benchmarks/gpu/test_run.py", True),
        ("scripts/test_test.py", True),
        ("sharding/test_everything.py", False),
        ("planner/test_buffer.py", False),
        ("sharding/buffer.py", False),
    ],
)
def test_a_file_without_a_source_is_reported(path: str, is_found: bool) -> None:
    assert list(without_source([Path(path)])) == ([] if is_found else [path])
