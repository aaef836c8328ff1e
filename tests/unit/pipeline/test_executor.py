"""Pipelines of ranks in one process equal one process with gradient accumulation bitwise."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from deepseek_zero.base.errors import UsageError
from deepseek_zero.base.mesh import Mesh
from deepseek_zero.pipeline.chain import find_chain
from deepseek_zero.pipeline.executor import PipelineExecutor, States
from deepseek_zero.pipeline.messages import StageLinks, matchings
from deepseek_zero.pipeline.schedule import PipelineSchedule, forward_only, make_schedule
from deepseek_zero.pipeline.stage import Cut, MicroBatch, cut_chain, take_stages, tied_stages
from deepseek_zero.pipeline.ties import Ties
from deepseek_zero.pipeline.verify import verify
from tests.in_process import Rank, run_ranks
from tests.models import Batch, Gpt, batch_of, seeded

Grads = dict[str, Tensor]


def gpt() -> nn.Module:
    return seeded(Gpt, blocks=6)


def micro_batches(many: int, sizes: Sequence[int] | None = None) -> list[Batch]:
    return [batch_of(0, micro, 0, 2 if sizes is None else sizes[micro]) for micro in range(many)]


def given(batch: Batch) -> MicroBatch:
    return MicroBatch((batch.tokens, batch.targets))


def alone(make: Callable[[], nn.Module], batches: Sequence[Batch]) -> tuple[list[Tensor], Grads]:
    """Train one process with gradient accumulation and return its losses and gradients."""
    model, losses = make(), []
    for batch in batches:
        loss = model(batch.tokens, batch.targets)
        (loss / len(batches)).backward()
        losses.append(loss.detach())
    return losses, {
        name: param.grad for name, param in model.named_parameters() if param.grad is not None
    }


@cache
def cut_of(stages: int, make: Callable[[], nn.Module] = gpt) -> Cut:
    model, batch = make(), batch_of(0, 0, 0)
    return cut_chain(model, find_chain(model, (batch.tokens, batch.targets)), stages, "uniform")


def pipelined(
    make: Callable[[], nn.Module],
    schedule: PipelineSchedule,
    batches: Sequence[Batch],
    *,
    steps: int = 1,
    key: Callable[[Batch], Any] = lambda batch: tuple(batch.tokens.shape),
    **options: Any,
) -> tuple[list[Tensor], Grads, list[list[str]]]:
    """Return the losses of the last step, all gradients, and each rank's collectives."""
    verify(schedule)

    def body(rank: Rank) -> tuple[list[Tensor] | None, Grads]:
        mesh = Mesh(pp=schedule.ranks).on_world(rank.size, rank.index)
        model = make()
        cut = cut_of(schedule.stages, make)
        executor = PipelineExecutor(
            StageLinks(rank.comm, mesh, schedule),
            take_stages(model, cut, schedule.stages_of(rank.index)),
        )
        for _ in range(steps):
            model.zero_grad()
            outcome = executor.run(
                schedule, [given(each) for each in batches], keys=[key(each) for each in batches]
            )
        return outcome.losses, {
            name: param.grad for name, param in model.named_parameters() if param.grad is not None
        }

    found = run_ranks(schedule.ranks, body, **options)
    losses = [outcome for outcome, _ in found if outcome is not None]
    assert len(losses) == 1
    grads: Grads = {}
    for _, own in found:
        assert not grads.keys() & own.keys()
        grads |= own
    return losses[0], grads, []


def equal(found: tuple[list[Tensor], Grads, Any], expected: tuple[list[Tensor], Grads]) -> bool:
    assert found[1].keys() == expected[1].keys()
    losses = all(torch.equal(*pair) for pair in zip(found[0], expected[0], strict=True))
    return losses and all(torch.equal(found[1][name], grad) for name, grad in expected[1].items())


SCHEDULES = [
    ("1f1b", 1),
    ("interleaved", 2),
    ("interleaved", 3),
    ("breadth_first", 2),
    ("breadth_first", 1),
]


@pytest.mark.parametrize(("name", "virtual"), SCHEDULES)
@pytest.mark.parametrize("reads_in_place", [False, True])
def test_two_ranks_have_the_bits_of_one_process(
    name: str, virtual: int, reads_in_place: bool
) -> None:
    schedule = make_schedule(name, 2, virtual, 4)
    batches = micro_batches(4)
    found = pipelined(gpt, schedule, batches, reads_in_place=reads_in_place)
    assert equal(found, alone(gpt, batches))


class StartsInPlace(nn.Module):
    """A block that changes its input in place."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.ReLU(inplace=True), nn.Linear(15, 15), nn.Linear(15, 15))

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.layers(x)
        return found


def starts_in_place() -> nn.Module:
    model = gpt()
    torch.manual_seed(0)
    model.blocks = nn.ModuleList(StartsInPlace() for _ in model.blocks)  # type: ignore[attr-defined]
    return model


@pytest.mark.parametrize(("ranks", "virtual"), [(2, 1), (2, 2)])
def test_a_stage_may_begin_with_a_layer_that_writes_in_place(ranks: int, virtual: int) -> None:
    batches = micro_batches(4)
    schedule = make_schedule("1f1b" if virtual == 1 else "interleaved", ranks, virtual, 4)
    found = pipelined(starts_in_place, schedule, batches)
    assert equal(found, alone(starts_in_place, batches))


@pytest.mark.parametrize(
    ("name", "virtual"), [("1f1b", 1), ("interleaved", 2), ("breadth_first", 2)]
)
@pytest.mark.parametrize("many", [1, 2, 4, 7])
def test_three_ranks_and_any_number_of_micro_batches(name: str, virtual: int, many: int) -> None:
    batches = micro_batches(many)
    found = pipelined(gpt, make_schedule(name, 3, virtual, many), batches, seed=many)
    assert equal(found, alone(gpt, batches))


def test_groups_of_micro_batches() -> None:
    batches = micro_batches(6)
    found = pipelined(
        gpt, make_schedule("breadth_first", 2, 3, 6, group=3), batches, reads_in_place=True, seed=1
    )
    assert equal(found, alone(gpt, batches))


def test_a_short_last_batch_and_new_shapes() -> None:
    batches = micro_batches(3, (2, 2, 1))
    for key in (lambda batch: tuple(batch.tokens.shape), lambda batch: None):
        found = pipelined(
            gpt, make_schedule("1f1b", 3, 1, 3), batches, steps=2, key=key, reads_in_place=True
        )
        assert equal(found, alone(gpt, batches))


def test_a_shape_that_was_not_announced_is_an_error_on_both_sides() -> None:
    batches = micro_batches(2)

    def body(rank: Rank) -> None:
        schedule = make_schedule("1f1b", 2, 1, 2)
        model = gpt()
        stages = take_stages(model, cut_of(2), schedule.stages_of(rank.index))
        executor = PipelineExecutor(
            StageLinks(rank.comm, Mesh(pp=2).on_world(rank.size, rank.index), schedule), stages
        )
        executor.run(schedule, [given(each) for each in batches], keys=["alike", "alike"])
        shorter = [given(each) for each in micro_batches(2, (1, 1))]
        executor.run(schedule, shorter, keys=["alike", "alike"])

    with pytest.raises(
        UsageError, match=r"output of pipeline stage 0 is \(1, 7, 15\) float32; stage 1 waits for"
    ):
        run_ranks(2, body, timeouts=3)


def test_messages_of_known_shape_have_no_header() -> None:
    schedule = make_schedule("1f1b", 2, 1, 4)
    batches = micro_batches(4)

    def body(rank: Rank) -> list[int]:
        model = gpt()
        stages = take_stages(model, cut_of(2), schedule.stages_of(rank.index))
        executor = PipelineExecutor(
            StageLinks(rank.comm, Mesh(pp=2).on_world(rank.size, rank.index), schedule), stages
        )
        sent = []
        for _ in range(2):
            rank.comm.meter.sent_bytes.clear()
            executor.run(schedule, [given(each) for each in batches], keys=["alike"] * 4)
            sent.append(rank.comm.meter.sent_bytes["send"])
        return sent

    activation = 2 * 7 * 15 * 4
    first, last = run_ranks(2, body)
    assert (
        first[1] == last[1] == 4 * activation
    )  # a forward or backward message per boundary and micro-batch
    assert first[0] > first[1]
    assert last[0] == last[1]


def test_evaluation_runs_only_forwards() -> None:
    batches = micro_batches(5)

    def body(rank: Rank) -> list[Any] | None:
        schedule = forward_only(2, 2, 5)
        verify(schedule)
        model = gpt()
        stages = take_stages(model, cut_of(4), schedule.stages_of(rank.index))
        executor = PipelineExecutor(
            StageLinks(rank.comm, Mesh(pp=2).on_world(rank.size, rank.index), schedule), stages
        )
        found = executor.run(
            schedule, [MicroBatch((each.tokens,)) for each in batches], keeps_outputs=True
        )
        assert all(param.grad is None for param in model.parameters())
        return found.outputs

    first, last = run_ranks(2, body)
    model = gpt()
    assert first is None
    assert last is not None
    for output, batch in zip(last, batches, strict=True):
        assert torch.equal(output, model(batch.tokens))


def test_frozen_stages_send_nothing_back() -> None:
    def frozen() -> nn.Module:
        model = gpt()
        for name, param in model.named_parameters():
            if not name.startswith(("blocks.4", "blocks.5", "norm", "head")):
                param.requires_grad_(False)
        return model

    batches = micro_batches(3)
    assert equal(pipelined(frozen, make_schedule("1f1b", 3, 1, 3), batches), alone(frozen, batches))

    def last_frozen() -> nn.Module:
        model = gpt()
        for name, param in model.named_parameters():
            param.requires_grad_(name.startswith(("tokens", "blocks.0")))
        return model

    assert equal(
        pipelined(last_frozen, make_schedule("1f1b", 3, 1, 3), batches), alone(last_frozen, batches)
    )


class Tied(Gpt):
    def __init__(self) -> None:
        super().__init__(blocks=6)
        self.head.weight = self.tokens.weight


class Apart(Gpt):
    """The same computation as `Tied`, with a separate parameter for each use of the tied weight."""

    def __init__(self) -> None:
        super().__init__(blocks=6)
        self.head.weight = nn.Parameter(self.tokens.weight.detach().clone())


@pytest.mark.parametrize(
    ("ranks", "name", "virtual"), [(2, "1f1b", 1), (3, "interleaved", 2), (2, "breadth_first", 3)]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_tied_weights_are_summed_in_the_order_of_stages(
    ranks: int, name: str, virtual: int, dtype: torch.dtype
) -> None:
    batches = micro_batches(4)
    tied = seeded(Tied).to(dtype)
    cut = cut_chain(tied, find_chain(tied, tuple(given(batches[0]).args)), ranks * virtual)
    schedule = make_schedule(name, ranks, virtual, 4, tied=tied_stages(cut.ties))
    verify(schedule)
    losses, apart = alone(lambda: seeded(Apart).to(dtype), batches)
    expected = (apart["tokens.weight"].float() + apart["head.weight"].float()).to(dtype)

    def body(rank: Rank) -> tuple[list[Tensor] | None, Tensor | None, bool]:
        model = seeded(Tied).to(dtype)
        mesh = Mesh(pp=ranks).on_world(rank.size, rank.index)
        stages = take_stages(model, cut, schedule.stages_of(rank.index))
        ties = Ties(rank.comm, mesh, schedule.placement, cut.ties)

        class Summing(States):
            def tie(self, stage: int) -> None:
                ties.add_up(
                    {
                        key: param.grad
                        for key, param in model.named_parameters()
                        if param.grad is not None
                    }
                )

        executor = PipelineExecutor(StageLinks(rank.comm, mesh, schedule), stages, Summing())
        found = executor.run(schedule, [given(each) for each in batches])
        grads = {key: param.grad for key, param in model.named_parameters()}
        for key, grad in grads.items():
            assert key == "tokens.weight" or torch.equal(grad, apart[key])
        return found.losses, grads.get("tokens.weight"), ties.is_counted("tokens.weight")

    found = run_ranks(ranks, body, reads_in_place=True)
    assert all(torch.equal(*pair) for pair in zip(found[-1][0] or [], losses, strict=True))
    assert [grad is not None for _, grad, _ in found] == [True, *[False] * (ranks - 2), True]
    for _, grad, _ in found:
        assert grad is None or torch.equal(grad, expected)
    assert [is_counted for _, grad, is_counted in found if grad is not None] == [True, False]


def test_pairs_are_made_in_few_lots() -> None:
    assert matchings([(0, 1), (1, 2), (2, 3), (3, 0)]) == [[(0, 1), (2, 3)], [(1, 2), (3, 0)]]
    assert len(matchings([(0, 1), (1, 2), (2, 0)])) == 3
    assert matchings([(0, 1), (1, 0)]) == [[(0, 1)], [(1, 0)]]


def test_an_error_in_one_stage_reaches_the_others() -> None:
    class Broken(Exception):
        pass

    def body(rank: Rank) -> None:
        schedule = make_schedule("1f1b", 3, 1, 4)
        model = gpt()
        stages = take_stages(model, cut_of(3), schedule.stages_of(rank.index))
        if rank.index == 1:
            stages[0].loss = None  # type: ignore[assignment]

            def broken(*args: Any) -> Any:
                raise Broken("in the middle")

            stages[0].forward = broken  # type: ignore[method-assign]
        mesh = Mesh(pp=3).on_world(rank.size, rank.index)
        PipelineExecutor(StageLinks(rank.comm, mesh, schedule), stages).run(
            schedule, [given(b) for b in micro_batches(4)]
        )

    with pytest.raises(Broken, match="in the middle"):
        run_ranks(3, body, timeouts=5)


def test_the_number_of_micro_batches_is_the_schedules() -> None:
    def body(rank: Rank) -> None:
        schedule = make_schedule("1f1b", 1, 1, 4)
        model = gpt()
        stages = take_stages(model, cut_of(1), [0])
        mesh = Mesh().on_world(1, 0)
        PipelineExecutor(StageLinks(rank.comm, mesh, schedule), stages).run(
            schedule, [given(b) for b in micro_batches(3)]
        )

    with pytest.raises(UsageError, match="3 micro-batches for a schedule of 4"):
        run_ranks(1, body)
