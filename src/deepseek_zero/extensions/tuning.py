"""Adjusts message and prefetch sizes during a run, on all ranks alike.

Every PERIOD steps the ranks compare how long the slowest of them waited. If the wait is long
enough, a size doubles. If the wait then does not fall, the old size is restored for good. Only
sizes that the user left open are changed. Results do not depend on them, because the plan fixes the
order of each sum.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from ..base.log import log_once
from ..comm.collectives import Comm
from ..planner.plan_settings import PlanSettings
from ..sharding.regroup import resize
from ..sharding.runtime import Runtime

PERIOD = 4  # Steps between two comparisons
WORTH = 0.02  # Waits shorter than this share of a step are ignored
GAIN = 0.9  # A larger size is kept if it reduces the wait at least to this share
KEYS = {"ahead_numel": "stage3_prefetch_bucket_size", "bucket_numel": "reduce_bucket_size"}
LANES = {"ahead_numel": "gather", "bucket_numel": "reduce"}


@dataclass
class Knob:
    """A message or prefetch size, in elements, that is adjusted during a run.

    Attributes:
        name: The name of the setting.
        value: The size that is used now.
        floor: The smallest size after the first change.
        ceiling: The largest size that is tried.
        before: The size, and the fraction of a step that ranks waited, before the last change.
        is_done: Whether the size is not changed any more.
    """

    name: str
    value: int
    floor: int
    ceiling: int
    before: tuple[int, float] | None = None
    is_done: bool = False

    def adjust(self, share: float) -> bool:
        """Adjust the size to the time that ranks wait for messages.

        Args:
            share: The fraction of a step that the slowest rank waited.

        Returns:
            True if the size changed.
        """
        if self.before is not None and share > GAIN * self.before[1]:
            self.value = self.before[0]
            self.is_done = True
            return True
        if share < WORTH or self.value >= self.ceiling:
            self.is_done = True
            return False
        self.before = self.value, share
        self.value = min(self.ceiling, max(2 * self.value, self.floor))
        return True


class Tuner:
    """Adjusts the message and prefetch sizes of one engine, one size after another.

    Args:
        settings: The settings of the plan. Only the sizes that the user has not configured are
            adjusted.
        sizes: The number of elements of each unit, which limit the sizes.
        comm: The communicator of all ranks, which compare their waiting times.
    """

    def __init__(self, settings: PlanSettings, sizes: Sequence[int], comm: Comm) -> None:
        self.comm = comm
        self.steps = 0
        self._seen: dict[str, float] = {}
        largest = max(sizes, default=0)
        total = sum(sizes)
        limits = {
            "ahead_numel": (2 * largest, min(settings.window_numel, total)),
            "bucket_numel": (0, largest),
        }
        travels = comm.size > 1 and settings.overlap and not comm.reads_in_place
        names = settings.tunes if travels else ()
        self.knobs = [Knob(name, getattr(settings, name), *limits[name]) for name in names]

    def after_step(self, runtime: Runtime) -> None:
        """Measure the step, and change a message or prefetch size if ranks wait too long.

        Args:
            runtime: The runtime of the model whose sizes are changed.

        Note:
            Collective every PERIOD steps, until all sizes are chosen.
        """
        if changed := self.choose():
            resize(runtime, replace(runtime.settings, **changed))

    def choose(self) -> dict[str, Any]:
        """Double or restore a size at the end of every PERIOD steps.

        Returns:
            The new size under the name of its setting; empty if no size changes.

        Note:
            Collective every PERIOD steps, until all sizes are chosen.
        """
        self.steps += 1
        knob = next((knob for knob in self.knobs if not knob.is_done), None)
        if knob is None or self.steps % PERIOD:
            return {}
        meter = self.comm.meter
        lane = LANES[knob.name]
        totals = {**meter.wait_seconds, "all": sum(meter.clock.seconds.values())}
        waited, passed = (
            totals.get(name, 0.0) - self._seen.get(name, 0.0) for name in (lane, "all")
        )
        self._seen = totals
        own_share = waited / passed if passed > 0 else 0.0
        row = torch.tensor([own_share], dtype=torch.float64, device="cpu")
        share = float(self.comm.all_gather_rows(row, "waits").max())
        old = knob.value
        if not knob.adjust(share):
            return {}
        log_once(
            f"{KEYS[knob.name]} {old:,} -> {knob.value:,} elements: {share:.1%} of a step waits "
            f"for a {lane}"
        )
        return {knob.name: knob.value}


def tune_sizes(runtime: Runtime) -> None:
    """Adjust the message and prefetch sizes that the user has not configured, during the run.

    Args:
        runtime: The runtime of the wrapped model, whose steps are measured.
    """
    tuner = Tuner(runtime.settings, [unit.numel for unit in runtime.units], runtime.comm)
    if tuner.knobs:
        runtime.after_steps.append(tuner.after_step)
