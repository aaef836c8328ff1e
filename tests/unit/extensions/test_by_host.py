"""Hierarchical sums by host are bitwise equal to one process that adds in the same order."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor

from deepseek_zero.base.errors import UsageError
from deepseek_zero.base.mesh import Mesh
from deepseek_zero.comm.bootstrap import Hosts
from deepseek_zero.comm.by_host import NEAR
from deepseek_zero.comm.pending import OrderedIssueQueue, Pending
from deepseek_zero.planner.plan_settings import PlanSettings
from deepseek_zero.precision.policy import Policy
from tests.in_process import Rank, optimizer_over, run_ranks, sharded
from tests.models import Gpt, batch_of, seeded
from tests.reference import OPTIMIZERS, Reference, TwoLevels

POLICIES = {torch.float32: Policy(), torch.bfloat16: Policy(torch.bfloat16, auto_cast=True)}
STEPS = 2


@dataclass
class Trained:
    """The results of one rank.

    sent: bytes of the last step.

    pool: the number of pool buffers by dtype and size.
    """

    losses: list[Tensor] = field(default_factory=list)
    weights: dict[str, Tensor] = field(default_factory=dict)
    sent: dict[str, int] = field(default_factory=dict)
    pool: dict[tuple[torch.dtype, int], int] = field(default_factory=dict)
    runtime: Any = None


def train(
    rank: Rank,
    stage: int,
    per_host: int,
    dtype: torch.dtype = torch.bfloat16,
    accumulation: int = 1,
    mesh: Mesh | None = None,
    **settings: Any,
) -> Trained:
    settings = {
        "policy": POLICIES[dtype],
        "accumulation": accumulation,
        "ranks_per_host": per_host,
        **settings,
    }
    runtime = sharded(rank, seeded(Gpt, blocks=2), mesh, stage=stage, window_numel=0, **settings)
    optimizer, found = optimizer_over(runtime, OPTIMIZERS["adamw"]), Trained(runtime=runtime)
    for step in range(STEPS):
        rank.comm.meter.reset()
        for micro in range(accumulation):
            runtime.step.is_boundary = micro == accumulation - 1
            batch = batch_of(step, micro, rank.index)
            loss = runtime.model(batch.tokens, batch.targets)
            loss.backward()
            found.losses.append(loss.detach())
        optimizer.step()
    found.sent = dict(rank.comm.meter.sent_bytes)
    found.weights = {name: value.clone() for name, value in runtime.model.state_dict().items()}
    for tensor in runtime.comm_ctx.pool.idle():
        key = tensor.dtype, tensor.numel()
        found.pool[key] = found.pool.get(key, 0) + 1
    return found


def reference(
    ranks: int, stage: int, per_host: int, dtype: torch.dtype, accumulation: int
) -> dict[str, Tensor]:
    """Return the weights of one process that adds gradients in the order by host."""
    found = Reference(
        seeded(Gpt, blocks=2),
        ranks,
        accumulation,
        stage < 2,
        dtype,
        OPTIMIZERS["adamw"],
        ranks_per_host=per_host,
    )
    for step in range(STEPS):
        found.step(
            [
                [batch_of(step, micro, rank) for micro in range(accumulation)]
                for rank in range(ranks)
            ]
        )
    return found.values()


@pytest.mark.parametrize(
    ("ranks", "per_host", "stage", "dtype", "accumulation", "reads_in_place", "settings"),
    [
        (4, 2, 0, torch.float32, 2, False, {"overlap": False}),
        (4, 2, 1, torch.bfloat16, 2, True, {}),
        (4, 2, 2, torch.float32, 2, True, {"bucket_numel": 4096}),
        (4, 2, 3, torch.bfloat16, 1, False, {"bucket_numel": 4096}),
        (6, 3, 3, torch.float32, 1, True, {}),
        (6, 2, 1, torch.float32, 1, False, {}),
    ],
)
def test_it_has_the_bits_of_one_process_and_sends_and_lends_what_is_predicted(
    ranks: int,
    per_host: int,
    stage: int,
    dtype: torch.dtype,
    accumulation: int,
    reads_in_place: bool,
    settings: dict[str, Any],
) -> None:
    found = run_ranks(
        ranks,
        lambda rank: train(rank, stage, per_host, dtype, accumulation, **settings),
        seed=stage,
        reads_in_place=reads_in_place,
    )
    expected = reference(ranks, stage, per_host, dtype, accumulation)
    for one in found:
        for name, weight in expected.items():
            assert torch.equal(one.weights[name], weight), name
        volume = one.runtime.plan.volume()
        inside = sum(nbytes for kind, nbytes in one.sent.items() if kind.startswith(NEAR))
        assert sum(one.sent.values()) - one.sent["rows"] == volume.state_bytes
        assert inside == volume.inside_hosts > 0
        lent = one.runtime.plan.pool_buffers()
        assert one.pool.keys() == lent.keys() and all(
            count <= lent[size] for size, count in one.pool.items()
        )


@pytest.mark.parametrize("stage", [0, 3])
def test_with_replicas_each_group_sums_by_host(stage: int) -> None:
    mesh = Mesh(dp_replicate=2, dp_shard=4)
    found = run_ranks(8, lambda rank: train(rank, stage, 2, torch.float32, mesh=mesh), seed=1)
    optimizer = OPTIMIZERS["adamw"]
    expected = TwoLevels(
        seeded(Gpt, blocks=2), 8, 1, stage < 2, make_optimizer=optimizer, ranks_per_host=2, shard=4
    )
    for step in range(STEPS):
        expected.step([[batch_of(step, 0, rank)] for rank in range(8)])
    for one in found:
        assert all(
            torch.equal(one.weights[name], weight) for name, weight in expected.values().items()
        )


def test_the_order_by_host_is_another_than_that_of_ranks() -> None:
    by_rank, by_host = (reference(4, 2, per_host, torch.float32, 1) for per_host in (1, 2))
    assert any(not torch.equal(by_rank[name], by_host[name]) for name in by_rank)


@pytest.mark.parametrize("per_host", [1, 4])
def test_one_rank_or_all_ranks_on_a_host_are_the_order_of_ranks(per_host: int) -> None:
    found = run_ranks(4, lambda rank: train(rank, 3, per_host))
    assert all(one.runtime.comm_ctx.route.near == 1 for one in found)
    expected = reference(4, 3, 1, torch.bfloat16, 1)
    assert all(torch.equal(found[3].weights[name], weight) for name, weight in expected.items())


def test_between_hosts_a_byte_crosses_once_for_each_host() -> None:
    (one, *_) = run_ranks(4, lambda rank: train(rank, 3, 2))
    padded = sum(group.layout.padded_numel for group in one.runtime.groups)
    gathers = one.runtime.plan.volume().gathers
    between = sum(
        nbytes for kind, nbytes in one.sent.items() if kind in ("all_gather", "reduce_scatter")
    )
    assert 2 * one.sent["all_gather"] * 3 == 2 * gathers  # H - 1 slices instead of N - 1
    assert 2 * one.sent["reduce_scatter"] == padded // 2 * 4  # for both ranks of a host: F x P x 4
    assert between == one.runtime.plan.volume().state_bytes - one.runtime.plan.volume().inside_hosts


def test_hosts_of_several_sizes_are_refused_by_name() -> None:
    with pytest.raises(UsageError, match=r"ranks_per_host=2, .*hosts have 1 or 2") as caught:
        Mesh(dp_shard=5).near_size(2)
    assert "divisor of 5" in caught.value.fix
    assert Mesh(dp_shard=6).host_groups(3) == (((0, 1, 2), (3, 4, 5)), ((0, 3), (1, 4), (2, 5)))
    assert Mesh(dp_shard=4, tp=2).host_groups(4) == (
        ((0, 2), (4, 6), (1, 3), (5, 7)),
        ((0, 4), (2, 6), (1, 5), (3, 7)),
    )
    assert [Mesh(dp_replicate=2, dp_shard=2).near_size(each) for each in (1, 2, 4)] == [1, 1, 1]


@pytest.mark.parametrize(
    ("keys", "per_host"),
    [
        ("aabb", 2),
        ("aaaa", 1),
        ("ab", 1),
        ("abab", 1),
        ("aab", 1),
        ("aaabbb", 3),
        ("aabbaa", 1),
        (["", ""], 1),
    ],
)
def test_ranks_of_a_host_are_counted_where_each_host_has_the_next_so_many(
    keys: Any, per_host: int
) -> None:
    assert Hosts(0, tuple(keys)).per_host == per_host


def test_a_plan_without_hosts_is_in_the_order_of_ranks() -> None:
    assert PlanSettings().ranks_per_host == 1


class Step:
    """A precondition that the test completes; `wait` calls a function first."""

    def __init__(self, meanwhile: Any = lambda: None) -> None:
        self.is_over, self.meanwhile = False, meanwhile

    def is_done(self) -> bool:
        return self.is_over

    def wait(self) -> None:
        self.meanwhile()
        self.is_over = True


def test_a_queue_issues_in_the_order_of_adding_also_when_a_wait_comes_back_to_it() -> None:
    queue, issued = OrderedIssueQueue(), list[int]()
    first, second = Step(lambda: queue.advance()), Step()
    pendings = [
        queue.add(step, lambda number=number: (issued.append(number), Pending(lambda: None))[1])
        for number, step in enumerate((first, second))
    ]
    second.is_over = True
    queue.advance()
    assert issued == [] and queue.is_open and not pendings[1].is_done()
    pendings[1].wait()
    assert issued == [0, 1] and not queue.is_open


def test_a_queued_collective_that_failed_raises_its_error_in_every_wait() -> None:
    def fail() -> Pending:
        raise ValueError("not issued")

    queue, step = OrderedIssueQueue(), Step()
    pending = queue.add(step, fail)
    with pytest.raises(ValueError, match="not issued"):
        queue.issue_all()
    for _ in range(2):
        with pytest.raises(ValueError, match="not issued"):
            pending.wait()
    assert not queue.is_open


def test_after_ctrl_c_in_a_wait_later_waits_raise_an_error_that_explains_it() -> None:
    def interrupt() -> None:
        raise KeyboardInterrupt

    for pending in (Pending(interrupt), OrderedIssueQueue().add(Step(), interrupt)):
        with pytest.raises(KeyboardInterrupt):
            pending.wait()
        for _ in range(2):
            with pytest.raises(UsageError, match=r"KeyboardInterrupt(.|\n)*engine again"):
                pending.wait()
