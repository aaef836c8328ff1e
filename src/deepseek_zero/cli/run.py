"""The command `deepseek-zero run`: read the options and start the ranks.

    deepseek-zero run [options] script.py args...

The options are the fields of `RunOptions`. The first argument that is not an option is the script,
and everything after it is passed to the script unchanged.
"""

from __future__ import annotations

import importlib
import math
import os
import shutil
import socket
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import typer
from rich.console import Console
from rich.text import Text

from deepseek_zero.base.errors import UsageError
from deepseek_zero.base.given import refuse_url
from deepseek_zero.base.host import allowed_cores
from deepseek_zero.base.launch import DEAD_AFTER, DEFAULT_DEAD_AFTER, MESH, TLS, checked_dead_after
from deepseek_zero.base.log import logger
from deepseek_zero.base.network import lead_gloo
from deepseek_zero.base.plugins import COMMANDS, contributions
from deepseek_zero.base.world import Nodes, discover, nodes_of, suspect_lone_process
from deepseek_zero.cli.launcher_options import (
    START_EACH,
    WHERE,
    LauncherOptions,
    cli_option,
    pid_file,
    refuse_launcher,
    refuse_options,
    set_log_level,
    warn_of_binding,
)
from deepseek_zero.cli.lifeline import Lifeline
from deepseek_zero.cli.local_rank import accepts_local_rank, find_module
from deepseek_zero.cli.nodes import (
    DEFAULT_HOSTFILE,
    NodeMachine,
    NodePlan,
    RankOptions,
    plan_node,
)
from deepseek_zero.cli.ranks import Command, Outcome, Target

HELP = f"""Run a script as one process per GPU (without GPUs: one per pair of CPU cores).

Everything after the script's name belongs to the script. \
Every option may be written with - or _.

Several machines: {START_EACH} \
Under Slurm (srun), SkyPilot, dstack, or with PET_* set, environment variables are used.

Started over ssh, --end-with-input ends everything here when that connection does."""

WHAT = "What they run"
AXES = ("pp", "tp", "sp")
"""Options that set axes of the mesh. Ranks read them from the environment."""


@dataclass(frozen=True)
class RunOptions(RankOptions, LauncherOptions):
    """The command line of `run`, with one field for each option.

    cli/__init__.py creates the command from the fields.
    """

    interface: str | None = cli_option(
        None, "Where ranks listen: a network interface, or an address of this host.", WHERE
    )
    ports: str | None = cli_option(
        None, "The ports that ranks listen at, FIRST-LAST. Default: any free ones.", WHERE
    )
    tls: bool = cli_option(False, "Encrypt what leaves a host: our own sockets, by TLS 1.3.", WHERE)
    pp: int = cli_option(1, "Pipeline stages, as `mesh.pp` of the configuration.", WHAT)
    tp: int = cli_option(1, "Ranks that share one layer (tensor parallel), as `mesh.tp`.", WHAT)
    sp: int = cli_option(1, "Ranks that share one sequence (Ulysses), as `mesh.sp`.", WHAT)
    module: bool = cli_option(False, "The script is a module's name (python -m).", WHAT, "-m")
    no_python: bool = cli_option(False, "The script is an executable, not Python source.", WHAT)
    no_local_rank: bool = cli_option(
        False, "Never pass --local_rank=N (default: if the script has that option).", WHAT
    )
    max_restarts: int = cli_option(
        0, "Times to start all ranks again after a failure. Default 0.", WHAT
    )
    save_grace: float = cli_option(
        300.0, "Seconds for ranks that save on SIGTERM to do so. Default 300.", WHAT
    )
    end_with_input: bool = cli_option(
        False, "End all ranks here when standard input ends (started over ssh).", WHAT
    )
    dead_after: float = cli_option(
        DEFAULT_DEAD_AFTER, "Seconds of silence until a machine is lost, or inf. Default 10.", WHERE
    )
    as_deepspeed: bool = cli_option(
        False, "`import deepspeed` in the script means this library.", WHAT
    )
    log_dir: Path | None = cli_option(  # noqa: RUF009  it returns a field
        None,
        "Ranks other than the first write DIR/rank_N.log, not the terminal.",
        WHAT,
        "--enable-each-rank-log",
    )
    command: list[str] | None = field(
        default=None,
        metadata={
            "argument": typer.Argument(
                metavar="SCRIPT [ARGS]...", help="The script and its own arguments."
            )
        },
    )


def run(options: RunOptions) -> int:
    """Launch the script and return the exit code.

    Returns:
        0 if all ranks succeeded; the exit code of the failed rank; 85 if the ranks saved and ended
        on request; 128 plus the number of the signal that ended the launcher.

    Raises:
        UsageError: An option is invalid.
    """
    refuse_options(options)
    set_log_level(options)
    warn_of_binding(options)
    axes = {axis: getattr(options, axis) for axis in AXES}
    for axis, size in axes.items():
        if size < 1:
            raise UsageError(
                f"--{axis} is {size}.",
                why="An axis has at least one rank.",
                fix=f"Leave --{axis} out.",
            )
    for option, value in (
        ("--max-restarts", options.max_restarts),
        ("--save-grace", options.save_grace),
    ):
        if not value >= 0:  # also refuses NaN
            raise UsageError(
                f"{option} is {value}.",
                why="It counts from 0.",
                fix=f"Leave {option} out, or give 0 or more.",
            )
    checked_dead_after(options.dead_after, "--dead-after")
    command = _command(options)
    # imported late, because it imports torch and --help must be fast
    agent = importlib.import_module("deepseek_zero.cli.agent")
    machine = NodeMachine(allowed_cores(), agent.gpus_of_this_machine(os.environ))
    asked: RankOptions = options
    if options.as_deepspeed:
        # DeepSpeed's default of these options
        names = ("num_gpus", "num_nodes", "node_rank")
        unset: dict[str, Any] = {name: None for name in names if getattr(options, name) == -1}
        asked = replace(options, **unset)
    if asked.hostfile is None and DEFAULT_HOSTFILE.is_file():
        asked = replace(asked, hostfile=DEFAULT_HOSTFILE)
    stated = _stated_nodes(asked)
    plan = plan_node(_enough(asked, machine, axes, stated), machine, own_names(), stated)
    _check_axes(plan, axes)
    refuse_launcher(options, plan.num_nodes)
    if plan.num_nodes > 1 and options.max_restarts:
        raise UsageError(
            "--max-restarts works on a single machine only.",
            why="A restart here would leave the other machines' ranks waiting for the old ones.",
            fix="Restart the whole job from its last checkpoint instead.",
        )
    if plan.share.note:
        logger.info(plan.share.note)
    environment = rank_environment(plan, machine)
    if options.as_deepspeed:
        environment |= _environment_as_deepspeed()
    connecting = _listening_environment(options) | ({TLS: "1"} if options.tls else {})
    environment |= connecting
    os.environ.update(connecting)  # also used by the launcher's own store
    # For scripts that call torch's init_process_group
    lead_gloo(plan.num_nodes == 1, plan.master_addr)
    if plan.num_nodes > 1:
        environment[DEAD_AFTER] = f"{options.dead_after:g}"
    if named := [f"{axis}={size}" for axis, size in axes.items() if size > 1]:
        environment[MESH] = ",".join(named)
    with pid_file(options), Lifeline.of_this_process(needs_input=options.end_with_input):
        limits = options.max_restarts, options.save_grace, options.dead_after
        return _tell(agent.run_ranks(plan, command, environment, *limits))


def _environment_as_deepspeed() -> dict[str, str]:
    """Return variables with which `import deepspeed` imports this library."""
    for module in contributions(COMMANDS):
        found: dict[str, str] = module.child_environment(os.environ)
        return found
    raise UsageError(
        "--as-deepspeed was given, and no package provides the name `deepspeed`.",
        "This copy of deepseek_zero has only its core.",
        "install the whole package, or leave --as-deepspeed out.",
    )


def _listening_environment(options: RunOptions) -> dict[str, str]:
    """Return the variables for --interface and --ports.

    Raises UsageError if this host does not have the interface or the address.
    """
    if options.interface is None and options.ports is None:
        return {}
    # imported late because its package imports torch
    channel = importlib.import_module("deepseek_zero.comm.net.channel")
    found: dict[str, str] = channel.listening_variables(options.interface, options.ports)
    return found


def _enough(
    asked: RankOptions, machine: NodeMachine, axes: Mapping[str, int], stated: Nodes | None
) -> RankOptions:
    """Set `nproc` to whole copies of the model if nothing else determines it.

    This applies if there are no GPUs and neither options nor variables set the number of ranks.
    """
    copy = math.prod(axes.values())
    options = (
        asked.nproc,
        asked.num_gpus,
        asked.hostfile,
        asked.include or None,
        asked.exclude or None,
    )
    variables = (stated.nproc, stated.num_gpus) if stated is not None else ()
    if copy == 1 or machine.gpus or any(one is not None for one in (*options, *variables)):
        return asked
    return replace(asked, nproc=max(1, machine.default_nproc // copy) * copy)


def _check_axes(plan: NodePlan, axes: Mapping[str, int]) -> None:
    """Raise UsageError if a single machine's ranks are not whole copies of the model.

    With several machines, the ranks check the number themselves.
    """
    copy = math.prod(axes.values())
    if plan.num_nodes == 1 and plan.share.nproc % copy:
        named = " ".join(f"--{axis} {size}" for axis, size in axes.items() if size > 1)
        raise UsageError(
            f"{named} needs a multiple of {copy} processes, and {plan.share.nproc} would run.",
            why="These ranks hold one copy of the model, and the world must be a multiple of them.",
            fix=f"Add --nproc {copy}, or choose smaller sizes.",
        )


# If a store is gone, torch logs a page of C++ frames for each call; the launcher's error message is
# sufficient.
SHORT_ERRORS = {"TORCH_CPP_LOG_LEVEL": "ERROR", "TORCH_DISABLE_ADDR2LINE": "1"}


def rank_environment(plan: NodePlan, machine: NodeMachine) -> dict[str, str]:
    """Return the variables that are the same for every rank of this machine.

    Args:
        plan: Ranks and rendezvous of this machine.
        machine: Cores and GPUs of this machine.
    """
    environment = machine.thread_environment(plan.share.nproc, os.environ)
    environment |= {name: value for name, value in SHORT_ERRORS.items() if name not in os.environ}
    if plan.share.devices is not None:
        environment["CUDA_VISIBLE_DEVICES"] = ",".join(plan.share.devices)
    return environment


def own_names() -> set[str]:
    """Return the names and addresses by which a hostfile may refer to this machine."""
    name = socket.gethostname()
    names = {name, name.partition(".")[0], socket.getfqdn()}
    with suppress(OSError):  # the machine may be unable to resolve its own name
        names.update(str(entry[4][0]) for entry in socket.getaddrinfo(name, None))
    return names


def _stated_nodes(asked: RankOptions) -> Nodes | None:
    """Return the nodes that a scheduler's variables describe.

    Options take precedence, also over invalid variables.
    """
    try:
        stated = nodes_of(os.environ)
    except UsageError:
        if asked.hostfile is None and asked.num_nodes is None:
            raise
        return None
    warning = suspect_lone_process(os.environ)
    if (
        warning is not None
        and stated is None
        and asked.num_nodes is None
        and asked.hostfile is None
    ):
        logger.warning(str(warning))
    with suppress(UsageError):  # the ranks do not get these variables
        if stated is None and asked.num_nodes is None and (outer := discover(os.environ)).size > 1:
            logger.warning(
                f"this launcher was itself started as rank {outer.rank} of {outer.size} "
                f"({outer.source}): each of them starts a separate training"
            )
    return stated


def _command(options: RunOptions) -> Command:
    if not options.command:
        raise UsageError(
            "No script was given.", fix="deepseek-zero run [options] script.py args..."
        )
    if options.module and options.no_python:
        raise UsageError(
            "--module and --no_python are mutually exclusive.", fix="Give one of them."
        )
    if options.log_dir is not None:
        refuse_url(f"--log-dir {options.log_dir}", options.log_dir)
    target, *args = options.command
    kind = (
        Target.MODULE if options.module else Target.PROGRAM if options.no_python else Target.SCRIPT
    )
    source = _source(kind, target)
    return Command(
        kind,
        target,
        tuple(args),
        pass_local_rank=not options.no_local_rank and accepts_local_rank(source, args),
        log_dir=options.log_dir,
    )


def _source(kind: Target, target: str) -> Path | None:
    """Return the Python source of the target, if there is one to parse.

    Raises UsageError if a script or program does not exist.
    """
    if kind is Target.MODULE:
        return find_module(target)
    if kind is Target.PROGRAM:
        if shutil.which(target) is None:
            raise UsageError(
                f"There is no program {target!r} to run.",
                fix="Check the path, or that it may be executed.",
            )
        return None
    path = Path(target)
    if path.is_dir():
        path /= "__main__.py"
    if not path.exists():
        hint = (
            " `run` starts Python itself, so leave it out." if target.startswith("python") else ""
        )
        raise UsageError(
            f"There is no script {str(path)!r} here.{hint}",
            why=f"The current folder is {Path.cwd()}.",
            fix="Name a Python file; for a module add --module, for another program --no_python.",
        )
    return path


def _tell(outcome: Outcome) -> int:
    """Print to stderr how the launch ended, unless it succeeded; return the exit code."""
    if outcome.headline:
        console = Console(stderr=True, highlight=False, soft_wrap=True)
        console.show_cursor(True)  # a killed progress bar may have left it hidden
        console.print(
            Text(f"\n{outcome.headline}; all ranks here have been ended", style="bold red")
        )
        if outcome.story:
            console.print(Text(outcome.story))
    return outcome.exit_code
