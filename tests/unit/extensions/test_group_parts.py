"""A new gradient compression or memory tier needs one class and no change of the core."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from deepseek_zero.base.capabilities import Capability
from deepseek_zero.base.mesh import Mesh
from deepseek_zero.base.work import Work
from deepseek_zero.comm.collectives import Comm
from deepseek_zero.comm.pending import Pending
from deepseek_zero.extensions.group_parts import group_parts
from deepseek_zero.extensions.state_dicts import StateDicts
from deepseek_zero.extensions.zero_init import ready_units
from deepseek_zero.optim.shard_set import ShardSet
from deepseek_zero.optim.sharded import ShardedOptimizer
from deepseek_zero.optim.step_settings import StepSettings
from deepseek_zero.planner.plan import Plan, plan_model
from deepseek_zero.planner.plan_settings import PlanSettings
from deepseek_zero.sharding.buffer import FlatBuffer
from deepseek_zero.sharding.comm_context import CommContext
from deepseek_zero.sharding.grad_reduction import GradReduction
from deepseek_zero.sharding.param_group import GroupParts
from deepseek_zero.sharding.runtime import Runtime
from deepseek_zero.sharding.wrap import MakeParts, wrap_model
from deepseek_zero.tiers.tier import COMPLETED, Storage, Tier, Tiers, TransferMeter
from tests.in_process import Rank, attach_extensions, poisoned, run_ranks
from tests.models import Gpt, batch_of, seeded
from tests.reference import OPTIMIZERS

STEPS = 3
WORLD = 2


class TopBits(GradReduction):
    """Rounds each gradient to bf16 before it is reduced."""

    def reduce(self, partial: FlatBuffer, target: FlatBuffer, what: str, *, add: bool) -> Pending:
        partial.memory.copy_(partial.memory.to(torch.bfloat16))
        return super().reduce(partial, target, what, add=add)


def with_top_bits(plan: Plan, comm: Comm, comm_ctx: CommContext) -> GroupParts:
    return replace(group_parts(plan, comm, comm_ctx), reduction=TopBits)


class Drawer(Storage):
    """A storage that keeps its elements in another tensor between uses."""

    on_device = False
    is_offloaded = True

    def __init__(self, memory: Tensor) -> None:
        super().__init__(memory)
        self.drawer = memory.clone()
        self.inside = torch.ones(memory.shape, dtype=torch.bool)
        self.moves = 0
        poisoned(memory)

    def fetch(self, low: int, high: int) -> Work:
        inside = self.inside[low:high]
        self.memory[low:high][inside] = self.drawer[low:high][inside]
        self.inside[low:high] = False
        return COMPLETED

    def read(self, low: int, high: int) -> Tensor:
        self.fetch(low, high)
        return self.memory[low:high]

    def store(self, low: int, high: int) -> Work:
        outside = ~self.inside[low:high]
        self.drawer[low:high][outside] = self.memory[low:high][outside]
        self.inside[low:high] = True
        self.moves += 1
        poisoned(self.memory[low:high])
        return COMPLETED

    def evict(self, low: int, high: int) -> None:
        self.store(low, high)


class Cupboard:
    """A memory tier of `Drawer` storages."""

    def __init__(self) -> None:
        self.traffic = TransferMeter()
        self.reserved_bytes = 0
        self.drawers: list[Drawer] = []

    def capabilities(self) -> list[Capability]:
        return []

    def check_space(self, nbytes: int, sharers: int) -> None: ...

    def reserve(
        self, numel: int, dtype: torch.dtype, chunk_numel: int, what: str, *, is_copied: bool = True
    ) -> Storage:
        self.drawers.append(Drawer(torch.zeros(numel, dtype=dtype)))
        return self.drawers[-1]

    def commit(self, sharers: int) -> None: ...

    def close(self) -> None: ...


def wrapped(
    rank: Rank, model: Gpt, tiers: Tiers, parts: MakeParts = group_parts, **settings: Any
) -> Runtime:
    here = Mesh().on_world(rank.size, rank.index)
    plan = plan_model(model, PlanSettings(persistence_numel=0, **settings), here)
    comm = rank.comm.lay_out(here)
    runtime = wrap_model(model, plan, comm, tiers, parts, ready_units)
    attach_extensions(runtime)
    StateDicts(runtime)
    return runtime


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_new_compression_of_gradients_needs_one_class(stage: int) -> None:
    def gradients(rank: Rank) -> list[Tensor]:
        model = seeded(Gpt, blocks=2)
        runtime = wrapped(rank, model, Tiers(), with_top_bits, stage=stage)
        batch = batch_of(0, 0, rank.index)
        model(batch.tokens, batch.targets).backward()
        assert all(isinstance(each.gradient.reduction, TopBits) for each in runtime.trained_groups)
        return [param.grad.full_tensor() for param in model.parameters()]

    sent = []
    for number in range(WORLD):
        model = seeded(Gpt, blocks=2)
        batch = batch_of(0, 0, number)
        model(batch.tokens, batch.targets).backward()
        sent.append([param.grad.to(torch.bfloat16).float() for param in model.parameters()])
    expected = [one + other for one, other in zip(*sent, strict=True)]
    for found in run_ranks(WORLD, gradients):
        for one, other in zip(found, expected, strict=True):
            assert torch.equal(one, other / WORLD)


@pytest.mark.parametrize("stage", [2, 3])
def test_a_new_memory_for_states_needs_one_class(stage: int) -> None:
    def train(rank: Rank, tier: Tier) -> tuple[list[Tensor], int]:
        model = seeded(Gpt, blocks=2)
        cupboard = Cupboard()
        tiers = Tiers({tier: cupboard}, chunk_numel=512)
        runtime = wrapped(rank, model, tiers, stage=stage, state_tier=tier, weight_tier=tier)
        groups = [{"params": list(model.parameters())}]
        optimizer = ShardedOptimizer(ShardSet(runtime, groups, OPTIMIZERS["adamw"], StepSettings()))
        for step in range(STEPS):
            batch = batch_of(step, 0, rank.index)
            model(batch.tokens, batch.targets).backward()
            optimizer.step()
        optimizer.finish()
        found = [value.clone() for value in model.state_dict().values()]
        return found, sum(drawer.moves for drawer in cupboard.drawers)

    plain = run_ranks(WORLD, lambda rank: train(rank, Tier.DEVICE))
    found = run_ranks(WORLD, lambda rank: train(rank, Tier.HOST))
    for (ours, moves), (theirs, no_moves) in zip(found, plain, strict=True):
        assert moves > 0 == no_moves
        assert all(map(torch.equal, ours, theirs))
