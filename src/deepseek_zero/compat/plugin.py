"""What the packages of other libraries' names add to the core (base/plugins.py)."""

from __future__ import annotations

from ..base.plugins import CHECKPOINT_LAYOUTS, EVERY_OTHER, contribute, contribute_names

_DEEPSPEED = f"{__package__}.deepspeed"

contribute(CHECKPOINT_LAYOUTS, f"{_DEEPSPEED}.checkpoint")
contribute_names("deepseek_zero.comm", {EVERY_OTHER: f"{_DEEPSPEED}.comm"})
