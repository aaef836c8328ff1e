"""Seed 000's import path: `from deepseek_zero.optimizer import ZeroOptimizer`."""

from .deepseek import ZeroOptimizer

__all__ = ["ZeroOptimizer"]
