"""An accelerate program that does not configure a backend for CPU ranks."""

from __future__ import annotations

import torch
from accelerate import Accelerator, DeepSpeedPlugin
from torch.utils.data import DataLoader, TensorDataset

accelerator = Accelerator(
    deepspeed_plugin=DeepSpeedPlugin(zero_stage=3, gradient_accumulation_steps=2)
)
model = torch.nn.Linear(8, 1)
loader = DataLoader(TensorDataset(torch.ones(32, 8)), batch_size=4)
accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-2), loader)
print(f"rank={accelerator.process_index}/{accelerator.num_processes}\n", end="", flush=True)  # noqa: T201
