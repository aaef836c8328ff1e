"""Cuts a model over a tensor-parallel axis: a plan becomes layers, local parameters and one rank's
counts of heads.
"""

from __future__ import annotations

from torch import nn

from ..base.errors import NotBuiltError
from ..base.mesh import Mesh
from ..comm.collectives import Comm, scatter
from ..planner.split import Split, is_own_cut
from .cuts import cut
from .group import TensorGroup
from .inputs import compare_first_inputs
from .layers import Axis, Column, Row, TensorAxis, Vocabulary, become
from .loss import split_loss
from .plans import ParallelPlan, ParallelSettings, choose
from .proof import prove, watch
from .streams import Streams
from .token_shards import shard_tokens
from .virtual import VirtualAxis, repeat, run_in_passes, share_tokens

KINDS = {
    "column": Column,
    "column_gather": Column,
    "head": Column,
    "row": Row,
    "row_scatter": Row,
    "vocabulary": Vocabulary,
}


def parallelize(
    model: nn.Module,
    comm: Comm,
    settings: ParallelSettings | None = None,
    plan: ParallelPlan | None = None,
) -> dict[str, Split]:
    """Cut a whole model in place; return where each parameter's elements are, by the model's names.

    comm: of the ranks of the tensor-parallel axis, all of which call this with an equal model.
    plan: as `choose` made it of the model and the settings, and `prove` completed it; None: it is
    made here. Values are the first rank's. Afterwards this rank's parameters are its own parts, and
    the first forward compares its inputs with those of the other ranks. Collective; refusals are
    raised before anything is cut.
    """
    settings = settings or ParallelSettings()
    if plan is None:
        plan = choose(model, comm.size, settings)
        prove(model, plan)
    _take_values(model, plan, comm)
    streams = Streams(comm.rank, comm.device) if may_draw(model) else None
    axis = TensorAxis(TensorGroup(comm), streams)
    _become(model, plan, axis)
    for (name, attribute), local in plan.attributes.items():
        setattr(model.get_submodule(name), attribute, local[comm.rank])
    if settings.loss == "split":
        _split_loss(model, plan, axis)
    compare_first_inputs(model, comm)
    model.register_forward_pre_hook(axis.begin)
    model.register_forward_hook(axis.end)
    if plan.stretch is not None:
        shard_tokens(model, plan.stretch, axis)
    watch(model, plan)
    return plan.splits


def virtual(
    model: nn.Module, tp: int | Mesh, settings: ParallelSettings | None = None
) -> nn.Module:
    """Make a whole model compute, in this process alone, as it would on that many tensor-parallel
    ranks; returns it.

    tp: the ranks, or a mesh that says how many. A debugging tool: loss and gradients are those of
    the ranks bit by bit, with whole parameters.
    """
    tp = tp.tp if isinstance(tp, Mesh) else tp
    settings = settings or ParallelSettings()
    plan = choose(model, tp, settings)
    prove(model, plan)
    summed = _summed_modules(model, plan)
    axis = VirtualAxis(tp, next(model.parameters()).device, has_dropout=may_draw(model))
    for holder, name in plan.attentions.items():
        module = model.get_submodule(name)
        counts = {
            (module, attribute): local
            for (of, attribute), local in plan.attributes.items()
            if of == name
        }
        run_in_passes(model.get_submodule(holder), axis, counts)
    for name in summed:
        repeat(model.get_submodule(name), axis)
    if plan.stretch is not None:
        if has_dropout(model):
            raise NotBuiltError(
                "a virtual axis of activations that are sharded over tokens draws no dropout.",
                "Each rank draws for its own tokens.",
                "set the model's dropout to 0, or tensor_parallel.sequence to false.",
            )
        for name in plan.stretch.norms:
            share_tokens(model.get_submodule(name), axis)
    _become(model, plan, axis)
    if settings.loss == "split":
        _split_loss(model, plan, axis)
    return model


def _summed_modules(model: nn.Module, plan: ParallelPlan) -> list[str]:
    """Return the modules inside of attentions whose parameters have gradients that are summed over
    the ranks.

    NotBuiltError for a parameter that is split and no layer's: a virtual rank has all of it.
    """
    layers = [choice.module for choice in plan.choices if choice.part is not None]
    of_layers = {id(param) for layer in layers for param in layer.parameters(recurse=False)}
    found: dict[str, None] = {}
    for name, param in model.named_parameters():
        split = plan.splits[name]
        owner, _, _ = name.rpartition(".")
        if split.kind == "split" and id(param) not in of_layers:
            raise NotBuiltError(
                f"a virtual axis of '{name}', which is split with the heads of its attention.",
                "One process computes with whole parameters.",
                "compare the ranks' run with a plain one instead.",
            )
        if split.kind == "partial" and any(
            owner.startswith(f"{holder}.") for holder in plan.attentions
        ):
            found[owner] = None
    return list(found)


def _become(model: nn.Module, plan: ParallelPlan, axis: Axis) -> None:
    for choice in plan.choices:
        if choice.part is not None:
            become(choice.module, KINDS[choice.style], axis, choice.part)


def _split_loss(model: nn.Module, plan: ParallelPlan, axis: Axis) -> None:
    """Let the loss read split logits where the model lets us; elsewhere they are gathered."""
    for choice in plan.choices:
        if choice.style == "head" and choice.part is not None:
            split_loss(model, axis, choice.module, choice.part)


def _take_values(model: nn.Module, plan: ParallelPlan, comm: Comm) -> None:
    """Give each parameter this rank's part of the first rank's values."""
    for name, parameter in model.named_parameters():
        if is_own_cut(parameter):
            continue
        split = plan.splits[name]
        parts = [cut(parameter.data, split, rank) for rank in range(comm.size)]
        own = parts[comm.rank].contiguous()
        if not parameter.is_meta:
            scatter(comm, [part.reshape(-1) for part in parts], own.view(-1), f"values of {name}")
        parameter.data = own


def has_dropout(model: nn.Module) -> bool:
    """Return whether a module has an attribute that enables dropout in training."""
    return any(_has_probability(module) for module in model.modules())


def may_draw(model: nn.Module) -> bool:
    """Return whether the model may draw random numbers in training.

    A forward may also read a probability in the configuration, which has some that no layer uses.
    """
    configs = [getattr(module, "config", None) for module in model.modules()]
    return has_dropout(model) or any(_has_probability(config) for config in configs)


def _has_probability(holder: object) -> bool:
    if isinstance(holder, nn.RReLU):
        return True
    for name, value in getattr(holder, "__dict__", {}).items():
        if (name == "p" or "drop" in name) and isinstance(value, float) and value > 0:
            return True
    return False
