"""Options of the `deepspeed` command that `deepseek-zero run` accepts.

works             --save_pid, --log_level, --quiet
has no effect     --no_ssh, --no_ssh_check (nothing is started over ssh);
                  --bind_cores_to_rank, --bind_core_list (a warning is logged);
                  on one machine, the options of REMOTE
is refused        all others; `_refused` has the reasons and alternatives
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, fields
from functools import partial
from pathlib import Path
from typing import Any

import typer

from deepseek_zero.base.errors import NotBuiltError, UsageError
from deepseek_zero.base.log import LEVELS, logger

START_EACH = (
    "Nothing is started over ssh: run this same command on every host, each with its own "
    "--node_rank (0, 1, ...) and all with the same --master_addr; or name the hosts in the "
    "hostfile as they name themselves."
)

WHERE = "Where ranks run"
PANEL = "DeepSpeed's other options"
# Options about starting ranks on other machines
REMOTE = ("launcher", "launcher_args", "ssh_port", "venv_script", "force_multi")
ELASTIC = (
    "A world of changing size is not built.",
    "Use --max_restarts, and load the last checkpoint at any world size.",
)


def cli_option(default: Any, text: str, panel: str, *aliases: str, **facts: Any) -> Any:
    """Return a field of a dataclass that is an option: `num_gpus` is --num-gpus.

    Args:
        default: Value of the field if the option is not given.
        text: The text for --help.
        panel: The heading in --help.
        aliases: Other names of the option.
        facts: More metadata of the field.
    """
    create = partial(typer.Option, help=text, rich_help_panel=panel, show_default=False)
    return field(default=default, metadata={"create": create, "aliases": aliases, **facts})


def _refused(default: Any, why: str, fix: str) -> Any:
    """Declare an option that is refused, with the reason and an alternative."""
    return cli_option(default, "Refused.", PANEL, refused=(why, fix))


@dataclass(frozen=True)
class LauncherOptions:
    """Options of the `deepspeed` command in addition to those that RunOptions defines."""

    launcher: str | None = cli_option(
        None, "Without effect on one machine; refused for several.", PANEL
    )
    launcher_args: str = cli_option("", "As --launcher.", PANEL)
    no_ssh: bool = cli_option(False, "Without effect: nothing is started over ssh.", PANEL)
    no_ssh_check: bool = cli_option(False, "As --no-ssh.", PANEL)
    save_pid: bool = cli_option(
        False, "Keep the launcher's process id in TMP/PID.deepspeed while it runs.", PANEL
    )
    log_level: str | None = cli_option(
        None, f"Log level of the launcher: {', '.join(LEVELS)}.", PANEL
    )
    quiet: bool = cli_option(False, "The launcher logs errors only.", PANEL, "-q")
    force_multi: bool = cli_option(False, "As --launcher.", PANEL)
    ssh_port: int | None = cli_option(None, "As --launcher.", PANEL)
    venv_script: str | None = cli_option(None, "As --launcher.", PANEL)
    bind_cores_to_rank: bool = cli_option(False, "Without effect, with a warning.", PANEL)
    bind_core_list: str | None = cli_option(None, "As --bind-cores-to-rank.", PANEL)
    autotuning: str | None = _refused(
        None,
        "Autotuning is not planned.",
        'Set a key to "auto": docs/reference/config.md has the resulting values.',
    )
    elastic_training: bool = _refused(False, *ELASTIC)
    min_elastic_nodes: int | None = _refused(None, *ELASTIC)
    max_elastic_nodes: int | None = _refused(None, *ELASTIC)


def refuse_options(options: LauncherOptions) -> None:
    """Raise an error for the first option that is not supported.

    Raises:
        NotBuiltError: An option is not supported, or `log_level` is unknown.
    """
    for each in fields(options):
        refused = each.metadata.get("refused")
        if refused and getattr(options, each.name):
            raise NotBuiltError(
                f"--{each.name} of the deepspeed command is not supported.", *refused
            )
    if options.log_level is not None and options.log_level not in LEVELS:
        raise NotBuiltError(
            f"--log_level {options.log_level} is not known.", "", f"use {', '.join(LEVELS)}."
        )


def refuse_launcher(options: LauncherOptions, num_nodes: int) -> None:
    """Raise an error for options about other machines (ssh, MPI, Slurm) if there are several.

    Args:
        options: Options of the command line.
        num_nodes: Number of machines.

    Raises:
        NotBuiltError: An option of REMOTE was given and there are several machines.
    """
    given = [name for name in REMOTE if getattr(options, name)]
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


def warn_of_binding(options: LauncherOptions) -> None:
    """Log a warning if the command line asks to bind ranks to cores."""
    if options.bind_cores_to_rank or options.bind_core_list:
        logger.warning(
            "--bind_cores_to_rank has no effect: ranks share the cores by threads "
            "(OMP_NUM_THREADS). Start the command under taskset to bind all of it."
        )


@contextmanager
def pid_file(options: LauncherOptions) -> Iterator[None]:
    """Keep a file with this process's id while the block runs, if --save_pid is set.

    Raises:
        UsageError: The file cannot be written, for example because another user owns it.
    """
    if not options.save_pid:
        yield
        return
    path = Path(tempfile.gettempdir()) / f"{os.getpid()}.deepspeed"
    try:
        _write_own(path, str(os.getpid()))
    except OSError as error:
        raise UsageError(
            f"--save_pid cannot write {path}: {error.strerror}.",
            "DeepSpeed chose that name, which every user of this machine can guess.",
            "remove what is there, set TMPDIR to a folder of your own, or leave --save_pid out.",
        ) from None
    try:
        yield
    finally:
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
