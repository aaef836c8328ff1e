"""The bytes sent along the tensor-parallel axis equal those of the plan."""

from __future__ import annotations

import copy

import pytest
import torch

from deepseek_zero.parallel.apply import parallelize
from deepseek_zero.parallel.plans import ParallelSettings, choose
from deepseek_zero.parallel.volume import traffic_of
from tests.in_process import Rank, run_ranks
from tests.unit.parallel.tiny import BATCH, EIGHT, LENGTH, batch, step, tiny

pytest.importorskip("transformers")


@pytest.mark.parametrize("loss", ["split", "gathered"])
@pytest.mark.parametrize(
    ("name", "dtype", "tp"),
    [
        *((name, torch.float32, 2) for name in EIGHT),
        ("llama", torch.bfloat16, 2),
        ("gpt2", torch.float32, 3),
        ("phi3", torch.float32, 2),
        ("olmo2", torch.float32, 2),
        ("qwen3", torch.bfloat16, 4),
    ],
    ids=str,
)
@pytest.mark.filterwarnings("ignore:`gradient_checkpointing_enable`")
@pytest.mark.parametrize("recomputes", [False, True])
def test_metered_bytes_are_the_predicted(
    name: str, dtype: torch.dtype, tp: int, loss: str, recomputes: bool
) -> None:
    assert_metered(name, dtype, tp, loss, recomputes=recomputes)


@pytest.mark.filterwarnings("ignore:`gradient_checkpointing_enable`")
@pytest.mark.parametrize("recomputes", [False, True])
@pytest.mark.parametrize(
    ("name", "tp"), [("llama", 2), ("gpt2", 4), ("gpt_neox", 2), ("bert", 2), ("qwen3", 2)]
)
def test_metered_bytes_of_sharded_tokens_are_the_predicted(
    name: str, tp: int, recomputes: bool
) -> None:
    assert_metered(name, torch.float32, tp, "split", recomputes=recomputes, sequence=True)


def assert_metered(
    name: str, dtype: torch.dtype, tp: int, loss: str, *, recomputes: bool, sequence: bool = False
) -> None:
    model, settings = tiny(name, dtype), ParallelSettings(loss=loss, sequence=sequence)  # type: ignore[arg-type]
    plan = choose(model, tp, settings)
    if recomputes:
        model.gradient_checkpointing_enable({"use_reentrant": False})  # type: ignore[operator]

    def body(rank: Rank) -> int:
        own = copy.deepcopy(model)
        parallelize(own, rank.comm, settings)
        before = rank.comm.meter.sent_bytes["tp"]
        step(own, batch())
        return rank.comm.meter.sent_bytes["tp"] - before

    expected = []
    for rank in range(tp):
        nbytes = sum(region.nbytes for region in traffic_of(model, plan, settings, rank))
        expected.append(nbytes * BATCH * LENGTH // tp)
    assert run_ranks(tp, body) == expected
