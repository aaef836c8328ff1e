"""Loss scaling for fp16.

The rule is DeepSpeed's, which is Megatron's. The caller finds overflows and reduces
them over the ranks: `update` receives the same result on every rank, so the scale is the same
everywhere without communication. The rule in detail::

    overflow, hysteresis left > 1      hysteresis falls by 1, the scale stays
    overflow, hysteresis left = 1      scale = max(scale / 2, minimum); an error if there already
    no overflow                        consecutive_hysteresis: hysteresis is refilled
    ... and a multiple of `window`     scale doubles, hysteresis is refilled
        good steps since the last overflow
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from deepseek_zero.base.errors import ConfigError, DeepSeekZeroError, UsageError
from deepseek_zero.base.log import log_once

_FACTOR = 2.0


class LossScaleError(DeepSeekZeroError):
    """Raised if gradients overflow although the loss scale is at its minimum."""


@dataclass(frozen=True)
class LossScaleSettings:
    """The section `fp16` of a configuration, with its key names.

    Attributes:
        loss_scale: A static scale; 0 means dynamic.
        initial_scale_power: The first dynamic scale is 2 to this power.
        loss_scale_window: Good steps after which the scale doubles.
        hysteresis: Overflows until the scale is halved.
        consecutive_hysteresis: Whether to refill the hysteresis after every good step.
        min_loss_scale: The minimum of a dynamic scale.
        gives_up: Whether to raise an error on an overflow at the minimum. Otherwise the step is
            skipped like any other step with an overflow.

    Raises:
        ConfigError: The first dynamic scale is below the minimum.
    """

    loss_scale: float = 0.0
    initial_scale_power: int = 16
    loss_scale_window: int = 1000
    hysteresis: int = 2
    consecutive_hysteresis: bool = False
    min_loss_scale: float = 1.0
    gives_up: bool = True

    def __post_init__(self) -> None:
        if self.dynamic and _FACTOR**self.initial_scale_power < self.min_loss_scale:
            raise ConfigError(
                f"fp16: 2^initial_scale_power is below min_loss_scale {self.min_loss_scale}."
            )

    @property
    def dynamic(self) -> bool:
        """Return whether the scale is dynamic."""
        return self.loss_scale == 0


@dataclass
class LossScaler:
    """The current loss scale and the rule that changes it.

    `update` must be called once per optimizer step, including skipped steps.

    Attributes:
        settings: The rule.
        scale: The current scale.
        cur_iter: Number of steps so far.
        last_overflow_iter: The step of the last overflow. It is -1 before the first one, so that
            the first window is as long as the others.
        cur_hysteresis: Overflows until the scale is halved.
    """

    settings: LossScaleSettings = dataclasses.field(default_factory=LossScaleSettings)
    scale: float = dataclasses.field(init=False)
    cur_iter: int = dataclasses.field(default=0, init=False)
    last_overflow_iter: int = dataclasses.field(default=-1, init=False)
    cur_hysteresis: int = dataclasses.field(init=False)

    def __post_init__(self) -> None:
        chosen = self.settings
        self.scale = (
            _FACTOR**chosen.initial_scale_power if chosen.dynamic else float(chosen.loss_scale)
        )
        self.cur_hysteresis = chosen.hysteresis

    @property
    def dynamic(self) -> bool:
        """Return whether the scale is dynamic."""
        return self.settings.dynamic

    def update(self, overflow: bool) -> None:
        """Update the scale after a step.

        Args:
            overflow: Whether the gradients of any rank overflowed, the same on all ranks. Such a
                step must be skipped.

        Raises:
            LossScaleError: The scale would fall below its minimum; nothing was changed.
        """
        if not self.dynamic:
            return
        if overflow:
            self._after_overflow()
        else:
            self._after_good_step()
        self.cur_iter += 1

    def state_dict(self) -> dict[str, Any]:
        """Return the changing values as plain numbers."""
        return {
            "dynamic": self.dynamic,
            "scale": self.scale,
            "cur_iter": self.cur_iter,
            "last_overflow_iter": self.last_overflow_iter,
            "cur_hysteresis": self.cur_hysteresis,
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restore the values returned by `state_dict`.

        The configuration decides between static and dynamic: a static scaler, or the state of a
        static one, leaves the configured scale. A minimum that was raised since then is respected.

        Raises:
            UsageError: The state is incomplete.
        """
        missing = [name for name in self.state_dict() if name not in state_dict]
        if missing:
            raise UsageError(
                f"the loss scaler's state lacks {', '.join(missing)}.",
                fix="pass what LossScaler.state_dict() returned.",
            )
        if not (self.dynamic and state_dict["dynamic"]):
            return
        self.scale = max(float(state_dict["scale"]), self.settings.min_loss_scale)
        self.cur_iter = int(state_dict["cur_iter"])
        self.last_overflow_iter = int(state_dict["last_overflow_iter"])
        self.cur_hysteresis = min(int(state_dict["cur_hysteresis"]), self.settings.hysteresis)

    def _after_overflow(self) -> None:
        if self.cur_hysteresis > 1:
            self.cur_hysteresis -= 1
            outcome = (
                f"the scale stays at {self.scale:g}, hysteresis falls to {self.cur_hysteresis}"
            )
        else:
            before = self.scale
            self.scale = self._lower()
            outcome = f"the scale falls from {before:g} to {self.scale:g}"
        self.last_overflow_iter = self.cur_iter
        log_once(f"gradients overflowed, step {self.cur_iter + 1} skipped: {outcome}.")

    def _lower(self) -> float:
        least = self.settings.min_loss_scale
        if self.scale <= least and self.settings.gives_up:
            raise LossScaleError(
                "Current loss scale already at minimum - cannot decrease scale anymore "
                f"({least:g}).",
                why=(
                    "gradients are infinite or NaN at the smallest scale allowed, so the scale is "
                    "not the cause."
                ),
                fix="look for the first non-finite loss, lower the learning rate or clip "
                "gradients, train in bf16, or set a smaller fp16.min_loss_scale.",
            )
        return max(self.scale / _FACTOR, least)

    def _after_good_step(self) -> None:
        if self.settings.consecutive_hysteresis:
            self.cur_hysteresis = self.settings.hysteresis
        good = self.cur_iter - self.last_overflow_iter - 1
        if good > 0 and good % self.settings.loss_scale_window == 0:
            self.cur_hysteresis = self.settings.hysteresis
            self.scale *= _FACTOR
