"""Axes set in the configuration, by arguments, by the launcher or by APIs start the same ranks."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import deepseek_zero
from deepseek_zero.base.errors import BatchMismatchError, NotBuiltError, UsageError
from deepseek_zero.base.launch import MESH
from deepseek_zero.compat.deepspeed import groups
from deepseek_zero.compat.deepspeed.before_initialize import tp_model_init
from deepseek_zero.sharding.runtime import Runtime


class Seed000(nn.Module):
    """The model of seed 000, smaller."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.embedding = nn.Embedding(12, 8)
        self.transformer = nn.Transformer(8, 2, 2, 2, 16, 0.0, batch_first=True)
        self.fc = nn.Linear(8, 12)
        self.dummy_inputs = {name: torch.zeros(3, 2, dtype=torch.long) for name in ("src", "tgt")}

    def forward(self, src: torch.Tensor, tgt: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.transformer(self.embedding(src), self.embedding(tgt))
        return self.fc(out)  # type: ignore[no-any-return]


class Chain(nn.Sequential):
    """A model with two blocks whose forward returns the loss."""

    def __init__(self) -> None:
        super().__init__(nn.ModuleList(nn.Linear(4, 4) for _ in range(2)))
        self.dummy_inputs = {"x": torch.zeros(2, 4)}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self[0]:
            x = block(x)
        return x.square().mean()


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.up_proj, self.down_proj = nn.Linear(6, 8), nn.Linear(8, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(torch.relu(self.up_proj(x)))


CONFIG: dict[str, Any] = {
    "train_batch_size": 4,
    "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
    "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
}


def loss_of(model: Any, scale: float = 1.0) -> torch.Tensor:
    x = torch.arange(24.0).view(4, 6) * scale / 24
    return (model(x) - x).square().mean()


def trained(engine: Any, steps: int = 3) -> list[float]:
    losses = []
    for _ in range(steps):
        loss = loss_of(engine)
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses


def everyone(value: Any) -> list[Any]:
    found = [None] * dist.get_world_size()
    dist.all_gather_object(found, value)
    return found


def mpu_of_tp() -> Any:
    rank = dist.get_rank()
    return SimpleNamespace(
        get_model_parallel_world_size=lambda: 2, get_model_parallel_rank=lambda: rank
    )


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    "place",
    [
        "mesh",
        "config",
        "autotp",
        "tp_size",
        "mp_degree",
        "launcher",
        "tp_model_init",
        "mpu",
        "mesh_param",
    ],
)
def test_each_place_starts_the_same_ranks(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, config, given = Mlp(), dict(CONFIG), dict[str, Any]()
    stated = {
        "config": {"mesh": {"tp": 2}},
        "autotp": {"tensor_parallel": {"autotp_size": 2}},
        "tp_size": {"tensor_parallel": {"tp": {"tp_size": 2}}},
        "mp_degree": {"dp_degree": 1, "pp_degree": 1, "mp_degree": 2},
        "mesh_param": {"mp_degree": 2},
    }
    config |= stated.get(place, {})
    if place == "mesh":
        given = {"mesh": {"tp": 2}}
    elif place == "mesh_param":
        given = {"mesh_param": (1, 1)}
    elif place == "mpu":
        given = {"mpu": mpu_of_tp()}
    elif place == "launcher":
        monkeypatch.setenv(MESH, "tp=2")
    elif place == "tp_model_init":
        tp_model_init(model, 2, None)
    engine = deepseek_zero.initialize(model=model, config=config, **given)[0]
    assert (engine.mesh.tp, engine.mesh.data_size, engine.train_micro_batch_size_per_gpu()) == (
        2,
        1,
        4,
    )
    assert (engine.config.mp_degree, engine.config.dp_degree, engine.autotp_size()) == (2, 1, 2)
    assert engine.mp_world_size == groups.get_tensor_model_parallel_world_size() == 2
    assert groups.get_data_parallel_world_size() == 1
    losses = trained(engine)
    assert losses[-1] < losses[0] and everyone(losses) == [losses] * 2


@pytest.mark.ranks(2)
@pytest.mark.parametrize("stage", [0, 3])
def test_seed_0s_api_accepts_degrees(stage: int) -> None:
    """Degrees have the names of seed 000; `dp_degree` is optional."""
    losses = []
    for degrees in ({"dp_degree": 1, "pp_degree": 1, "mp_degree": 2}, {"mp_degree": 2}, {}):
        model = Mlp()
        zero = deepseek_zero.DeepSeekZeRO3(model, stage=stage, **degrees)  # type: ignore[arg-type]
        optimizer = deepseek_zero.ZeroOptimizer(model.parameters(), lr=0.1, optimizer_type="sgd")
        for _ in range(3):
            optimizer.zero_grad()
            loss = loss_of(model)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        assert isinstance(zero.runtime, Runtime) and (zero.config.mp_degree == 2) == bool(degrees)
    assert losses[:3] == losses[3:6] and losses[6:] == pytest.approx(losses[:3], rel=1e-5)


@pytest.mark.ranks(2)
def test_ranks_of_one_layer_load_the_same_samples() -> None:
    data = torch.utils.data.TensorDataset(torch.arange(96.0).view(16, 6) / 96)
    config = CONFIG | {"tensor_parallel": {"autotp_size": 2}, "train_batch_size": 2}
    engine, _, loader, _ = deepseek_zero.initialize(model=Mlp(), config=config, training_data=data)
    batches = [batch for (batch,) in loader]
    assert len(batches) == 8
    assert everyone(torch.cat(batches).tolist()) == [torch.cat(batches).tolist()] * 2
    engine.backward(engine(batches[0]).square().mean())
    engine.step()


@pytest.mark.ranks(2)
def test_different_batches_on_ranks_of_one_layer_raise_an_error() -> None:
    engine = deepseek_zero.initialize(model=Mlp(), config=CONFIG, mesh={"tp": 2})[0]
    with pytest.raises(AssertionError, match="Data inconsistency within the TP group") as error:
        loss_of(engine, 1.0 + dist.get_rank())
    assert isinstance(error.value, BatchMismatchError) and "float32[4, 6]" in str(error.value)
    trained(engine)  # only the first batch is compared


@pytest.mark.ranks(2)
def test_a_model_in_slices_is_not_split_again() -> None:
    with deepseek_zero.zero.Init():
        model = Mlp()
    with pytest.raises(
        NotBuiltError, match=r"built under zero\.Init is not split over mesh axis tp"
    ):
        deepseek_zero.initialize(model=model, config=CONFIG, mesh={"tp": 2})


SCRIPT = """
import torch
import deepseek_zero
from torch import nn

model = nn.Sequential()
model.add_module("up_proj", nn.Linear(6, 8))
model.add_module("down_proj", nn.Linear(8, 6))
engine = deepseek_zero.initialize(model=model, config={"zero_optimization": {"stage": 3}})[0]
print(f"rank {engine.mesh.rank} of {engine.mesh.world_size}: {engine.mesh}", flush=True)
engine.destroy()
"""


@pytest.mark.slow  # `make slow`
def test_the_launchers_short_form_starts_whole_copies(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    command = [sys.executable, "-m", "deepseek_zero", "run", "--tp", "2", "train.py"]
    environment = os.environ | {
        "PYTHONPATH": str(Path(deepseek_zero.__path__[0]).parent),
        "CUDA_VISIBLE_DEVICES": "",
    }
    ended = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120
    )
    assert ended.returncode == 0, ended.stderr
    assert sorted(ended.stdout.split("\n"))[-2:] == [
        f"rank {rank} of 2: tp=2" for rank in range(2)
    ], ended.stdout


@pytest.mark.ranks(2)
@pytest.mark.parametrize("stage", [0, 3])
def test_torch_clips_a_model_of_split_layers_by_the_norm_of_all_its_gradients(stage: int) -> None:
    specs = [("linear1", "column"), ("linear2", "row")]
    rules = [{"patterns": [rf".*{name}.weight"], "partition_type": kind} for name, kind in specs]
    model, plain = Seed000(), Seed000()
    deepseek_zero.DeepSeekZeRO3(
        model,
        mp_degree=2,
        zero_optimization={"stage": stage, "stage3_param_persistence_threshold": 0},
        tensor_parallel={"partition_config": {"layer_specs": rules}},
    )
    tokens = torch.arange(6).view(3, 2)
    for each in (model, plain):
        each(tokens, tokens).square().mean().backward()
    for order in (2.0, 1.0, float("inf")):
        found = nn.utils.clip_grad_norm_(model.parameters(), 1.0, order)
        expected = nn.utils.clip_grad_norm_(plain.parameters(), 1.0, order)
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=0.0)


@pytest.mark.ranks(2)
def test_the_model_of_seed_000_is_refused_without_rules_and_cannot_be_cut() -> None:
    with pytest.raises(UsageError, match="no layer of Seed000 is split"):
        deepseek_zero.DeepSeekZeRO3(Seed000(), mp_degree=2)
    with pytest.raises(UsageError, match="cannot be cut"):
        deepseek_zero.DeepSeekZeRO3(Seed000(), pp_degree=2)


@pytest.mark.ranks(2)
def test_a_norm_of_the_gradients_of_one_stage_causes_a_warning() -> None:
    zero = deepseek_zero.DeepSeekZeRO3(Chain(), pp_degree=2)
    zero(torch.ones(2, 4)).backward()
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("deepseek_zero")
    logger.addHandler(handler)
    try:
        for _ in range(2):
            nn.utils.clip_grad_norm_(zero.parameters(), 1.0)
    finally:
        logger.removeHandler(handler)
    warned = [line for line in lines if "clip_grad_norm_ clips each stage by its own norm" in line]
    assert len(warned) == (dist.get_rank() == 0)


@pytest.mark.ranks(2)
def test_a_model_in_distributed_data_parallel_is_refused() -> None:
    with pytest.raises(UsageError, match=r"pass the model itself: ddp\.module"):
        deepseek_zero.DeepSeekZeRO3(nn.parallel.DistributedDataParallel(Mlp()))


@pytest.mark.ranks(2)
def test_an_engine_trains_with_the_optimizer_of_the_other_api() -> None:
    losses = []
    for kind in (deepseek_zero.ZeroOptimizer, torch.optim.AdamW):
        model = Mlp()
        optimizer = kind(model.parameters(), lr=0.1)
        for group in optimizer.param_groups:
            group["weight_decay"] = 0.0
        config = {key: value for key, value in CONFIG.items() if key != "optimizer"}
        engine, *_ = deepseek_zero.initialize(model=model, optimizer=optimizer, config=config)
        losses.append(trained(engine))
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)
