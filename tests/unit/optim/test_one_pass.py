"""Test the code around the update kernels: step counters, resets and the choice of kernels."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import deepseek_zero as dz
from deepseek_zero.base.errors import UsageError
from deepseek_zero.kernels import cuda
from deepseek_zero.kernels.rules import Layout, Variant
from deepseek_zero.optim.inner_states import reset_states
from deepseek_zero.optim.one_pass import Counter, Memory, OnePass, Piece
from deepseek_zero.optim.param_groups import prefer_fused
from deepseek_zero.precision.compact import StochasticRounding


def test_a_counter_of_updates_is_read_only_if_something_else_changed_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pytest.importorskip("llvmlite")
    param = torch.nn.Parameter(torch.zeros(3))
    inner = torch.optim.AdamW([param])
    one_pass = OnePass(inner)
    group = one_pass.group(inner.param_groups[0])
    assert group is not None
    reads: list[float] = []
    read = torch.Tensor.__float__

    def counted(tensor: Any) -> float:
        reads.append(read(tensor))
        return reads[-1]

    def updates(count: int) -> list[float]:
        """Update the shard `count` times and return the step number of each update."""
        numbers = []
        for _ in range(count):
            counter = one_pass.counter(param, group)
            variant = one_pass.variant(param, group)
            assert counter is not None and variant is not None
            memory = Memory(zeros(), zeros(), None, (zeros(), zeros()))
            layout = Layout(torch.float32)
            one_pass.update(variant, layout, memory, group, counter, 1.0, StochasticRounding(1), ())
            numbers.append(counter.value)
        return numbers

    monkeypatch.setattr(torch.Tensor, "__float__", counted)
    assert updates(3) == [1.0, 2.0, 3.0]
    assert reads == [0.0]
    inner.state[param]["step"] += 4
    assert updates(2) == [8.0, 9.0]
    assert reads == [0.0, 7.0]
    inner.state[param]["step"] = torch.tensor(20.0)
    assert updates(2) == [21.0, 22.0]
    assert reads == [0.0, 7.0, 20.0]
    assert inner.state[param]["step"].item() == 22.0


def test_a_kernel_of_a_gpu_raises_only_a_counter_on_that_gpu(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gpu = torch.device("meta")  # stands for a GPU; nothing is computed
    counters: list[Tensor | None] = []

    def run(*_: Any, counter: Tensor | None) -> None:
        counters.append(counter)

    monkeypatch.setattr(cuda, "run", run)
    param = nn.Parameter(torch.empty(16, device=gpu))
    inner = torch.optim.Adagrad([nn.Parameter(torch.zeros(1))])
    one_pass = OnePass(inner)
    group = one_pass.group(inner.param_groups[0])
    assert group is not None
    pieces = [Piece("a", 0, 8, 0), Piece("b", 8, 16, 0)]
    values = torch.empty(16, device=gpu, dtype=torch.bfloat16)
    memory = Memory(values, values, None, (values,))
    layout = Layout(torch.bfloat16, is_rounded=True, states_rounded=True)
    chance = StochasticRounding(1)
    for tensor in (torch.tensor(4.0), torch.empty((), device=gpu)):
        counter = Counter(tensor, tensor._version, 4.0)
        inner.state[param] = {"step": tensor}
        one_pass.update(group.later, layout, memory, group, counter, 1.0, chance, pieces)
        assert counter.value == 5.0
        if tensor.device == gpu:
            assert counters == [tensor, None]
        else:
            assert counters == [None, None] and tensor.item() == 5.0
        counters.clear()


def zeros() -> Tensor:
    return torch.zeros(3)


def engine_of(optimizer: str = "AdamW", **top: Any) -> Any:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "steps_per_print": None,
        "optimizer": {"type": optimizer, "params": {"lr": 1e-2}, "kernels": "compiled"},
        **top,
    }
    return dz.initialize(model=model, config=config)[0]


def train(engine: Any, steps: int = 2) -> list[Tensor]:
    dtype = next(engine.module.parameters()).dtype
    for step in range(steps):
        x = torch.randn(4, 64, generator=torch.Generator().manual_seed(step)).to(dtype)
        engine.backward(engine(x).float().square().mean())
        engine.step()
    return [value.clone() for value in engine.module_state_dict().values()]


ON_HOST = {"stage": 3, "offload_optimizer": {"device": "cpu"}}


@pytest.mark.parametrize("optimizer", ["AdamW", "SGD"])
@pytest.mark.parametrize(
    "top",
    [
        {},
        {"bf16": {"enabled": True}},
        {"fp16": {"enabled": True, "initial_scale_power": 8}},
        {"bf16": {"enabled": True}, "zero_optimization": {"stage": 1}},
        {"bf16": {"enabled": True}, "zero_optimization": ON_HOST},
        {"fp16": {"enabled": True, "initial_scale_power": 8}, "zero_optimization": ON_HOST},
    ],
    ids=["fp32", "bf16", "fp16", "stage 1", "bf16 on the host", "fp16 on the host"],
)
def test_the_first_steps_compile_nothing(
    optimizer: str, top: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("llvmlite")
    asked: list[tuple[Variant, Layout]] = []
    is_exact = OnePass.is_exact

    def noted(one_pass: OnePass, variant: Variant, layout: Layout, device: torch.device) -> bool:
        asked.append((variant, layout))
        return is_exact(one_pass, variant, layout, device)

    monkeypatch.setattr(OnePass, "is_exact", noted)
    engine = engine_of(optimizer, **top)
    compiled = set(asked)
    asked.clear()
    train(engine)
    engine.destroy()
    assert asked
    assert set(asked) <= compiled


@pytest.mark.parametrize("optimizer", ["AdamW", "Lion"])
def test_states_that_were_reset_begin_with_zeros(optimizer: str) -> None:
    pytest.importorskip("llvmlite")
    engine = engine_of(optimizer, zero_optimization=ON_HOST)
    first = {name: value.clone() for name, value in engine.module_state_dict().items()}
    expected = train(engine)
    reset_states(engine.optimizer.shard_set)
    engine.load_module_state_dict(first)
    found = train(engine)
    engine.destroy()
    for mine, its in zip(found, expected, strict=True):
        assert torch.equal(mine, its)


@pytest.mark.parametrize("on_cpu", [True, False])
def test_adagrad_is_fused_on_cpus_only(on_cpu: bool) -> None:
    for cls, expected in ((torch.optim.AdamW, True), (torch.optim.Adagrad, on_cpu)):
        inner = cls([nn.Parameter(torch.zeros(3))])
        prefer_fused(inner, on_cpu=on_cpu)
        assert (inner.param_groups[0]["fused"] is True) == expected


def test_an_engine_on_a_cpu_chooses_the_fused_adagrad() -> None:
    model = nn.Linear(64, 64)
    config = {"train_micro_batch_size_per_gpu": 4, "optimizer": {"type": "Adagrad"}}
    engine = dz.initialize(model=model, config=config)[0]
    assert [group["fused"] for group in engine.optimizer.param_groups] == [True]
    engine.destroy()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_a_state_that_was_replaced_by_another_dtype_is_refused(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A kernel would read beyond its end, or read other numbers."""
    pytest.importorskip("llvmlite")
    monkeypatch.setenv("DEEPSEEK_ZERO_KERNELS", "compiled")
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01}},
        "zero_optimization": {"stage": 1},
    }
    engine, optimizer, *_ = dz.initialize(model=nn.Linear(3, 3), config=config)
    for changes in (False, True):
        engine.backward(engine(torch.ones(1, 3)).sum())
        if changes:
            state = next(iter(optimizer.state.values()))
            state["exp_avg"] = state["exp_avg"].to(dtype)
            with pytest.raises(UsageError, match=str(dtype).removeprefix("torch.")):
                engine.step()
        else:
            engine.step()
    engine.destroy()
