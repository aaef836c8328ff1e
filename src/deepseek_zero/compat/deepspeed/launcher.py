"""DeepSpeed's command line, as far as it is not `deepseek-zero run`'s own.

Other options of the `deepspeed` command (LauncherOptions): each works, changes nothing, or is
refused by name.

    works             --save_pid, --log_level, --quiet
    changes nothing   --no_ssh, --no_ssh_check (nothing is started over ssh);
                      --launcher, --launcher_args on one machine
    refused           the rest: REFUSED says why and what to do

Machines and slots: the hostfile, and --include / --exclude.  A slot is a GPU's number (on a machine
without GPUs, just a place for a process).  The error texts begin as DeepSpeed's do, for people and
scripts that know them.

    hostfile   one `hostname slots=N` per line; blank lines and everything after # are ignored
    filter     NAME[:SLOT[,SLOT]...][@NAME...]; a name alone means all of its slots

`--local_rank=N` (accepts_local_rank): DeepSpeed passes it always, and a script that does not know
it dies in its argument parser.  Here it is passed where the script, or a module beside it that it
imports, names the option in a call (add_argument, click.option, ...) or calls parse_known_args,
which lets unknown options through; the source is read and never run.  LOCAL_RANK is in the
environment in any case.
"""

from __future__ import annotations

import ast
import os
import re
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from ...base.errors import NotBuiltError, UsageError
from ...base.log import LEVELS, logger

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


Slots = dict[str, tuple[int, ...]]
"""Host name -> its slots, in the order of the hostfile: the first host is node 0."""

_HOST_LINE = re.compile(r"^(\S+)\s+slots=(\d+)$")


def read_hostfile(path: Path) -> Slots:
    """Parse a hostfile from disk."""
    try:
        return parse_hostfile(path.read_text().splitlines())
    except OSError as error:
        raise UsageError(
            f"The hostfile {path} cannot be read: {error.strerror}.",
            fix="Correct --hostfile, or leave it out.",
        ) from error


def parse_hostfile(lines: Iterable[str]) -> Slots:
    """Return hosts and their slots 0..N-1, in the file's order."""
    hosts: Slots = {}
    for line in lines:
        text = line.partition("#")[0].strip()
        if not text:
            continue
        match = _HOST_LINE.match(text)
        if match is None:
            raise UsageError(
                f"Hostfile contains a bad entry: {line.strip()}, unable to proceed with launching.",
                fix="Write each line as `hostname slots=N`.",
            )
        host = match.group(1)
        slots = int(match.group(2))
        if host in hosts:
            raise UsageError(
                f"Hostfile contains multiple entries for {host}, unable to proceed with launching.",
                fix="Write one line per host, with all of its slots.",
            )
        hosts[host] = tuple(range(slots))
    if not hosts:
        raise UsageError(
            "Hostfile is empty or not formatted correctly, unable to proceed with launching.",
            fix="Write each line as `hostname slots=N`.",
        )
    return hosts


def parse_filter(text: str) -> dict[str, tuple[int, ...] | None]:
    """Return host -> slots named in an --include or --exclude text; None for a host named without
    slots.
    """
    named: dict[str, tuple[int, ...] | None] = {}
    for part in text.split("@"):
        host, colon, slots = part.strip().partition(":")
        numbers = slots.split(",") if colon else []
        if not host or not all(number.strip().isdecimal() for number in numbers):
            raise UsageError(
                f"The filter {text!r} has a part that cannot be read: {part!r}.",
                why="The grammar is NAME[:SLOT[,SLOT]...], parts joined by @, slots are numbers.",
                fix="For example: worker-0@worker-1:0,2",
            )
        earlier = named.get(host) or ()
        named[host] = earlier + tuple(int(number) for number in numbers) if colon else None
    return named


def filter_slots(
    hosts: Mapping[str, tuple[int, ...]], include: str = "", exclude: str = ""
) -> Slots:
    """Return the hosts and slots left by --include or --exclude, in the hostfile's order; empty
    hosts fall out.
    """
    if include and exclude:
        raise UsageError("--include and --exclude are mutually exclusive.", fix="Give one of them.")
    named = parse_filter(include or exclude) if include or exclude else {}
    for host, slots in named.items():
        if host not in hosts:
            raise UsageError(
                f"Hostname '{host}' not found in hostfile.", fix=f"Known hosts: {', '.join(hosts)}."
            )
        for slot in slots or ():
            if slot not in hosts[host]:
                known = ", ".join(map(str, hosts[host])) or "none"
                raise UsageError(
                    f"No slot '{slot}' specified on host '{host}'.", fix=f"Its slots: {known}."
                )
    kept = {
        host: kept_slots(slots, host, named, bool(include), bool(exclude))
        for host, slots in hosts.items()
    }
    left = {host: slots for host, slots in kept.items() if slots}
    if not left:
        raise UsageError(
            "--include or --exclude leaves no slot to run on.",
            fix="Name at least one slot to keep.",
        )
    return left


def kept_slots(
    slots: tuple[int, ...],
    host: str,
    named: Mapping[str, tuple[int, ...] | None],
    include: bool,
    exclude: bool,
) -> tuple[int, ...]:
    """Return which of a host's slots a filter leaves."""
    if host not in named:
        return () if include else slots
    chosen = slots if named[host] is None else named[host] or ()
    return tuple(slot for slot in slots if (slot in chosen) != exclude)


OPTIONS = {"--local_rank", "--local-rank"}

TOLERANT_CALLS = {"parse_known_args", "parse_known_intermixed_args"}

MAX_FILES = 200
"""Modules beside a script that are read at most; a project larger than that keeps its parser near
the top.
"""


def accepts_local_rank(source: Path | None, args: Sequence[str] = ()) -> bool:
    """Return whether the script at `source` takes --local_rank=N and `args` do not give it
    already.
    """
    if source is None or any(arg.partition("=")[0] in OPTIONS for arg in args):
        return False
    waiting = [source]
    seen = {source}
    while waiting and len(seen) <= MAX_FILES:
        tree = _parse(waiting.pop(0))
        if tree is None:
            continue
        if any(_takes_option(node) for node in ast.walk(tree)):
            return True
        found = [path for path in _local_imports(tree, source.parent) if path not in seen]
        seen.update(found)
        waiting.extend(dict.fromkeys(found))
    return False


def find_module(name: str, folders: Sequence[str] | None = None) -> Path | None:
    """Return the file that `python -m name` would run, found by path: importing would run the
    parent packages.
    """
    for folder in folders if folders is not None else [str(Path.cwd()), *sys.path]:
        base = Path(folder).joinpath(*name.split("."))
        for candidate in (base.with_name(f"{base.name}.py"), base / "__main__.py"):
            if candidate.is_file():
                return candidate
    return None


def _parse(path: Path) -> ast.Module | None:
    try:
        return ast.parse(path.read_bytes())
    except (OSError, SyntaxError, ValueError):
        return None


def _takes_option(node: ast.AST) -> bool:
    if not isinstance(node, ast.Call):
        return False
    called = (
        node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
    )
    # A flag built by f-string or held in a variable is not seen; the environment variable serves
    # such scripts.
    return called in TOLERANT_CALLS or any(
        isinstance(arg, ast.Constant) and arg.value in OPTIONS for arg in node.args
    )


def _local_imports(tree: ast.Module, folder: Path) -> Iterator[Path]:
    for name in _imported_names(tree):
        base = folder.joinpath(*name.split("."))
        for candidate in (base.with_name(f"{base.name}.py"), base / "__init__.py"):
            if candidate.is_file():
                yield candidate


def _imported_names(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
