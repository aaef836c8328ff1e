"""One job writes to a directory of checkpoints."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

from deepseek_zero.checkpoint.writer_lock import WRITER, WriterLock

TRY_TO_LOCK = """
import fcntl, sys
with open(sys.argv[1], "r+") as file:
    fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
"""


def test_a_directory_that_was_removed_is_locked_again(tmp_path: Path) -> None:
    directory = tmp_path / "run"
    locks = [WriterLock(), WriterLock()]
    for lock in locks:
        lock.acquire(directory)
    shutil.rmtree(directory)
    for lock in locks:
        lock.acquire(directory)
    locks[0].release()
    command = [sys.executable, "-c", TRY_TO_LOCK, str(directory / WRITER)]
    other = subprocess.run(command, capture_output=True, text=True, check=False)
    assert "BlockingIOError" in other.stderr
    locks[1].release()
    assert not (directory / WRITER).exists()
