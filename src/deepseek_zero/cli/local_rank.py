"""Find out whether a script accepts the option `--local_rank=N`.

DeepSpeed always passes it, and a script without this option fails in its argument parser. Here it
is passed only if the script, or a module next to it that it imports, accepts it. The module must
name the option in a call (add_argument, click.option, ...) or call parse_known_args. The source is
parsed and never executed. LOCAL_RANK is always in the environment.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

OPTIONS = {"--local_rank", "--local-rank"}

TOLERANT_CALLS = {"parse_known_args", "parse_known_intermixed_args"}

MAX_FILES = 200
"""Maximum number of modules that are read; larger projects have their parser near the script."""


def accepts_local_rank(source: Path | None, args: Sequence[str] = ()) -> bool:
    """Return whether to pass --local_rank=N to a script.

    Args:
        source: The script's source; None if there is none.
        args: The script's arguments; the option is not passed twice.
    """
    if source is None or any(arg.partition("=")[0] in OPTIONS for arg in args):
        return False
    waiting = [source]
    seen = {source}
    while waiting and len(seen) <= MAX_FILES:
        tree = _parse(waiting.pop(0))
        if tree is None:
            continue
        if any(_takes_option(node) for node in ast.walk(tree)):
            return True
        found = [
            path
            for name in _imported_names(tree)
            for path in _files_of(name, source.parent, "__init__.py")
            if path not in seen
        ]
        seen.update(found)
        waiting.extend(dict.fromkeys(found))
    return False


def find_module(name: str) -> Path | None:
    """Return the file that `python -m name` would run.

    It is searched for by path, because importing it would execute the parent packages.
    """
    folders = [str(Path.cwd()), *sys.path]
    files = (file for folder in folders for file in _files_of(name, Path(folder), "__main__.py"))
    return next(files, None)


def _files_of(name: str, folder: Path, in_package: str) -> list[Path]:
    """Return the files of a module in a folder: its own, and `in_package` of a package."""
    base = folder.joinpath(*name.split("."))
    candidates = (base.with_name(f"{base.name}.py"), base / in_package)
    return [file for file in candidates if file.is_file()]


def _parse(path: Path) -> ast.Module | None:
    try:
        return ast.parse(path.read_bytes())
    except (OSError, SyntaxError, ValueError):
        return None


def _takes_option(node: ast.AST) -> bool:
    if not isinstance(node, ast.Call):
        return False
    called = (
        node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
    )
    # A flag from an f-string or a variable is not detected; such scripts can use the environment
    # variable.
    return called in TOLERANT_CALLS or any(
        isinstance(arg, ast.Constant) and arg.value in OPTIONS for arg in node.args
    )


def _imported_names(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
