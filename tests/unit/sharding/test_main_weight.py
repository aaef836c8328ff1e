"""Main weights are read and written in the same manner in every storage format."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from deepseek_zero.extensions.gathered_parameters import take_changed
from deepseek_zero.planner.layout import even_layout
from deepseek_zero.planner.spec import Placement, R, S, Spec
from deepseek_zero.precision.policy import cast_master
from deepseek_zero.sharding.buffer import FlatBuffer
from deepseek_zero.sharding.main_weight import MasterWeight
from deepseek_zero.sharding.param_ranges import local_range, owned_range, write_main
from deepseek_zero.sharding.split_main_weight import SplitMasterWeight
from deepseek_zero.sharding.whole_values import main_values

LAYOUT = even_layout(["a", "b", "c"], [(700,), (900,), (300, 2)], 2)  # both ranks have a part of b
RANK = 1


def master_of(kind: str, placement: Placement, values: Tensor) -> MasterWeight:
    dtype = torch.int16 if kind == "split" else torch.float32
    buffer = FlatBuffer.empty(LAYOUT, Spec(placement, dtype), torch.device("cpu"))
    master = MasterWeight(buffer, torch.float32)
    if kind == "split":
        weight = FlatBuffer.empty(LAYOUT, Spec(placement, torch.bfloat16), torch.device("cpu"))
        master = SplitMasterWeight(buffer, torch.float32, weight)
    write_main(master, 0, values)
    return master


def values_of(placement: Placement) -> Tensor:
    numel = Spec(placement, torch.float32).numel(LAYOUT.padded_numel, 2)
    return torch.randn(numel, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("kind", ["split", "whole"])
@pytest.mark.parametrize("placement", [R, S])
def test_written_values_are_read_back_and_the_callers_are_unchanged(
    kind: str, placement: Placement
) -> None:
    values = values_of(placement)
    before = values.clone()
    master = master_of(kind, placement, values)
    assert torch.equal(values, before)
    assert torch.equal(master.read(0, values.numel()), values)
    assert torch.equal(main_values(master).memory, values)
    assert main_values(master).spec == Spec(placement, torch.float32)
    assert (master.in_place_view(3, 5) is None) == master.is_split == (kind == "split")
    write_main(master, 100, torch.tensor([1.0, 2.0, 1e-42]))
    assert master.read(99, 104).tolist() == [values[99], 1.0, 2.0, torch.tensor(1e-42), values[103]]


def test_a_split_master_keeps_its_weight_rounded() -> None:
    values = values_of(S)
    master, expected = (
        master_of("split", S, values),
        torch.empty(values.numel(), dtype=torch.bfloat16),
    )
    cast_master(values, expected)
    assert master.weight is not None and torch.equal(master.weight.memory, expected)


@pytest.mark.parametrize("kind", ["split", "whole"])
def test_a_new_weight_is_adopted_if_it_differs(kind: str) -> None:
    values = values_of(S)
    master = master_of(kind, S, values)
    old = torch.empty(values.numel(), dtype=torch.bfloat16)
    cast_master(values, old)
    new = old.clone()
    new[7] = 3.0
    take_changed(master, old != new, new)
    if master.weight is not None:
        master.weight.memory.copy_(new)
    found = master.read(0, values.numel())
    assert found[7] == 3.0
    found[7] = values[7]
    assert torch.equal(found, values)


def test_places_count_from_the_beginning_of_this_ranks_part() -> None:
    low = LAYOUT.bounds(RANK)[0]
    whole, part = (master_of("split", placement, values_of(placement)) for placement in (R, S))
    for slot in LAYOUT.slots:
        assert local_range(whole.buffer, slot, RANK) == (0, slot.numel, slot.start)
        start, stop, place = local_range(part.buffer, slot, RANK)
        assert owned_range(part.buffer, slot, RANK) == (place, place + stop - start)
        if start < stop:
            assert slot.start + start == low + place
            assert owned_range(whole.buffer, slot, RANK) == (
                low + place,
                low + place + stop - start,
            )
        else:
            assert slot.stop <= low
