"""Use transformers without its Trainer: a model under zero.Init, resized embeddings, generation.

Argument: FOLDER, with the model in FOLDER/base. Without `deepspeed` the program runs in one
process. Rank 0 prints JSON.
"""

from __future__ import annotations

import json
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaForCausalLM
from transformers.integrations import HfDeepSpeedConfig, is_deepspeed_available

PROMPTS = ((5, 9, 2), (1, 2, 3, 4, 5, 6))
CONFIG = {
    "train_micro_batch_size_per_gpu": 1,
    "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
}


def values(model: Any) -> dict[str, list[float]]:
    return {name: value.tolist() for name, value in model.state_dict().items()}


def generated(model: Any, ranks: int) -> list[list[int]]:
    """Generate greedily. Each rank has different prompts, which end at different times."""
    rank = torch.distributed.get_rank() if ranks > 1 else 0
    found = []
    for prompt in PROMPTS[rank::ranks]:
        settings = {
            "do_sample": False,
            "max_new_tokens": 4 + len(prompt),
            "eos_token_id": None,
            "pad_token_id": 0,
        }
        out = model.generate(torch.tensor([prompt]), **settings)
        found.append(out[0].tolist())
    if ranks == 1:
        return found
    everything: list[Any] = [None] * ranks
    torch.distributed.all_gather_object(everything, found)
    return [tokens for each in everything for tokens in each]


def main(folder: Path) -> None:
    torch.manual_seed(0)
    told: dict[str, Any] = {}
    gathered: Any = nullcontext
    is_sharded = is_deepspeed_available()
    if is_sharded:
        import deepspeed

        deepspeed.init_distributed()
        # from_pretrained uses this object as long as it exists
        settings = HfDeepSpeedConfig(CONFIG)
    model = LlamaForCausalLM.from_pretrained(folder / "base")
    told["built"] = sorted({type(param).__name__ for param in model.parameters()})
    model.resize_token_embeddings(72, mean_resizing=False)
    told["shape"] = [*model.get_input_embeddings().weight.shape]
    ranks = 1
    if is_sharded:
        assert settings.is_zero3()
        engine, *_ = deepspeed.initialize(model=model, config=CONFIG)
        engine.eval()
        gathered, ranks = (
            lambda: deepspeed.zero.GatheredParameters(model.parameters()),
            deepspeed.comm.get_world_size(),
        )
        told["kinds"] = sorted({type(param).__name__ for param in model.parameters()})
    told["generated"] = generated(model, ranks)
    with gathered():
        told["values"] = values(model)
        told["gathered"] = generated(model, ranks)
    told["world"] = ranks
    if ranks == 1 or torch.distributed.get_rank() == 0:
        print("TOLD", json.dumps(told))  # noqa: T201


if __name__ == "__main__":
    main(Path(sys.argv[1]))
