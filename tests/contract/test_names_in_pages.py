"""Every name in backticks in the pages exists: classes, fields, files, keys, commands, torch names.

A removed name is written without backticks, which shows readers that it cannot be looked up.
"""

from __future__ import annotations

import ast
import builtins
import fnmatch
import importlib
import importlib.util
import re
import sys
from collections import defaultdict
from contextlib import suppress
from dataclasses import dataclass, field, fields
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn

from deepseek_zero.cli.run import RunOptions

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "src" / "deepseek_zero"
PAGES = [
    ROOT / "ARCHITECTURE.md",
    *(
        path
        for folder in (".", "design", "concepts", "how-to")
        for path in sorted((ROOT / "docs" / folder).glob("*.md"))
    ),
]
ABBREVIATIONS = {
    "nn": "torch.nn",
    "dist": "torch.distributed",
    "mp": "torch.multiprocessing",
    "autograd": "torch.autograd",
    "cudnn": "torch.backends.cudnn",
    "optim": "torch.optim",
}
# Commands of the system and of schedulers, which no installed package provides.
COMMANDS = {
    "python",
    "python3",
    "pip",
    "srun",
    "mpirun",
    "torchrun",
    "kill",
    "ls",
    "df",
    "mount",
    "export",
    "make",
}
SUBCOMMANDS = {"run", "checkpoint", "convert", "doctor", "exec"}
# Names of the C library, of the loader and of other packages, which cannot be checked here.
ELSEWHERE = {
    "malloc": "the C library's",
    "mincore": "the kernel's",
    "mmap": "the kernel's",
    "RWF_NOWAIT": "the kernel's",
    "MALLOC_MMAP_THRESHOLD_": "glibc's environment",
    "MALLOC_TRIM_THRESHOLD_": "glibc's environment",
    "GLIBC_TUNABLES": "glibc's environment",
    "ncclRemoteError": "NCCL's",
    "ncclSystemError": "NCCL's",
    "sgd": "torch.optim's SGD, as `optimizer_type` spells it",
    "gradient_checkpointing_enable": "transformers'",
    "generation_config.json": "transformers'",
    "load_from_checkpoint": "Lightning's",
    "train.py": "the user's program",
}


@dataclass
class House:
    """Every name in the repository, read from the sources without importing them."""

    # by class or module
    members: dict[str, set[str]] = field(default_factory=lambda: defaultdict(set))
    bases: dict[str, list[str]] = field(default_factory=lambda: defaultdict(list))
    # everything defined, including fields, parameters and constants
    names: set[str] = field(default_factory=set)
    # attributes, keywords and imports, including names of other packages
    used: set[str] = field(default_factory=set)
    # String constants of src/ except docstrings: keys, options, values.
    words: set[str] = field(default_factory=set)

    def read(self, path: Path, *, is_source: bool) -> None:
        """Add the names of one file; for `src/` also the attributes and strings that it uses."""
        tree = ast.parse(path.read_text(encoding="utf-8"))
        self.names |= {path.stem, *path.relative_to(ROOT).parts[:-1]}
        module = path.parent.name if path.stem == "__init__" else path.stem
        self._define(tree, module)
        docstrings = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
        for node in ast.walk(tree):
            if isinstance(node, ast.arg):
                self.names.add(node.arg)
            if isinstance(node, ast.Attribute):
                self.used.add(node.attr)
            if isinstance(node, ast.keyword) and node.arg:
                self.used.add(node.arg)
            if isinstance(node, ast.ImportFrom) and node.module:
                self.used |= set(node.module.split("."))
            if isinstance(node, ast.alias):
                self.used |= {*node.name.split("."), node.asname or node.name}
            is_string = (
                isinstance(node, ast.Constant)
                and isinstance(node.value, str)
                and id(node) not in docstrings
            )
            if is_source and is_string:
                self.words |= {node.value, *re.split(r"[^\w-]+", node.value)}

    def _define(self, body: ast.Module | ast.ClassDef | ast.FunctionDef, owner: str) -> None:
        """Add the names that `body` defines to the members of `owner`, and visit nested
        definitions.
        """
        for node in ast.walk(body) if isinstance(body, ast.FunctionDef) else _statements(body):
            for name in _bound(node, in_method=isinstance(body, ast.FunctionDef)):
                self.members[owner].add(name)
                self.names.add(name)
            if node is body:
                continue
            if isinstance(node, ast.ClassDef):
                self.bases[node.name] += [
                    ast.unparse(base).partition("[")[0] for base in node.bases
                ]
                self._define(node, node.name)
            elif isinstance(node, ast.FunctionDef) and not isinstance(body, ast.FunctionDef):
                self._define(node, owner)

    def has(self, owner: str, name: str) -> bool:
        """Return whether `name` is a member of a class or module, or of a base of the class."""
        bases = [base for base in self.bases.get(owner, ()) if base.rpartition(".")[2] != owner]
        return name in self.members.get(owner, ()) or any(
            self.has(base.rpartition(".")[2], name) or _torch_has(base, name) for base in bases
        )


def _statements(body: ast.Module | ast.ClassDef) -> list[ast.stmt]:
    """Return the statements of a module or class, including those in `if` and `try` blocks."""
    found, left = [], list(body.body)
    while left:
        node = left.pop()
        found.append(node)
        if isinstance(node, (ast.If, ast.Try)):
            left += [*node.body, *node.orelse]
    return found


def _bound(node: ast.AST, *, in_method: bool) -> list[str]:
    """Return the names that a statement binds; within a method only the attributes of `self`."""
    if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
        return [node.name]
    if isinstance(node, ast.ImportFrom):
        return [alias.asname or alias.name for alias in node.names]
    targets = (
        node.targets
        if isinstance(node, ast.Assign)
        else [node.target]
        if isinstance(node, ast.AnnAssign)
        else []
    )
    flat = [each for one in targets for each in (one.elts if isinstance(one, ast.Tuple) else [one])]
    if in_method:
        return [
            each.attr
            for each in flat
            if isinstance(each, ast.Attribute) and ast.unparse(each.value) == "self"
        ]
    return [each.id for each in flat if isinstance(each, ast.Name)]


@cache
def house() -> House:
    """Read the repository once."""
    found = House()
    for folder in ("src", "tests", "benchmarks", "examples"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            if path != Path(__file__):
                found.read(path, is_source=folder == "src")
    return found


@cache
def public_names() -> set[str]:
    """Return the exported names of the package, most of which it imports lazily."""
    return set(
        (ROOT / "tests" / "contract" / "public_names.txt").read_text(encoding="utf-8").split()
    )


@cache
def files() -> set[str]:
    """Return every file and folder of the repository as a path from its root with a leading
    slash.
    """
    folders = ("src", "tests", "benchmarks", "examples", "docs", "scripts")
    paths = [path for folder in folders for path in (ROOT / folder).rglob("*")] + list(
        ROOT.iterdir()
    )
    return {f"/{path.relative_to(ROOT)}" for path in paths if "__pycache__" not in path.parts}


def _torch_has(path: str, name: str = "") -> bool:
    """Return whether `path.name` exists in torch or in the standard library."""
    root, *rest = [*path.split("."), *([name] if name else [])]
    if root[0].isupper():
        found: Any = (
            getattr(nn, root, None)
            or getattr(torch.optim, root, None)
            or getattr(torch, root, None)
        )
    else:
        root, *more = ABBREVIATIONS.get(root, root).split(".")
        if root != "torch" and root not in sys.stdlib_module_names:
            return False
        found, rest = importlib.import_module(root), [*more, *rest]
    for part in rest:
        if isinstance(found, ModuleType) and not hasattr(found, part):
            with suppress(ImportError):
                importlib.import_module(f"{found.__name__}.{part}")
        if not hasattr(found, part):
            return False
        found = getattr(found, part)
    return found is not None


def missing_in(span: str) -> list[str]:
    """Return the names in one backtick span that do not exist."""
    span = " ".join(span.split())
    if is_known(span):
        return []
    if span.startswith("-") or "deepseek-zero" in span or span.split()[0] in COMMANDS | SUBCOMMANDS:
        run = {f"--{each.name.replace('_', '-')}" for each in fields(RunOptions)}
        words = house().words | run | {"--help", "--install-completion"}  # typer adds these two
        return [
            option
            for option in re.findall(r"--[\w-]+", span)
            if not {option, option.replace("_", "-")} & words
        ]
    if re.fullmatch(r"[\w./*-]+", span):
        return [span]
    return [name for name in _names_of_code(span) if not is_known(name)]


def _names_of_code(code: str) -> list[str]:
    """Return the dotted names in code without strings, numbers and names that the code binds."""
    bare = re.sub(r"\"[^\"]*\"|'[^']*'", "", code)
    bound = set(re.findall(r"\bfor (\w+) in", bare)) | {"self"}
    names = re.findall(r"(?<![\w.])[A-Za-z_]\w*(?:\.\w+)*", bare)
    return [name for name in names if name.partition(".")[0] not in bound or "." in name]


def is_known(name: str) -> bool:
    """Return whether a text is a single name that exists."""
    found = house()
    name = name.removesuffix("()").removesuffix("/")
    last = re.sub(r"\d+$", "", name.rpartition("/")[2])
    if (
        name in ELSEWHERE
        or name in COMMANDS
        or {name, last} & found.words
        or not re.search(r"[A-Za-z]{2}", name)
    ):
        return True
    if name.startswith("/"):
        return Path(name).exists()
    if "*" in name:
        return bool(
            fnmatch.filter([*found.names, *found.words, *dir(torch)], name.rpartition(".")[2])
        )
    if "/" in name or re.search(r"\.(py|md|sh|json|toml)$", name):
        file, _, member = name.rpartition(".")  # for example base/memory.keep_freed_memory
        return _is_file(name) or (_is_file(f"{file}.py") and found.has(Path(file).name, member))
    first, *rest = name.lstrip(".").split(".")
    return _is_dotted_name(first, rest) if rest else _is_one_name(first)


def _is_one_name(name: str) -> bool:
    """Return whether an undotted name exists here, in Python or torch, or as an installed
    package.
    """
    owners = (builtins, torch, nn, torch.Tensor, nn.Module, torch.optim, torch.optim.Optimizer)
    return (
        name in house().names | house().used
        or name in sys.stdlib_module_names
        or any(hasattr(owner, name) for owner in owners)
        or importlib.util.find_spec(name) is not None
    )


def _is_dotted_name(first: str, rest: list[str]) -> bool:
    """Return whether `first.rest` exists in a class or module of the package, in torch or in an
    object.
    """
    found = house()
    if first == "deepseek_zero":
        path = "/".join([first, *rest])
        is_public = rest[0] in public_names() and len(rest) == 1
        return (
            is_public
            or _is_file(path)
            or _is_file(f"{path}.py")
            or found.has([first, *rest][-2], rest[-1])
        )
    if first[0].isupper():
        return found.has(first, rest[0]) or _torch_has(first, rest[0])
    if first in {"torch", "nn"}:
        return _torch_has(".".join([first, *rest]))
    if found.has(first, rest[0]) or _torch_has(".".join([first, *rest])):
        return True
    objects = (torch.Tensor, nn.Module, torch.optim.Optimizer)
    known = found.names | found.used | found.words
    return all(
        part in known or part.isupper() or any(hasattr(owner, part) for owner in objects)
        for part in rest
    )


def _is_file(name: str) -> bool:
    """Return whether the path of a file or folder of the repository ends with this name."""
    return any(path.endswith(f"/{name}") for path in files())


def spans_of(text: str) -> list[str]:
    """Return every text in single backticks outside fenced blocks."""
    return re.findall(r"`([^`]+)`", re.sub(r"^\s*```.*?^\s*```", "", text, flags=re.S | re.M))


@pytest.mark.parametrize("page", [str(path.relative_to(ROOT)) for path in PAGES])
def test_every_name_between_backticks_exists(page: str) -> None:
    spans = spans_of((ROOT / page).read_text(encoding="utf-8"))
    assert {span: missing for span in spans if (missing := missing_in(span))} == {}


def test_no_source_names_a_file_that_is_not_there() -> None:
    programs = {"script.py", "train.py"}  # programs of the user in example commands
    named = {
        (str(path.relative_to(ROOT)), name)
        for path in PACKAGE.rglob("*.py")
        for name in re.findall(r"(?<![\w./-])[\w/]+\.py\b", path.read_text(encoding="utf-8"))
    }
    assert len(named) > 100
    assert {
        (path, name) for path, name in named if name not in programs and not _is_file(name)
    } == set()


@pytest.mark.parametrize(
    "name",
    [
        "FlatGroup",
        "Extent.due",
        "ParamGroup.relay",
        "sharding/no_such_file.py",
        "sharding/buffer.shift",
        "deepseek_zero.plan.spec",
        "torch.nn.Param",
        "engine.go_back(loss)",
        "run --as-deepsped",
        "bf16.mastre",
    ],
)
def test_a_name_that_does_not_exist_is_found(name: str) -> None:
    assert missing_in(name)


@pytest.mark.parametrize(
    "name",
    [
        "ParamGroup",
        "StateGuard.pending",
        "ShardedParameter.data",
        "sharding/param_group.py",
        "sharding/move.move",
        "torch.nn.Parameter",
        "engine.backward(loss)",
        "bf16.master",
        "kill -9",
    ],
)
def test_a_name_that_exists_is_resolved(name: str) -> None:
    assert not missing_in(name)
