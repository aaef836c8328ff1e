"""Access to whole sharded parameters outside forward and backward.

Everything here is collective: all ranks of the engine call it with the same parameters. A parameter
that is split along "tp" is gathered to this rank's part. `join_split` joins the parts of all ranks
along "tp".
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from math import prod
from typing import Any

import torch
from torch import Tensor, nn

from ..base.device import version_of, without_torch_function
from ..base.errors import UsageError
from ..base.given import refuse
from ..comm.collectives import Comm, propagate_errors, scatter
from ..planner.spec import R, S
from ..planner.split import Split
from ..sharding.buffer import FlatBuffer
from ..sharding.external_params import unit_of
from ..sharding.main_weight import MasterWeight
from ..sharding.move import move
from ..sharding.param_group import ParamGroup
from ..sharding.sharded_parameter import owner_of
from .zero_init import InitShard, refuse_other_form


def groups_of(params: Iterable[nn.Parameter]) -> list[ParamGroup]:
    """Return the parameter groups that contain the parameters, each once, in the engine's order.

    Parameters that belong to no engine are ignored.

    Raises:
        UsageError: The engine of a parameter was deleted.
    """
    owners = dict.fromkeys(map(owner_of, params))
    ordered: list[ParamGroup] = []
    for group in owners:
        if not isinstance(group, ParamGroup) or group in ordered:
            continue
        runtime = group.runtime()
        if runtime is None:
            raise UsageError(
                f"parameters such as '{group.members[0].name}' belong to an engine that was "
                "deleted.",
                "Each rank holds only its slice, and only the engine can gather them.",
                "keep the engine as long as the model is used; take state_dict() before deleting "
                "it.",
            )
        ordered += [each for each in runtime.groups if each in owners]
    return ordered


def gather_full(buffer: FlatBuffer, group: ParamGroup, what: str) -> Tensor:
    """Return a copy of all elements of a weight, gradient or optimizer state, flat.

    Args:
        buffer: The flat buffer of the state, sharded or replicated.
        group: The parameter group to which the buffer belongs.
        what: The name of the state, used in error messages.

    Returns:
        A tensor of shape ``(padded_numel,)`` in the dtype of the state.

    Note:
        Collective if the state is sharded.
    """
    spec = buffer.spec.gathered()
    device = group.comm_ctx.pool.device
    full = torch.empty(group.layout.padded_numel, dtype=spec.dtype, device=device)
    if buffer.spec.placement is S:
        move(buffer, FlatBuffer(group.layout, spec, full), group.comm_ctx, what).wait()
    else:
        full.copy_(buffer.load())
    return full


def join_split(values: Tensor, split: Split, comm: Comm, what: str) -> Tensor:
    """Return a parameter's state over all ranks along "tp".

    Args:
        values: This rank's part, flat. It must not change until the function returns.
        split: How the parameter is split.
        comm: The ranks along "tp".
        what: The name of the state, used in error messages.

    Returns:
        The whole state, flat, in new memory; `values` itself if the parameter is not split.

    Note:
        Collective over `comm` if the parameter is split.
    """
    if split.kind != "split":
        return values
    shapes = [split.local_shape(coordinate) for coordinate in range(comm.size)]
    boxes = [
        values if peer == comm.rank else values.new_empty(prod(shape))
        for peer, shape in enumerate(shapes)
    ]
    comm.exchange([values] * comm.size, boxes, "gather", what).wait()
    whole = values.new_empty(split.shape)
    dim = split.dim
    for ranges, shape, box in zip(split.ranges, shapes, boxes, strict=True):
        part = box.view(shape)
        reached = 0
        for start, stop in ranges:
            end = min(stop, split.shape[dim])  # Elements after it are padding
            if start < end:
                whole.narrow(dim, start, end - start).copy_(part.narrow(dim, reached, end - start))
            reached += stop - start
    return whole.view(-1)


class GatheredParameters:
    """Context manager that gathers parameters of an engine or of `zero.Init`.

    Args:
        params: A parameter, several parameters, or a module. Parameters that are not sharded, and
            None, are ignored.
        modifier_rank: The rank whose in-place changes are broadcast to all ranks at exit. If the
            model has several parts ("tp", "pp"), its number among the ranks of a part. With None,
            parameters are only read, and a change raises on all ranks, because it would be lost.
        fwd_module: Accepted for DeepSpeed's signature; not used.
        enabled: If false, the context does nothing.

    Raises:
        UsageError: A parameter was changed and `modifier_rank` is None, its memory was replaced by
            a tensor of another shape or dtype, `modifier_rank` is no rank, or the object is entered
            inside its own block.

    Note:
        Collective at entry and at exit: every rank must enter it.
    """

    def __init__(
        self,
        params: Any,
        modifier_rank: int | None = None,
        fwd_module: Any = None,
        enabled: bool = True,
    ) -> None:
        if isinstance(params, nn.Module):
            params = list(params.parameters())
        given: Iterable[Any] = [params] if isinstance(params, Tensor | None) else params
        # None is the bias of a layer without one
        self.params: list[nn.Parameter] = [param for param in given if param is not None]
        self.modifier_rank = modifier_rank
        self.enabled = enabled
        self.groups: list[ParamGroup] = []
        self.enclosed: list[ParamGroup] = []  # groups that an outer block has gathered
        self.building: list[tuple[nn.Parameter, InitShard]] = []
        # Each group with its gathered values, and their marks if changes are refused
        self._held: list[tuple[ParamGroup, Tensor, tuple[int, ...]]] = []

    def __enter__(self) -> GatheredParameters:
        if not self.enabled:
            return self
        if self.groups or self.enclosed or self.building:
            raise UsageError(
                "a GatheredParameters object was entered inside its own block.",
                "It records the parameters of one block.",
                "create another GatheredParameters for the inner block.",
            )
        groups = groups_of(self.params)
        building = _under_construction(self.params)
        self._refuse_unknown_rank(groups, building)
        self.groups = [group for group in groups if not group.is_in_block]
        self.enclosed = [group for group in groups if group in _holders]
        self.building = building
        copies = []
        with torch.inference_mode(False), torch.no_grad():
            for param, shard in self.building:
                shard.pin_unsharded(param, watch=self.modifier_rank is None)
            for group in self.groups:
                group.is_in_block = True
                copy = gather_full(group.weight, group, group.members[0].name)
                copies.append(copy)
                buffer = FlatBuffer(group.layout, group.plan.weight.gathered(), copy)
                for member in group.members:
                    member.unshard(buffer.view(member.slot))
        _holders.update(dict.fromkeys(self.groups, self))
        self._held = [
            (group, copy, _mark(group, copy) if self.modifier_rank is None else ())
            for group, copy in zip(self.groups, copies, strict=True)
        ]
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        if not self.enabled:
            return
        try:
            if kind is None:
                with torch.no_grad():
                    self._take_over() if self.modifier_rank is not None else self._refuse_changes()
        finally:
            self._reshard(self.modifier_rank if kind is None else None)

    def discard(self) -> None:
        """Leave the context without keeping changes, as after an exception."""
        self._reshard(None)

    def _refuse_unknown_rank(
        self, groups: list[ParamGroup], building: list[tuple[nn.Parameter, InitShard]]
    ) -> None:
        """Raise UsageError if no rank is `modifier_rank`: each would keep its own changes."""
        comms = [group.comm_ctx.world for group in groups[:1]]
        comms += [shard.session.open_comm() for _, shard in building[:1]]
        for comm in comms:
            if self.modifier_rank is not None and self.modifier_rank not in range(comm.size):
                raise refuse(
                    "GatheredParameters",
                    "modifier_rank",
                    self.modifier_rank,
                    f"the rank whose changes all ranks adopt, 0 to {comm.size - 1}",
                    "name one of these ranks, or None to read the values only.",
                )

    def _take_over(self) -> None:
        assert self.modifier_rank is not None
        for group, copy, _ in self._held:
            _adopt(group, copy, self.modifier_rank)
        for group in self.enclosed:
            _holders[group]._adopt_from_inner(group, self.modifier_rank)

    def _adopt_from_inner(self, group: ParamGroup, modifier_rank: int) -> None:
        """Adopt the changes that an inner block made to one of this block's groups."""
        for number, (held, copy, mark) in enumerate(self._held):
            if held is group:
                _adopt(group, copy, modifier_rank)
                self._held[number] = group, copy, _mark(group, copy) if mark else ()

    def _refuse_changes(self) -> None:
        if self.groups:
            comm = self.groups[0].comm_ctx.world
        elif self.building:
            comm = self.building[0][1].session.open_comm()
        else:
            return
        changed = [
            ", ".join([member.name for member in group.members][:3])
            for group, copy, mark in self._held
            if _mark(group, copy) != mark
        ]
        changed += [
            shard.name_of(param) for param, shard in self.building if shard.is_changed(param)
        ]
        row = torch.tensor([len(changed)], device="cpu")
        if int(comm.all_gather_rows(row, "changes in GatheredParameters").sum()):
            where = f", among {changed[0]}." if changed else " on another rank."
            raise UsageError(
                "parameters had an in-place modification inside "
                f"GatheredParameters(modifier_rank=None){where}",
                "Each rank would keep a different change, or none.",
                "name the rank whose change counts: GatheredParameters(params, modifier_rank=0).",
            )

    def _reshard(self, winner: int | None) -> None:
        with torch.no_grad():
            for param, shard in self.building:
                shard.reshard(param, winner)
        for group in self.groups:
            group.is_in_block = False
            _holders.pop(group, None)
            runtime = group.runtime()
            if runtime is not None and group.unsharded is None:
                # A forward inside the block has used the values of the block.
                unit_of(group, runtime.units).reshard()
            for member in group.members:
                if group.is_sharded and group.unsharded is None:
                    with without_torch_function():
                        member.reshard()
                else:
                    source = group.unsharded if group.unsharded is not None else group.weight
                    member.unshard(source.view(member.slot))
        self.groups = []
        self.enclosed = []
        self.building = []
        self._held = []


# Gathered group -> the block that gathered it
_holders: weakref.WeakKeyDictionary[ParamGroup, GatheredParameters] = weakref.WeakKeyDictionary()


def _adopt(group: ParamGroup, copy: Tensor, modifier_rank: int) -> None:
    """Give all ranks the values that one rank has in its gathered copy of a group."""
    comm = group.comm_ctx.world
    if comm.rank == modifier_rank:
        with propagate_errors(comm):
            _take_replaced(group, copy)
    scatter(comm, [copy] * comm.size, copy, f"changed {group.members[0].name}", modifier_rank)
    set_full_values(group, copy)


def _under_construction(params: Iterable[nn.Parameter]) -> list[tuple[nn.Parameter, InitShard]]:
    """Return the parameters that zero.Init has cut and no engine has taken over.

    Each comes once, in an order that is the same on every rank.
    """
    found = dict[int, tuple[nn.Parameter, InitShard]]()
    for param in params:
        owner = owner_of(param)
        if isinstance(owner, InitShard) and not owner.is_in_block:
            found[owner.number] = param, owner
    return [found[number] for number in sorted(found)]


def take_changed(master: MasterWeight, changed: Tensor, weight: Tensor) -> None:
    """Copy the changed elements of a weight into its main weight.

    The caller changes the weight itself.

    Args:
        master: The main weight that receives the changed elements.
        changed: The mask of changed elements.
        weight: The new weight, flat.
    """
    values = master.buffer.write(0, master.buffer.memory.numel())
    places = changed.to(values.device)
    values[places] = 0 if master.is_split else weight[changed].to(values)


def _take_replaced(group: ParamGroup, copy: Tensor) -> None:
    """Copy members with replaced memory into the gathered copy.

    `.data = ` and `set_` replace a parameter's memory.
    """
    start = copy.data_ptr()
    step = copy.element_size()
    for member in group.members:
        param = member.param
        slot = member.slot
        if slot.numel and param.data_ptr() != start + slot.start * step:
            refuse_other_form(member.name, param.data, torch.Size(slot.shape), copy.dtype)
            copy[slot.start : slot.stop].view(slot.shape).copy_(param.data)


def _mark(group: ParamGroup, copy: Tensor) -> tuple[int, ...]:
    """Return a value that differs after the gathered copy was changed.

    In-place operations increase versions, operations on `.data` change the sum of the bits, and
    assigning `.data` changes addresses.
    """
    params = [member.param for member in group.members]
    versions = map(version_of, params)
    addresses = (param.data_ptr() for param in params)
    return int(copy.view(torch.int64).sum()), *versions, *addresses


def set_full_values(group: ParamGroup, full: Tensor) -> None:
    """Write new values of a parameter group into this rank's weight and main weight.

    Elements of the main weight whose weight does not change keep their bits.

    Args:
        group: The parameter group whose weight and main weight are overwritten.
        full: The values, flat, in the dtype of the weight.
    """
    group.guard.before_write()
    group.weight_gather.changed()
    rank = group.comm_ctx.comm.rank
    low, high = group.layout.bounds(rank)
    old = group.weight.slice_of(rank)
    mine = full[low:high].to(old.device)
    master = group.master
    if master is not None and not group.plan.master_is_weight:
        is_whole = master.placement is R
        before = group.weight.memory if is_whole else old
        after = full if is_whole else mine
        take_changed(master, before != after, after)
    if group.is_sharded:
        with group.weight.writing(0, mine.numel()) as weight:
            weight.copy_(mine)
    elif full.data_ptr() != group.weight.memory.data_ptr():
        group.weight.write(0, full.numel()).copy_(full)
