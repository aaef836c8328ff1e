"""Options of the `deepspeed` command that `deepseek-zero run` takes beside its own.

Each works, changes nothing, or is refused by name.

    works             --save_pid, --log_level, --quiet
    changes nothing   --no_ssh, --no_ssh_check (nothing is started over ssh);
                      --launcher, --launcher_args on one machine
    refused           the rest: REFUSED says why and what to do
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from deepseek_zero.base.errors import NotBuiltError, UsageError
from deepseek_zero.base.log import LEVELS, logger

START_EACH = (
    "Nothing is started over ssh: run this same command on every host, each with its own "
    "--node_rank (0, 1, ...) and all with the same --master_addr; or name the hosts in the "
    "hostfile as they name themselves."
)

PANEL = "DeepSpeed's other options"
NOT_HERE = "Refused."
BIND = (
    "Ranks share the cores by threads (OMP_NUM_THREADS); start the command under taskset to bind "
    "all of it."
)
ELASTIC = (
    "A world of changing size is not built.",
    "Use --max_restarts, and load the last checkpoint at any world size.",
)

# option: (why, what to do)
REFUSED: dict[str, tuple[str, str]] = {
    "force_multi": ("There is no launcher for a remote machine.", START_EACH),
    "ssh_port": ("Nothing is started over ssh.", START_EACH),
    "venv_script": (
        "Ranks run in the Python that runs this command.",
        "Activate the environment first.",
    ),
    "autotuning": (
        "Autotuning is not planned.",
        'Set a key to "auto": docs/reference/config.md says what it becomes.',
    ),
    "elastic_training": ELASTIC,
    "min_elastic_nodes": ELASTIC,
    "max_elastic_nodes": ELASTIC,
    "bind_cores_to_rank": ("Ranks are not bound to cores.", BIND),
    "bind_core_list": ("Ranks are not bound to cores.", BIND),
}


def _option(*names: str, text: str) -> Any:
    return typer.Option(*names, help=text, rich_help_panel=PANEL, show_default=False)


@dataclass(frozen=True)
class LauncherOptions:
    """The options of the `deepspeed` command that `deepseek-zero run` has not as its own;
    RunOptions adds those.
    """

    launcher: Annotated[
        str | None,
        _option("--launcher", text="Without effect on one machine; refused for several."),
    ] = None
    launcher_args: Annotated[str, _option("--launcher-args", text="Likewise.")] = ""
    no_ssh: Annotated[
        bool, _option("--no-ssh", text="Without effect: nothing is started over ssh.")
    ] = False
    no_ssh_check: Annotated[bool, _option("--no-ssh-check", text="Likewise.")] = False
    save_pid: Annotated[
        bool,
        _option(
            "--save-pid", text="Keep the launcher's process id in TMP/PID.deepspeed while it runs."
        ),
    ] = False
    log_level: Annotated[
        str | None, _option("--log-level", text=f"What the launcher says: {', '.join(LEVELS)}.")
    ] = None
    quiet: Annotated[
        bool, _option("--quiet", "-q", text="The launcher says only what goes wrong.")
    ] = False
    force_multi: Annotated[bool, _option("--force-multi", text=NOT_HERE)] = False
    ssh_port: Annotated[int | None, _option("--ssh-port", text=NOT_HERE)] = None
    venv_script: Annotated[str | None, _option("--venv-script", text=NOT_HERE)] = None
    autotuning: Annotated[str | None, _option("--autotuning", text=NOT_HERE)] = None
    elastic_training: Annotated[bool, _option("--elastic-training", text=NOT_HERE)] = False
    min_elastic_nodes: Annotated[int | None, _option("--min-elastic-nodes", text=NOT_HERE)] = None
    max_elastic_nodes: Annotated[int | None, _option("--max-elastic-nodes", text=NOT_HERE)] = None
    bind_cores_to_rank: Annotated[bool, _option("--bind-cores-to-rank", text=NOT_HERE)] = False
    bind_core_list: Annotated[str | None, _option("--bind-core-list", text=NOT_HERE)] = None


def refuse_options(options: LauncherOptions) -> None:
    """Raise a NotBuiltError for the first option that asks for what is not here."""
    for name, (why, fix) in REFUSED.items():
        if getattr(options, name):
            raise NotBuiltError(f"--{name} of the deepspeed command is not here.", why, fix)
    if options.log_level is not None and options.log_level not in LEVELS:
        raise NotBuiltError(
            f"--log_level {options.log_level} is not known.", "", f"use {', '.join(LEVELS)}."
        )


def refuse_launcher(options: LauncherOptions, num_nodes: int) -> None:
    """Raise a NotBuiltError where several machines are to be reached by DeepSpeed's starters (ssh,
    MPI, Slurm).
    """
    given = [name for name in ("launcher", "launcher_args") if getattr(options, name)]
    if given and num_nodes == 1:
        logger.info(
            "--%s is without effect on one machine: its ranks are started from here", given[0]
        )
    elif given:
        raise NotBuiltError(
            f"--{given[0]} {getattr(options, given[0])} cannot start {num_nodes} machines.",
            "This command starts the ranks of the machine it runs on.",
            START_EACH,
        )


def set_log_level(options: LauncherOptions) -> None:
    """Set how much the launcher says."""
    level = "error" if options.quiet else options.log_level
    if level is not None:
        logger.setLevel(LEVELS[level])


@contextmanager
def pid_file(options: LauncherOptions) -> Iterator[None]:
    """With --save_pid, keep a file from which the programs that started this one learn its process
    id.

    Raises `UsageError` if somebody else's stands in its place.
    """
    path = Path(tempfile.gettempdir()) / f"{os.getpid()}.deepspeed" if options.save_pid else None
    if path is not None:
        try:
            _write_own(path, str(os.getpid()))
        except OSError as error:
            raise UsageError(
                f"--save_pid cannot write {path}: {error.strerror}.",
                "DeepSpeed chose that name, which every user of this machine can guess.",
                "remove what is there, set TMPDIR to a folder of your own, or leave --save_pid "
                "out.",
            ) from None
    try:
        yield
    finally:
        if path is not None:
            path.unlink(missing_ok=True)


def _write_own(path: Path, text: str) -> None:
    """Write a new file that nobody else may open, in the place of an old one of this user's; follow
    no link.
    """
    with suppress(FileNotFoundError):
        if path.lstat().st_uid == os.geteuid():
            path.unlink()
    with open(
        os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600), "w"
    ) as file:
        file.write(text)
