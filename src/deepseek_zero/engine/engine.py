"""The engine: forward, backward and step of one model, made of `Parts`.  Coordinates, computes
nothing.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import chain, count
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import ReduceLROnPlateau

from .. import activations, attention, pipeline
from ..activations import recompute
from ..activations.recompute import Recompute
from ..base.capabilities import Capabilities
from ..base.errors import UsageError
from ..base.given import NoSuchNameError, whole_number
from ..base.log import log_once
from ..base.mesh import Mesh
from ..comm.agreement import AllRanks
from ..config import Batch
from ..extensions.state_dicts import StateDicts
from ..optim.sharded import ShardedOptimizer
from ..optim.step_settings import StepSettings
from ..planner.plan import Plan
from ..planner.plan_settings import PlanSettings
from ..precision.loss_scale import LossScaler
from ..sharding.runtime import Runtime
from .data import ShardedLoader
from .determinism import Determinism
from .explaining import lines_about_steps
from .integrity import Integrity
from .losses import Losses
from .memory import plan_of
from .memory_advice import MemoryAdvice
from .micro_batches import (
    HeldReductions,
    arguments_of,
    change_accumulation,
    has_graph,
    loss_of,
    mean_of_ranks,
    taken,
    warn_of_graphless,
)
from .observer import Observer
from .preemption import Preemption
from .saving import Saver
from .settings import RunSettings
from .step_fields import StepFields
from .stragglers import Stragglers

# Pydantic is imported by those who read a configuration, not by who names this class
if TYPE_CHECKING:
    from ..config import Config
    from ..pipeline import Pipeline, PlainLoop


class StandsForModule(nn.Module):
    """Base of objects that wrap a model as `module`: attributes that they do not have are the
    model's.
    """

    module: nn.Module

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            own = getattr(type(self), name, None)
            if isinstance(own, property) and own.fget is not None:
                # An AttributeError inside it led here: that one is to be seen, not ours
                return own.fget(self)
            if name == "module":  # not there yet
                raise
            try:
                return getattr(self.module, name)
            except AttributeError as error:
                if error.name != name or error.obj is not self.module:
                    raise  # of a property inside the model
                owner = f"'{type(self).__name__}' around a '{type(self.module).__name__}' object"
                raise NoSuchNameError(owner, name, partial(_names_of, self)) from None


def _backwards_of(runtime: Runtime, loop: Any) -> object:
    """Return something that differs after a backward through the model."""
    return runtime.step.backwards, loop.waiting if loop is not None else 0


def _names_of(engine: StandsForModule) -> list[str]:
    return [*dir(engine), *dir(engine.module)]


@dataclass
class Parts:
    """What one engine is made of; the settings are all that anything below was told."""

    runtime: Runtime
    optimizer: ShardedOptimizer | None
    scaler: LossScaler | None
    plan_settings: PlanSettings
    step_settings: StepSettings
    settings: RunSettings
    advice: MemoryAdvice
    state_dicts: StateDicts
    schedule: tuple[str, Any] | None = None
    recompute: Recompute | None = None
    vertical: activations.LayerwiseAccumulation | None = None
    saver: Saver = field(default_factory=Saver)
    preemption: Preemption | None = None
    integrity: Integrity | None = None
    capabilities: Capabilities = field(default_factory=Capabilities)
    determinism: Determinism | None = None
    pipeline: Pipeline | None = None
    loop: PlainLoop | None = None  # over the pipeline's stages
    sparse_attention: attention.SparseAttention | None = None
    # What DeepSeekZeRO3 heard of its optimizer, to compare with it
    told: dict[str, Any] = field(default_factory=dict)

    def describe(self) -> list[str]:
        """One line per part: what `dump_state` logs, and what the contract compares to find keys
        without effect.
        """
        units = [
            f"{unit.name}: {[group.plan for group in unit.groups]}" for unit in self.runtime.units
        ]
        inner = self.optimizer.inner if self.optimizer is not None else None
        return [
            str(self.plan_settings),
            str(self.step_settings),
            str(self.settings),
            f"loss scale {self.scaler}",
            f"optimizer {type(inner).__name__} {inner.defaults if inner is not None else ''}",
            f"schedule {self.schedule}",
            f"recomputation {self.recompute.settings if self.recompute is not None else None}",
            f"deterministic algorithms: {self.determinism is not None}",
            f"sparse attention {self.sparse_attention}",
            *units,
            str(self.runtime.executor.schedule),
        ]


class Engine(StandsForModule):
    """One model, its optimizer and its schedule.

    The wrapped model stays `engine.module`; other attributes fall through to it.  `loss.backward()`
    and `engine.backward(loss)` are equally good.
    """

    # A function that returns the client_state of saves that the program does not call
    # (checkpoint.save_on_signal).
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
        if self.optimizer is not None:
            self.optimizer.take_step = weakref.WeakMethod(self.step_now)
        self.lr_scheduler = lr_scheduler
        self.training_dataloader = training_dataloader
        with AllRanks(parts.runtime.comm, "opening the run's records"):
            self.observer = Observer(parts.settings.observer, mesh.device)
        if parts.settings.observer.dump_state:
            log_once("\n".join(parts.describe()))
        self.global_steps = self.micro_steps = self.skipped_steps = self.global_samples = 0
        self._boundary: bool | None = None
        self._backwards = 0  # since the last step
        self.held_reductions = HeldReductions()
        self.own_batches: Iterator[Any] | None = None  # of `training_dataloader`, once it is read
        self._stepped = self._told_of_graphless = self._told_of_direct_steps = False
        self._batch = config.batch  # changed by `_resize`
        # Ranks with all layers and tokens of their own compute alike; a GPU's host runs ahead of
        # it.
        are_alike = mesh.device.type == "cpu" and mesh.pp == mesh.tp == mesh.sp == 1
        comm = parts.runtime.comm
        stragglers = None
        if are_alike and not comm.hosts.is_one:
            stragglers = Stragglers(comm.meter, list(dict.fromkeys(comm.hosts.names)))
        self.step_fields = StepFields(parts.preemption, stragglers, parts.integrity)
        self.observer.planned(self.plan())
        self._losses = Losses(partial(_backwards_of, parts.runtime, parts.loop), self.observer.loss)

    @property
    def runtime(self) -> Runtime:
        """Return the runtime of the sharded model."""
        return self.parts.runtime

    # -- the step by step flow

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model's forward on this rank's micro-batch; over stages, in training, its
        backward too.
        """
        self.runtime.step.is_boundary = self.is_gradient_accumulation_boundary()
        self.observer.saw((*args, *kwargs.values()))
        if self.parts.loop is not None:
            with (
                self.observer.timed("forward"),
                self._losses.paused(),
                self.parts.advice.explaining("forward"),
            ):
                return self.parts.loop(args, kwargs)
        with (
            self.observer.timed("forward"),
            self.observer.profiled(self),
            self.parts.advice.explaining("forward"),
            self.runtime.loss_factor.entered(),
        ):
            # The first child is `self.module`, which __getattr__ would look up behind every name of
            # DeepSpeed's.
            return next(self.children())(*args, **kwargs)

    def train_batch(self, data_iter: Iterator[Any] | None = None) -> Tensor:
        """Take a whole step: `gradient_accumulation_steps` micro-batches forward and backward, then
        the update.

        Return the mean loss of all ranks' micro-batches, the same on every rank.  Collective in the
        world.  data_iter: yields micro-batches, the same on every stage and, whole or cut, on ranks
        that share sequences; None: of the engine's own loader, over and over.
        """
        accumulation = self._batch.accumulation
        batches = taken(data_iter or own_batches(self), accumulation, self.module, self.mesh)
        stages = self.parts.pipeline
        # A subclass may refuse its own forward, backward and step
        if stages is None:
            losses = []
            for batch in batches:
                args, kwargs = arguments_of(self.module, batch)
                loss = loss_of(self.module, Engine.forward(self, *args, **kwargs), batch)
                Engine.backward(self, loss)
                Engine.step(self)
                losses.append(loss.detach())
            return mean_of_ranks(losses, self.runtime.comm.whole, self.device)
        if self.parts.loop is not None:
            self.parts.loop.refuse_begun()
        micro_batches = stages.read(batches)
        for micro in micro_batches:
            if isinstance(micro, pipeline.MicroBatch):
                self.observer.saw((*micro.args, *micro.kwargs.values()))
        with (
            self.observer.timed("forward"),
            self._losses.paused(),
            self.parts.advice.explaining("train_batch"),
        ):
            loss = stages.train(micro_batches)
        self.observer.loss(loss)
        # All micro-batches of the step have been taken; `step` counts the last one
        self.global_samples += (accumulation - 1) * self._batch.micro * self.mesh.data_size
        self.micro_steps += accumulation - 1
        Engine.step(self)
        return loss

    def eval_batch(self, data_iter: Iterator[Any], num_micro_batches: int | None = None) -> Tensor:
        """Return the mean loss of so many micro-batches of all ranks, without a backward.
        Collective in the world.

        num_micro_batches: None: as many as a step has.
        """
        found, _ = evaluate(self, data_iter, num_micro_batches)
        assert found is not None
        return found

    def scale(self, loss: Tensor, scale_wrt_gas: bool = True) -> Tensor:
        """The loss times the loss scale, divided by the accumulation steps:
        `engine.scale(loss).backward()` is `engine.backward(loss)`.  A tensor of any shape; the
        model's outputs alone need no scaling.
        """
        scaled = self.runtime.loss_factor.apply(loss, by_accumulation=scale_wrt_gas)
        self._losses.scaled(scaled, loss)
        return scaled

    def backward(
        self, loss: Tensor, retain_graph: bool = False, scale_wrt_gas: bool = True
    ) -> Tensor:
        """Differentiate the loss; gradients are reduced as they appear.  Returns the loss divided
        by the accumulation steps.

        Collective: every rank calls it once per micro-batch, also one whose loss does not depend on
        the model: it counts as zeros there.  Where no rank's loss requires a gradient, this or the
        step raises UsageError on all.
        """
        runtime = self.runtime
        loop = self.parts.loop
        runtime.step.is_boundary = self.is_gradient_accumulation_boundary()
        done = runtime.step.backwards
        try:
            with (
                self.observer.timed("backward"),
                self._losses.paused(),
                self.parts.advice.explaining("backward"),
            ):
                if loop is not None:
                    with loop.expects(loss):
                        self.scale(loss, scale_wrt_gas).backward(retain_graph=retain_graph)
                elif not has_graph(loss, self.mesh):
                    runtime.step.is_graphless = True
                    if not self._told_of_graphless:
                        self._told_of_graphless = True
                        warn_of_graphless(self.global_steps + 1)
                else:
                    self.scale(loss, scale_wrt_gas).backward(retain_graph=retain_graph)
                if loop is None and runtime.step.backwards == done:
                    runtime.backward.join_skipped_passes()
        except BaseException as error:
            runtime.comm.waits.post_error(error)
            raise
        self._losses.differentiated(loss)
        self._backwards += 1
        return (
            loss / self._batch.accumulation
            if scale_wrt_gas and self._batch.accumulation > 1
            else loss
        )

    def step(self, lr_kwargs: dict[str, Any] | None = None) -> None:
        """Count a micro-batch; at the accumulation boundary update the weights and the learning
        rate.  Collective.

        With checkpoint.save_on_signal it ends in SystemExit(85) where a rank was asked to end,
        behind a save.
        """
        if self.optimizer is None:
            raise UsageError(
                "the engine has no optimizer.",
                "initialize got neither `optimizer` nor a configuration with an `optimizer` "
                "section.",
                "add one of the two; without an optimizer the engine serves inference only.",
            )
        self.held_reductions.refuse_step()
        if self.parts.loop is not None:
            self.parts.loop.refuse_open()
        boundary = self.is_gradient_accumulation_boundary()
        self._stepped = False
        taken = 1 if self.config.managed_gradient_accumulation else max(1, self.begun)
        self._backwards = 0
        self.micro_steps += taken
        self.global_samples += taken * self._batch.micro * self._batch.data_size
        if boundary:
            self._end_step(self.optimizer.step, lr_kwargs or {})

    def step_now(self) -> None:
        """Take a step with all gradients since the last one, at any point of the accumulation.
        Collective.

        This is what `engine.optimizer.step()` does: counters and the learning rate move as in
        `step`.
        """
        assert self.optimizer is not None
        self.held_reductions.refuse_step()
        if self.parts.loop is not None:
            self.parts.loop.refuse_open()
        if not self._told_of_direct_steps:
            self._told_of_direct_steps = True
            log_once(
                "optimizer.step() was called directly: it counts as a step of the engine and moves "
                "its learning-rate schedule, as engine.step() at the end of an accumulation.  Do "
                "not call lr_scheduler.step() as well."
            )
        counted = self.begun if self.config.managed_gradient_accumulation else 0
        step = self.runtime.step
        taken = 1 if self.parts.loop is not None else max(1, step.backwards - counted)
        if self.parts.loop is None and step.backwards and not step.is_boundary:
            self.runtime.backward.reduce_step()
        self._stepped = False
        self._backwards = 0
        self.micro_steps += taken
        if self.config.managed_gradient_accumulation:
            self.micro_steps = (self.global_steps + 1) * self._batch.accumulation
        self.global_samples += taken * self._batch.micro * self._batch.data_size
        self._end_step(self.optimizer.update, {})

    def _end_step(self, update: Callable[..., None], lr_kwargs: dict[str, Any]) -> None:
        """Update weights and learning rate, and all that follows a step.  update: of the
        optimizer.
        """
        assert self.optimizer is not None
        with self.observer.timed("step"), self.parts.advice.explaining("step"):
            self.step_fields.update(self.optimizer, update, self.global_steps + 1)
        self.global_steps += 1
        if self.optimizer.last is not None and self.optimizer.last.skipped:
            self.skipped_steps += 1
        else:
            self._stepped = True
            if self.lr_scheduler is not None:
                _move_rates(self.lr_scheduler, lr_kwargs)
        self.observer.stepped(self)
        if self.parts.saver.current is not None:
            self.parts.saver.commit_if_written()
        if self.parts.preemption is not None:
            self.parts.preemption.act(self)
        if self.parts.integrity is not None:
            self.parts.integrity.after_step(self.global_steps)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients."""
        if self.optimizer is not None:
            self.optimizer.zero_grad()

    def was_step_applied(self) -> bool:
        """Return whether the last step() changed the weights (not inside an accumulation, not
        skipped).
        """
        return self._stepped

    # -- accumulation

    def is_gradient_accumulation_boundary(self) -> bool:
        """Return whether the micro-batch under way is the last of its step.

        With `managed_gradient_accumulation` false it always may be: the program's step() decides.
        """
        if self._boundary is not None:
            return self._boundary
        if not self.config.managed_gradient_accumulation:
            return True
        return (self.micro_steps + 1) % self._batch.accumulation == 0

    @property
    def begun(self) -> int:
        """Micro-batches that were taken since the last step."""
        if self.config.managed_gradient_accumulation:
            return self.micro_steps % self._batch.accumulation
        return self._backwards

    def set_gradient_accumulation_boundary(self, is_boundary: bool) -> None:
        """Set by hand whether the next micro-batch ends a step; holds until it is set again."""
        if not self.config.managed_gradient_accumulation:
            raise UsageError(
                "set_gradient_accumulation_boundary() has no meaning where "
                "managed_gradient_accumulation is false.",
                "Every step() updates there.",
                "call step() where the accumulation ends, or leave the key out.",
            )
        self._boundary = is_boundary

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulate without reducing: stages 0 and 1 only, whose gradients are whole on every rank
        until the boundary.
        """
        if self.runtime.settings.stage >= 2:
            raise UsageError(
                "no_sync context manager is incompatible with gradients that are sharded: ZeRO "
                f"stage {self.runtime.settings.stage}.",
                "A sharded gradient has nowhere to wait: each rank keeps only its slice, so every "
                "backward reduces.",
                "use gradient_accumulation_steps, or stage 0 or 1.",
            )
        with self.held_reductions.inside("no_sync"):
            held = self._boundary
            self._boundary = False
            try:
                yield
            finally:
                self._boundary = held

    def set_train_batch_size(self, train_batch_size: int) -> None:
        """Change the samples per step by accumulating more or fewer micro-batches; every rank,
        between two steps.
        """
        whole_number("set_train_batch_size", "train_batch_size", train_batch_size, 1)
        per_micro = self._batch.micro * self._batch.data_size
        if train_batch_size < per_micro or train_batch_size % per_micro:
            raise UsageError(
                "Train batch size must be divisible by micro-batch data parallelism: "
                f"{train_batch_size} is not a multiple of {per_micro} ({self._batch.micro} per "
                f"rank x {self._batch.data_size} ranks).",
                "Only the number of micro-batches per step can change.",
                f"choose a multiple of {per_micro}.",
            )
        self._resize(self._batch.micro, train_batch_size // per_micro)

    def set_train_micro_batch_size(self, micro_batch_size: int) -> None:
        """Say that micro-batches have another size from now on; the accumulation stays, the batch
        size follows.

        A data loader keeps the sizes it was built with.
        """
        whole_number("set_train_micro_batch_size", "micro_batch_size", micro_batch_size, 1)
        self._resize(micro_batch_size, self._batch.accumulation)

    def _resize(self, micro: int, accumulation: int) -> None:
        if self.begun:
            raise UsageError(
                "the batch size was changed between two micro-batches of one step.",
                "Gradients already summed would be divided by the wrong number.",
                "change it right after a step() that updated the weights.",
            )
        before = self._batch
        train = micro * accumulation * before.data_size
        self._batch = Batch(train, micro, accumulation, before.data_size)
        self.parts.advice.batch = micro, accumulation
        changes = {
            "train_micro_batch_size_per_gpu": micro,
            "gradient_accumulation_steps": accumulation,
            "train_batch_size": train,
        }
        # For those who ask the engine for its configuration
        self.config = self.config.model_copy(update=changes)
        if accumulation != before.accumulation:
            self.micro_steps = self.global_steps * accumulation
            change_accumulation(self.runtime, self.optimizer, accumulation)
        if micro == before.micro and isinstance(self.training_dataloader, ShardedLoader):
            self.training_dataloader.deal_steps_of(train)

    # -- looking

    def plan(self) -> str:
        """The plan of every unit and the schedule, as text."""
        return "\n".join(self.current_plan().explain())

    def current_plan(self) -> Plan:
        """The plan that this rank follows now, with the messages and micro-batches of the last
        step.  Local.
        """
        return plan_of(
            self.runtime, self.optimizer, self.parts.pipeline, self.observer.micro_tokens
        )

    def destroy(self) -> None:
        """Unhook the model and free what the engine lent; calling it twice is harmless.  Collective
        where a checkpoint is being written, which is finished first.

        Rank 0 logs where its steps went, unless steps_per_print says that nothing is printed.
        """
        if (
            not self.runtime.is_destroyed
            and self.observer.settings.steps_per_print
            and self.global_steps > 1
        ):
            log_once(
                "\n".join(["where the run went", *lines_about_steps(self.runtime, self.optimizer)])
            )
        self.parts.saver.finish()
        self.parts.saver.close()
        self.runtime.remove_hooks()
        recompute.release(self.parts.recompute)
        if self.parts.vertical is not None:
            self.parts.vertical.remove()
        if self.parts.preemption is not None:
            self.parts.preemption.release()
        if self.parts.determinism is not None:
            self.parts.determinism.release()
        self.observer.close()

    @property
    def device(self) -> torch.device:
        """Return the device of this rank."""
        return self.mesh.device


def evaluate(
    engine: Engine,
    data_iter: Iterator[Any],
    many: int | None,
    *,
    keeps_outputs: bool = False,
    has_loss: bool = True,
) -> tuple[Tensor | None, list[Any] | None]:
    """Run forwards without a backward.

    Returns:
        The mean loss if `has_loss`, and the outputs on the ranks that compute them.
    """
    if engine.parts.loop is not None:
        engine.parts.loop.refuse_own_rows("eval_batch")
    model = engine.module
    batches = taken(data_iter, many or engine._batch.accumulation, model, engine.mesh)
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


def own_batches(engine: Engine) -> Iterator[Any]:
    """Yield the own loader's batches, epoch after epoch."""
    if engine.training_dataloader is None:
        raise UsageError(
            "train_batch was given no data_iter, and the engine has no loader of its own.",
            "",
            "pass an iterator of micro-batches, or training_data to initialize.",
        )
    if engine.own_batches is None:
        engine.own_batches = chain.from_iterable(engine.training_dataloader for _ in count())
    return engine.own_batches


def _move_rates(scheduler: Any, lr_kwargs: dict[str, Any]) -> None:
    if isinstance(scheduler, ReduceLROnPlateau) and "metrics" not in lr_kwargs:
        raise UsageError(
            "ReduceLROnPlateau was not told what it waits for.",
            "It lowers the rate when a number stops falling, and engine.step() knows none.",
            'pass it: engine.step(lr_kwargs={"metrics": loss}).',
        )
    scheduler.step(**lr_kwargs)
