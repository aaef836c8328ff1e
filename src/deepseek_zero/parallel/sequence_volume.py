"""Bytes that a rank sends for attention over shared sequences in a micro-batch, from a model's
configuration alone.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import nn

from .sequence import SequenceAttention
from .sequence_model import AttentionMethod, SequenceSettings, choose_attention, heads_of

ROW_BYTES = 16  # a rank's loss and how many tokens it is of, in float64
# Of models whose keys and values are of two widths
_OTHER_WIDTHS = ("v_head_dim", "qk_rope_head_dim", "kv_lora_rank")


class SequenceTraffic(NamedTuple):
    """What ranks that share sequences send.  attention: how it sees other ranks' tokens; "": the
    model's own modules
    exchange.  layer_bytes: that a rank sends for a token of its own in one layer, forward and
    backward; None: not
    known.  layers: of attention.  row_bytes: that it sends for the loss of a micro-batch.
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
    """Return what one rank sends, where every layer of attention has trained weights below it.
    Pure; of a whole model, before it is cut.

    ranks: along "sp". tp: ranks over which heads are cut. compute: the dtype of activations, where
    that is not the model's own. Raises as `share_sequences` does.
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
    recomputes = any(
        getattr(module, "gradient_checkpointing", False) is True for module in model.modules()
    )
    if attention == "ulysses":
        # A head that is repeated for the ranks travels as often
        copies = held if held % ranks == 0 else ranks
        numbers = (
            (3 if recomputes else 2) * (ranks - 1) * 2 * (heads // tp + copies) * width // ranks
        )
    # Keys and values: forward, again in backward, their gradients; and once more where a block is
    # recomputed
    else:
        numbers = (4 if recomputes else 3) * (ranks - 1) * 2 * held * width
    dtype = compute or next(param.dtype for param in model.parameters())
    return SequenceTraffic(attention, numbers * dtype.itemsize, text.num_hidden_layers, rows)
