"""The engine: forward, backward and step of one model."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..base.errors import UsageError
from ..base.mesh import Mesh
from ..comm.agreement import AllRanks
from ..extensions.loss_factor import loss_factor_of
from ..optim.sharded import ShardedOptimizer
from ..planner.plan import Plan
from ..sharding.runtime import Runtime
from .losses import Losses
from .micro_batches import HeldReductions
from .module_wrapper import StandsForModule
from .observer import Observer
from .optimizer import move_rates
from .parts import Parts, plan_of

# Importing pydantic takes time: only modules that read a configuration import it at run time.
if TYPE_CHECKING:
    from ..config import Config


class Engine(StandsForModule):
    """One model with its optimizer and its learning-rate schedule.

    The wrapped model is `engine.module`; attributes that the engine lacks are read from it.
    `loss.backward()` and `engine.backward(loss)` have the same effect.

    Args:
        config: The run's configuration.
        mesh: The device mesh: the size of each axis and this rank's coordinates.
        parts: The runtime, the optimizer and the features that `assemble` built.
        lr_scheduler: The learning-rate schedule that `step` advances, or None.
        training_dataloader: The loader of the training data, or None.

    Attributes:
        client_state: Returns the client state of checkpoints that a signal starts
            (checkpoint.save_on_signal); None saves none.
    """

    client_state: Callable[[], Mapping[str, Any]] | None = None

    def __init__(
        self,
        config: Config,
        mesh: Mesh,
        parts: Parts,
        lr_scheduler: Any = None,
        training_dataloader: Any = None,
    ) -> None:
        super().__init__()
        self.module = parts.runtime.model
        self.config = config
        self.mesh = mesh
        self.parts = parts
        self.optimizer: ShardedOptimizer | None = parts.optimizer
        self.lr_scheduler = lr_scheduler
        self.training_dataloader = training_dataloader
        with AllRanks(parts.runtime.comm, "opening the run's records"):
            self.observer = Observer(config, mesh.device)
        self.global_steps = 0
        self.micro_steps = 0
        self.skipped_steps = 0
        self.global_samples = 0
        self._boundary: bool | None = None
        self._backwards = 0  # number of backwards since the last step
        self.held_reductions = HeldReductions()
        # Iterates over `training_dataloader`, after its first use
        self.own_batches: Iterator[Any] | None = None
        self._stepped = False
        self.observer.planned(self.plan())
        self._loss_factor = loss_factor_of(parts.runtime)
        self._losses = Losses(parts.loss_checks.reached, self.observer.loss)

    @property
    def runtime(self) -> Runtime:
        """The runtime of the sharded model, with its units and parameter groups."""
        return self.parts.runtime

    # -- forward, backward, step

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model's forward on this rank's micro-batch, and return its output.

        With pipeline stages, a forward in training also runs the backward.

        Args:
            args: The positional arguments of the model's forward.
            kwargs: The keyword arguments of the model's forward.
        """
        self.runtime.step.is_boundary = self.is_gradient_accumulation_boundary()
        self.observer.saw((*args, *kwargs.values()))
        with self.observer.timed("forward"), self.parts.advice.explaining("forward"):
            if self.parts.loop is not None:
                return self.parts.loop(args, kwargs)
            with self.observer.profiled(self), self._loss_factor.entered():
                # The first child is `self.module`. Reading that attribute would go through
                # `__getattr__`, and through all attributes of the class first.
                return next(self.children())(*args, **kwargs)

    def scale(self, loss: Tensor, scale_wrt_gas: bool = True) -> Tensor:
        """Multiply a loss by the loss scale and divide it by the accumulation steps.

        `engine.scale(loss).backward()` has the effect of `engine.backward(loss)`. Losses that are
        outputs of the model need no scaling.

        Args:
            loss: A tensor of any shape.
            scale_wrt_gas: Whether to divide by the accumulation steps.

        Returns:
            The scaled loss, a new tensor of the same shape.
        """
        scaled = self._loss_factor.apply(loss, by_accumulation=scale_wrt_gas)
        self._losses.scaled(scaled, loss)
        return scaled

    def backward(
        self, loss: Tensor, retain_graph: bool = False, scale_wrt_gas: bool = True
    ) -> Tensor:
        """Differentiate the loss and reduce gradients as they appear.

        A loss that does not depend on the model counts as zeros.

        Args:
            loss: The loss of this rank's micro-batch.
            retain_graph: Whether to keep the graph for another backward.
            scale_wrt_gas: Whether to divide by the accumulation steps.

        Returns:
            The loss, divided by the accumulation steps if `scale_wrt_gas`.

        Raises:
            UsageError: No rank's loss requires a gradient; raised on all ranks, here or by `step`.

        Note:
            Collective: every rank must call it once per micro-batch.
        """
        self.runtime.step.is_boundary = self.is_gradient_accumulation_boundary()
        try:
            with (
                self.observer.timed("backward"),
                self._losses.paused(),
                self.parts.advice.explaining("backward"),
                self.parts.loss_checks.expected(loss, self.global_steps + 1) as has_graph,
            ):
                if has_graph:
                    self.scale(loss, scale_wrt_gas).backward(retain_graph=retain_graph)
        except BaseException as error:
            self.runtime.comm.waits.post_error(error)
            raise
        self._losses.differentiated(loss)
        self._backwards += 1
        accumulation = self.config.gradient_accumulation_steps
        if scale_wrt_gas and accumulation > 1:
            return loss / accumulation
        return loss

    def step(self, lr_kwargs: dict[str, Any] | None = None) -> None:
        """Count a micro-batch, and update the weights at the accumulation boundary.

        After an update, the learning-rate schedule advances by one step.

        Args:
            lr_kwargs: Keyword arguments that are passed to the schedule's `step`.

        Raises:
            UsageError: The engine has no optimizer.
            SystemExit: With code 85, after a checkpoint was saved since a rank received a signal
                (checkpoint.save_on_signal).

        Note:
            Collective: every rank must call it.
        """
        if self.optimizer is None:
            raise UsageError(
                "the engine has no optimizer.",
                "initialize got neither `optimizer` nor a configuration with an `optimizer` "
                "section.",
                "pass one of the two; without an optimizer the engine can only run inference.",
            )
        self._refuse_open_blocks()
        boundary = self.is_gradient_accumulation_boundary()
        self._count(1 if self.config.managed_gradient_accumulation else max(1, self.begun))
        if boundary:
            self._end_step(self.optimizer.step, lr_kwargs or {})

    def _refuse_open_blocks(self) -> None:
        """Raise `UsageError` if the gradients of the step are not complete yet."""
        self.held_reductions.refuse_step()
        self.parts.loss_checks.refuse_open()

    def _count(self, taken: int) -> None:
        """Count micro-batches before their step."""
        self._stepped = False
        self._backwards = 0
        self.micro_steps += taken
        batch = self.config.batch
        self.global_samples += taken * batch.micro * batch.data_size

    def _end_step(self, update: Callable[..., None], lr_kwargs: dict[str, Any]) -> None:
        """Update weights and learning rate by `update`, then run what follows a step."""
        assert self.optimizer is not None
        with self.observer.timed("step"), self.parts.advice.explaining("step"):
            self.parts.step_fields.update(self.optimizer, update, self.global_steps + 1)
        self.global_steps += 1
        if self.optimizer.last is not None and self.optimizer.last.skipped:
            self.skipped_steps += 1
        else:
            self._stepped = True
            if self.lr_scheduler is not None:
                move_rates(self.lr_scheduler, lr_kwargs)
        self.observer.stepped(self)
        if self.parts.saver.current is not None:
            self.parts.saver.commit_if_written()
        for act in self.parts.after_steps:
            act(self)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Discard the gradients of the current accumulation."""
        if self.optimizer is not None:
            self.optimizer.zero_grad()

    def was_step_applied(self) -> bool:
        """Return whether the last `step` changed the weights, which a skipped step does not."""
        return self._stepped

    # -- accumulation

    def is_gradient_accumulation_boundary(self) -> bool:
        """Return whether the current micro-batch is the last one of its step.

        It always is if `managed_gradient_accumulation` is false: each `step` updates.
        """
        if self._boundary is not None:
            return self._boundary
        if not self.config.managed_gradient_accumulation:
            return True
        return (self.micro_steps + 1) % self.config.gradient_accumulation_steps == 0

    @property
    def begun(self) -> int:
        """The number of micro-batches that the current accumulation already contains."""
        if self.config.managed_gradient_accumulation:
            return self.micro_steps % self.config.gradient_accumulation_steps
        return self._backwards

    # -- inspection

    def plan(self) -> Plan:
        """Return this rank's plan with the sizes of the last step; printing it shows a table."""
        return plan_of(
            self.runtime, self.optimizer, self.parts.pipeline, self.observer.micro_tokens
        )

    def destroy(self) -> None:
        """Remove the hooks from the model and free the engine's memory. Idempotent.

        Note:
            Collective if a checkpoint is being written, which is completed first.
        """
        self.parts.saver.finish()
        self.parts.saver.close()
        self.runtime.remove_hooks()
        self.parts.release()
        self.observer.close()

    @property
    def device(self) -> torch.device:
        """The `torch.device` on which this rank computes."""
        return self.mesh.device
