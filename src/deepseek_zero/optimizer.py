"""Import path `deepseek_zero.optimizer`, which re-exports `ZeroOptimizer`."""

from .api.wrap import ZeroOptimizer

__all__ = ["ZeroOptimizer"]
