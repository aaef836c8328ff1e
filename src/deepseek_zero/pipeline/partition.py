"""Divide a chain of layers into stages by the cost of each layer.

A partition is a tuple of stages + 1 layer numbers: stage g has the layers
[bounds[g], bounds[g + 1]). It depends only on numbers, so every rank computes the same one.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate

from ..base.errors import NotBuiltError, UsageError, shown

Bounds = tuple[int, ...]  # the first layer of each stage, then the number of layers
METHODS = ("best", "uniform", "parameters", "type:REGEX")
SLACK = 1.02  # tolerance in the balance of work that "best" accepts for a better balance of memory


@dataclass(frozen=True)
class LayerCost:
    """The costs of one layer, by which `partition` balances the stages.

    Attributes:
        kind: Name of the layer's class.
        trainable: Number of trained elements.
        flops: Floating-point operations of one micro-batch's forward.
        state_bytes: Bytes of weights, gradients, main weights and optimizer moments.
        saved_bytes: Bytes that a micro-batch saves for backward.
    """

    kind: str = ""
    trainable: int = 0
    flops: int = 0
    state_bytes: int = 0
    saved_bytes: int = 0


def partition(
    method: str, layers: Sequence[LayerCost], stages: int, in_flight: Sequence[int] | None = None
) -> Bounds:
    """Divide layers into stages, none of them empty.

    Args:
        method: "uniform" (equal numbers of layers), "parameters" (equal numbers of trained
            elements), "type:REGEX" (equal numbers of layers with a matching class name, ignoring
            case), or "best" (equal work; among nearly equal divisions, the least memory of the
            fullest stage).
        layers: Cost of each layer, in the order of the model.
        stages: Number of stages.
        in_flight: For each stage, the number of micro-batches with saved activations; used by
            "best". None means one micro-batch for each.

    Returns:
        The number of each stage's first layer, followed by the number of layers.

    Raises:
        UsageError: There are fewer layers than stages, the method is unknown or matches nothing, or
            its regular expression is invalid.
        NotBuiltError: The method is "profile".
    """
    if len(layers) < stages:
        raise UsageError(
            f"{len(layers)} layers are cut into {stages} stages.",
            "A stage has one layer at least.",
            f"use {len(layers)} stages at most, or a deeper model.",
        )
    name = method.lower()
    if name == "uniform":
        return uniform(len(layers), stages)
    if name == "parameters":
        return balanced([layer.trainable for layer in layers], stages)
    if name.startswith("type:"):
        pattern = method.split(":", 1)[1]
        try:
            regex = re.compile(pattern, re.IGNORECASE)
        except re.error as error:
            raise UsageError(
                f"partition {shown(method)} is no regular expression: {error}.",
                "It is compared with the class name of each layer.",
                "name a class, for example type:Block.",
            ) from error
        matches = [int(regex.search(layer.kind) is not None) for layer in layers]
        if not any(matches):
            kinds = ", ".join(dict.fromkeys(layer.kind for layer in layers))
            raise UsageError(
                f"partition {shown(method)} matches no layer.",
                f"The layers are {kinds}.",
                "name one of these classes.",
            )
        return balanced(matches, stages)
    if name == "best":
        return _best(layers, stages, in_flight or [1] * stages)
    if name == "profile":
        raise NotBuiltError(
            "Partitioning method profile not implemented.",
            "",
            f"use one of {', '.join(METHODS)}; best counts work.",
        )
    raise UsageError(
        f"Partitioning method {method} not implemented.", "", f"use one of {', '.join(METHODS)}."
    )


def uniform(layers: int, stages: int) -> Bounds:
    """Divide layers into stages of equal length; the first stages get the remainder.

    Args:
        layers: Number of layers to divide.
        stages: Number of stages.

    Returns:
        The number of each stage's first layer, followed by `layers`.
    """
    each, more = divmod(layers, stages)
    return tuple(stage * each + min(stage, more) for stage in range(stages + 1))


def balanced(weights: Sequence[float], stages: int) -> Bounds:
    """Divide layers so that the largest total weight of a stage is minimal. No stage is empty.

    If several divisions are optimal, each stage in turn gets the weight that is nearest to the mean
    of the remaining stages.

    Args:
        weights: Weight of each layer, for example its number of parameters.
        stages: Number of stages.

    Returns:
        The number of each stage's first layer, followed by the number of layers.
    """
    bounds = _sums(weights)
    return _cut_to_fit(bounds, stages, _smallest_bottleneck(bounds, stages))


def _sums(weights: Iterable[float]) -> list[float]:
    """Return the weight of the first k layers, for every k."""
    return [*accumulate(weights, initial=0)]


def _smallest_bottleneck(bounds: Sequence[float], stages: int) -> float:
    """Return the weight of the heaviest stage of the best division.

    best[k] is that weight for the first k layers. Stages are added one at a time.
    """
    layers = len(bounds) - 1
    best = list(bounds)
    for stage in range(2, stages + 1):
        longer = [float("inf")] * (layers + 1)
        for end in range(stage, layers + 1):
            # Search the last cut: best rises with it, and the last stage's weight falls
            cuts = range(stage - 1, end)
            place = bisect_left(cuts, True, key=lambda cut: best[cut] >= bounds[end] - bounds[cut])
            near = cuts[max(place - 1, 0) : place + 1]
            longer[end] = min(max(best[cut], bounds[end] - bounds[cut]) for cut in near)
        best = longer
    return best[layers]


def _cut_to_fit(bounds: Sequence[float], stages: int, most: float) -> Bounds:
    """Return a division in which no stage weighs more than `most`, if there is one.

    Each stage is as close as possible to the mean of the remaining weight.
    """
    layers = len(bounds) - 1
    # By number of stages: the first layer from which the rest fits into that many stages.
    earliest = [layers]
    for stage in range(1, stages + 1):
        end = earliest[-1]
        start = end
        while start > 0 and bounds[end] - bounds[start - 1] <= most:
            start -= 1
        earliest.append(min(start, layers - stage))
    found = [0]
    for stage in range(stages - 1):
        left = stages - stage
        start = found[-1]
        low = max(start + 1, earliest[left - 1])
        high = layers - (left - 1)
        fitting = [cut for cut in range(low, high + 1) if bounds[cut] - bounds[start] <= most]
        ideal = (bounds[layers] - bounds[start]) / left
        found.append(min(fitting, key=lambda cut: (abs(bounds[cut] - bounds[start] - ideal), cut)))
    return (*found, layers)


def _best(layers: Sequence[LayerCost], stages: int, in_flight: Sequence[int]) -> Bounds:
    """Minimize the memory of the fullest stage, with work balanced within `SLACK`."""
    work = _sums(layer.flops for layer in layers)
    if not work[-1]:
        work = _sums(layer.trainable for layer in layers)
    states = _sums(layer.state_bytes for layer in layers)
    saved = _sums(layer.saved_bytes for layer in layers)
    most = _smallest_bottleneck(work, stages) * SLACK
    count = len(layers)
    # By end: the smallest (memory, work) of the largest stage over divisions of the first layers
    # into `stage` stages; `cuts` has the start of the last stage.
    best: dict[int, tuple[float, float]] = {0: (0.0, 0.0)}
    cuts: list[dict[int, int]] = []
    for stage in range(stages):
        longer: dict[int, tuple[float, float]] = {}
        cut: dict[int, int] = {}
        for end in range(stage + 1, count - (stages - stage - 1) + 1):
            for start in range(end - 1, stage - 1, -1):
                if (weighs := work[end] - work[start]) > most:
                    break
                if start not in best:
                    continue
                needs = states[end] - states[start] + in_flight[stage] * (saved[end] - saved[start])
                score = max(best[start][0], needs), max(best[start][1], weighs)
                if end not in longer or score < longer[end]:
                    longer[end], cut[end] = score, start
        best = longer
        cuts.append(cut)
    found = [count]
    for cut in reversed(cuts):
        found.append(cut[found[-1]])
    return tuple(reversed(found))
