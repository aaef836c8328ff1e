"""DeepSpeed's `PipelineModule`, of whose layers each rank builds its stage."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from ...base.device import default_device
from ...base.errors import UsageError
from ...base.given import whole_number
from ...base.mesh import Mesh
from ...engine.mesh_statements import MeshStatement
from ...pipeline.layers import LayerSpec, LayerStages, TiedLayerSpec
from ...pipeline.partition import balanced, uniform
from . import activation_checkpointing, comm
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
    """Divide items into consecutive parts with equal numbers of items.

    If the division has a remainder, the first parts have one more item. If there are more parts
    than items, the last parts are empty.

    Args:
        num_items: Number of items.
        num_parts: Number of parts, at least 1.

    Returns:
        A list `bounds` of `num_parts` + 1 indices. Part i is `items[bounds[i] : bounds[i + 1]]`.
    """
    if num_items <= num_parts:
        return [min(part, num_items) for part in range(num_parts + 1)]
    return list(uniform(num_items, num_parts))


def partition_balanced(weights: Sequence[float], num_parts: int) -> list[int]:
    """Divide items into consecutive parts, and minimize the largest weight.

    The weight of a part is the sum of its items' weights. If there are more parts than items, the
    last parts are empty. Otherwise, no part is empty.

    Args:
        weights: Weight of each item, not negative.
        num_parts: Number of parts, at least 1.

    Returns:
        A list `bounds` of `num_parts` + 1 indices. Part i is `items[bounds[i] : bounds[i + 1]]`.
    """
    if len(weights) <= num_parts:
        return partition_uniform(len(weights), num_parts)
    return list(balanced(weights, num_parts))


class PipelineModule(LayerStages):
    """This rank's pipeline stage of a model that is written as a list of layers.

    Each layer gets the result of the previous one as its only argument, which may be a tuple. To
    count parameters, each `LayerSpec` is first built on the meta device, or on torch's default
    device if that fails, and discarded. Only the layers of this rank's stage are then built and
    kept. Parameter names contain the layer's index in the whole list, or the key of a tied layer.
    The module is moved to this rank's device. All ZeRO stages are supported.

    Args:
        layers: Modules, functions, `LayerSpec`s and `TiedLayerSpec`s, in the order of forward.
        num_stages: Number of stages, a divisor of the world size. The ranks of a stage are
            consecutive.
        topology: Axes over all ranks, one of which is "pipe". If given, `num_stages` is ignored.
        loss_fn: Function that is called with (output of the last layer, labels) and returns the
            loss. None means that the last layer returns the loss.
        seed_layers: Whether to set the seed before each layer is built and before it runs.
        seed_fn: Function that sets the seed; None uses `torch.manual_seed`.
        base_seed: Number from which the seed of each layer is computed.
        partition_method: The number that is balanced over the stages: "parameters" for trained
            elements, "uniform" for layers, or "type:REGEX" for layers whose class name matches
            REGEX, ignoring case.
        activation_checkpoint_interval: Number of layers that backward recomputes together; 0
            recomputes no layers.
        activation_checkpoint_func: Function that recomputes layers in backward, called like
            `torch.utils.checkpoint.checkpoint`.
        checkpointable_layers: Names of the layer classes that may be recomputed; None for all
            classes with parameters.
        dynamic_shape: Whether the shapes of activations may change between micro-batches. If true,
            the stages send the shapes with every activation.

    Raises:
        UsageError: Neither `num_stages` nor `topology` is given, `num_stages` is less than 1 or
            does not divide the world size, `topology` has no axis "pipe", there are fewer layers
            than stages, a layer of this rank's stage cannot be called, `partition_method` is
            unknown or matches no layer, `activation_checkpoint_interval` is negative, or layers in
            different stages share a trained parameter without a `TiedLayerSpec`.
        NotBuiltError: `partition_method` is "profile", or a layer of this rank's stage is itself a
            `PipelineModule`.
        AssertionError: `topology` does not have as many ranks as the world, or
            `checkpointable_layers` is not a list.
    """

    engine_class = PipelineEngine  # class of the engine that `initialize` creates

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
        world_size = comm.get_world_size()
        stages = topology.get_dim("pipe") if topology is not None else num_stages
        if not stages or stages < 1:
            raise UsageError(
                f"a pipeline cannot have {stages} stages.",
                "`num_stages` is less than 1, or `topology` has no axis named pipe.",
                "pass num_stages=2, or a topology with an axis pipe.",
            )
        if topology is None:
            if world_size % stages:
                raise UsageError(
                    f"num_stages ({stages}) must divide distributed world size ({world_size})",
                    "All stages have the same number of ranks.",
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
        """Set the number of layers that backward recomputes together.

        With 0, no layers are recomputed. The new number is used from the next forward pass on.

        Raises:
            UsageError: `interval` is negative or not an integer.
        """
        self.activation_checkpoint_interval = whole_number(
            "set_checkpoint_interval", "interval", interval, 0
        )

    def take_configured(self, pipeline: Mapping[str, Any]) -> None:
        """Apply the recomputation settings in the section `pipeline` of a configuration.

        A positive `activation_checkpoint_interval` replaces that of this module. If `use_reentrant`
        is False, `non_reentrant_checkpoint` replaces `activation_checkpoint_func`. Other keys are
        ignored.

        Args:
            pipeline: The keys of the section `pipeline` and their values.
        """
        if (
            isinstance(interval := pipeline.get("activation_checkpoint_interval"), int)
            and interval > 0
        ):
            self.activation_checkpoint_interval = interval
        if pipeline.get("use_reentrant") is False:
            self.activation_checkpoint_func = activation_checkpointing.non_reentrant_checkpoint

    @property
    def is_checkpointable_results(self) -> list[bool]:
        """Return whether backward recomputes each interval of this stage's layers.

        An interval consists of `activation_checkpoint_interval` consecutive layers; the last one
        may have fewer. If that number is 0, the list is empty.
        """
        count = len(self.forward_funcs)
        interval = self.activation_checkpoint_interval
        starts = range(0, count, interval) if interval else ()
        return [self.recomputes(self.forward_funcs[start : start + interval]) for start in starts]

    def _precompute_checkpointable_values(self) -> None:
        """Do nothing: `is_checkpointable_results` is computed when it is read."""

    def _is_checkpointable(self, funcs: Sequence[Callable[..., Any]]) -> bool:
        return self.recomputes(funcs)

    def get_additional_losses(self) -> Any:
        """Return None. A derived class may return losses by name, which DeepSpeed reports."""

    # -- ranks

    @property
    def _local_start(self) -> int:
        """Index of the first layer of this rank's stage."""
        return int(self.parts[self.stage_id])

    @property
    def _local_stop(self) -> int:
        """Index of the layer after the last one of this rank's stage."""
        return int(self.parts[self.stage_id + 1])

    def mesh_statement(self) -> MeshStatement:
        """Return the sizes of the axes pipe and model, and the ranks' coordinates on them.

        The axes are those of the topology. `initialize` raises an error if another argument
        requires a different mesh.
        """
        topology = self.topology()
        words = {"pp": "pipe", "tp": "model"}
        axes = {axis: size for axis, word in words.items() if (size := topology.get_dim(word))}
        ranks = map(topology.get_coord, range(topology.world_size()))
        places = tuple({axis: int(getattr(here, words[axis])) for axis in axes} for here in ranks)
        return MeshStatement("PipelineModule", axes, places=places)

    @property
    def mesh(self) -> Mesh:
        """Return a `Mesh` whose pp, dp_shard and tp are the sizes of pipe, data and model.

        These are axes of the topology. If it has no axis data or model, that size is 1.
        """
        grid = self._grid
        return Mesh(
            pp=self.num_stages, dp_shard=grid.data_parallel_size, tp=grid.slice_parallel_size
        )

    def topology(self) -> ProcessTopology:
        """Return the topology, which maps coordinates along its axes to ranks."""
        return self._topo

    def mpu(self) -> PipelineParallelGrid:
        """Return this rank's `PipelineParallelGrid`, which `initialize` accepts as `mpu`."""
        return self._grid

    def num_pipeline_stages(self) -> int:
        """Return the number of pipeline stages."""
        return self.num_stages
