"""Checkpoints, exports and conversions change the disk only through checkpoint/files.py.

tests/crash.py records the functions of that file and replays any prefix of the calls. It would miss
a change that bypasses the file.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parents[2] / "src" / "deepseek_zero"
DOOR = PACKAGE / "checkpoint" / "files.py"
WATCHED = [
    *sorted((PACKAGE / "checkpoint").glob("*.py")),
    *sorted((PACKAGE / "compat" / "deepspeed" / "checkpoint").glob("*.py")),
    PACKAGE / "engine" / "saving.py",
    PACKAGE / "engine" / "exporting.py",
    PACKAGE / "compat" / "deepspeed" / "zero_to_fp32.py",
    PACKAGE / "cli" / "checkpoint_pages.py",
]
# Calls that change a disk, on any object. Functions of files.py are called as `files.<name>`.
VERBS = frozenset(
    "rename replace renames unlink remove removedirs rmdir rmtree mkdir makedirs mkstemp mkdtemp "
    "NamedTemporaryFile TemporaryFile TemporaryDirectory touch chmod lchmod chown symlink_to "
    "hardlink_to symlink link truncate ftruncate pwrite pwritev write_text write_bytes copy2 "
    "copyfile copytree copyfileobj move save_file posix_fallocate fsync fdatasync sync".split()
)
READING = ("r", "rb", "rt")
ALLOWED = {  # (file, call): reason
    ("zero_to_fp32.py", "tempfile.mkdtemp"): "of the process alone, gone with it",
}


def bypasses(tree: ast.AST, file: str) -> Iterator[str]:
    """Yield the calls in a file that change a disk without files.py."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            name = ast.unparse(node.func)
            if (
                not name.startswith("files.")
                and (file, name) not in ALLOWED
                and _changes_a_disk(node, name)
            ):
                yield f"{file}:{node.lineno}: {ast.unparse(node)[:80]}"


def _changes_a_disk(node: ast.Call, name: str) -> bool:
    owner, _, verb = name.rpartition(".")
    if name in ("open", "os.fdopen", "io.open") or (
        verb == "open" and owner not in ("", "os", "zipfile", "self")
    ):
        place = 1 if name in ("open", "os.fdopen", "io.open") else 0
        modes = [keyword.value for keyword in node.keywords if keyword.arg == "mode"] + node.args[
            place : place + 1
        ]
        return any(not (isinstance(mode, ast.Constant) and mode.value in READING) for mode in modes)
    if name == "os.open":
        return any(
            flag in ast.unparse(node.args[1])
            for flag in ("O_WRONLY", "O_RDWR", "O_CREAT", "O_TRUNC", "O_APPEND")
        )
    if verb == "save" and owner == "torch":
        # the argument of files.new_file
        return not (len(node.args) > 1 and ast.unparse(node.args[1]) == "stream")
    return bool(owner) and verb in VERBS and not _is_of_a_value(node, owner, verb)


def _is_of_a_value(node: ast.Call, owner: str, verb: str) -> bool:
    """Return whether the call is str.replace or dataclasses.replace.

    They have two arguments or keywords; Path.replace has one argument.
    """
    return (
        verb == "replace"
        and owner not in ("os", "shutil")
        and (len(node.args) != 1 or bool(node.keywords))
    )


def test_no_change_to_a_disk_passes_files_by() -> None:
    found = [
        each
        for path in WATCHED
        if path != DOOR
        for each in bypasses(ast.parse(path.read_text()), path.name)
    ]
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    "line",
    [
        "open(path, 'w')", "open(path, mode='ab')", "open(path, how)", "path.open('w')",
        "path.write_text('x')", "os.replace(a, b)", "path.rename(b)", "path.replace(b)",
        "path.unlink()", "shutil.rmtree(a)", "path.mkdir()",
        "os.open(path, os.O_WRONLY | os.O_CREAT)", "torch.save(state, path)", "os.fsync(fd)",
        "os.chmod(path, 0o600)", "tempfile.mkdtemp()", "safetensors.torch.save_file(a, b)",
    ],
)  # fmt: skip
def test_such_a_line_would_be_found(line: str) -> None:
    assert list(bypasses(ast.parse(line), "any.py"))


@pytest.mark.parametrize(
    "line",
    ["open(path)", "open(path, 'rb')", "files.rename(a, b)", "os.open(path, os.O_RDONLY)",
     "text.replace('a', 'b')", "replace(value, wait=True)", "torch.save(state, stream)"],
)  # fmt: skip
def test_calls_that_change_no_file_are_not_reported(line: str) -> None:
    assert not list(bypasses(ast.parse(line), "any.py"))
