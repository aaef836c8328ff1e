"""Run any PyTorch optimizer over this rank's shards of the main weights.

The inner optimizer keeps its class and hyper-parameters; only its `params` are replaced by shards.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable

from .rank_agreement import compare_optimizers
from .shard_set import ShardSet
from .step import Step
from .step_message import StepMessage
from .torch_interface import TorchInterface, no_closure
from .verdict import StepResult


class ShardedOptimizer(TorchInterface):
    """A torch optimizer over shards of the main weights.

    `inner` computes the updates; `TorchInterface` forwards attributes to it. `shard_set` cuts the
    main weights of this rank into shards, combines them into tiles, and has the objects that
    update them: `moments` (the states of `inner`), `updater`, and the buffers in `scratch`.

    Attributes:
        steps: The number of calls of `step`.
        last: The result of the last step.
        last_norm: The gradient norm of the last step that was not skipped.
    """

    def __init__(self, shards: ShardSet) -> None:
        """Start the optimizer over the shards of this rank.

        Args:
            shards: The shards, over which the inner optimizer was built.

        Note:
            Collective: every rank must call it.
        """
        super().__init__(shards)
        self.steps = 0
        self.last: StepResult | None = None
        self.last_norm = 0.0
        self.overflow = False
        for policy in self.policies:
            policy.attach(self)
            policy.tiles_changed(shards.tiles)
        compare_optimizers(shards)
        shards.take_initial_states()
        for group in self.runtime.trained_groups:
            group.optimizer = weakref.ref(self)
        self._step = Step(shards)
        shards.compile_kernels()
        self.runtime.added_params = weakref.ref(self._added_params)

    def step(  # type: ignore[override]
        self,
        closure: Callable[[], float] | None = None,
        *,
        message: Callable[[], StepMessage] = StepMessage,
        number: int | None = None,
    ) -> None:
        """Update the weights from the reduced gradients.

        If an engine owns the optimizer, a call without `number` is a step of that engine.

        Args:
            closure: Must be None, because a closure would run a forward during the update.
            message: As in `update`.
            number: As in `update`.

        Note:
            Collective: every rank must call it.
        """
        if closure is not None:
            raise no_closure()
        take_step = self.take_step() if number is None else None
        if take_step is not None:
            take_step()
        else:
            self.update(message=message, number=number)

    def update(self, *, message: Callable[[], StepMessage], number: int | None) -> None:
        """Update the weights from the reduced gradients, without step hooks.

        If gradients are not finite, no state changes on any rank, unless `check_grad_overflow` is
        false.

        Args:
            message: A function that returns values to send to all ranks together with the gradient
                norm; every rank must use the same field names. The received values are in
                `last.verdict.fields`. It is called once, after gradients are reduced and before any
                state has changed.
            number: The number of this step in log messages and errors. None uses the number of
                steps of this optimizer.

        Raises:
            UsageError: No rank has a gradient, and a loss had no graph; raised on every rank.
            PeerError: Another rank failed.

        Note:
            Collective: every rank must call it.
        """
        self.steps = number if number is not None else self.steps + 1
        self.last = self._step.run(message, self.steps)
        self.overflow = self.last.overflow
        if not self.last.skipped:
            self.last_norm = self.last.norm
