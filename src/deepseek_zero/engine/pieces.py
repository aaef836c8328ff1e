"""Cut a model along "tp", "sp" and "pp" before ZeRO shards it, and plan the cuts.

The plans can be made for a rank of this run or for any rank of a planned one.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from .. import parallel, pipeline
from ..base.device import state_names
from ..base.errors import BatchMismatchError, NotBuiltError, UsageError
from ..base.log import log_once
from ..base.mesh import Mesh
from ..base.nested import is_of_integers, on_meta
from ..checkpoint.piece import remember_names, remember_same_names
from ..comm.agreement import AllRanks
from ..comm.collectives import Comm, scatter
from ..planner.messages import SUM_TILE_NUMEL
from ..planner.pieces import PipelinePlan, SequencePlan, TensorPlan
from ..planner.plan import Plan
from ..planner.split import set_split
from ..sharding.runtime import Runtime
from .settings import (
    PipelineSettings,
    pipeline_settings_of,
    policy_of,
    sequence_settings_of,
    tensor_settings_of,
)

if TYPE_CHECKING:  # as in engine.py
    from ..config import Config

    Layers = tuple[parallel.ParallelPlan | None, list[parallel.LayerTraffic]]


@dataclass(frozen=True)
class PiecePlans:
    """The plans for "pp", "tp" and "sp", each None if the axis has one rank.

    Attributes:
        pipeline: The stages and messages of a pipeline.
        tensor: The bytes of tensor parallelism.
        sequence: The bytes of sequence parallelism.
    """

    pipeline: PipelinePlan | None = None
    tensor: TensorPlan | None = None
    sequence: SequencePlan | None = None

    def added_to(self, plan: Plan) -> Plan:
        """Return a copy of `plan` that also contains these plans."""
        return replace(plan, **vars(self))


@dataclass(frozen=True)
class Sample:
    """A micro-batch whose shapes determine the sizes of messages in a plan.

    Attributes:
        micro: The arguments of the model's forward; None if they are unknown.
    """

    micro: pipeline.MicroBatch | None = None

    @classmethod
    def of(cls, batch: Any) -> Sample:
        """Create a sample from a micro-batch; from None, create one without shapes."""
        return cls() if batch is None else cls(pipeline.MicroBatch.of(batch))

    @property
    def _tensors(self) -> list[tuple[str, Tensor]]:
        """Return the tensors with the names of their arguments."""
        if self.micro is None:
            return []
        args, kwargs = self.micro
        named = [(f"argument {place}", value) for place, value in enumerate(args)]
        return [
            (name, value) for name, value in (*named, *kwargs.items()) if isinstance(value, Tensor)
        ]

    @property
    def words(self) -> str:
        """Return the shapes of the micro-batch's tensors as text; "" if it has no tensor."""
        for name, first in self._tensors:
            return f"for {name} {tuple(first.shape)}"
        return ""

    def chain_of(self, model: nn.Module) -> pipeline.Chain | None:
        """Return the blocks that a model runs in sequence, or None if they cannot be found."""
        if self.micro is None:
            return None
        return pipeline.find_chain(model, self.micro.args, self.micro.kwargs)

    @property
    def tokens(self) -> int | None:
        """The number of tokens, or None if the sample has no tensor.

        This is the number of elements of the first integer tensor. Without one, it is the number of
        rows of the first tensor.
        """
        for _, value in self._tensors:
            if is_of_integers(value):
                return value.numel()
        for _, first in self._tensors:
            return first.numel() // first.shape[-1] if first.dim() else None
        return None


@dataclass
class Stages:
    """The pipeline stages of this rank, and the parameters that are tied to other stages.

    Attributes:
        staged: The model, of which this rank holds some stages.
        ties: The parameters that this rank shares with other stages.
        settings: The schedule, and how layers are distributed over stages.
    """

    staged: pipeline.StagedModel
    ties: pipeline.Ties
    settings: PipelineSettings

    def connect(self, comm: Comm, mesh: Mesh, runtime: Runtime) -> pipeline.PlainLoop:
        """Build the pipeline over the wrapped stages, and the loop that runs its schedule.

        Args:
            comm: The communicator of the ranks of one piece; `comm.whole` is the world.
            mesh: The device mesh: the size of each axis and this rank's coordinates.
            runtime: The runtime of the wrapped stages, which shards their weights.

        Returns:
            The loop, through which the engine runs forward and backward of the stages.

        Note:
            Collective: every rank of the world must call it.
        """
        said = self.settings
        layers = runtime.model
        made = pipeline.Pipeline(
            self.staged,
            self.ties,
            comm.whole,
            mesh,
            runtime,
            said.schedule,
            group=said.group,
            is_dynamic=isinstance(layers, pipeline.LayerStages) and layers.dynamic_shape,
        )
        along = comm.along["pp"]
        if said.has_own_rows:
            return pipeline.PlainLoop(made, said.parts, own_rows=along)
        return pipeline.PlainLoop(made, said.parts, partial(compare_stages, comm=along))


def cut_along_axes(
    config: Config,
    model: nn.Module,
    mesh: Mesh,
    comm: Comm,
    example: Callable[[], Any],
    sequence: parallel.SequenceSettings | None,
    layers: Layers,
) -> tuple[Stages | None, PiecePlans]:
    """Cut a model in place to the part of this rank along "tp", "sp" and "pp".

    The part gets the first rank's values. Along "tp" layers are split, along "sp" the forward
    computes a part of each sequence, and along "pp" placeholders replace the blocks of other
    stages. The chain of blocks is searched in the whole model.

    Args:
        config: The run's configuration, from which the settings are read.
        model: The whole model, before it is cut.
        mesh: The device mesh: the size of each axis and this rank's coordinates.
        comm: The communicator of the world.
        example: A function that returns a micro-batch, on whose shapes the model is run to find its
            blocks.
        sequence: The settings of sequence parallelism; None without it.
        layers: How layers are split along "tp", as `plan_layers` returns it.

    Returns:
        This rank's pipeline stages (None without "pp"), and the plans of the axes.

    Note:
        Collective: every rank must call it. It raises before anything is cut along an axis.
    """
    sample = Sample()
    chain = None
    if "pp" in comm.along and not isinstance(model, pipeline.LayerStages):
        sample = Sample.of(example())
        chain = sample.chain_of(model)
    trained = {name: param.requires_grad for name, param in model.named_parameters()}
    split, traffic = layers
    shared = _shared_of(config, model, mesh, sequence)
    if split is not None:
        parallel.parallelize(model, comm.along["tp"], tensor_settings_of(config), split)
        for name, part in split.splits.items():
            set_split(model.get_parameter(name), part)
    if "sp" in comm.along:
        with AllRanks(comm, "sharing sequences"):
            parallel.share_sequences(
                model, comm.along["sp"], sequence_settings_of(config, sequence), tp=mesh.tp
            )
    stages = _take_stages(config, model, chain, mesh, comm) if "pp" in comm.along else None
    staged = stages.staged if stages is not None else None
    return stages, plans_of(config, mesh, staged, trained, traffic, shared, sample)


def refuse_auto_on(config: Config, mesh: Mesh) -> None:
    """Raise an error if precision "auto" is used with pipeline stages.

    One stage might then change to fp32 while the next one expects 16-bit activations.

    Args:
        config: The run's configuration, from which the settings are read.
        mesh: The device mesh: the size of each axis and this rank's coordinates.

    Raises:
        NotBuiltError: The mesh has stages, and the precision of units is "auto".
    """
    if mesh.pp > 1 and config.precision == "auto" and policy_of(config).compute is not None:
        raise NotBuiltError(
            "precision auto on a mesh with stages (pp).",
            "Each unit belongs to one stage, but messages between stages and the loss scale "
            "concern "
            "all stages.",
            'set precision to "bf16" or "fp16", or remove pp.',
        )


def refuse_shared_loader(config: Config, mesh: Mesh, what: str) -> None:
    """Raise an error if ranks of a pipeline need different rows of a batch but get the same ones.

    Args:
        config: The run's configuration, from which the settings are read.
        mesh: The device mesh: the size of each axis and this rank's coordinates.
        what: The name of the loader that gives all ranks the same rows, for the error message.

    Raises:
        UsageError: The pipeline has more than one rank and each needs its own rows.
    """
    if mesh.pp > 1 and pipeline_settings_of(config).has_own_rows:
        raise UsageError(
            f"{what} with pipeline.rows = own.",
            "The engine's loaders give the same rows to all ranks of a pipeline: they would be "
            "computed once for each rank.",
            "remove pipeline.rows, or pass batches of a loader with different rows on each rank.",
        )


def _take_stages(
    config: Config, model: nn.Module, chain: pipeline.Chain | None, mesh: Mesh, comm: Comm
) -> Stages:
    if config.zero_optimization.vertical_micro_batches > 1:
        raise UsageError(
            "vertical_micro_batches on a mesh with stages.",
            "Each of them sets the order of a step's micro-batches.",
            'remove it; "pipeline": {"schedule": "breadth_first"} is the same order over stages.',
        )
    settings = pipeline_settings_of(config)
    if chain is not None:
        _take_values(model, comm.along["pp"])
    names = state_names(model)
    if chain is None:
        names = pipeline.names_of_stages(names, comm.along["pp"])
    remember_names(model, names)
    staged = stages_of(settings, model, chain, mesh)
    ties = pipeline.Ties(comm.whole, mesh, staged.placement, staged.ties)
    if isinstance(model, pipeline.LayerStages):
        remember_same_names(model, model.same_names)
        model.activation_checkpoint_interval = (
            settings.recomputed or model.activation_checkpoint_interval
        )
    elif settings.recomputed:
        log_once(
            f"pipeline.activation_checkpoint_interval = {settings.recomputed} applies only to a "
            f"PipelineModule; {type(model).__name__} configures recomputation itself "
            "(gradient_checkpointing_enable).",
            logging.WARNING,
        )
    if chain is None:  # each rank built its own copy
        ties.spread(
            {name: param.data for name, param in model.named_parameters() if name in staged.ties}
        )
    return Stages(staged, ties, settings)


def _take_values(model: nn.Module, comm: Comm) -> None:
    """Copy the values of the first pipeline rank to the others.

    This happens before each rank drops the blocks of other stages.
    """
    for name, param in model.named_parameters():
        if param.is_meta or not param.numel():
            continue
        flat = param.detach().reshape(-1).contiguous()
        own = flat.clone()
        scatter(comm, [flat] * comm.size, own, f"values of {name}")
        if comm.rank:
            param.data.copy_(own.view(param.shape))


def compare_stages(batch: Any, comm: Comm) -> None:
    """Raise `BatchMismatchError` on every rank of a pipeline if their batches differ.

    Args:
        batch: The batch of this rank, whose tensors are compared by shape and checksum.
        comm: The communicator of the ranks of one pipeline.

    Note:
        Collective: every rank of `comm` must call it.
    """
    if (found := parallel.difference(batch, comm)) is not None:
        raise BatchMismatchError(
            f"the ranks of a pipeline received different batches: {found}.",
            "Every stage runs the model's forward on the same inputs, but accelerate and the "
            "Trainer "
            "give each rank different ones.",
            "shard data over mesh.data_size by mesh.data_index, not over the world by rank, as the "
            'engine\'s own loader does (training_data); or set "pipeline": {"rows": "own"}: '
            "the pipeline then computes the rows of every rank.",
        )


def plans_of(
    config: Config,
    mesh: Mesh,
    staged: pipeline.StagedModel | None,
    trained: Mapping[str, bool],
    traffic: Sequence[parallel.LayerTraffic],
    shared: parallel.SequenceTraffic | None,
    sample: Sample,
) -> PiecePlans:
    """Compute the plans of one rank for the axes "pp", "tp" and "sp".

    Args:
        config: The run's configuration, from which the settings are read.
        mesh: The device mesh: the size of each axis and this rank's coordinates.
        staged: The model, cut along "pp"; None without pipeline stages.
        trained: For each parameter of the whole model, whether it is trained.
        traffic: The bytes that each layer split along "tp" sends.
        shared: The bytes that attention sends along "sp"; None without that axis.
        sample: A micro-batch; messages have unknown sizes if it is empty.

    Returns:
        The plans, each None if its axis has one rank.
    """
    policy = policy_of(config)
    settings = pipeline_settings_of(config)
    many = config.gradient_accumulation_steps
    stages = tensor = sequence = None
    tokens = None if sample.tokens is None else sample.tokens // mesh.sp
    if staged is not None:
        stages = pipeline.planned_pipeline(
            staged,
            mesh,
            trained,
            schedule=settings.schedule,
            group=settings.group,
            micro_batches=many,
            compute=policy.compute,
            sample=sample.words,
        )
    scratch = SUM_TILE_NUMEL.on(mesh.device) * torch.float32.itemsize
    if mesh.tp > 1:
        sent = sum(each.nbytes for each in traffic if staged is None or _is_own(each, staged))
        forwards = len(staged.stages) if staged is not None else 1
        tensor = TensorPlan(mesh.tp, sent, tokens, many, scratch, forwards)
    if shared is not None:
        own = _layers_of(shared.layers, staged)
        sums = scratch if shared.attention else 0
        sent_for = None if shared.layer_bytes is None or own is None else own * shared.layer_bytes
        sequence = SequencePlan(
            mesh.sp, shared.attention, sent_for, shared.row_bytes, tokens, many, sums
        )
    return PiecePlans(stages, tensor, sequence)


def _is_own(layer: parallel.LayerTraffic, staged: pipeline.StagedModel) -> bool:
    """Return whether a stage of the rank computes a layer."""
    first = staged.stages[0]
    if not isinstance(first, pipeline.ModelStage):
        return True  # a list of layers contains only the rank's own layers
    stage = first.cut.stages - 1 if layer.is_head else first.cut.owners[layer.weight][0]
    return any(stage == each.index for each in staged.stages)


def _layers_of(layers: int, staged: pipeline.StagedModel | None) -> int | None:
    """Return how many of a model's attention layers one rank computes.

    Args:
        layers: The number of attention layers of the model.
        staged: The model, cut along "pp"; None without pipeline stages.

    Returns:
        None if the number is unknown.
    """
    if staged is None:
        return layers
    found = 0
    for stage in staged.stages:
        if not isinstance(stage, pipeline.ModelStage) or len(stage.cut.chain.keys) != layers:
            return None
        found += len(stage.cut.blocks_of(stage.index))
    return found


def stages_of(
    settings: PipelineSettings, model: nn.Module, chain: pipeline.Chain | None, mesh: Mesh
) -> pipeline.StagedModel:
    """Cut a whole model to the pipeline stages of one rank.

    Args:
        settings: The schedule, and how layers are distributed over stages.
        model: The whole model.
        chain: The chain of its blocks, or None for a list of layers.
        mesh: The device mesh: the size of each axis and this rank's coordinates.

    Returns:
        The model with this rank's stages, in which other stages are replaced by placeholders.
    """
    return pipeline.cut_model(
        model,
        chain,
        mesh,
        partition=settings.partition,
        schedule=settings.schedule,
        virtual=settings.virtual,
        group=settings.group,
        micro_batches=settings.micro_batches,
    )


def plan_layers(config: Config, model: nn.Module, mesh: Mesh) -> Layers:
    """Return how a whole model is split along "tp", and the bytes its layers send.

    The model does not change. Copies of its modules are run on meta tensors, so the function must
    be called before changes that only the engine's own modules can run (sparse attention).

    Args:
        config: The run's configuration, from which the settings are read.
        model: The whole model, before it is cut.
        mesh: The device mesh: the size of each axis and this rank's coordinates.

    Returns:
        The split of each layer, and the bytes that its collectives send.
    """
    if mesh.tp == 1:
        return None, []
    settings = tensor_settings_of(config)
    policy = policy_of(config)
    split = parallel.choose(model, mesh.tp, settings)
    parallel.prove(model, split)
    if split.why_whole:
        log_once(f"tensor_parallel.sequence is auto and remains disabled. {split.why_whole}")
    given = policy.compute or policy.autocast
    return split, parallel.traffic_of(model, split, settings, mesh.coordinates["tp"], given)


def _shared_of(
    config: Config, model: nn.Module, mesh: Mesh, stated: parallel.SequenceSettings | None
) -> parallel.SequenceTraffic | None:
    """Return the bytes that a rank sends for attention along "sp"."""
    if mesh.sp == 1:
        return None
    policy = policy_of(config)
    settings = sequence_settings_of(config, stated)
    return parallel.traffic_of_sequences(
        model, mesh.sp, mesh.tp, settings, policy.compute or policy.autocast
    )


def stage_to_plan(model: nn.Module, mesh: Mesh, *, is_optimized_by_caller: bool) -> nn.Module:
    """Return the model that the plan of a rank describes.

    For a list of layers this is the rank's stage.

    Args:
        model: The whole model, before it is cut.
        mesh: The device mesh: the size of each axis and this rank's coordinates.
        is_optimized_by_caller: Whether the caller's optimizer or parameters are those of the stage.

    Returns:
        A copy of the rank's stage on the meta device if `model` is a list of layers that has built
        another stage, else `model`.
    """
    index = mesh.coordinates["pp"]
    if (
        not isinstance(model, pipeline.LayerStages)
        or model.index == index
        or model.num_stages != mesh.pp
    ):
        return model
    if is_optimized_by_caller:
        raise NotBuiltError(
            f"the plan of pipeline rank {index} of a list of layers that has built stage "
            f"{model.index}, with a passed optimizer.",
            "The optimizer has the parameters of the stage that was built.",
            "set the optimizer in the configuration, or plan the rank of this stage.",
        )
    return on_meta(model.stage(index))


def plan_pieces(
    config: Config, model: nn.Module, mesh: Mesh, example: Any
) -> tuple[nn.Module, PiecePlans]:
    """Plan how a model is cut along "tp", "sp" and "pp", with a copy on the meta device.

    This does not change the model.

    Args:
        config: The run's configuration, from which the settings are read.
        model: The whole model, before it is cut.
        mesh: The device mesh: the size of each axis and this rank's coordinates.
        example: A micro-batch; None for the model's `dummy_inputs`, if it has them.

    Returns:
        The rank's part of the model on the meta device, and the plans of the axes.
    """
    if example is None:
        example = getattr(model, "dummy_inputs", None)
    sample = Sample.of(example)
    own = on_meta(model)
    trained = {name: param.requires_grad for name, param in model.named_parameters()}
    chain = None
    if mesh.pp > 1 and not isinstance(model, pipeline.LayerStages):
        if sample.micro is None:
            raise no_example("example")
        chain = sample.chain_of(own)
    split, traffic = plan_layers(config, model, mesh)
    shared = _shared_of(config, model, mesh, None)
    if split is not None:
        for name, param in own.named_parameters():
            shape = split.splits[name].local_shape(mesh.coordinates["tp"])
            param.data = torch.empty(shape, dtype=param.dtype, device="meta")
            set_split(param, split.splits[name])
    staged = None
    if mesh.pp > 1:
        staged = stages_of(pipeline_settings_of(config), own, chain, mesh)
    return own, plans_of(config, mesh, staged, trained, traffic, shared, sample)


def no_example(argument: str) -> UsageError:
    """Create the error for a pipeline that has no example batch to inspect its model with.

    Args:
        argument: The argument that could provide a batch.
    """
    return UsageError(
        "a pipeline needs a batch to find the model's blocks, and there is none.",
        "It runs the model's forward once on shapes only, to see which blocks pass each other "
        "their outputs.",
        f"pass {argument}, or give the model an attribute dummy_inputs: the arguments of a forward "
        "by name.",
    )
