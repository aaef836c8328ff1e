"""Train models that do not fit into memory, with ZeRO, offload and parallelism.

There are two APIs: `DeepSeekZeRO3` with `ZeroOptimizer`, and `initialize`, which returns an engine
(`engine.backward`, `engine.step`). Names are loaded on first use, so importing the package costs
little more than importing torch.
"""

from __future__ import annotations

import os
import sys
from functools import cache
from importlib import import_module
from pkgutil import iter_modules
from typing import TYPE_CHECKING, Any

# Checked first, because a missing memfd, SO_PEERCRED or /proc would fail with a less clear error.
if sys.platform != "linux":
    raise ImportError(
        f"deepseek_zero runs on Linux only, and this is {sys.platform}: its ranks use memory, "
        "sockets and disks as other systems do not offer them. On Windows use WSL 2, on a Mac a "
        "Linux container or virtual machine."
    )

from .base.lazy import import_at_once
from .base.plugins import contributed_name, contributed_names

if TYPE_CHECKING:
    import argparse
    from pathlib import Path

    from . import checkpointing as checkpointing
    from . import comm as comm
    from . import optimizer as optimizer
    from . import utils as utils
    from . import zero as zero
    from .api.configuration import ConfigKeywords
    from .api.distributed import init_distributed
    from .api.engine import ZeroEngine
    from .api.initialize import initialize
    from .api.wrap import DeepSeekZeRO3, ZeroOptimizer
    from .base.errors import ConfigError as DeepSpeedConfigError
    from .base.errors import DeepSeekZeroError
    from .base.log import logger
    from .engine.start import plan
    from .utils import log_dist

    dist = comm

    # The names that other packages contribute (base/plugins.py)
    DeepSpeedEngine = ZeroEngine

    def add_config_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser: ...
    def install_as_deepspeed() -> Path: ...
    def is_dropin_active() -> bool: ...
    def uninstall_as_deepspeed() -> None: ...


__version__ = "0.2.0"

# A program under torchrun may call torch's init_process_group before anything of this package.
if "torch.distributed" in sys.modules or os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
    import_module(f"{__name__}.base.restarts").separate_starts()

__all__ = [
    "ConfigKeywords",
    "DeepSeekZeRO3",
    "DeepSeekZeroError",
    "DeepSpeedConfigError",
    "ZeroOptimizer",
    "__version__",
    "init_distributed",
    "initialize",
    "log_dist",
    "logger",
    "plan",
]
_NAMES = tuple(__all__)
del __all__  # At run time `__getattr__` returns `__all__` with the contributed names

_HOMES = {
    "ConfigKeywords": "api.configuration",
    "DeepSeekZeRO3": "api.wrap",
    "ZeroOptimizer": "api.wrap",
    "DeepSeekZeroError": "base.errors",
    "DeepSpeedConfigError": "base.errors",
    "log_dist": "utils",
    "logger": "base.log",
    "init_distributed": "api.distributed",
    "initialize": "api.initialize",
    "plan": "engine.start",
}
_ROOMS = {name: name for name in ("zero", "utils", "comm", "checkpointing", "optimizer")} | {
    "dist": "comm"
}


@cache
def _files() -> frozenset[str]:
    return frozenset(module.name for module in iter_modules(__path__))


def _load_name(name: str) -> Any:
    value: Any
    if name == "__all__":
        value = [*_NAMES, *contributed_names(__name__)]
    elif name in _HOMES:
        value = getattr(import_at_once(f"{__name__}.{_HOMES[name]}"), name)
    elif name in _ROOMS:
        value = import_at_once(f"{__name__}.{_ROOMS[name]}")
    elif name in _files():
        # `from .. import parallel` also calls this before it imports the package
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    else:
        try:
            value = contributed_name(__name__, name)
        except AttributeError as error:
            given = import_module(f"{__name__}.base.given")
            owner = f"module {__name__!r}"
            raise given.with_suggestion(error, owner, name, __dir__) from None
    globals()[name] = value
    return value


if not TYPE_CHECKING:  # otherwise a type checker accepts any name
    __getattr__ = _load_name


def __dir__() -> list[str]:
    """Return the public names, so that completion shows nothing else."""
    return sorted({*_NAMES, *contributed_names(__name__), *_ROOMS})
