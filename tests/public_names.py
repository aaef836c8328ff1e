"""The public modules of the library and their public names, for the API reference and its test."""

from __future__ import annotations

from importlib import import_module
from types import ModuleType

# in the order of the pages
PUBLIC_MODULES = {
    "Training": (
        "deepseek_zero",
        "deepseek_zero.zero",
        "deepseek_zero.optimizer",
        "deepseek_zero.optimizers",
        "deepseek_zero.optimizers.lr_schedules",
        "deepseek_zero.checkpointing",
        "deepseek_zero.comm",
        "deepseek_zero.utils",
        "deepseek_zero.utils.zero_to_fp32",
    ),
    "Parts of the library": (
        "deepseek_zero.activations",
        "deepseek_zero.attention",
        "deepseek_zero.checkpoint",
        "deepseek_zero.parallel",
        "deepseek_zero.pipeline",
        "deepseek_zero.report",
    ),
}
# Modules that reexport all public names of another module
LISTED_IN = {"deepseek_zero.comm": "deepseek_zero.compat.deepspeed.comm"}


def public_names(module: ModuleType) -> list[str]:
    """Return the sorted names of a module's `__all__`."""
    listed = import_module(LISTED_IN.get(module.__name__, module.__name__))
    return sorted(listed.__all__)
