"""The initial state of a client's optimizer is kept, for any stage and number of ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from deepseek_zero.base.errors import DeepSeekZeroError, UsageError
from tests.compositions import Here, config_of, engines_of_threads, llama
from tests.in_process import Rank, run_ranks

RANKS, STEPS, WIDTH = 2, 3, 64
Make = Callable[[Iterable[Any]], torch.optim.Optimizer]


class OwnState(torch.optim.Optimizer):
    """An optimizer with initial state that differs by element, and without a step counter."""

    granularity = "element"

    def __init__(self, params: Iterable[Any], lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})
        for group in self.param_groups:
            for param in group["params"]:
                ramp = (
                    torch.arange(param.numel(), dtype=torch.float32).view(param.shape)
                    / param.numel()
                )
                self.state[param] = {
                    "speed": ramp.clone(),
                    "calls": 0,
                    "scale": torch.tensor(float(param.dim())),
                }

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    state = self.state[param]
                    state["calls"] += 1
                    state["speed"].mul_(0.9).add_(param.grad)
                    param.sub_(group["lr"] * state["scale"] / state["calls"] * state["speed"])


class ByRow(OwnState):
    """Adds a state that has another shape than the parameter."""

    granularity = "tensor"

    def __init__(self, params: Iterable[Any], lr: float = 0.1) -> None:
        super().__init__(params, lr)
        for number, state in enumerate(self.state.values()):
            state["row"] = torch.full((3,), 0.1 * number)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        super().step()
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    param.add_(self.state[param]["row"].sum() * 0.01)


class RowOfElements(ByRow):
    """Declares that it may be split at any element, which contradicts its state."""

    granularity = "element"


class Uncopied(Tensor):
    """A tensor that cannot be cloned, as some quantized states."""

    def clone(self, **_: Any) -> Any:
        raise NotImplementedError


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.gain = nn.Parameter(torch.tensor(0.5))

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.tanh(self.up(x))) * self.gain


def net() -> nn.Module:
    torch.manual_seed(1)
    return Net()


def data(step: int, rank: int) -> Tensor:
    return torch.randn(2, WIDTH, generator=torch.Generator().manual_seed(10 * step + rank))


def adagrad(params: Iterable[Any]) -> torch.optim.Optimizer:
    return torch.optim.Adagrad(params, lr=0.1, initial_accumulator_value=0.5)


MAKES: dict[str, Make] = {"Adagrad": adagrad, "own": OwnState, "by row": ByRow}


def plainly(make: Make, frozen_until: int = 0) -> dict[str, Tensor]:
    model = net()
    optimizer = make(model.parameters())
    for step in range(STEPS):
        model.up.requires_grad_(step >= frozen_until)
        for rank in range(RANKS):
            (model(data(step, rank)).square().mean() / RANKS).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model.state_dict()


def config(stage: int, **more: Any) -> dict[str, Any]:
    return config_of(stage, "fp32") | {"gradient_accumulation_steps": 1} | more


def train(
    here: Here, rank: Rank, stage: int, frozen_until: int = 0, **request: Any
) -> dict[str, Tensor]:
    model = net()
    model.up.requires_grad_(frozen_until == 0)
    made = (
        request.pop("make")(model.parameters())
        if "make" in request
        else request.pop("optimizer", None)
    )
    engine = here.start(rank, model, config(stage, **request), optimizer=made)
    for step in range(STEPS):
        model.up.requires_grad_(step >= frozen_until)
        engine.backward(engine(data(step, rank.index)).square().mean())
        engine.step()
    found = {name: value.clone() for name, value in engine.module.state_dict().items()}
    engine.destroy()
    return found


def on_ranks(body: Callable[[Here, Rank], Any]) -> list[Any]:
    with engines_of_threads() as here:
        return run_ranks(RANKS, lambda rank: body(here, rank), reads_in_place=True)


def assert_alike(found: list[dict[str, Tensor]], expected: dict[str, Tensor]) -> None:
    for each in found:
        for name, value in expected.items():
            torch.testing.assert_close(each[name], value, atol=2e-6, rtol=1e-5, msg=name)


@pytest.mark.parametrize("stage", range(4))
@pytest.mark.parametrize("kind", MAKES)
@pytest.mark.parametrize("is_callable", [False, True])
def test_state_from_construction_is_kept(kind: str, stage: int, is_callable: bool) -> None:
    make = MAKES[kind]
    request: dict[str, Any] = {"optimizer": make} if is_callable else {"make": make}
    assert_alike(on_ranks(lambda here, rank: train(here, rank, stage, **request)), plainly(make))


@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.parametrize("kind", [*MAKES, "named"])
def test_parameters_that_are_unfrozen_later_have_their_state_too(kind: str, stage: int) -> None:
    make = MAKES.get(kind, adagrad)
    named = {"type": "Adagrad", "params": {"lr": 0.1, "initial_accumulator_value": 0.5}}
    request: dict[str, Any] = {"optimizer": named} if kind == "named" else {"make": make}

    def body(here: Here, rank: Rank) -> dict[str, Tensor]:
        if kind != "named":
            return train(here, rank, stage, frozen_until=1, **request)
        model = net()
        model.up.requires_grad_(False)
        engine = here.start(rank, model, config(stage, optimizer=named))
        for step in range(STEPS):
            model.up.requires_grad_(step >= 1)
            engine.backward(engine(data(step, rank.index)).square().mean())
            engine.step()
        found = {name: value.clone() for name, value in engine.module.state_dict().items()}
        engine.destroy()
        return found

    assert_alike(on_ranks(body), plainly(make, frozen_until=1))


def trained(engine: Any, rank: Rank) -> dict[str, Tensor]:
    """Return the full weights after STEPS steps, and destroy the engine."""
    for step in range(STEPS):
        engine.backward(engine(data(step, rank.index)).square().mean())
        engine.step()
    found = {name: value.clone() for name, value in engine.module.state_dict().items()}
    engine.destroy()
    return found


@pytest.mark.parametrize("tier", ["cpu"])
@pytest.mark.parametrize("stage", [1, 3])
def test_offloaded_states_begin_with_the_clients_values(stage: int, tier: str) -> None:
    def body(here: Here, rank: Rank) -> dict[str, Tensor]:
        model = net()
        chosen = config(stage)
        chosen["zero_optimization"] |= {"offload_optimizer": {"device": tier}}
        return trained(
            here.start(rank, model, chosen, optimizer=OwnState(model.parameters())), rank
        )

    assert_alike(on_ranks(body), plainly(OwnState))


def test_layers_that_become_tiles_keep_their_rows_of_the_state() -> None:
    def body(here: Here, rank: Rank) -> dict[str, Tensor]:
        model = net()
        chosen = config(3)
        chosen["zero_optimization"] |= {"tile_above": 4 * WIDTH * WIDTH // 2}
        return trained(
            here.start(rank, model, chosen, optimizer=OwnState(model.parameters())), rank
        )

    assert_alike(on_ranks(body), plainly(OwnState))


@pytest.mark.parametrize("stage", [1, 3])
def test_ranks_along_tp_take_their_part_of_the_state(stage: int) -> None:
    pytest.importorskip("transformers")
    tokens = torch.arange(16).view(2, 8)

    def steps(model: nn.Module, backward: Callable[[Tensor], Any], step: Callable[[], Any]) -> None:
        for _ in range(STEPS):
            backward(model(input_ids=tokens, labels=tokens, use_cache=False).loss)
            step()

    def body(here: Here, rank: Rank) -> dict[str, Tensor]:
        from deepseek_zero.base.mesh import Mesh

        model = llama(1)
        made = OwnState(model.parameters(), lr=0.01)
        engine = here.start(rank, model, config(stage), optimizer=made, mesh=Mesh(tp=2))
        steps(engine, engine.backward, engine.step)
        found = {name: value.clone() for name, value in engine.module.state_dict().items()}
        engine.destroy()
        return found

    whole = llama(1)
    optimizer = OwnState(whole.parameters(), lr=0.01)

    def step() -> None:
        optimizer.step()
        optimizer.zero_grad()

    steps(whole, lambda loss: loss.backward(), step)
    assert_alike(on_ranks(body), whole.state_dict())


def refused(
    make: Make, stage: int = 3, spoil: Callable[[Any], None] = lambda _: None
) -> list[Exception]:
    def body(here: Here, rank: Rank) -> Exception:
        model = net()
        made = make(model.parameters())
        spoil(made)
        with pytest.raises(DeepSeekZeroError) as found:
            here.start(rank, model, config(stage), optimizer=made)
        return found.value

    return on_ranks(body)


def test_layers_that_cannot_be_cut_are_refused_by_name_on_every_rank() -> None:
    found = refused(RowOfElements)
    assert all("state 'row'" in str(each) and "RowOfElements" in str(each) for each in found)
    assert any(
        isinstance(each, UsageError) and 'granularity = "tensor"' in str(each) for each in found
    )


def test_tensors_in_a_parameter_group_are_refused_by_name() -> None:
    def spoil(made: Any) -> None:
        made.param_groups[0]["speeds"] = [
            torch.zeros_like(param) for param in made.param_groups[0]["params"]
        ]

    assert all("'speeds'" in str(each) for each in refused(OwnState, spoil=spoil))


def test_an_optimizer_that_counts_steps_is_refused_with_their_number() -> None:
    def spoil(made: Any) -> None:
        for group in made.param_groups:
            for param in group["params"]:
                param.grad = torch.zeros_like(param)
        made.step()
        made.zero_grad()

    found = refused(torch.optim.AdamW, spoil=spoil)
    assert all("AdamW" in str(each) and "counts 1" in str(each) for each in found)


def test_empty_entries_are_no_state() -> None:
    def make(params: Iterable[Any]) -> torch.optim.Optimizer:
        made = torch.optim.AdamW(params, lr=0.01)
        for param in made.param_groups[0]["params"]:
            made.state[param]  # creates an entry, as schedulefree's `train` does
        return made

    assert_alike(on_ranks(lambda here, rank: train(here, rank, 2, make=make)), plainly(make))


def test_different_initial_optimizers_on_ranks_are_reported() -> None:
    def body(here: Here, rank: Rank) -> str:
        model = net()
        made = OwnState(model.parameters())
        if rank.index == 1:
            made.state[model.up.weight]["speed"].add_(1.0)
        with pytest.raises(DeepSeekZeroError) as found:
            here.start(rank, model, config(1), optimizer=made)
        return str(found.value)

    assert all("'speed'" in each and "rank 1" in each for each in on_ranks(body))


def test_a_whole_state_of_another_tensor_class_is_not_cloned() -> None:
    def body(here: Here, rank: Rank) -> None:
        model = net()
        made = ByRow(model.parameters())
        for state in made.state.values():
            state["row"] = state["row"].as_subclass(Uncopied)
        engine = here.start(rank, model, config(0), optimizer=made)
        states = engine.optimizer.inner.state.values()
        assert {type(state["row"]) for state in states} == {Uncopied}
        engine.destroy()

    on_ranks(body)
