"""Recomputation: torch's non-reentrant checkpoint with offloaded inputs.

torch keeps the arguments that it is passed. It is passed placeholders instead of activations, and a
function that replaces them: by the original tensors in forward, and by restored copies in a
recomputation. This needs no hooks and no private API of torch.

[Note: one configuration per process] DeepSpeed's `checkpoint(function, *args)` has no argument for
the place of offloaded inputs, so `_Process` holds the configuration of the whole process.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Protocol

import torch
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from ..base.capabilities import Capability
from ..base.device import default_device
from ..base.log import log_once
from ..base.nested import Args, Kwargs
from ..comm.agreement import AllRanks
from ..comm.collectives import Comm
from ..sharding.saved_tensor_hooks import others_see
from ..tiers.disk import Disk, DiskSettings
from ..tiers.host import HostMemory
from ..tiers.tier import Storage, Tier, TierMemory
from .offload import ActivationOffload, ParkedTensors, extract_tensors, insert_tensors
from .partition import InputShare, PartitionedInputs
from .policy import compiled_contexts, contexts, operators_of
from .profile import Profile


@dataclass(frozen=True)
class RecomputeSettings:
    """Settings of activation checkpoints, which recompute activations in backward.

    Attributes:
        tier: The memory to which inputs of checkpoints are offloaded; None keeps them in place.
        directory: The directory for offloaded inputs, if the tier is a disk.
        disk: How the disk is accessed.
        checkpoints: Number of checkpoints for which memory is reserved; None determines it in the
            first step.
        profile: Whether to measure and log the times of each checkpoint in one step.
        policy: The operators whose results are kept instead of being recomputed (`operators_of`);
            None if not set.
        partitioned: Whether to shard the inputs of checkpoints over the tensor-parallel ranks, if
            any.
    """

    tier: Tier | None = None
    directory: Path | None = None
    disk: DiskSettings = field(default_factory=DiskSettings)
    checkpoints: int | None = None
    profile: bool = False
    policy: tuple[str, ...] | None = None
    partitioned: bool = False


class Recompute:
    """Runs the activation checkpoints of one process, and offloads their inputs.

    Args:
        settings: Where inputs are kept, and which results are not recomputed.
        tp: The tensor-parallel ranks over which inputs are sharded if `settings.partitioned` is
            true; None keeps inputs whole.
    """

    def __init__(self, settings: RecomputeSettings, tp: Comm | None = None) -> None:
        self.settings = settings
        self.tp = tp
        self._open_memories()
        self.profile = Profile() if settings.profile else None
        self.operators = operators_of(settings.policy or ())

    def capabilities(self) -> list[Capability]:
        """Return how the memory of offloaded inputs is accessed, for a report."""
        return self.parking.memory.capabilities() if self.parking is not None else []

    def checkpoint(self, function: Callable[..., Any], args: Args, kwargs: Kwargs) -> Any:
        """Run ``function(*args, **kwargs)``, which is computed again in backward.

        Inside saved-tensor hooks of other code (an outer checkpoint, save_on_cpu), inputs are not
        offloaded, because that code decides how to keep them.

        Args:
            function: The function whose activations are not saved.
            args: Positional arguments of the function.
            kwargs: Keyword arguments of the function, and those of torch's checkpoint.

        Returns:
            The result of the function.
        """
        if self.operators and torch.is_grad_enabled():
            parking = None if others_see() else self.parking
            kwargs = {"context_fn": partial(contexts, self.operators, parking)} | kwargs
        inputs = (args, kwargs)
        if self.parking is not None and torch.is_grad_enabled() and not others_see():
            (args, kwargs), tensors = extract_tensors(inputs)
            if tensors:
                keeps = self.parking if self.partition is None else self.partition
                function = _Filled(function, inputs, keeps.park(tensors))
        call = partial(torch_checkpoint, function, *args, use_reentrant=False, **kwargs)
        if self.profile is None or not torch.is_grad_enabled():
            return call()
        return self.profile.timed(call, inputs)

    def reset(self) -> None:
        """Free the memory of offloaded inputs and discard its learned size.

        Graphs that still exist keep their inputs.
        """
        self.close()
        self._open_memories()

    def _open_memories(self) -> None:
        tier = self.settings.tier
        tp = self.tp if self.settings.partitioned else None
        if tier is None and tp is not None:
            # Shares need an arena: a view of an input would keep the whole input
            tier = Tier.DEVICE
        self.parking: ActivationOffload | None = None
        self.partition: PartitionedInputs | None = None
        if tier is not None:
            open_memory = partial(_memory_for, replace(self.settings, tier=tier))
            self.parking = ActivationOffload(open_memory, self.settings.checkpoints)
        if self.parking is not None and tp is not None:
            self.partition = PartitionedInputs(tp, self.parking)

    def close(self) -> None:
        """Free the memory of offloaded inputs, unless a graph still needs it."""
        if self.parking is not None:
            self.parking.close()

    def explain(self) -> list[str]:
        """Return one line about the memory of offloaded inputs, or nothing if none is reserved."""
        return [self.parking.explain()] if self.parking is not None and self.parking.slabs else []

    def offloaded(self) -> list[Storage]:
        """Return the memory ranges that are reserved for offloaded inputs."""
        return [slab.storage for slab in self.parking.slabs] if self.parking is not None else []


@dataclass(eq=False)
class _Filled:
    """A function whose placeholders are replaced when it is called.

    The first call uses the original arguments, because the function may change a list or a dict of
    the caller. Later calls use restored copies. It exists as long as the graph can be recomputed,
    and keeps the offloaded inputs for that time.
    """

    function: Callable[..., Any]
    inputs: tuple[Args, Kwargs] | None  # with the keywords of torch's checkpoint
    parked: ParkedTensors | InputShare

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        inputs = self.inputs
        self.inputs = None
        if inputs is None:
            tensors = [tensor.requires_grad_() for tensor in self.parked.restore()]
            args, kwargs = insert_tensors((args, kwargs), tensors)
        else:
            args, given = inputs
            kwargs = {name: given[name] for name in kwargs}
        return self.function(*args, **kwargs)


def _memory_for(settings: RecomputeSettings) -> TierMemory:
    """Open the memory of a tier.

    On a CPU, device and host share one memory, so both tiers are the same. With a GPU, host memory
    is page-locked.
    """
    if settings.tier is Tier.NVME:
        return Disk(settings.directory or Path(), settings.disk)
    return HostMemory(pinned=default_device().type == "cuda" and settings.tier is Tier.HOST)


class Preserved(Protocol):
    """Interface of state that is restored before a recomputation.

    An example is a set of random number generators, whose state must be that of the forward.
    """

    def get_states(self) -> Any:
        """Return the current state, in any form that `set_states` accepts."""
        ...

    def set_states(self, states: Any) -> None:
        """Restore a state that `get_states` returned, before a recomputation."""
        ...


@dataclass(eq=False)
class _Replayed:
    """A function that restores the preserved states of its first call in later calls."""

    function: Callable[..., Any]
    preserved: list[Preserved]
    states: list[Any] | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        now = [each.get_states() for each in self.preserved]
        if self.states is None:
            self.states = now
            return self.function(*args, **kwargs)
        self._set(self.states)
        try:
            return self.function(*args, **kwargs)
        finally:
            self._set(now)

    def _set(self, states: list[Any]) -> None:
        for each, state in zip(self.preserved, states, strict=True):
            each.set_states(state)


class _Process:
    """See [Note: one configuration per process]."""

    recompute: ClassVar[Recompute | None] = None
    preserved: ClassVar[list[Preserved]] = []


def configure(settings: RecomputeSettings, tp: Comm | None = None) -> Recompute:
    """Set how `checkpoint` keeps inputs and recomputes activations in this process.

    An earlier configuration is closed.

    Args:
        settings: Where inputs are kept, and which results are not recomputed.
        tp: The tensor-parallel ranks over which inputs are sharded if `settings.partitioned` is
            true; None keeps inputs whole.

    Returns:
        The new configuration, which `release` can undo.

    Raises:
        StorageError: The directory cannot be used.
    """
    new = Recompute(settings, tp)
    old = _Process.recompute
    _Process.recompute = new
    if old is not None:
        old.close()
    return new


def configure_for(
    settings: RecomputeSettings, comm: Comm, *, shards_tokens: bool
) -> Recompute | None:
    """Call `configure` if a run has settings for recomputation.

    Args:
        settings: The settings of the run. Default settings mean none.
        comm: The communicator of the world, whose ranks along "tp" may shard inputs.
        shards_tokens: Whether activations between layers are sharded over tokens along "tp", so
            inputs are not sharded again.

    Returns:
        The new configuration, or None without settings.

    Note:
        Collective: every rank of the world must call it.
    """
    if settings == RecomputeSettings():
        return None
    tp = comm.along.get("tp") if settings.partitioned else None
    if settings.partitioned and (tp is None or shards_tokens):
        why = (
            "they are already sharded over tokens"
            if tp is not None
            else "there are no tensor-parallel ranks"
        )
        log_once(f"partition_activations: inputs of checkpoints are not split: {why}.")
        tp = None
    with AllRanks(comm, "opening the nvme_path of activations"):
        return configure(settings, tp)


def preserve(states: Preserved) -> None:
    """Register state that every later recomputation of this process restores."""
    if not any(each is states for each in _Process.preserved):
        _Process.preserved.append(states)


def current() -> Recompute | None:
    """Return the object that the last `configure` of this process created, or None."""
    return _Process.recompute


def release(recompute: Recompute | None) -> None:
    """Close a configuration, and remove it unless a later `configure` replaced it."""
    if recompute is None:
        return
    recompute.close()
    _forget(recompute)


def release_with(owner: object, recompute: Recompute) -> None:
    """Remove a configuration when an object is garbage-collected.

    Args:
        owner: The object, for example the engine that called `configure`.
        recompute: The configuration to remove, unless another one has replaced it.
    """
    weakref.finalize(owner, _forget, recompute).atexit = False


def _forget(recompute: Recompute) -> None:
    # Without closing it: a finalizer may run anywhere, and the threads of a disk end when it is
    # freed
    if _Process.recompute is recompute:
        _Process.recompute = None


def checkpoint(
    function: Callable[..., Any], *args: Any, use_reentrant: bool | None = None, **kwargs: Any
) -> Any:
    """Run a function and recompute its activations in backward instead of saving them.

    The configuration of the process determines where the inputs are stored, and may name operators
    whose results are saved. The inputs stay in place if the process has no configuration, inside
    saved-tensor hooks of other code, and while torch compiles. If gradients are disabled, the
    function is only called.

    Args:
        function: The function whose activations are not saved. Backward calls it again.
        *args: Positional arguments of the function.
        use_reentrant: Accepted for compatibility with torch; recomputation is never reentrant.
        **kwargs: Keyword arguments of the function, and those of torch.utils.checkpoint
            (`preserve_rng_state`, `context_fn`, ...).

    Returns:
        The result of the function.
    """
    if _Process.preserved and torch.is_grad_enabled():
        function = _Replayed(function, list(_Process.preserved))
    recompute = _Process.recompute
    if recompute is None or torch.compiler.is_compiling():
        if recompute is not None and recompute.operators:
            kwargs = {"context_fn": compiled_contexts(recompute.operators)} | kwargs
        return torch_checkpoint(function, *args, use_reentrant=False, **kwargs)
    return recompute.checkpoint(function, args, kwargs)
