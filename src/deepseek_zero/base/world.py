"""The identity of this process: its rank, the size of its world, its place on its host, and where the ranks meet.

`discover` reads what a launcher said, by a table of launchers; it is pure. `rank`, `size` and `local_rank` answer for
the running process: once a group is joined its word counts, before that the launcher's. No other file reads these
variables. Standard library only, because the log and the command line work without torch.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from .errors import UsageError

ALONE = "DEEPSEEK_ZERO_ALONE"  # 1: one process on purpose, whatever a launcher says
DEFAULT_PORT = 29500  # torchrun's and DeepSpeed's
MOST_PORT = 65535


@dataclass(frozen=True)
class World:
    """The place of one process in its world. None: its launcher does not say.

    local_rank, local_size: among the ranks of this host. address, port: where rank 0 listens. source: the launcher that
    said so.
    """

    rank: int = 0
    size: int = 1
    local_rank: int | None = 0
    local_size: int | None = 1
    address: str | None = None
    port: int | None = None
    source: str = "no launcher"
    fix: str = ""  # how this launcher is told where ranks meet

    def variables(self) -> dict[str, str]:
        """This world in the words of torchrun, which scripts and `env://` read."""
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
    """The names of one launcher's variables.  marks: those without which the others say nothing of a world."""

    source: str
    rank: str
    size: str
    local_rank: str
    local_size: str
    marks: tuple[str, ...]
    fix: str


TORCHRUN = Launcher(
    "RANK and WORLD_SIZE",
    "RANK",
    "WORLD_SIZE",
    "LOCAL_RANK",
    "LOCAL_WORLD_SIZE",
    (),
    "start the script with `deepseek-zero run --nproc N script.py` (or torchrun), which set all of them",
)
# A batch script has SLURM_NTASKS and SLURM_PROCID=0 and is one process: only a step makes a world.
SLURM = Launcher(
    "Slurm",
    "SLURM_PROCID",
    "SLURM_STEP_NUM_TASKS",
    "SLURM_LOCALID",
    "SLURM_STEP_TASKS_PER_NODE",
    ("SLURM_STEP_ID", "SLURM_STEP_NUM_TASKS"),
    "export MASTER_ADDR=$(scontrol show hostnames | head -n1) and MASTER_PORT before srun",
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
        "write `mpirun_rsh ... MASTER_ADDR=<address of rank 0's host> MASTER_PORT=29500 python ...`",
    ),
)


def discover(environ: Mapping[str, str]) -> World:
    """Return the world that a launcher's variables describe; one process if none does.

    Raises `UsageError` if they contradict each other or are no numbers. The meeting place may still be unknown.
    """
    if environ.get(ALONE) == "1":
        return World(source=f"{ALONE}=1")
    stated_rank, stated_size = (
        _number(environ, name, least) for name, least in ((TORCHRUN.rank, 0), (TORCHRUN.size, 1))
    )
    launcher = _launcher_of(environ)
    if launcher is None or (stated_rank is not None and stated_size is not None):
        return _stated(environ, stated_rank, stated_size)
    found = _read(environ, launcher)
    for name, stated, actual in ((TORCHRUN.rank, stated_rank, found.rank), (TORCHRUN.size, stated_size, found.size)):
        if stated not in (None, actual):
            raise UsageError(
                f"{name}={stated}, but {launcher.source} says {actual} ({launcher.rank}={found.rank}, "
                f"{launcher.size}={found.size}).",
                "A process has one rank in one world.",
                f"unset {name}, or set RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT together.",
            )
    return found


def _launcher_of(environ: Mapping[str, str]) -> Launcher | None:
    """The innermost launcher: an mpirun inside a Slurm job starts its daemons as a step, which ranks then inherit."""
    by_mpi = [each for each in MPI if all(mark in environ for mark in each.marks)]
    by_slurm = all(mark in environ for mark in SLURM.marks)
    if not by_slurm:
        return by_mpi[0] if by_mpi else None
    strangers = [each for each in by_mpi if (_number(environ, each.size, 1) or 1) != _number(environ, SLURM.size, 1)]
    return strangers[0] if strangers else SLURM


def _stated(environ: Mapping[str, str], rank: int | None, size: int | None) -> World:
    """The world of RANK and WORLD_SIZE."""
    if rank is None and size not in (None, 1):
        raise _incomplete(environ, size or 1, [TORCHRUN.rank])
    if (rank or 0) >= (size or 1):
        world = f"WORLD_SIZE={size}" if size is not None else "WORLD_SIZE is not set"
        raise UsageError(
            f"RANK={rank}, but {world}.",
            "Ranks are numbered from 0 to WORLD_SIZE - 1.",
            f"{TORCHRUN.fix}; a program that is to run alone unsets RANK, or sets {ALONE}=1.",
        )
    if size in (None, 1):
        return World(local_rank=_number(environ, TORCHRUN.local_rank, 0))
    return _read(environ, TORCHRUN)


def _read(environ: Mapping[str, str], launcher: Launcher) -> World:
    size = _number(environ, launcher.size, 1) or 1
    rank = _number(environ, launcher.rank, 0)
    if rank is None and size > 1:
        raise UsageError(
            f"{launcher.size}={size} but {launcher.rank} is not set.",
            f"{launcher.source} numbers its processes with it.",
            f"start the script through {launcher.source}, or set {ALONE}=1 for one process on purpose.",
        )
    if (rank or 0) >= size:
        raise UsageError(
            f"{launcher.rank}={rank}, but {launcher.size}={size}.",
            "Ranks are numbered from 0 to size - 1.",
            launcher.fix,
        )
    if size == 1:
        return World(source=launcher.source)
    local_size = _tasks_here(environ) if launcher is SLURM else _number(environ, launcher.local_size, 1)
    local_rank = _number(environ, launcher.local_rank, 0)
    for name, value, limit in (
        (launcher.local_size, local_size, size + 1),
        (launcher.local_rank, local_rank, local_size or size),
    ):
        if value is not None and value >= limit:
            raise UsageError(
                f"{name}={value}, but {launcher.size}={size}"
                + (f" and {launcher.local_size}={local_size}." if name == launcher.local_rank else "."),
                "A host has at most all ranks, numbered from 0.",
                f"unset {name}, or let the launcher set it.",
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
    )


def _number(environ: Mapping[str, str], name: str, least: int, most: int | None = None) -> int | None:
    """A variable as a number; None where it is not set."""
    text = environ.get(name)
    if text is None:
        return None
    if not re.fullmatch(r"[0-9]{1,9}", text) or not least <= int(text) <= (int(text) if most is None else most):
        limits = f"a number from {least} on" if most is None else f"a number from {least} to {most}"
        raise UsageError(
            f"{name}={text[:80]!r} is not {limits}.",
            "It says where this process stands among the ranks of its world.",
            f"unset it, or let a launcher set it (`deepseek-zero run --nproc N`); {ALONE}=1 means one process.",
        )
    return int(text)


def _tasks_here(environ: Mapping[str, str]) -> int | None:
    """This host's tasks out of Slurm's "2(x3),1": two on each of three hosts, one on the fourth."""
    counts: list[int] = []
    for part in environ.get(SLURM.local_size, "").split(","):
        found = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part)
        if found is None:
            return None
        counts += [int(found[1])] * int(found[2] or 1)
    node = _number(environ, "SLURM_NODEID", 0)
    return counts[node] if node is not None and node < len(counts) else None


def _address(environ: Mapping[str, str], launcher: Launcher, *, is_one_host: bool) -> str | None:
    """Return the address that a launcher's variables imply: Slurm lists its hosts, and on one host it is this one."""
    if launcher is SLURM and environ.get("SLURM_STEP_NODELIST"):
        return first_host(environ["SLURM_STEP_NODELIST"])
    return "127.0.0.1" if is_one_host and launcher is not TORCHRUN else None


def first_host(hosts: str) -> str:
    """The first host of Slurm's list: "h[03-05,9],g1" begins with h03."""
    first = re.split(r",(?![^\[]*\])", hosts)[0]
    return re.sub(r"\[([^\]\-,]+)[^\]]*\]", r"\1", first)


def _port(environ: Mapping[str, str], launcher: Launcher) -> int | None:
    """Two jobs on one host should not meet each other."""
    if launcher is SLURM:
        job, step = (int(text) if (text := environ.get(name, "")).isdecimal() else 0 for name in _STEP)
        return 20000 + job % 20000 + step % 16
    return None if launcher is TORCHRUN else DEFAULT_PORT


_STEP = ("SLURM_JOB_ID", "SLURM_STEP_ID")


def _incomplete(environ: Mapping[str, str], size: int, missing: list[str]) -> UsageError:
    return UsageError(
        f"WORLD_SIZE={size} but {', '.join(missing)} {'is' if len(missing) == 1 else 'are'} not set.",
        "A world of several processes is described by RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT.",
        f"{TORCHRUN.fix}; {ALONE}=1 means one process on purpose.",
    )


def meeting_place(environ: Mapping[str, str], world: World) -> World:
    """The same world, if it says where its ranks meet; UsageError that says what to set where it does not."""
    missing = [name for name, value in (("MASTER_ADDR", world.address), ("MASTER_PORT", world.port)) if value is None]
    if world.size == 1 or not missing:
        return world
    if world.source == TORCHRUN.source:
        raise _incomplete(environ, world.size, missing)
    raise UsageError(
        f"{world.source} started {world.size} processes, and {' and '.join(missing)} "
        f"{'is' if len(missing) == 1 else 'are'} not set.",
        "Its variables do not say where they can meet, and each would train a model of its own.",
        f"{world.fix}; {ALONE}=1 means {world.size} trainings of one process on purpose.",
    )


# -- the running process


def _group() -> Any:
    """torch.distributed, if this process has joined a group."""
    found = sys.modules.get("torch.distributed")
    is_initialized = getattr(found, "is_initialized", None)
    return found if is_initialized is not None and is_initialized() else None


def _said() -> World:
    """Return the launcher's world; one process if its variables are nonsense, which an attempt to join a group
    reports.
    """
    try:
        return discover(os.environ)
    except UsageError:
        return World()


def rank() -> int:
    """Return this process's number in its world."""
    group = _group()
    return int(group.get_rank()) if group is not None else _said().rank


def size() -> int:
    """Return the number of processes in its world."""
    group = _group()
    return int(group.get_world_size()) if group is not None else _said().size


def local_size() -> int | None:
    """Return the number of ranks on this host if a launcher says it (`comm/context.py` counts them once ranks are
    connected).
    """
    said = _said()
    return said.local_size if (said.rank, said.size) == (rank(), size()) else None


def meeting_address() -> str | None:
    """Return the address of rank 0, if a launcher says it."""
    return os.environ.get("MASTER_ADDR") or _said().address


def is_rank_zero() -> bool:
    """True on the rank that speaks for all."""
    return rank() == 0


def stated_local_rank() -> int | None:
    """This process's number on its host, where its launcher says it.

    A launcher's variables are another process's where they contradict the group (`mp.spawn` under torchrun).
    """
    said = _said()
    is_mine = said.size == 1 or (said.rank, said.size) == (rank(), size())
    return said.local_rank if is_mine else None


def local_rank() -> int:
    """Return this process's number on its host; if no launcher says it, its rank, which is the same on one host."""
    said = stated_local_rank()
    return rank() if said is None else said
