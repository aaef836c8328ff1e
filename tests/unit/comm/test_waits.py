"""How the waits of an engine end, and how often they poll."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch

from deepseek_zero.base.errors import PeerError
from deepseek_zero.comm.transports import base
from deepseek_zero.comm.waits import HOP_SECONDS, Waits
from tests.in_process import Rank, run_ranks


@dataclass(eq=False)
class SecondHops:
    is_open: bool = False
    advances: int = 0

    def advance(self) -> None:
        self.advances += 1


def test_an_error_that_one_rank_posts_ends_the_wait_of_another_and_is_withdrawn() -> None:
    def body(rank: Rank) -> str:
        if rank.index == 1:
            rank.comm.waits.post_error(ValueError("no batch\nsecond line"))
            return ""
        with pytest.raises(PeerError, match="ValueError: no batch") as caught:
            rank.comm.all_gather(torch.zeros(2), "gather", "w").wait()
        assert rank.comm.waits.has_given_up
        rank.comm.waits.post_error(RuntimeError("follows from the other rank's"))
        assert not rank.comm.waits.raised
        rank.comm.waits.withdraw_error()
        assert not rank.comm.waits.has_given_up
        return str(caught.value)

    assert "second line" not in run_ranks(2, body, timeouts=4)[0]


def test_a_wait_is_short_while_a_second_hop_may_have_to_be_issued() -> None:
    waits = Waits()
    assert not waits.polls_often and waits.poll_interval() == base.POLL_SECONDS
    hops = SecondHops()
    waits.add_hops(hops)
    assert waits.polls_often and waits.poll_interval() == base.POLL_SECONDS
    hops.is_open = True
    assert waits.poll_interval() == HOP_SECONDS
    waits.advance()
    assert hops.advances == 1
    del hops
    assert not waits.polls_often, "hops that are gone are forgotten"


def test_a_single_call_is_open_until_its_block_ends() -> None:
    waits = Waits()
    with waits.lone_call("state_dict()"):
        with waits.lone_call("inner"):
            pass
        assert waits._lone_call == "state_dict()"
    assert waits._lone_call == ""
