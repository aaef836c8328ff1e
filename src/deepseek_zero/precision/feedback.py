"""Error feedback: add a rank's compression errors to its next message.

With x the values to send, e the kept errors and Q the codec::

    it sends Q(x + e)        and keeps        e' = beta e + (1 - beta) (x + e - Q(x + e))

With beta 0 the whole error is kept; LoCo (zeropp_loco_param) keeps a running mean. Every operation
is elementwise IEEE fp32 until e' is rounded to its codec. The bits therefore do not depend on
devices, tiles or transports.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .codecs import Blocks, Cast, Codec

_PARTS = 8  # Parts of the scratch: three hold values, the others are the codecs' scratch
_GRANULE = 1024  # Tiles are whole blocks of every codec


@dataclass(frozen=True)
class Feedback:
    """How a rank stores compression errors and adds them to later messages.

    Attributes:
        codec: The codec in which errors are stored.
        beta: The weight of the old error.
        reset_every: Optimizer steps after which errors are reset; None means never.
    """

    codec: Cast | Blocks
    beta: float = 0.0
    reset_every: int | None = None

    def nbytes(self, numel: int) -> int:
        """Return the size of the errors of `numel` values, in bytes."""
        return self.codec.nbytes(numel)

    def zeros(self, numel: int, device: torch.device) -> Errors:
        """Return an error-feedback buffer of zeros.

        Args:
            numel: Number of values, a multiple of 1,024.
            device: The device of the errors.
        """
        return Errors(
            self, torch.zeros(self.codec.length(numel), dtype=self.codec.dtype, device=device)
        )


@dataclass(eq=False)
class Errors:
    """The error-feedback buffer of one rank.

    Attributes:
        feedback: How the errors are kept.
        memory: The errors, encoded with ``feedback.codec``.
    """

    feedback: Feedback
    memory: Tensor

    def encode(
        self, wire: Codec, values: Tensor, message: Tensor, place: int, scratch: Tensor
    ) -> None:
        """Add the stored errors to values, encode the sums, and store the new errors.

        A value that is not finite is sent as not finite, and no error is kept for its block.

        Args:
            wire: Codec of the message.
            values: The values, flat; their number is a multiple of 1,024.
            message: The message, as for ``wire.encode``.
            place: The index of the first value in the error-feedback buffer, a multiple of 1,024.
            scratch: Scratch as for ``wire.encode``, of at least 16,384 elements.
        """
        codec = self.feedback.codec
        beta = self.feedback.beta
        tile = scratch.numel() // _PARTS // _GRANULE * _GRANULE
        room = scratch[3 * tile :]
        for low in range(0, values.numel(), tile):
            high = min(low + tile, values.numel())
            error, exact, sent = (part[: high - low] for part in scratch[: 3 * tile].chunk(3))
            codec.decode(self.memory, place + low, place + high, error, room)
            torch.add(values[low:high], error, out=exact)
            wire.encode(exact, message, room, low)
            wire.decode(message, low, high, sent, room)
            # A product is rounded before it is added: no fused multiply-add
            error.mul_(beta).add_(exact.sub_(sent).mul_(1.0 - beta)).nan_to_num_(
                nan=0.0, posinf=0.0, neginf=0.0
            )
            codec.encode(error, self.memory, room, place + low)

    def scale(self, factor: float) -> None:
        """Multiply the errors by a factor, because future values have another scale."""
        self.feedback.codec.scale(self.memory, factor)

    def forget(self) -> None:
        """Set all errors to zero."""
        self.memory.zero_()
