"""Runs the python blocks of one Markdown page, each in a process of its own; called by test_docs.py as a program.

The library is imported once, and each block runs in a fork of that process, in an empty folder: a page of ten blocks
costs one import.  Prints `page:line` and the traceback of what failed; exits with the number of failures.
"""

from __future__ import annotations

import os
import re
import sys
import tempfile
import traceback
from collections.abc import Iterator
from pathlib import Path

FENCE = re.compile(r"^(?P<indent> *)```python(?P<words>[^\n]*)\n(?P<code>.*?)^(?P=indent)```", re.MULTILINE | re.DOTALL)


def blocks(page: str) -> Iterator[tuple[int, str]]:
    """(line, code) of every block that runs: all that open with ```python and do not say no-run."""
    for found in FENCE.finditer(page):
        if "no-run" not in found["words"].split():
            indent = len(found["indent"])
            code = "".join(line[indent:] or "\n" for line in found["code"].splitlines(keepends=True))
            yield page.count("\n", 0, found.start()) + 2, code


def _run(code: str, name: str, line: int) -> bool:
    child = os.fork()
    if child == 0:
        status = 1
        try:
            with tempfile.TemporaryDirectory() as folder:
                os.chdir(folder)
                exec(compile("\n" * (line - 1) + code, name, "exec"), {"__name__": "__main__"})
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(status)
    return os.waitpid(child, 0)[1] == 0


def _main(path: str) -> int:
    import deepseek_zero  # noqa: F401 (so that every fork has it)

    failures = 0
    for line, code in blocks(Path(path).read_text(encoding="utf-8")):
        if not _run(code, path, line):
            sys.stderr.write(f"{path}:{line}: this block failed\n")
            failures += 1
    return failures


if __name__ == "__main__":
    sys.exit(_main(sys.argv[1]))
