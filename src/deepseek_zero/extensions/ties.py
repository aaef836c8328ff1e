"""Checks and ties a model's parameters before the model is sharded.

Two Parameters over one storage (`b.weight = nn.Parameter(a.weight.data)`) are tied through their
memory. Sharding copies values into flat buffers, which would silently untie them. Parameters that
are the same view of one memory therefore become one Parameter. Partial overlaps, complex numbers
and parameters of another engine raise an error.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..base.errors import NotBuiltError, UsageError
from ..optim.param_groups import TIED_TO
from ..sharding.sharded_parameter import ShardedParameter, owner_of


@dataclass(frozen=True)
class Place:
    """The address range [start, stop) that a parameter or buffer occupies in memory.

    Attributes:
        name: The name in the model.
        tensor: The parameter or buffer.
        start: The address of the first byte.
        stop: The end of the range.
    """

    name: str
    tensor: Tensor
    start: int
    stop: int

    @property
    def view(self) -> tuple[Any, ...]:
        """A key that is equal for two tensors with the same memory, shape and strides."""
        return self.start, self.tensor.dtype, tuple(self.tensor.shape), self.tensor.stride()

    def is_parameter(self) -> bool:
        """Return whether the tensor is a parameter."""
        return isinstance(self.tensor, nn.Parameter)


def refuse_owned(model: nn.Module, split: str | None = None) -> None:
    """Raise an error if a parameter belongs to an engine or, with `split`, to `zero.Init`.

    Args:
        model: The model whose parameters are checked, before it is sharded.
        split: The mesh axis over which the model will be split; None without one.

    Raises:
        UsageError: A parameter already belongs to an engine.
        NotBuiltError: The model was built under zero.Init and `split` is not None.
    """
    for name, param in model.named_parameters():
        owner = owner_of(param)
        if owner is not None and owner.is_in_engine():
            raise UsageError(
                f"parameter '{name}' already belongs to an engine.",
                "A parameter lives in one engine at a time.",
                "call destroy() on the first engine, or build the second from its own copy of the "
                "model.",
            )
        if owner is not None and split is not None:
            raise NotBuiltError(
                f"a model built under zero.Init is not split over mesh axis {split}.",
                "Its parameters are slices of whole ones, and the split would need other slices.",
                "build it without zero.Init; initialize() leaves each rank its own part, in "
                "slices.",
            )


def refuse_modules(model: nn.Module) -> None:
    """Raise if a module cannot be wrapped, before anything changes.

    Args:
        model: The model whose modules are checked, before it is sharded.

    Raises:
        UsageError: The model was compiled by `torch.jit.script`, or a lazy module has no parameters
            yet.
    """
    if isinstance(model, torch.jit.ScriptModule):
        raise UsageError(
            "the model was compiled by torch.jit.script.",
            "Scripted modules accept no hooks, which gather the weights and save them.",
            "pass the model as it was before torch.jit.script; its submodules may be scripted.",
        )
    for name, param in model.named_parameters():
        if nn.parameter.is_lazy(param):
            raise UsageError(
                f"parameter '{name}' of a lazy module has no shape yet.",
                "The plan of a run needs the shapes of all parameters.",
                "call the model once with a batch before you wrap it, on every rank.",
            )


def tie_shared(model: nn.Module, known: Iterable[nn.Parameter] = ()) -> None:
    """Replace parameters with the same memory, shape and strides by one parameter.

    The first in the model's order stays. Parameters on the meta device share no memory. Errors are
    raised before anything changes.

    Args:
        model: The model whose parameters are checked, before it is sharded.
        known: Parameters outside the model that come before its own.

    Raises:
        UsageError: A parameter is complex, parameters share a part of their memory, or only one of
            two tied parameters is frozen.
    """
    for name, param in model.named_parameters():
        if param.dtype.is_complex:  # sums, main weights and moments are real numbers
            raise UsageError(
                f"parameter '{name}' holds complex numbers "
                f"({str(param.dtype).removeprefix('torch.')}).",
                "Gradients are added, and masters and moments kept, as real numbers: imaginary "
                "parts would be lost.",
                "hold real and imaginary parts, nn.Parameter(torch.view_as_real(value)), and use "
                "torch.view_as_complex(parameter) in forward; a constant may be a buffer.",
            )
    one: dict[int, nn.Parameter] = {}
    named = [
        (f"a parameter of shape {tuple(param.shape)} that was built before", param)
        for param in known
    ]
    tensors = (*named, *model.named_parameters(), *model.named_buffers())
    places = [place for name, tensor in tensors for place in _place(name, tensor)]
    for together in _overlapping(places):
        views: dict[tuple[Any, ...], Place] = {}
        for place in filter(Place.is_parameter, together):
            first = views.setdefault(place.view, place)
            if first.tensor is place.tensor:
                continue
            if first.tensor.requires_grad != place.tensor.requires_grad:
                raise UsageError(
                    f"'{first.name}' and '{place.name}' are one memory, and one of them is frozen.",
                    "The other's updates would move it.",
                    "freeze both, or give one its own values: "
                    "nn.Parameter(weight.detach().clone()).",
                )
            assert isinstance(first.tensor, nn.Parameter)
            one[id(place.tensor)] = first.tensor
        if views:
            _refuse_overlaps(
                [*views.values(), *(place for place in together if not place.is_parameter())]
            )
    for module in model.modules() if one else ():
        for name, param in list(module.named_parameters(recurse=False, remove_duplicate=False)):
            if id(param) in one:
                param.__dict__[TIED_TO] = one[id(param)]
                setattr(module, name, one[id(param)])


def _place(name: str, tensor: Tensor) -> Iterator[Place]:
    if (
        isinstance(tensor, ShardedParameter)
        or tensor.is_meta
        or tensor.layout is not torch.strided
        or not tensor.numel()
    ):
        return
    if start := tensor.data_ptr():
        last = sum(
            (size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)
        )
        yield Place(name, tensor, start, start + (last + 1) * tensor.element_size())


def _overlapping(places: Sequence[Place]) -> Iterator[list[Place]]:
    """Yield clusters of places whose byte ranges overlap, each in the given order."""
    order = {id(place): number for number, place in enumerate(places)}
    clusters: list[list[Place]] = []
    end = (torch.device("meta"), 0)
    for place in sorted(places, key=lambda each: (str(each.tensor.device), each.start)):
        if place.tensor.device == end[0] and place.start < end[1]:
            clusters[-1].append(place)
            end = end[0], max(end[1], place.stop)
        else:
            clusters.append([place])
            end = place.tensor.device, place.stop
    for cluster in clusters:
        if len(cluster) > 1:
            yield sorted(cluster, key=lambda each: order[id(each)])


def _refuse_overlaps(places: Sequence[Place]) -> None:
    """Raise UsageError if a parameter shares a byte with another place.

    Columns of one matrix share none. Parameters must come first; buffers, which follow, may overlap
    each other.
    """
    if len(places) < 2:
        return
    low = min(place.start for place in places)
    high = max(place.stop for place in places)
    owner = torch.full((high - low,), -1, dtype=torch.int32, device="cpu")
    for number, place in enumerate(places):
        size = place.tensor.element_size()
        strides = (*(stride * size for stride in place.tensor.stride()), 1)
        mine = owner.as_strided((*place.tensor.shape, size), strides, place.start - low)
        if int(mine.max()) >= 0:
            raise _partly(places[int(mine.max())], place)
        if place.is_parameter():
            mine.fill_(number)


def _partly(first: Place, other: Place) -> UsageError:
    what = "share memory and are not the same tensor of it"
    if not other.is_parameter():
        what = "share memory, and one of them is a buffer"
    return UsageError(
        f"'{first.name}' and '{other.name}' {what}.",
        "Each parameter gets its place in a flat buffer, so that a change of one would no longer "
        "reach the other.",
        "make one parameter of them and cut it in forward, or give one its own values: "
        "nn.Parameter(weight.detach().clone()).",
    )
