"""Pipelines over shared memory and gloo give the bits of one process.

Also tests a rank that dies and a late rank.
"""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from deepseek_zero.base.mesh import Mesh
from deepseek_zero.comm.collectives import Comm
from deepseek_zero.pipeline.chain import find_chain
from deepseek_zero.pipeline.executor import PipelineExecutor, States
from deepseek_zero.pipeline.messages import StageLinks
from deepseek_zero.pipeline.schedule import make_schedule
from deepseek_zero.pipeline.stage import MicroBatch, cut_chain, take_stages, tied_stages
from deepseek_zero.pipeline.ties import Ties
from tests.models import Gpt, batch_of, seeded

CPU = torch.device("cpu")


class Tied(Gpt):
    def __init__(self) -> None:
        super().__init__(blocks=6)
        self.head.weight = self.tokens.weight


class Apart(Tied):
    def __init__(self) -> None:
        super().__init__()
        self.head.weight = nn.Parameter(self.tokens.weight.detach().clone())


def given(many: int, sizes: tuple[int, ...] = ()) -> list[MicroBatch]:
    batches = [batch_of(0, micro, 0, sizes[micro] if sizes else 2) for micro in range(many)]
    return [MicroBatch((batch.tokens, batch.targets)) for batch in batches]


def expected(batches: list[MicroBatch]) -> tuple[list[Tensor], dict[str, Tensor]]:
    model, losses = seeded(Apart), []
    for batch in batches:
        loss = model(*batch.args)
        (loss / len(batches)).backward()
        losses.append(loss.detach())
    grads = {name: param.grad for name, param in model.named_parameters() if param.grad is not None}
    grads["tokens.weight"] = grads["tokens.weight"] + grads.pop("head.weight")
    return losses, grads


def pipeline(
    name: str, virtual: int, many: int, transport: str, states: type[States] = States
) -> tuple[PipelineExecutor, Any, nn.Module]:
    world = Comm(CPU, transport=transport)
    ranks = dist.get_world_size()
    mesh = Mesh(pp=ranks).on_world(ranks, dist.get_rank())
    model = seeded(Tied)
    cut = cut_chain(model, find_chain(model, given(1)[0].args), ranks * virtual, "uniform")
    schedule = make_schedule(name, ranks, virtual, many, tied=tied_stages(cut.ties))
    ties = Ties(world, mesh, schedule.placement, cut.ties)

    class Summing(states):  # type: ignore[valid-type, misc]
        def tie(self, stage: int) -> None:
            ties.add_up(
                {
                    key: param.grad
                    for key, param in model.named_parameters()
                    if param.grad is not None
                }
            )

    stages = take_stages(model, cut, schedule.stages_of(dist.get_rank()))
    return PipelineExecutor(StageLinks(world, mesh, schedule), stages, Summing()), schedule, model


def assert_is_one_process(
    name: str, virtual: int, many: int, transport: str, sizes: tuple[int, ...] = ()
) -> None:
    executor, schedule, model = pipeline(name, virtual, many, transport)
    batches = given(many, sizes)
    losses, grads = expected(batches)
    for _ in range(3):
        model.zero_grad()
        found = executor.run(
            schedule, batches, keys=[tuple(batch.args[0].shape) for batch in batches]
        )
        if found.losses is not None:
            assert all(torch.equal(*pair) for pair in zip(found.losses, losses, strict=True))
        for key, param in model.named_parameters():
            assert param.grad is not None
            assert torch.equal(param.grad, grads[key]), key


@pytest.mark.ranks(2)
@pytest.mark.parametrize("transport", ["fastest", "gloo"])
@pytest.mark.parametrize(
    ("name", "virtual"), [("1f1b", 1), ("interleaved", 3), ("breadth_first", 3)]
)
def test_two_processes_have_the_bits_of_one(name: str, virtual: int, transport: str) -> None:
    assert_is_one_process(name, virtual, 4, transport)


@pytest.mark.ranks(3)
@pytest.mark.parametrize("transport", ["fastest", "gloo"])
def test_three_processes_fewer_micro_batches_and_a_short_one(transport: str) -> None:
    assert_is_one_process("1f1b", 1, 2, transport)
    assert_is_one_process("interleaved", 2, 4, transport, (2, 2, 2, 1))


@pytest.mark.ranks(2)
def test_large_messages_and_a_late_rank() -> None:
    """Messages are larger than the inline limit, and some ranks are late."""

    class Late(States):
        def gather(self, stage: int) -> None:
            time.sleep(0.05 * dist.get_rank())

    executor, schedule, model = pipeline("breadth_first", 3, 4, "fastest", Late)
    batches = given(4, (64, 64, 64, 64))
    losses, grads = expected(batches)
    for _ in range(2):
        model.zero_grad()
        found = executor.run(schedule, batches, keys=["alike"] * 4)
    assert found.losses is None or all(
        torch.equal(*pair) for pair in zip(found.losses, losses, strict=True)
    )
    for key, param in model.named_parameters():
        assert param.grad is not None
        assert torch.equal(param.grad, grads[key]), key
