"""Other systems than Linux get one sentence, at import."""

from __future__ import annotations

import os
import subprocess
import sys


def test_another_system_is_told_at_import_what_to_do() -> None:
    program = "import sys; sys.platform = 'darwin'; import deepseek_zero"
    done = subprocess.run(
        [sys.executable, "-c", program],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 1
    last = done.stderr.splitlines()[-1]
    assert last.startswith("ImportError: deepseek_zero runs on Linux only, and this is darwin")
    assert "WSL 2" in last
    assert done.stderr.count("Error: ") == 1, done.stderr
