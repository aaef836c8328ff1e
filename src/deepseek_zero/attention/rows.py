"""Attention by a plan, tile by tile, with torch's own CPU attention kernel.

The kernel is called for each tile on views of queries and keys, and returns the logarithm of each
row's sum, which is saved for backward. Backward calls the kernel's backward for each tile. It adds
the gradients of the keys in the order of the tiles, in fp32 or better, so the same inputs give the
same bits. Consecutive tiles of one shape are computed as a batch, whose keys are one overlapping
view.

If the kernel cannot be used (another device, different widths, a gradient of a bias), two matmuls
and a softmax per tile do the same.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ..base.device import cpu_attention
from .plan import AttentionTile, HeadGroup, Mask, Pattern, added

# Returns which keys are seen, as a bool of shape (samples or 1, 1, queries, keys). The arguments
# are the numbers of samples, queries and keys, with four dimensions that broadcast.
BiasRule = Callable[[Tensor, Tensor, Tensor], Tensor]
Bias = Tensor | BiasRule

# Maximum elements of the keys that one call on several tiles reads, and of their gradients
_BATCH_NUMEL = 1 << 20
_KERNEL = cpu_attention()
_CAUSAL = Pattern(ahead=0)


def attend_by_plan(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    groups: Sequence[HeadGroup],
    scale: float,
    biases: Sequence[Bias] = (),
) -> Tensor:
    """Compute attention tile by tile.

    A query that attends to no key gets zeros, and has no gradient.

    Args:
        query: Shape ``(samples, heads, queries, width)``.
        key: Shape ``(samples, key_heads, keys, width)``; `key_heads` divides `heads`.
        value: Shape ``(samples, key_heads, keys, value_width)``.
        groups: The tiles of each group of heads, as `best_plan` or `groups_of` returns them.
        scale: Factor of the scores.
        biases: Each is a tensor of numbers to add to the scores, a bool tensor that is True for the
            visible keys, or a `BiasRule`, which is called for each tile. Tensors have four
            dimensions, each 1 or that of ``(samples, heads, queries, keys)``.

    Returns:
        A tensor of shape ``(samples, heads, queries, value_width)``, with the memory layout of
        `query`.
    """
    apply: Any = _ByPlan.apply
    found: Tensor = apply(query, key, value, tuple(groups), scale, *biases)
    return found


class _ByPlan(torch.autograd.Function):
    """Runs the kernel calls of a plan; saves outputs and the logarithms of row sums."""

    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        groups: tuple[HeadGroup, ...],
        scale: float,
        *biases: Bias,
    ) -> Tensor:
        needs_scores = any(ctx.needs_input_grad[5:])
        ctx.groups = groups
        ctx.scale = scale
        ctx.kernel = not needs_scores and _fits_kernel(query, key, value)
        out = torch.zeros_like(query)
        if query.shape[-1] != value.shape[-1]:
            out = value.new_zeros(*query.shape[:-1], value.shape[-1])
        sums = torch.zeros(query.shape[:-1], dtype=_sum_dtype(query), device=query.device)
        forward = _kernel_forward if ctx.kernel else _plain_forward
        for call in _calls(groups, query, key, biases):
            found, logs = forward(
                call, call.queries(query), call.keys(key), call.keys(value), scale
            )
            call.store(out, found)
            call.store(sums[..., None], logs[..., None])
        ctx.rules = [None if isinstance(each, Tensor) else each for each in biases]
        ctx.save_for_backward(
            query, key, value, out, sums, *(each for each in biases if isinstance(each, Tensor))
        )
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        query, key, value, out, sums, *tensors = ctx.saved_tensors
        each_tensor = iter(tensors)
        biases = tuple(next(each_tensor) if rule is None else rule for rule in ctx.rules)
        if grad.stride(-1) != 1:
            grad = grad.contiguous()  # For example an expanded gradient, as from sum()
        of_query = torch.zeros_like(query)
        of_key, of_value = (torch.zeros_like(each, dtype=_sum_dtype(each)) for each in (key, value))
        of_biases = [
            torch.zeros_like(bias) if is_wanted else None
            for bias, is_wanted in zip(biases, ctx.needs_input_grad[5:], strict=True)
        ]
        backward = _kernel_backward if ctx.kernel else _plain_backward
        for call in _calls(ctx.groups, query, key, biases):
            own = _Tensors(
                query=call.queries(query),
                out=call.queries(out),
                grad=call.queries(grad),
                sums=call.queries(sums[..., None]),
                key=call.keys(key),
                value=call.keys(value),
            )
            rows, keys, values, scores = backward(call, own, ctx.scale)
            call.store(of_query, rows)
            call.add_keys(of_key, keys)
            call.add_keys(of_value, values)
            if scores is not None:
                call.add_scores(of_biases, scores)
        return of_query, of_key.to(key.dtype), of_value.to(value.dtype), None, None, *of_biases


def _fits_kernel(*tensors: Tensor) -> bool:
    """Return whether torch's kernel accepts these tensors.

    They must have one width, be on a CPU, and have contiguous rows.
    """
    if _KERNEL is None or len({each.shape[-1] for each in tensors}) > 1:
        return False
    return all(each.device.type == "cpu" and each.stride(-1) == 1 for each in tensors)


def _sum_dtype(tensor: Tensor) -> torch.dtype:
    """Return the dtype of sums and scores: fp32 or better."""
    return torch.promote_types(tensor.dtype, torch.float32)


@dataclass(frozen=True)
class _Call:
    """Some samples and heads of one tile, or of a batch of tiles, for one kernel call.

    A kernel takes folded tensors, of shape (batch, heads, tokens, width). The batch is samples x
    tiles. If `shared` query heads read one key head, it is samples x key heads x tiles. Several
    tiles are of one sample, and then of one key head.

    Attributes:
        samples: The samples.
        heads: The query heads.
        key_heads: The key heads.
        tile: The tile or tiles.
        shared: Number of query heads per key head.
        biases: The biases and rules. A call with biases has one tile.
    """

    samples: slice
    heads: slice
    key_heads: slice
    tile: AttentionTile
    shared: int
    biases: tuple[Bias, ...] = ()

    def queries(self, tensor: Tensor) -> Tensor:
        """Return the rows of the tiles' queries, folded; a view if possible."""
        rows = self._rows(tensor)
        return rows.flatten(0, 1) if self.shared == 1 else rows.flatten(0, 2)

    def _rows(self, tensor: Tensor) -> Tensor:
        """Return a view of the rows of the tiles' queries.

        The shape is (samples, tiles, key heads, tokens, width), or (samples, key heads, tiles,
        shared, tokens, width) if several query heads share a key head.
        """
        tile = self.tile
        stop = tile.start + tile.count * tile.queries
        own = tensor[self.samples, self.heads, tile.start : stop]
        tiles: Tensor = own.unflatten(2, (tile.count, tile.queries))
        if self.shared == 1:
            return tiles.transpose(1, 2)
        heads: Tensor = tiles.unflatten(1, (-1, self.shared))
        return heads.transpose(2, 3)

    def store(self, into: Tensor, folded: Tensor) -> None:
        """Write folded rows to the tiles' queries."""
        rows = self._rows(into)
        rows.copy_(folded.reshape(rows.shape))

    def keys(self, tensor: Tensor) -> Tensor:
        """Return the tiles' keys or values, folded; a view if they are one span."""
        own = tensor[self.samples, self.key_heads]
        tile = self.tile
        if len(tile.spans) == 1:
            start, stop = tile.spans[0]
            tokens = own[:, :, start : stop + (tile.count - 1) * tile.queries]
            tiles = tokens.unfold(2, stop - start, tile.queries).transpose(3, 4)
        else:
            tiles = torch.cat([own[:, :, start:stop] for start, stop in tile.spans], 2)[:, :, None]
        if self.shared == 1:
            return tiles.transpose(1, 2).flatten(0, 1)
        return tiles.flatten(0, 2)[:, None].expand(-1, self.shared, -1, -1)

    def add_keys(self, total: Tensor, folded: Tensor) -> None:
        """Add the folded gradients of the tiles' keys to those of all keys."""
        own = total[self.samples, self.key_heads]
        tile = self.tile
        if self.shared > 1:
            tiles = folded.sum(1, dtype=total.dtype).unflatten(0, (*own.shape[:2], -1))
        else:
            tiles = folded.unflatten(0, (len(own), -1)).transpose(1, 2)
        for place, part in enumerate(tiles.unbind(2)):
            by = place * tile.queries
            before = 0
            for start, stop in tile.spans:
                own[:, :, start + by : stop + by] += part[:, :, before : before + stop - start]
                before += stop - start

    def mask(self, query: Tensor) -> Tensor | None:
        """Return the tensor that is added to the scores of folded queries, or None.

        Its shape is (queries, keys) or has four dimensions.
        """
        dtype = _sum_dtype(query)
        tile = self.tile
        mask = Mask(tile.queries, ((tile.keys, 0),), _CAUSAL) if tile.is_square else tile.mask
        own = None if mask is None else mask.added(dtype).to(query.device)
        if not self.biases:
            return own
        for bias in self.biases:
            given = self._bias(bias, query.device)
            part = added(given, dtype) if given.dtype == torch.bool else given.to(dtype)
            own = part if own is None else own + part
        assert own is not None
        own = own.expand(-1, -1, -1, tile.queries, -1)
        if self.shared == 1:
            return own.squeeze(2)
        if own.shape[:2] == (1, 1):
            return own[0]
        samples = self.samples.stop - self.samples.start
        return own.expand(samples, len(query) // samples, -1, -1, -1).flatten(0, 1)

    def _bias(self, bias: Bias, device: torch.device) -> Tensor:
        """Return a bias, or the result of a rule, for all keys of the tile.

        The shape is (samples, key heads, shared, queries, keys); each size but the last may be 1.
        """
        spans = self.tile.spans
        if isinstance(bias, Tensor):
            parts = self._parts(bias)
        else:
            parts = [self._ruled(bias, torch.arange(*span, device=device)) for span in spans]
        # A part may have one key, for all keys of its span
        columns = [
            part.expand(*part.shape[:-1], stop - start)
            for part, (start, stop) in zip(parts, spans, strict=True)
        ]
        return torch.cat(columns, -1)

    def _ruled(self, rule: BiasRule, keys: Tensor) -> Tensor:
        """Return the result of a rule for the keys of a span, in the form of `_parts`."""
        tile = self.tile
        samples = torch.arange(self.samples.start, self.samples.stop, device=keys.device)
        queries = torch.arange(tile.start, tile.stop, device=keys.device)
        seen = rule(samples.view(-1, 1, 1, 1), queries.view(1, 1, -1, 1), keys.view(1, 1, 1, -1))
        return seen[:, :, None]

    def _parts(self, bias: Tensor) -> list[Tensor]:
        """Return views of a bias for each span.

        The shape is (samples, key heads, shared, queries, keys); each size may be 1.
        """
        tile = self.tile
        places = (self.samples, self.heads, slice(tile.start, tile.stop))
        for dim, place in enumerate(places):
            if bias.shape[dim] > 1:
                bias = bias[(slice(None),) * dim + (place,)]
        heads = bias.unflatten(1, (-1, min(self.shared, bias.shape[1])))
        if heads.shape[-1] == 1:
            return [heads] * len(tile.spans)
        return [heads[..., start:stop] for start, stop in tile.spans]

    def add_scores(self, totals: Sequence[Tensor | None], folded: Tensor) -> None:
        """Add the folded gradients of the tile's scores to those of the biases."""
        samples = self.samples.stop - self.samples.start
        scores = folded.reshape(samples, -1, self.shared, *folded.shape[-2:])
        parts = scores.split([stop - start for start, stop in self.tile.spans], -1)
        for total in totals:
            if total is not None:
                for into, part in zip(self._parts(total), parts, strict=True):
                    into += part.sum_to_size(into.shape)


def _calls(
    groups: Sequence[HeadGroup], query: Tensor, key: Tensor, biases: tuple[Bias, ...]
) -> Iterator[_Call]:
    """Yield the kernel calls of a plan, in order.

    A tile that stands for several is computed in batches, for one sample at a time.
    """
    for group in groups:
        samples = range(*group.samples.indices(query.shape[0]))
        key_heads = range(*group.key_heads.indices(key.shape[1]))
        heads = range(*group.heads.indices(query.shape[1]))
        shared = len(heads) // len(key_heads)
        for tile in group.tiles:
            if not tile.keys or not samples:
                continue
            batch = 1
            parts = [slice(samples.start, samples.stop)]
            pairs = [(group.heads, group.key_heads)]
            if tile.count > 1 and not biases:
                numel = key.shape[3] * tile.keys
                if shared == 1:
                    numel *= len(key_heads)
                else:
                    pairs = _pairs(heads, key_heads)
                batch = max(_BATCH_NUMEL // numel, 1)
                parts = [slice(sample, sample + 1) for sample in samples]
            for place in range(0, tile.count, batch):
                own = replace(tile.at(place), count=min(batch, tile.count - place))
                for part, (read_by, read) in itertools.product(parts, pairs):
                    yield _Call(part, read_by, read, own, shared, biases)


def _pairs(heads: range, key_heads: range) -> list[tuple[slice, slice]]:
    """Return each key head with the query heads that read it."""
    shared = len(heads) // len(key_heads)
    found = []
    for place, key_head in enumerate(key_heads):
        own = heads[place * shared : (place + 1) * shared]
        found.append((slice(own.start, own.stop, own.step), slice(key_head, key_head + 1)))
    return found


# -- one tile: with torch's kernel, or with two matmuls


class _Tensors(NamedTuple):
    """The inputs of a call's backward, folded."""

    query: Tensor
    out: Tensor
    grad: Tensor
    sums: Tensor
    key: Tensor
    value: Tensor


_Gradients = tuple[Tensor, Tensor, Tensor, Tensor | None]  # Of queries, keys, values and scores


def _kernel_forward(
    call: _Call, query: Tensor, key: Tensor, value: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    """Return the folded outputs, and the logarithm of each row's sum, with torch's kernel."""
    assert _KERNEL is not None
    out, sums = _KERNEL[0](query, key, value, **_options(call, query, scale))
    return out, sums


def _kernel_backward(call: _Call, own: _Tensors, scale: float) -> _Gradients:
    """Return the folded gradients with torch's kernel, which has none of the scores."""
    assert _KERNEL is not None
    given = own.grad, own.query, own.key, own.value, own.out, own.sums[..., 0]
    return *_KERNEL[1](*given, **_options(call, own.query, scale)), None


def _options(call: _Call, query: Tensor, scale: float) -> dict[str, Any]:
    """Return the dropout, mask and scale for torch's kernel."""
    is_causal = call.tile.is_square and not call.biases
    mask = None if is_causal else call.mask(query)
    return {"dropout_p": 0.0, "is_causal": is_causal, "attn_mask": mask, "scale": scale}


def _plain_forward(
    call: _Call, query: Tensor, key: Tensor, value: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    """Do the work of `_kernel_forward` with two matmuls and a softmax."""
    scores = _scores(call, query, key, scale)
    sums = scores.logsumexp(-1, keepdim=True)
    # A query that sees nothing: make its weights exp(-inf)
    sums = sums.masked_fill(sums == -torch.inf, 0.0)
    return (scores - sums).exp_() @ value.to(scores.dtype), sums[..., 0]


def _plain_backward(call: _Call, own: _Tensors, scale: float) -> _Gradients:
    """Return the folded gradients of the queries, keys, values and scores of a call."""
    weights = (_scores(call, own.query, own.key, scale) - own.sums).exp_()
    query, out, grad, _, key, value = (each.to(weights.dtype) for each in own)
    of_scores = weights * (grad @ value.mT - (grad * out).sum(-1, keepdim=True))
    return of_scores @ key * scale, of_scores.mT @ query * scale, weights.mT @ grad, of_scores


def _scores(call: _Call, query: Tensor, key: Tensor, scale: float) -> Tensor:
    """Return the masked scores of a call, of shape (batch, heads, queries, keys)."""
    dtype = _sum_dtype(query)
    scores = query.to(dtype) @ key.to(dtype).mT * scale
    mask = call.mask(query)
    return scores if mask is None else scores + mask
