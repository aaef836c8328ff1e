"""Frees memory of gradients and buffers that is idle between their uses."""

from __future__ import annotations

from ..base.device import CPU
from ..base.memory import KEPT_BYTES, return_pages
from ..planner.spec import P
from ..sharding.grad_sum import GradState
from ..sharding.hooks import weak_hook
from ..sharding.pool import has_pages_to_return
from ..sharding.runtime import Runtime


def free_idle_memory(runtime: Runtime) -> None:
    """Free memory of a model between its uses, from now on.

    Args:
        runtime: The runtime of the model.
    """
    if runtime.comm_ctx.pool.device != CPU:
        runtime.forward.before_first_forwards.append(weak_hook(runtime, _free_gradients))
    elif not runtime.settings.streams_weights:  # otherwise the pages would be faulted in at once
        runtime.backward.after_drops.append(weak_hook(runtime, _return_idle_pages))


def _free_gradients(runtime: Runtime) -> None:
    """Free the buffers of empty, replicated gradients until the next backward.

    A buffer that is slow to allocate again is kept: on a CPU, or if other ranks use it.
    """
    for group in runtime.trained_groups:
        gradient = group.gradient
        is_alone = group.comm_ctx.comm.size == 1 and gradient.reduction.sums_all
        is_unused = gradient.sum.state is GradState.EMPTY and gradient.summand.buffer is None
        if gradient.sum.spec.placement is P and is_alone and is_unused:
            gradient.sum.drop()


def _return_idle_pages(runtime: Runtime) -> None:
    """Return the pages of large idle CPU buffers to the system after a step.

    The pages of the first `KEPT_BYTES` are kept, so that the next step has fewer page faults.
    """
    pool = runtime.comm_ctx.pool
    kept = 0
    for tensor in filter(has_pages_to_return, pool.idle()):
        kept += tensor.nbytes
        if kept > KEPT_BYTES:
            pool.comm.wait_until_read(tensor)
            return_pages(tensor)
