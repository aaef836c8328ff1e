"""`deepseek-zero exec` and `deepseek-zero dropin-path`: programs that import `deepspeed` get this
library.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Sequence

from deepseek_zero.base.errors import UsageError
from deepseek_zero.compat.deepspeed.dropin import DIRECTORY, child_environment

EXEC_HELP = """Run a command in which `import deepspeed` means this library.

For instance: deepseek-zero exec accelerate launch train.py. \
The commands `deepspeed` and `ds_report` are ours there
too. A genuine DeepSpeed stays as it is.
"""


def exec_command(command: Sequence[str]) -> None:
    """Become the command; does not return."""
    if not command:
        raise UsageError(
            "No command was given.",
            fix="deepseek-zero exec COMMAND [ARGS]..., for instance: exec torchrun",
        )
    environment = {**os.environ, **child_environment(os.environ)}
    program = shutil.which(command[0], path=environment["PATH"])
    if program is None:
        hint = (
            f"; for a script: deepseek-zero exec python {command[0]}"
            if command[0].endswith(".py")
            else ""
        )
        raise UsageError(
            f"There is no program {command[0]!r} to run.", fix=f"check its name and PATH{hint}."
        )
    sys.stdout.flush()
    os.execve(program, list(command), environment)


def show_path() -> None:
    """Print the directory to put first on PYTHONPATH."""
    sys.stdout.write(f"{DIRECTORY}\n")
