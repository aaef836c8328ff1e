"""Parameter groups are built from rank 0's values, gathered, resharded, changed and rebuilt."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from deepseek_zero.extensions.gathered_parameters import set_full_values
from deepseek_zero.planner.spec import R, S
from deepseek_zero.precision.policy import Policy
from deepseek_zero.sharding.buffer import FlatBuffer
from deepseek_zero.sharding.move import move
from deepseek_zero.sharding.param_group import ParamGroup
from deepseek_zero.sharding.regroup import promote, relayout
from deepseek_zero.sharding.sharded_parameter import ShardedParameter
from deepseek_zero.sharding.whole_values import main_values, restore_params
from tests.in_process import CPU, Rank, build_one, run_ranks
from tests.models import Odd

SIZES = (1, 2, 3, 4)
BF16 = Policy(torch.bfloat16)
on_ranks = pytest.mark.parametrize("size", SIZES)


def built(rank: Rank, stage: int, policy: Policy | None = None) -> ParamGroup:
    """Return the only parameter group of a model with different initial values on each rank."""
    return build_one(rank, Odd(seed=rank.index), stage=stage, policy=policy or Policy())


def shown(group: ParamGroup) -> dict[str, Tensor]:
    """Return the current values of the parameters."""
    return {member.name: member.param.detach().clone() for member in group.members}


def gathered(group: ParamGroup) -> dict[str, Tensor]:
    """Gather and return all values, then reshard."""
    group.gather("it").wait()
    group.point_to_unsharded()
    found = shown(group)
    group.reshard()
    return found


def masters(group: ParamGroup) -> Tensor:
    """Return the whole main weights of all ranks in fp32."""
    source = main_values(group.master)
    full = FlatBuffer.empty(group.layout, type(source.spec)(R, source.spec.dtype), CPU)
    move(source, full, group.comm_ctx, "masters").wait()
    return torch.cat([full.view(slot).reshape(-1) for slot in group.layout.slots])


def flat(values: dict[str, Tensor]) -> Tensor:
    return torch.cat([each.reshape(-1) for each in values.values()])


def same(left: dict[str, Tensor], right: dict[str, Tensor]) -> bool:
    return left.keys() == right.keys() and all(
        torch.equal(left[name], right[name]) for name in left
    )


def everywhere(size: int, body: Callable[[Rank], Any]) -> None:
    """Run with ranks in order, in other orders, and with reads from each other's memory."""
    run_ranks(size, body)
    run_ranks(size, body, seed=1)
    run_ranks(size, body, seed=2, reads_in_place=True)


def of_slots(group: ParamGroup, whole: Tensor) -> Tensor:
    """Return the elements of a whole flat buffer without padding, in order of parameters."""
    return torch.cat([whole[slot.start : slot.stop] for slot in group.layout.slots])


FIRST = {name: value.detach() for name, value in Odd(seed=0).named_parameters()}


@on_ranks
@pytest.mark.parametrize("stage", range(4))
def test_every_rank_gets_the_values_of_the_first(stage: int, size: int) -> None:
    def body(rank: Rank) -> None:
        group = built(rank, stage)
        held = group.layout.padded_numel // (size if stage == 3 else 1)
        assert group.weight.memory.numel() == held
        assert same(gathered(group) if stage == 3 else shown(group), FIRST)
        assert (
            sum(each.nbytes for each in group.comm_ctx.pool.idle())
            == group.comm_ctx.pool.allocated_bytes
        )

    everywhere(size, body)


@on_ranks
def test_a_gather_makes_the_weights_available_and_a_release_removes_them(size: int) -> None:
    def body(rank: Rank) -> None:
        group = built(rank, stage=3)
        pool, params = group.comm_ctx.pool, [member.param for member in group.members]
        before = None
        for _ in range(3):
            assert all(type(param) is ShardedParameter for param in params)
            assert group.unsharded is None
            pending = group.gather("it")
            group.gather("it").wait()  # a gathered group is not gathered again
            pending.wait()
            group.point_to_unsharded()
            assert all(type(param) is nn.Parameter for param in params)
            assert same(shown(group), FIRST)
            group.reshard()
            group.reshard()
            assert before in (None, pool.allocated_bytes), "the steady state allocates nothing"
            before = pool.allocated_bytes
        assert rank.issued("engine 0/gather").count("gather it") == (3 if size > 1 else 0)
        assert tuple(params[0].shape) == (701, 3)

    everywhere(size, body)


def test_a_released_buffer_is_reused_unless_a_view_of_it_exists() -> None:
    def body(rank: Rank) -> None:
        group = built(rank, stage=3)
        pool, numel = group.comm_ctx.pool, group.layout.padded_numel
        gathered(group)
        assert [each.numel() for each in pool.idle()].count(numel) == 1
        group.gather("it").wait()
        kept = group.unsharded.memory[:5]
        assert [each.numel() for each in pool.idle()].count(numel) == 0
        group.reshard()
        assert [each.numel() for each in pool.idle()].count(numel) == 0
        values = kept.clone()
        gathered(group)
        assert torch.equal(kept, values)

    run_ranks(2, body)


@on_ranks
@pytest.mark.parametrize("stage", range(4))
@pytest.mark.parametrize("policy", [Policy(), BF16], ids=["fp32", "bf16"])
def test_new_whole_values_reach_weight_and_master(policy: Policy, stage: int, size: int) -> None:
    """An unchanged element keeps its main weight, a changed one takes the new value."""

    def body(rank: Rank) -> None:
        group = built(rank, stage, policy)
        exact = masters(group)
        assert torch.equal(exact, flat(FIRST))
        group.gather("it").wait()
        whole = (group.unsharded or group.weight).memory.clone()
        group.reshard()
        slot = group.layout.slots[1]
        whole[slot.start : slot.stop] = 77.0
        set_full_values(group, whole)
        expected = torch.cat(
            [
                torch.full((1999,), 77.0) if name == "b" else FIRST[name].reshape(-1)
                for name in FIRST
            ]
        )
        assert torch.equal(masters(group), expected)
        now = gathered(group) if stage == 3 else shown(group)
        assert now["b"].eq(77.0).all()
        assert torch.equal(flat(now), of_slots(group, whole))

    everywhere(size, body)


@on_ranks
@pytest.mark.parametrize("stage", range(4))
def test_one_parameter_is_written_on_all_ranks(stage: int, size: int) -> None:
    def body(rank: Rank) -> None:
        group = built(rank, stage, BF16)
        value = torch.linspace(-1, 1, 1999)
        group.write_param(group.members[1].param, value)
        assert torch.equal(masters(group)[2103:4102], value)
        now = gathered(group) if stage == 3 else shown(group)
        assert torch.allclose(now["b"].float(), value, atol=0.01)

    everywhere(size, body)


@on_ranks
@pytest.mark.parametrize("stage", (1, 2))
def test_a_refresh_sends_the_updated_slices_to_every_rank(stage: int, size: int) -> None:
    def body(rank: Rank) -> None:
        group = built(rank, stage)
        group.weight.slice_of(rank.index).add_(rank.index + 1.0)
        group.refresh("it").wait()
        owner = torch.arange(group.layout.padded_numel) // group.layout.slice_numel + 1.0
        assert torch.equal(flat(shown(group)), flat(FIRST) + of_slots(group, owner))

    everywhere(size, body)


@on_ranks
@pytest.mark.parametrize("stage", (1, 2, 3))
@pytest.mark.parametrize("policy", [Policy(), BF16], ids=["fp32", "bf16"])
def test_a_new_layout_keeps_the_bits(policy: Policy, stage: int, size: int) -> None:
    def body(rank: Rank) -> None:
        group = built(rank, stage, policy)
        before = gathered(group) if stage == 3 else shown(group)
        relayout(group, "tensor")
        for slot in group.layout.slots:
            assert (
                sum(
                    start < stop
                    for start, stop in (group.layout.owned(slot, r) for r in range(size))
                )
                <= 1
            )
        assert torch.equal(masters(group), flat(FIRST))
        assert same(gathered(group) if stage == 3 else shown(group), before)
        relayout(group, "element")
        assert torch.equal(masters(group), flat(FIRST))
        assert same(gathered(group) if stage == 3 else shown(group), before)

    everywhere(size, body)


@on_ranks
@pytest.mark.parametrize("stage", range(4))
def test_a_released_group_leaves_plain_parameters_with_the_main_weights_values(
    stage: int, size: int
) -> None:
    def body(rank: Rank) -> None:
        group = built(rank, stage, BF16)
        restore_params(group)
        assert all(type(member.param) is nn.Parameter for member in group.members)
        assert same(shown(group), FIRST)

    everywhere(size, body)


@on_ranks
@pytest.mark.parametrize("stage", range(4))
def test_a_group_that_is_promoted_computes_in_fp32_from_its_masters(stage: int, size: int) -> None:
    def body(rank: Rank) -> None:
        group = built(rank, stage, BF16)
        assert all(
            each.dtype is torch.bfloat16
            for each in (gathered(group) if stage == 3 else shown(group)).values()
        )
        promote(group, "it", to_fp32=True)
        assert same(gathered(group) if stage == 3 else shown(group), FIRST)
        assert torch.equal(masters(group), flat(FIRST))

    everywhere(size, body)


@on_ranks
@pytest.mark.parametrize("stage", range(4))
@pytest.mark.parametrize(
    "policy", [BF16, Policy(torch.bfloat16, master="fp32"), Policy(torch.float16)], ids=str
)
def test_a_demoted_group_equals_its_original_state(policy: Policy, stage: int, size: int) -> None:
    def body(rank: Rank) -> None:
        group = built(rank, stage, policy)
        planned, before = group.planned, gathered(group) if stage == 3 else shown(group)
        promote(group, "it", to_fp32=True)
        promote(group, "it", to_fp32=False)
        assert group.planned == planned
        assert same(gathered(group) if stage == 3 else shown(group), before)
        assert torch.equal(masters(group), flat(FIRST))
        promote(group, "it", to_fp32=False)
        assert group.planned == planned

    run_ranks(size, body)
    run_ranks(size, body, seed=2, reads_in_place=True)


@on_ranks
def test_weights_are_a_column_of_the_table(size: int) -> None:
    def body(rank: Rank) -> list[Any]:
        return [built(rank, stage).plan.weight.placement for stage in range(4)]

    assert run_ranks(size, body) == [[R, R, R, S]] * size
