"""Learning-rate schedules by name: DeepSpeed's five, and any of torch.optim.lr_scheduler's; and DeepSpeed's flags.

Owns: names, checking of parameters, the command line.  The formulas are in schedule_shapes.py.  Called by
engine/assemble.py (resolve_schedule) and by programs that build a schedule themselves.
"""

from __future__ import annotations

import argparse
import dataclasses
import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch.optim import lr_scheduler as torch_schedules

from deepseek_zero.base.device import tell_schedules_of_step
from deepseek_zero.base.errors import ConfigError, DeepSeekZeroError, shown
from deepseek_zero.optim.arguments import checked_arguments, nearest
from deepseek_zero.optim.lean import undecorated
from deepseek_zero.optim.schedule import HasParamGroups, Schedule
from deepseek_zero.optim.schedule_shapes import LRRangeTest, OneCycle, WarmupCosineLR, WarmupDecayLR, WarmupLR

__all__ = [
    "SCHEDULES",
    "VALID_LR_SCHEDULES",
    "LRRangeTest",
    "OneCycle",
    "Schedule",
    "WarmupCosineLR",
    "WarmupDecayLR",
    "WarmupLR",
    "add_tuning_arguments",
    "get_config_from_args",
    "resolve_schedule",
]

SCHEDULES: dict[str, type[Schedule]] = {
    cls.__name__: cls for cls in (LRRangeTest, OneCycle, WarmupLR, WarmupDecayLR, WarmupCosineLR)
}
VALID_LR_SCHEDULES: list[str] = list(SCHEDULES)
_TORCH_SCHEDULES: dict[str, type[Any]] = {
    name: value
    for name, value in vars(torch_schedules).items()
    if inspect.isclass(value)
    and issubclass(value, torch_schedules.LRScheduler)
    and value is not torch_schedules.LRScheduler
}


def resolve_schedule(
    name: str, params: Mapping[str, Any], optimizer: HasParamGroups
) -> Schedule | torch.optim.lr_scheduler.LRScheduler:
    """Build the schedule a config names: one of DeepSpeed's, else one of torch.optim.lr_scheduler's.

    A torch schedule needs a torch.optim.Optimizer.  Case does not matter.
    """
    choices: dict[str, type[Any]] = {**_TORCH_SCHEDULES, **SCHEDULES}
    by_case = {choice.lower(): cls for choice, cls in choices.items()}
    cls = by_case.get(str(name).lower())
    if cls is None:
        raise ConfigError(
            f"DeepSpeed does not recognize LR scheduler {str(name)[:100]}{nearest(str(name)[:100], choices)}.",
            fix=f"name one of {', '.join(VALID_LR_SCHEDULES)} or one of torch.optim.lr_scheduler, or pass a scheduler.",
        )
    settings = checked_arguments(f"scheduler {shown(name)}", cls, params)
    try:
        _try_out(cls, optimizer, settings)
        built: Schedule | torch.optim.lr_scheduler.LRScheduler = cls(optimizer, **settings)
    except DeepSeekZeroError:
        raise
    except Exception as refusal:  # torch's classes check by whatever comes to hand: asserts, indices, comparisons
        raise ConfigError(
            f"scheduler {shown(name)} refuses its parameters {shown(settings, 300)}: {str(refusal)[:300]}",
            fix="see the documentation of the class for what it takes.",
        ) from refusal
    return built


def _try_out(cls: type[Any], optimizer: HasParamGroups, settings: Mapping[str, Any]) -> None:
    """Three steps over a stand-in: what the class takes and cannot compute with would end the training later."""
    with undecorated():
        stand_in = torch.optim.SGD([torch.zeros(1)], lr=0.1)
    stand_in.defaults = dict(getattr(optimizer, "defaults", stand_in.defaults))
    stand_in.param_groups = [{**group, "params": [torch.zeros(1)]} for group in optimizer.param_groups]
    schedule = cls(stand_in, **settings)
    tell_schedules_of_step(stand_in)
    for _ in range(3):
        schedule.step(**({"metrics": 1.0} if cls is torch_schedules.ReduceLROnPlateau else {}))
    rates = [group["lr"] for group in stand_in.param_groups]
    if not all(isinstance(rate, int | float | torch.Tensor) for rate in rates):
        raise TypeError(f"its rates are {shown(rates)}")


def _flag(text: str) -> bool:
    words = {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}
    if text.lower() not in words:
        raise argparse.ArgumentTypeError(f"{text!r} is neither true nor false")
    return words[text.lower()]


# DeepSpeed's flags: name, type, default, help.  A negative count means "not given".
_FLAGS: tuple[tuple[str, Any, Any, str], ...] = (
    ("lr_schedule", str, None, "learning-rate schedule: " + ", ".join(SCHEDULES)),
    ("lr_range_test_min_lr", float, 0.001, "range test: first learning rate"),
    ("lr_range_test_step_rate", float, 1.0, "range test: growth per interval"),
    ("lr_range_test_step_size", int, 1000, "range test: iterations per interval"),
    ("lr_range_test_staircase", _flag, False, "range test: hold the rate within an interval"),
    ("cycle_first_step_size", int, 1000, "1Cycle: iterations of the rise"),
    ("cycle_first_stair_count", int, -1, "1Cycle: stairs of the rise"),
    ("cycle_second_step_size", int, -1, "1Cycle: iterations of the fall (default: those of the rise)"),
    ("cycle_second_stair_count", int, -1, "1Cycle: stairs of the fall"),
    ("decay_step_size", int, 1000, "1Cycle: iterations per interval of the decay afterwards"),
    ("cycle_min_lr", float, 0.01, "1Cycle: lowest learning rate"),
    ("cycle_max_lr", float, 0.1, "1Cycle: highest learning rate"),
    ("decay_lr_rate", float, 0.0, "1Cycle: decay of the rate per interval"),
    ("cycle_momentum", None, False, "1Cycle: cycle momentum against the rate"),
    ("cycle_min_mom", float, 0.8, "1Cycle: lowest momentum"),
    ("cycle_max_mom", float, 0.9, "1Cycle: highest momentum"),
    ("decay_mom_rate", float, 0.0, "1Cycle: change of momentum per interval"),
    ("warmup_min_lr", float, 0.0, "warm-up: first learning rate"),
    ("warmup_max_lr", float, 0.001, "warm-up: learning rate reached"),
    ("warmup_num_steps", int, 1000, "warm-up: iterations"),
    ("warmup_type", str, "log", "warm-up: log or linear"),
    ("warmup_min_ratio", float, 0.01, "WarmupCosineLR: first ratio"),
    ("cos_min_ratio", float, 0.01, "WarmupCosineLR: last ratio"),
)


def add_tuning_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add DeepSpeed's schedule flags.

    WarmupDecayLR and WarmupCosineLR also need the script's own --total_num_steps; DeepSpeed has no such flag, and one
    added here would collide with a script that defines it.
    """
    group = parser.add_argument_group("Convergence Tuning", "Convergence tuning configurations")
    for name, kind, default, text in _FLAGS:
        if kind is None:
            group.add_argument(f"--{name}", action="store_true", default=default, help=text)
        else:
            group.add_argument(f"--{name}", type=kind, default=default, help=text)
    return parser


def get_config_from_args(args: argparse.Namespace) -> tuple[dict[str, Any] | None, str | None]:
    """The config's `scheduler` block from parsed flags: (block, None) or (None, why not)."""
    name = getattr(args, "lr_schedule", None)
    if name is None:
        return None, "--lr_schedule not specified on command line"
    if name not in SCHEDULES:
        return None, f"{name} is not supported LR schedule"
    given = {field.name: getattr(args, field.name, None) for field in dataclasses.fields(SCHEDULES[name].Settings)}
    counts = {flag for flag, _, default, _ in _FLAGS if default == -1}
    params = {key: value for key, value in given.items() if value is not None and not (key in counts and value < 0)}
    return {"type": name, "params": params}, None
