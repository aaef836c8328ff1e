"""DeepSpeed's `deepspeed.utils.groups`: process groups of the current mesh.

The mesh is that of the engine that was created last, as long as it exists. Without an engine, all
ranks are data-parallel. The groups are torch's, for programs that communicate themselves; this
library does not use them. `make_groups` creates all groups of a mesh once. They are kept as long as
the default process group.

The module can also be used as an mpu: `initialize(mpu=groups)`.
"""

from __future__ import annotations

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
    """State of this process.

    Attributes:
        stated: The mesh of the last engine or of `_init_tp_mesh_device`: the default group at that
            time, the mesh, and groups that exist already, by axes.
        world: Default group to which `made` belongs.
        made: torch's groups by ranks; None for groups without this rank.
    """

    stated: ClassVar[tuple[Any, Mesh, dict[tuple[str, ...], Any]] | None] = None
    world: ClassVar[Any] = None
    made: ClassVar[dict[tuple[int, ...], Any]] = {}


def initialize(ep_size: int = 1, mpu: Any = None) -> None:
    """Do nothing for the default arguments: `deepspeed.initialize` is given the mesh.

    Args:
        ep_size: Must be 1.
        mpu: Must be None.

    Raises:
        NotBuiltError: Another argument was passed.
    """
    if ep_size != 1 or mpu is not None:
        raise NotBuiltError(
            f"groups.initialize(ep_size={ep_size}, mpu={mpu!r}) is not built.",
            "Expert parallelism is not, and the other axes are stated to initialize().",
            "leave the call out, and pass mesh= or mpu= to initialize().",
        )


def _create_expert_and_data_parallel(
    expert_parallel_size_: int, use_data_before_expert_parallel_: bool = False
) -> None:
    """Do nothing: all ranks have all experts."""


def use_mesh_of(engine: Engine) -> None:
    """Use the mesh of this engine until another mesh or default group is created."""
    _Process.stated = get_world_group(), engine.mesh, {}


def _init_tp_mesh_device(
    tensor_model_parallel_size: int = 1, data_parallel_size: int | None = None
) -> tuple[Any, Any]:
    """Create the groups of a mesh with tensor parallelism.

    The functions of this module use this mesh until an engine is created. Returns this rank's
    data-parallel and tensor-parallel groups. Collective over all ranks.
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
    """Return the current mesh and its existing groups, or None if there is none."""
    if _Process.stated is None or _Process.stated[0] is not get_world_group():
        return None
    return _Process.stated[1:]


def mesh() -> Mesh:
    """Return the current mesh, from the point of view of this rank."""
    if (stated := _stated()) is not None:
        return stated[0]
    is_distributed = dist.is_initialized()
    size = dist.get_world_size() if is_distributed else 1
    rank = dist.get_rank() if is_distributed else 0
    return Mesh().on_world(size, rank)


def make_groups(over: Mesh) -> None:
    """Create the process groups of a mesh that do not exist yet.

    Note:
        Collective: every rank must call it. All ranks create the groups in the same order.
    """
    for kind in KINDS:
        for ranks in over.groups_along(*kind):
            if 1 < len(ranks) < over.world_size and ranks not in _made():
                group = dist.new_group(list(ranks), timeout=PATIENCE)
                _made()[ranks] = group if over.rank in ranks else None


def group_of(*axes: str, over: Mesh | None = None) -> Any:
    """Return torch's group of the ranks that differ from this rank only on some axes.

    Args:
        *axes: Names of the axes.
        over: The mesh; None for the current one.

    Returns:
        The group; None without a process group.

    Note:
        Collective over all ranks if the groups of the mesh do not exist yet.
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
    if _Process.world is not get_world_group():  # the groups belong to an earlier default group
        _Process.world = get_world_group()
        _Process.made = {}
    return _Process.made


def get_data_parallel_group() -> Any:
    """Return the group of ranks with the same part of the model and different batches."""
    return group_of(*DATA)


def get_data_parallel_world_size() -> int:
    """Return the number of data-parallel ranks."""
    return mesh().data_size


def get_data_parallel_rank() -> int:
    """Return this rank's index among the data-parallel ranks."""
    return mesh().data_index


def _get_data_parallel_group_ranks() -> list[int]:
    return list(mesh().ranks_along(*DATA))


def get_tensor_model_parallel_group() -> Any:
    """Return the process group of the tensor-parallel ranks."""
    return group_of(*TENSOR)


def get_tensor_model_parallel_world_size() -> int:
    """Return the number of tensor-parallel ranks."""
    return mesh().tp


def get_tensor_model_parallel_rank() -> int:
    """Return this rank's index among the tensor-parallel ranks."""
    return mesh().coordinates["tp"]


def get_tensor_model_parallel_src_rank() -> int:
    """Return the first rank of this rank's tensor-parallel group."""
    return mesh().ranks_along(*TENSOR)[0]


def _get_sequence_parallel_group() -> Any:
    return group_of(*SEQUENCE)


def _get_sequence_parallel_world_size() -> int:
    return mesh().sp


def _get_sequence_parallel_rank() -> int:
    return mesh().coordinates["sp"]


def _get_sequence_data_parallel_group() -> Any:
    """Return the group of ranks whose gradients are summed."""
    return group_of(*REDUCE_AXES)


def _get_sequence_data_parallel_world_size() -> int:
    return mesh().reduce_size


def _get_sequence_data_parallel_rank() -> int:
    here = mesh()
    return here.ranks_along(*REDUCE_AXES).index(here.rank)


def get_pipeline_model_parallel_group() -> Any:
    """Return the process group of the pipeline stages."""
    return group_of(*PIPE)


def get_pipeline_model_parallel_world_size() -> int:
    """Return the number of pipeline stages."""
    return mesh().pp


def get_pipeline_model_parallel_rank() -> int:
    """Return this rank's pipeline stage."""
    return mesh().coordinates["pp"]


# Variables of DeepSpeed's module, for programs that check whether groups exist
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
# In DeepSpeed's module, model parallel and tensor parallel mean the same.
get_model_parallel_group = get_tensor_model_parallel_group
get_model_parallel_world_size = _get_model_parallel_world_size = (
    get_tensor_model_parallel_world_size
)
get_model_parallel_rank = get_tensor_model_parallel_rank
_get_expert_model_parallel_world_size = get_tensor_model_parallel_world_size
