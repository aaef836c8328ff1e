"""Bytes that a rank sends for sequence parallelism in one micro-batch.

They are computed from the configuration of the model.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import nn

from .sequence import SequenceAttention
from .sequence_model import AttentionMethod, SequenceSettings, choose_attention, heads_of
from .volume import recomputes_blocks

ROW_BYTES = 16  # a rank's loss and its number of tokens, in float64
# In models with different widths of keys and values
_OTHER_WIDTHS = ("v_head_dim", "qk_rope_head_dim", "kv_lora_rank")


class SequenceTraffic(NamedTuple):
    """Describes the bytes that one rank sends for sequence parallelism.

    Attributes:
        attention: How attention accesses the tokens of other ranks: "ulysses" (all-to-all) or
            "all_gather"; "" if the model's own modules communicate.
        layer_bytes: Bytes that a rank sends in one attention layer for each token of this rank, in
            forward and backward. None if the number is unknown.
        layers: The number of attention layers; 0 if `layer_bytes` is None.
        row_bytes: Bytes that a rank sends to average the loss of a micro-batch over the ranks; 0 if
            the loss is not averaged.
    """

    attention: AttentionMethod | str
    layer_bytes: int | None
    layers: int = 0
    row_bytes: int = 0


def traffic_of_sequences(
    model: nn.Module,
    ranks: int,
    tp: int,
    settings: SequenceSettings,
    compute: torch.dtype | None = None,
) -> SequenceTraffic:
    """Compute the bytes that one rank sends for sequence parallelism.

    The result assumes that every attention layer has trained weights before it, so that backward
    sends gradients in each of them.

    Args:
        model: The whole model, before it is split.
        ranks: The number of sequence-parallel ranks ("sp").
        tp: The number of tensor-parallel ranks ("tp"), over which the attention heads are split.
        settings: How attention communicates, and whether the loss is averaged over the ranks.
        compute: The dtype of activations. None means the dtype of the model's first parameter.

    Returns:
        A `SequenceTraffic` with the bytes for each token and attention layer, and for the loss of
        the micro-batch. `layer_bytes` is None (unknown) and `layers` is 0 if the model contains
        `SequenceAttention` modules, or if its keys and values differ in width.

    Raises:
        NotBuiltError: Sequence parallelism, or the method `settings.attention`, does not support
            the model.
    """
    if any(isinstance(module, SequenceAttention) for module in model.modules()):
        return SequenceTraffic("", None)
    attention = choose_attention(model, ranks, tp, settings)
    config: Any = model.config
    text = config.get_text_config()
    rows = (ranks - 1) * ROW_BYTES if settings.weighs_loss else 0
    if any(getattr(text, name, None) for name in _OTHER_WIDTHS):
        return SequenceTraffic(attention, None, row_bytes=rows)
    heads, key_heads = heads_of(text)
    width = getattr(text, "head_dim", None) or text.hidden_size // heads
    held = max(key_heads // tp, 1)
    passes = 3 if recomputes_blocks(model) else 2
    per_head = 2 * (ranks - 1) * width
    if attention == "ulysses":
        # A repeated head is sent once per copy
        copies = held if held % ranks == 0 else ranks
        numbers = passes * per_head * (heads // tp + copies) // ranks
    else:
        # Keys and values: forward, again in backward, their gradients, and once more if a block is
        # recomputed
        numbers = (passes + 1) * per_head * held
    dtype = compute or next(param.dtype for param in model.parameters())
    return SequenceTraffic(attention, numbers * dtype.itemsize, text.num_hidden_layers, rows)
