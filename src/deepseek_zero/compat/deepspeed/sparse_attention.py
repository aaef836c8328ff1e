"""DeepSpeed's `deepspeed.ops.sparse_attention`: configurations and modules.

They are based on `deepseek_zero.attention`: a configuration creates a layout, and a module calls
the kernel. Sequences may have any length, device and dtype. A layout is created for the length of
each sequence, not cut out of the layout of the longest one. "unidirectional" is causal for each
token.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from ...attention.hugging_face import attend_sparsely, is_of_transformers, switch
from ...attention.layer import SparseAttention
from ...attention.layouts import (
    BigBird,
    BlockLayout,
    BSLongformer,
    Dense,
    Direction,
    Fixed,
    Listed,
    LocalSlidingWindow,
    Variable,
)
from ...base.errors import ConfigError, NotBuiltError, UsageError, shown

Module = TypeVar("Module", bound=nn.Module)


@dataclass(eq=False)
class SparsityConfig:
    """Base class of the configurations. Custom ones override `make_layout`.

    Args:
        num_heads: Number of attention heads, each of which may have its own layout.
        block: Block size in tokens.
        different_layout_per_head: Whether heads have different layouts.

    Raises:
        ConfigError: A value is invalid.
    """

    KIND: ClassVar[type[BlockLayout] | None] = None

    num_heads: int
    block: int = 16
    different_layout_per_head: bool = False

    def __post_init__(self) -> None:
        self.num_layout_heads = self.num_heads if self.different_layout_per_head else 1
        if self.KIND is not None:
            self.layout_for(self.block)  # raises if a value is invalid

    def setup_layout(self, seq_len: int) -> Tensor:
        """Return an empty layout of shape ``(heads, blocks, blocks)``.

        The last block may be shorter than the others.
        """
        blocks = math.ceil(seq_len / self.block)
        return torch.zeros(self.num_heads, blocks, blocks, dtype=torch.int64, device="cpu")

    def check_and_propagate_first_head_layout(self, layout: Tensor) -> Tensor:
        """Copy the first head's layout to all heads in place, and return the layout.

        If heads have different layouts, it is returned unchanged.
        """
        if not self.different_layout_per_head:
            layout[1:] = layout[:1]
        return layout

    def make_layout(self, seq_len: int) -> Tensor:
        """Return the layout of a sequence, with 0 or 1 for each pair of blocks.

        Returns:
            An integer tensor of shape ``(heads, blocks, blocks)``.

        Raises:
            NotBuiltError: The class is the base class.
        """
        if self.KIND is None:
            raise NotBuiltError(
                f"{type(self).__name__} makes no layout.",
                "It is the base class of the layouts.",
                "use a subclass, such as FixedSparsityConfig, or override make_layout.",
            )
        return self.layout_for(seq_len).table(self.num_heads, seq_len).to(torch.int64)

    def layout_for(self, seq_len: int) -> BlockLayout:
        """Return the layout as an object, from the current values of the attributes."""
        kind: Any = self.KIND
        if kind is None or type(self).make_layout is not SparsityConfig.make_layout:
            seen = self.make_layout(seq_len).bool()
            return Listed(
                self.block, attention=getattr(self, "attention", "bidirectional"), seen=seen
            )
        values: dict[str, Any] = {}
        for name in kind.__dataclass_fields__:
            if hasattr(self, name):
                value = getattr(self, name)
                values[name] = tuple(value) if isinstance(value, list) else value
        made: BlockLayout = kind(**values)
        return made


class DenseSparsityConfig(SparsityConfig):
    """A layout in which every block attends to every block."""

    KIND = Dense


@dataclass(eq=False)
class FixedSparsityConfig(SparsityConfig):
    """Local windows with global blocks; see `deepseek_zero.attention.layouts.Fixed`.

    Args:
        num_heads: Number of attention heads, each of which may have its own layout.
        block: Block size in tokens.
        different_layout_per_head: Whether heads have different layouts.
        num_local_blocks: Blocks per window.
        num_global_blocks: Global blocks per window.
        attention: "bidirectional" or "unidirectional".
        horizontal_global_attention: Whether global blocks attend to all blocks.
        num_different_global_patterns: Number of patterns of global blocks over the heads.
    """

    KIND = Fixed

    num_local_blocks: int = 4
    num_global_blocks: int = 1
    attention: Direction = "bidirectional"
    horizontal_global_attention: bool = False
    num_different_global_patterns: int = 1


@dataclass(eq=False)
class VariableSparsityConfig(SparsityConfig):
    """Windows of given sizes with global and random blocks.

    See `deepseek_zero.attention.layouts.Variable`.

    Args:
        num_heads: Number of attention heads, each of which may have its own layout.
        block: Block size in tokens.
        different_layout_per_head: Whether heads have different layouts.
        num_random_blocks: Random blocks per row of blocks.
        local_window_blocks: Blocks of each window.
        global_block_indices: Global blocks, or the starts of ranges of them.
        global_block_end_indices: Ends of the ranges; None for single blocks.
        attention: "bidirectional" or "unidirectional".
        horizontal_global_attention: Whether global blocks attend to all blocks.
    """

    KIND = Variable

    num_random_blocks: int = 0
    local_window_blocks: Sequence[int] = (4,)
    global_block_indices: Sequence[int] = (0,)
    global_block_end_indices: Sequence[int] | None = None
    attention: Direction = "bidirectional"
    horizontal_global_attention: bool = False


@dataclass(eq=False)
class BigBirdSparsityConfig(SparsityConfig):
    """A sliding window with global blocks at the start and random blocks.

    See `deepseek_zero.attention.layouts.BigBird`.

    Args:
        num_heads: Number of attention heads, each of which may have its own layout.
        block: Block size in tokens.
        different_layout_per_head: Whether heads have different layouts.
        num_random_blocks: Random blocks per row of blocks.
        num_sliding_window_blocks: Width of the window in blocks.
        num_global_blocks: Number of global blocks.
        attention: "bidirectional" or "unidirectional".
    """

    KIND = BigBird

    num_random_blocks: int = 1
    num_sliding_window_blocks: int = 3
    num_global_blocks: int = 1
    attention: Direction = "bidirectional"


@dataclass(eq=False)
class BSLongformerSparsityConfig(SparsityConfig):
    """A sliding window with global blocks.

    See `deepseek_zero.attention.layouts.BSLongformer`.

    Args:
        num_heads: Number of attention heads, each of which may have its own layout.
        block: Block size in tokens.
        different_layout_per_head: Whether heads have different layouts.
        num_sliding_window_blocks: Width of the window in blocks.
        global_block_indices: Global blocks, or the starts of ranges of them.
        global_block_end_indices: Ends of the ranges; None for single blocks.
        attention: "bidirectional" or "unidirectional".
    """

    KIND = BSLongformer

    num_sliding_window_blocks: int = 3
    global_block_indices: Sequence[int] = (0,)
    global_block_end_indices: Sequence[int] | None = None
    attention: Direction = "bidirectional"


@dataclass(eq=False)
class LocalSlidingWindowSparsityConfig(SparsityConfig):
    """A sliding window; see `deepseek_zero.attention.layouts.LocalSlidingWindow`.

    Args:
        num_heads: Number of attention heads, each of which may have its own layout.
        block: Block size in tokens.
        num_sliding_window_blocks: Width of the window in blocks.
        attention: "bidirectional" or "unidirectional".
    """

    KIND = LocalSlidingWindow

    different_layout_per_head: bool = field(default=False, init=False)
    num_sliding_window_blocks: int = 3
    attention: Direction = "unidirectional"


_MODES = ("add", "mul")


class SparseSelfAttention(nn.Module):
    """Attention with a sparse layout and DeepSpeed's masks.

    A mask with the mode "add" is added to the scores. With "mul", positions where it is 0 are
    hidden.

    Args:
        sparsity_config: Layout of blocks to attend to; None for a fixed layout.
        key_padding_mask_mode: Mode of the padding mask.
        attn_mask_mode: Mode of the attention mask.
        max_seq_length: Ignored; a layout is created for the length of each sequence.

    Raises:
        ConfigError: A mode is unknown.
    """

    def __init__(
        self,
        sparsity_config: SparsityConfig | None = None,
        key_padding_mask_mode: str = "add",
        attn_mask_mode: str = "mul",
        max_seq_length: int = 2048,
    ) -> None:
        super().__init__()
        for name, mode in (
            ("key_padding_mask_mode", key_padding_mask_mode),
            ("attn_mask_mode", attn_mask_mode),
        ):
            if mode not in _MODES:
                raise ConfigError(
                    f"{name} = {shown(mode)}.", "", f"choose one of {', '.join(_MODES)}."
                )
        self.sparsity_config = sparsity_config or FixedSparsityConfig(4)
        self.key_padding_mask_mode = key_padding_mask_mode
        self.attn_mask_mode = attn_mask_mode
        self._known: dict[int, BlockLayout] = {}

    def get_layout(self, seq_len: int) -> Tensor:
        """Return the layout of a sequence, with 0 or 1 for each pair of blocks.

        The shape is ``(heads, blocks, blocks)``.
        """
        return self.sparsity_config.make_layout(seq_len)

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        rpe: Tensor | None = None,
        key_padding_mask: Tensor | None = None,
        attn_mask: Tensor | None = None,
    ) -> Tensor:
        """Return the attention output of shape ``(samples, heads, tokens, width)``.

        Args:
            query: Shape ``(samples, heads, tokens, width)``.
            key: As `query`; the last two dimensions may be swapped.
            value: As `query`.
            rpe: Relative position bias, which is added to the scores. Shape ``(tokens, tokens)``,
                optionally with dimensions for heads and samples. It may require a gradient.
            key_padding_mask: Shape ``(samples, tokens)``.
            attn_mask: Shape ``(tokens, tokens)``.

        Returns:
            The weighted sum of the values for each query.
        """
        tokens = query.shape[2]
        if key.shape != query.shape and key.mT.shape == query.shape:
            key = key.mT.contiguous()
        biases = list[Tensor]()
        if rpe is not None:
            biases.append(rpe.reshape((1,) * (4 - rpe.dim()) + rpe.shape))
        for mask, mode, shape in (
            (key_padding_mask, self.key_padding_mask_mode, (-1, 1, 1, tokens)),
            (attn_mask, self.attn_mask_mode, (1, 1, tokens, tokens)),
        ):
            if mask is not None:
                biases.append(mask.reshape(shape) if mode == "add" else mask.reshape(shape) != 0)
        return SparseAttention(self._layout(tokens))(query, key, value, biases=biases)

    def _layout(self, tokens: int) -> BlockLayout:
        layout = self._known.get(tokens) or self.sparsity_config.layout_for(tokens)
        # A Listed layout is only equal to itself, and the plan of a layout is found by equality.
        if isinstance(layout, Listed):
            self._known[tokens] = layout
        return layout


class BertSparseSelfAttention(nn.Module):
    """BERT's self-attention with a sparse layout.

    Args:
        config: Configuration of a BERT model.
        sparsity_config: Layout of blocks to attend to; None for a fixed layout.

    Raises:
        UsageError: The hidden size is not a multiple of the number of heads.
    """

    def __init__(self, config: Any, sparsity_config: SparsityConfig | None = None) -> None:
        super().__init__()
        if config.hidden_size % config.num_attention_heads:
            raise UsageError(
                f"hidden size {config.hidden_size} over {config.num_attention_heads} attention "
                "heads.",
                "Heads have equal widths.",
                "choose a number of heads that divides it.",
            )
        self.num_attention_heads = config.num_attention_heads
        self.attention_head_size = config.hidden_size // config.num_attention_heads
        self.all_head_size = config.hidden_size
        self.query, self.key, self.value = (
            nn.Linear(config.hidden_size, self.all_head_size) for _ in range(3)
        )
        self.sparse_self_attention = SparseSelfAttention(sparsity_config)

    def transpose_for_scores(self, x: Tensor) -> Tensor:
        """Return hidden states in the shape ``(samples, heads, tokens, head width)``."""
        heads: Tensor = x.unflatten(-1, (self.num_attention_heads, self.attention_head_size))
        return heads.transpose(1, 2)

    def forward(self, hidden_states: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        """Apply the attention.

        Args:
            hidden_states: Shape ``(samples, tokens, hidden size)``.
            attention_mask: Padding mask with one number for each token, which is added to the
                scores.

        Returns:
            Hidden states of the same shape.
        """
        query, key, value = (
            self.transpose_for_scores(layer(hidden_states))
            for layer in (self.query, self.key, self.value)
        )
        found: Tensor = self.sparse_self_attention(
            query, key, value, key_padding_mask=attention_mask
        )
        return found.transpose(1, 2).flatten(2)


class SparseAttentionUtils:
    """DeepSpeed's functions for extending a trained model to longer sequences."""

    @staticmethod
    def extend_position_embedding(model: Module, max_position: int) -> Module:
        """Extend the position embeddings of BERT or RoBERTa by repeating their rows.

        The model's position buffers and configuration are changed as well. RoBERTa keeps its
        reserved rows in addition.

        Args:
            model: Model whose embeddings are changed in place.
            max_position: New number of positions.

        Returns:
            `model` itself.

        Raises:
            NotBuiltError: The model has no such embeddings.
            UsageError: The model already has as many positions.
        """
        own: Any = getattr(model, "bert", None) or getattr(model, "roberta", None) or model
        embeddings: Any = getattr(own, "embeddings", None)
        table = getattr(embeddings, "position_embeddings", None)
        if not isinstance(table, nn.Embedding):
            raise NotBuiltError(
                f"{type(model).__name__} has no table of positions where BERT and RoBERTa have "
                "one.",
                "Models with rotary positions need none.",
                "set their max_position_embeddings instead.",
            )
        reserved = 0 if table.padding_idx is None else table.padding_idx + 1
        rows = table.weight.detach()
        known = len(rows) - reserved
        if max_position <= known:
            raise UsageError(
                f"{max_position} positions, and the table has {known}.", "", "ask for more."
            )
        places = torch.arange(max_position, device=rows.device) % known + reserved
        extended = nn.Parameter(
            torch.cat((rows[:reserved], rows[places])), requires_grad=table.weight.requires_grad
        )
        table.weight = extended
        table.num_embeddings = len(extended)
        for name, buffer in list(embeddings.named_buffers(recurse=False)):
            if name == "position_ids":
                embeddings.position_ids = torch.arange(
                    len(extended), device=buffer.device, dtype=buffer.dtype
                )[None]
            elif name == "token_type_ids":
                embeddings.token_type_ids = buffer.new_zeros(1, len(extended))
        if getattr(model, "config", None) is not None:
            config: Any = model.config
            config.max_position_embeddings = len(extended)
        return model

    @staticmethod
    def update_tokenizer_model_max_length(tokenizer: Any, max_position: int) -> Any:
        """Set a tokenizer's maximum length and return the tokenizer.

        Args:
            tokenizer: Tokenizer of transformers.
            max_position: New maximum length in tokens.

        Returns:
            `tokenizer` itself.
        """
        tokenizer.model_max_length = max_position
        tokenizer.init_kwargs["model_max_length"] = max_position
        return tokenizer

    @staticmethod
    def replace_model_self_attention_with_sparse_self_attention(
        model: Module, max_position: int, sparsity_config: SparsityConfig | None = None
    ) -> Module:
        """Make a model of transformers use sparse attention, in place, and return it.

        Its modules and their names do not change.

        Args:
            model: Model to change in place.
            max_position: Number of tokens of the longest sequence.
            sparsity_config: Layout of blocks to attend to; None for a fixed layout.

        Returns:
            `model` itself.

        Raises:
            NotBuiltError: The model is not from transformers.
        """
        if not is_of_transformers(model):
            raise NotBuiltError(
                f"{type(model).__name__} is no model of transformers.",
                "Its attention is looked up there by name.",
                "call SparseSelfAttention in the model's own attention.",
            )
        attend_sparsely(
            model,
            SparseAttention((sparsity_config or FixedSparsityConfig(4)).layout_for(max_position)),
        )
        return model

    @staticmethod
    def replace_self_attention_layer_with_sparse_self_attention_layer(
        config: Any, layers: Iterable[nn.Module], sparsity_config: SparsityConfig | None = None
    ) -> Iterable[nn.Module]:
        """Make the layers of a transformers model use sparse attention, and return them.

        The layers must be all attention layers of the model, because its masks apply to all.

        Args:
            config: Configuration of the model.
            layers: The layers, which are changed in place.
            sparsity_config: Layout of blocks to attend to; None for a fixed layout.

        Returns:
            `layers` itself.
        """
        layout = (sparsity_config or FixedSparsityConfig(4)).layout_for(
            config.max_position_embeddings
        )
        switch(layers, config, SparseAttention(layout))
        return layers

    @staticmethod
    def pad_to_block_size(
        block_size: int,
        input_ids: Tensor | None,
        attention_mask: Tensor | None,
        token_type_ids: Tensor | None,
        position_ids: Tensor | None,
        inputs_embeds: Tensor | None,
        pad_token_id: int,
        model_embeddings: Any,
    ) -> tuple[int, Tensor | None, Tensor | None, Tensor | None, Tensor | None, Tensor | None]:
        """Pad inputs on the right to a multiple of the block size.

        The attention mask hides the padding. The kernel does not need padding. It is for programs
        that expect full blocks.

        Args:
            block_size: Block size in tokens.
            input_ids: Shape ``(samples, tokens)``.
            attention_mask: Shape ``(samples, tokens)``.
            token_type_ids: Shape ``(samples, tokens)``.
            position_ids: Shape ``(samples, tokens)``.
            inputs_embeds: Shape ``(samples, tokens, width)``.
            pad_token_id: Value of the padding.
            model_embeddings: Embeds the padding if there are `inputs_embeds`.

        Returns:
            The number of added tokens, followed by the five inputs.

        Raises:
            UsageError: Neither `input_ids` nor `inputs_embeds` is given.
        """
        given = input_ids if input_ids is not None else inputs_embeds
        if given is None:
            raise UsageError(
                "neither input_ids nor inputs_embeds were given.", "", "pass one of them."
            )
        added = -given.shape[1] % block_size
        if not added:
            return 0, input_ids, attention_mask, token_type_ids, position_ids, inputs_embeds
        if inputs_embeds is not None:
            tokens = torch.full((given.shape[0], added), pad_token_id, device=given.device)
            inputs_embeds = torch.cat((inputs_embeds, model_embeddings(tokens)), 1)

        def padded(values: Tensor | None, fill: int = 0) -> Tensor | None:
            return None if values is None else pad(values, (0, added), value=fill)

        return (
            added,
            padded(input_ids, pad_token_id),
            padded(attention_mask),
            padded(token_type_ids),
            padded(position_ids, pad_token_id),
            inputs_embeds,
        )

    @staticmethod
    def unpad_sequence_output(pad_len: int, sequence_output: Tensor) -> Tensor:
        """Remove the padding that `pad_to_block_size` added from an output.

        Args:
            pad_len: Number of added tokens.
            sequence_output: Shape ``(samples, tokens, ...)``.

        Returns:
            The output without the last `pad_len` tokens.
        """
        return sequence_output[:, : sequence_output.shape[1] - pad_len]
