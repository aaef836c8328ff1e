"""Options of the `deepspeed` command that `deepseek-zero run` accepts.

works             --save_pid, --log_level, --quiet
has no effect     --no_ssh, --no_ssh_check (nothing is started over ssh);
                  --launcher, --launcher_args on one machine
is refused        all others; REFUSED has the reasons and alternatives
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

# option: (reason, alternative)
REFUSED: dict[str, tuple[str, str]] = {
    "force_multi": ("There is no launcher for a remote machine.", START_EACH),
    "ssh_port": ("Nothing is started over ssh.", START_EACH),
    "venv_script": (
        "Ranks run in the Python that runs this command.",
        "Activate the environment first.",
    ),
    "autotuning": (
        "Autotuning is not planned.",
        'Set a key to "auto": docs/reference/config.md has the resulting values.',
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
    """Options of the `deepspeed` command in addition to those that RunOptions defines."""

    launcher: Annotated[
        str | None,
        _option("--launcher", text="Without effect on one machine; refused for several."),
    ] = None
    launcher_args: Annotated[str, _option("--launcher-args", text="As --launcher.")] = ""
    no_ssh: Annotated[
        bool, _option("--no-ssh", text="Without effect: nothing is started over ssh.")
    ] = False
    no_ssh_check: Annotated[bool, _option("--no-ssh-check", text="As --no-ssh.")] = False
    save_pid: Annotated[
        bool,
        _option(
            "--save-pid", text="Keep the launcher's process id in TMP/PID.deepspeed while it runs."
        ),
    ] = False
    log_level: Annotated[
        str | None, _option("--log-level", text=f"Log level of the launcher: {', '.join(LEVELS)}.")
    ] = None
    quiet: Annotated[bool, _option("--quiet", "-q", text="The launcher logs errors only.")] = False
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
    """Raise an error for the first option that is not supported.

    Raises:
        NotBuiltError: An option is not supported, or `log_level` is unknown.
    """
    for name, (why, fix) in REFUSED.items():
        if getattr(options, name):
            raise NotBuiltError(f"--{name} of the deepspeed command is not supported.", why, fix)
    if options.log_level is not None and options.log_level not in LEVELS:
        raise NotBuiltError(
            f"--log_level {options.log_level} is not known.", "", f"use {', '.join(LEVELS)}."
        )


def refuse_launcher(options: LauncherOptions, num_nodes: int) -> None:
    """Refuse DeepSpeed's launchers (ssh, MPI, Slurm) for several machines.

    Args:
        options: The options.
        num_nodes: Number of machines.

    Raises:
        NotBuiltError: A launcher was given and there are several machines.
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
    """Set the log level of the launcher."""
    level = "error" if options.quiet else options.log_level
    if level is not None:
        logger.setLevel(LEVELS[level])


@contextmanager
def pid_file(options: LauncherOptions) -> Iterator[None]:
    """Keep a file with this process's id while the block runs, if --save_pid is set.

    Raises:
        UsageError: The file cannot be written, for example because another user owns it.
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
    """Write a new private file, replacing an old one of this user; follow no link."""
    with suppress(FileNotFoundError):
        if path.lstat().st_uid == os.geteuid():
            path.unlink()
    with open(
        os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600), "w"
    ) as file:
        file.write(text)
