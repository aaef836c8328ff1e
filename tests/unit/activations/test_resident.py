"""What the system sees: with a disk the resident memory of a deep net stays small, holes in the
heap included.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

STEPS = """
import sys, torch
from pathlib import Path
from deepseek_zero.activations import recompute
from deepseek_zero.activations.recompute import RecomputeSettings, checkpoint
from deepseek_zero.base.memory import keep_freed_memory
from deepseek_zero.tiers.tier import Tier
from tests.unit.base.test_memory import resident_bytes

keep_freed_memory()
if sys.argv[1] != "none":
    recompute.configure(RecomputeSettings(Tier(sys.argv[1]), Path(sys.argv[2])))
scale, most = torch.ones((), requires_grad=True), 0

def block(x):
    global most
    most = max(most, resident_bytes())
    return torch.tanh(x * scale)

checkpoint(block, torch.ones(8) * scale).backward(torch.ones(8))  # what torch imports for it
start, most = resident_bytes(), 0
for _ in range(2):
    x = torch.ones(2 << 20) * scale  # 8 MiB, which the C library serves from its heap
    for _ in range(48):
        x = checkpoint(block, x)
    x.mean().backward()
    del x
print(most - start >> 20)
"""


@pytest.mark.slow  # half a minute
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc and asks glibc")
def test_a_deep_net_with_a_disk_takes_little_of_the_resident_memory(tmp_path: Path) -> None:
    def most(tier: str) -> int:
        command = [sys.executable, "-c", STEPS, tier, str(tmp_path)]
        root = Path(__file__).resolve().parents[3]
        return int(subprocess.check_output(command, cwd=root, text=True))

    plain, parked = most("none"), most("nvme")
    assert parked < 0.7 * plain, f"{parked} of {plain} MiB"
