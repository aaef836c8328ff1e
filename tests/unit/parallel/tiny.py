"""Tiny unmodified transformers models, and one training step in one process or on several ranks."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from deepseek_zero.parallel.apply import parallelize, virtual
from deepseek_zero.parallel.cuts import cut
from deepseek_zero.parallel.plans import ParallelSettings
from deepseek_zero.planner.split import Split
from tests.in_process import Rank, run_ranks

VOCABULARY, LENGTH, BATCH = 67, 8, 3
_COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 32,
}
_GQA = _COMMON | {"num_key_value_heads": 2, "head_dim": 8}
_GPT2: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "n_embd": 32,
    "n_layer": 2,
    "n_head": 4,
    "n_positions": 32,
    "attn_pdrop": 0.0,
    "embd_pdrop": 0.0,
    "resid_pdrop": 0.0,
}
_OPT: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "ffn_dim": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 32,
    "word_embed_proj_dim": 32,
    "dropout": 0.0,
    "attention_dropout": 0.0,
}
_BERT = _COMMON | {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
# name -> (config class, model class, options)
MODELS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", "LlamaForCausalLM", _GQA),
    "mistral": ("MistralConfig", "MistralForCausalLM", _GQA),
    "qwen2": (
        "Qwen2Config",
        "Qwen2ForCausalLM",
        _COMMON | {"num_key_value_heads": 2, "tie_word_embeddings": True},
    ),
    "gemma2": ("Gemma2Config", "Gemma2ForCausalLM", _GQA),
    "gpt2": ("GPT2Config", "GPT2LMHeadModel", _GPT2),
    "gpt_neox": ("GPTNeoXConfig", "GPTNeoXForCausalLM", _COMMON),
    "opt": ("OPTConfig", "OPTForCausalLM", _OPT),
    "qwen3": ("Qwen3Config", "Qwen3ForCausalLM", _GQA),
    "olmo2": ("Olmo2Config", "Olmo2ForCausalLM", _GQA | {"pad_token_id": 0}),
    "gptj": ("GPTJConfig", "GPTJForCausalLM", _GPT2 | {"rotary_dim": 4}),
    "roberta": ("RobertaConfig", "RobertaForMaskedLM", _BERT | {"pad_token_id": 1}),
    "distilbert": (
        "DistilBertConfig",
        "DistilBertForMaskedLM",
        {
            "vocab_size": VOCABULARY,
            "dim": 32,
            "n_layers": 2,
            "n_heads": 4,
            "hidden_dim": 48,
            "dropout": 0.0,
            "attention_dropout": 0.0,
            "max_position_embeddings": 32,
        },
    ),
    "phi3": (
        "Phi3Config",
        "Phi3ForCausalLM",
        _COMMON | {"num_key_value_heads": 2, "pad_token_id": 0},
    ),
    "bert": ("BertConfig", "BertForMaskedLM", _BERT),
}


MORE = ("qwen3", "olmo2", "gptj", "roberta", "distilbert", "phi3")
EIGHT = ("llama", "mistral", "qwen2", "gemma2", "gpt2", "gpt_neox", "opt", "bert")


def tiny(name: str, dtype: torch.dtype = torch.float32, **options: Any) -> nn.Module:
    """Return a model with the same random values in every call, also in biases and norms."""
    import transformers

    config_name, model_name, known = MODELS[name]
    config = getattr(transformers, config_name)(**{**known, **options})
    with torch.random.fork_rng():
        torch.manual_seed(11)
        model = getattr(transformers, model_name)(config)
        for parameter in model.parameters():
            parameter.data.add_(torch.randn_like(parameter) * 0.05)
    return model.to(dtype).train()


def batch(seed: int = 3) -> dict[str, Tensor]:
    """Return tokens and labels, of which some are ignored."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(VOCABULARY, (BATCH, LENGTH), generator=generator)
    labels = tokens.clone()
    labels[0, :3] = -100
    return {"input_ids": tokens, "labels": labels}


@dataclass
class Step:
    """The results of one forward and backward."""

    loss: Tensor
    grads: dict[str, Tensor | None]
    splits: dict[str, Split] = field(default_factory=dict)
    logits: Tensor | None = None


def step(model: nn.Module, inputs: dict[str, Tensor], autocast: bool = False) -> Step:
    """Run one forward and backward with a fixed seed."""
    torch.manual_seed(5)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        output = model(
            **inputs, **({"use_cache": False} if "ert" not in type(model).__name__ else {})
        )
    output.loss.backward()
    grads = {
        name: None if each.grad is None else each.grad.clone()
        for name, each in model.named_parameters()
    }
    return Step(
        output.loss.detach(),
        grads,
        logits=None if output.logits is None else output.logits.detach(),
    )


def ranks_step(
    model: nn.Module,
    tp: int,
    settings: ParallelSettings | None = None,
    *,
    autocast: bool = False,
    **world: Any,
) -> list[Step]:
    """Run the step on the ranks of a tensor-parallel axis."""

    def body(rank: Rank) -> Step:
        own = copy.deepcopy(model)
        splits = parallelize(own, rank.comm, settings)
        found = step(own, batch(), autocast)
        found.splits = splits
        return found

    return run_ranks(tp, body, **world)


def virtual_step(
    model: nn.Module, tp: int, settings: ParallelSettings | None = None, *, autocast: bool = False
) -> Step:
    """Run the step with all ranks simulated in one process."""
    return step(virtual(copy.deepcopy(model), tp, settings), batch(), autocast)


def summed(steps: list[Step], name: str, rank: int) -> Tensor | None:
    """Return a rank's gradient.

    If several ranks have the same elements and compute partial gradients, these are summed in rank
    order.
    """
    split, own = steps[rank].splits[name], steps[rank].grads[name]
    summands = split.summands(rank, len(steps))
    if own is None or not summands:
        return own
    total = torch.zeros_like(own, dtype=torch.float32)
    for other in summands:
        grad = steps[other].grads[name]
        assert grad is not None
        total = total + grad.float()
    return total.to(own.dtype)


def differences(steps: list[Step], whole: Step) -> list[str]:
    """Return all bitwise differences between the ranks' steps and that of the whole model."""
    found = []
    for rank, each in enumerate(steps):
        if not torch.equal(each.loss, whole.loss):
            found.append(f"rank {rank}: loss {each.loss.item()} and {whole.loss.item()}")
        for name, grad in whole.grads.items():
            own, split = summed(steps, name, rank), each.splits[name]
            if (own is None) != (grad is None):
                found.append(f"rank {rank}: {name} has {'no' if own is None else 'a'} gradient")
            elif grad is not None and own is not None:
                expected = cut(grad, split, rank)
                if own.shape != expected.shape or not torch.equal(own, expected):
                    far = (
                        (own - expected).abs().max().item()
                        if own.shape == expected.shape
                        else own.shape
                    )
                    found.append(f"rank {rank}: {name} differs by {far}")
    return found


def furthest(found: Step, plain: Step) -> float:
    """Return the largest relative difference of loss and gradients."""
    far = abs((found.loss - plain.loss) / plain.loss).item()
    for name, grad in plain.grads.items():
        own = found.grads[name]
        if grad is not None and own is not None:
            scale = max(grad.abs().max().item(), 1e-3)
            far = max(far, (own.float() - grad.float()).abs().max().item() / scale)
    return far


Body = Callable[[Rank], Step]
