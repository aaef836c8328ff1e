"""A model on a mesh that cuts it: what this rank keeps along "tp", "sp" and "pp", before ZeRO shards that."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from torch import nn
from torch.optim import Optimizer

from .. import parallel, pipeline
from ..base.errors import UsageError
from ..base.log import log_once
from ..base.mesh import Mesh
from ..checkpoint.piece import remember_names, remember_same_names
from ..comm.agreement import run_on_all_ranks
from ..comm.collectives import Comm, scatter
from ..planner.split import set_split
from ..sharding.runtime import Runtime
from ..sharding.wrap import refuse_sliced
from .data import compare_first_batch, compare_stages
from .piece_plans import PiecePlans, Sample, layer_traffic, plans_of, stages_of
from .settings import PipelineSettings, pipeline_settings_of, sequence_settings_of, tensor_settings_of

if TYPE_CHECKING:  # as in engine.py
    from ..config import Config


@dataclass
class Pieces:
    """What a rank has of a model on a mesh that cuts it.  stages: along "pp"; plans: what its plan says of that."""

    stages: Stages | None
    plans: PiecePlans


@dataclass
class Stages:
    """The stages of a model that this rank has, and what they share with others'."""

    staged: pipeline.StagedModel
    ties: pipeline.Ties
    settings: PipelineSettings

    def connect(self, comm: Comm, mesh: Mesh, runtime: Runtime) -> pipeline.PlainLoop:
        """Make the pipeline, once the stages are wrapped, and the plain loop over it.  Collective in the world."""
        said = self.settings
        made = pipeline.Pipeline(self.staged, self.ties, comm.whole, mesh, runtime, said.schedule, group=said.group)
        return pipeline.PlainLoop(made, said.parts, partial(compare_stages, comm=comm.along["pp"]))


def cut_along_axes(
    config: Config,
    model: nn.Module,
    mesh: Mesh,
    comm: Comm,
    example: Callable[[], Any],
    sequence: parallel.SequenceSettings | None,
) -> Pieces:
    """Leave of a model this rank's piece, in place, with the first rank's values; return its stages where it has some.

    Along "tp" layers are cut, along "sp" the forward is one part of a forward, along "pp" blocks of others become
    stand-ins.  The chain of blocks is looked for in the whole model.  example, sequence: as `assemble` takes them.
    Collective; refusals name the axis and the reason, and come before anything is cut along it.
    """
    sample, chain = Sample(), None
    if "pp" in comm.along and not isinstance(model, pipeline.LayerStages):
        sample = Sample.of(example())
        chain = sample.chain_of(model)
    trained = {name: param.requires_grad for name, param in model.named_parameters()}
    traffic = layer_traffic(config, model, mesh)
    if "tp" in comm.along:
        refuse_sliced(model, "tp")
        for name, split in parallel.parallelize(model, comm.along["tp"], tensor_settings_of(config, model)).items():
            set_split(model.get_parameter(name), split)
        compare_first_batch(model, comm.along["tp"])
    if "sp" in comm.along:

        def share() -> None:
            parallel.share_sequences(model, comm.along["sp"], sequence_settings_of(config, sequence), tp=mesh.tp)

        run_on_all_ranks(comm, "sharing sequences", share)
    stages = _take_stages(config, model, chain, mesh, comm) if "pp" in comm.along else None
    staged = stages.staged if stages is not None else None
    return Pieces(stages, plans_of(config, mesh, staged, trained, traffic, sample))


def _take_stages(config: Config, model: nn.Module, chain: pipeline.Chain | None, mesh: Mesh, comm: Comm) -> Stages:
    if config.zero_optimization.vertical_micro_batches > 1:
        raise UsageError(
            "vertical_micro_batches on a mesh with stages.",
            "Both take a step's micro-batches in an order of their own.",
            'leave it out; "pipeline": {"schedule": "breadth_first"} is that order over stages.',
        )
    settings = pipeline_settings_of(config)
    if chain is not None:
        _take_values(model, comm.along["pp"])
    remember_names(model, None if chain is not None else comm.along["pp"])
    staged = stages_of(settings, model, chain, mesh)
    ties = pipeline.Ties(comm.whole, mesh, staged.placement, staged.ties)
    if isinstance(model, pipeline.LayerStages):
        remember_same_names(model, model.same_names)
        model.activation_checkpoint_interval = settings.recomputed or model.activation_checkpoint_interval
    elif settings.recomputed:
        log_once(
            f"pipeline.activation_checkpoint_interval = {settings.recomputed} is for a PipelineModule; "
            f"{type(model).__name__} recomputes where it says so itself (gradient_checkpointing_enable).",
            logging.WARNING,
        )
    if chain is None:  # each rank built its own copy
        ties.spread({name: param.data for name, param in model.named_parameters() if name in staged.ties})
    return Stages(staged, ties, settings)


def _take_values(model: nn.Module, comm: Comm) -> None:
    """Let every rank of the pipeline have the values of its first, before each keeps its part."""
    for name, param in model.named_parameters():
        if param.is_meta or not param.numel():
            continue
        flat = param.detach().reshape(-1).contiguous()
        own = flat.clone()
        scatter(comm, [flat] * comm.size, own, f"values of {name}")
        if comm.rank:
            param.data.copy_(own.view(param.shape))


def forget_others(model: nn.Module, optimizer: Any, params: Sequence[Any] | None) -> Sequence[Any] | None:
    """Leave out of an optimizer's groups, and return without, the parameters that other stages have."""
    own = {id(param) for param in model.parameters()}

    def kept(members: Sequence[Any]) -> list[Any]:
        return [each for each in members if id(each[1] if isinstance(each, tuple) else each) in own]

    if isinstance(optimizer, Optimizer):
        for group in optimizer.param_groups:
            group["params"] = kept(group["params"])
    if params is None or not any(isinstance(each, Mapping) for each in params):
        return None if params is None else kept(params)
    return [{**each, "params": kept(each["params"])} if isinstance(each, Mapping) else each for each in params]
