"""Changing the batch of a running engine: accumulation steps and what depends on them."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from ..base.errors import UsageError
from ..base.given import whole_number
from ..config import Batch

if TYPE_CHECKING:
    from .engine import Engine


def set_train_batch_size(engine: Engine, samples: int) -> None:
    """Change the samples per step by accumulating more or fewer micro-batches.  Every rank, between two steps."""
    whole_number("set_train_batch_size", "train_batch_size", samples, 1)
    per_micro = engine._batch.micro * engine.mesh.data_size
    if samples < per_micro or samples % per_micro:
        raise UsageError(
            f"Train batch size must be divisible by micro-batch data parallelism: {samples} is not a multiple of "
            f"{per_micro} ({engine._batch.micro} per rank x {engine.mesh.data_size} ranks).",
            "Only the number of micro-batches per step can change.",
            f"choose a multiple of {per_micro}.",
        )
    _resize(engine, engine._batch.micro, samples // per_micro)


def set_train_micro_batch_size(engine: Engine, samples: int) -> None:
    """Change the samples per forward on one rank that are counted; a data loader keeps the size it was built with."""
    whole_number("set_train_micro_batch_size", "micro_batch_size", samples, 1)
    _resize(engine, samples, engine._batch.accumulation)


def _resize(engine: Engine, micro: int, accumulation: int) -> None:
    if engine.micro_steps % engine._batch.accumulation:
        raise UsageError(
            "the batch size was changed between two micro-batches of one step.",
            "Gradients already summed would be divided by the wrong number.",
            "change it right after a step() that updated the weights.",
        )
    before, train = engine._batch, micro * accumulation * engine.mesh.data_size
    engine._batch = Batch(train, micro, accumulation, engine.mesh.data_size)
    changes = {
        "train_micro_batch_size_per_gpu": micro,
        "gradient_accumulation_steps": accumulation,
        "train_batch_size": train,
    }
    engine.config = engine.config.model_copy(update=changes)  # for those who ask the engine for its configuration
    if accumulation != before.accumulation:
        _accumulate(engine, accumulation)


def _accumulate(engine: Engine, accumulation: int) -> None:
    """Gradients summed over micro-batches are kept in fp32, single ones in the weight's dtype: the plan follows."""
    engine.micro_steps = engine.global_steps * accumulation
    runtime, policy = engine.runtime, engine.runtime.settings.policy
    runtime.settings = replace(runtime.settings, accumulation=accumulation)
    if engine.optimizer is not None:
        engine.optimizer.flush()
        engine.optimizer.finish()  # gradients of another dtype are to come
    runtime.drop_grads()
    for group in runtime.trained_groups:
        assert group.plan.grad is not None
        dtype = policy.grad_dtype(group.plan.weight.dtype, accumulation)
        if dtype != group.plan.grad.dtype:
            group.planned = group.planned.with_grad_dtype(dtype)
            group.gradient.buffer = group.gradient.delayed.buffer = None
