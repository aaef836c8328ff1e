"""Configurations are read from a dict, a file, JSON text with comments, or base64."""

from __future__ import annotations

import base64
import json
from pathlib import Path

import pytest

from deepseek_zero.base.errors import ConfigError
from deepseek_zero.config.text import parse, read, strip_comments


def test_comments_and_trailing_commas_are_read_over() -> None:
    text = '{ // one\n "a": 1, # two\n /* three\n four */ "b": [1, 2,], }'
    assert parse(text, "text").values == {"a": 1, "b": [1, 2]}


@pytest.mark.parametrize(
    "inside", ["http://x", "a # b", "/* c */", ",]", 'say \\"//\\" now', "back\\\\"]
)
def test_signs_inside_a_string_stay(inside: str) -> None:
    text = f'{{"a": "{inside}", /* c */ "b": 1,}}'
    assert parse(text, "text").values == {"a": json.loads(f'"{inside}"'), "b": 1}


def test_stripping_keeps_every_line_and_column() -> None:
    text = '{ /* a\n b */ "x": 1, // c\n "y": 2 }'
    stripped = strip_comments(text)
    assert [len(line) for line in stripped.splitlines()] == [
        len(line) for line in text.splitlines()
    ]


def test_broken_json_names_file_line_and_text(tmp_path: Path) -> None:
    path = tmp_path / "ds.json"
    path.write_text('{\n // comment\n "a": True\n}', encoding="utf-8")
    with pytest.raises(
        ConfigError, match=r'ds\.json is not JSON: .* at line 3, column 7: "a": True'
    ):
        read(path)


@pytest.mark.parametrize("text", ["", "[1]", "{"])
def test_files_without_a_json_object_are_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "ds.json"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError, match=r"ds\.json"):
        read(path)


def test_an_unclosed_comment_is_not_swallowed() -> None:
    with pytest.raises(ConfigError, match="not JSON"):
        parse('{"a": 1 /* }', "text")


def test_urlsafe_base64_is_read_with_and_without_padding() -> None:
    encoded = base64.urlsafe_b64encode(json.dumps({"note": "~~??>>", "a": 1}).encode()).decode()
    for text in (encoded, encoded.rstrip("=")):
        document = read(text)
        assert (document.values["a"], document.source) == (1, "base64")


def test_a_long_base64_text_is_not_taken_for_a_path() -> None:
    encoded = base64.urlsafe_b64encode(json.dumps({"a": "x" * 5000}).encode()).decode()
    assert read(encoded).values == {"a": "x" * 5000}


@pytest.mark.parametrize(
    "source", ["nowhere.json", "@@@", base64.urlsafe_b64encode(b"[1, 2]").decode()]
)
def test_a_text_that_is_neither_path_nor_base64_is_refused(source: str) -> None:
    with pytest.raises(ConfigError, match="Expected a string path to an existing deepspeed config"):
        read(source)


def test_a_path_object_and_its_text_read_the_same(tmp_path: Path) -> None:
    path = tmp_path / "ds.json"
    path.write_text('\ufeff{"a": 1}', encoding="utf-8")
    assert read(path).values == read(str(path)).values == {"a": 1}
    assert read(path).source == str(path)


def test_no_configuration_is_an_empty_one() -> None:
    assert read(None).values == {}


def test_other_types_are_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="cannot be an int"):
        read(3)  # type: ignore[arg-type]


def test_duplicate_keys_are_found_at_every_depth() -> None:
    assert parse('{"a": 1, "b": {"c": 1, "c": 2}, "a": 3}', "text").duplicates == ("c", "a")
