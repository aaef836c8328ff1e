"""Run the python blocks of Markdown pages, each in new processes. test_docs.py starts this program.

The program reads lines "RANKS PAGE" from standard input and answers each with one line of JSON: the
number of failures and the output. This process has imported the library once and runs each block in
forks, in an empty folder. Multiple ranks form a process group as under a launcher, and share the
folder.

    ```python                runs on one rank and on two
    ```python one-rank       runs on one rank, for a reason given in the text
    ```python no-run         does not run
"""

from __future__ import annotations

import atexit
import json
import os
import re
import shutil
import signal
import socket
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator
from pathlib import Path

import torch

FENCE = re.compile(
    r"^(?P<indent> *)```python(?P<words>[^\n]*)\n(?P<code>.*?)^(?P=indent)```",
    re.MULTILINE | re.DOTALL,
)
BLOCK_SECONDS = 200.0


def blocks(page: str, ranks: int = 1) -> Iterator[tuple[int, str]]:
    """Yield (line, code) of every block that runs on `ranks` ranks."""
    for found in FENCE.finditer(page):
        words = found["words"].split()
        if "no-run" not in words and not (ranks > 1 and "one-rank" in words):
            indent = len(found["indent"])
            code = "".join(
                line[indent:] or "\n" for line in found["code"].splitlines(keepends=True)
            )
            yield page.count("\n", 0, found.start()) + 2, code


def run_page(path: str, ranks: int) -> dict[str, object]:
    """Run the blocks of a page; return the number of failures and their output."""
    failures = 0
    with tempfile.TemporaryFile() as output:
        for line, code in blocks(Path(path).read_text(encoding="utf-8"), ranks):
            problem = _run(code, path, line, ranks, output.fileno())
            if problem:
                os.write(output.fileno(), f"{path}:{line}: this block {problem}\n".encode())
                failures += 1
        output.seek(0)
        return {"failures": failures, "output": output.read().decode(errors="replace")}


def _run(code: str, name: str, line: int, ranks: int, output: int) -> str:
    """Run a block on every rank; return an error text, or ""."""
    program = compile("\n" * (line - 1) + code, name, "exec")
    where = f" on {ranks} ranks" if ranks > 1 else ""
    # The first rank that ends would remove a TemporaryDirectory.
    folder, port = (tempfile.mkdtemp(), _free_port())
    children = {}
    for rank in range(ranks):
        child = os.fork()
        if child == 0:
            _run_as(rank, ranks, port, folder, program, output)
        children[child] = rank
    deadline = time.monotonic() + BLOCK_SECONDS
    has_failed = False
    while children and time.monotonic() < deadline:
        child, status = os.waitpid(-1, os.WNOHANG)
        if child == 0:
            time.sleep(0.01)
            continue
        del children[child]
        has_failed = has_failed or status != 0
    for child in children:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    shutil.rmtree(folder, ignore_errors=True)
    if children:
        return f"did not end in {BLOCK_SECONDS:g} s{where} (ranks {sorted(children.values())})"
    return f"failed{where}" if has_failed else ""


def _run_as(rank: int, ranks: int, port: int, folder: str, program: object, output: int) -> None:
    """Run a block in this process as one rank, and end the process."""
    status = 1
    os.dup2(output, 1)
    os.dup2(output, 2)
    try:
        os.chdir(folder)
        if ranks > 1:
            place = {
                "RANK": rank,
                "LOCAL_RANK": rank,
                "WORLD_SIZE": ranks,
                "LOCAL_WORLD_SIZE": ranks,
            }
            os.environ.update({key: str(value) for key, value in place.items()})
            os.environ.update(
                {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1"}
            )
            torch.set_num_threads(1)
        exec(program, {"__name__": "__main__"})  # type: ignore[call-overload]
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        if ranks > 1:
            atexit._run_exitfuncs()  # the library destroys the process group there
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def _free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def _main() -> None:
    import deepseek_zero

    deepseek_zero.initialize  # noqa: B018  # names of the package are imported at their first use

    for request in sys.stdin:
        ranks, _, page = request.rstrip("\n").partition(" ")
        sys.stdout.write(json.dumps(run_page(page, int(ranks))) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    _main()
