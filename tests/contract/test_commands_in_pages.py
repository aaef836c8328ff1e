"""The commands that pages and error messages show to readers are valid.

Their targets, extras, packages, modules, paths, subcommands and options exist. The test installs
and starts nothing.
"""

from __future__ import annotations

import ast
import re
import shlex
import tomllib
from collections.abc import Iterator
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import typer
from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import canonicalize_name

from deepseek_zero.cli import app

ROOT = Path(__file__).resolve().parents[2]
PAGES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "benchmarks/README.md")),
    *sorted((ROOT / "docs").rglob("*.md")),
]
FENCE = re.compile(r"^ *```(?P<lang>[^\n]*)\n(?P<body>.*?)^ *```", re.MULTILINE | re.DOTALL)
PROGRAMS = {"pip", "make", "git", "deepseek-zero", "python", "python3"}
FOLDERS = {"benchmarks", "docs", "examples", "scripts", "src", "tests"}
CLIENTS = {"wandb", "comet-ml"}  # their services need an account, so no extra installs them


@cache
def project() -> dict[str, Any]:
    return dict(tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"])


@cache
def known_packages() -> set[str]:
    extras = project()["optional-dependencies"].values()
    stated = [*project()["dependencies"], *(each for extra in extras for each in extra)]
    return CLIENTS | {canonicalize_name(Requirement(each).name) for each in stated}


def commands_of(page: str) -> Iterator[str]:
    """Yield each command in the shell blocks and in the backtick spans of a page."""
    blocks = [block["body"] for block in FENCE.finditer(page) if block["lang"].startswith("bash")]
    lines = [line for block in blocks for line in block.splitlines()]
    spans = re.findall(r"`([^`]+)`", FENCE.sub("", page))
    for text in [*lines, *(" ".join(span.split()) for span in spans)]:
        yield from re.split(r"&&|\|\||[;|]", text)


def problems(command: str) -> list[str]:
    """Return the problems of one command; empty for programs that this test does not know."""
    try:
        words = shlex.split(command, comments=True)
    except ValueError:  # code with an unpaired quotation mark
        return []
    names = [Path(word).name for word in words]
    begin = next((place for place, name in enumerate(names) if name in PROGRAMS), None)
    if begin is None:
        return []
    name = names[begin]
    rest = words[begin + 1 :]
    found = [f"no file {word}" for word in words if _is_missing_file(word)]
    if name.startswith("python") and rest[:1] == ["-m"] and len(rest) > 1:
        name = rest[1]
        rest = rest[2:]
        # A search for pip makes setuptools replace distutils and warn.
        if name != "pip" and find_spec(name) is None:
            return [*found, f"no module {name}"]
    if name == "pip" and rest[:1] == ["install"]:
        found += _problems_of_install(rest[1:])
    elif name == "make":
        found += _problems_of_make(rest)
    elif name == "git" and rest[:1] == ["clone"] and rest[1:2]:
        if rest[1] not in project().get("urls", {}).values():
            found.append(f"{rest[1]} is no address of the project")
    elif name == "deepseek-zero":
        found += _problems_of_cli(typer.main.get_command(app), rest)
    return found


def _is_missing_file(word: str) -> bool:
    is_here = "/" in word and word.split("/")[0] in FOLDERS
    return is_here and not list(ROOT.glob(word.split("::")[0]))


def _problems_of_install(words: list[str]) -> list[str]:
    found = []
    words = [word for word in words if not word.endswith(".whl")]
    while words:
        word = words.pop(0)
        if word in ("-c", "-r", "--constraint", "--requirement"):
            path = words.pop(0)
            found += [] if (ROOT / path).is_file() else [f"no file {path}"]
        elif not word.startswith("-"):
            found += _problems_of_requirement(word)
    return found


def _problems_of_requirement(word: str) -> list[str]:
    if here := re.fullmatch(r"\.(?:\[(?P<extras>[\w,-]+)\])?", word):
        extras = set((here["extras"] or "").split(",")) - {""}
        missing = extras - set(project()["optional-dependencies"])
        return [f"no extra {extra}" for extra in sorted(missing)]
    try:
        name = canonicalize_name(Requirement(word).name)
    except InvalidRequirement:
        return [f"{word} is no requirement"]
    if name == canonicalize_name(project()["name"]):
        return [f"{word} is on no package index"]
    return [] if name in known_packages() else [f"no dependency {word}"]


def _problems_of_make(words: list[str]) -> list[str]:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    targets = set(re.findall(r"^([\w-]+):", makefile, re.MULTILINE))
    found = []
    for word in words:
        variable, equals, _ = word.partition("=")
        if equals:
            found += [] if f"$({variable})" in makefile else [f"no variable {variable}"]
        elif word not in targets:
            found.append(f"no target {word}")
    return found


def _problems_of_cli(command: Any, words: list[str]) -> list[str]:
    """Return the unknown subcommand or option of a command line of `deepseek-zero`."""
    inner = getattr(command, "commands", {})
    if inner and words and not words[0].startswith("-"):
        if words[0] not in inner:
            return [f"no subcommand {words[0]}"]
        return _problems_of_cli(inner[words[0]], words[1:])
    helps = command.get_help_option_names(command.context_class(command))
    takes_value = dict.fromkeys(helps, False)
    for one in command.params:
        takes_value |= {_plain(name): not getattr(one, "is_flag", True) for name in _names(one)}
    starts_program = command.context_settings.get("allow_interspersed_args") is False
    found = []
    rest = list(words)
    while rest:
        word, equals, _ = rest.pop(0).partition("=")
        if word == "--" or (starts_program and not word.startswith("-")):
            return found  # the other arguments belong to the program
        if word.startswith("--") and _plain(word) not in takes_value:
            found.append(f"no option {word}")
        elif rest and not equals and takes_value.get(_plain(word), False):
            rest.pop(0)
    return found


def _names(parameter: Any) -> list[str]:
    return [*parameter.opts, *parameter.secondary_opts]


def _plain(option: str) -> str:
    return option.replace("_", "-")


@pytest.mark.parametrize("page", [str(path.relative_to(ROOT)) for path in PAGES])
def test_every_command_of_a_page_can_work(page: str) -> None:
    commands = commands_of((ROOT / page).read_text(encoding="utf-8"))
    assert {each: found for each in commands if (found := problems(each))} == {}


def test_every_install_command_of_a_message_can_work() -> None:
    install = re.compile(r"""pip install (?:"[^"]+"|'[^']+'|-e '[^']+'|[\w.-]*\w)""")
    commands = set[str]()
    for path in (ROOT / "src").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                commands |= set(install.findall(node.value))
    assert len(commands) > 3
    assert {each: found for each in commands if (found := problems(each))} == {}


def test_the_pages_have_commands() -> None:
    found = [each for page in PAGES for each in commands_of(page.read_text(encoding="utf-8"))]
    for program, fewest in {"pip install": 8, "make ": 15, "deepseek-zero ": 40}.items():
        assert sum(program in each for each in found) >= fewest, program


@pytest.mark.parametrize(
    ("command", "problem"),
    [
        ("python3 -m pip install deepseek-zero", "deepseek-zero is on no package index"),
        ("pip install 'deepseek_zero[fast]'", "deepseek_zero[fast] is on no package index"),
        ("pip install '.[fast,fats]'", "no extra fats"),
        ("pip install -c constraint.txt torch", "no file constraint.txt"),
        ("pip install '.[fast]' torchh", "no dependency torchh"),
        ("make tests", "no target tests"),
        ("make train PYTHN=python3.12", "no variable PYTHN"),
        ("git clone https://example.org/deepseek_zero", "is no address of the project"),
        ("srun -n 2 deepseek-zero start train.py", "no subcommand start"),
        ("deepseek-zero checkpoint check DIR", "no subcommand check"),
        ("deepseek-zero run --nprocs 2 train.py --epochs 3", "no option --nprocs"),
        ("deepseek-zero checkpoint prune DIR --keep 2", "no option --keep"),
        (".venv/bin/python -m benchmarks.bnech", "no module benchmarks.bnech"),
        ("deepseek-zero run --nproc 2 examples/train.py", "no file examples/train.py"),
    ],
)
def test_an_invalid_command_is_detected(command: str, problem: str) -> None:
    (found,) = problems(command)
    assert problem in found
