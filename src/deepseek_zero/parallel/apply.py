"""Apply a plan of tensor parallelism to a model.

Layers, local parameters and the attributes that count heads are changed in place.
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
from .virtual import Attention, Repeated, TokenShare, VirtualAxis

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
    """Split a whole model over the tensor-parallel ranks, in place.

    All ranks receive the first rank's parameter values, except for parameters that were split
    before. Afterwards, each weight of a split layer contains only this rank's shard, and each
    attention counts only this rank's heads. The forward and backward of the model are collective.
    If `ParallelSettings.loss` is "split" and the model supports it, the model's loss function is
    replaced.

    Hooks are registered on the model. Before each forward, they set torch's random generators to
    the first rank's state if the states differ. The first forward raises BatchMismatchError if the
    tensors in its inputs differ between the ranks. It also checks the modules that `prove` could
    not run, and raises NotBuiltError if a rank would compute another result or if the check fails.

    Args:
        model: The whole model, with the same architecture on all ranks.
        comm: The communicator of the tensor-parallel ranks.
        settings: Which layers are split and how the loss is computed; by default
            `ParallelSettings()`.
        plan: The result of `choose` for this model and these settings, on which `prove` was called.
            If None, this function calls `choose` and `prove`.

    Returns:
        A dict from the name of each parameter to how it is split over the ranks (`Split`).

    Raises:
        UsageError: `plan` is None, and `choose` raises this error. The model is unchanged.
        NotBuiltError: `plan` is None, and `choose` or `prove` raises this error because tensor
            parallelism does not support the model. The model is unchanged.
        PeerError: Another rank failed or issued a different collective.

    Note:
        Collective: every rank of `comm` must call it.
    """
    settings = settings or ParallelSettings()
    if plan is None:
        plan = choose(model, comm.size, settings)
        prove(model, plan)
    _take_values(model, plan, comm)
    streams = Streams(comm.rank, comm.device) if may_draw(model) else None
    axis = TensorAxis(TensorGroup(comm), streams)
    _become(model, plan, axis, settings)
    for (name, attribute), local in plan.attributes.items():
        setattr(model.get_submodule(name), attribute, local[comm.rank])
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
    """Simulate several tensor-parallel ranks in one process.

    This is a debugging tool. Loss and gradients are bitwise equal to those of a tensor-parallel
    run, but the parameters stay whole.

    Args:
        model: The whole model. Its split layers and attentions change their class in place.
        tp: The number of simulated tensor-parallel ranks, or a mesh, of which the size along "tp"
            is used.
        settings: Which layers are split and how the loss is computed; by default
            `ParallelSettings()`.

    Returns:
        `model` itself.

    Raises:
        NotBuiltError: Tensor parallelism does not support the model, or one process cannot simulate
            it.
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
        become(model.get_submodule(holder), Attention, axis=axis, counts=counts)
    for name in summed:
        become(model.get_submodule(name), Repeated, axis=axis)
    if plan.stretch is not None:
        if has_dropout(model):
            raise NotBuiltError(
                "a virtual axis of activations that are sharded over tokens draws no dropout.",
                "Each rank draws for its own tokens.",
                "set the model's dropout to 0, or tensor_parallel.sequence to false.",
            )
        for name in plan.stretch.norms:
            become(model.get_submodule(name), TokenShare, axis=axis)
    _become(model, plan, axis, settings)
    return model


def _summed_modules(model: nn.Module, plan: ParallelPlan) -> list[str]:
    """Return the modules in attentions whose gradients are summed over the ranks.

    Raises NotBuiltError for a split parameter outside of the split layers, because a virtual rank
    has all of it.
    """
    of_layers = {
        id(param) for choice in plan.choices for param in choice.module.parameters(recurse=False)
    }
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


def _become(model: nn.Module, plan: ParallelPlan, axis: Axis, settings: ParallelSettings) -> None:
    """Change the layers, and make the loss read split logits if the model supports it."""
    for choice in plan.choices:
        become(choice.module, KINDS[choice.style], axis=axis, part=choice.part)
    for choice in plan.choices:
        if choice.style == "head" and settings.loss == "split":
            split_loss(model, axis, choice.module, choice.part)


def _take_values(model: nn.Module, plan: ParallelPlan, comm: Comm) -> None:
    """Set each parameter to this rank's part of the first rank's values."""
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
    """Return whether a module of the model has an attribute that enables dropout in training."""
    return any(_has_probability(module) for module in model.modules())


def may_draw(model: nn.Module) -> bool:
    """Return whether the model may draw random numbers in training.

    A forward may also read a dropout probability from the model's configuration, so nonzero
    probabilities there count even if no layer uses them.
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
