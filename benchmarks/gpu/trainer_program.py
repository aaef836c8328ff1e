"""A program that uses the Trainer, started by checks.py: `trainer_program.py plain|zero FOLDER`."""

from __future__ import annotations

import json
import sys
from typing import Any


def main(kind: str, folder: str) -> None:
    import torch  # noqa: PLC0415
    from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments  # noqa: PLC0415  # optional

    torch.manual_seed(0)
    sizes = {
        "vocab_size": 500,
        "hidden_size": 128,
        "num_hidden_layers": 2,
        "intermediate_size": 256,
    }
    model = LlamaForCausalLM(LlamaConfig(num_attention_heads=4, use_cache=False, **sizes))
    rows = torch.randint(1, 500, (64, 32), generator=torch.Generator().manual_seed(0))
    zero: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": "auto",
        "gradient_clipping": "auto",
        "bf16": {"enabled": "auto"},
        "zero_optimization": {
            "stage": 3,
            "offload_optimizer": {"device": "cpu", "pin_memory": True},
            "overlap_comm": True,
            "reduce_bucket_size": "auto",
            "stage3_prefetch_bucket_size": "auto",
            "stage3_param_persistence_threshold": "auto",
            "stage3_gather_16bit_weights_on_model_save": True,
        },
        "optimizer": {
            "type": "AdamW",
            "params": {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto"},
        },
    }
    arguments = TrainingArguments(
        folder,
        per_device_train_batch_size=8,
        num_train_epochs=2,
        logging_steps=1,
        report_to=[],
        save_strategy="no",
        learning_rate=1e-3,
        lr_scheduler_type="constant",
        seed=1,
        deepspeed=zero if kind == "zero" else None,
    )
    data = [{"input_ids": row, "labels": row} for row in rows]
    trainer = Trainer(model=model, args=arguments, train_dataset=data)
    trainer.train()
    if kind == "zero":
        trainer.save_model(folder)
    print(
        "LOSSES",
        json.dumps([entry["loss"] for entry in trainer.state.log_history if "loss" in entry]),
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
