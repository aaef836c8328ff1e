"""Sparse attention for models of transformers, through its registries.

transformers looks up two functions by the name in a model's configuration: one for the mask of a
forward, one for the attention of each layer. The functions here create no mask of all pairs. There
is no mask if the model's rule is causal, full or a window, and nothing is padded. The mask is the
padding, of shape (samples, tokens), if there is only padding. Otherwise it is an object that
evaluates the model's own rule for one tile at a time.
"""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from torch import Tensor, nn

from ..base.device import has_no_values
from ..base.errors import NotBuiltError, UsageError
from .layer import SparseAttention
from .layouts import Dense
from .rows import Bias

NAME = "block_sparse"
_REFUSED = {"softcap": "capped scores", "s_aux": "sinks beside the keys", "cache": "a paged cache"}

# By each module of a model that uses a layout, because transformers passes one of them to the
# attention function
_SPARSE: weakref.WeakKeyDictionary[nn.Module, SparseAttention] = weakref.WeakKeyDictionary()


def is_of_transformers(model: nn.Module) -> bool:
    """Return whether a model's configuration names an attention function of transformers."""
    return getattr(getattr(model, "config", None), "_attn_implementation", None) is not None


def attend_sparsely(model: nn.Module, attention: SparseAttention) -> None:
    """Replace the attention of a transformers model by sparse attention, in place.

    An attention function and a mask function are registered with transformers under one name. The
    model's configuration is changed to select this name.

    Args:
        model: The transformers model to change.
        attention: The sparse attention that all layers of the model call.

    Raises:
        NotBuiltError: Sparse attention does not support the model's attention, or heads have
            different layouts and `attention.ranks` does not divide the number of heads.
    """
    config: Any = model.config
    reasons = {
        "its attention does not ask by name": not getattr(
            model, "_supports_attention_backend", False
        ),
        "encoder and decoder have sequences of their own": getattr(
            config, "is_encoder_decoder", False
        ),
        "its layers attend to another sequence": getattr(config, "add_cross_attention", False),
    }
    if found := [reason for reason, holds in reasons.items() if holds]:
        raise NotBuiltError(
            f"sparse_attention is not built for {type(model).__name__}: {found[0]}.",
            "A layout says which tokens of one sequence see each other, in attention that "
            "transformers looks up.",
            "leave the section out, or call engine.sparse_attention in the model's own attention.",
        )
    switch([model], config, attention)


def switch(layers: Iterable[nn.Module], config: Any, attention: SparseAttention) -> None:
    """Replace the attention of some layers of a transformers model, in place.

    The layers receive no masks of all pairs any more.

    Args:
        layers: The layers whose attention is replaced.
        config: The model's configuration, which these layers read.
        attention: The sparse attention that the layers call.

    Raises:
        NotBuiltError: Heads have different layouts, and the number of ranks does not divide the
            number of heads.
    """
    _check_heads(config, attention)
    functions, masks = _interfaces()
    functions.register(NAME, _attend)
    masks.register(NAME, _mask)
    for layer in layers:
        for module in layer.modules():
            _SPARSE[module] = attention
    config._attn_implementation = NAME


def _check_heads(config: Any, attention: SparseAttention) -> None:
    heads = getattr(config.get_text_config(), "num_attention_heads", None)
    if (
        attention.ranks > 1
        and attention.layout.different_layout_per_head
        and (heads or 0) % attention.ranks
    ):
        raise NotBuiltError(
            f"different_layout_per_head with {heads} heads over {attention.ranks} ranks.",
            "Ranks find their heads' layouts by equal shares of the heads.",
            "choose a number of ranks that divides the heads, or one layout for all heads.",
        )


def _interfaces() -> tuple[Any, Any]:
    """Import transformers' attention and mask registries, for one of its models."""
    functions = import_module("transformers.modeling_utils").ALL_ATTENTION_FUNCTIONS
    return functions, import_module("transformers.masking_utils").ALL_MASK_ATTENTION_FUNCTIONS


@dataclass(frozen=True)
class _Seen:
    """The mask of a forward that has more than padding.

    Attributes:
        padding: Shape ``(samples, keys)``, True for a token; None without padding.
        rule: The model's own rule of sample, head, query and key; None if `window` expresses it.
        window: Maximum distance in tokens between a query and a key, in both directions.
        first_query: The position of the first query in the sequence.
        first_key: The position of the first key in the sequence.
    """

    padding: Tensor | None
    rule: Callable[..., Tensor] | None
    window: int | None
    first_query: int
    first_key: int

    def asked(self, samples: Tensor, queries: Tensor, keys: Tensor) -> Tensor:
        assert self.rule is not None
        return self.rule(samples, samples * 0, queries + self.first_query, keys + self.first_key)


def _mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: Any = 0,
    kv_offset: int = 0,
    mask_function: Any = None,
    attention_mask: Tensor | None = None,
    use_vmap: bool = False,
    **_: Any,
) -> Tensor | _Seen | None:
    """Return the mask for the layers, with a transformers mask function's signature."""
    first_query = int(q_offset)
    if first_query + q_length != kv_offset + kv_length:
        raise NotBuiltError(
            f"{q_length} queries from token {first_query} on, beside {kv_length} keys from "
            f"{kv_offset} on.",
            "Sparse attention takes the queries as the last ones of the keys; a cache of fixed "
            "length has others.",
            "take transformers' dynamic cache.",
        )
    if use_vmap:
        raise NotBuiltError(
            "a mask function of the model's own is not built for sparse attention.",
            "It is asked for a tile at a time, by numbers of tokens.",
            "leave sparse_attention out for this model.",
        )
    padding = attention_mask
    if padding is not None:
        padding = nn.functional.pad(padding, (0, max(kv_offset + kv_length - padding.shape[1], 0)))
        padding = padding[:, kv_offset : kv_offset + kv_length]
        padding = None if not has_no_values(padding) and bool(padding.all()) else padding
    is_known, both_ways = _read(mask_function)
    if is_known and both_ways is None and not kv_offset:
        return padding
    own_mask = None if is_known else mask_function
    return _Seen(padding, own_mask, both_ways, first_query, kv_offset)


def _read(mask_function: Any) -> tuple[bool, int | None]:
    """Return whether a mask function is transformers' causal, full or sliding one.

    The second value is the width of a window in both directions. Layers pass the width of a causal
    window themselves, as for FlashAttention.
    """
    masks = import_module("transformers.masking_utils")
    plain = (masks.causal_mask_function, masks.bidirectional_mask_function)
    if mask_function is None or mask_function in plain:
        return True, None
    parts = inspect.getclosurevars(mask_function).nonlocals.get("mask_functions", ())
    if (
        len(parts) != 2
        or parts[1] not in plain
        or not mask_function.__qualname__.startswith("and_masks.")
    ):
        return False, None
    window = inspect.getclosurevars(parts[0]).nonlocals.get("sliding_window")
    name = parts[0].__qualname__
    if name.startswith("sliding_window_overlay.") and parts[1] is plain[0]:
        return True, None
    both = name.startswith("sliding_window_bidirectional_overlay.") and parts[1] is plain[1]
    return both, window if both else None


def _attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | _Seen | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    sliding_window: int | None = None,
    position_bias: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Return one layer's attention (samples, tokens, heads, width), and no weights.

    It has the signature of a transformers attention function.
    """
    sparse = _SPARSE.get(module)
    if sparse is None:
        raise UsageError(
            f"{type(module).__name__} attends by a layout that this copy of the model does not "
            "have.",
            "The model was copied after an engine had taken it.",
            "copy it before, or set its attention with set_attn_implementation.",
        )
    for name, words in _REFUSED.items():
        if kwargs.get(name) is not None:
            raise NotBuiltError(
                f"{type(module).__name__}: {words} are not built for sparse attention.",
                "The kernel computes softmax(query key^T scale + bias) value.",
                "leave sparse_attention out for this model.",
            )
    causal = getattr(module, "is_causal", True) if is_causal is None else bool(is_causal)
    biases: list[Bias] = [] if position_bias is None else [position_bias]
    replaces_rule = False  # whether a mask expresses causality and the window
    both_ways = None
    if isinstance(attention_mask, _Seen):
        if attention_mask.first_key and not isinstance(sparse.layout, Dense):
            raise NotBuiltError(
                f"a cache that has dropped its first {attention_mask.first_key} tokens, and a "
                "layout of blocks.",
                "Blocks are counted from the first token.",
                "generate with a cache that keeps all, or with mode 'dense'.",
            )
        both_ways = attention_mask.window
        if attention_mask.rule is not None:
            biases.append(attention_mask.asked)
            replaces_rule = True
        attention_mask = attention_mask.padding
    if attention_mask is not None and attention_mask.dim() == 4:
        biases.append(attention_mask[..., : key.shape[2]])
        replaces_rule = True
    elif attention_mask is not None:
        biases.append(attention_mask[:, None, None])
    causal = causal and not replaces_rule
    found = sparse(
        query,
        key,
        value,
        is_causal=causal and both_ways is None,
        window=sliding_window if causal else None,
        reach=both_ways,
        scale=scaling,
        biases=biases,
        dropout=dropout,
    )
    return found.transpose(1, 2).contiguous(), None
