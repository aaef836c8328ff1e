"""Which layers of a model family are split, for models that do not define a plan.

A row is a family: patterns of module names (matched at their end), and the style of the layers. To
support another family, add a row.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import takewhile
from typing import Literal

from torch import nn

Style = Literal[
    "column", "row", "column_gather", "row_scatter", "vocabulary", "head", "partial", "equal"
]


@dataclass(frozen=True)
class Fused:
    """How several projections are stored in one layer.

    Attributes:
        kind: "blocks" (one after the other) or "interleaved" (head by head).
        parts: The number of projections (3 for q, k and v).
        sizes: The width of each, if they differ.
    """

    kind: Literal["blocks", "interleaved"]
    parts: int
    sizes: tuple[int, ...] = ()


@dataclass(frozen=True)
class StyleRule:
    """A rule for splitting the layers whose module names match a pattern.

    Attributes:
        pattern: A regular expression that is matched to the last parts of a module's name.
        style: How these layers are split, for example "column" or "row".
        fused: How several projections are stored in such a layer, or None if it has one.
    """

    pattern: str
    style: Style
    fused: Fused | None = None

    def matches(self, name: str) -> bool:
        """Return whether a module name, or its last dotted parts, match the pattern."""
        return re.search(rf"(?:^|\.)(?:{self.pattern})$", name) is not None


_BERT = (
    StyleRule(r"attention\.self\.(query|key|value)", "column"),
    StyleRule(r"attention\.output\.dense", "row"),
    StyleRule(r"intermediate\.dense", "column"),
    StyleRule(r"output\.dense", "row"),
)
_OPT = (
    StyleRule(r"self_attn\.(q|k|v)_proj", "column"),
    StyleRule(r"self_attn\.out_proj", "row"),
    StyleRule(r"fc1", "column"),
    StyleRule(r"fc2", "row"),
)
FAMILIES: dict[str, tuple[StyleRule, ...]] = {  # by `model_type` of the configuration
    "gpt2": (
        StyleRule(r"attn\.c_attn", "column", Fused("blocks", 3)),
        StyleRule(r"attn\.c_proj", "row"),
        StyleRule(r"mlp\.c_fc", "column"),
        StyleRule(r"mlp\.c_proj", "row"),
    ),
    "gpt_neox": (
        StyleRule(r"attention\.query_key_value", "column", Fused("interleaved", 3)),
        StyleRule(r"attention\.dense", "row"),
        StyleRule(r"mlp\.dense_h_to_4h", "column"),
        StyleRule(r"mlp\.dense_4h_to_h", "row"),
    ),
    "opt": _OPT,
    "bert": _BERT,
    "roberta": _BERT,
    "electra": _BERT,
    "distilbert": (
        StyleRule(r"attention\.(q|k|v)_lin", "column"),
        StyleRule(r"attention\.out_lin", "row"),
        StyleRule(r"ffn\.lin1", "column"),
        StyleRule(r"ffn\.lin2", "row"),
    ),
    "gptj": (
        StyleRule(r"attn\.(q|k|v)_proj", "column"),
        StyleRule(r"attn\.out_proj", "row"),
        StyleRule(r"mlp\.fc_in", "column"),
        StyleRule(r"mlp\.fc_out", "row"),
    ),
}
ALIASES = {"gpt-neox": "gpt_neox", "gpt2": "gpt2", "gpt-2": "gpt2", "gpt-j": "gptj"}

# Families that cannot be split by layers, because code outside of these depends on the heads
REFUSED: dict[str, str] = {
    "bloom": "its ALiBi bias is made for all heads outside of the attention",
    "falcon": "its fused projection and its ALiBi bias depend on the number of heads outside of "
    "the attention",
    "mpt": "its ALiBi bias is made for all heads outside of the attention",
    "t5": "its relative position bias is made for all heads in the first block",
    "mt5": "its relative position bias is made for all heads in the first block",
}

NAMES: tuple[StyleRule, ...] = (
    StyleRule(r"(q|k|v|query|key|value|wq|wk|wv|q_proj|k_proj|v_proj)", "column"),
    StyleRule(r"(up|gate|up_proj|gate_proj|fc1|w1|w3|wi|wi_0|wi_1)", "column"),
    StyleRule(r"(o|o_proj|out_proj|wo|down|down_proj|fc2|w2)", "row"),
)


def common_path(names: Iterable[str]) -> list[str]:
    """Return the parts of the longest dotted prefix that all names have in common."""
    paths = zip(*(name.split(".") for name in names), strict=False)
    return [each[0] for each in takewhile(lambda each: len(set(each)) == 1, paths)]


def asked(model: nn.Module, getter: str) -> nn.Module | None:
    """Return a layer through a method of the model, as transformers models have.

    Args:
        model: The model, of transformers or any other library.
        getter: The name of the method, for example "get_input_embeddings".

    Returns:
        The layer, or None if the model does not have the method or the layer.
    """
    try:
        found = getattr(model, getter)()
    except (AttributeError, NotImplementedError):
        return None
    return found if isinstance(found, nn.Module) else None
