"""Forwards and backwards that a rank skipped, or that an exception ended."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Protocol

import torch
from torch import nn

from ..base.device import calls_under_way, ends_recomputation
from ..comm.collectives import Comm
from ..planner.auto_wrap_policy import BATCH_NORMS
from ..precision.policy import Policy
from .comm_context import CommContext
from .gather_lane import GatherLane
from .reduce_lane import ReduceLane
from .step_state import Phase, StepState
from .unit import Unit


class BackwardPasses(Protocol):
    """Interface of `Backward` for the functions of this file."""

    units: Sequence[Unit]
    gathers: GatherLane
    reductions: ReduceLane
    comm: Comm
    comm_ctx: CommContext
    step: StepState

    def begin_passes(self, *, ends_step: bool) -> None: ...
    def end(self, *, joined: bool = True) -> None: ...
    def show_grads(self, *, joined: bool) -> None: ...
    def discard_step(self) -> None: ...


def join_skipped_passes(backward: BackwardPasses) -> None:
    """Run the collectives of a forward and a backward that this rank skipped.

    The rank gathers the same units as the others, and contributes zeros as gradients.

    Args:
        backward: The backward of the model.

    Note:
        Collective: every rank that skipped the forward and the backward must call it.
    """
    step = backward.step
    gathers = backward.gathers
    with torch.no_grad():
        if step.forwards == 0:
            gathers.begin(gathers.schedule.forward)
            gathers.end()
        backward.begin_passes(ends_step=step.is_boundary)
        backward.end(joined=False)


def reduce_step(backward: BackwardPasses) -> None:
    """Reduce the gradients of all backwards since the last step.

    It is called before a step if no backward reduced gradients, because none of them was known to
    be the last one.

    Args:
        backward: The backward of the model.

    Note:
        Collective: every rank must call it.
    """
    with torch.no_grad():
        backward.begin_passes(ends_step=True)
        backward.reductions.reduce_remaining()
        backward.comm_ctx.copy_engine.synchronize()
        backward.gathers.end()
        backward.show_grads(joined=False)


def recover(backward: BackwardPasses) -> None:
    """Recover from a forward or backward that an exception ended.

    Collectives in flight are finished, and incomplete gradients are dropped.

    Args:
        backward: The backward of the model, whose phase is not idle.
    """
    step = backward.step
    backward.comm.waits.withdraw_error()
    interrupted = step.phase
    step.enter(Phase.IDLE)
    leave_forwards(step)
    with torch.no_grad():
        backward.gathers.end()
        for unit in backward.units:
            unit.unpin()
        if interrupted is Phase.BACKWARD:
            backward.discard_step()
    step.forwards = 0


def post_forward_error(unit: Unit, policy: Policy, comm: Comm) -> None:
    """Post the exception that ends a forward to the other ranks.

    The function is called while the exception is handled.

    Args:
        unit: The unit whose forward has raised.
        policy: The dtypes of the model.
        comm: The communicator of all ranks of the job.
    """
    error = sys.exception()
    if error is None or ends_recomputation(error):
        return
    if unit.number == 0 and policy.compute is not None:
        _explain_dtypes(error, unit.module, policy.compute)
    comm.waits.post_error(error)


def _explain_dtypes(error: BaseException, model: nn.Module, compute: torch.dtype) -> None:
    """Add a note to torch's error about mixed dtypes, because wrapping casts the weights only.

    Args:
        error: The error that ended the forward.
        model: The wrapped model.
        compute: The dtype of its weights.
    """
    if not isinstance(error, RuntimeError) or "type" not in str(error):
        return
    others = []
    for prefix, module in model.named_modules():
        for name, buffer in module.named_buffers(recurse=False):
            is_other = buffer.is_floating_point() and buffer.dtype != compute
            if is_other and not isinstance(module, BATCH_NORMS):
                others.append(f"'{prefix}.{name}'" if prefix else f"'{name}'")
    named = ", ".join(others[:3])
    if len(others) > 3:
        named += f" and {len(others) - 3} more"
    which = f" Buffers with another dtype are {named}." if others else ""
    error.add_note(
        f"[deepseek_zero] The weights were cast to {compute}. Tensors that forward creates keep "
        f"their dtype.{which}\n"
        "  What to do: cast them where they are used, as in `x + self.table.to(x.dtype)`, or cast "
        "the buffers before wrapping; torch_autocast casts both in each operation."
    )


def leave_forwards(step: StepState) -> None:
    """Forget forwards that an exception ended, and exit the context managers they entered.

    Args:
        step: The state of the model's step.
    """
    for frame in reversed(step.active):
        for context in reversed(frame.contexts):
            context.__exit__(None, None, None)
    step.active.clear()
    step.root_calls.clear()


def is_nested(root: Unit, outermost: Unit) -> bool:
    """Return whether a forward of the root that begins now is inside another forward.

    The outermost unit may have ended without a call of its hook after forward, because torch calls
    no hook after a KeyboardInterrupt.

    Args:
        root: The unit whose forward begins.
        outermost: The outermost unit whose forward has not ended.
    """
    calls = calls_under_way(outermost.module)
    return calls > 1 if outermost is root else calls > 0


def reduce_late(lane: ReduceLane) -> None:
    """Reduce the gradients that arrived too late on any rank, before a step.

    A gradient is late if it arrives after its unit was reduced, for example if two reentrant
    checkpoints share a block.

    Args:
        lane: The reduce lane of the model.

    Note:
        Collective: every rank must call it if any rank has late gradients.
    """
    mask = torch.zeros(len(lane.units), dtype=torch.uint8, device="cpu")
    mask[list(lane.late)] = 1
    agreed = lane.comm.all_gather_rows(mask, "late gradients").amax(dim=0)
    for unit in lane.order:
        if agreed[unit.number]:
            lane.reduce(unit)
    lane.wait()
    lane.late.clear()
    lane.complete_sums()
