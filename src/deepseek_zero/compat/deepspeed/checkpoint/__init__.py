"""Checkpoints in DeepSpeed's layout: read, written, and made known to the core by
`register_layout`.
"""

from __future__ import annotations

from ....checkpoint.layouts import register_layout
from .layout import DEEPSPEED
from .writer import convert_to_deepspeed

__all__ = ["CONVERTERS", "DEEPSPEED", "convert_to_deepspeed"]

CONVERTERS = {"deepspeed": convert_to_deepspeed}

register_layout(DEEPSPEED)
