"""Recomputation: torch's non-reentrant checkpoint, with its inputs offloaded until backward asks
for them.

torch keeps what it is passed. It is passed slots in place of activations, and a function that fills
them: in forward with the tensors themselves, in a recomputation with restored copies. It needs no
hook and no private name of torch's.

[Note: one configuration per process] DeepSpeed's `checkpoint(function, *args)` has no argument for
where inputs are offloaded to, so `_Process` holds that, for the whole process.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from ..base.capabilities import Capability
from ..base.device import default_device
from ..comm.collectives import Comm
from ..sharding.saved_tensor_hooks import others_see
from ..tiers.disk import Disk, DiskSettings
from ..tiers.host import HostMemory
from ..tiers.tier import Storage, Tier, TierMemory
from .offload import ActivationOffload, extract_tensors, insert_tensors
from .partition import PartitionedInputs
from .policy import compiled_contexts, contexts, operators_of
from .profile import Profile


@dataclass(frozen=True)
class RecomputeSettings:
    """tier: the memory of the arena that the inputs of checkpoints are offloaded to; None: they
    stay in place.

    directory, disk: of the disk. checkpoints: how many the arena must hold; None: learned. profile:
    time each, once.
    policy: what is kept beside inputs instead of being computed again (policy.py); None: nothing is
    said of it.
    partitioned: each tensor-parallel rank keeps its share of inputs (partition.py), where there are
    such ranks.
    """

    tier: Tier | None = None
    directory: Path | None = None
    disk: DiskSettings = field(default_factory=DiskSettings)
    checkpoints: int | None = None
    profile: bool = False
    policy: tuple[str, ...] | None = None
    partitioned: bool = False


class Recompute:
    """The recomputation of one process: its settings, and the arena of offloaded inputs.

    tp: the ranks among which inputs are partitioned; None: they are not.
    """

    def __init__(self, settings: RecomputeSettings, tp: Comm | None = None) -> None:
        self.settings = settings
        self.tp = tp
        self._make_room()
        self.profile = Profile() if settings.profile else None
        self.operators = operators_of(settings.policy or ())

    def capabilities(self) -> list[Capability]:
        """Describe how inputs come and go in the memory that they are offloaded to."""
        return self.parking.memory.capabilities() if self.parking is not None else []

    def checkpoint(
        self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Run function(*args, **kwargs), to be computed again in backward.

        Inside the hooks of others (a checkpoint around this one, save_on_cpu) inputs are not
        offloaded: they are theirs to keep.
        """
        if self.operators and torch.is_grad_enabled():
            parking = None if others_see() else self.parking
            kwargs = {"context_fn": partial(contexts, self.operators, parking)} | kwargs
        inputs = (args, kwargs)
        if self.parking is not None and torch.is_grad_enabled() and not others_see():
            (args, kwargs), tensors = extract_tensors(inputs)
            if tensors:
                keeps = self.parking if self.partition is None else self.partition
                function = _Filled(function, tensors, keeps.park(tensors))
        call = partial(torch_checkpoint, function, *args, use_reentrant=False, **kwargs)
        if self.profile is None or not torch.is_grad_enabled():
            return call()
        return self.profile.timed(call, inputs)

    def reset(self) -> None:
        """Forget the learned size and free the memory; graphs that are still alive keep theirs."""
        self.close()
        self._make_room()

    def _make_room(self) -> None:
        tier = self.settings.tier
        if tier is None and self.tp is not None:
            tier = Tier.DEVICE  # shares wait in an arena: a view of an input would keep all of it
        self.parking: ActivationOffload | None = None
        self.partition: PartitionedInputs | None = None
        if tier is not None:
            open_memory = partial(_memory_for, replace(self.settings, tier=tier))
            self.parking = ActivationOffload(open_memory, self.settings.checkpoints)
        if self.parking is not None and self.tp is not None:
            self.partition = PartitionedInputs(self.tp, self.parking)

    def close(self) -> None:
        if self.parking is not None:
            self.parking.close()

    def explain(self) -> list[str]:
        """Return one line, if anything was offloaded."""
        return [self.parking.explain()] if self.parking is not None and self.parking.slabs else []

    def offloaded(self) -> list[Storage]:
        """Return the storages that hold offloaded inputs now."""
        return [slab.storage for slab in self.parking.slabs] if self.parking is not None else []


class Parked(Protocol):
    """The inputs of one checkpoint, wherever they are."""

    def restore(self) -> list[Tensor]: ...


class _Filled:
    """A function whose slots are filled when it is called: at first with the tensors themselves,
    then with restored copies.

    It lives as long as the graph can be recomputed, and the offloaded inputs as long as it.
    """

    def __init__(self, function: Callable[..., Any], tensors: list[Tensor], parked: Parked) -> None:
        self.function = function
        self.parked = parked
        self.tensors: list[Tensor] | None = tensors

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        tensors = self.tensors
        self.tensors = None
        if tensors is None:
            tensors = [tensor.requires_grad_() for tensor in self.parked.restore()]
        args, kwargs = insert_tensors((args, kwargs), tensors)
        return self.function(*args, **kwargs)


def _memory_for(settings: RecomputeSettings) -> TierMemory:
    """Open the memory of a tier. On a CPU device and host share one memory, so both tiers are the
    same; beside a GPU the host's is page-locked.
    """
    if settings.tier is Tier.NVME:
        return Disk(settings.directory or Path(), settings.disk)
    return HostMemory(pinned=default_device().type == "cuda" and settings.tier is Tier.HOST)


class Preserved(Protocol):
    """Something that a recomputation must find as forward did: streams of random numbers, say."""

    def get_states(self) -> Any: ...

    def set_states(self, states: Any) -> None: ...


class _Replayed:
    """A function that finds what is preserved as its first call did, whenever it is called
    again.
    """

    def __init__(self, function: Callable[..., Any], preserved: list[Preserved]) -> None:
        self.function = function
        self.preserved = preserved
        self.states: list[Any] | None = None

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
    """Set what `checkpoint` does in this process from now on; raise `StorageError` if the directory
    cannot be used.

    tp: as `Recompute` takes it.
    """
    new = Recompute(settings, tp)
    old = _Process.recompute
    _Process.recompute = new
    if old is not None:
        old.close()
    return new


def preserve(states: Preserved) -> None:
    """Let recomputations of this process find these states as their forwards did, from now on."""
    if not any(each is states for each in _Process.preserved):
        _Process.preserved.append(states)


def current() -> Recompute | None:
    """Return the last configuration; None if there is none."""
    return _Process.recompute


def release(recompute: Recompute | None) -> None:
    """Undo a `configure`, unless another came after it."""
    if recompute is None:
        return
    recompute.close()
    _forget(recompute)


def release_with(owner: object, recompute: Recompute) -> None:
    """Undo a `configure` when `owner` is collected, if nothing released it before."""
    weakref.finalize(owner, _forget, recompute).atexit = False


def _forget(recompute: Recompute) -> None:
    # Without closing it: a finalizer may run anywhere, and a disk's threads end by themselves when
    # it goes.
    if _Process.recompute is recompute:
        _Process.recompute = None


def checkpoint(
    function: Callable[..., Any], *args: Any, use_reentrant: bool | None = None, **kwargs: Any
) -> Any:
    """Run `function` and compute its activations again in backward instead of keeping them.

    kwargs: the function's, and torch.utils.checkpoint's own (preserve_rng_state, context_fn, ...).
    use_reentrant: for callers that pass it to torch's; recomputation is never reentrant here.
    """
    if _Process.preserved and torch.is_grad_enabled():
        function = _Replayed(function, list(_Process.preserved))
    recompute = _Process.recompute
    if recompute is None or torch.compiler.is_compiling():
        if recompute is not None and recompute.operators:
            kwargs = {"context_fn": compiled_contexts(recompute.operators)} | kwargs
        return torch_checkpoint(function, *args, use_reentrant=False, **kwargs)
    return recompute.checkpoint(function, args, kwargs)
