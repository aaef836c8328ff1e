"""The settings of an optimizer step, and their translation for the planner."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from ..base.device import PerDevice
from ..kernels.check import pytorch_differs
from ..kernels.choice import available, chosen
from ..kernels.rules import NAMES
from ..planner.update import ParamGroupPlan, UpdateSettings
from .tile_memory import PrefetchSettings

# Elements per optimizer call (4 MiB of fp32 on the CPU). Working set and scratch memory stay small,
# and the overhead of a call is a few per cent of its time.
TILE_NUMEL = PerDevice(cpu=1 << 20, accelerator=1 << 26)
# The same for a kernel on a CPU, so that each of 16 threads gets a million elements
KERNEL_TILE_NUMEL = 1 << 24
TILE_ALIGNMENT = 1 << 12  # elements; tiles end at page boundaries for every element size


@dataclass(frozen=True)
class StepSettings:
    """The settings of an optimizer step.

    Attributes:
        max_norm: The largest gradient norm; 0 switches clipping off.
        tile_numel: The elements per optimizer call on the training device (sub_group_size).
        host_tile_numel: The elements per call if the host updates.
        kernel_tile_numel: The elements per call if a kernel updates states in memory.
        granularity: For each parameter group, "element" (the default) or "tensor": where its state
            may be cut.
        check_finite: Whether to skip a step whose gradient is not finite, even without loss
            scaling.
        keep_grads: Whether to keep the gradients after the step.
        flow: How many tiles (lists of shards that are updated together) are fetched before their
            update, or are still being stored after it.
        can_defer: Whether a policy may run updates of offloaded weights after the step.
        by_unit: Whether tiles end at unit boundaries, because a policy updates some units in
            backward.
        on_accelerator: Whether the training device is not a CPU.
        undo_bytes: The size in bytes of the log that undoes updates made in backward.
        kernels: The implementation of updates that have a kernel: "auto", "compiled" or "torch".
    """

    max_norm: float = 0.0
    tile_numel: int = TILE_NUMEL.cpu
    host_tile_numel: int = TILE_NUMEL.cpu
    kernel_tile_numel: int = KERNEL_TILE_NUMEL
    granularity: tuple[str, ...] = ()  # one value per parameter group; "element" if missing
    check_finite: bool = False
    keep_grads: bool = False
    flow: PrefetchSettings = field(default_factory=PrefetchSettings)
    can_defer: bool = False
    by_unit: bool = False
    on_accelerator: bool = False
    undo_bytes: int = 0
    kernels: str = "auto"

    @property
    def clips(self) -> bool:
        """Whether the gradient norm is clipped."""
        return self.max_norm > 0


def update_settings_of(
    settings: StepSettings,
    optimizer: str,
    groups: Sequence[ParamGroupPlan],
    *,
    scales_grads: bool,
    undoes: bool,
) -> UpdateSettings:
    """Convert the settings of a step to those that the planner needs.

    Args:
        settings: The settings of the optimizer step.
        optimizer: The name of the optimizer's class.
        groups: The optimizer's parameter groups, by names of parameters.
        scales_grads: Whether gradients may be clipped or unscaled.
        undoes: Whether a log can undo the updates that run in backward.
    """
    undo_bytes = settings.undo_bytes if undoes else 0
    return UpdateSettings(
        optimizer,
        tuple(groups),
        settings.tile_numel,
        scales_grads=scales_grads,
        can_defer=settings.can_defer,
        by_unit=settings.by_unit,
        on_accelerator=settings.on_accelerator,
        undo_bytes=undo_bytes,
        kernels=_kernels_for(optimizer, settings.kernels),
        host_tile_numel=settings.host_tile_numel,
        kernel_tile_numel=settings.kernel_tile_numel,
        gpu_kernels=chosen(settings.kernels) != "torch",
    )


def _kernels_for(optimizer: str, wanted: str) -> str:
    """Return the implementation of updates on a CPU: "auto", "compiled" or "torch".

    With "auto", kernels update only ranks with many elements and PyTorch updates the others, so
    both must compute the same bits.

    Args:
        optimizer: The name of the optimizer's class.
        wanted: The configured value.
    """
    found = available(wanted)
    rule = NAMES.get(optimizer)
    if found == "auto" and rule is not None and pytorch_differs(rule):
        return "torch"
    return found
