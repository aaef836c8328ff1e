"""Results with activations sharded over tokens are bitwise equal to `virtual` in that mode."""

from __future__ import annotations

import copy

import pytest
import torch

from deepseek_zero.base.errors import NotBuiltError, UsageError
from deepseek_zero.parallel.apply import parallelize
from deepseek_zero.parallel.plans import ParallelSettings, choose
from tests.in_process import Rank, run_ranks
from tests.unit.parallel.tiny import (
    batch,
    differences,
    furthest,
    ranks_step,
    step,
    tiny,
    virtual_step,
)

pytest.importorskip("transformers")

SHARDED = ParallelSettings(sequence=True)
FAMILIES = ("llama", "gpt2", "gpt_neox", "qwen2", "gemma2", "bert")


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_ranks_compute_what_the_virtual_axis_does(name: str, dtype: torch.dtype) -> None:
    model = tiny(name, dtype)
    whole, steps = virtual_step(model, 2, SHARDED), ranks_step(model, 2, SHARDED)
    assert differences(steps, whole) == []
    assert furthest(whole, step(copy.deepcopy(model), batch())) < (
        5e-6 if dtype == torch.float32 else 8e-2
    )


def test_three_ranks_of_uneven_heads_and_four_that_share_some() -> None:
    for name, tp, options in (("gpt2", 4, {}), ("llama", 4, {"num_key_value_heads": 1})):
        model = tiny(name, **options)
        assert differences(ranks_step(model, tp, SHARDED), virtual_step(model, tp, SHARDED)) == []


def test_ranks_that_read_in_place_compute_the_same() -> None:
    model = tiny("llama")
    whole = virtual_step(model, 2, SHARDED)
    for seed in range(2):
        assert (
            differences(ranks_step(model, 2, SHARDED, reads_in_place=True, seed=seed), whole) == []
        )


@pytest.mark.filterwarnings("ignore:`gradient_checkpointing_enable`")
@pytest.mark.parametrize("is_reentrant", [False, True])
def test_recomputed_blocks(is_reentrant: bool) -> None:
    model = tiny("gpt2")
    whole = virtual_step(model, 2, SHARDED)
    model.gradient_checkpointing_enable({"use_reentrant": is_reentrant})  # type: ignore[operator]
    assert differences(ranks_step(model, 2, SHARDED), whole) == []


def test_only_what_is_between_the_regions_is_a_summand() -> None:
    splits = choose(tiny("gpt2"), 2, SHARDED).splits
    partial = {
        name.replace(".h.0.", ".h.*.").replace(".h.1.", ".h.*.")
        for name in splits
        if splits[name].kind == "partial"
    }
    norms = {
        f"transformer.h.*.ln_{number}.{leaf}" for number in (1, 2) for leaf in ("weight", "bias")
    }
    assert partial == norms
    assert not [
        name for name, each in choose(tiny("gpt2"), 2).splits.items() if each.kind == "partial"
    ]


def test_the_tokens_between_the_regions_are_a_part() -> None:
    """In training, norms receive half of the tokens; in evaluation, all of them.

    Modules after the blocks always receive all tokens.
    """
    model = tiny("gpt2")

    def body(rank: Rank) -> list[list[int]]:
        own = copy.deepcopy(model)
        parallelize(own, rank.comm, SHARDED)
        seen: list[int] = []
        for name in (
            "transformer.h.0.ln_1",
            "transformer.h.1.ln_2",
            "transformer.h.1.mlp.act",
            "transformer.ln_f",
        ):
            own.get_submodule(name).register_forward_hook(
                lambda module, args, output: seen.append(output.shape[1])
            )
        step(own, batch())
        trained = list(seen)
        seen.clear()
        own.eval()
        with torch.no_grad():
            own(input_ids=torch.zeros(1, 5, dtype=torch.long), use_cache=False)
        return [trained, seen]

    assert run_ranks(2, body) == [[[4, 4, 8, 8], [5, 5, 5, 5]]] * 2


def test_tokens_that_the_ranks_do_not_divide_are_refused() -> None:
    model = tiny("llama")

    def body(rank: Rank) -> None:
        own = copy.deepcopy(model)
        parallelize(own, rank.comm, SHARDED)
        own(input_ids=torch.zeros(2, 7, dtype=torch.long), use_cache=False)

    with pytest.raises(UsageError, match=r"\(2, 7, 32\) are not shared by tp=2"):
        run_ranks(2, body)


@pytest.mark.parametrize(
    ("name", "why"),
    [("phi3", "gathers its outputs"), ("opt", "join the batch"), ("olmo2", "gathers its")],
)
def test_models_that_need_all_tokens_are_refused_by_name(name: str, why: str) -> None:
    with pytest.raises(NotBuiltError, match=why):
        choose(tiny(name), 2, SHARDED)
    left_open = choose(tiny(name), 2, ParallelSettings(sequence="auto"))
    assert left_open.stretch is None and why in left_open.why_whole
    assert left_open.splits == choose(tiny(name), 2).splits


def test_it_is_enabled_by_default_if_supported() -> None:
    plan = choose(tiny("llama"), 2, ParallelSettings(sequence="auto"))
    assert (
        plan.stretch == choose(tiny("llama"), 2, SHARDED).stretch is not None and not plan.why_whole
    )


def test_a_layer_that_may_mix_tokens_is_refused_by_name() -> None:
    model = tiny("gpt2")
    model.transformer.h[1].mix = torch.nn.Linear(8, 8)  # type: ignore[union-attr, index, operator]
    with pytest.raises(NotBuiltError, match=r"transformer\.h\.1\.mix.*\n.*Whether a Linear"):
        choose(model, 2, SHARDED)
