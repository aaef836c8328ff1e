"""Tiles of a sequence: run a function on a part of the tokens at a time.

This is possible if the result of a token depends on no other token (an MLP, the logits and the
loss). Forward keeps each tile's input. Backward recomputes one tile, differentiates it, and
continues with the next, so only one tile's activations exist at a time. Each tile is a checkpoint.
Autograd sees a weight used once per tile, so it sums the weight's gradient over the tiles and
delivers it once.

Autograd sums in the weight's dtype, and a 16-bit sum of many tiles loses precision. A module's
16-bit weights are therefore read through additional nodes (`fp32_sums`)::

    weight -> _Whole -> _Read -> tile 0
                     -> _Read -> tile 1

    _Read     adds a tile's gradient to a sum in fp32 and passes on nothing
    _Whole    runs after all tiles, rounds the sum and passes it on
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint

from .. import parallel
from ..base.errors import NotBuiltError, UsageError
from ..base.quantities import ceil_div
from ..sharding.sharded_parameter import ShardedParameter


@dataclass(frozen=True)
class TileSettings:
    """Number of tokens that are computed at a time (a tile); None for all tokens.

    Attributes:
        loss: For the logits and the loss.
        mlp: For feed-forward layers.
    """

    loss: int | None = None
    mlp: int | None = None


def each_tile(
    function: Callable[..., Tensor], tiles: int, *tensors: Tensor, dim: int = 1
) -> list[Tensor]:
    """Call a function on one part of the tokens after the other.

    Each part is a checkpoint, which is computed again in backward.

    Args:
        function: Called with one part of each tensor.
        tiles: Number of parts. The last parts may be shorter, and there are fewer for fewer tokens.
        *tensors: Tensors of equal length in `dim`, by default of shape ``(samples, tokens, ...)``.
        dim: The dimension to split.

    Returns:
        The function's result for each part, in order.

    Raises:
        UsageError: The lengths differ, or `tiles` is less than 1.

    Note:
        If the function calls sharded units, all ranks must use the same number of tiles, because
        each tile all-gathers their weights.
    """
    lengths = [each.shape[dim] for each in tensors]
    if tiles < 1 or len(set(lengths)) != 1:
        raise UsageError(
            f"{tiles} tiles of tensors of {lengths} tokens.",
            "Each tile is the same part of every tensor.",
            f"choose 1 tile or more, and pass tensors of equal length in dimension {dim}.",
        )
    parts = zip(*(each.chunk(tiles, dim) for each in tensors), strict=True)
    return [_again(function, part) for part in parts]


def in_tiles(function: Callable[..., Tensor], tiles: int, *tensors: Tensor, dim: int = 1) -> Tensor:
    """Call a function on one part of the tokens after the other, and concatenate the results.

    A token's result has the bits that the function returns for the tokens of its part. Gradients of
    weights are sums over the parts, last part first, in the dtype of the weight except with
    `fp32_sums`.

    Args:
        function: Called with one part of each tensor. The result of a token must not depend on
            other tokens.
        tiles: Number of parts. The last parts may be shorter, and there are fewer for fewer tokens.
        *tensors: Tensors of equal length in `dim`, by default of shape ``(samples, tokens, ...)``.
        dim: The dimension to split and to concatenate.

    Returns:
        A tensor with the results of all tokens.

    Raises:
        UsageError: The lengths differ, or `tiles` is less than 1.
    """
    return torch.cat(each_tile(function, tiles, *tensors, dim=dim), dim)


def _again(function: Callable[..., Tensor], part: tuple[Tensor, ...]) -> Tensor:
    def contiguous(*tensors: Tensor) -> Tensor:
        # A copy that exists while the tile is computed; a part of more than one sample is strided
        return function(*(each.contiguous() for each in tensors))

    found: Tensor = checkpoint(contiguous, *part, use_reentrant=False)
    return found


# -- 16-bit gradients, summed in 32 bits


@dataclass
class _Sum:
    """The fp32 sum of the gradients of one weight, over the tiles so far."""

    total: Tensor | None = None


class _Whole(torch.autograd.Function):
    """A weight, as an input of all tiles."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, over: _Sum) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.over = over
        ctx.dtype = weight.dtype
        return weight.view_as(weight)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor | None) -> tuple[Tensor | None, None]:
        assert grad is None, "only tiles read it"
        found = ctx.over.total
        ctx.over.total = None
        return None if found is None else found.to(ctx.dtype), None


class _Read(torch.autograd.Function):
    """A weight, as an input of one tile."""

    @staticmethod
    def forward(ctx: Any, whole: Tensor, over: _Sum) -> Tensor:
        ctx.over = over
        return whole.view_as(whole)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[None, None]:
        over = ctx.over
        over.total = grad.float() if over.total is None else over.total.add_(grad)
        return None, None


@dataclass
class _Weight:
    """A weight that tiles read.

    Attributes:
        param: The parameter.
        places: The (module, name) of each attribute that refers to it.
        whole: The output of `_Whole`.
        over: The sum of its gradients.
    """

    param: Tensor
    places: list[tuple[nn.Module, str]] = field(default_factory=list)
    whole: Tensor | None = None
    over: _Sum = field(default_factory=_Sum)

    def read(self) -> None:
        """Make modules read the weight through a new node.

        An attribute of the instance has precedence over the module's parameters.
        """
        found = _Read.apply(self.whole, self.over)  # type: ignore[no-untyped-call]
        for module, name in self.places:
            module.__dict__[name] = found

    def give_back(self) -> None:
        """Make modules read the parameter again."""
        for module, name in self.places:
            module.__dict__.pop(name, None)


@contextmanager
def fp32_sums(
    module: nn.Module | None, only: Sequence[Tensor] | None = None
) -> Iterator[Callable[[Callable[..., Tensor]], Callable[..., Tensor]]]:
    """Sum the gradients of a module's 16-bit weights over tiles in fp32.

    Other weights are not changed. Weights that are sharded when the block opens are not changed
    either, because a unit inside the module gathers them for each tile. A recomputation reads the
    weights themselves, because autograd needs only its values.

    Args:
        module: The module whose weights the tiles read; None has no effect.
        only: The weights to include; None for all.

    Yields:
        A decorator for the function that computes one tile with the module.
    """
    found: dict[int, _Weight] = {}
    is_used = module is not None and torch.is_grad_enabled() and not torch.compiler.is_compiling()
    for each in module.modules() if module is not None and is_used else ():
        for name, param in each.named_parameters(recurse=False, remove_duplicate=False):
            if _is_summed(param, only):
                found.setdefault(id(param), _Weight(param)).places.append((each, name))
    for weight in found.values():
        weight.whole = _Whole.apply(weight.param, weight.over)  # type: ignore[no-untyped-call]

    def reading(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def read(*tensors: Tensor) -> Tensor:
            given = [weight for weight in found.values() if weight.whole is not None]
            for weight in given:
                weight.read()
            try:
                return function(*tensors)
            finally:
                for weight in given:
                    weight.give_back()

        return read if found else function

    try:
        yield reading
    finally:
        for weight in found.values():
            weight.whole = None  # A view of a gathered buffer must not outlive the forward


def _is_summed(param: Tensor, only: Sequence[Tensor] | None) -> bool:
    if isinstance(param, ShardedParameter) or not param.requires_grad:
        return False
    return param.dtype.itemsize == 2 and (only is None or any(param is each for each in only))


# -- models of transformers


class TiledMlp(nn.Module):
    """A feed-forward layer that computes one tile of its tokens at a time in training.

    The class is not instantiated: a module's class is replaced by a subclass of this one and its
    own. Tensor arguments other than the input, such as the residual, must have the same tokens, and
    are split with it.

    Attributes:
        tile_rows: Number of tokens per tile.
        tile_name: The name of the module, for errors.
    """

    tile_rows: int
    tile_name: str

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the original forward; in training, on one tile of tokens after the other."""
        plain: Callable[..., Any] = super().forward
        names = list(kwargs)
        given = [*args, *kwargs.values()]
        places = [place for place, each in enumerate(given) if isinstance(each, Tensor)]
        if not places or not (self.training and torch.is_grad_enabled()):
            return plain(*args, **kwargs)
        tokens = given[places[0]].shape[:-1]
        tiles = ceil_div(tokens[-1], self.tile_rows) if tokens else 1
        if tiles <= 1:
            return plain(*args, **kwargs)
        if any(given[place].shape[:-1] != tokens for place in places):
            shapes = [tuple(given[place].shape) for place in places]
            raise self._refused(
                f"it is given tensors of the shapes {shapes}, which do not have the same tokens"
            )

        def part(*tensors: Tensor) -> Tensor:
            values = list(given)
            for place, tensor in zip(places, tensors, strict=True):
                values[place] = tensor
            found = plain(
                *values[: len(args)], **dict(zip(names, values[len(args) :], strict=True))
            )
            if not isinstance(found, Tensor) or found.shape[:-1] != tensors[0].shape[:-1]:
                shape = tuple(found.shape) if isinstance(found, Tensor) else type(found).__name__
                raise self._refused(
                    f"it returns {shape} for {tuple(tensors[0].shape)}, and not one row for each "
                    "token"
                )
            return found

        with fp32_sums(self) as reading:
            return in_tiles(reading(part), tiles, *(given[place] for place in places), dim=-2)

    def _refused(self, what: str) -> NotBuiltError:
        return NotBuiltError(
            f"activation_checkpointing.tiled_mlp: '{self.tile_name}' cannot be cut into tiles of "
            f"tokens: {what}.",
            "Each token's result must follow from that token alone.",
            "leave tiled_mlp out, and call deepseek_zero.activations.tiles.in_tiles in the model's "
            "forward.",
        )


def check_rows(rows: int, key: str) -> None:
    """Raise an error unless a tile has at least one token.

    Args:
        rows: Number of tokens per tile.
        key: The key of `activation_checkpointing` that sets this number.

    Raises:
        UsageError: `rows` is less than 1.
    """
    if rows < 1:
        raise UsageError(
            f"activation_checkpointing.{key}: tiles of {rows} rows.",
            "A tile has at least one token.",
            "pass rows of at least 1, for example 1024.",
        )


def tile_mlps(model: nn.Module, rows: int) -> None:
    """Make feed-forward layers compute one tile of their tokens at a time in training.

    A tile is a range of tokens. Tiles reduce the memory of activations, because backward recomputes
    one tile at a time. A module is a feed-forward layer if its class name ends with "MLP", as in
    transformers, and if it contains no other such module. Call this function before the model is
    wrapped. A second call for the same model sets the number of tokens.

    Args:
        model: The model. The class of each feed-forward layer is replaced in place.
        rows: Number of tokens per tile, at least 1.

    Raises:
        NotBuiltError: The model has no feed-forward layer, the input of a layer is sharded over
            tokens along "tp", or a layer contains a module that computes the result of a token from
            other tokens, such as a convolution. The model is then unchanged. A later forward raises
            this error if the tensors that a layer receives or returns do not have the same tokens.
        UsageError: `rows` is less than 1.
    """
    check_rows(rows, "tiled_mlp")
    named = {name: module for name, module in model.named_modules() if _is_mlp(module)}
    found = list(named.values())
    if not found:
        raise NotBuiltError(
            f"activation_checkpointing.tiled_mlp: {type(model).__name__} has no module whose class "
            "is called ...MLP.",
            "That is how feed-forward layers are found.",
            "leave it out, and call deepseek_zero.activations.tiles.in_tiles in the model's "
            "forward.",
        )
    if any(
        isinstance(each, parallel.Layer) and each.part.shards_tokens
        for module in found
        for each in module.modules()
    ):
        raise NotBuiltError(
            'activation_checkpointing.tiled_mlp beside "tensor_parallel": {"sequence": true} '
            "is not built.",
            "What a layer reads there is gathered from all ranks, not cut into tiles.",
            "leave one of the two out.",
        )
    for name, module in named.items():
        for inner, each in module.named_modules(prefix=name):
            if isinstance(each, _MIXES_TOKENS) and not _is_pointwise(each):
                raise NotBuiltError(
                    f"activation_checkpointing.tiled_mlp: '{inner}' ({type(each).__name__}) "
                    "computes a token from others.",
                    "A tile has a part of the tokens, and each token's result must follow from "
                    "that token alone.",
                    "leave tiled_mlp out.",
                )
    for name, module in named.items():
        base = type(module)
        if not issubclass(base, TiledMlp):  # from an earlier call
            name_of_class = f"Tiled{base.__name__}"
            module.__class__ = type(name_of_class, (TiledMlp, base), {"__module__": __name__})
        module.tile_rows = rows
        module.tile_name = name


# Layers that compute the result of one token or position from several
_MIXES_TOKENS = (
    *(nn.Conv1d, nn.Conv2d, nn.RNNBase, nn.MultiheadAttention, nn.GroupNorm),
    *(nn.BatchNorm1d, nn.BatchNorm2d, nn.InstanceNorm1d, nn.InstanceNorm2d),
)


def _is_pointwise(module: nn.Module) -> bool:
    """Return whether a convolution computes each position from that position only."""
    return isinstance(module, nn.Conv1d | nn.Conv2d) and set(module.kernel_size) == {1}


def _is_mlp(module: nn.Module) -> bool:
    """Return whether this is a feed-forward layer that contains no other one."""
    kinds = [type(each).__name__.endswith("MLP") for each in module.modules()]
    return kinds[0] and sum(kinds) == 1
