"""Unmodified transformers models in stages have the loss and gradients of one process."""

from __future__ import annotations

import copy
from importlib.util import find_spec
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from deepseek_zero.base.mesh import Mesh
from deepseek_zero.pipeline.chain import ChainError, find_chain
from deepseek_zero.pipeline.executor import PipelineExecutor
from deepseek_zero.pipeline.messages import StageLinks
from deepseek_zero.pipeline.schedule import make_schedule
from deepseek_zero.pipeline.stage import Cut, MicroBatch, cut_chain, take_stages
from tests.in_process import Rank, run_ranks
from tests.needs import need
from tests.unit.pipeline.held import assert_held

MANY = 3
SIZES: dict[str, Any] = {
    "vocab_size": 61,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "num_hidden_layers": 4,
    "intermediate_size": 48,
}
GROUPED = {**SIZES, "num_key_value_heads": 2}
NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}


class Wrapped(nn.Module):
    """A module around a model that hides the model's cache argument."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, input_ids: Tensor, attention_mask: Tensor, labels: Tensor) -> Any:
        found = self.net(input_ids=input_ids, attention_mask=attention_mask)
        found["loss"] = nn.functional.cross_entropy(
            found.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()
        )
        return found


def model_of(family: str) -> nn.Module:
    need(find_spec("transformers") is not None, "transformers")
    import transformers as hf

    gpt2 = {
        "vocab_size": 61,
        "n_embd": 32,
        "n_head": 4,
        "n_layer": 4,
        "resid_pdrop": 0,
        "embd_pdrop": 0,
    }
    opt = {key: size for key, size in SIZES.items() if key != "intermediate_size"}
    t5 = {"vocab_size": 61, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4}
    made: dict[str, Any] = {
        "llama": lambda: hf.LlamaForCausalLM(hf.LlamaConfig(**GROUPED)),
        "mistral": lambda: hf.MistralForCausalLM(hf.MistralConfig(**GROUPED)),
        "qwen2": lambda: hf.Qwen2ForCausalLM(hf.Qwen2Config(**GROUPED, tie_word_embeddings=True)),
        "gemma2": lambda: hf.Gemma2ForCausalLM(hf.Gemma2Config(**GROUPED, head_dim=8)),
        "gpt2": lambda: hf.GPT2LMHeadModel(hf.GPT2Config(**gpt2, attn_pdrop=0)),
        "gpt_neox": lambda: hf.GPTNeoXForCausalLM(hf.GPTNeoXConfig(**SIZES)),
        "opt": lambda: hf.OPTForCausalLM(
            hf.OPTConfig(**opt, ffn_dim=48, word_embed_proj_dim=32, dropout=0.0)
        ),
        "bert": lambda: hf.BertForMaskedLM(hf.BertConfig(**SIZES, **NO_DROPOUT)),
        "t5": lambda: hf.T5ForConditionalGeneration(hf.T5Config(**t5, decoder_start_token_id=0)),
        "wrapped": lambda: Wrapped(hf.LlamaForCausalLM(hf.LlamaConfig(**GROUPED))),
        "albert": lambda: hf.AlbertForMaskedLM(hf.AlbertConfig(**SIZES, embedding_size=16)),
    }
    torch.manual_seed(0)
    model: nn.Module = made[family]()
    return model.train()


def sample(micro: int) -> MicroBatch:
    generator = torch.Generator().manual_seed(micro)
    ids = torch.randint(0, 61, (2, 9), generator=generator)
    mask = torch.ones_like(ids)
    mask[1, 6:] = 0
    return MicroBatch(
        (), {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}
    )


def alone(model: nn.Module, cut: Cut) -> tuple[list[Tensor], dict[str, Tensor]]:
    """Train one process with gradient accumulation and return its losses and gradients."""
    losses = []
    for micro in range(MANY):
        loss = model(**sample(micro).kwargs).loss
        (loss / MANY).backward()
        losses.append(loss.detach())
    return losses, {
        name: param.grad for name, param in model.named_parameters() if param.grad is not None
    }


FAMILIES = ["llama", "mistral", "qwen2", "gemma2", "gpt2", "gpt_neox", "opt", "bert", "wrapped"]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("ranks", [2, 3])
def test_unmodified_models_have_the_bits_of_one_process(family: str, ranks: int) -> None:
    model = model_of(family)
    cut = cut_chain(model, find_chain(model, (), sample(0).kwargs), ranks)
    schedule = make_schedule("1f1b", ranks, 1, MANY)
    losses, expected = alone(copy.deepcopy(model), cut)

    def body(rank: Rank) -> tuple[list[Tensor] | None, dict[str, Tensor]]:
        own = copy.deepcopy(model)
        mesh = Mesh(pp=ranks).on_world(rank.size, rank.index)
        executor = PipelineExecutor(
            StageLinks(rank.comm, mesh, schedule), take_stages(own, cut, [rank.index])
        )
        outcome = executor.run(schedule, [sample(micro) for micro in range(MANY)])
        return outcome.losses, {
            name: p.grad for name, p in own.named_parameters() if p.grad is not None
        }

    found = run_ranks(ranks, body, reads_in_place=True)
    assert found[-1][0] is not None
    assert all(torch.equal(*pair) for pair in zip(found[-1][0], losses, strict=True))
    assert_held(
        [grads for _, grads in found],
        expected,
        lambda name: len(cut.owners[name]),
        are_summed=False,
    )


@pytest.mark.parametrize(
    ("family", "said"),
    [("t5", "is given more than the output of"), ("albert", "has no list of blocks")],
)
def test_other_models_are_refused_by_name(family: str, said: str) -> None:
    model = model_of(family)
    kwargs = dict(sample(0).kwargs)
    with pytest.raises(ChainError, match=said) as caught:
        find_chain(model, (), kwargs)
    assert "PipelineModule" in str(caught.value)
