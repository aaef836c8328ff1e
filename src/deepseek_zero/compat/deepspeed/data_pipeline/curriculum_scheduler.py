"""DeepSpeed's schedules of the difficulty of samples."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from ....base.errors import UsageError, shown

# schedule type -> required keys of schedule_config
SCHEDULES = {
    "fixed_discrete": ("difficulty", "max_step"),
    "fixed_root": ("total_curriculum_step", "difficulty_step", "root_degree"),
    "fixed_linear": ("total_curriculum_step", "difficulty_step"),
    "custom": (),
}


def by_root(
    step: int, total: float, degree: float, least: float, most: float, multiple: int
) -> float:
    """Return the value of a root schedule at a step.

    The value rises from `least` to `most` in `total` steps like the degree-th root. It is rounded
    down to a multiple of `multiple`, but not below the first multiple that is at least `least`.

    Args:
        step: Current step.
        total: Number of steps of the schedule.
        degree: Degree of the root; 1 for a linear schedule.
        least: Value at step 0.
        most: Value at step `total`.
        multiple: Granularity of the value.

    Returns:
        The difficulty at this step.
    """
    value: int = math.floor((float(step) / total) ** (1.0 / degree) * (most - least) + least)
    value -= value % multiple
    return min(max(value, -(-least // multiple) * multiple), most)


class CurriculumScheduler:
    """Difficulty of one metric as a function of the step.

    Args:
        config: min_difficulty, max_difficulty, schedule_type (a key of SCHEDULES) and
            schedule_config.

    Raises:
        UsageError: A key is missing, schedule_type is unknown, or a number of the schedule is not
            positive.
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
        else:
            _refuse_zeros(SCHEDULES[kind], schedule)
        self.state["schedule_config"] = schedule

    def get_current_difficulty(self) -> Any:
        """Return the difficulty of the current step."""
        return self.state["current_difficulty"]

    def set_current_difficulty(self, difficulty: Any) -> None:
        """Set the difficulty of the current step."""
        self.state["current_difficulty"] = difficulty

    def set_custom_get_difficulty(self, schedule_function: Callable[[int], Any]) -> None:
        """Set the function of the schedule "custom", which maps a step to a difficulty."""
        self.custom_get_difficulty = schedule_function

    def get_state(self) -> dict[str, Any]:
        """Return the configuration and the current difficulty, for a checkpoint."""
        return self.state

    def set_state(self, state: dict[str, Any]) -> None:
        """Restore the configuration and the difficulty that `get_state` returned."""
        self.state = state

    def get_difficulty(self, global_steps: int) -> Any:
        """Return the difficulty of a step. Steps start at 1."""
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
        degree = schedule["root_degree"] if kind == "fixed_root" else 1
        return by_root(
            global_steps,
            schedule["total_curriculum_step"],
            degree,
            self.state["min_difficulty"],
            self.state["max_difficulty"],
            schedule["difficulty_step"],
        )

    def update_difficulty(self, global_steps: int) -> Any:
        """Advance to a step and return its difficulty.

        The difficulty does not change any more after it has reached the maximum.
        """
        if self.state["current_difficulty"] < self.state["max_difficulty"]:
            self.state["current_difficulty"] = self.get_difficulty(global_steps)
        return self.state["current_difficulty"]


def _refuse_missing(names: tuple[str, ...], given: Mapping[str, Any], where: str) -> None:
    for name in names:
        if name not in given:
            raise UsageError(
                f"Curriculum learning requires '{name}' in {where}.", fix=f"state {name} there."
            )


def _refuse_zeros(names: tuple[str, ...], schedule: Mapping[str, Any]) -> None:
    for name in names:
        value = schedule[name]
        if not isinstance(value, int | float) or not value > 0:
            raise UsageError(
                f"Curriculum learning got {name}={shown(value)} in schedule_config.",
                "The schedule divides by it.",
                f"state a positive number as {name}.",
            )


def _refuse_odd_lists(schedule: Mapping[str, Any]) -> None:
    levels = schedule["difficulty"]
    ends = schedule["max_step"]
    if not ends or len(levels) != len(ends) + 1:
        raise UsageError(
            f"fixed_discrete has {len(levels)} difficulties and {len(ends)} values of max_step.",
            "The last difficulty is used for all steps after the last max_step.",
            "give one difficulty more than values of max_step, and at least one of these.",
        )
