"""Pipelines at an engine's door: which stages a model becomes here, whose values they have, what a batch is to them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import nn
from torch.optim import Optimizer

from ..base.errors import UsageError
from ..base.mesh import Mesh
from ..checkpoint.piece import remember_names
from ..comm.collectives import Comm, scatter
from ..pipeline.chain import Chain, find_chain
from ..pipeline.layers import Labelled, LayerStages
from ..pipeline.pipeline import Pipeline, StagedModel, cut_model
from ..pipeline.schedule import make_schedule
from ..pipeline.stage import MicroBatch
from ..pipeline.ties import Ties
from .settings import PipelineSettings


def chain_of(model: nn.Module, example: Callable[[], Any]) -> Chain | None:
    """Return the chain of blocks of a whole model, before its layers are split; None for a list of layers.  Local.

    example: returns a micro-batch, as the model's forward takes it.  ChainError where the model is no chain.
    """
    if isinstance(model, LayerStages):
        return None
    batch = micro_batch_of(example())
    return find_chain(model, batch.args, batch.kwargs)


def take_stages_of(
    model: nn.Module, chain: Chain | None, settings: PipelineSettings, mesh: Mesh, comm: Comm
) -> StagedModel:
    """Leave this rank's stages of a model, with the first stage's rank's values.  Collective along "pp"."""
    if chain is not None:
        _take_values(model, comm)
    remember_names(model)
    return cut_model(
        model,
        mesh,
        partition=settings.partition,
        schedule=settings.schedule,
        virtual=settings.virtual,
        group=settings.group,
        micro_batches=settings.micro_batches,
        chain=chain,
    )


def share_ties(model: nn.Module, staged: StagedModel, comm: Comm, mesh: Mesh) -> None:
    """Give each weight that several stages of a list of layers share its first stage's values.  Collective.

    comm: the world's.
    """
    if staged.ties and not staged.has_all_inputs:
        ties = Ties(comm, mesh, make_schedule("1f1b", mesh.pp, 1, 1, tied=staged.tied), staged.ties)
        ties.spread({name: param.data for name, param in model.named_parameters() if name in staged.ties})


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


def read_batches(pipeline: Pipeline, batches: Sequence[Any]) -> list[Any]:
    """Read what a data loader yields as the pipeline's stages take it."""
    return [micro_batch_of(each) if pipeline.staged.has_all_inputs else labelled_of(each) for each in batches]


def micro_batch_of(batch: Any) -> MicroBatch:
    """Read a batch as the arguments of a forward: a mapping by name, a tuple or list in order."""
    if isinstance(batch, MicroBatch):
        return batch
    if isinstance(batch, Mapping):
        return MicroBatch((), dict(batch))
    return MicroBatch(tuple(batch) if isinstance(batch, (tuple, list)) else (batch,))


def labelled_of(batch: Any) -> Labelled:
    """Read a batch of a list of layers: (inputs, labels)."""
    if isinstance(batch, Labelled):
        return batch
    if isinstance(batch, (tuple, list)) and len(batch) == 2:
        return Labelled(*batch)
    raise UsageError(
        "a micro-batch of a list of layers is a pair (inputs, labels).",
        "The first layer takes the inputs, the loss the labels.",
        "let the data iterator yield pairs.",
    )


def no_example() -> Any:
    """Raise: a pipeline was asked for, and no batch is known."""
    raise UsageError(
        "a pipeline needs a batch to find the model's blocks by, and none is known.",
        "It runs the model's forward once on shapes alone, to see which blocks hand each other their outputs.",
        "pass training_data, or give the model an attribute dummy_inputs: the arguments of a forward by name.",
    )
