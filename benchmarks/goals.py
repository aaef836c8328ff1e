"""The goals of the benchmark on two cores with GPT-125M, and a check of a results file."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from .summary import Summary

Measure = Callable[[Summary, Summary | None], float | None]  # of the 125m cell and of the tiny one


@dataclass(frozen=True)
class Goal:
    """A figure and its bound. at_least: the bound is a minimum, otherwise a maximum."""

    what: str
    bounds: Mapping[str, float]
    measure: Measure
    unit: str = ""
    at_least: bool = False

    def is_met(self, dtype: str, value: float) -> bool:
        return value >= self.bounds[dtype] if self.at_least else value <= self.bounds[dtype]

    def bound(self, dtype: str) -> str:
        return f"{'>=' if self.at_least else '<='} {show(self.bounds[dtype])}{self.unit}"


def show(value: float) -> str:
    """Format a figure with digits that depend on its size."""
    if 0 < abs(value) < 0.01:
        return f"{value:.0e}".replace("e-0", "e-")
    return f"{value:.0f}" if abs(value) >= 100 else f"{value:.2f}".rstrip("0").rstrip(".")


def _over_floor(*stages: int) -> Measure:
    def worst(main: Summary, tiny: Summary | None) -> float | None:
        return _worst(main.over_floor(f"ours-{stage}") for stage in stages)

    return worst


def _faster_than(peer: str) -> Measure:
    return lambda main, tiny: main.times_faster("ours-3", peer)


def _memory(moment: str, system: str = "ours-3") -> Measure:
    def megabytes(main: Summary, tiny: Summary | None) -> float | None:
        row = main.rows.get(system)
        return row.memory[moment]["pss"] / 1e6 if row and row.memory else None

    return megabytes


def _ready(main: Summary, tiny: Summary | None) -> float | None:
    row = main.rows.get("ours-3")
    return row.seconds["import"] + row.seconds["initialise"] if row and row.seconds else None


def _first(main: Summary, tiny: Summary | None) -> float | None:
    row = main.rows.get("ours-3")
    return row.first_over_later if row else None


def _fixed_cost(main: Summary, tiny: Summary | None) -> float | None:
    row = tiny.rows.get("ours-3") if tiny else None
    return row.median * 1e3 if row and row.median else None


def _loss_gap(main: Summary, tiny: Summary | None) -> float | None:
    return _worst(row.loss_gap for name, row in main.rows.items() if name.startswith("ours"))


def _worst(values: Iterable[float | None]) -> float | None:
    return max((value for value in values if value is not None), default=None)


def _both(bound: float) -> dict[str, float]:
    return {"bf16": bound, "fp32": bound}


GOALS = [
    Goal("stage 3, step over floor", {"bf16": 1.15, "fp32": 1.10}, _over_floor(3)),
    Goal("stages 1 and 2, step over floor", {"bf16": 1.15, "fp32": 1.10}, _over_floor(1, 2)),
    Goal("stage 0, step over floor", {"bf16": 1.25, "fp32": 1.12}, _over_floor(0)),
    Goal(
        "stage 3, times faster than FSDP2",
        {"bf16": 1.9, "fp32": 1.6},
        _faster_than("fsdp2"),
        at_least=True,
    ),
    Goal(
        "stage 3, times faster than DeepSpeed 3",
        {"bf16": 2.2, "fp32": 1.9},
        _faster_than("deepspeed-3"),
        at_least=True,
    ),
    Goal("stage 3, steady memory, PSS", _both(975), _memory("steady"), " MB"),
    Goal("stage 3, peak memory, PSS", {"bf16": 1230, "fp32": 1430}, _memory("train_peak"), " MB"),
    Goal(
        "peak while initialising under zero.Init, PSS",
        _both(700),
        _memory("init_peak", "ours-3-init"),
        " MB",
    ),
    Goal(
        "import and initialise, beyond torch's import and the model's own building",
        _both(1.2),
        _ready,
        " s",
    ),
    Goal("first step over a later one", _both(1.3), _first),
    Goal("a step of the 2-layer, 64-wide model", _both(13), _fixed_cost, " ms"),
    Goal("losses against the one-process run, all stages", {"bf16": 2e-4, "fp32": 1e-6}, _loss_gap),
]


def goal_table(summaries: Mapping[str, Summary]) -> list[str]:
    """Return a Markdown table of goals, measured values and results. summaries: by cell name."""
    lines = [
        "| goal | bf16 | measured | met | fp32 | measured | met |",
        "|---|--:|--:|:-:|--:|--:|:-:|",
    ]
    for goal in GOALS:
        cells = [part for dtype in ("bf16", "fp32") for part in _verdict(goal, dtype, summaries)]
        lines.append(f"| {goal.what} | {' | '.join(cells)} |")
    return lines


def _verdict(goal: Goal, dtype: str, summaries: Mapping[str, Summary]) -> list[str]:
    main, tiny = summaries.get(f"125m-{dtype}"), summaries.get(f"tiny-{dtype}")
    value = goal.measure(main, tiny) if main else None
    if value is None:
        return [goal.bound(dtype), "-", "-"]
    return [
        goal.bound(dtype),
        show(value) + goal.unit,
        "yes" if goal.is_met(dtype, value) else "no",
    ]
