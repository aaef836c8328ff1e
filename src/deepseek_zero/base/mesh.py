"""Named axes over the ranks of a world, and the start of torch.distributed.

A `Mesh` is arithmetic: it can be made for any rank of any world without a process group.  A process
without a launcher
is a world of one: it joins no group and runs the same code with smaller data.
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

# Evidence ends a wait (comm/flight_recorder.py), never patience: a rank that loads data for an hour
# is late, not dead.
PATIENCE = timedelta(days=7)
TELL_SECONDS = 30.0  # after which a rank says whom it waits for


AXES = ("pp", "dp_replicate", "dp_shard", "sp", "tp")  # from the slowest to the fastest
SHARD_AXES = ("dp_shard", "sp")  # over whose ranks a state is cut
# Over whose ranks gradients are summed: they have one piece of the model
REDUCE_AXES = ("dp_replicate", *SHARD_AXES)
# A run of neighbours among the ranks along the shard axes (`Mesh.inner_groups`); no factor
INNER_AXES = ("inner",)
REST = -1  # the size of an axis that takes the ranks the others leave
_OTHER_NAMES = {
    "replicate": "dp_replicate",
    "shard": "dp_shard",
    "dp": "dp_shard",
    "fsdp": "dp_shard",
}


@dataclass(frozen=True)
class Mesh:
    """Named axes over the ranks of a world, and where one rank stands on them.  Needs no process
    group.

        rank = (((pp * R + dp_replicate) * S + dp_shard) * C + sp) * T + tp

    The sizes are pp, R, S, C and T.  Three numbers follow, and one is never used for another:
    `data_size` ranks see different batches, `shard_size` ranks hold the slices of one state,
    `reduce_size` ranks' gradients are summed.
    dp_shard: `REST` takes what the other axes leave of the world (`on_world`).
    """

    pp: int = 1
    dp_replicate: int = 1
    dp_shard: int = REST
    sp: int = 1
    tp: int = 1
    rank: int = 0
    device: torch.device = CPU

    def __post_init__(self) -> None:
        for axis, size in zip(AXES, self.sizes, strict=True):
            is_size = isinstance(size, int) and not isinstance(size, bool)
            if not is_size or (size < 1 and not (size == REST and axis == "dp_shard")):
                raise UsageError(
                    f"mesh axis {axis} is {shown(size)}.",
                    "An axis has at least one rank.",
                    "give it a whole number from 1 on"
                    + (", or leave it out." if axis == "dp_shard" else "."),
                )

    def on_world(self, world_size: int, rank: int = 0, device: torch.device | None = None) -> Mesh:
        """Return this mesh over a world of that many ranks, seen by one of them; UsageError where
        it does not fit.
        """
        others = math.prod(size for size in self.sizes if size != REST)
        shard = world_size // others if self.dp_shard == REST else self.dp_shard
        found = replace(self, dp_shard=max(1, shard), rank=rank, device=device or self.device)
        if found.world_size != world_size:
            stated = ", ".join(
                f"{axis}={size}"
                for axis, size in zip(AXES, self.sizes, strict=True)
                if size not in (1, REST)
            )
            raise UsageError(
                f"the mesh ({stated}) does not fit a world of {world_size} ranks.",
                f"The product of the axes is {others}"
                + (", which must divide the world." if self.dp_shard == REST else "."),
                "choose sizes whose product is the number of ranks, or leave dp_shard out.",
            )
        return found

    # -- sizes

    @property
    def sizes(self) -> tuple[int, ...]:
        """The size of each axis, in the order of `AXES`."""
        return (self.pp, self.dp_replicate, self.dp_shard, self.sp, self.tp)

    @cached_property
    def world_size(self) -> int:
        """All ranks."""
        return math.prod(self.sizes)

    @cached_property
    def data_size(self) -> int:
        """Ranks that see different batches; the batch of a step is micro-batch x accumulation x
        this.
        """
        return self.dp_replicate * self.dp_shard

    @cached_property
    def shard_size(self) -> int:
        """Ranks that hold the slices of one sharded state."""
        return self.dp_shard * self.sp

    @cached_property
    def reduce_size(self) -> int:
        """Ranks whose gradients are summed, which is what their mean divides by."""
        return self.dp_replicate * self.dp_shard * self.sp

    @property
    def is_distributed(self) -> bool:
        """Return whether there is more than one rank."""
        return self.world_size > 1

    # -- where this rank stands

    @property
    def coordinates(self) -> dict[str, int]:
        """This rank's place on each axis."""
        found = {}
        rest = self.rank
        for axis, size in zip(reversed(AXES), reversed(self.sizes), strict=True):
            rest, found[axis] = divmod(rest, size)
        return {axis: found[axis] for axis in AXES}

    def place_of(self, rank: int) -> str:
        """Return a rank's place on the axes that have several ranks: "pp=1, dp_shard=0, tp=1"; ""
        on dp_shard alone.
        """
        several = [axis for axis, size in zip(AXES, self.sizes, strict=True) if size > 1]
        here = replace(self, rank=rank).coordinates
        return (
            ""
            if several in ([], ["dp_shard"])
            else ", ".join(f"{axis}={here[axis]}" for axis in several)
        )

    @property
    def data_index(self) -> int:
        """Return the number of this rank's share of a batch, of `data_size` shares."""
        here = self.coordinates
        return here["dp_replicate"] * self.dp_shard + here["dp_shard"]

    @property
    def shard_index(self) -> int:
        """Return the number of this rank's slice, of `shard_size` slices."""
        here = self.coordinates
        return here["dp_shard"] * self.sp + here["sp"]

    def rank_at(self, **coordinates: int) -> int:
        """The rank at this rank's coordinates but for those given."""
        found = 0
        here = self.coordinates | coordinates
        for axis, size in zip(AXES, self.sizes, strict=True):
            found = found * size + here[axis]
        return found

    def ranks_along(self, *axes: str) -> tuple[int, ...]:
        """The ranks that differ from this one on these axes only, ascending; this one is among
        them.
        """
        sizes = dict(zip(AXES, self.sizes, strict=True))
        places = itertools.product(*(range(sizes[axis]) for axis in AXES if axis in axes))
        names = [axis for axis in AXES if axis in axes]
        return tuple(self.rank_at(**dict(zip(names, place, strict=True))) for place in places)

    def groups_along(self, *axes: str) -> tuple[tuple[int, ...], ...]:
        """`ranks_along` of every rank: the world cut into groups, in the order of their first
        ranks.
        """
        found = {
            replace(self, rank=rank).ranks_along(*axes): None for rank in range(self.world_size)
        }
        return tuple(found)

    def inner_groups(self, size: int) -> tuple[tuple[int, ...], ...]:
        """The world cut into runs of `size` neighbours among those that hold the slices of one
        state, ascending; the size divides `shard_size`.
        """
        runs = range(0, self.shard_size, size)
        return tuple(
            ranks[start : start + size]
            for ranks in self.groups_along(*SHARD_AXES)
            for start in runs
        )

    def host_groups(
        self, per_host: int
    ) -> tuple[tuple[tuple[int, ...], ...], tuple[tuple[int, ...], ...]]:
        """The world cut twice, for sums by host: into the ranks of one host among those that hold
        the slices of one state, and into those with one place on their hosts, hosts ascending.

        per_host: ranks of the world that each host has, in runs.  UsageError where hosts have
        different numbers.
        """
        dealt = [self._on_hosts(ranks, per_host) for ranks in self.groups_along(*SHARD_AXES)]
        near = tuple(run for runs in dealt for run in runs)
        return near, tuple(across for runs in dealt for across in zip(*runs, strict=True))

    def hosts_of(self, per_host: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return this rank's two groups of `host_groups`."""
        runs = self._on_hosts(self.ranks_along(*SHARD_AXES), per_host)
        near = next(run for run in runs if self.rank in run)
        return near, tuple(run[near.index(self.rank)] for run in runs)

    def near_size(self, per_host: int) -> int:
        """Return how many ranks of one host hold slices of one state; 1 where sums by host are
        those by rank.
        """
        size = len(self.hosts_of(per_host)[0]) if per_host > 1 else 1
        return 1 if size == self.shard_size else size

    def _on_hosts(self, ranks: tuple[int, ...], per_host: int) -> list[tuple[int, ...]]:
        """Return ranks that hold the slices of one state, host by host."""
        runs = [
            tuple(run) for _, run in itertools.groupby(ranks, key=lambda rank: rank // per_host)
        ]
        if len(sizes := sorted({len(run) for run in runs})) > 1:
            raise UsageError(
                f"ranks_per_host={per_host}: of the ranks that hold the slices of one state, hosts "
                f"have {' or '.join(map(str, sizes))}.",
                "Sums by host are formed in every host over the same number of ranks.",
                f"choose a divisor of {self.shard_size}, or 1 for sums in the order of ranks.",
            )
        return runs

    def outer_groups(self, neighbours: int) -> tuple[tuple[int, ...], ...]:
        """The world cut into the ranks that hold the same slice of what so many neighbours along
        "tp" share: replicas, and these neighbours of each, ascending.
        """
        found: dict[tuple[int, ...], list[int]] = {}
        for rank in range(self.world_size):
            here = replace(self, rank=rank).coordinates
            place = (here["pp"], here["dp_shard"], here["sp"], here["tp"] // neighbours)
            found.setdefault(place, []).append(rank)
        return tuple(map(tuple, found.values()))

    def __str__(self) -> str:
        stated = [
            f"{axis}={size}" for axis, size in zip(AXES, self.sizes, strict=True) if size != 1
        ]
        return " x ".join(stated) or "one rank"


def mesh_of(value: Any) -> Mesh:
    """Read a mesh from what a caller passed: None, a Mesh, a mapping of axis to size, torch's
    DeviceMesh (by its names) or accelerate's ParallelismConfig.  Its size is not compared with any
    world yet; UsageError where it is none.
    """
    return Mesh(**axes_of(value))


def axes_of(value: Any) -> dict[str, Any]:
    """Return the axes that `mesh_of`'s value states, and their sizes, which `Mesh` has not looked
    at yet.

    A Mesh states every axis, a mapping and a DeviceMesh those that they name.  Of a
    ParallelismConfig a size of 1 is the default, which states nothing, but for the two data axes,
    which it states together.
    """
    if value is None:
        return {}
    if isinstance(value, Mesh):
        return dict(zip(AXES, value.sizes, strict=True))
    if isinstance(value, Mapping):
        return _named({str(name): size for name, size in value.items()}, value)
    if (names := getattr(value, "mesh_dim_names", None)) is not None:
        ranks = value.mesh.flatten().tolist()
        if ranks != list(range(len(ranks))):
            raise UsageError(
                f"the device mesh has its ranks in the order {shown(ranks)}.",
                "Ranks ascend along the axes, the last one fastest.",
                "build it with init_device_mesh, with its axes in the order "
                + ", ".join(AXES)
                + ".",
            )
        known = [_OTHER_NAMES.get(name, name) for name in names]
        if sorted(known, key=lambda name: AXES.index(name) if name in AXES else -1) != known:
            raise UsageError(
                f"the device mesh has its axes in the order {', '.join(names)}.",
                "The order says which ranks are neighbours.",
                "use the order " + ", ".join(AXES) + ".",
            )
        return _named(dict(zip(names, value.mesh.shape, strict=True)), value)
    if hasattr(value, "dp_shard_size") and hasattr(value, "dp_replicate_size"):
        found = {
            axis: getattr(value, f"{axis}_size", 1)
            for axis in ("dp_replicate", "dp_shard", "sp", "tp", "cp")
        }
        is_data_stated = found["dp_replicate"] != 1 or found["dp_shard"] != 1
        keeps = ("dp_replicate", "dp_shard") if is_data_stated else ()
        return _named(
            {axis: size for axis, size in found.items() if axis in keeps or size != 1}, value
        )
    raise UsageError(
        f"mesh={shown(value)} is no mesh.",
        "A mesh names axes and their sizes.",
        'pass a dict ({"dp_replicate": 2, "dp_shard": 4}), a Mesh, or a DeviceMesh with '
        "mesh_dim_names.",
    )


def _named(sizes: Mapping[str, Any], value: Any) -> dict[str, Any]:
    known = [_OTHER_NAMES.get(name, name) for name in sizes]
    for name, axis in zip(sizes, known, strict=True):
        if axis not in AXES or known.count(axis) > 1:
            raise UsageError(
                f"mesh={shown(value)} {'names' if axis not in AXES else 'states twice'} the axis "
                f"'{name}'.",
                f"The axes are {', '.join(AXES)}.",
                "use each of these names at most once.",
            )
    return dict(zip(known, sizes.values(), strict=True))


def shares_gpu(local_size: int | None) -> bool:
    """Return whether a host that runs so many ranks has fewer GPUs, so that some share one. None
    counts as no.
    """
    return (
        local_size is not None
        and torch.cuda.is_available()
        and local_size > torch.cuda.device_count()
    )


def default_backend(device: torch.device) -> str:
    """gloo on the host; on GPUs NCCL beside it, unless the launcher says that ranks share one,
    which NCCL refuses.
    """
    is_shared = device.type != "cuda" or shares_gpu(world.local_size())
    return "gloo" if is_shared else "cpu:gloo,cuda:nccl"


def device_of_group(backend: str) -> torch.device | None:
    """Return the `device_id` that torch's init_process_group should have: this rank's GPU if NCCL
    serves it.

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
    """Join the group a launcher describes in the environment; True if this process belongs to one
    afterwards.

    Without a launcher nothing is started (a world of one).  port: where ranks meet if the launcher
    does not say.
    store_of: returns the store of torch's that the launcher keeps, if it keeps one
    (`comm.net.store.launchers_store`). UsageError where a launcher says of several processes and
    not how they meet (base/world.py), or says nonsense. Collective under a launcher.
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
    os.environ.update(found.variables())  # where torch looks, and scripts that ask for LOCAL_RANK
    device = default_device()
    if device.type == "cuda":
        torch.cuda.set_device(device)
    backend = backend or default_backend(device)
    lead_gloo(found.nodes == 1, found.address)
    separate_starts()
    try:
        # NCCL's own threads ask a store whenever they like, also where Python has ended: they get
        # torch's own.
        store = store_of() if "nccl" not in backend else None
        if store is None and backend not in ("fake", "mpi"):  # they need no store
            store = _met(found, timeout)
        place = (
            {} if store is None else {"store": store, "rank": found.rank, "world_size": found.size}
        )
        dist.init_process_group(
            backend, timeout=timeout, device_id=device_of_group(backend), **place
        )
        atexit.register(drain_threads)
    except (dist.DistNetworkError, dist.DistStoreError, OSError) as error:
        # Torch adds a page of C++ frames to its first one
        lines = str(error).splitlines() or [type(error).__name__]
        raise PeerError(
            f"rank {found.rank} of {found.size} did not meet the others at "
            f"{found.address}:{found.port}: {lines[0][:300]}",
            "Rank 0 listens there, and every rank connects to it before training begins.",
            "look at rank 0's output first; another job on that port needs another MASTER_PORT.",
        ) from None
    return True


def _met(found: World, timeout: timedelta) -> Any:
    """Return torch's store at the meeting place, once all ranks are there; say whom this one waits
    for.
    """
    others = (
        "rank 0, which listens there once it has started"
        if found.rank
        else f"{found.size - 1} more to come"
    )
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
    # As torch does: the store may be another's, too.
    return dist.PrefixStore("default_pg", store)  # type: ignore[attr-defined]  # public


def current_mesh(
    device: torch.device | None = None, wish: Any = None, *, store_of: Callable[[], Any | None]
) -> Mesh:
    """The mesh of this process; starts torch.distributed if a launcher's variables are there.

    wish: what the caller says of it (`mesh_of`); nothing: every rank along dp_shard. store_of: as
    `init_distributed`.
    """
    device = device or default_device()
    wanted = mesh_of(wish)
    if init_distributed(store_of=store_of) and dist.get_world_size() > 1:
        return wanted.on_world(dist.get_world_size(), dist.get_rank(), device)
    log_first(
        "no launcher: a world of one process (`deepseek-zero run --nproc 2 script.py` starts two)"
    )
    return wanted.on_world(1, 0, device)
