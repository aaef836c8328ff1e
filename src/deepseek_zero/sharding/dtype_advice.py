"""Advice for errors of PyTorch about mixed dtypes."""

from __future__ import annotations

import torch
from torch import nn

from ..planner.auto_wrap_policy import BATCH_NORMS


def explain_dtypes(error: BaseException, model: nn.Module, compute: torch.dtype) -> None:
    """Add a note to torch's error about mixed dtypes, because wrapping casts no buffers.

    Args:
        error: The error that ended the forward.
        model: The wrapped model.
        compute: The dtype of its weights.
    """
    if not isinstance(error, RuntimeError) or "type" not in str(error):
        return
    others = []
    for prefix, module in model.named_modules():
        for name, buffer in module.named_buffers(recurse=False):
            is_other = buffer.is_floating_point() and buffer.dtype != compute
            if is_other and not isinstance(module, BATCH_NORMS):
                others.append(f"'{prefix}.{name}'" if prefix else f"'{name}'")
    named = ", ".join(others[:3])
    if len(others) > 3:
        named += f" and {len(others) - 3} more"
    which = f" Buffers with another dtype are {named}." if others else ""
    error.add_note(
        f"[deepseek_zero] The weights were cast to {compute}. Buffers, and tensors that forward "
        f"creates, keep their dtype.{which}\n"
        "  What to do: cast them where they are used, as in `x + self.table.to(x.dtype)`, or cast "
        "the buffers before wrapping; torch_autocast casts both in each operation."
    )
