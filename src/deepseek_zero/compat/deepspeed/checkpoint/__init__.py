"""Read and write checkpoints in DeepSpeed's layout.

Importing the package registers the layout.
"""

from __future__ import annotations

from ....checkpoint.layouts import register_layout
from .layout import DEEPSPEED
from .writer import convert_to_deepspeed

__all__ = ["CONVERTERS", "DEEPSPEED", "convert_to_deepspeed"]

CONVERTERS = {"deepspeed": convert_to_deepspeed}

register_layout(DEEPSPEED)
