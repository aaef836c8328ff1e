"""Train a small Hugging Face Llama on bytes with ZeRO-3, and generate text.

    deepseek-zero run --nproc 2 examples/hf_language_model.py
    python examples/hf_language_model.py --steps 300

Nothing is downloaded: the weights start random, and the text is the source code of the Python
library (text.py). The model is used like any transformers model: `model(input_ids=, labels=).loss`,
and `model.generate` while its weights are sharded. Ends with an error unless the loss fell by 1.5
nats per byte.
"""

from __future__ import annotations

import argparse
import os

os.environ["HF_HUB_OFFLINE"] = "1"  # before transformers is imported

import torch
from text import Sampler, load_corpus
from transformers import LlamaConfig, LlamaForCausalLM

import deepseek_zero as dz

LEAST_FALL = 1.5
LENGTH = 128

MODEL = LlamaConfig(
    vocab_size=256,
    hidden_size=128,
    intermediate_size=344,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=2 * LENGTH,
    bos_token_id=None,
    eos_token_id=None,
    pad_token_id=0,
    tie_word_embeddings=True,
)

CONFIG = {
    "train_micro_batch_size_per_gpu": 8,
    "gradient_clipping": 1.0,
    "steps_per_print": None,
    "optimizer": {
        "type": "AdamW",
        "params": {"lr": 3e-3, "betas": [0.9, 0.95], "weight_decay": 0.1},
    },
    "scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": 3e-3, "warmup_num_steps": 10}},
    # Also shard the norms: with the default threshold such small parameters stay whole on every
    # rank.
    "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
}


def write(engine: dz.DeepSpeedEngine, prompt: bytes, num_bytes: int = 60) -> str:
    """Continue the prompt.

    Collective: each forward gathers weights, so all ranks sample equally.
    """
    torch.manual_seed(0)
    tokens = torch.tensor([list(prompt)], device=engine.device)
    engine.eval()
    found = engine.module.generate(
        tokens,
        attention_mask=torch.ones_like(tokens),
        max_new_tokens=num_bytes,
        do_sample=True,
        top_k=8,
    )
    engine.train()
    return bytes(found[0].tolist()).decode("utf-8", errors="replace")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", type=int, default=60)
    steps = parser.parse_args().steps
    if steps < 1:
        parser.error("--steps must be at least 1")
    torch.manual_seed(0)
    engine, *_ = dz.initialize(model=LlamaForCausalLM(MODEL), config=CONFIG)
    sampler = Sampler(
        load_corpus(limit_bytes=2_000_000).train, engine.train_micro_batch_size_per_gpu(), LENGTH
    )

    losses = []
    for step in range(steps):
        text, _ = sampler.draw(step, engine.global_rank)
        text = text.to(engine.device)
        loss = engine(input_ids=text, labels=text).loss  # transformers shifts the labels
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
        if engine.global_rank == 0 and (step + 1) % 10 == 0:
            print(f"step {step + 1}: loss {loss.item():.3f} nats per byte", flush=True)

    sample = write(engine, b"def ")
    fall = losses[0] - sum(losses[-5:]) / 5
    if engine.global_rank == 0:
        print(f"the loss fell by {fall:.2f} nats per byte; the model writes:\n{sample}")
    assert fall >= LEAST_FALL, (
        f"the loss fell by {fall:.2f} nats per byte; the margin is {LEAST_FALL}"
    )


if __name__ == "__main__":
    main()
