"""The base of our learning-rate schedules: a function of the iteration, written into an optimizer's groups.

Owns: counting, writing, saving.  Does not own: the formulas (schedule_shapes.py) nor the names (lr_schedules.py).
Works on any object with `param_groups`, so that a sharded optimizer needs no disguise.

[Note: when a schedule writes the rate] Building one writes the rate of "before iteration 0" into every group, so the
first optimizer step uses it.  Each `step()` advances `last_batch_iteration` (-1, 0, 1, ...) and writes the rate that
the next optimizer step uses.  In the warm-up family iteration 0 still has the minimum (log 1 = 0), so the first two
optimizer steps use it; that is DeepSpeed's counting and it is kept, so that a run ported from it keeps its curve.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Protocol

from torch import Tensor

from deepseek_zero.base.errors import ConfigError, UsageError

PerGroup = float | Sequence[float]


class HasParamGroups(Protocol):
    """What a schedule needs of an optimizer."""

    param_groups: list[dict[str, Any]]


class Schedule(ABC):
    """A function of the iteration that writes `lr` into an optimizer's groups; quacks like torch's LRScheduler."""

    Settings: ClassVar[type[Any]]

    def __init__(self, optimizer: HasParamGroups, *args: Any, **settings: Any) -> None:
        self.settings = self.Settings(*args, **settings)
        self.optimizer = _with_groups(optimizer)
        self.last_batch_iteration = whole_number("last_batch_iteration", self.settings.last_batch_iteration, -1)
        self._prepare()
        self._last_lr: list[float] = []
        self._write()

    @abstractmethod
    def get_lr(self) -> list[float]:
        """The rate of each group at `last_batch_iteration`."""

    def get_last_lr(self) -> list[float]:
        """The rate of each group as last written."""
        return list(self._last_lr)

    def step(self, iteration: int | None = None) -> None:
        """Advance by one iteration, or to the one given, and write the rates."""
        self.last_batch_iteration = self.last_batch_iteration + 1 if iteration is None else iteration
        self._write()

    def state_dict(self) -> dict[str, Any]:
        """DeepSpeed's state, one integer; the settings come from the config."""
        return {"last_batch_iteration": self.last_batch_iteration}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Go to the saved iteration and write its rates."""
        self.last_batch_iteration = int(state_dict["last_batch_iteration"])
        self._write()

    @abstractmethod
    def _prepare(self) -> None:
        """Check the settings and lay out what is per group."""

    def _write(self) -> None:
        groups, rates = self.optimizer.param_groups, self.get_lr()
        if len(groups) != len(rates):
            raise UsageError(
                f"the optimizer has {len(groups)} parameter groups; {type(self).__name__} was built for {len(rates)}.",
                fix="build the schedule after the last add_param_group.",
            )
        for group, rate in zip(groups, rates, strict=True):
            if isinstance(group["lr"], Tensor):
                group["lr"].fill_(rate)  # a captured graph reads this very tensor
            else:
                group["lr"] = rate
        self._last_lr = rates

    def _per_group(self, name: str, value: PerGroup) -> list[float]:
        count = len(self.optimizer.param_groups)
        if isinstance(value, int | float):
            return [float(value)] * count
        if len(value) != count:
            raise ConfigError(
                f"{name} lists {len(value)} values for {count} parameter groups.",
                fix="give one number, or one for each group.",
            )
        return [float(single) for single in value]

    def _own_rates(self) -> list[float]:
        return [float(group["lr"]) for group in self.optimizer.param_groups]


def _with_groups(optimizer: Any) -> HasParamGroups:
    """The optimizer, or the one it wraps."""
    candidate: Any
    for candidate in (optimizer, getattr(optimizer, "optimizer", None)):
        if getattr(candidate, "param_groups", None):
            found: HasParamGroups = candidate
            return found
    raise UsageError(
        f"{type(optimizer).__name__} has no param_groups to schedule.",
        fix="pass the optimizer that engine.step() steps.",
    )


def whole_number(name: str, value: Any, least: int) -> int:
    """A count; 1e3 is one, 2.5 is not."""
    whole = isinstance(value, int | float) and not isinstance(value, bool) and float(value).is_integer()
    if not whole or value < least:
        raise ConfigError(f"{name} is {value!r}.", fix=f"give a whole number of at least {least}.")
    return int(value)
