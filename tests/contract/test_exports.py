"""The exports, the output and the cost of `import deepseek_zero`."""

from __future__ import annotations

import importlib.metadata
import re
import statistics
import subprocess
import sys
from pathlib import Path

import deepseek_zero

ROOT = Path(__file__).resolve().parents[2]
NAMES = Path(__file__).with_name("public_names.txt")
MOST_OF_TORCHS_IMPORT = 0.3


def test_the_public_names_are_the_pinned_ones() -> None:
    pinned = NAMES.read_text(encoding="utf-8").split()
    assert sorted(deepseek_zero.__all__) == pinned, (
        f"a change of the public names belongs in {NAMES.name} and CHANGELOG.md"
    )


def test_every_public_name_is_there() -> None:
    missing = [name for name in deepseek_zero.__all__ if not hasattr(deepseek_zero, name)]
    assert not missing


def test_completion_shows_public_names_and_modules_only() -> None:
    rooms = {"checkpointing", "comm", "dist", "optimizer", "utils", "zero"}
    assert set(dir(deepseek_zero)) == {*deepseek_zero.__all__, *rooms}


def test_the_version_is_the_installed_ones() -> None:
    assert deepseek_zero.__version__ == importlib.metadata.version("deepseek-zero")


def test_the_version_is_the_last_release_of_the_changelog() -> None:
    stated = {
        "pyproject.toml": r'^version = "(.+)"$',
        "CITATION.cff": r"^version: (.+)$",
        "CHANGELOG.md": r"^## \[(\d.*)\] - ",
    }
    for file, pattern in stated.items():
        versions = re.findall(pattern, (ROOT / file).read_text(encoding="utf-8"), re.MULTILINE)
        assert versions[0] == deepseek_zero.__version__, file


def test_the_import_prints_nothing() -> None:
    done = subprocess.run(
        [sys.executable, "-c", "import deepseek_zero"], capture_output=True, text=True, check=True
    )
    assert (done.stdout, done.stderr) == ("", "")


def test_the_import_adds_little_to_that_of_torch() -> None:
    # CPU seconds, because other load does not affect them, relative to torch's in the same process,
    # because machines differ. Garbage collection is off because it would visit torch's objects.
    code = (
        "import gc, time; gc.disable(); start = time.process_time(); import torch; middle = "
        "time.process_time(); import deepseek_zero; print((time.process_time() - middle) / (middle "
        "- start))"
    )
    ratios = [float(subprocess.check_output([sys.executable, "-c", code])) for _ in range(3)]
    assert statistics.median(ratios) < MOST_OF_TORCHS_IMPORT, ratios
