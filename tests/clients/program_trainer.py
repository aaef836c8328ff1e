"""Run an unmodified transformers Trainer on a tiny Llama.

Arguments: STAGE (-1: without DeepSpeed) FOLDER [WORD ...]. Rank 0 prints JSON. The words are:

pretrained: load the model from FOLDER/base. peft: train LoRA weights. mixed: a bf16 base model with
fp32 adapters. bf16: compute in bf16. reentrant, direct: the kind of activation checkpointing.
untrained: only evaluate. tp: all ranks along tp (DeepSpeed's AutoTP). sp: all ranks share sequences
(DeepSpeed's Ulysses). pp: all ranks are stages of one pipeline. metrics: compute a metric of the
logits in each evaluation. resume: continue from FOLDER/run/checkpoint-2.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import Dataset
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

TINY = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32,
}
STEPS = 4


class Rows(Dataset[dict[str, torch.Tensor]]):
    def __init__(self, count: int) -> None:
        self.rows = torch.randint(0, 64, (count, 8), generator=torch.Generator().manual_seed(1))

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.rows[index], "labels": self.rows[index]}


def deepspeed_config(stage: int, tp: int = 1, pp: int = 1) -> dict[str, Any]:
    zero = {"stage": stage, "reduce_bucket_size": "auto", "stage3_prefetch_bucket_size": "auto"}
    zero |= {
        "stage3_param_persistence_threshold": 0,
        "stage3_gather_16bit_weights_on_model_save": True,
    }
    auto = (
        "train_micro_batch_size_per_gpu",
        "gradient_accumulation_steps",
        "train_batch_size",
        "gradient_clipping",
    )
    axes: dict[str, Any] = {"tensor_parallel": {"autotp_size": tp}} if tp > 1 else {}
    axes |= {"pipeline": {"stages": pp, "rows": "own"}} if pp > 1 else {}
    told = axes | {
        "zero_optimization": zero,
        "zero_allow_untested_optimizer": True,
        "bf16": {"enabled": "auto"},
    }
    return dict.fromkeys(auto, "auto") | told


def arguments(stage: int, folder: Path, words: list[str]) -> TrainingArguments:
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    tp = ranks if "tp" in words else 1
    sequences: dict[str, Any] = {}
    if "sp" in words:
        from accelerate import ParallelismConfig
        from accelerate.utils import DeepSpeedSequenceParallelConfig

        handler = DeepSpeedSequenceParallelConfig(
            sp_seq_length_is_variable=True, sp_attn_implementation="sdpa"
        )
        config = ParallelismConfig(sp_size=ranks, sp_backend="deepspeed", sp_handler=handler)
        sequences = {"parallelism_config": config}
    again = (
        {"use_reentrant": "reentrant" in words} if {"reentrant", "direct"} & set(words) else None
    )
    return TrainingArguments(
        str(folder / "run"),
        per_device_train_batch_size=4 if sequences else 4 // (ranks // tp),
        gradient_accumulation_steps=2,
        max_steps=STEPS,
        learning_rate=1e-2,
        warmup_steps=1,
        logging_steps=1,
        save_steps=2,
        eval_steps=2,
        eval_strategy="steps",
        load_best_model_at_end=True,
        report_to=[],
        disable_tqdm=True,
        dataloader_pin_memory=False,
        use_cpu=not torch.cuda.is_available(),
        bf16="bf16" in words,
        gradient_checkpointing=again is not None,
        gradient_checkpointing_kwargs=again,
        deepspeed=deepspeed_config(stage, tp, ranks if "pp" in words else 1)
        if stage >= 0
        else None,
        **sequences,
    )


def model_for(folder: Path, words: list[str]) -> Any:
    torch.manual_seed(0)
    if "pretrained" not in words:
        return LlamaForCausalLM(LlamaConfig(**TINY))
    model = LlamaForCausalLM.from_pretrained(
        folder / "base", dtype=torch.bfloat16 if "mixed" in words else "auto"
    )
    if "peft" in words:
        from peft import LoraConfig, get_peft_model

        torch.manual_seed(3)
        model = get_peft_model(
            model, LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
        )
        # Reentrant checkpointing requires inputs with a gradient.
        model.enable_input_require_grads()
    return model


def mean_logit(found: Any) -> dict[str, float]:
    """Return a metric that depends on the logits of every row and on their order."""
    rows = torch.as_tensor(found.predictions).double().mean((1, 2))
    return {"mean_logit": float((rows * torch.arange(1, len(rows) + 1)).sum())}


def main(stage: int, folder: Path, words: list[str]) -> None:
    # First, because from_pretrained reads it to decide whether to build under zero.Init.
    settings = arguments(stage, folder, words)
    model = model_for(folder, words)
    metrics = mean_logit if "metrics" in words else None
    trainer = Trainer(
        model, settings, train_dataset=Rows(32), eval_dataset=Rows(4), compute_metrics=metrics
    )
    if "untrained" not in words:
        trainer.train(
            resume_from_checkpoint=str(folder / "run" / "checkpoint-2")
            if "resume" in words
            else None
        )
    trainer.evaluate()  # evaluates the best model, which the end of training has loaded
    trainer.save_model(str(folder / "final"))
    history = trainer.state.log_history
    told: dict[str, Any] = {
        key: [row[key] for row in history if key in row] for key in ("loss", "eval_loss")
    }
    told["mean_logit"] = [row["eval_mean_logit"] for row in history if "eval_mean_logit" in row]
    told["norm"] = [row["grad_norm"] for row in history if "loss" in row]
    told["kinds"] = sorted({type(param).__name__ for param in model.parameters()})
    told["dtypes"] = sorted({str(param.dtype) for param in model.parameters()})
    told["best"] = trainer.state.best_model_checkpoint
    told["world"] = trainer.accelerator.num_processes
    if trainer.is_world_process_zero():
        print("TOLD", json.dumps(told))  # noqa: T201


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]), sys.argv[3:])
