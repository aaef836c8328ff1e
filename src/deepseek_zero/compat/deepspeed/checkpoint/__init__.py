"""Checkpoints in DeepSpeed's layout: read, written, and made known to the core by `register_layout`."""

from __future__ import annotations

from .writer import convert_to_deepspeed

__all__ = ["convert_to_deepspeed"]
