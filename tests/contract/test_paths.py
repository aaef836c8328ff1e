"""No file names a path of one machine; src/ touches no FSDP, and torch's private names only in three files."""

from __future__ import annotations

import ast
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "src" / "deepseek_zero"
MAY_TOUCH_PRIVATE_TORCH = {"base/device.py", "sharding/buffer.py", "sharding/handle.py"}
EVERYWHERE = {Path("/"), Path("/tmp"), Path("/home"), Path("/srv"), Path("/opt")}  # says nothing about one machine


def test_no_file_names_a_path_of_this_machine() -> None:
    places = {str(path) for path in (ROOT, ROOT.parent, Path.home()) if path not in EVERYWHERE}
    machine = re.compile(r"(?<![\w.\-])(" + "|".join(map(re.escape, sorted(places))) + r"|/(home|Users)/\w+)/")
    found = [f"{path.relative_to(ROOT)}: {hit.group()}" for path in _files() for hit in machine.finditer(_text(path))]
    assert not found


def test_src_never_touches_fsdp() -> None:
    found = [f"{path}: {name}" for path, name in _torch_names_of_src() if "fsdp" in name.lower()]
    assert not found


def test_private_torch_names_stand_only_in_the_three_files_that_guard_them() -> None:
    found = [
        f"{path}: {name}"
        for path, name in _torch_names_of_src()
        if path not in MAY_TOUCH_PRIVATE_TORCH and re.search(r"\._(?!_)", name)
    ]
    assert not found


@pytest.mark.parametrize(
    ("source", "names"),
    [
        ("import torch\ntorch._C._set()", {"torch._C._set"}),
        ("import torch.distributed as dist\ndist._x()", {"torch.distributed._x"}),
        ("from torch.utils import _pytree as tree\ntree.map()", {"torch.utils._pytree", "torch.utils._pytree.map"}),
        ("from torch.distributed.fsdp import fully_shard", {"torch.distributed.fsdp.fully_shard"}),
        ("torch = object()\n'torch._C'", set()),
    ],
)
def test_torch_names_are_found_under_their_aliases(source: str, names: set[str]) -> None:
    assert names <= set(_torch_names(ast.parse(source)))
    assert names or not set(_torch_names(ast.parse(source)))


def _files() -> list[Path]:
    """What git tracks or would track."""
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
    """Every dotted name under torch that a module imports or reads, with its own aliases resolved."""
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
