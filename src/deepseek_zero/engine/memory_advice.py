"""Explain failed allocations by the bytes of the plan and a change that would fit."""

from __future__ import annotations

import re
import sys
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from types import TracebackType
from typing import Any

import torch

from ..base.device import allocated_bytes, free_device_bytes
from ..base.errors import DeepSeekZeroError
from ..base.quantities import format_bytes
from ..comm.context import ranks_of_this_host
from ..planner.auto_wrap_policy import ModelShape
from ..planner.plan import Plan, plan_shape
from ..planner.update import UpdateSettings
from ..tiers.host import free_host_bytes
from ..tiers.tier import Tier

_PREDICTION = "the plan predicts"  # part of every explanation
# Texts of PyTorch's allocators that raise a plain RuntimeError.
_TEXTS = ("DefaultCPUAllocator", "can't allocate memory", "not enough memory", "out of memory")
_REQUEST = re.compile(r"tried to allocate ([\d.]+) (bytes|[KMGT]iB)", re.IGNORECASE)
_UNITS = {"bytes": 1, "kib": 1 << 10, "mib": 1 << 20, "gib": 1 << 30, "tib": 1 << 40}
_STATES = {
    "weight": "parameters",
    "grad": "gradients",
    "master": "main weights",
    "moments": "optimizer states",
    "buffers": "communication and update buffers",
}


@dataclass(frozen=True)
class ConfigChange:
    """A change of the configuration that reduces the memory of a run.

    Attributes:
        text: The change, as an error message names it.
        settings: The fields of `PlanSettings` that it changes.
        divides: The factor by which it makes the micro-batch smaller.
    """

    text: str
    settings: dict[str, Any]
    divides: int = 1


@dataclass
class MemoryAdvice:
    """Adds the plan of one rank to the errors of failed allocations.

    An error that leaves a call of the engine gets the text in its message (`explaining`). One that
    leaves the program's own code, such as a plain `loss.backward()`, gets it as a note when it ends
    the program (`explain_uncaught`).

    Attributes:
        plan: The plan of this rank, with the predicted bytes of each state.
        shape: The model's shape, the input for the plans of other configurations.
        update: The optimizer, as the planner needs it.
        batch: Samples of a micro-batch, and micro-batches of a step.
    """

    plan: Plan
    shape: ModelShape
    update: UpdateSettings | None
    batch: tuple[int, int]
    _is_explaining: bool = field(default=False, repr=False)

    @contextmanager
    def explaining(self, call: str) -> Iterator[None]:
        """Return a context that explains the error of a failed allocation.

        The error that leaves the block has the class of the original one, which is its cause. A
        program that looks for the class or for the text of the original error finds both.

        Args:
            call: The name of the call that the block serves, for the message.
        """
        if self._is_explaining:
            yield
            return
        self._is_explaining = True
        try:
            yield
        except (MemoryError, RuntimeError) as error:
            if not _is_of_allocation(error):
                raise
            text = self.text(error, f"{call}()")
            if type(error) not in (MemoryError, RuntimeError, torch.OutOfMemoryError):
                error.add_note(text)  # the constructor of a subclass may need other arguments
                raise
            raise type(error)(f"{error}\n  {text}") from error
        finally:
            self._is_explaining = False

    def text(self, error: BaseException, where: str) -> str:
        """Return the explanation of a failed allocation.

        Args:
            error: The error that the allocator raised; its message states the requested bytes.
            where: The name of the engine's method in which the allocation failed.

        Returns:
            Several lines: the planned bytes by state, and a change of the configuration that would
            fit.
        """
        device = self.plan.mesh.device
        available = available_bytes(device)
        planned = self._near_bytes(self.plan)
        asked = allocated_bytes(device) + _requested_bytes(error)
        other = max(0, asked - planned)
        states = {name: self.plan.bytes_by_state().get(state, 0) for state, name in _STATES.items()}
        listed = ", ".join(
            f"{format_bytes(nbytes)} of {name}" for name, nbytes in states.items() if nbytes
        )
        lines = [
            f"This was {where} on rank {self.plan.mesh.rank}.",
            f"Why: {_PREDICTION} {format_bytes(planned)} for this rank on {device} ({listed}). "
            f"Activations and other tensors, with this request, need {format_bytes(other)}. This "
            f"process can have {format_bytes(available)} there.",
            f"What to do: {self._advice(available, planned, other)}",
        ]
        return "\n  ".join(lines)

    def _advice(self, available: int, planned: int, other: int) -> str:
        least = planned + other
        best = first = ""
        if least <= available:
            first = (
                "this size would fit, so memory is fragmented or has another limit: on a GPU try "
                "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True. Or "
            )
        for change in self._changes(activations_first=other > planned):
            try:
                needed = self._near_bytes(self._planned_with(change)) + other // change.divides
            except DeepSeekZeroError:  # the planner refuses this combination
                continue
            if needed <= available and needed < least:
                return (
                    f"{first}{change.text}. According to the plan this rank then needs "
                    f"{format_bytes(needed)}, which fits."
                )
            if needed < least:
                least = needed
                best = change.text
        if not best:
            return (
                "no single change of the configuration saves memory here. Use more ranks, or a "
                "smaller model."
            )
        return (
            f"no single change is enough. The largest saving is: {best}; this rank then needs "
            f"{format_bytes(least)}. Use more ranks as well, or a smaller micro-batch."
        )

    def _changes(self, *, activations_first: bool) -> list[ConfigChange]:
        """Return the changes of the configuration to try, the least costly first."""
        settings = self.plan.settings
        micro, accumulation = self.batch
        smaller = [
            ConfigChange(
                f'set "train_micro_batch_size_per_gpu": {micro // factor} and '
                f'"gradient_accumulation_steps": {accumulation * factor}, which keeps the global '
                "batch",
                {"accumulation": settings.accumulation * factor},
                factor,
            )
            for factor in range(2, micro + 1)
            if micro % factor == 0
        ]
        others = list[ConfigChange]()
        if self.plan.mesh.shard_size > 1:
            for stage in range(settings.stage + 1, 4):
                text = f'set "zero_optimization": {{"stage": {stage}}}'
                others.append(ConfigChange(text, {"stage": stage}))
        tier = Tier.HOST
        value = '{"device": "cpu"}'
        if self.plan.mesh.device.type == "cpu":  # the run itself has filled the host's memory
            tier = Tier.NVME
            value = '{"device": "nvme", "nvme_path": FOLDER}'
        sections = (("offload_optimizer", "state_tier", 1), ("offload_param", "weight_tier", 3))
        for section, name, stage in sections if not settings.unit_tiers else ():
            if settings.stage >= stage and getattr(settings, name) is Tier.DEVICE:
                text = f'set "zero_optimization": {{"{section}": {value}}}'
                others.append(ConfigChange(text, {name: tier}))
        return [*smaller, *others] if activations_first else [*others, *smaller]

    def _planned_with(self, change: ConfigChange) -> Plan:
        plan = self.plan
        settings = replace(plan.settings, **change.settings)
        found = plan_shape(self.shape, settings, plan.mesh, plan.machine, self.update)
        return replace(found, pipeline=plan.pipeline, tensor=plan.tensor, sequence=plan.sequence)

    def _near_bytes(self, plan: Plan) -> int:
        """Return the bytes that a plan predicts for the memory of the training device."""
        found = plan.bytes_by_tier()
        return found[Tier.DEVICE] + (found[Tier.HOST] if plan.mesh.device.type == "cpu" else 0)


ExceptHook = Callable[[type[BaseException], BaseException, TracebackType | None], object]


def explain_uncaught(advice: MemoryAdvice) -> None:
    """Add an advice to the errors of failed allocations that end the program.

    It replaces the advice of an earlier call.
    """
    # Another hook may have replaced ours and call it, as the one of torch.distributed does
    if not isinstance(sys.excepthook, _ExplainingHook):
        sys.excepthook = _ExplainingHook(sys.excepthook, advice)
    sys.excepthook.advice = weakref.ref(advice)


class _ExplainingHook:
    """Adds an explanation to an error before the interpreter prints it.

    Args:
        before: The `sys.excepthook` that it replaces, and that prints the error.
        advice: The source of the explanation.
    """

    def __init__(self, before: ExceptHook, advice: MemoryAdvice) -> None:
        self.before = before
        self.advice = weakref.ref(advice)

    def __call__(
        self, kind: type[BaseException], error: BaseException, trace: TracebackType | None
    ) -> None:
        advice = self.advice()
        notes = getattr(error, "__notes__", ())
        is_explained = any(_PREDICTION in text for text in (str(error), *notes))
        if advice is not None and _is_of_allocation(error) and not is_explained:
            error.add_note(f"  {advice.text(error, 'outside the calls of the engine')}")
        self.before(kind, error, trace)


def available_bytes(device: torch.device) -> int:
    """Return the bytes of a device's memory that are free or used by this process."""
    free = free_device_bytes(device)
    if free is None:
        return allocated_bytes(device) + free_host_bytes() // ranks_of_this_host()
    return torch.cuda.memory_reserved(device) + free


def _is_of_allocation(error: BaseException) -> bool:
    if isinstance(error, DeepSeekZeroError):  # these errors already contain advice
        return False
    return isinstance(error, MemoryError | torch.OutOfMemoryError) or any(
        text in str(error) for text in _TEXTS
    )


def _requested_bytes(error: BaseException) -> int:
    """Return the bytes of the failed request; 0 if the message does not name them."""
    found = _REQUEST.search(str(error))
    return int(float(found[1]) * _UNITS[found[2].lower()]) if found else 0
