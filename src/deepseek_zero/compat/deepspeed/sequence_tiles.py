"""DeepSpeed's tiled computations over sequences.

They are those of `deepspeed.runtime.sequence_parallel.ulysses_sp`. They are based on
activations/tiles.py and have DeepSpeed's interface, for example `TiledMLP.apply(...)`. Every
gradient is complete when it arrives, so `ds_grad_is_ready` of a parameter is not needed. All
weights that a function uses get their gradients, even without `compute_params`. 16-bit gradients
are accumulated over tiles in fp32: those of the module for TiledMLP, those of `compute_params` for
TiledFusedLogitsLoss.

With `compute_params`, TiledFusedLogitsLoss computes gradients in forward (`sum_at_once`), like
DeepSpeed, and otherwise in backward. A factor that is applied to the loss afterwards (accumulation,
loss scale) also applies to these gradients, unlike in DeepSpeed.
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
    """Compute fn(**kwargs_to_shard, **kwargs_to_pass) in tiles of the sequence.

    The tiles are recomputed in backward.

    Args:
        fn: Function to apply to each tile.
        seqlen: Ignored.
        shards: Number of tiles.
        kwargs_to_shard: Tensors of shape ``(samples, seqlen, ...)`` to split.
        kwargs_to_pass: Arguments for every tile.
        grad_requiring_tensor_key: Ignored.
        compute_params: Ignored.
        output_unshard_dimension: Dimension along which results are joined; 0 if each result is a
            scalar loss.
        output_reduction: "mean", "sum" or None for the joined result.

    Returns:
        The joined results, after the reduction if there is one.

    Raises:
        ValueError: The reduction is unknown.
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
    """`sequence_tiled_compute` with positional arguments."""

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
        """Compute a function in tiles of the sequence, as `sequence_tiled_compute` does.

        Args:
            fn: Function to apply to each tile.
            seqlen: Ignored.
            shards: Number of tiles.
            keys_to_shard: Names of the tensors to split.
            keys_to_pass: Names of the arguments for every tile.
            grad_requiring_tensor_key: Ignored.
            compute_params: Ignored.
            output_unshard_dimension: Dimension along which results are joined; 0 for scalar losses.
            output_reduction: "mean", "sum" or None for the joined result.
            *args: Values of `keys_to_shard`, then those of `keys_to_pass`.

        Returns:
            The joined results, after the reduction if there is one.
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
    """Run a module's forward pass in tiles of the sequence."""

    @staticmethod
    def apply(
        fn: Callable[[Any, Tensor], Tensor],
        self: Any,
        x: Tensor,
        shards: int,
        compute_params: Sequence[Tensor] | None = None,
    ) -> Tensor:
        """Compute fn(self, x) in tiles, which are recomputed in backward.

        Args:
            fn: Function of the module and a tile.
            self: Module that is passed to `fn`.
            x: Shape ``(samples, tokens, width)`` or ``(tokens, width)``.
            shards: Number of tiles.
            compute_params: Parameters whose 16-bit gradients are accumulated in fp32. If it is None
                or empty, all of the module's are.

        Returns:
            The joined outputs of the tiles, in the order of `x`.
        """
        with fp32_sums(_module(self), compute_params or None) as reading:
            return in_tiles(reading(partial(fn, self)), shards, x, dim=-2)


class TiledFusedLogitsLoss:
    """Compute a loss in tiles of the tokens, never all logits at once."""

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
        """Return the mean or the sum of fn(self, x, y) over the tiles.

        Args:
            fn: Function of the module and tiles of `x`, `y` and `mask`. The samples and tokens of a
                tile are flattened to one dimension.
            self: Module that is passed to `fn`.
            x: Shape ``(samples, tokens, ...)``.
            y: Shape ``(samples, tokens, ...)``.
            mask: Shape ``(samples, tokens)``; passed to `fn` only if it is not None.
            shards: Number of tiles.
            compute_params: Weights that `fn` reads. Their gradients are computed in forward and
                accumulated in fp32.
            output_reduction: "mean" or "sum". Use "sum" if tiles have different numbers of valid
                tokens.

        Returns:
            A scalar that can be differentiated.

        Raises:
            ValueError: A shape or the reduction is invalid.
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
