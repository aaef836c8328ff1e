"""DeepSpeed's sparse attention: configurations, modules, and utilities for trained models."""

from __future__ import annotations

import copy
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention as sdpa

from deepseek_zero.attention.layouts import (
    BigBird,
    BSLongformer,
    Dense,
    Fixed,
    LocalSlidingWindow,
    Variable,
)
from deepseek_zero.base.errors import ConfigError, NotBuiltError, UsageError
from deepseek_zero.compat.deepspeed import sparse_attention as ours
from deepseek_zero.compat.deepspeed.sparse_attention import (
    BertSparseSelfAttention,
    BigBirdSparsityConfig,
    FixedSparsityConfig,
    SparseAttentionUtils,
    SparseSelfAttention,
    SparsityConfig,
)
from tests.unit.parallel.tiny import VOCABULARY, tiny


@pytest.mark.parametrize(
    "kind", [Dense, Fixed, Variable, BigBird, BSLongformer, LocalSlidingWindow]
)
def test_a_configuration_makes_its_kinds_layout(kind: Any) -> None:
    config = getattr(ours, f"{kind.__name__}SparsityConfig")(num_heads=3, block=4)
    assert config.layout_for(50) == kind(block=4) and config.num_layout_heads == 1
    found = config.make_layout(50)
    assert found.dtype == torch.int64 and found.shape == (3, 13, 13)
    assert torch.equal(found.bool(), kind(block=4).table(3, 50))


def test_arguments_are_read_when_a_layout_is_made_and_refused_at_once() -> None:
    config = ours.VariableSparsityConfig(4, 8, True, 1, [1, 2], [0, 3], [1, 5], "unidirectional")
    expected = Variable(8, True, "unidirectional", 1, (1, 2), (0, 3), (1, 5))
    assert config.layout_for(64) == expected
    config.num_random_blocks = 0
    assert config.layout_for(64) != expected
    with pytest.raises(ConfigError, match="divides"):
        FixedSparsityConfig(4, num_global_blocks=3)
    with pytest.raises(NotBuiltError, match="makes no layout"):
        SparsityConfig(4).make_layout(64)


class Diagonal(SparsityConfig):
    def make_layout(self, seq_len: int) -> Tensor:
        layout = self.setup_layout(seq_len)
        layout[0].fill_diagonal_(1)
        return self.check_and_propagate_first_head_layout(layout)


def inputs(tokens: int = 21) -> list[Tensor]:
    noise = torch.Generator().manual_seed(2)
    return [torch.randn(2, 4, tokens, 8, generator=noise) for _ in range(3)]


def expanded(layout: Tensor, block: int, tokens: int) -> Tensor:
    return (
        layout.repeat_interleave(block, 1).repeat_interleave(block, 2)[:, :tokens, :tokens].bool()
    )


@pytest.mark.parametrize(
    "config", [FixedSparsityConfig(4, 4), BigBirdSparsityConfig(4, 4, True), Diagonal(4, 4)]
)
def test_the_module_is_dense_attention_under_the_layout_and_its_masks(
    config: SparsityConfig,
) -> None:
    query, key, value = inputs()
    seen = expanded(config.make_layout(21), 4, 21)
    module = SparseSelfAttention(config, max_seq_length=8)
    for turned in (key, key.mT):
        assert torch.allclose(
            module(query, turned, value), sdpa(query, key, value, seen), atol=1e-6
        )
    rpe = torch.randn(21, 21, generator=torch.Generator().manual_seed(3), requires_grad=True)
    padding = torch.zeros(2, 21)
    padding[1, 15:] = -20.0
    allowed = torch.ones(21, 21).tril()
    scores = (
        rpe
        + padding[:, None, None]
        + torch.zeros(1, 1, 21, 21).masked_fill(~(seen & (allowed != 0)), -torch.inf)
    )
    expected = sdpa(query, key, value, scores)
    found = module(query, key, value, rpe, padding, allowed)
    assert torch.allclose(found, expected, atol=1e-6)
    grads = [
        torch.autograd.grad(each.square().sum(), rpe, retain_graph=True)[0]
        for each in (found, expected)
    ]
    assert torch.allclose(*grads, atol=1e-5) and grads[0].any()
    other = SparseSelfAttention(config, key_padding_mask_mode="mul", attn_mask_mode="add")
    added = torch.zeros(21, 21).masked_fill(allowed == 0, -torch.inf)
    # Queries from position 12 on may attend only to padding, so they are not compared.
    found = other(query, key, value, rpe, padding == 0, added)
    assert torch.allclose(found[:, :, :12], expected[:, :, :12], atol=1e-6)


def test_a_sequence_longer_than_the_layout_is_no_error() -> None:
    module = SparseSelfAttention(max_seq_length=16)
    assert module(*inputs(100)).shape == (2, 4, 100, 8) and module.get_layout(100).shape == (
        4,
        7,
        7,
    )
    with pytest.raises(ConfigError, match="attn_mask_mode"):
        SparseSelfAttention(attn_mask_mode="sub")


def test_berts_attention_by_itself() -> None:
    config = SimpleNamespace(hidden_size=32, num_attention_heads=4)
    module, states = (
        BertSparseSelfAttention(config, ours.DenseSparsityConfig(4)),
        torch.randn(2, 10, 32),
    )
    mask = torch.zeros(2, 1, 1, 10)
    mask[0, ..., 7:] = -10000.0
    query, key, value = (
        module.transpose_for_scores(each(states))
        for each in (module.query, module.key, module.value)
    )
    expected = sdpa(query, key, value, mask).transpose(1, 2).flatten(2)
    assert torch.allclose(module(states, mask), expected, atol=1e-6)
    with pytest.raises(UsageError, match="equal widths"):
        BertSparseSelfAttention(SimpleNamespace(hidden_size=30, num_attention_heads=4))


transformers = pytest.importorskip("transformers")


@pytest.mark.parametrize(("name", "reserved"), [("bert", 0), ("roberta", 2)])
def test_positions_are_extended_by_their_own_rows(name: str, reserved: int) -> None:
    model = tiny(name).eval()
    table = getattr(model, name).embeddings.position_embeddings.weight.detach().clone()
    known = len(table) - reserved
    found = SparseAttentionUtils.extend_position_embedding(model, 71)
    assert found is model and model.config.max_position_embeddings == 71 + reserved  # type: ignore[union-attr]
    embeddings = getattr(model, name).embeddings
    rows = embeddings.position_embeddings.weight
    assert torch.equal(rows[:reserved], table[:reserved])
    assert all(
        torch.equal(rows[reserved + row], table[reserved + row % known]) for row in range(71)
    )
    assert model(torch.randint(2, VOCABULARY, (1, 71))).logits.isfinite().all(), (
        "buffers are as long"
    )
    assert "position_ids" not in "".join(model.state_dict())
    with pytest.raises(UsageError, match="ask for more"):
        SparseAttentionUtils.extend_position_embedding(model, 71)
    with pytest.raises(NotBuiltError, match="no table of positions"):
        SparseAttentionUtils.extend_position_embedding(nn.Linear(2, 2), 71)


@pytest.mark.parametrize("by_layers", [False, True])
def test_a_trained_model_is_made_sparse(by_layers: bool) -> None:
    model, tokens = tiny("bert").eval(), torch.randint(2, VOCABULARY, (2, 21))
    plain = copy.deepcopy(model)
    plain.set_attn_implementation("eager")  # type: ignore[operator]
    config = FixedSparsityConfig(4, block=4)
    if by_layers:
        layers = model.bert.encoder.layer  # type: ignore[union-attr]
        found: Any = (
            SparseAttentionUtils.replace_self_attention_layer_with_sparse_self_attention_layer(
                model.config, layers, config
            )
        )
        assert found is layers
    else:
        replace = SparseAttentionUtils.replace_model_self_attention_with_sparse_self_attention
        assert replace(model, 32, config) is model
    seen = expanded(config.make_layout(21), 4, 21)[None]
    mask = torch.zeros(seen.shape).masked_fill(~seen, torch.finfo(torch.float32).min)
    assert torch.allclose(
        model(tokens).logits, plain(tokens, attention_mask=mask).logits, atol=1e-5
    )
    assert list(model.state_dict()) == list(plain.state_dict())


def test_inputs_are_padded_to_whole_blocks_and_outputs_cut_back() -> None:
    ids, embed = torch.randint(2, 9, (2, 21)), nn.Embedding(9, 4)
    ones = torch.ones_like(ids)
    found = SparseAttentionUtils.pad_to_block_size(
        16, ids, ones, ones * 0, ones * 5, embed(ids), 1, embed
    )
    added, tokens, mask, types, places, embedded = found
    assert added == 11 and all(each is not None and each.shape[1] == 32 for each in found[1:])
    assert (
        tokens is not None
        and mask is not None
        and types is not None
        and places is not None
        and embedded is not None
    )
    assert (
        (tokens[:, 21:] == 1).all()
        and not mask[:, 21:].any()
        and not types.any()
        and (places[:, 21:] == 1).all()
    )
    assert torch.equal(embedded, embed(tokens))
    assert torch.equal(SparseAttentionUtils.unpad_sequence_output(added, tokens), ids)
    whole = SparseAttentionUtils.pad_to_block_size(7, ids, ones, None, None, None, 1, None)
    assert (
        whole[0] == 0
        and whole[1] is ids
        and SparseAttentionUtils.unpad_sequence_output(0, ids) is not None
    )
    with pytest.raises(UsageError, match="neither input_ids"):
        SparseAttentionUtils.pad_to_block_size(16, None, None, None, None, None, 1, None)
    tokenizer = SimpleNamespace(model_max_length=3, init_kwargs={})
    assert SparseAttentionUtils.update_tokenizer_model_max_length(tokenizer, 71) is tokenizer
    assert tokenizer.model_max_length == tokenizer.init_kwargs["model_max_length"] == 71


def test_the_names_are_under_deepspeeds_path(as_deepspeed: None) -> None:
    import deepspeed

    room = deepspeed.ops.sparse_attention
    assert (
        room.SparseSelfAttention
        is SparseSelfAttention
        is room.sparse_self_attention.SparseSelfAttention
    )
    assert room.sparsity_config.FixedSparsityConfig is FixedSparsityConfig
    assert room.sparse_attention_utils.SparseAttentionUtils is room.SparseAttentionUtils
    assert room.bert_sparse_self_attention.BertSparseSelfAttention is room.BertSparseSelfAttention
    with pytest.raises(NotBuiltError, match=r"sparse_attention\.Softmax is not provided"):
        _ = room.Softmax
