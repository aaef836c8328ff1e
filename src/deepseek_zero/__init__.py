"""deepseek_zero: train models far larger than memory, on whatever there is.

Two doors: seed 000's (`DeepSeekZeRO3`, `ZeroOptimizer`) and DeepSpeed's words (`initialize`,
`engine.backward`, ...). Names load on first use, so that importing the package costs little more
than importing torch.
"""

from __future__ import annotations

import os
import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any

# Before anything fails for want of memfd, SO_PEERCRED or /proc, and says so less clearly
if sys.platform != "linux":
    raise ImportError(
        f"deepseek_zero runs on Linux only, and this is {sys.platform}: its ranks use memory, "
        "sockets and disks as other systems do not offer them. On Windows use WSL 2, on a Mac a "
        "Linux container or virtual machine."
    )

from .base.lazy import import_at_once

if TYPE_CHECKING:
    from .base.errors import ConfigError as DeepSpeedConfigError
    from .base.errors import DeepSeekZeroError
    from .base.log import logger
    from .compat.deepspeed.arguments import add_config_arguments
    from .compat.deepspeed.comm import init_distributed
    from .compat.deepspeed.configuration import ConfigKeywords
    from .compat.deepspeed.dropin import (
        install_as_deepspeed,
        is_dropin_active,
        uninstall_as_deepspeed,
    )
    from .compat.deepspeed.engine import DeepSpeedEngine
    from .compat.deepspeed.initialize import initialize
    from .deepseek import DeepSeekZeRO3, ZeroOptimizer
    from .engine.start import plan
    from .utils import log_dist

__version__ = "0.1.0"

# A program under torchrun may call torch's init_process_group before anything of this package.
if "torch.distributed" in sys.modules or os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
    import_module(f"{__name__}.base.restarts").separate_starts()

__all__ = [
    "ConfigKeywords",
    "DeepSeekZeRO3",
    "DeepSeekZeroError",
    "DeepSpeedConfigError",
    "DeepSpeedEngine",
    "ZeroOptimizer",
    "__version__",
    "add_config_arguments",
    "init_distributed",
    "initialize",
    "install_as_deepspeed",
    "is_dropin_active",
    "log_dist",
    "logger",
    "plan",
    "uninstall_as_deepspeed",
]

_HOMES = {
    "ConfigKeywords": "compat.deepspeed.configuration",
    "DeepSeekZeRO3": "deepseek",
    "ZeroOptimizer": "deepseek",
    "DeepSeekZeroError": "base.errors",
    "DeepSpeedConfigError": "base.errors",
    "DeepSpeedEngine": "compat.deepspeed.engine",
    "log_dist": "utils",
    "logger": "base.log",
    "add_config_arguments": "compat.deepspeed.arguments",
    "init_distributed": "compat.deepspeed.comm",
    "initialize": "compat.deepspeed.initialize",
    "install_as_deepspeed": "compat.deepspeed.dropin",
    "is_dropin_active": "compat.deepspeed.dropin",
    "plan": "engine.start",
    "uninstall_as_deepspeed": "compat.deepspeed.dropin",
}
_ROOMS = {name: name for name in ("zero", "utils", "comm", "checkpointing", "optimizer")} | {
    "dist": "comm"
}


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        value = getattr(import_at_once(f"{__name__}.{_HOMES[name]}"), name)
    elif name in _ROOMS:
        value = import_at_once(f"{__name__}.{_ROOMS[name]}")
    else:
        error = None
        if not name.startswith("_"):
            error = import_module(f"{__name__}.compat.deepspeed.missing").package_name_missing(name)
        given = import_module(f"{__name__}.base.given")
        raise error or given.NoSuchNameError(f"module {__name__!r}", name, __dir__)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    """The public names, so that completion shows nothing else."""
    return sorted({*__all__, *_ROOMS})
