"""Tiles of a sequence: a function of tokens runs over a part of them at a time, and again for backward.

What a token's result needs of no other token (an MLP, the logits and the loss) may be computed in tiles. Forward keeps
each tile's input; backward computes one tile again, differentiates it, and goes on to the next: at most one tile's
activations are there. Each tile is a checkpoint, whose weights autograd sees as used once per tile, so a weight's
gradient is added up over the tiles first and arrives once, whatever waits for it.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from ..base.errors import UsageError


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
