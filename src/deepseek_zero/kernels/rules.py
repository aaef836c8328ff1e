"""Optimizers whose updates need one pass over memory: their states, scalars and formulas.

This file is the definition of the bits of an update (docs/design/updates.md). A formula is written
once, over operations that the caller passes in. LLVM compiles it with its own operations
(`cpu.py`), and NumPy evaluates it with exact ones (`definition.py`). The rules of the definition:

- Each operation is rounded once, to the nearest fp32 number. `fma(a, b, c)` is one operation.
- Scalars are computed in double precision and rounded once.
- The last n % 8 elements of a parameter of n elements have a separate formula (`is_tail`),
  because PyTorch's fused optimizers compute them with other instructions on a CPU. An update
  therefore equals PyTorch's in every element.
- Weights, main weights and states have only one NaN, 0x7FC00000.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.optim import Optimizer

Value = Any  # a vector of fp32 in LLVM or an array of fp32 in NumPy
Scalars = tuple[np.float32, ...]
Hypers = Mapping[str, Any]
VECTOR = 8  # Elements. The remaining elements of a parameter are its tail.


class Operations(NamedTuple):
    """The operations of a formula other than + - * /.

    Attributes:
        fma: Fused multiply-add.
        sqrt: Square root.
        sign: -1, 0 or 1; 0 for NaN.
    """

    fma: Callable[[Value, Value, Value], Value]
    sqrt: Callable[[Value], Value]
    sign: Callable[[Value], Value]


# (weight, gradient, two states, scalars, is_tail) -> (weight, two states)
Formula = Callable[[Value, Value, Value, Value, Any, Any], tuple[Value, Value, Value]]


@dataclass(frozen=True)
class Variant:
    """The options that select a formula of a rule; each variant has its own kernel.

    Attributes:
        rule: The name of the rule.
        states: The names of the element-wise states, at most two.
        maximizes: Whether the objective is maximized.
        decays: Whether weight decay is not zero, and is added to the gradient.
        decoupled: Whether weight decay shrinks the weight instead.
        near: Whether the weight of the new gradient in the first moment is at least one half.
        first: Whether there is no momentum yet.
        nesterov: Whether Nesterov momentum is used.
    """

    rule: str
    states: tuple[str, ...]
    maximizes: bool = False
    decays: bool = False
    decoupled: bool = False
    near: bool = False
    first: bool = False
    nesterov: bool = False


@dataclass(frozen=True)
class Layout:
    """How a shard is stored.

    Attributes:
        gradient: The dtype of the gradient: fp32, bf16 or fp16.
        is_split: Whether the main weight is a bf16 weight and its remainder
            (`precision/policy.py`). If not, it is fp32.
        published: The dtype, bf16 or fp16, of a weight that is written next to an fp32 main weight.
        is_rounded: Whether there is no main weight, and the bf16 weight is rounded stochastically
            (`precision/compact.py`).
        states_rounded: Whether the states are bf16 and rounded stochastically. If not, they are
            fp32.
    """

    gradient: torch.dtype
    is_split: bool = False
    published: torch.dtype | None = None
    is_rounded: bool = False
    states_rounded: bool = False

    @property
    def is_random(self) -> bool:
        """Return whether an update needs random bits."""
        return self.is_rounded or self.states_rounded


@dataclass(frozen=True)
class Rule:
    """The states, scalars and formula of one optimizer class.

    Attributes:
        variant: A function that returns the variant for hyper-parameters. The second argument is
            whether the parameter has its states already.
        scalars: A function that returns the scalars of a formula. The second argument is the number
            of the update, from 1 on.
        formula: A function that returns the formula of a variant.
        counts: Whether the optimizer keeps the number of its updates in a state named `step`.
        hides_nan: Whether a state may be NaN while the weight is not.
    """

    variant: Callable[[Hypers, bool], Variant]
    scalars: Callable[[Hypers, float], Scalars]
    formula: Callable[[Variant, Operations], Formula]
    counts: bool = True
    hides_nan: bool = False


def _rounded(*values: float) -> Scalars:
    return tuple(np.float32(value) for value in values)


# -- Adam and AdamW


def _adam_variant(hypers: Hypers, has_states: bool) -> Variant:
    decoupled = bool(hypers["decoupled_weight_decay"])
    return Variant(
        "adam",
        ("exp_avg", "exp_avg_sq"),
        maximizes=bool(hypers["maximize"]),
        decays=hypers["weight_decay"] != 0 and not decoupled,
        decoupled=decoupled,
        near=bool(np.float32(1 - hypers["betas"][0]) >= 0.5),
    )


def _adam_scalars(hypers: Hypers, step: float) -> Scalars:
    lr = float(hypers["lr"])
    (beta1, beta2) = map(float, hypers["betas"])
    decay = (
        1 - lr * hypers["weight_decay"]
        if hypers["decoupled_weight_decay"]
        else hypers["weight_decay"]
    )
    weight = float(np.float32(1 - beta1))
    if weight >= 0.5:
        weight -= 1
    size = lr / (1 - beta1**step)
    root = math.sqrt(1 - beta2**step)
    return _rounded(decay, weight, beta2, 1 - beta2, size, root, hypers["eps"])


def _adam(variant: Variant, operations: Operations) -> Formula:
    fma, sqrt, _ = operations
    maximizes = variant.maximizes
    decays = variant.decays
    decoupled = variant.decoupled
    near = variant.near

    def formula(
        p: Value, d: Value, m: Value, v: Value, scalars: Any, is_tail: Any
    ) -> tuple[Value, Value, Value]:
        decay, weight, beta2, rest, size, root, eps = scalars
        if maximizes:
            d = -d
        if decays:
            d = fma(p, decay, d)
        if decoupled:
            p = p * decay
        m = fma(weight, d - m, d) if near else fma(weight, d - m, m)
        v = fma(v, beta2, (rest * d) * d) if is_tail else fma(rest * d, d, v * beta2)
        return p - (size * m) / (sqrt(v) / root + eps), m, v

    return formula


# -- SGD


def _sgd_variant(hypers: Hypers, has_states: bool) -> Variant:
    has_momentum = hypers["momentum"] != 0
    states = ("momentum_buffer",) if has_momentum else ()
    return Variant(
        "sgd",
        states,
        maximizes=bool(hypers["maximize"]),
        decays=hypers["weight_decay"] != 0,
        first=has_momentum and not has_states,
        nesterov=bool(hypers["nesterov"]),
    )


def _sgd_scalars(hypers: Hypers, step: float) -> Scalars:
    return _rounded(
        hypers["weight_decay"], hypers["momentum"], 1 - hypers["dampening"], -float(hypers["lr"])
    )


def _sgd(variant: Variant, operations: Operations) -> Formula:
    fma = operations.fma
    maximizes = variant.maximizes
    decays = variant.decays
    nesterov = variant.nesterov
    has_momentum = bool(variant.states)
    first = variant.first

    def formula(
        p: Value, d: Value, m: Value, unused: Value, scalars: Any, is_tail: Any
    ) -> tuple[Value, Value, Value]:
        decay, momentum, rest, negative_lr = scalars
        if maximizes:
            d = -d
        if decays:
            d = fma(p, decay, d)
        if has_momentum:
            if first:
                m = d
            else:
                m = fma(m, momentum, d * rest) if is_tail else fma(d, rest, m * momentum)
            d = fma(m, momentum, d) if nesterov else m
        return fma(d, negative_lr, p), m, unused

    return formula


# -- Adagrad


def _adagrad_variant(hypers: Hypers, has_states: bool) -> Variant:
    return Variant(
        "adagrad", ("sum",), maximizes=bool(hypers["maximize"]), decays=hypers["weight_decay"] != 0
    )


def _adagrad_scalars(hypers: Hypers, step: float) -> Scalars:
    lr = float(hypers["lr"]) / (1 + (step - 1) * hypers["lr_decay"])
    return _rounded(hypers["weight_decay"], lr, hypers["eps"])


def _adagrad(variant: Variant, operations: Operations) -> Formula:
    fma, sqrt, _ = operations
    maximizes = variant.maximizes
    decays = variant.decays

    def formula(
        p: Value, d: Value, s: Value, unused: Value, scalars: Any, is_tail: Any
    ) -> tuple[Value, Value, Value]:
        decay, lr, eps = scalars
        if maximizes:
            d = -d
        if decays:
            d = fma(p, decay, d)
        s = fma(d, d, s)
        return p - (lr * d) / (sqrt(s) + eps), s, unused

    return formula


# -- Lion (optimizers/lion.py)


def _lion_variant(hypers: Hypers, has_states: bool) -> Variant:
    return Variant("lion", ("exp_avg",), maximizes=bool(hypers.get("maximize", False)))


def _lion_scalars(hypers: Hypers, step: float) -> Scalars:
    lr = float(hypers["lr"])
    (beta1, beta2) = map(float, hypers["betas"])
    return _rounded(1 - lr * hypers["weight_decay"], lr, beta1, 1 - beta1, beta2, 1 - beta2)


def _lion(variant: Variant, operations: Operations) -> Formula:
    sign = operations.sign
    maximizes = variant.maximizes

    def formula(
        p: Value, d: Value, m: Value, unused: Value, scalars: Any, is_tail: Any
    ) -> tuple[Value, Value, Value]:
        keep, lr, beta1, rest1, beta2, rest2 = scalars
        if maximizes:
            d = -d
        p = p * keep - sign(m * beta1 + d * rest1) * lr
        return p, m * beta2 + d * rest2, unused

    return formula


RULES: dict[str, Rule] = {
    "adam": Rule(_adam_variant, _adam_scalars, _adam),
    "sgd": Rule(_sgd_variant, _sgd_scalars, _sgd, counts=False),
    "adagrad": Rule(_adagrad_variant, _adagrad_scalars, _adagrad),
    "lion": Rule(_lion_variant, _lion_scalars, _lion, counts=False, hides_nan=True),
}
# By the name of the class
NAMES = {"Adam": "adam", "AdamW": "adam", "SGD": "sgd", "Adagrad": "adagrad", "Lion": "lion"}

# Options that choose another implementation, and the values that keep the fused one
OPEN_OPTIONS = {
    "fused": (None, True),
    "foreach": (None, False),
    "capturable": (False,),
    "differentiable": (False,),
}


def rule_of(optimizer: str, hypers: Hypers) -> Rule | None:
    """Return the rule of an optimizer.

    Args:
        optimizer: The name of the class, PyTorch's or this library's.
        hypers: Hyper-parameters of the parameter group, such as `betas`.

    Returns:
        The rule; None if there is none for these hyper-parameters.
    """
    name = NAMES.get(optimizer)
    if name is None or hypers.get("amsgrad"):
        return None
    if any(
        hypers.get(option, allowed[0]) not in allowed for option, allowed in OPEN_OPTIONS.items()
    ):
        return None
    return RULES[name]


def known_rule(optimizer: Optimizer, hypers: Hypers) -> Rule | None:
    """Return the rule of an optimizer of PyTorch or of this library; None for other classes.

    There is no rule for Adam without bias correction.

    Args:
        optimizer: The optimizer.
        hypers: Hyper-parameters of the parameter group.
    """
    cls = type(optimizer)
    is_known = cls.__module__.partition(".")[0] in ("torch", "deepseek_zero")
    if not is_known or not getattr(optimizer, "bias_correction", True):
        return None
    return rule_of(cls.__name__, hypers)
