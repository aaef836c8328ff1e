"""Write the checkpoints in this folder, one for each layout and kind of state, with expected
results.

    python tests/data/checkpoints/make.py [folder] [case ...]

Commit bcf5641 wrote the committed files (torch 2.13, CPU). Never write them again with newer code:
they show that checkpoints of that commit still load. A new layout gets a new case, written by the
commit that introduces it.

Each case trains `saved_after` steps, saves, and continues to train. A case is one zip file: the
saved folder, `expected.json` (digests of weights and moments at the save, losses of the later steps
by rank, and the machine that computed them) and `final.safetensors` (the weights after those
steps).
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import shutil
import sys
import tempfile
import zipfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.multiprocessing
from torch import Tensor, nn

HERE = Path(__file__).parent
STEPS_AFTER = 3
CLIENT_STATE = {
    "epoch": 7,
    "note": ["plain", 1.5, None],
    "pair": (1, float("inf")),
    "tensor": torch.arange(3),
}
BF16 = {"bf16": {"enabled": True}}
FP16 = {"fp16": {"enabled": True, "initial_scale_power": 4, "loss_scale_window": 2}}
AUTO = {
    "fp16": {"enabled": True, "loss_scale": 1.0},
    "precision": "auto",
    "precision_window": 2,
    "optimizer": {"type": "AdamW", "params": {"lr": 3e-3, "eps": 1e-15}},
    "gradient_clipping": 0.0,
}
ONE_BIT = {
    "optimizer": {"type": "OneBitAdam", "params": {"lr": 1e-2, "freeze_step": 1}},
    "gradient_clipping": 0.0,
}
DEEPSPEED = {"checkpoint": {"layout": "deepspeed"}}
WIDTH = 24  # a block has 1,200 elements, more than one slice


class Fade(torch.autograd.Function):
    """An identity in forward that scales the gradient by a factor."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0] * ctx.factor, None


class Block(nn.Module):
    """A feed-forward layer with a residual connection, with names that "tp" splits.

    drop: dropout probability with torch's default generator. fade: the factor by which gradients
    inside the block are smaller, so that they underflow in fp16.
    """

    def __init__(self, drop: float, fade: float) -> None:
        super().__init__()
        self.up_proj = nn.Linear(WIDTH, WIDTH)
        self.down_proj = nn.Linear(WIDTH, WIDTH)
        self.drop = drop
        self.fade = fade

    def forward(self, x: Tensor) -> Tensor:
        start = Fade.apply(x, 1 / self.fade) if self.fade != 1 else x
        inside = self.down_proj(torch.tanh(self.up_proj(start)))
        if self.fade != 1:
            inside = Fade.apply(inside, self.fade)
        if self.drop:
            inside = inside * (torch.rand(inside.shape) >= self.drop)
        return x + inside


class Running(nn.Module):
    """A weight, and a running statistic that differs from rank to rank."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))
        self.register_buffer("mean", torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        self.mean.mul_(0.5).add_(x.detach().float().mean(0))
        return x * self.weight


class Little(nn.Module):
    """Repeated blocks, a running statistic, a tied and a frozen parameter; returns its loss."""

    def __init__(self, blocks: int = 1, drop: float = 0.0, fade: float = 1.0) -> None:
        super().__init__()
        self.read = nn.Linear(5, WIDTH)
        self.blocks = nn.ModuleList(
            Block(drop, fade if number == 0 else 1.0) for number in range(blocks)
        )
        self.norm = Running()
        self.frozen = nn.Linear(WIDTH, 4)
        self.frozen.requires_grad_(False)
        self.write = nn.Linear(4, 3, bias=False)
        self.again = nn.Linear(4, 3)
        self.again.weight = self.write.weight

    @property
    def dummy_inputs(self) -> dict[str, Tensor]:
        return {"x": torch.zeros(4, 5)}

    def forward(self, x: Tensor) -> Tensor:
        x = self.read(x.to(self.read.weight.dtype))
        for block in self.blocks:
            x = block(x)
        x = self.frozen(self.norm(x))
        return (self.write(x) + self.again(x)).float().square().mean()


@dataclass(frozen=True)
class Case:
    """One checkpoint.

    Attributes:
        top: Top-level keys of the configuration.
        zero: Keys of its section zero_optimization.
        model: Arguments of `Little`.
        save: Arguments of `save_checkpoint`.
        uses: "groups" (two parameter groups), "loader" (the engine's data loader) or "layers" (a
            PipelineModule).
    """

    stage: int
    world: int = 2
    top: dict[str, Any] = field(default_factory=dict)
    zero: dict[str, Any] = field(default_factory=dict)
    mesh: dict[str, int] | None = None
    model: dict[str, Any] = field(default_factory=dict)
    saved_after: int = 2
    save: dict[str, Any] = field(default_factory=dict)
    uses: str = ""

    def config(self) -> dict[str, Any]:
        return {
            "train_micro_batch_size_per_gpu": 4,
            "steps_per_print": None,
            "gradient_clipping": 1.0,
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "weight_decay": 0.1}},
            "scheduler": {
                "type": "WarmupLR",
                "params": {"warmup_num_steps": 5, "warmup_max_lr": 1e-2},
            },
            "zero_optimization": {
                "stage": self.stage,
                "stage3_param_persistence_threshold": 0,
                **self.zero,
            },
            **self.top,
        }


def _offload(device: str, **more: Any) -> dict[str, Any]:
    section = {"device": device, **more}
    return {"offload_optimizer": section, "offload_param": {"device": device}}


def _codes(**gradients: Any) -> dict[str, Any]:
    compression = {
        "gradients": {"bits": 8, "block": 64, **gradients},
        "weights": {"bits": 8},
        "min_numel": 0,
    }
    return {"compression": compression}


CASES: dict[str, Case] = {
    # our layout ("slices"): stages, world sizes, dtypes
    "stage0": Case(0, model={"drop": 0.2}),
    "stage1": Case(1),
    "stage2": Case(2),
    "stage3": Case(3, model={"drop": 0.2}),
    "one_rank": Case(3, world=1, top=BF16, model={"drop": 0.2}),
    "three_ranks": Case(3, world=3, top=BF16),
    "split_master": Case(3, top=BF16),
    "split_master_stage1": Case(1, top=BF16),
    "fp32_master": Case(3, top={"bf16": {"enabled": True, "master": "fp32"}}),
    "no_master": Case(2, top={"bf16": {"enabled": True, "master": "none"}}),
    "fp16": Case(2, top=FP16),
    "lifted_unit": Case(3, top=AUTO, model={"fade": 1e-6, "blocks": 2}, saved_after=6),
    "bf16_moments": Case(3, top={**BF16, "optimizer": {"type": "AdamW", "moments": "bf16"}}),
    "8bit_moments": Case(3, top={**BF16, "optimizer": {"type": "AdamW", "moments": "8bit"}}),
    "without_frozen": Case(3, save={"exclude_frozen_parameters": True}),
    "behind": Case(3, save={"wait": False}),
    "groups": Case(3, uses="groups"),
    "loader": Case(3, uses="loader"),
    # optimizers whose states have other shapes, or without states
    "sgd": Case(2, top={"optimizer": {"type": "SGD", "params": {"lr": 1e-2}}}),
    "momentum": Case(
        3, top={"optimizer": {"type": "SGD", "params": {"lr": 1e-2, "momentum": 0.9}}}
    ),
    "adafactor": Case(3, top={"optimizer": {"type": "Adafactor", "params": {"lr": 1e-2}}}),
    "lamb": Case(1, top={"optimizer": {"type": "Lamb", "params": {"lr": 1e-2}}}),
    "lion": Case(3, top={"optimizer": {"type": "Lion", "params": {"lr": 1e-3}}}),
    "muon": Case(3, top={"optimizer": {"type": "Muon", "params": {"lr": 1e-2}}}),
    # offload
    "cpu": Case(3, top=BF16, zero=_offload("cpu")),
    "nvme": Case(3, top=BF16, zero=_offload("nvme")),
    "delayed": Case(
        2, top=BF16, zero={"offload_optimizer": {"device": "cpu", "delayed_update_after": 1}}
    ),
    # compressed communication: error feedback, and weights that follow main weights by differences
    "codes_at_rest": Case(
        3, zero={"zero_quantized_nontrainable_weights": True, "compression": {"min_numel": 0}}
    ),
    "differences": Case(2, zero=_codes()),
    "feedback": Case(1, zero=_codes(error_feedback="bf16")),
    "feedback_int8": Case(3, zero=_codes(error_feedback="int8")),
    "one_bit_adam": Case(1, top=ONE_BIT),
    # meshes
    "replicas": Case(3, world=4, mesh={"dp_replicate": 2}),
    "by_host": Case(3, world=4, top={"ranks_per_host": 2}),
    "neighbours": Case(3, world=4, zero={"zero_hpz_partition_size": 2}),
    "tiles": Case(3, zero={"tile_above": 1024}),
    "tp": Case(3, mesh={"tp": 2}),
    "tp_stage1": Case(1, mesh={"tp": 2}, top=BF16),
    "pp": Case(3, mesh={"pp": 2}, model={"blocks": 2}),
    "pp_stage1": Case(1, mesh={"pp": 2}, model={"blocks": 2}, top=BF16),
    "layers": Case(1, mesh={"pp": 2}, top={"gradient_accumulation_steps": 2}, uses="layers"),
    "tp_pp": Case(2, world=4, mesh={"tp": 2, "pp": 2}, model={"blocks": 2}),
    # DeepSpeed's layout
    "deepspeed0": Case(0, top=DEEPSPEED),
    "deepspeed0_bf16": Case(0, top=DEEPSPEED | BF16),
    "deepspeed1": Case(1, top=DEEPSPEED),
    "deepspeed2_fp16": Case(2, top=DEEPSPEED | FP16),
    "deepspeed2_bf16": Case(2, top=DEEPSPEED | BF16),
    "deepspeed3": Case(3, top=DEEPSPEED),
    "deepspeed3_bf16": Case(3, top=DEEPSPEED | BF16),
    "universal": Case(2, top=DEEPSPEED),
    "converted": Case(3, top=BF16),
}
# Weights only: the exports of one run, in each kind of file. `load_weights` loads them.
EXPORTED = Case(3, top=BF16, zero={"stage3_gather_16bit_weights_on_model_save": True})
EXPORTS: dict[str, Callable[[Any, Path], Any]] = {
    "folder": lambda engine, path: engine.export(path / "folder"),
    "shards": lambda engine, path: engine.export(path / "shards", "fp32", max_shard_bytes=4000),
    "one.safetensors": lambda engine, path: engine.export(path / "one.safetensors"),
    "one.pth": lambda engine, path: engine.export(path / "one.pth"),
    "16bit.safetensors": lambda engine, path: engine.save_16bit_model(path, "16bit.safetensors"),
    "16bit.bin": lambda engine, path: engine.save_16bit_model(path, "16bit.bin"),
}


def start(case: Case, scratch: str, seed: int = 5) -> Any:
    """Return the engine of a case. scratch: the folder for states that are offloaded to disk."""
    import deepseek_zero

    torch.manual_seed(seed)
    config = case.config()
    for section in config["zero_optimization"].values():
        if isinstance(section, dict) and section.get("device") == "nvme":
            section["nvme_path"] = scratch
    if case.uses == "layers":
        return deepseek_zero.initialize(model=_layers(), config=config, mesh=case.mesh)[0]
    model = Little(**case.model)
    more: dict[str, Any] = {}
    if case.uses == "groups":
        trained = [each for each in model.parameters() if each.requires_grad]
        more["model_parameters"] = [
            {"params": trained[:2], "lr": 3e-3, "weight_decay": 0.0},
            {"params": trained[2:]},
        ]
    if case.uses == "loader":
        more["training_data"] = [batch(7, 0)[0] * number for number in range(43)]
    return deepseek_zero.initialize(model=model, config=config, mesh=case.mesh, **more)[0]


def _layers() -> Any:
    from deepseek_zero.compat.deepspeed.pipe import LayerSpec, PipelineModule

    layers = [
        LayerSpec(nn.Linear, 5, WIDTH),
        LayerSpec(Block, 0.0, 1.0),
        LayerSpec(Block, 0.0, 1.0),
        Running(),
    ]
    return PipelineModule(
        layers, num_stages=2, loss_fn=lambda output, target: (output - target).square().mean()
    )


def shrink_generators() -> None:
    """Give the random generators states of mostly zeros, which take a few bytes in a zip file."""
    random.setstate((3, (1, *[0] * 623, 624), None))
    np.random.set_state(("MT19937", np.array([1, *[0] * 623], dtype=np.uint32), 624, 0, 0.0))
    state = torch.get_rng_state()
    state[64:5000] = 0
    torch.set_rng_state(state)


def batch(step: int, place: int) -> Tensor:
    return torch.randn(4, 5, generator=torch.Generator().manual_seed(100 * step + place))


def train(engine: Any, case: Case, first: int, last: int) -> list[float]:
    """Train the steps [first, last) on this rank's data and return their losses."""
    losses = []
    for step in range(first, last):
        if case.uses == "layers":
            pairs = [(batch(step, place), torch.zeros(4, WIDTH)) for place in range(2)]
            losses.append(float(engine.train_batch(iter(pairs))))
        elif case.uses == "loader":
            # One epoch continues over all calls.
            rows = engine.__dict__.setdefault("rows", iter(engine.training_dataloader))
            losses.append(_step(engine, next(rows)))
        else:
            losses.append(_step(engine, batch(step, engine.mesh.data_index)))
    return losses


def _step(engine: Any, rows: Tensor) -> float:
    loss = engine(rows)
    engine.backward(loss)
    engine.step()
    return float(loss.detach())


def digest(value: Tensor) -> str:
    flat = value.detach().cpu().contiguous().reshape(-1)
    data = flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""
    return f"{str(value.dtype)[6:]} {tuple(value.shape)} {hashlib.sha256(data).hexdigest()[:16]}"


def exact_weights(engine: Any) -> dict[str, Tensor]:
    """Return this rank's parameters in their most precise form, and all buffers.  Collective."""
    from deepseek_zero.utils import safe_get_full_fp32_param

    found = dict(engine.module.named_buffers())
    for name, param in engine.module.named_parameters():
        value = safe_get_full_fp32_param(param)
        if value is not None:
            found[name] = value
    return found


def moments(engine: Any) -> dict[str, Tensor]:
    """Return the full moments of this rank's parameters. Collective."""
    from deepseek_zero.utils import safe_get_full_optimizer_state

    found = {}
    for name, param in engine.module.named_parameters():
        for key in ("exp_avg", "exp_avg_sq", "momentum_buffer"):
            try:
                value = safe_get_full_optimizer_state(param, key)
            except (KeyError, ValueError, RuntimeError):
                continue
            if value is not None:
                found[f"{name} {key}"] = value
    return found


def whole_weights(engine: Any) -> dict[str, Tensor]:
    """Return the whole model's weights on every rank. Collective."""
    return {name: value.detach().clone() for name, value in engine.module_state_dict().items()}


def probe() -> str:
    """Return a digest of plain outputs, which depends on how this machine's kernels round."""
    torch.manual_seed(1)
    model = Little(blocks=2)
    optimizer = torch.optim.AdamW(
        [each for each in model.parameters() if each.requires_grad], lr=1e-2, fused=True
    )
    for step in range(4):
        model(batch(step, 0)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return digest(torch.cat([each.detach().reshape(-1) for each in model.parameters()]))


def machine() -> dict[str, str]:
    return {
        "torch": torch.__version__,
        "cpu": torch.backends.cpu.get_cpu_capability(),
        "probe": probe(),
    }


# -- writing


def _write(case: Case, name: str, out: Path, scratch: str) -> None:
    from deepseek_zero.compat.deepspeed.checkpoint import convert_to_deepspeed
    from deepseek_zero.compat.deepspeed.checkpoint.universal import main as ds_to_universal

    engine = start(case, scratch)
    if not case.model.get("drop"):
        shrink_generators()
    train(engine, case, 0, case.saved_after)
    engine.save_checkpoint(str(out), tag="saved", client_state=CLIENT_STATE, **case.save)
    engine.finish_saving()
    states = {
        key: digest(value) for key, value in (exact_weights(engine) | moments(engine)).items()
    }
    live = {key: digest(value) for key, value in whole_weights(engine).items()}
    losses = train(engine, case, case.saved_after, case.saved_after + STEPS_AFTER)
    final = whole_weights(engine)
    by_rank = _gathered({"states": states, "losses": [loss.hex() for loss in losses]})
    if dist.get_rank() == 0:
        if name == "universal":
            ds_to_universal(
                SimpleNamespace(
                    input_folder=str(out / "saved"), output_folder=str(out / "universal")
                )
            )
            shutil.rmtree(out / "saved")
        if name == "converted":
            convert_to_deepspeed(out, out / "theirs", tag="saved", stage=2, ranks=3)
            shutil.rmtree(out / "saved")
        (out / "zero_to_fp32.py").unlink(missing_ok=True)
        _save_expected(out, final, {"live": live, "by_rank": by_rank})
    engine.destroy()


def _export(out: Path) -> None:
    """Export a run's weights in each kind of file, and train a new run from them."""
    import deepseek_zero

    case = EXPORTED
    engine = start(case, "")
    train(engine, case, 0, 2)
    for write in EXPORTS.values():
        write(engine, out)
    live = whole_weights(engine)
    model = Little()
    model.load_state_dict({key: value.float() for key, value in live.items()})
    again = deepseek_zero.initialize(model=model, config=case.config())[0]
    by_rank = _gathered({"losses": [loss.hex() for loss in train(again, case, 2, 2 + STEPS_AFTER)]})
    final = whole_weights(again)
    if dist.get_rank() == 0:
        named = {"live": {key: digest(value) for key, value in live.items()}, "by_rank": by_rank}
        _save_expected(out, final, named)


def _gathered(value: Any) -> list[Any]:
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, value)
    return found


def _save_expected(out: Path, final: dict[str, Tensor], expected: dict[str, Any]) -> None:
    from safetensors.torch import save_file

    save_file({key: value.clone() for key, value in final.items()}, out / "final.safetensors")
    (out / "expected.json").write_text(
        json.dumps({"machine": machine(), **expected}, indent=1) + "\n"
    )


def _zip(folder: Path, path: Path) -> None:
    """Write a zip file whose bytes depend only on the files in `folder`."""
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as target:
        for each in sorted(each for each in folder.rglob("*") if each.is_file()):
            target.writestr(
                zipfile.ZipInfo(str(each.relative_to(folder))),
                each.read_bytes(),
                zipfile.ZIP_DEFLATED,
            )


def _rank(rank: int, world: int, cases: list[str], folder: str, scratch: str) -> None:
    os.environ |= {
        "MASTER_ADDR": "127.0.0.1",
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world),
    }
    dist.init_process_group("gloo", rank=rank, world_size=world)
    for name in cases:
        out = Path(scratch) / name
        if name == "exports":
            _export(out)
        else:
            _write(CASES[name], name, out, scratch)
        dist.barrier()
        if rank == 0:
            _zip(out, Path(folder) / f"{name}.zip")
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    target = Path(sys.argv[1]) if len(sys.argv) > 1 else HERE
    target.mkdir(exist_ok=True)
    chosen = sys.argv[2:] or [*CASES, "exports"]
    os.environ.setdefault("MASTER_PORT", "29518")
    for size in (1, 2, 3, 4):
        of_size = [each for each in chosen if CASES.get(each, EXPORTED).world == size]
        with tempfile.TemporaryDirectory() as scratch:
            if of_size:
                torch.multiprocessing.spawn(
                    _rank, (size, of_size, str(target), scratch), nprocs=size
                )


if __name__ == "__main__":
    main()
