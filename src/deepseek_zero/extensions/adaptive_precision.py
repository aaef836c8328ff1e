"""Adaptive precision (precision "auto"): choose the units that compute in fp32.

The choice follows from each unit's gradients, and is reversed when 16 bits are enough.

After a step whose gradient was not finite, `NonFiniteReport` may name a unit. A unit that is named
`PATIENCE` times in a row, or once at the smallest loss scale, is promoted at once. In addition,
each unit's reduced gradient is examined once per window of steps, still multiplied by the loss
scale:

lost     of its nonzero elements, those of at most 2^-24, fp16's smallest number
largest  the largest magnitude, which 16 bits must hold once the unit is demoted

For a unit in 16 bits a window is bad if more than `LOST` of the nonzero elements are lost, if all
elements are zero while other units have nonzero ones, or if a skipped step named the unit. `BAD`
bad windows in a row promote it. For a promoted unit a window is good if at most `KEPT` would be
lost, the largest is well within fp16, and no skipped step named the unit. As many good windows in a
row as its patience demote it. The patience is `GOOD` at first, and doubles each time the unit is
promoted again.

Counts are added up over ranks, so the decision does not depend on the number of ranks, and every
rank decides from the same numbers.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor

from ..base.log import log_once
from ..optim.policy_state import Stepping
from ..optim.rank_agreement import comm_of_units
from ..optim.update_policy import UpdatePolicy
from ..optim.verdict import StepResult, Verdict
from ..precision.loss_scale import LossScaler
from ..sharding.regroup import promote_unit
from ..sharding.runtime import Runtime
from ..sharding.unit import Unit

# Skipped steps in a row that name the same unit. A loss scale that is only too high recovers
# sooner.
PATIENCE = 3
# Windows in a row
BAD = 2
GOOD = 8
# Shares of a gradient's nonzero elements. Between them, a unit keeps its precision.
LOST = 0.1
KEPT = 0.05
# Limits of fp16. The upper one is a quarter of its largest number, because activations are not
# examined.
SMALLEST = 2.0**-24
LARGEST = 65504.0 / 4
COUNTED_AT_ONCE = 1 << 20  # Elements


@dataclass(frozen=True)
class Evidence:
    """Statistics of one unit's gradient in one step, over all ranks.

    Attributes:
        elements: Number of elements that have a gradient.
        counted: Number of nonzero elements.
        lost: Number of nonzero elements of at most `SMALLEST`, which fp16 rounds to zero.
        largest: The largest magnitude.
    """

    elements: int
    counted: int
    lost: int
    largest: float

    @property
    def share(self) -> float | None:
        """The fraction of nonzero elements that fp16 would round to zero; None if all are zero."""
        return self.lost / self.counted if self.counted else None


@dataclass
class History:
    """The record of one unit, which determines its next change of precision.

    A window is a range of steps at whose end the unit's gradient is examined. It is bad if fp16
    would lose too much of the gradient, or if a skipped step was attributed to the unit. In a unit
    that computes in 16 bits, bad windows are counted. In a unit that computes in fp32, good ones
    are.

    Attributes:
        bad: The number of bad windows in a row.
        good: The number of good windows in a row.
        patience: The number of good windows in a row after which the unit returns to 16 bits.
        is_named: Whether a skipped step of the current window was attributed to the unit.
        times: The number of times that the unit was switched to fp32.
    """

    bad: int = 0
    good: int = 0
    patience: int = GOOD
    is_named: bool = False
    times: int = 0


@dataclass(frozen=True)
class PrecisionChange:
    """One change of a unit's precision at the end of a step.

    Attributes:
        step: The number of the step.
        unit: The name of the unit.
        is_promoted: Whether the unit now computes in fp32; False if it computes in 16 bits again.
        why: The reason for the change, as text for logs.
    """

    step: int
    unit: str
    is_promoted: bool
    why: str

    def __str__(self) -> str:
        now = "fp32" if self.is_promoted else "16 bits again"
        return f"step {self.step}: '{self.unit}' computes in {now} from now on: {self.why}"


@dataclass(eq=False)
class AdaptivePrecision(UpdatePolicy):
    """An update policy that switches single units to fp32 and back to 16 bits.

    It does so between steps. A unit is switched to fp32 if three skipped steps in a row are
    attributed to it, or one at the smallest loss scale. It is also switched after two bad windows
    of steps in a row. A window is bad if a skipped step in it is attributed to the unit. With fp16,
    it is also bad if more than 10 % of the nonzero elements of the unit's gradient are too small
    for fp16, or if all elements are zero and those of other units are not. The unit is switched
    back after 16 bits would have been enough in eight windows in a row. This number doubles each
    time that the unit is switched to fp32 again.

    Attributes:
        runtime: The runtime of the wrapped model.
        window: The number of steps in a window, at whose end the gradients are examined.
        decisions: All changes of precision so far.
        changed: Whether the last step changed the precision of a unit.
    """

    watches_overflows = True
    checkpoint_key = "precision"

    runtime: Runtime
    window: int
    decisions: list[PrecisionChange] = field(default_factory=list)
    changed: bool = False
    _scaler: LossScaler | None = None
    _steps: int = 0  # Steps of the current window
    _histories: dict[str, History] = field(default_factory=lambda: defaultdict(History))
    # The unit that the latest skipped steps named, and how many in a row
    _suspect: tuple[str, int] = ("", 0)
    _seen: list[Evidence] | None = None  # Evidence of this step, by unit

    def attach(self, optimizer: Stepping) -> None:
        self._scaler = optimizer.scaler

    def before_update(self, verdict: Verdict) -> None:
        """Measure how well fp16 can represent the gradient of each unit.

        The gradients are measured only in the last step of a window of steps. If the norm is not
        finite in that step, the window lasts until the next step with a finite norm. `after_update`
        uses the result to change the precision of units.

        Args:
            verdict: The gradient norm and other facts about this step, equal on all ranks.

        Raises:
            PeerError: Another rank failed or issued a different collective.

        Note:
            Collective in the last step of a window: every rank must call it.
        """
        self._steps += 1
        self._seen = None
        if verdict.is_finite and self._steps >= self.window:
            self._seen = self._look()

    def after_update(self, result: StepResult, origin: Unit | None) -> bool:
        """Switch units to fp32 or back to 16 bits.

        The skipped steps and gradients of recent steps determine the changes. Rank 0 logs each
        change as a warning. The attribute `changed` is set to whether there was a change, and each
        change is appended to `decisions`.

        Args:
            result: The result of the step, including whether its gradient overflowed.
            origin: The unit in which the first non-finite value occurred; None if the unit is
                unknown.

        Returns:
            True if the step was skipped and this call therefore switched `origin` to fp32. The loss
            scale then need not shrink. False in all other cases.

        Raises:
            PeerError: Another rank failed or issued a different collective.

        Note:
            Collective if the precision of a unit changes: every rank must call it.
        """
        self.changed = False
        has_promoted = False
        if origin is not None:
            self._histories[origin.name].is_named = True
        if not result.overflow:
            self._suspect = ("", 0)
        elif origin is not None and not origin.is_promoted:
            before, count = self._suspect
            self._suspect = (origin.name, count + 1 if origin.name == before else 1)
            scaler = self._scaler
            at_minimum = (
                scaler is not None
                and scaler.dynamic
                and scaler.scale <= scaler.settings.min_loss_scale
            )
            if self._suspect[1] >= PATIENCE or at_minimum:
                why = "it made a non-finite number of finite ones, step after step"
                self._change(origin, result.number, why, is_promoted=True)
                has_promoted = True
                self._suspect = ("", 0)
        seen = self._seen
        if seen is not None:
            # Gradients that are all zero are no evidence
            if any(each.counted for each in seen):
                for unit, evidence in zip(self.runtime.units, seen, strict=True):
                    if unit.trained:
                        self._judge(unit, evidence, result.number)
            self._steps = 0
            self._seen = None
            for history in self._histories.values():
                history.is_named = False
        return has_promoted

    @property
    def promoted(self) -> list[str]:
        """The names of the units that now compute in fp32 because of this policy."""
        return [unit.name for unit in self.runtime.units if unit.is_promoted]

    def restore(self, names: Sequence[str]) -> None:
        """Set the precision of every unit to that of a checkpoint.

        These changes are neither logged nor appended to `decisions`.

        Args:
            names: The names of the units that compute in fp32. All other units compute in 16 bits.

        Raises:
            PeerError: Another rank failed or issued a different collective.

        Note:
            Collective: every rank must call it. No weights may be gathered when it is called.
        """
        for unit in self.runtime.units:
            to_fp32 = unit.name in names
            if to_fp32 != unit.is_promoted:
                self._promote(unit, to_fp32=to_fp32)

    def _promote(self, unit: Unit, *, to_fp32: bool) -> None:
        promote_unit(self.runtime, unit, to_fp32=to_fp32)

    def state_dict(self) -> dict[str, Any]:
        """Return the state for a checkpoint.

        Returns:
            A dict with the counters on which future changes of precision depend, and with a list of
            all changes so far.
        """
        return {
            "steps": self._steps,
            "suspect": list(self._suspect),
            "histories": {name: asdict(each) for name, each in self._histories.items()},
            "decisions": [asdict(each) for each in self.decisions],
        }

    def load_state_dict(self, state: dict[str, Any] | None) -> None:
        """Restore the counters and the list of changes from a checkpoint.

        The precision of the units is not changed. Call `restore` to change it.

        Args:
            state: The result of `state_dict`. None resets the counters and empties the list.
        """
        state = state or AdaptivePrecision(self.runtime, self.window).state_dict()
        self._steps = int(state["steps"])
        name, count = state["suspect"]
        self._suspect = (str(name), int(count))
        self._histories.clear()
        for unit, history in state["histories"].items():
            self._histories[unit] = History(**history)
        self.decisions = [PrecisionChange(**each) for each in state["decisions"]]

    def explain(self) -> list[str]:
        """Return lines of text about the precision of units, for `engine.explain`.

        The first line names the units in fp32. Each further line describes one change of precision.
        """
        lifted = ", ".join(f"'{name}'" for name in self.promoted) or "no unit"
        lines = [f'precision "auto": {lifted} in fp32; decided every {self.window} steps']
        return lines + [f"  {each}" for each in self.decisions]

    # -- windows

    def _judge(self, unit: Unit, evidence: Evidence, step: int) -> None:
        """Decide about one unit at the end of a window."""
        history = self._histories[unit.name]
        # bf16 has the range of fp32
        is_fp16 = self.runtime.settings.policy.compute is torch.float16
        share = evidence.share or 0.0
        if not unit.is_promoted:
            if evidence.share is None and evidence.elements:
                share = 1.0
            loses = is_fp16 and share > LOST
            history.bad = history.bad + 1 if history.is_named or loses else 0
            if history.bad >= BAD:
                why = "skipped steps name it"
                if loses:
                    why = f"{share:.1%} of its gradient is below fp16's range"
                why = f"{why} (limit {LOST:.0%}), {BAD} windows in a row"
                self._change(unit, step, why, is_promoted=True)
            return
        if evidence.share is None and not history.is_named:
            return  # Without a gradient nothing is known
        fits = not is_fp16 or (share <= KEPT and evidence.largest <= LARGEST)
        history.good = history.good + 1 if fits and not history.is_named else 0
        if history.good >= history.patience:
            why = "it was not named"
            if is_fp16:
                why = f"16 bits would lose {share:.1%} of its gradient (limit {KEPT:.0%})"
            why = f"{why}, {history.good} windows in a row"
            self._change(unit, step, why, is_promoted=False)

    def _change(self, unit: Unit, step: int, why: str, *, is_promoted: bool) -> None:
        """Promote or demote a unit, and record the decision."""
        history = self._histories[unit.name]
        history.good = 0
        history.bad = 0
        if is_promoted:
            history.times += 1
            if history.times > 1:
                history.patience *= 2
        self._promote(unit, to_fp32=is_promoted)
        self.changed = True
        decision = PrecisionChange(step, unit.name, is_promoted, why)
        self.decisions.append(decision)
        plan = "\n".join(unit.planned.explain(unit.number))
        log_once(f"precision auto: {decision}.  Its new plan:\n{plan}", logging.WARNING)

    # -- evidence

    def _look(self) -> list[Evidence]:
        """Return the evidence of each unit in this step.

        Note:
            Collective: every rank must call it.
        """
        runtime = self.runtime
        rows = torch.tensor(
            [_counts(unit) for unit in runtime.units], dtype=torch.float64, device="cpu"
        )
        comm = comm_of_units(runtime)
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
    """Return elements, counted, lost and largest of this rank's part of a gradient."""
    total = [0.0, 0.0, 0.0, 0.0]
    for part in _gradients(unit):
        size = part.abs()
        total[0] += size.numel()
        total[1] += int(torch.count_nonzero(size))
        total[2] += int(((size > 0) & (size <= SMALLEST)).sum())
        total[3] = max(total[3], float(size.amax()))
    return total


def _gradients(unit: Unit) -> Iterator[Tensor]:
    """Yield this rank's reduced gradients of a unit, flat, in pieces.

    Groups without a gradient are left out.
    """
    for group in unit.trained:
        gradient = group.gradient.sum.reduced()
        if gradient is not None and len(group.gradient.sum.absent or ()) < len(group.members):
            yield from (part for part in gradient.split(COUNTED_AT_ONCE) if part.numel())
