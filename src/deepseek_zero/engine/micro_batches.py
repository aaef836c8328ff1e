"""Micro-batches of whole steps: model arguments, losses, and accumulation.

A model that is a list of layers takes pairs (inputs, labels). Any other model takes the arguments
of its forward and returns its loss.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from .. import pipeline
from ..base.errors import UsageError
from ..base.log import logger
from ..base.mesh import Mesh
from ..comm.collectives import Comm
from ..optim.sharded import ShardedOptimizer
from ..sharding.irregular_passes import join_skipped_passes
from ..sharding.regroup import set_grad_dtype
from ..sharding.runtime import Runtime


def arguments_of(model: nn.Module, batch: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the positional and keyword arguments of the model for a micro-batch.

    Args:
        model: The model, which is either a list of layers or a module that returns its loss.
        batch: The micro-batch: a pair (inputs, labels) for a list of layers, otherwise a mapping, a
            sequence or a single argument.

    Returns:
        The positional arguments, and the keyword arguments, to call the model's forward with.
    """
    if isinstance(model, pipeline.LayerStages):
        return (pipeline.Labelled.of(batch).inputs,), {}
    args, kwargs = pipeline.MicroBatch.of(batch)
    return tuple(args), dict(kwargs)


def loss_of(model: nn.Module, output: Any, batch: Any) -> Tensor:
    """Return the loss of a micro-batch from the model's output.

    Args:
        model: The model, which is either a list of layers or a module that returns its loss.
        output: The output of its forward.
        batch: The micro-batch: a pair (inputs, labels) for a list of layers, otherwise a mapping, a
            sequence or a single argument. Only a list of layers needs it, for the labels.

    Returns:
        The loss, a scalar.
    """
    if isinstance(model, pipeline.LayerStages):
        return pipeline.LayersStage(model).loss(output, pipeline.Labelled.of(batch))
    return pipeline.loss_of(output)


def mean_of_ranks(losses: Sequence[Tensor], world: Comm, device: torch.device) -> Tensor:
    """Return the mean loss of all ranks' micro-batches.

    Args:
        losses: The losses of this rank's micro-batches, scalars.
        world: The communicator of the world.
        device: The device of the result.

    Returns:
        The mean, a scalar that is equal on every rank.

    Note:
        Collective: every rank of the world must call it.
    """
    own = sum(float(loss) for loss in losses) / len(losses)
    mean = torch.tensor([own], dtype=torch.float64, device="cpu")
    table = world.all_gather_rows(mean, "the losses of all ranks")
    return table.mean().float().to(device)


def has_graph(loss: Any, mesh: Mesh) -> bool:
    """Return whether a loss can be differentiated.

    Args:
        loss: The loss that the program passed.
        mesh: The device mesh: the size of each axis and this rank's coordinates.

    Returns:
        True if the loss requires a gradient.

    Raises:
        UsageError: The loss is not a tensor, or it has no graph in a world of one rank.
    """
    if not isinstance(loss, Tensor):
        raise UsageError(
            f"engine.backward got a {type(loss).__name__} where a tensor is needed.",
            "A loss is differentiated through the operations that computed it.",
            "pass the loss itself, not loss.item().",
        )
    if not loss.requires_grad and mesh.world_size == 1:
        raise UsageError(
            "engine.backward got a loss that does not require a gradient.",
            "It was computed under torch.no_grad(), detached, or computed from parameters that are "
            "frozen.",
            "compute it from the model's outputs with gradients enabled.",
        )
    return loss.requires_grad


def change_accumulation(
    runtime: Runtime, optimizer: ShardedOptimizer | None, accumulation: int
) -> None:
    """Change the number of accumulated micro-batches, and the plan with it.

    Gradients that are summed over several micro-batches are kept in fp32, single ones in the dtype
    of the weight.

    Args:
        runtime: The runtime of the wrapped model, with its units and parameter groups.
        optimizer: The engine's sharded optimizer; None if the engine has none.
        accumulation: The number of micro-batches per step from now on.
    """
    policy = runtime.settings.policy
    runtime.settings = replace(runtime.settings, accumulation=accumulation)
    if optimizer is not None:
        optimizer.flush()
        optimizer.finish()  # the next gradients may have another dtype
    runtime.backward.drop_grads()
    for group in runtime.trained_groups:
        summands = accumulation * runtime.settings.row_parts
        set_grad_dtype(group, policy.grad_dtype(group.plan.weight.dtype, summands))


@dataclass
class HeldReductions:
    """Tracks the context, such as `no_sync`, that currently postpones gradient reduction.

    Attributes:
        name: The name of the open context, or an empty string.
    """

    name: str = ""

    @contextmanager
    def inside(self, name: str) -> Iterator[None]:
        """Return a context inside which `step`, and another context of this kind, raise."""
        if self.name:
            raise UsageError(
                f"{name} context manager reentry is unsupported: nested in {self.name}.",
                "Both determine when gradients are reduced.",
                "remove one of the two.",
            )
        self.name = name
        try:
            yield
        finally:
            self.name = ""

    def refuse_step(self) -> None:
        """Raise `UsageError` if a context that postpones gradient reduction is open."""
        if self.name:
            raise UsageError(
                f"It is illegal to call Engine.step() inside {self.name} context manager "
                "(no_sync).",
                "The gradients of its backwards are not reduced yet.",
                "call step() after the block.",
            )


class LossChecks:
    """Checks the losses of `engine.backward` for an engine without pipeline stages.

    `PlainLoop` (pipeline/loop.py) has the same methods for an engine with stages.

    Args:
        runtime: The runtime of the wrapped model.
        mesh: The device mesh: the size of each axis and this rank's coordinates.
    """

    def __init__(self, runtime: Runtime, mesh: Mesh) -> None:
        self.runtime = runtime
        self.mesh = mesh
        self._has_warned = False

    def reached(self) -> int:
        """Return a number that changes with each backward through the model."""
        return self.runtime.step.backwards

    @contextmanager
    def expected(self, loss: Any, step: int) -> Iterator[bool]:
        """Return a context for the backward of a loss, which yields whether it has a graph.

        If the backward does not reach the model, the gradients of this rank count as zeros.

        Args:
            loss: The loss that the program passed.
            step: The number of the step, beginning with 1.

        Note:
            Collective: every rank must enter and leave it.
        """
        state = self.runtime.step
        done = state.backwards
        is_differentiable = has_graph(loss, self.mesh)
        if not is_differentiable:
            state.is_graphless = True
            self._warn_once(step)
        yield is_differentiable
        if state.backwards == done:
            join_skipped_passes(self.runtime.backward)

    def _warn_once(self, step: int) -> None:
        if not self._has_warned:
            self._has_warned = True
            logger.warning(
                f"step {step}: this rank's loss does not require a gradient, so its gradients "
                "count as zeros.  If no rank's loss requires one, the step raises an error.  This "
                "is logged once."
            )

    def refuse_open(self) -> None:
        """Do nothing, because only a loss of a pipeline identifies its backward."""


def refuse_destroyed(runtime: Runtime, call: str) -> None:
    """Raise `UsageError` if `engine.destroy` was called.

    Args:
        runtime: The runtime of the engine.
        call: The name of the method that the program called.
    """
    if runtime.is_destroyed:
        raise UsageError(
            f"engine.{call}() was called after destroy().",
            "destroy() has removed the hooks that reduce gradients and gather weights.",
            "call it before destroy(), or create another engine with initialize.",
        )
