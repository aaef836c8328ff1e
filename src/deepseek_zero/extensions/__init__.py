"""Features that attach to the extension points of the core.

The core imports none of them.

The names below are loaded on first use, so a run without a feature does not import its file.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..base.lazy import loads_on_first_use

if TYPE_CHECKING:
    from .adaptive_precision import AdaptivePrecision
    from .by_host import TwoHops
    from .coded_weight import CodedWeight
    from .cut_layers import CutChoice, choose_cuts
    from .deferred_update import DeferredUpdate
    from .delayed_update import DelayedGradient, DelayedUpdate
    from .error_feedback import ErrorFeedback, ErrorFeedbackSteps, ReplicatedErrorFeedback
    from .layer_tiles import follow_tiles
    from .one_bit_adam import MomentumSteps
    from .replicas import SumOverReplicas
    from .secondary_copy import SecondaryCopy
    from .shared_weight import SharedWeight
    from .speculative_update import SpeculativeUpdate, unsupported_optimizer, works_by_shard
    from .weight_differences import WeightDifferences

__all__ = [
    "AdaptivePrecision",
    "CodedWeight",
    "CutChoice",
    "DeferredUpdate",
    "DelayedGradient",
    "DelayedUpdate",
    "ErrorFeedback",
    "ErrorFeedbackSteps",
    "MomentumSteps",
    "ReplicatedErrorFeedback",
    "SecondaryCopy",
    "SharedWeight",
    "SpeculativeUpdate",
    "SumOverReplicas",
    "TwoHops",
    "WeightDifferences",
    "choose_cuts",
    "follow_tiles",
    "unsupported_optimizer",
    "works_by_shard",
]

if not TYPE_CHECKING:  # otherwise a type checker accepts any name
    __getattr__ = loads_on_first_use(
        __name__,
        {
            "adaptive_precision": "AdaptivePrecision",
            "by_host": "TwoHops",
            "coded_weight": "CodedWeight",
            "cut_layers": "CutChoice choose_cuts",
            "deferred_update": "DeferredUpdate",
            "delayed_update": "DelayedGradient DelayedUpdate",
            "error_feedback": "ErrorFeedback ErrorFeedbackSteps ReplicatedErrorFeedback",
            "layer_tiles": "follow_tiles",
            "one_bit_adam": "MomentumSteps",
            "replicas": "SumOverReplicas",
            "secondary_copy": "SecondaryCopy",
            "shared_weight": "SharedWeight",
            "speculative_update": "SpeculativeUpdate unsupported_optimizer works_by_shard",
            "weight_differences": "WeightDifferences",
        },
    )
