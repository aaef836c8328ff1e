"""The model of the example is causal, learns, and generates the same text for the same seed."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

from examples.gpt import GPT, SIZES, VOCABULARY, GPTConfig, generate

SMALL = GPTConfig(num_layers=2, width=16, num_heads=2, context=12)


def small(**changes: object) -> GPT:
    torch.manual_seed(0)
    return GPT(GPTConfig(**{**SMALL.__dict__, **changes}))  # type: ignore[arg-type]


def batch() -> Tensor:
    return torch.randint(VOCABULARY, (3, SMALL.context), generator=torch.Generator().manual_seed(1))


def test_a_byte_attends_only_to_itself_and_earlier_bytes() -> None:
    model, tokens = small(), batch()
    changed = tokens.clone()
    changed[:, 7] = (changed[:, 7] + 1) % VOCABULARY
    difference = (model(tokens) - model(changed)).abs().amax(dim=(0, 2))
    assert difference[:7].max() == 0
    assert difference[7:].min() > 0


def test_an_untrained_model_is_as_good_as_a_uniform_guess() -> None:
    assert small()(batch(), batch()).item() == pytest.approx(math.log(VOCABULARY), abs=0.1)


def test_the_loss_is_the_cross_entropy_of_the_logits() -> None:
    model, tokens, targets = small(), batch(), batch().roll(1)
    expected = -torch.log_softmax(model(tokens), -1).gather(-1, targets[..., None]).mean()
    torch.testing.assert_close(model(tokens, targets), expected)


def test_a_few_steps_lower_the_loss() -> None:
    model, tokens = small(), batch()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(10):
        loss = model(tokens, tokens)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < losses[0] - 1.5


def test_a_tied_head_is_the_byte_embedding() -> None:
    model = small(tied_head=True)
    assert model.head.weight is model.bytes.weight
    count = [sum(parameter.numel() for parameter in each.parameters()) for each in (small(), model)]
    assert count[0] - count[1] == VOCABULARY * SMALL.width


def test_the_main_size_is_trainable_in_minutes_and_large_enough_to_shard() -> None:
    with torch.device("meta"):
        model = GPT(SIZES["main"])
    assert 0.5e6 < sum(parameter.numel() for parameter in model.parameters()) < 10e6


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_generated_text_continues_the_prompt_and_repeats_for_the_same_seed(
    temperature: float,
) -> None:
    texts = [
        generate(small(), b"def ", 20, context=SMALL.context, temperature=temperature, seed=3)
        for _ in range(2)
    ]
    assert texts[0] == texts[1]
    assert texts[0].startswith(b"def ")
    assert len(texts[0]) == 24


def test_another_seed_generates_another_text() -> None:
    texts = {
        generate(small(), b"a", 20, context=SMALL.context, temperature=1.0, seed=seed)
        for seed in range(3)
    }
    assert len(texts) == 3


def test_temperature_zero_takes_the_likeliest_byte_and_the_window_stays_in_the_context() -> None:
    class Counter(nn.Module):
        """Predicts the successor of the last byte and fails if the input is too long."""

        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.zeros(1))

        def forward(self, tokens: Tensor) -> Tensor:
            assert tokens.shape[1] <= 4
            assert not self.training
            return torch.nn.functional.one_hot(tokens + 1, VOCABULARY).float()

    model = Counter()
    assert generate(model, b"abc", 5, context=4, temperature=0.0) == b"abcdefgh"
    assert model.training
