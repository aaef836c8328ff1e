"""DeepSpeed's optimizer classes by name: torch's kernels under DeepSpeed's arguments and defaults.

There is one class per rule, on CPU and GPU alike; the registry turns DeepSpeed's arguments into it.  Reached through
the drop-in (`deepspeed.ops`).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch.optim import Optimizer

from ..optim.registry import resolve_optimizer


def DeepSpeedCPUAdam(model_params: Iterable[Any], lr: float = 1e-3, **options: Any) -> Optimizer:
    """Adam or, unless `adamw_mode` is false, AdamW, without decay unless asked for."""
    return resolve_optimizer("Adam", {"lr": lr, **options}).build(model_params)


def FusedAdam(params: Iterable[Any], lr: float = 1e-3, **options: Any) -> Optimizer:
    """Adam or, unless `adam_w_mode` is false, AdamW, without decay unless asked for."""
    return resolve_optimizer("Adam", {"lr": lr, **options}).build(params)


def DeepSpeedCPUAdagrad(model_params: Iterable[Any], lr: float = 1e-2, **options: Any) -> Optimizer:
    """Adagrad."""
    return resolve_optimizer("Adagrad", {"lr": lr, **options}).build(model_params)


def DeepSpeedCPULion(model_params: Iterable[Any], lr: float = 1e-3, **options: Any) -> Optimizer:
    """Lion."""
    return resolve_optimizer("Lion", {"lr": lr, **options}).build(model_params)


def FusedLion(params: Iterable[Any], lr: float = 1e-3, **options: Any) -> Optimizer:
    """Lion."""
    return resolve_optimizer("Lion", {"lr": lr, **options}).build(params)


def FusedLamb(params: Iterable[Any], lr: float = 1e-3, **options: Any) -> Optimizer:
    """LAMB."""
    return resolve_optimizer("Lamb", {"lr": lr, **options}).build(params)
