"""Two Parameters on the same memory act as one Parameter or raise an error.

Complex parameters raise an error.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import deepseek_zero
from tests.plain import (
    Setting,
    assert_trains_like_plain,
    draw,
    engine_for,
    here,
    on_stages_0_to_3,
    seeded,
)

pytestmark = pytest.mark.ranks(2)
ZeroError = deepseek_zero.DeepSeekZeroError
WIDTH = 8


class Stack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.last = nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.second(torch.tanh(self.first(x)))))


class Shared(Stack):
    """Two layers whose weights are two Parameters on the same memory."""

    def __init__(self) -> None:
        super().__init__()
        self.second.weight = nn.Parameter(self.first.weight.data)


class Columns(Stack):
    """Two Parameters that share a storage but no elements."""

    def __init__(self) -> None:
        super().__init__()
        both = torch.randn(WIDTH, 2 * WIDTH)
        self.first.weight, self.second.weight = (
            nn.Parameter(both[:, :WIDTH]),
            nn.Parameter(both[:, WIDTH:]),
        )


def square(model: Any, rank: int, step: int, backward: Callable[..., Any]) -> Tensor:
    loss = model(draw(rank, step, 4, WIDTH)).square().mean()
    backward(loss)
    return loss


@on_stages_0_to_3
def test_parameters_over_one_memory_train_as_one(setting: Setting) -> None:
    """Plain SGD adds both gradients to the shared memory, as it does for one tied Parameter."""
    for build in (Shared, Columns):
        engine = assert_trains_like_plain(build, square, setting)
        tied = engine.module.first.weight is engine.module.second.weight
        assert tied == (build is Shared)
        engine.destroy()


@on_stages_0_to_3
def test_an_optimizer_that_was_given_both_updates_one(setting: Setting) -> None:
    def train(
        make: Callable[[nn.Module], tuple[nn.Module, Callable[[Tensor], None]]],
    ) -> dict[str, Tensor]:
        model, update = make(seeded(Shared))
        for step in range(3):
            update(model(draw(0, step, 4, WIDTH)).square().mean())
        return {name: value.clone() for name, value in model.state_dict().items()}

    def plainly(model: nn.Module) -> tuple[nn.Module, Callable[[Tensor], None]]:
        model.second.weight = model.first.weight
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, eps=1e-6)

        def update(loss: Tensor) -> None:
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

        return model, update

    def by_engine(model: nn.Module) -> tuple[nn.Module, Callable[[Tensor], None]]:
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, eps=1e-6)
        engine = deepseek_zero.initialize(
            model=model, optimizer=optimizer, config=setting.config(optimizer={})
        )[0]

        def update(loss: Tensor) -> None:
            engine.backward(loss)
            engine.step()

        return model, update

    def by_hand(model: nn.Module) -> tuple[nn.Module, Callable[[Tensor], None]]:
        optimizer = deepseek_zero.ZeroOptimizer(
            model.parameters(), lr=0.01, eps=1e-6, optimizer_type="adamw", weight_decay=0.01
        )
        zero = {
            key: value
            for key, value in setting.config()["zero_optimization"].items()
            if key != "stage"
        }
        model.kept = [
            deepseek_zero.DeepSeekZeRO3(model, stage=setting.stage, zero_optimization=zero)
        ]  # type: ignore[assignment]

        def update(loss: Tensor) -> None:
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

        return model, update

    expected = train(plainly)
    for make in (by_engine, by_hand):
        for name, value in train(make).items():
            torch.testing.assert_close(value, expected[name], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", [None, torch.float32])
def test_under_zero_init_too(dtype: torch.dtype | None) -> None:
    class Under(Stack):
        """Like `Shared`, but a separate class, so that it can be built sharded."""

        def __init__(self) -> None:
            super().__init__()
            self.second.weight = nn.Parameter(self.first.weight.data)

    def built() -> nn.Module:
        torch.manual_seed(7)
        with deepseek_zero.zero.Init(dtype=dtype):
            return Under()

    model, plain = built(), seeded(Shared)
    engine = engine_for(model, Setting(3))
    assert model.first.weight is model.second.weight
    for name, value in plain.state_dict().items():
        assert torch.equal(engine.module.state_dict()[name], value), name

    with deepseek_zero.zero.Init(dtype=dtype):
        inner = nn.Sequential(Under())
    assert inner[0].first.weight is inner[0].second.weight

    class Slice(Stack):
        def __init__(self) -> None:
            super().__init__()
            self.last.weight = nn.Parameter(self.first.weight.data[:1])

    with pytest.raises(ZeroError, match="share memory"), deepseek_zero.zero.Init(dtype=dtype):
        nn.ModuleList([Slice()])


def test_parameters_on_the_meta_device_share_nothing() -> None:
    with torch.device("meta"):
        model = Stack()
    engine = engine_for(model, Setting(3))
    assert model.first.weight is not model.second.weight
    engine.backward(engine(draw(here(), 0, 4, WIDTH)).square().mean())
    engine.step()


def sliced(model: Stack) -> None:
    model.last.weight = nn.Parameter(model.first.weight.data[:1])


def transposed(model: Stack) -> None:
    model.second.weight = nn.Parameter(model.first.weight.data.t())


def as_other_numbers(model: Stack) -> None:
    model.last.weight = nn.Parameter(model.first.weight.data.view(torch.bfloat16)[:1, :WIDTH])


def shifted(model: Stack) -> None:
    both = torch.randn(WIDTH + 1, WIDTH)
    model.first.weight, model.second.weight = nn.Parameter(both[1:]), nn.Parameter(both[:-1])


def one_frozen(model: Stack) -> None:
    model.second.weight = nn.Parameter(model.first.weight.data, requires_grad=False)


def a_buffer(model: Stack) -> None:
    model.register_buffer("seen", model.first.weight.data[0])


def in_two_groups(model: Stack) -> None:
    model.second.weight = nn.Parameter(model.first.weight.data)


@on_stages_0_to_3
def test_memory_that_is_shared_in_part_is_an_error_on_every_rank(setting: Setting) -> None:
    for change in (sliced, transposed, as_other_numbers, shifted, one_frozen, a_buffer):
        model = seeded(Stack)
        change(model)
        before = {name: value.clone() for name, value in model.state_dict().items()}
        with pytest.raises(ZeroError, match=r"(share memory|are one memory)") as raised:
            engine_for(model, setting)
        assert "first.weight" in str(raised.value)
        for name, value in model.state_dict().items():
            assert torch.equal(value, before[name])
    model = seeded(Stack)
    if here() == 1:
        sliced(model)
    with pytest.raises(ZeroError, match="share memory"):
        engine_for(model, setting)


class Complex(Stack):
    def __init__(self, dtype: torch.dtype = torch.complex64, trained: bool = True) -> None:
        super().__init__()
        self.phase = nn.Parameter(torch.ones(WIDTH, dtype=dtype), requires_grad=trained)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(torch.fft.ifft(torch.fft.fft(x) * self.phase).real)


class Rotated(Stack):
    """Complex numbers in a buffer, as in rotary embeddings."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("turns", torch.polar(torch.ones(WIDTH), torch.arange(WIDTH) / 3.0))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(torch.fft.ifft(torch.fft.fft(x) * self.turns).real)


@on_stages_0_to_3
def test_complex_parameters_are_an_error_on_every_rank_and_complex_buffers_work(
    setting: Setting,
) -> None:
    for build in (Complex, lambda: Complex(torch.complex128), lambda: Complex(trained=False)):
        model = seeded(build)
        with pytest.raises(ZeroError, match=r"(?s)'phase'.*complex.*view_as_complex"):
            engine_for(model, setting)
        assert torch.equal(model.phase.detach().real.float(), torch.ones(WIDTH))
    zero = {
        key: value for key, value in setting.config()["zero_optimization"].items() if key != "stage"
    }
    with pytest.raises(ZeroError, match="complex"):
        deepseek_zero.DeepSeekZeRO3(seeded(Complex), stage=setting.stage, zero_optimization=zero)
    with pytest.raises(ZeroError, match="complex"), deepseek_zero.zero.Init():
        nn.ModuleList([Complex()])
    assert_trains_like_plain(Rotated, square, setting)
