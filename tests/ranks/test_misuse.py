"""Nothing hangs: each misuse ends in an error with the cause on every living rank.

Work that a rank may skip does not stop training. The error comes within seconds of the evidence (a
death, an exception, another collective), never after a timeout: a late rank may be late by any
time. Each wait is limited to 30 seconds by the test.
"""

from __future__ import annotations

import atexit
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import deepseek_zero
from deepseek_zero import DeepSeekZeRO3, ZeroOptimizer
from deepseek_zero.base.errors import ModelMismatchError, PeerError, UsageError
from deepseek_zero.comm import context
from deepseek_zero.comm.bootstrap import Hosts
from deepseek_zero.comm.net.key_value_store import listening_host
from deepseek_zero.comm.transports import base, shared_memory
from tests.plain import (
    BACKWARD,
    STAGE_1,
    STAGE_2,
    STAGE_3,
    STAGE_3_BARE,
    Plain,
    Setting,
    assert_same_state,
    assert_trains_like_plain,
    draw,
    engine_for,
    here,
    on_stage_3,
    on_stages_1_and_3,
    on_stages_1_to_3,
    seeded,
)

on_two_ranks = pytest.mark.ranks(2)
WIDTH = 8
EVERY_SETTING = pytest.mark.parametrize(
    "setting", [STAGE_1, STAGE_2, STAGE_3, STAGE_3_BARE], ids=str
)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.shift = nn.Parameter(torch.randn(WIDTH))
        self.skip_shift = False

    def forward(self, x: Tensor) -> Tensor:
        y = x + self.down(torch.tanh(self.up(x)))
        return y if self.skip_shift else y + self.shift


class Model(nn.Module):
    """A model that runs its blocks in a configurable order."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(), Block(), Block(), Block()])
        self.head = nn.Linear(WIDTH, 3)
        self.order = (0, 1, 2, 3)

    def forward(self, x: Tensor) -> Tensor:
        for number in self.order:
            x = self.blocks[number](x)
        return self.head(x)


def inner(model: Any) -> Any:
    return model if isinstance(model, Model) else model.module


def loss_of(model: nn.Module, rank: int, step: int) -> Tensor:
    return model(draw(rank, step, 4, WIDTH)).square().mean()


def train(model: nn.Module, rank: int, step: int, backward: BACKWARD) -> Tensor:
    loss = loss_of(model, rank, step)
    backward(loss)
    return loss


# -- work that one rank may skip
# --------------------------------------------------------------------------------------------


@on_two_ranks
@EVERY_SETTING
@pytest.mark.parametrize("block", [0, 3])
@pytest.mark.parametrize("skipper", [0, 1])
def test_a_parameter_that_one_rank_does_not_use_gets_zeros_from_it(
    skipper: int, block: int, setting: Setting
) -> None:
    def body(model: nn.Module, rank: int, step: int, backward: BACKWARD) -> Any:
        inner(model).blocks[block].skip_shift = rank == skipper and step % 2 == 1
        return train(model, rank, step, backward)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(base, "POLL_SECONDS", 0.1)
        assert_trains_like_plain(Model, body, setting, steps=4)


@on_two_ranks
@EVERY_SETTING
@pytest.mark.parametrize("skipper", [0, 1])
@pytest.mark.parametrize("order", [(0, 2, 3), (2,), ()], ids=str)
def test_units_that_one_rank_does_not_use_get_zeros_from_it(
    order: tuple[int, ...], skipper: int, setting: Setting
) -> None:
    def body(model: nn.Module, rank: int, step: int, backward: BACKWARD) -> Any:
        inner(model).order = order if rank == skipper and step != 1 else (0, 1, 2, 3)
        return train(model, rank, step, backward)

    with pytest.MonkeyPatch.context() as patch:
        # A waiting rank notices this at its second poll
        patch.setattr(base, "POLL_SECONDS", 0.1)
        assert_trains_like_plain(Model, body, setting, steps=4)


def every_unit_skipped(setting: Setting, skips: Callable[[Any, int], None], steps: int = 4) -> None:
    """On rank 1, replace forward and backward of odd steps by `skips(engine, step)`."""
    plain, model = Plain(Model), seeded(Model)
    engine = engine_for(model, setting)
    for step in range(steps):
        plain.run(lambda m, r, s, b: None if r == 1 and s % 2 else train(m, r, s, b), step)
        plain.update()
        if here() == 1 and step % 2:
            skips(engine, step)
        else:
            engine.backward(loss_of(engine, here(), step))
        engine.step()
    assert_same_state(model, plain.mine)


@on_two_ranks
@EVERY_SETTING
def test_a_rank_whose_loss_does_not_use_the_model_continues_training(setting: Setting) -> None:
    every_unit_skipped(setting, lambda engine, step: engine.backward(torch.ones(())))


@on_two_ranks
@EVERY_SETTING
def test_a_rank_that_drops_the_models_output_continues_training(setting: Setting) -> None:
    def forward_only(engine: Any, step: int) -> None:
        loss_of(engine, here(), step)
        engine.backward(torch.ones(()))

    every_unit_skipped(setting, forward_only)


@on_two_ranks
@EVERY_SETTING
def test_a_rank_without_a_batch_that_only_steps_continues_training(setting: Setting) -> None:
    every_unit_skipped(setting, lambda engine, step: None)


def evaluate_instead(engine: Any, step: int) -> None:
    with torch.no_grad():
        engine.backward(loss_of(engine, here(), step))


@on_two_ranks
@pytest.mark.parametrize("setting", [STAGE_1, STAGE_2], ids=str)
def test_a_rank_under_no_grad_contributes_zeros(
    setting: Setting,
) -> None:
    every_unit_skipped(setting, evaluate_instead)


@on_two_ranks
@on_stage_3
def test_with_sharded_weights_an_evaluation_on_one_rank_only_is_an_error_on_both(
    setting: Setting,
) -> None:
    with pytest.raises(PeerError, match=r"different collectives"):
        every_unit_skipped(setting, evaluate_instead)
    dist.barrier()


# -- a rank that raises
# ------------------------------------------------------------------------------------------------


class Boom(Exception):
    """An error that the tests raise."""


def raises(*_: Any) -> None:
    raise Boom("rank 1 has a bad day")


def raise_in_backward(module: nn.Module, args: Any, output: Tensor) -> None:
    output.register_hook(raises)


HOOKS: dict[str, Callable[[Model], Any]] = {
    "before a unit": lambda model: model.blocks[2].register_forward_pre_hook(raises),
    "inside a unit": lambda model: model.blocks[2].up.register_forward_hook(raises),
    "at the end": lambda model: model.head.register_forward_hook(raises),
    "in backward": lambda model: model.blocks[2].register_forward_hook(raise_in_backward),
}


def one_good_step(engine: Any) -> None:
    engine.backward(loss_of(engine, here(), 0))
    engine.step()


@on_two_ranks
@on_stages_1_and_3
@pytest.mark.parametrize("at, by_engine", [*((at, True) for at in HOOKS), ("in backward", False)])
def test_a_rank_that_raises_is_named_on_the_other(
    at: str, by_engine: bool, setting: Setting
) -> None:
    model = seeded(Model)
    engine = engine_for(model, setting)
    one_good_step(engine)

    def another() -> None:
        loss = loss_of(engine, here(), 1)
        engine.backward(loss) if by_engine else loss.backward()
        engine.step()

    if here() == 1:
        HOOKS[at](model)
        with pytest.raises(Boom):
            another()
    else:
        began = time.monotonic()
        # With a plain loss.backward() the early end is detected, but the error message is not
        # known.
        told = ".*Boom: rank 1 has a bad day" if by_engine or at != "in backward" else ""
        with pytest.raises(PeerError, match="rank 1 raised an error" + told):
            another()
        assert time.monotonic() - began < 15
    dist.barrier()


@pytest.mark.ranks(3)
@on_stage_3
def test_every_other_rank_of_three_names_the_one_that_raised(setting: Setting) -> None:
    model = seeded(Model)
    engine = engine_for(model, setting)
    one_good_step(engine)
    if here() == 1:
        model.blocks[2].register_forward_hook(raises)
    with pytest.raises(Boom if here() == 1 else PeerError, match="rank 1"):
        one_good_step(engine)
    dist.barrier()


@on_two_ranks
@on_stages_1_and_3
def test_a_rank_that_catches_its_error_and_continues_is_named_or_works(
    setting: Setting,
) -> None:
    """One rank skips a bad batch, so the ranks differ by one forward.

    Only sharded weights detect this.
    """
    model = seeded(Model)
    engine = engine_for(model, setting)
    one_good_step(engine)
    if here() == 1:
        hook = model.blocks[2].register_forward_pre_hook(raises)
        with pytest.raises(Boom):
            one_good_step(engine)
        hook.remove()
    if setting.stage == 1:
        one_good_step(engine)
        assert engine.global_steps == 2
    else:
        with pytest.raises(PeerError, match="rank"):
            one_good_step(engine)
            state = model.state_dict()
            assert all(torch.isfinite(value).all() for value in state.values())
    dist.barrier()


# -- a rank that ends
# --------------------------------------------------------------------------------------------------


def finish_this_program() -> None:
    """Run the exit handlers of a script and exit, instead of serving further tests."""
    atexit._run_exitfuncs()
    os._exit(0)


def be_killed() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


ENDS = {"killed": be_killed, "finished": finish_this_program}


def ends_during(dying: int, how: str, setting: Setting, late_survivor: bool = False) -> None:
    model = seeded(Model)
    engine = engine_for(model, setting)
    one_good_step(engine)
    if here() == dying:
        if how == "killed":
            model.blocks[2].register_forward_pre_hook(lambda *_: be_killed())
            one_good_step(engine)
        ENDS[how]()
    if late_survivor:
        time.sleep(1.5)  # the rank dies before the others wait
    began = time.monotonic()
    with pytest.raises(PeerError, match=rf"rank {dying}|another rank") as caught:
        for _ in range(3):
            one_good_step(engine)
    assert time.monotonic() - began < 25
    assert caught.value.fix


@pytest.mark.ranks(2, timeout=60, dies=[1])
@on_stages_1_and_3
@pytest.mark.parametrize("how", list(ENDS))
def test_the_end_of_rank_1_is_an_error_on_rank_0(how: str, setting: Setting) -> None:
    ends_during(1, how, setting)


@pytest.mark.ranks(2, timeout=60, dies=[0])
@pytest.mark.parametrize("how", list(ENDS))
def test_the_end_of_rank_0_with_the_store_is_an_error_on_rank_1(how: str) -> None:
    ends_during(0, how, STAGE_3)


@pytest.mark.ranks(3, timeout=60, dies=[1])
def test_the_death_of_one_of_three_is_an_error_on_both_others() -> None:
    ends_during(1, "killed", STAGE_3_BARE)


@pytest.mark.ranks(2, timeout=60, dies=[1])
def test_a_death_before_the_survivor_waits_is_an_error_too() -> None:
    ends_during(1, "killed", STAGE_2, late_survivor=True)


def unequal_batches(short: int, wait_after: float = 0.0) -> None:
    """Give one rank fewer batches.

    wait_after: Seconds that the other ranks wait before the next collective.
    """
    model = seeded(Model)
    engine = engine_for(model, STAGE_3)
    with pytest.raises(
        PeerError, match=rf"rank {short} has ended.*\n.*different numbers of batches"
    ):
        for step in range(4):
            if step == 2 and here() == short:
                finish_this_program()
            if step == 2:
                time.sleep(wait_after)
            engine.backward(loss_of(engine, here(), step))
            engine.step()


@pytest.mark.ranks(2, timeout=60, dies=[1])
def test_unequal_numbers_of_batches_name_the_rank_that_ran_out() -> None:
    unequal_batches(short=1)


@pytest.mark.ranks(2, timeout=60, dies=[0])
@pytest.mark.parametrize("wait_after", [0.0, 5.0])
def test_unequal_numbers_of_batches_are_named_though_rank_0_ended_which_kept_the_board(
    wait_after: float,
) -> None:
    unequal_batches(short=0, wait_after=wait_after)


# -- ranks with different calls
# ------------------------------------------------------------------------------------


@on_two_ranks
@on_stage_3
@pytest.mark.parametrize("late_action", ["state_dict", "evaluate and state_dict"])
def test_unequal_numbers_of_batches_before_a_common_end_are_an_error_on_both(
    late_action: str, setting: Setting
) -> None:
    model = seeded(Model)
    engine = engine_for(model, setting)
    one_good_step(engine)
    with pytest.raises(PeerError, match=r"rank [01]"):
        for step in range(3 if here() == 0 else 2):
            engine.backward(loss_of(engine, here(), step))
            engine.step()
        if "evaluate" in late_action:
            with torch.no_grad():
                loss_of(engine, here(), 9)
        model.state_dict()
        engine.backward(loss_of(engine, here(), 10))
        engine.step()
        finish_nothing()
    dist.barrier()


def finish_nothing() -> None:
    """Fail, because no rank has raised an error."""
    raise AssertionError("the ranks did different things and nobody noticed")


@on_two_ranks
@on_stage_3
def test_a_state_dict_on_one_rank_only_is_an_error_on_both(setting: Setting) -> None:
    model = seeded(Model)
    engine = engine_for(model, setting)
    one_good_step(engine)
    with pytest.raises(PeerError, match=r"different collectives") as caught:
        if here() == 0:
            model.state_dict()
        engine.backward(loss_of(engine, here(), 1))
        engine.step()
        finish_nothing()
    assert (
        "rank 0" in str(caught.value)
        and "rank 1" in str(caught.value)
        and "state_dict" in caught.value.fix
    )
    dist.barrier()


@pytest.mark.ranks(2, timeout=60, dies=[1])
def test_a_state_dict_on_one_rank_while_the_other_ends_is_an_error() -> None:
    model = seeded(Model)
    engine = engine_for(model, STAGE_3)
    one_good_step(engine)
    if here() == 1:
        finish_this_program()
    with pytest.raises(PeerError, match=r"rank 1 has ended"):
        model.state_dict()


@on_two_ranks
@on_stage_3
def test_gathered_parameters_on_one_rank_only_are_an_error_on_both(setting: Setting) -> None:
    model = seeded(Model)
    engine = engine_for(model, setting)
    one_good_step(engine)
    with pytest.raises(PeerError, match=r"rank [01]"):
        if here() == 0:
            with deepseek_zero.zero.GatheredParameters(model.blocks[1]):
                pass
        engine.backward(loss_of(engine, here(), 1))
        engine.step()
        finish_nothing()
    dist.barrier()


@on_two_ranks
@on_stages_1_to_3
def test_units_used_in_another_order_on_one_rank_still_train(setting: Setting) -> None:
    """Every rank follows the schedule, so another order costs only memory."""

    def body(model: nn.Module, rank: int, step: int, backward: BACKWARD) -> Any:
        inner(model).order = (0, 1, 2, 3) if rank == 0 else (2, 0, 3, 1)
        return train(model, rank, step, backward)

    assert_trains_like_plain(Model, body, setting, steps=3)


@pytest.mark.ranks(2, fresh=True)
def test_on_several_hosts_the_flight_recorder_uses_the_launchers_address() -> None:
    """Host keys define the number of hosts, even if the launcher sets no local world size.

    PyTorchJob, for example, does not.
    """
    # The address under which others reach this machine, if it has a network
    own = listening_host(Hosts(0, ("a", "b")))
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("LOCAL_WORLD_SIZE")
        patch.setenv("MASTER_ADDR", own)
        patch.setattr(shared_memory, "host_key", lambda: f"host {here()}")
        # Often 127.0.1.1, which other hosts cannot reach
        patch.setattr("socket.gethostbyname", raises)
        engine = engine_for(seeded(Model), STAGE_1)
    world = context.WorldContext.of_this_world()
    if here() == 1:
        assert world.recorder._store._address[0] == own, (
            "and not 127.0.0.1, where another host would find itself"
        )
    assert (context.ranks_of_this_host(), world.hosts.local_ranks, world.hosts.is_one) == (
        1,
        [here()],
        False,
    )
    if here() == 1:
        engine.module.blocks[2].register_forward_pre_hook(raises)
    with pytest.raises(Boom if here() == 1 else PeerError, match="rank 1"):
        one_good_step(engine)
    dist.barrier()


@on_two_ranks
@on_stage_3
def test_two_engines_used_in_different_orders_are_an_error_on_both(setting: Setting) -> None:
    engines = [engine_for(seeded(Model), setting) for _ in range(2)]
    with pytest.raises(
        PeerError,
        match=r"rank 0 is in 'begin forward' of engine \d+, "
        r"rank 1 is in 'begin forward' of engine \d+",
    ):
        for number in (0, 1) if here() == 0 else (1, 0):
            one_good_step(engines[number])
    dist.barrier()


@on_two_ranks
def test_an_error_caught_in_one_engine_does_not_end_the_other() -> None:
    first, second = (engine_for(seeded(Model), STAGE_1) for _ in range(2))
    one_good_step(second)
    if here() == 1:
        hook = first.module.blocks[2].register_forward_pre_hook(raises)
        with pytest.raises(Boom):
            one_good_step(first)
        hook.remove()
        # Meanwhile rank 0 waits in the second engine and polls the flight recorder
        time.sleep(4 * base.POLL_SECONDS)
    for _ in range(2):
        one_good_step(second)
    assert second.global_steps == 3


@on_two_ranks
@pytest.mark.parametrize("transport", ["fastest", "gloo"])
def test_units_requested_in_another_order_work_or_are_an_error_on_both(
    transport: str,
) -> None:
    """A unit that is not in the schedule is gathered on demand.

    Shared memory needs no transfer; over gloo the ranks need the same order.
    """
    model = seeded(Model)
    engine = deepseek_zero.initialize(
        model=model, config=STAGE_3_BARE.config() | {"transport": transport}
    )[0]
    one_good_step(engine)
    model.order = (0, 1, 0, 1) if here() == 0 else (1, 0, 1, 0)
    if transport == "fastest":
        one_good_step(engine)
        everyone: list[Any] = [None, None]
        dist.all_gather_object(
            everyone, {name: value.tolist() for name, value in model.state_dict().items()}
        )
        assert everyone[0] == everyone[1]
        return
    with pytest.raises(PeerError, match=r"different collectives.*blocks\.[01].*blocks\.[01]"):
        one_good_step(engine)
        finish_nothing()
    dist.barrier()


CONFIGS: dict[str, dict[str, Any]] = {
    "stage": {"zero_optimization": {"stage": 2}},
    "learning rate": {"optimizer": {"type": "SGD", "params": {"lr": 0.5}}},
    "optimizer": {"optimizer": {"type": "AdamW", "params": {"lr": 0.1}}},
    "clipping": {"gradient_clipping": 1.0},
    "accumulation": {"gradient_accumulation_steps": 2},
    "precision": {"bf16": {"enabled": True}},
    "micro-batch": {"train_micro_batch_size_per_gpu": 4},
    "units": {"units": ["Linear"]},
}


@on_two_ranks
@pytest.mark.parametrize("key", list(CONFIGS))
def test_configurations_that_differ_between_ranks_are_an_error_on_both(key: str) -> None:
    config = STAGE_3.config() | (CONFIGS[key] if here() == 1 else {})
    with pytest.raises(ModelMismatchError, match=r"(?s)rank 0.*rank 1"):
        deepseek_zero.initialize(model=seeded(Model), config=config)
    dist.barrier()


@on_two_ranks
def test_local_configuration_keys_may_differ(tmp_path: Path) -> None:
    more: dict[str, Any] = (
        {"wall_clock_breakdown": True, "steps_per_print": 3} if here() == 1 else {}
    )
    engine = deepseek_zero.initialize(model=seeded(Model), config=STAGE_3.config() | more)[0]
    one_good_step(engine)


# -- a rank that is late
# -----------------------------------------------------------------------------------------------


@on_two_ranks
@on_stages_1_and_3
@pytest.mark.parametrize("late", [0, 1])
def test_a_late_rank_continues_training(late: int, setting: Setting) -> None:
    """The rank is late by several polls of the flight recorder."""

    def body(model: nn.Module, rank: int, step: int, backward: BACKWARD) -> Any:
        if not isinstance(model, Model) and here() == late and step == 1:
            time.sleep(3.5 * base.POLL_SECONDS)
        return train(model, rank, step, backward)

    assert_trains_like_plain(Model, body, setting, steps=3)


@on_two_ranks
@on_stage_3
def test_ninety_reads_of_the_flight_recorder_are_no_evidence(setting: Setting) -> None:
    """Polling is fifty times faster, so the rank is late by the polls of 90 seconds."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(base, "POLL_SECONDS", 0.02)

        def body(model: nn.Module, rank: int, step: int, backward: BACKWARD) -> Any:
            if not isinstance(model, Model) and here() == 1 and step == 1:
                time.sleep(90 * 0.02)
            return train(model, rank, step, backward)

        assert_trains_like_plain(Model, body, setting, steps=2)


@on_two_ranks
def test_a_rank_that_is_late_at_every_collective_continues_training() -> None:
    """One rank polls the flight recorder several times between two collectives of the other."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(base, "POLL_SECONDS", 0.005)
        model, plain = seeded(Model), Plain(Model)
        engine = engine_for(model, STAGE_3_BARE)
        for block in model.blocks:
            block.register_forward_pre_hook(lambda *_: time.sleep(0.03 * here()))
            block.register_forward_hook(
                lambda _m, _a, out: (
                    out.register_hook(lambda _g: time.sleep(0.03 * (1 - here()))) and None
                )
            )
        for step in range(3):
            plain.run(train, step)
            plain.update()
            train(engine, here(), step, engine.backward)
            engine.step()
        assert_same_state(model, plain.mine)


def test_a_script_with_unequal_batches_ends_with_the_error_under_the_launcher(
    tmp_path: Path,
) -> None:
    """The launcher ends the run with an exit code and the error; no process hangs at exit."""
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    began = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-m", "deepseek_zero.cli", "run", "--nproc", "2", str(script)],
        capture_output=True,
        text=True,
        timeout=90,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"},
    )
    output = done.stdout + done.stderr
    assert done.returncode != 0
    assert "PeerError: rank 1 has ended" in output, output[-3000:]
    assert "different numbers of batches" in output
    assert time.monotonic() - began < 80


SCRIPT = """
import os, torch, deepseek_zero
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8))
config = {
    "train_micro_batch_size_per_gpu": 1,
    "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
    "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
}
engine = deepseek_zero.initialize(model=model, config=config)[0]
for _ in range(4 if os.environ["RANK"] == "0" else 2):
    engine.backward(engine(torch.ones(1, 8)).sum())
    engine.step()
"""


@pytest.mark.ranks(2)
def test_an_optimizer_of_an_unwrapped_model_raises_at_its_first_step() -> None:
    model, other = nn.Linear(64, 64), nn.Linear(64, 64)
    optimizer = ZeroOptimizer(model.parameters())
    model(torch.ones(2, 64)).sum().backward()
    with pytest.raises(
        UsageError, match=r"one of 2 ranks has 2 parameters that no wrapped model holds.*\(64, 64\)"
    ):
        optimizer.step()
    DeepSeekZeRO3(model)
    optimizer.zero_grad()
    model(torch.ones(2, 64)).sum().backward()
    optimizer.step()
    both = ZeroOptimizer([*model.parameters(), *other.parameters()])
    with pytest.raises(
        UsageError, match=r"holds a parameter of shape \(64, 64\) that the wrapped model does not"
    ):
        both.step()
    DeepSeekZeRO3(other)
    both = ZeroOptimizer([*model.parameters(), *other.parameters()])
    with pytest.raises(UsageError, match="one optimizer for each wrapped model"):
        both.step()


@on_two_ranks
def test_ranks_that_handle_the_same_error_wait_for_each_other() -> None:
    engine = engine_for(Model(), STAGE_3)
    comm = engine.runtime.comm
    for late in (0, 1):
        with pytest.raises(RuntimeError, match="shapes"):
            engine(torch.ones(2, WIDTH + 1))
        if dist.get_rank() == late:
            time.sleep(4 * base.POLL_SECONDS)
        comm.barrier("the first after the error")
        if dist.get_rank() != late:
            time.sleep(4 * base.POLL_SECONDS)
        comm.barrier("the second after the error")


@on_two_ranks
def test_a_forked_process_that_uses_sharded_weights_gets_an_error(tmp_path: Path) -> None:
    engine = engine_for(Model(), STAGE_3)
    found = tmp_path / f"{dist.get_rank()}.txt"
    child = os.fork()
    if child == 0:
        try:
            with torch.no_grad():
                engine(torch.ones(2, WIDTH))
        except UsageError as error:
            found.write_text(str(error))
        finally:
            os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    assert "forked from a rank" in found.read_text()
    if dist.get_rank() == 0:
        time.sleep(4 * base.POLL_SECONDS)  # rank 1 would see an error that the child had posted
    engine(torch.ones(2, WIDTH))
