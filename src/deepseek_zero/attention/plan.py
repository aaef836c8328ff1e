"""Plans of attention: tiles of queries with the spans of keys that each reads.

A tile is a range of queries and the keys that any of them attends to, as spans of the sequence. If
not every query of a tile attends to every key of its spans, the tile has a mask. A mask is
described by a few numbers and built when it is needed, and tiles of one shape share it. No data
structure here has queries x keys elements.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import pairwise
from threading import Lock

import torch
from torch import Tensor

from ..base.quantities import ceil_div
from .layouts import BlockLayout, BlockSpan, Dense

SMALLEST_TILE = 32  # Queries; the kernel processes this many at a time
_FULL = 0.75  # A tile with this share of seen pairs is not worth splitting
_TILE_COST = 12_000  # Fixed cost of a tile's calls, in pairs of a query and a key
# Cost of concatenating another span's keys and separating their gradients, in pairs
_SPAN_COST = 3_000
_PAIR_COSTS = {256: 0.88}  # Cost of a pair in larger tiles, relative to smaller ones
_KEPT_BYTES = 32 << 20  # Bytes of cached masks; a mask of a quarter of this is not cached


@dataclass(frozen=True)
class Pattern:
    """Defines which keys each query attends to, by a block layout and maximum distances.

    A query attends to a key if two conditions hold. The layout contains the pair of their blocks,
    and the key is at most `behind` tokens before the query or at most `ahead` tokens after it.

    Attributes:
        layout: The blocks of keys that each block of queries attends to; None for all keys.
        behind: Maximum distance in tokens to an earlier key; None for no limit.
        ahead: Maximum distance in tokens to a later key; 0 is causal, None is no limit.
    """

    layout: BlockLayout | None = None
    behind: int | None = None
    ahead: int | None = None

    @classmethod
    def of(
        cls,
        layout: BlockLayout | None,
        *,
        is_causal: bool = False,
        window: int | None = None,
        reach: int | None = None,
    ) -> Pattern:
        """Create a pattern from a layout, a causal mask and maximum distances.

        Args:
            layout: The blocks of keys that each block of queries attends to; None for all keys.
            is_causal: Whether a query does not attend to later keys. A unidirectional layout is
                always causal.
            window: A query attends to its own key and at most `window - 1` earlier keys; None for
                no limit. Later keys are not limited.
            reach: A query attends only to keys at most this many tokens away; None for no limit.

        Returns:
            A pattern in which a query attends to the keys that all these arguments allow.
        """
        is_causal |= layout is not None and layout.is_causal
        behind = reach
        if window is not None:
            behind = window - 1 if reach is None else min(window - 1, reach)
        blocks = None if isinstance(layout, Dense) else layout
        return cls(blocks, behind, 0 if is_causal else reach)

    def variant(self, head: int) -> int:
        """Return a number that identifies the layout of a head.

        Heads with the same number have the same layout.

        Args:
            head: The index of the head in the layer.
        """
        return 0 if self.layout is None else self.layout.variant(head)

    def reaches(self, away: Tensor) -> Tensor:
        """Return which distances from a query to a key are within `behind` and `ahead`.

        Args:
            away: Distances in tokens; positive for keys after the query.

        Returns:
            A bool tensor with the shape of `away`, True for distances within the limits.
        """
        seen = torch.ones_like(away, dtype=torch.bool)
        if self.ahead is not None:
            seen &= away <= self.ahead
        if self.behind is not None:
            seen &= away >= -self.behind
        return seen


@dataclass(frozen=True)
class Mask:
    """Which keys of its spans the queries of a tile see, described without a table of pairs.

    Tiles of one shape share a mask.

    Attributes:
        queries: Number of queries of the tile.
        spans: For each span, the number of keys, and the tokens from the first query to the first
            key. The latter is None if all distances in the span are within the pattern's limits.
        pattern: The pattern, whose limits of distance apply inside the spans.
        bits: The blocks of the spans that each row of the layout attends to, one byte each; None
            for all.
        first_token: The position of the tile's first query in its row of the layout.
        first_tokens: The position of each span's first key in its block.
    """

    queries: int
    spans: tuple[tuple[int, int | None], ...]
    pattern: Pattern
    bits: bytes | None = None
    first_token: int = 0
    first_tokens: tuple[int, ...] = ()

    @property
    def keys(self) -> int:
        """Return the number of keys of all spans."""
        return sum(length for length, _ in self.spans)

    def seen(self) -> Tensor:
        """Return the mask as a bool of shape ``(queries, keys)``."""
        found = self._blocks()
        place = torch.arange(self.queries, dtype=torch.int32, device="cpu")[:, None]
        before = 0
        for length, offset in self.spans:
            if offset is not None:
                away = (
                    torch.arange(offset, offset + length, dtype=torch.int32, device="cpu")[None]
                    - place
                )
                found[:, before : before + length] &= self.pattern.reaches(away)
            before += length
        return found

    def _blocks(self) -> Tensor:
        """Return which pairs the layout contains, as a bool of shape ``(queries, keys)``."""
        layout = self.pattern.layout
        if self.bits is None or layout is None:
            return torch.ones(self.queries, self.keys, dtype=torch.bool, device="cpu")
        columns = []
        before = 0
        for (length, _), first in zip(self.spans, self.first_tokens, strict=True):
            columns.append(
                torch.arange(first, first + length, device="cpu") // layout.block + before
            )
            before += (first + length - 1) // layout.block + 1
        bits = torch.frombuffer(bytearray(self.bits), dtype=torch.bool).view(-1, before)
        tokens = torch.arange(self.first_token, self.first_token + self.queries, device="cpu")
        return bits.index_select(1, torch.cat(columns))[tokens // layout.query_block]

    def added(self, dtype: torch.dtype) -> Tensor:
        """Return the mask as a tensor to add to scores: 0 for visible keys, -inf for others.

        Recently used masks are cached.
        """
        return _MASKS.of(self, dtype)


class _Masks:
    """A cache of the masks that were used last, up to `_KEPT_BYTES`."""

    def __init__(self) -> None:
        self._kept = OrderedDict[tuple[Mask, torch.dtype], Tensor]()
        self._lock = Lock()
        self._bytes = 0

    def of(self, mask: Mask, dtype: torch.dtype) -> Tensor:
        """Return a mask as a tensor to add to scores, from the cache if it is there."""
        with self._lock:
            if (found := self._kept.get((mask, dtype))) is not None:
                self._kept.move_to_end((mask, dtype))
                return found
        made = added(mask.seen(), dtype)
        if made.nbytes <= _KEPT_BYTES // 4:
            with self._lock:
                if self._kept.setdefault((mask, dtype), made) is made:
                    self._bytes += made.nbytes
                while self._bytes > _KEPT_BYTES:
                    self._bytes -= self._kept.popitem(last=False)[1].nbytes
        return made


def added(seen: Tensor, dtype: torch.dtype) -> Tensor:
    """Convert a bool mask to a tensor that is added to scores.

    Args:
        seen: A bool tensor, True for visible keys.
        dtype: The dtype of the result.

    Returns:
        A tensor of the same shape: 0 for visible keys, -inf for others.
    """
    return torch.zeros(seen.shape, dtype=dtype, device=seen.device).masked_fill_(~seen, -torch.inf)


_MASKS = _Masks()


@dataclass(frozen=True)
class AttentionTile:
    """A range of queries and the spans of keys that they read.

    Attributes:
        start: The first query of the range.
        stop: The query after the last one.
        spans: The ranges (start, stop) of keys.
        mask: Which of these keys each query attends to; None if all pairs are seen or `is_square`.
        is_square: Whether the keys are the tile's own positions, and each query attends to those up
            to its own. The kernel calls this causal and needs no mask.
        count: Number of tiles that this object represents. Each begins one tile of queries after
            the previous one, and its keys are shifted by the same number.
    """

    start: int
    stop: int
    spans: tuple[BlockSpan, ...]
    mask: Mask | None = None
    is_square: bool = False
    count: int = 1

    @property
    def queries(self) -> int:
        """Return the number of queries of one tile."""
        return self.stop - self.start

    @property
    def keys(self) -> int:
        """Return the number of keys in all spans of one tile."""
        return sum(stop - start for start, stop in self.spans)

    def cost_at(self, pair: float) -> float:
        """Return the estimated time to compute the tiles, in pairs of a query and a key.

        Tiles that are computed as a batch have the fixed cost of one call together.

        Args:
            pair: The cost of one pair.
        """
        pairs = self.queries * self.keys * pair
        calls = _TILE_COST + _SPAN_COST * (len(self.spans) - 1)  # A batch of tiles pays this once
        return calls + self.count * (pairs / 2 if self.is_square else pairs)

    def at(self, place: int) -> AttentionTile:
        """Return one of the `count` tiles, or the tile that would follow them."""
        by = place * self.queries
        spans = tuple((start + by, stop + by) for start, stop in self.spans)
        return replace(self, start=self.start + by, stop=self.stop + by, spans=spans, count=1)


@dataclass(frozen=True)
class HeadGroup:
    """Heads that are computed with the same tiles.

    Attributes:
        heads: The heads of the queries.
        key_heads: The heads of the keys that they read; each serves the same number of query heads.
        tiles: The tiles, which together contain all queries.
        samples: The samples of the batch to which the tiles apply.
    """

    heads: slice
    key_heads: slice
    tiles: tuple[AttentionTile, ...]
    samples: slice = field(default_factory=lambda: slice(None))


@dataclass(frozen=True)
class AttentionShape:
    """The sizes of queries and keys for which attention is planned.

    Attributes:
        heads: Number of heads of the queries.
        key_heads: Number of heads of the keys.
        queries: Number of queries.
        keys: Number of keys.
        first_head: The index of the first head among all heads of the layer.
    """

    heads: int
    key_heads: int
    queries: int
    keys: int
    first_head: int = 0

    @classmethod
    def of(cls, query: Tensor, key: Tensor, first_head: int = 0) -> AttentionShape:
        """Return the sizes of two tensors.

        Args:
            query: Queries of shape ``(samples, heads, queries, width)``.
            key: Keys of shape ``(samples, key_heads, keys, width)``.
            first_head: The index of the first head among all heads of the layer.

        Returns:
            The numbers of heads, key heads, queries and keys.
        """
        return cls(query.shape[1], key.shape[1], query.shape[2], key.shape[2], first_head)


def groups_of(
    pattern: Pattern, shape: AttentionShape, tile: int, samples: slice = slice(None)
) -> tuple[HeadGroup, ...]:
    """Divide the queries of a pattern into tiles, for each group of heads with one layout.

    Args:
        pattern: The keys that each query attends to.
        shape: The numbers of heads, queries and keys. The queries belong to the last positions of
            the keys.
        tile: Maximum number of queries per tile.
        samples: The samples of the batch to which the result applies.

    Returns:
        The groups of heads with their tiles, which `attend_by_plan` computes.
    """
    shared = shape.heads // shape.key_heads
    variants = [pattern.variant(head + shape.first_head) for head in range(shape.heads)]
    tiles = {each: _merged(_tiles(pattern, each, shape, tile)) for each in sorted({*variants})}
    if len(tiles) == 1:
        return (HeadGroup(slice(None), slice(None), tiles[variants[0]], samples),)
    found = list[HeadGroup]()
    # Heads that share a key head are in groups of their own
    step = shape.heads if shared == 1 else shared
    for first in range(0, shape.heads, step):
        own = range(first, first + step)
        key_head = first // shared
        for variant in sorted({variants[head] for head in own}):
            for heads in _slices([head for head in own if variants[head] == variant]):
                read = heads if shared == 1 else slice(key_head, key_head + 1)
                found.append(HeadGroup(heads, read, tiles[variant], samples))
    return tuple(found)


@lru_cache(maxsize=32)
def best_plan(
    pattern: Pattern, shape: AttentionShape, tiles: tuple[int, ...]
) -> tuple[HeadGroup, ...]:
    """Plan the attention of a pattern with the cheapest of several tile sizes.

    Args:
        pattern: The keys that each query attends to.
        shape: The numbers of heads, queries and keys.
        tiles: The maximum numbers of queries per tile to compare.

    Returns:
        The groups of heads with their tiles, as `groups_of` returns them.
    """
    plans = dict[float, tuple[HeadGroup, ...]]()
    for size in tiles:
        plan = groups_of(pattern, shape, size)
        pair = _PAIR_COSTS.get(size, 1.0)
        costs = []
        for group in plan:
            heads = len(range(shape.heads)[group.heads])
            costs += [heads * tile.cost_at(pair) for tile in group.tiles]
        plans.setdefault(sum(costs), plan)
    return plans[min(plans)]


def _slices(places: Sequence[int]) -> list[slice]:
    """Return ascending indices as slices: one slice if they are evenly spaced."""
    steps = {after - before for before, after in pairwise(places)}
    if len(steps) > 1:
        return [slice(place, place + 1) for place in places]
    return [slice(places[0], places[-1] + 1, *steps)]


def _merged(tiles: Iterable[AttentionTile]) -> tuple[AttentionTile, ...]:
    """Merge consecutive equal tiles of one span into one tile with a count."""
    found: list[AttentionTile] = []
    for tile in tiles:
        last = found[-1] if found else None
        if last is not None and len(last.spans) == 1 and tile == last.at(last.count):
            found[-1] = replace(last, count=last.count + 1)
        else:
            found.append(tile)
    return tuple(found)


def _tiles(pattern: Pattern, variant: int, shape: AttentionShape, size: int) -> list[AttentionTile]:
    """Return the tiles of all queries; each has at most `size` queries, and may be split."""
    offset = shape.keys - shape.queries
    found = list[AttentionTile]()
    edges = [*range(offset - offset % size, shape.keys, size), shape.keys]
    for edge, stop in pairwise(edges):
        start = max(edge, offset)
        found += _best(_Rows.of(pattern, variant, shape, start, stop), start, stop)
    return found


@dataclass(frozen=True)
class _Rows:
    """Rows of a pattern's layout, evaluated once for all tiles that are tried.

    Attributes:
        pattern: The pattern.
        shape: The sizes.
        first: The first row.
        seen: The rows from `first` on, of shape ``(rows, blocks)``; None without a layout.
    """

    pattern: Pattern
    shape: AttentionShape
    first: int = 0
    seen: Tensor | None = None

    @classmethod
    def of(
        cls, pattern: Pattern, variant: int, shape: AttentionShape, start: int, stop: int
    ) -> _Rows:
        """Return the rows of the queries at positions [start, stop) of the keys."""
        layout = pattern.layout
        if layout is None:
            return cls(pattern, shape)
        first = start // layout.query_block
        end = ceil_div(stop, layout.query_block)
        blocks = ceil_div(shape.keys, layout.block)
        return cls(pattern, shape, first, layout.rows(variant, first, end, blocks))


def _best(rows: _Rows, start: int, stop: int) -> list[AttentionTile]:
    """Return the tile of the queries at positions [start, stop), or a cheaper split."""
    whole, share = _tile(rows, start, stop)
    layout = rows.pattern.layout
    step = SMALLEST_TILE if layout is None else max(SMALLEST_TILE, layout.query_block)
    middle = (start + stop) // 2 // step * step
    if share >= _FULL or not start < middle < stop:
        return [whole]
    halves = _best(rows, start, middle) + _best(rows, middle, stop)
    is_cheaper = sum(each.cost_at(1.0) for each in halves) < whole.cost_at(1.0)
    return halves if is_cheaper else [whole]


def _tile(rows: _Rows, start: int, stop: int) -> tuple[AttentionTile, float]:
    """Return the tile of the queries at positions [start, stop), and its seen share.

    The share does not count edges.
    """
    pattern = rows.pattern
    shape = rows.shape
    first = 0 if pattern.behind is None else max(start - pattern.behind, 0)
    last = shape.keys if pattern.ahead is None else min(stop + pattern.ahead, shape.keys)
    spans: tuple[BlockSpan, ...] = ((first, last),)
    bits = None
    share = 1.0
    layout = pattern.layout
    if layout is not None:
        bits, spans = _blocks(rows, layout, (start, stop), (first, last))
        share = bits.double().mean().item() if bits.numel() else 1.0
        bits = None if share == 1.0 else bits
    offset = shape.keys - shape.queries
    place = (start - offset, stop - offset)
    near = [_is_near(pattern, span, start, stop) for span in spans]
    if bits is None and all(near):
        return AttentionTile(*place, spans), share
    is_own = spans == ((start, stop),)
    is_within = pattern.behind is None or pattern.behind >= stop - start - 1
    if bits is None and pattern.ahead == 0 and is_own and is_within:
        return AttentionTile(*place, spans, is_square=True), share
    parts = tuple(
        (b - a, None if fits else a - start) for (a, b), fits in zip(spans, near, strict=True)
    )
    mask = Mask(stop - start, parts, pattern)
    if bits is not None and layout is not None:
        mask = replace(
            mask,
            bits=bits.numpy().tobytes(),
            first_token=start % layout.query_block,
            first_tokens=tuple(a % layout.block for a, _ in spans),
        )
    return AttentionTile(*place, spans, mask), share


def _blocks(
    rows: _Rows, layout: BlockLayout, queries: BlockSpan, keys: BlockSpan
) -> tuple[Tensor, tuple[BlockSpan, ...]]:
    """Return which blocks of its spans each row of a tile attends to, and the spans.

    A block that the rule by token excludes for a row counts as seen, because it needs no bit.
    """
    start, stop = queries
    first, last = keys
    ahead = rows.pattern.ahead
    row = start // layout.query_block
    end = ceil_div(stop, layout.query_block)
    block = first // layout.block
    beyond = ceil_div(last, layout.block)
    assert rows.seen is not None
    seen = rows.seen[row - rows.first : end - rows.first, block:beyond]
    # A run of seen blocks begins and ends where consecutive blocks differ
    zero = torch.zeros(1, device="cpu")
    steps = torch.diff(seen.any(0).to(torch.int8), prepend=zero, append=zero)
    edges = steps.nonzero().view(-1, 2)
    runs = [(a + block, b + block) for a, b in edges.tolist()]
    spans = tuple((max(a * layout.block, first), min(b * layout.block, last)) for a, b in runs)
    bits = torch.cat([seen[:, a - block : b - block] for a, b in runs], 1) if runs else seen[:, :0]
    if ahead is not None and runs:
        begins = torch.cat([torch.arange(a, b, device="cpu") for a, b in runs]) * layout.block
        ends = (
            torch.arange(row, end, device="cpu") * layout.query_block
            + layout.query_block
            - 1
            + ahead
        )
        bits = bits | (begins[None] > ends[:, None])
    return bits, spans


def _is_near(pattern: Pattern, span: BlockSpan, start: int, stop: int) -> bool:
    """Return whether all queries at [start, stop) are near enough to all keys."""
    is_past = pattern.ahead is None or span[1] - 1 <= start + pattern.ahead
    return is_past and (pattern.behind is None or span[0] >= stop - 1 - pattern.behind)


def whole_mask(pattern: Pattern, shape: AttentionShape) -> Tensor:
    """Return the mask of all pairs of a query and a key, for kernels that compute all scores.

    Args:
        pattern: The keys that each query attends to.
        shape: The numbers of heads, queries and keys.

    Returns:
        A bool tensor of shape ``(heads, queries, keys)``, True for visible keys.
    """
    offset = shape.keys - shape.queries
    away = (
        torch.arange(shape.keys, device="cpu")[None]
        - torch.arange(offset, shape.keys, device="cpu")[:, None]
    )
    seen = pattern.reaches(away).expand(shape.heads, -1, -1)
    layout = pattern.layout
    if layout is None:
        return seen
    rows = torch.arange(offset, shape.keys, device="cpu") // layout.query_block
    columns = torch.arange(shape.keys, device="cpu") // layout.block
    table = layout.table(shape.first_head + shape.heads, shape.keys)[shape.first_head :]
    return seen & table[:, rows][:, :, columns]
