"""An accelerate loop on a tiny Llama with ranks along an axis.

Arguments: AXIS (none, tp or sp) STAGE. Rank 0 prints JSON.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

import torch
from accelerate import Accelerator, DeepSpeedPlugin, InitProcessGroupKwargs, ParallelismConfig
from accelerate.utils import DeepSpeedSequenceParallelConfig
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM

from tests.clients.program_trainer import TINY, Rows

ROWS, BATCH = 16, 4


def accelerator_of(axis: str, stage: int) -> Accelerator:
    """Return an Accelerator with DeepSpeed and all ranks along the axis.

    The axis "none" uses accelerate without DeepSpeed.
    """
    if axis == "none":
        return Accelerator(cpu=True)
    ranks = int(os.environ["WORLD_SIZE"])
    plugin = DeepSpeedPlugin(zero_stage=stage, gradient_accumulation_steps=1, gradient_clipping=1.0)
    config = plugin.deepspeed_config
    config["zero_optimization"]["stage3_param_persistence_threshold"] = 0
    config["train_micro_batch_size_per_gpu"] = BATCH
    given: dict[str, Any] = {
        "deepspeed_plugin": plugin,
        "kwargs_handlers": [InitProcessGroupKwargs(backend="gloo")],
    }
    if axis == "tp":
        config["tensor_parallel"] = {"autotp_size": ranks}
    else:
        handler = DeepSpeedSequenceParallelConfig(
            sp_seq_length_is_variable=True, sp_attn_implementation="sdpa"
        )
        given["parallelism_config"] = ParallelismConfig(
            sp_size=ranks, sp_backend="deepspeed", sp_handler=handler
        )
    return Accelerator(**given)


def loss_of(model: Any, batch: dict[str, torch.Tensor], axis: str) -> torch.Tensor:
    """Return the model's loss.

    For shared sequences the ranks' losses are weighted by their numbers of valid tokens, as in
    accelerate's documentation.
    """
    output = model(**batch, use_cache=False)
    if axis != "sp":
        return output.loss
    from deepspeed.utils import groups
    from torch.distributed.nn.functional import all_gather

    group = groups._get_sequence_parallel_group()
    losses = all_gather(output.loss, group=group)
    counts = all_gather((batch["shift_labels"].view(-1) != -100).sum(), group=group)
    total = sum(loss * count for loss, count in zip(losses, counts, strict=True) if count)
    return total / sum(counts)


def main(axis: str, stage: int) -> None:
    accelerator = accelerator_of(axis, stage)
    torch.manual_seed(0)
    model: Any = LlamaForCausalLM(LlamaConfig(**TINY))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model, optimizer, loader = accelerator.prepare(
        model, optimizer, DataLoader(Rows(ROWS), batch_size=BATCH)
    )
    losses = []
    for batch in loader:
        loss = loss_of(model, batch, axis)
        accelerator.backward(loss)
        if axis == "none":
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    if accelerator.is_main_process:
        print("TOLD", json.dumps({"losses": losses, "world": accelerator.num_processes}))  # noqa: T201
    accelerator.end_training()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
