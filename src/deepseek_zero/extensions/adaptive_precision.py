"""Adaptive precision (precision "auto"): chooses the units that compute in fp32. The choice follows
from the gradients of each unit, and is taken back when 16 bits would do.

A step whose gradient was not finite may name a unit (nonfinite.py): one that is named `PATIENCE`
times in a row, or once at the smallest loss scale, is promoted at once.  Beside that, once in every
window of steps each unit's reduced gradient is looked at as it is, multiplied by the loss scale:

    lost     of its elements that are not zero, those of at most 2^-24, fp16's smallest number
    largest  the largest of them, which 16 bits must hold once the unit is demoted

A unit in 16 bits has a bad window where more than `LOST` of the elements are lost, where all of
them are zero and others' are not, or where a skipped step named it; `BAD` of them in a row promote
it.  A promoted one has a good window where no more than `KEPT` would be lost, the largest is well
within fp16, and no skipped step named it; as many as its patience in a row demote it, `GOOD` at
first and twice as many after each time that it had to be promoted again.

Counts are added up over ranks, so that any number of ranks decides alike; every rank decides from
the same numbers alone.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from ..base.log import log_once
from ..optim.update_policy import Stepping, UpdatePolicy
from ..optim.verdict import StepResult, Verdict
from ..precision.loss_scale import LossScaler
from ..sharding.runtime import Runtime
from ..sharding.unit import Unit

# Skipped steps in a row that name the same unit; a loss scale that is merely too high recovers
# sooner
PATIENCE = 3
# windows in a row
BAD = 2
GOOD = 8
# shares of a gradient's elements; between them nothing is decided
LOST = 0.1
KEPT = 0.05
# of fp16; a quarter of its largest, since a unit's activations are not seen
SMALLEST = 2.0**-24
LARGEST = 65504.0 / 4
COUNTED_AT_ONCE = 1 << 20  # elements


@dataclass(frozen=True)
class Evidence:
    """What the gradient of one unit shows in one step, over all ranks.

    elements: of those that have a gradient.  counted: those that are not zero.  lost: of these, the
    ones at the lower end of fp16 or beyond.  largest: of their magnitudes.
    """

    elements: int
    counted: int
    lost: int
    largest: float

    @property
    def share(self) -> float | None:
        """The share of its elements that are lost; None where all are zero."""
        return self.lost / self.counted if self.counted else None


@dataclass
class History:
    """What is remembered of one unit.

    bad, good: windows in a row.  patience: good ones until it is demoted.  is_named: a skipped step
    of this window has named it.  times: it was promoted.
    """

    bad: int = 0
    good: int = 0
    patience: int = GOOD
    is_named: bool = False
    times: int = 0


@dataclass(frozen=True)
class PrecisionChange:
    """One switch of a unit at the end of a step.  why: with the number that decided."""

    step: int
    unit: str
    is_promoted: bool
    why: str

    def __str__(self) -> str:
        now = "fp32" if self.is_promoted else "16 bits again"
        return f"step {self.step}: '{self.unit}' computes in {now} from now on: {self.why}"


class AdaptivePrecision(UpdatePolicy):
    """Promotes units to fp32 and demotes them, at step boundaries.

    Attributes:
        window: The number of steps from one decision to the next.
        decisions: All decisions so far.
        changed: The last step switched a unit.
    """

    watches_overflows = True
    checkpoint_key = "precision"

    def __init__(self, runtime: Runtime, window: int) -> None:
        self.runtime = runtime
        self.window = window
        self.decisions: list[PrecisionChange] = []
        self.changed = False
        self._scaler: LossScaler | None = None
        self._steps = 0  # of the window under way
        self._histories: dict[str, History] = {}
        # The unit that skipped steps in a row name, and how many
        self._suspect: tuple[str, int] = ("", 0)
        self._seen: list[Evidence] | None = None  # of this step, by unit

    def attach(self, optimizer: Stepping) -> None:
        self._scaler = optimizer.scaler

    def before_update(self, verdict: Verdict) -> None:
        """Count the elements of the step's gradient if a window ends. Collective then."""
        self._steps += 1
        self._seen = None
        if verdict.is_finite and self._steps >= self.window:
            self._seen = self._look()

    def after_update(self, result: StepResult, origin: Unit | None) -> bool:
        """Switch units. Return whether a skipped step promoted one. Collective if one is switched.

        Args:
            result: The result of the step.
            origin: The unit that a step which was not finite named.
        """
        return self._switch(origin, result.overflow, result.number)

    def _switch(self, named: Unit | None, skipped: bool, step: int) -> bool:
        scaler = self._scaler
        self.changed = False
        has_promoted = False
        if named is not None:
            self._history(named).is_named = True
        if not skipped:
            self._suspect = ("", 0)
        elif named is not None and not named.is_promoted:
            before, count = self._suspect
            self._suspect = (named.name, count + 1 if named.name == before else 1)
            at_minimum = (
                scaler is not None
                and scaler.dynamic
                and scaler.scale <= scaler.settings.min_loss_scale
            )
            if self._suspect[1] >= PATIENCE or at_minimum:
                why = "it made a non-finite number of finite ones, step after step"
                self._promote(named, step, why)
                has_promoted = True
                self._suspect = ("", 0)
        if self._seen is not None:
            self._judge(self._seen, step)
            self._steps = 0
            self._seen = None
            for history in self._histories.values():
                history.is_named = False
        return has_promoted

    @property
    def promoted(self) -> list[str]:
        """Names of the units that compute in fp32."""
        return [unit.name for unit in self.runtime.units if unit.is_promoted]

    def restore(self, names: Sequence[str]) -> None:
        """Let those units compute in fp32 that did when a checkpoint was saved, and no others.
        Collective; every unit must be sharded.
        """
        for unit in self.runtime.units:
            if unit.name in names and not unit.is_promoted:
                self.runtime.promote_to_fp32(unit)
            elif unit.is_promoted and unit.name not in names:
                self.runtime.demote(unit)

    def state_dict(self) -> dict[str, Any]:
        """Return what decides the next switches, as plain values."""
        return {
            "steps": self._steps,
            "suspect": list(self._suspect),
            "histories": {name: asdict(each) for name, each in self._histories.items()},
            "decisions": [asdict(each) for each in self.decisions],
        }

    def load_state_dict(self, state: dict[str, Any] | None, *, has_moments: bool = True) -> None:
        """Go on from a `state_dict`; None: from the start."""
        state = state or AdaptivePrecision(self.runtime, self.window).state_dict()
        self._steps = int(state["steps"])
        name, count = state["suspect"]
        self._suspect = (str(name), int(count))
        self._histories = {name: History(**each) for name, each in state["histories"].items()}
        self.decisions = [PrecisionChange(**each) for each in state["decisions"]]

    def explain(self) -> list[str]:
        """Return what was decided so far, in words."""
        lifted = ", ".join(f"'{name}'" for name in self.promoted) or "no unit"
        lines = [f'precision "auto": {lifted} in fp32; decided every {self.window} steps']
        return lines + [f"  {each}" for each in self.decisions]

    # -- windows

    def _history(self, unit: Unit) -> History:
        return self._histories.setdefault(unit.name, History())

    def _judge(self, seen: Sequence[Evidence], step: int) -> None:
        """Decide of each unit at the end of a window, from what all ranks have seen."""
        if not any(each.counted for each in seen):
            return  # a gradient of nothing but zeros says nothing of units
        for unit, evidence in zip(self.runtime.units, seen, strict=True):
            if unit.trained:
                (self._judge_promoted if unit.is_promoted else self._judge_low)(
                    unit, evidence, step
                )

    def _judge_low(self, unit: Unit, evidence: Evidence, step: int) -> None:
        history = self._history(unit)
        has_fp16 = self._has_fp16
        share = 1.0 if evidence.share is None and evidence.elements else evidence.share or 0.0
        is_bad = history.is_named or (has_fp16 and share > LOST)
        history.bad = history.bad + 1 if is_bad else 0
        if history.bad < BAD:
            return
        why = "skipped steps name it"
        if has_fp16 and share > LOST:
            why = f"{share:.1%} of its gradient is below fp16's range"
        self._promote(unit, step, f"{why} (limit {LOST:.0%}), {BAD} windows in a row")

    def _judge_promoted(self, unit: Unit, evidence: Evidence, step: int) -> None:
        history = self._history(unit)
        if evidence.share is None and not history.is_named:
            return  # no gradient came: nothing is known
        share = evidence.share or 0.0
        is_fp16 = self._has_fp16
        fits = not is_fp16 or (share <= KEPT and evidence.largest <= LARGEST)
        history.good = history.good + 1 if fits and not history.is_named else 0
        if history.good < history.patience:
            return
        windows = history.good
        history.good = 0
        history.bad = 0
        self.runtime.demote(unit)
        why = (
            f"16 bits would lose {share:.1%} of its gradient (limit {KEPT:.0%})"
            if is_fp16
            else "it was not named"
        )
        self._decided(
            PrecisionChange(step, unit.name, False, f"{why}, {windows} windows in a row"), unit
        )

    @property
    def _has_fp16(self) -> bool:
        """Whether units that are not promoted lose what is small: bf16 has the range of fp32."""
        return self.runtime.settings.policy.compute is torch.float16

    def _promote(self, unit: Unit, step: int, why: str) -> None:
        history = self._history(unit)
        history.times = history.times + 1
        history.good = 0
        history.bad = 0
        if history.times > 1:
            history.patience *= 2
        self.runtime.promote_to_fp32(unit)
        self._decided(PrecisionChange(step, unit.name, True, why), unit)

    def _decided(self, decision: PrecisionChange, unit: Unit) -> None:
        self.changed = True
        self.decisions.append(decision)
        plan = "\n".join(unit.explain())
        log_once(f"precision auto: {decision}.  Its new plan:\n{plan}", logging.WARNING)

    # -- evidence

    def _look(self) -> list[Evidence]:
        """Return what the step's gradients show of each unit. Collective."""
        runtime = self.runtime
        rows = torch.tensor([_counts(unit) for unit in runtime.units], dtype=torch.float64)
        comm = runtime.comm_of_units
        if comm.size > 1:
            found = comm.all_gather_rows(rows.reshape(-1), "what gradients show").view(
                comm.size, *rows.shape
            )
            rows = torch.cat([found[..., :3].sum(dim=0), found[..., 3:].amax(dim=0)], dim=1)
        return [
            Evidence(int(all_), int(some), int(lost), most)
            for all_, some, lost, most in rows.tolist()
        ]


def _counts(unit: Unit) -> list[float]:
    """Return elements, counted, lost and largest of this rank's part of a unit's gradient."""
    total = [0.0, 0.0, 0.0, 0.0]
    for part in _gradients(unit):
        size = part.abs()
        total[0] += size.numel()
        total[1] += int(torch.count_nonzero(size))
        total[2] += int(((size > 0) & (size <= SMALLEST)).sum())
        total[3] = max(total[3], float(size.amax()))
    return total


def _gradients(unit: Unit) -> Iterator[Tensor]:
    """Yield the reduced gradients of this rank, flat, a stretch at a time; without groups that got
    none.
    """
    for group in unit.trained:
        gradient = group.gradient.sum.reduced()
        if gradient is not None and len(group.gradient.sum.absent or ()) < len(group.members):
            yield from (part for part in gradient.split(COUNTED_AT_ONCE) if part.numel())
