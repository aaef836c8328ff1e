"""DeepSpeed's `PipelineModule`: a model written as a list of layers, of which this rank builds its
stage's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch.distributed as dist

from ...base.device import default_device
from ...base.errors import UsageError
from ...base.given import whole_number
from ...base.mesh import Mesh
from ...engine.mesh_statements import MeshStatement
from ...pipeline.layers import LayerSpec, LayerStages, TiedLayerSpec
from ...pipeline.partition import balanced, uniform
from . import activation_checkpointing
from .pipe_engine import PipelineEngine, PipelineError
from .pipe_topology import PipeDataParallelTopology, PipelineParallelGrid, ProcessTopology

__all__ = [
    "LayerSpec",
    "PipelineError",
    "PipelineModule",
    "TiedLayerSpec",
    "partition_balanced",
    "partition_uniform",
]


def partition_uniform(num_items: int, num_parts: int) -> list[int]:
    """Return the boundaries of parts with equal numbers of items; parts behind the last item are
    empty.
    """
    if num_items <= num_parts:
        return [min(part, num_items) for part in range(num_parts + 1)]
    return list(uniform(num_items, num_parts))


def partition_balanced(weights: Sequence[float], num_parts: int) -> list[int]:
    """Return the boundaries of parts of which the heaviest is as light as can be."""
    if len(weights) <= num_parts:
        return partition_uniform(len(weights), num_parts)
    return list(balanced(weights, num_parts))


class PipelineModule(LayerStages):
    """A model as a list of layers, cut into stages over the ranks.

    layers: modules, functions, `LayerSpec`s and `TiedLayerSpec`s; each takes what the one before
    returns, one argument,
    of which a tuple is one.  num_stages: must divide the world; the ranks of a stage are
    neighbours.  topology: axes over the ranks, instead.  partition_method: "parameters", "uniform",
    "type:REGEX".  The other arguments are DeepSpeed's.  All ZeRO stages take it.  Only this rank's
    layers are built; names hold a layer's place in the whole list.
    """

    engine_class = PipelineEngine  # that `initialize` makes of it

    def __init__(
        self,
        layers: Iterable[Any],
        num_stages: int | None = None,
        topology: ProcessTopology | None = None,
        loss_fn: Callable[..., Any] | None = None,
        seed_layers: bool = False,
        seed_fn: Callable[[int], Any] | None = None,
        base_seed: int = 1234,
        partition_method: str = "parameters",
        activation_checkpoint_interval: int = 0,
        activation_checkpoint_func: Callable[..., Any] = activation_checkpointing.checkpoint,
        checkpointable_layers: list[str] | None = None,
        dynamic_shape: bool = False,
    ) -> None:
        if num_stages is None and topology is None:
            raise UsageError(
                "must provide num_stages or topology",
                "",
                "pass num_stages=2, or a topology with an axis pipe.",
            )
        if checkpointable_layers is not None:
            assert isinstance(checkpointable_layers, list), (
                "param `checkpointable_layers` must be type of list."
            )
        is_distributed = dist.is_available() and dist.is_initialized()
        world_size = dist.get_world_size() if is_distributed else 1
        stages = topology.get_dim("pipe") if topology is not None else num_stages
        assert stages is not None
        if topology is None:
            if world_size % stages:
                raise UsageError(
                    f"num_stages ({stages}) must divide distributed world size ({world_size})",
                    "Every stage has as many ranks as the others.",
                    "start a number of ranks that is a multiple of num_stages.",
                )
            topology = PipeDataParallelTopology(num_pp=stages, num_dp=world_size // stages)
        grid = PipelineParallelGrid(topology)
        super().__init__(
            layers,
            stages,
            grid.stage_id,
            method=partition_method,
            loss_fn=loss_fn,
            seed_layers=seed_layers,
            seed_fn=seed_fn,
            base_seed=base_seed,
            checkpoint_interval=activation_checkpoint_interval,
            checkpoint_func=activation_checkpoint_func,
            checkpointable=checkpointable_layers,
        )
        self._topo = topology
        self._grid = grid
        self.global_rank = grid.global_rank
        self.world_size = world_size
        self.stage_id = grid.stage_id
        self.dynamic_shape = dynamic_shape
        self.to(default_device())

    # -- recomputation

    def set_checkpoint_interval(self, interval: int) -> None:
        """Recompute so many layers at a time in backward from the next forward on; 0: none."""
        self.activation_checkpoint_interval = whole_number(
            "set_checkpoint_interval", "interval", interval, 0
        )

    def take_configured(self, pipeline: Mapping[str, Any]) -> None:
        """Recompute as the section `pipeline` of a configuration says, where it says it."""
        if (
            isinstance(interval := pipeline.get("activation_checkpoint_interval"), int)
            and interval > 0
        ):
            self.activation_checkpoint_interval = interval
        if pipeline.get("use_reentrant") is False:
            self.activation_checkpoint_func = activation_checkpointing.non_reentrant_checkpoint

    @property
    def is_checkpointable_results(self) -> list[bool]:
        """Of each run of layers that would be recomputed at once, whether it is."""
        count = len(self.forward_funcs)
        interval = self.activation_checkpoint_interval
        starts = range(0, count, interval) if interval else ()
        return [self.recomputes(self.forward_funcs[start : start + interval]) for start in starts]

    def _precompute_checkpointable_values(self) -> None:
        """Do nothing: `is_checkpointable_results` is computed where it is read."""

    def _is_checkpointable(self, funcs: Sequence[Callable[..., Any]]) -> bool:
        return self.recomputes(funcs)

    # -- who stands where

    def mesh_statement(self) -> MeshStatement:
        """What the topology says: stages, tensor-parallel ranks where it has that axis, who is
        where.
        """
        topology = self.topology()
        words = {"pp": "pipe", "tp": "model"}
        axes = {axis: size for axis, word in words.items() if (size := topology.get_dim(word))}
        ranks = map(topology.get_coord, range(topology.world_size()))
        places = tuple({axis: int(getattr(here, words[axis])) for axis in axes} for here in ranks)
        return MeshStatement("PipelineModule", axes, places=places)

    @property
    def mesh(self) -> Mesh:
        """The axes that the topology says."""
        grid = self._grid
        return Mesh(
            pp=self.num_stages, dp_shard=grid.data_parallel_size, tp=grid.slice_parallel_size
        )

    def topology(self) -> ProcessTopology:
        """Return the axes over the ranks."""
        return self._topo

    def mpu(self) -> PipelineParallelGrid:
        """Return who stands where."""
        return self._grid

    def num_pipeline_stages(self) -> int:
        """Return the number of stages."""
        return self.num_stages
