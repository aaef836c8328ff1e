"""The reading order of ARCHITECTURE.md has every file that a plain step enters.

This test lists the few exceptions with the reason why a reader may skip them.
"""

from __future__ import annotations

import gc
import inspect
import re
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from torch import nn

import deepseek_zero

ROOT = Path(__file__).resolve().parents[2]
SOURCE = Path(deepseek_zero.__file__).parent
FOLDERS = ("engine", "optim", "planner", "sharding", "tiers")
SKIPPED = {
    "engine/losses.py": "finds the losses among the results of a forward",
    "engine/memory_advice.py": "adds advice to errors about memory",
    "engine/micro_batches.py": "checks losses, and the time of calls in an accumulation",
    "engine/observer.py": "measures, logs and records",
    "engine/state_offload.py": "refuses steps while engine.offload_states is in force",
    "engine/step_fields.py": "adds the fields of features to the message of a step",
    "tiers/budget.py": "counts memory of the device",
    "tiers/tier.py": "has the memories of states; a plain step uses `Storage` only",
}


def reading_order() -> set[str]:
    """Return the files of the reading order, by their path in the package."""
    page = (ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8")
    files = set()
    folder = ""
    for name in re.findall(r"`([\w/]+\.py)`", page.partition("## Reading order")[2]):
        if "/" in name:
            folder = name.rpartition("/")[0]
        files.add(f"{folder}/{name.rpartition('/')[2]}")
    return files


@contextmanager
def entered_files() -> Iterator[set[str]]:
    """Collect the files of the package whose functions the block enters."""
    found: set[str] = set()

    def note(frame: FrameType, event: str, argument: Any) -> None:
        code = frame.f_code
        is_function = code.co_flags & inspect.CO_OPTIMIZED
        if event == "call" and is_function and code.co_filename.startswith(str(SOURCE)):
            found.add(Path(code.co_filename).relative_to(SOURCE).as_posix())

    before = sys.getprofile()
    gc.collect()  # engines of other tests would run their finalizers in a step
    gc.disable()
    threading.setprofile(note)
    sys.setprofile(note)
    try:
        yield found
    finally:
        sys.setprofile(before)
        threading.setprofile(None)
        gc.enable()


def files_of_plain_steps() -> set[str]:
    found: set[str] = set()
    for stage in range(4):
        model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8))
        config = {
            "train_micro_batch_size_per_gpu": 2,
            "bf16": {"enabled": True},
            "optimizer": {"type": "AdamW"},
            "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        }
        engine = deepseek_zero.initialize(model=model, config=config)[0]
        with entered_files() as files:
            for _ in range(2):
                loss = engine(torch.ones(2, 8, dtype=torch.bfloat16)).float().square().mean()
                engine.backward(loss)
                engine.step()
        engine.destroy()
        found |= files
    return {file for file in found if file.startswith(tuple(f"{each}/" for each in FOLDERS))}


# New processes, because an engine of another test that is not destroyed and accumulates gradients
# lets every backward of its process look for its parameters.
@pytest.mark.ranks(1, fresh=True)
def test_a_plain_step_runs_only_files_that_the_page_lists() -> None:
    entered = files_of_plain_steps()
    assert entered - reading_order() - SKIPPED.keys() == set()
    assert SKIPPED.keys() - entered == set(), "every reason belongs to a file that a step enters"


@pytest.mark.ranks(2, fresh=True)
def test_a_plain_step_of_two_ranks_runs_only_files_that_the_page_lists() -> None:
    entered = files_of_plain_steps()
    assert {"sharding/move.py", "optim/verdict.py"} <= entered
    assert entered - reading_order() - SKIPPED.keys() == set()


def test_no_file_of_the_page_has_a_reason_to_be_skipped() -> None:
    assert SKIPPED.keys() & reading_order() == set()
