"""List the files of the library that one training step runs through, at stage 3 in bf16 with all
states on disk.

    OMP_NUM_THREADS=1 deepseek-zero run --nproc 2 benchmarks/files_of_a_step.py

Runs two ranks. Prints a line for each file whose functions ran on rank 0, in any thread, during two
steps after the first three, with the number of functions. It uses only public names, so it also
runs with an older checkout (PYTHONPATH=OTHER/src).
"""

from __future__ import annotations

import collections
import os
import sys
import tempfile
import threading
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn

import deepseek_zero


class Block(nn.Module):
    """A residual block, which is one unit."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(64, 256), nn.Linear(256, 64)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(x)))


class Model(nn.Module):
    """An embedding, four blocks and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(100, 64), nn.Linear(64, 100)
        self.blocks = nn.ModuleList(Block() for _ in range(4))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def main() -> None:
    house = str(Path(deepseek_zero.__file__).parent) + os.sep
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as folder:
        disk = {"device": "nvme", "nvme_path": folder}
        config: dict[str, Any] = {
            "train_batch_size": 8,
            "bf16": {"enabled": True},
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
            "gradient_clipping": 1.0,
            "zero_optimization": {
                "stage": 3,
                "stage3_param_persistence_threshold": 0,
                "offload_param": disk,
                "offload_optimizer": disk,
            },
        }
        engine = deepseek_zero.initialize(model=Model(), config=config)[0]
        tokens = torch.randint(0, 100, (4, 8))
        ran: dict[str, set[str]] = collections.defaultdict(set)

        def note(frame: FrameType, event: str, _: object) -> None:
            if event == "call" and frame.f_code.co_filename.startswith(house):
                ran[frame.f_code.co_filename.removeprefix(house)].add(frame.f_code.co_qualname)

        for number in range(5):
            if number == 3:
                threading.setprofile(note)
                sys.setprofile(note)
            loss = nn.functional.cross_entropy(
                engine(tokens).view(-1, 100).float(), tokens.view(-1)
            )
            engine.backward(loss)
            engine.step()
        sys.setprofile(None)
        threading.setprofile(None)
        engine.destroy()
    if int(os.environ.get("RANK", "0")) == 0:
        for name in sorted(ran):
            print(f"{len(ran[name]):4} functions  {name}")
        print(f"{len(ran)} files, {sum(map(len, ran.values()))} functions")


if __name__ == "__main__":
    main()
