"""DeepSpeed's `deepspeed.ops.sparse_attention`: its configurations, its two modules and its
utilities.

They are words for `deepseek_zero.attention`: a configuration makes a layout, a module calls the
kernel. Sequences have any length, on any device and in any dtype. A layout is made for the sequence
at hand, not cut out of one of the longest length, and "unidirectional" is causal by token.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
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


class SparsityConfig:
    """What the kinds have in common. A class of one's own overrides `make_layout`."""

    KIND: ClassVar[type[BlockLayout] | None] = None

    def __init__(
        self, num_heads: int, block: int = 16, different_layout_per_head: bool = False
    ) -> None:
        self.num_heads = num_heads
        self.block = block
        self.different_layout_per_head = different_layout_per_head
        self.num_layout_heads = num_heads if different_layout_per_head else 1

    def setup_layout(self, seq_len: int) -> Tensor:
        """Return an empty layout, (heads, blocks, blocks); a last block may be short."""
        blocks = math.ceil(seq_len / self.block)
        return torch.zeros(self.num_heads, blocks, blocks, dtype=torch.int64)

    def check_and_propagate_first_head_layout(self, layout: Tensor) -> Tensor:
        """Give every head the first one's layout, in place, unless heads differ."""
        if not self.different_layout_per_head:
            layout[1:] = layout[:1]
        return layout

    def make_layout(self, seq_len: int) -> Tensor:
        """Return the layout of a sequence, 0 or 1 for each pair of blocks, (heads, blocks,
        blocks).
        """
        if self.KIND is None:
            raise NotBuiltError(
                f"{type(self).__name__} makes no layout.",
                "It is what the kinds of layouts have in common.",
                "take one of them, such as FixedSparsityConfig, or override make_layout.",
            )
        return self.layout_for(seq_len).table(self.num_heads, seq_len).to(torch.int64)

    def layout_for(self, seq_len: int) -> BlockLayout:
        """Return the layout as an object, read from the attributes as they are now."""
        kind: Any = self.KIND
        if kind is None or type(self).make_layout is not SparsityConfig.make_layout:
            seen = self.make_layout(seq_len).bool()
            return Listed(
                self.block, attention=getattr(self, "attention", "bidirectional"), seen=seen
            )
        values = {
            name: getattr(self, name) for name in kind.__dataclass_fields__ if hasattr(self, name)
        }
        made: BlockLayout = kind(
            **{
                name: tuple(each) if isinstance(each, list) else each
                for name, each in values.items()
            }
        )
        return made


class DenseSparsityConfig(SparsityConfig):
    """Every block sees every block."""

    KIND = Dense


class FixedSparsityConfig(SparsityConfig):
    """Windows, and blocks in each of them that are seen by all:
    `deepseek_zero.attention.layouts.Fixed`.
    """

    KIND = Fixed

    def __init__(
        self,
        num_heads: int,
        block: int = 16,
        different_layout_per_head: bool = False,
        num_local_blocks: int = 4,
        num_global_blocks: int = 1,
        attention: Direction = "bidirectional",
        horizontal_global_attention: bool = False,
        num_different_global_patterns: int = 1,
    ) -> None:
        super().__init__(num_heads, block, different_layout_per_head)
        self.num_local_blocks = num_local_blocks
        self.num_global_blocks = num_global_blocks
        self.attention = attention
        self.horizontal_global_attention = horizontal_global_attention
        self.num_different_global_patterns = num_different_global_patterns
        self.layout_for(block)  # refuses what cannot be


class VariableSparsityConfig(SparsityConfig):
    """Windows of stated sizes, global and random blocks:
    `deepseek_zero.attention.layouts.Variable`.
    """

    KIND = Variable

    def __init__(
        self,
        num_heads: int,
        block: int = 16,
        different_layout_per_head: bool = False,
        num_random_blocks: int = 0,
        local_window_blocks: Iterable[int] = (4,),
        global_block_indices: Iterable[int] = (0,),
        global_block_end_indices: Iterable[int] | None = None,
        attention: Direction = "bidirectional",
        horizontal_global_attention: bool = False,
    ) -> None:
        super().__init__(num_heads, block, different_layout_per_head)
        self.num_random_blocks = num_random_blocks
        self.local_window_blocks = list(local_window_blocks)
        self.global_block_indices = list(global_block_indices)
        self.global_block_end_indices = (
            None if global_block_end_indices is None else list(global_block_end_indices)
        )
        self.attention = attention
        self.horizontal_global_attention = horizontal_global_attention
        self.layout_for(block)


class BigBirdSparsityConfig(SparsityConfig):
    """A sliding window, first blocks seen by all, and random blocks:
    `deepseek_zero.attention.layouts.BigBird`.
    """

    KIND = BigBird

    def __init__(
        self,
        num_heads: int,
        block: int = 16,
        different_layout_per_head: bool = False,
        num_random_blocks: int = 1,
        num_sliding_window_blocks: int = 3,
        num_global_blocks: int = 1,
        attention: Direction = "bidirectional",
    ) -> None:
        super().__init__(num_heads, block, different_layout_per_head)
        self.num_random_blocks = num_random_blocks
        self.num_sliding_window_blocks = num_sliding_window_blocks
        self.num_global_blocks = num_global_blocks
        self.attention = attention
        self.layout_for(block)


class BSLongformerSparsityConfig(SparsityConfig):
    """A sliding window, and blocks seen by all: `deepseek_zero.attention.layouts.BSLongformer`."""

    KIND = BSLongformer

    def __init__(
        self,
        num_heads: int,
        block: int = 16,
        different_layout_per_head: bool = False,
        num_sliding_window_blocks: int = 3,
        global_block_indices: Iterable[int] = (0,),
        global_block_end_indices: Iterable[int] | None = None,
        attention: Direction = "bidirectional",
    ) -> None:
        super().__init__(num_heads, block, different_layout_per_head)
        self.num_sliding_window_blocks = num_sliding_window_blocks
        self.attention = attention
        self.global_block_indices = list(global_block_indices)
        self.global_block_end_indices = (
            None if global_block_end_indices is None else list(global_block_end_indices)
        )
        self.layout_for(block)


class LocalSlidingWindowSparsityConfig(SparsityConfig):
    """A sliding window alone: `deepseek_zero.attention.layouts.LocalSlidingWindow`."""

    KIND = LocalSlidingWindow

    def __init__(
        self,
        num_heads: int,
        block: int = 16,
        num_sliding_window_blocks: int = 3,
        attention: Direction = "unidirectional",
    ) -> None:
        super().__init__(num_heads, block)
        self.num_sliding_window_blocks = num_sliding_window_blocks
        self.attention = attention
        self.layout_for(block)


_MODES = ("add", "mul")


class SparseSelfAttention(nn.Module):
    """Attention by a layout, with masks in DeepSpeed's two ways: "add" is added to scores, "mul"
    hides where it is 0.

    max_seq_length is not needed: layouts are made for the sequence at hand.
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
        """Return the layout of a sequence, 0 or 1, (heads, blocks, blocks)."""
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
        """Return attention, (samples, heads, tokens, width). Local.

        query, key, value: (samples, heads, tokens, width); key may have its last two dimensions
        turned.  rpe: added to scores, of (tokens, tokens), or with heads, or with samples and heads
        before; it may have a gradient.
        key_padding_mask: (samples, tokens).  attn_mask: (tokens, tokens).
        """
        tokens = query.shape[2]
        if key.shape != query.shape and key.mT.shape == query.shape:
            key = key.mT.contiguous()
        biases = list[Tensor]()
        if rpe is not None:
            biases.append(rpe.reshape((1,) * (4 - rpe.dim()) + rpe.shape))
        if key_padding_mask is not None:
            padding = key_padding_mask.reshape(query.shape[0], 1, 1, tokens)
            biases.append(padding if self.key_padding_mask_mode == "add" else padding != 0)
        if attn_mask is not None:
            allowed = attn_mask.reshape(1, 1, tokens, tokens)
            biases.append(allowed if self.attn_mask_mode == "add" else allowed != 0)
        return SparseAttention(self._layout(tokens))(query, key, value, biases=biases)

    def _layout(self, tokens: int) -> BlockLayout:
        layout = (
            self.sparsity_config.layout_for(tokens)
            if tokens not in self._known
            else self._known[tokens]
        )
        # Equal to itself alone: a plan is found again by the same object
        if isinstance(layout, Listed):
            self._known[tokens] = layout
        return layout


class BertSparseSelfAttention(nn.Module):
    """BERT's self-attention by a layout: hidden states and a mask of padding (added to scores) to
    hidden states.
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
        """Return hidden states as (samples, heads, tokens, width of a head)."""
        heads: Tensor = x.unflatten(-1, (self.num_attention_heads, self.attention_head_size))
        return heads.transpose(1, 2)

    def forward(self, hidden_states: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        """Return hidden states, (samples, tokens, hidden size).  attention_mask: as many numbers as
        tokens.
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
    """What DeepSpeed has for turning a trained model into one of longer sequences."""

    @staticmethod
    def extend_position_embedding(model: Module, max_position: int) -> Module:
        """Give BERT or RoBERTa a table of `max_position` positions, its rows over and over; return
        the model.

        Its buffers by position and its configuration follow. RoBERTa keeps the rows it reserves
        beside them. NotBuiltError for a model without such a table; UsageError where the table is
        no shorter.
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
        """Tell a tokenizer how long sequences may be; return it."""
        tokenizer.model_max_length = max_position
        tokenizer.init_kwargs["model_max_length"] = max_position
        return tokenizer

    @staticmethod
    def replace_model_self_attention_with_sparse_self_attention(
        model: Module, max_position: int, sparsity_config: SparsityConfig | None = None
    ) -> Module:
        """Let a model of transformers attend by a layout, in place; return it. Its modules and
        their names stay.

        max_position: tokens of the longest sequence. NotBuiltError where the model's attention
        cannot.
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
        """Let layers of one model of transformers attend by a layout, in place; return them.
        config: the model's.

        The layers must be all that attend in the model, since its masks are made for one way.
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
        """Return how many tokens were added, and the inputs with them, on the right, hidden by the
        mask.

        The kernel does not need it; programs that count on full blocks do. model_embeddings: embeds
        padding where there are inputs_embeds.
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
        return (
            added,
            None if input_ids is None else pad(input_ids, (0, added), value=pad_token_id),
            None if attention_mask is None else pad(attention_mask, (0, added)),
            None if token_type_ids is None else pad(token_type_ids, (0, added)),
            None if position_ids is None else pad(position_ids, (0, added), value=pad_token_id),
            inputs_embeds,
        )

    @staticmethod
    def unpad_sequence_output(pad_len: int, sequence_output: Tensor) -> Tensor:
        """Return an output without the tokens that `pad_to_block_size` added."""
        return sequence_output[:, : sequence_output.shape[1] - pad_len]
