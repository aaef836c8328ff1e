"""Worlds over real hosts (tests/hosts.py): how they start, what travels between them."""

from __future__ import annotations

import os
import socket

import pytest
import torch.distributed as dist

from deepseek_zero.comm import context
from tests.models import Gpt, batch_of, seeded
from tests.reference import OPTIMIZERS, Reference
from tests.training import DTYPES, Run, start_engine, train_step


@pytest.mark.ranks(4, hosts=2)
def test_two_hosts_start_where_no_launcher_counts_their_ranks() -> None:
    assert "LOCAL_WORLD_SIZE" not in os.environ and "LOCAL_RANK" not in os.environ
    rank, run = dist.get_rank(), Run(3, "bf16")
    assert socket.gethostname() == f"h{rank // 2}"
    engine = start_engine(run, seeded(Gpt))
    world = context.WorldContext.of_this_world()
    assert world.hosts.near == [rank // 2 * 2, rank // 2 * 2 + 1]
    assert (context.ranks_of_this_host(), context.local_rank()) == (2, rank % 2)
    assert "shared memory within a host, gloo between hosts" in str(engine.runtime.comm.capabilities())
    reference = Reference(seeded(Gpt), 4, 1, False, DTYPES[run.dtype], OPTIMIZERS["sgd"])
    for step in range(2):
        (loss,) = train_step(engine, run, step)
        expected, _ = reference.step([[batch_of(step, 0, each)] for each in range(4)])
        assert loss.equal(expected[rank][0])
