"""Importing the transports does not import the compatibility package for DeepSpeed."""

from __future__ import annotations

import os
import subprocess
import sys


def test_the_transports_are_imported_without_the_compat_package() -> None:
    program = (
        "import sys; from deepseek_zero.comm import context; assert 'deepseek_zero.compat' not in "
        "sys.modules"
    )
    subprocess.run(
        [sys.executable, "-c", program],
        check=True,
        env=os.environ | {"PYTHONPATH": ":".join(sys.path)},
    )
