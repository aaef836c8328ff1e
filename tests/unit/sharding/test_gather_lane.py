"""All ranks issue gathers and reductions in the same order, and no gradient is lost.

The order of the blocks may differ between ranks: blocks are skipped, reordered, repeated or
recomputed, or a rank runs no forward.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from deepseek_zero.base.errors import PeerError
from deepseek_zero.base.mesh import Mesh
from deepseek_zero.planner.schedule import ActionKind
from deepseek_zero.sharding import irregular_passes
from deepseek_zero.sharding.runtime import Runtime
from deepseek_zero.sharding.unit import UnitState
from tests.in_process import Deadlock, Rank, World, optimizer_over, run_ranks, sharded
from tests.reference import OPTIMIZERS

BLOCKS, WIDTH, STEPS = 5, 19, 3
WIDE = 100  # a rank's slice of a block has several messages
Route = Sequence[int] | None
STRAIGHT = tuple(range(BLOCKS))
GATHERS, REDUCES = "engine 0/gather", "engine 0/reduce"


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.linear(x))


class Routed(nn.Module):
    """A model that takes the order of its blocks as an argument of forward.

    recomputes: run each block in a reentrant checkpoint.
    """

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(5)
            self.blocks = nn.ModuleList(Block(width) for _ in range(BLOCKS))
            self.head = nn.Linear(width, 3)

    def forward(self, x: Tensor, route: Sequence[int], recomputes: bool = False) -> Tensor:
        for number in route:
            x = (
                checkpoint(self.blocks[number], x, use_reentrant=True)
                if recomputes
                else self.blocks[number](x)
            )
        return self.head(x)


def batch(rank: int, step: int, width: int = WIDTH) -> Tensor:
    return (
        torch.randn(4, width, generator=torch.Generator().manual_seed(100 * step + rank))
        * 10.0**rank
    )


def start(
    rank: Rank, most_reductions: int = 1, *, width: int = WIDTH, **settings: Any
) -> tuple[Routed, Runtime]:
    model = Routed(width)
    runtime = sharded(
        rank, model, unit_names=("Block",), **{"stage": 3, "ahead_numel": 1000, **settings}
    )
    runtime.reductions.most_reductions = most_reductions
    return model, runtime


def assert_at_rest(runtime: Runtime) -> None:
    """Check that every unit is sharded and every pool buffer is returned after backward."""
    assert all(unit.state is UnitState.SHARDED for unit in runtime.units)
    pool = runtime.comm_ctx.pool
    assert sum(each.nbytes for each in pool.idle()) == pool.allocated_bytes


def reduce_late(runtime: Runtime) -> set[str]:
    """Reduce late gradients, as a step does.

    Returns the names of the parameters with gradients from several reductions.
    """
    runtime.backward.before_step()
    mine = torch.tensor([float(unit.number in runtime.reductions.late) for unit in runtime.units])
    late = runtime.comm.all_gather_rows(mine, "who is late").amax(dim=0).tolist()
    if any(late):
        irregular_passes.reduce_late(runtime.reductions)
    return {member.name for unit in runtime.units if late[unit.number] for member in unit.members()}


def assert_equal(found: Tensor, expected: Tensor, what: str, *, exact: bool) -> None:
    """Compare bitwise if `exact`, otherwise up to the order of summation."""
    close = 0.0 if exact else 1e-6 * float(expected.abs().max())
    torch.testing.assert_close(
        found, expected, rtol=0.0, atol=close, msg=lambda text: f"{what}: {text}"
    )


def plain_gradients(routes: Sequence[Route], step: int, width: int = WIDTH) -> dict[str, Tensor]:
    """Return the mean gradients: summed in rank order in fp32, then divided once."""
    found = []
    for rank, route in enumerate(routes):
        model = Routed(width)
        if route is not None:
            model(batch(rank, step, width), route).square().mean().backward()
        found.append(
            [torch.zeros_like(p) if p.grad is None else p.grad for p in model.parameters()]
        )
    sums = [parts[0].clone() for parts in zip(*found, strict=True)]
    for number, parts in enumerate(zip(*found, strict=True)):
        for part in parts[1:]:
            sums[number].add_(part)
        sums[number].div_(float(len(routes)))
    return {
        name: total for (name, _), total in zip(Routed(width).named_parameters(), sums, strict=True)
    }


ROUTES: dict[str, tuple[Route, ...]] = {
    "straight": (STRAIGHT, STRAIGHT),
    "one rank skips a block": (STRAIGHT, (0, 2, 3, 4)),
    "one rank skips most": ((0, 1, 2, 3, 4), (4,), (0,)),
    "each rank skips others": ((0, 1, 2), (2, 3, 4), (0, 4)),
    "no rank uses a block": ((0, 1, 3, 4), (0, 1, 3, 4)),
    "one rank goes backwards": (STRAIGHT, STRAIGHT[::-1]),
    "each rank in its own order": ((0, 1, 2, 3, 4), (3, 1, 4, 0, 2), (2, 4, 0, 1, 3)),
    "no block at all": (STRAIGHT, ()),
    "twice at once": ((0, 1, 1, 2, 3, 4),) * 2,
    "twice with others between": ((0, 1, 2, 1, 3, 4, 0),) * 3,
}
WINDOWS: dict[str, dict[str, Any]] = {
    "wide": {},
    "none": {"window_numel": 0, "ahead_numel": 0},
    "in turn": {"overlap": False, "window_numel": 0},
    "between hosts": {"most_reductions": 2, "window_numel": 0},
}


@pytest.mark.parametrize("routes", ROUTES.values(), ids=ROUTES)
@pytest.mark.parametrize("settings", WINDOWS.values(), ids=WINDOWS)
@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.parametrize("seed", [None, 1])
def test_ranks_with_different_routes_issue_the_same_collectives_and_lose_no_gradient(
    routes: Sequence[Route], settings: dict[str, Any], stage: int, seed: int | None
) -> None:
    def body(rank: Rank) -> tuple[list[str], list[str]]:
        model, runtime = start(rank, stage=stage, **settings)
        allocated = 0
        for step in range(STEPS):
            model(batch(rank.index, step), routes[rank.index]).square().mean().backward()
            late = reduce_late(runtime)
            assert_at_rest(runtime)
            expected = plain_gradients(routes, step)
            for name, param in model.named_parameters():
                assert_equal(
                    param.grad.full_tensor(),
                    expected[name],
                    f"{name}, step {step}",
                    exact=name not in late,
                )
            runtime.after_step()
            pool = runtime.comm_ctx.pool
            assert step < 2 or allocated == pool.allocated_bytes, (
                "the steady state allocates nothing"
            )
            allocated = pool.allocated_bytes
        return rank.issued(GATHERS), rank.issued(REDUCES)

    found = run_ranks(len(routes), body, seed=seed, reads_in_place=seed is not None)
    assert all(each == found[0] for each in found), "one order per lane"


STRAYS: dict[str, tuple[Route, ...]] = {
    "straight": (STRAIGHT,) * 4,
    "a rank of each host skips": (STRAIGHT, (0, 4), (2,), STRAIGHT),
    "each rank skips others": ((0, 1, 2), (2, 3, 4), (0, 4), (3,)),
    "each rank in its own order": (
        (0, 1, 2, 3, 4),
        (3, 1, 4, 0, 2),
        (2, 4, 0, 1, 3),
        STRAIGHT[::-1],
    ),
}


@pytest.mark.parametrize("routes", STRAYS.values(), ids=STRAYS)
@pytest.mark.parametrize("settings", WINDOWS.values(), ids=WINDOWS)
@pytest.mark.parametrize("seed", [1, 2])
def test_second_hops_are_issued_in_one_order_on_ranks_with_different_routes(
    routes: Sequence[Route], settings: dict[str, Any], seed: int | None
) -> None:
    """Any wait on a rank issues its pending second hops, since ranks would deadlock otherwise.

    Two hosts have two ranks each; every lane of both groups is compared.
    """
    lanes = [
        f"engine 0 {group}/{lane}" for group in ("near", "across") for lane in ("gather", "reduce")
    ]

    def body(rank: Rank) -> dict[str, list[str]]:
        model, runtime = start(rank, stage=3, ranks_per_host=2, **settings)
        for step in range(STEPS):
            model(batch(rank.index, step), routes[rank.index]).square().mean().backward()
            reduce_late(runtime)
            assert_at_rest(runtime)
            expected = plain_gradients(routes, step)
            for name, param in model.named_parameters():
                assert_equal(
                    param.grad.full_tensor(), expected[name], f"{name}, step {step}", exact=False
                )
            runtime.after_step()
        return {lane: rank.issued(lane) for lane in lanes}

    found = run_ranks(4, body, seed=seed, reads_in_place=seed == 2)
    assert all(each == found[0] for each in found) and all(found[0].values())


@pytest.mark.parametrize("routes", ROUTES.values(), ids=ROUTES)
def test_between_hosts_a_units_messages_are_all_issued_before_the_next_units(
    routes: Sequence[Route],
) -> None:
    def body(rank: Rank) -> list[str]:
        model, runtime = start(rank, 2, width=WIDE, bucket_numel=1024 * rank.size)
        for step in range(STEPS):
            model(batch(rank.index, step, WIDE), routes[rank.index]).square().mean().backward()
            late = reduce_late(runtime)
            assert_at_rest(runtime)
            expected = plain_gradients(routes, step, WIDE)
            for name, param in model.named_parameters():
                assert_equal(
                    param.grad.full_tensor(),
                    expected[name],
                    f"{name}, step {step}",
                    exact=name not in late,
                )
            runtime.after_step()
        return rank.issued(REDUCES)

    found = run_ranks(len(routes), body, seed=1)
    assert all(each == found[0] for each in found), "one order"
    units = [name for name, _ in groupby(found[0])]
    assert len(found[0]) > 3 * len(units), "several messages each"
    if routes == ROUTES["straight"]:  # otherwise, some gradients are reduced late
        assert len(units) == STEPS * (BLOCKS + 1)


@pytest.mark.parametrize("settings", WINDOWS.values(), ids=WINDOWS)
@pytest.mark.parametrize("order", [STRAIGHT, (3, 0, 4, 2, 1)])
def test_issued_collectives_equal_the_schedule_after_the_order_is_known(
    order: Sequence[int], settings: dict[str, Any]
) -> None:
    def body(rank: Rank) -> None:
        model, runtime = start(rank, **settings)
        for step in range(STEPS):
            before = len(rank.issued(GATHERS)), len(rank.issued(REDUCES))
            model(batch(rank.index, step), order).square().mean().backward()
            issued = rank.issued(GATHERS)[before[0] :], rank.issued(REDUCES)[before[1] :]
            actions = runtime.plan.schedule.actions()
            for kind, verb, names in zip(
                (ActionKind.GATHER, ActionKind.REDUCE), ("gather", "reduce"), issued, strict=True
            ):
                program = [
                    f"{verb} {runtime.units[each.unit].name}"
                    for each in actions
                    if each.kind is kind
                ]
                assert not step or names == program
            runtime.after_step()
        assert list(runtime.plan.schedule.forward.order) == [0, *(number + 1 for number in order)]

    run_ranks(2, body, seed=1)


@pytest.mark.parametrize("stage", range(4))
def test_with_replicas_and_accumulation_issued_collectives_equal_the_schedule(stage: int) -> None:
    """Unsharded gradients are reduced, and replicas all-reduce (A), after the last backward."""
    micro_batches, mesh = 3, Mesh(dp_replicate=2, dp_shard=2)
    lanes = {
        ActionKind.GATHER: "engine 0 dp_shard/gather",
        ActionKind.REDUCE: "engine 0 dp_shard/reduce",
        ActionKind.ALL_REDUCE: "engine 0 dp_replicate/reduce",
    }

    def body(rank: Rank) -> None:
        model = Routed()
        settings = {"stage": stage, "window_numel": 0, "accumulation": micro_batches}
        runtime = sharded(rank, model, mesh, unit_names=("Block",), **settings)
        names = [unit.name for unit in runtime.units]
        for step in range(STEPS):
            before = {kind: len(rank.issued(lane)) for kind, lane in lanes.items()}
            for micro in range(micro_batches):
                runtime.step.is_boundary = micro == micro_batches - 1
                model(batch(rank.index, step), STRAIGHT).square().mean().backward()
            schedule = runtime.plan.schedule
            runtime.backward.before_step()
            for kind, lane in lanes.items():
                verb = "gather" if kind is ActionKind.GATHER else "reduce"
                program = [
                    f"{verb} {names[action.unit]}"
                    for micro in range(micro_batches)
                    for walk in (
                        schedule.forward,
                        schedule.backward if micro == micro_batches - 1 else schedule.accumulate,
                    )
                    for action in walk.actions
                    if action.kind is kind
                    and (kind is not ActionKind.GATHER or runtime.units[action.unit].sharded)
                ]
                issued = [
                    name
                    for name in rank.issued(lane)[before[kind] :]
                    if name.startswith(f"{verb} ")
                ]
                assert issued == program, (step, lane)
                assert kind is not ActionKind.ALL_REDUCE or len(program) == len(names), (
                    "once a step"
                )
            runtime.after_step()

    run_ranks(4, body, seed=3)


@pytest.mark.parametrize("stage", range(4))
def test_a_rank_without_a_batch_joins_at_the_step(stage: int) -> None:
    routes: tuple[Route, ...] = (STRAIGHT, None, (0, 4))

    def body(rank: Rank) -> dict[str, Tensor]:
        model, runtime = start(rank, stage=stage)
        optimizer = optimizer_over(runtime, OPTIMIZERS["sgd"])
        if (route := routes[rank.index]) is not None:
            model(batch(rank.index, 0), route).square().mean().backward()
        optimizer.step()
        return {name: value.clone() for name, value in model.state_dict().items()}

    expected = Routed()
    for (_, param), grad in zip(
        expected.named_parameters(), plain_gradients(routes, 0).values(), strict=True
    ):
        param.grad = grad
    OPTIMIZERS["sgd"](list(expected.parameters())).step()
    for found in run_ranks(3, body, seed=1):
        assert all(torch.equal(found[name], value) for name, value in expected.state_dict().items())


@pytest.mark.parametrize("stage", range(4))
@pytest.mark.parametrize("late_ranks", [(0, 1, 2), (1,)], ids=["on all ranks", "on one"])
def test_a_gradient_that_arrives_after_its_sum_is_reduced_before_the_step(
    stage: int, late_ranks: Sequence[int]
) -> None:
    """A block in two reentrant checkpoints of one forward gets two gradients."""
    routes = [(0, 1, 1, 2) if rank in late_ranks else (0, 1, 2) for rank in range(3)]
    # Persistent weights avoid a second gather that only one rank would issue.
    settings = {"persistence_numel": 10_000} if stage == 3 else {}

    def body(rank: Rank) -> dict[str, Tensor]:
        model, runtime = start(rank, stage=stage, **settings)
        optimizer = optimizer_over(runtime, OPTIMIZERS["sgd"])
        x = batch(rank.index, 0).requires_grad_()
        model(x, routes[rank.index], True).square().mean().backward()
        assert bool(runtime.reductions.late) == (rank.index in late_ranks)
        optimizer.step()
        return {name: value.clone() for name, value in model.state_dict().items()}

    expected = Routed()
    for param, grad in zip(expected.parameters(), plain_gradients(routes, 0).values(), strict=True):
        param.grad = grad
    OPTIMIZERS["sgd"](list(expected.parameters())).step()
    for found in run_ranks(3, body, seed=2):
        for name, value in expected.state_dict().items():
            assert_equal(found[name], value, name, exact=not name.startswith("blocks.1."))


@pytest.mark.parametrize("strays", ["asks for a state dict", "uses a released block again"])
def test_a_rank_that_deviates_from_the_program_is_named(strays: str) -> None:
    """One rank issues an extra gather: all ranks fail with an error that names both collectives."""

    def body(rank: Rank) -> None:
        model, _ = start(rank, window_numel=0, ahead_numel=0)
        if rank.index == 1 and strays == "asks for a state dict":
            model.state_dict()
        route = (
            (0, 1, 2, 1)
            if rank.index == 1 and strays == "uses a released block again"
            else (0, 1, 2)
        )
        model(batch(rank.index, 0), route).square().mean().backward()

    found = World[None](2).outcomes(body)
    assert all(isinstance(error, Deadlock) for error in found)
    first, second = str(found[0]).split("; ")
    assert first.startswith("rank 0 waits for") and second.startswith("rank 1 waits for 'gather")
    assert first.removeprefix("rank 0") != second.removeprefix("rank 1")

    found = World[None](2, timeouts=40).outcomes(body)
    assert any(
        isinstance(error, PeerError) and "different collectives" in str(error) for error in found
    )


def test_a_forward_after_one_that_raised_on_all_ranks_works() -> None:
    def body(rank: Rank) -> None:
        model, runtime = start(rank)
        for step in range(2):
            with pytest.raises(IndexError):
                model(batch(rank.index, step), (0, 1, BLOCKS))
            model(batch(rank.index, step), STRAIGHT).square().mean().backward()
            assert_at_rest(runtime)
            expected = plain_gradients([STRAIGHT] * 2, step)
            for name, param in model.named_parameters():
                assert torch.equal(param.grad.full_tensor(), expected[name])
            runtime.after_step()

    run_ranks(2, body, seed=1)
