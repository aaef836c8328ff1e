"""Changes of `.grad` between backward and step are used by the step, as in unsharded PyTorch.

Every edit runs unchanged on the wrapped model and on a plain model. The plain model's `.grad` is
the mean over the data of all ranks.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import deepseek_zero
from tests.side_by_side import ADAMW, ByEngine, ByHand, Plainly, assert_same_values, offloaded

pytestmark = pytest.mark.ranks(2)
ZeroError = deepseek_zero.DeepSeekZeroError
Edit = Callable[[nn.Module, int], Any]
STEPS = 3
INNER, HEAD, NORM = "blocks.1.up.weight", "head.weight", "blocks.0.norm_1.bias"


def param(model: nn.Module, name: str = INNER) -> nn.Parameter:
    return dict(model.named_parameters())[name]


def noise_like(value: Tensor, step: int) -> Tensor:
    return (
        torch.randn(value.shape, generator=torch.Generator().manual_seed(step)).to(value.dtype)
        * 0.01
    )


# -- edits: each takes the model and the step number


def nothing(model: nn.Module, step: int) -> None:
    """Make no edit, which measures the tolerance of the comparison."""


def assign_a_tensor(model: nn.Module, step: int) -> None:
    for each in (INNER, HEAD, NORM):
        param(model, each).grad = noise_like(param(model, each), step)


def assign_none(model: nn.Module, step: int) -> None:
    if step >= 1:  # earlier there are no moments that would move the weight
        for each in (INNER, NORM):
            param(model, each).grad = None


def assign_none_to_all(model: nn.Module, step: int) -> None:
    if step == 1:
        model.zero_grad()


def zero_all(model: nn.Module, step: int) -> None:
    if step == 1:
        model.zero_grad(set_to_none=False)


def none_then_a_tensor(model: nn.Module, step: int) -> None:
    param(model).grad = None
    param(model).grad = noise_like(param(model), step)


def multiply(model: nn.Module, step: int) -> None:
    for each in model.parameters():
        assert each.grad is not None
        each.grad.mul_(0.5)
        each.grad *= 3
        each.grad.div_(2.0)
        each.grad.data.mul_(1.25)


def zero_one(model: nn.Module, step: int) -> None:
    grad = param(model).grad
    assert grad is not None
    grad.zero_()


def add_noise(model: nn.Module, step: int) -> None:
    for each in model.parameters():
        assert each.grad is not None
        each.grad += noise_like(each, step)
        each.grad.detach().add_(noise_like(each, step + 10), alpha=0.5)


def out_of_place(model: nn.Module, step: int) -> None:
    for each in model.parameters():
        grad = each.grad
        assert grad is not None
        scaled = 0.5 * grad.clone() - grad / 4 + grad.abs() * 0.1 + (1.0 - grad) * 1e-4
        each.grad = torch.where(
            grad > 0, scaled, scaled + grad
        ).float()  # continuous, because the runs differ in their last bits


def masks(model: nn.Module, step: int) -> None:
    for each in model.parameters():
        grad = each.grad
        assert grad is not None
        grad.masked_fill_(noise_like(each, 5) > 0, 0.0)
        grad.clamp_(-0.01, 0.02).nan_to_num_()
        torch.where(torch.isfinite(grad), grad, torch.zeros_like(grad))
        grad.copy_(noise_like(each, step)) if each.dim() == 1 else grad.pow_(3).clip_(max=0.001)


def weight_decay_by_hand(model: nn.Module, step: int) -> None:
    for each in model.parameters():
        assert each.grad is not None
        with torch.no_grad():
            each.grad.add_(each, alpha=0.1)


def foreach(model: nn.Module, step: int) -> None:
    grads = [each.grad for each in model.parameters() if each.grad is not None]
    torch._foreach_mul_(grads, 0.5)
    torch._foreach_add_(grads, [noise_like(each, step) for each in grads], alpha=0.25)
    torch._foreach_mul_(grads, [1.0 + 0.1 * k for k in range(len(grads))])
    torch._foreach_clamp_max_(grads, 0.05)
    if step == 2:
        torch._foreach_zero_(grads[:3])


def clip_by_norm(model: nn.Module, step: int) -> Tensor:
    return nn.utils.clip_grad_norm_(model.parameters(), 0.1)


def clip_by_value(model: nn.Module, step: int) -> None:
    nn.utils.clip_grad_value_(model.parameters(), 0.003)


def replace_data(model: nn.Module, step: int) -> None:
    for each in model.parameters():
        assert each.grad is not None
        each.grad.data = noise_like(each, step)


def norms(model: nn.Module, step: int) -> list[Tensor]:
    grad = param(model).grad
    assert grad is not None
    return [
        grad.norm(),
        torch.norm(grad),
        grad.norm(2),
        grad.norm(p="fro"),
        grad.norm(1.0),
        grad.norm(float("inf")),
        grad.norm(-float("inf")),
        grad.norm(3),
        torch.linalg.vector_norm(grad),
        torch.linalg.vector_norm(grad, 0),
        torch.linalg.norm(grad),
        grad.data.norm(2).detach(),
        (grad * 2).norm(),
        *torch._foreach_norm([grad, grad], 2),
    ]


EDITS: list[Edit] = [
    nothing,
    assign_a_tensor,
    assign_none,
    assign_none_to_all,
    zero_all,
    none_then_a_tensor,
    multiply,
    zero_one,
    add_noise,
    out_of_place,
    masks,
    weight_decay_by_hand,
    foreach,
    clip_by_norm,
    clip_by_value,
    replace_data,
    norms,
]


def compare(edit: Edit, run: Any, plain: Plainly, about: str) -> None:
    for step in range(STEPS):
        for micro in range(plain.accumulation):
            for each in (run, plain):
                each.backward(step, micro)
            if micro < plain.accumulation - 1:
                run.step() if isinstance(run, ByEngine) else None
        given = [edit(each.model, step) for each in (run, plain)]
        if given[0] is not None:
            torch.testing.assert_close(given[0], given[1], rtol=1e-5, atol=1e-6)
        for each in (run, plain):
            each.step()
    assert_same_values(run, plain, about)
    run.end()


STAGES = [0, *(pytest.param(stage, marks=pytest.mark.slow) for stage in (1, 2)), 3]


@pytest.mark.parametrize("stage", STAGES)
def test_the_step_uses_what_the_program_has_made_of_grad(stage: int) -> None:
    for edit in EDITS:
        compare(edit, ByEngine(stage), Plainly(), f"{edit.__name__} by the engine")


@pytest.mark.parametrize("stage", STAGES)
def test_zero_optimizer_uses_what_the_program_has_made_of_grad(stage: int) -> None:
    for edit in EDITS:
        compare(edit, ByHand(stage), Plainly(), f"{edit.__name__} by hand")


SOME = [nothing, assign_a_tensor, assign_none, assign_none_to_all, add_noise, clip_by_norm]


@pytest.mark.parametrize("stage", [*(pytest.param(n, marks=pytest.mark.slow) for n in (1, 2)), 3])
def test_edits_apply_at_the_end_of_an_accumulation_and_with_offload(stage: int) -> None:
    for edit in SOME:
        compare(edit, ByEngine(stage, 2), Plainly(2), f"{edit.__name__}, accumulation 2")
        for tier in ("cpu", "nvme"):
            run = ByEngine(stage, zero_optimization=offloaded(tier, stage))
            compare(edit, run, Plainly(), f"{edit.__name__}, {tier}")
    compare(
        assign_none, ByHand(stage, **offloaded("cpu", stage)), Plainly(), "assign_none by hand, cpu"
    )


# -- edits between micro-batches, before a backward and without one


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_edits_between_micro_batches_count(stage: int) -> None:
    edits: list[Edit] = [
        assign_a_tensor,
        none_then_a_tensor,
        assign_none,
        zero_all,
        multiply,
        assign_none_to_all,
    ]
    for edit in edits:
        run, plain = ByEngine(stage, 2), Plainly(2)
        for step in range(STEPS):
            for each in (run, plain):
                each.backward(step, 0)
                edit(each.model, step)
                if each is run:
                    run.step()
                each.backward(step, 1)
                each.step()
        assert_same_values(run, plain, f"{edit.__name__} between micro-batches")
        run.end()


def put_first(model: nn.Module, step: int) -> None:
    for each in model.parameters():
        each.grad = noise_like(each, step)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_gradient_from_before_backward_is_added_to_or_kept_separately(stage: int) -> None:
    run, plain = ByHand(stage), Plainly()
    for step in range(4):
        for each in (run, plain):
            put_first(each.model, step)
            if step % 2:
                each.backward(step, 0)  # accumulates into the assigned gradient
            each.step()
    for each in (run, plain):
        each.backward(5, 0)
        each.model.zero_grad()
        each.optimizer.step()
        each.optimizer.step()  # two steps without gradients
    assert_same_values(run, plain, "put before backward")
    run.end()


# -- differences between ranks


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_each_ranks_slice_of_what_it_assigned_counts_and_replicas_stay_equal(stage: int) -> None:
    run = ByEngine(stage)
    for step in range(2):
        run.backward(step, 0)
        for each in run.model.parameters():
            assert each.grad is not None
            each.grad.add_(noise_like(each, step + 50 * dist.get_rank()))
        if step == 1:
            whole = param(run.model).grad.full_tensor()  # type: ignore[union-attr]
            param(run.model).grad = whole * (1 + dist.get_rank())
        run.step()
    checksum = torch.stack(
        [value.double().sum() for value in run.model.state_dict().values()]
    ).reshape(1, -1)
    both = [torch.empty_like(checksum) for _ in range(dist.get_world_size())]
    dist.all_gather(both, checksum)
    assert torch.equal(both[0], both[1])
    run.end()


@pytest.mark.parametrize("stage", [0, 3])
def test_a_gradient_dropped_on_one_rank_only_is_an_error_on_every_rank(stage: int) -> None:
    run = ByEngine(stage)
    run.backward(0, 0)
    before = {name: value.clone() for name, value in run.model.state_dict().items()}
    if dist.get_rank() == 1:
        param(run.model).grad = None
    with pytest.raises(
        ZeroError, match=r"(?s)which parameters have no gradient.*none.*blocks.1.up.weight"
    ):
        run.step()
    for name, value in run.model.state_dict().items():
        assert torch.equal(value, before[name])
    run.end()


def test_operations_without_support_for_sharded_gradients_raise_an_error_with_the_name() -> None:
    run = ByEngine(3)
    run.backward(0, 0)
    grad, other = param(run.model).grad, param(run.model, HEAD).grad
    assert grad is not None and other is not None

    def put_item() -> None:
        grad[0] = 0.0

    refused: list[Callable[[], Any]] = [
        put_item,
        lambda: grad.sum(),
        lambda: grad.view(-1),
        lambda: grad[0],
        lambda: grad.norm(dim=0),
        lambda: grad.normal_(),
        lambda: torch.zeros(grad.shape).add_(grad),
        lambda: torch.mul(grad, 2, out=torch.zeros(grad.shape)),
        lambda: grad.type(torch.float64),
        lambda: grad.flatten(),
        lambda: grad.numpy(),
        lambda: grad.tolist(),
        lambda: torch.cat([grad, grad]),
    ]
    for each in refused:
        with pytest.raises(ZeroError, match="full_tensor"):
            each()
    with pytest.raises(
        ZeroError, match=r"blocks.1.up.weight.*head.weight|head.weight.*blocks.1.up.weight"
    ):
        grad.mul_(other)
    with pytest.raises(ZeroError, match="another parameter"):
        param(run.model, "blocks.2.up.weight").grad = grad
        run.step()
    param(run.model, "blocks.2.up.weight").grad = None
    run.engine.zero_grad()
    with pytest.raises(ZeroError, match="is over"):
        grad.mul_(2.0)
    run.end()


# -- number formats, delayed and early updates, other readers of gradients


def loss_scale(run: ByEngine) -> float:
    return float(run.engine.optimizer.loss_scale)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_under_16_bits_grad_is_as_held_and_assigned_values_reach_the_masters(stage: int) -> None:
    formats: list[dict[str, Any]] = [
        {"bf16": {"enabled": True}},
        {"bf16": {"enabled": True, "master": "fp32"}},
        {"fp16": {"enabled": True, "loss_scale": 0, "initial_scale_power": 10}},
    ]
    for sections in formats:
        run = ByEngine(stage, **sections)
        masters = {
            name: deepseek_zero.utils.safe_get_full_fp32_param(each) for name, each in named(run)
        }
        reference = [nn.Parameter(value.clone()) for value in masters.values() if value is not None]
        optimizer = torch.optim.AdamW(reference, **ADAMW)
        for step in range(STEPS):
            run.backward(step, 0)
            shown = deepseek_zero.utils.safe_get_full_grad(param(run.model))
            assert shown is not None and torch.equal(
                shown, param(run.model).grad.full_tensor().float()
            )  # type: ignore[union-attr]
            for (_name, each), plain in zip(named(run), reference, strict=True):
                wanted = noise_like(plain.detach(), step)
                each.grad = (wanted * loss_scale(run)).to(each.dtype)
                plain.grad = each.grad.clone().float() / loss_scale(run)
            if step == 1:
                param(run.model, HEAD).grad = None
                reference[[name for name, _ in named(run)].index(HEAD)].grad = None
            given = deepseek_zero.utils.safe_get_full_grad(param(run.model))
            expected = reference[[name for name, _ in named(run)].index(INNER)].grad
            assert given is not None and expected is not None
            torch.testing.assert_close(given / loss_scale(run), expected)
            run.step()
            assert run.engine.was_step_applied()
            optimizer.step()
        for (name, each), plain in zip(named(run), reference, strict=True):
            found = deepseek_zero.utils.safe_get_full_fp32_param(each)
            assert found is not None
            torch.testing.assert_close(
                found,
                plain.detach(),
                rtol=1e-5,
                atol=1e-6,
                msg=lambda text, name=name: f"{name}: {text}",
            )
        run.end()


def named(run: ByEngine) -> list[tuple[str, nn.Parameter]]:
    return list(run.model.named_parameters())


def test_a_nan_that_was_put_into_a_gradient_skips_an_fp16_step() -> None:
    run = ByEngine(3, fp16={"enabled": True, "initial_scale_power": 4, "hysteresis": 1})
    run.backward(0, 0)
    before = {name: value.clone() for name, value in run.model.state_dict().items()}
    grad = param(run.model).grad
    assert grad is not None
    grad.fill_(float("nan"))
    run.step()
    assert not run.engine.was_step_applied() and loss_scale(run) == 8.0
    for name, value in run.model.state_dict().items():
        assert torch.equal(value, before[name])
    run.end()


def test_speculative_updates_are_undone_if_gradients_were_changed() -> None:
    for edit in (nothing, assign_a_tensor, assign_none, add_noise, assign_none_to_all):
        run = ByEngine(3, zero_optimization=offloaded("cpu", 3, super_offload=True))
        compare(edit, run, Plainly(), f"{edit.__name__}, super_offload")


def test_a_delayed_update_uses_the_edited_gradient() -> None:
    """A parameter without a gradient is not updated by the delayed update of the next step."""
    for edit in (assign_a_tensor, assign_none, multiply):
        values = []
        for sharded in (True, False):
            run: Any = (
                ByEngine(3, zero_optimization=offloaded("cpu", 3, delayed_update_after=0))
                if sharded
                else Plainly()
            )
            owed: list[Tensor | None] | None = None
            for step in range(4):
                run.backward(step, 0)
                edit(run.model, step)
                if sharded:
                    run.step()
                    continue
                made = [
                    None if each.grad is None else each.grad.clone()
                    for each in run.model.parameters()
                ]
                for each, grad in zip(
                    run.model.parameters(), owed or [None] * len(made), strict=True
                ):
                    each.grad = grad
                run.step()
                owed = made
            values.append(run)
        assert_same_values(values[0], values[1], f"{edit.__name__}, delayed")
        values[0].end()


# -- checkpoints


def drop_now_and_then(model: nn.Module, step: int) -> None:
    """Drop gradients so that one unit has parameters with three different step counts."""
    param(model).grad = None if step != 1 else param(model).grad
    param(model, "blocks.1.proj.weight").grad = (
        None if step == 2 else param(model, "blocks.1.proj.weight").grad
    )


def values_of(run: Any) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in run.model.state_dict().items()}


@pytest.mark.parametrize("stage", [1, 3])
def test_runs_resume_from_checkpoints_of_unequal_counters(stage: int, tmp_path: Path) -> None:
    for tier in ("none", "nvme"):
        sections = {"zero_optimization": offloaded(tier, stage)} if tier != "none" else {}
        run = ByEngine(stage, **sections)
        for step in range(3):
            run.backward(step, 0)
            drop_now_and_then(run.model, step)
            run.step()
        run.engine.save_checkpoint(str(tmp_path), tag=tier)
        run.engine.save_checkpoint(str(tmp_path), tag=f"{tier}-2")
        again = ByEngine(stage, **sections)
        again.engine.load_checkpoint(str(tmp_path), tag=tier)
        for each in (run, again):
            for step in range(3, 6):
                each.backward(step, 0)
                drop_now_and_then(each.model, step - 3)
                each.step()
        expected = values_of(run)
        for name, value in values_of(again).items():
            assert torch.equal(value, expected[name]), (tier, name)
        run.engine.load_checkpoint(str(tmp_path), tag=tier)  # into split shards
        again.end()
        run.end()


def test_the_optimizers_state_dict_resumes_with_unequal_counters() -> None:
    run, plain = ByHand(2), ByHand(2)
    for step in range(3):
        run.backward(step, 0)
        drop_now_and_then(run.model, step)
        run.step()
    weights, state = values_of(run), copy.deepcopy(run.optimizer.state_dict())
    plain.model.load_state_dict(weights)
    plain.optimizer.load_state_dict(state)
    for each in (run, plain):
        each.backward(4, 0)
        each.step()
    for name, value in values_of(plain).items():
        assert torch.equal(value, values_of(run)[name]), name
    run.end()
    plain.end()


def test_moments_in_8_bits_that_share_an_exponent_are_reported() -> None:
    # Weights and biases share shards on both ranks: lengths that are multiples of 8 leave no gaps.
    model = nn.Sequential(*(nn.Linear(32, 32) for _ in range(4)))
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "steps_per_print": None,
        "optimizer": {"type": "AdamW", "params": ADAMW, "moments": "8bit"},
        "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
    }
    engine = deepseek_zero.initialize(model=model, config=config)[0]
    for _ in range(2):
        engine.backward(engine(torch.ones(2, 32)).square().mean())
        engine.step()
    engine.backward(engine(torch.ones(2, 32)).square().mean())
    for layer in model:
        layer.bias.grad = None
    with pytest.raises(ZeroError, match=r"8 bits|failed"):
        engine.step()
