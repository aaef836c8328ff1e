"""An accelerate loop over pipeline stages.

Arguments: STAGES WAY. With WAY shared, the data loader is not prepared, so all ranks have its rows.
With WAY prepared, accelerate gives each rank different rows, which the library refuses. Rank 0
prints JSON.
"""

from __future__ import annotations

import json
import sys

import torch
from accelerate import Accelerator, DeepSpeedPlugin, InitProcessGroupKwargs
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM

from tests.clients.program_trainer import TINY, Rows

ACCUMULATION, CLIP = 2, 0.5


def main(stages: int, way: str) -> None:
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": ACCUMULATION,
        "gradient_clipping": CLIP,
        "zero_optimization": {"stage": 2},
        "zero_allow_untested_optimizer": True,
        "pipeline": {"stages": stages, "micro_batches": 2} if stages > 1 else {},
    }
    accelerator = Accelerator(
        deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=config),
        kwargs_handlers=[
            InitProcessGroupKwargs(backend="gloo")
        ],  # otherwise accelerate treats CPU ranks as one process
    )
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**TINY))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    loader = DataLoader(Rows(24), batch_size=4)
    model, optimizer = accelerator.prepare(model, optimizer)
    if way == "prepared":
        loader = accelerator.prepare(loader)
    losses, norms = [], []
    for batch in loader:
        with accelerator.accumulate(model):
            loss = model(**batch).loss
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                norms.append(float(accelerator.clip_grad_norm_(model.parameters(), CLIP)))
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.item())
    if accelerator.is_main_process:
        print("TOLD", json.dumps({"losses": losses, "norms": norms}))  # noqa: T201


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
