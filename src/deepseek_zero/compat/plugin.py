"""What the packages of other libraries' names add to the core (base/plugins.py)."""

from __future__ import annotations

from ..base.plugins import (
    CHECKPOINT_LAYOUTS,
    DIALECT,
    EVERY_OTHER,
    contribute,
    contribute_names,
)

_DEEPSPEED = f"{__package__}.deepspeed"

contribute(CHECKPOINT_LAYOUTS, f"{_DEEPSPEED}.checkpoint")
contribute(DIALECT, f"{_DEEPSPEED}.dialect")
contribute_names(
    "deepseek_zero",
    {
        "DeepSpeedEngine": f"{_DEEPSPEED}.engine",
        "add_config_arguments": f"{_DEEPSPEED}.arguments",
        "install_as_deepspeed": f"{_DEEPSPEED}.dropin",
        "is_dropin_active": f"{_DEEPSPEED}.dropin",
        "uninstall_as_deepspeed": f"{_DEEPSPEED}.dropin",
        EVERY_OTHER: f"{_DEEPSPEED}.package",
    },
)
contribute_names("deepseek_zero.comm", {EVERY_OTHER: f"{_DEEPSPEED}.comm"})
