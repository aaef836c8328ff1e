"""Compare training on combined mesh axes with one process, for every ZeRO stage and dtype.

The reference is one process: it uses the virtual axis instead of "tp" and accumulates the
micro-batches of all ranks in the contract's order (tests/reference.py). The ranks are threads of
this process (tests/in_process.py). `initialize` builds their engines.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from deepseek_zero.api.engine import ZeroEngine
from deepseek_zero.base.mesh import Mesh
from deepseek_zero.comm.collectives import Comm
from deepseek_zero.config.load import load
from deepseek_zero.engine import connecting as connecting_file
from deepseek_zero.engine import start as start_file
from deepseek_zero.engine.dialect import EngineDialect
from deepseek_zero.parallel.apply import virtual
from deepseek_zero.parallel.cuts import cut
from deepseek_zero.parallel.sequence_model import own_tokens
from deepseek_zero.planner.split import split_of
from tests.in_process import CPU, Rank, run_ranks
from tests.reference import OPTIMIZERS, Reference

VOCABULARY, LENGTH, ROWS, MANY, STEPS, SCALE_POWER = 67, 8, 2, 2, 2, 8
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
Sizes = tuple[int, int, int, int]  # pp, dp, tp, sp
Tokens = dict[str, Tensor]


def llama(layers: int) -> nn.Module:
    """A tiny model with one key-value head per head, so that ranks along "tp" share none."""
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {
        "vocab_size": VOCABULARY,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": layers,
    }
    with torch.random.fork_rng():
        torch.manual_seed(3)
        model: nn.Module = LlamaForCausalLM(
            LlamaConfig(num_attention_heads=8, num_key_value_heads=8, **sizes)
        )
    return model.train()


def batch(step: int, micro: int, data: int) -> Tokens:
    """Return the micro-batch of one data coordinate."""
    generator = torch.Generator().manual_seed(1000 * step + 100 * micro + data)
    tokens = torch.randint(VOCABULARY, (ROWS, LENGTH), generator=generator)
    return {"input_ids": tokens, "labels": tokens}


# -- training on ranks


class Here(threading.local):
    """Builds engines over the rank of the current thread instead of torch.distributed's world."""

    rank: Rank

    def start(
        self,
        rank: Rank,
        model: nn.Module,
        config: dict[str, Any],
        kind: type[ZeroEngine] = ZeroEngine,
        **request: Any,
    ) -> Any:
        """Build the engine of one rank as `initialize` does.

        Args:
            kind: Class of the engine.
            **request: Arguments of `Request`.
        """
        self.rank = rank
        return start_file.start(
            load(config), start_file.Request(model, **request), EngineDialect(kind)
        )


@contextmanager
def engines_of_threads() -> Iterator[Here]:
    """Patch the library so that `start` builds engines over ranks that are threads."""
    here = Here()

    def current_mesh(device: torch.device | None = None, wish: Any = None, **_: Any) -> Mesh:
        return Mesh().on_world(here.rank.size, here.rank.index, device or CPU)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(start_file, "current_mesh", current_mesh)
        patch.setattr(connecting_file, "Comm", lambda *args, **kwargs: here.rank.comm)
        # The capability report assumes the library's own transports.
        patch.setattr(Comm, "capabilities", lambda comm: [])
        yield here


def config_of(stage: int, dtype: str, clipping: float = 0.0) -> dict[str, Any]:
    """Return the configuration of a composition, which shards every parameter of any size."""
    found: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": ROWS,
        "gradient_accumulation_steps": MANY,
        "gradient_clipping": clipping,
        "steps_per_print": None,
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
    }
    if dtype != "fp32":
        found[dtype] = {
            "enabled": True,
            **({"initial_scale_power": SCALE_POWER} if dtype == "fp16" else {}),
        }
    return found


@dataclass
class Found:
    """The results of one rank.

    Attributes:
        losses: By step, the loss of each micro-batch, or one mean.
        parts: By name, this rank's part of the weight and how the whole weight is split.
    """

    losses: list[list[float]] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    weights: dict[str, Tensor] = field(default_factory=dict)
    parts: dict[str, Any] = field(default_factory=dict)
    mesh: Mesh = field(default_factory=Mesh)


def train(
    here: Here,
    rank: Rank,
    sizes: Sizes,
    stage: int,
    dtype: str,
    optimizer: str,
    clipping: float = 0.0,
    zero: dict[str, Any] | None = None,
) -> Found:
    """Train the engine of one rank for a few steps. zero: additional keys of zero_optimization."""
    pp, dp, tp, sp = sizes
    mesh = Mesh(pp=pp, dp_shard=dp, tp=tp, sp=sp)
    model = llama(max(2, pp))
    made, config = (
        OPTIMIZERS[optimizer](list(model.parameters())),
        config_of(stage, dtype, clipping),
    )
    config["zero_optimization"] |= zero or {}
    engine = here.start(rank, model, config, optimizer=made, mesh=mesh)
    found = Found(mesh=engine.mesh)
    for step in range(STEPS):
        found.losses.append(one_step(engine, step))
        found.norms.append(engine.optimizer.last.norm)
        assert engine.was_step_applied()
    found.parts = {name: split_of(param) for name, param in engine.module.named_parameters()}
    found.weights = {name: value.clone() for name, value in engine.module.state_dict().items()}
    engine.destroy()
    return found


def one_step(engine: ZeroEngine, step: int) -> list[float]:
    """Return the losses of this rank's micro-batches; with stages, the mean from `train_batch`."""
    mesh = engine.mesh
    batches = [batch(step, micro, mesh.data_index) for micro in range(MANY)]
    if mesh.sp > 1:
        batches = [own_tokens(each, mesh.coordinates["sp"], mesh.sp) for each in batches]
    if mesh.pp > 1:
        return [engine.train_batch(iter(batches)).item()]
    losses = []
    for each in batches:
        loss = engine(**each, use_cache=False).loss
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses


# -- the reference run


class OfTokens(Reference):
    """The reference for a language model, with a loss scale that is a power of two."""

    scale = 1.0

    def micro_batch(self, batch: Any) -> tuple[Tensor, list[Tensor]]:
        for weight in self.weights:
            weight.grad = None
        loss = self.model(**batch, use_cache=False).loss
        (loss.float() * (self.scale / self.accumulation)).backward()
        return loss.detach(), [
            torch.zeros_like(each) if each.grad is None else each.grad for each in self.weights
        ]

    def gradients(
        self, batches: Sequence[Sequence[Any]]
    ) -> tuple[list[list[Tensor]], list[Tensor]]:
        losses, reduced = super().gradients(batches)
        return losses, [grad.float() / self.scale for grad in reduced]


@dataclass
class Expected:
    """The results of the reference.

    Attributes:
        losses: By step, data coordinate and micro-batch.
        norms: Of the gradient, by step.
        weights: Of the whole model.
    """

    losses: list[list[list[float]]]
    norms: list[float]
    weights: dict[str, Tensor]


@cache
def expected_of(
    layers: int,
    tp: int,
    data: int,
    adds_first: bool,
    dtype: str,
    optimizer: str,
    clipping: float = 0.0,
) -> Expected:
    """Train in one process on the batches of `data` data coordinates."""
    model = llama(layers)
    if tp > 1:
        virtual(model, tp)
    reference = OfTokens(
        model, data, MANY, adds_first, DTYPES[dtype], OPTIMIZERS[optimizer], clipping
    )
    reference.scale = 2.0**SCALE_POWER if dtype == "fp16" else 1.0
    losses, norms = [], []
    for step in range(STEPS):
        found, norm = reference.step(
            [[batch(step, micro, each) for micro in range(MANY)] for each in range(data)]
        )
        losses.append([[loss.item() for loss in of_rank] for of_rank in found])
        norms.append(norm)
    return Expected(losses, norms, reference.values())


# -- the comparison


def run(sizes: Sizes, stage: int, dtype: str, clipping: float = 0.0) -> str:
    """Train on the ranks of a composition and compare with the reference.

    Returns "bitwise", or "close" for runs along "sp" or with clipping. Clipping compares closely
    because the ranks sum the norm in another order. clipping: the largest norm of a gradient.
    """
    pp, dp, tp, sp = sizes
    is_close = sp > 1 or clipping > 0
    # For a gradient near zero, rounding decides the sign of Adam's first step.
    optimizer = "sgd" if is_close else "adamw"
    with engines_of_threads() as here:
        found = run_ranks(
            pp * dp * tp * sp,
            lambda rank: train(here, rank, sizes, stage, dtype, optimizer, clipping),
            reads_in_place=True,
        )
    adds_first = stage < 2 or pp > 1
    expected = expected_of(max(2, pp), tp, dp, adds_first, dtype, optimizer, clipping)
    tolerance = {"fp32": 1e-6, "bf16": 2e-2, "fp16": 2e-3}[dtype] if is_close else None
    for each in found:
        compare(each, expected, tolerance)
    assert all(each.norms == found[0].norms for each in found), "one norm over the world"
    held = {name for each in found for name in each.weights}
    assert held == expected.weights.keys()
    return "close" if is_close else "bitwise"


def compare(found: Found, expected: Expected, tolerance: float | None) -> None:
    """Compare one rank with the reference, bitwise or within a tolerance relative to the largest
    value.
    """
    mesh = found.mesh
    for step, losses in enumerate(found.losses):
        wanted = expected.losses[step]
        if mesh.pp > 1:
            flat = [loss for of_rank in wanted for loss in of_rank]
            assert losses == [
                pytest.approx(sum(flat) / len(flat), rel=max(1e-6, tolerance or 0.0))
            ], step
        elif tolerance is None:
            assert losses == wanted[mesh.data_index], step
        else:
            assert losses == pytest.approx(wanted[mesh.data_index], rel=tolerance), step
    assert found.norms == pytest.approx(expected.norms, rel=max(1e-5, tolerance or 0.0))
    for name, value in found.weights.items():
        # The weights of other stages are whole.
        whole, split = (expected.weights[name], found.parts.get(name))
        # The state in a checkpoint is gathered along "tp".
        is_whole = split is None or value.shape == whole.shape
        part = whole if is_whole else cut(whole, split, mesh.coordinates["tp"])
        if tolerance is None:
            assert torch.equal(value, part), (
                f"{name} on {mesh.coordinates}: {(value - part).abs().max()}"
            )
        else:
            far = (value - part).abs().max() / max(1.0, float(part.abs().max()))
            assert far <= tolerance, f"{name} on {mesh.coordinates}: {far}"
