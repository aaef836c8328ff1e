"""Sparse attention in transformers models equals their eager attention under the same mask."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import deepseek_zero as dz
from deepseek_zero.attention.hugging_face import attend_sparsely
from deepseek_zero.attention.layer import SparseAttention
from deepseek_zero.attention.layouts import (
    BigBird,
    BlockLayout,
    Dense,
    Fixed,
    LocalSlidingWindow,
    layout_of,
)
from deepseek_zero.attention.plan import Pattern
from deepseek_zero.base.errors import ConfigError, NotBuiltError, UsageError
from deepseek_zero.base.log import log_first
from deepseek_zero.base.mesh import Mesh
from deepseek_zero.config import Facts, resolve
from deepseek_zero.config.load import load
from deepseek_zero.engine.settings import sparse_attention_of
from deepseek_zero.parallel.apply import parallelize
from deepseek_zero.parallel.plans import choose
from deepseek_zero.parallel.proof import prove
from deepseek_zero.parallel.sequence_model import SequenceSettings, own_part, share_sequences
from deepseek_zero.pipeline import find_chain
from deepseek_zero.utils import safe_get_full_grad
from tests.in_process import Rank, run_ranks
from tests.unit.attention.dense import seen_of
from tests.unit.parallel.tiny import VOCABULARY, batch, tiny

pytest.importorskip("transformers")
LENGTH = 23
FIXED = {"mode": "fixed", "block": 4, "num_local_blocks": 2}
GATHERS = SequenceSettings("all_gather")
HEADS = FIXED | {"num_different_global_patterns": 2, "different_layout_per_head": True}


def tokens(rows: int = 2, length: int = LENGTH) -> Tensor:
    return torch.randint(
        2, VOCABULARY, (rows, length), generator=torch.Generator().manual_seed(length)
    )


def added(seen: Tensor) -> Tensor:
    return torch.zeros(seen.shape).masked_fill(~seen, torch.finfo(torch.float32).min)


def pattern_of(section: dict[str, Any], *, is_causal: bool, window: int | None = None) -> Pattern:
    arguments = {name: value for name, value in section.items() if name != "mode"}
    return Pattern.of(layout_of(section["mode"], arguments), is_causal=is_causal, window=window)


def close(found: Tensor, expected: Tensor) -> bool:
    return bool((found - expected).abs().max() <= 2e-6 * expected.abs().max().clamp(min=1))


def switched(name: str, section: dict[str, Any] | None, **config: Any) -> Any:
    base: dict[str, Any] = {
        "train_batch_size": 2,
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
    }
    model = name if isinstance(name, nn.Module) else tiny(name)
    return dz.initialize(model=model, config={**base, **config, "sparse_attention": section})[0]


@pytest.mark.parametrize(
    ("name", "section", "options"),
    [
        ("bert", HEADS, {}),
        ("roberta", {"mode": "bigbird", "block": 4, "num_random_blocks": 1}, {}),
        ("bert", {"mode": "fixed", "block": 4, "attention": "unidirectional"}, {}),
        ("llama", HEADS, {}),
        (
            "llama",
            {
                "mode": "variable",
                "block": 4,
                "local_window_blocks": [1, 2],
                "attention": "unidirectional",
            },
            {},
        ),
        ("mistral", {"mode": "dense"}, {"sliding_window": 5}),
        ("mistral", {"mode": "bslongformer", "block": 2}, {"sliding_window": 9}),
        ("gpt2", {"mode": "localslidingwindow", "block": 4}, {}),
    ],
)
def test_a_model_is_switched_by_the_configuration_only(
    name: str, section: dict[str, Any], options: dict[str, Any]
) -> None:
    model, ids = tiny(name, **options), tokens()
    plain = copy.deepcopy(model)
    plain.set_attn_implementation("eager")  # type: ignore[operator]
    is_causal = name not in ("bert", "roberta")
    pattern = pattern_of(section, is_causal=is_causal, window=options.get("sliding_window"))
    mask = added(seen_of(pattern, 4, LENGTH, LENGTH)[None])
    expected = plain(input_ids=ids, attention_mask=mask, labels=ids).loss
    expected.backward()
    engine = switched(model, section)  # type: ignore[arg-type]
    loss = engine(input_ids=ids, labels=ids).loss
    engine.backward(loss)
    assert close(loss, expected)
    for key, parameter in plain.named_parameters():
        found = safe_get_full_grad(engine.module.get_parameter(key))
        assert parameter.grad is None or (found is not None and close(found, parameter.grad)), key
    engine.destroy()


def test_without_the_section_nothing_changes_and_with_it_something_does() -> None:
    model = tiny("llama")
    own = model.config._attn_implementation  # type: ignore[union-attr]
    engine = switched(model, None)  # type: ignore[arg-type]
    assert model.config._attn_implementation == own and engine.sparse_attention is None  # type: ignore[union-attr]
    engine.destroy()
    ids = tokens()
    before = model(ids).logits
    attend_sparsely(
        model, SparseAttention(LocalSlidingWindow(block=4, num_sliding_window_blocks=1))
    )
    assert not torch.allclose(model(ids).logits, before)


@pytest.mark.parametrize("limit", [{"window": 0}, {"reach": -1}])
def test_a_query_that_could_not_see_itself_is_refused(limit: dict[str, int]) -> None:
    query = torch.randn(1, 2, LENGTH, 8)
    with pytest.raises(UsageError, match="at least to its own key"):
        SparseAttention(Dense())(query, query, query, is_causal=True, **limit)


def test_another_model_calls_the_engines_attention() -> None:
    engine = switched(nn.Linear(4, 4), FIXED)  # type: ignore[arg-type]
    assert engine.sparse_attention.layout == Fixed(block=4, num_local_blocks=2)
    query = torch.randn(1, 2, LENGTH, 8)
    seen = seen_of(Pattern.of(engine.sparse_attention.layout), 2, LENGTH, LENGTH)
    expected = nn.functional.scaled_dot_product_attention(query, query, query, seen)
    assert close(engine.sparse_attention(query, query, query), expected)
    engine.destroy()


@pytest.mark.parametrize("name", ["bert", "llama", "mistral"])
def test_padding_is_left_out(name: str) -> None:
    model, ids = tiny(name), tokens()
    plain = copy.deepcopy(model)
    attend_sparsely(model, SparseAttention(Dense()))
    mask = torch.ones_like(ids)
    mask[1, :6] = 0
    found, expected = (each(input_ids=ids, attention_mask=mask).logits for each in (model, plain))
    assert close(found[mask.bool()], expected[mask.bool()])
    assert not close(found, model(ids).logits)


def test_packed_sequences_do_not_attend_to_each_other() -> None:
    model, ids = tiny("mistral", sliding_window=5), tokens(1)
    plain = copy.deepcopy(model)
    attend_sparsely(model, SparseAttention(Dense()))
    places = torch.cat([torch.arange(9), torch.arange(LENGTH - 9)])[None]
    found, expected = (
        each(input_ids=ids, position_ids=places, use_cache=False).logits for each in (model, plain)
    )
    assert close(found, expected) and not close(found, model(input_ids=ids).logits)


def test_a_window_to_both_sides() -> None:
    model, ids = tiny_modern_bert(), tokens()
    plain = copy.deepcopy(model)
    attend_sparsely(model, SparseAttention(Dense()))
    assert close(model(ids).logits, plain(ids).logits)
    model.config._attn_implementation = "sdpa"
    assert close(model(ids).logits, plain(ids).logits), "and back"


def tiny_modern_bert() -> Any:
    transformers = pytest.importorskip("transformers")
    sizes: dict[str, Any] = {
        "vocab_size": VOCABULARY,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "local_attention": 8,
        "global_attn_every_n_layers": 2,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 1,
        "cls_token_id": 1,
        "sep_token_id": 1,
    }
    return transformers.ModernBertForMaskedLM(transformers.ModernBertConfig(**sizes)).eval()


@pytest.mark.parametrize("name", ["llama", "mistral"])
def test_generating_with_a_cache_is_generating_without(name: str) -> None:
    model, ids = tiny(name, sliding_window=6) if name == "mistral" else tiny(name), tokens(1, 9)
    attend_sparsely(
        model, SparseAttention(Dense() if name == "mistral" else Fixed(block=4, num_local_blocks=2))
    )
    more: dict[str, Any] = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
    found, expected = (model.generate(ids, use_cache=cached, **more) for cached in (True, False))  # type: ignore[operator]
    assert found.tolist() == expected.tolist()


def test_a_cache_with_eviction_is_refused_with_block_sparse_attention() -> None:
    model, ids = tiny("mistral", sliding_window=4), tokens(1, 9)
    attend_sparsely(model, SparseAttention(Fixed(block=4)))
    with pytest.raises(NotBuiltError, match="dropped its first"):
        model.generate(ids, max_new_tokens=3, do_sample=False, pad_token_id=0)  # type: ignore[operator]


def test_attention_dropout_falls_back_to_all_pairs_and_is_logged(
    caplog: pytest.LogCaptureFixture,
) -> None:
    log_first.cache_clear()
    model, ids = tiny("bert", attention_probs_dropout_prob=0.4), tokens()
    attend_sparsely(model, SparseAttention(BigBird(block=4)))
    still, model = model.eval()(ids).logits, model.train()
    runs = []
    for _ in range(2):
        torch.manual_seed(0)
        runs.append(model(ids).logits)
    assert not close(runs[0], still) and torch.equal(runs[0], runs[1])
    assert caplog.text.count("all pairs are computed") == 1, "not for each layer of each step"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda: tiny("gemma2"), "capped scores"),
        (lambda: copy.deepcopy(sparse("llama")), "copied after an engine"),
    ],
)
def test_options_without_a_kernel_are_refused_when_used(change: Any, words: str) -> None:
    model = change()
    if model.config._attn_implementation != "block_sparse":
        attend_sparsely(model, SparseAttention(Dense()))
    with pytest.raises((NotBuiltError, UsageError), match=words):
        model(tokens())


def sparse(name: str) -> nn.Module:
    model = tiny(name)
    attend_sparsely(model, SparseAttention(Dense()))
    return model


def test_models_and_sections_that_do_not_fit_are_refused_before_anything_changes() -> None:
    model = tiny("bert", is_decoder=True, add_cross_attention=True)
    with pytest.raises(NotBuiltError, match="another sequence"):
        switched(model, FIXED)  # type: ignore[arg-type]
    assert model.config._attn_implementation != "block_sparse"  # type: ignore[union-attr]
    with pytest.raises(ConfigError, match="divides num_local_blocks"):
        switched("llama", FIXED | {"num_global_blocks": 3, "num_local_blocks": 4})
    with pytest.raises(ConfigError, match="num_random_blocks beside mode 'fixed'"):
        switched("llama", FIXED | {"num_random_blocks": 2})
    per_head = Fixed(different_layout_per_head=True)
    with pytest.raises(NotBuiltError, match="4 heads over 3 ranks"):
        attend_sparsely(tiny("llama"), SparseAttention(per_head, 3, 0))


def trained(checkpoints: bool = False, **config: Any) -> list[Tensor]:
    """Train three steps and return their losses."""
    torch.manual_seed(1)
    model = tiny("llama")
    if checkpoints:
        model.gradient_checkpointing_enable({"use_reentrant": False})  # type: ignore[operator]
    engine = switched(model.train(), HEADS | {"attention": "unidirectional"}, **config)  # type: ignore[arg-type]
    losses = []
    for _ in range(3):
        losses.append(engine(input_ids=tokens(), labels=tokens()).loss)
        engine.backward(losses[-1])
        engine.step()
    engine.destroy()
    return [each.detach() for each in losses]


@pytest.mark.filterwarnings("ignore:`gradient_checkpointing_enable`")
def test_runs_have_the_same_bits_whatever_zero_does() -> None:
    first = trained()
    offloads = {"offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"}}
    ways = [trained(), trained(checkpoints=True)]
    ways += [trained(zero_optimization={"stage": 3, **more}) for more in ({}, offloads)]
    assert all(torch.equal(torch.stack(each), torch.stack(first)) for each in ways)
    assert first[2] < first[0]


@pytest.mark.parametrize(
    ("name", "mesh", "layout"),
    [
        (
            "llama",
            Mesh(tp=2),
            Fixed(block=2, different_layout_per_head=True, num_different_global_patterns=4),
        ),
        ("llama", Mesh(sp=2), BigBird(block=2, different_layout_per_head=True)),
        (
            "llama",
            Mesh(sp=2, tp=2),
            BigBird(block=2, different_layout_per_head=True, attention="unidirectional"),
        ),
        ("bert", Mesh(tp=2), BigBird(block=2, different_layout_per_head=True)),
    ],
)
def test_ranks_along_tp_and_sp_have_their_heads_layouts(
    name: str, mesh: Mesh, layout: BlockLayout
) -> None:
    model, inputs = tiny(name), batch(3)
    whole = copy.deepcopy(model)
    attend_sparsely(whole, SparseAttention(layout))
    expected = step(whole, inputs)

    def body(rank: Rank) -> tuple[Tensor, dict[str, Tensor | None]]:
        here, own = mesh.on_world(rank.size, rank.index), copy.deepcopy(model)
        comm = rank.comm.lay_out(here)
        place = here.coordinates["tp"] * here.sp + here.coordinates["sp"]
        plan = choose(own, here.tp)
        # Like the engine, call `prove` first, because its copies have no sparse layout.
        prove(own, plan)
        attend_sparsely(own, SparseAttention(layout, here.tp * here.sp, place))
        if here.tp > 1:
            parallelize(own, comm.along["tp"], plan=plan)
        if here.sp == 1:
            return step(own, inputs)
        share_sequences(own, comm.along["sp"], tp=here.tp)
        return step(own, own_part(own, inputs))

    for loss, grads in run_ranks(mesh.tp * mesh.sp, body):
        assert close(loss, expected[0])
        norm = grads["model.norm.weight" if name == "llama" else "bert.embeddings.LayerNorm.weight"]
        assert norm is not None and norm.isfinite().all()
        if mesh.sp == 1:
            whole_norm = expected[1][
                "model.norm.weight" if name == "llama" else "bert.embeddings.LayerNorm.weight"
            ]
            assert whole_norm is not None and close(norm, whole_norm)


def test_an_engine_returns_the_heads_of_each_rank() -> None:
    config = resolve(load({"sparse_attention": HEADS}), Facts())
    for rank in range(8):
        here = Mesh(tp=2, sp=2).on_world(8, rank)
        found = sparse_attention_of(config, here)
        assert found is not None and found.layout == layout_of(
            "fixed", {k: v for k, v in HEADS.items() if k != "mode"}
        )
        assert (found.ranks, found.index) == (
            4,
            here.coordinates["tp"] * 2 + here.coordinates["sp"],
        )


def step(model: nn.Module, inputs: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor | None]]:
    loss = model(**inputs).loss
    loss.backward()
    return loss.detach(), {name: each.grad for name, each in model.named_parameters()}


def test_a_pipeline_finds_the_blocks_of_a_model_that_attends_by_a_layout() -> None:
    inputs = {
        "input_ids": tokens(),
        "labels": tokens(),
        "attention_mask": torch.ones_like(tokens()),
    }
    assert len(find_chain(sparse("llama"), (), inputs).blocks) == 2


def test_gathered_keys_are_refused_along_sp() -> None:
    model = tiny("llama")
    attend_sparsely(model, SparseAttention(Fixed(block=2)))

    def body(rank: Rank) -> None:
        with pytest.raises(NotBuiltError, match="block_sparse' takes masks of another form"):
            share_sequences(
                model, rank.comm.lay_out(Mesh(sp=2).on_world(2, rank.index)).along["sp"], GATHERS
            )

    run_ranks(2, body)
