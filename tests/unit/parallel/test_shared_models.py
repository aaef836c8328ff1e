"""Unmodified models on sequences that ranks share, beside split layers too: ranks as threads against one process."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from deepseek_zero.base.errors import NotBuiltError
from deepseek_zero.base.mesh import Mesh
from deepseek_zero.parallel.apply import parallelize
from deepseek_zero.parallel.cuts import cut
from deepseek_zero.parallel.sequence_model import SequenceSettings, own_part, share_sequences
from tests.in_process import Rank, run_ranks
from tests.shared_sequences import batch, close
from tests.unit.parallel.tiny import LENGTH, Step, tiny

pytest.importorskip("transformers")
THREE = {"hidden_size": 36, "num_attention_heads": 3, "num_key_value_heads": 3, "head_dim": 12}


def step(model: nn.Module, inputs: dict[str, Tensor]) -> Step:
    loss = model(**inputs).loss
    loss.backward()
    grads = {name: None if each.grad is None else each.grad.clone() for name, each in model.named_parameters()}
    return Step(loss.detach(), grads)


def on_ranks(
    model: nn.Module, mesh: Mesh, inputs: dict[str, Tensor], settings: SequenceSettings | None = None, **world: Any
) -> list[tuple[Step, dict[str, int], int]]:
    """Each rank's step, with the means of gradients over sp, the bytes that it sent, and its place along tp."""

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


def compare(model: nn.Module, mesh: Mesh, inputs: dict[str, Tensor], settings: SequenceSettings | None = None) -> None:
    """Within 1e-6 of one process: losses, and gradients as ZeRO would average them."""
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
    """Labels of a masked language model are its own tokens', and stay."""
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
    """With 5 labels ignored a rank may have no valid token at all."""
    attention: Any = "all_gather" if name == "mistral" else "auto"
    compare(tiny(name, **options), Mesh(sp=size), batch(1, ignores=5), SequenceSettings(attention))


@pytest.mark.parametrize("attention", ["ulysses", "all_gather"])
@pytest.mark.parametrize(("name", "options"), [("llama", {}), ("llama", {"num_key_value_heads": 1}), ("gpt2", {})])
def test_beside_tensor_parallelism(name: str, options: dict[str, Any], attention: Any) -> None:
    """Each of two ranks along tp has half the heads, which two ranks along sp divide again."""
    compare(tiny(name, **options), Mesh(sp=2, tp=2), batch(2), SequenceSettings(attention))


def test_bytes_are_those_of_the_formula() -> None:
    """(C - 1) times a rank's keys and values: gathered, gathered again, and their gradients."""
    model = tiny("llama")
    text: Any = model.config
    own = 3 * (LENGTH // 2) * 2 * text.num_key_value_heads * text.head_dim * 4
    for found in on_ranks(model, Mesh(sp=2), batch(0), SequenceSettings("all_gather")):
        assert found[1]["sp"] == text.num_hidden_layers * 3 * own


@pytest.mark.parametrize("attention", ["ulysses", "all_gather"])
def test_padding_behind_sequences_may_be_masked(attention: Any) -> None:
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
        ("llama", {}, Mesh(sp=4, tp=2), "ulysses", "4 attention heads, 2 on each of 2 ranks along tp, cannot be cut"),
        ("llama", {"attention_dropout": 0.1}, Mesh(sp=2), "auto", "drop something in training"),
        ("llama", {"attn_implementation": "eager"}, Mesh(sp=2), "auto", "takes masks of another form"),
        ("gemma2", {}, Mesh(sp=2), "ulysses", "sliding_attention"),
    ],
)
def test_models_that_are_not_built_are_refused_by_name(
    name: str, options: dict[str, Any], mesh: Mesh, attention: Any, words: str
) -> None:
    with pytest.raises(NotBuiltError, match=words):
        on_ranks(tiny(name, **options), mesh, batch(0), SequenceSettings(attention))
