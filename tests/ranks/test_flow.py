"""Every order of forwards, backwards and steps of a plain model trains as without sharding.

Each test compares an engine on two ranks with plain copies of the same model (tests/plain.py).
"""

from __future__ import annotations

import gc
import os
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

import deepseek_zero
from deepseek_zero.comm.ids import WORLD_LANE
from tests.plain import (
    BACKWARD,
    LEARNING_RATE,
    STAGE_3_BARE,
    Plain,
    Setting,
    assert_same_outputs,
    assert_same_state,
    assert_trains_like_plain,
    draw,
    engine_for,
    here,
    on_stage_3,
    on_stages_0_to_3,
    on_stages_1_and_3,
    on_stages_1_to_3,
    seeded,
)
from tests.training import offload

pytestmark = pytest.mark.ranks(2)
WIDTH = 8


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(x)))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(), Block(), Block()])
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def loss_of(model: nn.Module, rank: int, step: int, part: int = 0) -> Tensor:
    return model(draw(rank + 100 * part, step, 4, WIDTH)).square().mean()


# -- forwards and backwards
# --------------------------------------------------------------------------------------------


@on_stages_1_to_3
def test_several_forwards_before_one_backward(setting: Setting) -> None:
    def body(model: nn.Module, rank: int, step: int, backward: BACKWARD) -> Any:
        loss = sum((loss_of(model, rank, step, part) for part in range(3)), torch.zeros(()))
        backward(loss)
        return loss

    assert_trains_like_plain(Model, body, setting)


@on_stages_1_to_3
@pytest.mark.parametrize("order", [(0, 1, 2), (2, 0, 1)], ids=str)
def test_several_forwards_then_as_many_backwards_in_any_order(
    order: tuple[int, ...], setting: Setting
) -> None:
    def body(model: nn.Module, rank: int, step: int, backward: BACKWARD) -> Any:
        losses = [loss_of(model, rank, step, part) for part in range(3)]
        for number in order:
            backward(losses[number])
        return losses

    assert_trains_like_plain(Model, body, setting)


@on_stages_1_to_3
def test_several_unannounced_micro_batches_before_a_step(setting: Setting) -> None:
    def body(model: nn.Module, rank: int, step: int, backward: BACKWARD) -> Any:
        losses = []
        for part in range(3):
            losses.append(loss_of(model, rank, step, part))
            backward(losses[-1])
        return losses

    assert_trains_like_plain(Model, body, setting)


@on_stages_1_to_3
def test_retain_graph_and_a_second_backward_through_the_same_graph(setting: Setting) -> None:
    def body(model: nn.Module, rank: int, step: int, backward: BACKWARD) -> Any:
        loss = loss_of(model, rank, step)
        backward(loss, retain_graph=True)
        backward(loss, retain_graph=True)
        backward(loss)
        return loss

    assert_trains_like_plain(Model, body, setting)


@on_stages_1_to_3
def test_two_losses_of_one_forward_are_differentiated_one_after_the_other(setting: Setting) -> None:
    def body(model: nn.Module, rank: int, step: int, backward: BACKWARD) -> Any:
        output = model(draw(rank, step, 4, WIDTH))
        first, second = output[:, 0].square().mean(), output[:, 1:].abs().mean()
        backward(first, retain_graph=True)
        backward(second)
        return first, second

    assert_trains_like_plain(Model, body, setting)


@on_stages_1_and_3
def test_a_forward_without_use_of_its_output_changes_nothing(setting: Setting) -> None:
    def body(model: nn.Module, rank: int, step: int, backward: BACKWARD) -> Any:
        loss_of(model, rank, step, part=1)
        loss = loss_of(model, rank, step)
        loss_of(model, rank, step, part=2)
        backward(loss)
        return loss

    assert_trains_like_plain(Model, body, setting)


class Recursive(Model):
    """Every block runs three times in one forward.

    A block's last gradient comes long after its first.
    """

    def forward(self, x: Tensor, depth: int = 2) -> Tensor:
        return super().forward(x) if depth == 0 else self(x * 0.5, depth - 1) + super().forward(x)


@on_stages_0_to_3
def test_the_model_called_inside_its_own_forward_counts_once(setting: Setting) -> None:
    def body(model: nn.Module, rank: int, step: int, backward: BACKWARD) -> Any:
        loss = loss_of(model, rank, step)
        backward(loss)
        return loss

    assert_trains_like_plain(Recursive, body, setting)


@on_stages_1_to_3
def test_backward_hooks_and_create_graph_give_a_gradient_penalty(setting: Setting) -> None:
    """The penalty differentiates the gradient of the input, so backward is differentiated."""

    def body(model: nn.Module, rank: int, step: int, backward: BACKWARD) -> Any:
        x = draw(rank, step, 4, WIDTH).requires_grad_()
        output = model(x).square().mean()
        (slope,) = torch.autograd.grad(output, x, create_graph=True)
        loss = output + slope.square().sum()
        backward(loss)
        return loss

    assert_trains_like_plain(Model, body, setting)


@on_stages_1_to_3
def test_autograd_grad_of_the_input_does_not_affect_the_step(setting: Setting) -> None:
    def body(model: nn.Module, rank: int, step: int, backward: BACKWARD) -> Any:
        x = draw(rank, step, 4, WIDTH).requires_grad_()
        (slope,) = torch.autograd.grad(model(x).square().mean(), x)
        loss = model(x.detach() + 0.1 * slope.sign()).square().mean()
        backward(loss)
        return slope, loss

    assert_trains_like_plain(Model, body, setting)


class Deep(nn.Module):
    """Six blocks, some of which a rank may skip."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(6))

    def forward(self, x: Tensor, skipped: range) -> Tensor:
        for number, block in enumerate(self.blocks):
            x = x if number in skipped else block(x)
        return x


HOST, DISK = (Setting(3, 0, offload(tier)) for tier in ("cpu", "nvme"))
SKIPPING = {
    "stage 1": Setting(1),
    "stage 2": Setting(2),
    "stage 3": STAGE_3_BARE,
    "on the host": HOST,
    "on a disk": DISK,
}


@pytest.mark.parametrize("setting", SKIPPING.values(), ids=SKIPPING)
def test_a_rank_may_skip_several_blocks_in_a_row(setting: Setting) -> None:
    def body(model: nn.Module, rank: int, step: int, backward: BACKWARD) -> Any:
        loss = (
            model(draw(rank, step, 4, WIDTH), range(1, 5 if rank == step % 2 else 1))
            .square()
            .mean()
        )
        backward(loss)
        return loss

    assert_trains_like_plain(Deep, body, setting, transport="gloo")


# -- without gradients
# -------------------------------------------------------------------------------------------------


@on_stages_1_to_3
@pytest.mark.parametrize(
    "quiet", [torch.no_grad, torch.inference_mode], ids=["no_grad", "inference_mode"]
)
def test_forwards_without_gradients_may_run_anywhere(
    quiet: Callable[[], Any], setting: Setting
) -> None:
    def look(model: nn.Module, rank: int, step: int) -> Tensor:
        model.eval()
        with quiet():
            output = model(draw(rank + 50, step, 4, WIDTH))
        model.train()
        return output.clone()

    def body(model: nn.Module, rank: int, step: int, backward: BACKWARD) -> Any:
        before = look(model, rank, step)
        loss = loss_of(model, rank, step)
        between = look(model, rank, step)
        backward(loss)
        return before, loss, between, look(model, rank, step)

    assert_trains_like_plain(Model, body, setting)


@on_stages_1_and_3
def test_a_model_that_is_never_trained_runs_inference(setting: Setting) -> None:
    plain, model = seeded(Model), seeded(Model)
    engine = engine_for(model, setting)
    engine.eval()
    for _ in range(3):
        x = draw(here(), 0, 4, WIDTH)
        assert not engine.training
        assert torch.equal(engine(x).detach(), plain(x).detach())


class Writer(nn.Module):
    """Greedy generation that calls the model once per token."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(13, WIDTH)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.head = nn.Linear(WIDTH, 13)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens).cumsum(dim=1)
        for block in self.blocks:
            x = block(x)
        return self.head(x)

    @torch.no_grad()
    def generate(self, tokens: Tensor, count: int) -> Tensor:
        for _ in range(count):
            tokens = torch.cat([tokens, self(tokens)[:, -1:].argmax(dim=-1)], dim=1)
        return tokens


def write(model: nn.Module, rank: int, step: int, backward: BACKWARD) -> Any:
    start = torch.tensor([[1 + rank, 2, 3 + step]])
    loss = F.cross_entropy(model(start)[0, :-1], start[0, 1:])
    before = model.generate(start, 5)
    backward(loss)
    return loss, before, model.generate(start, 3)


@on_stages_1_to_3
def test_generate_runs_between_forward_backward_and_step(setting: Setting) -> None:
    assert_trains_like_plain(Writer, write, setting)


@on_stage_3
def test_generate_by_ranks_of_the_same_length_works_before_any_training(setting: Setting) -> None:
    plain, model = seeded(Writer), seeded(Writer)
    engine = engine_for(model, setting)
    start = torch.tensor([[1 + here(), 2]])
    assert torch.equal(engine.generate(start, 4), plain.generate(start, 4))
    assert torch.equal(model.generate(start, 4), plain.generate(start, 4))


class EncoderDecoder(nn.Module):
    """Generation calls only the encoder, as in Hugging Face's encoder-decoder models."""

    class Encoder(nn.Module):
        def __init__(self, embed: nn.Embedding) -> None:
            super().__init__()
            self.embed = embed
            self.blocks = nn.ModuleList([Block(), Block()])
            self.norm = nn.LayerNorm(WIDTH)

        def forward(self, tokens: Tensor) -> Tensor:
            x = self.embed(tokens)
            for block in self.blocks:
                x = block(x)
            return self.norm(x)

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(13, WIDTH)
        self.encoder = self.Encoder(self.embed)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.head = nn.Linear(WIDTH, 13)

    def forward(
        self, source: Tensor | None, target: Tensor, memory: Tensor | None = None
    ) -> Tensor:
        memory = self.encoder(source) if memory is None else memory
        x = self.embed(target).cumsum(dim=1) + memory.mean(dim=1, keepdim=True)
        for block in self.blocks:
            x = block(x)
        return self.head(x)

    @torch.no_grad()
    def generate(self, source: Tensor, count: int) -> Tensor:
        memory = self.encoder(source)
        tokens = source[:, :1]
        for _ in range(count):
            tokens = torch.cat([tokens, self(None, tokens, memory)[:, -1:].argmax(dim=-1)], dim=1)
        return tokens


@on_stages_1_to_3
def test_generate_that_calls_a_part_of_the_model_by_itself(setting: Setting) -> None:
    def body(model: nn.Module, rank: int, step: int, backward: BACKWARD) -> Any:
        source = torch.tensor([[1 + rank, 5, 3 + step]])
        before = model.generate(source, 4)
        loss = F.cross_entropy(model(source, source)[0, :-1], source[0, 1:])
        backward(loss)
        return before, loss, model.generate(source, 4)

    assert_trains_like_plain(EncoderDecoder, body, setting)


# -- recomputation
# --------------------------------------------------------------------------------------------------


class Checkpointed(Model):
    """A model with blocks recomputed in backward.

    how: Recompute each block, two blocks together, or the inside of each block.
    """

    def __init__(self, reentrant: bool, how: str) -> None:
        super().__init__()
        self.reentrant, self.how = reentrant, how
        if how == "inside":
            for block in self.blocks:
                block.forward = self._inside(block)  # type: ignore[method-assign]

    def _inside(self, block: nn.Module) -> Callable[[Tensor], Tensor]:
        def part(x: Tensor) -> Tensor:
            return block.down(torch.tanh(block.up(x)))

        return lambda x: x + checkpoint(part, x, use_reentrant=self.reentrant)

    def forward(self, x: Tensor) -> Tensor:
        if self.reentrant:
            x = x.requires_grad_()  # reentrant recomputation needs an input that requires grad
        if self.how == "each":
            for block in self.blocks:
                x = checkpoint(block, x, use_reentrant=self.reentrant)
        elif self.how == "pairs":
            x = checkpoint(
                lambda y: self.blocks[1](self.blocks[0](y)), x, use_reentrant=self.reentrant
            )
            x = self.blocks[2](x)
        elif self.how == "sequence":
            x = checkpoint_sequential(list(self.blocks), 2, x, use_reentrant=self.reentrant)
        elif self.how == "twice":  # one block in two recomputed regions
            for number in (0, 1, 0):
                x = checkpoint(self.blocks[number], x, use_reentrant=self.reentrant)
        elif self.how == "all":
            return checkpoint(super().forward, x, use_reentrant=self.reentrant)
        else:
            return super().forward(x)
        return self.head(x)


@on_stages_1_to_3
@pytest.mark.parametrize("reentrant", [True, False], ids=["reentrant", "plain"])
@pytest.mark.parametrize("how", ["each", "pairs", "sequence", "inside", "twice", "all"])
def test_recomputed_blocks_train(how: str, reentrant: bool, setting: Setting) -> None:
    def body(model: nn.Module, rank: int, step: int, backward: BACKWARD) -> Any:
        loss = loss_of(model, rank, step)
        backward(loss)
        return loss

    assert_trains_like_plain(lambda: Checkpointed(reentrant, how), body, setting)


@on_stages_1_and_3
@pytest.mark.parametrize("reentrant", [True, False], ids=["reentrant", "plain"])
def test_recomputed_blocks_train_when_several_forwards_come_before_the_backwards(
    reentrant: bool, setting: Setting
) -> None:
    def body(model: nn.Module, rank: int, step: int, backward: BACKWARD) -> Any:
        losses = [loss_of(model, rank, step, part) for part in range(2)]
        backward(losses[0])
        backward(losses[1])
        return losses

    assert_trains_like_plain(lambda: Checkpointed(reentrant, "each"), body, setting)


def test_the_end_of_a_recomputation_is_no_error_to_a_rank_that_waits() -> None:
    """`checkpoint` ends the recomputation with an exception, which passes through our hooks."""

    def dawdle(block: nn.Module, given: Any, output: Tensor) -> None:
        output.register_hook(lambda grad: time.sleep(2))

    model = seeded(lambda: Checkpointed(False, "each"))
    if here() == 1:
        model.blocks[0].register_forward_hook(dawdle)
    engine = engine_for(model, STAGE_3_BARE, transport="gloo")
    for step in range(2):
        engine.backward(loss_of(engine, here(), step))
        engine.step()


@on_stages_1_and_3
def test_a_model_that_is_checkpointed_as_a_whole_from_outside_trains(setting: Setting) -> None:
    def body(model: nn.Module, rank: int, step: int, backward: BACKWARD) -> Any:
        loss = checkpoint(model, draw(rank, step, 4, WIDTH), use_reentrant=False).square().mean()
        backward(loss)
        return loss

    assert_trains_like_plain(Model, body, setting)


@on_stages_1_and_3
def test_saved_tensors_on_the_host_train(setting: Setting) -> None:
    def body(model: nn.Module, rank: int, step: int, backward: BACKWARD) -> Any:
        with torch.autograd.graph.save_on_cpu():
            loss = loss_of(model, rank, step)
        backward(loss)
        return loss

    assert_trains_like_plain(Model, body, setting)


# -- accumulation
# --------------------------------------------------------------------------------------------------


@on_stages_1_to_3
@pytest.mark.parametrize("by_engine", [True, False], ids=["engine.backward", "loss.backward"])
def test_declared_accumulation_averages_micro_batches(by_engine: bool, setting: Setting) -> None:
    plain, model = Plain(Model), seeded(Model)
    engine = engine_for(model, setting, gradient_accumulation_steps=3)
    for step in range(2):
        for part in range(3):
            plain.run(lambda m, r, s, b, part=part: b(loss_of(m, r, s, part) / 3), step)
            loss = loss_of(engine, here(), step, part)
            engine.backward(loss) if by_engine else loss.backward()
            engine.step()
        plain.update()
    assert engine.global_steps == 2
    assert_same_state(model, plain.mine)


@pytest.mark.parametrize("stage", [0, 1])
@pytest.mark.parametrize("by_engine", [True, False], ids=["engine.backward", "loss.backward"])
def test_no_sync_adds_micro_batches_without_reducing_them(stage: int, by_engine: bool) -> None:
    plain, model = Plain(Model), seeded(Model)
    engine = engine_for(model, Setting(stage))
    for step in range(2):
        for part in range(3):
            plain.run(lambda m, r, s, b, part=part: b(loss_of(m, r, s, part)), step)

        def micro(part: int, step: int = step) -> None:
            loss = loss_of(engine, here(), step, part)
            engine.backward(loss) if by_engine else loss.backward()

        with engine.no_sync():
            before = engine.runtime.comm.meter.total_bytes()
            micro(0)
            micro(1)
            assert engine.runtime.comm.meter.total_bytes() == before
        micro(2)
        engine.step()
        plain.update()
    assert_same_state(model, plain.mine)


@pytest.mark.parametrize("stage", [2, 3])
def test_no_sync_with_sharded_gradients_raises_an_error(stage: int) -> None:
    engine = engine_for(seeded(Model), Setting(stage))
    with (
        pytest.raises(deepseek_zero.DeepSeekZeroError, match=rf"no_sync.*stage {stage}"),
        engine.no_sync(),
    ):
        pass


# -- exceptions on all ranks
# -------------------------------------------------------------------------------------------


class Boom(Exception):
    """An error that the tests raise."""


class Fragile(Model):
    """Raises once at the place named by `at`."""

    def __init__(self) -> None:
        super().__init__()
        self.at = ""
        self.blocks[1].register_forward_pre_hook(lambda *_: self._raise("forward"))
        self.blocks[1].up.register_forward_hook(lambda *_: self._raise("inside"))

    def _raise(self, here: str) -> None:
        if self.at == here:
            self.at = ""
            raise Boom(here)

    def _in_backward(self, grad: Tensor) -> None:
        self._raise("backward")

    def forward(self, x: Tensor) -> Tensor:
        for number, block in enumerate(self.blocks):
            x = block(x)
            if number == 1 and x.requires_grad:
                x.register_hook(self._in_backward)
        self._raise("end")
        return self.head(x)


@on_stages_1_to_3
@pytest.mark.parametrize("at", ["forward", "inside", "end", "backward"])
def test_after_an_exception_on_all_ranks_the_next_step_works(at: str, setting: Setting) -> None:
    def body(model: Any, rank: int, step: int, backward: BACKWARD) -> Any:
        if step == 1:
            model.at = getattr(model, "module", model).at = at
            with pytest.raises(Boom):
                backward(loss_of(model, rank, step, part=1))
            model.zero_grad()
        loss = loss_of(model, rank, step)
        backward(loss)
        return loss

    assert_trains_like_plain(Fragile, body, setting)


@on_stages_1_to_3
def test_an_interrupted_backward_leaves_no_incomplete_gradient(
    setting: Setting,
) -> None:
    """A plain model would keep the gradients from before the exception.

    The engine discards the gradients of an interrupted backward.
    """
    plain, model = Plain(Model), seeded(Fragile)
    engine = engine_for(model, setting)
    model.at = "backward"
    with pytest.raises(Boom):
        engine.backward(loss_of(engine, here(), 0, part=1))
    plain.run(lambda m, r, s, b: b(loss_of(m, r, s)), 0)
    plain.update()
    engine.backward(loss_of(engine, here(), 0))
    engine.step()
    assert_same_state(model, plain.mine)


@on_stages_1_and_3
def test_a_forward_inside_an_except_clause_is_an_ordinary_forward(setting: Setting) -> None:
    def body(model: nn.Module, rank: int, step: int, backward: BACKWARD) -> Any:
        try:
            raise Boom("handled")
        except Boom:
            loss = loss_of(model, rank, step)
            backward(loss)
        return loss

    assert_trains_like_plain(Model, body, setting)


# -- several engines
# --------------------------------------------------------------------------------------------------


@on_stages_1_to_3
def test_two_engines_train_in_turn(setting: Setting) -> None:
    plains = [Plain(Model), Plain(Model)]
    models = [seeded(Model), seeded(Model)]
    engines = [engine_for(model, setting) for model in models]
    for step in range(3):
        for number, (plain, engine) in enumerate(zip(plains, engines, strict=True)):
            plain.run(lambda m, r, s, b, number=number: b(loss_of(m, r, s, number)), step)
            plain.update()
            engine.backward(loss_of(engine, here(), step, number))
            engine.step()
    for plain, model in zip(plains, models, strict=True):
        assert_same_state(model, plain.mine)


class Generator(Model):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(WIDTH, WIDTH)


@on_stages_1_to_3
@pytest.mark.parametrize("by_engine", [True, False], ids=["engine.backward", "loss.backward"])
def test_one_backward_goes_through_two_engines(by_engine: bool, setting: Setting) -> None:
    makers, judges = Plain(Generator), Plain(Model)
    maker, judge = seeded(Generator), seeded(Model)
    make, judging = engine_for(maker, setting), engine_for(judge, setting)
    for step in range(3):
        for rank, (one, other) in enumerate(zip(makers.copies, judges.copies, strict=True)):
            other(one(draw(rank, step, 4, WIDTH))).square().mean().backward()
        makers.update()
        judges.update()
        loss = judging(make(draw(here(), step, 4, WIDTH))).square().mean()
        judging.backward(loss) if by_engine else loss.backward()
        make.step()
        judging.step()
    assert_same_state(maker, makers.mine)
    assert_same_state(judge, judges.mine)


@on_stages_1_and_3
def test_a_sharded_teacher_trains_a_sharded_student(setting: Setting) -> None:
    teacher = seeded(Model, seed=3)
    plain, student = Plain(Model), seeded(Model)
    target = seeded(Model, seed=3)
    frozen = deepseek_zero.initialize(
        model=teacher.requires_grad_(False), config=setting.config(optimizer={})
    )[0]
    engine = engine_for(student, setting)
    for step in range(2):
        plain.run(
            lambda m, r, s, b: b(
                F.mse_loss(m(draw(r, s, 4, WIDTH)), target(draw(r, s, 4, WIDTH)).detach())
            ),
            step,
        )
        plain.update()
        x = draw(here(), step, 4, WIDTH)
        engine.backward(F.mse_loss(engine(x), frozen(x).detach()))
        engine.step()
    assert_same_state(student, plain.mine)


def live_bytes() -> int:
    """Return the bytes of every live tensor storage in Python, found through `gc`."""
    gc.collect()
    storages = {}
    for thing in gc.get_objects():
        # `isinstance` would read `__class__` of every object
        if issubclass(type(thing), Tensor) and not thing.is_meta:
            with torch._C.DisableTorchFunctionSubclass():
                storage = thing.untyped_storage()
            # torch.compile leaves fake tensors, which report a real device
            if storage.device.type == "meta":
                continue
            storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


class Wide(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(128, 512), nn.Linear(512, 128)) for _ in range(4)
        )

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


@on_stages_1_to_3
@pytest.mark.parametrize("trained", [True, False], ids=["trained", "interrupted"])
def test_deleting_engine_and_model_returns_their_memory(trained: bool, setting: Setting) -> None:
    at_first = live_bytes()
    model = seeded(Wide)
    engine = engine_for(model, setting)
    for step in range(2):
        loss = engine(draw(here(), step, 4, 128)).square().mean()
        if trained or step == 0:
            engine.backward(loss)
            engine.step()
    assert live_bytes() - at_first > 1_000_000
    gone = weakref.ref(engine), weakref.ref(model), weakref.ref(engine.runtime)
    del engine, model, loss
    assert live_bytes() - at_first < 10_000
    assert [reference() for reference in gone] == [None, None, None]


@on_stages_1_and_3
def test_a_model_whose_engine_was_destroyed_raises_a_clear_error(setting: Setting) -> None:
    """A model cannot train without its engine; each call must raise an error with the reason."""
    model = seeded(Model)
    engine = engine_for(model, setting)
    engine.backward(loss_of(engine, here(), 0))
    engine.step()
    del engine
    gc.collect()
    with pytest.raises(deepseek_zero.DeepSeekZeroError, match="engine"):
        model(draw(here(), 0, 4, WIDTH))


@on_stages_1_and_3
def test_a_model_belongs_to_one_engine_and_after_destroy_to_the_next(setting: Setting) -> None:
    plain, model = Plain(Model), seeded(Model)
    first = engine_for(model, setting)
    with pytest.raises(deepseek_zero.DeepSeekZeroError, match="belongs to an engine"):
        engine_for(model, setting)
    first.destroy()
    second = engine_for(model, setting)
    plain.run(lambda m, r, s, b: b(loss_of(m, r, s)), 0)
    plain.update()
    second.backward(loss_of(second, here(), 0))
    second.step()
    assert_same_state(model, plain.mine)


@pytest.mark.ranks(2, fresh=True)
def test_a_world_that_is_destroyed_and_joined_again_trains() -> None:
    store = dist.PrefixStore("second world", dist.distributed_c10d._get_default_store())
    for world in range(2):
        engine = engine_for(seeded(Model), STAGE_3_BARE)
        loss = loss_of(engine, here(), 0)
        engine.backward(loss)
        engine.step()
        assert torch.isfinite(loss) and engine.global_steps == 1
        del engine
        gc.collect()
        dist.destroy_process_group()
        if world == 0:
            dist.init_process_group("gloo", store=store, rank=int(os.environ["RANK"]), world_size=2)


@pytest.mark.ranks(2, fresh=True)
def test_the_threads_of_deleted_engines_end() -> None:
    def one_step() -> None:
        engine = engine_for(seeded(Model), STAGE_3_BARE)
        engine.backward(loss_of(engine, here(), 0))
        engine.step()

    def an_engine_is_waited_for() -> bool:
        waits = [
            each.name
            for each in threading.enumerate()
            if each.name.startswith("deepseek-zero-wait-")
        ]
        # Waiting threads of the world's lane remain
        return any(not name.startswith(f"deepseek-zero-wait-{WORLD_LANE}/") for name in waits)

    def threads() -> int:
        gc.collect()
        deadline = time.monotonic() + 20
        while time.monotonic() < deadline and an_engine_is_waited_for():
            time.sleep(0.01)
        assert not an_engine_is_waited_for()
        return len(os.listdir("/proc/self/task"))

    one_step()
    at_first = threads()
    for _ in range(5):
        one_step()
    assert (
        threads() < at_first + 5
    )  # torch may start one thread; an engine that stayed alive would have three


# -- torch.compile
# --------------------------------------------------------------------------------------------------


@on_stages_1_and_3
@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("how", ["in place", "wrapped"])
def test_blocks_compiled_before_or_after_wrapping_train(
    how: str, when: str, setting: Setting
) -> None:
    def compiled(model: nn.Module) -> nn.Module:
        for number, block in enumerate(model.blocks):
            if how == "in place":
                block.compile(backend="aot_eager")
            else:
                model.blocks[number] = torch.compile(block, backend="aot_eager")
        return model

    plain, model = Plain(Model), seeded(Model)
    if when == "before":
        compiled(model)
    engine = engine_for(model, setting)
    if when == "after":
        compiled(model)
    for step in range(3):
        expected = plain.run(lambda m, r, s, b: [loss := loss_of(m, r, s), b(loss)][0], step)
        plain.update()
        found = loss_of(engine, here(), step)
        engine.backward(found)
        engine.step()
        assert_same_outputs(found, expected)
    torch._dynamo.reset()
    values = {name.replace("_orig_mod.", ""): value for name, value in model.state_dict().items()}
    for name, value in plain.mine.state_dict().items():
        torch.testing.assert_close(values[name], value, rtol=1e-5, atol=1e-6)


@on_stages_1_and_3
def test_a_batch_of_another_size_recompiles_blocks_that_have_gradients(setting: Setting) -> None:
    plain, model = Plain(Model), seeded(Model)
    engine = engine_for(model, setting)
    for block in model.blocks:
        block.compile(backend="aot_eager")

    def loss_of_batch(model: nn.Module, rank: int, size: int) -> Tensor:
        return model(draw(rank, size, size, WIDTH)).square().mean()

    torch._dynamo.reset()
    for size in (4, 6):
        expected = plain.run(lambda m, r, s, b: [loss := loss_of_batch(m, r, s), b(loss)][0], size)
        found = loss_of_batch(engine, here(), size)
        engine.backward(found)
        assert_same_outputs(found, expected)
    torch._dynamo.reset()


# -- the plain loop of seed 000
# --------------------------------------------------------------------------------------------------


@on_stages_1_to_3
@pytest.mark.parametrize("optimizer_first", [True, False])
def test_the_plain_loop_of_seed_000_trains(optimizer_first: bool, setting: Setting) -> None:
    def wrap() -> None:
        zero = {
            key: value
            for key, value in setting.config()["zero_optimization"].items()
            if key != "stage"
        }
        deepseek_zero.DeepSeekZeRO3(model, stage=setting.stage, zero_optimization=zero)

    def make() -> Any:
        return deepseek_zero.ZeroOptimizer(
            model.parameters(), lr=LEARNING_RATE, optimizer_type="sgd"
        )

    plain, model = Plain(Model), seeded(Model)
    if optimizer_first:
        optimizer = make()
        wrap()
    else:
        wrap()
        optimizer = make()
    for step in range(3):
        plain.run(lambda m, r, s, b: b(loss_of(m, r, s)), step)
        plain.update()
        optimizer.zero_grad()
        loss_of(model, here(), step).backward()
        optimizer.step()
    assert_same_state(model, plain.mine)


def test_zero_grad_between_two_backwards_discards_the_first() -> None:
    plain, model = Plain(Model), seeded(Model)
    engine = engine_for(model, STAGE_3_BARE)
    plain.run(lambda m, r, s, b: b(loss_of(m, r, s)), 0)
    plain.update()
    engine.backward(loss_of(engine, here(), 0, part=1))
    engine.zero_grad()
    engine.backward(loss_of(engine, here(), 0))
    engine.step()
    assert_same_state(model, plain.mine)
