"""Command lines of `deepseek-zero checkpoint inspect | verify | convert | prune`.

They are implemented in cli/checkpoint_pages.py, which is imported late because it imports torch.
Exit codes: 0 for success, 1 if `verify` finds damage, 2 if the command is impossible (missing
checkpoint, existing output, wrong option).
"""

from __future__ import annotations

import importlib
from enum import Enum
from pathlib import Path
from typing import Annotated, Any

import typer

from deepseek_zero.base.errors import UsageError
from deepseek_zero.base.given import refuse_url

app = typer.Typer(
    no_args_is_help=True,
    help="Inspect, verify and convert checkpoints, and remove old ones.",
)


def _local(path: Path) -> Path:
    refuse_url(f"'{path}'", path)
    return path


Where = Annotated[
    Path,
    typer.Argument(
        metavar="DIR", help="A directory of checkpoints, or one checkpoint in it.", callback=_local
    ),
]
Tag = Annotated[
    str | None,
    typer.Option("--tag", help="Only this checkpoint of the directory.", show_default=False),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]


class CheckpointForm(Enum):
    """Output format of `convert`."""

    SAFETENSORS = "safetensors"
    PTH = "pth"
    DEEPSPEED = "deepspeed"


class Dtype(Enum):
    """Dtype of converted weights."""

    FP32 = "fp32"
    BF16 = "bf16"
    FP16 = "fp16"


def _pages() -> Any:
    return importlib.import_module("deepseek_zero.cli.checkpoint_pages")


@app.command("inspect")
def inspect_command(where: Where, tag: Tag = None, json: AsJson = False) -> None:
    """Show the checkpoints of a directory, or the contents of one checkpoint."""
    _pages().inspect(where, tag, as_json=json)


@app.command("verify")
def verify_command(where: Where, tag: Tag = None, json: AsJson = False) -> None:
    """Compare every byte with its checksum. Exit code 0: undamaged; 1: damaged."""
    status = 0 if _pages().verify(where, tag, as_json=json) else 1
    raise typer.Exit(status)


@app.command("convert")
def convert_command(
    where: Where,
    out: Annotated[
        Path,
        typer.Argument(
            metavar="OUT",
            help="The path to write, which must not exist: a file for pth, else a directory.",
            callback=_local,
        ),
    ],
    to: Annotated[
        CheckpointForm, typer.Option("--to", help="The format to write.")
    ] = CheckpointForm.SAFETENSORS,
    dtype: Annotated[
        Dtype | None,
        typer.Option(
            "--dtype", help="Dtype of the weights. Default: as saved.", show_default=False
        ),
    ] = None,
    tag: Annotated[
        str | None,
        typer.Option(
            "--tag", help="The checkpoint. Default: that of the file `latest`.", show_default=False
        ),
    ] = None,
    json: AsJson = False,
) -> None:
    """Convert a checkpoint to safetensors or pth (weights), or DeepSpeed (all states)."""
    if to is CheckpointForm.DEEPSPEED and dtype is not None:
        raise UsageError(
            "--dtype does not go with --to deepspeed.",
            why="A DeepSpeed checkpoint holds the states in the dtypes they train in.",
            fix="Leave --dtype out, or convert to safetensors or pth.",
        )
    name = dtype.value if dtype is not None else None
    _pages().convert(where, tag, out, to.value, name, as_json=json)


@app.command("prune")
def prune_command(
    where: Annotated[
        Path, typer.Argument(metavar="DIR", help="A directory of checkpoints.", callback=_local)
    ],
    keep_last: Annotated[
        int | None,
        typer.Option(
            "--keep-last",
            min=1,
            help="Keep this many of the newest. Default: all.",
            show_default=False,
        ),
    ] = None,
    keep_every: Annotated[
        int | None,
        typer.Option(
            "--keep-every",
            min=1,
            help="Also keep multiples of this many steps.",
            show_default=False,
        ),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="List what would be removed, remove nothing.")
    ] = False,
    json: AsJson = False,
) -> None:
    """Remove old checkpoints and leftovers of unfinished saves."""
    if keep_every is not None and keep_last is None:
        raise UsageError(
            "--keep-every needs --keep-last.",
            why="Without it every checkpoint is kept.",
            fix="Say how many of the newest to keep, for example --keep-last 2.",
        )
    _pages().prune(where, keep_last, keep_every, dry_run=dry_run, as_json=json)
