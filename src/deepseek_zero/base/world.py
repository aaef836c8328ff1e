"""The identity of this process: its rank, world size, host, and rendezvous.

`discover` reads the variables of a launcher for one process, using a table of launchers. `nodes_of`
reads the variables of a cluster for a launcher of ours. Neither changes anything. `rank`, `size`
and `local_rank` describe the running process: from its process group if it has joined one, else
from the launcher. No other file reads these variables. Standard library only, because the log and
the command line work without torch.
"""

from __future__ import annotations

import itertools
import os
import re
import socket
import sys
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from .errors import UsageError

Environment = Mapping[str, str]

ALONE = "DEEPSEEK_ZERO_ALONE"  # 1 means one process, whatever a launcher sets
DEFAULT_PORT = 29500  # torchrun's and DeepSpeed's
MOST_PORT = 65535


@dataclass(frozen=True)
class World:
    """The identity of one process; None for values that its launcher does not set.

    Attributes:
        rank: The rank.
        size: Number of ranks.
        local_rank: Index among the ranks of this host.
        local_size: Number of ranks of this host.
        address: Address at which rank 0 listens.
        port: Port at which rank 0 listens.
        source: Name of the launcher.
        fix: How to pass the address and port with this launcher.
        node: Index of this host.
        nodes: Number of hosts.
    """

    rank: int = 0
    size: int = 1
    local_rank: int | None = 0
    local_size: int | None = 1
    address: str | None = None
    port: int | None = None
    source: str = "no launcher"
    fix: str = ""  # how to pass the address and port with this launcher
    node: int | None = 0
    nodes: int | None = 1

    def variables(self) -> dict[str, str]:
        """Return this world as torchrun's variables, which scripts and `env://` read."""
        said = {
            "RANK": self.rank,
            "WORLD_SIZE": self.size,
            "LOCAL_RANK": self.local_rank,
            "LOCAL_WORLD_SIZE": self.local_size,
            "MASTER_ADDR": self.address,
            "MASTER_PORT": self.port,
        }
        return {name: str(value) for name, value in said.items() if value is not None}


@dataclass(frozen=True)
class Launcher:
    """The names of one launcher's variables.

    Attributes:
        source: Name of the launcher.
        rank: Variable with the rank.
        size: Variable with the number of ranks.
        local_rank: Variable with the index among the ranks of a host.
        local_size: Variable with the number of ranks of a host.
        marks: Variables that must be set for the others to describe a world.
        fix: How to pass the address and port with this launcher.
        node: Variables with the index of a host.
        nodes: Variable with the number of hosts.
    """

    source: str
    rank: str
    size: str
    local_rank: str
    local_size: str
    marks: tuple[str, ...]
    fix: str
    node: tuple[str, ...] = ()
    nodes: str = ""


TORCHRUN = Launcher(
    "RANK and WORLD_SIZE",
    "RANK",
    "WORLD_SIZE",
    "LOCAL_RANK",
    "LOCAL_WORLD_SIZE",
    (),
    "start the script with `deepseek-zero run --nproc N script.py` (or torchrun), which set all of "
    "them",
    ("GROUP_RANK", "NODE_RANK"),
    "GROUP_WORLD_SIZE",
)
# A batch script has SLURM_NTASKS and SLURM_PROCID=0 and is one process. Only a step creates a
# world.
SLURM = Launcher(
    "Slurm",
    "SLURM_PROCID",
    "SLURM_STEP_NUM_TASKS",
    "SLURM_LOCALID",
    "SLURM_STEP_TASKS_PER_NODE",
    ("SLURM_STEP_ID", "SLURM_STEP_NUM_TASKS"),
    "export MASTER_ADDR=$(scontrol show hostnames | head -n1) and MASTER_PORT before srun",
    ("SLURM_NODEID",),
    "SLURM_STEP_NUM_NODES",
)
MPI = (
    Launcher(
        "Open MPI",
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_SIZE",
        "OMPI_COMM_WORLD_LOCAL_RANK",
        "OMPI_COMM_WORLD_LOCAL_SIZE",
        ("OMPI_COMM_WORLD_SIZE",),
        "write `mpirun -x MASTER_ADDR=<address of rank 0's host> -x MASTER_PORT=29500 ...`",
    ),
    Launcher(
        "MPICH or Intel MPI",
        "PMI_RANK",
        "PMI_SIZE",
        "MPI_LOCALRANKID",
        "MPI_LOCALNRANKS",
        ("PMI_SIZE",),
        "write `mpiexec -genv MASTER_ADDR <address of rank 0's host> -genv MASTER_PORT 29500 ...`",
    ),
    Launcher(
        "MVAPICH",
        "MV2_COMM_WORLD_RANK",
        "MV2_COMM_WORLD_SIZE",
        "MV2_COMM_WORLD_LOCAL_RANK",
        "MV2_COMM_WORLD_LOCAL_SIZE",
        ("MV2_COMM_WORLD_SIZE",),
        "write `mpirun_rsh ... MASTER_ADDR=<address of rank 0's host> MASTER_PORT=29500 python "
        "...`",
    ),
)


def discover(environ: Environment) -> World:
    """Return the world that a launcher's variables describe; one process without any.

    The address and port may still be unknown.

    Raises:
        UsageError: The variables contradict each other or are not numbers.
    """
    if environ.get(ALONE) == "1":
        return World(source=f"{ALONE}=1")
    stated_rank = _number(environ, TORCHRUN.rank, 0)
    stated_size = _number(environ, TORCHRUN.size, 1)
    launcher = _launcher_of(environ)
    if launcher is None or (stated_rank is not None and stated_size is not None):
        if stated_size in (None, 1) and not any(name in environ for name in _COUNTED):
            _refuse_lone_process(environ, launcher)
        return _stated(environ, stated_rank, stated_size)
    found = _read(environ, launcher)
    for name, stated, actual in (
        (TORCHRUN.rank, stated_rank, found.rank),
        (TORCHRUN.size, stated_size, found.size),
    ):
        if stated not in (None, actual):
            raise UsageError(
                f"{name}={stated}, but {launcher.source} has {actual} "
                f"({launcher.rank}={found.rank}, {launcher.size}={found.size}).",
                "A process has one rank in one world.",
                f"unset {name}, or set RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT together.",
            )
    return found


# torchrun, our launcher and DeepSpeed's set these to the number of ranks that they started, which
# may be one.
_COUNTED = (TORCHRUN.local_size, "LOCAL_SIZE")


def _launcher_of(environ: Environment) -> Launcher | None:
    """Return the innermost launcher.

    An mpirun inside a Slurm job starts its daemons as a step, whose variables their ranks inherit.
    It numbers the ranks of a host; a step that uses PMI leaves that to Slurm's variables.
    """
    by_mpi = next((each for each in MPI if all(mark in environ for mark in each.marks)), None)
    if not all(mark in environ for mark in SLURM.marks):
        return by_mpi
    return by_mpi if by_mpi is not None and by_mpi.local_rank in environ else SLURM


def _stated(environ: Environment, rank: int | None, size: int | None) -> World:
    """Return the world that RANK and WORLD_SIZE describe."""
    if rank is None and size not in (None, 1):
        raise _incomplete(size or 1, [TORCHRUN.rank])
    if (rank or 0) >= (size or 1):
        world = f"WORLD_SIZE={size}" if size is not None else "WORLD_SIZE is not set"
        raise UsageError(
            f"RANK={rank}, but {world}.",
            "Ranks are numbered from 0 to WORLD_SIZE - 1.",
            f"{TORCHRUN.fix}; to run one process, unset RANK or set {ALONE}=1.",
        )
    if size in (None, 1):
        return World(local_rank=_number(environ, TORCHRUN.local_rank, 0))
    return _read(environ, TORCHRUN)


def _read(environ: Environment, launcher: Launcher) -> World:
    size = _number(environ, launcher.size, 1) or 1
    rank = _number(environ, launcher.rank, 0)
    if rank is None and size > 1:
        raise UsageError(
            f"{launcher.size}={size} but {launcher.rank} is not set.",
            f"{launcher.source} numbers its processes with it.",
            f"start the script through {launcher.source}, or set {ALONE}=1 for one process on "
            "purpose.",
        )
    if (rank or 0) >= size:
        raise UsageError(
            f"{launcher.rank}={rank}, but {launcher.size}={size}.",
            "Ranks are numbered from 0 to size - 1.",
            launcher.fix,
        )
    if size == 1:
        return World(source=launcher.source)
    local_size = (
        _tasks_here(environ) if launcher is SLURM else _number(environ, launcher.local_size, 1)
    )
    local_rank = _number(environ, launcher.local_rank, 0)
    for name, value, limit, stated in (
        (launcher.local_size, local_size, size + 1, ""),
        (
            launcher.local_rank,
            local_rank,
            local_size or size,
            f" and {launcher.local_size}={local_size}",
        ),
    ):
        if value is not None and value >= limit:
            raise UsageError(
                f"{name}={value}, but {launcher.size}={size}{stated}.",
                "A host has at most all ranks, numbered from 0.",
                f"unset {name}, or let the launcher set it.",
            )
    nodes = 1 if local_size == size else _number(environ, launcher.nodes, 1)
    node: int | None = 0
    if nodes != 1:
        stated_names = (name for name in launcher.node if name in environ)
        node = next((_number(environ, name, 0) for name in stated_names), None)
    if nodes is not None and (node or 0) >= nodes:
        raise UsageError(
            f"this host is number {node} ({' or '.join(launcher.node)}), but "
            f"{launcher.nodes}={nodes}.",
            "Hosts are numbered from 0.",
            f"unset {launcher.nodes}, or let the launcher set it.",
        )
    return World(
        rank or 0,
        size,
        local_rank,
        local_size,
        environ.get("MASTER_ADDR") or _address(environ, launcher, is_one_host=local_size == size),
        _number(environ, "MASTER_PORT", 1, MOST_PORT) or _port(environ, launcher),
        launcher.source,
        launcher.fix,
        node,
        nodes,
    )


_MOST_NUMBER = 999_999_999


def _number(environ: Environment, name: str, least: int, most: int = _MOST_NUMBER) -> int | None:
    """Return a variable as a number, or None if it is not set."""
    text = environ.get(name)
    if text is None:
        return None
    if not re.fullmatch(r"[0-9]{1,9}", text) or not least <= int(text) <= most:
        limits = f"a number from {least} to {most}"
        if most == _MOST_NUMBER:
            limits = f"a number of at least {least}"
        raise UsageError(
            f"{name}={text[:80]!r} is not {limits}.",
            "It describes the position of this process among the ranks.",
            f"unset it, or let a launcher set it (`deepseek-zero run --nproc N`); {ALONE}=1 means "
            "one process.",
        )
    return int(text)


def _task_counts(environ: Environment) -> list[int]:
    """Return the tasks of each host from Slurm's notation.

    "2(x3),1" means two on each of three hosts and one on the fourth. Empty if the variable is
    missing.
    """
    counts: list[int] = []
    for part in environ.get(SLURM.local_size, "").split(","):
        found = re.fullmatch(r"(\d{1,9})(?:\(x(\d{1,5})\))?", part)
        if found is None:
            return []
        counts += [int(found[1])] * int(found[2] or 1)
    return counts


def _tasks_here(environ: Environment) -> int | None:
    counts = _task_counts(environ)
    node = _number(environ, "SLURM_NODEID", 0)
    return counts[node] if node is not None and node < len(counts) else None


def _address(environ: Environment, launcher: Launcher, *, is_one_host: bool) -> str | None:
    """Return the address that a launcher's variables imply, or None.

    Slurm lists its hosts. On one host it is this one. Open MPI provides the host of its mpirun,
    which usually is that of rank 0 (`_refuse_foreign_address`).
    """
    if launcher is SLURM and environ.get("SLURM_STEP_NODELIST"):
        return next(hosts_of(environ["SLURM_STEP_NODELIST"]))
    if is_one_host and launcher is not TORCHRUN:
        return "127.0.0.1"
    if launcher is not MPI[0]:
        return None
    if found := re.search(r"tcp://([0-9.,]+):", environ.get(_MPIRUN_LISTENS, "")):
        return next(
            (each for each in found[1].split(",") if each and not each.startswith("127.")), None
        )
    job = re.fullmatch(r"prterun-(.+)-\d+@\d+", environ.get(_MPIRUN_JOB, ""))
    return job[1] if job is not None else None


_MPIRUN_LISTENS = "OMPI_MCA_orte_hnp_uri"  # Open MPI 4: "4711.0;tcp://10.0.0.1,172.17.0.1:41157"
_MPIRUN_JOB = "PMIX_NAMESPACE"  # Open MPI 5: host and process id of mpirun, "prterun-h0-4711@1"


def hosts_of(text: str) -> Iterator[str]:
    """Yield the hosts of a Slurm host list in its order.

    "h[03-05,9],g1" is h03, h04, h05, h9, g1.

    Raises:
        UsageError: The text is not such a list.
    """
    for part in re.split(r",(?![^\[]*\])", text):
        pieces = re.split(r"\[([^\[\]]*)\]", part)  # plain, in brackets, plain, ...
        if not part or any(mark in plain for plain in pieces[::2] for mark in "[], "):
            raise _no_host_list(text)
        ranges = [
            _range_of(inner, text) if place % 2 else [inner] for place, inner in enumerate(pieces)
        ]
        yield from map("".join, itertools.product(*ranges))


def _range_of(inner: str, text: str) -> list[str]:
    """Expand "03-05,9" to 03, 04, 05, 9; a leading zero sets the width of the numbers."""
    numbers: list[str] = []
    for each in inner.split(","):
        found = re.fullmatch(r"(\d{1,9})(?:-(\d{1,9}))?", each)
        if found is None or int(found[2] or found[1]) - int(found[1]) not in range(_MOST_HOSTS):
            raise _no_host_list(text)
        width = len(found[1]) if found[1].startswith("0") else 0
        numbers += [
            f"{number:0{width}d}" for number in range(int(found[1]), int(found[2] or found[1]) + 1)
        ]
    return numbers


_MOST_HOSTS = 100_000


def _no_host_list(text: str) -> UsageError:
    return UsageError(
        f"{text[:80]!r} is not a list of hosts.",
        'Slurm writes SLURM_STEP_NODELIST as "h[0-1,7],g3".',
        SLURM.fix + ".",
    )


def _port(environ: Environment, launcher: Launcher) -> int | None:
    """Return a port that differs between jobs on one host, if the launcher allows it."""
    if launcher is SLURM:
        # An interactive step has a number of ten digits
        job, step = (
            int(text) if (text := environ.get(name, "")).isdecimal() else 0 for name in _STEP
        )
        return 20000 + job % 20000 + step % 16
    return None if launcher is TORCHRUN else DEFAULT_PORT


_STEP = ("SLURM_JOB_ID", "SLURM_STEP_ID")


def _incomplete(size: int, missing: list[str]) -> UsageError:
    are = "is" if len(missing) == 1 else "are"
    return UsageError(
        f"WORLD_SIZE={size} but {', '.join(missing)} {are} not set.",
        "A world of several processes is described by RANK, WORLD_SIZE, MASTER_ADDR and "
        "MASTER_PORT.",
        f"{TORCHRUN.fix}; {ALONE}=1 means one process on purpose.",
    )


def meeting_place(environ: Environment, world: World) -> World:
    """Return the world if it has an address and a port for the rendezvous.

    Args:
        environ: Environment variables of this process.
        world: The result of `discover`.

    Returns:
        The same world, in which `address` and `port` are set.

    Raises:
        UsageError: The address or port is unknown, or a guessed address is not rank 0's own. The
            message names the variable to set.
    """
    missing = [
        name
        for name, value in (("MASTER_ADDR", world.address), ("MASTER_PORT", world.port))
        if value is None
    ]
    if world.size == 1 or not missing:
        _refuse_foreign_address(environ, world)
        return world
    if world.source == TORCHRUN.source:
        raise _incomplete(world.size, missing)
    are = "is" if len(missing) == 1 else "are"
    raise UsageError(
        f"{world.source} started {world.size} processes, and {' and '.join(missing)} {are} not "
        "set.",
        "Its variables have no address for the rendezvous; each would train a separate model.",
        f"{world.fix}; {ALONE}=1 means {world.size} separate runs on purpose.",
    )


def ask_mpi(environ: Environment, world: World) -> World:
    """Return the world with rank 0's address from mpi4py, if it is needed.

    It is used if an MPI started the processes on several hosts, MASTER_ADDR is not set, and mpi4py
    is installed for this MPI. It takes precedence over a guessed address, which is that of mpirun:
    rank 0 may be on another host.

    Args:
        environ: Environment variables of this process.
        world: The result of `discover`.

    Returns:
        The world, changed only if mpi4py returned an address.

    Note:
        Collective over MPI's world if mpi4py is used: every process must call it.
    """
    by_mpi = world.source in {each.source for each in MPI}
    is_known = world.size == world.local_size or bool(environ.get("MASTER_ADDR"))
    if is_known or not by_mpi or find_spec("mpi4py") is None:
        return world
    try:
        everyone = import_module("mpi4py.MPI").COMM_WORLD
    except (ImportError, RuntimeError):  # no MPI library found
        return world
    # mpi4py was built for another MPI
    if (everyone.Get_size(), everyone.Get_rank()) != (world.size, world.rank):
        return world
    row = bytearray(_LONGEST_NAME)
    if world.rank == 0:
        name = socket.gethostname()
        with suppress(OSError):
            name = next(
                (
                    place
                    for each in socket.getaddrinfo(name, None)
                    if not (place := str(each[4][0])).startswith(("127.", "::1", "fe80"))
                ),
                name,
            )
        row[: len(name)] = name.encode()
    everyone.Bcast(row, root=0)
    return replace(world, address=row.rstrip(b"\0").decode())


_LONGEST_NAME = 256


def _refuse_foreign_address(environ: Environment, world: World) -> None:
    """Raise UsageError on rank 0 if the guessed address is not one of this host."""
    if world.rank or world.address is None or environ.get("MASTER_ADDR"):
        return
    try:
        family, kind, _, _, place = socket.getaddrinfo(world.address, 0, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind) as probe:
            probe.bind(place)
    except OSError as error:
        raise UsageError(
            f"the rendezvous address is {world.address}, which is not an address of this machine "
            f"({error}).",
            f"Rank 0 listens there, and {world.source}'s variables have no other address.",
            f"{world.fix}.",
        ) from None


# -- machines, for a launcher


@dataclass(frozen=True)
class Nodes:
    """The hosts on which a cluster engine started a command. None means unknown.

    Attributes:
        source: Name of the engine.
        num_nodes: Number of hosts.
        node_rank: Index of this host.
        nproc: Processes on each host, as for torchrun ("4", "auto", "cpu", "gpu").
        num_gpus: GPUs on each host.
        address: Address of the rendezvous.
        port: Port of the rendezvous.
    """

    source: str
    num_nodes: int
    node_rank: int | None = None
    nproc: str | None = None
    num_gpus: int | None = None
    address: str | None = None
    port: int | None = None


@dataclass(frozen=True)
class NodeVariables:
    """The names of one engine's variables, with the meanings of `Nodes`."""

    source: str
    num_nodes: str
    node_rank: str
    address: str
    nproc: str = ""
    num_gpus: str = ""
    port: str = ""


PET = NodeVariables(
    "PET_*",
    "PET_NNODES",
    "PET_NODE_RANK",
    "PET_MASTER_ADDR",
    nproc="PET_NPROC_PER_NODE",
    port="PET_MASTER_PORT",
)
ENGINES = (
    NodeVariables(
        "SkyPilot",
        "SKYPILOT_NUM_NODES",
        "SKYPILOT_NODE_RANK",
        "SKYPILOT_NODE_IPS",
        num_gpus="SKYPILOT_NUM_GPUS_PER_NODE",
    ),
    NodeVariables(
        "dstack",
        "DSTACK_NODES_NUM",
        "DSTACK_NODE_RANK",
        "DSTACK_MASTER_NODE_IP",
        num_gpus="DSTACK_GPUS_PER_NODE",
    ),
    NodeVariables(
        "LeaderWorkerSet",
        "LWS_GROUP_SIZE",
        "LWS_WORKER_INDEX",
        "LWS_LEADER_ADDRESS",
    ),
)
# Variables of PyTorchJob for its pods. torchrun uses the same ones for ranks; without LOCAL_RANK
# they may number hosts.
PODS = NodeVariables("RANK and WORLD_SIZE", "WORLD_SIZE", "RANK", "MASTER_ADDR", port="MASTER_PORT")


def nodes_of(environ: Environment) -> Nodes | None:
    """Return the hosts that a launcher's own environment describes, or None.

    Raises:
        UsageError: An engine started several launchers on one host, or a value is invalid.
    """
    if environ.get(ALONE) == "1":
        return None
    stated = (
        _stated_nodes(environ, PET) if PET.num_nodes in environ or PET.nproc in environ else None
    )
    if stated is not None and stated.num_nodes > 1:
        return stated
    found = _nodes_of_engine(environ)
    if found is None:
        return stated
    if stated is None:
        return found
    if PET.num_nodes in environ and found.num_nodes > 1:
        raise UsageError(
            f"{PET.num_nodes}={environ[PET.num_nodes][:80]}, but {found.source} has "
            f"{found.num_nodes} machines.",
            "Each of them would start a separate run.",
            f"unset {PET.num_nodes}, or set {ALONE}=1 for that.",
        )
    # The number of processes per host, not of hosts
    return replace(found, nproc=stated.nproc)


def _nodes_of_engine(environ: Environment) -> Nodes | None:
    """Return the hosts that any engine except PET_* describes."""
    launcher = _launcher_of(environ)
    if launcher is not None:
        return _nodes_of_tasks(environ, launcher)
    engines = ENGINES if TORCHRUN.local_rank in environ else (*ENGINES, PODS)
    return next(
        (_stated_nodes(environ, engine) for engine in engines if engine.num_nodes in environ), None
    )


def _stated_nodes(environ: Environment, engine: NodeVariables) -> Nodes:
    least, most = _stated_count(environ, engine)
    if least != most:
        raise UsageError(
            f"{engine.num_nodes}={environ[engine.num_nodes][:80]} requests {least} to {most} "
            "machines.",
            "A world of changing size is not built.",
            f"set {engine.num_nodes} to one number.",
        )
    num_gpus = _number(environ, engine.num_gpus, 0)
    return Nodes(
        engine.source,
        least,
        _number(environ, engine.node_rank, 0),
        environ.get(engine.nproc) or None,
        num_gpus or None,
        next(iter(environ.get(engine.address, "").split()), None),
        _number(environ, engine.port, 1, MOST_PORT),
    )


def _stated_count(environ: Environment, engine: NodeVariables) -> tuple[int, int]:
    """Return the smallest and largest number of hosts; torchrun accepts "1:4"."""
    text = environ.get(engine.num_nodes, "1")
    ends = [
        _number({engine.num_nodes: each}, engine.num_nodes, 1) or 1 for each in text.split(":", 1)
    ]
    return ends[0], ends[-1]


def _nodes_of_tasks(environ: Environment, launcher: Launcher) -> Nodes | None:
    """Return the hosts if our launcher runs as one task per host of a Slurm step.

    None for a single task.
    """
    tasks = _read(environ, launcher)
    if tasks.size == 1:
        return None
    nodes = tasks.nodes
    if launcher is SLURM and nodes is None:
        nodes = len(_task_counts(environ)) or None
    if nodes != tasks.size or launcher is not SLURM:
        why = "Each would start a separate run."
        option = ""
        if launcher is SLURM:
            why = "It must be started once on each host."
            option = "; or add --ntasks-per-node=1 to srun"
        raise UsageError(
            f"{launcher.source} started {tasks.size} copies of this launcher "
            f"({launcher.size}={tasks.size}).",
            why,
            "let it start the script itself (`srun python script.py`, `mpirun python script.py`), "
            f"which makes one world{option}; {ALONE}=1 means separate runs.",
        )
    return Nodes(launcher.source, nodes, tasks.node, address=tasks.address, port=tasks.port)


def _refuse_lone_process(environ: Environment, launcher: Launcher | None) -> None:
    """Raise UsageError in a world of one if an engine runs the same command elsewhere."""
    for each in MPI if launcher is None else ():
        if _number(environ, each.rank, 0) and each.size not in environ:
            raise UsageError(
                f"{each.rank}={environ[each.rank]}, but {each.size} is not set.",
                f"{each.source} sets both for its processes; each would train a separate model.",
                f"start the script through {each.source}, or set {ALONE}=1 for one process on "
                "purpose.",
            )
    if launcher is not None and (count := _number(environ, launcher.size, 1) or 1) > 1:
        raise UsageError(
            f"{TORCHRUN.size}=1, but {launcher.source} has {count} ({launcher.size}={count}).",
            f"It started {count} processes, and each would train a separate model.",
            f"unset RANK and WORLD_SIZE; {ALONE}=1 means one process on purpose.",
        )
    for engine in (PET, *ENGINES):
        most = _stated_count(environ, engine)[1]
        if most > 1:
            raise UsageError(
                f"{engine.num_nodes}={environ[engine.num_nodes][:80]}, but this process is not one "
                "of several ranks.",
                f"The same command runs on {most} machines, and each would train a separate model.",
                "start the script with `deepseek-zero run script.py`, which reads these variables; "
                f"{ALONE}=1 means one process on purpose.",
            )


@dataclass(frozen=True)
class Suspicion:
    """A variable that suggests that a lone process should be one of several ranks.

    Attributes:
        name: The variable.
        least: The smallest value that suggests it.
        counts: Variables that confirm it if they are 2 or more.
        why: The reason, for the message.
        fix: What the user can do.
    """

    name: str
    least: int
    counts: tuple[str, ...]
    why: str
    fix: str


_INDEXED_JOB = Suspicion(
    "JOB_COMPLETION_INDEX",
    0,
    ("NNODES", "NUM_NODES"),
    "Each pod of an indexed Kubernetes Job would train a separate model.",
    "start the script in every pod with `deepseek-zero run --num-nodes PODS --node-rank "
    f"$JOB_COMPLETION_INDEX --master-addr FIRST_POD train.py`; {ALONE}=1 means one process on "
    "purpose.",
)
_SLURM_WHY = "Without srun a command of a Slurm job is one process on the job's first machine."
_SLURM_FIX = (
    f"start the script with `srun python train.py`; {ALONE}=1 means one process on purpose."
)
_SUSPICIONS = (
    _INDEXED_JOB,
    Suspicion("SLURM_JOB_NUM_NODES", 2, ("SLURM_NTASKS",), _SLURM_WHY, _SLURM_FIX),
    Suspicion("SLURM_NNODES", 2, ("SLURM_NTASKS",), _SLURM_WHY, _SLURM_FIX),
    Suspicion("SLURM_NTASKS", 2, (), _SLURM_WHY, _SLURM_FIX),
)


def suspect_lone_process(environ: Environment) -> UsageError | None:
    """Return a warning if a lone process was probably meant to be one of several ranks."""
    found = _suspicion_of(environ)
    if found is None:
        return None
    return UsageError(
        f"{found.name}={environ[found.name]}, but no launcher has set a rank.", found.why, found.fix
    )


def refuse_lone_process(environ: Environment) -> None:
    """Raise UsageError if two variables indicate that a lone process is one of several ranks."""
    found = _suspicion_of(environ)
    if found is None:
        return
    for count in found.counts:
        if _value_of(environ, count) >= 2:
            raise UsageError(
                f"{found.name}={environ[found.name]} and {count}={environ[count]}, but this "
                "process has no rank.",
                found.why,
                found.fix,
            )


def _suspicion_of(environ: Environment) -> Suspicion | None:
    if environ.get(ALONE) == "1" or TORCHRUN.size in environ or _launcher_of(environ) is not None:
        return None
    return next((each for each in _SUSPICIONS if _value_of(environ, each.name) >= each.least), None)


def _value_of(environ: Environment, name: str) -> int:
    """Return a variable as a number, or -1 if it is not one."""
    text = environ.get(name, "")
    return int(text) if re.fullmatch(r"[0-9]{1,9}", text) else -1


# -- the running process


def _group() -> Any:
    """Return torch.distributed if this process has joined a process group."""
    found = sys.modules.get("torch.distributed")
    is_initialized = getattr(found, "is_initialized", None)
    return found if is_initialized is not None and is_initialized() else None


def _said() -> World:
    """Return the launcher's world.

    It is one process if the variables are invalid; joining a process group reports that.
    """
    try:
        return discover(os.environ)
    except UsageError:
        return World()


def rank() -> int:
    """Return the rank of this process in the world; 0 if it is the only process."""
    group = _group()
    return int(group.get_rank()) if group is not None else _said().rank


def size() -> int:
    """Return the number of ranks of the world; 1 if this is the only process."""
    group = _group()
    return int(group.get_world_size()) if group is not None else _said().size


def local_size() -> int | None:
    """Return the number of ranks on this host if a launcher provides it.

    `comm/context.py` counts them after the ranks are connected.
    """
    said = _said()
    return said.local_size if (said.rank, said.size) == (rank(), size()) else None


def meeting_address() -> str | None:
    """Return the address of rank 0 if a launcher provides it."""
    return os.environ.get("MASTER_ADDR") or _said().address


def is_rank_zero() -> bool:
    """Return whether this process is rank 0, which writes logs and shared files."""
    return rank() == 0


def stated_local_rank() -> int | None:
    """Return this process's index on its host if its launcher provides it.

    A launcher's variables are ignored if they contradict the process group (`mp.spawn` under
    torchrun): they belong to another process.
    """
    said = _said()
    is_mine = said.size == 1 or (said.rank, said.size) == (rank(), size())
    return said.local_rank if is_mine else None


def local_rank() -> int:
    """Return this process's index on its host.

    If no launcher provides it, it is the rank, which is the same on one host.
    """
    said = stated_local_rank()
    return rank() if said is None else said
