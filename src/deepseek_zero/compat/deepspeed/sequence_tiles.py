"""DeepSpeed's tiled computations of `deepspeed.runtime.sequence_parallel.ulysses_sp`, over
activations/tiles.py.

They are called as there, `TiledMLP.apply(...)`, and every gradient arrives once. So nothing waits
for a parameter's `ds_grad_is_ready`, and `compute_params` are not needed: whatever weights a
function uses get their gradients. Those of 16 bits are added up over tiles in fp32: of TiledMLP the
module's, of TiledFusedLogitsLoss the `compute_params`. TiledFusedLogitsLoss differentiates tiles in
forward where it is told what its function reads (`sum_at_once`), as DeepSpeed does, and in backward
elsewhere; its weights get the factor that the loss is multiplied by afterwards (accumulation, loss
scale), which theirs miss there.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ...activations.tiled_loss import sum_at_once
from ...activations.tiles import each_tile, fp32_sums, in_tiles

_REDUCTIONS: Mapping[str | None, Callable[[Tensor], Tensor]] = {
    None: lambda found: found,
    "mean": Tensor.mean,
    "sum": Tensor.sum,
}


def sequence_tiled_compute(
    fn: Callable[..., Tensor],
    seqlen: int,
    shards: int,
    kwargs_to_shard: Mapping[str, Tensor],
    kwargs_to_pass: Mapping[str, Any],
    grad_requiring_tensor_key: str,
    compute_params: Sequence[Tensor] | None = None,
    output_unshard_dimension: int = 1,
    output_reduction: str | None = "mean",
) -> Tensor:
    """Return fn(**kwargs_to_shard, **kwargs_to_pass), computed in tiles of the sequence and again
    in backward.

    kwargs_to_shard: of (samples, seqlen, ...). output_unshard_dimension: where tiles are joined; 0:
    each returns one
    number, a loss. output_reduction: "mean", "sum" or None, of what is joined. seqlen,
    grad_requiring_tensor_key,
    compute_params: accepted; they follow from the tensors. ValueError for another reduction.
    """
    if output_reduction not in _REDUCTIONS:
        raise ValueError(f"unknown value {output_reduction}: valid values are: none/mean/sum")
    names = list(kwargs_to_shard)

    def one(*tensors: Tensor) -> Tensor:
        return fn(**dict(zip(names, tensors, strict=True)), **kwargs_to_pass)

    found = each_tile(one, shards, *kwargs_to_shard.values())
    joined = (
        torch.stack(found)
        if output_unshard_dimension == 0
        else torch.cat(found, output_unshard_dimension)
    )
    return _REDUCTIONS[output_reduction](joined)


class SequenceTiledCompute:
    """`sequence_tiled_compute` by places."""

    @staticmethod
    def apply(
        fn: Callable[..., Tensor],
        seqlen: int,
        shards: int,
        keys_to_shard: Sequence[str],
        keys_to_pass: Sequence[str],
        grad_requiring_tensor_key: str,
        compute_params: Sequence[Tensor] | None,
        output_unshard_dimension: int,
        output_reduction: str | None,
        *args: Any,
    ) -> Tensor:
        """Return what `sequence_tiled_compute` does.  args: the values of keys_to_shard, then those
        of keys_to_pass.
        """
        cut = args[: len(keys_to_shard)]
        passed = args[len(keys_to_shard) :]
        return sequence_tiled_compute(
            fn,
            seqlen,
            shards,
            dict(zip(keys_to_shard, cut, strict=True)),
            dict(zip(keys_to_pass, passed, strict=True)),
            grad_requiring_tensor_key,
            compute_params,
            output_unshard_dimension,
            output_reduction,
        )


class TiledMLP:
    """A module's forward in tiles of the sequence."""

    @staticmethod
    def apply(
        fn: Callable[[Any, Tensor], Tensor],
        self: Any,
        x: Tensor,
        shards: int,
        compute_params: Sequence[Tensor] | None = None,
    ) -> Tensor:
        """Return fn(self, x), computed tile by tile and again in backward.

        x: (samples, tokens, width), or (tokens, width).  compute_params: those whose gradients of
        16 bits are added up in fp32; None or none: all of the module's.
        """
        with fp32_sums(_module(self), compute_params or None) as reading:
            return in_tiles(reading(partial(fn, self)), shards, x, dim=-2)


class TiledFusedLogitsLoss:
    """A loss in tiles of the tokens, so that the logits of all of them never exist."""

    @staticmethod
    def apply(
        fn: Callable[..., Tensor],
        self: Any,
        x: Tensor,
        y: Tensor,
        mask: Tensor | None,
        shards: int,
        compute_params: Sequence[Tensor] | None,
        output_reduction: str,
    ) -> Tensor:
        """Return the mean or the sum of what fn(self, x, y) is for each tile.

        x, y: (samples, tokens, ...); fn gets tiles of (some tokens of all samples in turn, ...).
        mask: (samples, tokens), cut beside them and passed where it is not None.  output_reduction:
        "mean" or "sum"; tiles of unequal numbers of valid tokens ask for "sum".  compute_params:
        the weights that fn reads, whose gradients are computed in forward then (`sum_at_once`), and
        added up in fp32.  ValueError as DeepSpeed raises.
        """
        if output_reduction not in ("mean", "sum"):
            raise ValueError(
                f'unknown reduction {output_reduction}: valid values are: "mean"/"sum"'
            )
        if x.dim() < 2:
            raise ValueError("x must be at least 2D [batch_size, seq_len, ...]")
        if y.dim() < 2:
            raise ValueError("y must be at least 2D [batch_size, seq_len, ...]")
        if x.shape[:2] != y.shape[:2]:
            raise ValueError("x and y batch/seq dims must match")
        if mask is not None and mask.dim() != 2:
            raise ValueError(f"mask must be 2D [batch_size, seq_len], but got {mask.dim()}")
        if mask is not None and mask.shape != x.shape[:2]:
            raise ValueError("mask shape must match x and y batch/seq")
        given = [x, y] if mask is None else [x, y, mask]
        rows = [each.flatten(0, 1) for each in given]
        trained = [each for each in compute_params or () if each.requires_grad]
        total = sum_at_once(partial(fn, self), shards, trained, *rows)
        if total is not None:
            return total if output_reduction == "sum" else total / len(rows[0].chunk(shards))
        with fp32_sums(_module(self), compute_params or ()) as reading:
            found = torch.stack(each_tile(reading(partial(fn, self)), shards, *rows, dim=0))
        return _REDUCTIONS[output_reduction](found)


def _module(given: Any) -> nn.Module | None:
    return given if isinstance(given, nn.Module) else None
