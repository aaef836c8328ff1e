"""DeepSpeed's `deepspeed.moe.utils`: separate parameters of experts from others.

A parameter of an expert has `allreduce = False`, and its `group_name` is the name of the ranks that
share it. Here all ranks do (moe_layers.py). Programs call these functions for every model.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from .moe_layers import MoE

Groups = list[dict[str, Any]]  # of the parameters of an optimizer
Params = list[nn.Parameter]


def is_moe_param(param: Tensor) -> bool:
    """Return whether a parameter belongs to an expert."""
    return getattr(param, "allreduce", True) is False


def is_moe_param_group(param_group: Mapping[str, Any]) -> bool:
    """Return whether a parameter group contains parameters of experts."""
    return bool(param_group.get("moe", False))


def has_moe_layers(m: nn.Module) -> tuple[bool, int]:
    """Return whether a model has MoE layers, and the last one's number of experts."""
    counts = [each.num_experts for each in m.modules() if isinstance(each, MoE)]
    return bool(counts), counts[-1] if counts else 0


def split_params_into_shared_and_expert_params(
    params: Iterable[nn.Parameter],
) -> tuple[Params, Params]:
    """Return the shared parameters and the parameters of experts."""
    shared: Params = []
    experts: Params = []
    for param in params:
        (experts if is_moe_param(param) else shared).append(param)
    return shared, experts


def split_params_grads_into_shared_and_expert_params(
    group: Iterable[nn.Parameter],
) -> tuple[list[Tensor], list[Tensor]]:
    """Return the existing gradients of shared parameters and of parameters of experts."""
    shared: list[Tensor] = []
    experts: list[Tensor] = []
    for param in group:
        if param.grad is not None:
            (experts if is_moe_param(param) else shared).append(param.grad)
    return shared, experts


def split_params_into_different_moe_groups_for_optimizer(
    param_groups: Mapping[str, Any] | Sequence[dict[str, Any]],
    max_group_size: float | None = 178_956_971,
) -> Groups:
    """Move parameters of experts into separate groups by `group_name`.

    Args:
        param_groups: One or more parameter groups, whose "params" are changed.
        max_group_size: Largest number of elements of a group of experts; None for no limit.

    Returns:
        The given groups, followed by those of the experts.

    Raises:
        ValueError: `param_groups` has the wrong type.
    """
    if not isinstance(param_groups, Mapping | list | tuple):
        raise ValueError(f"Unknown param group type of {type(param_groups)}")
    groups: list[Any] = [param_groups] if isinstance(param_groups, Mapping) else list(param_groups)
    apart: Groups = []
    for group in groups:
        shared, experts = split_params_into_shared_and_expert_params(group["params"])
        group["params"] = shared
        for name in dict.fromkeys(getattr(param, "group_name", "") for param in experts):
            mine = [param for param in experts if getattr(param, "group_name", "") == name]
            apart += [
                {**group, "name": name, "moe": True, "params": part}
                for part in _bounded(mine, max_group_size)
            ]
    return groups + apart


def _bounded(params: Sequence[nn.Parameter], most: float | None) -> list[Params]:
    parts: list[Params] = []
    size = 0
    for param in params:
        numel = int(getattr(param, "ds_numel", param.numel()))
        if not parts or (most is not None and size + numel > most):
            parts.append([])
            size = 0
        parts[-1].append(param)
        size += numel
    return parts


def configure_moe_param_groups(model_parameters: list[Any]) -> Groups:
    """Return parameter groups for an optimizer from a list of parameters or of groups.

    Raises:
        TypeError: An element is neither a tensor nor a dict.
    """
    assert isinstance(model_parameters, list), "model_parameters must be a list"
    for each in model_parameters:
        if not isinstance(each, Tensor | dict):
            raise TypeError(f"an optimizer takes tensors or dicts, but got {type(each)}")
    if isinstance(model_parameters[0], Tensor):
        return split_params_into_different_moe_groups_for_optimizer(
            {"params": model_parameters, "name": "dense-params"}
        )
    if any("moe" in group for group in model_parameters):
        return model_parameters
    return split_params_into_different_moe_groups_for_optimizer(model_parameters)
