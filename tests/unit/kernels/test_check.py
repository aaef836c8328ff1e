"""Compare the reference formulas with PyTorch's fused optimizers and with the kernels."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from dataclasses import replace
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch

from deepseek_zero.base.errors import UsageError
from deepseek_zero.kernels import choice, definition
from deepseek_zero.kernels.check import (
    Arrays,
    Chance,
    differing_elements,
    expected,
    fused_update,
    sample,
)
from deepseek_zero.kernels.rules import RULES, Layout, Variant, rule_of
from deepseek_zero.optimizers.lion import Lion
from tests.kernels import on_processor

cpu = pytest.importorskip("deepseek_zero.kernels.cpu", reason="needs llvmlite")

ADAM = {
    "lr": 3e-4,
    "eps": 1e-8,
    "weight_decay": 0.01,
    "maximize": False,
    "decoupled_weight_decay": True,
}
SGD = {
    "lr": 0.1,
    "momentum": 0.9,
    "dampening": 0.0,
    "nesterov": False,
    "weight_decay": 0.01,
    "maximize": False,
}
ADAGRAD = {"lr": 0.01, "lr_decay": 0.1, "eps": 1e-10, "weight_decay": 0.01, "maximize": False}
LION = {"lr": 1e-4, "betas": (0.9, 0.99), "weight_decay": 0.01, "maximize": False}


def hyper_parameters() -> list[tuple[str, dict[str, Any]]]:
    """Return every rule with every option that selects a variant."""
    found: list[tuple[str, dict[str, Any]]] = []
    for beta, decay, decoupled, maximize in itertools.product(
        (0.9, 0.3), (0.0, 0.01), (True, False), (False, True)
    ):
        own = {"betas": (beta, 0.999), "weight_decay": decay, "decoupled_weight_decay": decoupled}
        found.append(("adam", ADAM | own | {"maximize": maximize}))
    for momentum, decay, maximize in itertools.product((0.0, 0.9), (0.0, 0.01), (False, True)):
        own = {"momentum": momentum, "weight_decay": decay, "maximize": maximize}
        found += [("sgd", SGD | own), ("sgd", SGD | own | {"dampening": 0.1})]
        found += [("sgd", SGD | own | {"nesterov": True})] if momentum else []
    for decay, maximize in itertools.product((0.0, 0.01), (False, True)):
        found.append(("adagrad", ADAGRAD | {"weight_decay": decay, "maximize": maximize}))
        found.append(("lion", LION | {"weight_decay": decay, "maximize": maximize}))
    return found


def bits(values: Any) -> Any:
    return definition.settle(np.asarray(values, np.float32)).view(np.int32)


def test_the_exact_fma_rounds_the_exact_result_once() -> None:
    random = np.random.default_rng(1)
    exponents = random.integers(-70, 60, (3, 3000))
    a, b, c = (random.standard_normal((3, 3000)) * np.exp2(exponents)).astype(np.float32)
    c[::3] = -a[::3] * b[::3] * np.float32(1 + 2**-20)  # cancellation
    c[1::7] = np.float32(2**-149)  # a product plus a subnormal
    found = definition.fma(a, b, c)
    for x, y, z, result in zip(a, b, c, found, strict=True):
        exact = Fraction(float(x)) * Fraction(float(y)) + Fraction(float(z))
        near = [np.nextafter(result, np.float32(sign * np.inf)) for sign in (-1, 1)]
        errors = [
            abs(Fraction(float(value)) - exact) for value in (result, *near) if np.isfinite(value)
        ]
        assert not np.isfinite(result) or errors[0] == min(errors)
        assert (
            errors.count(errors[0]) == 1 or result.view(np.int32) % 2 == 0
        )  # ties are rounded to even


def torch_update(name: str, hypers: dict[str, Any], arrays: Arrays, first: bool) -> Arrays:
    """Return PyTorch's update of one parameter in the first or third step."""
    if name != "lion":
        return fused_update(name, hypers, arrays, 3, first=first)
    param = torch.nn.Parameter(torch.from_numpy(arrays.main.copy()))
    param.grad = torch.from_numpy(arrays.gradient.copy())
    lion, moment = Lion([param], **hypers), torch.from_numpy(arrays.states[0].copy())
    lion.state[param]["exp_avg"] = moment
    lion.step()
    return replace(arrays, main=param.detach().numpy(), states=(moment.numpy(),))


@pytest.mark.parametrize("kind", ["normal", "bits", "edges"])
@pytest.mark.parametrize("numel", [4096, 1003, 5])
def test_the_definition_is_what_pytorch_computes_for_a_parameter(kind: str, numel: int) -> None:
    for name, hypers in hyper_parameters():
        for has_states in (True, False) if name == "sgd" else (True,):
            rule = RULES[name]
            variant = rule.variant(hypers, has_states)
            arrays = sample(variant, Layout(torch.float32), kind, numel)
            found = expected(variant, Layout(torch.float32), arrays, rule.scalars(hypers, 3), 1.0)
            theirs = torch_update(name, hypers, arrays, first=variant.first)
            for mine, its in zip(
                (found.main, *found.states), (theirs.main, *theirs.states), strict=True
            ):
                assert np.array_equal(bits(mine), bits(its)), (name, hypers, has_states)


LAYOUTS = [
    Layout(torch.float32),
    Layout(torch.bfloat16, is_split=True),
    Layout(torch.float32, is_split=True),
    Layout(torch.bfloat16, published=torch.bfloat16),
    Layout(torch.float16, published=torch.float16),
    Layout(torch.bfloat16, is_split=True, states_rounded=True),
    Layout(torch.bfloat16, is_rounded=True, states_rounded=True),
]
ADAMW = RULES["adam"].variant(ADAM | {"betas": (0.9, 0.999)}, True)


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_a_kernel_is_the_definition_in_every_layout(layout: Layout) -> None:
    assert differing_elements(ADAMW, layout, cpu.run) == 0


@pytest.mark.parametrize("name", ["sgd", "adagrad", "lion"])
def test_a_kernel_of_each_rule_is_the_definition(name: str) -> None:
    hypers = {"sgd": SGD, "adagrad": ADAGRAD, "lion": LION}[name]
    assert differing_elements(RULES[name].variant(hypers, True), LAYOUTS[1], cpu.run) == 0


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_every_variant_is_the_definition(layout: Layout) -> None:
    variants = {
        RULES[name].variant(hypers, has)
        for name, hypers in hyper_parameters()
        for has in (True, False)
    }
    for variant in variants:
        assert differing_elements(variant, layout, cpu.run, numel=20003) == 0, variant


@pytest.mark.slow
def test_two_to_the_26_random_elements_have_the_bits_of_the_definition() -> None:
    layout, scalars = LAYOUTS[1], RULES["adam"].scalars(ADAM | {"betas": (0.9, 0.999)}, 100)
    for seed in range(64):
        arrays = sample(ADAMW, layout, "normal" if seed % 2 else "bits", 1 << 20, seed)
        found = arrays.copy()
        cpu.run(ADAMW, layout, found, scalars, 0.3, Chance(), threads=2)
        wanted = expected(ADAMW, layout, arrays, scalars, 0.3)
        for mine, its in zip(found.columns(), wanted.columns(), strict=True):
            assert np.array_equal(mine.view(np.int16), its.view(np.int16)), seed


@pytest.mark.parametrize("threads", [1, 2, 3, 4])
def test_lengths_offsets_and_threads_change_no_bit(
    threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("deepseek_zero.kernels.threads.GRAIN", 64)
    layout, scalars = LAYOUTS[1], RULES["adam"].scalars(ADAM | {"betas": (0.9, 0.999)}, 7)
    for numel, offset in itertools.product((0, 1, 7, 8, 9, 64, 65, 127, 1000, 1031), (0, 1, 3)):
        whole = sample(ADAMW, layout, "bits", numel + offset, numel)
        columns = [column[offset:] for column in whole.columns()]
        arrays = Arrays(columns[0], columns[1], columns[2], (columns[3], columns[4]))
        wanted = expected(ADAMW, layout, arrays, scalars, 0.5)
        cpu.run(ADAMW, layout, arrays, scalars, 0.5, Chance(), threads)
        for mine, its in zip(arrays.columns(), wanted.columns(), strict=True):
            assert np.array_equal(mine.view(np.int16), its.view(np.int16)), (numel, offset)


@pytest.mark.parametrize("name", ["main", "other", "states"])
def test_a_kernel_refuses_arrays_that_are_too_short(name: str) -> None:
    layout, scalars = LAYOUTS[1], RULES["adam"].scalars(ADAM | {"betas": (0.9, 0.999)}, 7)
    arrays = sample(ADAMW, layout, "normal", 100)
    short = getattr(arrays, name)[:1]  # for the states: only one of two
    with pytest.raises(ValueError, match="100 elements"):
        cpu.run(ADAMW, layout, replace(arrays, **{name: short}), scalars, 0.5, Chance())


@pytest.mark.slow
@pytest.mark.parametrize("name", ["generic", "haswell", "skylake-avx512"])
def test_another_processor_has_the_same_bits_or_torch_is_chosen(name: str) -> None:
    code = (
        "import torch\n"
        "from deepseek_zero.kernels import cpu\n"
        "from deepseek_zero.kernels.rules import RULES, Layout\n"
        f"variant = RULES['adam'].variant({ADAM | {'betas': (0.9, 0.999)}!r}, True)\n"
        "print(cpu.is_exact(variant, Layout(torch.bfloat16, is_split=True)))\n"
    )
    code = on_processor(name) + code
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() in ("True", "False")
    assert done.stdout.strip() == "True" or "so PyTorch computes it" in done.stdout + done.stderr


@pytest.mark.parametrize("capability", ["default", "avx2", "avx512"])
def test_pytorch_computes_every_update_if_kernels_differ_from_it(
    capability: str,
) -> None:
    code = (
        "import torch, deepseek_zero as dz\nfrom deepseek_zero.kernels.check import "
        "pytorch_differs\nfrom deepseek_zero.planner import update\nupdate.WORTH_COMPILING = 1\n"
        "config = {'train_micro_batch_size_per_gpu': 1, 'optimizer': {'type': 'AdamW', 'params': "
        "{'lr': 1e-3}}}\nengine, optimizer, *_ = dz.initialize(model=torch.nn.Linear(64, 64), "
        "config=config)\nkernels = {shard.has_kernel for shard in optimizer.shards()}\nsaid = "
        "[line for line in engine.explain().splitlines() if 'updates:' in line]\n"
        "print(pytorch_differs('adam'), kernels, *said)\n"
    )
    environment = os.environ | {"ATEN_CPU_CAPABILITY": capability, choice.VARIABLE: ""}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True
    )
    if done.stdout.startswith("True"):
        assert "{False}" in done.stdout
        assert (
            "PyTorch's fused update and the kernels differ in rounding on this CPU" in done.stdout
        )
    else:
        assert done.stdout.startswith("False {True}")
        assert capability != "default", "without fused multiply-add PyTorch has other bits"


def test_a_kernel_that_differs_is_not_used_and_named(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    run = cpu.run

    def wrong(
        variant: Variant,
        layout: Layout,
        arrays: Arrays,
        scalars: Any,
        factor: float,
        chance: Chance,
    ) -> None:
        run(variant, layout, arrays, scalars, factor, chance)
        arrays.main[17] += 1

    monkeypatch.setattr(cpu, "run", wrong)
    variant = RULES["lion"].variant(LION, True)
    assert not cpu.is_exact.__wrapped__(variant, Layout(torch.float32))
    assert "differs from its definition" in caplog.text


# -- which implementation computes an update


def test_options_that_choose_another_implementation_have_no_rule() -> None:
    assert rule_of("AdamW", {"fused": True, "amsgrad": False}) is RULES["adam"]
    for option in ({"amsgrad": True}, {"fused": False}, {"foreach": True}, {"capturable": True}):
        assert rule_of("AdamW", option) is None
    assert rule_of("RAdam", {}) is None


def test_the_environment_is_stronger_than_the_configuration(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv(choice.VARIABLE, raising=False)
    assert choice.available("auto") == "auto"
    monkeypatch.setenv(choice.VARIABLE, "torch")
    assert choice.available("compiled") == "torch"
    monkeypatch.setenv(choice.VARIABLE, "numba")
    with pytest.warns(DeprecationWarning, match='is called "compiled" now'):
        assert choice.available("auto") == "compiled"
    monkeypatch.setenv(choice.VARIABLE, "cuda")
    with pytest.raises(UsageError, match="set it to auto, compiled or torch"):
        choice.available("auto")


def test_without_llvmlite_torch_computes_and_only_an_explicit_choice_is_an_error(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delenv(choice.VARIABLE, raising=False)
    monkeypatch.setattr(choice, "find_spec", lambda name: None)
    caplog.set_level("INFO")
    assert choice.available("auto") == "torch"
    assert "the extra `fast` installs it" in caplog.text
    with pytest.raises(UsageError, match="install the extra"):
        choice.available("compiled")
