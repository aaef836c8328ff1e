"""Compares updates by kernels and by PyTorch with their definition.

The inputs are random numbers, random bits and edge values.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from ..base.device import FUSED_UPDATES
from ..base.log import log_once
from ..base.quantities import ceil_div
from . import definition
from .rules import RULES, Layout, Scalars, Variant

NUMEL = 3 * 1024 + 5  # Not a multiple of 8, to test a tail
_NOTHING: NDArray[Any] = np.zeros(0, np.float32)
_EDGES = np.array(
    "0 -0.0 1 -1 0.5 7 1e-8 1e-20 -1e20 1e-30 1e30 65504 65536 1e-40 -1e-40 3e-39 1.4e-45 -1.4e-45 "
    "1.1754944e-38 3.4028235e38 -3.4028235e38 inf -inf nan 0.33333334 1.0000001 0.99999994".split(),
    np.float32,
)
_HYPERS: dict[str, dict[str, Any]] = {
    "adam": {"lr": 3e-4, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.01},
    "sgd": {"lr": 0.1, "momentum": 0.9, "dampening": 0.1, "weight_decay": 0.01},
    "adagrad": {"lr": 0.01, "lr_decay": 0.1, "eps": 1e-10, "weight_decay": 0.01},
    "lion": {"lr": 1e-4, "betas": (0.9, 0.99), "weight_decay": 0.01},
}


class Chance(NamedTuple):
    """The random bits for a range of one parameter (`precision/compact.py`).

    Attributes:
        element: The index of the first element in the parameter.
        step: The number of the update.
        seed: The seed of the generator.
        keys: The keys of the weight and of two states.
    """

    element: int = 0
    step: int = 0
    seed: int = 0
    keys: tuple[int, int, int] = (0, 0, 0)


@dataclass
class Arrays:
    """The flat memory of a shard as kernels use it; 16-bit numbers are int16.

    Arrays that a layout lacks are empty.

    Attributes:
        gradient: The gradient.
        main: The main weight, or the weight if there is no main weight.
        other: The remainders of a split main weight, or the published weight.
        states: The states, at most two.
    """

    gradient: NDArray[Any]
    main: NDArray[Any]
    other: NDArray[Any]
    states: tuple[NDArray[Any], ...]

    def columns(self) -> tuple[NDArray[Any], ...]:
        """Return gradient, main weight, other and two states."""
        first, second, *_ = (*self.states, _NOTHING, _NOTHING)
        return self.gradient, self.main, self.other, first, second

    def copy(self) -> Arrays:
        """Return a copy of the arrays that an update changes; the gradient is not copied."""
        return Arrays(
            self.gradient,
            self.main.copy(),
            self.other.copy(),
            tuple(state.copy() for state in self.states),
        )


_CHANCE = Chance(5, 7, 1, (11, 12, 13))
Run = Callable[[Variant, Layout, Arrays, Scalars, float, Chance], None]


def values(kind: str, numel: int, random: np.random.Generator) -> NDArray[np.float32]:
    """Return fp32 test values.

    Args:
        kind: "normal", "bits" (random bits) or "edges" (special values).
        numel: Number of values.
        random: Generator that draws the values.
    """
    if kind == "normal":
        return random.standard_normal(numel).astype(np.float32)
    if kind == "bits":
        bits = random.integers(-(1 << 31), 1 << 31, numel, dtype=np.int64)
        return bits.astype(np.int32).view(np.float32)
    return random.choice(_EDGES, numel)


def sample(variant: Variant, layout: Layout, kind: str, numel: int, seed: int = 0) -> Arrays:
    """Return the arrays of a shard with test values.

    Args:
        variant: The formula, which determines the states.
        layout: Dtypes and form in which the shard is stored.
        kind: "normal", "bits" (random bits) or "edges" (special values).
        numel: Number of elements.
        seed: The seed of the values.
    """
    random = np.random.default_rng(seed)
    main = values(kind, numel, random)
    gradient = definition.narrow(values(kind, numel, random), layout.gradient)
    states: list[NDArray[Any]] = [values(kind, numel, random) for _ in variant.states]
    if variant.rule in ("adam", "adagrad"):
        states[-1] = np.abs(states[-1])  # a mean or a sum of squares
    if layout.states_rounded:
        states = [definition.narrow(state, torch.bfloat16) for state in states]
    if layout.is_rounded:
        return Arrays(gradient, definition.narrow(main, torch.bfloat16), _NOTHING, tuple(states))
    if not layout.is_split:
        published_numel = numel if layout.published is not None else 0
        return Arrays(gradient, main, np.zeros(published_numel, np.int16), tuple(states))
    upper, lower = definition.split(main)
    return Arrays(gradient, upper, lower, tuple(states))


def expected(
    variant: Variant,
    layout: Layout,
    arrays: Arrays,
    scalars: Scalars,
    factor: float,
    chance: Chance | None = None,
) -> Arrays:
    """Return the result of the definition. The arrays are not changed.

    Args:
        variant: Optimizer rule and options, which select the formula.
        layout: Dtypes and form in which the shard is stored.
        arrays: The arrays before the update.
        scalars: The result of `Rule.scalars`.
        factor: The factor by which the gradient is multiplied.
        chance: The random bits, if the layout needs any.
    """
    chance = chance or Chance()
    main = arrays.main
    if layout.is_split:
        main = definition.join(main, arrays.other)
    elif layout.is_rounded:
        main = definition.widen(main, torch.bfloat16)
    gradient = definition.widen(arrays.gradient, layout.gradient)
    states = list(arrays.states)
    if layout.states_rounded:
        states = [definition.widen(state, torch.bfloat16) for state in states]
    weight, states = definition.update(variant, scalars, factor, main, gradient, states)
    if layout.states_rounded:
        states = [_rounded(state, chance, number + 1) for number, state in enumerate(states)]
    if layout.is_rounded:
        return replace(arrays, main=_rounded(weight, chance, 0), states=tuple(states))
    if layout.is_split:
        upper, lower = definition.split(weight)
        return replace(arrays, main=upper, other=lower, states=tuple(states))
    other = arrays.other
    if layout.published is not None:
        other = definition.narrow(weight, layout.published)
    return replace(arrays, main=weight, other=other, states=tuple(states))


def differing_elements(variant: Variant, layout: Layout, run: Run, numel: int = NUMEL) -> int:
    """Return the number of elements in which a kernel differs from the definition.

    Args:
        variant: Optimizer rule and options, which select the formula.
        layout: Dtypes and form in which the shard is stored.
        run: Runs the kernel.
        numel: Number of elements of each test.
    """
    hypers = {"maximize": variant.maximizes, "nesterov": variant.nesterov, "dampening": 0.0}
    hypers["decoupled_weight_decay"] = variant.decoupled
    scalars = RULES[variant.rule].scalars(hypers | _HYPERS[variant.rule], 3)
    differing = 0
    for kind in ("normal", "bits", "edges"):
        arrays = sample(variant, layout, kind, numel)
        found = arrays.copy()
        run(variant, layout, found, scalars, 0.7, _CHANCE)
        wanted = expected(variant, layout, arrays, scalars, 0.7, _CHANCE)
        for mine, its in zip(found.columns(), wanted.columns(), strict=True):
            differing += int((_bits(mine) != _bits(its)).sum())
    return differing


def is_definition(variant: Variant, layout: Layout, run: Run, compiler: str, where: str) -> bool:
    """Return whether a kernel equals the definition bit for bit; log a warning if not.

    Args:
        variant: Optimizer rule and options, which select the formula.
        layout: Dtypes and form in which the shard is stored.
        run: Runs the kernel.
        compiler: The name of the compiler, for the warning.
        where: The machine or device, for the warning.
    """
    differing = differing_elements(variant, layout, run)
    if differing:
        log_once(
            f"the update of {variant.rule} that {compiler} compiled differs from its definition in "
            f"{differing} elements of a test on {where}, so PyTorch computes it, more slowly.",
            logging.WARNING,
        )
    return not differing


@cache
def pytorch_differs(rule: str) -> bool:
    """Return whether PyTorch's fused update differs from the definition on this CPU.

    It does on processors without fused multiply-add, with other vector widths, and if
    `ATEN_CPU_CAPABILITY` selects other instructions.
    """
    hypers = {"maximize": False, "nesterov": False, "decoupled_weight_decay": True, **_HYPERS[rule]}
    if rule == "lion":  # Lion is this library's own, in PyTorch's elementary operations
        return False
    variant = RULES[rule].variant(hypers, True)
    layout = Layout(torch.float32)
    step = 3
    for kind in ("normal", "edges"):
        arrays = sample(variant, layout, kind, NUMEL)
        wanted = expected(variant, layout, arrays, RULES[rule].scalars(hypers, step), 1.0)
        found = fused_update(rule, hypers, arrays, step)
        for mine, its in zip(
            (found.main, *found.states), (wanted.main, *wanted.states), strict=True
        ):
            if not np.array_equal(_bits(definition.settle(mine)), _bits(definition.settle(its))):
                return True
    return False


def fused_update(
    rule: str, hypers: dict[str, Any], arrays: Arrays, step: int, *, first: bool = False
) -> Arrays:
    """Return the result of PyTorch's fused optimizer for one fp32 parameter.

    Args:
        rule: "adam", "sgd" or "adagrad".
        hypers: All hyper-parameters of the rule.
        arrays: Gradient, weight and states; they are not changed.
        step: The number of the update, from 1 on.
        first: Whether the states of SGD have no values yet.
    """
    param, gradient, *states = (
        torch.from_numpy(each.copy()) for each in (arrays.main, arrays.gradient, *arrays.states)
    )
    common = {key: hypers[key] for key in ("lr", "weight_decay", "maximize")}
    steps = [torch.tensor(float(step), dtype=torch.float32, device="cpu")]
    if rule == "adam":
        fused = FUSED_UPDATES["AdamW" if hypers["decoupled_weight_decay"] else "Adam"]
        beta1, beta2 = hypers["betas"]
        own = {"beta1": beta1, "beta2": beta2, "eps": hypers["eps"], "amsgrad": False}
        fused([param], [gradient], [states[0]], [states[1]], [], steps, **common, **own)
    elif rule == "sgd":
        own = {key: hypers[key] for key in ("momentum", "dampening", "nesterov")}
        FUSED_UPDATES["SGD"]([param], [gradient], states, **common, **own, is_first_step=first)
    else:
        own = {key: hypers[key] for key in ("lr_decay", "eps")}
        FUSED_UPDATES["Adagrad"]([param], [gradient], states, steps, **common, **own)
    return replace(arrays, main=param.numpy(), states=tuple(state.numpy() for state in states))


def _rounded(values: NDArray[np.float32], chance: Chance, number: int) -> NDArray[np.int16]:
    """Return fp32 numbers rounded to bf16 by the random bits of key `number`."""
    first, skipped = divmod(chance.element, 16)
    stop = skipped + len(values)
    key = [chance.seed, chance.keys[number]]
    generator = np.random.Philox(counter=[first, chance.step, 0, 0], key=key)
    words = generator.random_raw(ceil_div(stop, 4))
    return definition.round_by(values, words.view(np.int16)[skipped:stop])


def _bits(array: NDArray[Any]) -> NDArray[Any]:
    """Return numbers as 16-bit integers, two for each fp32 number."""
    return array.view(np.int16)
