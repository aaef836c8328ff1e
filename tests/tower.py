"""A small model that covers the cases of weight files, with functions to build, train and compare
it.

Used by the tests of checkpoints, export, import and DeepSpeed's file layout.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

import deepseek_zero
from tests.plain import here

BF16 = {"bf16": {"enabled": True}}
FP16 = {"fp16": {"enabled": True, "initial_scale_power": 4, "loss_scale_window": 2}}


class Tower(nn.Module):
    """A model with odd sizes, repeated blocks, running statistics and special tensors.

    It has a tied parameter, a frozen parameter and a non-persistent buffer.
    """

    def __init__(self, width: int = 13) -> None:
        super().__init__()
        self.read = nn.Linear(7, width)
        self.blocks = nn.ModuleList(
            [nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(3)]
        )
        self.norm = nn.BatchNorm1d(width)
        self.frozen = nn.Linear(width, width)
        self.frozen.requires_grad_(False)
        self.write = nn.Linear(width, 5, bias=False)
        self.again = nn.Linear(width, 5)
        self.again.weight = self.write.weight
        self.register_buffer("scratch", torch.zeros(3), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.read(x)
        for block in self.blocks:
            x = x + block(x)
        x = self.frozen(self.norm(x))
        return self.write(x) + self.again(x)


def tower(seed: int = 3) -> Tower:
    """Return a tower whose values depend only on the seed."""
    torch.manual_seed(seed)
    return Tower()


def config(stage: int, **top: Any) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": 4,
        "steps_per_print": None,
        "gradient_clipping": 1.0,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "weight_decay": 0.1}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 5, "warmup_max_lr": 1e-2}},
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        **top,
    }


def start(stage: int, seed: int = 3, **top: Any) -> Any:
    """Return an engine over a tower."""
    return deepseek_zero.initialize(model=tower(seed), config=config(stage, **top))[0]


def train(engine: Any, first: int, last: int) -> None:
    """Train steps [first, last) on this rank's data."""
    for step in range(first, last):
        generator = torch.Generator().manual_seed(100 * step + here())
        loss = engine(torch.randn(4, 7, generator=generator)).float().square().mean()
        engine.backward(loss)
        engine.step()


def differences(left: dict[str, Tensor], right: dict[str, Tensor]) -> list[str]:
    """Return names that only one side has, and names whose values differ in any bit."""
    lonely = sorted(left.keys() ^ right.keys())
    return lonely + [
        name
        for name in left
        if name in right
        and not (left[name].dtype == right[name].dtype and torch.equal(left[name], right[name]))
    ]


def whole(engine: Any) -> dict[str, Tensor]:
    """Return the most precise full state dict: main weights if there are any, else weights;
    buffers.

    Collective.
    """
    from deepseek_zero.utils import safe_get_full_fp32_param

    state = dict(engine.module.state_dict())
    for name, param in engine.module.named_parameters(remove_duplicate=False):
        master = safe_get_full_fp32_param(param)
        if master is not None:
            state[name] = master
    return state


def moments(engine: Any) -> dict[str, Tensor]:
    """Return both full moments by parameter name. Collective."""
    from deepseek_zero.utils import safe_get_full_optimizer_state

    found = {
        f"{name} {key}": safe_get_full_optimizer_state(param, key)
        for name, param in engine.module.named_parameters()
        for key in ("exp_avg", "exp_avg_sq")
    }
    return {name: value for name, value in found.items() if value is not None}
