"""Read the arguments `mpu` and `mesh_param` of `initialize`.

An mpu ("model parallel unit": Megatron's, DeepSpeed's grid, or a program's own) is any object or
module with getters for group sizes and ranks, whose names are in `READ`. They are called once on
every rank and compared with the mesh.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import torch.distributed as dist

from ..base.errors import UsageError, shown
from ..base.given import refuse
from ..comm.bootstrap import all_gather_text
from ..engine.mesh_statements import MeshStatement

# Middle parts of the getter names get_..._world_size and get_..._rank, the least ambiguous first.
READ: dict[str, tuple[str, ...]] = {
    "tp": ("tensor_model_parallel", "slice_parallel", "model_parallel"),
    "pp": ("pipeline_model_parallel", "pipe_parallel", "pipeline_parallel"),
    "sp": ("sequence_parallel",),
    "data": ("data_parallel",),
}


def mpu_statement(mpu: Any) -> MeshStatement:
    """Read the group sizes and ranks of an mpu.

    Returns:
        The sizes and ranks that the object returned, for comparison with the mesh.

    Raises:
        UsageError: On every rank, if the object has no such getters or if ranks have different
            sizes.

    Note:
        Collective if there is a process group: every rank must call it.
    """
    own = _read(mpu)
    told = [own]
    if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
        rows = all_gather_text(json.dumps(own), dist.get_world_size(), None)
        told = [json.loads(row) for row in rows]
    sizes = [{name: size for name, (size, _) in each.items()} for each in told]
    for rank, each in enumerate(sizes):
        if not each:
            fix = (
                "pass an object with get_model_parallel_world_size(), get_model_parallel_rank(), "
                "and so on."
            )
            given = f"of rank {rank}" if own else mpu
            raise refuse(
                "initialize", "mpu", given, "an object that tells the sizes of groups", fix
            )
    for rank, each in enumerate(sizes):
        if each != sizes[0]:
            raise UsageError(
                f"the mpu of rank {rank} has {_described(each)}, but that of rank 0 has "
                f"{_described(sizes[0])}.",
                "A run has one mesh.",
                "use the same sizes on every rank.",
            )
    data_size = sizes[0].pop("data", None)
    places = [
        {name: place for name, (_, place) in each.items() if place is not None} for each in told
    ]
    return MeshStatement("mpu=", sizes[0], data_size, places=places)


def _read(mpu: Any) -> dict[str, tuple[int, int | None]]:
    """Return (size, rank) of each kind of group that the mpu has."""
    found: dict[str, tuple[int, int | None]] = {}
    words: dict[str, str] = {}
    for name, middles in READ.items():
        for middle in middles:
            size = _ask(mpu, f"get_{middle}_world_size")
            if size is not None:
                found[name] = size, _ask(mpu, f"get_{middle}_rank")
                words[name] = middle
                break
    if words.get("tp") == "model_parallel" and "sp" in found:
        tensor, sequence = found["tp"][0], found["sp"][0]
        if tensor == sequence > 1:
            # A sequence-parallel mpu shows its group under this name too, for Megatron
            del found["tp"]
    return found


def _ask(mpu: Any, name: str) -> int | None:
    ask = getattr(mpu, name, None)
    if not callable(ask):
        return None
    answer = ask()
    if isinstance(answer, bool) or not isinstance(answer, int) or answer < 0:
        raise UsageError(
            f"mpu.{name}() is {shown(answer)}.", "It counts ranks.", "let it return a whole number."
        )
    return answer


def _described(sizes: Mapping[str, int]) -> str:
    return ", ".join(f"{name}={size}" for name, size in sizes.items())


def mesh_param_statement(mesh_param: Any) -> MeshStatement:
    """Read DeepSpeed's argument `mesh_param`, a pair of group sizes.

    The pair contains the number of data-parallel and the number of sequence-parallel ranks.

    Returns:
        The sizes of the data and sequence axes, for comparison with the mesh.

    Raises:
        UsageError: It is not a pair of positive integers.
    """
    is_pair = (
        isinstance(mesh_param, Sequence)
        and not isinstance(mesh_param, str)
        and len(mesh_param) == 2
    )
    if not is_pair or not all(type(size) is int and size > 0 for size in mesh_param):
        wanted = "a pair (data-parallel ranks, sequence-parallel ranks)"
        raise refuse(
            "initialize",
            "mesh_param",
            mesh_param,
            wanted,
            "pass for example mesh_param=(2, 2), or mesh=.",
        )
    return MeshStatement("mesh_param=", {"sp": mesh_param[1]}, data_size=mesh_param[0])
