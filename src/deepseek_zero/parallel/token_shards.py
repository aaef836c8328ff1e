"""Activations that are sharded over tokens (Megatron's sequence parallelism).

This applies between the split layers of a block:

    first block                  its input is reduced to this rank's tokens (`shard`)
    norms, dropout, residuals    on this rank's tokens; the gradient of a norm is a summand
    attention                    its module receives all tokens (`TensorAxis.read_tokens`),
                                 because it reads the number of tokens there
    other columns                gather their input; the sum of a row layer is for own tokens
    last block                   its output is all-gathered (`unshard`)

Everything outside of the blocks is whole, because a model computes positions and masks there. In
evaluation nothing is sharded.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor, nn

from ..base.errors import NotBuiltError, UsageError
from ..base.nested import Args, Kwargs
from .families import common_path
from .functions import shard, unshard
from .layers import TensorAxis

FLATTENING = ("opt",)
OFF = 'leave tensor_parallel.sequence out, or say "sequence": false.'


@dataclass(frozen=True)
class ShardedBlocks:
    """The blocks of a model between which activations are sharded over tokens.

    Attributes:
        blocks: The names of the blocks, in order.
        attentions: The names of the modules that contain query, key and value projections.
        norms: The names of the layers (norms) that every rank holds whole and applies to its own
            tokens.
    """

    blocks: tuple[str, ...]
    attentions: tuple[str, ...]
    norms: tuple[str, ...]


def find_stretch(
    model: nn.Module, styles: Mapping[str, str], attentions: Sequence[str], unknown: Collection[str]
) -> ShardedBlocks:
    """Find the blocks between which activations can be sharded over tokens.

    Args:
        model: The whole model, before anything is split.
        styles: How each split layer is split ("column", "row" and so on), by name.
        attentions: The names of the modules that contain query, key and value projections.
        unknown: The names of such modules whose row layer was not found.

    Returns:
        The names of the blocks, and of their modules that are handled specially.

    Raises:
        NotBuiltError: A layer needs all tokens. The message names it.
    """
    regions = [
        name for name, style in styles.items() if style not in ("vocabulary", "head", "partial")
    ]
    config = getattr(model, "config", None)
    if getattr(config, "is_encoder_decoder", False):
        raise _refused(type(model).__name__, "its decoder reads what its encoder gives")
    if (family := getattr(config, "model_type", "")) in FLATTENING:
        raise _refused(
            type(model).__name__,
            f"blocks of the family '{family}' join the batch's tokens in one dimension",
        )
    container = _container(model, regions)
    blocks = tuple(
        f"{container}.{key}" if container else key
        for key, _ in model.get_submodule(container).named_children()
    )
    if unknown:
        raise _refused(min(unknown), "where its attention ends is not known")
    norms = []
    for block in blocks:
        if not any(each.startswith(f"{block}.") for each in regions):
            raise _refused(block, "none of its layers is split")
        for name, module in model.get_submodule(block).named_modules(prefix=block):
            style = styles.get(name)
            if style in ("column", "row", "partial"):
                continue
            if style is not None:
                raise _refused(name, "its rule gathers its outputs, or cuts whole inputs")
            has_buffers = any(True for _ in module.buffers(recurse=False))
            if not has_buffers and not any(True for _ in module.parameters(recurse=False)):
                continue
            if has_buffers or "norm" not in type(module).__name__.lower():
                raise _refused(
                    name,
                    f"whether a {type(module).__name__} treats tokens one by one is not known",
                )
            if any(name.startswith(f"{attention}.") for attention in attentions):
                raise _refused(name, "it stands between an attention's input and its projections")
            norms.append(name)
    return ShardedBlocks(blocks, tuple(attentions), tuple(norms))


def _container(model: nn.Module, regions: Sequence[str]) -> str:
    """Return the name of the list of blocks with all split layers."""
    path = common_path(regions)
    while path and not isinstance(
        model.get_submodule(".".join(path)), nn.ModuleList | nn.Sequential
    ):
        path.pop()
    found = ".".join(path)
    if not isinstance(model.get_submodule(found), nn.ModuleList | nn.Sequential):
        raise _refused(type(model).__name__, "its split layers are in no list of blocks")
    return found


def _refused(name: str, why: str) -> NotBuiltError:
    return NotBuiltError(
        f"tensor_parallel.sequence: activations of '{name}' cannot be sharded over tokens.",
        f"{why[0].upper()}{why[1:]}.",
        OFF,
    )


def shard_tokens(model: nn.Module, stretch: ShardedBlocks, axis: TensorAxis) -> None:
    """Register hooks that shard a split model's activations over tokens in training.

    Args:
        model: The model, after its layers were split.
        stretch: The blocks between which activations are sharded.
        axis: The tensor-parallel axis, which gathers tokens for the split layers and sums their
            gradients.
    """
    first = stretch.blocks[0]
    last = stretch.blocks[-1]
    model.get_submodule(first).register_forward_pre_hook(
        _given(lambda x: shard(_fitting(x, axis), axis.group, first)), with_kwargs=True
    )
    if axis.streams is not None:
        for name in stretch.blocks:
            block = model.get_submodule(name)
            block.register_forward_pre_hook(_entering(axis))
            block.register_forward_hook(lambda module, args, output: axis.leave())
    model.get_submodule(last).register_forward_hook(_gives(lambda x: unshard(x, axis.group, last)))
    # The gradients for its input are added first, before they are added to others, as on the
    # virtual axis
    for name in stretch.norms:
        norm = model.get_submodule(name)
        norm.register_forward_pre_hook(_given(lambda x: x.view_as(x)), with_kwargs=True)
    for name in stretch.attentions:
        read = partial(axis.read_tokens, name=name)
        model.get_submodule(name).register_forward_pre_hook(_given(read), with_kwargs=True)


def _given(change: Any) -> Any:
    """Return a hook that changes the first tensor argument of a module in training."""

    def hook(module: nn.Module, args: Args, kwargs: Kwargs) -> Any:
        if not module.training:
            return None
        if args:
            return (change(args[0]), *args[1:]), kwargs
        name = next(name for name, value in kwargs.items() if isinstance(value, Tensor))
        return args, {**kwargs, name: change(kwargs[name])}

    return hook


def _gives(change: Any) -> Any:
    """Return a hook that changes the first tensor that a module in training returns."""

    def hook(module: nn.Module, args: Any, output: Any) -> Any:
        if not module.training:
            return None
        return (change(output[0]), *output[1:]) if isinstance(output, tuple) else change(output)

    return hook


def _entering(axis: TensorAxis) -> Any:
    def hook(module: nn.Module, args: Any) -> None:
        if module.training:
            axis.enter_tokens()

    return hook


def _fitting(x: Tensor, axis: TensorAxis) -> Tensor:
    """Return the input of the first block.

    Raises UsageError on all ranks if their number does not divide the tokens.
    """
    if x.dim() != 3 or x.shape[1] % axis.group.size:
        raise UsageError(
            f"tensor_parallel.sequence: activations of shape {tuple(x.shape)} are not shared by "
            f"tp={axis.group.size}.",
            "Each rank has as many tokens of (batch, tokens, width) in training.",
            f"pad the batch to a multiple of {axis.group.size} tokens, or {OFF}",
        )
    return x
