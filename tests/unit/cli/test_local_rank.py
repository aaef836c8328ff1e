"""The launcher passes --local_rank=N only to scripts that accept it."""

from __future__ import annotations

from pathlib import Path

import pytest

from deepseek_zero.cli.local_rank import accepts_local_rank, find_module

ARGPARSE = "import argparse\nparser = argparse.ArgumentParser()\n"

TAKES = {
    "argparse": ARGPARSE + "parser.add_argument('--local_rank', type=int, default=-1)\n",
    "argparse with a hyphen": ARGPARSE + "parser.add_argument('--local-rank', dest='local_rank')\n",
    "click": "import click\n@click.command()\n@click.option('--local_rank')\n"
    "def main(local_rank): ...\n",
    "a parser that lets unknown options through": ARGPARSE
    + "args, rest = parser.parse_known_args()\n",
}

TAKES_NOT = {
    "no parser": "print('hello')\n",
    "a parser without it": ARGPARSE + "parser.add_argument('--epochs')\nparser.parse_args()\n",
    "only DeepSpeed's arguments": ARGPARSE
    + "parser = deepspeed.add_config_arguments(parser)\nparser.parse_args()\n",
    "only a variable of that name": "import os\nlocal_rank = int(os.environ['LOCAL_RANK'])\n",
    "only a comment": "# --local_rank\n",
    "not Python": "def x(:\n",
}


@pytest.mark.parametrize("source", TAKES.values(), ids=TAKES)
def test_a_script_with_the_option_gets_it(tmp_path: Path, source: str) -> None:
    script = tmp_path / "train.py"
    script.write_text(source)
    assert accepts_local_rank(script)


@pytest.mark.parametrize("source", TAKES_NOT.values(), ids=TAKES_NOT)
def test_a_script_without_the_option_does_not_get_it(tmp_path: Path, source: str) -> None:
    script = tmp_path / "train.py"
    script.write_text(source)
    assert not accepts_local_rank(script)


@pytest.mark.parametrize("place", ["arguments.py", "lib/arguments.py", "lib/__init__.py"])
def test_a_parser_in_a_module_next_to_the_script_is_found(tmp_path: Path, place: str) -> None:
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib" / "__init__.py").touch()
    (tmp_path / place).write_text(TAKES["argparse"])
    script = tmp_path / "train.py"
    script.write_text("import os\nimport arguments\nfrom lib import arguments\n")
    assert accepts_local_rank(script)


def test_modules_that_import_each_other_end_the_search(tmp_path: Path) -> None:
    (tmp_path / "one.py").write_text("import two\n")
    (tmp_path / "two.py").write_text("import one\n")
    assert not accepts_local_rank(tmp_path / "one.py")


@pytest.mark.parametrize("given", [["--local_rank=3"], ["--local-rank", "3"]])
def test_an_option_the_user_gave_is_not_given_twice(tmp_path: Path, given: list[str]) -> None:
    script = tmp_path / "train.py"
    script.write_text(TAKES["argparse"])
    assert not accepts_local_rank(script, given)


def test_a_module_is_found_without_importing_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    package = tmp_path / "package"
    package.mkdir()
    (package / "__init__.py").write_text("raise RuntimeError('imported')\n")
    (package / "__main__.py").touch()
    (package / "train.py").touch()
    assert find_module("package.train") == package / "train.py"
    assert find_module("package") == package / "__main__.py"
    assert find_module("package.absent") is None
