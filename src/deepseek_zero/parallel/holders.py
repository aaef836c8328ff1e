"""Copies of the modules that contain split layers, which the proof (proof.py) runs."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..base.device import CPU, clear_hooks, fake_tensors
from ..base.errors import NotBuiltError, brief
from ..base.nested import Args, Kwargs, all_tensors, map_inputs, meta_parameters, on_meta, once
from ..planner.split import Ranges, RangesOfRanks, Split
from .plans import ADAPTED, Choice, ParallelPlan, adapted_common, parent_of

ROWS = 2  # rows of generated inputs
TOKENS = 6
MOST_ROWS = 2  # maximum rows of recorded inputs of a first forward
MOST_TOKENS = 16
# Parts of names of attributes that differ between layers
NOT_THE_KIND = ("idx", "index", "layer_id", "layer_num", "training")


class _Enough(Exception):
    """All expected calls were recorded."""


@dataclass(frozen=True)
class ModuleCall:
    """The arguments of one call of a module.

    Attributes:
        args: The positional arguments.
        kwargs: The keyword arguments.
    """

    args: Args
    kwargs: Kwargs


@dataclass(frozen=True)
class RegionHolder:
    """A module with column layers and the row layers that read their outputs, copied for `prove`.

    It is the smallest such module, for example an attention. Its parameters have no values.

    Attributes:
        names: The names of all modules of this kind in the model; only the first one is examined.
        template: A copy of the module with parameters on the meta device.
        members: The split layers of these column-row groups, by name in the module.
        given: Other split layers in the module, by name; `prove` treats them as whole.
        inside: The names of other holders inside this module.
        attributes: The number of heads of each rank, by (module, attribute) that stores it.
        widths: For attentions: how the ranks split a dimension of a given number of features or
            heads.
        ranks: The number of tensor-parallel ranks.
        device: The device of the parameters.
        dtype: The dtype of the parameters.
        vectors: Values of parameters with fewer than two dimensions, by name.
    """

    names: list[str]
    template: nn.Module
    members: Mapping[str, Choice]
    given: Mapping[str, Choice]
    inside: tuple[str, ...]
    attributes: Mapping[tuple[str, str], tuple[int, ...]]
    widths: Mapping[int, RangesOfRanks]
    ranks: int
    device: torch.device
    dtype: torch.dtype
    vectors: Mapping[str, Tensor]

    @property
    def is_named(self) -> bool:
        """Return whether the configuration names every split layer of the module."""
        return all(
            choice.source in ("partition_config", "LoRA") for choice in self.members.values()
        )

    def own_parameters(self) -> dict[str, nn.Parameter]:
        """Return the parameters that belong to no split layer, by name in the module.

        The bias of a row layer is included, because every rank holds it.
        """
        return {
            name: param
            for name, param in self.template.named_parameters()
            if self.layer_of(name) is None
        }

    def layer_of(self, parameter: str) -> Choice | None:
        """Return the split layer to which a parameter belongs, or None if it belongs to none."""
        name, _, leaf = parameter.rpartition(".")
        choice = self.members.get(name) or self.given.get(name)
        return None if choice is not None and choice.style == "row" and leaf == "bias" else choice

    def ranges_of(self, layer: str, style: str | None, rank: int | None) -> Ranges | None:
        """Return the outputs or inputs of a split layer that a rank computes or reads.

        Args:
            layer: The name of the layer in the module.
            style: "column" for outputs, "row" for inputs, None for a result that no layer computes.
            rank: The tensor-parallel rank, or None for the whole module.

        Returns:
            The ranges (start, stop) of features, or None if the rank has all of them.
        """
        choice = self.members.get(layer)
        if rank is None or choice is None or choice.style != style:
            return None
        return choice.part.weight.ranges[rank]


# -- which modules


def holders_of(model: nn.Module, plan: ParallelPlan) -> list[RegionHolder]:
    """Return a copy of one module of each kind that contains split layers.

    Modules are of one kind if their classes, shapes and split layers are equal.

    Args:
        model: The whole model, before anything is split.
        plan: Which of its layers are split, and how.

    Returns:
        The copies; `names` of each contains all modules of its kind.
    """
    named: dict[str, nn.Module] = dict(model.named_modules())
    columns: dict[str, list[Choice]] = {}
    for choice in plan.choices:
        if choice.style == "column" and choice.region:
            columns.setdefault(choice.region, []).append(choice)
    found: dict[str, list[Choice]] = {}
    for row in plan.choices:
        if row.style == "row" and row.name in columns:
            region = [row, *columns[row.name]]
            found.setdefault(_callable(named, adapted_common(region)), []).extend(region)
    kinds: dict[Any, RegionHolder] = {}
    for name, choices in found.items():
        inside = tuple(each for each in found if is_inside(each, name))
        key = _kind_of(named[name], _layers_in(plan, name))
        if key in kinds:
            kinds[key].names.append(name)
        else:
            kinds[key] = _holder(model, plan, name, choices, inside)
    return list(kinds.values())


def _callable(named: Mapping[str, nn.Module], name: str) -> str:
    """Return the name of the nearest module that has a forward: itself or a parent."""
    while name and type(named[name]).forward in (
        nn.Module.forward,
        nn.ModuleList.forward,
        nn.ModuleDict.forward,
    ):
        name = name.rpartition(".")[0]
    return name


def is_inside(name: str, other: str) -> bool:
    """Return whether a module is a descendant of another one.

    Args:
        name: The dotted name of the module in the model.
        other: The name of the possible ancestor; "" is the model.
    """
    return name != other and (not other or name.startswith(f"{other}."))


def joined(holder: str, name: str) -> str:
    """Return the full dotted name of a module or parameter.

    Args:
        holder: The name of the module that contains it; "" is the model.
        name: Its name in that module; "" is the module itself.
    """
    return ".".join(each for each in (holder, name) if each)


def _layers_in(plan: ParallelPlan, holder: str) -> dict[str, Choice]:
    """Return the layers of a module whose products are replaced, by name in it."""
    prefix = f"{holder}." if holder else ""
    return {
        choice.name.removeprefix(prefix): choice
        for choice in plan.choices
        if choice.style != "vocabulary" and choice.name.startswith(prefix)
    }


def widths_of(choice: Choice) -> tuple[int, int]:
    """Return the numbers of outputs and inputs of the whole layer, even after it was split."""
    first, second = choice.part.weight.shape
    return (second, first) if choice.part.transposed else (first, second)


def _kind_of(module: nn.Module, layers: Mapping[str, Choice]) -> Any:
    """Return a key that is equal for modules of one kind.

    It contains classes, plain attributes, shapes and split layers.
    """
    parts = []
    for inner, each in module.named_modules():
        plain = {
            key: value
            for key, value in vars(each).items()
            if isinstance(value, (bool, int, float, str))
            and not any(word in key for word in NOT_THE_KIND)
        }
        shapes = [(key, tuple(param.shape)) for key, param in each.named_parameters(recurse=False)]
        parts.append((inner, type(each), str(sorted(plain.items())), str(shapes)))
    splits = [(inner, each.style, each.part.weight) for inner, each in layers.items()]
    return tuple(parts), tuple(splits)


def _holder(
    model: nn.Module,
    plan: ParallelPlan,
    name: str,
    choices: Sequence[Choice],
    inside: tuple[str, ...],
) -> RegionHolder:
    """Return the copy of a module with split layers.

    Args:
        model: The whole model.
        plan: Which of its layers are split, and how.
        name: The name of the module.
        choices: The column and row layers in it that `prove` examines.
        inside: The names of other such modules inside it.
    """
    module = model.get_submodule(name)
    prefix = f"{name}." if name else ""
    parents = {parent_of(each) for each in choices if each.style == "column"}
    attributes = {
        (of.removeprefix(prefix) if of != name else "", attribute): local
        for (of, attribute), local in plan.attributes.items()
        if of in parents
    }
    wrappers = [each.name.removesuffix(ADAPTED) for each in choices]
    members: dict[str, Choice] = {}
    given: dict[str, Choice] = {}
    for inner, each in _layers_in(plan, name).items():
        is_member = any(f"{each.name}.".startswith(f"{wrapper}.") for wrapper in wrappers)
        if is_member:
            members[inner] = each
        else:
            given[inner] = each
    widths: dict[int, RangesOfRanks] = {}
    for each in choices:
        is_one_projection = each.fused is None or each.style == "row"
        if each.head_dim is not None and is_one_projection:
            _note_width(widths, each.part.side, each.head_dim)
    floating = next((param for param in module.parameters() if param.is_floating_point()), None)
    vectors = {
        key: param.detach().clone()
        for key, param in module.named_parameters()
        if param.dim() < 2 and not param.is_meta
    }
    return RegionHolder(
        [name],
        _template(name, module),
        members,
        given,
        tuple(each.removeprefix(prefix) for each in inside),
        attributes,
        widths,
        plan.ranks,
        CPU if floating is None or floating.is_meta else floating.device,
        torch.float32 if floating is None else floating.dtype,
        vectors,
    )


def _note_width(widths: dict[int, RangesOfRanks], side: Split, head_dim: int) -> None:
    """Record how the ranks share an attention's features and heads, by their number."""
    (width,) = side.shape
    widths.setdefault(width, side.ranges)
    heads = []
    for each in side.ranges:
        heads.append(tuple((low // head_dim, high // head_dim) for low, high in each))
    widths.setdefault(width // head_dim, tuple(heads))


def _template(name: str, module: nn.Module) -> nn.Module:
    """Return a copy of a module with its buffers, without parameter values and hooks.

    Raises NotBuiltError if it cannot be copied.
    """
    memo = meta_parameters(module)
    for buffer in module.buffers():
        memo[id(buffer)] = (
            torch.zeros_like(buffer, device=CPU) if buffer.is_meta else buffer.detach().clone()
        )
    try:
        copy = deepcopy(module, memo).eval().requires_grad_(False)
    except Exception as error:
        raise NotBuiltError(
            f"tensor parallelism: module '{name}' ({type(module).__name__}) has split layers and "
            "cannot be copied.",
            "A copy is run to examine whether a rank computes its part of it; copying failed: "
            f"{brief(error)}.",
            "keep locks, files and process groups out of the module, or use dp_shard instead of "
            "tp.",
        ) from error
    for each in copy.modules():
        clear_hooks(each)
    return copy


# -- arguments


def calls_in(model: nn.Module, names: Sequence[str]) -> dict[str, ModuleCall]:
    """Record the calls of modules in a forward of the model on its `dummy_inputs`.

    A copy of the model runs on fake tensors. If its forward fails, the calls before the failure are
    returned.

    Args:
        model: The whole model.
        names: The names of the modules whose calls are recorded.

    Returns:
        The arguments of the first call of each module that was called, by name.
    """
    example = getattr(model, "dummy_inputs", None)
    calls: dict[str, ModuleCall] = {}
    if not isinstance(example, Mapping) or not names:
        return calls

    def seen(name: str) -> Callable[..., None]:
        """Return a hook that records the first call, and ends the forward after the last one."""

        def look(module: nn.Module, args: Any, kwargs: Any) -> None:
            calls.setdefault(name, ModuleCall(*without_caches((args, kwargs))))
            if len(calls) == len(names):
                raise _Enough

        return look

    try:
        copy = on_meta(model)
        for name in names:
            copy.get_submodule(name).register_forward_pre_hook(seen(name), with_kwargs=True)
        with fake_tensors() as mode, torch.enable_grad(), torch.random.fork_rng(devices=[]):

            def faked(tensor: Tensor) -> Tensor:
                """Return a fake tensor on the CPU."""
                with mode:
                    return torch.empty(tensor.shape, dtype=tensor.dtype, device=CPU)

            state = {
                name: faked(each).requires_grad_(each.requires_grad)
                for name, each in copy.named_parameters()
            }
            state.update({name: faked(each) for name, each in copy.named_buffers()})
            torch.func.functional_call(
                copy, state, (), map_inputs(dict(example), faked), tie_weights=True
            )
    except Exception:  # the model's error; the first forward checks the modules not reached
        return calls
    return calls


def simple_call(holder: RegionHolder) -> ModuleCall | None:
    """Generate arguments for a module whose forward takes one tensor.

    Feed-forward layers are such modules.

    Returns:
        The arguments, on the meta device, or None if the forward needs other arguments.
    """
    parameters = inspect.signature(holder.template.forward).parameters.values()
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    needed = [each for each in parameters if each.default is each.empty and each.kind in kinds]
    if len(needed) != 1:
        return None
    first = next(each for each in holder.members.values() if each.style == "column")
    return ModuleCall((torch.empty(ROWS, TOKENS, widths_of(first)[1], device="meta"),), {})


def without_caches(value: Any) -> Any:
    """Replace key/value caches in arguments by None, because training does not use them."""
    if hasattr(value, "get_seq_length"):
        return None
    if type(value) is dict:
        return {key: without_caches(each) for key, each in value.items()}
    return tuple(map(without_caches, value)) if type(value) is tuple else value


def small_copy(args: Args, kwargs: Kwargs) -> ModuleCall:
    """Return arguments with fewer batch rows and tokens, so that a module runs faster.

    The dimensions of rows and tokens are recognized by the sizes of the first floating-point
    tensor.

    Args:
        args: The positional arguments of a call.
        kwargs: The keyword arguments of the same call.

    Returns:
        Arguments with detached, shortened views of the tensors.
    """
    given = all_tensors((args, kwargs), visits_objects=False)
    hidden = next((each for each in given if each.is_floating_point() and each.dim() >= 2), None)
    if hidden is None:
        return ModuleCall(args, kwargs)
    tokens = hidden.shape[-2]
    rows = hidden.shape[0] if hidden.dim() > 2 else 0

    def narrowed(tensor: Tensor) -> Tensor:
        """Return a view of the first rows and tokens of an argument."""
        requires_grad = tensor.requires_grad
        tensor = tensor.detach()
        if rows and tensor.dim() and tensor.shape[0] == rows:
            tensor = tensor[:MOST_ROWS]
        for dim in range(tensor.dim()):
            if tensor.shape[dim] == tokens > MOST_TOKENS and tokens != hidden.shape[-1]:
                tensor = tensor.narrow(dim, 0, MOST_TOKENS)
        return tensor.requires_grad_(requires_grad)

    return ModuleCall(*map_inputs((args, kwargs), once(narrowed)))
