"""docs/reference/config.md matches the schema, and the schema's statements about every key hold."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

from deepseek_zero.base.errors import NotBuiltError
from deepseek_zero.config import Facts, FieldRow, Status, resolve
from deepseek_zero.config import load as checks_room
from deepseek_zero.config.load import load
from deepseek_zero.config.not_built import NOT_BUILT, NotBuilt
from deepseek_zero.config.problems import lookup
from tests.config_keys import CHECKS, NOT_BUILT_KEYS, ROWS, KeyNotBuilt, off_default_config

ROOT = Path(__file__).resolve().parents[2]
BY_STATUS = {status: [row for row in ROWS if row.status is status] for status in Status}


def named(row: FieldRow | NotBuilt | KeyNotBuilt) -> str:
    return row.path


def test_the_reference_page_is_what_the_generator_writes() -> None:
    page = (ROOT / "docs" / "reference" / "config.md").read_text(encoding="utf-8")
    render = runpy.run_path(str(ROOT / "scripts" / "config_reference"))["render"]
    assert page == render(), "run scripts/config_reference"


def test_no_key_is_listed_twice() -> None:
    paths = [key.path for key in (*ROWS, *NOT_BUILT_KEYS)]
    assert len(set(paths)) == len(paths)


@pytest.mark.parametrize("row", ROWS, ids=named)
def test_each_key_has_one_sentence_and_a_status(row: FieldRow) -> None:
    assert row.sentence[0].isupper() or row.sentence.startswith(
        ("fp16", "bf16", "throughput", "fixed_linear")
    )
    assert row.sentence.endswith(".")
    assert row.kind is not None
    if row.status is not Status.EFFECTIVE:
        assert row.reason, "a key without effect says why"
        assert not row.reason.endswith(".")


@pytest.mark.parametrize("row", NOT_BUILT.values(), ids=named)
def test_each_key_that_is_not_built_has_one_sentence_and_a_reason(row: NotBuilt) -> None:
    assert row.what[0].isupper() and row.what.endswith(".")
    assert row.reason and not row.reason.endswith(".")


@pytest.mark.parametrize("row", BY_STATUS[Status.EFFECTIVE], ids=named)
def test_each_effective_key_has_an_example_off_its_default_that_loads(
    row: FieldRow, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Pretend that the packages of the monitors are installed.
    monkeypatch.setattr(checks_room, "find_spec", lambda name: object())
    config = resolve(
        load(off_default_config(row.path)),
        Facts(world_size=row.example if row.path in CHECKS else 1),
    )
    found = lookup(config.model_dump(), row.path)
    expected = tuple(row.example) if isinstance(row.example, list) else row.example
    if isinstance(expected, dict):  # The value also contains defaults of the section's other keys.
        assert found is not None and found.items() >= expected.items()
    else:
        assert found == expected
    assert found != row.default


@pytest.mark.parametrize("row", NOT_BUILT_KEYS, ids=named)
def test_each_key_that_is_not_built_off_its_default_is_an_error_that_names_it(
    row: KeyNotBuilt,
) -> None:
    with pytest.raises(NotBuiltError) as error:
        load(off_default_config(row.path))
    assert row.path.rpartition(".")[2] in str(error.value)


@pytest.mark.parametrize("row", BY_STATUS[Status.ACCEPTED], ids=named)
def test_each_accepted_key_loads_at_its_default(row: FieldRow) -> None:
    given: dict[str, object] = {}
    holder = given
    *path, last = row.path.split(".")
    for name in path:
        inner: dict[str, object] = {}
        holder[name] = inner
        holder = inner
    holder[last] = row.default
    assert lookup(resolve(load(given), Facts()).model_dump(), row.path) == row.default
