"""The command `deepseek-zero`: a typer app with one module per subcommand.

Only subcommands that need torch import it, and only when they run, so `--help` is fast. The
library's own errors end the command with exit code 2 and a message without a traceback.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import inspect
import platform
import signal
import sys
from collections.abc import Callable
from dataclasses import fields
from typing import Annotated, Any, get_type_hints

import typer
from rich.console import Console

from deepseek_zero.base.errors import DeepSeekZeroError
from deepseek_zero.base.log import logger, speak
from deepseek_zero.base.plugins import COMMANDS, contributions
from deepseek_zero.cli.checkpoint import app as checkpoint_app
from deepseek_zero.cli.run import HELP as RUN_HELP
from deepseek_zero.cli.run import RunOptions
from deepseek_zero.cli.run import run as run_script
from deepseek_zero.cli.worker import leave

USAGE_EXIT_CODE = 2

app = typer.Typer(
    name="deepseek-zero",
    help=(
        "ZeRO 0-3 in pure Python on PyTorch: start training, look after checkpoints, look at the "
        "machine."
    ),
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)


def _hyphened(word: str) -> str:
    """Normalize --master_port to --master-port.

    It is applied to option names only, not to values or the script's arguments.
    """
    return word.replace("_", "-")


def _run_command(act: Callable[[RunOptions], int]) -> Callable[..., None]:
    """Create the command `run`, whose options are the fields of `RunOptions`.

    The command passes an instance of `RunOptions` to `act`.
    """
    hints = get_type_hints(RunOptions)
    parameters = []
    for each in fields(RunOptions):
        about = each.metadata
        info = about.get("argument")
        if info is None:
            info = about["create"](f"--{_hyphened(each.name)}", *about["aliases"])
        kind: Any = Annotated[hints[each.name], info]
        keyword_only = inspect.Parameter.KEYWORD_ONLY
        parameters.append(
            inspect.Parameter(each.name, keyword_only, default=each.default, annotation=kind)
        )

    def command(**values: Any) -> None:
        raise typer.Exit(act(RunOptions(**values)))

    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    command.__annotations__ = {each.name: each.annotation for each in parameters}
    return command


RUN_CONTEXT: dict[str, Any] = {
    # Parsing stops at the first argument that is not an option. Everything after the script's name
    # belongs to the script.
    "allow_interspersed_args": False,
    "token_normalize_func": _hyphened,
}

app.add_typer(checkpoint_app, name="checkpoint")
app.command("run", help=RUN_HELP, context_settings=RUN_CONTEXT)(_run_command(run_script))
for _contribution in contributions(COMMANDS):
    _contribution.add_commands(app)


@app.command("doctor")
def doctor_command(
    json: Annotated[
        bool, typer.Option("--json", help="Print the findings as JSON instead of a table.")
    ] = False,
    hide: Annotated[  # ds_report's options; there are no compiled operators to hide
        bool, typer.Option("--hide_operator_status", "--hide_errors_and_warnings", hidden=True)
    ] = False,
) -> None:
    """Show what this machine has, and what that means for training."""
    # imported late because it imports torch
    importlib.import_module("deepseek_zero.cli.doctor").show(as_json=json)


@app.command("version")
def version_command() -> None:
    """Print the versions that a bug report needs."""
    parts = [f"{name} {_installed(name)}" for name in ("deepseek-zero", "torch")]
    Console(highlight=False).print(", ".join([*parts, f"Python {platform.python_version()}"]))


def _print_version(asked: bool) -> None:
    if asked:
        version_command()
        raise typer.Exit


@app.callback()
def _before_any_command(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print the versions and exit."
        ),
    ] = False,
) -> None:
    """Define the options that precede a command; typer reads them from the parameters."""


def _installed(distribution: str) -> str:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return "(not installed as a package)"


def main() -> None:
    """Run the command line and exit; the entry point of the `deepseek-zero` script."""
    try:
        answer()
    except SystemExit as end:
        if not isinstance(end.code, int | None):
            raise  # a message, which Python prints
        leave(end.code or 0)
    leave(0)


def answer() -> None:
    """Run the command line.

    Raises:
        SystemExit: The command ended with an exit code.
    """
    try:
        speak()
        app()
    except DeepSeekZeroError as error:
        logger.error(str(error))
        sys.exit(USAGE_EXIT_CODE)
    except KeyboardInterrupt:
        sys.exit(128 + signal.SIGINT)
