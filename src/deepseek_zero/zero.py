"""`deepspeed.zero`: sharded construction, gathered parameters and tiled layers.

This module only re-exports.
"""

from __future__ import annotations

from .api.zero import (
    GatheredParameters,
    Init,
    load_weights,
    register_external_parameter,
    unregister_external_parameter,
)
from .extensions.tiled import TiledLinear

__all__ = [
    "GatheredParameters",
    "Init",
    "TiledLinear",
    "load_weights",
    "register_external_parameter",
    "unregister_external_parameter",
]
