"""Every python block in README.md and docs/ runs on one rank and on two, unless its fence opts
out.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

import pytest

from tests.contract import run_blocks

ROOT = Path(__file__).resolve().parents[2]
TEXTS = {
    path: path.read_text(encoding="utf-8")
    for path in [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
}
RUNS = [
    (str(path.relative_to(ROOT)), ranks)
    for path, text in TEXTS.items()
    for ranks in (1, 2)
    if any(run_blocks.blocks(text, ranks))
]


class Runner:
    """A process that has imported the library and runs one page after another."""

    def __init__(self) -> None:
        command = [sys.executable, run_blocks.__file__]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def run(self, page: Path, ranks: int) -> dict[str, Any]:
        """Run the blocks of a page; return the number of failures and the output."""
        self._stream(self._process.stdin).write(f"{ranks} {page}\n")
        self._stream(self._process.stdin).flush()
        answer = self._stream(self._process.stdout).readline()
        assert answer, "the process that runs the blocks has died"
        found: dict[str, Any] = json.loads(answer)
        return found

    def close(self) -> None:
        self._stream(self._process.stdin).close()
        self._process.wait(timeout=30)
        self._stream(self._process.stdout).close()

    @staticmethod
    def _stream(stream: IO[str] | None) -> IO[str]:
        assert stream is not None
        return stream


@pytest.fixture(scope="module")
def runner() -> Iterator[Runner]:
    runner = Runner()
    yield runner
    runner.close()


@pytest.mark.parametrize(("page", "ranks"), RUNS)
def test_the_python_blocks_of_a_page_run(runner: Runner, page: str, ranks: int) -> None:
    done = runner.run(ROOT / page, ranks)
    assert done["failures"] == 0, done["output"]


PAGE = """Text

```python
x = 1
```

```python no-run
1 / 0
```

- item
  ```python
  1 / x
  ```

```python one-rank
import os
assert "RANK" not in os.environ
```

```python
import torch.distributed as dist
import deepseek_zero
deepseek_zero.init_distributed()
total = __import__("torch").ones(1)
dist.all_reduce(total)
open(f"{dist.get_rank()} of {int(total)}", "w").close()
dist.barrier()
assert len(__import__("os").listdir()) == total
```
"""


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_failing_block_is_named_by_page_and_line_and_every_block_runs(
    runner: Runner, tmp_path: Path, ranks: int
) -> None:
    page = tmp_path / "page.md"
    page.write_text(PAGE)
    done = runner.run(page, ranks)
    assert done["failures"] == 1, done["output"]
    assert f"{page}:13: this block failed{' on 2 ranks' if ranks == 2 else ''}\n" in done["output"]
    assert "NameError: name 'x' is not defined" in done["output"]


def test_a_failure_on_one_rank_ends_the_block_on_all_without_a_hang(
    runner: Runner, tmp_path: Path
) -> None:
    page = tmp_path / "page.md"
    page.write_text("```python\nimport os\nassert os.environ.get('RANK') != '1'\n```\n")
    assert runner.run(page, 1)["failures"] == 0
    assert runner.run(page, 2)["failures"] == 1
