"""Free the memory of an engine's states between two phases of a program.

It maps tensors to DeepSpeed's kinds of state, and refuses the use of offloaded states.
tiers/parked.py moves the bytes.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import NoReturn

import torch
from torch import Tensor

from ..base.device import without_torch_function
from ..base.errors import UsageError, brief
from ..base.log import logger
from ..base.memory import trim_heap
from ..optim.sharded import ShardedOptimizer
from ..report.measure import moments_of
from ..sharding.buffer import FlatBuffer, StateGuard
from ..sharding.param_group import ParamGroup
from ..sharding.regroup import drop_gradient_buffers, is_empty
from ..sharding.runtime import Runtime
from ..tiers.parked import ParkedStorages

OPTIM_STATES = "optim_states"
HP_PARAMS = "hp_params"
LP_PARAMS = "lp_params"
LP_GRADS = "lp_grads"
GRAD_BUFFER = "contiguous_grad_buffer"
KINDS = (OPTIM_STATES, HP_PARAMS, LP_PARAMS, LP_GRADS, GRAD_BUFFER)


@dataclass
class StateOffload:
    """Moves the states of one engine to other memory between two phases of a program.

    Attributes:
        offloaded: The kinds of state that are offloaded now.
        runtime: The wrapped model, whose weights and gradients are moved.
        optimizer: The sharded optimizer, whose states are moved; None if there is none.
    """

    runtime: Runtime
    optimizer: ShardedOptimizer | None
    offloaded: set[str] = field(default_factory=set)
    _parked: list[ParkedStorages] = field(default_factory=list)
    _undo: list[Callable[[], None]] = field(default_factory=list)

    def offload(
        self, kinds: Collection[str], *, pinned: bool, in_file: bool, folder: str | None
    ) -> None:
        """Offload the states of these kinds, and free their memory.

        States that have already been offloaded are not moved again.

        Args:
            kinds: The kinds of state to offload, for example "optim_states"
                (`OffloadStateTypeEnum`).
            pinned: Whether to page-lock the host memory.
            in_file: Whether to write to a file, even if there is an accelerator.
            folder: The folder of the file; None for the system's folder for temporary files.

        Note:
            Collective: every rank must call it, between two steps.
        """
        new = set(kinds) - self.offloaded
        if not new:
            return
        if not self.offloaded and self.optimizer is not None:
            self.optimizer.finish()
        with torch.no_grad():
            self.runtime.gathers.reshard_all()
        self.runtime.comm_ctx.copy_engine.synchronize()
        # Other ranks may still read the weights of this rank
        self.runtime.comm.whole.barrier("offload_states")
        parked = ParkedStorages(
            Path(folder or tempfile.gettempdir()), pinned=pinned, in_file=in_file
        )
        self._parked.append(parked)
        # Set first, so that reload_states also restores the states after a failure below
        self.offloaded |= new
        self._refuse_uses(new)
        kind = self.runtime.comm_ctx.pool.device.type
        parked.park(each for each in self._tensors(new) if in_file or each.device.type == kind)
        if LP_GRADS in new:
            for group in self.runtime.trained_groups:
                if is_empty(group.gradient):
                    drop_gradient_buffers(group.gradient)
        if GRAD_BUFFER in new:
            self._drop_buffers()
        trim_heap()
        if kind == "cuda":
            torch.cuda.empty_cache()

    def reload(self) -> None:
        """Restore all offloaded states. A second call does nothing.

        Note:
            Collective: every rank must call it.
        """
        if not self.offloaded:
            return
        self._restore()
        # From here on other ranks read the weights of this rank
        self.runtime.comm.whole.barrier("reload_states")

    def release(self) -> None:
        """Restore all states of an engine that is destroyed, to keep its model readable.

        If there is no memory for the states, or their file cannot be read, they are dropped with a
        warning, and every use of them raises.
        """
        try:
            self._restore()
        except (MemoryError, RuntimeError) as error:
            logger.warning(
                "destroy() could not reload the states that offload_states() moved, and "
                f"dropped them: {brief(error)}. Call reload_states() before destroy() to keep them."
            )
            for parked in self._parked:
                parked.drop()
            self._parked = []

    def _restore(self) -> None:
        for parked in self._parked:
            parked.restore()
        for group in self.runtime.groups:
            group.guard.refusal = None
        for undo in reversed(self._undo):
            undo()
        self._parked = []
        self._undo = []
        self.offloaded = set()

    def refuse(self) -> None:
        """Raise `UsageError` if any state is offloaded."""
        if self.offloaded - {GRAD_BUFFER, LP_GRADS}:
            refuse_offloaded_state()

    # -- selection of tensors

    def _tensors(self, kinds: Collection[str]) -> Iterator[Tensor]:
        groups = self.runtime.groups
        weights = {_address(group.weight.memory) for group in groups}
        if OPTIM_STATES in kinds:
            yield from self._moments()
            for group in groups:
                yield from group.gradient.reduction.tensors()
        for group in groups:
            master = group.master.buffer if group.master is not None else None
            # A main weight that is the weight itself belongs to the weights, which a program may
            # still read.
            is_own = master is not None and _address(master.memory) not in weights
            if HP_PARAMS in kinds and master is not None and is_own:
                yield from _in_memory(master)
            if LP_PARAMS in kinds:
                yield from _in_memory(group.weight)
                yield from (buffer.memory for buffer in group.weight_gather.buffers())
            for kept in group.gradient.kept.values() if LP_GRADS in kinds else ():
                if kept.is_full and kept.buffer is not None:
                    yield from _in_memory(kept.buffer)

    def _moments(self) -> Iterator[Tensor]:
        optimizer = self.optimizer
        if optimizer is None:
            return
        for tensor in moments_of(optimizer.inner.state):  # type: ignore[arg-type]
            if tensor is not None and not optimizer.scratch.is_placeholder(tensor):
                yield tensor
        yield from optimizer.moments.on_device()
        for storage in optimizer.moments.offloaded():
            if not storage.is_offloaded:
                yield storage.memory

    def _drop_buffers(self) -> None:
        """Drop the buffers whose contents are not needed between two steps."""
        for group in self.runtime.groups:
            group.comm_ctx.pool.clear()
        if self.optimizer is not None:
            scratch = self.optimizer.scratch
            for what in {what for what, _ in scratch.kept} - {"nothing", "undo"}:
                scratch.drop(what)

    # -- refusals

    def _refuse_uses(self, kinds: Collection[str]) -> None:
        """Make every use of these states raise until `reload`."""
        if not set(kinds) & {OPTIM_STATES, HP_PARAMS, LP_PARAMS}:
            return
        guard = OffloadedGuard()
        for group in self.runtime.groups:
            group.guard.refusal = refuse_offloaded_state  # refuses writes and therefore updates
            master = group.master
            buffers = list[FlatBuffer]()
            if master is not None:
                is_weight = group.plan.master_is_weight
                if (LP_PARAMS if is_weight else HP_PARAMS) in kinds:
                    buffers.append(master.buffer)
                if LP_PARAMS in kinds and master.weight is not None:
                    buffers.append(master.weight)
            if LP_PARAMS in kinds:
                buffers += [group.weight, *group.weight_gather.buffers()]
                self._hide_parameters(group)
            for buffer in buffers:
                if buffer.guard is not guard:
                    self._undo.append(partial(setattr, buffer, "guard", buffer.guard))
                    buffer.guard = guard

    def _hide_parameters(self, group: ParamGroup) -> None:
        """Make parameters that are whole on this rank raise if their values are used.

        Sharded parameters do this anyway.
        """
        if group.is_sharded:
            return
        for member in group.members:
            with without_torch_function():
                member.reshard()

        def show() -> None:
            for member in group.members:
                member.unshard(group.weight.view(member.slot))

        # These run in reverse order, so this one runs after the guards are restored
        self._undo.insert(0, show)


def _in_memory(buffer: FlatBuffer) -> list[Tensor]:
    """Return the memory of a buffer; none if its elements are elsewhere between uses."""
    return [] if buffer.storage.is_offloaded else [buffer.memory]


def _address(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


class OffloadedGuard(StateGuard):
    """A guard that raises on every access to an offloaded state."""

    is_offloaded = True

    def before_read(self) -> None:
        """Raise `UsageError`, because the state is offloaded."""
        refuse_offloaded_state()

    def before_write(self) -> None:
        """Raise `UsageError`, because the state is offloaded."""
        refuse_offloaded_state()


def refuse_offloaded_state() -> NoReturn:
    """Raise the `UsageError` for the use of an offloaded state."""
    raise UsageError(
        "a state is used that engine.offload_states() has moved.",
        "Its memory was freed.",
        "call engine.reload_states() on all ranks before the next forward, step, save or load.",
    )
