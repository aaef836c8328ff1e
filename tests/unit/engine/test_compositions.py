"""Every way to put 2, 4 or 8 ranks along pp, dp, tp and sp, with ZeRO 0-3 in three number formats: one process's bits.

CI runs cases that try every pair of values on up to 8 ranks; DEEPSEEK_ZERO_FULL=1 runs the whole product, half an hour.
"""

from __future__ import annotations

import copy
import math

import pytest

from tests.compositions import DTYPES, Found, Sizes, compare, expected_of, run
from tests.pairwise import Case, cases, is_full

pytest.importorskip("transformers")
SIZES = (1, 2, 4, 8) if is_full() else (1, 2, 4)
AXES = {"pp": SIZES, "dp": SIZES, "tp": SIZES, "sp": SIZES, "stage": (0, 1, 2, 3), "dtype": tuple(DTYPES)}


def is_built(case: Case) -> bool:
    """Whether the axes fill 2, 4 or 8 ranks, and there is something that computes along all of them."""
    pp, _, _, sp = case[:4]
    return math.prod(case[:4]) in (2, 4, 8) and not (sp > 1 and pp > 1)


@pytest.mark.parametrize(*cases(AXES, [(2, 2, 2, 1, 3, "bf16")], is_built))
def test_a_composition_has_the_bits_of_one_process(pp: int, dp: int, tp: int, sp: int, stage: int, dtype: str) -> None:
    assert run((pp, dp, tp, sp), stage, dtype) == ("bitwise" if sp == 1 else "close")


@pytest.mark.parametrize("stage", [0, 3])
def test_sequences_beside_split_layers(stage: int) -> None:
    assert run((1, 1, 2, 2), stage, "fp32") == "close"


@pytest.mark.parametrize("sizes", [(2, 1, 1, 2), (2, 1, 2, 2)])
def test_sequences_beside_stages_are_refused_by_name(sizes: Sizes) -> None:
    said = run(sizes, 3, "fp32")
    assert said.startswith("mesh axes") and "sp=2" in said and "What to do: " in said


@pytest.mark.parametrize("sizes", [(2, 1, 2, 1), (1, 2, 2, 1), (1, 2, 1, 2)])
def test_a_gradient_is_clipped_by_its_norm_over_the_world(sizes: Sizes) -> None:
    """Pitfalls: clipped per stage, or by a norm that counts a parameter as often as there are ranks along "tp"."""
    assert expected_of(2, sizes[2], sizes[1], True, "fp32", "sgd").norms[0] > 0.5
    assert run(sizes, 2 if sizes[0] == 1 else 3, "fp32", clipping=0.1) == "close"


def test_the_comparison_sees_one_bit() -> None:
    expected = expected_of(2, 1, 1, True, "fp32", "adamw")
    losses, parts = [each[0] for each in expected.losses], dict.fromkeys(expected.weights)
    found = Found(losses, expected.norms, copy.deepcopy(expected.weights), parts)
    compare(found, expected, None)
    name = next(iter(found.weights))
    found.weights[name].view(-1)[3:4].mul_(1 + 2**-22)
    with pytest.raises(AssertionError, match=name):
        compare(found, expected, None)
    further = [[loss * (1 + 1e-6) for loss in each] for each in losses]
    for other in (Found(further, expected.norms), Found(losses, [norm * 1.4 for norm in expected.norms])):
        with pytest.raises(AssertionError):
            compare(other, expected, None)
