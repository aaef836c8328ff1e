"""Replace tied and cut parameters in the parameter groups of an optimizer."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from torch import nn

from ..base.errors import UsageError

TIED_TO = "_zero_tied_to"  # attribute: the parameter to which this one is tied
CUT_INTO = "_zero_cut_into"  # attribute: the parameters into which this one was cut


def without_twins(groups: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the parameter groups with tied and cut parameters replaced.

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
