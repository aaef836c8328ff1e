"""A bit flip in memory is found at the next comparison on every rank.

The error names rank, state and parameter.
"""

from __future__ import annotations

import gc
import logging
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import deepseek_zero
from deepseek_zero.base.errors import IntegrityError
from deepseek_zero.engine.engine import Engine
from deepseek_zero.sharding.backward import Backward
from deepseek_zero.sharding.param_group import ParamGroup

WRONG, STEPS, WIDTH = 1, 5, 96  # `WRONG` is the rank with bit flips
EXPONENT = 1 << 28


def start(
    stage: int, *, mode: str = "end", every: int = 1, frozen: bool = False, **config: Any
) -> Engine:
    torch.manual_seed(0)
    model = config.pop("model", None) or nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(3)])
    if frozen:
        model[1].requires_grad_(False)
    zero = {
        "stage": stage,
        "stage3_param_persistence_threshold": 0,
        **config.pop("zero_optimization", {}),
    }
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "AdamW"},
        "zero_optimization": zero,
        "steps_per_print": None,
        "integrity": {"mode": mode, "every": every},
        **config,
    }
    return deepseek_zero.initialize(model=model, config=config)[0]


def train(engine: Engine, flip: Callable[[Engine], None] | None = None, at: int = 2) -> list[float]:
    """Train and return the losses.

    flip: Called on one rank between two steps. All ranks have the same batches.
    """
    losses = []
    dtype = next(engine.module.parameters()).dtype
    for step in range(STEPS):
        if step == at and flip is not None and dist.get_rank() == WRONG:
            flip(engine)
        loss = engine(torch.ones(2, WIDTH, dtype=dtype)).float().square().mean()
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses


def flip_bit(values: Tensor) -> None:
    # Bypass PyTorch, like a hardware error
    words = values.detach().reshape(-1).view(torch.uint8).numpy().view("u4")
    words[3] ^= EXPONENT


def flip_weight(engine: Engine) -> None:
    flip_bit(next(engine.module.parameters()))


def flip_slice(engine: Engine) -> None:
    flip_bit(engine.runtime.units[-1].groups[0].weight.memory)


def flip_moment(engine: Engine) -> None:
    assert engine.optimizer is not None
    flip_bit(next(iter(engine.optimizer.inner.state.values()))["exp_avg"])


def flip_master(engine: Engine) -> None:
    master = engine.runtime.units[-1].groups[0].master
    assert master is not None
    flip_bit(master.buffer.memory)


OTHER = r"differs on rank 1 from ranks 0, 2"
RESTED = r"changed on rank 1 although nothing wrote it"


@pytest.mark.ranks(3)
@pytest.mark.parametrize(
    ("stage", "flip", "found"),
    [
        (0, flip_weight, f"weight of '0.weight' and 5 more {OTHER}"),
        (
            0,
            flip_moment,
            f"exp_avg of '0.weight' and 2 more {RESTED}; exp_avg of '0.weight' and 2 more {OTHER}",
        ),
        (1, flip_weight, f"weight of '0.weight' and 5 more {OTHER}"),
        (2, flip_weight, f"weight of '0.weight' and 5 more {OTHER}"),
        (2, flip_moment, f"exp_avg of .* {RESTED}"),
        (3, flip_moment, f"exp_avg of .* {RESTED}"),
        (3, flip_slice, f"weight of .* {RESTED}"),
    ],
)
def test_the_rank_the_state_and_the_parameters_are_named_on_every_rank(
    stage: int, flip: Callable[[Engine], None], found: str
) -> None:
    engine = start(stage)
    with pytest.raises(IntegrityError, match=f"step 3: {found}") as error:
        train(engine, flip)
    assert "saved before step 2" in str(error.value)
    engine.destroy()


@pytest.mark.ranks(3)
@pytest.mark.parametrize("stage", [2, 3])
def test_halves_of_masters_are_compared_too(stage: int) -> None:
    engine = start(stage, bf16={"enabled": True})
    with pytest.raises(IntegrityError, match=f"step 3: master of .* {RESTED}"):
        train(engine, flip_master)
    engine.destroy()


@pytest.mark.ranks(3, hosts=3)
def test_a_differing_gathered_copy_of_one_rank_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = start(3, transport="gloo")  # gloo messages have no checksum
    train(engine)
    point = ParamGroup.point_to_unsharded

    def damaged(group: ParamGroup) -> None:
        if group.unsharded is not None and dist.get_rank() == WRONG:
            flip_bit(group.unsharded.memory)
        point(group)

    monkeypatch.setattr(ParamGroup, "point_to_unsharded", damaged)
    with pytest.raises(IntegrityError, match=f"gathered weight of .* {OTHER}"):
        train(engine)
    monkeypatch.undo()
    engine.destroy()


@pytest.mark.ranks(3)
def test_a_differing_replicated_gradient_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = start(0)
    train(engine)
    before_step = Backward.before_step

    def damaged(backward: Backward) -> None:
        before_step(backward)
        if dist.get_rank() == WRONG:
            gradient = engine.runtime.trained_groups[0].gradient.sum.reduced()
            assert gradient is not None
            flip_bit(gradient)

    monkeypatch.setattr(Backward, "before_step", damaged)
    with pytest.raises(IntegrityError, match=f"gradient of .* {OTHER}"):
        train(engine)
    monkeypatch.undo()
    engine.destroy()


@pytest.mark.ranks(2)
def test_with_two_ranks_both_are_named_and_for_a_slice_its_rank() -> None:
    engine = start(1)
    with pytest.raises(
        IntegrityError,
        match=r"weight of .* differs between ranks 0, 1, without a majority",
    ):
        train(engine, flip_weight)
    engine.destroy()
    engine = start(3)
    with pytest.raises(IntegrityError, match=f"weight of .* {RESTED}"):
        train(engine, flip_slice)
    engine.destroy()


@pytest.mark.ranks(4)
def test_slices_are_compared_among_replicas() -> None:
    engine = start(2, mesh={"dp_replicate": 2}, bf16={"enabled": True})
    twins = "differs between ranks 1, 3, without a majority"
    with pytest.raises(
        IntegrityError, match=f"step 3: master of .* {RESTED}; master of .* {twins}"
    ):
        train(engine, flip_master)
    engine.destroy()


@pytest.mark.ranks(4)
@pytest.mark.parametrize("flip", [flip_weight, None])
def test_pieces_along_tp_are_compared_among_themselves(
    flip: Callable[[Engine], None] | None,
) -> None:
    class Pair(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            return self.down(torch.relu(self.up(x)))

    rules = [
        {"patterns": [r"up\.weight$"], "partition_type": "column"},
        {"patterns": [r"down\.weight$"], "partition_type": "row"},
    ]
    engine = start(
        1,
        model=Pair(),
        mesh={"tp": 2},
        tensor_parallel={"partition_config": {"layer_specs": rules}},
    )
    if flip is None:
        assert len(train(engine)) == STEPS
    else:
        with pytest.raises(
            IntegrityError, match=r"step 3: weight of 'up.weight' .* differs between ranks 1, 3"
        ):
            train(engine, flip)
    engine.destroy()


@pytest.mark.ranks(3)
@pytest.mark.parametrize("stage", [1, 3])
def test_a_persistent_difference_is_found_at_the_next_comparison(stage: int) -> None:
    """Frozen weights do not change between two comparisons."""
    engine = start(stage, every=2, frozen=True)

    def flip(engine: Engine) -> None:
        frozen = next(
            group for unit in engine.runtime.units for group in unit.groups if not group.trainable
        )
        flip_bit(frozen.weight.memory)

    with pytest.raises(
        IntegrityError, match=f"step 4: weight of '1.weight'.* {OTHER if stage == 1 else RESTED}"
    ):
        train(engine, flip, at=2)
    engine.destroy()


@pytest.mark.ranks(3)
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_run_without_faults_has_the_same_losses_and_logs_nothing(stage: int) -> None:
    engine = start(stage, mode="off")
    plain = train(engine)
    engine.destroy()
    for every in (1, 3):
        engine = start(stage, every=every)
        assert train(engine) == plain
        engine.destroy()


@pytest.mark.ranks(3)
def test_a_warning_is_logged_once_and_the_run_continues() -> None:
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("deepseek_zero").addHandler(handler)
    engine = start(0, mode="warn")
    assert len(train(engine, flip_weight)) == STEPS
    engine.destroy()
    logging.getLogger("deepseek_zero").removeHandler(handler)
    found = [line for line in said if f"weight of '0.weight' and 5 more {OTHER}" in line]
    assert len(found) == (dist.get_rank() == 0)


@pytest.mark.ranks(2)
def test_a_model_does_not_keep_the_engine_that_compared_it() -> None:
    engine = start(3)
    train(engine)
    model, optimizer = engine.module, weakref.ref(engine.optimizer)
    del engine
    gc.collect()
    assert optimizer() is None and model is not None
