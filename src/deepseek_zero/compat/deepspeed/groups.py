"""DeepSpeed's `deepspeed.utils.groups`: process groups of the current mesh.

The mesh is that of the engine that was created last, as long as it exists. Without an engine, all
ranks are data-parallel. The groups are torch's, for programs that communicate themselves; this
library does not use them. `make_groups` creates all groups of a mesh once. They are kept as long as
the default process group.

The module can also be used as an mpu: `initialize(mpu=groups)`.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, ClassVar

from ...base.errors import NotBuiltError, UsageError
from ...base.given import whole_number
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
    """Make the functions of this module return the groups of an engine's mesh."""
    _Process.stated = get_world_group(), engine.mesh, {}


def _init_tp_mesh_device(
    tensor_model_parallel_size: int = 1, data_parallel_size: int | None = None
) -> tuple[Any, Any]:
    """Create the groups of a mesh with tensor parallelism.

    The functions of this module use this mesh until an engine is created. Returns this rank's
    data-parallel and tensor-parallel groups. Every rank must call this.
    """
    whole_number(
        "_init_tp_mesh_device", "tensor_model_parallel_size", tensor_model_parallel_size, 1
    )
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
        ranks = [list(each) for each in here.groups_along(*axes)]
        found[axes], _ = dist.new_subgroups_by_enumeration(ranks)
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
    return Mesh().on_world(dist.get_world_size(), dist.get_rank())


def make_groups(over: Mesh) -> None:
    """Create the torch process groups of a mesh that do not exist yet.

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
        Collective if the groups of the mesh do not exist yet: every rank must call it.
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


def _get_data_parallel_group_ranks() -> list[int]:
    return list(mesh().ranks_along(*DATA))


def get_tensor_model_parallel_src_rank() -> int:
    """Return the first rank of this rank's tensor-parallel group."""
    return mesh().ranks_along(*TENSOR)[0]


# Kinds of groups in the names of DeepSpeed's functions, and their axes. In DeepSpeed's module,
# model parallel and tensor parallel mean the same.
AXES = {
    "data_parallel": DATA,
    "tensor_model_parallel": TENSOR,
    "model_parallel": TENSOR,
    "expert_model_parallel": TENSOR,
    "sequence_parallel": SEQUENCE,
    "sequence_data_parallel": REDUCE_AXES,
    "pipeline_model_parallel": PIPE,
}


def getter(name: str, over: Callable[[], Mesh] | None = None) -> Callable[[], Any]:
    """Return DeepSpeed's function `get_KIND_group`, `get_KIND_world_size` or `get_KIND_rank`.

    Args:
        name: Name of the function, which may begin with an underscore.
        over: Function that returns the mesh; None for the current one.

    Returns:
        A function without arguments that returns a process group, a number of ranks or this rank's
        index in the group.

    Raises:
        AttributeError: There is no such function.
    """
    found = _GETTER.fullmatch(name)
    if found is None:
        raise AttributeError(f"no attribute {name!r}")
    axes = AXES[found[1]]

    def ranks() -> tuple[Mesh, tuple[int, ...]]:
        here = mesh() if over is None else over()
        return here, here.ranks_along(*axes)

    def rank() -> int:
        here, along = ranks()
        return along.index(here.rank)

    return {
        "group": lambda: group_of(*axes, over=None if over is None else over()),
        "world_size": lambda: len(ranks()[1]),
        "rank": rank,
    }[found[2]]


_GETTER = re.compile(f"_?get_({'|'.join(AXES)})_(group|world_size|rank)")


def __getattr__(name: str) -> Any:
    return globals().setdefault(name, getter(name))


# Variables of DeepSpeed's module, for programs that check whether groups exist
_DATA_PARALLEL_GROUP = _MODEL_PARALLEL_GROUP = _TENSOR_MODEL_PARALLEL_GROUP = None
_DEVICE_MESH_SPLIT_UNSUPPORTED = (
    "No backend for the parent process group or its backend does not support splitting"
)
_clone_world_group = get_world_group
