"""What of a tensor its bytes do not say, and how its bytes are copied out of it and back.  Called by parking.py."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor


@dataclass(frozen=True)
class TensorMeta:
    """The dtype, shape, strides and device of a tensor.

    Where its elements lie without gaps, in whatever order (a transpose, an expanded tensor), the stretch of memory
    they lie in is copied as it is.  A slice with gaps is copied element by element, and has its gaps again afterwards:
    a kernel that looks at strides takes the same way twice.
    """

    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]
    device: torch.device

    @classmethod
    def of(cls, tensor: Tensor) -> TensorMeta:
        return cls(tensor.dtype, tensor.size(), tensor.stride(), tensor.device)

    @property
    def nbytes(self) -> int:
        """Bytes to keep."""
        return min(self._span, prod(self.size)) * self.dtype.itemsize

    @property
    def _span(self) -> int:
        """Elements from the first to the last."""
        if 0 in self.size:
            return 0
        return 1 + sum((length - 1) * step for length, step in zip(self.size, self.stride, strict=True))

    def _gapless(self, tensor: Tensor, flat: Tensor) -> tuple[Tensor, Tensor]:
        """The two as views that have the same elements in the same order."""
        if self._span <= prod(self.size):
            return tensor.as_strided((self._span,), (1,)), flat
        return tensor, flat.view(self.size)

    def write(self, tensor: Tensor, bytes_: Tensor) -> None:
        """Copy a tensor of this form into `nbytes` bytes; on a device in the stream of the moment."""
        source, target = self._gapless(tensor.detach(), bytes_.view(self.dtype))
        target.copy_(source, non_blocking=True)

    def empty(self) -> Tensor:
        """A new tensor of this form, with arbitrary contents."""
        return torch.empty_strided(self.size, self.stride, dtype=self.dtype, device=self.device)

    def read(self, tensor: Tensor, bytes_: Tensor) -> None:
        """Undo `write`, into a tensor of this form."""
        target, source = self._gapless(tensor, bytes_.view(self.dtype))
        target.copy_(source, non_blocking=True)
