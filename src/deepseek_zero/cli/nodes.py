"""Decide what this machine runs: node rank, number of ranks, devices, rendezvous.

    --hostfile, --include, --exclude        hosts and slots; each host is a node, the first is
                                            node 0
    --num_nodes, --num_gpus                 how many of them are used
    --nproc                                 processes on this machine; default: its GPUs, or one
                                            per pair of cores
    --node_rank, or the host's own name     which node this machine is
    scheduler variables (base/world.py)     anything that no option sets, without a hostfile

The functions are pure: they compute a `NodePlan` from `RankOptions`, `Nodes` and a `NodeMachine`.
They do not need torch if there are no GPUs to count.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from deepseek_zero.base.errors import UsageError
from deepseek_zero.base.world import Nodes
from deepseek_zero.cli.hostfile import (
    MOST_PROCESSES,
    Slots,
    filter_slots,
    parse_filter,
    read_hostfile,
)
from deepseek_zero.cli.launcher_options import START_EACH, WHERE, cli_option

LAST_PORT = 65_535
DEFAULT_PORT = 29500
"""Port of node 0 with several nodes and without --master_port; a single node uses any free port."""

LOCALHOST = "localhost"
DEFAULT_HOSTFILE = Path("/job/hostfile")
"""DeepSpeed's default hostfile, used if it exists and --hostfile is not given."""


@dataclass(frozen=True)
class RankOptions:
    """Options of `deepseek-zero run` that place the ranks; None means not given."""

    nproc: int | None = cli_option(
        None, "Processes here. Default: GPUs, else a pair of cores each.", WHERE
    )
    num_gpus: int | None = cli_option(
        None, "GPUs to use here (on each host of a hostfile).", WHERE, "--num-accelerators"
    )
    num_nodes: int | None = cli_option(None, "Machines to use. Default: 1, or all.", WHERE)
    hostfile: Path | None = cli_option(  # noqa: RUF009  it returns a field
        None, f"Lines of `hostname slots=N`. Default: {DEFAULT_HOSTFILE}.", WHERE, "-H"
    )
    include: str = cli_option(
        "", "Only these: NAME[:SLOT,...][@NAME...], here: localhost:0,2", WHERE, "-i"
    )
    exclude: str = cli_option("", "All but these; the same grammar.", WHERE, "-e")
    master_addr: str | None = cli_option(
        None, "Address of node 0. Default: the first host, or here.", WHERE
    )
    master_port: int = cli_option(
        0, "Port of node 0. Default 0: any free one; 29500 for several.", WHERE
    )
    node_rank: int | None = cli_option(
        None, "This machine's number. Default: its place in the hostfile.", WHERE
    )


@dataclass(frozen=True)
class NodeShare:
    """The ranks of this machine.

    Attributes:
        nproc: Number of processes.
        devices: Value for CUDA_VISIBLE_DEVICES; None leaves the variable unchanged.
        note: A line to log, if any.
    """

    nproc: int
    devices: tuple[str, ...] | None = None
    note: str = ""


@dataclass(frozen=True)
class NodePlan:
    """What this machine runs as one of the nodes; `master_port` 0 means any free port."""

    share: NodeShare
    num_nodes: int = 1
    node_rank: int = 0
    master_addr: str = "127.0.0.1"
    master_port: int = 0


def plan_node(
    options: RankOptions,
    machine: NodeMachine,
    own_names: Collection[str],
    stated: Nodes | None = None,
) -> NodePlan:
    """Decide what this machine runs.

    Args:
        options: Options of the command line.
        machine: The cores and GPUs of this machine.
        own_names: Host names and addresses of this machine.
        stated: Values from a scheduler's variables, if any.

    Returns:
        The node's number, processes and devices, and the address of the rendezvous.

    Raises:
        UsageError: The options contradict each other or the machine.
    """
    _check(options)
    if options.hostfile is None:
        filled = options if stated is None else _filled(options, stated, machine)
        return _plan_without_hostfile(filled, machine)
    hosts = filter_slots(read_hostfile(options.hostfile), options.include, options.exclude)
    hosts = dict(list(hosts.items())[: options.num_nodes])
    names = list(hosts)
    node_rank = _own_place(names, options.node_rank, own_names)
    share = _share_of_slots(hosts[names[node_rank]][: options.num_gpus], options.nproc, machine)
    if options.num_nodes is not None and options.num_nodes > len(names):
        note = (
            f"--num_nodes {options.num_nodes}: the hostfile has {_count(len(names), 'host')}, so "
            "that many are used"
        )
        share = replace(share, note=note)
    return _placed(options, share, len(names), node_rank, names[0])


def _placed(
    options: RankOptions, share: NodeShare, num_nodes: int, node_rank: int, first: str
) -> NodePlan:
    """Return the plan of a node; `first` is the name of node 0 if no option has its address."""
    port = DEFAULT_PORT
    if num_nodes == 1:
        first = "127.0.0.1"
        port = 0
    return NodePlan(
        share, num_nodes, node_rank, options.master_addr or first, options.master_port or port
    )


def _filled(options: RankOptions, stated: Nodes, machine: NodeMachine) -> RankOptions:
    """Fill in values from a scheduler's variables; options take precedence."""
    found: dict[str, Any] = {"num_nodes": options.num_nodes or stated.num_nodes}
    if found["num_nodes"] > 1:  # a single machine uses any free port
        found["node_rank"] = stated.node_rank if options.node_rank is None else options.node_rank
        found["master_addr"] = options.master_addr or stated.address
        found["master_port"] = options.master_port or stated.port or 0
    if not (options.nproc or options.num_gpus or options.include or options.exclude):
        found["num_gpus"], found["nproc"] = stated.num_gpus, _stated_nproc(stated, machine)
    return replace(options, **found)


def _stated_nproc(stated: Nodes, machine: NodeMachine) -> int | None:
    """Return the number of processes from torchrun's variable.

    It is a number, "gpu" for the number of GPUs, "cpu" for the number of cores, or "auto" for our
    default.
    """
    if stated.nproc in (None, "auto"):
        return None
    counts = {"gpu": len(machine.gpus), "cpu": machine.cores}
    count = (
        int(stated.nproc)
        if re.fullmatch("[0-9]{1,6}", stated.nproc)
        else counts.get(stated.nproc, 0)
    )
    if count < 1:
        raise UsageError(
            f"PET_NPROC_PER_NODE={stated.nproc[:80]!r} gives no process on this machine.",
            "It is a number, auto, cpu or gpu; this machine has "
            f"{_count(len(machine.gpus), 'GPU')}.",
            "correct the variable, or give --nproc.",
        )
    if count > MOST_PROCESSES:
        raise UsageError(
            f"PET_NPROC_PER_NODE={stated.nproc!r} is more than the {MOST_PROCESSES} processes that "
            "are started on one machine.",
            "Each process loads PyTorch and needs a few hundred MB of memory.",
            "correct the variable, or give --nproc.",
        )
    return count


def _plan_without_hostfile(options: RankOptions, machine: NodeMachine) -> NodePlan:
    share = _local_share(options, machine)
    num_nodes = options.num_nodes or 1
    node_rank = options.node_rank or 0
    if num_nodes > 1 and (options.node_rank is None or options.master_addr is None):
        raise UsageError(
            f"{num_nodes} nodes need --node_rank and --master_addr (or a hostfile).",
            why="The command does not know the number of this node or the rendezvous address.",
            fix=START_EACH,
        )
    _check_node_rank(node_rank, num_nodes)
    return _placed(options, share, num_nodes, node_rank, LOCALHOST)


def _check(options: RankOptions) -> None:
    counts = {
        "--nproc": options.nproc,
        "--num_gpus": options.num_gpus,
        "--num_nodes": options.num_nodes,
    }
    for option, value in counts.items():
        if value is not None and value < 1:
            raise UsageError(
                f"{option} is {value}; it counts from 1.",
                fix=f"Leave {option} out for the default.",
            )
    if not 0 <= options.master_port <= LAST_PORT:
        raise UsageError(
            f"--master_port is {options.master_port}.",
            why=f"Ports are numbers from 1 to {LAST_PORT}; below 1024 only root may listen.",
            fix="Leave it out for any free port, or name one that is free, for example 29500.",
        )
    if options.nproc is not None and options.nproc > MOST_PROCESSES:
        raise UsageError(
            f"--nproc {options.nproc} is more than the {MOST_PROCESSES} processes that are started "
            "on one machine.",
            why="Each process loads PyTorch and needs a few hundred MB of memory.",
            fix="Start one process for each GPU, or for each pair of cores.",
        )
    if options.nproc is not None and options.num_gpus is not None:
        raise UsageError(
            "--nproc and --num_gpus are mutually exclusive: both give the number of processes.",
            fix="Give one of them.",
        )
    filtered = bool(options.include or options.exclude)
    clash = [option for option, value in counts.items() if filtered and value is not None]
    if clash:
        raise UsageError(
            f"--include and --exclude are mutually exclusive with {' and '.join(clash)}.",
            why="The filter already selects the slots.",
            fix="Give the filter or the number.",
        )


def _check_node_rank(node_rank: int, num_nodes: int) -> None:
    if not 0 <= node_rank < num_nodes:
        raise UsageError(
            f"--node_rank {node_rank} is not one of the {num_nodes} nodes.",
            why="Nodes count from 0.",
        )


def _own_place(names: list[str], node_rank: int | None, own_names: Collection[str]) -> int:
    if node_rank is not None:
        _check_node_rank(node_rank, len(names))
        return node_rank
    known = {LOCALHOST, *own_names}
    places = [index for index, name in enumerate(names) if name in known]
    if len(places) != 1:
        found = f"{len(places)} times" if places else "not at all"
        raise UsageError(
            f"The hostfile names this machine {found}, so its node number is unknown.",
            why=(
                f"Its hosts: {', '.join(names)}. This machine is known as: "
                f"{', '.join(sorted(own_names))}."
            ),
            fix=START_EACH,
        )
    return places[0]


def _share_of_slots(slots: tuple[int, ...], nproc: int | None, machine: NodeMachine) -> NodeShare:
    """Return one process for each slot, on the GPUs of these numbers if there are any."""
    if nproc is not None or not machine.gpus:
        return NodeShare(nproc or len(slots))
    if max(slots) >= len(machine.gpus):
        raise UsageError(
            f"The hostfile gives this machine slot {max(slots)}, but it shows {len(machine.gpus)} "
            "GPUs.",
            fix="Correct `slots=` (slots count from 0), or CUDA_VISIBLE_DEVICES.",
        )
    return NodeShare(len(slots), tuple(machine.gpus[slot] for slot in slots))


def _local_share(options: RankOptions, machine: NodeMachine) -> NodeShare:
    if options.nproc is not None:
        return NodeShare(options.nproc, note=_crowded(options.nproc, machine))
    if options.include or options.exclude:
        return _filtered_share(options, machine)
    if options.num_gpus is None:
        note = "" if machine.gpus else _cpu_default(machine)
        return NodeShare(machine.default_nproc, note=note)
    if not machine.gpus:
        return _instead_of_gpus(f"--num_gpus {options.num_gpus}", options.num_gpus, machine)
    if options.num_gpus > len(machine.gpus):
        return NodeShare(
            len(machine.gpus),
            note=f"--num_gpus {options.num_gpus}: this machine shows "
            f"{_count(len(machine.gpus), 'GPU')}, so that many processes run",
        )
    return NodeShare(options.num_gpus, machine.gpus[: options.num_gpus])


def _filtered_share(options: RankOptions, machine: NodeMachine) -> NodeShare:
    numbered = _numbered(machine.gpus)
    # Slots for processes: the default number, or as many as the filter mentions
    if not numbered:
        spoken = [
            slot
            for slots in parse_filter(options.include or options.exclude).values()
            for slot in slots or ()
        ]
        places = range(max([machine.default_nproc, *(slot + 1 for slot in spoken)]))
        slots = _only_local({LOCALHOST: tuple(places)}, options)
        option = "--include" if options.include else "--exclude"
        return _instead_of_gpus(option, len(slots), machine)
    slots = _only_local({LOCALHOST: tuple(numbered)}, options)
    return NodeShare(len(slots), tuple(numbered[slot] for slot in slots))


def _only_local(hosts: Slots, options: RankOptions) -> tuple[int, ...]:
    return filter_slots(hosts, options.include, options.exclude)[LOCALHOST]


def _numbered(gpus: tuple[str, ...]) -> dict[int, str]:
    """Map slots to GPU names.

    The slot is the GPU's number, or its position if the names are not numbers (UUIDs).
    """
    if all(name.isdecimal() for name in gpus):
        return {int(name): name for name in gpus}
    return dict(enumerate(gpus))


def _instead_of_gpus(option: str, wanted: int, machine: NodeMachine) -> NodeShare:
    """Start CPU ranks instead of the requested GPUs, to keep batch size and sharding.

    More than two ranks run only if each has a core.
    """
    nproc = min(wanted, max(2, machine.cores))
    wanted_gpus = f"{option} requests {_count(wanted, 'GPU')} and this machine has none"
    running = f"running {_count(nproc, 'CPU rank')} instead on {_count(machine.cores, 'core')}"
    return NodeShare(nproc, note=f"{wanted_gpus}: {running} (--nproc N sets another number)")


def _cpu_default(machine: NodeMachine) -> str:
    nproc = machine.default_nproc
    running = f"running {_count(nproc, 'process', 'es')} on {_count(machine.cores, 'CPU core')}"
    return f"no GPU here: {running} (--nproc N sets another number)"


def _crowded(nproc: int, machine: NodeMachine) -> str:
    if not machine.gpus or nproc <= len(machine.gpus):
        return ""
    return (
        f"--nproc {nproc} is more than this machine's {_count(len(machine.gpus), 'GPU')}: ranks "
        "must share them"
    )


def _count(number: int, noun: str, plural: str = "s") -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}{plural}"


THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")


@dataclass(frozen=True)
class NodeMachine:
    """The resources of this machine.

    Attributes:
        cores: Number of CPU cores that this process may use.
        gpus: Names of the visible GPUs, as used in CUDA_VISIBLE_DEVICES.
    """

    cores: int
    gpus: tuple[str, ...] = ()

    @property
    def default_nproc(self) -> int:
        """Return one process per GPU or, without GPUs, one per pair of cores."""
        return len(self.gpus) or max(1, self.cores // 2)

    def thread_environment(self, nproc: int, environment: Mapping[str, str]) -> dict[str, str]:
        """Return variables that divide the cores among the ranks.

        Variables that the user has set are omitted.

        Args:
            nproc: Number of ranks.
            environment: The environment of the launcher.
        """
        threads = max(1, self.cores // nproc)
        return {name: str(threads) for name in THREAD_VARIABLES if name not in environment}


def visible_gpus(count: int, environment: Mapping[str, str]) -> tuple[str, ...]:
    """Return the names of the visible GPUs.

    Args:
        count: Number of GPUs that the driver reports with CUDA_VISIBLE_DEVICES applied.
        environment: The environment of the launcher.
    """
    listed = [
        name.strip()
        for name in environment.get("CUDA_VISIBLE_DEVICES", "").split(",")
        if name.strip()
    ]
    return tuple(listed[:count]) if listed else tuple(str(index) for index in range(count))
