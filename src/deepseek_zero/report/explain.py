"""Where a step went, and what bounds it: phases of the clock, waits and sums of the meter, in sentences.

Called by the engine's `explain`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..base.quantities import format_bytes, format_count, format_seconds
from ..comm.meter import Event, Meter
from ..tiers.tier import Tier, Tiers

WORTH_SAYING = 0.02  # of a step
LANES = {"gather": "waiting for weights", "reduce": "waiting for gradients", "rows": "waiting to agree"}


@dataclass(frozen=True)
class Advice:
    """What of the settings a sentence of advice is made from.  ahead_numel: elements gathered ahead of their use.

    window_numel: gathered elements at a time.  largest_numel: of a unit.  in_place: gathers move nothing, so a wait is
    for a slower rank.
    """

    ahead_numel: int
    window_numel: int
    largest_numel: int
    in_place: bool


def shares(meter: Meter) -> dict[str, float]:
    """Parts of a step, largest first; they add up to 1.  Waits and sums are taken out of the phases around them."""
    seconds = meter.clock.seconds
    total = sum(seconds.values())
    if not total:
        return {}
    parts = {LANES[lane]: waited for lane, waited in meter.wait_seconds.items()}
    parts["adding gradients up"] = meter.sum_seconds
    # Weights are waited for in forward and backward, gradients in backward, agreement in the step: taken from the sum.
    parts["computing"] = seconds.get("forward", 0.0) + seconds.get("backward", 0.0)
    parts["computing"] -= sum(parts[each] for each in (LANES["gather"], LANES["reduce"]) if each in parts)
    parts["computing"] -= meter.sum_seconds
    parts["the optimizer"] = seconds.get("optimizer", 0.0) - parts.get(LANES["rows"], 0.0)
    parts["outside"] = seconds.get("outside", 0.0)
    return dict(sorted(((name, part / total) for name, part in parts.items()), key=lambda item: -item[1]))


def where_steps_went(meter: Meter, advice: Advice) -> list[str]:
    """Lines of text; one that says what is missing before there are two steps."""
    steps = meter.clock.steps
    if steps <= 0:
        return ["steps: measured from the second one on"]
    parts = shares(meter)
    mean = sum(meter.clock.seconds.values()) / steps
    told = ", ".join(f"{name} {part:.1%}" for name, part in parts.items() if part >= 0.0005)
    lines = [f"steps: {format_seconds(mean)} each over the last {steps}: {told}"]
    for lane, name in LANES.items():
        if parts.get(name, 0.0) >= WORTH_SAYING:
            lines.append(f"  {name} {parts[name]:.1%}: {_advice(lane, advice)}")
    return lines


def what_moved(tiers: Tiers, steps: int) -> list[str]:
    """A line per memory besides the device: bytes a step, speed, how much of it ran beside something else."""
    lines = []
    for tier, memory in tiers.memories.items():
        moved, total = memory.traffic, memory.traffic.read_bytes + memory.traffic.written_bytes
        if tier is Tier.HOST:
            lines.append(f"host: {format_bytes(memory.reserved_bytes)} rest there")
        elif steps > 0 and moved.seconds:
            hidden = max(0.0, 1 - moved.waited_seconds / moved.seconds)
            lines.append(
                f"disk: {format_bytes(memory.reserved_bytes)} rest there; a step reads "
                f"{format_bytes(moved.read_bytes / steps)} and writes {format_bytes(moved.written_bytes / steps)} at "
                f"{total / moved.seconds / 1e9:.2f} GB/s, {hidden:.0%} of that time beside something else"
            )
            if hidden < 1 - 2 * WORTH_SAYING:
                lines.append(f"  waiting for the disk {format_seconds(moved.waited_seconds / steps)} a step: {_SLOW}")
    return lines


_SLOW = "more tokens per step hide it, a larger buffer_count lets it run further ahead"


def _advice(lane: str, advice: Advice) -> str:
    if lane == "gather" and not advice.in_place:
        two, three = (format_count(units * advice.largest_numel) for units in (2, 3))
        if advice.ahead_numel < 2 * advice.largest_numel:
            return f"stage3_prefetch_bucket_size of {two} elements would start them two units ahead"
        if advice.window_numel < 3 * advice.largest_numel:
            return f"stage3_max_live_parameters of {three} elements would let them start earlier"
        return "weights travel slower than they are used; a larger micro-batch computes more with each"
    if lane == "reduce" and not advice.in_place:
        return "gradients travel slower than backward makes them; fewer micro-batch boundaries would send fewer"
    return "another rank comes later; give ranks equal batches and equal machines"


def overlap_share(events: Sequence[Event]) -> float:
    """Of the time in which a collective was under way, the part in which this rank did something else; 0 if none."""
    total = under_way_seconds(events)
    return (total - exposed_seconds(events)) / total if total else 0.0


def under_way_seconds(events: Sequence[Event]) -> float:
    """How long at least one collective was between its start and the arrival of its data."""
    return sum(stop - start for start, stop in _under_way(events))


def exposed_seconds(events: Sequence[Event]) -> float:
    """How long this rank did nothing else than wait for one that was under way."""
    standing = _merged([event.waited for event in events])
    pairs = ((span, wait) for span in _under_way(events) for wait in standing)
    return sum(max(0.0, min(stop, until) - max(start, since)) for (start, stop), (since, until) in pairs)


def _under_way(events: Sequence[Event]) -> list[tuple[float, float]]:
    return _merged([(event.issued, event.arrived) for event in events if event.arrived > event.issued])


def _merged(spans: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    found: list[tuple[float, float]] = []
    for start, stop in sorted(spans):
        if found and start <= found[-1][1]:
            found[-1] = (found[-1][0], max(found[-1][1], stop))
        else:
            found.append((start, stop))
    return found
