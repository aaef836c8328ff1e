"""Parameter groups of an optimizer, without parameters that others stand for."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from torch import nn

from ..base.errors import UsageError

TIED_TO = "_zero_tied_to"  # attribute: the parameter that it was made one with
CUT_INTO = "_zero_cut_into"  # attribute: the parameters that it was cut into


def without_twins(groups: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the parameter groups that an optimizer was given, without twins and cut weights.

    Each Parameter that `tie_shared` made one with another is left out. The tiles of a weight that
    was cut (extensions/cut_layers.py) stand in its place.
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
