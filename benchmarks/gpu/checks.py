"""Part 8 of scripts/gpu: features on one GPU, each compared with plain PyTorch on the same
device.
"""

from __future__ import annotations

import gc
import json
import math
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import deepseek_zero as dz
from benchmarks.gpu import trainer_program
from benchmarks.gpu.results import Result, attempt, begin, device, write_result
from deepseek_zero.checkpointing import checkpoint

ADAMW: dict[str, Any] = {"lr": 1e-3, "weight_decay": 0.1, "betas": (0.9, 0.95), "eps": 1e-6}
STEPS, ROWS = 6, 4
HERE = device()
IS_DRY = HERE.type == "cpu"
LENGTH, VOCABULARY = (16, 200) if IS_DRY else (128, 1000)
Figures = dict[str, Any]


def llama(
    layers: int = 2 if IS_DRY else 4,
    width: int = 64 if IS_DRY else 256,
    vocabulary: int = VOCABULARY,
) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM  # noqa: PLC0415  # optional

    torch.manual_seed(3)
    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=width,
        intermediate_size=2 * width,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        use_cache=False,
    )
    return LlamaForCausalLM(config)


def tokens_of(step: int, vocabulary: int = VOCABULARY) -> Tensor:
    generator = torch.Generator().manual_seed(step)
    return torch.randint(1, vocabulary, (ROWS, LENGTH), generator=generator).to(HERE)


def plain(model: nn.Module, steps: int = STEPS, autocast: bool = False) -> list[float]:
    """Train with plain PyTorch and return the losses."""
    model = model.to(HERE)
    optimizer = torch.optim.AdamW(
        [param for param in model.parameters() if param.requires_grad], **ADAMW
    )
    losses = []
    for step in range(steps):
        with torch.autocast(HERE.type, torch.bfloat16, enabled=autocast):
            loss = model(input_ids=tokens_of(step), labels=tokens_of(step)).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def engine_of(model: nn.Module, zero: Figures | None = None, **top: Any) -> Any:
    config = {
        "train_micro_batch_size_per_gpu": ROWS,
        "steps_per_print": None,
        "optimizer": {"type": "AdamW", "params": ADAMW},
        "zero_optimization": {"stage": 3, **(zero or {})},
        **top,
    }
    return dz.initialize(model=model, config=config)[0]


def train(
    engine: Any, steps: int = STEPS, first: int = 0, feed: Callable[[int], Tensor] = tokens_of
) -> list[float]:
    losses = []
    for step in range(first, first + steps):
        loss = engine(input_ids=feed(step), labels=feed(step)).loss
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses


def near(found: list[float], expected: list[float], tolerance: float) -> Figures:
    """Check losses and return their largest difference."""
    gap = max(abs(one - other) for one, other in zip(found, expected, strict=True))
    assert gap < tolerance, (gap, found, expected)
    return {"gap": gap}


def compared(
    model: nn.Module, expected: list[float], tolerance: float = 2e-4, zero: Any = None, **top: Any
) -> Figures:
    """Train an engine over a model and compare its losses."""
    engine = engine_of(model, zero, **top)
    found = train(engine, len(expected))
    engine.destroy()
    return near(found, expected, tolerance)


def truth() -> list[float]:
    return plain(llama())


def stage(number: int) -> Figures:
    return compared(llama().to(HERE), truth(), zero={"stage": number})


def model_left_on_the_cpu() -> Figures:
    engine = engine_of(llama())
    assert {tensor.device.type for tensor in engine.module.buffers()} == {HERE.type}
    found = near(train(engine), truth(), 2e-4)
    engine.destroy()
    return found


def offload(place: str, sections: tuple[str, ...]) -> Figures:
    entry = {"device": place, "nvme_path": tempfile.mkdtemp(), "pin_memory": True}
    return compared(llama().to(HERE), truth(), zero=dict.fromkeys(sections, entry))


def offload_of_a_client_optimizer() -> Figures:
    model = llama().to(HERE)
    zero = {"stage": 2, "offload_optimizer": {"device": "cpu"}}
    config = {
        "train_micro_batch_size_per_gpu": ROWS,
        "steps_per_print": None,
        "zero_optimization": zero,
    }
    engine = dz.initialize(
        model=model, optimizer=torch.optim.AdamW(model.parameters(), **ADAMW), config=config
    )[0]
    found = near(train(engine), truth(), 2e-4)
    engine.destroy()
    return found


def zero_init() -> Figures:
    config = {"train_micro_batch_size_per_gpu": ROWS, "zero_optimization": {"stage": 3}}
    with dz.zero.Init(config_dict_or_path=config):
        model = llama()
    engine = engine_of(model)
    losses = train(engine, 3)
    engine.destroy()
    assert all(map(math.isfinite, losses)) and abs(losses[0] - math.log(VOCABULARY)) < 1, losses
    return {"loss": losses[0]}


def bf16() -> Figures:
    return compared(llama().to(HERE), truth(), 5e-2, bf16={"enabled": True})


def fp16_with_overflow() -> Figures:
    engine = engine_of(llama().to(HERE), fp16={"enabled": True, "initial_scale_power": 24})
    losses = train(engine, 14, feed=lambda step: tokens_of(0))
    skipped = engine.skipped_steps
    engine.destroy()
    assert skipped > 0 and losses[-1] < losses[0] - 0.1, (skipped, losses)
    return {"skipped": skipped}


def autocast() -> Figures:
    section = {"enabled": True, "dtype": "bfloat16"}
    return compared(llama().to(HERE), plain(llama(), autocast=True), 1e-2, torch_autocast=section)


def gradient_checkpointing() -> Figures:
    expected, found = truth(), {}
    for reentrant in (False, True):
        model = llama().to(HERE)
        model.gradient_checkpointing_enable(
            gradient_checkpointing_kwargs={"use_reentrant": reentrant}
        )
        found = compared(model, expected)
    return found


class Tower(nn.Module):
    """Blocks with activation checkpointing."""

    def __init__(self, width: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
            for _ in range(12)
        )

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + checkpoint(block, x)
        return x.square().mean()


def activations_on_the_host() -> Figures:
    """Activations on the host give the same bits with less device memory."""
    width, rows = (64, 64) if IS_DRY else (256, 65536)
    found: dict[str, tuple[list[float], int]] = {}
    for place in ("none", "cpu"):
        engine = engine_of(Tower(width).to(HERE), activation_checkpointing={"device": place})
        generator = torch.Generator().manual_seed(0)
        losses, rest = [], 0
        for step in range(3):
            if step == 2 and not IS_DRY:
                torch.cuda.synchronize()
                torch.cuda.reset_peak_memory_stats()
                rest = torch.cuda.memory_allocated()
            loss = engine(torch.randn(rows, width, generator=generator).to(HERE))
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
        peak = 0 if IS_DRY else torch.cuda.max_memory_allocated() - rest
        found[place] = losses, peak
        engine.destroy()
    assert found["none"][0] == found["cpu"][0], found
    assert IS_DRY or found["cpu"][1] < found["none"][1] - 400e6, found
    return {f"MiB with {place}": peak / 2**20 for place, (_, peak) in found.items()}


def lora() -> Figures:
    from peft import LoraConfig, get_peft_model  # noqa: PLC0415  # optional

    def build() -> Any:
        model = llama()
        torch.manual_seed(1)
        adapters = LoraConfig(r=8, target_modules=["q_proj", "v_proj"], lora_dropout=0.0)
        return get_peft_model(model, adapters).to(HERE)

    return compared(build(), plain(build()))


def compiled() -> Figures:
    expected = plain(llama(layers=2), 4)
    engine = engine_of(llama(layers=2).to(HERE))
    engine.compile()
    found = near(train(engine, 4), expected, 2e-3)
    engine.destroy()
    return found


def save_and_go_on() -> Figures:
    """A new engine continues with the same bits, and transformers loads the 16-bit weights."""
    from transformers import LlamaForCausalLM  # noqa: PLC0415  # optional

    folder = tempfile.mkdtemp()
    top = {"bf16": {"enabled": True}, "zero": {"stage3_gather_16bit_weights_on_model_save": True}}
    engine = engine_of(llama().to(HERE), **top)
    train(engine, 3)
    engine.save_checkpoint(folder)
    engine.export(f"{folder}/weights")
    engine.module.config.save_pretrained(f"{folder}/weights")
    expected = train(engine, 3, first=3)
    engine.destroy()
    engine = engine_of(llama().to(HERE), **top)
    engine.load_checkpoint(folder)
    found = train(engine, 3, first=3)
    engine.destroy()
    assert found == expected, (found, expected)
    loaded = LlamaForCausalLM.from_pretrained(f"{folder}/weights").to(HERE)
    with torch.no_grad():
        loss = loaded(input_ids=tokens_of(3), labels=tokens_of(3)).loss.item()
    return near([loss], expected[:1], 5e-2)


def generate() -> None:
    engine = engine_of(llama().to(HERE))
    train(engine, 1)
    out = engine.module.generate(tokens_of(0)[:1, :8], max_new_tokens=6, do_sample=False)
    engine.destroy()
    assert out.shape == (1, 14), out.shape


def memory_report() -> Figures:
    """The bytes of the report equal those of the allocator."""
    gc.collect()
    before = 0 if IS_DRY else torch.cuda.memory_allocated()
    layers, width = (2, 64) if IS_DRY else (8, 1024)
    engine = engine_of(llama(layers, width, VOCABULARY).to(HERE), bf16={"enabled": True})
    train(engine, 2)
    gc.collect()
    report = engine.memory_report()
    held = report.measured_total if IS_DRY else torch.cuda.memory_allocated() - before
    engine.destroy()
    assert report.predicted_total == report.measured_total, report
    # cuBLAS keeps a workspace of up to 32 MiB for each thread that computes.
    assert abs(held - report.measured_total) < 0.1 * held + (64 << 20), (
        held,
        report.measured_total,
    )
    return {"allocator MiB": held / 2**20, "report MiB": report.measured_total / 2**20}


def trainer() -> Figures:
    """The Trainer with a DeepSpeed JSON has the same losses as without it."""
    losses = {}
    for kind in ("plain", "zero"):
        program = [sys.executable, trainer_program.__file__, kind, tempfile.mkdtemp()]
        command = (
            [sys.executable, "-m", "deepseek_zero.cli", "exec", *program]
            if kind == "zero"
            else program
        )
        environment = {name: value for name, value in os.environ.items() if name not in WORLD}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
        print(done.stdout, done.stderr, flush=True)
        lines = [line for line in done.stdout.splitlines() if line.startswith("LOSSES")]
        assert lines, done.stderr[-400:]
        losses[kind] = json.loads(lines[0].removeprefix("LOSSES"))
    return near(losses["zero"], losses["plain"], 5e-3)


WORLD = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
OPTIMIZER, BOTH = ("offload_optimizer",), ("offload_optimizer", "offload_param")
CHECKS: tuple[tuple[str, Callable[[], Figures | None], tuple[str, ...]], ...] = (
    ("stage 1, model on the device", partial(stage, 1), ()),
    ("stage 2, model on the device", partial(stage, 2), ()),
    ("stage 3, model on the device", partial(stage, 3), ()),
    ("model left on the CPU", model_left_on_the_cpu, ()),
    ("optimizer on the host", partial(offload, "cpu", OPTIMIZER), ()),
    ("everything on the host", partial(offload, "cpu", BOTH), ()),
    ("optimizer on a disk", partial(offload, "nvme", OPTIMIZER), ()),
    ("everything on a disk", partial(offload, "nvme", BOTH), ()),
    ("client optimizer on the host, stage 2", offload_of_a_client_optimizer, ()),
    ("zero.Init", zero_init, ()),
    ("bf16", bf16, ()),
    ("fp16 with overflows", fp16_with_overflow, ()),
    ("torch_autocast", autocast, ()),
    ("gradient checkpointing, both kinds", gradient_checkpointing, ()),
    ("activations on the host", activations_on_the_host, ()),
    ("LoRA", lora, ("peft",)),
    ("engine.compile", compiled, ()),
    ("save, load, go on; weights for transformers", save_and_go_on, ()),
    ("generate at stage 3", generate, ()),
    ("memory report", memory_report, ()),
    ("Trainer with a DeepSpeed JSON", trainer, ("accelerate",)),
)
# slow in a dry run: a compiler, and two more processes
SLOW_DRY = ("engine.compile", "Trainer with a DeepSpeed JSON")


def main() -> None:
    begin()
    assert Path(trainer_program.__file__).exists()
    for name, check, needs in CHECKS:
        missing = [package for package in needs if find_spec(package) is None]
        if missing:
            write_result(Result(name, "skipped", why=f"{', '.join(missing)} is not installed"))
        elif IS_DRY and name in SLOW_DRY:
            write_result(Result(name, "skipped", why="takes too long for a dry run"))
        else:
            attempt(name, check)


if __name__ == "__main__":
    main()
