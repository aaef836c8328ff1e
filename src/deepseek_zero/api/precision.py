"""The 16-bit format that a configuration enables."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from ..config.problems import lookup

DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}


def low_precision(values: Mapping[str, Any]) -> str | None:
    """Return "fp16" or "bf16" if a configuration enables that section, and None otherwise."""
    return next((name for name in DTYPES if lookup(values, f"{name}.enabled") is True), None)
