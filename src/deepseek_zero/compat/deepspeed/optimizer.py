"""The sharded optimizer with DeepSpeed's names.

The engines of `initialize` have one of these. Only names are added.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cache
from itertools import accumulate
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Adam, AdamW

from ...api.leaves import get_z3_leaf_modules
from ...base.given import refuse
from ...extensions.param_states import full_grad, safe_get_local_grad
from ...optim.inner_states import load_inner, load_states
from ...optim.shard_set import ShardSet
from ...optim.sharded import ShardedOptimizer
from ...planner.plan_settings import PlanSettings
from ...planner.spec import S
from ...precision.loss_scale import LossScaler, LossScaleSettings
from ...tiers.tier import Tier
from .parameters import ParameterOffload

# DeepSpeed's attributes of the loss scale -> ours, for reading and writing
SCALE_WORDS = {"cur_scale": "scale", "loss_scale": "scale"} | {
    name: name for name in ("cur_iter", "last_overflow_iter", "cur_hysteresis")
}
SETTING_WORDS = {
    "scale_window": "loss_scale_window",
    "min_loss_scale": "min_loss_scale",
    "min_scale": "min_loss_scale",
    "delayed_shift": "hysteresis",
    "consecutive_hysteresis": "consecutive_hysteresis",
}


class LossScaleView:
    """Read and write an engine's loss scaler under DeepSpeed's names.

    Reads and writes go to the scaler itself.
    """

    scale_factor = 2.0
    use_grad_scaling = True

    scaler: LossScaler

    def __init__(self, scaler: LossScaler) -> None:
        vars(self)["scaler"] = scaler

    def __getattr__(self, name: str) -> Any:
        if name in SCALE_WORDS:
            return getattr(self.scaler, SCALE_WORDS[name])
        if name in ("dynamic", "dynamic_loss_scale"):
            return self.scaler.dynamic
        if name in SETTING_WORDS:
            return getattr(self.scaler.settings, SETTING_WORDS[name])
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def __setattr__(self, name: str, value: Any) -> None:
        if name not in SCALE_WORDS:
            raise AttributeError(
                f"{name} of a loss scale cannot be set; these can: {', '.join(SCALE_WORDS)}"
            )
        setattr(self.scaler, SCALE_WORDS[name], value)

    def update_scale(self, overflow: bool) -> None:
        """Halve or double the scale after a step, depending on whether it overflowed."""
        self.scaler.update(overflow)


class _NoScale:
    """Constant loss scale of 1, for engines without a loss scaler."""

    cur_scale = loss_scale = 1.0
    cur_iter = 0
    dynamic = False
    dynamic_loss_scale = False
    use_grad_scaling = False
    last_overflow_iter = scale_factor = scale_window = min_loss_scale = None


# DeepSpeed's attribute of the optimizer -> function of the engine
SETTINGS: dict[str, Callable[[Any], Any]] = {
    "dtype": lambda e: e.get_data_types()[0],
    "gradient_accumulation_dtype": lambda e: e.get_data_types()[1],
    "communication_data_type": lambda e: e.communication_data_type or e.get_data_types()[0],
    "gradient_predivide_factor": lambda e: e.gradient_predivide_factor(),
    "postscale_gradients": lambda e: e.postscale_gradients(),
    "partition_gradients": lambda e: e.zero_optimization_partition_gradients(),
    "contiguous_gradients": lambda e: e.zero_contiguous_gradients(),
    "overlap_comm": lambda e: e.zero_overlap_comm(),
    "reduce_scatter": lambda e: e.zero_reduce_scatter(),
    "reduce_bucket_size": lambda e: e.zero_reduce_bucket_size(),
    "allgather_bucket_size": lambda e: e.zero_allgather_bucket_size(),
    "sub_group_size": lambda e: e.zero_sub_group_size(),
    "cpu_offload": lambda e: e.zero_use_cpu_optimizer(),
    "elastic_checkpoint": lambda e: e.zero_elastic_checkpoint(),
    "dp_process_group": lambda e: e.data_parallel_group,
    "real_dp_process_group": lambda e: [e.data_parallel_group for _ in e.optimizer.param_groups],
    "has_moe_layers": lambda e: e.has_moe_layers,
    "mpu": lambda e: e.mpu,
    "module": lambda e: e.module,
    "custom_loss_scaler": lambda e: False,
    "external_loss_scale": lambda e: None,
}

# Parameter of the inner optimizer, its offset in the flat tensors of its group, its number of
# elements
_Span = tuple[nn.Parameter, int, int]
State = dict[str, Any]  # of an optimizer, or of one parameter of it


class NamedOptimizer(ShardedOptimizer):
    """The sharded optimizer with DeepSpeed's attributes and methods."""

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """Allocate the object without the constructor of the other base of `_plain_class`."""
        return object.__new__(cls)

    def __init__(self, shards: ShardSet) -> None:
        super().__init__(shards)
        if isinstance(self.inner, Adam) and not hasattr(type(self.inner), "adam_w_mode"):
            # DeepSpeed's attribute, which Adam does not have
            setattr(self.inner, "adam_w_mode", isinstance(self.inner, AdamW))  # noqa: B010
        if self.runtime.settings.stage == 3:
            self.parameter_offload = ParameterOffload()

    @property
    def loss_scaler(self) -> Any:
        """Return the loss scaler; one with the constant scale 1 if losses are not scaled."""
        return LossScaleView(self.scaler) if self.scaler is not None else _NoScale()

    loss_scale_config = loss_scaler

    @property
    def dynamic_loss_scale(self) -> bool:
        """Return whether the loss scale is dynamic."""
        return self.scaler is not None and self.scaler.dynamic

    @property
    def cur_scale(self) -> float:
        """Return the factor by which losses are currently multiplied."""
        return self.loss_scale

    @cur_scale.setter
    def cur_scale(self, value: float) -> None:
        if self.scaler is not None:
            self.scaler.scale = float(value)

    def needs_scaler(self) -> bool:
        """Return whether a program that calls autograd itself must scale its loss."""
        return self.scaler is not None

    def scale_if_loss(self, value: Any) -> Any:
        """Return a loss times the scale, and any other value unchanged."""
        is_loss = isinstance(value, torch.Tensor) and value.numel() == 1 and value.requires_grad
        return value * self.loss_scale if is_loss else value

    @property
    def fp16_groups(self) -> list[list[nn.Parameter]]:
        """Return the updated parameters of each group, whatever their dtype."""
        return [list(params) for params in self.shard_set.params_by_group]

    bit16_groups = fp16_groups

    @property
    def low_precision_dtype(self) -> torch.dtype | None:
        """Return the dtype of the computation; None for that of the model."""
        return self.runtime.settings.policy.compute

    @property
    def _global_grad_norm(self) -> float | None:
        return self.last_norm if self.last is not None else None

    @property
    def clip_grad(self) -> float:
        """Return the largest allowed norm of the gradients; 0 if they are not clipped."""
        return self.settings.max_norm

    @property
    def fp32_groups(self) -> list[list[Tensor]]:
        """Return fp32 copies of this rank's main weights by group, one flat tensor per tile."""
        self.finish()
        return [
            [shard.master.read(shard.start, shard.stop).float().cpu().reshape(-1) for shard in each]
            for each in self.shard_set.shards_by_group
        ]

    @property
    def fp32_groups_flat(self) -> list[Tensor]:
        """Return `fp32_groups`, concatenated to one flat tensor per group."""
        return [_flat(each) for each in self.fp32_groups]

    single_partition_of_fp32_groups = fp32_partitioned_groups_flat = fp32_groups_flat

    # -- gradients between backward and step

    @property
    def averaged_gradients(self) -> dict[int, list[Tensor]]:
        """Return this rank's flat shards of the reduced gradients by group number.

        Groups without gradients are left out.
        """
        found = {
            number: [grad for param in params if (grad := safe_get_local_grad(param)) is not None]
            for number, params in enumerate(self.shard_set.params_by_group)
        }
        return {number: grads for number, grads in found.items() if grads}

    @property
    def fp32_groups_gradients_flat(self) -> list[Tensor]:
        """Return the whole reduced gradients of each group, flat and in fp32.

        Parameters without a gradient are left out.

        Note:
            Collective: every rank must read the property.
        """
        found = [
            [full_grad(param) for param in params] for params in self.shard_set.params_by_group
        ]
        return [_flat(grad for grad in grads if grad is not None) for grads in found]

    def get_fp32_grad_partitions(self) -> dict[int, dict[int, Tensor]]:
        """Return `averaged_gradients` in fp32, by group number and position."""
        return {
            number: {place: part.float() for place, part in enumerate(each)}
            for number, each in self.averaged_gradients.items()
        }

    @property
    def accumulated_grads_in_cpu(self) -> dict[int, Tensor]:
        """Return `averaged_gradients` on the CPU, numbered over all groups."""
        return dict(
            enumerate(part.cpu() for each in self.averaged_gradients.values() for part in each)
        )

    def _get_norm_groups(self) -> list[Tensor]:
        """Return the norm of each group's reduced gradients over all ranks.

        Note:
            Collective: every rank must call it.
        """
        own = [
            sum(
                float(part.double().square().sum())
                for part in self.averaged_gradients.get(number, ())
            )
            for number in range(len(self.shard_set.params_by_group))
        ]
        comm = self.runtime.comm_ctx.comm
        rows = comm.all_gather_rows(
            torch.tensor(own, dtype=torch.float64, device="cpu"), "norms of groups"
        )
        is_cut = any(
            group.plan.grad is not None and group.plan.grad.placement is S
            for group in self.runtime.groups
        )
        squares = rows.sum(0) if is_cut else rows[comm.rank]
        return list(squares.sqrt().float())

    def scaled_global_norm(self, norm_type: int = 2) -> torch.Tensor:
        """Return the norm of all reduced gradients, which contain the loss scale.

        Args:
            norm_type: Must be 2, as in DeepSpeed.

        Note:
            Collective: every rank must call it.
        """
        assert norm_type == 2, "only the L2 norm is supported"
        norm: torch.Tensor = torch.stack(self._get_norm_groups()).norm()
        return norm

    # -- for programs that call the optimizer instead of its engine

    @property
    def _engine(self) -> Any:
        """The engine that owns the optimizer."""
        step = self.take_step()
        assert isinstance(step, MethodType), "no engine has the optimizer"
        return step.__self__

    def backward(self, loss: torch.Tensor, retain_graph: bool = False) -> None:
        """Compute gradients of the loss times the loss scale, as the engine does.

        The loss is not divided by the number of accumulation steps.

        Args:
            loss: Scalar loss.
            retain_graph: Whether to keep the autograd graph.

        Note:
            Collective: every rank must call it.
        """
        self._engine.backward(loss, retain_graph, scale_wrt_gas=False)

    def offload_states(self, *args: Any, **kwargs: Any) -> None:
        """Release the memory of states, as `offload_states` of the engine does.

        Args:
            *args: Positional arguments of the engine's method.
            **kwargs: Keyword arguments of the engine's method.

        Note:
            Collective: every rank must call it.
        """
        self._engine.offload_states(*args, **kwargs)

    def reload_states(self, non_blocking: bool = False) -> None:
        """Restore the states that `offload_states` moved.

        Args:
            non_blocking: Accepted; the states have been restored when this returns.

        Note:
            Collective: every rank must call it.
        """
        self._engine.reload_states(non_blocking)

    @property
    def leaf_parameters(self) -> dict[nn.Module, list[nn.Parameter]]:
        """Return the parameters of each module that `set_z3_leaf_modules` selected."""
        return {
            module: list(module.parameters()) for module in get_z3_leaf_modules(self.runtime.model)
        }

    # -- flat weights

    nccl_start_alignment_factor = 2

    @property
    def bit16_groups_flat(self) -> list[Tensor]:
        """Return copies of the whole weights, one flat tensor per group. Stages 0 to 2 only."""
        return [
            torch.cat([param.detach().reshape(-1) for param in params]) if params else _flat(())
            for params in self.shard_set.params_by_group
        ]

    @property
    def parallel_partitioned_bit16_groups(self) -> list[list[Tensor]]:
        """Return `bit16_groups_flat`, split evenly into one part per rank.

        Main weights may be split differently.
        """
        return [
            list(flat.chunk(self.runtime.comm_ctx.comm.size)) for flat in self.bit16_groups_flat
        ]

    def get_param_id(self, param: nn.Parameter) -> int:
        """Return the index of a parameter among the updated ones of all groups.

        Raises:
            UsageError: The optimizer does not update the parameter.
        """
        every = (each for params in self.shard_set.params_by_group for each in params)
        for number, each in enumerate(every):
            if each is param:
                return number
        wanted = "a parameter that this optimizer updates"
        fix = "pass a trained parameter of the engine's model."
        raise refuse("get_param_id", "param", param, wanted, fix)

    @property
    def param_to_partition_ids(self) -> list[dict[int, list[int]]]:
        """Return the partitions that contain each parameter, by group and `get_param_id`.

        Partitions are those of `parallel_partitioned_bit16_groups`.
        """
        found = list[dict[int, list[int]]]()
        number = 0
        for params in self.shard_set.params_by_group:
            numels = [param.numel() for param in params]
            size = max(1, -(-sum(numels) // self.runtime.comm_ctx.comm.size))
            ends = list(accumulate(numels))
            found.append({})
            for numel, end in zip(numels, ends, strict=True):
                found[-1][number] = list(range((end - numel) // size, -(-end // size)))
                number += 1
        return found

    # -- settings

    def __getattr__(self, name: str) -> Any:
        """Return a setting of the run under DeepSpeed's name, as a row of `SETTINGS`."""
        step = vars(self).get("take_step", lambda: None)()
        if name in SETTINGS and isinstance(step, MethodType):
            return SETTINGS[name](step.__self__)
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def get_lr(self) -> float:
        """Return the learning rate of the first parameter group."""
        rate: float = self.param_groups[0]["lr"]
        return rate

    def set_lr(self, lr: float) -> None:
        """Set the learning rate of all parameter groups."""
        for group in self.param_groups:
            group["lr"] = lr

    def refresh_fp32_params(self) -> None:
        """Do nothing: the next step notices weights that a program has changed."""

    update_lp_params = _restore_from_bit16_weights = refresh_fp32_params

    def _set_fp32_optimizer_param_groups(self) -> None:
        """Do nothing: the groups of `optimizer` always have its main weights."""

    _clear_fp32_optimizer_param_groups = _set_fp32_optimizer_param_groups


def _flat(tensors: Iterable[Tensor]) -> Tensor:
    """Concatenate the elements of fp32 tensors, of which there may be none."""
    return torch.cat([torch.zeros(0, device="cpu"), *(each.reshape(-1) for each in tensors)])


class FlatStates:
    """The inner optimizer, of which `state_dict` has DeepSpeed's format.

    `state_dict()` and `load_state_dict()` use one flat tensor of each kind per parameter group. The
    tensor has the same length on all ranks, even on those without an element of the group. It
    contains this rank's slices of the units in which the group has parameters, in order, with zeros
    elsewhere. If the states do not have the size of their parameters (Adafactor), torch's format is
    used. Everything else is delegated to the inner optimizer.
    """

    def __init__(self, optimizer: ShardedOptimizer) -> None:
        # A weak reference, because the sharded optimizer holds this object
        object.__setattr__(self, "_sharded", weakref.ref(optimizer))
        object.__setattr__(self, "_inner", optimizer.inner)

    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        """Class of the inner optimizer, for `isinstance`."""
        return type(self._inner)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._inner, name, value)

    def __eq__(self, other: object) -> bool:
        return other is self or other is self._inner

    def __hash__(self) -> int:
        return hash(self._inner)

    def __repr__(self) -> str:
        return repr(self._inner)

    def state_dict(self) -> State:
        """Return this rank's optimizer states in DeepSpeed's format, one flat tensor per kind."""
        return _flat_states(self._owner())

    def load_state_dict(self, state_dict: State) -> None:
        """Load the states of this rank, in the flat or torch's format."""
        _load_flat_states(self._owner(), state_dict)

    def _owner(self) -> ShardedOptimizer:
        found: ShardedOptimizer | None = self._sharded()
        assert found is not None, "the engine's optimizer is gone"
        return found


class DropInOptimizer(NamedOptimizer):
    """The sharded optimizer of a program that imported `deepspeed`, at stages 1 to 3."""

    def __init__(self, shards: ShardSet) -> None:
        super().__init__(shards)
        self._flat = FlatStates(self)

    @property
    def optimizer(self) -> Any:
        """Return the inner optimizer, with its states in DeepSpeed's format."""
        return self._flat


def _flat_states(optimizer: ShardedOptimizer) -> State:
    states = load_states(optimizer.shard_set)
    inner = optimizer.inner
    tensors = (
        (param, value)
        for param, state in states.items()
        for value in state.values()
        if _is_moment(value)
    )
    if any(value.numel() != param.numel() for param, value in tensors):
        return dict(type(inner).state_dict(inner))
    found: dict[int, State] = {}
    groups = []
    for number, group in enumerate(inner.param_groups):
        groups.append(
            {key: value for key, value in group.items() if key != "params"} | {"params": [number]}
        )
        spans, length = _spans(optimizer, number)
        if optimizer.updater.updates and length:
            like = next((states[param] for param, *_ in spans if param in states), None)
            found[number] = _flat_state(
                states, spans, length, like or _state_of_nothing(optimizer, group)
            )
    return {"state": found, "param_groups": groups}


def _flat_state(
    states: Mapping[Any, State],
    spans: Sequence[_Span],
    length: int,
    like: Mapping[str, Any],
) -> State:
    """Return one state with flat tensors.

    `like` is the state of any parameter of the group.
    """
    found: State = {}
    for kind, value in like.items():
        if not _is_moment(value):
            found[kind] = value.clone() if isinstance(value, Tensor) else value
            continue
        found[kind] = flat = torch.zeros(length, dtype=value.dtype, device=value.device)
        for param, start, numel in spans:
            if param in states:
                flat[start : start + numel] = states[param][kind].reshape(-1)
    return found


def _load_flat_states(optimizer: ShardedOptimizer, state: State) -> None:
    count = len(optimizer.shard_set.shards_by_group)
    flat = {number: _spans(optimizer, number) for number in range(count)}
    lengths = {number: (length,) for number, (_, length) in flat.items()}
    moments = [
        (number, value) for number, each in state["state"].items() for value in each.values()
    ]
    is_flat = len(state["param_groups"]) == count and all(
        tuple(value.shape) == lengths.get(number) for number, value in moments if _is_moment(value)
    )
    if not is_flat:
        load_inner(optimizer.shard_set, state)
        return
    found: dict[int, State] = {}
    groups = []
    for number, group in enumerate(state["param_groups"]):
        spans, _ = flat[number]
        groups.append({**group, "params": list(range(len(found), len(found) + len(spans)))})
        for param, start, numel in spans:
            found[len(found)] = {
                kind: value[start : start + numel].reshape(param.shape)
                if _is_moment(value)
                else value
                for kind, value in state["state"].get(number, {}).items()
            }
    load_inner(
        optimizer.shard_set,
        {"state": {key: each for key, each in found.items() if each}, "param_groups": groups},
    )


def _is_moment(value: Any) -> bool:
    """Return whether a state's value is per element. Step counts are not."""
    return isinstance(value, Tensor) and value.dim() > 0


def _spans(optimizer: ShardedOptimizer, number: int) -> tuple[list[_Span], int]:
    """Return a group's spans on this rank and the length of its flat tensors."""
    names = set(optimizer.shard_set.names_by_group[number])
    starts = dict[int, int]()
    length = 0
    for group in optimizer.runtime.trained_groups:
        if group.plan.master is not None and names & {slot.name for slot in group.layout.slots}:
            starts[id(group)] = length
            length += group.plan.master.numel(group.layout.padded_numel, group.layout.ranks)
    shards = optimizer.shard_set.shards_by_group[number]
    return [
        (shard.param, starts[id(shard.group)] + shard.start, shard.numel) for shard in shards
    ], length


def _state_of_nothing(optimizer: ShardedOptimizer, group: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the state that a rank would have if it had one element of a group.

    It is created by one step of a copy of the optimizer with a single element.
    """
    one = nn.Parameter(torch.zeros(1, device="cpu"))
    one.grad = torch.zeros(1, device="cpu")
    kind: Any = type(optimizer.inner)
    try:
        copy = kind([{**group, "params": [one]}])
    except TypeError:  # the class requires more arguments
        return {}
    copy.step()
    state = dict(copy.state[one])
    if "step" in state:
        updates = optimizer.updater.updates
        step = state["step"]
        state["step"] = torch.full_like(step, updates) if isinstance(step, Tensor) else updates
    return state


def scale_at_stage_0(settings: LossScaleSettings) -> LossScaleSettings:
    """Return settings that behave like DeepSpeed's loss scale at stage 0.

    DeepSpeed's optimizer has no hysteresis there and does not raise at the minimum scale.
    """
    return replace(settings, hysteresis=1, gives_up=False)


def named_class(inner: Any, settings: PlanSettings) -> type[NamedOptimizer]:
    """Return the class of sharded optimizers with DeepSpeed's names.

    DeepSpeed does not wrap the optimizer at stage 0 in fp32. In this case the returned class is
    also a subclass of the inner optimizer's class, and both optimizers compare equal.

    Args:
        inner: Class of the inner optimizer.
        settings: Settings of the sharding plan, which has the stage and the dtypes.

    Returns:
        A class whose constructor takes the argument of `ShardedOptimizer`.
    """
    is_plain = settings.stage == 0 and settings.policy.compute in (None, torch.float32)
    return _plain_class(inner) if is_plain else NamedOptimizer


def dropin_class(inner: Any, settings: PlanSettings) -> type[NamedOptimizer]:
    """Return the class of sharded optimizers in a program that imported `deepspeed`.

    Args:
        inner: Class of the inner optimizer.
        settings: Settings of the sharding plan, which has the stage and the dtypes.

    Returns:
        `DropInOptimizer` at stages 1 to 3, else the result of `named_class`.
    """
    return DropInOptimizer if settings.stage else named_class(inner, settings)


@cache
def _plain_class(inner: Any) -> type[NamedOptimizer]:
    def is_inner(self: NamedOptimizer, other: object) -> bool:
        return other is self or other is self.inner

    words = {"__eq__": is_inner, "__hash__": object.__hash__, "__module__": __name__}
    try:
        return type(NamedOptimizer.__name__, (NamedOptimizer, inner), words)
    except TypeError:  # the class has its own metaclass or layout
        return NamedOptimizer


class _Kind(type):
    """Metaclass of DeepSpeed's optimizer classes.

    There is a single optimizer class, so isinstance() depends on the settings of its engine.
    """

    fits: Callable[[PlanSettings], bool]

    def __instancecheck__(cls, instance: object) -> bool:
        return isinstance(instance, NamedOptimizer) and cls.fits(instance.runtime.settings)


class DeepSpeedZeroOptimizer(metaclass=_Kind):
    """isinstance() is true for optimizers of stages 1 and 2."""

    fits = staticmethod(lambda settings: settings.stage in (1, 2))


class DeepSpeedZeroOptimizer_Stage3(metaclass=_Kind):
    """isinstance() is true for optimizers of stage 3."""

    fits = staticmethod(lambda settings: settings.stage == 3)


class FP16_Optimizer(metaclass=_Kind):
    """isinstance() is true for fp16 optimizers of stage 0."""

    fits = staticmethod(
        lambda settings: settings.stage == 0 and settings.policy.compute is torch.float16
    )


# In DeepSpeed these are optimizers without a fused kernel, and no optimizer here has one.
class FP16_UnfusedOptimizer(metaclass=_Kind):
    """isinstance() is true for 16-bit optimizers of stage 0."""

    fits = staticmethod(
        lambda settings: (
            settings.stage == 0 and settings.policy.compute in (torch.float16, torch.bfloat16)
        )
    )


class BF16_Optimizer(metaclass=_Kind):
    """isinstance() is true for some bf16 optimizers of stages 0 and 1.

    At stage 1 gradients must be accumulated in fp32 and nothing may be offloaded.
    """

    @staticmethod
    def fits(settings: PlanSettings) -> bool:
        """Return whether an optimizer with these settings is an instance."""
        if settings.policy.compute is not torch.bfloat16:
            return False
        is_wide = settings.policy.accumulate is torch.float32
        return settings.stage == 0 or (
            settings.stage == 1 and is_wide and settings.state_tier is Tier.DEVICE
        )
