"""Where a chain of layers is cut into stages: boundaries, from what each layer costs.

A partition is a tuple of stages + 1 layer numbers: stage g has the layers [found[g], found[g + 1]).
It depends on numbers alone, so every rank computes the same one.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from ..base.errors import NotBuiltError, UsageError, shown

METHODS = ("best", "uniform", "parameters", "type:REGEX")
SLACK = 1.02  # "best" gives up so much of the balance of work for the balance of memory


@dataclass(frozen=True)
class LayerCost:
    """What one layer costs its stage.

    kind: its class's name.  trainable: elements that are trained.  flops: of a micro-batch's
    forward.  state_bytes: weights, gradients, master and moments.  saved_bytes: what a micro-batch
    leaves for backward.
    """

    kind: str = ""
    trainable: int = 0
    flops: int = 0
    state_bytes: int = 0
    saved_bytes: int = 0


def partition(
    method: str, layers: Sequence[LayerCost], stages: int, in_flight: Sequence[int] | None = None
) -> tuple[int, ...]:
    """Cut the layers into stages, none of them empty.

    method: "uniform" (equal numbers of layers), "parameters" (equal trained elements), "type:REGEX"
    (equal numbers of layers whose class's name matches, in any case), "best" (equal work; of the
    cuts that are near enough, the one whose fullest stage needs least memory).  in_flight: by
    stage, micro-batches whose activations are kept; for "best". UsageError for fewer layers than
    stages, or a method that is unknown.
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
        matches = [
            int(re.search(pattern, layer.kind, re.IGNORECASE) is not None) for layer in layers
        ]
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


def uniform(layers: int, stages: int) -> tuple[int, ...]:
    """Equal numbers of layers; the first stages have one more where they do not divide."""
    each, more = divmod(layers, stages)
    return tuple(stage * each + min(stage, more) for stage in range(stages + 1))


def balanced(weights: Sequence[float], stages: int) -> tuple[int, ...]:
    """The cut whose heaviest stage weighs least; of those, the one whose next heaviest does, as far
    as that is seen from the front.  No stage is empty.
    """
    bounds = [*accumulate(weights, initial=0)]
    found = _cut_to_fit(bounds, stages, _smallest_bottleneck(bounds, stages))
    assert found is not None
    return found


def _smallest_bottleneck(bounds: Sequence[float], stages: int) -> float:
    """The weight of the heaviest stage of the best cut.

    best[k] is that of the first k layers; one stage is added at a time, and grows until it is the
    heaviest itself.
    """
    layers = len(bounds) - 1
    best = list(bounds)
    for stage in range(2, stages + 1):
        longer = [float("inf")] * (layers + 1)
        for end in range(stage, layers + 1):
            # the last cut: best rises with it, the last stage's weight falls
            low = stage - 1
            high = end - 1
            while low < high:
                middle = (low + high) // 2
                if best[middle] >= bounds[end] - bounds[middle]:
                    high = middle
                else:
                    low = middle + 1
            before = [cut for cut in (low - 1, low) if stage - 1 <= cut < end]
            longer[end] = min(max(best[cut], bounds[end] - bounds[cut]) for cut in before)
        best = longer
    return best[layers]


def _cut_to_fit(bounds: Sequence[float], stages: int, most: float) -> tuple[int, ...] | None:
    """A cut of which no stage weighs more than `most`, each stage as near the mean of what is left
    as that allows.
    """
    layers = len(bounds) - 1
    # The first layer from which the rest fits into so many stages.
    earliest = [layers]
    for stage in range(1, stages + 1):
        end = earliest[-1]
        start = end
        while start > 0 and bounds[end] - bounds[start - 1] <= most:
            start -= 1
        earliest.append(min(start, layers - stage))
    if earliest[stages] > 0:
        return None
    found = [0]
    for stage in range(stages - 1):
        left = stages - stage
        start = found[-1]
        low = max(start + 1, earliest[left - 1])
        high = layers - (left - 1)
        fitting = [cut for cut in range(low, high + 1) if bounds[cut] - bounds[start] <= most]
        if not fitting:
            return None
        ideal = (bounds[layers] - bounds[start]) / left
        found.append(min(fitting, key=lambda cut: (abs(bounds[cut] - bounds[start] - ideal), cut)))
    return (*found, layers)


def _best(layers: Sequence[LayerCost], stages: int, in_flight: Sequence[int]) -> tuple[int, ...]:
    """The cut with the lightest fullest stage, among those whose work is balanced within
    `SLACK`.
    """
    work = [*accumulate((layer.flops for layer in layers), initial=0)]
    if not work[-1]:
        work = [*accumulate((layer.trainable for layer in layers), initial=0)]
    states = [*accumulate((layer.state_bytes for layer in layers), initial=0)]
    saved = [*accumulate((layer.saved_bytes for layer in layers), initial=0)]
    most = _smallest_bottleneck(work, stages) * SLACK
    count = len(layers)
    # By end: the least (fullest, heaviest) of a cut of the first layers into `stage` stages, and
    # where it ends before.
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
