"""Pipeline parallelism: schedules, the division of a model into stages, execution.

The names below are loaded on first use, so a run without stages does not import them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..base.lazy import loads_on_first_use

if TYPE_CHECKING:
    from .chain import Chain, find_chain
    from .layers import Labelled, LayersStage, LayerStages, names_of_stages
    from .loop import PlainLoop
    from .pipeline import Pipeline, StagedModel, cut_model
    from .planned import planned_pipeline, schedule_of
    from .schedule import StageActionKind
    from .stage import MicroBatch, ModelStage, loss_of
    from .ties import Ties
    from .verify import simulate

__all__ = [
    "Chain",
    "Labelled",
    "LayerStages",
    "LayersStage",
    "MicroBatch",
    "ModelStage",
    "Pipeline",
    "PlainLoop",
    "StageActionKind",
    "StagedModel",
    "Ties",
    "cut_model",
    "find_chain",
    "loss_of",
    "names_of_stages",
    "planned_pipeline",
    "schedule_of",
    "simulate",
]

if not TYPE_CHECKING:  # otherwise a type checker accepts any name
    __getattr__ = loads_on_first_use(
        __name__,
        {
            "chain": "Chain find_chain",
            "layers": "Labelled LayersStage LayerStages names_of_stages",
            "loop": "PlainLoop",
            "pipeline": "Pipeline StagedModel cut_model",
            "planned": "planned_pipeline schedule_of",
            "schedule": "StageActionKind",
            "stage": "MicroBatch ModelStage loss_of",
            "ties": "Ties",
            "verify": "simulate",
        },
    )
