"""Combine three axes on eight ranks of one machine: pipeline stages, shards and tensor parallelism.

    deepseek-zero run --nproc 8 examples/three_axes.py

pp 2 x dp_shard 2 x tp 2 at ZeRO-3: each rank has a quarter of the layers' weights, sharded again
between two ranks. The program prints the weights of each rank and asserts that the loss falls.
"""

from __future__ import annotations

import os

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import deepseek_zero

STEPS, MICRO_BATCHES, WORDS = 30, 4, 64


class Counting(torch.utils.data.Dataset):
    """Sequences that count up from a random token, so that the next token can be learned."""

    def __len__(self) -> int:
        return 4096

    def __getitem__(self, number: int) -> dict[str, torch.Tensor]:
        tokens = (torch.arange(16) + number * 7) % WORDS
        return {"input_ids": tokens, "labels": tokens}


def main() -> None:
    torch.manual_seed(0)
    sizes = {
        "vocab_size": WORDS,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 4,
    }
    model = LlamaForCausalLM(LlamaConfig(num_attention_heads=4, num_key_value_heads=2, **sizes))
    total = sum(param.numel() for param in model.parameters())
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": MICRO_BATCHES,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
        "steps_per_print": None,
        "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
    }
    mesh = {"pp": 2, "dp_shard": 2, "tp": 2}
    engine, *_ = deepseek_zero.initialize(
        model=model, config=config, training_data=Counting(), mesh=mesh
    )
    losses = [engine.train_batch().item() for _ in range(STEPS)]

    runtime = engine.runtime
    held = sum(group.weight.memory.numel() for group in runtime.groups)
    here = ", ".join(
        f"{axis} {place}" for axis, place in engine.mesh.coordinates.items() if axis in mesh
    )
    units = [unit.name for unit in runtime.units if unit.groups]
    told = f"({here}) holds {held:,} of {total:,} elements: {', '.join(units)}"
    for rank, line in enumerate(runtime.comm.whole.all_gather_text(told, "who holds what")):
        if int(os.environ.get("RANK", "0")) == 0:
            print(f"rank {rank} {line}")
    if int(os.environ.get("RANK", "0")) == 0:
        print(f"loss {losses[0]:.2f} -> {losses[-1]:.2f}")
    assert losses[-1] < 0.7 * losses[0], losses
    engine.destroy()


if __name__ == "__main__":
    main()
