"""The main weight of one group: the values that the optimizer updates.

It has its own buffer, shares the weight's storage (fp32), or is split (split_main_weight.py).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor

from ..base.device import CPU
from ..planner.spec import Placement
from ..precision.compact import round_to_bf16
from ..precision.policy import cast_master
from ..tiers.tier import CopyEngine, Storage
from .buffer import FlatBuffer


@dataclass(eq=False)
class MasterWeight:
    """This rank's part of the main weight of one group, which the optimizer updates.

    Ranges [place, end) of the methods count elements of this rank's main weight.

    Attributes:
        buffer: The values; the int16 remainders if the main weight `is_split`.
        dtype: The dtype of the values.
        weight: This rank's part of the weight that the model computes with; None if the main weight
            is that weight, or if the weight follows the main weight by differences.
        is_exposed: Whether the weight is a plain parameter between steps, so a program may change
            it.
        update_device: The device that updates the main weight.
        copy_engine: Copies between the host and the device.
    """

    buffer: FlatBuffer
    dtype: torch.dtype
    weight: FlatBuffer | None = None
    is_exposed: bool = True
    update_device: torch.device = CPU
    copy_engine: CopyEngine = field(default_factory=CopyEngine)
    #: The values are split into the bf16 weight and a remainder.
    is_split: ClassVar[bool] = False

    def __post_init__(self) -> None:
        if self.update_device == CPU:
            self.on_device.staged = self.copy_engine.staged_tile(
                self.on_device.memory, is_read=self.weight is None or self.is_split
            )

    @property
    def on_device(self) -> FlatBuffer:
        """Return the buffer on the training device: the weight if there is one."""
        return self.buffer if self.weight is None else self.weight

    @property
    def is_rounded(self) -> bool:
        """Return whether the values are stored only in a narrower dtype than `dtype`."""
        return self.buffer.spec.dtype != self.dtype

    @property
    def is_copied_for_update(self) -> bool:
        """Return whether an update needs a copy of the values on its device."""
        return not self.is_updated_in_place or self.buffer.storage.is_offloaded

    @property
    def is_updated_in_place(self) -> bool:
        """Return whether the optimizer works on the values themselves, not on a copy."""
        return not self.is_rounded and self.buffer.memory.device == self.update_device

    @property
    def placement(self) -> Placement:
        """Return the placement of the main weight."""
        return self.buffer.spec.placement

    # -- values

    def in_place_view(self, place: int, end: int) -> Tensor | None:
        """Return a flat, writable view of the values; None unless `is_updated_in_place`."""
        return self.buffer.write(place, end) if self.is_updated_in_place else None

    def read(
        self, place: int, end: int, out: Tensor | None = None, scratch: Tensor | None = None
    ) -> Tensor:
        """Return elements [place, end), flat, in the main weight's dtype: a view or a copy.

        Args:
            place: The first element of the range.
            end: The end of the range.
            out: The output; None to return a view or a new tensor.
            scratch: Scratch memory to join the two halves.
        """
        values = self.buffer.at_update_device(place, end)
        return values.to(self.dtype) if out is None else out.copy_(values)

    def read_now(self, place: int, end: int) -> Tensor:
        """Return the current values, read-only, as `read`; a pending update does not run."""
        return self.buffer.read_now(place, end).to(self.dtype)

    def write_consuming(
        self, place: int, end: int, values: Tensor, chance: Tensor | None = None
    ) -> None:
        """Write new values into the main weight, and overwrite `values` as scratch memory.

        Args:
            place: The first element of the range.
            end: The end of the range.
            values: The new values, flat, in the main weight's dtype; arbitrary afterwards.
            chance: Random bits for stochastic rounding, if the main weight `is_rounded`.
        """
        self.buffer.guard.before_write()
        own = self.buffer.at_update_device(place, end)
        if chance is not None:
            round_to_bf16(values, own, chance)
        else:
            cast_master(values, own)

    def copy_to_weight(self, place: int, end: int) -> None:
        """Cast the values into the weight, unless it is the main weight or half of it."""
        if self.weight is not None:
            self.buffer.guard.before_write()
            values = self.buffer.elements(place, end)
            weight = self.weight.at_update_device(place, end)
            staging = staging_like(weight, values)
            cast_master(values, staging)
            if staging is not weight:
                weight.copy_(staging)

    def offloaded(self) -> list[Storage]:
        """Return the storages of the values that are not on the training device."""
        buffers = [self.buffer] if self.weight is None else [self.buffer, self.weight]
        return [buffer.storage for buffer in buffers if not buffer.storage.on_device]


def staging_like(target: Tensor, values: Tensor) -> Tensor:
    """Return `target`, or a tensor like it on the device of `values`, to be copied there later."""
    if target.device == values.device:
        return target
    return torch.empty_like(target, device=values.device)
