"""CUDA C of an update: `update.cu`, and a header for each variant and layout.

The formula is not written a second time. The function in `rules.py` is evaluated with names instead
of numbers, and each operation appends a line of CUDA C.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from importlib.resources import files

import torch

from .rules import RULES, Layout, Operations, Variant

THREADS = 256  # Per block
_TYPES = {torch.float32: "float", torch.bfloat16: "bf16", torch.float16: "fp16"}
_HEADER = """\
typedef {gradient} Gradient;
typedef {main} Main;
typedef {other} Other;
typedef {state} State;
enum {{
    THREADS = {threads},
    IS_SPLIT = {is_split:d},
    PUBLISHES = {publishes:d},
    STATES = {states},
    READS_STATES = {reads_states:d},
}};

__device__ void formula(float& weight, float gradient, float& first, float& second, \
const Scalars& scalars,
                        bool is_tail) {{
    if (is_tail) {{
{tail}
    }} else {{
{body}
    }}
}}
"""


def _operation(function: str) -> Callable[[_Name, _Name], _Name]:
    """Return an operator that appends a call of a CUDA function."""

    def operator(self: _Name, other: _Name) -> _Name:
        return self.result(f"{function}({self.name}, {other.name})")

    return operator


class _Name:
    """A number in a formula, represented by its name in CUDA C."""

    def __init__(self, name: str, lines: list[str]) -> None:
        self.name = name
        self.lines = lines

    def result(self, expression: str) -> _Name:
        """Append a line that computes an expression; return the name of its value."""
        name = f"x{len(self.lines)}"
        self.lines.append(f"const float {name} = {expression};")
        return _Name(name, self.lines)

    def __neg__(self) -> _Name:
        return self.result(f"-{self.name}")

    __add__ = _operation("__fadd_rn")
    __sub__ = _operation("__fsub_rn")
    __mul__ = _operation("__fmul_rn")
    __truediv__ = _operation("__fdiv_rn")


def _fma(a: _Name, b: _Name, c: _Name) -> _Name:
    return a.result(f"__fmaf_rn({a.name}, {b.name}, {c.name})")


def _sqrt(value: _Name) -> _Name:
    return value.result(f"__fsqrt_rn({value.name})")


def _sign(value: _Name) -> _Name:
    return value.result(f"{value.name} > 0.0f ? 1.0f : ({value.name} < 0.0f ? -1.0f : 0.0f)")


def _formula(variant: Variant, scalar_count: int, *, is_tail: bool) -> str:
    lines: list[str] = []
    scalars = tuple(_Name(f"scalars.at[{index}]", lines) for index in range(scalar_count))
    weight, gradient, first, second = (
        _Name(name, lines) for name in ("weight", "gradient", "first", "second")
    )
    formula = RULES[variant.rule].formula(variant, Operations(_fma, _sqrt, _sign))
    results = formula(weight, gradient, first, second, scalars, is_tail)
    for target, value in zip(("weight", "first", "second"), results, strict=True):
        if value.name != target:
            lines.append(f"{target} = {value.name};")
    return "\n".join(f"        {line}" for line in lines)


@cache
def header(variant: Variant, layout: Layout, scalar_count: int) -> str:
    """Return the text of `variant.h`.

    Args:
        variant: Optimizer rule and options, which select the formula.
        layout: Dtypes and form in which the shard is stored.
        scalar_count: Number of scalars of the formula.
    """
    other = "low_half" if layout.is_split else "nothing"
    if layout.published is not None:
        other = _TYPES[layout.published]
    main = "bf16" if layout.is_split or layout.is_rounded else "float"
    state = "bf16" if layout.states_rounded else "float"
    return _HEADER.format(
        threads=THREADS,
        gradient=_TYPES[layout.gradient],
        main=main,
        other=other,
        state=state,
        is_split=layout.is_split,
        publishes=layout.published is not None,
        states=len(variant.states),
        reads_states=not variant.first,
        tail=_formula(variant, scalar_count, is_tail=True),
        body=_formula(variant, scalar_count, is_tail=False),
    )


@cache
def frame() -> str:
    """Return the text of `update.cu`."""
    return (files(__package__) / "update.cu").read_text(encoding="utf-8")
