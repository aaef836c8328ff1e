"""The inputs of a checkpoint on their way into a slab and back.

Where the slab is another device's memory they pass beside what that device computes, and come back before their turn.
Called by parking.py, which says when.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..tiers.ferry import CopyEngine, copy_engine_for
from ..tiers.tier import CopyEvent, Extent
from .form import TensorMeta
from .slab import ArenaBlock

ALIGNMENT = 64  # bytes at which a tensor begins


@dataclass
class OffloadedInputs:
    """The inputs of one checkpoint in the slab.  is_stored: sent to where the memory keeps them."""

    place: ArenaBlock
    forms: list[TensorMeta]
    is_stored: bool = False

    @property
    def extent(self) -> Extent:
        """What its place is a stretch of."""
        return self.place.slab.extent

    @property
    def nbytes(self) -> int:
        return sum(form.nbytes for form in self.forms)

    def parts(self, bytes_: Tensor) -> list[tuple[TensorMeta, Tensor]]:
        """Each form with its bytes."""
        found: list[tuple[TensorMeta, Tensor]] = []
        start = 0
        for form in self.forms:
            found.append((form, bytes_[start : start + form.nbytes]))
            start += rounded(form.nbytes, ALIGNMENT)
        return found


class ActivationCopy:
    """Between one slab and whatever device its tensors are of."""

    def __init__(self) -> None:
        self._ferries: dict[torch.device, CopyEngine] = {}
        self._coming: dict[int, tuple[CopyEvent, list[Tensor]]] = {}

    def copy_out(self, tensors: Sequence[Tensor], stay: OffloadedInputs) -> None:
        """Copy them into their place; they are kept until that is over."""
        bytes_, sources = stay.place.part(), list(tensors)
        with self._copy_engine(stay).d2h(stay.extent, sources.clear):
            for tensor, (form, part) in zip(tensors, stay.parts(bytes_), strict=True):
                form.write(tensor, part)

    def copy_in(self, number: int, stay: OffloadedInputs) -> list[Tensor]:
        """New tensors with their bytes, for the device to use."""
        crossing, found = self._coming.pop(number) if number in self._coming else self._start(stay)
        crossing.wait_stream()
        return found

    def prefetch(self, number: int, stay: OffloadedInputs) -> None:
        """Let them come while others are used, where that takes time."""
        if number not in self._coming and self._copy_engine(stay).overlaps:
            self._coming[number] = self._start(stay)

    def discard(self, number: int) -> None:
        """Nobody will ask for them again."""
        self._coming.pop(number, None)

    def synchronize(self) -> None:
        """Nothing more is sent for a while: what was is not kept any longer."""
        for ferry in self._ferries.values():
            ferry.synchronize()

    def _start(self, stay: OffloadedInputs) -> tuple[CopyEvent, list[Tensor]]:
        bytes_, found = stay.place.look(), [form.empty() for form in stay.forms]
        with self._copy_engine(stay).h2d(stay.extent) as crossing:
            for tensor, (form, part) in zip(found, stay.parts(bytes_), strict=True):
                form.read(tensor, part)
        return crossing, found

    def _copy_engine(self, stay: OffloadedInputs) -> CopyEngine:
        """To the device of the tensors; where they wait in its own memory nothing crosses."""
        home = stay.extent.memory.device
        device = next((form.device for form in stay.forms if form.device != home), home)
        if device not in self._ferries:
            self._ferries[device] = CopyEngine() if device == home else copy_engine_for(device)
        return self._ferries[device]


def rounded(nbytes: int, unit: int) -> int:
    """Up to a multiple of a unit."""
    return -(-nbytes // unit) * unit
