"""Compare Newton-Schulz with singular values, Muon with its formula and its AdamW with torch's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from deepseek_zero.base.errors import ConfigError
from deepseek_zero.optimizers.common import adam_state
from deepseek_zero.optimizers.muon import Muon, orthogonalize


def slow_orthogonalize(matrix: Tensor, steps: int = 5) -> Tensor:
    """Apply the quintic polynomial to the singular values in float64."""
    left, values, right = torch.linalg.svd(
        matrix.double() / matrix.double().norm(), full_matrices=False
    )
    for _ in range(steps):
        values = 3.4445 * values - 4.7750 * values**3 + 2.0315 * values**5
    return left @ torch.diag(values) @ right


SHAPES = [(8, 8), (6, 10), (10, 6), (4, 32), (32, 4), (1, 5), (5, 1)]


@pytest.mark.parametrize("method", ["standard", "gram"])
@pytest.mark.parametrize("shape", SHAPES)
def test_newton_schulz_is_the_quintic_on_the_singular_values(
    shape: tuple[int, int], method: str
) -> None:
    matrix = torch.randn(shape)
    result = orthogonalize(matrix, method)
    torch.testing.assert_close(result.double(), slow_orthogonalize(matrix), rtol=0, atol=2e-5)


@pytest.mark.parametrize("method", ["standard", "gram"])
@pytest.mark.parametrize("steps", [1, 2, 3, 6])
def test_any_number_of_steps_works(steps: int, method: str) -> None:
    matrix = torch.randn(4, 20)
    expected = slow_orthogonalize(matrix, steps)
    torch.testing.assert_close(
        orthogonalize(matrix, method, steps).double(), expected, rtol=0, atol=2e-5
    )


@pytest.mark.parametrize("method", ["standard", "gram"])
def test_singular_values_approach_one_and_the_input_is_unchanged(method: str) -> None:
    matrix = torch.randn(16, 64) * 1e-4
    before = matrix.clone()
    values = torch.linalg.svdvals(orthogonalize(matrix, method))
    assert values.min() > 0.6 and values.max() < 1.3 and torch.equal(matrix, before)


@pytest.mark.parametrize("method", ["standard", "gram"])
def test_a_stack_equals_a_loop_over_its_matrices_and_zeros_stay_zero(method: str) -> None:
    stack = torch.randn(3, 4, 12)
    stack[1] = 0
    result = orthogonalize(stack, method)
    expected = torch.stack([orthogonalize(matrix, method) for matrix in stack])
    torch.testing.assert_close(result, expected, rtol=0, atol=1e-6)
    assert not result[1].any()


def test_a_nearly_singular_matrix_stays_finite_and_bounded_in_the_gram_form() -> None:
    matrix = torch.outer(torch.randn(16), torch.randn(64)) + 1e-6 * torch.randn(16, 64)
    assert torch.linalg.matrix_norm(orthogonalize(matrix, "gram"), 2) < 1.3


@pytest.mark.parametrize("nesterov", [True, False])
@pytest.mark.parametrize("shape", [(6, 3), (3, 6), (2, 4, 5), (4, 3, 2, 2)])
def test_a_matrix_follows_the_formula(shape: tuple[int, ...], nesterov: bool) -> None:
    start, grads = torch.randn(shape), [torch.randn(shape) for _ in range(3)]
    weight = start.clone()
    optimizer = Muon(
        [weight], lr=0.1, momentum=0.9, weight_decay=0.2, nesterov=nesterov, ns_method="standard"
    )
    expected, momentum = start.double(), torch.zeros(shape, dtype=torch.float64)
    for grad in grads:
        weight.grad = grad.clone()
        optimizer.step()
        momentum = 0.9 * momentum + 0.1 * grad.double()
        update = 0.1 * grad.double() + 0.9 * momentum if nesterov else momentum
        flat = update.reshape(shape[0], -1) if len(shape) == 4 else update
        stack = flat if flat.ndim == 3 else flat.unsqueeze(0)
        direction = torch.stack([slow_orthogonalize(matrix) for matrix in stack]).reshape(shape)
        scale = max(1.0, stack.shape[-2] / stack.shape[-1]) ** 0.5
        expected = expected * (1 - 0.1 * 0.2) - 0.1 * scale * direction
    torch.testing.assert_close(weight.double(), expected, rtol=0, atol=5e-5)
    torch.testing.assert_close(
        optimizer.state[weight]["momentum_buffer"].double(), momentum, rtol=0, atol=1e-6
    )


def test_the_other_parameters_follow_torchs_adamw_bit_for_bit() -> None:
    starts = [torch.randn(5), torch.randn(33)]
    mine, torchs = [s.clone() for s in starts], [s.clone() for s in starts]
    settings = {"lr": 0.02, "betas": (0.8, 0.9), "eps": 1e-9, "weight_decay": 0.3}
    muon, adamw = Muon(mine, **settings), torch.optim.AdamW(torchs, fused=True, **settings)
    for _ in range(3):
        for a, b in zip(mine, torchs, strict=True):
            a.grad = b.grad = torch.randn_like(a)
        muon.step()
        adamw.step()
    assert all(torch.equal(a, b) for a, b in zip(mine, torchs, strict=True))


@pytest.mark.parametrize(
    ("settings", "rates"),
    [
        ({}, [0.02, 3e-4]),
        ({"lr": 0.5}, [0.5, 0.5]),
        ({"muon_lr": 0.1, "adam_lr": 0.2}, [0.1, 0.2]),
        ({"lr": 0.5, "adam_lr": 0.2}, [0.5, 0.2]),
    ],
)
def test_a_mixed_group_is_split_and_each_part_has_its_rate(
    settings: dict[str, float], rates: list[float]
) -> None:
    vector, matrix = torch.ones(3), torch.ones(3, 3)
    optimizer = Muon([vector, matrix], **settings)
    assert [group["use_muon"] for group in optimizer.param_groups] == [True, False]
    assert [group["params"] for group in optimizer.param_groups] == [[matrix], [vector]]
    assert [group["lr"] for group in optimizer.param_groups] == rates


def test_a_parameter_group_may_have_a_name_and_its_own_learning_rate() -> None:
    embedding, hidden = torch.ones(3, 3), torch.ones(3, 3)
    groups = [
        {"params": [embedding], "use_muon": False, "lr": 0.3},
        {"params": [hidden], "use_muon": True},
    ]
    optimizer = Muon(groups, lr=0.1)
    assert [(group["use_muon"], group["lr"]) for group in optimizer.param_groups] == [
        (False, 0.3),
        (True, 0.1),
    ]
    assert [Muon.group_granularity(group) for group in optimizer.param_groups] == [
        "element",
        "tensor",
    ]
    embedding.grad = hidden.grad = torch.ones(3, 3)
    optimizer.step()
    assert set(optimizer.state[embedding]) == {"step", "exp_avg", "exp_avg_sq"}
    assert set(optimizer.state[hidden]) == {"momentum_buffer"}


def test_hidden_matrices_are_updated_by_muon_and_other_parameters_by_adamw() -> None:
    class Float8Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.tokens = nn.Embedding(10, 4)
            self.position_embedding = nn.Parameter(torch.zeros(6, 4))
            self.up, self.frozen, self.norm = (
                nn.Linear(4, 8),
                nn.Linear(4, 4, bias=False),
                nn.LayerNorm(4),
            )
            self.tied_output = nn.Linear(4, 10, bias=False)
            self.tied_output.weight = self.tokens.weight
            self.lm_head = nn.Linear(4, 10)
            self.frozen.weight.requires_grad_(False)

    model = Float8Block()
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    matrices, others = Muon.parameter_groups(model)
    assert [names[id(p)] for p in matrices["params"]] == ["up.weight"] and matrices[
        "use_muon"
    ] is True
    assert others["use_muon"] is False and sorted(names[id(p)] for p in others["params"]) == [
        "lm_head.bias",
        "lm_head.weight",
        "norm.bias",
        "norm.weight",
        "position_embedding",
        "tokens.weight",
        "up.bias",
    ]


def test_a_saved_state_resumes_with_the_same_bits() -> None:
    starts, grads = (
        [torch.randn(3, 4), torch.randn(3)],
        [[torch.randn(3, 4), torch.randn(3)] for _ in range(4)],
    )

    def go(weights: list[Tensor], optimizer: Muon, steps: list[list[Tensor]]) -> None:
        for step in steps:
            for weight, grad in zip(weights, step, strict=True):
                weight.grad = grad.clone()
            optimizer.step()

    straight, resumed = [s.clone() for s in starts], [s.clone() for s in starts]
    go(straight, Muon(straight), grads)
    first = Muon(resumed)
    go(resumed, first, grads[:2])
    second = Muon(resumed)
    second.load_state_dict(first.state_dict())
    go(resumed, second, grads[2:])
    assert all(torch.equal(a, b) for a, b in zip(straight, resumed, strict=True))


def test_a_vector_cannot_be_orthogonalised() -> None:
    with pytest.raises(ConfigError, match=r"holds shapes \[\(3,\)\]"):
        Muon([{"params": [torch.ones(3)], "use_muon": True}])


@pytest.mark.parametrize(
    "settings", [{"betas": (0.9, 1.5)}, {"betas": (0.9,)}, {"eps": -1.0}, {"momentum": 1.0}]
)
def test_impossible_settings_are_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="Muon cannot use"):
        Muon([torch.ones(2, 2)], **settings)


@pytest.mark.parametrize("shape", [(4, 0), (0, 4), (0, 4, 2, 2), (2, 0, 3, 3)])
def test_a_parameter_without_elements_is_stepped(shape: tuple[int, ...]) -> None:
    empty = nn.Parameter(torch.ones(shape))
    empty.grad = torch.ones(shape)
    Muon([empty]).step()
    assert empty.shape == shape


def test_an_unknown_method_is_named() -> None:
    with pytest.raises(ConfigError, match="does not know ns_method 'cubic'"):
        Muon([torch.ones(2, 2)], ns_method="cubic")


@pytest.mark.parametrize(
    "given", [lambda weight: weight, lambda weight: iter([weight])], ids=["tensor", "iterator"]
)
def test_a_group_may_have_one_tensor_or_an_iterator(given: Callable[[Tensor], Any]) -> None:
    model = nn.ModuleDict({"up": nn.Linear(4, 3), "lm_head": nn.Linear(3, 9)})
    for weight, uses_muon in ((model["up"].weight, True), (model["lm_head"].weight, False)):
        (group,) = Muon.divide_groups(model, [{"params": given(weight)}])
        assert [id(member) for member in group["params"]] == [id(weight)]
        assert group["use_muon"] is uses_muon


def test_the_rate_the_decay_and_the_momentum_may_be_positional_as_in_torch_and_deepspeed() -> None:
    group = Muon([torch.ones(2, 2)], 0.5, 0.1, 0.8).param_groups[0]
    assert (group["lr"], group["weight_decay"], group["momentum"]) == (0.5, 0.1, 0.8)


def test_a_counter_that_was_loaded_on_the_cpu_is_moved_to_the_device() -> None:
    param = torch.ones(3, device="meta")
    state: dict[str, Any] = {"step": torch.tensor(4.0)}
    adam_state(state, param, param.device)
    assert state["step"].device == param.device
    state = {"step": torch.tensor(4.0)}
    counter = state["step"]
    adam_state(state, torch.ones(3), torch.device("cpu"))
    assert state["step"] is counter
