"""Micro-batches of whole steps: what a model is called with, their losses, and how many are summed.

A model that is a list of layers takes pairs (inputs, labels); any other one takes what its forward
takes and returns its loss.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from .. import parallel, pipeline
from ..base.errors import UsageError
from ..base.log import logger
from ..base.mesh import Mesh
from ..comm.collectives import Comm
from ..optim.sharded import ShardedOptimizer
from ..sharding.runtime import Runtime


def taken(batches: Iterator[Any], many: int, model: nn.Module, mesh: Mesh) -> list[Any]:
    """Take so many micro-batches; of sequences that ranks share, this rank's part."""
    found = [next(batches) for _ in range(many)]
    if mesh.sp == 1:
        return found
    return [parallel.own_part(model, batch) for batch in found]


def arguments_of(model: nn.Module, batch: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return what the model's forward is called with."""
    if isinstance(model, pipeline.LayerStages):
        return (pipeline.Labelled.of(batch).inputs,), {}
    args, kwargs = pipeline.MicroBatch.of(batch)
    return tuple(args), dict(kwargs)


def loss_of(model: nn.Module, output: Any, batch: Any) -> Tensor:
    """Return the loss of what the model returned for a micro-batch."""
    if isinstance(model, pipeline.LayerStages):
        return pipeline.LayersStage(model).loss(output, pipeline.Labelled.of(batch))
    return pipeline.loss_of(output)


def mean_of_ranks(losses: Sequence[Tensor], world: Comm, device: torch.device) -> Tensor:
    """Return the mean loss of all ranks' micro-batches.  Collective in the world."""
    own = sum(float(loss) for loss in losses) / len(losses)
    mean = torch.tensor([own], dtype=torch.float64)
    table = world.all_gather_rows(mean, "the losses of all ranks")
    return table.mean().float().to(device)


def has_graph(loss: Any, mesh: Mesh) -> bool:
    """Return whether a loss can be differentiated.

    Raises:
        UsageError: It is no tensor, or it has no graph and no other rank's may have one.
    """
    if not isinstance(loss, Tensor):
        raise UsageError(
            f"engine.backward got a {type(loss).__name__} where a tensor is needed.",
            "A loss is differentiated through the operations that made it.",
            "pass the loss itself, not loss.item().",
        )
    if not loss.requires_grad and mesh.world_size == 1:
        raise UsageError(
            "engine.backward got a loss that does not require a gradient.",
            "It was computed under torch.no_grad(), detached, or made of parameters that are "
            "frozen.",
            "compute it from the model's outputs with gradients on.",
        )
    return loss.requires_grad


def warn_of_graphless(step: int) -> None:
    """Log that this rank's loss cannot be differentiated."""
    logger.warning(
        f"step {step}: this rank's loss does not require a gradient, so it counts as zeros beside "
        "the other ranks'.  If that is so on all of them, the step is an error; this is said once."
    )


def change_accumulation(
    runtime: Runtime, optimizer: ShardedOptimizer | None, accumulation: int
) -> None:
    """Sum so many micro-batches from now on.

    Gradients summed over several micro-batches are kept in fp32, single ones in the dtype of the
    weight, and the plan follows.
    """
    policy = runtime.settings.policy
    runtime.settings = replace(runtime.settings, accumulation=accumulation)
    if optimizer is not None:
        optimizer.flush()
        optimizer.finish()  # gradients of another dtype are to come
    runtime.backward.drop_grads()
    for group in runtime.trained_groups:
        summands = accumulation * runtime.settings.row_parts
        group.set_grad_dtype(policy.grad_dtype(group.plan.weight.dtype, summands))


class HeldReductions:
    """The context that holds back the reduction of gradients, while one is open.

    Attributes:
        name: The name of the context; empty outside.
    """

    def __init__(self) -> None:
        self.name = ""

    @contextmanager
    def inside(self, name: str) -> Iterator[None]:
        """Refuse step() and another such context inside this one."""
        if self.name:
            raise UsageError(
                f"{name} context manager reentry is unsupported: nested in {self.name}.",
                "Both say when gradients are reduced.",
                "leave one of the two out.",
            )
        self.name = name
        try:
            yield
        finally:
            self.name = ""

    def refuse_step(self) -> None:
        """Raise UsageError inside a context."""
        if self.name:
            raise UsageError(
                f"It is illegal to call Engine.step() inside {self.name} context manager "
                "(no_sync).",
                "The gradients of its backwards are not reduced yet.",
                "call step() behind the block.",
            )
