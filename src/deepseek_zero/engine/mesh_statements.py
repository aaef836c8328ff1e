"""Combine all statements about the mesh of a run.

A caller may name axes in several places: `mesh=`, configuration keys, the launcher's command line,
or an object of another library. Each is a `MeshStatement`. `choose_mesh` combines them, or raises
an error that names two contradictory ones. Of the axes that are not named, dp_shard gets the
remaining ranks and the others get one rank.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ..base.errors import UsageError, shown
from ..base.launch import MESH, MESH_OPTIONS
from ..base.mesh import AXES, Mesh, axes_of
from ..config import RawConfig

DATA_AXES = ("dp_replicate", "dp_shard")  # chosen together; each other axis is chosen by itself
_OTHERS = ("pp", "sp", "tp")
# Configuration keys that set the size of one axis
AXIS_KEYS = {
    "pp_degree": "pp",
    "pipeline.stages": "pp",
    "mp_degree": "tp",
    "tensor_parallel.autotp_size": "tp",
    "tensor_parallel.tp.tp_size": "tp",
    "tensor_parallel.tensor_parallel.tp_size": "tp",
    "sequence_parallel_size": "sp",
}
# Sizes that switch a section off and do not count as a statement
_OFF = {"tensor_parallel.autotp_size": 0}
_MICS = "mics_shard_size"


@dataclass(frozen=True)
class MeshStatement:
    """A requirement on the mesh from one source, such as an argument or a configuration key.

    Attributes:
        where: The source of the statement, for error messages.
        axes: The sizes of axes, by name; dp_shard may be REST.
        data_size: The number of ranks with different batches.
        shard_size: The number of ranks that hold the slices of one state.
        places: For each rank, its coordinates on axes or "data".
        groups: For each axis, the ranks of this rank's group.
    """

    where: str
    axes: Mapping[str, Any] = field(default_factory=dict)
    data_size: int | None = None
    shard_size: int | None = None
    places: Sequence[Mapping[str, int]] = ()
    groups: Mapping[str, tuple[int, ...]] = field(default_factory=dict)


def statements_of(
    raw: RawConfig, given: Any = None, others: Iterable[MeshStatement] = (), launched: bool = True
) -> tuple[MeshStatement, ...]:
    """Collect all requirements on the mesh from the arguments and the configuration.

    Args:
        raw: The configuration as the user wrote it.
        given: `mesh=`, as in `mesh_of`.
        others: Requirements that follow from other arguments of the caller, such as `mpu`.
        launched: Whether to include the launcher's command line.

    Returns:
        One statement per source that sets an axis, which `choose_mesh` merges.

    Raises:
        UsageError: A value does not describe a mesh.
    """
    found = [MeshStatement("mesh=", axes_of(given))] if given is not None else []
    found += others
    if section := raw.get("mesh"):
        found.append(MeshStatement("the configuration's mesh", axes_of(section)))
    for key, axis in AXIS_KEYS.items():
        size = raw.get(key)
        if size is not None and size != _OFF.get(key):
            found.append(MeshStatement(key, {axis: size}))
    if (size := raw.get(f"zero_optimization.{_MICS}", -1)) > 0:
        found.append(MeshStatement(_MICS, shard_size=size))
    if launched and (text := os.environ.get(MESH)):
        found.append(MeshStatement(MESH_OPTIONS, _axes_in(text)))
    return tuple(found)


def _axes_in(text: str) -> dict[str, int]:
    pairs = [each.partition("=") for each in text.split(",")]
    try:
        return axes_of({axis.strip(): int(size) for axis, _, size in pairs})
    except ValueError:
        raise UsageError(
            f"the variable {MESH} is {shown(text)}.",
            "It must contain axes and their sizes.",
            f"set {MESH}=pp=2,tp=2, or unset it.",
        ) from None


def choose_mesh(statements: Sequence[MeshStatement], world: Mesh) -> Mesh:
    """Return the mesh that the statements describe, for this rank of the world.

    Args:
        statements: The requirements from the arguments, the configuration and the launcher.
        world: The world, with every rank along dp_shard.

    Returns:
        The merged mesh, with this rank's coordinates.

    Raises:
        UsageError: Two statements disagree, or one does not fit the world.
    """
    for each in statements:
        Mesh(**each.axes)  # raises if a value is not a size
    sizes, sources = _settled(statements)
    others = Mesh(**sizes, dp_shard=1).world_size
    if world.world_size % others:
        stated = [axis for axis, size in sizes.items() if size > 1]
        told = ", ".join(f"{sources[axis]} has {axis}={sizes[axis]}" for axis in stated)
        raise UsageError(
            f"the mesh ({', '.join(f'{axis}={sizes[axis]}' for axis in stated)}) does not fit a "
            f"world of {world.world_size} ranks.",
            f"{told}: {others} ranks hold one copy of the model, so the world must be a multiple "
            "of it.",
            f"start a multiple of {others} ranks (deepseek-zero run --nproc {others} script.py), "
            "or choose smaller sizes.",
        )
    meshes = [
        (each.where, Mesh(**(dict(each.axes) | sizes)))
        for each in statements
        if each.axes.keys() & set(DATA_AXES)
    ]
    meshes += [
        (each.where, _in_groups(each, each.shard_size, sizes, world.world_size // others))
        for each in statements
        if each.shard_size
    ]
    if not meshes:
        meshes = [("", Mesh(**sizes))]
    whole = [
        (where, mesh.on_world(world.world_size, world.rank, world.device)) for where, mesh in meshes
    ]
    first, found = whole[0]
    for where, mesh in whole:
        if mesh != found:
            raise _disagreement(first, str(found), where, str(mesh))
    for each in statements:
        if each.data_size not in (None, found.data_size):
            noun = "rank" if each.data_size == 1 else "ranks"
            raise UsageError(
                f"{each.where} has {each.data_size} data-parallel {noun}, but the mesh ({found}) "
                f"has {found.data_size}.",
                "Data-parallel ranks are those with different batches: the world divided by pp, "
                "sp and "
                "tp.",
                "state it in one place.",
            )
        _compare_places(each, found)
    return found


def _compare_places(statement: MeshStatement, mesh: Mesh) -> None:
    for rank, stated in enumerate(statement.places):
        here = replace(mesh, rank=rank)
        actual = here.coordinates | {"data": here.data_index}
        for name, place in stated.items():
            if place != actual[name]:
                raise UsageError(
                    f"{statement.where} has rank {rank} at {name}={place}, but the mesh "
                    f"({mesh}) has it at {name}={actual[name]}.",
                    f"Ranks ascend along {', '.join(AXES)}, the last one fastest.",
                    "create its groups in that order, or do not pass it.",
                )
    for axis, ranks in statement.groups.items():
        if ranks != (own := mesh.ranks_along(axis)):
            raise UsageError(
                f"{statement.where} has rank {mesh.rank} in a group with the ranks {list(ranks)} "
                "along "
                f"{axis}, but in the mesh ({mesh}) they are {list(own)}.",
                f"Ranks ascend along {', '.join(AXES)}, the last one fastest.",
                "do not pass the group.",
            )


def _settled(statements: Sequence[MeshStatement]) -> tuple[dict[str, Any], dict[str, str]]:
    """Return the sizes of all axes but the data axes, and the first statement of each."""
    sizes = dict[str, Any]()
    sources = dict[str, str]()
    for axis in _OTHERS:
        for each in statements:
            size = each.axes.get(axis)
            if size is None:
                continue
            source = sources.setdefault(axis, each.where)
            if size != sizes.setdefault(axis, size):
                raise _disagreement(source, f"{axis}={sizes[axis]}", each.where, f"{axis}={size}")
    return sizes, sources


def _in_groups(statement: MeshStatement, size: int, sizes: Mapping[str, Any], ranks: int) -> Mesh:
    """Return a mesh whose states are sharded within groups of `size` ranks.

    Args:
        statement: The statement of the configuration that sets the size of a group.
        size: The number of ranks in a group.
        sizes: The sizes of the axes.
        ranks: The number of ranks along the data axes and sp.
    """
    sp = sizes.get("sp", 1)
    if ranks * sp % size or size % sp:
        along_sp = f", {sp} along sp" if sp > 1 else ""
        divisible = " that sp divides" if sp > 1 else ""
        raise UsageError(
            f"zero_optimization.{statement.where} is {size}, but there are {ranks * sp} ranks"
            f"{along_sp}.",
            "States are sharded within groups of this size, and every rank is in one group.",
            f"choose a divisor of the number of ranks{divisible}.",
        )
    return Mesh(**sizes, dp_replicate=ranks * sp // size)


def _disagreement(first: str, one: str, second: str, other: str) -> UsageError:
    return UsageError(
        f"{first} has {one}, but {second} has {other}.",
        "A run has one mesh.",
        "state it in one place.",
    )
