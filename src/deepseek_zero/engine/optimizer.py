"""The optimizer of a client or a configuration, and its parameter groups."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import ReduceLROnPlateau

from ..base.errors import UsageError, shown
from ..kernels.rules import OPEN_OPTIONS
from ..optim.param_groups import with_replacements
from ..optim.shard_set import unknown_parameter
from ..optimizers.registry import granularity_of, resolve_optimizer
from ..planner.memory import MOMENT_OPTIONS
from ..planner.update import ParamGroupPlan
from .client_states import ClientStates

if TYPE_CHECKING:  # as in engine.py
    from ..config import Config


Client = Optimizer | Callable[[list[Any]], Optimizer] | None
Groups = list[dict[str, Any]]  # parameter groups
Make = Callable[[Groups], Optimizer]


@dataclass(frozen=True)
class OptimizerParts:
    """The parameter groups of an optimizer, and how to build it over shards.

    Attributes:
        groups: The parameter groups, of whole parameters.
        make: Builds the optimizer over shards of main weights.
        cls: Its class; None without an optimizer.
        granularity: For each group, how finely its state may be cut.
        planned: The groups by names of parameters, as the planner needs them.
        states: The states that a client's optimizer already has.
    """

    cls: type[Optimizer] | None = None
    groups: Sequence[dict[str, Any]] = ()
    make: Make | None = None
    granularity: tuple[str, ...] = ()
    planned: tuple[ParamGroupPlan, ...] = ()
    states: ClientStates | None = None


def optimizer_parts(
    config: Config,
    model: nn.Module,
    client: Client,
    params: Sequence[Any] | None,
    *,
    is_part: bool = False,
    coordinate: int = 0,
) -> OptimizerParts:
    """Build the parameter groups and the constructor of the optimizer.

    They are empty if neither the client nor the configuration has an optimizer.

    Args:
        config: The run's configuration, from which the settings are read.
        model: The model whose parameters are trained.
        client: The client's optimizer, or a callable that makes one.
        params: The parameters or parameter groups to train; None for all that require gradients.
        is_part: Whether the model has only some stages of a pipeline; parameters of other stages
            are left out.
        coordinate: The coordinate of this rank along "tp".

    Returns:
        The parameter groups of whole parameters, and a function that builds the optimizer over
        their shards.
    """
    if is_part:
        params = forget_others(model, client, params)
    if callable(client) and not isinstance(client, Optimizer):
        groups = _groups(model, params)
        has_groups = params is not None and any(isinstance(each, dict) for each in params)
        made = client(groups if has_groups else groups[0]["params"])
        if not isinstance(made, Optimizer):
            raise UsageError(
                f"the callable passed as optimizer returned {shown(made)}, which is not a "
                "torch.optim.Optimizer.",
                "It is called with parameters or parameter groups, and the returned optimizer "
                "steps over shards of them.",
                "return an optimizer, for example torch.optim.AdamW(params, lr=0.001).",
            )
        client = made
    if isinstance(client, Optimizer):
        groups = list(client.param_groups)
        cut = tuple(granularity_of(client, group) for group in groups)
        planned = planned_groups(model, groups, cut)
        states = client_states(client, coordinate)
        return OptimizerParts(type(client), groups, adopting(client), cut, planned, states)
    if config.optimizer.type is None:
        return OptimizerParts()
    spec = resolve_optimizer(config.optimizer.type, config.optimizer.params)
    # Include frozen parameters: they are updated after they are unfrozen.
    empty = "model_parameters is empty."
    if params is None:
        params = list(model.parameters())
        empty = "No parameter of the model requires a gradient."
    groups = spec.parameter_groups(model, _groups(model, params))
    if not any(group["params"] for group in groups):
        raise UsageError(
            f"optimizer {config.optimizer.type} has nothing to train.",
            empty,
            "remove the optimizer from the configuration to run only inference, or let "
            "parameters require gradients.",
        )
    decisive = MOMENT_OPTIONS | OPEN_OPTIONS.keys()
    defaults = {key: value for key, value in spec.defaults.items() if key in decisive}
    cut = tuple(granularity_of(spec.cls, group) for group in groups)
    return OptimizerParts(
        spec.cls, groups, spec.build, cut, planned_groups(model, groups, cut, defaults)
    )


def forget_others(
    model: nn.Module, optimizer: Any, params: Sequence[Any] | None
) -> Sequence[Any] | None:
    """Remove the parameters of other pipeline stages from an optimizer's groups.

    Args:
        model: The model with the stages of this rank.
        optimizer: The client's optimizer, whose groups are changed in place. Anything that is not
            an optimizer is ignored.
        params: The parameters or parameter groups to train, or None.

    Returns:
        `params` without the parameters of other stages.
    """
    own = {id(param) for param in model.parameters()}

    def kept(members: Sequence[Any]) -> list[Any]:
        found = []
        for each in members:
            if isinstance(each, Mapping):
                found.append({**each, "params": kept(each["params"])})
            elif id(each[1] if isinstance(each, tuple) else each) in own:
                found.append(each)
        return found

    if isinstance(optimizer, Optimizer):
        for group in optimizer.param_groups:
            group["params"] = kept(group["params"])
    return None if params is None else kept(params)


def planned_groups(
    model: nn.Module,
    groups: Sequence[dict[str, Any]],
    granularity: Sequence[str],
    defaults: Mapping[str, Any] | None = None,
) -> tuple[ParamGroupPlan, ...]:
    """Describe parameter groups for the planner, by the names of their parameters.

    Args:
        model: The model whose parameters are trained.
        groups: The optimizer's parameter groups, which contain parameters of `model`.
        granularity: For each group, how finely its state may be cut.
        defaults: The defaults of hyper-parameters that decide how many moments there are, and
            whether a kernel updates them.

    Returns:
        One description per parameter group, in the same order.

    Raises:
        UsageError: A group has a parameter that the model does not have.
    """
    names = {id(param): name for name, param in model.named_parameters()}
    given = with_replacements(groups)
    for group in given:
        for param in group["params"]:
            if id(param) not in names:
                raise unknown_parameter(param)
    return tuple(
        ParamGroupPlan(
            {**(defaults or {}), **{key: value for key, value in group.items() if key != "params"}},
            frozenset(names[id(param)] for param in group["params"]),
            cut != "element",
        )
        for group, cut in zip(given, granularity, strict=True)
    )


def adopting(client: Optimizer) -> Make:
    """Return a function that reuses the client's optimizer, with slices as parameters.

    The object stays the same, so schedulers bound to it keep working.
    """

    def adopt(groups: Groups) -> Optimizer:
        for key in [key for key in client.state if isinstance(key, Tensor)]:
            del client.state[key]  # the state of a whole parameter, which `ClientStates` keeps
        for mine, sliced in zip(client.param_groups, groups, strict=True):
            mine["params"] = sliced["params"]
        return client

    return adopt


def client_states(client: Optimizer, coordinate: int) -> ClientStates | None:
    """Return the state of a client's optimizer for whole parameters, or None if empty.

    Args:
        client: The user's optimizer, which may already have state for whole parameters.
        coordinate: The coordinate of this rank along "tp".

    Returns:
        The states, from which those of shards are cut; None if the optimizer has no state.

    Raises:
        UsageError: The state counts steps, or a parameter group holds tensors with elements. Only
            the state in `Optimizer.state` is cut.
    """
    name = type(client).__name__
    for number, group in enumerate(client.param_groups):
        for key, value in group.items():
            values = value.values() if isinstance(value, Mapping) else value
            if key == "params" or isinstance(values, str | Tensor):
                continue
            if isinstance(values, Iterable) and any(
                isinstance(each, Tensor) and each.dim() > 0 for each in values
            ):
                raise UsageError(
                    f"parameter group {number} of {name} has tensors under '{key}'.",
                    "Only the optimizer's `state`, by parameter, can be split into shards.",
                    "store them there: self.state[param]['name'] = tensor.",
                )
    states = ClientStates(client, coordinate)
    if counted := states.most_steps:
        raise UsageError(
            f"the {name} that was passed as optimizer has already taken steps: its state counts "
            f"{counted:g}.",
            "The engine counts steps from its own first step, so schedule, loss scale and "
            "optimizer "
            "would disagree.",
            "pass a fresh optimizer and load its state from a checkpoint afterwards.",
        )
    return None if states.are_empty else states


def _groups(model: nn.Module, params: Sequence[Any] | None) -> Groups:
    """Return parameters or parameter groups as parameter groups."""
    if params is None:
        params = [param for param in model.parameters() if param.requires_grad]
    if params and isinstance(params[0], dict):
        return with_replacements({**group, "params": _unnamed(group["params"])} for group in params)
    return with_replacements([{"params": _unnamed(params)}])


def _unnamed(members: Iterable[Any]) -> list[Any]:
    """Return the parameters of a list that may have (name, parameter) pairs."""
    return [item[1] if isinstance(item, tuple) else item for item in members]


def move_rates(scheduler: Any, lr_kwargs: dict[str, Any]) -> None:
    """Advance a learning-rate schedule by one step.

    Args:
        scheduler: The schedule, with the interface of `torch.optim.lr_scheduler`.
        lr_kwargs: Keyword arguments that are passed to its `step`.

    Raises:
        UsageError: A ReduceLROnPlateau received no metric.
    """
    if isinstance(scheduler, ReduceLROnPlateau) and "metrics" not in lr_kwargs:
        raise UsageError(
            "ReduceLROnPlateau received no metric.",
            "It lowers the rate when a metric stops improving, and engine.step() has none.",
            'pass one: engine.step(lr_kwargs={"metrics": loss}).',
        )
    scheduler.step(**lr_kwargs)
