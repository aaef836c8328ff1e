"""Error feedback: add the compression errors of gradients to later ones.

The formulas are in `precision/feedback.py`.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from ..comm.pending import Pending
from ..optim.policy_state import Stepping
from ..optim.update_policy import UpdatePolicy
from ..optim.updater import Updater
from ..optim.verdict import StepResult
from ..planner.extras import feedback_of
from ..precision.feedback import Errors, Feedback
from ..sharding.buffer import FlatBuffer
from ..sharding.grad_reduction import GradReduction
from ..sharding.param_group import ParamGroup
from ..sharding.runtime import Runtime
from .replicas import SumOverReplicas


class ErrorFeedback(GradReduction):
    """A gradient reduction with error feedback.

    Each rank adds the compression errors of its earlier reductions to its gradient before the
    gradient is compressed and sent.

    Args:
        group: The parameter group whose gradients are reduced.
    """

    _errors: Errors | None = None

    def reduce(self, partial: FlatBuffer, target: FlatBuffer, what: str, *, add: bool) -> Pending:
        """Add earlier compression errors to a gradient, and start its reduction.

        The new compression errors replace the earlier ones. The first call allocates their buffer.

        Args:
            partial: This rank's partial gradient.
            target: The output, a view of `partial` at stages 0 and 1.
            what: The name of the unit, used in error messages.
            add: Whether to add the sum to the values of `target`, instead of overwriting them.

        Returns:
            A handle. `partial` and `target` may not be read or written before its `wait()` returns.
            `wait()` raises `PeerError` if another rank failed.

        Raises:
            OutOfMemoryError: The memory budget does not allow the buffer of the errors.
            UsageError: `engine.offload_states` has moved a state of the parameter group.

        Note:
            Collective: every rank of the shard group must call it in the same order.
        """
        self.group.guard.before_write()
        partial.errors = self.ensure_errors()
        return super().reduce(partial, target, what, add=add)

    def own_states(self) -> dict[str, Tensor]:
        return {} if self._errors is None else {"gradients": self._errors.memory}

    def forget(self) -> None:
        if self._errors is not None:
            self.group.guard.before_write()
            self._errors.forget()

    def restore(self, saved: Mapping[str, Tensor]) -> None:
        """Restore the compression errors from a checkpoint.

        The call allocates the buffer of the errors if there is none.

        Args:
            saved: The result of `own_states`. If it is empty, the errors are not changed.

        Raises:
            OutOfMemoryError: The memory budget does not allow the buffer of the errors.
        """
        errors = self.ensure_errors()
        if "gradients" in saved:
            errors.memory.copy_(saved["gradients"])

    def scale(self, factor: float) -> None:
        """Multiply the compression errors by a factor.

        The call has no effect before the first reduction, because there are no errors.

        Args:
            factor: The new loss scale divided by the old one.

        Raises:
            UsageError: `engine.offload_states` has moved a state of the parameter group.
        """
        if self._errors is not None:
            self.group.guard.before_write()
            self._errors.scale(factor)

    def ensure_errors(self) -> Errors:
        """Return the buffer of the compression errors.

        The first call allocates the buffer and fills it with zeros.

        Raises:
            OutOfMemoryError: The memory budget does not allow the buffer.
        """
        if self._errors is None:
            group = self.group
            feedback = feedback_of(group.plan)
            assert feedback is not None
            errors = feedback.zeros(group.planned.errors_numel, group.comm_ctx.pool.device)
            what = f"what codes leave out of gradients of {group.members[0].name}"
            group.comm_ctx.tiers.budget.reserve_for(errors, errors.memory.nbytes, what)
            self._errors = errors
        return self._errors


class ReplicatedErrorFeedback(ErrorFeedback, SumOverReplicas):
    """A gradient reduction that uses error feedback within each replica (as in HSDP).

    The sums of the replicas are then added up without error feedback.
    """


class ErrorFeedbackSteps(UpdatePolicy):
    """An update policy that keeps compression errors valid between steps.

    Errors are set to zero after a skipped step, and after every `feedback.reset_every` updates. If
    the loss scale changes, errors are multiplied by the same factor, because they are errors of
    scaled gradients.

    Args:
        feedback: The settings of error feedback.
    """

    keeps_own_states = True

    def __init__(self, feedback: Feedback) -> None:
        self._feedback = feedback
        self._runtime: Runtime
        self._updater: Updater

    def attach(self, optimizer: Stepping) -> None:
        self._runtime = optimizer.runtime
        self._updater = optimizer.updater

    def after_step(self, result: StepResult, rescale: float) -> None:
        """Reset the errors if necessary, and rescale them to a new loss scale.

        The errors are set to zero after a skipped step, and after every `feedback.reset_every`
        updates. Every rank must call the method with the same arguments, although it does not
        communicate.

        Args:
            result: The result of the step, including whether the step was skipped.
            rescale: The new loss scale divided by the old one. Errors are multiplied by this
                factor.
        """
        every = self._feedback.reset_every
        is_reset = every is not None and self._updater.updates % every == 0
        if result.skipped or is_reset:
            for reduction in self._reductions():
                reduction.forget()
        self._scale(rescale)

    def restore_own_states(self, group: ParamGroup, saved: Mapping[str, Tensor]) -> None:
        """Restore the compression errors of one parameter group from a checkpoint.

        The call has no effect if the group's gradients are reduced without error feedback.

        Args:
            group: The parameter group to which the errors belong.
            saved: This rank's errors, under the key "gradients". If it is empty, the errors are
                not changed.

        Raises:
            OutOfMemoryError: The memory budget does not allow the buffer of the errors.
        """
        if isinstance(group.gradient.reduction, ErrorFeedback):
            group.gradient.reduction.restore(saved)

    def states_loaded(self, rescale: float) -> None:
        self._scale(rescale)

    def _scale(self, factor: float) -> None:
        if factor == 1.0:
            return
        for reduction in self._reductions():
            reduction.scale(factor)

    def _reductions(self) -> list[ErrorFeedback]:
        reductions = [group.gradient.reduction for group in self._runtime.trained_groups]
        return [each for each in reductions if isinstance(each, ErrorFeedback)]
