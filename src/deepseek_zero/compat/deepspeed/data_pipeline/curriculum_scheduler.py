"""How difficult samples may be at a step: DeepSpeed's schedules, with its arithmetic."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from ....base.errors import UsageError

# schedule type -> what its schedule_config must name
SCHEDULES = {
    "fixed_discrete": ("difficulty", "max_step"),
    "fixed_root": ("total_curriculum_step", "difficulty_step", "root_degree"),
    "fixed_linear": ("total_curriculum_step", "difficulty_step"),
    "custom": (),
}


def by_root(
    step: int, total: float, degree: float, least: float, most: float, multiple: int
) -> float:
    """Return a value that goes from `least` to `most` in `total` steps as the degree-th root does.

    Values are rounded down to multiples of `multiple`, and never below the first multiple at or
    above `least`.
    """
    value: int = math.floor((float(step) / total) ** (1.0 / degree) * (most - least) + least)
    value -= value % multiple
    return min(max(value, -(-least // multiple) * multiple), most)


class CurriculumScheduler:
    """The difficulty of one metric over steps.

    config: min_difficulty, max_difficulty, schedule_type (a key of SCHEDULES) and schedule_config.
    Raises UsageError where one is missing.
    """

    def __init__(self, config: Mapping[str, Any]) -> None:
        _refuse_missing(("min_difficulty", "max_difficulty", "schedule_type"), config, "the config")
        kind = config["schedule_type"]
        if kind not in SCHEDULES:
            raise UsageError(
                f"Unsupported curriculum schedule type {kind!r}.",
                fix=f"choose one of {', '.join(SCHEDULES)}.",
            )
        self.state: dict[str, Any] = {
            name: config[name] for name in ("min_difficulty", "max_difficulty")
        }
        self.state |= {"current_difficulty": config["min_difficulty"], "schedule_type": kind}
        self.first_step = True
        self.custom_get_difficulty: Callable[[int], Any] | None = None
        if kind == "custom":
            return
        schedule = config.get("schedule_config") or {}
        _refuse_missing(SCHEDULES[kind], schedule, f"schedule_config of {kind}")
        if kind == "fixed_discrete":
            _refuse_odd_lists(schedule)
        self.state["schedule_config"] = schedule

    def get_current_difficulty(self) -> Any:
        return self.state["current_difficulty"]

    def set_current_difficulty(self, difficulty: Any) -> None:
        self.state["current_difficulty"] = difficulty

    def set_custom_get_difficulty(self, schedule_function: Callable[[int], Any]) -> None:
        """Take the function of the schedule "custom": step -> difficulty."""
        self.custom_get_difficulty = schedule_function

    def get_state(self) -> dict[str, Any]:
        return self.state

    def set_state(self, state: dict[str, Any]) -> None:
        self.state = state

    def get_difficulty(self, global_steps: int) -> Any:
        """Return the difficulty of a step; steps begin at 1."""
        kind = self.state["schedule_type"]
        if kind == "custom":
            if self.custom_get_difficulty is None:
                raise UsageError(
                    "the schedule custom has no function.",
                    fix="call engine.set_custom_curriculum_learning_schedule.",
                )
            return self.custom_get_difficulty(global_steps)
        schedule = self.state["schedule_config"]
        if kind == "fixed_discrete":
            ends = zip(schedule["difficulty"], schedule["max_step"], strict=False)
            return next(
                (level for level, end in ends if global_steps <= end), schedule["difficulty"][-1]
            )
        return by_root(
            global_steps,
            schedule["total_curriculum_step"],
            schedule["root_degree"] if kind == "fixed_root" else 1,
            self.state["min_difficulty"],
            self.state["max_difficulty"],
            schedule["difficulty_step"],
        )

    def update_difficulty(self, global_steps: int) -> Any:
        """Go to a step and return its difficulty, which stays once it has reached the maximum."""
        if self.state["current_difficulty"] < self.state["max_difficulty"]:
            self.state["current_difficulty"] = self.get_difficulty(global_steps)
        return self.state["current_difficulty"]


def _refuse_missing(names: tuple[str, ...], given: Mapping[str, Any], where: str) -> None:
    for name in names:
        if name not in given:
            raise UsageError(
                f"Curriculum learning requires '{name}' in {where}.", fix=f"state {name} there."
            )


def _refuse_odd_lists(schedule: Mapping[str, Any]) -> None:
    levels = schedule["difficulty"]
    ends = schedule["max_step"]
    if not ends or len(levels) != len(ends) + 1:
        raise UsageError(
            f"fixed_discrete has {len(levels)} difficulties and {len(ends)} values of max_step.",
            "The last difficulty holds for all steps behind the last max_step.",
            "give one difficulty more than values of max_step, and at least one of these.",
        )
