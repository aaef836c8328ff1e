"""Recomputation, offload and tiling of the activations that forward saves for backward.

The names below load on first use, because few runs need them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..base.lazy import loads_on_first_use

if TYPE_CHECKING:
    from .hugging_face import recompute_layers, route_checkpoints
    from .layerwise_accumulation import LayerwiseAccumulation
    from .tiled_loss import tile_loss
    from .tiles import tile_mlps

__all__ = [
    "LayerwiseAccumulation",
    "recompute_layers",
    "route_checkpoints",
    "tile_loss",
    "tile_mlps",
]

if not TYPE_CHECKING:  # A type checker would accept any name
    __getattr__ = loads_on_first_use(
        __name__,
        {
            "hugging_face": "recompute_layers route_checkpoints",
            "layerwise_accumulation": "LayerwiseAccumulation",
            "tiled_loss": "tile_loss",
            "tiles": "tile_mlps",
        },
    )
