"""A reduction in several messages keeps two in flight, in one order.

It gives the bits of a reduction in one message.
"""

from __future__ import annotations

import json
from itertools import groupby, pairwise

import pytest
import torch
import torch.distributed as dist

from deepseek_zero.base.meter import Event
from tests.models import Gpt, seeded
from tests.training import Run, start_engine, train_step

SMALL, ALL = 2048, 1 << 40


def reductions(run: Run) -> tuple[list[Event], dict[str, torch.Tensor], list[str]]:
    """Return a step's reductions in the order of issue, the weights, and every rank's order."""
    engine = start_engine(run, seeded(Gpt, hidden=600))
    train_step(engine, run, 0)
    with engine.timeline() as seen:
        train_step(engine, run, 1)
    found = sorted(
        (event for event in seen.collectives if event.lane == "reduce"),
        key=lambda event: event.issued,
    )
    orders = engine.runtime.comm.all_gather_text(
        json.dumps([event.what for event in found]), "orders"
    )
    return found, dict(engine.module.state_dict()), orders


@pytest.mark.ranks(2)
@pytest.mark.parametrize("transport", ["fastest", "gloo"])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_two_messages_of_a_reduction_are_in_flight_together(stage: int, transport: str) -> None:
    events, weights, orders = reductions(
        Run(stage, optimizer="adamw", bucket=SMALL, transport=transport)
    )
    assert len(set(orders)) == 1, "one order on every rank"
    units = [list(messages) for _, messages in groupby(events, key=lambda event: event.what)]
    assert max(map(len, units)) > 4
    for messages in units:
        for earlier, later in pairwise(messages):
            assert later.issued <= earlier.waited[0], (
                "the next one is on its way before anybody waits for this one"
            )
        for earlier, later in zip(messages, messages[2:], strict=False):
            assert later.issued >= earlier.waited[1], "and not more than two"
    whole = reductions(Run(stage, optimizer="adamw", bucket=ALL, transport=transport))[1]
    assert weights.keys() == whole.keys()
    assert all(torch.equal(weights[name], whole[name]) for name in weights)
    dist.barrier()
