"""DeepSpeed's `deepspeed.utils.logging`: the logger and `log_dist`.

This module only re-exports.
"""

from __future__ import annotations

from ..api.utils import log_dist, set_log_level_from_string
from ..base.log import logger

__all__ = ["log_dist", "logger", "set_log_level_from_string"]
