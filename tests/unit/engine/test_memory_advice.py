"""A failed allocation raises an error with the planned and free memory and a remedy."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from deepseek_zero import DeepSeekZeRO3, ZeroOptimizer, plan
from deepseek_zero.base.errors import OutOfMemoryError
from deepseek_zero.base.quantities import format_bytes
from deepseek_zero.engine import assemble as assemble_file
from deepseek_zero.engine import memory_advice
from deepseek_zero.tiers.tier import Tier
from tests.compositions import Here, config_of, engines_of_threads
from tests.in_process import Rank, run_ranks

WIDTH = 256
LAYERS = 8
NUMEL = LAYERS * WIDTH * (WIDTH + 1)
STATES = 4 * NUMEL  # bytes of fp32 parameters
REQUEST = 4096  # bytes requested in the messages below
ON_CUDA = "CUDA out of memory. Tried to allocate 4.00 KiB. GPU 0 has a total capacity of 1.00 GiB."
ON_CPU = (
    "[enforce fail at alloc_cpu.cpp:117] err == 0. DefaultCPUAllocator: can't allocate memory: you "
    "tried to allocate 4096 bytes. Error code 12 (Cannot allocate memory)"
)
ERRORS = [torch.OutOfMemoryError(ON_CUDA), RuntimeError(ON_CPU), MemoryError("no memory")]


class Failing(nn.Module):
    """Raises a given error in its forward or backward."""

    def __init__(self) -> None:
        super().__init__()
        self.forward_error: BaseException | None = None
        self.backward_error: BaseException | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.forward_error is not None:
            raise self.forward_error
        if self.backward_error is not None:
            x.register_hook(self._fail)
        return x

    def _fail(self, gradient: Tensor) -> Tensor:
        assert self.backward_error is not None
        raise self.backward_error


def layers() -> list[nn.Module]:
    return [nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)]


class Run:
    """An engine of one rank with simulated memory statistics."""

    def __init__(self, here: Here, rank: Rank, config: dict[str, Any]) -> None:
        self.failing = Failing()
        model = nn.Sequential(*layers(), self.failing)
        config["optimizer"] = {"type": "AdamW", "params": {"lr": 0.01}}
        self.engine = here.start(rank, model, config)
        self.rank = rank

    def loss(self) -> Tensor:
        dtype = next(self.engine.module.parameters()).dtype
        found: Tensor = self.engine(torch.randn(2, WIDTH, dtype=dtype)).square().mean()
        return found


def set_memory(monkeypatch: pytest.MonkeyPatch, room: int, allocated: int) -> None:
    monkeypatch.setattr(memory_advice, "available_bytes", lambda device: room)
    monkeypatch.setattr(memory_advice, "allocated_bytes", lambda device: allocated)


def error_of(ranks: int, config: dict[str, Any], body: Callable[[Run], Any]) -> BaseException:
    """Run `body` on every rank and return the error that it raises on rank 0."""

    def on(rank: Rank) -> BaseException | None:
        run = Run(here, rank, config | {"zero_optimization": dict(config["zero_optimization"])})
        try:
            body(run)
        except (RuntimeError, MemoryError) as error:
            return error
        return None

    with engines_of_threads() as here:
        found = run_ranks(ranks, on, reads_in_place=True)[0]
    assert found is not None
    return found


def fail_forward(error: BaseException) -> Callable[[Run], Any]:
    def body(run: Run) -> None:
        run.failing.forward_error = error
        run.loss()

    return body


def fail_backward(error: BaseException) -> Callable[[Run], Any]:
    def body(run: Run) -> None:
        run.failing.backward_error = error
        run.engine.backward(run.loss())

    return body


def fail_step(error: BaseException) -> Callable[[Run], Any]:
    def body(run: Run) -> None:
        def update(**_: Any) -> None:
            raise error

        run.engine.optimizer.step = update
        for _ in range(2):
            run.engine.backward(run.loss())
            run.engine.step()

    return body


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
@pytest.mark.parametrize("fail", [fail_forward, fail_backward, fail_step])
def test_the_error_keeps_its_class_and_names_a_change(
    error: BaseException,
    fail: Callable[[BaseException], Callable[[Run], Any]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    set_memory(monkeypatch, room=10 * STATES, allocated=2 * STATES)
    found = error_of(1, config_of(1, "fp32"), fail(error))
    assert type(found) is type(error) and found.__cause__ is error
    text = str(found)
    assert len(found.args) == 1 and text.startswith(str(error))
    call = fail.__name__.removeprefix("fail_")
    for part in (f"{call}()", "parameters", "optimizer states", "Why: ", "What to do: "):
        assert part in text, (part, text)
    assert text.count("What to do") == 1


def test_a_failed_start_is_explained(monkeypatch: pytest.MonkeyPatch) -> None:
    def wrap(*_: Any) -> None:
        raise torch.OutOfMemoryError(ON_CUDA)

    set_memory(monkeypatch, room=3 * STATES, allocated=STATES)
    monkeypatch.setattr(assemble_file, "wrap_model", wrap)
    with (
        pytest.raises(torch.OutOfMemoryError, match=r"(?s)initialize\(\) on rank 0.*nvme_path"),
        engines_of_threads() as here,
    ):
        run_ranks(1, lambda rank: Run(here, rank, config_of(1, "fp32")))


def planned(ranks: int, config: dict[str, Any], change: dict[str, Any]) -> int:
    """Return the planned bytes in host memory after a change of `zero_optimization`."""
    model = nn.Sequential(*layers())
    config = config | {"optimizer": {"type": "AdamW", "params": {"lr": 0.01}}}
    config["zero_optimization"] = config["zero_optimization"] | change
    tiers = plan(model, config, ranks=ranks).bytes_by_tier()
    return tiers[Tier.DEVICE] + tiers[Tier.HOST]


ON_DISK = {"device": "nvme", "nvme_path": "."}


@pytest.mark.parametrize(
    ("ranks", "zero", "change", "expected"),
    [
        (2, {"stage": 0}, {"stage": 1}, '{"stage": 1}'),
        (2, {"stage": 0}, {"stage": 3}, '{"stage": 3}'),
        (2, {"stage": 1}, {"stage": 2}, '{"stage": 2}'),
        (
            1,
            {"stage": 1},
            {"offload_optimizer": ON_DISK},
            '{"offload_optimizer": {"device": "nvme"',
        ),
        (
            2,
            {
                "stage": 3,
                "offload_optimizer": ON_DISK,
                "stage3_prefetch_bucket_size": 0,
                "stage3_max_reuse_distance": 0,
            },
            {"offload_param": ON_DISK},
            '{"offload_param": {"device": "nvme"',
        ),
    ],
)
def test_the_change_of_states_fits_by_the_plan(
    ranks: int,
    zero: dict[str, Any],
    change: dict[str, Any],
    expected: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config = config_of(zero["stage"], "bf16")
    config["zero_optimization"] |= zero
    config["units"] = [str(number) for number in range(LAYERS)]
    now, then = planned(ranks, config, {}), planned(ranks, config, change)
    assert then < now
    set_memory(monkeypatch, room=then, allocated=now - REQUEST)
    text = str(error_of(ranks, config, fail_forward(torch.OutOfMemoryError(ON_CUDA))))
    fix = text.rpartition("What to do: ")[2]
    assert fix.startswith(f'set "zero_optimization": {expected}') and fix.endswith("which fits."), (
        text
    )
    assert format_bytes(then) in fix


def test_a_smaller_micro_batch_keeps_the_global_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    config = config_of(1, "fp32") | {"train_micro_batch_size_per_gpu": 8}
    now = planned(1, config, {})
    set_memory(monkeypatch, room=4 * now, allocated=10 * now - REQUEST)
    text = str(error_of(1, config, fail_forward(torch.OutOfMemoryError(ON_CUDA))))
    expected = (
        'What to do: set "train_micro_batch_size_per_gpu": 2 and "gradient_accumulation_steps": 8'
    )
    assert expected in text, text  # 9 / 2 + 1 does not fit


def test_no_change_is_promised_that_does_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    config = config_of(0, "fp32") | {"train_micro_batch_size_per_gpu": 1}
    now = planned(1, config, {})
    set_memory(monkeypatch, room=now // 2, allocated=now)
    text = str(error_of(1, config, fail_forward(torch.OutOfMemoryError(ON_CUDA))))
    assert "no single change" in text and "which fits" not in text


def test_other_errors_are_unchanged(monkeypatch: pytest.MonkeyPatch) -> None:
    set_memory(monkeypatch, room=STATES, allocated=STATES)
    for error in (
        RuntimeError("mat1 and mat2 shapes cannot be multiplied"),
        OutOfMemoryError("a", "b", "c"),
    ):
        assert error_of(1, config_of(1, "fp32"), fail_forward(error)) is error


def plain_forward(error: BaseException, model: nn.Module, failing: Failing) -> None:
    failing.forward_error = error
    model(torch.randn(2, WIDTH))


def plain_backward(error: BaseException, model: nn.Module, failing: Failing) -> None:
    failing.backward_error = error
    model(torch.randn(2, WIDTH)).square().mean().backward()


def plain_step(error: BaseException, model: nn.Module, failing: Failing) -> None:
    def step_now(*_: Any) -> Any:
        raise error

    optimizer = ZeroOptimizer(model.parameters(), lr=0.1, optimizer_type="sgd")
    for _ in range(2):
        model(torch.randn(2, WIDTH)).square().mean().backward()
        optimizer.step()
        assert optimizer.sharded is not None
        optimizer.sharded.updater.step_now = step_now  # type: ignore[method-assign]


@pytest.mark.parametrize("fail", [plain_forward, plain_backward, plain_step])
def test_an_error_of_a_plain_loop_is_explained_when_it_ends_the_program(
    fail: Callable[[BaseException, nn.Module, Failing], None],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    set_memory(monkeypatch, room=3 * STATES, allocated=2 * STATES)
    error = torch.OutOfMemoryError(ON_CUDA)
    failing = Failing()
    model = DeepSeekZeRO3(nn.Sequential(*layers(), failing))
    with pytest.raises(torch.OutOfMemoryError) as found:
        fail(error, model, failing)
    sys.excepthook(found.type, found.value, found.tb)  # as the interpreter does at the end
    printed = capsys.readouterr().err
    assert printed.count("What to do: ") == 1 and printed.count(ON_CUDA) == 1
    assert "Why: the plan predicts" in printed and "on rank 0" in printed


def test_other_errors_that_end_the_program_are_unchanged(
    capsys: pytest.CaptureFixture[str],
) -> None:
    model = DeepSeekZeRO3(nn.Sequential(*layers()))
    error = RuntimeError("mat1 and mat2 shapes cannot be multiplied")
    sys.excepthook(type(error), error, None)
    assert "What to do" not in capsys.readouterr().err
    assert model.training


def test_a_hook_that_replaces_and_calls_the_librarys_is_called_once(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """torch.distributed installs such a hook when it creates a process group."""
    first = DeepSeekZeRO3(nn.Sequential(*layers()))
    ours = sys.excepthook
    calls = list[object]()

    def between(kind: Any, error: Any, trace: Any) -> None:
        calls.append(error)
        ours(kind, error, trace)

    monkeypatch.setattr(sys, "excepthook", between)
    second = DeepSeekZeRO3(nn.Sequential(*layers()))
    error = RuntimeError("no error of an allocation")
    sys.excepthook(type(error), error, None)
    assert calls == [error] and capsys.readouterr().err.count("no error of an allocation") == 1
    assert first.training and second.training


def test_a_search_for_the_batch_size_still_works(monkeypatch: pytest.MonkeyPatch) -> None:
    memory = pytest.importorskip("accelerate.utils.memory")
    set_memory(monkeypatch, room=10 * STATES, allocated=2 * STATES)
    for error in ERRORS[:2]:
        found = error_of(1, config_of(1, "fp32"), fail_forward(error))
        assert memory.should_reduce_batch_size(error) and memory.should_reduce_batch_size(found)
