"""An accelerate loop with DeepSpeed at a stage, as in accelerate's documentation.

Arguments: STAGE FOLDER. Rank 0 prints JSON.
"""

from __future__ import annotations

import json
import sys

import torch
from accelerate import Accelerator, DeepSpeedPlugin, InitProcessGroupKwargs
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

ROWS, BATCH, ACCUMULATION, CLIP = 32, 4, 2, 0.5


def parts() -> tuple[nn.Module, torch.optim.Optimizer, TensorDataset]:
    """Return the model, its optimizer and the data, which are the same everywhere."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))
    x = torch.randn(ROWS, 8)
    return (
        model,
        torch.optim.AdamW(model.parameters(), lr=1e-2),
        TensorDataset(x, x.sum(1, keepdim=True)),
    )


def main(stage: int, folder: str) -> None:
    plugin = DeepSpeedPlugin(
        zero_stage=stage,
        gradient_accumulation_steps=ACCUMULATION,
        gradient_clipping=CLIP,
        zero3_save_16bit_model=True,
    )
    plugin.deepspeed_config["zero_optimization"]["stage3_param_persistence_threshold"] = 0
    accelerator = Accelerator(
        deepspeed_plugin=plugin,
        gradient_accumulation_steps=ACCUMULATION,
        kwargs_handlers=[
            InitProcessGroupKwargs(backend="gloo")
        ],  # otherwise accelerate treats CPU ranks as one process
    )
    model, optimizer, data = parts()
    loader = DataLoader(data, batch_size=BATCH // accelerator.num_processes)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)

    def epoch() -> list[float]:
        losses = []
        for x, y in loader:
            with accelerator.accumulate(model):
                loss = (model(x) - y).square().mean()
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), CLIP)
                optimizer.step()
                optimizer.zero_grad()
            losses.append(accelerator.reduce(loss.detach(), "mean").item())
        return losses

    first = epoch()
    accelerator.save_state(folder)
    second = epoch()
    state = accelerator.get_state_dict(model)
    accelerator.load_state(folder)
    again = epoch()
    kinds = sorted({type(param).__name__ for param in accelerator.unwrap_model(model).parameters()})
    if accelerator.is_main_process:
        weights = {name: value.tolist() for name, value in state.items()}
        told = {
            "first": first,
            "second": second,
            "again": again,
            "kinds": kinds,
            "weights": weights,
        }
        told["world"] = accelerator.num_processes
        told["engine"] = type(model).__module__
        print("TOLD", json.dumps(told))  # noqa: T201
    accelerator.end_training()


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
