"""One optimizer step: agree on the gradient norm, unscale and clip, update, refresh the weights."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from contextlib import closing

import torch

from ..base.device import mark_stepped
from ..comm.collectives import propagate_errors
from ..comm.pending import Pending
from ..planner.messages import MAX_IN_FLIGHT
from ..sharding.irregular_passes import reduce_late
from .inner_step import Decision
from .master_shard import tiles_by_group
from .nonfinite import NonFiniteReport
from .rank_agreement import (
    IdleReport,
    equalise_edits,
    measure_of,
    refuse_disagreement,
)
from .shard_set import ShardSet
from .step_message import StepMessage
from .verdict import StepResult, Verdict, clip_factor


class Step:
    """Runs the steps of an optimizer over its shards."""

    def __init__(self, shards: ShardSet) -> None:
        self.shards = shards
        self.runtime = shards.runtime
        self.policies = shards.policies
        self._measure = measure_of(self.runtime)
        self._idle = IdleReport(self.runtime)
        self._nonfinite = NonFiniteReport(shards)
        self._restrict_norm()

    def run(self, message: Callable[[], StepMessage], number: int) -> StepResult:
        """Update the weights from the reduced gradients, as `ShardedOptimizer.update`.

        Note:
            Collective: every rank must call it.
        """
        shards = self.shards
        scaler = shards.scaler
        shards.updater.guard.refuse_mixture()
        for policy in self.policies:
            policy.before_step()
        self._restrict_norm()
        verdict = self._agree(message)
        is_idle = verdict.flags.is_idle and bool(self.runtime.trained_groups)
        if is_idle:
            self._idle.report(verdict, number)
        overflow = not verdict.is_finite and (scaler is not None or shards.settings.check_finite)
        grad_scale = 1.0 if scaler is None else shards.grad_scale
        norm = verdict.norm / grad_scale
        result = StepResult(norm, overflow or is_idle, verdict, overflow, number)
        decision = None
        if not result.skipped:
            factor = clip_factor(norm, shards.settings.max_norm) / grad_scale
            decision = Decision(factor, shards.updater.updates + 1)
        with torch.no_grad(), propagate_errors(self.runtime.comm):
            if verdict.flags.any_edited:
                equalise_edits(self.runtime)
            if any(group.gradient.sum.absent for group in self.runtime.trained_groups):
                shards.cut_apart_absent()
            if not is_idle:
                for policy in self.policies:
                    policy.before_update(verdict)
            self.update_by(decision)
            mark_stepped(shards.inner)  # for torch's learning-rate schedules
            self.runtime.after_step(drop=not shards.settings.keep_grads or result.skipped)
            origin = None
            if not verdict.is_finite or self._nonfinite.in_a_row:
                origin = self._nonfinite.after_step(result)
            mended = [policy.after_update(result, origin) for policy in self.policies]
        rescale = 1.0
        if scaler is not None and not any(mended) and not is_idle:
            before = scaler.scale
            scaler.update(overflow)
            rescale = scaler.scale / before
        for policy in self.policies:
            policy.after_step(result, rescale)
        return result

    def _restrict_norm(self) -> None:
        """Restrict the gradient norm to the parameters that the optimizer updates."""
        updated = {id(param) for params in self.shards.params_by_group for param in params}
        for group in self.runtime.trained_groups:
            group.restrict_norm(updated)

    def _agree(self, message: Callable[[], StepMessage]) -> Verdict:
        """Reduce the gradients that are left, and agree on the norm. Every rank must call it."""
        runtime = self.runtime
        with torch.no_grad(), propagate_errors(runtime.comm):
            runtime.backward.before_step()
            extra = message()
            options = self.shards.inner.param_groups
            verdict = self._measure(runtime, options, extra)
            if verdict.facts_differ or verdict.flags.any_late:
                refuse_disagreement(self.shards, verdict)
            if verdict.flags.any_late:
                reduce_late(runtime.reductions)
                verdict = self._measure(runtime, options, extra)
        return verdict

    def update_by(self, made: Decision | None) -> None:
        """Update by this step's decision, if there is one, or by that of a policy.

        Note:
            Collective: every rank must call it.
        """
        shards = self.shards
        due = made
        for policy in self.policies:
            due = policy.due(due)
        done = set[int]()
        for policy in self.policies:
            done |= policy.conclude(due)
        for policy in self.policies:
            policy.keep(made)
        if made is not None:
            shards.updater.updates = made.number
        if due is None:
            return
        self.runtime.step.updates += 1
        for group in self.runtime.trained_groups:
            group.weight_gather.changed()
        self._update_and_refresh(due)
        for policy in self.policies:
            policy.postpone(due, done)

    def _update_and_refresh(self, due: Decision) -> None:
        """Update the tiles of this step, and all-gather the weights that are unsharded.

        The gather of one group overlaps with the update of the next, unless it `computes` on the
        CPU. A rank without a shard of a group still takes part in its gather.
        """
        tiles = self.shards.tiles.now
        pending: list[Pending] = []
        # Only a few at a time, because each keeps its message in a borrowed buffer
        computing: deque[Pending] = deque()
        left = tiles_by_group(tiles)  # the number of tiles that are not updated yet
        with closing(self.shards.updater.step_now(tiles, due)) as updates:
            for unit in self.runtime.units:
                for group in unit.trained:
                    computes = group.weight_gather.computes
                    while group in left or (left and computes):
                        left -= tiles_by_group([next(updates)])
                    if computes and len(computing) == MAX_IN_FLIGHT:
                        computing.popleft().wait()
                    under_way = computing if computes else pending
                    under_way.append(group.refresh(unit.name, is_update=True))
            for _ in updates:  # run the generator to its end
                pass
        for each in (*pending, *computing):
            each.wait()
