"""A layout in which no parameter is cut, for optimizers that need whole tensors."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from .layout import BLOCK, FlatLayout, Shape, Slot, even_layout


def whole_layout(
    names: Sequence[str], shapes: Sequence[Shape], ranks: int, block: int = BLOCK
) -> FlatLayout:
    """Lay out parameters so that none is cut between ranks.

    Some optimizers need whole matrices or norms. The largest parameter goes to the rank with the
    fewest elements so far. Slices are padded to the fullest rank.

    Args:
        names: The names of the parameters.
        shapes: Their shapes.
        ranks: The number of slices.
        block: The length of a slice is a multiple of this many elements.
    """
    loads = [0] * ranks
    place: dict[int, tuple[int, int]] = {}
    order = sorted(range(len(names)), key=lambda index: (-prod(shapes[index]), index))
    for index in order:
        rank = min(range(ranks), key=lambda candidate: (loads[candidate], candidate))
        place[index] = (rank, loads[rank])
        loads[rank] += prod(shapes[index])
    slice_numel = -(-max(loads, default=0) // block) * block
    slots = [
        Slot(name, tuple(shape), place[index][0] * slice_numel + place[index][1])
        for index, (name, shape) in enumerate(zip(names, shapes, strict=True))
    ]
    return FlatLayout(tuple(slots), slice_numel, ranks)


LAYOUTS = {"element": even_layout, "tensor": whole_layout}
