"""Layouts: which block of keys each block of queries sees. Pure, and without a table of all pairs.

A layout is asked for the rows it is needed for, `rows(head, start, stop, blocks)`: a bool of (stop
- start, blocks). The six kinds, their arguments and their blocks are DeepSpeed's, with two
differences. A layout that is unidirectional never shows a block of the future, and the kernel is
causal by token inside the diagonal block. Random blocks come from a counter (`seed`, head, row), so
that every rank draws the same ones and no generator moves.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from ..base.errors import ConfigError, shown

Direction = Literal["unidirectional", "bidirectional"]
BlockSpan = tuple[int, int]  # blocks [start, stop)


@dataclass(frozen=True)
class BlockLayout:
    """What every kind has.  block: tokens of a side of a block.  different_layout_per_head: heads
    may differ.
    """

    block: int = 16
    different_layout_per_head: bool = False
    attention: Direction = "bidirectional"

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if type(value) is int and value < (0 if name in ("num_random_blocks", "seed") else 1):
                raise ConfigError(
                    f"{name} = {value} in a layout of blocks.", "", "state a positive number."
                )
        if self.attention not in get_args(Direction):
            words = " or ".join(get_args(Direction))
            raise ConfigError(
                f"attention = {shown(self.attention)} in a layout of blocks.", "", f"state {words}."
            )
        self._check()

    def _check(self) -> None:
        """Raise ConfigError where the arguments contradict each other."""

    @property
    def is_causal(self) -> bool:
        """Whether no query sees a later token."""
        return self.attention == "unidirectional"

    @property
    def query_block(self) -> int:
        """Tokens of a row."""
        return self.block

    def variant(self, head: int) -> int:
        """Return a number that is the same for heads with the same layout: what `rows` takes as a
        head.
        """
        return 0

    def rows(self, head: int, start: int, stop: int, blocks: int) -> Tensor:
        """Return which of `blocks` blocks of keys the rows [start, stop) see, a bool of (stop -
        start, blocks).

        head: a `variant`.
        """
        row = torch.arange(start, stop)[:, None]
        column = torch.arange(blocks)[None]
        seen = self._pairs(head, row, column, blocks)
        return seen & (column <= row) if self.is_causal else seen

    def _pairs(self, head: int, row: Tensor, column: Tensor, blocks: int) -> Tensor:
        raise NotImplementedError

    def table(self, heads: int, tokens: int) -> Tensor:
        """Return the layout of a whole sequence, a bool of (heads, rows, blocks): for looking at,
        not for computing.
        """
        rows = -(-tokens // self.query_block)
        blocks = -(-tokens // self.block)
        return torch.stack(
            [self.rows(self.variant(head), 0, rows, blocks) for head in range(heads)]
        )


@dataclass(frozen=True)
class Dense(BlockLayout):
    """Every block sees every block."""

    def _pairs(self, head: int, row: Tensor, column: Tensor, blocks: int) -> Tensor:
        return (row >= 0) & (column >= 0)


@dataclass(frozen=True)
class Fixed(BlockLayout):
    """Windows side by side, and in each of them some blocks that are seen by all.

    num_local_blocks: of a window.  num_global_blocks: at the end of a window, seen from everywhere
    (unidirectional: from there on).  horizontal_global_attention: these blocks see everything too.
    num_different_global_patterns: heads take turns in which blocks of a window are the global ones.
    """

    num_local_blocks: int = 4
    num_global_blocks: int = 1
    horizontal_global_attention: bool = False
    num_different_global_patterns: int = 1

    def _check(self) -> None:
        local = self.num_local_blocks
        many = self.num_global_blocks
        patterns = self.num_different_global_patterns
        if local % many:
            raise ConfigError(
                f"num_local_blocks = {local} and num_global_blocks = {many}.",
                "Windows are cut into groups of global blocks.",
                "choose a num_global_blocks that divides num_local_blocks.",
            )
        _refuse_horizontal(self.horizontal_global_attention, self.attention)
        if patterns > 1 and not self.different_layout_per_head:
            raise ConfigError(
                f"num_different_global_patterns = {patterns} with one layout for all heads.",
                "Heads take turns in the patterns.",
                "set different_layout_per_head, or leave it at 1.",
            )
        if patterns > local // many:
            raise ConfigError(
                f"num_different_global_patterns = {patterns}.",
                f"A window of {local} blocks has {local // many} groups of {many} global blocks.",
                f"choose at most {local // many}.",
            )

    def variant(self, head: int) -> int:
        return head % self.num_different_global_patterns

    def _pairs(self, head: int, row: Tensor, column: Tensor, blocks: int) -> Tensor:
        local = self.num_local_blocks
        many = self.num_global_blocks
        whole = blocks - blocks % local
        first = local - (1 + head) * many
        starts = list(range(first, whole, local))
        if whole < blocks:  # a short last window
            starts.append(max(min(whole + first, blocks - many), 0))
        spans = [(start, start + many) for start in starts]
        near = row // local == column // local
        return near | _global(
            spans, row, column, blocks, self.is_causal, self.horizontal_global_attention
        )


@dataclass(frozen=True)
class Variable(BlockLayout):
    """Windows of stated sizes, blocks at stated places that are seen by all, and random blocks.

    local_window_blocks: sizes one after another; the last one repeats.  global_block_indices: first
    blocks of what is seen by all; global_block_end_indices: behind their last ones (None: one block
    each).
    """

    num_random_blocks: int = 0
    local_window_blocks: tuple[int, ...] = (4,)
    global_block_indices: tuple[int, ...] = (0,)
    global_block_end_indices: tuple[int, ...] | None = None
    horizontal_global_attention: bool = False
    seed: int = 0

    def _check(self) -> None:
        if not self.local_window_blocks or min(self.local_window_blocks) < 1:
            raise ConfigError(
                f"local_window_blocks = {shown(self.local_window_blocks)}.",
                "",
                "list one positive size or more.",
            )
        _refuse_horizontal(self.horizontal_global_attention, self.attention)
        _spans(self.global_block_indices, self.global_block_end_indices)

    def variant(self, head: int) -> int:
        return head if self.different_layout_per_head and self.num_random_blocks else 0

    def _pairs(self, head: int, row: Tensor, column: Tensor, blocks: int) -> Tensor:
        ends = list[int]()
        while not ends or ends[-1] < blocks:
            size = self.local_window_blocks[min(len(ends), len(self.local_window_blocks) - 1)]
            ends.append((ends[-1] if ends else 0) + size)
        window = torch.bucketize(
            torch.arange(max(blocks, int(row.max()) + 1)), torch.tensor(ends), right=True
        )
        near = window[row] == window[column]
        spans = _spans(self.global_block_indices, self.global_block_end_indices)
        seen = near | _global(
            spans, row, column, blocks, self.is_causal, self.horizontal_global_attention
        )
        return seen | _random(self.seed, head, row, blocks, self.num_random_blocks, self.is_causal)


@dataclass(frozen=True)
class BigBird(BlockLayout):
    """A sliding window, first blocks that see and are seen by all, and random blocks."""

    num_random_blocks: int = 1
    num_sliding_window_blocks: int = 3
    num_global_blocks: int = 1
    seed: int = 0

    def variant(self, head: int) -> int:
        return head if self.different_layout_per_head and self.num_random_blocks else 0

    def _pairs(self, head: int, row: Tensor, column: Tensor, blocks: int) -> Tensor:
        near = (row - column).abs() <= self.num_sliding_window_blocks // 2
        seen = near | (row < self.num_global_blocks) | (column < self.num_global_blocks)
        return seen | _random(self.seed, head, row, blocks, self.num_random_blocks, self.is_causal)


@dataclass(frozen=True)
class BSLongformer(BlockLayout):
    """A sliding window, and blocks at stated places that see and are seen by all."""

    num_sliding_window_blocks: int = 3
    global_block_indices: tuple[int, ...] = (0,)
    global_block_end_indices: tuple[int, ...] | None = None

    def _check(self) -> None:
        _spans(self.global_block_indices, self.global_block_end_indices)

    def _pairs(self, head: int, row: Tensor, column: Tensor, blocks: int) -> Tensor:
        near = (row - column).abs() <= self.num_sliding_window_blocks // 2
        spans = _spans(self.global_block_indices, self.global_block_end_indices)
        return near | _global(spans, row, column, blocks, False, True)


@dataclass(frozen=True)
class LocalSlidingWindow(BlockLayout):
    """A sliding window: blocks at most num_sliding_window_blocks // 2 away."""

    attention: Direction = "unidirectional"
    num_sliding_window_blocks: int = 3

    def _pairs(self, head: int, row: Tensor, column: Tensor, blocks: int) -> Tensor:
        return (row - column).abs() <= self.num_sliding_window_blocks // 2


@dataclass(frozen=True, eq=False)
class Listed(BlockLayout):
    """A layout that somebody made, as a table; equal to itself alone.

    seen: a bool of (tables, rows, blocks): of heads one after another, or one for all.  sharing:
    heads that have one
    table together.  tokens_of_row: None: as many as of a block.
    """

    seen: Tensor = field(default_factory=lambda: torch.ones(1, 1, 1, dtype=torch.bool))
    sharing: int = 1
    tokens_of_row: int | None = None

    @property
    def query_block(self) -> int:
        return self.tokens_of_row or self.block

    def variant(self, head: int) -> int:
        return head // self.sharing if len(self.seen) > 1 else 0

    def rows(self, head: int, start: int, stop: int, blocks: int) -> Tensor:
        if stop > self.seen.shape[1] or blocks > self.seen.shape[2]:
            raise ConfigError(
                f"a layout of {self.seen.shape[1]} rows and {self.seen.shape[2]} blocks, for "
                f"{stop} rows and {blocks}.",
                "It was made for a shorter sequence.",
                "make one for this length.",
            )
        return self.seen[head, start:stop, :blocks]


MODES: Mapping[str, type[BlockLayout]] = {
    "dense": Dense,
    "fixed": Fixed,
    "variable": Variable,
    "bigbird": BigBird,
    "bslongformer": BSLongformer,
    "localslidingwindow": LocalSlidingWindow,
}


def fields_of(mode: str) -> set[str]:
    """Return the names of the arguments of one of DeepSpeed's modes."""
    return {each.name for each in fields(MODES[mode])}


def layout_of(mode: str, arguments: Mapping[str, Any]) -> BlockLayout:
    """Return the layout of one of DeepSpeed's modes; arguments that are not this mode's must not be
    there.

    arguments: by DeepSpeed's names, lists as lists.  ConfigError for a mode or an argument that
    there is not.
    """
    if mode not in MODES:
        raise ConfigError(
            f"sparse_attention.mode = {shown(mode)}.", "", f"choose one of {', '.join(MODES)}."
        )
    kind: Any = MODES[mode]
    known = fields_of(mode)
    if unknown := sorted({*arguments} - known):
        raise ConfigError(
            f"sparse_attention: {', '.join(unknown)} beside mode {shown(mode)}, which has no such "
            "argument.",
            "It would be without effect.",
            f"leave it out; this mode has {', '.join(sorted(known))}.",
        )
    made: BlockLayout = kind(
        **{
            name: tuple(each) if isinstance(each, list) else each
            for name, each in arguments.items()
        }
    )
    return made


def _refuse_horizontal(horizontal: bool, attention: Direction) -> None:
    if horizontal and attention == "unidirectional":
        raise ConfigError(
            "horizontal_global_attention with attention = 'unidirectional'.",
            "Global blocks would see the future.",
            "take bidirectional attention, or leave it out.",
        )


def _spans(starts: Iterable[int], stops: Iterable[int] | None) -> list[BlockSpan]:
    """Return the spans of global blocks; ConfigError where they are none."""
    first = list(starts)
    last = [start + 1 for start in first] if stops is None else list(stops)
    if len(first) != len(last) or any(
        not 0 <= start < stop for start, stop in zip(first, last, strict=False)
    ):
        raise ConfigError(
            f"global_block_indices = {shown(first)}, global_block_end_indices = {shown(stops)}.",
            "Each start has an end behind it.",
            "list as many ends as starts, each greater than its start.",
        )
    return list(zip(first, last, strict=True))


def _global(
    spans: Iterable[BlockSpan],
    row: Tensor,
    column: Tensor,
    blocks: int,
    from_there: bool,
    horizontal: bool,
) -> Tensor:
    """Return the pairs of spans that are seen by all rows (from_there: by rows from the span's
    start on).

    horizontal: and see everything.
    """
    places = max(blocks, int(row.max()) + 1)
    beyond = places  # where a block of no span begins: no row is so far
    begin = torch.full((places,), beyond)
    for start, stop in spans:
        begin[start:stop] = begin[start:stop].clamp(max=start)
    seen = row >= begin[column] if from_there else begin[column] < beyond
    return seen | (begin[row] < beyond) if horizontal else seen.expand(len(row), blocks)


def _random(seed: int, head: int, row: Tensor, blocks: int, many: int, causal: bool) -> Tensor:
    """Return `many` random blocks for each row, of those up to itself where causal; all where there
    are fewer.
    """
    seen = torch.zeros(len(row), blocks, dtype=torch.bool)
    if many:
        for place, number in enumerate(row.flatten().tolist()):
            among = min(number + 1, blocks) if causal else blocks
            seen[place, _sample(seed, head, number, among, min(many, among))] = True
    return seen


def _sample(seed: int, head: int, row: int, among: int, many: int) -> list[int]:
    """Return distinct numbers below `among`, by Floyd's algorithm."""
    found = set[int]()
    for last in range(among - many, among):
        drawn = _mixed(seed, head, row, last) % (last + 1)
        block = last if drawn in found else drawn
        found.add(block)
    return sorted(found)


_WORD = (1 << 64) - 1


def _mixed(*words: int) -> int:
    """Return 64 bits that depend on every word: splitmix64, once per word."""
    state = 0
    for word in words:
        state = (state + word + 0x9E3779B97F4A7C15) & _WORD
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _WORD
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _WORD
        state ^= state >> 31
    return state
