"""Run an unmodified TRL trainer on a tiny Llama.

Arguments: KIND (base, sft, dpo) STAGE (-1: without DeepSpeed) FOLDER [WORD ...]. KIND base writes
FOLDER/base, the pretrained model and tokenizer that the other kinds load. The option peft trains
LoRA weights, and resume continues from FOLDER/run/checkpoint-2. Rank 0 prints JSON.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from peft import LoraConfig
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
)
from trl import DPOConfig, DPOTrainer, SFTConfig, SFTTrainer
from trl.models.utils import unwrap_model_for_generation

from tests.clients.program_trainer import TINY, deepspeed_config

WORDS = (
    "a river runs under the old stone bridge and children throw small sticks into its brown water"
).split()


def write_base(folder: Path) -> None:
    """Write the model that every run starts from and a word-level tokenizer, without downloads."""
    vocabulary = {word: number for number, word in enumerate(["<pad>", "<eos>", "<unk>", *WORDS])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>"
    )
    fast.save_pretrained(folder / "base")
    torch.manual_seed(5)
    LlamaForCausalLM(LlamaConfig(**TINY)).save_pretrained(folder / "base")


def sentence(start: int, length: int) -> str:
    return " ".join(WORDS[(start + step) % len(WORDS)] for step in range(length))


def settings(kind: type[Any], stage: int, folder: Path, **more: Any) -> Any:
    return kind(
        str(folder / "run"),
        per_device_train_batch_size=4 // int(os.environ.get("WORLD_SIZE", "1")),
        gradient_accumulation_steps=2,
        max_steps=4,
        learning_rate=1e-2,
        logging_steps=1,
        save_steps=2,
        report_to=[],
        disable_tqdm=True,
        dataloader_pin_memory=False,
        bf16=False,
        use_cpu=not torch.cuda.is_available(),
        deepspeed=deepspeed_config(stage) if stage >= 0 else None,
        **more,
    )


def trainer_of(kind: str, stage: int, folder: Path, words: list[str]) -> Any:
    makes, arguments = {"sft": (SFTTrainer, SFTConfig), "dpo": (DPOTrainer, DPOConfig)}[kind]
    row = {
        "sft": lambda at: {"prompt": sentence(at, 4), "completion": " " + sentence(at + 4, 4)},
        "dpo": lambda at: {
            "prompt": sentence(at, 4),
            "chosen": " " + sentence(at + 4, 4),
            "rejected": " " + sentence(at + 9, 4),
        },
    }[kind]
    adapters = (
        LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
        if "peft" in words
        else None
    )
    # First, because from_pretrained reads it to decide whether to build under zero.Init.
    given = settings(arguments, stage, folder)
    torch.manual_seed(3)
    return makes(
        AutoModelForCausalLM.from_pretrained(folder / "base"),
        args=given,
        train_dataset=Dataset.from_list([row(at) for at in range(32)]),
        processing_class=PreTrainedTokenizerFast.from_pretrained(folder / "base"),
        peft_config=adapters,
    )


def generated(trainer: Any) -> list[int]:
    """Generate with the trained model as TRL's online trainers do, which gathers and patches
    hooks.
    """
    with unwrap_model_for_generation(trainer.model_wrapped, trainer.accelerator) as model:
        prompt = torch.tensor([[3, 4, 5]])
        return model.generate(prompt, attention_mask=prompt > 0, do_sample=False, max_new_tokens=8)[
            0
        ].tolist()


def main(kind: str, stage: int, folder: Path, words: list[str]) -> None:
    if kind == "base":
        return write_base(folder)
    trainer = trainer_of(kind, stage, folder, words)
    trainer.train(
        resume_from_checkpoint=str(folder / "run" / "checkpoint-2") if "resume" in words else None
    )
    told: dict[str, Any] = {"generated": generated(trainer)}
    trainer.save_model(str(folder / "final"))
    history = trainer.state.log_history
    told["loss"] = [row["loss"] for row in history if "loss" in row]
    told["norm"] = [row["grad_norm"] for row in history if "loss" in row]
    models = [
        trainer.model,
        *([trainer.ref_model] if getattr(trainer, "ref_model", None) is not None else []),
    ]
    told["kinds"] = [
        sorted({type(param).__name__ for param in model.parameters()}) for model in models
    ]
    told["world"] = trainer.accelerator.num_processes
    if trainer.is_world_process_zero():
        print("TOLD", json.dumps(told))  # noqa: T201


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), Path(sys.argv[3]), sys.argv[4:])
