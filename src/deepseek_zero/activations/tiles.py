"""Tiles of a sequence: a function of tokens runs over a part of them at a time, and again for backward.

What a token's result needs of no other token (an MLP, the logits and the loss) may be computed in tiles. Forward keeps
each tile's input; backward computes one tile again, differentiates it, and goes on to the next: at most one tile's
activations are there. Each tile is a checkpoint, whose weights autograd sees as used once per tile, so a weight's
gradient is added up over the tiles first and arrives once, whatever waits for it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from .. import parallel
from ..base.errors import NotBuiltError, UsageError


@dataclass(frozen=True)
class TileSettings:
    """Tokens that are computed at a time: of the logits and the loss, and of feed-forward layers; None: all of them."""

    loss: int | None = None
    mlp: int | None = None


def each_tile(function: Callable[..., Tensor], tiles: int, *tensors: Tensor, dim: int = 1) -> list[Tensor]:
    """Return what the function makes of each part of the tensors, by place, to be computed again in backward.

    tensors: as long as each other in dimension `dim`, (samples, tokens, ...) by default; the function gets one part of
    each. They are cut into `tiles` parts, the last ones shorter, and fewer where there are fewer tokens. Local; but
    where the function calls sharded units of its own, all ranks take as many tiles, since each gathers them. UsageError
    where lengths differ.
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
    """Return function(*tensors), computed tile by tile and joined in dimension `dim`. As `each_tile`.

    A token's result has the bits that the function gives it among the tokens of its tile. Gradients of weights are
    sums over tiles, the last tile first.
    """
    return torch.cat(each_tile(function, tiles, *tensors, dim=dim), dim)


def _again(function: Callable[..., Tensor], part: tuple[Tensor, ...]) -> Tensor:
    found: Tensor = checkpoint(function, *part, use_reentrant=False)
    return found


class TiledMlp(nn.Module):
    """A feed-forward layer that computes tiles of its tokens in training.  Never made: a module takes a class of it and
    of its own as its class.
    """

    tile_rows: int

    def forward(self, x: Tensor) -> Tensor:
        plain: Callable[[Tensor], Tensor] = super().forward
        tiles = -(-x.shape[-2] // self.tile_rows)
        if tiles <= 1 or not (self.training and torch.is_grad_enabled()):
            return plain(x)
        return in_tiles(plain, tiles, x, dim=-2)


def tile_mlps(model: nn.Module, rows: int) -> None:
    """Let the feed-forward layers of a model compute `rows` tokens at a time in training. Local.

    They are the modules whose class is called ...MLP, as transformers calls them, and that hold no other one. Before
    the model is wrapped. NotBuiltError where there is none, or where ranks along "tp" shard what they read over tokens.
    """
    found = [module for module in model.modules() if type(module).__name__.endswith("MLP") and _is_innermost(module)]
    if not found:
        raise NotBuiltError(
            f"activation_checkpointing.tiled_mlp: {type(model).__name__} has no module whose class is called ...MLP.",
            "That is how feed-forward layers are found.",
            "leave it out, and call deepseek_zero.activations.tiles.in_tiles in the model's forward.",
        )
    if any(
        isinstance(each, parallel.Layer) and each.part.shards_tokens for module in found for each in module.modules()
    ):
        raise NotBuiltError(
            'activation_checkpointing.tiled_mlp beside "tensor_parallel": {"sequence": true} is not built.',
            "What a layer reads there is gathered from all ranks, not cut into tiles.",
            "leave one of the two out.",
        )
    for module in found:
        base = type(module)
        module.__class__ = type(f"Tiled{base.__name__}", (TiledMlp, base), {"__module__": __name__})
        module.tile_rows = rows  # type: ignore[assignment]


def _is_innermost(module: nn.Module) -> bool:
    return not any(type(each).__name__.endswith("MLP") for each in module.modules() if each is not module)
