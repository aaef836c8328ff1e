"""Processes that write the same output wait for each other."""

from __future__ import annotations

import threading
from pathlib import Path

from deepseek_zero.checkpoint.staging import in_turn


def test_processes_that_write_one_output_wait_for_each_other(tmp_path: Path) -> None:
    inside, most = [], []

    def work() -> None:
        with in_turn(tmp_path / "out"):
            inside.append(1)
            most.append(len(inside))
            threading.Event().wait(0.01)
            inside.pop()

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert most == [1, 1, 1, 1]
