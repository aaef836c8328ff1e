"""DeepSpeed's `deepspeed.utils.groups`: which ranks share what, of the mesh of this process's
engine.

The engine that was made last tells, while it lives; without one every rank is data-parallel with
all others, and alone in every other sense.  A group is torch's, for programs that communicate by
themselves: this library's own ranks do not use it.  Groups of a mesh are made once, all of them, by
`make_groups`, and kept as long as the world's group.

The module is an mpu, too: `initialize(mpu=groups)`.
"""

from __future__ import annotations

import weakref
from typing import Any, ClassVar

from ...base.errors import NotBuiltError, UsageError
from ...base.mesh import PATIENCE, REDUCE_AXES, Mesh
from ...engine.engine import Engine
from . import comm as dist
from .comm import get_world_group

DATA = ("dp_replicate", "dp_shard")
TENSOR = ("tp",)
SEQUENCE = ("sp",)
PIPE = ("pp",)
KINDS: tuple[tuple[str, ...], ...] = (DATA, REDUCE_AXES, TENSOR, SEQUENCE, PIPE)


class _Process:
    """Whose mesh is told, and torch's groups of this world: by ranks, None where this rank is not
    among them.

    stated: the world's group in which a program made groups by itself (`_init_tp_mesh_device`),
    their mesh, and they.
    """

    engine: ClassVar[weakref.ref[Engine] | None] = None
    stated: ClassVar[tuple[Any, Mesh, dict[tuple[str, ...], Any]] | None] = None
    world: ClassVar[Any] = None
    made: ClassVar[dict[tuple[int, ...], Any]] = {}


def initialize(ep_size: int = 1, mpu: Any = None) -> None:
    """Nothing to do: the mesh is stated to `deepspeed.initialize`."""
    if ep_size != 1 or mpu is not None:
        raise NotBuiltError(
            f"groups.initialize(ep_size={ep_size}, mpu={mpu!r}) is not built.",
            "Expert parallelism is not, and the other axes are stated to initialize().",
            "leave the call out, and pass mesh= or mpu= to initialize().",
        )


def _create_expert_and_data_parallel(
    expert_parallel_size_: int, use_data_before_expert_parallel_: bool = False
) -> None:
    """Nothing to do: experts marked in a model are whole on every rank, and all ranks answer for
    them.
    """


def tell_of(engine: Engine) -> None:
    """Have these functions answer from this engine's mesh, while it lives.  Local."""
    _Process.engine = weakref.ref(engine)
    _Process.stated = None


def _init_tp_mesh_device(
    tensor_model_parallel_size: int = 1, data_parallel_size: int | None = None
) -> tuple[Any, Any]:
    """Make the groups of so many ranks that share layers, and have these functions answer from them
    until an engine is made; returns this rank's data-parallel group and the one that shares its
    layers.  Collective in the world.
    """
    size = dist.get_world_size()
    rank = dist.get_rank()
    if size % tensor_model_parallel_size or data_parallel_size not in (
        None,
        size // tensor_model_parallel_size,
    ):
        raise UsageError(
            f"{tensor_model_parallel_size} tensor-parallel ranks and {data_parallel_size} "
            f"data-parallel ones do not make up a world of {size}.",
            fix="leave data_parallel_size out, and choose a divisor of the world.",
        )
    here = Mesh(tp=tensor_model_parallel_size).on_world(size, rank)
    found: dict[tuple[str, ...], Any] = {}
    for axes in (DATA, TENSOR):
        for ranks in here.groups_along(*axes):
            made = dist.new_group(list(ranks))
            if rank in ranks:
                found[axes] = made
    _Process.stated = get_world_group(), here, found
    return found[DATA], found[TENSOR]


def _stated() -> tuple[Mesh, dict[tuple[str, ...], Any]] | None:
    """Return what a program made by itself in this world."""
    if _Process.stated is None or _Process.stated[0] is not get_world_group():
        return None
    return _Process.stated[1:]


def mesh() -> Mesh:
    """Return the mesh that these functions answer from, seen by this rank."""
    if (stated := _stated()) is not None:
        return stated[0]
    size = dist.get_world_size() if dist.is_initialized() else 1
    engine = _Process.engine() if _Process.engine is not None else None
    if engine is not None and engine.mesh.world_size == size:
        return engine.mesh
    return Mesh().on_world(size, dist.get_rank() if dist.is_initialized() else 0)


def make_groups(over: Mesh) -> None:
    """Make torch's groups of a mesh that are not there yet.  Collective, in one order on every
    rank.
    """
    for kind in KINDS:
        for ranks in over.groups_along(*kind):
            if 1 < len(ranks) < over.world_size and ranks not in _made():
                group = dist.new_group(list(ranks), timeout=PATIENCE)
                _made()[ranks] = group if over.rank in ranks else None


def group_of(*axes: str, over: Mesh | None = None) -> Any:
    """Return torch's group of this rank and those that differ from it on these axes; None without a
    process group.

    over: the mesh they are axes of; None: the one that is told.  Collective in the world where its
    groups were not made yet.
    """
    if over is None and (stated := _stated()) is not None and axes in stated[1]:
        return stated[1][axes]
    if not dist.is_initialized():
        return None
    here = over or mesh()
    ranks = here.ranks_along(*axes)
    if len(ranks) == here.world_size:
        return get_world_group()
    if ranks not in _made():
        if len(ranks) == 1:
            _made()[ranks] = dist.new_group(
                list(ranks), timeout=PATIENCE, use_local_synchronization=True
            )
        else:
            make_groups(here)
    return _made()[ranks]


def _made() -> dict[tuple[int, ...], Any]:
    if _Process.world is not get_world_group():  # another world: its groups are none of this one's
        _Process.world = get_world_group()
        _Process.made = {}
    return _Process.made


def get_data_parallel_group() -> Any:
    """Return the group of the ranks that see different batches with the same piece of the model."""
    return group_of(*DATA)


def get_data_parallel_world_size() -> int:
    return mesh().data_size


def get_data_parallel_rank() -> int:
    return mesh().data_index


def _get_data_parallel_group_ranks() -> list[int]:
    return list(mesh().ranks_along(*DATA))


def get_tensor_model_parallel_group() -> Any:
    return group_of(*TENSOR)


def get_tensor_model_parallel_world_size() -> int:
    return mesh().tp


def get_tensor_model_parallel_rank() -> int:
    return mesh().coordinates["tp"]


def get_tensor_model_parallel_src_rank() -> int:
    """Return the rank that a model's input would come from: the first that shares this one's
    layers.
    """
    return mesh().ranks_along(*TENSOR)[0]


def _get_sequence_parallel_group() -> Any:
    return group_of(*SEQUENCE)


def _get_sequence_parallel_world_size() -> int:
    return mesh().sp


def _get_sequence_parallel_rank() -> int:
    return mesh().coordinates["sp"]


def _get_sequence_data_parallel_group() -> Any:
    """Return the group of the ranks whose gradients are summed."""
    return group_of(*REDUCE_AXES)


def _get_sequence_data_parallel_world_size() -> int:
    return mesh().reduce_size


def _get_sequence_data_parallel_rank() -> int:
    here = mesh()
    return here.ranks_along(*REDUCE_AXES).index(here.rank)


def get_pipeline_model_parallel_group() -> Any:
    return group_of(*PIPE)


def get_pipeline_model_parallel_world_size() -> int:
    return mesh().pp


def get_pipeline_model_parallel_rank() -> int:
    return mesh().coordinates["pp"]


# What DeepSpeed's module keeps of its own; a program that looks there finds that nothing was made
# yet.
_DATA_PARALLEL_GROUP = _MODEL_PARALLEL_GROUP = _TENSOR_MODEL_PARALLEL_GROUP = None
_DEVICE_MESH_SPLIT_UNSUPPORTED = (
    "No backend for the parent process group or its backend does not support splitting"
)
_clone_world_group = get_world_group
_get_data_parallel_group = get_data_parallel_group
_get_data_parallel_world_size = get_data_parallel_world_size
_get_data_parallel_rank = get_data_parallel_rank
get_sequence_parallel_group = _get_sequence_parallel_group
get_sequence_parallel_world_size = _get_sequence_parallel_world_size
get_sequence_parallel_rank = _get_sequence_parallel_rank
# DeepSpeed's module has one meaning for both words: the ranks that share a layer.
get_model_parallel_group = get_tensor_model_parallel_group
get_model_parallel_world_size = _get_model_parallel_world_size = (
    get_tensor_model_parallel_world_size
)
get_model_parallel_rank = get_tensor_model_parallel_rank
_get_expert_model_parallel_world_size = get_tensor_model_parallel_world_size
