"""Test the optimizer registry: names, DeepSpeed's parameters, refusals and granularity."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
from torch import nn

from deepseek_zero.base.errors import ConfigError, NotBuiltError
from deepseek_zero.optimizers import registry
from deepseek_zero.optimizers.lamb import Lamb
from deepseek_zero.optimizers.lion import Lion
from deepseek_zero.optimizers.muon import Muon
from deepseek_zero.optimizers.one_bit_adam import OneBitAdam
from deepseek_zero.optimizers.registry import VALID_OPTIMIZERS, granularity_of, resolve_optimizer


@pytest.mark.parametrize(
    ("name", "cls"),
    [
        ("Adam", torch.optim.AdamW),
        ("AdamW", torch.optim.AdamW),
        ("ADAMW", torch.optim.AdamW),
        ("sgd", torch.optim.SGD),
        ("Adagrad", torch.optim.Adagrad),
        ("Lion", Lion),
        ("Lamb", Lamb),
        ("Muon", Muon),
        ("RMSprop", torch.optim.RMSprop),
        ("adafactor", torch.optim.Adafactor),
    ],
)
def test_names_are_found_in_any_case(name: str, cls: type) -> None:
    assert resolve_optimizer(name, {}).cls is cls


@pytest.mark.parametrize("name", VALID_OPTIMIZERS)
def test_every_valid_name_builds_and_steps_on_the_cpu(name: str) -> None:
    weight = torch.ones(3, 4)
    spec = resolve_optimizer(name, {})
    optimizer = spec.build([weight])
    weight.grad = torch.ones(3, 4)
    optimizer.step()
    assert not torch.equal(weight, torch.ones(3, 4))
    assert spec.granularity == granularity_of(optimizer) == granularity_of(type(optimizer))


@pytest.mark.parametrize(
    ("params", "cls", "decay"),
    [
        ({}, torch.optim.AdamW, 0.0),
        ({"adam_w_mode": True, "weight_decay": 0.3}, torch.optim.AdamW, 0.3),
        ({"adam_w_mode": False}, torch.optim.Adam, 0.0),
        ({"adam_w_mode": False, "torch_adam": True}, torch.optim.Adam, 0),
        ({"torch_adam": True}, torch.optim.AdamW, 0.01),
        (
            {"torch_adam": False, "fp32_optimizer_states": True, "bias_correction": True},
            torch.optim.AdamW,
            0.0,
        ),
        ({"fp32_optimizer_states": False, "set_grad_none": False}, torch.optim.AdamW, 0.0),
    ],
)
def test_adam_has_deepspeeds_meaning(params: dict[str, Any], cls: type, decay: float) -> None:
    optimizer = resolve_optimizer("Adam", params).build([torch.ones(1)])
    assert type(optimizer) is cls and optimizer.param_groups[0]["weight_decay"] == decay


def test_adamw_has_decoupled_weight_decay_in_every_mode() -> None:
    assert resolve_optimizer("AdamW", {"adam_w_mode": False}).cls is torch.optim.AdamW


def test_lists_become_tuples_and_auto_leaves_the_default() -> None:
    params = {"lr": "auto", "betas": [0.8, 0.9], "eps": "auto", "weight_decay": 0.1}
    spec = resolve_optimizer("AdamW", params)
    assert spec.defaults == {"betas": (0.8, 0.9), "weight_decay": 0.1, "fused": True}
    assert spec.build([torch.ones(1)]).param_groups[0]["lr"] == 1e-3


@pytest.mark.parametrize("name", ["Adam", "AdamW", "SGD"])
def test_the_fused_kernel_is_used_unless_configured_otherwise(name: str) -> None:
    assert resolve_optimizer(name, {}).defaults["fused"] is True
    assert resolve_optimizer(name, {"fused": False}).defaults["fused"] is False
    assert "fused" not in resolve_optimizer(name, {"foreach": False}).defaults
    assert "fused" not in resolve_optimizer("RMSprop", {}).defaults


def test_muon_passes_its_rates_to_the_groups_that_it_creates() -> None:
    model = nn.Sequential(nn.Embedding(5, 4), nn.Linear(4, 4))
    spec = resolve_optimizer("Muon", {"muon_lr": 0.1, "adam_lr": 0.2, "ns_method": "standard"})
    optimizer = spec.build(spec.parameter_groups(model))
    assert [(group["use_muon"], group["lr"]) for group in optimizer.param_groups] == [
        (True, 0.1),
        (False, 0.2),
    ]
    assert [granularity_of(optimizer, group) for group in optimizer.param_groups] == [
        "tensor",
        "element",
    ]
    assert granularity_of(Muon) == "tensor"


def test_muon_divides_the_users_groups_and_keeps_their_settings() -> None:
    model = nn.Sequential(nn.Embedding(5, 4), nn.Linear(4, 4), nn.Linear(4, 4))
    spec = resolve_optimizer("Muon", {"lr": 0.1})
    decayed = {"params": [model[0].weight, model[1].weight, model[1].bias], "weight_decay": 0.5}
    said = {"params": [model[2].weight], "use_muon": False, "lr": 0.7}
    groups = spec.parameter_groups(model, [decayed, said])
    assert [(g["use_muon"], g.get("weight_decay"), len(g["params"])) for g in groups] == [
        (True, 0.5, 1),
        (False, 0.5, 2),
        (False, None, 1),
    ]
    built = spec.build(groups).param_groups
    assert [(g["use_muon"], g["lr"], g["weight_decay"]) for g in built] == [
        (True, 0.1, 0.5),
        (False, 0.1, 0.5),
        (False, 0.7, 0.0),
    ]


def test_a_rank_may_own_nothing_of_a_group_and_the_groups_stay_in_place() -> None:
    for name in ("Muon", "Lamb", "Lion", "AdamW"):
        optimizer = resolve_optimizer(name, {}).build(
            [{"params": []}, {"params": [torch.ones(2, 2)]}]
        )
        assert [len(group["params"]) for group in optimizer.param_groups] == [0, 1]
        optimizer.param_groups[1]["params"][0].grad = torch.ones(2, 2)
        optimizer.step()


def test_other_optimizers_take_all_trainable_parameters_as_one_group() -> None:
    model = nn.Linear(2, 2)
    model.bias.requires_grad_(False)
    (group,) = resolve_optimizer("Lion", {}).parameter_groups(model)
    assert [id(parameter) for parameter in group["params"]] == [id(model.weight)]


@pytest.mark.parametrize(
    ("name", "params", "message"),
    [
        ("AdmaW", {}, r"'AdmaW' is not known \(did you mean 'adamw'\?\)"),
        ("Adam", {"learning_rate": 1}, "'learning_rate' is not a parameter"),
        ("Adam", {"weigth_decay": 1}, r"did you mean 'weight_decay'\?"),
        ("Adam", {"lr": "fast"}, "'lr' must be a number, not 'fast'"),
        ("Lion", {"eps": 1e-8}, "'eps' is not a parameter"),
        ("Muon", {"ns_metod": "gram"}, r"did you mean 'ns_method'\?"),
        (
            "SGD",
            {"max_grad_norm": 1.0},
            "'max_grad_norm' is not supported as an optimizer parameter, please switch to",
        ),
    ],
)
def test_invalid_optimizer_parameters_are_named(
    name: str, params: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        resolve_optimizer(name, params)


def test_all_problems_are_reported_together_with_the_valid_names() -> None:
    with pytest.raises(ConfigError) as caught:
        resolve_optimizer("Lamb", {"lr": "x", "speed": 1, "max_coef": 2})
    text = str(caught.value)
    assert (
        "'lr' must be a number" in text
        and "'speed'" in text
        and "did you mean 'max_coeff'?" in text
    )
    assert "betas, bias_correction, eps" in text


def test_errors_of_an_optimizer_class_are_config_errors() -> None:
    with pytest.raises(
        ConfigError, match=r"AdamW refuses its parameters.*Invalid learning rate: -1"
    ):
        resolve_optimizer("Adam", {"lr": -1}).build([torch.ones(1)])


@pytest.mark.parametrize("name", ["ZeroOneAdam", "OneBitLamb", "MuAdam", "MuAdamW", "MuSGD"])
def test_a_known_name_that_is_not_implemented_raises_an_error_with_the_reason(name: str) -> None:
    with pytest.raises(NotBuiltError, match=f"optimizer '{name}' is not built: "):
        resolve_optimizer(name, {"freeze_step": 10})


@pytest.mark.parametrize(
    ("name", "params"),
    [
        ("Adam", {"amsgrad": True, "bias_correction": False}),
        ("Lamb", {"eps_inside_sqrt": True}),
        ("Adagrad", {"amsgrad": True}),
        ("OneBitAdam", {"amsgrad": True}),
        ("OneBitAdam", {"eps_inside_sqrt": True}),
    ],
)
def test_a_value_that_is_not_built_is_never_ignored(name: str, params: dict[str, Any]) -> None:
    with pytest.raises(NotBuiltError, match=next(iter(params))):
        resolve_optimizer(name, params)


def test_one_bit_adam_takes_deepspeeds_parameters_and_needs_a_warm_up() -> None:
    ignored = {"cuda_aware": True, "comm_backend_name": "nccl", "amsgrad": False}
    spec = resolve_optimizer(
        "OneBitAdam", {"lr": 0.1, "betas": [0.8, 0.9], "freeze_step": 400, **ignored}
    )
    assert spec.granularity == "element" and spec.defaults == {
        "lr": 0.1,
        "betas": (0.8, 0.9),
        "freeze_step": 400,
    }
    built = spec.build([torch.nn.Parameter(torch.ones(2))])
    assert (built.freeze_step, built.beta1) == (400, 0.8) and built.param_groups[0][
        "weight_decay"
    ] == 0.0
    with pytest.raises(ConfigError, match="freeze_step is 0"):
        resolve_optimizer("OneBitAdam", {"freeze_step": 0})


@pytest.mark.parametrize(
    ("steps", "message"),
    [((5, 0), "freeze_step is 0"), ((5, "a"), "freeze_step is 'a'"), ((5, 6), "different values")],
)
def test_one_bit_adam_refuses_the_freeze_step_of_a_parameter_group(
    steps: tuple[Any, Any], message: str
) -> None:
    groups = [{"params": [nn.Parameter(torch.ones(2))], "freeze_step": step} for step in steps]
    with pytest.raises(ConfigError, match=message):
        OneBitAdam(groups)
    same = [{**group, "freeze_step": 5} for group in groups]
    assert OneBitAdam(same).freeze_step == 5


@pytest.mark.parametrize("name", ["LBFGS", "SparseAdam"])
def test_an_optimizer_that_cannot_be_sharded_is_refused(name: str) -> None:
    with pytest.raises(NotBuiltError, match=f"optimizer {name} cannot be sharded"):
        resolve_optimizer(name, {})
    with pytest.raises(NotBuiltError, match="cannot be sharded"):
        granularity_of(getattr(torch.optim, name))


def test_every_optimizer_of_this_torch_is_supported_or_refused(
    capsys: pytest.CaptureFixture[str],
) -> None:
    names = {name for name, value in vars(torch.optim).items() if inspect.isclass(value)} - {
        "Optimizer"
    }
    refused = {cls.__name__ for cls in registry._REFUSED}
    answers = {name: granularity_of(getattr(torch.optim, name)) for name in names - refused}
    assert {name for name, answer in answers.items() if answer == "tensor"} == {"Adafactor", "Muon"}
    assert not capsys.readouterr().err, "an optimizer is missing from the table"


class _Custom(torch.optim.AdamW):
    pass


def test_an_unknown_class_gets_whole_tensors_and_one_note(
    capsys: pytest.CaptureFixture[str],
) -> None:
    registry._note_unknown.cache_clear()
    assert granularity_of(_Custom([torch.ones(1)])) == granularity_of(_Custom) == "tensor"
    assert capsys.readouterr().err.count('granularity = "element"') == 1


def test_a_declared_granularity_is_used_and_an_invalid_one_refused() -> None:
    declared = type("Declared", (_Custom,), {"granularity": "element"})
    assert granularity_of(declared) == granularity_of(declared([torch.ones(1)])) == "element"
    with pytest.raises(ConfigError, match="granularity is 'bits'"):
        granularity_of(type("Wrong", (_Custom,), {"granularity": "bits"}))


@pytest.mark.parametrize(
    "name",
    [name for name in VALID_OPTIMIZERS if resolve_optimizer(name, {}).granularity == "element"],
)
def test_element_means_that_slices_on_a_block_boundary_give_the_same_bits(name: str) -> None:
    spec = resolve_optimizer(name, {})
    start, grads = torch.randn(3072), [torch.randn(3072) for _ in range(3)]
    whole, slices = start.clone(), [shard.clone() for shard in start.split(1024)]
    together, apart = spec.build([whole]), spec.build(slices)
    for grad in grads:
        whole.grad = grad.clone()
        for shard, part in zip(slices, grad.split(1024), strict=True):
            shard.grad = part.clone()
        together.step()
        apart.step()
    assert torch.equal(torch.cat(slices), whole)


@pytest.mark.parametrize("name", ["adam_w_mode", "torch_adam", "set_grad_none"])
@pytest.mark.parametrize("value", ["true", "false", 2, []])
def test_a_switch_that_is_not_a_boolean_is_refused(name: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=f"'{name}' must be true or false"):
        resolve_optimizer("Adam", {name: value})


def test_a_switch_may_be_a_number_or_null() -> None:
    assert resolve_optimizer("Adam", {"adam_w_mode": 1}).cls is torch.optim.AdamW
    assert resolve_optimizer("Adam", {"adam_w_mode": 0}).cls is torch.optim.Adam
    assert "weight_decay" not in resolve_optimizer("AdamW", {"torch_adam": 1}).defaults
    assert resolve_optimizer("AdamW", {"torch_adam": None}).defaults["weight_decay"] == 0.0
