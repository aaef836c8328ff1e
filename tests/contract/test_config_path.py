"""A configuration key passes through few files between the JSON and its effect, each once."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

MOST = 6
SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "config_path"


def test_a_key_passes_few_files_and_each_of_them_once() -> None:
    command = [sys.executable, str(SCRIPT), "--most", str(MOST)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("files, 0 revisits") == 3


def test_a_key_that_passes_more_files_is_found() -> None:
    command = [sys.executable, str(SCRIPT), "--most", "1", "gradient_clipping"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "config/normalise.py" in done.stdout
