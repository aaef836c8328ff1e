"""Runs any torch optimizer over this rank's shards of the master weights: the optimizer's step.

The optimizer that the user made, or that the registry made, keeps its class, its groups and its
hyper-parameters. Only its `params` are replaced by shards (shard_set.py). A step agrees on the
gradient norm (verdict.py), unscales and clips, updates tile by tile (updater.py) and refreshes the
weights. Policies (update_policy.py) may change when units are updated.
"""

from __future__ import annotations

import logging
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import closing
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.optim import Optimizer

from ..base.device import ScalesItself, adopt_step_hooks, tell_schedules_of_step
from ..base.errors import UsageError
from ..base.log import log_once
from ..comm.agreement import AllRanks, agree, agree_on, values_in
from ..comm.collectives import propagate_errors
from ..comm.pending import Pending
from ..optimizers.plain_steps import undecorated
from ..planner.messages import MAX_IN_FLIGHT
from ..planner.update import UpdatePlan
from ..precision.loss_scale import LossScaler
from ..sharding.runtime import Runtime
from .executor_updates import ExecutorUpdates
from .fused import are_updated_on_cpu, prefer_fused
from .initial_states import InitialStates
from .inner_states import discard_updates, load_inner, reset_states
from .nonfinite import NonFiniteReport
from .one_pass import planned_layout
from .shard_set import ShardSet, gradients_are_scaled
from .step_message import StepMessage
from .step_settings import StepSettings, clip_factor
from .twins import without_twins
from .update_policy import UpdatePolicy
from .updater import (
    Decision,
    MasterShard,
    Tiles,
    hypers_of,
)
from .verdict import StepResult, Verdict, absent_among, agree_on_norm

P = TypeVar("P", bound=UpdatePolicy)


class ShardedOptimizer(ScalesItself, Optimizer):
    """A torch optimizer over master shards. `inner` computes; `param_groups` and `state` are its
    own.
    """

    def __init__(
        self,
        runtime: Runtime,
        groups: Sequence[dict[str, Any]],
        make_inner: Callable[[list[dict[str, Any]]], Optimizer],
        settings: StepSettings,
        scaler: LossScaler | None = None,
        planned: UpdatePlan | None = None,
        initial_states: InitialStates | None = None,
        policies: Sequence[UpdatePolicy] = (),
    ) -> None:
        """planned: the optimizer's part of the plan that the model was wrapped by; None: it is
        planned here.

        initial_states: those of a client's optimizer; None: there are none. policies: what changes
        when units are updated, the same on every rank.
        """
        self.policies = tuple(policies)
        self.runtime = runtime
        self.settings = settings
        self.scaler = scaler
        groups = without_twins(groups)
        self.overflow = False
        self.steps = self._idle_steps = 0  # calls of step; those without a gradient on any rank
        watches = any(policy.watches_overflows for policy in self.policies)
        self.nonfinite = NonFiniteReport(runtime, scaler, watches=watches)
        # weak: the engine's `step_now`
        self.take_step: Callable[[], Callable[[], None] | None] = lambda: None
        self.last: StepResult | None = None
        self.last_norm = 0.0  # of the gradients of the last step that was not skipped
        self.shard_set = ShardSet(runtime, groups, settings, scaler, planned, self.policies)
        self.scratch = self.shard_set.scratch
        self.params_by_group = self.shard_set.params_by_group
        self.names_by_group = self.shard_set.names_by_group
        self.shards_by_group = self.shard_set.shards_by_group
        sliced = [
            {**group, "params": [shard.param for shard in shards]}
            for group, shards in zip(groups, self.shards_by_group, strict=True)
        ]
        with undecorated():
            self.inner = make_inner(sliced)
        self.shard_set.attach(self.inner, initial_states)
        self.moments = self.shard_set.moments
        self.updater = self.shard_set.updater
        for policy in self.policies:
            policy.attach(self)
        prefer_fused(self.inner, on_cpu=are_updated_on_cpu(runtime))
        # By its class, of which kernels depend
        self.shard_set.tiles = Tiles.of(self.plan, self.shards_by_group)
        adopt_step_hooks(self, self.inner)
        _compare_ranks(self, initial_states)
        if initial_states is not None:
            with AllRanks(runtime.comm, "taking over the state of the optimizer"):
                self.shard_set.take_initial_states()
        for group in runtime.trained_groups:
            group.optimizer = weakref.ref(self)
        self.shard_set.count_updated()
        _compile_kernels(self.shard_set)
        self._executor_updates = ExecutorUpdates(self.shard_set, weakref.ref(self))
        runtime.executor.reductions.updates = weakref.ref(self._executor_updates)

    # torch.optim.Optimizer's own attributes are the inner optimizer's; its __init__ is not called,
    # since it would insist on owning parameters.
    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return self.inner.param_groups

    @param_groups.setter
    def param_groups(self, groups: list[dict[str, Any]]) -> None:
        self.inner.param_groups = groups

    @property
    def state(self) -> Any:  # type: ignore[override]
        """Return `load_states()`: torch's name for users, the one property that does what a verb
        does; we read none.
        """
        return self.load_states()

    def load_states(self) -> dict[Tensor, dict[str, Any]]:
        """Run every deferred update, fetch offloaded moments, and return the inner optimizer's
        state, by shard.

        Shards are in their own order, whatever was updated or loaded first. Local. Raises
        `StorageError` if a disk fails, `UsageError` after an update that failed.
        """
        self.finish()
        states = self.inner.state
        for shard in self.shards():
            self.moments.load(shard, working=False)
            if shard.param in states:
                states[shard.param] = states.pop(shard.param)
        return states

    @property
    def defaults(self) -> dict[str, Any]:  # type: ignore[override]
        return self.inner.defaults

    @property
    def optimizer(self) -> Optimizer:
        """The inner optimizer, under DeepSpeed's name."""
        return self.inner

    @property
    def loss_scale(self) -> float:
        """Return the factor that losses are multiplied by now."""
        return self.scaler.scale if self.scaler is not None else 1.0

    @property
    def grad_scale(self) -> float:
        """Return the factor that what is held as gradients is multiplied by: the loss scale; 1.0 of
        momenta.
        """
        if self.scaler is None or not gradients_are_scaled(self.runtime):
            return 1.0
        return self.scaler.scale

    def policy(self, cls: type[P]) -> P | None:
        """Return the policy of that class; None without one."""
        return next((policy for policy in self.policies if isinstance(policy, cls)), None)

    def shards(self) -> list[MasterShard]:
        """Return every shard this rank updates."""
        return self.shard_set.all()

    @property
    def tiles(self) -> Tiles:
        """Return the tiles of the shards."""
        return self.shard_set.tiles

    @property
    def plan(self) -> UpdatePlan:
        """Return the shards and tiles of this rank as data, with the hyper-parameters in force."""
        return self.shard_set.plan

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Update more parameters of the wrapped model, with hyper-parameters of their own. Every
        rank, between steps.
        """
        self._executor_updates.add_group(param_group)

    # -- stepping

    def step(  # type: ignore[override]
        self,
        closure: Callable[[], float] | None = None,
        *,
        message: Callable[[], StepMessage] = StepMessage,
        number: int | None = None,
    ) -> None:
        """Update the weights from the reduced gradients. Collective.

        A call by the program (without `number`) is a step of the engine, if there is one:
        `Engine.step_now`. The other arguments are those of `update`.
        """
        if closure is not None:
            raise UsageError(
                "step(closure) is not supported by sharded optimizers.",
                "A closure would run forward and backward inside the update of one slice.",
                "call forward, backward and step() in turn.",
            )
        take_step = self.take_step() if number is None else None
        if take_step is not None:
            take_step()
        else:
            self.update(message=message, number=number)

    def update(
        self, *, message: Callable[[], StepMessage] = StepMessage, number: int | None = None
    ) -> None:
        """Update the weights from the reduced gradients, without step hooks. Collective.

        If gradients are not finite no state changes on any rank, unless check_grad_overflow is
        false.

        Args:
            message: Returns fields to send with the norm, the same on every rank; all ranks find
                them in `last.verdict.fields`. It is called once, after gradients are reduced and
                before anything has changed.
            number: The number of this step in log messages and errors. By default it is counted
                here.

        Raises:
            UsageError: A loss had no graph; on every rank.
            PeerError: Another rank failed.
        """
        self.updater.refuse_mixture()
        for policy in self.policies:
            policy.before_step()
        self.shard_set.count_updated()
        self.steps = number if number is not None else self.steps + 1
        runtime = self.runtime
        groups = self.runtime.trained_groups
        with torch.no_grad(), propagate_errors(runtime.comm):
            runtime.backward.before_step()
            extra = message()
            verdict = agree_on_norm(runtime, extra)
            _refuse_disagreement(runtime, verdict)
            if verdict.any_late:
                runtime.executor.reductions.reduce_late()
                verdict = agree_on_norm(runtime, extra)
        is_idle = verdict.is_idle and bool(groups)
        if is_idle:
            self._idle_steps += 1
            _report_idle(runtime, verdict, self.steps, self._idle_steps)
        with torch.no_grad(), propagate_errors(runtime.comm):
            if verdict.any_edited:
                for each in [group.gradient.equalise(group.members[0].name) for group in groups]:
                    each.wait()
            if any(group.gradient.sum.absent for group in groups):
                self.shard_set.cut_apart(lambda cover: cover.is_absent)
            scale = self.grad_scale
            self.overflow = not verdict.is_finite and (
                self.scaler is not None or self.settings.check_finite
            )
            skip = self.overflow or is_idle
            factor = clip_factor(verdict.norm / scale, self.settings.max_norm) / scale
            if not is_idle:
                for policy in self.policies:
                    policy.before_update(verdict)
            keeps = any(policy.keeps_decisions for policy in self.policies)
            hypers = hypers_of(self.inner) if keeps else None
            made = None
            if not skip:
                made = Decision(factor, self.updater.updates + 1, hypers)
            self._conclude(made)
            tell_schedules_of_step(self.inner)
            result = StepResult(verdict.norm / scale, skip, verdict, self.overflow, self.steps)
            self.last = result
            self.last_norm = self.last_norm if skip else result.norm
            runtime.after_step(drop=not self.settings.keep_grads or skip)
            origin = None
            if not verdict.is_finite or self.nonfinite.in_a_row:
                origin = self.nonfinite.after_step(
                    verdict.by_group,
                    is_finite=verdict.is_finite,
                    skipped=self.overflow,
                    step=self.steps,
                )
            is_mended = False
            for policy in self.policies:
                is_mended |= policy.after_update(result, origin)
        scale_before = self.loss_scale
        if self.scaler is not None and not is_mended and not is_idle:
            self.scaler.update(self.overflow)
        for policy in self.policies:
            policy.after_step(result, self.loss_scale / scale_before)

    def _conclude(self, made: Decision | None) -> None:
        """Carry out the decision that is due: of this step, unless a policy has another one."""
        due = made
        for policy in self.policies:
            due = policy.due(due)
        done = set[int]()
        for policy in self.policies:
            done |= policy.conclude(due)
        for policy in self.policies:
            policy.keep(made)
        if made is not None:
            self.updater.updates = made.number
        if due is None:
            return
        for group in self.runtime.trained_groups:
            group.weight_gather.changed()
        self._update_and_refresh(due)
        later = [
            tile for unit, tiles in self.tiles.later.items() if unit not in done for tile in tiles
        ]
        for policy in self.policies:
            policy.postpone(later, due)

    def _update_and_refresh(self, due: Decision) -> None:
        """Update what is due now, and bring it to all ranks that hold it whole: a group's
        weights are under way while the next one is updated, unless a refresh needs the core itself.

        In unit order on every rank: a rank may own no shard of a group and still takes part in its
        gather.
        """
        pending: list[Pending] = []
        # Few at a time: each has its message in a lent buffer
        computing: deque[Pending] = deque()
        left = {shard.group for tile in self.tiles.now for _, shard in tile}
        with closing(self.updater.step_now(self.tiles.now, due)) as updates:
            for unit in self.runtime.units:
                for group in unit.trained:
                    computes = group.weight_gather.computes
                    while group in left or (left and computes):
                        left -= next(updates)
                    if computes and len(computing) == MAX_IN_FLIGHT:
                        computing.popleft().wait()
                    under_way = computing if computes else pending
                    under_way.append(group.refresh(unit.name, is_update=True))
            for _ in updates:  # to its end
                pass
        for each in (*pending, *computing):
            each.wait()

    def finish(self) -> None:
        """Bring every state to where the last step leaves it: updates that are still to come run,
        and those that came before their step are undone. Local.
        """
        self.shard_set.finish()

    def flush(self) -> None:
        """Run the update that a step has left to the next one, if there is one; between two steps.
        Collective.
        """
        if not any(policy.owes_update for policy in self.policies):
            return
        if self.runtime.step.backwards:
            raise UsageError(
                "flush was called between a backward and its step.",
                "The gradient that is owed would take the place of the one collected so far.",
                "call it after step().",
            )
        self.finish()
        with torch.no_grad(), propagate_errors(self.runtime.comm):
            self.runtime.comm.barrier("flush")  # no rank computes with the weights any more
            self._conclude(None)
            self.runtime.backward.drop_grads()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients. Local."""
        self.runtime.backward.discard_step()

    def state_dict(self) -> dict[str, Any]:
        """Return this rank's state as the inner optimizer has it; engine checkpoints name it by
        parameter and hold the delayed update too.
        """
        self.load_states()
        scaler = self.scaler.state_dict() if self.scaler else None
        stretches = [
            [(shard.names[0], shard.start, shard.stop) for shard in shards]
            for shards in self.shards_by_group
        ]
        counts = {"updates": self.updater.updates, "steps": self.steps}
        inner = type(self.inner).state_dict(self.inner)  # past a class that overrides it
        return {"inner": inner, "scaler": scaler, **counts, "stretches": stretches}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load a `state_dict` of the same rank, world size and stage."""
        discard_updates(self.shard_set)
        self.updater.updates = int(state["updates"])
        self.steps = int(state.get("steps", self.updater.updates))
        reset_states(self.shard_set)
        self.shard_set.cut_as(state.get("stretches"))
        load_inner(self.shard_set, state["inner"])
        if self.scaler is not None and state.get("scaler") is not None:
            self.scaler.load_state_dict(state["scaler"])

    def __repr__(self) -> str:
        return f"ShardedOptimizer({self.inner!r})"


def _compare_ranks(optimizer: ShardedOptimizer, initial_states: InitialStates | None) -> None:
    """Raise on every rank if ranks differ in how they will step; numbers of shards may differ.
    Collective.
    """
    values = values_in(optimizer.settings, "step")
    if optimizer.scaler is not None:
        values |= values_in(optimizer.scaler.settings, "loss scaling")
    values["optimizer"] = type(optimizer.inner).__name__
    for number, group in enumerate(optimizer.inner.param_groups):
        for key, value in group.items():
            if isinstance(value, (bool, int, float, str, tuple)):
                values[f"{key} of parameter group {number}"] = value
    if initial_states is not None:
        for number, line in enumerate(initial_states.describe()):
            values[f"initial state {number}"] = line
    agree_on(
        optimizer.runtime.comm,
        values,
        "their optimizer",
        "Each rank updates its slices of the same tensors, so one rule must hold for all.",
        "build the optimizer and the configuration from the same arguments on every rank.",
    )


def _compile_kernels(shard_set: ShardSet) -> None:
    """Compile the kernels of all shards. Local."""
    for group, shards in zip(shard_set.inner.param_groups, shard_set.shards_by_group, strict=True):
        kinds = {
            (planned_layout(shard.group.plan), shard.master.update_device): shard.group.plan
            for shard in shards
            if shard.has_kernel
        }
        for (_, device), plan in kinds.items():
            shard_set.updater.one_pass.compile(plan, group, device)


def _report_idle(runtime: Runtime, verdict: Verdict, step: int, idle_steps: int) -> None:
    """Report that no rank has a gradient: raise `UsageError` on all if a loss had no graph,
    else warn; nothing is updated.
    """
    if verdict.any_graphless:
        runtime.backward.discard_step()
        raise UsageError(
            f"step {step}: no rank's loss required a gradient, so there is nothing to update with.",
            "The loss was computed under torch.no_grad(), detached, or made of parameters that "
            "are frozen.",
            "compute it from the model's outputs with gradients on; a rank alone may be without.",
        )
    if idle_steps & (idle_steps - 1) == 0:  # the 1st, 2nd, 4th, 8th, ...
        log_once(
            f"step {step}: no gradient has reached the model since the last step, on any "
            "rank, so nothing was updated.\n  What to do: call backward before step(); leave "
            "out both where a batch is passed over.",
            logging.WARNING,
        )


def _refuse_disagreement(runtime: Runtime, verdict: Verdict) -> None:
    """Raise on every rank, before any state has changed, if ranks assigned to `.grad` what has
    no common meaning.
    """
    if len(set(verdict.absences)) > 1:
        agree(
            runtime.comm,
            absent_among(runtime.trained_groups) or ["none"],
            "which parameters have no gradient",
            "A parameter is frozen, or its gradient dropped (`grad = None`, zero_grad), on all "
            "ranks or on none: each rank updates its slices of the same tensors.",
            "decide it from what all ranks know (the step, an all-reduced loss), the same "
            "everywhere.",
        )
    if verdict.any_edited and verdict.any_late:
        raise UsageError(
            "gradients were changed in a step in which some came after their sum.",
            "They are added now, behind what the program saw when it changed them.",
            "use a block's parameters in one checkpoint (or none) of the forward, or leave the "
            "gradients as they are.",
        )
