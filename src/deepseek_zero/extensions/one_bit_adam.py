"""The step of 1-bit Adam: after `freeze_step`, ranks exchange momenta as signs.

`optimizers/one_bit_adam.py` has the optimizer, and `momentum_exchange.py` the exchange of one
group.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from ..base.errors import UsageError
from ..comm.collectives import propagate_errors
from ..optim.param_overlap import rank_of
from ..optim.policy_state import Stepping
from ..optim.update_policy import UpdatePolicy
from ..optim.verdict import StepResult
from ..optimizers.one_bit_adam import OneBitAdam
from ..planner.spec import R
from ..sharding.param_group import ParamGroup
from .momentum_exchange import MomentumExchange, exchange_momenta, reduce_gradients


class MomentumSteps(UpdatePolicy):
    """The update policy of 1-bit Adam.

    After `freeze_step` updates, ranks exchange momenta as signs instead of reducing gradients. The
    policy starts this exchange. It ends the exchange if a checkpoint with fewer updates is loaded.
    """

    keeps_own_states = True

    def __init__(self, *, clips: bool, keeps_grads: bool, adapts_precision: bool) -> None:
        """Store the settings that `attach` checks.

        Args:
            clips: Whether the norm of gradients is clipped.
            keeps_grads: Whether gradients are kept until `zero_grad()`.
            adapts_precision: Whether units may change their precision.
        """
        self._clips = clips
        self._keeps_grads = keeps_grads
        self._adapts_precision = adapts_precision
        # A weak reference, because the optimizer holds this policy
        self._attached: Callable[[], Stepping | None] = lambda: None
        # Loaded from a checkpoint, by id of the group, until they are used
        self._own_states: dict[int, Mapping[str, Tensor]] = {}

    def attach(self, optimizer: Stepping) -> None:
        """Store the optimizer, and check the settings of the run.

        The check finds settings that do not support the exchange of momenta. The policy keeps only
        a weak reference to the optimizer.

        Args:
            optimizer: The sharded optimizer to which the policy belongs.

        Raises:
            UsageError: At least one setting does not support the exchange. The message names all
                such settings. Every rank raises the error.
        """
        self._attached = weakref.ref(optimizer)
        runtime = optimizer.runtime
        plan = runtime.settings
        groups = runtime.trained_groups
        hypers = {(each["betas"][0], each["freeze_step"]) for each in optimizer.inner.param_groups}
        found = {
            f"stage {plan.stage}": plan.stage > 1,
            "gradient_clipping": self._clips,
            "codes of gradients (zero_quantized_gradients, "
            "compression.auto)": plan.compression.codes_gradients,
            "communication_data_type": plan.policy.reduce is not None,
            "optimizer.moments": plan.policy.moments != "fp32",
            "precision 'auto'": self._adapts_precision,
            "offload_optimizer": any(group.plan.is_offloaded for group in groups),
            "ZeroOptimizer": self._keeps_grads,
            "vertical_micro_batches": plan.layerwise_micro_batches > 1,
            'ranks_per_host above 1 ("ranks_per_host": 1 goes)': any(
                group.planned.near > 1 for group in groups
            ),
            "other axes than dp_shard": runtime.comm.whole is not runtime.comm_ctx.comm,
            "several values of betas[0] or freeze_step": len(hypers) > 1,
        }
        if names := [name for name, is_there in found.items() if is_there]:
            raise UsageError(
                f"OneBitAdam cannot be used with {', '.join(names)}.",
                "From freeze_step on all ranks send each other signs of momenta, at stages 0 and "
                "1; nobody has sums of gradients.",
                "leave that out, or take Adam with zero_quantized_gradients, which goes with all "
                "of it.",
            )

    @property
    def _optimizer(self) -> Stepping:
        optimizer = self._attached()
        assert optimizer is not None
        return optimizer

    @property
    def _inner(self) -> OneBitAdam:
        inner = self._optimizer.inner
        assert isinstance(inner, OneBitAdam)
        return inner

    def refuse_joining(self, what: str, fix: str) -> None:
        """Raise `UsageError` if ranks already exchange momenta.

        A parameter that is added during the exchange would have no second moment.

        Args:
            what: The event that adds parameters. It is not used.
            fix: What the user can do. It is not used, because the error contains other advice.

        Raises:
            UsageError: Ranks exchange momenta.
        """
        if self._inner.takes_momenta:
            raise UsageError(
                "a parameter joins the optimizer behind OneBitAdam's freeze_step.",
                "It has no second moment, which is not formed any more.",
                "let it be trained from the start, or load the last checkpoint with another "
                "optimizer.",
            )

    def after_step(self, result: StepResult, rescale: float) -> None:
        """Keep or discard the exchanged momenta, and start the exchange when it is due.

        After a skipped step, the new momenta are discarded and the compression errors are set to
        zero. After `freeze_step` updates, the gradient reduction of every trained group is replaced
        by the exchange, and `takes_momenta` of the inner optimizer becomes True.

        Args:
            result: The result of the step, including whether it was skipped.
            rescale: The new loss scale divided by the old one; not used.

        Raises:
            OutOfMemoryError: The memory budget does not allow the buffers of the exchange.
            PeerError: Another rank failed.

        Note:
            Collective: every rank must call it.
        """
        for group in self._optimizer.runtime.trained_groups:
            if isinstance(group.gradient.reduction, MomentumExchange):
                group.gradient.reduction.end_step(keep=not result.skipped)
        self._follow(is_forced=False)

    def restore_own_states(self, group: ParamGroup, saved: Mapping[str, Tensor]) -> None:
        """Store the buffers of a group's exchange until all states are loaded.

        If the exchange of momenta starts after loading, it uses the buffers. Otherwise they are
        discarded.

        Args:
            group: The parameter group to which the buffers belong.
            saved: This rank's error-feedback buffers "worker" and "server", and the current
                momentum "signs". If "signs" is missing, the buffers are not used.
        """
        self._own_states[id(group)] = saved

    def states_loaded(self, rescale: float) -> None:
        self._follow(is_forced=True)

    def _follow(self, *, is_forced: bool) -> None:
        """Start or end the exchange, depending on `freeze_step`. Every rank must call it.

        Args:
            is_forced: Whether to start or end it in any case, because states have been loaded.
        """
        optimizer = self._optimizer
        runtime = optimizer.runtime
        inner = self._inner
        is_due = optimizer.updater.updates >= inner.freeze_step
        if is_due == inner.takes_momenta and not is_forced:
            return
        with torch.no_grad(), propagate_errors(runtime.comm):
            for group in runtime.trained_groups:
                if is_due and group.layout.slice_numel:
                    own = self._own_momentum(group)
                    saved = self._own_states.pop(id(group), {})
                    known = saved if "signs" in saved else {}
                    exchange_momenta(
                        group, inner.beta1, own, known, lambda: self._optimizer.loss_scale
                    )
                else:
                    reduce_gradients(group)
        inner.takes_momenta = is_due
        self._own_states.clear()
        runtime.comm_ctx.pool.clear()  # Free the buffers of gradient messages
        optimizer.scratch.drop("grads")  # momenta need no cast

    def _own_momentum(self, group: ParamGroup) -> Tensor:
        """Return this rank's flat slice of the momentum; missing states are zeros."""
        optimizer = self._optimizer
        device = optimizer.runtime.comm_ctx.pool.device
        found = torch.zeros(group.layout.slice_numel, dtype=torch.float32, device=device)
        for shard in optimizer.shards():
            if shard.group is not group or not self._inner.state.get(shard.param):
                continue
            first = shard.start
            if shard.master.placement is R:
                first -= rank_of(shard) * len(found)
            low = max(0, first)
            high = min(len(found), first + shard.numel)
            if low < high:
                momentum = optimizer.moments.read(shard, "exp_avg").reshape(-1)
                found[low:high].copy_(momentum[low - first : high - first])
        return found
