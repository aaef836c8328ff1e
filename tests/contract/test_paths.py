"""No file contains a machine-specific path, and src/ imports neither FSDP nor private torch names.

One guarded file may use private names of torch.
"""

from __future__ import annotations

import ast
import re
import subprocess
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
import torch
import torch.utils.data
from torch import nn

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "src" / "deepseek_zero"
# test_device.py tests that these names exist
MAY_TOUCH_PRIVATE_TORCH = {"base/device.py"}
# paths that exist on every machine
EVERYWHERE = {Path("/"), Path("/tmp"), Path("/home"), Path("/srv"), Path("/opt")}


def test_no_file_names_a_path_of_this_machine() -> None:
    places = {str(path) for path in (ROOT, ROOT.parent, Path.home()) if path not in EVERYWHERE}
    machine = re.compile(
        r"(?<![\w.\-])(" + "|".join(map(re.escape, sorted(places))) + r"|/(home|Users)/\w+)/"
    )
    found = [
        f"{path.relative_to(ROOT)}: {hit.group()}"
        for path in _files()
        for hit in machine.finditer(_text(path))
    ]
    assert not found


def test_src_never_touches_fsdp() -> None:
    found = [f"{path}: {name}" for path, name in _torch_names_of_src() if "fsdp" in name.lower()]
    assert not found


def test_private_torch_names_are_used_only_in_the_file_with_tests_for_them() -> None:
    found = [
        f"{path}: {name}"
        for path in sorted(PACKAGE.rglob("*.py"))
        if path.relative_to(PACKAGE).as_posix() not in MAY_TOUCH_PRIVATE_TORCH
        for name in _private_torch_names(ast.parse(_text(path)))
    ]
    assert not found


@pytest.mark.parametrize(
    "source",
    [
        "import torch\ntorch._C._set()",
        "def hold(module): return list(module._parameters)",
        "def version(tensor): return tensor._version",
        "def hooks(model): return getattr(model, '_forward_pre_hooks')",
    ],
)
def test_a_private_name_of_torchs_is_found_on_whatever_object_it_is_read(source: str) -> None:
    assert _private_torch_names(ast.parse(source))


def test_a_private_name_of_this_library_is_not_reported_as_torchs() -> None:
    own = (
        "class Ours:\n    def __init__(self): self._version = 1\n    def read(self): return "
        "self._version"
    )
    assert not _private_torch_names(ast.parse(own))


@pytest.mark.parametrize(
    ("source", "names"),
    [
        ("import torch\ntorch._C._set()", {"torch._C._set"}),
        ("import torch.distributed as dist\ndist._x()", {"torch.distributed._x"}),
        (
            "from torch.utils import _pytree as tree\ntree.map()",
            {"torch.utils._pytree", "torch.utils._pytree.map"},
        ),
        ("from torch.distributed.fsdp import fully_shard", {"torch.distributed.fsdp.fully_shard"}),
        ("torch = object()\n'torch._C'", set()),
    ],
)
def test_torch_names_are_found_under_their_aliases(source: str, names: set[str]) -> None:
    assert names <= set(_torch_names(ast.parse(source)))
    assert names or not set(_torch_names(ast.parse(source)))


def _private_torch_names(tree: ast.Module) -> list[str]:
    """Return torch's names with one leading underscore, in `torch` or on objects that torch
    creates.

    If the file also defines the name, it is taken for the file's.
    """
    defined = {
        node.name for node in ast.walk(tree) if isinstance(node, (ast.FunctionDef, ast.ClassDef))
    }
    assigned = [target for node in ast.walk(tree) for target in _targets(node)]
    own = defined | {
        target.attr
        for target in assigned
        if isinstance(target, ast.Attribute) and _is_self(target.value)
    }
    private = _private_names_of_torchs_objects() - own
    found = [name for name in _torch_names(tree) if re.search(r"\._(?!_)", name)]
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node.attr in private:
            found.append(ast.unparse(node))
        elif isinstance(node, ast.Constant) and node.value in private:
            found.append(str(node.value))
    return found


def _is_self(node: ast.expr) -> bool:
    return isinstance(node, ast.Name) and node.id == "self"


def _targets(node: ast.AST) -> list[ast.expr]:
    """Return the targets of a plain assignment: x in `x = 1`, but not in `x += 1`."""
    if isinstance(node, ast.AnnAssign):
        return [node.target]
    if isinstance(node, ast.Assign):
        return [
            each
            for target in node.targets
            for each in (target.elts if isinstance(target, ast.Tuple) else [target])
        ]
    return []


@cache
def _private_names_of_torchs_objects() -> frozenset[str]:
    parameter = nn.Parameter(torch.ones(1))
    optimizer = torch.optim.AdamW([parameter])
    made = [
        nn.Module(),
        parameter,
        parameter.untyped_storage(),
        (parameter * 1).grad_fn,
        optimizer,
        torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0),
        torch.utils.data.DataLoader([1]),
        torch.distributed.TCPStore,
        torch.distributed.ProcessGroup,
    ]
    names = {name for each in made for name in (*dir(each), *getattr(each, "__dict__", {}))}
    return frozenset(name for name in names if re.match(r"_[^_]", name))


def _files() -> list[Path]:
    """Return the files that git tracks or would track."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.check_output(command, cwd=ROOT, text=True)
    return [ROOT / name for name in listed.split("\0") if name and (ROOT / name).is_file()]


def _text(path: Path) -> str:
    return path.read_bytes().decode("utf-8", errors="ignore")


def _torch_names_of_src() -> Iterator[tuple[str, str]]:
    for path in sorted(PACKAGE.rglob("*.py")):
        for name in _torch_names(ast.parse(_text(path), str(path))):
            yield path.relative_to(PACKAGE).as_posix(), name


def _torch_names(tree: ast.Module) -> Iterator[str]:
    """Yield every dotted torch name that a module imports or reads, with aliases resolved."""
    aliases = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for item in node.names:
                aliases[item.asname or item.name.partition(".")[0]] = (
                    item.name if item.asname else item.name.partition(".")[0]
                )
                yield from _under_torch(item.name)
        elif isinstance(node, ast.ImportFrom) and not node.level:
            for item in node.names:
                aliases[item.asname or item.name] = f"{node.module}.{item.name}"
                yield from _under_torch(f"{node.module}.{item.name}")
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and (name := _dotted(node, aliases)):
            yield from _under_torch(name)


def _dotted(node: ast.expr, aliases: dict[str, str]) -> str:
    if isinstance(node, ast.Name):
        return aliases.get(node.id, "")
    if isinstance(node, ast.Attribute) and (base := _dotted(node.value, aliases)):
        return f"{base}.{node.attr}"
    return ""


def _under_torch(name: str) -> Iterator[str]:
    if name.partition(".")[0] == "torch":
        yield name
