"""Unmodified models with sequence parallelism, also with tensor parallelism, equal one process."""

from __future__ import annotations

import copy
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from deepseek_zero.base.errors import NotBuiltError, UsageError
from deepseek_zero.base.mesh import Mesh
from deepseek_zero.parallel.apply import parallelize
from deepseek_zero.parallel.cuts import cut
from deepseek_zero.parallel.sequence_model import (
    SequenceSettings,
    _Shared,
    choose_attention,
    own_part,
    own_tokens,
    share_sequences,
)
from tests.in_process import Rank, run_ranks
from tests.shared_sequences import batch, close
from tests.unit.parallel.tiny import LENGTH, Step, tiny

pytest.importorskip("transformers")
THREE = {"hidden_size": 36, "num_attention_heads": 3, "num_key_value_heads": 3, "head_dim": 12}


def step(model: nn.Module, inputs: dict[str, Tensor]) -> Step:
    loss = model(**inputs).loss
    loss.backward()
    grads = {
        name: None if each.grad is None else each.grad.clone()
        for name, each in model.named_parameters()
    }
    return Step(loss.detach(), grads)


def on_ranks(
    model: nn.Module,
    mesh: Mesh,
    inputs: dict[str, Tensor],
    settings: SequenceSettings | None = None,
    **world: Any,
) -> list[tuple[Step, dict[str, int], int]]:
    """Return each rank's step with gradients averaged over sp, its sent bytes and its tp rank."""

    def body(rank: Rank) -> tuple[Step, dict[str, int], int]:
        here, own, splits = mesh.on_world(rank.size, rank.index), copy.deepcopy(model), {}
        comm = rank.comm.lay_out(here)
        if "tp" in comm.along:
            splits = parallelize(own, comm.along["tp"])
        share_sequences(own, comm.along["sp"], settings, tp=here.tp)
        found = step(own, own_part(own, inputs))
        sent = dict(rank.comm.meter.sent_bytes)
        for name, grad in found.grads.items():
            if grad is not None:
                rows = comm.along["sp"].all_gather_rows(grad.flatten(), name)
                found.grads[name] = rows.mean(0).view(grad.shape)
                if splits and (summands := splits[name].summands(here.coordinates["tp"], here.tp)):
                    rows = comm.along["tp"].all_gather_rows(found.grads[name].flatten(), name)  # type: ignore[union-attr]
                    found.grads[name] = sum(rows[each] for each in summands).view(grad.shape)  # type: ignore[union-attr]
        found.splits = splits
        return found, sent, here.coordinates["tp"]

    return run_ranks(mesh.sp * mesh.tp, body, **world)


def compare(
    model: nn.Module,
    mesh: Mesh,
    inputs: dict[str, Tensor],
    settings: SequenceSettings | None = None,
) -> None:
    """Check that losses and averaged gradients are within 1e-6 of one process."""
    whole = step(copy.deepcopy(model), inputs)
    for found, _, tp in on_ranks(model, mesh, inputs, settings):
        assert abs(found.loss.item() / whole.loss.item() - 1) < 1e-6
        for name, grad in whole.grads.items():
            own = found.grads[name]
            assert (own is None) == (grad is None), name
            if own is not None and grad is not None:
                assert close(own, cut(grad, found.splits[name], tp) if found.splits else grad), name


@pytest.mark.parametrize("attention", ["ulysses", "all_gather"])
@pytest.mark.parametrize("name", ["llama", "qwen2", "gpt2", "gpt_neox", "bert"])
def test_unmodified_models(name: str, attention: Any) -> None:
    """The labels of a masked language model are not shifted."""
    compare(tiny(name), Mesh(sp=2), batch(0), SequenceSettings(attention))


@pytest.mark.parametrize(
    ("name", "options", "size"),
    [
        ("llama", THREE, 2),
        ("llama", THREE | {"num_key_value_heads": 1}, 4),
        ("gpt2", {"n_embd": 36, "n_head": 3}, 2),
        ("mistral", {"sliding_window": 3}, 2),
        ("llama", {"num_key_value_heads": 1}, 4),
    ],
)
def test_any_number_of_heads(name: str, options: dict[str, Any], size: int) -> None:
    """With 5 ignored labels, a rank may have no valid token."""
    attention: Any = "all_gather" if name == "mistral" else "auto"
    compare(tiny(name, **options), Mesh(sp=size), batch(1, ignores=5), SequenceSettings(attention))


@pytest.mark.parametrize("attention", ["ulysses", "all_gather"])
@pytest.mark.parametrize(
    ("name", "options"), [("llama", {}), ("llama", {"num_key_value_heads": 1}), ("gpt2", {})]
)
def test_with_tensor_parallelism(name: str, options: dict[str, Any], attention: Any) -> None:
    """Two tp ranks have half of the heads each, and two sp ranks divide these again."""
    compare(tiny(name, **options), Mesh(sp=2, tp=2), batch(2), SequenceSettings(attention))


def test_bytes_are_those_of_the_formula() -> None:
    """A rank's keys and values are sent three times to C - 1 ranks.

    They are gathered in forward and in backward, and their gradients are reduced.
    """
    model = tiny("llama")
    text: Any = model.config
    own = 3 * (LENGTH // 2) * 2 * text.num_key_value_heads * text.head_dim * 4
    for found in on_ranks(model, Mesh(sp=2), batch(0), SequenceSettings("all_gather")):
        assert found[1]["sp"] == text.num_hidden_layers * 3 * own


@pytest.mark.parametrize("attention", ["ulysses", "all_gather"])
def test_padding_after_sequences_may_be_masked(attention: Any) -> None:
    padded = batch(1) | {"attention_mask": torch.ones(3, LENGTH, dtype=torch.long)}
    padded["attention_mask"][1, 3:] = 0
    padded["attention_mask"][2, 6:] = 0
    padded["labels"][padded["attention_mask"] == 0] = -100
    compare(tiny("llama"), Mesh(sp=2), padded, SequenceSettings(attention))
    turned = padded | {"attention_mask": padded["attention_mask"].flip(1)}
    with pytest.raises(NotBuiltError, match="leaves out tokens before others"):
        on_ranks(tiny("llama"), Mesh(sp=2), turned, SequenceSettings(attention))
    with pytest.raises(NotBuiltError, match="whose tokens see those behind them"):
        on_ranks(tiny("bert"), Mesh(sp=2), padded, SequenceSettings(attention))


@pytest.mark.parametrize(
    ("name", "options", "mesh", "attention", "words"),
    [
        ("llama", THREE, Mesh(sp=2), "ulysses", "3 attention heads cannot be cut"),
        (
            "llama",
            {},
            Mesh(sp=4, tp=2),
            "ulysses",
            "4 attention heads, 2 on each of 2 ranks along tp, cannot be cut",
        ),
        ("llama", {"attention_dropout": 0.1}, Mesh(sp=2), "auto", "drop something in training"),
        (
            "llama",
            {"attn_implementation": "eager"},
            Mesh(sp=2),
            "auto",
            "takes masks of another form",
        ),
        ("gemma2", {}, Mesh(sp=2), "ulysses", "sliding_attention"),
    ],
)
def test_models_that_are_not_built_are_refused_by_name(
    name: str, options: dict[str, Any], mesh: Mesh, attention: Any, words: str
) -> None:
    with pytest.raises(NotBuiltError, match=words):
        on_ranks(tiny(name, **options), mesh, batch(0), SequenceSettings(attention))


SMALL = {
    "vocab_size": 67,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 32,
}
MIXTURE = SMALL | {"num_key_value_heads": 2, "num_local_experts": 4, "output_router_logits": True}
ENCODER = SMALL | {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
MOBILE = ENCODER | {"embedding_size": 16, "intra_bottleneck_size": 32, "true_hidden_size": 32}


def made(config: str, model: str, options: dict[str, Any]) -> nn.Module:
    import transformers

    with torch.random.fork_rng():
        torch.manual_seed(11)
        found: nn.Module = getattr(transformers, model)(
            getattr(transformers, config)(**options)
        ).train()
    return found


@pytest.mark.parametrize(
    ("config", "model", "options", "words"),
    [
        (
            "LlamaConfig",
            "LlamaForSequenceClassification",
            SMALL,
            "loss of LlamaForSequenceClassification is not known",
        ),
        (
            "LlamaConfig",
            "LlamaForQuestionAnswering",
            SMALL,
            "loss of LlamaForQuestionAnswering is not known",
        ),
        ("BertConfig", "BertForPreTraining", ENCODER, "loss of BertForPreTraining is not known"),
        (
            "BertConfig",
            "BertForMultipleChoice",
            ENCODER,
            "loss of BertForMultipleChoice is not known",
        ),
        ("BertConfig", "BertModel", ENCODER, "output of 'pooler'"),
        (
            "RobertaConfig",
            "RobertaForMaskedLM",
            ENCODER,
            "positions of 'roberta.embeddings.position_embeddings'",
        ),
        ("MobileBertConfig", "MobileBertForMaskedLM", MOBILE, "by the tokens next to it"),
        ("MixtralConfig", "MixtralForCausalLM", MIXTURE, "a part over the routers of all tokens"),
        (
            "MambaConfig",
            "MambaForCausalLM",
            SMALL,
            "mixer.conv1d' .* computes a token from its neighbours",
        ),
        ("MambaConfig", "MambaForCausalLM", {"num_hidden_layers": 0}, "has no num_attention_heads"),
    ],
)
def test_layers_that_mix_tokens_are_refused_by_name(
    config: str, model: str, options: dict[str, Any], words: str
) -> None:
    with pytest.raises(NotBuiltError, match=words):
        choose_attention(made(config, model, options), 2, 1, SequenceSettings())


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")
def test_an_adapters_wrapper_does_not_hide_the_head() -> None:
    peft = pytest.importorskip("peft")
    lora = peft.LoraConfig(r=4, target_modules=["q_proj"])
    choose_attention(
        peft.get_peft_model(made("LlamaConfig", "LlamaForCausalLM", SMALL), lora),
        2,
        1,
        SequenceSettings(),
    )
    hidden = peft.get_peft_model(made("LlamaConfig", "LlamaForSequenceClassification", SMALL), lora)
    with pytest.raises(
        NotBuiltError, match=r"the loss of .* is not known to be a mean over tokens"
    ):
        choose_attention(hidden, 2, 1, SequenceSettings())


@pytest.mark.parametrize("attention", ["ulysses", "all_gather"])
def test_a_model_that_names_the_mask_of_its_attention(attention: Any) -> None:
    options = SMALL | {
        "num_key_value_heads": 2,
        "head_dim": 8,
        "num_experts": 4,
        "moe_intermediate_size": 16,
    }
    options |= {"num_experts_per_tok": 2}
    options |= {"layer_types": ["full_attention", "full_attention"]}
    compare(
        made("AfmoeConfig", "AfmoeForCausalLM", options),
        Mesh(sp=2),
        batch(0),
        SequenceSettings(attention),
    )


def test_attention_with_its_own_mask_is_refused_by_name() -> None:
    doge = made(
        "DogeConfig", "DogeForCausalLM", SMALL | {"num_key_value_heads": 2, "hidden_dropout": 0.0}
    )
    with pytest.raises(
        NotBuiltError, match=r"attention of DogeAttention .* adds a bias to its scores"
    ):
        on_ranks(doge, Mesh(sp=2), batch(0))


ALL, CAUSAL = torch.ones(6, 6, dtype=torch.bool), torch.ones(6, 6, dtype=torch.bool).tril()
HIDDEN = torch.finfo(torch.float32).min


@pytest.mark.parametrize(
    ("mask", "options", "said"),
    [
        (CAUSAL, {}, ""),
        (torch.zeros(6, 6).masked_fill(~CAUSAL, HIDDEN), {}, ""),
        (CAUSAL.triu(-2), {"sliding_window": 3}, ""),
        (ALL, {"is_causal": False}, ""),
        (torch.block_diag(CAUSAL[:3, :3], CAUSAL[:3, :3]), {}, "hides tokens"),
        (ALL, {}, "sees later tokens"),
        (CAUSAL, {"is_causal": False}, "hides tokens"),
        (CAUSAL.triu(-2), {}, "hides tokens"),
        (torch.full((6, 6), 0.5), {}, "adds a bias"),
        (None, {"position_bias": torch.ones(6, 6)}, "adds a bias"),
    ],
)
def test_a_mask_is_what_ranks_compute_without_it(
    mask: Tensor | None, options: dict[str, Any], said: str
) -> None:
    def body(rank: Rank) -> None:
        shared = _Shared(tiny("llama"), rank.comm, SequenceSettings(), "ulysses")
        shared.look_at_scores(nn.Identity(), mask if mask is None else mask[None, None], options)

    with pytest.raises(NotBuiltError, match=said) if said else nullcontext():
        run_ranks(2, body)


def test_a_forward_that_calls_no_registered_attention_is_refused_by_name() -> None:
    model: Any = tiny("llama")
    model.model.layers = nn.ModuleList()
    with pytest.raises(NotBuiltError, match="has called no attention that is registered"):
        on_ranks(model, Mesh(sp=2), batch(0))


def test_a_requested_router_loss_is_refused_by_name() -> None:
    model = made("MixtralConfig", "MixtralForCausalLM", MIXTURE | {"output_router_logits": False})
    with pytest.raises(NotBuiltError, match="output_router_logits is not built"):
        on_ranks(model, Mesh(sp=2), batch(0) | {"output_router_logits": True})  # type: ignore[dict-item]


def test_a_model_is_shared_only_once() -> None:
    def body(rank: Rank) -> None:
        comm = rank.comm.lay_out(Mesh(sp=2).on_world(2, rank.index)).along["sp"]
        model = tiny("llama")
        share_sequences(model, comm)
        for again in (model, model.model):
            with pytest.raises(UsageError, match="already shares its sequences"):
                share_sequences(again, comm)  # type: ignore[arg-type]

    run_ranks(2, body)


def test_windows_in_both_directions_are_those_of_one_process() -> None:
    transformers = pytest.importorskip("transformers")
    words = SMALL | {"num_hidden_layers": 3, "local_attention": 4, "pad_token_id": 0}
    config = transformers.ModernBertConfig(**words, global_attn_every_n_layers=3)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = transformers.ModernBertForMaskedLM(config).train()
    compare(model, Mesh(sp=2), batch(0))


def test_a_batch_without_tokens_is_refused() -> None:
    labels = torch.zeros(2, 4, dtype=torch.long)
    with pytest.raises(UsageError, match="neither input_ids nor inputs_embeds"):
        own_tokens({"labels": labels}, 0, 2)
    with pytest.raises(UsageError, match="neither input_ids nor inputs_embeds"):
        own_tokens({"labels": labels, "input_ids": None}, 0, 2)
    found = own_tokens({"input_ids": None, "inputs_embeds": torch.zeros(2, 4, 3)}, 0, 2)
    assert found["inputs_embeds"].shape == (2, 2, 3)


def test_arguments_that_are_none_count_as_missing() -> None:
    tokens = torch.zeros(2, 4, dtype=torch.long)
    found = own_tokens({"input_ids": tokens, "labels": None, "position_ids": None}, 1, 2)
    assert found["position_ids"].tolist() == [[2, 3]] * 2 and "shift_labels" not in found
    found = own_tokens({"input_ids": tokens, "labels": tokens + 5, "shift_labels": None}, 1, 2)
    assert found["shift_labels"].tolist() == [[5, -100]] * 2
