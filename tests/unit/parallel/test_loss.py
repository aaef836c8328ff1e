"""The loss of vocabulary-parallel logits is torch's cross entropy and equal on every rank."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from deepseek_zero.base.errors import UsageError
from deepseek_zero.parallel.apply import parallelize
from deepseek_zero.parallel.group import TensorGroup
from deepseek_zero.parallel.layers import LayerPart, TensorAxis
from deepseek_zero.parallel.loss import split_cross_entropy
from deepseek_zero.parallel.virtual import VirtualAxis
from deepseek_zero.planner.split import Split
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

WORDS, TOKENS = 11, 6
PART = LayerPart("head", Split("split", (WORDS, 4), 0, (((0, 4),), ((4, 8),), ((8, 11),))))


def values() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(2)
    targets = torch.randint(WORDS, (TOKENS,), generator=generator)
    targets[1] = -100
    return torch.randn(TOKENS, WORDS, generator=generator) * 4, targets


def split(logits: Tensor, targets: Tensor, **terms: Any) -> list[tuple[Tensor, Tensor]]:
    """Return each rank's loss and its columns of the gradient."""

    def body(rank: Rank) -> tuple[Tensor, Tensor]:
        ((start, stop),) = PART.weight.ranges[rank.index]
        own = logits[:, start:stop].clone().requires_grad_()
        loss = split_cross_entropy(own, targets, TensorAxis(TensorGroup(rank.comm)), PART, **terms)
        (loss * 3).backward()
        assert own.grad is not None
        return loss.detach(), own.grad

    return run_ranks(3, body)


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("ignored", [-100, 7])
def test_the_arguments_of_cross_entropy_are_supported(reduction: Any, ignored: int) -> None:
    logits, targets = values()
    targets = targets.masked_fill(targets == -100, ignored)
    whole = logits.clone().requires_grad_()
    expected = F.cross_entropy(whole, targets, reduction=reduction, ignore_index=ignored)
    (expected * 3).backward()
    found = split(logits, targets, reduction=reduction, ignore_index=ignored)
    for loss, _ in found:
        torch.testing.assert_close(loss, expected.detach())
        assert torch.equal(loss, found[0][0])
    torch.testing.assert_close(torch.cat([grad for _, grad in found], 1), whole.grad)


def test_a_mean_over_no_tokens_equals_torchs() -> None:
    logits, targets = values()
    nothing = torch.full_like(targets, -100)
    assert F.cross_entropy(logits, nothing).isnan() and split(logits, nothing)[0][0].isnan()


def test_a_target_outside_of_the_vocabulary_is_refused() -> None:
    """Its loss was that of a logit of 0."""
    logits, targets = values()
    for target in (-1, WORDS):
        with pytest.raises(UsageError, match=f"target {target} is outside of the vocabulary of 11"):
            split(logits, targets.masked_fill(targets == -100, target))


def test_tokens_that_are_masked_out_everywhere_on_a_rank() -> None:
    logits, targets = values()
    logits[:, 4:8] = -torch.inf
    targets = targets.masked_fill((targets >= 4) & (targets < 8), 0)
    whole = logits.clone().requires_grad_()
    F.cross_entropy(whole, targets).mul(3).backward()
    found = split(logits, targets)
    torch.testing.assert_close(found[0][0], F.cross_entropy(logits, targets))
    torch.testing.assert_close(torch.cat([grad for _, grad in found], 1), whole.grad)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_the_virtual_axis_has_the_same_bits(dtype: torch.dtype) -> None:
    logits, targets = values()
    whole = logits.to(dtype).clone().requires_grad_()
    axis = VirtualAxis(3, whole.device, has_dropout=False)
    loss = split_cross_entropy(whole, targets, axis, PART)
    (loss * 3).backward()
    found = split(logits.to(dtype), targets)
    assert all(torch.equal(each, loss) for each, _ in found)
    assert whole.grad is not None
    assert torch.equal(torch.cat([grad for _, grad in found], 1), whole.grad)


class TestTransformers:
    """Unmodified models that compute their loss from split logits."""

    @pytest.fixture(autouse=True)
    def _needed(self) -> None:
        pytest.importorskip("transformers")

    @pytest.mark.parametrize("name", ["llama", "qwen2", "gemma2", "gpt2", "gpt_neox", "opt"])
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
    def test_ranks_compute_what_the_virtual_axis_does_and_show_no_logits(
        self, name: str, dtype: torch.dtype
    ) -> None:
        model = tiny(name, dtype)
        whole, steps = virtual_step(model, 2), ranks_step(model, 2)
        assert differences(steps, whole) == []
        assert all(each.logits is None for each in steps)
        assert furthest(whole, step(copy.deepcopy(model), batch())) < (
            5e-6 if dtype == torch.float32 else 5e-2
        )

    def test_a_model_that_reads_its_logits_itself_gathers_them(self) -> None:
        assert all(each.logits is not None for each in ranks_step(tiny("bert"), 2))

    def test_in_evaluation_and_without_labels_logits_are_whole(self) -> None:
        model = tiny("llama").eval()
        whole = model(**batch())

        def body(rank: Rank) -> list[Tensor]:
            own = copy.deepcopy(model)
            parallelize(own, rank.comm)
            with torch.no_grad():
                found = own(**batch())
                loss, logits = own(**batch(), return_dict=False)[:2]
            own.train()
            trained = own(input_ids=batch()["input_ids"])
            assert torch.equal(found.loss, loss) and torch.equal(found.logits, logits)
            return [found.loss, found.logits, trained.logits]

        for loss, logits, trained in run_ranks(2, body):
            torch.testing.assert_close(loss, whole.loss.detach())
            torch.testing.assert_close(logits, whole.logits.detach())
            torch.testing.assert_close(trained.detach(), whole.logits.detach())

    def test_tuples_and_token_counts(self) -> None:
        """Labels may be positional; the loss may be divided by a given number of tokens."""
        model, count = tiny("llama"), torch.tensor(16)
        whole = model(**batch(), num_items_in_batch=count).loss

        def body(rank: Rank) -> Tensor:
            own = copy.deepcopy(model)
            parallelize(own, rank.comm)
            return own(**batch(), num_items_in_batch=count, return_dict=False, use_cache=False)

        for found in run_ranks(2, body):
            assert len(found) == 1
            torch.testing.assert_close(found[0].detach(), whole.detach())

    def test_a_loss_function_without_logits_is_an_error(self) -> None:
        model = tiny("llama")

        def body(rank: Rank) -> None:
            own = copy.deepcopy(model)
            parallelize(own, rank.comm)
            own.loss_function = lambda **given: given["logits"].sum()  # type: ignore[assignment]
            own(**batch())

        with pytest.raises(
            UsageError, match=r"did not pass the split logits of 'lm_head' to its loss function"
        ):
            run_ranks(2, body)


def test_no_whole_row_is_sent() -> None:
    """Each rank sends three numbers per token."""

    def body(rank: Rank) -> int:
        axis = TensorAxis(TensorGroup(rank.comm))
        ((start, stop),) = PART.weight.ranges[rank.index]
        logits, targets = values()
        before = rank.comm.meter.sent_bytes["tp"]
        own = nn.Parameter(logits[:, start:stop].clone())
        split_cross_entropy(own, targets, axis, PART).backward()  # type: ignore[no-untyped-call]
        return rank.comm.meter.sent_bytes["tp"] - before

    assert run_ranks(3, body) == [2 * TOKENS * 3 * 4] * 3
