"""The 16 bits that a configuration asks to compute in."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from ..config.problems import lookup

DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}


def low_precision(values: Mapping[str, Any]) -> str | None:
    """Return the section of the 16 bits that a configuration's values ask to compute in; None where
    they do not.
    """
    return next((name for name in DTYPES if lookup(values, f"{name}.enabled") is True), None)
