"""Tensor and sequence parallelism: layers and attention that several ranks compute together.

The names below are imported on first use, because a run without these axes needs none of them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..base.lazy import loads_on_first_use

if TYPE_CHECKING:
    from .apply import parallelize
    from .inputs import difference
    from .layers import Layer, TensorAxis
    from .plans import ParallelPlan, ParallelSettings, choose
    from .proof import prove
    from .sequence_model import SequenceSettings, own_part, share_sequences
    from .sequence_volume import SequenceTraffic, traffic_of_sequences
    from .volume import LayerTraffic, traffic_of

__all__ = [
    "Layer",
    "LayerTraffic",
    "ParallelPlan",
    "ParallelSettings",
    "SequenceSettings",
    "SequenceTraffic",
    "TensorAxis",
    "choose",
    "difference",
    "own_part",
    "parallelize",
    "prove",
    "share_sequences",
    "traffic_of",
    "traffic_of_sequences",
]

if not TYPE_CHECKING:  # otherwise a type checker accepts any name
    __getattr__ = loads_on_first_use(
        __name__,
        {
            "apply": "parallelize",
            "inputs": "difference",
            "layers": "Layer TensorAxis",
            "plans": "ParallelPlan ParallelSettings choose",
            "proof": "prove",
            "sequence_model": "SequenceSettings own_part share_sequences",
            "sequence_volume": "SequenceTraffic traffic_of_sequences",
            "volume": "LayerTraffic traffic_of",
        },
    )
