"""Learning-rate schedules by name: DeepSpeed's five and those of torch.optim.

`LRSchedule` is the base class of DeepSpeed's schedules: a function of the iteration, whose value is
written into the groups of any object with `param_groups`, for example a sharded optimizer.

[Note: when a schedule writes the rate] The constructor writes the rate of "before iteration 0" into
every group, so the first optimizer step uses it. Each `step()` advances `last_batch_iteration` (-1,
0, 1, ...) and writes the rate of the next optimizer step. In the warm-up family, iteration 0 still
has the minimum (log 1 = 0), so the first two optimizer steps use it. This is DeepSpeed's counting,
and it is kept so that a ported run has the same curve.
"""

from __future__ import annotations

import dataclasses
import inspect
import logging
import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor
from torch.optim import lr_scheduler as torch_schedules

from ..base.device import mark_stepped
from ..base.errors import ConfigError, DeepSeekZeroError, UsageError, shown
from ..base.given import did_you_mean
from ..base.log import log_once
from .plain_steps import undecorated
from .registry import checked_arguments

__all__ = [
    "SCHEDULES",
    "VALID_LR_SCHEDULES",
    "LRRangeTest",
    "LRSchedule",
    "OneCycle",
    "WarmupCosineLR",
    "WarmupDecayLR",
    "WarmupLR",
    "resolve_schedule",
]

PerGroup = float | Sequence[float]


class HasParamGroups(Protocol):
    """The part of an optimizer that a schedule uses."""

    param_groups: list[dict[str, Any]]


class LRSchedule(ABC):
    """Base class of schedules that write `lr` into an optimizer's parameter groups.

    The constructor writes the learning rates of the first optimizer step. If the `lr` of a group is
    a tensor, it is overwritten in place. The methods `step`, `get_last_lr`, `state_dict` and
    `load_state_dict` have the names and the purpose of those of PyTorch's `LRScheduler`. A derived
    class defines the dataclass `Settings` and the methods `get_lr` and `_prepare`.

    Args:
        optimizer: An object with `param_groups`, or with an attribute `optimizer` that has them.
        args: Settings of the schedule as positional arguments, in the order in which the derived
            class lists them.
        settings: Settings of the schedule as keyword arguments.

    Raises:
        UsageError: The optimizer has no parameter groups.
        ConfigError: A number is out of range or not finite, or a list does not have one value per
            parameter group.
        TypeError: A setting is unknown, or a required setting is missing.
    """

    Settings: ClassVar[type[Any]]

    def __init__(self, optimizer: HasParamGroups, *args: Any, **settings: Any) -> None:
        self.settings = self.Settings(*args, **settings)
        self.optimizer = _with_groups(optimizer)
        self.last_batch_iteration = _whole(self.settings, "last_batch_iteration", -1)
        self._prepare()
        self._last_lr: list[float] = []
        self._write()

    @abstractmethod
    def get_lr(self) -> list[float]:
        """Return the learning rate of each parameter group at the current iteration.

        The current iteration is `last_batch_iteration`. Nothing is written into the groups.
        """

    def get_last_lr(self) -> list[float]:
        """Return the learning rates that were last written, one per parameter group."""
        return list(self._last_lr)

    def step(self, iteration: int | None = None) -> None:
        """Advance the schedule and write the new learning rates into the groups.

        The next optimizer step uses these rates.

        Args:
            iteration: The number of the iteration to set. None advances the schedule by one
                iteration.

        Raises:
            UsageError: The number of parameter groups has changed.
        """
        self.last_batch_iteration = (
            self.last_batch_iteration + 1 if iteration is None else iteration
        )
        self._write()

    def state_dict(self) -> dict[str, Any]:
        """Return the current iteration under "last_batch_iteration", as DeepSpeed does.

        The settings are not saved, because they come from the configuration.
        """
        return {"last_batch_iteration": self.last_batch_iteration}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restore a saved iteration, and write its learning rates into the groups.

        Args:
            state_dict: The result of `state_dict`.

        Raises:
            KeyError: `state_dict` has no key "last_batch_iteration".
            UsageError: The number of parameter groups has changed.
        """
        self.last_batch_iteration = int(state_dict["last_batch_iteration"])
        self._write()

    @abstractmethod
    def _prepare(self) -> None:
        """Check the settings, and compute the values of each group."""

    def _write(self) -> None:
        groups = self.optimizer.param_groups
        rates = self.get_lr()
        if len(groups) != len(rates):
            raise UsageError(
                f"the optimizer has {len(groups)} parameter groups; {type(self).__name__} was "
                f"built for {len(rates)}.",
                fix="build the schedule after the last add_param_group.",
            )
        for group, rate in zip(groups, rates, strict=True):
            if isinstance(group["lr"], Tensor):
                group["lr"].fill_(rate)  # A captured CUDA graph reads this tensor
            else:
                group["lr"] = rate
        self._last_lr = rates

    def _per_group(self, name: str) -> list[float]:
        """Return the value of a setting for each group."""
        count = len(self.optimizer.param_groups)
        value: PerGroup = getattr(self.settings, name)
        if isinstance(value, int | float) or getattr(value, "ndim", None) == 0:
            return [_finite(name, value)] * count  # or a scalar array
        if isinstance(value, str) or not hasattr(value, "__len__"):
            raise ConfigError(
                f"{name} is {shown(value)}.", fix="give one number, or one for each group."
            )
        if len(value) != count:
            raise ConfigError(
                f"{name} lists {len(value)} values for {count} parameter groups.",
                fix="give one number, or one for each group.",
            )
        return [_finite(name, single) for single in value]

    def _own_rates(self) -> list[float]:
        return [float(group["lr"]) for group in self.optimizer.param_groups]


def _with_groups(optimizer: Any) -> HasParamGroups:
    """Return the optimizer, or the one that it wraps."""
    candidate: Any
    for candidate in (optimizer, getattr(optimizer, "optimizer", None)):
        if getattr(candidate, "param_groups", None):
            found: HasParamGroups = candidate
            return found
    raise UsageError(
        f"{type(optimizer).__name__} has no param_groups to schedule.",
        fix="pass the optimizer that engine.step() steps.",
    )


def _finite(name: str, value: Any) -> float:
    """Return a setting as a float.

    Raises ConfigError if it is not a finite number.
    """
    number = math.nan
    with suppress(TypeError, ValueError):
        number = float(value)
    if not math.isfinite(number):
        raise ConfigError(f"{name} is {shown(value)}.", fix="give a finite number.")
    return number


def _whole(settings: Any, name: str, least: int) -> int:
    """Return a setting as an int; 1e3 is accepted, 2.5 is not.

    Raises ConfigError if it is not a whole number, or is less than `least`.
    """
    value = getattr(settings, name)
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not float(value).is_integer() or value < least:
        raise ConfigError(f"{name} is {value!r}.", fix=f"give a whole number of at least {least}.")
    return int(value)


def _steps(settings: Any, name: str, least: int) -> float:
    """Return a number of iterations. Programs for DeepSpeed compute fractions such as 0.03 * total.

    Raises ConfigError if it is not a number, or is less than `least`.
    """
    value = getattr(settings, name)
    is_fraction = isinstance(value, float) and math.isfinite(value) and value > least
    return value if is_fraction and not value.is_integer() else _whole(settings, name, least)


def _between(lows: Sequence[float], highs: Sequence[float], share: float) -> list[float]:
    """Return the value of each group at a fraction of the way from low to high."""
    return [low + (high - low) * share for low, high in zip(lows, highs, strict=True)]


@dataclasses.dataclass(frozen=True)
class LRRangeTestSettings:
    """The settings of `LRRangeTest`.

    Attributes:
        lr_range_test_min_lr: The first rate.
        lr_range_test_step_size: Iterations per interval.
        lr_range_test_step_rate: The increase per interval, relative to the first rate.
        lr_range_test_staircase: Whether to increase once per interval instead of continuously.
        last_batch_iteration: The iteration to start after.
    """

    lr_range_test_min_lr: PerGroup = 1e-3
    lr_range_test_step_size: int = 2000
    lr_range_test_step_rate: float = 1.0
    lr_range_test_staircase: bool = False
    last_batch_iteration: int = -1


@dataclasses.dataclass(frozen=True)
class OneCycleSettings:
    """The settings of `OneCycle`.

    Attributes:
        cycle_min_lr: The rate at both ends of the cycle.
        cycle_max_lr: The rate at the peak of the cycle.
        decay_lr_rate: The decay of the rate per decay interval.
        cycle_first_step_size: Iterations of the rising part.
        cycle_second_step_size: Iterations of the falling part; None for those of the rising part.
        cycle_first_stair_count: Stairs of the rising part; 0 for none.
        cycle_second_stair_count: Stairs of the falling part; None for those of the rising part.
        decay_step_size: Iterations per decay interval; 0 for no decay.
        cycle_momentum: Whether to cycle the momentum in the opposite direction.
        cycle_min_mom: The momentum at the peak of the cycle.
        cycle_max_mom: The momentum at both ends of the cycle.
        decay_mom_rate: The change of the momentum per decay interval.
        last_batch_iteration: The iteration to start after.
    """

    cycle_min_lr: PerGroup
    cycle_max_lr: PerGroup
    decay_lr_rate: float = 0.0
    cycle_first_step_size: int = 2000
    cycle_second_step_size: int | None = None
    cycle_first_stair_count: int = 0
    cycle_second_stair_count: int | None = None
    decay_step_size: int = 0
    cycle_momentum: bool = True
    cycle_min_mom: PerGroup = 0.8
    cycle_max_mom: PerGroup = 0.9
    decay_mom_rate: float = 0.0
    last_batch_iteration: int = -1


@dataclasses.dataclass(frozen=True)
class WarmupSettings:
    """The settings of `WarmupLR`.

    Attributes:
        warmup_min_lr: The first rate.
        warmup_max_lr: The rate after the warm-up; None for each group's own rate.
        warmup_num_steps: Iterations of the warm-up.
        warmup_type: "log" or "linear".
        last_batch_iteration: The iteration to start after.
    """

    warmup_min_lr: PerGroup = 0.0
    warmup_max_lr: PerGroup | None = None
    warmup_num_steps: int = 1000
    warmup_type: str = "log"
    last_batch_iteration: int = -1


@dataclasses.dataclass(frozen=True)
class WarmupDecaySettings:
    """The settings of `WarmupDecayLR`.

    Attributes:
        total_num_steps: The iteration at which the rate is 0.
        warmup_min_lr: The first rate.
        warmup_max_lr: The rate after the warm-up; None for each group's own rate.
        warmup_num_steps: Iterations of the warm-up.
        warmup_type: "log" or "linear".
        last_batch_iteration: The iteration to start after.
    """

    total_num_steps: int
    warmup_min_lr: PerGroup = 0.0
    warmup_max_lr: PerGroup | None = 0.001
    warmup_num_steps: int = 1000
    warmup_type: str = "log"
    last_batch_iteration: int = -1


@dataclasses.dataclass(frozen=True)
class WarmupCosineSettings:
    """The settings of `WarmupCosineLR`, as ratios of each group's own rate.

    Attributes:
        total_num_steps: The iteration at which the cosine ends.
        warmup_min_ratio: The ratio at iteration 0.
        warmup_num_steps: Iterations of the warm-up.
        cos_min_ratio: The ratio at the end of the cosine.
        warmup_type: "log" or "linear".
        last_batch_iteration: The iteration to start after.
    """

    total_num_steps: int
    warmup_min_ratio: float = 0.0
    warmup_num_steps: int = 1000
    cos_min_ratio: float = 0.0001
    warmup_type: str = "log"
    last_batch_iteration: int = -1


class WarmupLR(LRSchedule):
    """Increase the rate from a minimum to a maximum, then keep the maximum.

    The rate of iteration i is ``warmup_min_lr + (warmup_max_lr - warmup_min_lr) * gamma``. Let n be
    `warmup_num_steps`. During the warm-up (``i < n``), gamma is ``log(i + 1) / log(n)`` for the
    type "log" and ``i / n`` for the type "linear". Before iteration 0 of a warm-up, gamma is 0.
    After the warm-up, gamma is 1. If n is 0, there is no warm-up. A positive n below 2 is replaced
    by 2, as in DeepSpeed.

    Args:
        optimizer: The optimizer, or an object with `param_groups`.
        warmup_min_lr: The rate at iteration 0, for all groups or as a list with one rate per group
            (default 0).
        warmup_max_lr: The rate after the warm-up, in the same form. None (default) means the rate
            that each group has when the schedule is created.
        warmup_num_steps: The number of iterations of the warm-up, which may be a fraction (default
            1000).
        warmup_type: "log" (default) or "linear". Any other value is replaced by "log" with a
            warning.
        last_batch_iteration: The iteration after which the schedule starts; -1 (default) for a new
            run.

    Raises:
        UsageError: The optimizer has no parameter groups.
        ConfigError: A number is out of range or not finite, or a list does not have one value per
            parameter group.
        TypeError: A setting is unknown, or a required setting is missing.
    """

    Settings: ClassVar[type[Any]] = WarmupSettings

    def _prepare(self) -> None:
        self.warmup = _Warmup(self.settings)
        self.warmup_num_steps, self.warmup_type = self.warmup.num_steps, self.warmup.shape
        self.min_lrs = self._per_group("warmup_min_lr")
        self.max_lrs = (
            self._own_rates()
            if self.settings.warmup_max_lr is None
            else self._per_group("warmup_max_lr")
        )

    def get_lr(self) -> list[float]:
        """Return the learning rate of each parameter group at the current iteration.

        The current iteration is `last_batch_iteration`. Nothing is written into the groups.
        """
        rising = self.warmup.at(self.last_batch_iteration)
        gamma = self._after_warmup() if rising is None else rising
        return _between(self.min_lrs, self.max_lrs, gamma)

    def _after_warmup(self) -> float:
        return 1.0


class WarmupDecayLR(WarmupLR):
    """Increase the rate to a maximum, then decay it linearly to the minimum.

    The rate of iteration i is ``warmup_min_lr + (warmup_max_lr - warmup_min_lr) * gamma``. Let n be
    `warmup_num_steps` and N be `total_num_steps`. During the warm-up (``i < n``), gamma is ``log(i
    + 1) / log(n)`` for the type "log" and ``i / n`` for "linear". Before iteration 0 of a warm-up,
    gamma is 0. After the warm-up, gamma is ``max(0, (N - i) / max(1, N - n))``. If n is 0, there is
    no warm-up. A positive n below 2 is replaced by 2, as in DeepSpeed. If N is less than n, the
    constructor logs a message.

    Args:
        optimizer: The optimizer, or an object with `param_groups`.
        total_num_steps: The iteration at which the rate has returned to `warmup_min_lr`, which is
            at least 1 and may be a fraction.
        warmup_min_lr: The rate at iteration 0, for all groups or as a list with one rate per group
            (default 0).
        warmup_max_lr: The rate after the warm-up, in the same form (default 0.001). None means the
            rate that each group has when the schedule is created.
        warmup_num_steps: The number of iterations of the warm-up, which may be a fraction (default
            1000).
        warmup_type: "log" (default) or "linear". Any other value is replaced by "log" with a
            warning.
        last_batch_iteration: The iteration after which the schedule starts; -1 (default) for a new
            run.

    Raises:
        UsageError: The optimizer has no parameter groups.
        ConfigError: A number is out of range or not finite, or a list does not have one value per
            parameter group.
        TypeError: A setting is unknown, or a required setting is missing.
    """

    Settings = WarmupDecaySettings

    def _prepare(self) -> None:
        super()._prepare()
        self.total_num_steps = _total(self.settings, self.warmup.num_steps)

    def _after_warmup(self) -> float:
        left = self.total_num_steps - max(self.last_batch_iteration, 0)
        return max(0.0, left / max(1, self.total_num_steps - self.warmup.num_steps))


class WarmupCosineLR(LRSchedule):
    """Increase the rate to the base rate of each group, then decay it along a cosine.

    The base rate of a parameter group is the learning rate that the group has when the schedule is
    created. The schedule multiplies the base rate by a ratio. Let i be the iteration, n be
    `warmup_num_steps` and N be `total_num_steps`.

    During the warm-up (``i < n``), the ratio is ``warmup_min_ratio + (1 - warmup_min_ratio) *
    gamma``, where gamma is ``log(i + 1) / log(n)`` for the type "log" and ``i / n`` for "linear".
    After the warm-up, the ratio is ``cos_min_ratio + (1 - cos_min_ratio) * (1 + cos(pi * p)) / 2``,
    where p is ``min(1, (i - n + 1) / max(1, N - n))``. If n is 0, there is no warm-up. A positive n
    below 2 is replaced by 2, as in DeepSpeed. Before iteration 0 of a warm-up the ratio is 0, also
    as in DeepSpeed. If N is less than n, the constructor logs a message.

    Args:
        optimizer: The optimizer, or an object with `param_groups`.
        total_num_steps: The number of iterations N, which is at least 1 and may be a fraction. The
            cosine ends at iteration ``N - 1``.
        warmup_min_ratio: The ratio at iteration 0 (default 0).
        warmup_num_steps: The number of iterations of the warm-up, which may be a fraction (default
            1000).
        cos_min_ratio: The ratio at the end of the cosine (default 0.0001).
        warmup_type: "log" (default) or "linear". Any other value is replaced by "log" with a
            warning.
        last_batch_iteration: The iteration after which the schedule starts; -1 (default) for a new
            run.

    Raises:
        UsageError: The optimizer has no parameter groups.
        ConfigError: A number is out of range or not finite.
        TypeError: A setting is unknown, or a required setting is missing.
    """

    Settings = WarmupCosineSettings

    def _prepare(self) -> None:
        self.warmup = _Warmup(self.settings)
        self.warmup_num_steps, self.warmup_type = self.warmup.num_steps, self.warmup.shape
        self.total_num_steps = _total(self.settings, self.warmup.num_steps)
        self._min_ratio = _finite("warmup_min_ratio", self.settings.warmup_min_ratio)
        self._cos_ratio = _finite("cos_min_ratio", self.settings.cos_min_ratio)
        self.org_lrs = self._own_rates()

    def get_lr(self) -> list[float]:
        """Return the learning rate of each parameter group at the current iteration.

        The current iteration is `last_batch_iteration`. Nothing is written into the groups.
        """
        ratio = self.get_lr_ratio()
        return [rate * ratio for rate in self.org_lrs]

    def get_lr_ratio(self) -> float:
        """Return the current ratio by which the base rate of every group is multiplied."""
        rising = self.warmup.at(self.last_batch_iteration)
        if rising is None:
            return self._cosine()
        if self.last_batch_iteration < 0:
            return 0.0
        return self._min_ratio + (1.0 - self._min_ratio) * rising

    def _cosine(self) -> float:
        done = max(self.last_batch_iteration, 0) - self.warmup.num_steps + 1
        progress = min(1.0, done / max(1, self.total_num_steps - self.warmup.num_steps))
        low = self._cos_ratio
        return max(0.0, low + (1.0 - low) * (1.0 + math.cos(math.pi * progress)) / 2.0)


class LRRangeTest(LRSchedule):
    """Learning-rate range test (Smith 2015): increase the rate without a limit.

    The rate of iteration i is ``lr_range_test_min_lr * (1 + lr_range_test_step_rate * q)``, where q
    is ``(i + 1) / lr_range_test_step_size``. With `lr_range_test_staircase`, q is rounded down, so
    the rate is constant for `lr_range_test_step_size` iterations.

    Args:
        optimizer: The optimizer, or an object with `param_groups`.
        lr_range_test_min_lr: The first rate, for all groups or as a list with one rate per group
            (default 0.001).
        lr_range_test_step_size: The number of iterations of an interval (default 2000).
        lr_range_test_step_rate: The increase per interval, as a multiple of the first rate (default
            1).
        lr_range_test_staircase: Whether to increase the rate once per interval instead of in every
            iteration (default false).
        last_batch_iteration: The iteration after which the schedule starts; -1 (default) for a new
            run.

    Raises:
        UsageError: The optimizer has no parameter groups.
        ConfigError: A number is out of range or not finite, or a list does not have one value per
            parameter group.
        TypeError: A setting is unknown, or a required setting is missing.
    """

    Settings = LRRangeTestSettings

    def _prepare(self) -> None:
        self.min_lrs = self._per_group("lr_range_test_min_lr")
        self.step_size = _whole(self.settings, "lr_range_test_step_size", 1)
        rate = self.settings.lr_range_test_step_rate
        self._step_rate = _finite("lr_range_test_step_rate", rate)

    def get_lr(self) -> list[float]:
        """Return the learning rate of each parameter group at the current iteration.

        The current iteration is `last_batch_iteration`. Nothing is written into the groups.
        """
        interval = (self.last_batch_iteration + 1) / self.step_size
        if self.settings.lr_range_test_staircase:
            interval = math.floor(interval)
        return [low * (1.0 + self._step_rate * interval) for low in self.min_lrs]


# DeepSpeed writes this beta2 with the cycled beta1, whatever the optimizer's beta2 is
_CYCLE_BETA2 = 0.99


class OneCycle(LRSchedule):
    """Increase the rate to a maximum, then decrease it and decay it further.

    The cycle consists of the increase and of the decrease to the first rate. During the cycle the
    rate is ``cycle_min_lr + (cycle_max_lr - cycle_min_lr) * s``. The height s rises from 0 to 1
    over the first part of the cycle, and falls to 0 over the second part. In each part, the height
    changes linearly. If a part has a number of stairs, the height changes in equal stairs instead.

    After the cycle the rate is ``cycle_min_lr / (1 + decay_lr_rate * t)``, where t is the number of
    iterations since the end of the cycle divided by `decay_step_size`. If `decay_step_size` is 0, t
    is 0.

    With `cycle_momentum`, beta1 is ``cycle_max_mom - (cycle_max_mom - cycle_min_mom) * s`` during
    the cycle and ``cycle_max_mom * (1 + decay_mom_rate * t)`` after it. beta2 is 0.99, as in
    DeepSpeed. The schedule writes both into the `betas` of every parameter group. The first
    optimizer step of a new run uses `cycle_min_mom` as beta1, also as in DeepSpeed.
    `cycle_momentum` has no effect unless every parameter group has `betas`.

    Args:
        optimizer: The optimizer, or an object with `param_groups`.
        cycle_min_lr: The rate at both ends of the cycle, for all groups or as a list with one rate
            per group.
        cycle_max_lr: The rate at the peak of the cycle, in the same form.
        decay_lr_rate: The factor of t in the decay of the rate (default 0). If it is negative, the
            rate increases, and the schedule ends with an error before the denominator reaches 0.
        cycle_first_step_size: The number of iterations of the rising part (default 2000).
        cycle_second_step_size: The number of iterations of the falling part. None (default) means
            as many as in the rising part.
        cycle_first_stair_count: The number of stairs of the rising part; 0 (default) for none.
        cycle_second_stair_count: The number of stairs of the falling part. None (default) means as
            many as in the rising part.
        decay_step_size: The number of iterations of a decay interval; 0 (default) for no decay.
        cycle_momentum: Whether to change the momentum too, in the opposite direction of the rate
            (default true).
        cycle_min_mom: The momentum at the peak of the cycle, in the form of `cycle_min_lr` (default
            0.8).
        cycle_max_mom: The momentum at both ends of the cycle, in the same form (default 0.9).
        decay_mom_rate: The factor of t in the change of the momentum after the cycle (default 0).
        last_batch_iteration: The iteration after which the schedule starts; -1 (default) for a new
            run.

    Raises:
        UsageError: The optimizer has no parameter groups.
        ConfigError: A number is out of range or not finite, or a list does not have one value per
            parameter group.
        TypeError: A setting is unknown, or a required setting is missing.
    """

    Settings = OneCycleSettings

    def _prepare(self) -> None:
        chosen = self.settings
        second = chosen.cycle_second_step_size
        stairs = chosen.cycle_second_stair_count
        self.first_size = _whole(chosen, "cycle_first_step_size", 1)
        self.second_size = (
            self.first_size if second is None else _whole(chosen, "cycle_second_step_size", 0)
        )
        self.total_size = self.first_size + self.second_size
        self.first_stairs = _whole(chosen, "cycle_first_stair_count", 0)
        self.second_stairs = (
            self.first_stairs if stairs is None else _whole(chosen, "cycle_second_stair_count", 0)
        )
        self.step_ratio = self.first_size / self.total_size
        self.decay_size = _whole(chosen, "decay_step_size", 0)
        self._lr_decay = _finite("decay_lr_rate", chosen.decay_lr_rate)
        self._mom_decay = _finite("decay_mom_rate", chosen.decay_mom_rate)
        self.min_lrs = self._per_group("cycle_min_lr")
        self.max_lrs = self._per_group("cycle_max_lr")
        self.min_moms = self._per_group("cycle_min_mom")
        self.max_moms = self._per_group("cycle_max_mom")
        self.cycle_momentum = bool(chosen.cycle_momentum) and self._takes_momentum()

    def get_lr(self) -> list[float]:
        """Return the learning rate of each parameter group at the current iteration.

        The current iteration is `last_batch_iteration`. Nothing is written into the groups.
        """
        if self._cycling():
            return _between(self.min_lrs, self.max_lrs, self._scale())
        factor = 1.0 + self._lr_decay * self._decay_intervals()
        if factor <= 0.0:
            raise ConfigError(
                f"OneCycle has no rate at iteration {self.last_batch_iteration}, with "
                f"decay_lr_rate={self._lr_decay:g}.",
                "The rate after the cycle is cycle_min_lr / (1 + decay_lr_rate * t), and this "
                "denominator has reached 0.",
                "set decay_lr_rate to 0 or more, or increase decay_step_size.",
            )
        return [low / factor for low in self.min_lrs]

    def get_mom(self) -> list[tuple[float, float]] | None:
        """Return the momentum of each parameter group at the current iteration.

        The current iteration is `last_batch_iteration`. Before iteration 0 the result contains
        `cycle_max_mom`, although the first optimizer step of a new run uses `cycle_min_mom`, as in
        DeepSpeed.

        Returns:
            A list with the pair (beta1, beta2) of each group. None if the schedule does not change
            the momentum.
        """
        if not self.cycle_momentum:
            return None
        if self._cycling():
            beta1s = _between(self.max_moms, self.min_moms, self._scale())
        else:
            factor = 1.0 + self._mom_decay * self._decay_intervals()
            beta1s = [high * factor for high in self.max_moms]
        return [(beta1, _CYCLE_BETA2) for beta1 in beta1s]

    def _write(self) -> None:
        super()._write()
        moms = self.get_mom()
        if moms is None:
            return
        if self.last_batch_iteration < 0:
            # As in DeepSpeed: the first update runs with cycle_min_mom, although get_mom() returns
            # cycle_max_mom
            moms = [(low, _CYCLE_BETA2) for low in self.min_moms]
        for group, betas in zip(self.optimizer.param_groups, moms, strict=False):
            group["betas"] = betas

    def _cycling(self) -> bool:
        return self.last_batch_iteration < self.total_size

    def _scale(self) -> float:
        """Return the height in the cycle, 0 at its ends and 1 at its peak."""
        at = (self.last_batch_iteration + 1) % self.total_size
        rising = at <= self.first_size
        part, size = (at, self.first_size) if rising else (self.total_size - at, self.second_size)
        stairs = self.first_stairs if rising else self.second_stairs
        return math.floor(part * stairs / size) / stairs if stairs else part / size

    def _decay_intervals(self) -> float:
        since = self.last_batch_iteration - self.total_size + 1
        return since / self.decay_size if self.decay_size else 0.0

    def _takes_momentum(self) -> bool:
        groups = self.optimizer.param_groups
        if not all("betas" in group for group in groups):
            name = type(self.optimizer).__name__
            log_once(
                f"OneCycle: cycle_momentum has no effect, because optimizer {name} has no betas."
            )
            return False
        if any(group["betas"][1] != _CYCLE_BETA2 for group in groups):
            log_once(
                f"OneCycle: cycle_momentum sets beta2 to {_CYCLE_BETA2}, as in DeepSpeed; false "
                "keeps yours."
            )
        return True


class _Warmup:
    """The rise from 0 to 1 that three schedules share."""

    def __init__(self, settings: Any) -> None:
        num_steps = _steps(settings, "warmup_num_steps", 0)
        self.num_steps = max(2, num_steps) if num_steps else 0
        self.shape = settings.warmup_type
        if self.shape not in ("log", "linear"):
            log_once(
                f'warmup_type {self.shape!r} is not known ("log", "linear"): the warm-up is '
                "logarithmic, as in DeepSpeed.",
                logging.WARNING,
            )
            self.shape = "log"

    def at(self, iteration: int) -> float | None:
        """Return gamma at an iteration, or None after the warm-up."""
        if not self.num_steps or iteration >= self.num_steps:
            return None
        if iteration < 0:
            return 0.0
        if self.shape == "linear":
            return iteration / self.num_steps
        return math.log(iteration + 1) / math.log(self.num_steps)


def _total(settings: Any, warmup: float) -> float:
    steps = _steps(settings, "total_num_steps", 1)
    if steps < warmup:
        log_once(
            f"total_num_steps {steps} is less than warmup_num_steps {warmup}: the run ends inside "
            "the warm-up.",
            logging.WARNING,
        )
    return steps


SCHEDULES: dict[str, type[LRSchedule]] = {
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
) -> LRSchedule | torch.optim.lr_scheduler.LRScheduler:
    """Build the schedule that a configuration names.

    The name is that of a schedule of DeepSpeed or of a class of `torch.optim.lr_scheduler`. The
    classes of PyTorch require a `torch.optim.Optimizer`. To check the parameters, the function
    first runs up to three steps of the schedule over another optimizer with copies of the
    parameter groups.

    Args:
        name: The name of the schedule, for example "WarmupLR". Case is ignored.
        params: The keyword arguments of the schedule's class. A value "auto" selects the default.
        optimizer: The optimizer whose learning rates the schedule writes.

    Returns:
        The schedule. It has already written the rates of the first step into the optimizer.

    Raises:
        ConfigError: The name is unknown, the class does not accept the parameters or the optimizer,
            or it cannot compute learning rates from them.
        UsageError: The optimizer has no parameter groups.
    """
    choices: dict[str, type[Any]] = {**_TORCH_SCHEDULES, **SCHEDULES}
    by_case = {choice.lower(): cls for choice, cls in choices.items()}
    cls = by_case.get(str(name).lower())
    if cls is None:
        raise ConfigError(
            "no learning-rate schedule is called "
            f"{str(name)[:100]}{did_you_mean(str(name)[:100], choices)}.",
            fix=(
                f"name one of {', '.join(VALID_LR_SCHEDULES)} or one of torch.optim.lr_scheduler, "
                "or pass a scheduler."
            ),
        )
    settings = checked_arguments(f"scheduler {shown(name)}", cls, params)
    try:
        _try_out(cls, _with_groups(optimizer), settings)
        built: LRSchedule | torch.optim.lr_scheduler.LRScheduler = cls(optimizer, **settings)
    except DeepSeekZeroError:
        raise
    except Exception as refusal:
        # torch's classes raise different errors: from asserts, indices, comparisons
        raise ConfigError(
            f"scheduler {shown(name)} refuses its parameters {shown(settings, 300)}: "
            f"{str(refusal)[:300]}",
            fix="see the documentation of the class for what it takes.",
        ) from refusal
    return built


def _try_out(cls: type[Any], optimizer: HasParamGroups, settings: Mapping[str, Any]) -> None:
    """Run three steps, or all if there are fewer, over a stand-in optimizer.

    This finds values that the class accepts but cannot compute with, before the training starts.
    """
    with undecorated():
        stand_in = torch.optim.SGD([torch.zeros(1, device="cpu")], lr=0.1)
    stand_in.defaults = dict(getattr(optimizer, "defaults", stand_in.defaults))
    # Schedules overwrite rates that are tensors in place, so the stand-in needs copies
    stand_in.param_groups = [
        {name: _copied(value) for name, value in group.items()}
        | {"params": [torch.zeros(1, device="cpu")]}
        for group in optimizer.param_groups
    ]
    schedule = cls(stand_in, **settings)
    mark_stepped(stand_in)
    # OneCycleLR raises an error after its last step
    for _ in range(min(3, getattr(schedule, "total_steps", 3))):
        schedule.step(**({"metrics": 1.0} if cls is torch_schedules.ReduceLROnPlateau else {}))
    rates = [group["lr"] for group in stand_in.param_groups]
    if not all(isinstance(rate, int | float | torch.Tensor) for rate in rates):
        raise TypeError(f"its rates are {shown(rates)}")
    if not all(math.isfinite(rate) for rate in rates):
        raise ValueError(f"its rates are {shown(rates)}")


def _copied(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) else value
