"""What programs read of an engine's optimizer in DeepSpeed's words: its loss scale, and what stands behind it.

`initialize` makes its engine's optimizer one of these.  It is the sharded optimizer of every other door; only names are
added.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch

from ...optim.sharded import ShardedOptimizer
from ...precision.loss_scale import LossScaler

# Attributes of DeepSpeed's loss scale -> of ours; both ways.
SCALE_WORDS = {"cur_scale": "scale", "loss_scale": "scale"} | {
    name: name for name in ("cur_iter", "last_overflow_iter", "cur_hysteresis")
}
SETTING_WORDS = {
    "scale_window": "loss_scale_window",
    "min_loss_scale": "min_loss_scale",
    "min_scale": "min_loss_scale",
    "delayed_shift": "hysteresis",
    "consecutive_hysteresis": "consecutive_hysteresis",
}


class LossScaleView:
    """An engine's loss scaler under DeepSpeed's names: reads and writes the scaler itself."""

    scale_factor = 2.0

    scaler: LossScaler

    def __init__(self, scaler: LossScaler) -> None:
        vars(self)["scaler"] = scaler

    def __getattr__(self, name: str) -> Any:
        if name in SCALE_WORDS:
            return getattr(self.scaler, SCALE_WORDS[name])
        if name in SETTING_WORDS:
            return getattr(self.scaler.settings, SETTING_WORDS[name])
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def __setattr__(self, name: str, value: Any) -> None:
        if name not in SCALE_WORDS:
            raise AttributeError(f"{name} of a loss scale is not to be set; what is: {', '.join(SCALE_WORDS)}")
        setattr(self.scaler, SCALE_WORDS[name], value)

    @property
    def dynamic(self) -> bool:
        """Whether it moves."""
        return self.scaler.dynamic

    dynamic_loss_scale = dynamic

    @property
    def use_grad_scaling(self) -> bool:
        """Whether losses are scaled."""
        return True

    def update_scale(self, overflow: bool) -> None:
        """Take the verdict of one step."""
        self.scaler.update(overflow)


class _NoScale:
    """The loss scale of an engine that has none: 1, for ever."""

    cur_scale = loss_scale = 1.0
    cur_iter, dynamic, dynamic_loss_scale, use_grad_scaling = 0, False, False, False
    last_overflow_iter = scale_factor = scale_window = min_loss_scale = None


class NamedOptimizer(ShardedOptimizer):
    """The sharded optimizer under DeepSpeed's names."""

    @property
    def loss_scaler(self) -> Any:
        """The loss scale; without one, a scale of 1."""
        return LossScaleView(self.scaler) if self.scaler is not None else _NoScale()

    loss_scale_config = loss_scaler

    @property
    def dynamic_loss_scale(self) -> bool:
        """Whether the loss scale moves."""
        return self.scaler is not None and self.scaler.dynamic

    @property
    def cur_scale(self) -> float:
        """The factor that losses are multiplied by now."""
        return self.loss_scale

    @cur_scale.setter
    def cur_scale(self, value: float) -> None:
        if self.scaler is not None:
            self.scaler.scale = float(value)

    def needs_scaler(self) -> bool:
        """Return whether a program that differentiates by itself must scale its loss."""
        return self.scaler is not None

    def scale_if_loss(self, value: Any) -> Any:
        """Return a loss times the loss scale; anything but a scalar that requires a gradient as it is."""
        is_loss = isinstance(value, torch.Tensor) and value.numel() == 1 and value.requires_grad
        return value * self.loss_scale if is_loss else value

    @property
    def fp16_groups(self) -> list[list[torch.nn.Parameter]]:
        """The parameters of each group that this optimizer updates, of whatever dtype."""
        return [list(group["params"]) for group in self.param_groups]

    bit16_groups = fp16_groups

    @property
    def _global_grad_norm(self) -> float | None:
        return self.last.norm if self.last is not None else None

    @property
    def clip_grad(self) -> float:
        """The largest norm of the gradients; 0: not clipped."""
        return self.settings.max_norm

    @property
    def fp32_groups_flat(self) -> list[torch.Tensor]:
        """Copies of this rank's masters in fp32, one flat tensor per group."""
        self.finish()
        parts = [
            [shard.master.read(shard.start, shard.stop).float().cpu() for shard in each]
            for each in self.shards_by_group
        ]
        return [torch.cat([torch.zeros(0), *(part.reshape(-1) for part in each)]) for each in parts]

    single_partition_of_fp32_groups = fp32_partitioned_groups_flat = fp32_groups_flat


def class_of(optimizer: ShardedOptimizer) -> type[NamedOptimizer]:
    """Return the class under DeepSpeed's names.  Where DeepSpeed has no optimizer of its own, at stage 0 in fp32, it is
    also a class of the optimizer's that computes, and equal to that.
    """
    settings = optimizer.runtime.settings
    inner: Any = type(optimizer.inner)
    is_plain = settings.stage == 0 and settings.policy.compute in (None, torch.float32)
    return _plain_class(inner) if is_plain else NamedOptimizer


@cache
def _plain_class(inner: Any) -> type[NamedOptimizer]:
    def is_inner(self: NamedOptimizer, other: object) -> bool:
        return other is self or other is self.inner

    words = {"__eq__": is_inner, "__hash__": object.__hash__, "__module__": __name__}
    try:
        return type(NamedOptimizer.__name__, (NamedOptimizer, inner), words)
    except TypeError:  # a class with a metaclass or a layout of its own
        return NamedOptimizer


class _Kind(type):
    """A class of DeepSpeed's optimizers, by what an engine was asked for: there is one optimizer."""

    def __instancecheck__(cls, instance: object) -> bool:
        return isinstance(instance, NamedOptimizer) and bool(cls.fits(instance, instance.runtime.settings.stage))  # type: ignore[attr-defined]


class DeepSpeedZeroOptimizer(metaclass=_Kind):
    """An optimizer of stage 1 or 2."""

    @staticmethod
    def fits(optimizer: NamedOptimizer, stage: int) -> bool:
        """Return whether it is one."""
        return stage in (1, 2)


class DeepSpeedZeroOptimizer_Stage3(metaclass=_Kind):
    """An optimizer of stage 3."""

    @staticmethod
    def fits(optimizer: NamedOptimizer, stage: int) -> bool:
        """Return whether it is one."""
        return stage == 3


class FP16_Optimizer(metaclass=_Kind):
    """An optimizer of stage 0 in fp16."""

    @staticmethod
    def fits(optimizer: NamedOptimizer, stage: int) -> bool:
        """Return whether it is one."""
        return stage == 0 and optimizer.runtime.settings.policy.compute is torch.float16


class BF16_Optimizer(metaclass=_Kind):
    """An optimizer of stage 0 in bf16."""

    @staticmethod
    def fits(optimizer: NamedOptimizer, stage: int) -> bool:
        """Return whether it is one."""
        return stage == 0 and optimizer.runtime.settings.policy.compute is torch.bfloat16
