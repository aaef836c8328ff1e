"""Meshes of 2, 4 or 8 ranks train like one process, bitwise if they have no sp axis.

Each mesh runs with ZeRO stages 0 to 3 and three dtypes. CI runs enough cases to cover every pair of
values on up to 8 ranks. DEEPSEEK_ZERO_FULL=1 runs the whole product, which takes half an hour.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from typing import Any

import pytest

from deepseek_zero.api.engine import ZeroEngine
from deepseek_zero.base.mesh import Mesh
from deepseek_zero.config.load import load
from deepseek_zero.engine import start as start_file
from deepseek_zero.engine.dialect import EngineDialect
from deepseek_zero.parallel.sequence_model import own_tokens
from tests.compositions import (
    DTYPES,
    LENGTH,
    MANY,
    ROWS,
    STEPS,
    Found,
    Sizes,
    Tokens,
    batch,
    compare,
    config_of,
    engines_of_threads,
    expected_of,
    llama,
    run,
)
from tests.in_process import Rank, run_ranks
from tests.pairwise import Case, cases, is_full
from tests.reference import OPTIMIZERS

pytest.importorskip("transformers")
SIZES = (1, 2, 4, 8) if is_full() else (1, 2, 4)
AXES = {
    "pp": SIZES,
    "dp": SIZES,
    "tp": SIZES,
    "sp": SIZES,
    "stage": (0, 1, 2, 3),
    "dtype": tuple(DTYPES),
}


def is_built(case: Case) -> bool:
    """Return whether the product of the mesh sizes is 2, 4 or 8."""
    return math.prod(case[:4]) in (2, 4, 8)


@pytest.mark.parametrize(*cases(AXES, [(2, 2, 2, 1, 3, "bf16")], is_built))
def test_a_composition_has_the_bits_of_one_process(
    pp: int, dp: int, tp: int, sp: int, stage: int, dtype: str
) -> None:
    assert run((pp, dp, tp, sp), stage, dtype) == ("bitwise" if sp == 1 else "close")


@pytest.mark.parametrize(
    ("sizes", "stage"), [((1, 1, 2, 2), 0), ((1, 1, 2, 2), 3), ((2, 1, 1, 2), 3), ((2, 1, 2, 2), 1)]
)
def test_sequence_parallelism_with_split_layers_and_stages(sizes: Sizes, stage: int) -> None:
    assert run(sizes, stage, "fp32") == "close"


@pytest.mark.parametrize("attention", ["ulysses", "all_gather"])
def test_both_training_loops_of_stages_with_sequence_parallel_ranks(attention: Any) -> None:
    """`train_batch` shards whole batches; a plain loop passes each rank its tokens.

    Both send the planned number of bytes.
    """
    config = config_of(3, "fp32") | {"sequence_parallel": {"attention": attention}}

    with engines_of_threads() as here:

        def body(rank: Rank) -> tuple[list[float], list[float]]:
            here.rank = rank
            data = [{name: value[0] for name, value in batch(0, 0, 0).items()}]
            found = []
            for is_plain in (False, True):
                model = llama(2)
                optimizer = OPTIMIZERS["sgd"](list(model.parameters()))
                request = start_file.Request(
                    model, optimizer, mesh=Mesh(pp=2, sp=2), training_data=data
                )
                engine = start_file.start(load(config), request, EngineDialect(ZeroEngine))
                planned = engine.runtime.plan.pipeline
                assert planned is not None and planned.outputs == (
                    LENGTH * 32 * 4 // 2,
                )  # bytes per sample
                losses = []
                for step in range(STEPS):
                    micros = [batch(step, micro, 0) for micro in range(MANY)]
                    before = engine.runtime.comm.meter.sent_bytes["send"]
                    if is_plain:
                        loss = one_plain_step(engine, micros, attention)
                    else:
                        loss = engine.train_batch(iter(micros)).item()
                    sent = engine.runtime.comm.meter.sent_bytes["send"] - before
                    # the bytes of the headers: of one micro-batch in the plain loop, of a step
                    # otherwise
                    described = planned.header_bytes // (MANY if is_plain else 1)
                    assert sent - (described if not step else 0) == MANY * ROWS * planned.outputs[0]
                    losses.append(loss)
                found.append(losses)
                engine.destroy()
            return found[0], found[1]

        ranks = run_ranks(4, body, reads_in_place=True)
    expected = expected_of(2, 1, 1, True, "fp32", "sgd").losses
    for losses in ranks:
        assert losses == (pytest.approx([sum(each[0]) / MANY for each in expected], rel=1e-6),) * 2


@pytest.mark.parametrize("sizes", [(2, 1, 2, 1), (1, 2, 2, 1), (1, 2, 1, 2)])
def test_a_gradient_is_clipped_by_its_norm_over_the_world(sizes: Sizes) -> None:
    """The norm must cover all stages and count a parameter that tp ranks replicate once."""
    assert expected_of(2, sizes[2], sizes[1], True, "fp32", "sgd").norms[0] > 0.5
    assert run(sizes, 2 if sizes[0] == 1 else 3, "fp32", clipping=0.1) == "close"


def one_plain_step(engine: Any, micros: Sequence[Tokens], attention: Any) -> float:
    losses = []
    for micro in micros:
        own = own_tokens(micro, engine.mesh.coordinates["sp"], engine.mesh.sp, attention)
        loss = engine(**own).loss
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return sum(losses) / len(losses)


def test_the_comparison_detects_one_bit() -> None:
    expected = expected_of(2, 1, 1, True, "fp32", "adamw")
    losses, parts = [each[0] for each in expected.losses], dict.fromkeys(expected.weights)
    found = Found(losses, expected.norms, copy.deepcopy(expected.weights), parts)
    compare(found, expected, None)
    name = next(iter(found.weights))
    found.weights[name].view(-1)[3:4].mul_(1 + 2**-22)
    with pytest.raises(AssertionError, match=name):
        compare(found, expected, None)
    further = [[loss * (1 + 1e-6) for loss in each] for each in losses]
    for other in (
        Found(further, expected.norms),
        Found(losses, [norm * 1.4 for norm in expected.norms]),
    ):
        with pytest.raises(AssertionError):
            compare(other, expected, None)
