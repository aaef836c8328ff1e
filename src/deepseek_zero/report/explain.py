"""Explain how the time of a step is spent and what limits it.

The input is the clock and the counters of the meter, and the links to other memories. The module
also computes how much of the recorded communication overlapped with other work.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from ..base.meter import AWAY, BETWEEN, Event, Meter
from ..base.quantities import format_bytes, format_count, format_seconds
from ..tiers.tier import TransferEvent
from .links import MemoryLink

Seconds = tuple[float, float]  # start and end, in seconds of time.perf_counter

WORTH_SAYING = 0.02  # share of a step
LANES = {
    "gather": "waiting for weights",
    "reduce": "waiting for gradients",
    "rows": "waiting for ranks",
}


@dataclass(frozen=True)
class Advice:
    """Sizes of a plan, from which `where_steps_went` derives its advice.

    Attributes:
        ahead_numel: Maximum number of weight elements whose gather starts before they are needed.
        window_numel: Maximum number of weight elements that are gathered at the same time.
        largest_numel: Number of weight elements in the largest unit.
        in_place: Whether gathers move no bytes, because ranks read each other's memory. Waiting for
            weights is then caused by slower ranks.
    """

    ahead_numel: int
    window_numel: int
    largest_numel: int
    in_place: bool


COMPUTING = "computing"
OPTIMIZER = "the optimizer"
OWN = (COMPUTING, OPTIMIZER, AWAY, BETWEEN)  # parts without waiting for other ranks


def seconds_by_part(meter: Meter) -> dict[str, float]:
    """Return the time of all steps by part, in seconds.

    Waits and sums are subtracted from the phases that contain them.
    """
    seconds = meter.clock.seconds
    parts = {LANES[lane]: waited for lane, waited in meter.wait_seconds.items()}
    parts["summing gradients"] = meter.sum_seconds
    # Waits for weights occur in forward and backward, for gradients in backward, and for agreement
    # in the optimizer.
    parts[COMPUTING] = seconds.get("forward", 0.0) + seconds.get("backward", 0.0)
    parts[COMPUTING] -= sum(
        parts[each] for each in (LANES["gather"], LANES["reduce"]) if each in parts
    )
    parts[COMPUTING] -= meter.sum_seconds
    parts[OPTIMIZER] = seconds.get("optimizer", 0.0) - parts.get(LANES["rows"], 0.0)
    parts[AWAY] = seconds.get(AWAY, 0.0)
    parts[BETWEEN] = seconds.get(BETWEEN, 0.0)
    return parts


def shares(meter: Meter) -> dict[str, float]:
    """Return the fractions of a step's time by part, which add up to 1, largest first."""
    total = sum(meter.clock.seconds.values())
    if not total:
        return {}
    parts = seconds_by_part(meter)
    return dict(
        sorted(((name, part / total) for name, part in parts.items()), key=lambda item: -item[1])
    )


def where_steps_went(meter: Meter, advice: Advice) -> list[str]:
    """Return lines of text that report how this rank spent the time of its steps.

    The first line contains the mean duration of a step and the fraction of each part. A kind of
    wait that takes at least 2 % of the time has a line with advice. Until two steps have been
    taken, the only line states that measurement starts with the second step.

    Args:
        meter: Measurements of all steps on this rank.
        advice: Sizes of the plan, from which the advice in the lines is derived.
    """
    steps = meter.clock.steps
    if steps <= 0:
        return ["steps: measured from the second step on"]
    parts = shares(meter)
    mean = sum(meter.clock.seconds.values()) / steps
    told = ", ".join(f"{name} {part:.1%}" for name, part in parts.items() if part >= 0.0005)
    lines = [f"steps: {format_seconds(mean)} each over the last {steps}: {told}"]
    for lane, name in LANES.items():
        if parts.get(name, 0.0) >= WORTH_SAYING:
            lines.append(f"  {name} {parts[name]:.1%}: {_advice(lane, advice)}")
    return lines


def what_moved(links: Sequence[MemoryLink]) -> list[str]:
    """Return lines of text that report the transfers to and from each other memory.

    A memory without transfers has one line with the bytes that it stores. If this rank waits for
    one of these memories for more than 2 % of a step, the last line contains advice for the memory
    with the longest wait.

    Args:
        links: The traffic between the device and each other memory on this rank, from `links_of`.
            If `links` is empty, the result is an empty list.
    """
    lines = [line for link in links for line in _carried(link)]
    slowest = max(links, key=lambda link: link.waited_seconds, default=None)
    if slowest is not None and slowest.waited_seconds > WORTH_SAYING * slowest.step_seconds:
        is_too_slow = slowest.needed_seconds > slowest.working_seconds
        advice = _LINK_BOUND if is_too_slow else _COULD_HIDE
        lines.append(f"  waiting for the {slowest.name} {advice}")
    return lines


def _carried(link: MemoryLink) -> list[str]:
    stored = f"{link.name}: stores {format_bytes(link.resting_bytes)}"
    if not link.moved_bytes:
        return [stored]
    return [
        f"{stored}; a step reads {format_bytes(link.read_bytes)} and writes "
        f"{format_bytes(link.written_bytes)} at {link.rate / 1e9:.2f} GB/s, {link.hidden:.0%} of "
        f"that time hidden, {format_seconds(link.waited_seconds)} of waiting",
        f"  lower bound {format_seconds(link.bound_seconds)} per step, {link.reached:.0%} of it "
        "reached: "
        f"the {link.name} at its highest rate ({link.best_rate / 1e9:.2f} GB/s) needs "
        f"{format_seconds(link.needed_seconds)}, the other work "
        f"{format_seconds(link.working_seconds)}",
    ]


_LINK_BOUND = "cannot be hidden: more tokens per step add compute that overlaps with it"
_COULD_HIDE = (
    "could be hidden: a larger offload_optimizer.buffer_count lets updates run further ahead, a "
    "larger stage3_prefetch_bucket_size gathers"
)


def _advice(lane: str, advice: Advice) -> str:
    if lane == "gather" and not advice.in_place:
        two, three = (format_count(units * advice.largest_numel) for units in (2, 3))
        if advice.ahead_numel < 2 * advice.largest_numel:
            return f"stage3_prefetch_bucket_size of {two} elements would start them two units ahead"
        if advice.window_numel < 3 * advice.largest_numel:
            return f"stage3_max_live_parameters of {three} elements would let them start earlier"
        return (
            "gathers are slower than the computation; a larger micro-batch computes more per gather"
        )
    if lane == "reduce" and not advice.in_place:
        return (
            "reductions are slower than backward; fewer micro-batches per step would "
            "send fewer gradients"
        )
    return "another rank is slower; use equal batches and equal machines"


# -- recorded communication


Travel = Event | TransferEvent


@dataclass
class Timeline:
    """Contains the recorded collectives and memory transfers of one rank.

    Attributes:
        collectives: The recorded collectives with their times, in the order in which the rank
            waited for them.
        transfers: The recorded transfers between memories with their times, in the order in which
            they were requested. A transfer that has not ended has the end time 0.0.
    """

    collectives: list[Event] = field(default_factory=list)
    transfers: list[TransferEvent] = field(default_factory=list)


def overlap_share(travels: Sequence[Travel], others: Sequence[Travel] = ()) -> float:
    """Return the fraction of the communication time in which this rank did other work.

    Args:
        travels: Recorded collectives or transfers.
        others: Further communication; waiting for it does not count as other work.

    Returns:
        A number from 0 to 1; 0 if there was no communication.
    """
    total = under_way_seconds(travels)
    return (total - exposed_seconds(travels, others)) / total if total else 0.0


def under_way_seconds(travels: Sequence[Travel]) -> float:
    """Return for how many seconds at least one of the collectives or transfers was in progress."""
    return sum(stop - start for start, stop in _under_way(travels))


def exposed_seconds(travels: Sequence[Travel], others: Sequence[Travel] = ()) -> float:
    """Return for how many seconds a transfer was in progress while this rank only waited.

    Args:
        travels: Recorded collectives or transfers.
        others: Further communication; waiting for it counts as well.
    """
    return _common_seconds(
        _under_way(travels), _merged([each.waited for each in (*travels, *others)])
    )


def _under_way(travels: Sequence[Travel]) -> list[Seconds]:
    return _merged([each.under_way for each in travels if each.under_way[1] > each.under_way[0]])


def _common_seconds(left: Sequence[Seconds], right: Sequence[Seconds]) -> float:
    """Return the overlap of two sorted lists of disjoint intervals."""
    found = 0.0
    mine = 0
    theirs = 0
    while mine < len(left) and theirs < len(right):
        (start, stop), (since, until) = left[mine], right[theirs]
        found += max(0.0, min(stop, until) - max(start, since))
        if stop < until:
            mine += 1
        else:
            theirs += 1
    return found


def _merged(spans: Sequence[Seconds]) -> list[Seconds]:
    found: list[Seconds] = []
    for start, stop in sorted(spans):
        if found and start <= found[-1][1]:
            found[-1] = (found[-1][0], max(found[-1][1], stop))
        else:
            found.append((start, stop))
    return found
