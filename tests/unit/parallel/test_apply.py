"""Tensor-parallel training of unmodified transformers models is bitwise equal to `virtual`.

`virtual` simulates all ranks of the axis in one process.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from deepseek_zero.base.errors import BatchMismatchError
from deepseek_zero.parallel.apply import parallelize
from deepseek_zero.parallel.plans import ParallelSettings, choose
from tests.in_process import Rank, run_ranks
from tests.unit.parallel.tiny import (
    EIGHT,
    MORE,
    batch,
    differences,
    furthest,
    ranks_step,
    step,
    tiny,
    virtual_step,
)

pytest.importorskip("transformers")

GATHERED = ParallelSettings(loss="gathered")


@pytest.mark.parametrize("name", EIGHT)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_two_ranks_compute_what_the_virtual_axis_does(name: str, dtype: torch.dtype) -> None:
    model = tiny(name, dtype)
    whole = virtual_step(model, 2, GATHERED)
    assert differences(ranks_step(model, 2, GATHERED), whole) == []


@pytest.mark.parametrize("name", MORE)
def test_more_families(name: str) -> None:
    model = tiny(name)
    whole = virtual_step(model, 2)
    assert differences(ranks_step(model, 2), whole) == []
    assert furthest(whole, step(copy.deepcopy(model), batch())) < 5e-6


@pytest.mark.parametrize("name", EIGHT)
def test_the_virtual_axis_computes_the_model_within_rounding(name: str) -> None:
    model = tiny(name)
    plain = step(copy.deepcopy(model), batch())
    assert furthest(virtual_step(model, 2, GATHERED), plain) < 5e-6


@pytest.mark.parametrize(
    "options", [{"num_key_value_heads": 1}, {"num_key_value_heads": 2}], ids=str
)
@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_ranks_share_a_key_value_head(name: str, options: dict[str, Any]) -> None:
    model = tiny(name, **options)
    plain = step(copy.deepcopy(model), batch())
    whole = virtual_step(model, 4, GATHERED)
    assert furthest(whole, plain) < 5e-6
    steps = ranks_step(model, 4, GATHERED)
    assert any(
        split.kind == "split" and len(split.sharers(0)) > 1 for split in steps[0].splits.values()
    )
    assert differences(steps, whole) == []


@pytest.mark.parametrize("name", ["llama", "gpt2", "gpt_neox", "bert"])
def test_uneven_heads_and_widths(name: str) -> None:
    """Three ranks do not divide 4 heads, 128 hidden features or a vocabulary of 67 evenly."""
    model = tiny(name, **({"num_key_value_heads": 4} if name == "llama" else {}))
    plain = step(copy.deepcopy(model), batch())
    whole = virtual_step(model, 3, GATHERED)
    assert furthest(whole, plain) < 5e-6
    assert differences(ranks_step(model, 3, GATHERED), whole) == []


def test_ranks_that_read_in_place_compute_the_same() -> None:
    model = tiny("llama")
    whole = virtual_step(model, 2, GATHERED)
    for seed in range(3):
        assert (
            differences(ranks_step(model, 2, GATHERED, reads_in_place=True, seed=seed), whole) == []
        )


@pytest.mark.parametrize("name", ["llama", "bert", "gpt_neox"])
def test_a_block_has_four_sums(name: str) -> None:
    """Each block has two sums in forward and two in backward.

    There are three more: one for the embedding, one for the head's input gradient, one to gather
    the logits.
    """
    model = tiny(name)

    def body(rank: Rank) -> int:
        own = copy.deepcopy(model)
        parallelize(own, rank.comm, GATHERED)
        before = rank.comm.meter.calls["tp"]
        step(own, batch())
        return rank.comm.meter.calls["tp"] - before

    assert run_ranks(2, body) == [2 * 4 + 3] * 2


def test_autocast() -> None:
    model = tiny("llama")
    whole = virtual_step(model, 2, GATHERED, autocast=True)
    assert not torch.equal(whole.loss, virtual_step(model, 2, GATHERED).loss)
    assert differences(ranks_step(model, 2, GATHERED, autocast=True), whole) == []


@pytest.mark.filterwarnings("ignore:`gradient_checkpointing_enable`")
def test_recomputed_blocks() -> None:
    model = tiny("llama")
    whole = virtual_step(model, 2, GATHERED)
    model.gradient_checkpointing_enable({"use_reentrant": False})  # type: ignore[operator]
    assert differences(ranks_step(model, 2, GATHERED), whole) == []


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_norms_of_heads_have_a_gradient_that_is_summed(dtype: torch.dtype) -> None:
    model = tiny("qwen3", dtype)
    whole, steps = virtual_step(model, 2), ranks_step(model, 2)
    assert steps[0].splits["model.layers.0.self_attn.q_norm.weight"].kind == "partial"
    assert differences(steps, whole) == []
    assert furthest(whole, step(copy.deepcopy(model), batch())) < (
        5e-6 if dtype == torch.float32 else 5e-2
    )


def test_outputs_that_are_gathered_immediately_and_whole_inputs() -> None:
    """Phi-3's own plan splits its fused projections and replicates its attention."""
    model = tiny("phi3")
    whole, steps = virtual_step(model, 2), ranks_step(model, 2)
    assert {choice.style for choice in choose(model, 2).choices} >= {"column_gather", "row_scatter"}
    assert differences(steps, whole) == []
    assert furthest(whole, step(copy.deepcopy(model), batch())) < 5e-6


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`")
def test_lora_with_split_layers() -> None:
    """B is split with a column layer and A with a row layer; frozen weights have no gradient."""
    peft = pytest.importorskip("peft")
    targets = ["q_proj", "v_proj", "o_proj", "up_proj", "down_proj"]
    config = peft.LoraConfig(r=4, target_modules=targets, lora_dropout=0.0, init_lora_weights=False)
    with torch.random.fork_rng():
        torch.manual_seed(1)
        model = peft.get_peft_model(tiny("llama"), config)
    whole, steps = virtual_step(model, 2), ranks_step(model, 2)
    assert differences(steps, whole) == []
    assert furthest(whole, step(copy.deepcopy(model), batch())) < 5e-6
    split = {
        name.split(".layers.0.")[1]
        for name, each in steps[0].splits.items()
        if each.kind == "split" and "layers.0" in name
    }
    assert {
        "self_attn.q_proj.lora_B.default.weight",
        "self_attn.o_proj.lora_A.default.weight",
    } <= split
    assert (
        not {"self_attn.q_proj.lora_A.default.weight", "self_attn.o_proj.lora_B.default.weight"}
        & split
    )


class Prompted(torch.nn.Module):
    """A frozen model with trained prompts before its input, as in prompt tuning."""

    def __init__(self, base: torch.nn.Module) -> None:
        super().__init__()
        self.base_model, self.config = base.requires_grad_(False), base.config
        self.prompt = torch.nn.Embedding(3, 32)
        torch.nn.init.normal_(self.prompt.weight, generator=torch.Generator().manual_seed(4))

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor, **rest: Any) -> Any:
        rows = len(input_ids)
        prompts = self.prompt(torch.arange(3)).expand(rows, 3, 32)
        embedded: Any = self.base_model.get_input_embeddings()(input_ids)  # type: ignore[operator]
        padded = torch.cat((labels.new_full((rows, 3), -100), labels), 1)
        return self.base_model(
            inputs_embeds=torch.cat((prompts, embedded), 1), labels=padded, **rest
        )


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_learnt_prompts_before_split_layers(name: str) -> None:
    model = Prompted(tiny(name))
    whole, steps = virtual_step(model, 2), ranks_step(model, 2)
    assert differences(steps, whole) == []
    plain = step(copy.deepcopy(model), batch())
    assert furthest(whole, plain) < 5e-6
    assert [key for key, grad in whole.grads.items() if grad is not None] == ["prompt.weight"]
    assert plain.grads["prompt.weight"] is not None and plain.grads["prompt.weight"].abs().sum() > 0


def test_different_inputs_on_ranks_are_reported() -> None:
    model = tiny("llama")

    def body(rank: Rank) -> None:
        own = copy.deepcopy(model)
        parallelize(own, rank.comm)
        step(own, batch(rank.index))

    with pytest.raises(
        BatchMismatchError,
        match=r"Data inconsistency within the TP group.*rank 0 was given .*, rank 1 ",
    ):
        run_ranks(2, body)


def test_a_forward_that_raised_leaves_no_state() -> None:
    """The next forward works and draws from the common generator."""
    model = tiny("llama", attention_dropout=0.1)

    def body(rank: Rank) -> bool:
        own = copy.deepcopy(model)
        parallelize(own, rank.comm)
        axis = own.lm_head.axis  # type: ignore[union-attr]

        def fail(module: Any, args: Any) -> None:
            raise KeyError("once")

        hook = own.model.layers[0].self_attn.o_proj.register_forward_pre_hook(fail)  # type: ignore[union-attr, index]
        before = torch.get_rng_state()
        with pytest.raises(KeyError):
            own(**batch())
        hook.remove()
        left = bool(axis._entered) and not torch.equal(torch.get_rng_state(), before)  # type: ignore[union-attr]
        axis.begin(own, ())  # type: ignore[operator, union-attr]
        torch.set_rng_state(before)
        return left and not axis._entered and axis.streams._outside is None  # type: ignore[union-attr]

    assert run_ranks(2, body) == [True, True]
