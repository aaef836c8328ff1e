"""Commands that the `deepspeed` compatibility layer adds to `deepseek-zero`.

They are `exec` and `dropin-path`, the environment of `run --as-deepspeed`, and a row of `doctor`.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import sys
from collections.abc import Sequence
from typing import Annotated

import typer

from ...base.errors import UsageError
from .dropin import DIRECTORY, child_environment, is_dropin_active

__all__ = ["add_commands", "child_environment", "findings"]

EXEC_HELP = """Run a command in which `import deepspeed` means this library.

For instance: deepseek-zero exec accelerate launch train.py. \
The commands `deepspeed` and `ds_report` are ours there
too. A genuine DeepSpeed stays as it is.
"""


def add_commands(app: typer.Typer) -> None:
    """Add the subcommands `exec` and `dropin-path` to the command `deepseek-zero`.

    `exec` runs a program in which `import deepspeed` imports this library. `dropin-path` prints the
    directory of the drop-in package.

    Args:
        app: The application of the command `deepseek-zero`.
    """

    @app.command("exec", help=EXEC_HELP, context_settings={"allow_interspersed_args": False})
    def exec_program(
        command: Annotated[
            list[str] | None, typer.Argument(metavar="COMMAND [ARGS]...", help="What to run.")
        ] = None,
    ) -> None:
        exec_command(command or [])

    @app.command("dropin-path")
    def dropin_path_command() -> None:
        """Print the directory that holds our `deepspeed`, to put first on PYTHONPATH by hand."""
        sys.stdout.write(f"{DIRECTORY}\n")


def exec_command(command: Sequence[str]) -> None:
    """Replace this process by the command. It does not return."""
    if not command:
        raise UsageError(
            "No command was given.",
            fix="deepseek-zero exec COMMAND [ARGS]..., for instance: exec torchrun",
        )
    environment = {**os.environ, **child_environment(os.environ)}
    program = shutil.which(command[0], path=environment["PATH"])
    if program is None:
        hint = ""
        if command[0].endswith(".py"):
            hint = f"; for a script: deepseek-zero exec python {command[0]}"
        raise UsageError(
            f"There is no program {command[0]!r} to run.", fix=f"check its name and PATH{hint}."
        )
    sys.stdout.flush()
    os.execve(program, list(command), environment)


def findings() -> list[tuple[str, str, str]]:
    """Return the row about DeepSpeed for the table that `deepseek-zero doctor` prints.

    The row reports which package `import deepspeed` imports, if any.

    Returns:
        A list with one tuple of a name, a value and the meaning of the value.
    """
    if is_dropin_active():
        meaning = f"this library answers to that name, from {DIRECTORY}"
        return [("deepspeed", "deepseek_zero", meaning)]
    if importlib.util.find_spec("deepspeed") is not None:
        meaning = "`deepseek-zero exec COMMAND` puts this library in its place"
        return [("deepspeed", "genuine", meaning)]
    return [("deepspeed", "none", "`deepseek-zero exec COMMAND` answers to that name")]
