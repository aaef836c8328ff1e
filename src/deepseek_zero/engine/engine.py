"""The engine: forward, backward, step. Coordinates, computes nothing.

Both doors return an `Engine`; compat/deepspeed/engine.py adds DeepSpeed's getters.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import ReduceLROnPlateau

from ..activations import recompute
from ..base.errors import UsageError
from ..base.log import log_once, logger
from ..base.mesh import Mesh
from ..base.world import is_rank_zero
from ..comm.agreement import run_on_all_ranks
from ..optim.sharded import ShardedOptimizer
from ..report.explain import Advice, Timeline, what_moved, where_steps_went
from ..report.links import links_of
from ..report.picture import draw_plan, places_of
from ..sharding.runtime import Runtime
from .memory import memory_report, plan_of
from .observe import Observer

if TYPE_CHECKING:  # pydantic is imported by those who read a configuration, not by who names this class
    from ..config import Config
    from .assemble import Parts


class StandsForModule(nn.Module):
    """Base of objects that wrap a model as `module`: attributes that they do not have are the model's."""

    module: nn.Module

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            own = getattr(type(self), name, None)
            if isinstance(own, property) and own.fget is not None:
                return own.fget(self)  # an AttributeError inside it led here: that one is to be seen, not ours
            if name == "module":  # not there yet
                raise
            return getattr(self.module, name)


class Engine(StandsForModule):
    """One model, its optimizer and its schedule.

    The wrapped model stays `engine.module`; other attributes fall through to it.  `loss.backward()` and
    `engine.backward(loss)` are equally good.
    """

    # A function that returns the client_state of saves that the program does not call (checkpoint.save_on_signal).
    client_state: Callable[[], Mapping[str, Any]] | None = None

    def __init__(self, model: nn.Module, config: Config, mesh: Mesh, parts: Parts) -> None:
        super().__init__()
        self.module = model
        self.config, self.mesh, self.parts = config, mesh, parts
        self.optimizer: ShardedOptimizer | None = parts.optimizer
        self.lr_scheduler: Any = None
        self.training_dataloader: Any = None
        self.observer = run_on_all_ranks(
            parts.runtime.comm,
            "opening the run's records",
            lambda: Observer(parts.observer_settings, mesh.device),
        )
        if parts.observer_settings.dump_state:
            log_once("\n".join(parts.describe()))
        self.global_steps = self.micro_steps = self.skipped_steps = self.global_samples = 0
        self._boundary: bool | None = None
        self._stepped = self._told_of_graphless = False
        self._batch = config.batch  # changed by accumulate.py
        self.observer.planned(self.plan())

    @property
    def runtime(self) -> Runtime:
        """Return the runtime of the sharded model."""
        return self.parts.runtime

    # -- the step by step flow

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model's forward on this rank's micro-batch."""
        self.runtime.is_boundary = self.is_gradient_accumulation_boundary()
        self.observer.saw((*args, *kwargs.values()))
        with self.observer.timed("forward"), self.observer.profiled(self):
            return self.module(*args, **kwargs)

    def scale(self, loss: Tensor, scale_wrt_gas: bool = True) -> Tensor:
        """The loss times the loss scale, divided by the accumulation steps: `engine.scale(loss).backward()` is
        `engine.backward(loss)`.  A tensor of any shape; the model's outputs alone need no scaling.
        """
        return self.runtime.loss_factor.apply(loss, by_accumulation=scale_wrt_gas)

    def backward(self, loss: Tensor, retain_graph: bool = False, scale_wrt_gas: bool = True) -> Tensor:
        """Differentiate the loss; gradients are reduced as they appear.  Returns the loss divided by the accumulation
        steps.

        Collective: every rank calls it once per micro-batch, also one whose loss does not depend on the model: it
        counts as zeros there.  Where no rank's loss requires a gradient, this or the step raises UsageError on all.
        """
        runtime = self.runtime
        runtime.is_boundary = self.is_gradient_accumulation_boundary()
        done = runtime.backwards
        try:
            with self.observer.timed("backward"):
                if not self._has_graph(loss):
                    runtime.is_graphless = True
                else:
                    self.scale(loss, scale_wrt_gas).backward(retain_graph=retain_graph)
                if runtime.backwards == done:
                    runtime.join_skipped_passes()
        except BaseException as error:
            runtime.comm.post_error(error)
            raise
        self.observer.loss(loss)
        return loss / self._batch.accumulation if scale_wrt_gas and self._batch.accumulation > 1 else loss

    def _has_graph(self, loss: Tensor) -> bool:
        """Return whether a loss can be differentiated.  UsageError where it cannot and no other rank's may."""
        if not isinstance(loss, Tensor):
            raise UsageError(
                f"engine.backward got a {type(loss).__name__} where a tensor is needed.",
                "A loss is differentiated through the operations that made it.",
                "pass the loss itself, not loss.item().",
            )
        if loss.requires_grad:
            return True
        if self.mesh.world_size == 1:
            raise UsageError(
                "engine.backward got a loss that does not require a gradient.",
                "It was computed under torch.no_grad(), detached, or made of parameters that are frozen.",
                "compute it from the model's outputs with gradients on.",
            )
        if not self._told_of_graphless:
            self._told_of_graphless = True
            logger.warning(
                f"step {self.global_steps + 1}: this rank's loss does not require a gradient, so it counts as zeros "
                "beside the other ranks'.  If that is so on all of them, the step is an error; this is said once."
            )
        return False

    def step(self, lr_kwargs: dict[str, Any] | None = None) -> None:
        """Count a micro-batch; at the accumulation boundary update the weights and the learning rate.  Collective.

        With checkpoint.save_on_signal it ends in SystemExit(85) where a rank was asked to end, behind a save.
        """
        if self.optimizer is None:
            raise UsageError(
                "the engine has no optimizer.",
                "initialize got neither `optimizer` nor a configuration with an `optimizer` section.",
                "add one of the two; without an optimizer the engine serves inference only.",
            )
        boundary = self.is_gradient_accumulation_boundary()
        self._stepped = False
        self.micro_steps += 1
        self.global_samples += self._batch.micro * self.mesh.data_size
        if not boundary:
            return
        preemption = self.parts.preemption
        with self.observer.timed("step"):
            word = preemption.word if preemption is not None else None
            self.optimizer.step(word=word, number=self.global_steps + 1)
        self.global_steps += 1
        if self.optimizer.last is not None and self.optimizer.last.skipped:
            self.skipped_steps += 1
        else:
            self._stepped = True
            if self.lr_scheduler is not None:
                self._move_rates(lr_kwargs or {})
        self.observer.stepped(self)
        self.parts.saver.commit_if_written()
        if preemption is not None:
            preemption.act(self)

    def _move_rates(self, words: dict[str, Any]) -> None:
        if isinstance(self.lr_scheduler, ReduceLROnPlateau) and "metrics" not in words:
            raise UsageError(
                "ReduceLROnPlateau was not told what it waits for.",
                "It lowers the rate when a number stops falling, and engine.step() knows none.",
                'pass it: engine.step(lr_kwargs={"metrics": loss}).',
            )
        self.lr_scheduler.step(**words)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients."""
        if self.optimizer is not None:
            self.optimizer.zero_grad()

    def was_step_applied(self) -> bool:
        """Return whether the last step() changed the weights (not inside an accumulation, not skipped)."""
        return self._stepped

    # -- accumulation

    def is_gradient_accumulation_boundary(self) -> bool:
        """Return whether the micro-batch under way is the last of its step."""
        if self._boundary is not None:
            return self._boundary
        return (self.micro_steps + 1) % self._batch.accumulation == 0

    def set_gradient_accumulation_boundary(self, is_boundary: bool) -> None:
        """Set by hand whether the next micro-batch ends a step; holds until it is set again."""
        self._boundary = is_boundary

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulate without reducing: stages 0 and 1 only, whose gradients are whole on every rank until the
        boundary.
        """
        if self.runtime.settings.stage >= 2:
            raise UsageError(
                f"no_sync is not compatible with ZeRO stage {self.runtime.settings.stage}.",
                "A sharded gradient has nowhere to wait: each rank keeps only its slice, so every backward reduces.",
                "use gradient_accumulation_steps, or stage 0 or 1.",
            )
        held, self._boundary = self._boundary, False
        try:
            yield
        finally:
            self._boundary = held

    # -- looking

    def memory_report(self) -> Any:
        """Predicted and measured bytes of this rank, by state (report.measure.MemoryReport)."""
        parked = self.parts.recompute.extents() if self.parts.recompute is not None else []
        return memory_report(self.runtime, self.optimizer, parked)

    def explain(self, picture: Path | str | None = None) -> str:
        """The plan, and where this rank's steps went since the second one: computing, waiting, updating.  Local.

        picture: where rank 0 also draws plan and schedule, as a PNG.
        """
        if picture is not None and is_rank_zero():
            places, about = places_of(plan_of(self.runtime, self.optimizer)), self.plan().partition("\n")[0]
            draw_plan(places, self.runtime.executor.schedule, picture, about)
        parked = self.parts.recompute.explain() if self.parts.recompute is not None else []
        capabilities = ["capabilities:", *(f"  {line}" for line in self.parts.capabilities.explain())]
        return "\n".join([self.plan(), *capabilities, *self._where_steps_went(), *parked])

    def _where_steps_went(self) -> list[str]:
        settings, executor, comm = self.runtime.settings, self.runtime.executor, self.runtime.comm
        advice = Advice(
            settings.ahead_numel, settings.window_numel, max(executor.sizes, default=0), comm.reads_in_place
        )
        moved = what_moved(links_of(self.runtime.comm_ctx.tiers, comm.meter))
        early = self.optimizer.speculative if self.optimizer is not None else None
        return where_steps_went(comm.meter, advice) + moved + (early.explain() if early is not None else [])

    @contextmanager
    def timeline(self) -> Iterator[Timeline]:
        """A log of the block: each collective and each transfer to or from another memory, with its times."""
        meter, tiers, seen = self.runtime.comm.meter, self.runtime.comm_ctx.tiers, Timeline()
        meter.events = seen.collectives
        tiers.record(seen.transfers)
        try:
            yield seen
        finally:
            meter.events = None
            tiers.record(None)

    def plan(self) -> str:
        """The plan of every unit and the schedule, as text."""
        lines = [f"stage {self.runtime.settings.stage}, {self.mesh.world_size} rank(s), device {self.mesh.device}"]
        lines += [line for unit in self.runtime.units for line in unit.explain()]
        return "\n".join([*lines, f"schedule: {self.runtime.executor.schedule}"])

    def destroy(self) -> None:
        """Unhook the model and free what the engine lent; calling it twice is harmless.  Collective where a checkpoint
        is being written, which is finished first.

        Rank 0 logs where its steps went, unless steps_per_print says that nothing is printed.
        """
        if not self.runtime.is_destroyed and self.observer.settings.steps_per_print and self.global_steps > 1:
            log_once("\n".join(["where the run went", *self._where_steps_went()]))
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
        return self.mesh.device
