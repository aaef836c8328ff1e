"""Layouts of block-sparse attention: the blocks of keys that each block of queries attends to.

A layout is evaluated for the rows that are needed: `rows(head, start, stop, blocks)` returns a bool
of shape (stop - start, blocks), so no table of all pairs is held. The six kinds, their arguments
and their blocks are DeepSpeed's, with two differences. A unidirectional layout never shows a block
of the future, and the kernel is causal by token inside the diagonal block. Random blocks are a
function of (`seed`, head, row), so every rank draws the same ones and no generator's state changes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from ..base.errors import ConfigError, shown
from ..base.quantities import ceil_div

Direction = Literal["unidirectional", "bidirectional"]
BlockSpan = tuple[int, int]  # Blocks [start, stop)


@dataclass(frozen=True)
class BlockLayout:
    """Base class of layouts, which define the blocks of keys that queries attend to.

    Queries and keys are divided into blocks of `block` tokens. A row of the layout is a block of
    queries, and a column is a block of keys.

    Attributes:
        block: Number of tokens of a block.
        different_layout_per_head: Whether heads may have different layouts.
        attention: "unidirectional" excludes keys that come after the query; "bidirectional" allows
            them.

    Raises:
        ConfigError: A value is out of range, or the arguments contradict each other.
    """

    block: int = 16
    different_layout_per_head: bool = False
    attention: Direction = "bidirectional"

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if isinstance(value, list):
                raise ConfigError(
                    f"{name} = {shown(value)} in a layout of blocks.",
                    "Layouts are keys of caches, and a list cannot be.",
                    f"pass a tuple, {name}={shown(tuple(value))}.",
                )
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
        """Raise ConfigError if the arguments contradict each other."""

    @property
    def is_causal(self) -> bool:
        """Return whether no query attends to a later token."""
        return self.attention == "unidirectional"

    @property
    def query_block(self) -> int:
        """Return the number of queries that one row of the layout describes."""
        return self.block

    def variant(self, head: int) -> int:
        """Return the number that identifies the layout of a head in calls to `rows`.

        Heads with the same number have the same layout.

        Args:
            head: The index of the head in the layer.
        """
        return 0

    def rows(self, head: int, start: int, stop: int, blocks: int) -> Tensor:
        """Return the blocks of keys that each row in a range attends to.

        A row is a block of queries.

        Args:
            head: The number that `variant` returned for a head.
            start: Index of the first row.
            stop: Index of the last row plus 1.
            blocks: Number of blocks of keys in the sequence.

        Returns:
            A bool tensor of shape ``(stop - start, blocks)``, True for visible blocks.
        """
        row = torch.arange(start, stop, device="cpu")[:, None]
        column = torch.arange(blocks, device="cpu")[None]
        seen = self._pairs(head, row, column, blocks)
        return seen & (column <= row) if self.is_causal else seen

    def _pairs(self, head: int, row: Tensor, column: Tensor, blocks: int) -> Tensor:
        raise NotImplementedError

    def table(self, heads: int, tokens: int) -> Tensor:
        """Return the layout of a whole sequence, for inspection.

        Args:
            heads: Number of heads.
            tokens: Length of the sequence, which determines the numbers of rows and blocks.

        Returns:
            A bool tensor of shape ``(heads, rows, blocks)``, True for visible blocks.
        """
        rows = ceil_div(tokens, self.query_block)
        blocks = ceil_div(tokens, self.block)
        return torch.stack(
            [self.rows(self.variant(head), 0, rows, blocks) for head in range(heads)]
        )


@dataclass(frozen=True)
class Dense(BlockLayout):
    """A layout in which every block of queries attends to every block of keys."""

    def _pairs(self, head: int, row: Tensor, column: Tensor, blocks: int) -> Tensor:
        return (row >= 0) & (column >= 0)


@dataclass(frozen=True)
class Fixed(BlockLayout):
    """A layout in which blocks see the others of their window, and global blocks of all windows.

    Attributes:
        num_local_blocks: Blocks per window.
        num_global_blocks: Global blocks at the end of each window. If the layout is unidirectional,
            only rows from their start on see them.
        horizontal_global_attention: Whether global blocks also see all blocks.
        num_different_global_patterns: Number of different choices of a window's global blocks,
            which heads use in turn.
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
        """Return a number that identifies which blocks of a window are global for a head.

        Args:
            head: The index of the head in the layer.
        """
        return head % self.num_different_global_patterns

    def _pairs(self, head: int, row: Tensor, column: Tensor, blocks: int) -> Tensor:
        local = self.num_local_blocks
        many = self.num_global_blocks
        whole = blocks - blocks % local
        first = local - (1 + head) * many
        starts = list(range(first, whole, local))
        if whole < blocks:  # A short last window
            starts.append(max(min(whole + first, blocks - many), 0))
        spans = [(start, start + many) for start in starts]
        near = row // local == column // local
        return near | _global(
            spans, row, column, blocks, self.is_causal, self.horizontal_global_attention
        )


@dataclass(frozen=True)
class _WithRandomBlocks(BlockLayout):
    """Base class of layouts with random blocks.

    Attributes:
        num_random_blocks: Random blocks per row.
    """

    num_random_blocks: int = 0

    def variant(self, head: int) -> int:
        """Return the head if its random blocks differ from other heads', else 0."""
        return head if self.different_layout_per_head and self.num_random_blocks else 0

    def _random(self, seed: int, head: int, row: Tensor, blocks: int) -> Tensor:
        """Return the random blocks of each row, or all blocks if there are fewer.

        If the layout is causal, they are chosen from the blocks up to the row itself.
        """
        many = self.num_random_blocks
        seen = torch.zeros(len(row), blocks, dtype=torch.bool, device="cpu")
        if many:
            for place, number in enumerate(row.flatten().tolist()):
                among = min(number + 1, blocks) if self.is_causal else blocks
                seen[place, _sample(seed, head, number, among, min(many, among))] = True
        return seen


@dataclass(frozen=True)
class Variable(_WithRandomBlocks):
    """A layout of windows of given sizes, global blocks at given positions, and random blocks.

    Attributes:
        num_random_blocks: Random blocks per row.
        local_window_blocks: The sizes of the windows in order; the last one repeats.
        global_block_indices: The first block of each span of global blocks, which all rows see.
        global_block_end_indices: The block after the last one of each span of global blocks; None
            for spans of one block.
        horizontal_global_attention: Whether global blocks also see all blocks.
        seed: The seed of the random blocks.
    """

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

    def _pairs(self, head: int, row: Tensor, column: Tensor, blocks: int) -> Tensor:
        ends = list[int]()
        while not ends or ends[-1] < blocks:
            size = self.local_window_blocks[min(len(ends), len(self.local_window_blocks) - 1)]
            ends.append((ends[-1] if ends else 0) + size)
        window = torch.bucketize(
            torch.arange(max(blocks, int(row.max()) + 1), device="cpu"),
            torch.tensor(ends, device="cpu"),
            right=True,
        )
        near = window[row] == window[column]
        spans = _spans(self.global_block_indices, self.global_block_end_indices)
        seen = near | _global(
            spans, row, column, blocks, self.is_causal, self.horizontal_global_attention
        )
        return seen | self._random(self.seed, head, row, blocks)


@dataclass(frozen=True)
class BigBird(_WithRandomBlocks):
    """A layout of a sliding window, leading global blocks, and random blocks.

    Global blocks see all blocks and are seen by all.

    Attributes:
        num_random_blocks: Random blocks per row.
        num_sliding_window_blocks: Width of the window in blocks.
        num_global_blocks: Number of global blocks.
        seed: The seed of the random blocks.
    """

    num_random_blocks: int = 1
    num_sliding_window_blocks: int = 3
    num_global_blocks: int = 1
    seed: int = 0

    def _pairs(self, head: int, row: Tensor, column: Tensor, blocks: int) -> Tensor:
        near = (row - column).abs() <= self.num_sliding_window_blocks // 2
        seen = near | (row < self.num_global_blocks) | (column < self.num_global_blocks)
        return seen | self._random(self.seed, head, row, blocks)


@dataclass(frozen=True)
class BSLongformer(BlockLayout):
    """A layout of a sliding window, and global blocks at given positions.

    Global blocks see all blocks and are seen by all.

    Attributes:
        num_sliding_window_blocks: Width of the window in blocks.
        global_block_indices: The first block of each span of global blocks.
        global_block_end_indices: The block after the last one of each span of global blocks; None
            for spans of one block.
    """

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
    """A layout in which a block attends to those at most ``num_sliding_window_blocks // 2`` away.

    Attributes:
        num_sliding_window_blocks: Width of the window in blocks.
    """

    attention: Direction = "unidirectional"
    num_sliding_window_blocks: int = 3

    def _pairs(self, head: int, row: Tensor, column: Tensor, blocks: int) -> Tensor:
        return (row - column).abs() <= self.num_sliding_window_blocks // 2


@dataclass(frozen=True, eq=False)
class Listed(BlockLayout):
    """A layout that is given as a table. Instances compare by identity.

    Attributes:
        seen: A bool of shape ``(tables, rows, blocks)``, with one table per group of heads, or one
            for all.
        sharing: Number of consecutive heads that share a table.
        tokens_of_row: Number of queries of a row; None for the tokens of a block.
    """

    seen: Tensor = field(
        default_factory=lambda: torch.ones(1, 1, 1, dtype=torch.bool, device="cpu")
    )
    sharing: int = 1
    tokens_of_row: int | None = None

    @property
    def query_block(self) -> int:
        """Return the number of queries that one row of the table describes."""
        return self.tokens_of_row or self.block

    def variant(self, head: int) -> int:
        """Return the index of the table that a head uses.

        Args:
            head: The index of the head in the layer.
        """
        return head // self.sharing if len(self.seen) > 1 else 0

    def rows(self, head: int, start: int, stop: int, blocks: int) -> Tensor:
        """Return which blocks of keys some rows see, from the table.

        Args:
            head: The number of the table, as `variant` returned it for a head.
            start: The first row.
            stop: The row after the last one.
            blocks: Number of blocks of keys in the sequence.

        Returns:
            A bool tensor of shape ``(stop - start, blocks)``, True for visible blocks.

        Raises:
            ConfigError: The table is for a shorter sequence.
        """
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
    """Return the names of the arguments that one of DeepSpeed's sparsity modes accepts.

    The arguments are the fields of the layout class `MODES[mode]`.

    Raises:
        KeyError: The mode is unknown.
    """
    return {each.name for each in fields(MODES[mode])}


def layout_of(mode: str, arguments: Mapping[str, Any]) -> BlockLayout:
    """Create the layout of one of DeepSpeed's sparsity modes.

    Args:
        mode: The name of the mode, for example "fixed" or "bigbird"; a key of `MODES`.
        arguments: Arguments of the mode by DeepSpeed's names; lists are allowed for tuples. A
            missing argument has the default of the layout class.

    Returns:
        A `BlockLayout`, for example for `SparseAttention`.

    Raises:
        ConfigError: The mode is unknown, does not have one of the arguments, or does not allow the
            value of an argument.
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
    """Return the spans of global blocks; raise ConfigError if they are invalid."""
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
    """Return the pairs whose key block is in a span.

    With `from_there`, only rows from the start of the span see it. With `horizontal`, rows in a
    span also see everything.
    """
    places = max(blocks, int(row.max()) + 1)
    beyond = places  # Start of a block without a span: greater than every row
    begin = torch.full((places,), beyond, device="cpu")
    for start, stop in spans:
        begin[start:stop] = begin[start:stop].clamp(max=start)
    seen = row >= begin[column] if from_there else begin[column] < beyond
    return seen | (begin[row] < beyond) if horizontal else seen.expand(len(row), blocks)


def _sample(seed: int, head: int, row: int, among: int, many: int) -> list[int]:
    """Return `many` distinct numbers below `among`, by Floyd's algorithm."""
    found = set[int]()
    for last in range(among - many, among):
        drawn = _mixed(seed, head, row, last) % (last + 1)
        block = last if drawn in found else drawn
        found.add(block)
    return sorted(found)


_WORD = (1 << 64) - 1


def _mixed(*words: int) -> int:
    """Return 64 bits that depend on every number, by splitmix64."""
    state = 0
    for word in words:
        state = (state + word + 0x9E3779B97F4A7C15) & _WORD
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _WORD
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _WORD
        state ^= state >> 31
    return state
