"""The plans of what a rank has of a model along "tp" and "pp": of a run's rank, and of one that is not there."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from .. import parallel, pipeline
from ..base.errors import NotBuiltError, UsageError
from ..base.mesh import Mesh
from ..planner.layout import SUM_TILE_NUMEL
from ..planner.pieces import PipelinePlan, TensorPlan
from ..planner.plan import Plan
from ..planner.split import set_split
from .settings import PipelineSettings, pipeline_settings_of, policy_of, tensor_settings_of

if TYPE_CHECKING:  # as in engine.py
    from ..config import Config


@dataclass(frozen=True)
class PiecePlans:
    """What a `Plan` has beside its units, where the model is cut."""

    pipeline: PipelinePlan | None = None
    tensor: TensorPlan | None = None

    def added_to(self, plan: Plan) -> Plan:
        """Return the plan with these."""
        return replace(plan, pipeline=self.pipeline, tensor=self.tensor)


@dataclass(frozen=True)
class Sample:
    """A micro-batch that plans are made for.  words: what it is."""

    micro: pipeline.MicroBatch | None = None
    words: str = ""

    @classmethod
    def of(cls, batch: Any) -> Sample:
        """Read what a model's forward takes; None: nothing is known."""
        if batch is None:
            return cls()
        micro = pipeline.MicroBatch.of(batch)
        named = [*((f"argument {place}", value) for place, value in enumerate(micro.args)), *micro.kwargs.items()]
        name, first = next(((name, value) for name, value in named if isinstance(value, Tensor)), ("", None))
        return cls(micro, f"for {name} {tuple(first.shape)}" if first is not None else "")

    def chain_of(self, model: nn.Module) -> pipeline.Chain | None:
        """Return the chain of blocks of a whole model; None where nothing is known.  Local."""
        return pipeline.find_chain(model, self.micro.args, self.micro.kwargs) if self.micro is not None else None

    @property
    def tokens(self) -> int | None:
        """Elements of the first integer tensor, or else rows of the first tensor; None without any."""
        if self.micro is None:
            return None
        given = [*self.micro.args, *self.micro.kwargs.values()]
        found = [value for value in given if isinstance(value, Tensor)]
        whole = next((each for each in found if not each.is_floating_point()), None)
        if whole is not None:
            return whole.numel()
        return found[0].numel() // found[0].shape[-1] if found and found[0].dim() else None


def plans_of(
    config: Config,
    mesh: Mesh,
    staged: pipeline.StagedModel | None,
    trained: Mapping[str, bool],
    traffic: Sequence[parallel.LayerTraffic],
    sample: Sample,
) -> PiecePlans:
    """Return the plans of one rank.  Local.

    staged: the model, cut along "pp".  trained, traffic: of the whole model's parameters and layers.
    """
    policy, settings, many = policy_of(config), pipeline_settings_of(config), config.gradient_accumulation_steps
    stages = tensor = None
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
    if mesh.tp > 1:
        sent = sum(each.nbytes for each in traffic if staged is None or _is_own(each, staged))
        scratch = SUM_TILE_NUMEL.on(mesh.device) * torch.float32.itemsize
        tensor = TensorPlan(mesh.tp, sent, sample.tokens, many, scratch)
    return PiecePlans(stages, tensor)


def _is_own(layer: parallel.LayerTraffic, staged: pipeline.StagedModel) -> bool:
    """Whether one of a rank's stages computes a layer."""
    first = staged.stages[0]
    if not isinstance(first, pipeline.ModelStage):
        return True  # a list of layers has its own ones alone
    stage = first.cut.stages - 1 if layer.is_head else first.cut.owners[layer.weight][0]
    return any(stage == each.index for each in staged.stages)


def stages_of(
    settings: PipelineSettings, model: nn.Module, chain: pipeline.Chain | None, mesh: Mesh
) -> pipeline.StagedModel:
    """Leave of a model one rank's stages, as `pipeline.cut_model` does by these settings.  Local."""
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


def layer_traffic(config: Config, model: nn.Module, mesh: Mesh) -> list[parallel.LayerTraffic]:
    """Return what a rank sends along "tp" for each region of layers of a whole model.  Local; changes nothing."""
    if mesh.tp == 1:
        return []
    settings, policy = tensor_settings_of(config, model), policy_of(config)
    plan = parallel.choose(model, mesh.tp, settings)
    return parallel.traffic_of(model, plan, settings, mesh.coordinates["tp"], policy.compute or policy.autocast)


def plan_pieces(config: Config, model: nn.Module, mesh: Mesh, example: Any) -> tuple[nn.Module, PiecePlans]:
    """Return the piece of a model that one rank of a mesh would have, on the meta device, and its plans.  Pure: the
    model stays as it is.

    example: a micro-batch; None: the model's `dummy_inputs`, if it has them.
    """
    sample = Sample.of(example if example is not None else getattr(model, "dummy_inputs", None))
    own, trained = on_meta(model), {name: param.requires_grad for name, param in model.named_parameters()}
    chain = None
    if mesh.pp > 1 and not isinstance(model, pipeline.LayerStages):
        if sample.micro is None:
            raise no_example("example")
        chain = sample.chain_of(own)
    traffic = layer_traffic(config, model, mesh)
    if mesh.tp > 1:
        split = parallel.choose(model, mesh.tp, tensor_settings_of(config, model))
        for name, param in own.named_parameters():
            shape = split.splits[name].local_shape(mesh.coordinates["tp"])
            param.data = torch.empty(shape, dtype=param.dtype, device="meta")
            set_split(param, split.splits[name])
    staged = None
    if mesh.pp > 1:
        if isinstance(own, pipeline.LayerStages) and own.index != mesh.coordinates["pp"]:
            raise NotBuiltError(
                f"the plan of pipeline rank {mesh.coordinates['pp']} of a list of layers that has built stage "
                f"{own.index}.",
                "Each rank builds its own layers, and the shapes of others are not here.",
                "build the list with that stage's topology, or plan the rank of this stage.",
            )
        staged = stages_of(pipeline_settings_of(config), own, chain, mesh)
    return own, plans_of(config, mesh, staged, trained, traffic, sample)


def no_example(argument: str) -> UsageError:
    """Return the error that a pipeline's model has no batch to be looked at with.  argument: that could give one."""
    return UsageError(
        "a pipeline needs a batch to find the model's blocks by, and none is known.",
        "It runs the model's forward once on shapes alone, to see which blocks hand each other their outputs.",
        f"pass {argument}, or give the model an attribute dummy_inputs: the arguments of a forward by name.",
    )


def on_meta(model: nn.Module) -> nn.Module:
    """Return a copy of a model without values: parameters and buffers are on the meta device, ties stay."""
    memo: dict[int, Any] = {}
    for param in model.parameters():
        empty = torch.empty(param.shape, dtype=param.dtype, device="meta")
        memo[id(param)] = nn.Parameter(empty, requires_grad=param.requires_grad)
    for buffer in model.buffers():
        memo[id(buffer)] = torch.empty(buffer.shape, dtype=buffer.dtype, device="meta")
    return deepcopy(model, memo)
