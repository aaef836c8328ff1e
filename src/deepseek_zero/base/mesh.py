"""Named axes over the ranks of a world, and the start of torch.distributed.

A `Mesh` is pure arithmetic: it can be created for any rank of any world without a process group. A
process without a launcher is a world of one rank: it joins no process group and runs the same code.
"""

from __future__ import annotations

import atexit
import itertools
import logging
import math
import os
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist

from . import world
from .device import CPU, default_device
from .ending import drain_threads
from .errors import PeerError, UsageError, shown
from .log import log_first, logger, speak
from .network import lead_gloo
from .restarts import MEETING, separate_starts
from .world import (
    World,
    ask_mpi,
    discover,
    meeting_place,
    refuse_lone_process,
    suspect_lone_process,
)

Ranks = tuple[int, ...]
Groups = tuple[Ranks, ...]

# Waits end by evidence (comm/flight_recorder.py), not by a timeout: a rank that loads data for an
# hour is late, not dead.
PATIENCE = timedelta(days=7)
TELL_SECONDS = 30.0  # after which a rank logs which ranks it waits for


AXES = ("pp", "dp_replicate", "dp_shard", "sp", "tp")  # from slowest to fastest varying
SHARD_AXES = ("dp_shard", "sp")  # axes over which states are sharded
# Axes over which gradients are summed: their ranks have the same part of the model
REDUCE_AXES = ("dp_replicate", *SHARD_AXES)
REST = -1  # the size of an axis that takes all remaining ranks
_OTHER_NAMES = {
    "replicate": "dp_replicate",
    "shard": "dp_shard",
    "dp": "dp_shard",
    "fsdp": "dp_shard",
}


@dataclass(frozen=True)
class Mesh:
    """Named axes over the ranks of a world, and the coordinates of one rank.

    It needs no process group. The number of a rank follows from its coordinates:

        rank = (((pp * R + dp_replicate) * S + dp_shard) * C + sp) * T + tp

    The sizes of the axes are pp, R, S, C and T. Three products of them have different meanings:
    `data_size` ranks read different batches, `shard_size` ranks hold the shards of one state, and
    the gradients of `reduce_size` ranks are summed.

    Attributes:
        pp: Pipeline stages.
        dp_replicate: Replicas of the sharded states.
        dp_shard: Data-parallel ranks that shard the states. `REST` means all ranks that the other
            axes leave (`on_world`).
        sp: Ranks that split a sequence.
        tp: Ranks that split layers.
        rank: The rank that this object describes.
        device: The device of that rank.
    """

    pp: int = 1
    dp_replicate: int = 1
    dp_shard: int = REST
    sp: int = 1
    tp: int = 1
    rank: int = 0
    device: torch.device = CPU

    def __post_init__(self) -> None:
        for axis, size in self._axes.items():
            fix = "set it to a whole number of at least 1"
            least = 1
            if axis == "dp_shard":
                fix += ", or leave it out"
                least = REST
            is_size = isinstance(size, int) and not isinstance(size, bool)
            if not is_size or size < least or size == 0:
                raise UsageError(
                    f"mesh axis {axis} is {shown(size)}.",
                    "An axis has at least one rank.",
                    f"{fix}.",
                )

    def on_world(self, world_size: int, rank: int = 0, device: torch.device | None = None) -> Mesh:
        """Return this mesh over a world, with the coordinates of one of its ranks.

        Args:
            world_size: Number of ranks of the world.
            rank: Rank that the returned mesh describes.
            device: Device of that rank; by default that of this mesh.

        Returns:
            The mesh of the given rank, in which `dp_shard` has a definite size.

        Raises:
            UsageError: The axes do not fit the world.
        """
        others = math.prod(size for size in self.sizes if size != REST)
        shard = world_size // others if self.dp_shard == REST else self.dp_shard
        found = replace(self, dp_shard=max(1, shard), rank=rank, device=device or self.device)
        if found.world_size != world_size:
            stated = ", ".join(
                f"{axis}={size}" for axis, size in self._axes.items() if size not in (1, REST)
            )
            rule = ", which must divide the world" if self.dp_shard == REST else ""
            raise UsageError(
                f"the mesh ({stated}) does not fit a world of {world_size} ranks.",
                f"The product of the axes is {others}{rule}.",
                "choose sizes whose product is the number of ranks, or leave dp_shard out.",
            )
        return found

    # -- sizes

    @property
    def sizes(self) -> tuple[int, ...]:
        """Return the size of each axis, in the order of `AXES`."""
        return tuple(self._axes.values())

    @property
    def _axes(self) -> dict[str, int]:
        return {axis: getattr(self, axis) for axis in AXES}

    @cached_property
    def world_size(self) -> int:
        """Return the number of all ranks, the product of the sizes of all axes."""
        return math.prod(self.sizes)

    @cached_property
    def data_size(self) -> int:
        """Return the number of ranks that read different batches.

        The batch size of a step is micro-batch x accumulation x `data_size`.
        """
        return self.dp_replicate * self.dp_shard

    @cached_property
    def shard_size(self) -> int:
        """Return the number of ranks that hold the shards of one sharded state."""
        return self.dp_shard * self.sp

    @cached_property
    def reduce_size(self) -> int:
        """Return the number of ranks whose gradients are summed and averaged."""
        return self.dp_replicate * self.dp_shard * self.sp

    @property
    def is_distributed(self) -> bool:
        """Return whether the mesh has more than one rank."""
        return self.world_size > 1

    # -- coordinates of this rank

    @property
    def coordinates(self) -> dict[str, int]:
        """Return this rank's index along each axis, by the name of the axis."""
        return self._coordinates_of(self.rank)

    def _coordinates_of(self, rank: int) -> dict[str, int]:
        found = {}
        for axis, size in reversed(self._axes.items()):
            rank, found[axis] = divmod(rank, size)
        return {axis: found[axis] for axis in AXES}

    def place_of(self, rank: int) -> str:
        """Return a rank's coordinates on the axes with several ranks, as text.

        For example "pp=1, dp_shard=0, tp=1"; "" if only dp_shard has several.
        """
        several = [axis for axis, size in self._axes.items() if size > 1]
        if several in ([], ["dp_shard"]):
            return ""
        here = self._coordinates_of(rank)
        return ", ".join(f"{axis}={here[axis]}" for axis in several)

    @property
    def data_index(self) -> int:
        """Return the index of this rank's samples among the `data_size` parts of a batch."""
        here = self.coordinates
        return here["dp_replicate"] * self.dp_shard + here["dp_shard"]

    @property
    def shard_index(self) -> int:
        """Return the index of this rank's shard, of `shard_size` shards."""
        here = self.coordinates
        return here["dp_shard"] * self.sp + here["sp"]

    def rank_at(self, **coordinates: int) -> int:
        """Return the rank with the given coordinates; other coordinates are this rank's."""
        found = 0
        here = self.coordinates | coordinates
        for axis, size in self._axes.items():
            found = found * size + here[axis]
        return found

    def ranks_along(self, *axes: str) -> Ranks:
        """Return the ranks that differ from this one only on the given axes, ascending.

        This rank is included.
        """
        names = [axis for axis in AXES if axis in axes]
        places = itertools.product(*(range(getattr(self, axis)) for axis in names))
        return tuple(self.rank_at(**dict(zip(names, place, strict=True))) for place in places)

    def groups_along(self, *axes: str) -> Groups:
        """Return `ranks_along` of every rank: disjoint groups, ordered by first rank."""
        return self._grouped(lambda here: tuple(here[axis] for axis in AXES if axis not in axes))

    def _grouped(self, place_of: Callable[[dict[str, int]], tuple[int, ...]]) -> Groups:
        """Return the groups of ranks whose coordinates have the same place."""
        found: dict[tuple[int, ...], list[int]] = {}
        for rank in range(self.world_size):
            place = place_of(self._coordinates_of(rank))
            found.setdefault(place, []).append(rank)
        return tuple(map(tuple, found.values()))

    def inner_groups(self, size: int) -> Groups:
        """Divide the ranks that shard one state into groups of `size` consecutive ranks.

        `size` divides `shard_size`.
        """
        runs = range(0, self.shard_size, size)
        return tuple(
            ranks[start : start + size]
            for ranks in self.groups_along(*SHARD_AXES)
            for start in runs
        )

    def host_groups(self, per_host: int) -> tuple[Groups, Groups]:
        """Return the two partitions of the world for reductions by host.

        The first contains the ranks of each host that shard one state. The second contains the
        ranks with the same index on their hosts, hosts ascending.

        Args:
            per_host: Number of consecutive ranks on each host.

        Raises:
            UsageError: Hosts have different numbers of these ranks.
        """
        dealt = [self._on_hosts(ranks, per_host) for ranks in self.groups_along(*SHARD_AXES)]
        near = tuple(run for runs in dealt for run in runs)
        return near, tuple(across for runs in dealt for across in zip(*runs, strict=True))

    def hosts_of(self, per_host: int) -> tuple[Ranks, Ranks]:
        """Return this rank's two groups of `host_groups`."""
        runs = self._on_hosts(self.ranks_along(*SHARD_AXES), per_host)
        near = next(run for run in runs if self.rank in run)
        return near, tuple(run[near.index(self.rank)] for run in runs)

    def near_size(self, per_host: int) -> int:
        """Return how many ranks of one host hold shards of one state.

        It is 1 if a reduction by host is the same as one by rank.
        """
        size = len(self.hosts_of(per_host)[0]) if per_host > 1 else 1
        return 1 if size == self.shard_size else size

    def _on_hosts(self, ranks: Ranks, per_host: int) -> list[Ranks]:
        """Split ranks that hold the shards of one state by host."""
        runs = [
            tuple(run) for _, run in itertools.groupby(ranks, key=lambda rank: rank // per_host)
        ]
        if len(sizes := sorted({len(run) for run in runs})) > 1:
            raise UsageError(
                f"ranks_per_host={per_host}, but of the ranks that shard a state hosts "
                f"have {' or '.join(map(str, sizes))}.",
                "Sums by host are formed over the same number of ranks on every host.",
                f"choose a divisor of {self.shard_size}, or 1 for sums in the order of ranks.",
            )
        return runs

    def outer_groups(self, neighbours: int) -> Groups:
        """Return the groups of ranks that hold the same shard of a partly replicated layer.

        Each contains the replicas, and for each of them `neighbours` ranks along "tp" that hold
        copies of the layer, ascending.
        """
        return self._grouped(
            lambda here: (here["pp"], here["dp_shard"], here["sp"], here["tp"] // neighbours)
        )

    def __str__(self) -> str:
        stated = [f"{axis}={size}" for axis, size in self._axes.items() if size != 1]
        return " x ".join(stated) or "one rank"


def mesh_of(value: Any) -> Mesh:
    """Return the mesh that an argument of a caller describes.

    Args:
        value: None, a `Mesh`, a mapping of axis to size, a `DeviceMesh` of torch with names, or a
            ParallelismConfig of accelerate. Its size is not compared with the world yet.

    Raises:
        UsageError: The value is not a mesh.
    """
    return Mesh(**axes_of(value))


def axes_of(value: Any) -> dict[str, Any]:
    """Return the axes and sizes that an argument of `mesh_of` states, unchecked.

    A `Mesh` states every axis, a mapping and a `DeviceMesh` those that they name. In a
    ParallelismConfig a size of 1 is the default and states nothing, except that the two data axes
    are stated together.

    Raises:
        UsageError: The value is not a mesh.
    """
    if value is None:
        return {}
    if isinstance(value, Mesh):
        return dict(value._axes)
    if isinstance(value, Mapping):
        return _named({str(name): size for name, size in value.items()}, value)
    if (names := getattr(value, "mesh_dim_names", None)) is not None:
        ranks = value.mesh.flatten().tolist()
        if ranks != list(range(len(ranks))):
            raise UsageError(
                f"the device mesh has its ranks in the order {shown(ranks)}.",
                "Ranks ascend along the axes, fastest along the last one.",
                f"build it with init_device_mesh, with its axes in the order {', '.join(AXES)}.",
            )
        known = [_OTHER_NAMES.get(name, name) for name in names]
        order = {axis: place for place, axis in enumerate(AXES)}
        if sorted(known, key=lambda name: order.get(name, -1)) != known:
            raise UsageError(
                f"the device mesh has its axes in the order {', '.join(names)}.",
                "The order determines which ranks are neighbours.",
                f"use the order {', '.join(AXES)}.",
            )
        return _named(dict(zip(names, value.mesh.shape, strict=True)), value)
    if hasattr(value, "dp_shard_size") and hasattr(value, "dp_replicate_size"):
        found = {}
        for axis in ("dp_replicate", "dp_shard", "sp", "tp", "cp"):
            found[axis] = getattr(value, f"{axis}_size", 1)
        stated = {axis: size for axis, size in found.items() if size != 1}
        if "dp_replicate" in stated or "dp_shard" in stated:
            stated = {"dp_replicate": found["dp_replicate"], "dp_shard": found["dp_shard"]} | stated
        return _named(stated, value)
    raise UsageError(
        f"mesh={shown(value)} is not a mesh.",
        "A mesh names axes and their sizes.",
        'pass a dict ({"dp_replicate": 2, "dp_shard": 4}), a Mesh, or a DeviceMesh with '
        "mesh_dim_names.",
    )


def _named(sizes: Mapping[str, Any], value: Any) -> dict[str, Any]:
    known = [_OTHER_NAMES.get(name, name) for name in sizes]
    for name, axis in zip(sizes, known, strict=True):
        if axis not in AXES or known.count(axis) > 1:
            states = "states twice" if axis in AXES else "names"
            raise UsageError(
                f"mesh={shown(value)} {states} the axis '{name}'.",
                f"The axes are {', '.join(AXES)}.",
                "use each of these names at most once.",
            )
    return dict(zip(known, sizes.values(), strict=True))


def shares_gpu(local_size: int | None) -> bool:
    """Return whether this host has fewer GPUs than ranks. False for None."""
    return (
        local_size is not None
        and torch.cuda.is_available()
        and local_size > torch.cuda.device_count()
    )


def default_backend(device: torch.device) -> str:
    """Return the backend of torch.distributed for a device.

    It is gloo for the CPU, and NCCL in addition on GPUs. NCCL is left out if several ranks use one
    GPU, which it does not support.
    """
    is_shared = device.type != "cuda" or shares_gpu(world.local_size())
    return "gloo" if is_shared else "cpu:gloo,cuda:nccl"


def device_of_group(backend: str) -> torch.device | None:
    """Return the `device_id` for `init_process_group`: this rank's GPU with NCCL.

    Without it torch warns at each `barrier` that it has to guess the device.
    """
    device = default_device()
    return device if device.type == "cuda" and "nccl" in backend else None


def init_distributed(
    backend: str | None = None,
    timeout: timedelta = PATIENCE,
    port: int | None = None,
    *,
    store_of: Callable[[], Any | None],
) -> bool:
    """Join the process group that a launcher describes in the environment.

    Without a launcher nothing is started.

    Args:
        backend: Backend of torch.distributed. By default it depends on the device.
        timeout: Timeout of collectives of torch.distributed.
        port: Port of the rendezvous if the launcher does not set one.
        store_of: A function that returns the launcher's key-value store of torch, or None
            (`comm.net.store.launchers_store`).

    Returns:
        Whether this process has a process group.

    Raises:
        UsageError: The launcher's variables are invalid, or describe several processes without a
            meeting place (base/world.py).
        PeerError: The ranks did not connect.

    Note:
        Collective under a launcher: every rank must call it.
    """
    speak()
    if dist.is_available() and dist.is_initialized():
        return True
    found = discover(os.environ)
    if found.port is None and port is not None:
        found = replace(found, port=port)
    found = meeting_place(os.environ, ask_mpi(os.environ, found))
    if found.size == 1:
        refuse_lone_process(os.environ)
        if warning := suspect_lone_process(os.environ):
            log_first(str(warning), logging.WARNING)
        return False
    os.environ.update(found.variables())  # read by torch, and by scripts that use LOCAL_RANK
    device = default_device()
    if device.type == "cuda":
        torch.cuda.set_device(device)
    backend = backend or default_backend(device)
    lead_gloo(found.nodes == 1, found.address)
    separate_starts()
    try:
        # NCCL's threads use the store at any time, even after Python has ended, so they need
        # torch's own.
        store = store_of() if "nccl" not in backend else None
        if store is None and backend not in ("fake", "mpi"):  # these need no store
            store = _met(found, timeout)
        place = {}
        if store is not None:
            place = {"store": store, "rank": found.rank, "world_size": found.size}
        dist.init_process_group(
            backend, timeout=timeout, device_id=device_of_group(backend), **place
        )
        atexit.register(drain_threads)
    except (dist.DistNetworkError, dist.DistStoreError, OSError) as error:
        # Only the first line, because torch appends a page of C++ frames
        lines = str(error).splitlines() or [type(error).__name__]
        raise PeerError(
            f"rank {found.rank} of {found.size} could not join the other ranks at "
            f"{found.address}:{found.port}: {lines[0][:300]}",
            "Rank 0 listens there, and every rank connects to it before training begins.",
            "look at rank 0's output first; another job on that port needs another MASTER_PORT.",
        ) from None
    return True


def _met(found: World, timeout: timedelta) -> Any:
    """Return torch's store after all ranks have joined it.

    A warning names the missing ranks after `TELL_SECONDS`.
    """
    others = f"{found.size - 1} more rank(s)"
    if found.rank:
        others = "rank 0, which listens there once it has started"
    waits = (
        f"rank {found.rank} has waited {TELL_SECONDS:.0f} s at {found.address}:{found.port} for "
        f"{others}"
    )
    teller = threading.Timer(TELL_SECONDS, logger.warning, [waits])
    teller.daemon = True
    teller.start()
    try:
        meeting = dist.rendezvous("env://", found.rank, found.size, timeout=min(timeout, MEETING))  # type: ignore[attr-defined]
        store, _, _ = next(meeting)
    finally:
        teller.cancel()
    store.set_timeout(timeout)
    # As torch does, because the store may have other users
    return dist.PrefixStore("default_pg", store)  # type: ignore[attr-defined]  # public


def current_mesh(
    device: torch.device | None = None, wish: Any = None, *, store_of: Callable[[], Any | None]
) -> Mesh:
    """Return the mesh of this process, and join its process group if there is one.

    Args:
        device: The device of this rank; by default `default_device`.
        wish: The axes that the caller states (`mesh_of`). By default all ranks are along dp_shard.
        store_of: A function that returns the launcher's key-value store of torch, or None.

    Raises:
        UsageError: The axes do not fit the world.

    Note:
        Collective under a launcher: every rank must call it.
    """
    device = device or default_device()
    wanted = mesh_of(wish)
    if init_distributed(store_of=store_of) and dist.get_world_size() > 1:
        return wanted.on_world(dist.get_world_size(), dist.get_rank(), device)
    log_first(
        "no launcher: a world of one process (`deepseek-zero run --nproc 2 script.py` starts two)"
    )
    return wanted.on_world(1, 0, device)
