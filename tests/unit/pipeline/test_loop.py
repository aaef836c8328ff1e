"""The plain training loop with stages: gradient accumulation, changed losses, and refusals."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import deepseek_zero
from deepseek_zero.base.errors import UsageError
from deepseek_zero.base.mesh import Mesh
from deepseek_zero.extensions.loss_factor import loss_factor_of
from deepseek_zero.optim.sharded import ShardedOptimizer
from deepseek_zero.pipeline.chain import find_chain
from deepseek_zero.pipeline.handed import hand_out, hand_to_all
from deepseek_zero.pipeline.loop import PlainLoop, StageOutput
from deepseek_zero.pipeline.pipeline import Pipeline, cut_model
from deepseek_zero.pipeline.rows import cut_rows, join_rows
from deepseek_zero.pipeline.stage import MicroBatch
from deepseek_zero.pipeline.ties import Ties
from deepseek_zero.precision.loss_scale import LossScaler, LossScaleSettings
from deepseek_zero.precision.policy import Policy
from tests.in_process import Rank, World, optimizer_over, run_ranks, sharded
from tests.models import VOCABULARY, Batch, Gpt, batch_of, seeded
from tests.reference import OPTIMIZERS, Reference

STEPS = 2
POLICIES = {torch.float32: Policy(), torch.bfloat16: Policy(torch.bfloat16, auto_cast=True)}


def gpt() -> nn.Module:
    return seeded(Gpt, blocks=4)


class Tied(Gpt):
    def __init__(self) -> None:
        super().__init__(blocks=4)
        self.head.weight = self.tokens.weight


class Loop:
    """One rank of a pipelined model with its plain loop, as in an engine.

    calls: the number of calls per step.
    """

    def __init__(
        self,
        rank: Rank,
        model: nn.Module,
        calls: int,
        parts: int | None,
        *,
        name: str = "1f1b",
        virtual: int = 1,
        stage: int = 3,
        policy: Policy = POLICIES[torch.float32],
        own_rows: bool = False,
    ) -> None:
        axes = Mesh(pp=2)
        mesh = axes.on_world(rank.size, rank.index)
        batch = batch_of(0, 0, 0)
        chain = find_chain(model, (batch.tokens, batch.targets))
        staged = cut_model(model, chain, mesh, partition="uniform", schedule=name, virtual=virtual)
        ties = Ties(rank.comm, mesh, staged.placement, staged.ties)
        row_parts = (parts or 1) * (2 if own_rows else 1)
        counts = {"accumulation": calls, "row_parts": row_parts, "reduces_once": True}
        self.model, self.calls, self.rank = model, calls, rank
        self.runtime = sharded(rank, model, axes, stage=stage, policy=policy, **counts)
        self.optimizer: ShardedOptimizer = optimizer_over(
            self.runtime, OPTIMIZERS["adamw"], max_norm=0.5
        )
        self.pipeline = Pipeline(staged, ties, rank.comm, mesh, self.runtime, name)
        self.loop = PlainLoop(
            self.pipeline, parts, own_rows=self.runtime.comm.along["pp"] if own_rows else None
        )
        self.data = mesh.data_index

    def call(self, batch: Batch, *, ends: bool = True) -> Any:
        self.runtime.step.is_boundary = ends
        return self.loop((batch.tokens, batch.targets), {})

    def step(
        self, batches: Sequence[Batch], change: Callable[[Tensor], Tensor] = lambda loss: loss
    ) -> list[Tensor]:
        """Run one step with one call per batch and return the losses."""
        losses = []
        for number, batch in enumerate(batches, 1):
            loss = self.call(batch, ends=number == self.calls)
            loss_factor_of(self.runtime).apply(change(loss)).backward()
            losses.append(loss.detach())
        self.optimizer.step()
        return losses

    def weights(self) -> dict[str, Tensor]:
        return {key: value.clone() for key, value in self.model.state_dict().items()}


def joined(batches: Sequence[Batch]) -> Batch:
    return Batch(
        torch.cat([each.tokens for each in batches]), torch.cat([each.targets for each in batches])
    )


def batches_of(step: int, calls: int, parts: int, data: int = 0) -> list[Batch]:
    many = [batch_of(step, micro, data) for micro in range(calls * parts)]
    return [joined(many[first : first + parts]) for first in range(0, len(many), parts)]


@pytest.mark.parametrize(
    ("stage", "name", "virtual", "calls", "parts", "dtype"),
    [
        (0, "1f1b", 1, 1, 3, torch.bfloat16),
        (1, "interleaved", 2, 2, 2, torch.bfloat16),
        (2, "breadth_first", 2, 3, 3, torch.float32),
        (2, "1f1b", 1, 3, 1, torch.bfloat16),
        (3, "1f1b", 1, 1, 3, torch.float32),
        (3, "interleaved", 2, 2, 2, torch.float32),
        (3, "breadth_first", 2, 2, 2, torch.bfloat16),
    ],
)
def test_parts_and_calls_have_the_bits_of_one_process_that_accumulates(
    stage: int, name: str, virtual: int, calls: int, parts: int, dtype: torch.dtype
) -> None:
    def body(rank: Rank) -> tuple[list[list[Tensor]], list[float], dict[str, Tensor]]:
        here = Loop(
            rank,
            gpt(),
            calls,
            parts,
            name=name,
            virtual=virtual,
            stage=stage,
            policy=POLICIES[dtype],
        )
        losses, norms = [], []
        for step in range(STEPS):
            losses.append(here.step(batches_of(step, calls, parts, here.data)))
            norms.append(here.optimizer.last.norm)
        return losses, norms, here.weights()

    found = run_ranks(4, body, reads_in_place=True)
    reference = Reference(gpt(), 2, calls * parts, True, dtype, OPTIMIZERS["adamw"], 0.5)
    for step in range(STEPS):
        batches = [
            [batch_of(step, micro, data) for micro in range(calls * parts)] for data in range(2)
        ]
        norm = found[0][1][step]
        expected, exact = reference.step(batches, norm)
        assert norm == pytest.approx(exact, rel=1e-5)
        for rank, (losses, norms, _) in enumerate(found):
            assert norms[step] == norm
            means = (
                torch.stack(expected[rank % 2])
                .double()
                .unflatten(0, (calls, parts))
                .mean(1)
                .float()
            )
            assert torch.equal(torch.stack(losses[step]), means)
    values = reference.values()
    for _, _, weights in found:
        assert weights.keys() == gpt().state_dict().keys()  # the parameters of all stages
        assert all(torch.equal(weight, values[key]) for key, weight in weights.items())


@pytest.mark.parametrize("stage", [1, 3])
def test_tied_weights_are_added_up_once_a_step(stage: int) -> None:
    def body(rank: Rank, *, plain: bool) -> tuple[dict[str, Tensor], list[str]]:
        here = Loop(rank, seeded(Tied), 2 if plain else 4, 2 if plain else None, stage=stage)
        for step in range(STEPS):
            if plain:
                here.step(batches_of(step, 2, 2, here.data))
            else:
                many = [batch_of(step, micro, here.data) for micro in range(4)]
                here.pipeline.train([MicroBatch((each.tokens, each.targets)) for each in many])
                here.optimizer.step()
        return here.weights(), [name for _, name in rank.world.issued[rank.index] if "tied" in name]

    found, expected = (
        run_ranks(4, lambda rank, plain=plain: body(rank, plain=plain)) for plain in (True, False)
    )
    for (weights, ties), (whole, others) in zip(found, expected, strict=True):
        assert len(ties) == len(others) == STEPS
        assert all(torch.equal(value, whole[key]) for key, value in weights.items())


@pytest.mark.parametrize(("scale", "tied"), [(None, False), (8.0, True)])
def test_a_factor_of_the_callers_is_rescaled_once_and_assumed_from_then_on(
    scale: float | None, tied: bool
) -> None:
    def body(rank: Rank, factor: float) -> tuple[list[list[Tensor]], list[int]]:
        here = Loop(rank, seeded(Tied) if tied else gpt(), 2, 2, stage=2)
        loss_factor = loss_factor_of(here.runtime)
        loss_factor.scaler = (
            None if scale is None else LossScaler(LossScaleSettings(loss_scale=scale))
        )
        rescaled, now = list[int](), [0]
        inner = here.loop._rescale

        def rescale(*given: Any) -> None:
            rescaled.append(now[0])
            inner(*given)

        here.loop._rescale = rescale  # type: ignore[method-assign]
        grads = []
        for step in range(2):
            now[0] = step
            for number, batch in enumerate(batches_of(0, 2, 2)):
                loss_factor.apply(here.call(batch, ends=number == 1) * factor).backward()
            found = [group.gradient.sum.reduced() for group in here.runtime.trained_groups]
            grads.append([grad.clone() for grad in found if grad is not None])
            here.runtime.backward.discard_step()
        loss_factor.scaler = None
        return grads, rescaled

    plain, quarter = (
        run_ranks(2, lambda rank, each=each: body(rank, each)) for each in (1.0, 0.25)
    )
    for (expected, never), (found, once) in zip(plain, quarter, strict=True):
        assert (never, once) == ([], [0])
        for step in range(2):  # multiplication by a power of two is exact
            assert all(
                torch.equal(grad * 0.25, other)
                for grad, other in zip(expected[step], found[step], strict=True)
            )


@pytest.mark.parametrize("calls", [1, 2])
def test_a_plain_backward_counts_as_the_engines(calls: int) -> None:
    def body(rank: Rank, *, plain: bool) -> dict[str, Tensor]:
        here = Loop(rank, gpt(), calls, 2, stage=1)
        for step in range(STEPS):
            for number, batch in enumerate(batches_of(step, calls, 2), 1):
                loss = here.call(batch, ends=number == calls)
                (loss if plain else loss_factor_of(here.runtime).apply(loss)).backward()
            here.optimizer.step()
        return here.weights()

    found, expected = (
        run_ranks(2, lambda rank, plain=plain: body(rank, plain=plain)) for plain in (True, False)
    )
    for weights, others in zip(found, expected, strict=True):
        assert all(torch.equal(value, others[key]) for key, value in weights.items())


@pytest.mark.parametrize(("parts", "dtype"), [(None, torch.bfloat16), (2, torch.float32)])
def test_rows_of_each_rank_have_the_bits_of_all_rows_on_every_rank(
    parts: int | None, dtype: torch.dtype
) -> None:
    def body(rank: Rank, *, own: bool) -> tuple[list[Tensor], dict[str, Tensor]]:
        many = parts if own else 2 * (parts or 1)
        here = Loop(rank, gpt(), 2, many, stage=2, policy=POLICIES[dtype], own_rows=own)
        losses = list[Tensor]()
        for step in range(STEPS):
            batches = batches_of(step, 4, parts or 1)
            pairs = [batches[:2], batches[2:]]
            losses += here.step([pair[rank.index] if own else joined(pair) for pair in pairs])
        here.model.load_state_dict(here.weights())  # the state dict of the whole model
        return losses, here.weights()

    found, expected = (
        run_ranks(2, lambda rank, own=own: body(rank, own=own)) for own in (True, False)
    )
    means = torch.stack([torch.stack(own) for own, _ in found]).mean(0).tolist()
    for (_, weights), (losses, whole) in zip(found, expected, strict=True):
        assert means == pytest.approx(torch.stack(losses).tolist())
        assert weights.keys() == whole.keys() and all(
            torch.equal(value, whole[key]) for key, value in weights.items()
        )


class Summed(nn.Module):
    """A model that divides a summed loss by a given total and also returns logits."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.head = nn.Embedding(VOCABULARY, 8), nn.Linear(8, VOCABULARY)
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))

    def forward(
        self, tokens: Tensor, targets: Tensor | None = None, num_items_in_batch: int | None = None
    ) -> dict[str, Tensor]:
        x = self.tokens(tokens)
        for block in self.blocks:
            x = block(x)
        logits = self.head(x)
        if targets is None:
            return {"logits": logits}
        total = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")
        return {"loss": total / (num_items_in_batch or targets.numel()), "logits": logits}


def test_losses_that_are_sums_over_a_total_add_up() -> None:
    (batch,) = batches_of(0, 1, 4)

    def body(rank: Rank, many: int | None) -> tuple[float, list[Tensor]]:
        here = Loop(rank, seeded(Summed), 1, many, stage=0)
        given = {
            "tokens": batch.tokens,
            "targets": batch.targets,
            "num_items_in_batch": batch.targets.numel(),
        }
        loss = here.loop((), given).loss
        loss.backward()
        grads = [group.gradient.sum.reduced() for group in here.runtime.trained_groups]
        return loss.item(), [grad.clone() for grad in grads if grad is not None]

    for (loss, grads), (whole, expected) in zip(
        run_ranks(2, lambda rank: body(rank, 4)),
        run_ranks(2, lambda rank: body(rank, None)),
        strict=True,
    ):
        assert loss == pytest.approx(whole, rel=1e-6)
        assert len(grads) == len(expected) > 0
        for grad, other in zip(grads, expected, strict=True):
            torch.testing.assert_close(grad, other, rtol=1e-4, atol=1e-6)


def test_the_output_of_a_call_has_its_loss_on_all_stages_and_other_values_on_the_last() -> None:
    (batch,) = batches_of(0, 1, 2)

    def body(rank: Rank) -> tuple[Any, Any, Any]:
        here = Loop(rank, seeded(Summed), 1, 2)
        given = {"tokens": batch.tokens, "targets": batch.targets}
        trained = here.loop((), given)
        trained.loss.backward()
        here.model.eval()
        found = here.loop((), given)
        bare = here.loop((), {"tokens": batch.tokens})
        return trained, found, bare

    (first, found, bare), (last, whole, logits) = run_ranks(2, body)
    model = seeded(Summed)
    expected = model(batch.tokens, batch.targets)
    for output in (first, last, found):
        assert isinstance(output, StageOutput)
        assert output.loss is output["loss"] is output[0]
        assert output.loss.item() == pytest.approx(expected["loss"].item(), rel=1e-6)
        with pytest.raises(AttributeError, match="'logits' stays on the last stage"):
            _ = output.logits
        with pytest.raises(KeyError, match="'logits' stays on the last stage"):
            _ = output["logits"]
        with pytest.raises(IndexError, match="'1' stays on the last stage"):
            _ = output[1]
    assert not found.loss.requires_grad
    assert float(whole["loss"]) == float(found.loss)
    torch.testing.assert_close(whole["logits"], expected["logits"])
    assert bare == {}
    torch.testing.assert_close(logits["logits"], expected["logits"])


class Scores(Summed):
    """A model that returns only one score for each row."""

    def forward(self, tokens: Tensor, targets: Any = None, num_items_in_batch: Any = None) -> Any:
        return super().forward(tokens)["logits"].mean((1, 2), keepdim=True)[:, 0]


@pytest.mark.parametrize("own_rows", [False, True])
def test_the_score_of_one_row_is_no_loss(own_rows: bool) -> None:
    (batch,) = batches_of(0, 1, 2)
    whole = seeded(Scores)(batch.tokens[:2]).detach()

    def body(rank: Rank) -> Any:
        here = Loop(rank, seeded(Scores), 1, None if own_rows else 2, stage=0, own_rows=own_rows)
        here.model.eval()
        count = 1 + rank.index if own_rows else 2
        return here.loop((batch.tokens[:count],), {})

    for rank, found in enumerate(run_ranks(2, body)):
        if own_rows:
            torch.testing.assert_close(found, whole[: 1 + rank])
    torch.testing.assert_close(found, whole)


@pytest.mark.parametrize("parts", [None, 2])
def test_each_rank_has_what_the_model_returns_for_its_own_rows(parts: int | None) -> None:
    """Sequence lengths and totals differ between ranks."""
    model = seeded(Summed)

    def given(rank: int) -> dict[str, Any]:
        (batch,) = batches_of(rank, 1, 2)
        tokens, targets = batch.tokens[:, : 6 - rank], batch.targets[:, : 6 - rank]
        return {"tokens": tokens, "targets": targets, "num_items_in_batch": torch.tensor(7 + rank)}

    def body(rank: Rank) -> tuple[Any, Any, Any, list[Tensor]]:
        here = Loop(rank, seeded(Summed), 1, parts, stage=0, own_rows=True)
        loss = here.loop((), given(rank.index)).loss
        (loss * 2).backward()
        grads = [group.gradient.sum.reduced() for group in here.runtime.trained_groups]
        here.model.eval()
        found = here.loop((), given(rank.index))
        with torch.no_grad():
            bare = here.model(given(rank.index)["tokens"])  # as in a client that relies on hooks
        return loss, found, bare, [grad.clone() for grad in grads if grad is not None]

    outcomes = run_ranks(2, body)
    for rank, (loss, found, bare, _) in enumerate(outcomes):
        whole = model(**given(rank))
        (whole["loss"] / 1).backward()  # the mean over two ranks cancels the factor of 2
        assert isinstance(found, StageOutput) and found[0] is found.loss
        for each in (loss, found.loss):
            assert each.item() == pytest.approx(whole["loss"].item(), rel=1e-6)
        torch.testing.assert_close(found.logits, whole["logits"])
        torch.testing.assert_close(bare.logits, whole["logits"])
    norm = sum(grad.double().square().sum() for *_, grads in outcomes for grad in grads)
    expected = sum(
        param.grad.double().square().sum() for param in model.parameters() if param.grad is not None
    )
    assert float(norm) == pytest.approx(float(expected), rel=1e-5)


def test_exchanged_values_arrive_unchanged() -> None:
    def body(rank: Rank) -> tuple[Any, Any]:
        own = {
            "x": [
                torch.full((rank.index, 3), 1.5, dtype=torch.bfloat16),
                (None, "a", float(rank.index)),
            ]
        }
        own |= {"flags": torch.tensor([True, False]), "one": torch.tensor(7)}
        outputs = [own | {"cache": object()}, {"y": torch.arange(3)}] if rank.index == 1 else None
        return hand_to_all(own, rank.comm, "all"), hand_out(outputs, rank.comm, "each", 1)

    for rank, (found, mine) in enumerate(run_ranks(2, body)):
        for index, each in enumerate(found):
            (x, rest), flags = each["x"], each["flags"]
            assert x.shape == (index, 3) and x.dtype is torch.bfloat16 and bool((x == 1.5).all())
            assert (
                rest == (None, "a", float(index))
                and flags.tolist() == [True, False]
                and int(each["one"]) == 7
            )
        if rank:
            assert mine["y"].tolist() == [0, 1, 2]
        else:
            assert mine.keys() == found[1].keys() and mine["x"][0].shape == (1, 3)


Misuse = Callable[[Loop], None]


def _again(here: Loop) -> None:
    loss = here.call(batch_of(0, 0, 0))
    loss.backward(retain_graph=True)
    loss.backward()


def _never(here: Loop) -> None:
    here.call(batch_of(0, 0, 0))
    here.optimizer.step()


def _dropped(here: Loop) -> None:
    loss = here.call(batch_of(0, 0, 0))
    here.optimizer.zero_grad()
    loss.backward()


def _in_mid_step(here: Loop) -> None:
    here.call(batch_of(0, 0, 0), ends=False).backward()
    (here.call(batch_of(0, 1, 0)) * 3).backward()


def _differs(here: Loop) -> None:
    (here.call(batch_of(0, 0, 0)) * (1 + here.rank.index)).backward()


def _wants_input_gradients(here: Loop) -> None:
    here.loop((batch_of(0, 0, 0).tokens,), {"targets": torch.ones(2, requires_grad=True)})


def _uneven(here: Loop) -> None:
    here.loop.parts = 3
    here.call(batch_of(0, 0, 0))


def _by_itself(here: Loop) -> None:
    here.model(batch_of(0, 0, 0).tokens)


def _odd_rows(here: Loop) -> None:
    here.loop._own_rows = here.runtime.comm.along["pp"]
    here.loop((batch_of(0, 0, 0).tokens, object()), {})


def _whole_step(here: Loop) -> None:
    here.loop._own_rows = here.runtime.comm.along["pp"]
    here.loop.refuse_begun()


def _begun(here: Loop) -> None:
    here.call(batch_of(0, 0, 0), ends=False).backward()
    here.loop.refuse_begun()


@pytest.mark.parametrize(
    ("misuse", "message"),
    [
        (_again, "a second backward"),
        (_never, "a step before the backward"),
        (_dropped, "gradients were dropped"),
        (_in_mid_step, "other calls of this step"),
        (_differs, "differ in their backward"),
        (_wants_input_gradients, "requires a gradient"),
        (_uneven, "2 rows cannot be cut into pipeline.micro_batches = 3"),
        (_by_itself, "called directly"),
        (_begun, "train_batch in a step"),
        (_odd_rows, "a object is in a batch, and each pipeline rank has different rows"),
        (_whole_step, "train_batch with pipeline.rows = own"),
    ],
)
def test_misuse_is_an_error_on_every_rank(misuse: Misuse, message: str) -> None:
    for found in World[None](2).outcomes(lambda rank: misuse(Loop(rank, gpt(), 2, None))):
        assert isinstance(found, UsageError) and message in " ".join(str(found).split()), found


def test_the_idle_mode_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    def body(rank: Rank) -> None:
        here = Loop(rank, gpt(), 1, None)
        here.step(batches_of(0, 1, 1))
        here.step(batches_of(1, 1, 1))

    with caplog.at_level("INFO"):
        run_ranks(2, body)
    told = [each for each in caplog.messages if "idles 50% of the time" in each]
    assert len(told) == 2 and "micro_batches" in told[0]  # two threads, both with rank 0


def test_two_losses_of_two_calls_may_be_added_up() -> None:
    def body(rank: Rank, *, apart: bool) -> dict[str, Tensor]:
        here = Loop(rank, gpt(), 1, None)
        batches = [batch_of(0, micro, 0) for micro in range(2)]
        if apart:
            here.call(batches[0], ends=False).backward()
            here.call(batches[1]).backward()
        else:
            (here.call(batches[0]) + here.call(batches[1])).backward()
        here.optimizer.step()
        return here.weights()

    found, expected = (
        run_ranks(2, lambda rank, apart=apart: body(rank, apart=apart)) for apart in (False, True)
    )
    for weights, others in zip(found, expected, strict=True):
        assert all(torch.equal(value, others[key]) for key, value in weights.items())


@pytest.mark.parametrize(("parts", "dtype"), [(None, torch.bfloat16), (4, torch.float32)])
def test_a_plan_adds_up_the_gradients_of_parts_as_of_an_accumulation(
    parts: int | None, dtype: torch.dtype
) -> None:
    config = {
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": 2},
        "pipeline": {"micro_batches": parts},
    }
    batch = {"tokens": batch_of(0, 0, 0).tokens, "targets": batch_of(0, 0, 0).targets}
    model, make = gpt(), OPTIMIZERS["adamw"]
    found = deepseek_zero.plan(
        model, config, ranks=2, mesh={"pp": 2}, optimizer=make, example=batch
    )
    groups = [group for unit in found.units for group in unit.groups]
    assert groups and {
        group.plan.grad.dtype for group in groups if group.plan.grad is not None
    } == {dtype}


def test_rows_are_cut_and_joined() -> None:
    tokens, place = torch.arange(24).view(4, 6), torch.arange(6).unsqueeze(0)
    given = {"places": place, "names": ["a"], "labels": torch.arange(4), "total": torch.tensor(3)}
    parts = cut_rows(MicroBatch((tokens,), given), 2)
    assert [part.args[0].tolist() for part in parts] == [tokens[:2].tolist(), tokens[2:].tolist()]
    assert [part.kwargs["labels"].tolist() for part in parts] == [[0, 1], [2, 3]]
    assert all(
        torch.equal(part.kwargs["places"], place) and part.kwargs["names"] == ["a"]
        for part in parts
    )
    back = join_rows(
        [{"x": (part.args[0], "kept"), "mean": part.args[0].float().mean()} for part in parts]
    )
    assert torch.equal(back["x"][0], tokens) and back["x"][1] == "kept"
    assert float(back["mean"]) == float(tokens.float().mean())
