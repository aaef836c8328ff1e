"""Memory shared by all ranks of a group, and all-gathers in it."""

from __future__ import annotations

import torch

from deepseek_zero.comm.collectives import Comm
from deepseek_zero.comm.pending import DONE
from tests.in_process import Rank, run_ranks


def test_a_group_of_one_rank_has_memory_of_its_own_that_is_always_gathered() -> None:
    in_place = Comm(torch.device("cpu")).in_place
    memory = in_place.allocate(4, torch.float32, "w")
    assert memory is not None
    assert memory.whole.tolist() == [0.0] * 4
    assert in_place.gather(memory, "w") is DONE


def test_ranks_that_share_no_pages_have_none() -> None:
    def body(rank: Rank) -> bool:
        in_place = rank.comm.in_place
        in_place.begin("forward")
        in_place.end()
        return in_place.allocate(4, torch.float32, "w") is None

    assert run_ranks(2, body) == [True, True]
