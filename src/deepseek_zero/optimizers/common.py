"""Parts that the optimizers of this package share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

# Computes the loss and its gradients again; None to use the current gradients
Closure = Callable[[], float] | None


def evaluated(closure: Closure) -> float | None:
    """Call a step's closure with gradients enabled.

    Args:
        closure: Computes the loss and its gradients; None to do nothing.

    Returns:
        The loss, or None without a closure.
    """
    if closure is None:
        return None
    with torch.enable_grad():
        return closure()


def adam_state(state: dict[str, Any], parameter: Tensor, step_device: torch.device) -> None:
    """Create the state of Adam if there is none: `step`, `exp_avg` and `exp_avg_sq`.

    If there is one, `step` is moved to its device. A checkpoint loads it on the CPU.

    Args:
        state: The state of the parameter, changed in place.
        parameter: The parameter, whose shape and device the moments get.
        step_device: The device of the scalar `step`, which counts updates.
    """
    if not state:
        state["step"] = torch.zeros((), dtype=torch.float32, device=step_device)
        state["exp_avg"] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
        state["exp_avg_sq"] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
    else:
        state["step"] = torch.as_tensor(state["step"], dtype=torch.float32, device=step_device)
