"""Whole steps of an engine: all micro-batches of a training step, and evaluation."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from .. import parallel, pipeline
from ..base.errors import UsageError
from ..base.given import refuse, whole_number
from ..comm.collectives import propagate_errors
from .engine import Engine
from .micro_batches import arguments_of, loss_of, mean_of_ranks, refuse_destroyed

MOST_EMPTY = 2  # epochs without a batch, in a row


def train_batch(engine: Engine, data_iter: Iterator[Any] | None = None) -> Tensor:
    """Run a whole training step: all its micro-batches, then the update.

    Each micro-batch runs forward and backward. After the update, the learning-rate schedule
    advances by one step. If `managed_gradient_accumulation` is false and there is no pipeline, each
    micro-batch is a step with its own update.

    Args:
        engine: The engine. The methods `forward`, `backward` and `step` of `Engine` itself are
            called, because the methods of a subclass may raise an error.
        data_iter: Iterator over micro-batches. None reads micro-batches from the data loader of
            the engine.

    Returns:
        The mean loss over the micro-batches of all ranks: a scalar, the same on every rank.

    Raises:
        UsageError: `data_iter` is None and the engine has no data loader or an empty one,
            `data_iter` is not an iterator, the model returns no scalar loss, or the engine has no
            optimizer. With a pipeline, also if earlier forwards have begun the step, or if
            `pipeline.rows` is "own".
        StopIteration: The iterator yields fewer micro-batches than a step needs.
        SystemExit: With code 85, after a checkpoint was saved since a rank received a signal
            (checkpoint.save_on_signal).
        PeerError: Another rank failed or issued a different collective.

    Note:
        Collective: every rank of the world must call it.
    """
    refuse_destroyed(engine.runtime, "train_batch")
    accumulation = engine.config.gradient_accumulation_steps
    model = engine.module
    with propagate_errors(engine.runtime.comm):
        given = own_batches(engine) if data_iter is None else iterator_of("train_batch", data_iter)
    batches = taken(engine, given, accumulation)
    stages = engine.parts.pipeline
    if stages is None:
        losses = []
        for batch in batches:
            args, kwargs = arguments_of(model, batch)
            loss = loss_of(model, Engine.forward(engine, *args, **kwargs), batch)
            Engine.backward(engine, loss)
            Engine.step(engine)
            losses.append(loss.detach())
        return mean_of_ranks(losses, engine.runtime.comm.whole, engine.device)
    if engine.parts.loop is not None:
        engine.parts.loop.refuse_begun()
    micro_batches = stages.read(batches)
    for micro in micro_batches:
        if isinstance(micro, pipeline.MicroBatch):
            engine.observer.saw((*micro.args, *micro.kwargs.values()))
    with (
        engine.observer.timed("forward"),
        engine.parts.advice.explaining("train_batch"),
    ):
        loss = stages.train(micro_batches)
    engine.observer.loss(loss)
    # `step` counts the last micro-batch, so count the others here.
    batch = engine.config.batch
    engine.global_samples += (accumulation - 1) * batch.micro * batch.data_size
    engine.micro_steps += accumulation - 1
    Engine.step(engine)
    return loss


def evaluate(
    engine: Engine,
    data_iter: Iterator[Any],
    many: int | None,
    *,
    keeps_outputs: bool = False,
    has_loss: bool = True,
) -> tuple[Tensor | None, list[Any] | None]:
    """Run the model's forward on several micro-batches in evaluation mode.

    Gradients are disabled.

    Args:
        engine: The engine. At the end, it and all submodules of the model get the mode, training
            or evaluation, that the engine had before.
        data_iter: Iterator over micro-batches.
        many: The number of micro-batches, at least 1. None means as many as in a training step.
        keeps_outputs: Whether to return the outputs of this rank's micro-batches.
        has_loss: Whether to compute the mean loss.

    Returns:
        A tuple of the mean loss over the micro-batches of all ranks and the list of outputs. The
        loss is None if `has_loss` is false. The outputs are None if `keeps_outputs` is false. With
        a pipeline, they are also None on ranks without the last stage.

    Raises:
        UsageError: `data_iter` is not an iterator, `many` is not a positive integer, `has_loss` is
            true and the model returns no scalar loss, or the engine has a pipeline and
            `pipeline.rows` is "own".
        StopIteration: The iterator yields fewer micro-batches than needed.
        PeerError: Another rank failed or issued a different collective.

    Note:
        Collective: every rank of the world must call it.
    """
    if engine.parts.loop is not None:
        engine.parts.loop.refuse_own_rows("eval_batch")
    if many is not None:
        whole_number("eval_batch", "num_micro_batches", many, 1)
    model = engine.module
    with propagate_errors(engine.runtime.comm):
        given = iterator_of("eval_batch", data_iter)
    batches = taken(engine, given, many or engine.config.gradient_accumulation_steps)
    stages = engine.parts.pipeline
    was_training = engine.training
    engine.eval()
    try:
        if stages is not None:
            return stages.evaluate(
                stages.read(batches), keeps_outputs=keeps_outputs, has_loss=has_loss
            )
        outputs = []
        losses = []
        with torch.no_grad():
            for batch in batches:
                args, kwargs = arguments_of(model, batch)
                outputs.append(Engine.forward(engine, *args, **kwargs))
            if has_loss:
                losses = [
                    loss_of(model, output, batch)
                    for output, batch in zip(outputs, batches, strict=True)
                ]
        mean = None
        if has_loss:
            mean = mean_of_ranks(losses, engine.runtime.comm.whole, engine.device)
        return mean, outputs if keeps_outputs else None
    finally:
        engine.train(was_training)


def iterator_of(call: str, given: Any) -> Iterator[Any]:
    """Return the argument `data_iter` of a call.

    Raises:
        UsageError: It is not an iterator. A list or a loader would begin again in each call.
    """
    if not hasattr(given, "__next__"):
        wanted = "an iterator over micro-batches"
        raise refuse(call, "data_iter", given, wanted, "create it once: iter(loader).")
    found: Iterator[Any] = given
    return found


def taken(engine: Engine, batches: Iterator[Any], many: int) -> list[Any]:
    """Take the next micro-batches of a step from an iterator.

    If ranks share sequences, only this rank's part of each micro-batch is returned.

    Args:
        engine: The engine, whose mesh decides which part this rank uses.
        batches: An iterator that yields micro-batches.
        many: The number of micro-batches to take.

    Returns:
        The micro-batches.
    """
    found = [next(batches) for _ in range(many)]
    if engine.mesh.sp == 1:
        return found
    return [parallel.own_part(engine.module, batch) for batch in found]


def own_batches(engine: Engine) -> Iterator[Any]:
    """Return an iterator over the engine's own loader, epoch after epoch.

    The iterator raises `UsageError` if an epoch has no batch.

    Raises:
        UsageError: The engine has no loader.
    """
    if engine.training_dataloader is None:
        raise UsageError(
            "train_batch received no data_iter, and the engine has no data loader.",
            "",
            "pass an iterator of micro-batches, or training_data to initialize.",
        )
    if engine.own_batches is None:
        refusal = UsageError(
            "the engine's data loader yields no batch.",
            "Its dataset is empty, or has fewer samples than a step and dataloader_drop_last is "
            "true.",
            "pass more samples, or set dataloader_drop_last to false.",
        )
        engine.own_batches = endless(engine.training_dataloader, refusal)
    return engine.own_batches


def endless(loader: Iterable[Any], refusal: UsageError) -> Iterator[Any]:
    """Yield the batches of a loader, epoch after epoch.

    Args:
        loader: The loader, which is iterated once per epoch. A single epoch may have no batch, as
            after loading a checkpoint of the end of an epoch.
        refusal: The error that is raised if two epochs in a row have no batch.
    """
    empty = 0
    while empty < MOST_EMPTY:
        empty += 1
        for batch in loader:
            empty = 0
            yield batch
    raise refusal
