"""The tiled loss has the value and gradients of torch's loss and stores the logits of one tile."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import deepseek_zero
from deepseek_zero.activations.tiled_loss import LossSettings, tile_loss, tiled_cross_entropy
from deepseek_zero.base.errors import NotBuiltError, UsageError
from deepseek_zero.report.memory_trace import MemoryTrace
from tests.plain import seeded
from tests.unit.parallel.tiny import batch, furthest, step, tiny

WIDTH, WORDS = 24, 61


def given(tokens: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    """Return inputs of a head and their targets, of which every third is ignored."""
    draw = torch.Generator().manual_seed(tokens)
    targets = torch.randint(WORDS, (tokens,), generator=draw)
    targets[::3] = -100
    return torch.randn(tokens, WIDTH, generator=draw).to(dtype), targets


def plain(head: nn.Linear, x: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(head(x).float(), targets, ignore_index=-100, reduction="sum")


def tiled(rows: int) -> Callable[[nn.Linear, Tensor, Tensor], Tensor]:
    def compute(head: nn.Linear, x: Tensor, targets: Tensor) -> Tensor:
        return tiled_cross_entropy(x, head.weight, head.bias, targets, LossSettings(rows))

    return compute


def gradients(
    head: nn.Linear, compute: Any, x: Tensor, targets: Tensor, factor: float = 1.0
) -> list[Tensor]:
    own, leaf = copy.deepcopy(head), x.clone().requires_grad_()
    loss = compute(own, leaf, targets)
    (loss * factor).backward()
    found = [each.grad for each in (leaf, *own.parameters())]
    return [loss.detach(), *(each for each in found if each is not None)]


def head_of(dtype: torch.dtype = torch.float32, *, bias: bool = True) -> nn.Linear:
    return seeded(lambda: nn.Linear(WIDTH, WORDS, bias=bias)).to(dtype)


@pytest.mark.parametrize("tokens", [1, 7, 16, 21])
@pytest.mark.parametrize("factor", [1.0, 0.5, -3.0])
@pytest.mark.parametrize("bias", [False, True])
def test_it_is_torchs_loss_times_any_factor(tokens: int, factor: float, bias: bool) -> None:
    head, (x, targets) = head_of(bias=bias), given(tokens)
    for found, wanted in zip(
        gradients(head, tiled(8), x, targets, factor),
        gradients(head, plain, x, targets, factor),
        strict=True,
    ):
        torch.testing.assert_close(found, wanted, rtol=1e-6, atol=2e-6)


@pytest.mark.parametrize(
    ("dtype", "room"), [(torch.bfloat16, 2**-8), (torch.float16, 2**-11)], ids=str
)
def test_sixteen_bits_are_as_near_to_exact_gradients_as_torchs(
    dtype: torch.dtype, room: float
) -> None:
    """For fp16, torch's logit gradients need a loss scale; those of the tiled loss do not."""
    head, (x, targets) = head_of(dtype), given(64, dtype)
    scale = 1024.0 if dtype == torch.float16 else 1.0
    exact = gradients(copy.deepcopy(head).double(), plain, x.double(), targets, scale)
    found, theirs = (gradients(head, compute, x, targets, scale) for compute in (tiled(16), plain))
    for ours, other, wanted in zip(found, theirs, exact, strict=True):
        size = float(wanted.abs().max())
        far = [float((each.double() - wanted).abs().max()) / size for each in (ours, other)]
        assert far[0] <= 1.5 * far[1] + room, far


def test_a_frozen_head_keeps_no_gradient_and_a_graph_that_is_kept_gives_the_same_twice() -> None:
    head, (x, targets) = head_of(), given(12)
    head.requires_grad_(False)
    leaf = x.clone().requires_grad_()
    loss = tiled(4)(head, leaf, targets)
    loss.backward(retain_graph=True)
    assert leaf.grad is not None and head.weight.grad is None
    first, leaf.grad = leaf.grad.clone(), None
    (loss * 2).backward()
    assert torch.equal(leaf.grad, first * 2)


def test_a_step_without_gradients_does_nothing() -> None:
    head, (x, targets) = head_of(), given(5)
    found = gradients(head, tiled(2), x, torch.full_like(targets, -100))
    assert all(not each.any() for each in found)
    with torch.no_grad():
        torch.testing.assert_close(tiled(2)(head, x, targets), plain(head, x, targets))


def test_targets_of_other_tokens_are_refused() -> None:
    head, (x, targets) = head_of(), given(5)
    with pytest.raises(UsageError, match="4 targets for 5 tokens"):
        tiled(2)(head, x, targets[:4])


def test_its_peak_is_one_tile_of_logits_and_the_gradients() -> None:
    tokens, words, width, rows = 1024, 4096, 64, 64
    head, x = nn.Linear(width, words, bias=False), torch.randn(tokens, width, requires_grad=True)
    targets = torch.arange(tokens)
    trace = MemoryTrace(dict, lambda: "step")
    with trace.recording():
        tiled_cross_entropy(x, head.weight, None, targets, LossSettings(rows)).backward()
    assert trace.peak_bytes <= 1.25 * 4 * (rows * words + tokens * width + words * width)
    assert trace.peak_bytes < 0.2 * 4 * tokens * words


# -- models of transformers


def test_models_of_transformers_compute_the_same_step() -> None:
    pytest.importorskip("transformers")
    for name in ("llama", "qwen2", "gpt2"):  # In qwen2, the head and the embedding share a weight.
        own = tiny(name)
        wanted = step(copy.deepcopy(own), batch())
        tile_loss(own, 5)
        found = step(own, batch())
        assert furthest(found, wanted) < 1e-6 and found.logits is None, name
        with torch.no_grad():
            assert own.eval()(**batch()).logits is not None
        torch.testing.assert_close(own(**batch()).loss, wanted.loss)


def test_a_loss_over_items_and_shifted_labels_and_a_tuple() -> None:
    pytest.importorskip("transformers")
    own = tiny("llama")
    whole = copy.deepcopy(own)
    tile_loss(own, 4)
    shifted = F.pad(batch()["labels"], (0, 1), value=-100)[:, 1:].contiguous()
    for more in (
        {"num_items_in_batch": 11},
        {"num_items_in_batch": torch.tensor(7)},
        {"shift_labels": shifted},
    ):
        torch.testing.assert_close(own(**batch(), **more).loss, whole(**batch(), **more).loss)
    found = own(**batch(), return_dict=False, use_cache=False)
    assert len(found) == 1
    torch.testing.assert_close(found[0], whole(**batch()).loss)


def test_a_head_with_several_modules_supports_tiles() -> None:
    """LoRA adapters produce such a head."""
    pytest.importorskip("transformers")

    class Adapted(nn.Module):
        def __init__(self, base: nn.Linear) -> None:
            super().__init__()
            self.base, self.low = (
                base.requires_grad_(False),
                nn.Linear(base.in_features, 2, bias=False),
            )
            self.up = nn.Linear(2, base.out_features, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            return self.base(x) + self.up(self.low(x))

    own: Any = tiny("llama")
    own.lm_head = seeded(lambda: Adapted(own.lm_head))
    wanted = step(copy.deepcopy(own), batch())
    tile_loss(own, 5)
    assert furthest(step(own, batch()), wanted) < 1e-6


def test_unsupported_layers_for_tiles_are_refused_by_name() -> None:
    pytest.importorskip("transformers")
    with pytest.raises(NotBuiltError, match="tiled_loss: Linear has no loss"):
        tile_loss(nn.Linear(2, 2), 4)
    with pytest.raises(NotBuiltError, match="tiled_loss: BertForMaskedLM"):
        tile_loss(tiny("bert"), 4)
    capped = tiny("gemma2")
    tile_loss(capped, 4)
    with pytest.raises(UsageError, match="changes its logits or its labels"):
        capped(**batch())


def test_the_switch_in_the_configuration() -> None:
    pytest.importorskip("transformers")
    model = tiny("llama")
    config = {
        "train_micro_batch_size_per_gpu": 3,
        "activation_checkpointing": {"tiled_loss": 5, "tiled_mlp": 3},
    }
    engine, *_ = deepseek_zero.initialize(model=copy.deepcopy(model), config=config)
    found = engine(**batch())
    assert found.logits is None
    torch.testing.assert_close(found.loss, model(**batch()).loss)
    engine.destroy()


def test_a_model_of_an_earlier_engine_is_tiled_again() -> None:
    pytest.importorskip("transformers")
    model = tiny("llama")
    expected = model(**batch()).loss
    for rows in (5, 2):
        tile_loss(model, rows)
        assert model.lm_head.tiles.settings.rows == rows
        found = model(**batch())
        assert found.logits is None
        torch.testing.assert_close(found.loss, expected)


def test_tiles_without_rows_are_refused() -> None:
    with pytest.raises(UsageError, match="tiles of 0 rows"):
        tile_loss(nn.Linear(2, 2), 0)


@pytest.mark.parametrize("target", [-1, WORDS])
def test_a_target_outside_of_the_vocabulary_is_refused(target: int) -> None:
    """Its loss was that of a logit of 0."""
    head, (x, targets) = head_of(), given(8)
    targets[5] = target
    with pytest.raises(UsageError, match=f"target {target} is outside of the vocabulary of 61"):
        tiled(4)(head, x, targets)


@pytest.mark.parametrize("rows", [0, -1])
def test_the_function_refuses_tiles_without_rows(rows: int) -> None:
    with pytest.raises(UsageError, match="A tile has at least one token"):
        tiled(rows)(head_of(), *given(8))


class Scaled(nn.Linear):
    """A linear layer with its own forward."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * 0.5


def test_a_subclass_of_linear_keeps_its_forward() -> None:
    pytest.importorskip("transformers")
    own: Any = tiny("llama")
    own.lm_head.__class__ = Scaled
    wanted = step(copy.deepcopy(own), batch())
    tile_loss(own, 5)
    assert furthest(step(own, batch()), wanted) < 1e-6
