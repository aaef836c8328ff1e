"""Training on ranks in one process is bitwise equal to unsharded training at every stage."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from deepseek_zero.base.device import outer_saved_tensor_hooks
from deepseek_zero.base.errors import UsageError
from deepseek_zero.base.mesh import Mesh
from deepseek_zero.precision.policy import Policy
from tests.in_process import Rank, optimizer_over, run_ranks, sharded
from tests.models import Gpt, batch_of, seeded
from tests.reference import OPTIMIZERS, Reference, TwoLevels

STEPS = 2
POLICIES = {torch.float32: Policy(), torch.bfloat16: Policy(torch.bfloat16, auto_cast=True)}
on_stages = pytest.mark.parametrize("stage", range(4))


@dataclass
class Trained:
    """The results of one rank."""

    losses: list[list[Tensor]]
    norms: list[float]
    weights: dict[str, Tensor]


def small() -> nn.Module:
    return seeded(Gpt, blocks=2)


def train(
    rank: Rank,
    stage: int,
    dtype: torch.dtype,
    accumulation: int,
    mesh: Mesh | None = None,
    **settings: Any,
) -> Trained:
    model = small()
    settings = {"policy": POLICIES[dtype], "accumulation": accumulation, **settings}
    runtime = sharded(rank, model, mesh, stage=stage, **settings)
    optimizer = optimizer_over(runtime, OPTIMIZERS["adamw"], max_norm=0.5)
    losses, norms = [], []
    for step in range(STEPS):
        losses.append([])
        for micro in range(accumulation):
            runtime.step.is_boundary = micro == accumulation - 1
            batch = batch_of(step, micro, rank.index)
            loss = model(batch.tokens, batch.targets)
            loss.backward()
            losses[-1].append(loss.detach())
        optimizer.step()
        norms.append(optimizer.last.norm)
    return Trained(
        losses, norms, {name: value.clone() for name, value in model.state_dict().items()}
    )


def assert_same_bits(found: list[Trained], reference: Reference) -> None:
    for step in range(STEPS):
        batches = [
            [batch_of(step, k, r) for k in range(reference.accumulation)]
            for r in range(reference.ranks)
        ]
        norm = found[0].norms[step]
        expected, exact = reference.step(batches, norm)
        assert norm == pytest.approx(exact, rel=1e-5)
        for rank, each in enumerate(found):
            assert each.norms[step] == norm, "one norm on all ranks"
            assert all(map(torch.equal, each.losses[step], expected[rank])), (
                f"losses of rank {rank}, step {step}"
            )
    for rank, each in enumerate(found):
        for name, weight in reference.values().items():
            assert torch.equal(each.weights[name], weight), f"{name} on rank {rank}"


def reference_of(
    size: int, stage: int, dtype: torch.dtype, accumulation: int, shard: int = 0
) -> Reference:
    """Return the reference.

    shard: size of a shard group in a mesh with replicas, or 0 without replicas.
    """
    given = (
        small(),
        size,
        accumulation,
        stage < 2 or (shard or size) == 1,
        dtype,
        OPTIMIZERS["adamw"],
        0.5,
    )
    return TwoLevels(*given, shard=shard) if shard else Reference(*given)


@on_stages
@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("dtype", POLICIES, ids=["fp32", "bf16"])
@pytest.mark.parametrize("accumulation", [1, 2])
def test_every_stage_gives_the_bits_of_one_process(
    stage: int, size: int, dtype: torch.dtype, accumulation: int
) -> None:
    found = run_ranks(size, lambda rank: train(rank, stage, dtype, accumulation), seed=stage)
    assert_same_bits(found, reference_of(size, stage, dtype, accumulation))


@on_stages
@pytest.mark.parametrize(
    "seed", [None, 1, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (2, 3))]
)
@pytest.mark.parametrize("reads_in_place", [False, True], ids=["copied", "in place"])
def test_no_order_of_ranks_changes_a_bit(
    stage: int, seed: int | None, reads_in_place: bool
) -> None:
    found = run_ranks(
        3,
        lambda rank: train(rank, stage, torch.float32, 1),
        seed=seed,
        reads_in_place=reads_in_place,
    )
    assert_same_bits(found, reference_of(3, stage, torch.float32, 1))


@on_stages
@pytest.mark.parametrize(
    "settings",
    [
        {"window_numel": 0},
        {"ahead_numel": 0},
        {"keep_numel": 0, "ahead_numel": 3000},
        {"overlap": False},
        {"bucket_numel": 2048},
        {"persistence_numel": 50},
        {"window_numel": 0, "bucket_numel": 1, "overlap": False},
    ],
    ids=lambda settings: " ".join(settings),
)
def test_no_schedule_and_no_size_changes_a_bit(stage: int, settings: dict[str, Any]) -> None:
    found = run_ranks(
        2,
        lambda rank: train(rank, stage, torch.bfloat16, 2, **settings),
        seed=5,
        reads_in_place=True,
    )
    assert_same_bits(found, reference_of(2, stage, torch.bfloat16, 2))


@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.parametrize("dtype", POLICIES, ids=["fp32", "bf16"])
def test_gradients_that_are_reduced_once_a_step_are_added_up_first(
    stage: int, dtype: torch.dtype
) -> None:
    found = run_ranks(3, lambda rank: train(rank, stage, dtype, 3, reduces_once=True), seed=stage)
    assert_same_bits(found, reference_of(3, 1, dtype, 3))


@on_stages
@pytest.mark.parametrize("size", [1, 2])
def test_pinned_units_run_forwards_and_backwards_in_any_order_with_one_gather(
    stage: int, size: int
) -> None:
    """A stage of a pipeline has such an order: F0 F1 B0 F2 B1 B2."""

    def body(rank: Rank) -> Trained:
        model = small()
        settings = {
            "policy": POLICIES[torch.bfloat16],
            "accumulation": 3,
            "reduces_once": True,
            "window_numel": 0,
        }
        runtime = sharded(rank, model, None, stage=stage, **settings)
        optimizer = optimizer_over(runtime, OPTIMIZERS["adamw"], max_norm=0.5)
        losses, norms = [], []
        for step in range(STEPS):
            batches, open_losses = (
                [batch_of(step, micro, rank.index) for micro in range(3)],
                dict[int, Tensor](),
            )
            for unit in runtime.units:
                unit.is_pinned = True
            for what, micro in (("F", 0), ("F", 1), ("B", 0), ("F", 2), ("B", 1), ("B", 2)):
                if what == "F":
                    open_losses[micro] = model(batches[micro].tokens, batches[micro].targets)
                else:
                    runtime.step.is_boundary = micro == 2
                    open_losses[micro].backward()
            for unit in runtime.units:
                unit.unpin()
            losses.append([open_losses[micro].detach() for micro in range(3)])
            optimizer.step()
            norms.append(optimizer.last.norm)
        if stage == 3 and size > 1:
            gathers = [
                each
                for each in rank.issued("engine 0/gather")
                if each.startswith("gather blocks.0")
            ]
            assert len(gathers) == STEPS, gathers
        return Trained(
            losses, norms, {name: value.clone() for name, value in model.state_dict().items()}
        )

    assert_same_bits(
        run_ranks(size, body, seed=1), reference_of(size, min(stage, 1), torch.bfloat16, 3)
    )


@on_stages
@pytest.mark.parametrize(("replicas", "shard"), [(2, 2), (2, 1), (1, 3), (4, 1), (2, 3)])
@pytest.mark.parametrize("accumulation", [1, 2])
def test_replicas_add_up_in_two_levels(
    stage: int, replicas: int, shard: int, accumulation: int
) -> None:
    """Hybrid sharding: one reduction within a shard group, and one between replicas per step."""
    mesh, size = Mesh(dp_replicate=replicas, dp_shard=shard), replicas * shard
    found = run_ranks(
        size, lambda rank: train(rank, stage, torch.float32, accumulation, mesh), seed=stage
    )
    assert_same_bits(found, reference_of(size, stage, torch.float32, accumulation, shard))


@pytest.mark.parametrize("stage", [1, 3])
def test_replicas_are_summed_once_a_step(stage: int) -> None:
    def body(rank: Rank) -> list[str]:
        train(rank, stage, torch.float32, 3, Mesh(dp_replicate=2, dp_shard=2))
        return rank.issued("engine 0 dp_replicate/reduce")

    names = ["root", "blocks.0", "blocks.1"]
    for issued in run_ranks(4, body):
        for name in names:
            assert issued.count(f"reduce {name}") == STEPS, issued


@pytest.mark.parametrize("stage", [2, 3])
def test_a_gradient_is_not_changed_while_each_replica_has_its_own_sum(stage: int) -> None:
    def step(rank: Rank) -> None:
        model = small()
        runtime = sharded(
            rank, model, Mesh(dp_replicate=2, dp_shard=2), stage=stage, accumulation=2
        )
        param = next(iter(model.parameters()))
        for micro in range(2):
            runtime.step.is_boundary = micro == 1
            batch = batch_of(0, micro, rank.index)
            model(batch.tokens, batch.targets).backward()
            if micro == 0:
                with pytest.raises(UsageError, match="between the micro-batches"):
                    param.grad.mul_(2)
        param.grad.mul_(2)  # all replicas have the same sum now

    run_ranks(4, step)


def interrupt(*_: Any) -> None:
    raise KeyboardInterrupt


def train_after_an_interrupt(
    rank: Rank, stage: int, place: str, *, is_recorded: bool
) -> tuple[float, Any]:
    """Return the gradient norm of one step and the saved-tensor hooks that are active after it."""
    model = small()
    runtime = sharded(rank, model, stage=stage, accumulation=2)
    optimizer = optimizer_over(runtime, OPTIMIZERS["adamw"])
    batch = batch_of(0, 0, rank.index)
    handle = model.get_submodule(place).register_forward_pre_hook(interrupt)
    with pytest.raises(KeyboardInterrupt), torch.set_grad_enabled(is_recorded):
        model(batch.tokens, batch.targets)
    handle.remove()
    for micro in range(2):
        runtime.step.is_boundary = micro == 1
        batch = batch_of(0, micro, rank.index)
        model(batch.tokens, batch.targets).backward()
    hooks = outer_saved_tensor_hooks()
    optimizer.step()
    return optimizer.last.norm, hooks


@on_stages
@pytest.mark.parametrize("place", ["head", "blocks.0.up", "blocks.1.down"])
@pytest.mark.parametrize("is_recorded", [True, False], ids=["training", "evaluation"])
def test_a_forward_after_an_interrupted_one_is_an_ordinary_forward(
    stage: int, place: str, is_recorded: bool
) -> None:
    def run(rank: Rank) -> tuple[float, Any]:
        return train_after_an_interrupt(rank, stage, place, is_recorded=is_recorded)

    expected = run_ranks(2, lambda rank: train(rank, stage, torch.float32, 2))[0].norms[0]
    for norm, hooks in run_ranks(2, run):
        assert norm == expected
        assert hooks is None


class Table(nn.Sequential):
    """A model that adds a buffer to its input."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(4, 4), nn.BatchNorm1d(4))
        self.register_buffer("table", torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x + self.table)


@on_stages
def test_an_error_about_dtypes_names_the_buffers_that_were_not_cast(stage: int) -> None:
    def run(rank: Rank) -> str:
        model = Table()
        _runtime = sharded(rank, model, stage=stage, policy=POLICIES[torch.bfloat16])
        with pytest.raises(RuntimeError, match="dtype") as caught:
            model(torch.ones(2, 4))
        (note,) = caught.value.__notes__
        return note

    (note,) = run_ranks(1, run)
    assert "cast to torch.bfloat16" in note
    assert "another dtype are 'table'." in note
