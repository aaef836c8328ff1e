"""List the engine states that this rank saves, each with a function that reads it.

The module writes no file, and copies nothing before it is read.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from math import prod
from typing import Any
from zlib import crc32

import torch
from torch import Tensor
from torch.optim import Optimizer

from ..base.errors import CheckpointError
from ..base.nested import inner_tensors, is_subclass
from ..optim.master_shard import MasterShard
from ..optim.param_overlap import ParamOverlap, overlaps_of, rank_of
from ..optim.sharded import ShardedOptimizer
from ..optim.tile_memory import StorageRange
from ..planner.extras import feedback_of
from ..planner.spec import R
from ..sharding.buffer import FlatBuffer
from ..sharding.grad_sum import GradSum
from ..sharding.param_group import ParamGroup
from ..sharding.param_info import ParamInfo
from ..sharding.param_ranges import owned_range
from ..tiers.tier import Storage
from .contents import Contents
from .format import INNER, MOMENT, OWN, REPLICA, WEIGHT, WHOLE, SavedChunk, decode, encode
from .numpy_values import Plain, with_python_numbers
from .piece import ModelPiece
from .safetensors_file import dtype_name, dtype_named


def exact_dtype(group: ParamGroup) -> torch.dtype:
    """Return the dtype of the most precise form of a group's weights.

    It is the main weight's dtype if there is one.
    """
    return group.master.dtype if group.master is not None else group.weight.spec.dtype


def exact_storages(group: ParamGroup) -> list[Storage]:
    """Return the storages outside the device that contain the most precise weights."""
    if group.master is not None:
        return group.master.offloaded()
    return [] if group.weight.storage.on_device else [group.weight.storage]


ReadRange = Callable[[int, int], Tensor]  # returns the flat elements [low, high)
ReadMoment = Callable[[MasterShard, str], Tensor]


@dataclass(frozen=True)
class Source:
    """A buffer of a group, the dtype in which it is saved, and a function that reads it."""

    buffer: FlatBuffer
    dtype: torch.dtype
    read: ReadRange


@dataclass(eq=False)
class WriteItem:
    """A chunk that this rank writes.

    Attributes:
        chunk: Describes the elements.
        dtype: Their dtype.
        shape: Their shape in the file.
        read: A function that returns the flat elements [low, high) of the chunk, valid until the
            next call.
        group: The parameter group whose update changes them; None if no update does.
    """

    chunk: SavedChunk
    dtype: torch.dtype
    shape: tuple[int, ...]
    read: ReadRange
    group: ParamGroup | None = None

    @property
    def numel(self) -> int:
        """Return the number of elements."""
        return prod(self.shape)


@dataclass
class WriteGroup:
    """Checkpoint items that are written together, and the state ranges to prefetch for them."""

    items: list[WriteItem]
    ranges: list[StorageRange] = field(default_factory=list)


def write_groups(
    contents: Contents, *, skip_frozen: bool, elsewhere: Collection[str] = ()
) -> Iterator[WriteGroup]:
    """Yield this rank's items of weights and optimizer states in update order.

    Each element of the model is in exactly one item over all ranks. If several ranks have the same
    slice or the same part along "tp", the first one writes it.

    Args:
        contents: The states to save.
        skip_frozen: Whether to omit parameters that are not trained.
        elsewhere: Names of parameters that an earlier stage writes.

    Returns:
        An iterator over groups of items, which are written in this order.
    """
    runtime = contents.runtime
    optimizer = contents.optimizer
    chunks = Chunks(ModelPiece.of(runtime), runtime.comm.whole.rank, frozenset(elsewhere))
    yield from (_own_items(group, chunks) for group in runtime.trained_groups)
    if runtime.comm_ctx.outer is not None and runtime.comm_ctx.outer.comm.rank > 0:
        return  # the first replica writes the same

    @lru_cache(maxsize=1)  # parameters of one shard request the same moment one after another
    def read_moment(shard: MasterShard, key: str) -> Tensor:
        assert optimizer is not None
        return optimizer.moments.read(shard, key).reshape(-1)

    shards = optimizer.shards() if optimizer is not None else []
    for group in runtime.groups:
        if group.trainable or not skip_frozen:
            yield _weight_items(group, chunks)
        for shard in shards:
            if optimizer is not None and shard.group is group:
                yield _moment_items(optimizer, shard, chunks, read_moment)
        for kept in group.gradient.kept.values() if group.trainable else ():
            yield _kept_gradient_items(group, kept, chunks)


@dataclass(frozen=True)
class Chunks:
    """Create the chunks of this rank, with names and parts of the whole model.

    Attributes:
        piece: Relates local parameters to the whole model.
        rank: Global rank whose file has the chunks.
        elsewhere: Names of parameters that an earlier stage writes.
    """

    piece: ModelPiece
    rank: int
    elsewhere: frozenset[str]

    def of(self, kind: str, member: ParamInfo, key: str, start: int, stop: int) -> SavedChunk:
        """Return the chunk for elements [start, stop) of a local parameter.

        Args:
            kind: Kind of state, for example "weight", "buffer" or "moment".
            member: Parameter of this rank's model.
            key: The optimizer's name of the state.
            start: First element.
            stop: Index after the last element of the range.

        Returns:
            The description of the range, which the manifest stores.
        """
        saved = self.piece.range_of(kind, member, key, start, stop)
        return SavedChunk(**vars(saved), rank=self.rank)

    def are_written(self, group: ParamGroup, member: ParamInfo) -> bool:
        """Return whether this rank's piece writes the states of a parameter.

        It does not if another rank along "tp" has the same states, or if an earlier stage has a
        parameter that is tied to it.

        Args:
            group: Parameter group of this rank.
            member: Parameter of the group.

        Returns:
            False if another rank writes the same elements.
        """
        return group.planned.is_counted and self.piece.name(member) not in self.elsewhere


def _owned_items(
    group: ParamGroup, kind: str, source: Source, chunks: Chunks, absent: Collection[int] = ()
) -> list[WriteItem]:
    """List this rank's slice of each parameter of a group, in update order.

    The elements come from `source`. Parameters whose numbers are in `absent` are omitted.
    """
    rank = group.comm_ctx.comm.rank
    found = []
    for number, member in enumerate(group.members):
        start, stop = group.layout.owned(member.slot, rank)
        if start < stop and number not in absent and chunks.are_written(group, member):
            low = member.slot.start
            chunk = chunks.of(kind, member, "", start - low, stop - low)
            read = partial(
                _read_from, source.read, owned_range(source.buffer, member.slot, rank)[0]
            )
            found.append(WriteItem(chunk, source.dtype, (stop - start,), read, group))
    return found


def _weight_items(group: ParamGroup, chunks: Chunks) -> WriteGroup:
    """List this rank's slice of a group's weights, even if every rank has all of them."""
    weight = Source(group.weight, group.weight.spec.dtype, group.weight.read_now)
    master = group.master
    exact = weight if master is None else Source(master.buffer, master.dtype, master.read_now)
    write_group = WriteGroup(_owned_items(group, WEIGHT, exact, chunks))
    if group.plan.weight_is_independent:
        write_group.items += _owned_items(group, REPLICA, weight, chunks)
    rank = group.comm_ctx.comm.rank
    spans = [
        owned_range(exact.buffer, member.slot, rank)
        for member in group.members
        if chunks.are_written(group, member)
    ]
    spans = [(low, high) for low, high in spans if low < high]
    if spans:
        write_group.ranges = [
            StorageRange(storage, spans[0][0], spans[-1][1], changes=False)
            for storage in exact_storages(group)
        ]
    return write_group


def _read_from(read: ReadRange, place: int, low: int, high: int) -> Tensor:
    return read(place + low, place + high)


def _kept_gradient_items(group: ParamGroup, kept: GradSum, chunks: Chunks) -> WriteGroup:
    """List this rank's slice of a gradient that a later update needs."""
    buffer = kept.buffer
    if not kept.is_full or buffer is None:
        return WriteGroup([])
    source = Source(buffer, buffer.spec.dtype, buffer.read_now)
    items = _owned_items(group, kept.saved_as, source, chunks, kept.absent or ())
    if not items or buffer.storage.on_device:
        return WriteGroup(items)
    numel = buffer.memory.numel()
    return WriteGroup(items, [StorageRange(buffer.storage, 0, numel, changes=False)])


def _own_items(group: ParamGroup, chunks: Chunks) -> WriteGroup:
    """List the group states that belong to this rank only, such as error feedback."""
    name, lies = place_of(group, chunks.piece)
    return WriteGroup(
        [
            _whole_item(
                SavedChunk(OWN, name, f"{state} {lies}", 0, memory.numel(), chunks.rank),
                memory,
                group,
            )
            for state, memory in group.gradient.reduction.own_states().items()
        ]
    )


def _whole_item(chunk: SavedChunk, value: Tensor, group: ParamGroup | None = None) -> WriteItem:
    """Return the item of a tensor that is saved whole, in its own shape."""
    flat = value.reshape(-1)
    return WriteItem(
        chunk, value.dtype, tuple(value.shape), lambda low, high: flat[low:high], group
    )


def place_of(group: ParamGroup, piece: ModelPiece) -> tuple[str, str]:
    """Return the name and layout checksum under which a rank's own states are saved.

    Args:
        group: Parameter group of this rank.
        piece: Relates its parameters to the whole model.

    Returns:
        The name of the group's first parameter, and a checksum of the group's layout.
    """
    planned = group.planned
    lies = f"{planned.layout} {planned.near} {planned.predivide} {feedback_of(planned.plan)}"
    return piece.name(group.members[0]), f"{crc32(lies.encode()):08x}"


def _moment_items(
    optimizer: ShardedOptimizer, shard: MasterShard, chunks: Chunks, read: ReadMoment
) -> WriteGroup:
    """List this rank's slice of every optimizer state of a shard that has elements."""
    ranges = [replace(each, changes=False) for each in optimizer.moments.storage_ranges(shard)]
    write_group = WriteGroup([], ranges)
    group = shard.group
    for key, value in optimizer.inner.state.get(shard.param, {}).items():
        if not isinstance(value, Tensor) or is_scalar_state(value, shard.param):
            continue
        for overlap in overlaps_of(shard):
            if not chunks.are_written(group, group.members[overlap.number]):
                continue
            if is_subclass(value):
                for name, inner in inner_tensors(value).items():
                    write_group.items += _whole_state_items(
                        overlap, f"{key}{INNER}{name}", inner, chunks
                    )
            elif value.shape == shard.param.shape:
                read_key = partial(read, shard, key)
                write_group.items += _owned_moment_items(
                    overlap, key, value.dtype, chunks, read_key
                )
            else:
                write_group.items += _whole_state_items(overlap, key, value, chunks)
    return write_group


def is_scalar_state(value: Tensor, param: Tensor) -> bool:
    """Return whether an optimizer state is a counter such as `step`.

    Args:
        value: Optimizer state to classify.
        param: Parameter to which the state belongs.

    Returns:
        True for a 0-dim tensor, if the parameter has at least one dimension.
    """
    return value.dim() == 0 and param.dim() > 0


def _owned_moment_items(
    overlap: ParamOverlap,
    key: str,
    dtype: torch.dtype,
    chunks: Chunks,
    read: Callable[[], Tensor],
) -> Iterator[WriteItem]:
    """Yield the slice of a moment that this rank would own if it were sharded.

    At stage 0 every rank has the whole moment. `read` returns the moment of the whole shard.
    """
    shard = overlap.shard
    low, high = shard.group.layout.owned(overlap.slot, rank_of(shard))
    start = max(overlap.start, low - overlap.slot.start)
    stop = min(overlap.stop, high - overlap.slot.start)
    if start < stop:
        at = overlap.offset + start - overlap.start
        chunk = chunks.of(MOMENT, shard.group.members[overlap.number], key, start, stop)
        yield WriteItem(
            chunk,
            dtype,
            (stop - start,),
            lambda low, high: read()[at + low : at + high],
            shard.group,
        )


def _whole_state_items(
    overlap: ParamOverlap, key: str, value: Tensor, chunks: Chunks
) -> Iterator[WriteItem]:
    """Yield a state with its own shape on the rank that owns the first element.

    Raises CheckpointError if the shard has only part of the parameter.
    """
    if overlap.stop - overlap.start != overlap.slot.numel:
        raise CheckpointError(
            f"optimizer state '{key}' of '{overlap.slot.name}' has shape {tuple(value.shape)} over "
            "part of it.",
            "Only whole parameters can have a state of another shape.",
            'give the optimizer class the attribute granularity = "tensor".',
        )
    group = overlap.shard.group
    low, high = group.layout.bounds(rank_of(overlap.shard))
    replicated = group.master is not None and group.master.placement is R
    if not replicated or low <= overlap.slot.start < high:
        chunk = chunks.of(WHOLE, group.members[overlap.number], key, 0, value.numel())
        yield _whole_item(chunk, value, group)


def optimizer_scalars(optimizer: ShardedOptimizer) -> dict[str, Plain]:
    """Return the optimizer states without elements by parameter name.

    Returns:
        A mapping such as ``{name: {"step": {"value": 3.0, "dtype": "float32"}}}``.

    Raises:
        CheckpointError: A state is neither a plain value nor a tensor.
    """
    names = ModelPiece.of(optimizer.runtime).names
    found = dict[str, Plain]()
    for shard in optimizer.shards():
        for key, value in optimizer.inner.state.get(shard.param, {}).items():
            if isinstance(value, Tensor) and not is_scalar_state(value, shard.param):
                continue
            number = saved_scalar(value)
            if number is None:
                raise _unstorable(key, value, shard.names[0])
            for name in shard.names:
                found.setdefault(names.get(name, name), {})[key] = number
    return found


def saved_scalar(value: Any) -> Plain | None:
    """Return a number of an optimizer in the form that a manifest stores.

    Args:
        value: A tensor with one element, a plain value, or any other object.

    Returns:
        A dict with the keys "value" and "dtype"; None if a manifest cannot store the value.
    """
    if isinstance(value, Tensor):
        return {"value": encode(value.item(), "", {}), "dtype": dtype_name(value.dtype)}
    if value is None or isinstance(value, (bool, int, float, str)):
        return {"value": encode(with_python_numbers(value), "", {}), "dtype": None}
    return None


def scalar_value(saved: Plain) -> Any:
    """Return the number that `saved_scalar` converted."""
    value = decode(saved["value"], {})
    if saved["dtype"] is None:
        return value
    return torch.tensor(value, dtype=dtype_named(saved["dtype"]), device="cpu")


def _unstorable(key: str, value: Any, name: str) -> CheckpointError:
    kind = type(value)
    return CheckpointError(
        f"optimizer state '{key}' of '{name}' is a {kind.__name__} of {kind.__module__}.",
        "Checkpoints hold plain values and tensors, so that reading one never runs code.",
        "if the optimizer is your own, keep that state as tensors or numbers. If it is another "
        "library's, its state cannot be saved: save only the weights (engine.export, or "
        "save_16bit_model), or use another optimizer.",
    )


def package_of(optimizer: Optimizer) -> str:
    """Return the name of the package that defines an optimizer's class.

    It distinguishes optimizers of the same name, such as AdamW, in different packages.
    """
    return type(optimizer).__module__.partition(".")[0]


def value_item(kind: str, name: str, value: Tensor, rank: int) -> WriteItem:
    """Return the item of a tensor that no step changes.

    Args:
        kind: Kind of state, for example "weight", "buffer" or "moment".
        name: Name in the checkpoint.
        value: The tensor, saved whole and in its own shape.
        rank: Global rank whose file has it.

    Returns:
        An item that writes the whole tensor.
    """
    return _whole_item(SavedChunk(kind, name, "", 0, value.numel(), rank), value)
