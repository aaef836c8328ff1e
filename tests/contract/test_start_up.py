"""`initialize` imports only what a run needs, because each module adds to every process's
start-up.
"""

from __future__ import annotations

import subprocess
import sys

MOST_MODULES = 296  # each split of a file that every run needs adds one
FEATURES = (
    "attention.layer checkpoint.load checkpoint.save "
    "extensions.adaptive_precision extensions.speculative_update extensions.weight_differences "
    "pipeline.pipeline report.picture"
).split()

PROGRAM = """
import sys
from torch import nn
import deepseek_zero
deepseek_zero.initialize(
    model=nn.Sequential(*[nn.Linear(8, 8) for _ in range(4)]),
    config={
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": {"stage": 3},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
    },
)
print(*(name for name in sys.modules if name.startswith("deepseek_zero")))
"""


def test_initialize_imports_few_modules_and_no_feature_that_is_off() -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], check=True, capture_output=True, text=True
    )
    loaded = done.stdout.split()
    assert len(loaded) <= MOST_MODULES
    assert not {f"deepseek_zero.{name}" for name in FEATURES} & set(loaded)
