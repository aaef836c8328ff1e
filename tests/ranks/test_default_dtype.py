"""The default dtype and the default device of the program do not change states and buffers."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import deepseek_zero as dz
from deepseek_zero.base.mesh import Mesh
from deepseek_zero.optimizers import Lamb, Muon
from deepseek_zero.pipeline.ties import Ties
from tests.in_process import Rank, run_ranks


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def trained(dtype: torch.dtype, optimizer: dict[str, Any]) -> list[Tensor]:
    """Return the weights of a model after four steps of a program with a default dtype."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(24, 24), nn.Linear(24, 24))
    inputs = torch.randn(4, 4, 24)
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "optimizer": optimizer,
        "zero_optimization": {"stage": 1},
    }
    with default_dtype(dtype):
        engine = dz.initialize(model=model, config=config)[0]
        for batch in inputs:
            engine.backward(engine(batch).square().mean())
            engine.step()
        engine.destroy()
    return [param.detach().clone() for param in model.parameters()]


@pytest.mark.parametrize(
    "optimizer",
    [
        {"type": "AdamW", "params": {"lr": 0.01}},
        {"type": "AdamW", "params": {"lr": 0.01}, "moments": "8bit"},
        {"type": "SGD", "params": {"lr": 0.01, "momentum": 0.9}},
        {"type": "OneBitAdam", "params": {"lr": 0.01, "freeze_step": 2}},
    ],
    ids=["AdamW", "8 bits", "SGD", "OneBitAdam"],
)
@pytest.mark.parametrize("kernels", ["compiled", "torch"])
def test_updates_do_not_depend_on_the_default_dtype(
    optimizer: dict[str, Any], kernels: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if kernels == "compiled":
        pytest.importorskip("llvmlite")
    monkeypatch.setenv("DEEPSEEK_ZERO_KERNELS", kernels)
    wanted = trained(torch.float32, optimizer)
    found = trained(torch.bfloat16, optimizer)
    assert all(map(torch.equal, found, wanted))


@pytest.mark.parametrize("cls", [Lamb, Muon])
def test_updates_are_counted_beyond_256(cls: type[Lamb | Muon]) -> None:
    param = nn.Parameter(torch.ones(2))
    param.grad = torch.ones(2)
    optimizer = cls([param])
    with default_dtype(torch.bfloat16):
        for _ in range(300):
            optimizer.step()
    assert optimizer.state[param]["step"] == 300


def test_gradients_of_tied_weights_are_summed_in_fp32() -> None:
    def body(rank: Rank) -> Tensor:
        mesh = Mesh(pp=3).on_world(rank.size, rank.index)
        ties = Ties(rank.comm, mesh, (0, 1, 2), {"weight": (0, 1, 2)})
        grad = torch.tensor([1.0, 0.5], dtype=torch.float32) + rank.index * 2.0**-20
        ties.add_up({"weight": grad})
        return grad

    with default_dtype(torch.bfloat16):
        sums = run_ranks(3, body)
    assert all(torch.equal(each, torch.tensor([3.0, 1.5]) + 3 * 2.0**-20) for each in sums)


# Functions of torch that create a tensor on the default device
CREATORS = frozenset(
    "arange as_tensor empty empty_strided eye full linspace logspace ones rand randint randn "
    "randperm scalar_tensor tensor tril_indices triu_indices zeros".split()
)


def losses_of(stage: int, folder: Path, *, has_other_device: bool) -> list[float]:
    """Return the losses of a program, which also saves and loads, with another default device."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 1))
    data = list(torch.randn(6, 8))
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.1}},
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        "gradient_clipping": 1.0,
    }
    losses = []
    with torch.device("meta") if has_other_device else nullcontext():
        engine, _, loader, _ = dz.initialize(model=model, config=config, training_data=data)
        for batch in loader:
            loss = engine(batch).square().mean()
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
            engine.save_checkpoint(folder)
            engine.load_checkpoint(folder)
        engine.destroy()
    return losses


@pytest.mark.ranks(2)
@pytest.mark.parametrize("stage", [1, 3])
def test_a_program_may_have_another_default_device(stage: int, tmp_path: Path) -> None:
    wanted = losses_of(stage, tmp_path / "plain", has_other_device=False)
    assert losses_of(stage, tmp_path / "meta", has_other_device=True) == wanted


def test_each_tensor_that_the_library_creates_has_a_device() -> None:
    package = Path(dz.__path__[0])
    found = []
    for path in sorted(package.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
                continue
            is_of_torch = ast.unparse(node.func.value) == "torch"
            if (
                is_of_torch
                and node.func.attr in CREATORS
                and not any(each.arg in ("device", None) for each in node.keywords)
            ):
                found.append(f"{path.relative_to(package)}:{node.lineno}: {ast.unparse(node)}")
    assert not found
