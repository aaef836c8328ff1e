"""The settings of an optimizer's step, and what the planner needs of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from ..base.device import PerDevice
from ..kernels.check import pytorch_differs
from ..kernels.compiler import available, chosen
from ..kernels.rules import NAMES
from ..planner.update import ParamGroupPlan, UpdateSettings
from .updater import PrefetchSettings

# Elements per optimizer call (4 MiB of fp32 on the CPU): what is touched at once, and what is kept
# for it, stays small, and the call itself is a few per cent of its time.
TILE_NUMEL = PerDevice(cpu=1 << 20, accelerator=1 << 26)
# The same for a kernel on a CPU: 16 threads then get a million elements each.
KERNEL_TILE_NUMEL = 1 << 24
TILE_ALIGNMENT = 1 << 12  # elements; tiles end where pages do, whatever the size of an element


@dataclass(frozen=True)
class StepSettings:
    """The settings of a step.

    Attributes:
        max_norm: The largest gradient norm; 0 switches clipping off.
        tile_numel: The elements of one optimizer call on the training device (sub_group_size).
        host_tile_numel: The elements of one call if the host updates.
        kernel_tile_numel: The elements of one call if a kernel updates states in memory.
        granularity: For each parameter group, how finely its state may be cut; "element" by
            default.
        check_finite: Skip a step whose gradient is not finite, even without loss scaling.
        keep_grads: Keep the gradients after the step.
        flow: How many tiles are fetched ahead.
        can_defer: Updates of offloaded weights may run after the step, by a policy.
        by_unit: Tiles end where units do, since a policy updates some units in backward.
        early_on_device: These may be units whose weights are on the training device.
        undo_bytes: The bytes of the log that undoes such updates.
        kernels: What computes updates that have a kernel: "auto", "numba" or "torch".
    """

    max_norm: float = 0.0
    tile_numel: int = TILE_NUMEL.cpu
    host_tile_numel: int = TILE_NUMEL.cpu
    kernel_tile_numel: int = KERNEL_TILE_NUMEL
    granularity: tuple[str, ...] = ()  # one word per parameter group; "element" where there is none
    check_finite: bool = False
    keep_grads: bool = False
    flow: PrefetchSettings = field(default_factory=PrefetchSettings)
    can_defer: bool = False
    by_unit: bool = False
    early_on_device: bool = False
    undo_bytes: int = 0
    kernels: str = "auto"  # what computes updates that have a kernel: "auto", "numba" or "torch"

    @property
    def clips(self) -> bool:
        """Whether the norm of gradients is bounded."""
        return self.max_norm > 0


def update_settings_of(
    settings: StepSettings,
    optimizer: str,
    groups: Sequence[ParamGroupPlan],
    *,
    scales_grads: bool,
    undoes: bool,
) -> UpdateSettings:
    """Return a step's settings as the planner needs them.

    Args:
        settings: The settings of the step.
        optimizer: The name of the optimizer's class.
        groups: Its parameter groups.
        scales_grads: Gradients may be clipped or unscaled.
        undoes: A log undoes the updates of some units in backward.
    """
    undo_bytes = settings.undo_bytes if undoes else 0
    return UpdateSettings(
        optimizer,
        tuple(groups),
        settings.tile_numel,
        scales_grads=scales_grads,
        can_defer=settings.can_defer,
        by_unit=settings.by_unit,
        early_on_device=settings.early_on_device,
        undo_bytes=undo_bytes,
        kernels=_kernels_for(optimizer, settings.kernels),
        host_tile_numel=settings.host_tile_numel,
        kernel_tile_numel=settings.kernel_tile_numel,
        gpu_kernels=chosen(settings.kernels) != "torch",
    )


def _kernels_for(optimizer: str, wanted: str) -> str:
    """Return what computes updates on a CPU: "auto", "numba" or "torch".

    With "auto", kernels update only ranks with many elements. PyTorch updates the others, so both
    must have the same
    bits. wanted: the word of the configuration.
    """
    found = available(wanted)
    rule = NAMES.get(optimizer)
    if found == "auto" and rule is not None and pytorch_differs(rule):
        return "torch"
    return found
