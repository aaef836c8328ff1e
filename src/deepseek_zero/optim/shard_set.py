"""The shards of the main weights that an optimizer updates, and their tiles."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property, partial
from importlib import import_module
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ..base.errors import NotBuiltError, UsageError
from ..comm.agreement import AllRanks
from ..optimizers.plain_steps import undecorated
from ..planner.split import split_of
from ..planner.update import ParamGroupPlan, ShardRange, UpdatePlan, UpdateSettings, shard_ranges
from ..planner.update import Tile as PlannedTile
from ..precision.compact import StochasticRounding
from ..precision.loss_scale import LossScaler
from ..sharding.param_group import ParamGroup
from ..sharding.regroup import relayout
from ..sharding.runtime import Runtime
from ..sharding.sharded_parameter import owner_of
from ..tiers.budget import DeviceBudget
from .initial_states import InitialStates, makes_states, state_of_first_step, states_at_construction
from .master_shard import MasterShard, Tile, Tiles
from .moments import Moments
from .offloaded_states import update_offloaded
from .param_groups import are_updated_on_cpu, prefer_fused, with_replacements
from .param_overlap import ParamOverlap, overlaps_of
from .step_settings import StepSettings, update_settings_of
from .tile_memory import TileScratch
from .update_policy import UpdatePolicy
from .updater import Updater, in_turn

if TYPE_CHECKING:
    from .one_pass import OnePass


class ShardSet:
    """The parts of this rank's main weights that one optimizer updates.

    Each part (shard) is a parameter for the inner optimizer. Shards that are updated in one call
    form a tile.

    Attributes:
        runtime: The runtime of the wrapped model, with its parameter groups.
        settings: The settings of the optimizer step, such as tile sizes.
        policies: The update policies, the same on every rank.
        scaler: The loss scaler, if losses are scaled.
        initial_states: The states that the user's optimizer already had; None if there are none.
        scratch: The buffers in which tiles are updated.
        uncut: For each parameter group, whether its update needs whole tensors.
        params_by_group: The parameters of each parameter group.
        names_by_group: The names of the updated parameters of each group, the same on every rank.
        shards_by_group: The shards of this rank for each parameter group.
        tiles: The lists of shards that are updated together.
        inner: The optimizer that computes updates.
        moments: The states of that optimizer.
        updater: Runs the inner optimizer over the tiles.
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
        """Cut the parameter groups into shards, and build the inner optimizer over them.

        Args:
            runtime: The runtime of the wrapped model, with its parameter groups.
            groups: The optimizer's parameter groups, with parameters of the wrapped model.
            make_inner: Builds the inner optimizer from groups of shards.
            settings: The settings of the optimizer step, such as the clipping norm and tile sizes.
            scaler: The loss scaler, if losses are scaled.
            planned: The optimizer's part of the plan by which the model was wrapped. By default it
                is made here.
            initial_states: The states that the user's optimizer already had; None if there are
                none.
            policies: The update policies, the same on every rank.

        Note:
            Collective if `planned` is None and a group needs whole tensors.
        """
        groups = with_replacements(groups)
        self.runtime = runtime
        self.settings = settings
        self.policies = tuple(policies)
        self.scaler = scaler
        self.initial_states = initial_states
        self.uncut = [
            number < len(settings.granularity) and settings.granularity[number] != "element"
            for number in range(len(groups))
        ]
        if planned is None:
            whole = [group for group, uncut in zip(groups, self.uncut, strict=True) if uncut]
            relayout_whole(runtime, whole)
        budget = runtime.comm_ctx.tiers.budget  # of the training device; others have no limit
        self.scratch = TileScratch(
            defaultdict(DeviceBudget, {runtime.comm_ctx.pool.device: budget})
        )
        self.params_by_group: list[list[nn.Parameter]] = [list(group["params"]) for group in groups]
        self.names_by_group = list(map(trained_names, self.params_by_group))
        self.inner: Optimizer
        self.moments: Moments
        self.updater: Updater
        self._has_states_at_construction = False
        if planned is not None:
            self.shards_by_group = self._built(planned)
        else:
            unknown = self._update_settings("", groups)
            self.shards_by_group = [
                self._cut(group["params"], uncut, unknown)
                for group, uncut in zip(groups, self.uncut, strict=True)
            ]
            planned = self._planned("", groups)  # the optimizer's class is not known yet
        self.scratch.grow(planned.fullest_tiles)
        self._reserve_staging(planned)
        self._build_inner(groups, make_inner)

    def _build_inner(
        self,
        groups: Sequence[dict[str, Any]],
        make_inner: Callable[[list[dict[str, Any]]], Optimizer],
    ) -> None:
        sliced = [
            {**group, "params": [shard.param for shard in shards]}
            for group, shards in zip(groups, self.shards_by_group, strict=True)
        ]
        with undecorated():
            self.inner = make_inner(sliced)
        # Adagrad makes its state at construction
        self._has_states_at_construction = self.initial_states is not None or makes_states(
            self.inner
        )
        self.moments = Moments(self.inner, self.scratch)
        numel = sum(shard.numel for shard in self.all())
        self.updater = Updater(self.inner, self.scratch, numel)
        prefer_fused(self.inner, on_cpu=are_updated_on_cpu(self.runtime))
        # Plan again now that the optimizer's class is known, because it decides about kernels
        self.tiles = tiles_of(self.plan, self.shards_by_group)
        self._attach()

    def _attach(self) -> None:
        """Attach to the updater what the updates of the current shards need."""
        updater = self.updater
        shards = self.all()
        updater.in_turn = in_turn
        if any(shard.group.plan.is_offloaded for shard in shards):
            updater.in_turn = partial(
                update_offloaded, moments=self.moments, settings=self.settings.flow
            )
        updater.kernels = []
        if any(shard.has_kernel for shard in shards):
            updater.kernels = [partial(self.one_pass.update_tile, moments=self.moments)]
        is_stored = any(shard.group.plan.moments_external for shard in shards)
        updater.stored = [self.moments] if is_stored else []

    @cached_property
    def one_pass(self) -> OnePass:
        """Updates shards with kernels. It is imported only if there is a kernel for a shard."""
        module = import_module("deepseek_zero.optim.one_pass")
        one_pass: OnePass = module.OnePass(self.inner)
        return one_pass

    def all(self) -> list[MasterShard]:
        """Return all shards that this rank updates, in the order of parameter groups."""
        return [shard for shards in self.shards_by_group for shard in shards]

    @property
    def plan(self) -> UpdatePlan:
        """The plan of this rank's shards and tiles, with the current hyper-parameters."""
        return self._planned(type(self.inner).__name__, self.inner.param_groups)

    def finish(self) -> None:
        """Run pending updates, and undo updates that ran ahead of their step.

        Afterwards every state is as the last step left it.
        """
        self.updater.guard.refuse_mixture()
        for policy in self.policies:
            policy.finish()

    def compile_kernels(self) -> None:
        """Compile the kernels that update the shards, so that no step waits for it."""
        if self.updater.kernels:
            for group, shards in zip(self.inner.param_groups, self.shards_by_group, strict=True):
                self.one_pass.compile_for(group, shards)

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
        scales = self.settings.clips or (
            self.scaler is not None and gradients_are_scaled(self.runtime)
        )
        undoes = any(policy.undoes for policy in self.policies)
        settings = update_settings_of(
            self.settings, optimizer, chosen, scales_grads=scales, undoes=undoes
        )
        return replace(settings, crosses_hosts=self.runtime.machine.spans_hosts)

    def _planned(self, optimizer: str, groups: Sequence[Mapping[str, Any]]) -> UpdatePlan:
        settings = self._update_settings(optimizer, groups)
        ranges = [list(map(planned_range, shards)) for shards in self.shards_by_group]
        units = [unit.planned for unit in self.runtime.units]
        return UpdatePlan.of(settings, ranges, units, self.runtime.comm_ctx.pool.device)

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
        """Cut one parameter group into shards.

        Neighbouring parameters are merged and cut into tiles, or kept as whole tensors if `uncut`.
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

    def take(self, number: int, params: Sequence[nn.Parameter]) -> None:
        """Add parameters to one of the optimizer's parameter groups, and cut them into shards.

        Args:
            number: The index of the parameter group.
            params: The parameters to add.

        Note:
            Collective if the optimizer needs whole tensors of this group.
        """
        if not params:
            return
        if self.uncut[number]:
            refuse_parts(type(self.inner).__name__, zip(trained_names(params), params, strict=True))
            relayout_whole(self.runtime, [{"params": params}])
        settings = self._update_settings(type(self.inner).__name__, self.inner.param_groups)
        shards = self._with_initial_states(self._cut(params, self.uncut[number], settings))
        self.shards_by_group[number] = [*self.shards_by_group[number], *shards]
        self.names_by_group[number] = trained_names(self.params_by_group[number])
        self._add_missing_states(number, shards)

    def take_initial_states(self) -> None:
        """Cut the states that the user's optimizer already had into states of the shards.

        Note:
            Collective: every rank must call it.
        """
        states = self.initial_states
        if states is None:
            return
        with AllRanks(self.runtime.comm, "taking over the state of the optimizer"):
            for number, shards in enumerate(self.shards_by_group):
                self.shards_by_group[number] = self._with_initial_states(shards)
            self.replan()
            states.release_trained()

    def _with_initial_states(self, shards: Sequence[MasterShard]) -> list[MasterShard]:
        """Return new shards with the state of the client's optimizer.

        Shards whose parameters have different counters are cut.
        """
        states = self.initial_states
        if states is None:
            return list(shards)
        found = list[MasterShard]()
        for shard in shards:
            spans = cuts_of(shard, states.counters)
            found += self._parts_of(shard, spans) if len(spans) > 1 else [shard]
        for shard in found:
            if values := states.cut_for(shard):
                self.inner.state[shard.param] = values
                self.moments.offload(shard, StochasticRounding(0))
        return found

    def _add_missing_states(self, number: int, shards: Sequence[MasterShard]) -> None:
        """Create the state from construction for shards that have none."""
        without = [shard.param for shard in shards if not self.inner.state.get(shard.param)]
        if self._has_states_at_construction and without:
            group = {**self.inner.param_groups[number], "params": without}
            self.inner.state.update(states_at_construction(self.inner, group))

    def state_of_first_step(self, shard: MasterShard) -> dict[str, Any]:
        """Return the state of a shard that the inner optimizer's first step makes."""
        number = next(
            number for number, shards in enumerate(self.shards_by_group) if shard in shards
        )
        return state_of_first_step(self.inner, shard, number)

    def add_missing_states(self) -> None:
        """Create the states that shards lack, if the optimizer makes states when it is built."""
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

    @property
    def grad_scale(self) -> float:
        """The factor by which the loss scaler has multiplied the reduced gradients."""
        assert self.scaler is not None
        return self.scaler.scale if gradients_are_scaled(self.runtime) else 1.0

    def cut_apart_absent(self) -> None:
        """Put parameters without a gradient into separate shards, which are not updated."""
        self.cut_apart(lambda cover: cover.is_absent)

    def cut_apart(self, apart: Callable[[ParamOverlap], Any]) -> None:
        """Cut shards whose parameters differ in a property.

        Each part then has its own counters and can be updated separately. Values and moments keep
        their bits.

        Args:
            apart: A function that returns the property for a parameter's part of a shard. A shard
                is cut where it changes.
        """
        cuts = {shard: spans for shard in self.all() if len(spans := cuts_of(shard, apart)) > 1}
        if not cuts:
            return
        self.finish()
        for shard in cuts:
            self.moments.refuse_cut(shard)
        for number, shards in enumerate(self.shards_by_group):
            self.shards_by_group[number] = [
                each for shard in shards for each in self._parts_of(shard, cuts.get(shard))
            ]
        self.replan()

    def cut_as(self, stretches: list[list[tuple[str, int, int]]] | None) -> None:
        """Cut the shards as they were cut when a state dict was saved.

        The optimizer must have no state yet.

        Args:
            stretches: For each parameter group, the (first name, start, stop) of each shard.
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
                    shard.names = tuple(cover.slot.name for cover in overlaps_of(shard))
                shards.append(shard)
            self.shards_by_group[number] = shards
        self.replan()

    def _parts_of(self, shard: MasterShard, spans: list[ShardRange] | None) -> list[MasterShard]:
        if spans is None:
            return [shard]
        parts = [self._shard(shard.group, span) for span in spans]
        self.moments.cut(shard, parts)
        return parts

    def replan(self) -> None:
        """Combine the shards into tiles again after they have changed."""
        for group, shards in zip(self.inner.param_groups, self.shards_by_group, strict=True):
            group["params"] = [shard.param for shard in shards]
        planned = self.plan
        self.tiles = tiles_of(planned, self.shards_by_group)
        self._attach()
        self.scratch.grow(planned.fullest_tiles)
        self._reserve_staging(planned)
        for policy in self.policies:
            policy.tiles_changed(self.tiles)

    def _reserve_staging(self, planned: UpdatePlan) -> None:
        """Reserve staging memory for all tiles that are copied at the same time.

        One more tile covers the end of the ring, because a tile may not fit there.
        """
        flow = self.settings.flow
        tiles = flow.ahead + 1 + flow.behind + 1
        self.runtime.comm_ctx.copy_engine.reserve_staging(planned.staging_bytes(tiles))


def gradients_are_scaled(runtime: Runtime) -> bool:
    """Return whether gradients are multiplied by the loss scale; exchanged momenta are not."""
    return all(group.gradient.reduction.is_scaled for group in runtime.trained_groups)


def tiles_of(plan: UpdatePlan, shards_by_group: Sequence[Sequence[MasterShard]]) -> Tiles:
    """Build the tiles of a plan from its shards.

    Args:
        plan: The plan of the updates, which lists shards in tiles.
        shards_by_group: Shards that were made from `plan.shards`, in the same order.

    Returns:
        The same tiles as in `plan.order`, made of shards.
    """
    shard_of = {
        id(planned): shard
        for ranges, shards in zip(plan.shards, shards_by_group, strict=True)
        for planned, shard in zip(ranges, shards, strict=True)
    }

    def tile_of(planned_tile: PlannedTile) -> Tile:
        tile = Tile()
        filled = 0
        for number, planned in planned_tile:
            shard = shard_of[id(planned)]
            shard.at = filled
            shard.has_kernel = plan.has_kernel(number, planned)
            tile.append((number, shard))
            filled += shard.numel
        return tile

    later = {unit: list(map(tile_of, tiles)) for unit, tiles in plan.order.later.items()}
    return Tiles(list(map(tile_of, plan.order.now)), later)


def planned_range(shard: MasterShard) -> ShardRange:
    """Return the plan's description of a shard."""
    shape = tuple(shard.param.shape)
    return ShardRange(shard.group.planned, shard.start, shard.stop, shard.names, shape)


def cuts_of(shard: MasterShard, apart: Callable[[ParamOverlap], Any]) -> list[ShardRange]:
    """Return the ranges of a shard within which all parameters have the same key.

    The whole shard is returned if all keys are equal or if it is a whole tensor.

    Args:
        shard: The shard to divide.
        apart: A function that returns the key of a parameter's range.
    """
    covers = list(overlaps_of(shard))
    runs = [list(run) for _, run in itertools.groupby(covers, key=apart)]
    if len(runs) < 2:
        return [planned_range(shard)]
    edges = [shard.start, *(shard.start + run[0].offset for run in runs[1:]), shard.stop]
    return [
        ShardRange(
            shard.group.planned, low, high, tuple(cover.slot.name for cover in run), (high - low,)
        )
        for run, low, high in zip(runs, edges, edges[1:], strict=False)
    ]


def unknown_parameter(param: torch.Tensor) -> UsageError:
    """Create the error for a parameter that is not in the wrapped model."""
    return UsageError(
        f"the optimizer holds a parameter of shape {tuple(param.shape)} that the wrapped model "
        "does not have.",
        "Each parameter is updated where its slice is; this one belongs to no model, or to another "
        "one.",
        "build the optimizer from the same model that is wrapped, and one optimizer for each "
        "wrapped model.",
    )


def trained_names(params: Iterable[nn.Parameter]) -> list[str]:
    """Return the names of the parameters that are updated.

    The names are in the optimizer's order and the same on every rank.
    """
    owners = [(owner_of(param), param) for param in params]
    return [
        owner.name_of(param)
        for owner, param in owners
        if isinstance(owner, ParamGroup) and owner.trainable
    ]


def refuse_parts(optimizer: str, named: Iterable[tuple[str, Tensor]]) -> None:
    """Raise an error if tensor parallelism split a parameter that the optimizer needs whole.

    Args:
        optimizer: The name of the optimizer's class, for the message.
        named: The names and parameters of a group that may not be cut.

    Raises:
        NotBuiltError: A parameter is split over the ranks along tp.
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
    """Change the layout of parameters so that no tensor is cut between ranks.

    Weights and main weights keep their bits.

    Args:
        runtime: The runtime of the wrapped model, with its parameter groups.
        groups: The parameter groups that need whole tensors.

    Note:
        Collective: every rank must call it.
    """
    owners = {id(owner_of(param)) for group in groups for param in group["params"]}
    is_changed = False
    for unit in runtime.units:
        for group in unit.trained:
            whole = group.planned.relayout("tensor")
            if id(group) in owners and group.planned.may_be_cut and whole.layout != group.layout:
                relayout(group, "tensor")
                is_changed = True
    if is_changed:
        runtime.replan()  # the sizes of messages have changed
