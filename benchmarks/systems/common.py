"""Code shared by the systems: their result type, micro-batch loops, and AdamW on fp32 main
weights.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..cells import ADAMW, SEQUENCES_PER_RANK, Cell
from ..model import GPT, Batch

MakeModel = Callable[[], GPT]
Step = Callable[[list[Batch]], list[Tensor]]


@dataclass(frozen=True)
class Job:
    """The cell, the rank of this process and the number of ranks."""

    cell: Cell
    rank: int
    size: int

    @property
    def is_bf16(self) -> bool:
        return self.cell.dtype == "bf16"


@dataclass
class System:
    """A model ready to train. step: runs one optimizer step over its micro-batches; returns the
    losses.
    """

    step: Step
    sent_bytes: Callable[[], int] | None = None  # the system's own count since its construction
    settings: dict[str, Any] = field(default_factory=dict)  # for the report


def join() -> None:
    """Initialize the process group from the environment, unless it is initialized."""
    if not dist.is_initialized():
        dist.init_process_group("gloo")


def take_a_core(rank: int, size: int) -> int:
    """Use one thread, pinned to a core if there are enough; return the number of cores."""
    torch.set_num_threads(1)
    cores = sorted(os.sched_getaffinity(0))
    if size <= len(cores):
        os.sched_setaffinity(0, {cores[rank]})
    return len(cores)


def seconds_of(work: Callable[[], object]) -> float:
    """Return this rank's seconds of work that all ranks begin together. Collective."""
    dist.barrier()
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def backward_all(
    model: nn.Module,
    batches: Sequence[Batch],
    quiet: Callable[[], AbstractContextManager[Any]] = nullcontext,
) -> list[Tensor]:
    """Run forward and backward of every micro-batch with the gradient of their mean.

    All but the last run inside `quiet()`.
    """
    losses = []
    for number, (tokens, targets) in enumerate(batches):
        with quiet() if number < len(batches) - 1 else nullcontext():
            loss = model(tokens, targets)
            (loss / len(batches)).backward()
        losses.append(loss.detach())
    return losses


def engine_settings(job: Job, zero: dict[str, Any]) -> dict[str, Any]:
    """Return the cell as a DeepSpeed configuration, for the two systems that use one."""
    return {
        "train_micro_batch_size_per_gpu": SEQUENCES_PER_RANK,
        "gradient_accumulation_steps": job.cell.accumulation,
        "optimizer": {"type": "AdamW", "params": ADAMW},
        "bf16": {"enabled": job.is_bf16},
        "zero_optimization": zero,
    }


def engine_step(engine: Any) -> Step:
    """Return a step of `engine(...)`, `engine.backward` and `engine.step` for every micro-batch."""

    def step(batches: list[Batch]) -> list[Tensor]:
        losses = []
        for tokens, targets in batches:
            loss = engine(tokens, targets)
            engine.backward(loss)
            engine.step()
            losses.append(loss.detach())
        return losses

    return step


def to_bf16(params: Iterable[nn.Parameter]) -> None:
    """Round the weights in place one by one, so that no second copy of the model exists."""
    for param in params:
        param.data = param.data.to(torch.bfloat16)


class MasterAdamW:
    """Fused AdamW over `part` of each weight.

    With bf16 weights it keeps fp32 main weights, initialized from the fp32 originals.
    """

    def __init__(
        self, model: nn.Module, *, bf16: bool, part: Callable[[Tensor], Tensor] = Tensor.flatten
    ) -> None:
        self.weights, self.part, self.bf16 = list(model.parameters()), part, bf16
        self.masters = []
        for weight in self.weights:
            mine = part(weight.detach())
            self.masters.append(nn.Parameter(mine.clone() if bf16 else mine))
            if bf16:
                to_bf16([weight])
        self.optimizer = torch.optim.AdamW(self.masters, fused=True, **ADAMW)

    def step(self) -> None:
        """Update from the weights' gradients, and clear the gradients."""
        for master, weight in zip(self.masters, self.weights, strict=True):
            assert weight.grad is not None
            master.grad = self.part(weight.grad).float()
            if self.bf16:
                weight.grad = None
        self.optimizer.step()
        for master, weight in zip(self.masters, self.weights, strict=True):
            if self.bf16:
                self.part(weight.detach()).copy_(master.detach())
            master.grad = weight.grad = None
