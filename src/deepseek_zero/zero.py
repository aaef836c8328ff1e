"""DeepSpeed's `deepspeed.zero`: building sharded, gathering parameters, announcing external ones,
tiled layers.

Re-exports only.
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
