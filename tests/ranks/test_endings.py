"""A program exits with its exit status even if one of its threads waits for a message."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.hosts import free_port

PROGRAM = """
import atexit, os, signal, sys, time
import torch, deepseek_zero
from deepseek_zero.comm.collectives import Comm

class Slow:
    def __del__(self):  # Python ends, and other threads may run
        time.sleep(1.0)

rank, folder = int(os.environ["RANK"]), sys.argv[1]
deepseek_zero.init_distributed("gloo")
if rank == 0:
    # first, so that it runs last: the connection ends
    atexit.register(lambda: os.kill(other, signal.SIGKILL))
comm = Comm(torch.device("cpu"), transport="gloo")
other = int(comm.all_gather_rows(torch.tensor([os.getpid()]), "processes")[1])
if rank == 1:
    time.sleep(100)
slow = Slow()
pending = comm.all_gather(torch.zeros(10), "gather", "what the other rank never sends")
time.sleep(0.2)
raise ValueError("this rank's own")
"""


@pytest.mark.timeout(100)
def test_a_rank_that_raised_ends_with_status_1_though_a_message_to_it_is_lost_as_it_ends(
    tmp_path: Path,
) -> None:
    script = tmp_path / "program.py"
    script.write_text(PROGRAM)
    world = {
        "WORLD_SIZE": "2",
        "LOCAL_WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
    }
    ranks = []
    for rank in range(2):
        environment = os.environ | world | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
        command = [sys.executable, str(script), str(tmp_path)]
        ranks.append(subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True))
    errors = [rank.communicate(timeout=90)[1] for rank in ranks]
    assert ranks[0].returncode == 1, errors[0][-3000:]
    assert "this rank's own" in errors[0]
    assert "terminate called" not in errors[0]
