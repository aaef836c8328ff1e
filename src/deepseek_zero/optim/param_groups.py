"""Prepare the parameter groups of an optimizer that a program gives.

Tied and cut parameters are replaced, and PyTorch's fused kernels are enabled if the program left
the choice open. A step may use the hyper-parameters of an earlier one.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from ..base.device import CPU
from ..base.errors import UsageError
from ..sharding.runtime import Runtime

Hypers = list[dict[str, Any]]  # the options of each parameter group, without its parameters
TIED_TO = "_zero_tied_to"  # attribute: the parameter to which this one is tied
CUT_INTO = "_zero_cut_into"  # attribute: the parameters into which this one was cut
FUSED = (torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD, torch.optim.Adagrad)


def with_replacements(groups: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the parameter groups with tied and tiled parameters replaced.

    A parameter that `tie_shared` tied to another is replaced by the other one. A weight that was
    cut (extensions/cut_layers.py) is replaced by its tiles.

    Args:
        groups: The parameter groups that the optimizer received.

    Raises:
        UsageError: Two groups contain the same memory.
    """
    found: list[dict[str, Any]] = []
    seen: dict[int, int] = {}
    for number, group in enumerate(groups):
        mine: dict[int, nn.Parameter] = {}
        for param in group["params"]:
            one = param.__dict__.get(TIED_TO, param)
            if seen.setdefault(id(one), number) != number:
                raise UsageError(
                    f"a parameter of shape {tuple(one.shape)} is in the parameter groups "
                    f"{seen[id(one)]} and {number}: two Parameters there are one memory.",
                    "Each element is updated once, by the hyper-parameters of one group.",
                    "put both into one group, or give one its own values: "
                    "nn.Parameter(weight.detach().clone()).",
                )
            for each in one.__dict__.get(CUT_INTO, (one,)):
                mine[id(each)] = each
        found.append({**group, "params": list(mine.values())})
    return found


def are_updated_on_cpu(runtime: Runtime) -> bool:
    """Return whether all main weights are updated on a CPU."""
    masters = [group.master for group in runtime.trained_groups]
    return all(each is None or each.update_device == CPU for each in masters)


def prefer_fused(optimizer: Optimizer, *, on_cpu: bool) -> None:
    """Enable PyTorch's fused kernels if the user left the choice open.

    A fused kernel reads and writes memory once instead of many times.

    Args:
        optimizer: The inner optimizer, whose parameter groups are changed in place.
        on_cpu: Whether all shards of all ranks are updated on a CPU. PyTorch has no fused Adagrad
            on CUDA.
    """
    if type(optimizer) not in FUSED or (type(optimizer) is torch.optim.Adagrad and not on_cpu):
        return
    for group in optimizer.param_groups:
        if group.get("fused", False) is None and not group.get("foreach"):
            group["fused"] = True


@contextmanager
def with_hypers(optimizer: Optimizer, hypers: Hypers) -> Iterator[None]:
    """Return a context in which an optimizer has other hyper-parameters.

    Afterwards it has its own again, except for those that it changed itself in the context.

    Args:
        optimizer: The inner optimizer, whose parameter groups are changed in place.
        hypers: The hyper-parameters of each parameter group.
    """
    before = [dict(group) for group in optimizer.param_groups]
    for group, values in zip(optimizer.param_groups, hypers, strict=True):
        group.update(values)
    try:
        yield
    finally:
        for group, earlier, values in zip(optimizer.param_groups, before, hypers, strict=True):
            for key, value in values.items():
                if group[key] is value:
                    group[key] = earlier[key]
