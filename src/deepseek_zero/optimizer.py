"""Seed 000's import path: `from deepseek_zero.optimizer import ZeroOptimizer`."""

from .api.wrap import ZeroOptimizer

__all__ = ["ZeroOptimizer"]
