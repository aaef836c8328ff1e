"""Implement `deepseek-zero checkpoint ...`, with output as tables or JSON.

cli/checkpoint.py imports this module late because it imports torch.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from datetime import datetime
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)
from rich.table import Table
from rich.text import Text

from deepseek_zero.base.errors import CheckpointError, UsageError
from deepseek_zero.base.plugins import CHECKPOINT_LAYOUTS, contributions
from deepseek_zero.base.quantities import format_bytes, format_count
from deepseek_zero.checkpoint import catalogue
from deepseek_zero.checkpoint.catalogue import CheckpointInfo, Retention
from deepseek_zero.checkpoint.convert import convert_to_pth, convert_to_safetensors
from deepseek_zero.checkpoint.format import MOMENT, WHOLE, Manifest
from deepseek_zero.checkpoint.layouts import SLICES
from deepseek_zero.checkpoint.read import open_checkpoint
from deepseek_zero.checkpoint.safetensors_file import dtype_named, read_header
from deepseek_zero.checkpoint.verify import Fault, OnBytes, checksum_coverage, num_without_checksum
from deepseek_zero.checkpoint.verify import verify as verify_one

MOST_FAULTS = 20  # shown for each checkpoint in a table; --json has all of them

CONVERTERS: dict[str, Callable[..., Any]] = {
    "safetensors": convert_to_safetensors,
    "pth": convert_to_pth,
}
Facts = dict[str, Any]  # about a checkpoint, or about a tensor of one


# -- inspect


def inspect(where: Path, tag: str | None, *, as_json: bool) -> None:
    """Print the contents of a directory or of one checkpoint.

    Args:
        where: A directory of checkpoints, or a checkpoint.
        tag: The checkpoint in the directory; None means all of them.
        as_json: Whether to print JSON instead of tables.
    """
    if tag is None and not catalogue.is_single_checkpoint(where):
        _inspect_directory(where, as_json=as_json)
        return
    entry = _entries(where, tag)[0]
    if entry.manifest is None:
        raise CheckpointError(
            f"{entry.folder}: {entry.faults[0]}.",
            fix="look at the other checkpoints in the same directory.",
        )
    facts = _facts(entry)
    tensors = _tensors(entry)
    if as_json:
        _print_json({**facts, "plan": entry.manifest.plan, "parameters": tensors})
        return
    console = _console()
    console.print(_facts_table(entry, facts))
    console.print(_tensors_table(tensors))
    _print_plan(console, entry.manifest)
    _print_faults(console, entry.faults)


def _inspect_directory(where: Path, *, as_json: bool) -> None:
    """Print the checkpoints of a directory and the leftovers of unfinished saves."""
    left = catalogue.leftovers(where)
    latest = catalogue.latest_tag(where)
    entries = catalogue.checkpoints(where) if left else _entries(where, None)
    if as_json:
        found = {
            "directory": str(where),
            "latest": latest,
            "checkpoints": [_facts(entry) for entry in entries],
            "leftovers": [{"path": str(one.path), "in_use": one.is_in_use} for one in left],
        }
        _print_json(found)
        return
    console = _console()
    table = _table(
        f"checkpoints in {where}, newest first",
        "tag",
        "step",
        "saved",
        "ranks",
        "stage",
        "size",
        "state",
    )
    for entry in entries:
        ranks = "?"
        stage = "?"
        if entry.manifest is not None:
            ranks = str(entry.manifest.world_size)
            stage = str(entry.manifest.stage)
        state = Text("complete", "green")
        if not entry.is_complete:
            state = Text(f"damaged: {entry.faults[0]}", "red")
        name = f"{entry.tag} (latest)" if entry.tag == latest else entry.tag
        size = format_bytes(entry.num_bytes)
        step = str(entry.step) if entry.step >= 0 else "?"
        table.add_row(name, step, _when(entry), ranks, stage, size, state)
    console.print(table)
    for one in left:
        doing = "left by a save that never finished; `prune` removes it"
        if one.is_in_use:
            doing = "being written"
        console.print(Text(f"{one.path.name}: {doing}", "yellow"))
    if latest is not None and latest not in [entry.tag for entry in entries]:
        console.print(Text(f"latest names {latest}, which does not exist", "red"))


def _facts(entry: CheckpointInfo) -> Facts:
    """Return the description of a checkpoint as JSON values."""
    manifest = entry.manifest
    facts: Facts = {
        "tag": entry.tag,
        "folder": str(entry.folder),
        "step": entry.step if entry.step >= 0 else None,
        "saved_at": entry.saved_at,
        "num_bytes": entry.num_bytes,
        "complete": entry.is_complete,
        "faults": [asdict(fault) for fault in entry.faults],
    }
    layout = entry.layout
    facts["layout"] = layout.name if layout is not None else None
    if manifest is not None:
        has_states = layout is not None and layout.has_states
        facts |= {
            "ranks": manifest.world_size if has_states else None,
            "stage": manifest.stage if has_states else None,
            "mesh": manifest.mesh,
            "ranks_per_host": manifest.ranks_per_host,
            "optimizer": manifest.optimizer,
            "num_parameters": sum(
                math.prod(each["shape"]) for each in manifest.parameters.values()
            ),
            "chunks": len(manifest.chunks),
            "chunks_without_checksum": num_without_checksum(manifest),
            "format": f"{manifest.format} {manifest.version}"
            if layout is SLICES
            else manifest.format,
            "run": manifest.run,
        }
    return facts


def _tensors(entry: CheckpointInfo) -> dict[str, Facts]:
    """Map parameters and buffers to shape, dtype, optimizer states and bytes."""
    manifest = entry.manifest
    assert manifest is not None
    found = {
        name: {**facts, "states": [], "num_bytes": 0}
        for name, facts in (manifest.parameters | manifest.buffers).items()
    }
    if entry.layout is not SLICES:
        return _foreign_tensors(entry, found)
    headers = {}
    for file in {chunk.file for chunk in manifest.chunks} - {fault.file for fault in entry.faults}:
        headers[file] = read_header(entry.folder / file).locations
    for chunk in manifest.chunks:
        facts = found.get(chunk.name)
        if facts is None:  # neither a parameter nor a buffer
            continue
        if chunk.kind in (MOMENT, WHOLE) and chunk.key not in facts["states"]:
            facts["states"].append(chunk.key)
        if chunk.file in headers:
            facts["num_bytes"] += headers[chunk.file][chunk.tensor_name].num_bytes
    return found


def _foreign_tensors(entry: CheckpointInfo, found: dict[str, Facts]) -> dict[str, Facts]:
    """Complete the entries of a checkpoint that has no manifest of this library."""
    with ExitStack() as stack:
        source = open_checkpoint(entry.folder, None, stack, checks=False)
        for name, facts in found.items():
            facts["states"] = source.values.keys(MOMENT, name)
            count = math.prod(facts["shape"]) * (1 + len(facts["states"]))
            facts["num_bytes"] = count * dtype_named(facts["dtype"]).itemsize
    return found


def _facts_table(entry: CheckpointInfo, facts: Facts) -> Table:
    """Return a table of the facts of one checkpoint; facts without a value have no row."""
    table = _table(f"checkpoint {entry.tag}", "what", "")
    table.show_header = False
    table.add_row("folder", str(entry.folder))
    saved = f"saved {_when(entry)}"
    step = f"{facts['step']}, {saved}" if facts["step"] is not None else f"unknown, {saved}"
    table.add_row("step", step)
    if facts["ranks"] is not None:
        table.add_row("saved by", f"{facts['ranks']} rank(s) at stage {facts['stage']}")
        if facts["mesh"] is not None:
            table.add_row("mesh", _format_mesh(facts["mesh"]))
        if facts["ranks_per_host"] > 1:
            table.add_row("sums", f"by host, of {facts['ranks_per_host']} ranks each")
        table.add_row("optimizer", facts["optimizer"] or "unknown")
    table.add_row("parameters", format_count(facts["num_parameters"]))
    size = format_bytes(facts["num_bytes"])
    if facts["chunks"]:
        size += f" in {facts['chunks']} chunks"
    table.add_row("size", size)
    if facts["chunks_without_checksum"]:
        table.add_row("checksums", f"{facts['chunks_without_checksum']} chunks have none")
    run = f", run {facts['run']}" if facts["run"] else ""
    table.add_row("format", facts["format"] + run)
    return table


def _format_mesh(sizes: dict[str, int]) -> str:
    """Return the axes of a mesh with several ranks, as "pp=2 x tp=4"."""
    return " x ".join(f"{axis}={size}" for axis, size in sizes.items() if size != 1) or "one rank"


def _tensors_table(tensors: dict[str, Facts]) -> Table:
    """Return a table with a row for each parameter and buffer."""
    table = _table("tensors", "name", "shape", "dtype", "optimizer states", "size")
    for name, facts in tensors.items():
        shape = " x ".join(map(str, facts["shape"])) or "scalar"
        trained = {True: ", ".join(facts["states"]) or "none", False: "frozen", None: "buffer"}
        dtype = facts["dtype"]
        states = trained[facts.get("trained")]
        table.add_row(name, shape, dtype, states, format_bytes(facts["num_bytes"]))
    return table


def _print_plan(console: Console, manifest: Manifest) -> None:
    """Print the plan; units with the same plan share a row."""
    rows: dict[tuple[str, ...], list[str]] = {}
    columns = list(dict.fromkeys(column for plan in manifest.plan.values() for column in plan))
    for unit, plan in manifest.plan.items():
        row = tuple(plan.get(column) or "" for column in columns)
        rows.setdefault(row, []).append(unit.rpartition("/")[0] or "root")
    if not rows:
        return
    table = _table("plan", *columns, "units")
    for row, units in rows.items():
        names = ", ".join(dict.fromkeys(units))
        shown_names = names if len(names) < 60 else f"{units[0]} and {len(units) - 1} more"
        table.add_row(*row, shown_names)
    console.print(table)


# -- verify


def verify(where: Path, tag: str | None, *, as_json: bool) -> bool:
    """Verify every byte of checkpoints, and print the result.

    Args:
        where: A directory of checkpoints, or a checkpoint.
        tag: The checkpoint in the directory; None means all of them.
        as_json: Whether to print JSON instead of text.

    Returns:
        Whether all of them are undamaged.
    """
    entries = _entries(where, tag)
    found: dict[str, list[Fault]] = {}
    with _progress(sum(entry.num_bytes for entry in entries), quiet=as_json) as on_bytes:
        for entry in entries:
            found[entry.tag] = verify_one(entry.folder, on_bytes=on_bytes)
    if as_json:
        _print_json([_verdict(entry, found[entry.tag]) for entry in entries])
    else:
        console = _console()
        for entry in entries:
            _print_verdict(console, entry, found[entry.tag])
    return not any(found.values())


def _verdict(entry: CheckpointInfo, faults: Sequence[Fault]) -> Facts:
    """Return the result of a verification as JSON values."""
    unknown = num_without_checksum(entry.manifest) if entry.manifest is not None else None
    note = "" if faults else checksum_coverage(entry.folder)
    return {
        "tag": entry.tag,
        "good": not faults,
        "chunks_without_checksum": unknown,
        "note": note,
        "faults": [asdict(fault) for fault in faults],
    }


def _print_verdict(console: Console, entry: CheckpointInfo, faults: Sequence[Fault]) -> None:
    if faults:
        console.print(Text(f"{entry.tag}: damaged, {len(faults)} fault(s)", "bold red"))
        _print_faults(console, faults)
        return
    verdict = _verdict(entry, faults)
    note = verdict["note"]
    if verdict["chunks_without_checksum"]:
        note = f"{verdict['chunks_without_checksum']} chunks have no checksum and were only read"
    note = f"; {note}" if note else ""
    console.print(Text(f"{entry.tag}: good, {format_bytes(entry.num_bytes)} read{note}", "green"))


def _print_faults(console: Console, faults: Sequence[Fault]) -> None:
    """Print the first faults, and what to do about them."""
    for fault in faults[:MOST_FAULTS]:
        console.print(Text(f"  {fault}", "red"))
    if len(faults) > MOST_FAULTS:
        console.print(Text(f"  and {len(faults) - MOST_FAULTS} more (--json names all)", "red"))
    if faults:
        console.print(
            '  What to do: bring the files back from a copy, or load an older one (tag="newest" '
            "finds it)."
        )


# -- convert


def _convert(source: Path, out: Path, form: str, dtype: str | None) -> None:
    """Write a checkpoint in another format, by this package or by one that contributes it."""
    if form in CONVERTERS:
        CONVERTERS[form](source, out, dtype)
        return
    for module in contributions(CHECKPOINT_LAYOUTS):
        if form in module.CONVERTERS:
            module.CONVERTERS[form](source, out)
            return
    raise UsageError(
        f"no package of this installation writes the format {form}.",
        "This copy of deepseek_zero has only its core.",
        f"choose one of: {', '.join(CONVERTERS)}.",
    )


def convert(
    where: Path, tag: str | None, out: Path, form: str, dtype: str | None, *, as_json: bool
) -> None:
    """Convert a checkpoint to another format.

    Args:
        where: A directory of checkpoints, or a checkpoint.
        tag: The checkpoint in the directory; None selects the one named by `latest`.
        out: The output, which must not exist.
        form: The format: "safetensors", "pth", or one that another package contributes.
        dtype: The dtype of the weights; None keeps that of the checkpoint.
        as_json: Whether to print JSON instead of text.
    """
    if out.exists():
        raise UsageError(
            f"{out} exists already.",
            why="Nothing is overwritten.",
            fix="Pass a path that does not exist.",
        )
    source = where if tag is None and catalogue.is_single_checkpoint(where) else _folder(where, tag)
    with Console(stderr=True).status(Text(f"converting {source} to {form}")):
        _convert(source, out, form, dtype)
    written = sum(path.stat().st_size for path in [out, *out.rglob("*")] if path.is_file())
    if as_json:
        _print_json({"source": str(source), "out": str(out), "to": form, "num_bytes": written})
    else:
        _console().print(f"{source} -> {out}: {form}, {format_bytes(written)}")


def _folder(where: Path, tag: str | None) -> Path:
    """Return the folder of a checkpoint in a directory, by default of the latest one."""
    chosen = tag or catalogue.latest_tag(where)
    if chosen is None:
        raise UsageError(
            f"{where} names no latest checkpoint.", fix="Name one with --tag; `inspect` lists them."
        )
    return _entries(where, chosen)[0].folder


# -- prune


def prune(
    where: Path, last: int | None, every: int | None, *, dry_run: bool, as_json: bool
) -> None:
    """Remove old checkpoints and leftovers of unfinished saves, and print the result.

    Args:
        where: A directory of checkpoints.
        last: Number of newest checkpoints to keep; None keeps all.
        every: Also keep multiples of this number of steps.
        dry_run: Whether to only print what would be removed.
        as_json: Whether to print JSON instead of text.
    """
    if not where.is_dir():
        raise UsageError(
            f"{where} is no directory.", fix="Name the directory that save_checkpoint was given."
        )
    if catalogue.is_single_checkpoint(where):
        raise UsageError(
            f"{where} is one checkpoint, not a directory of checkpoints.",
            "prune removes the older checkpoints of a directory.",
            f"Name {where.absolute().parent}, or remove this checkpoint as a folder.",
        )
    try:
        done = catalogue.prune(where, Retention(last, every), dry_run=dry_run)
    except OSError as error:
        raise CheckpointError(
            f"{where}: {error.strerror or error}.",
            "A checkpoint is renamed to a hidden name before it is removed, so none is incomplete.",
            "check the directory's permissions, and run prune again.",
        ) from error
    if as_json:
        kept, removed = ([entry.tag for entry in entries] for entries in (done.kept, done.removed))
        cleaned = [path.name for path in done.cleaned]
        _print_json({"removed": removed, "kept": kept, "cleaned": cleaned, "dry_run": dry_run})
        return
    console = _console()
    verb = "would remove" if dry_run else "removed"
    for name in [*(entry.tag for entry in done.removed), *(path.name for path in done.cleaned)]:
        console.print(f"{verb} {name}")
    console.print(f"kept {', '.join(entry.tag for entry in done.kept) or 'none'}")


# -- shared helpers


def _entries(where: Path, tag: str | None) -> list[CheckpointInfo]:
    """Return the checkpoints that the arguments select, or raise UsageError."""
    if tag is None and catalogue.is_single_checkpoint(where):
        return [catalogue.info_at(where, where.absolute().name)]
    entries = catalogue.checkpoints(where)
    chosen = [entry for entry in entries if tag is None or entry.tag == tag]
    if chosen:
        return chosen
    fix = "Name the directory that save_checkpoint was given."
    if entries:
        fix = f"Choose one of: {', '.join(entry.tag for entry in entries)}."
    name = f" {tag!r}" if tag else ""
    raise UsageError(f"{where} holds no checkpoint{name}.", fix=fix)


def _when(entry: CheckpointInfo) -> str:
    """Return the local time at which a checkpoint was saved."""
    return datetime.fromtimestamp(entry.saved_at).isoformat(" ", "seconds")


def _table(title: str, *columns: str) -> Table:
    """Return an empty table without lines."""
    table = Table(title=title, title_justify="left", box=None, pad_edge=False)
    for column in columns:
        table.add_column(column, overflow="fold")
    return table


def _console() -> Console:
    return Console(highlight=False, markup=False)


def _print_json(document: Any) -> None:
    _console().print(json.dumps(document, indent=2), soft_wrap=True)


@contextmanager
def _progress(total: int, *, quiet: bool) -> Iterator[OnBytes]:
    """Show a progress bar on stderr if it is a terminal."""
    columns = (
        TextColumn("reading"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    console = Console(stderr=True)
    with Progress(
        *columns, console=console, transient=True, disable=quiet or not console.is_terminal
    ) as bar:
        task = bar.add_task("", total=total)
        yield lambda count: bar.advance(task, count)
