"""Runs any torch optimizer over this rank's shards of the master weights.

The optimizer the user made, or one the registry made, keeps its class, its groups and its
hyper-parameters; only its `params` are replaced by shards.  Owns the step: verdict, unscaling,
clipping, tile by tile update, refresh of the weights.

The verdict is what every rank must agree on before a step: the global gradient norm, and whether it
is finite.  Norms are sums of squares per (group, slice) in float64, exchanged in one all-gather
(step_message.py) and added in one order, so that every stage and every rank computes the same bits.
The same message carries the engine's fields: preemption signal, step timings, memory checksums.
"""

from __future__ import annotations

import logging
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ..base.device import CPU, PerDevice, ScalesItself, adopt_step_hooks, tell_schedules_of_step
from ..base.errors import NotBuiltError, UsageError
from ..base.log import log_once
from ..comm.agreement import AllRanks, agree, agree_on, values_in
from ..comm.collectives import Pending, propagate_errors
from ..kernels import cuda
from ..kernels.check import pytorch_differs
from ..kernels.compiler import available, chosen
from ..kernels.rules import NAMES
from ..optimizers.plain_steps import undecorated
from ..optimizers.registry import granularity_of
from ..planner.layout import MAX_IN_FLIGHT
from ..planner.split import split_of
from ..planner.update import ParamGroupPlan, ShardRange, UpdatePlan, UpdateSettings, shard_ranges
from ..precision.compact import StochasticRounding
from ..precision.loss_scale import LossScaler
from ..sharding.param_group import ParamGroup
from ..sharding.runtime import Runtime
from ..sharding.sharded_parameter import owner_of
from ..sharding.ties import without_twins
from ..sharding.unit import Unit
from .initial_states import InitialStates, makes_states, states_at_construction
from .nonfinite import NonFiniteReport
from .one_pass import planned_layout
from .step_message import StepMessage
from .update_policy import UpdatePolicy
from .updater import (
    Decision,
    MasterShard,
    Moments,
    ParamOverlap,
    PrefetchSettings,
    Scratch,
    Tiles,
    Updater,
    cuts_of,
    hypers_of,
)
from .verdict import StepResult, Verdict, absent_among, agree_on_norm

P = TypeVar("P", bound=UpdatePolicy)
# Elements per optimizer call (4 MiB of fp32 on the CPU): what is touched at once, and what is kept
# for it, stays small, and the call itself is a few per cent of its time.
TILE_NUMEL = PerDevice(cpu=1 << 20, accelerator=1 << 26)
# The same for a kernel on a CPU: 16 threads then get a million elements each.
KERNEL_TILE_NUMEL = 1 << 24
TILE_ALIGNMENT = 1 << 12  # elements; tiles end where pages do, whatever the size of an element
FUSED = (torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD, torch.optim.Adagrad)


@dataclass(frozen=True)
class StepSettings:
    """The settings of a step. tile_numel: elements per optimizer call on the training device
    (sub_group_size).
    host_tile_numel: elements per call where the host updates. kernel_tile_numel: the same where a
    kernel updates states in memory. can_defer: updates of offloaded weights may run after the step,
    by a policy. by_unit: tiles end where units do, since a policy updates some units in backward.
    undo_bytes: for the log that undoes such updates.
    """

    max_norm: float = 0.0
    tile_numel: int = TILE_NUMEL.cpu
    host_tile_numel: int = TILE_NUMEL.cpu
    kernel_tile_numel: int = KERNEL_TILE_NUMEL
    granularity: tuple[str, ...] = ()  # one word per parameter group; "element" where there is none
    check_finite: bool = False
    keep_grads: bool = False
    flow: PrefetchSettings = field(default_factory=PrefetchSettings)
    can_defer: bool = False
    by_unit: bool = False
    undo_bytes: int = 0
    kernels: str = "auto"  # what computes updates that have a kernel: "auto", "numba" or "torch"

    @property
    def clips(self) -> bool:
        """Whether the norm of gradients is bounded."""
        return self.max_norm > 0


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
        self.uncut = whole = [
            number < len(settings.granularity) and settings.granularity[number] != "element"
            for number in range(len(groups))
        ]
        if planned is None:
            relayout_whole(
                runtime, [group for group, uncut in zip(groups, whole, strict=True) if uncut]
            )
        self.scratch = Scratch(runtime.comm_ctx.pool.device, budget=runtime.comm_ctx.tiers.budget)
        self.params_by_group: list[list[nn.Parameter]] = [list(group["params"]) for group in groups]
        self.names_by_group = list(map(trained_names, self.params_by_group))
        if planned is not None:
            self.shards_by_group = self._built(planned)
        else:
            unknown = self._update_settings("", groups)
            self.shards_by_group = [
                self._cut(group["params"], uncut, unknown)
                for group, uncut in zip(groups, whole, strict=True)
            ]
        planned = planned or self._planned("", groups)  # by what class is not known yet
        self.tiles = Tiles.of(planned, self.shards_by_group)
        self.scratch.grow(planned.fullest_tiles)
        self._reserve_staging(planned)
        slices = [[shard.param for shard in shards] for shards in self.shards_by_group]
        with undecorated():
            self.inner = make_inner(
                [{**group, "params": own} for group, own in zip(groups, slices, strict=True)]
            )
        self._initial_states = initial_states
        # Adagrad
        self._has_states_at_construction = initial_states is not None or makes_states(self.inner)
        self.moments = Moments(self.inner, self.scratch)
        self.updater = Updater(
            self.inner, self.scratch, self.moments, settings.flow, runtime.comm.meter.clock
        )
        for policy in self.policies:
            policy.attach(self)
        self._prefer_fused()
        # By its class, of which kernels depend
        self.tiles = Tiles.of(self.plan, self.shards_by_group)
        adopt_step_hooks(self, self.inner)
        self._compare_ranks()
        if initial_states is not None:
            with AllRanks(runtime.comm, "taking over the state of the optimizer"):
                self.shards_by_group = [
                    self._with_initial_states(shards) for shards in self.shards_by_group
                ]
                self._plan_work()
                initial_states.release_trained()
        for group in runtime.trained_groups:
            group.optimizer = weakref.ref(self)
        self._count_updated()
        self._compile_kernels()
        runtime.executor.reductions.updates = weakref.ref(self)

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
        return 1.0 if self.scaler is None or self._holds_momenta else self.scaler.scale

    @property
    def _holds_momenta(self) -> bool:
        """Return whether what is held as gradients are momenta (OneBitAdam), which are exchanged
        without a scale.
        """
        return any(not group.gradient.reduction.is_scaled for group in self.runtime.trained_groups)

    def policy(self, cls: type[P]) -> P | None:
        """Return the policy of that class; None without one."""
        return next((policy for policy in self.policies if isinstance(policy, cls)), None)

    def shards(self) -> list[MasterShard]:
        """Return every shard this rank updates."""
        return [shard for shards in self.shards_by_group for shard in shards]

    @property
    def plan(self) -> UpdatePlan:
        """Return the shards and tiles of this rank as data, with the hyper-parameters in force."""
        return self._planned(type(self.inner).__name__, self.param_groups)

    def explain(self) -> list[str]:
        """Return the line of `engine.explain` about what computes updates."""
        shards = self.shards()
        name = type(self.inner).__name__
        rules = [self.updater.one_pass.rule(group) for group in self.param_groups]
        count = sum(
            shard.has_kernel and rule is not None
            for of_group, rule in zip(self.shards_by_group, rules, strict=True)
            for shard in of_group
        )
        if refused := self.updater.one_pass.refused:
            return [
                f"updates: {name} by PyTorch: no exact kernel of {refused} can be compiled on this "
                "machine"
            ]
        if shards and count == len(shards):
            return [f"updates: {name} by compiled kernels, in one pass over memory"]
        plan = self.plan
        if not any(rules):
            why = f"there is no kernel for {name} with these options"
        elif (
            plan.device != CPU
            and plan.settings.gpu_kernels
            and cuda.why_not(plan.device) is not None
        ):
            why = (
                f"no kernel can be compiled for {plan.device}, because {cuda.why_not(plan.device)}"
            )
        elif plan.settings.kernels == "torch" and available(self.settings.kernels) == "torch":
            why = "numba is not installed, or kernels are switched off"
        elif plan.settings.kernels == "torch":
            why = "PyTorch's own fused update has other bits on this CPU than the kernels"
        elif plan.kernels == "torch":
            why = "this rank updates so few elements that compiling kernels is not worth it"
        else:
            why = "there is no kernel for how the others are stored, or for where they are updated"
        return [
            f"updates: {name} by PyTorch for {len(shards) - count} of {len(shards)} shards: {why}"
        ]

    def _update_settings(
        self, optimizer: str, groups: Sequence[Mapping[str, Any]]
    ) -> UpdateSettings:
        options = [
            {key: value for key, value in group.items() if key != "params"} for group in groups
        ]
        chosen = [
            ParamGroupPlan(each, frozenset(names), uncut)
            for each, names, uncut in zip(options, self.names_by_group, self.uncut, strict=True)
        ]
        scales = self.settings.clips or (self.scaler is not None and not self._holds_momenta)
        undoes = any(policy.undoes for policy in self.policies)
        settings = update_settings_of(
            self.settings, optimizer, chosen, scales_grads=scales, undoes=undoes
        )
        return replace(settings, crosses_hosts=self.runtime.machine.spans_hosts)

    def _planned(self, optimizer: str, groups: Sequence[Mapping[str, Any]]) -> UpdatePlan:
        settings = self._update_settings(optimizer, groups)
        ranges = [[shard.planned for shard in shards] for shards in self.shards_by_group]
        units = [unit.planned for unit in self.runtime.units]
        return UpdatePlan.of(settings, ranges, units, self.runtime.comm_ctx.pool.device)

    def _compare_ranks(self) -> None:
        """Raise on every rank if ranks differ in how they will step; numbers of shards may differ.
        Collective.
        """
        values = values_in(self.settings, "step")
        values |= values_in(
            self.scaler.settings if self.scaler is not None else None, "loss scaling"
        )
        values["optimizer"] = type(self.inner).__name__
        for number, group in enumerate(self.inner.param_groups):
            for key, value in group.items():
                if isinstance(value, (bool, int, float, str, tuple)):
                    values[f"{key} of parameter group {number}"] = value
        for number, line in enumerate(
            self._initial_states.describe() if self._initial_states is not None else []
        ):
            values[f"initial state {number}"] = line
        agree_on(
            self.runtime.comm,
            values,
            "their optimizer",
            "Each rank updates its slices of the same tensors, so one rule must hold for all.",
            "build the optimizer and the configuration from the same arguments on every rank.",
        )

    def _prefer_fused(self) -> None:
        masters = [group.master for group in self.runtime.trained_groups]
        prefer_fused(
            self.inner,
            on_cpu=all(each is None or each.update_device == CPU for each in masters),
        )

    def _compile_kernels(self) -> None:
        """Compile the kernels of all shards. Local."""
        for group, shards in zip(self.inner.param_groups, self.shards_by_group, strict=True):
            kinds = {
                (planned_layout(shard.group.plan), shard.master.update_device): shard.group.plan
                for shard in shards
                if shard.has_kernel
            }
            for (_, device), plan in kinds.items():
                self.updater.one_pass.compile(plan, group, device)

    # -- cutting

    def _built(self, planned: UpdatePlan) -> list[list[MasterShard]]:
        """Build the shards of a plan, by parameter group."""
        groups = {id(group.planned): group for group in self.runtime.trained_groups}
        return [
            [self._shard(groups[id(each.group)], each) for each in ranges]
            for ranges in planned.shards
        ]

    def _cut(
        self, params: Iterable[nn.Parameter], uncut: bool, settings: UpdateSettings
    ) -> list[MasterShard]:
        """Cut one parameter group into shards: neighbours merged, cut into tiles; whole tensors if
        the optimizer needs them.
        """
        wanted: dict[int, tuple[ParamGroup, list[int]]] = {}
        known = {id(group) for group in self.runtime.groups}
        for param in params:
            owner = owner_of(param)
            if not isinstance(owner, ParamGroup) or id(owner) not in known:
                raise unknown_parameter(param)
            if owner.trainable:
                wanted.setdefault(id(owner), (owner, []))[1].append(owner.index[id(param)])
        shards: list[MasterShard] = []
        for group in self.runtime.trained_groups:
            if id(group) in wanted:
                names = frozenset(group.members[number].name for number in wanted[id(group)][1])
                rank = self.runtime.comm_ctx.comm.rank
                tile_numel = settings.tile_numel_of(group.plan)
                for span in shard_ranges(group.planned, rank, names, tile_numel, uncut):
                    shards.append(self._shard(group, span))
        return shards

    # -- when parameters are frozen and unfrozen (sharding/executor.py, Updates)

    def refuse_regrouping(self) -> None:
        """Raise if updates are under way that an unfrozen parameter could not join."""
        for policy in self.policies:
            policy.refuse_joining(
                "a parameter that was frozen when the model was wrapped was unfrozen",
                "wrap the model with that parameter trained and freeze it then, or leave both keys "
                "out.",
            )

    def after_reduce(self, unit: Unit) -> None:
        """Note that a unit's gradient has been reduced. Local."""
        for policy in self.policies:
            policy.after_reduce(unit)

    def regroup(self, groups: Sequence[ParamGroup]) -> None:
        """Update the parameters of these groups too, each in the parameter group it was given
        in.
        """
        self.finish()
        new = {id(group) for group in groups if group.trainable}
        for number, params in enumerate(self.params_by_group):
            self._take(number, [param for param in params if id(owner_of(param)) in new])
        self._plan_work()
        for group in groups:
            group.optimizer = weakref.ref(self) if group.trainable else group.optimizer
        known = {id(param) for params in self.params_by_group for param in params}
        members = [member for group in groups if group.trainable for member in group.members]
        if strangers := [member.name for member in members if id(member.param) not in known]:
            log_once(
                f"'{strangers[0]}' and {len(strangers) - 1} more parameters were unfrozen and are "
                "in no group of the optimizer: they get gradients and are not updated.  Give it "
                "all parameters, or add_param_group.",
                logging.WARNING,
            )

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Update more parameters of the wrapped model, with hyper-parameters of their own. Every
        rank, between steps.
        """
        given = param_group["params"]
        (group,) = without_twins(
            [{**param_group, "params": [given] if isinstance(given, Tensor) else list(given)}]
        )
        names = {id(param) for params in self.params_by_group for param in params}
        if any(id(param) in names for param in group["params"]):
            raise UsageError(
                "some parameters appear in more than one parameter group.",
                "Each element is updated once, by the hyper-parameters of one group.",
                "give add_param_group parameters that the optimizer does not have.",
            )
        for policy in self.policies:
            policy.refuse_joining(
                "add_param_group() was called",
                "give the optimizer all its parameter groups before the model is wrapped, or leave "
                "both keys out.",
            )
        self.finish()
        self.uncut.append(granularity_of(self.inner, group) != "element")
        self.params_by_group.append(group["params"])
        self.shards_by_group.append([])
        self.names_by_group.append([])
        self.inner.add_param_group({**group, "params": []})
        self._prefer_fused()
        self._take(len(self.params_by_group) - 1, group["params"])
        self._plan_work()

    def _count_updated(self) -> None:
        """Restrict the gradient norm to the parameters that this optimizer updates. Local."""
        updated = {id(param) for params in self.params_by_group for param in params}
        for group in self.runtime.trained_groups:
            group.follow_optimizer(updated)

    def _take(self, number: int, params: Sequence[nn.Parameter]) -> None:
        """Add parameters to one of the user's groups."""
        if not params:
            return
        if self.uncut[number]:
            refuse_parts(type(self.inner).__name__, zip(trained_names(params), params, strict=True))
            relayout_whole(self.runtime, [{"params": params}])
        settings = self._update_settings(type(self.inner).__name__, self.param_groups)
        shards = self._with_initial_states(self._cut(params, self.uncut[number], settings))
        self.shards_by_group[number] = [*self.shards_by_group[number], *shards]
        self.names_by_group[number] = trained_names(self.params_by_group[number])
        self._add_missing_states(number, shards)

    def _with_initial_states(self, shards: Sequence[MasterShard]) -> list[MasterShard]:
        """Return new shards, cut where counters differ, after they got the state of the client's
        optimizer. Local.
        """
        states = self._initial_states
        if states is None:
            return list(shards)
        found = list[MasterShard]()
        for shard in shards:
            spans = cuts_of(shard, states.counters)
            found += self._parts_of(shard, spans if len(spans) > 1 else None)
        for shard in found:
            if values := states.cut_for(shard):
                self.inner.state[shard.param] = values
                self.moments.offload(shard, StochasticRounding(0))
        return found

    def _add_missing_states(self, number: int, shards: Sequence[MasterShard]) -> None:
        """Create the state of these shards of a group if the class creates state at construction.
        Local.
        """
        without = [shard.param for shard in shards if not self.inner.state.get(shard.param)]
        if self._has_states_at_construction and without:
            group = {**self.inner.param_groups[number], "params": without}
            self.inner.state.update(states_at_construction(self.inner, group))

    def state_of_first_step(self, shard: MasterShard) -> dict[str, Any]:
        """Return the state that the inner optimizer makes for a shard in its first step. Local."""
        number = next(
            number for number, shards in enumerate(self.shards_by_group) if shard in shards
        )
        return self.updater.state_of_first_step(shard, number)

    def add_missing_states(self) -> None:
        """Add the state from construction for shards without a state in the checkpoint. Local."""
        for number, shards in enumerate(self.shards_by_group):
            self._add_missing_states(number, shards)

    def _shard(self, group: ParamGroup, span: ShardRange) -> MasterShard:
        assert group.master is not None
        values = (
            None
            if group.master.is_copied_for_update
            else group.master.in_place_view(span.start, span.stop)
        )
        if values is None:
            values = self.scratch.placeholder(
                torch.Size(span.shape), group.master.dtype, group.master.update_device
            )
        return MasterShard(
            group, span.start, span.stop, nn.Parameter(values.view(span.shape)), span.names
        )

    def cut_apart(self, apart: Callable[[ParamOverlap], Any]) -> None:
        """Cut shards whose parameters differ in `apart`, so that each part has its own counters and
        may be updated alone.

        Local; values and moments keep their bits.
        """
        cuts = {shard: spans for shard in self.shards() if len(spans := cuts_of(shard, apart)) > 1}
        if not cuts:
            return
        self.finish()
        for shard in cuts:
            self.moments.refuse_cut(shard)
        for number, shards in enumerate(self.shards_by_group):
            self.shards_by_group[number] = [
                each for shard in shards for each in self._parts_of(shard, cuts.get(shard))
            ]
        self._plan_work()

    def _parts_of(self, shard: MasterShard, spans: list[ShardRange] | None) -> list[MasterShard]:
        if spans is None:
            return [shard]
        parts = [self._shard(shard.group, span) for span in spans]
        self.moments.cut(shard, parts)
        return parts

    def _plan_work(self) -> None:
        """Plan the tiles anew after shards have changed."""
        for group, shards in zip(self.inner.param_groups, self.shards_by_group, strict=True):
            group["params"] = [shard.param for shard in shards]
        planned = self.plan
        self.tiles = Tiles.of(planned, self.shards_by_group)
        self.scratch.grow(planned.fullest_tiles)
        self._reserve_staging(planned)
        for policy in self.policies:
            policy.tiles_changed(self.tiles)

    def _reserve_staging(self, planned: UpdatePlan) -> None:
        """Reserve staging memory for all tiles that are copied at the same time.

        One more tile covers the end of the ring, where a tile may not fit.
        """
        flow = self.settings.flow
        tiles = flow.ahead + 1 + flow.behind + 1
        self.runtime.comm_ctx.copy_engine.reserve_staging(planned.staging_bytes(tiles))

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
        self._count_updated()
        self.steps = number if number is not None else self.steps + 1
        runtime = self.runtime
        groups = self.runtime.trained_groups
        with torch.no_grad(), propagate_errors(runtime.comm):
            runtime.before_step()
            extra = message()
            verdict = agree_on_norm(runtime, extra)
            self._refuse_differences(verdict)
            if verdict.any_late:
                runtime.executor.reductions.reduce_late()
                verdict = agree_on_norm(runtime, extra)
        is_idle = verdict.is_idle and bool(groups)
        if is_idle:
            self._report_idle(verdict)
        with torch.no_grad(), propagate_errors(runtime.comm):
            if verdict.any_edited:
                for each in [group.gradient.equalise(group.members[0].name) for group in groups]:
                    each.wait()
            if any(group.gradient.absent for group in groups):
                self.cut_apart(lambda cover: cover.is_absent)
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
            self._conclude(None if skip else Decision(factor, self.updater.updates + 1, hypers))
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

    def _report_idle(self, verdict: Verdict) -> None:
        """Report that no rank has a gradient: raise `UsageError` on all if a loss had no graph,
        else warn; nothing is updated.
        """
        if verdict.any_graphless:
            self.zero_grad()
            raise UsageError(
                f"step {self.steps}: no rank's loss required a gradient, so there is nothing to "
                "update with.",
                "The loss was computed under torch.no_grad(), detached, or made of parameters that "
                "are frozen.",
                "compute it from the model's outputs with gradients on; a rank alone may be "
                "without.",
            )
        self._idle_steps += 1
        if self._idle_steps & (self._idle_steps - 1) == 0:  # the 1st, 2nd, 4th, 8th, ...
            log_once(
                f"step {self.steps}: no gradient has reached the model since the last step, on any "
                "rank, so nothing was updated.\n  What to do: call backward before step(); leave "
                "out both where a batch is passed over.",
                logging.WARNING,
            )

    def _refuse_differences(self, verdict: Verdict) -> None:
        """Raise on every rank, before any state has changed, if ranks assigned to `.grad` what has
        no common meaning.
        """
        if len(set(verdict.absences)) > 1:
            agree(
                self.runtime.comm,
                absent_among(self.runtime.trained_groups) or ["none"],
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
            group.weights_changed()
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
        self.updater.refuse_mixture()
        for policy in self.policies:
            policy.finish()

    def flush(self) -> None:
        """Run the update that a step has left to the next one, if there is one; between two steps.
        Collective.
        """
        if not any(policy.owes_update for policy in self.policies):
            return
        if self.runtime.backwards:
            raise UsageError(
                "flush was called between a backward and its step.",
                "The gradient that is owed would take the place of the one collected so far.",
                "call it after step().",
            )
        self.finish()
        with torch.no_grad(), propagate_errors(self.runtime.comm):
            self.runtime.comm.barrier("flush")  # no rank computes with the weights any more
            self._conclude(None)
            self.runtime.drop_grads()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients. Local."""
        self.runtime.discard_step()

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
        inner = type(self.inner).state_dict(self.inner)  # its own: compat/deepspeed shows another
        return {"inner": inner, "scaler": scaler, **counts, "stretches": stretches}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load a `state_dict` of the same rank, world size and stage."""
        discard_updates(self)
        self.updater.updates = int(state["updates"])
        self.steps = int(state.get("steps", self.updater.updates))
        reset_states(self)
        self._cut_as(state.get("stretches"))
        self.load_inner(state["inner"])
        if self.scaler is not None and state.get("scaler") is not None:
            self.scaler.load_state_dict(state["scaler"])

    def _cut_as(self, stretches: list[list[tuple[str, int, int]]] | None) -> None:
        """Cut shards as a state dict has them: some were cut, and have counters of their own. No
        state may be there yet.
        """
        owners = {
            member.name: group for group in self.runtime.trained_groups for member in group.members
        }
        for number, saved in enumerate(stretches or ()):
            here = {
                (shard.names[0], shard.start, shard.stop): shard
                for shard in self.shards_by_group[number]
            }
            shards = []
            for name, start, stop in saved:
                shard = here.get((name, start, stop))
                if shard is None:
                    span = ShardRange(owners[name].planned, start, stop, (name,), (stop - start,))
                    shard = self._shard(owners[name], span)
                    shard.names = tuple(cover.slot.name for cover in shard.overlaps())
                shards.append(shard)
            self.shards_by_group[number] = shards
        self._plan_work()

    def load_inner(self, state: dict[str, Any]) -> None:
        """Load states into the inner optimizer, and offload them to their tiers; shards without an
        entry keep theirs.
        """
        kept = dict(self.inner.state)
        with undecorated():
            type(self.inner).load_state_dict(self.inner, state)
        loaded = set(self.inner.state)
        self.inner.state.update(
            {param: each for param, each in kept.items() if param not in loaded}
        )
        for shard in self.shards():
            if shard.param in loaded:
                self.moments.offload(shard, StochasticRounding(self.updater.updates))

    def __repr__(self) -> str:
        return f"ShardedOptimizer({self.inner!r})"


def clip_factor(norm: float, max_norm: float) -> float:
    """Return the factor of gradients that bounds their norm by max_norm; 1.0 if clipping is off (0)
    or not needed.
    """
    if max_norm <= 0.0:
        return 1.0
    return min(1.0, max_norm / (norm + 1e-6))


def update_settings_of(
    settings: StepSettings,
    optimizer: str,
    groups: Sequence[ParamGroupPlan],
    *,
    scales_grads: bool,
    undoes: bool,
) -> UpdateSettings:
    """Return a step's settings as the planner needs them. optimizer: its class. undoes: some units
    are updated in backward, with a log to undo that.
    """
    return UpdateSettings(
        optimizer,
        tuple(groups),
        settings.tile_numel,
        scales_grads=scales_grads,
        can_defer=settings.can_defer,
        by_unit=settings.by_unit,
        undo_bytes=settings.undo_bytes if undoes else 0,
        kernels=_kernels_for(optimizer, settings.kernels),
        host_tile_numel=settings.host_tile_numel,
        kernel_tile_numel=settings.kernel_tile_numel,
        gpu_kernels=chosen(settings.kernels) != "torch",
    )


def _kernels_for(optimizer: str, wanted: str) -> str:
    """Return what computes updates on a CPU: "auto", "numba" or "torch".

    With "auto", kernels update only ranks with many elements. PyTorch updates the others, so both
    must have the same
    bits. wanted: the word of the configuration.
    """
    found = available(wanted)
    rule = NAMES.get(optimizer)
    if found == "auto" and rule is not None and pytorch_differs(rule):
        return "torch"
    return found


def unknown_parameter(param: torch.Tensor) -> UsageError:
    return UsageError(
        f"the optimizer holds a parameter of shape {tuple(param.shape)} that the wrapped model "
        "does not have.",
        "Each parameter is updated where its slice is; this one belongs to no model, or to another "
        "one.",
        "build the optimizer from the same model that is wrapped, and one optimizer for each "
        "wrapped model.",
    )


def reset_states(optimizer: ShardedOptimizer) -> dict[Tensor, dict[str, Any]]:
    """Reset the optimizer to before its first step; return the states that were there."""
    optimizer.finish()
    for shard in optimizer.shards():
        shard.group.guard.before_write()
    before = dict(optimizer.inner.state)
    optimizer.inner.state.clear()
    optimizer.moments.forget()
    return before


def discard_updates(optimizer: ShardedOptimizer) -> None:
    """Drop every update that is not over: other states are about to be loaded."""
    optimizer.updater.refuse_mixture()
    for policy in optimizer.policies:
        policy.discard()


def trained_names(params: Iterable[nn.Parameter]) -> list[str]:
    """Return the names of the parameters that are updated, in the optimizer's order; the same on
    every rank.
    """
    owners = [(owner_of(param), param) for param in params]
    return [
        owner.name_of(param)
        for owner, param in owners
        if isinstance(owner, ParamGroup) and owner.trainable
    ]


def refuse_parts(optimizer: str, named: Iterable[tuple[str, Tensor]]) -> None:
    """Raise NotBuiltError if tensor parallelism has split a parameter that the optimizer needs as a
    whole tensor.

    Args:
        optimizer: The name of the optimizer's class, for the message.
        named: The names and parameters of a group that may not be cut.
    """
    for name, param in named:
        split = split_of(param)
        if split is None or split.kind != "split":
            continue
        raise NotBuiltError(
            f"{optimizer} with tensor parallelism (tp): parameter '{name}' is split over the ranks "
            "along tp.",
            f"{optimizer} computes its update from a whole tensor, and each rank would take its "
            "part for the whole.",
            "use an optimizer that works element by element (AdamW, SGD, Lion), or dp_shard "
            "instead of tp; if the optimizer is a class of your own that works element by element, "
            'set granularity = "element" in it.',
        )


def relayout_whole(runtime: Runtime, groups: Sequence[dict[str, Any]]) -> None:
    """Lay out again the groups with parameters of these optimizer groups, so that no tensor is cut.

    Collective; weights and masters keep their bits.
    """
    owners = {id(owner_of(param)) for group in groups for param in group["params"]}
    for unit in runtime.units:
        for group in unit.trained:
            whole = group.planned.relayout("tensor")
            if id(group) in owners and group.planned.may_be_cut and whole.layout != group.layout:
                group.relayout("tensor")


def prefer_fused(optimizer: Optimizer, *, on_cpu: bool) -> None:
    """Choose torch's fused kernels if the class has one and the user left the choice open: one pass
    over memory instead of many.

    Args:
        optimizer: The inner optimizer.
        on_cpu: All shards of all ranks are updated on a CPU. PyTorch has no fused Adagrad on CUDA.
    """
    if type(optimizer) not in FUSED or (type(optimizer) is torch.optim.Adagrad and not on_cpu):
        return
    for group in optimizer.param_groups:
        if group.get("fused", False) is None and not group.get("foreach"):
            group["fused"] = True
