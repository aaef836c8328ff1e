"""Updates have the same bits on a GPU as on a CPU and in the definition; skipped without a GPU."""

from __future__ import annotations

import threading
from functools import partial

import numpy as np
import pytest
import torch
from torch import Tensor

import deepseek_zero as dz
from deepseek_zero.engine.explain_updates import explain_updates
from deepseek_zero.kernels import check, cuda
from deepseek_zero.kernels.rules import RULES, Layout, Scalars, Variant
from tests.gpu.plain_runs import Net, config, loss_of
from tests.kernels import LAYOUTS, VARIANTS

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
DEVICE = torch.device("cuda", 0)
MANY = (1 << 22) + 5
NO_CHANCE = check.Chance()
ADAMW = {
    "lr": 3e-4,
    "betas": (0.9, 0.999),
    "eps": 1e-8,
    "weight_decay": 0.01,
    "decoupled_weight_decay": True,
}


def columns_of(arrays: check.Arrays, offset: int = 0) -> list[Tensor]:
    """Copy arrays to the device, each at `offset` elements from the start of its memory."""
    found = []
    for column in arrays.columns():
        room = torch.empty(
            len(column) + offset, dtype=torch.from_numpy(column).dtype, device=DEVICE
        )
        found.append(room[offset:].copy_(torch.from_numpy(column)))
    return found


def run_at(
    offset: int,
    variant: Variant,
    layout: Layout,
    arrays: check.Arrays,
    scalars: Scalars,
    factor: float,
    chance: check.Chance,
) -> None:
    columns = columns_of(arrays, offset)
    cuda.run(variant, layout, columns, scalars, factor, chance)
    for column, result in zip(arrays.columns(), columns, strict=True):
        np.copyto(column, result.cpu().numpy())


def same(left: list[Tensor], right: check.Arrays) -> bool:
    pairs = zip(left, right.columns(), strict=True)
    return all(mine.cpu().numpy().tobytes() == its.tobytes() for mine, its in pairs)


def test_nvrtc_and_the_driver_are_found() -> None:
    assert cuda.why_not(DEVICE) is None


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("variant", VARIANTS)
def test_a_kernel_has_the_bits_of_the_definition(variant: str, layout: str) -> None:
    assert cuda.is_exact(VARIANTS[variant], LAYOUTS[layout], DEVICE)


@pytest.mark.parametrize("offset", [0, 1, 8])
def test_arrays_may_begin_anywhere(offset: int) -> None:
    run = partial(run_at, offset)
    assert check.differing_elements(VARIANTS["adamw"], LAYOUTS["split"], run, numel=MANY) == 0


@pytest.mark.parametrize("layout", ["split", "fp32 and fp16", "rounded, bf16 states"])
@pytest.mark.parametrize("variant", ["adamw", "sgd nesterov", "adagrad", "lion"])
def test_a_gpu_and_a_cpu_have_the_same_bits(variant: str, layout: str) -> None:
    cpu = pytest.importorskip("deepseek_zero.kernels.cpu", reason="llvmlite is not installed")
    rule = RULES[VARIANTS[variant].rule]
    hypers = {"momentum": 0.9, "dampening": 0.0, "lr_decay": 0.0} | ADAMW
    arrays = check.sample(VARIANTS[variant], LAYOUTS[layout], "normal", MANY)
    columns = columns_of(arrays)
    for step in range(1, 11):
        chance = check.Chance(8, step, 0, (1, 2, 3))
        cpu.run(VARIANTS[variant], LAYOUTS[layout], arrays, rule.scalars(hypers, step), 0.3, chance)
        cuda.run(
            VARIANTS[variant], LAYOUTS[layout], columns, rule.scalars(hypers, step), 0.3, chance
        )
    assert same(columns, arrays)


def test_the_factor_and_the_flag_may_be_on_the_device() -> None:
    variant, layout = VARIANTS["adamw"], LAYOUTS["split"]
    scalars = RULES["adam"].scalars(ADAMW, 1)
    arrays = check.sample(variant, layout, "normal", 4099)
    columns = columns_of(arrays)
    factor = torch.tensor(0.25, device=DEVICE)
    cuda.run(
        variant, layout, columns, scalars, factor, NO_CHANCE, skip=torch.ones((), device=DEVICE)
    )
    assert same(columns, arrays)
    cuda.run(
        variant, layout, columns, scalars, factor, NO_CHANCE, skip=torch.zeros((), device=DEVICE)
    )
    assert same(columns, check.expected(variant, layout, arrays, scalars, 0.25))


def test_a_thread_that_has_not_used_the_device_updates_on_its_current_stream() -> None:
    variant, layout = VARIANTS["adamw"], LAYOUTS["fp32"]
    scalars = RULES["adam"].scalars(ADAMW, 1)
    arrays = check.sample(variant, layout, "normal", 4099)
    columns = columns_of(arrays)
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()

    def update() -> None:
        with torch.cuda.stream(stream):
            cuda.run(variant, layout, columns, scalars, 1.0, NO_CHANCE)

    thread = threading.Thread(target=update)
    thread.start()
    thread.join()
    stream.synchronize()
    assert same(columns, check.expected(variant, layout, arrays, scalars, 1.0))


@pytest.mark.parametrize("name", ["AdamW", "SGD", "Adagrad"])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_a_run_with_the_optimizer_on_the_host_has_the_bits_of_a_run_on_the_gpu(
    name: str, dtype: str
) -> None:
    found = []
    for place in ("none", "cpu"):
        torch.manual_seed(0)
        top = config(3, dtype, optimizer={"type": name, "params": {"lr": 1e-2}})
        zero = {"stage": 3, "offload_optimizer": {"device": place, "pin_memory": True}}
        engine, *_ = dz.initialize(model=Net().to(DEVICE), config=top | {"zero_optimization": zero})
        for step in range(3):
            engine.backward(loss_of(engine, step))
            engine.step()
        found.append([value.cpu() for value in engine.state_dict().values()])
        assert (
            any("by compiled kernels" in line for line in explain_updates(engine.optimizer))
            or place == "cpu"
        )
        engine.destroy()
    for on_gpu, on_host in zip(*found, strict=True):
        assert torch.equal(on_gpu, on_host)
