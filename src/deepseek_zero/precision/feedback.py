"""Error feedback: what codes leave out of a rank's gradients is kept and added to its next ones.

With x what a rank is about to send, e what it keeps and Q what comes out of the codec,

    it sends Q(x + e)        and keeps        e' = beta e + (1 - beta) (x + e - Q(x + e))

beta 0 keeps all that was left out; LoCo (zeropp_loco_param) keeps a running mean of it.  Every
operation is elementwise IEEE fp32 until e' is rounded to the codec it is kept in: devices, tiles
and transports change no bit.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .codecs import Blocks, Cast, Codec

_PARTS = 8  # of a scratch: three hold values, the others are for the codecs to work in
_GRANULE = 1024  # tiles are whole blocks of every codec


@dataclass(frozen=True)
class Feedback:
    """How errors are kept.  codec: as what.  beta: weight of the old error.  reset_every: optimizer
    steps after which errors are forgotten; None: never.
    """

    codec: Cast | Blocks
    beta: float = 0.0
    reset_every: int | None = None

    def nbytes(self, numel: int) -> int:
        """Return what the errors of so many values take in memory."""
        return self.codec.nbytes(numel)

    def zeros(self, numel: int, device: torch.device) -> Errors:
        """Return the errors of so many values before anything was sent.  numel: a multiple of
        1,024.
        """
        return Errors(
            self, torch.zeros(self.codec.length(numel), dtype=self.codec.dtype, device=device)
        )


@dataclass(eq=False)
class Errors:
    """What codes have left out of one rank's values.  memory: as `feedback.codec` writes them."""

    feedback: Feedback
    memory: Tensor

    def encode(
        self, wire: Codec, values: Tensor, message: Tensor, place: int, scratch: Tensor
    ) -> None:
        """Write values, with what was left out of the ones before, into a message; keep what it
        leaves out.  Local.

        values: flat, a multiple of 1,024 long.  place: of the first of them among all that errors
        are kept of, a
        multiple of 1,024.  message, scratch: as `wire.encode` takes them, scratch of at least
        16,384 elements.  A value that is not finite is sent as one, and nothing is kept of its
        block.
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
            # A product is rounded before it is added: no fused multiply-add.
            error.mul_(beta).add_(exact.sub_(sent).mul_(1.0 - beta)).nan_to_num_(
                nan=0.0, posinf=0.0, neginf=0.0
            )
            codec.encode(error, self.memory, room, place + low)

    def scale(self, factor: float) -> None:
        """Multiply them: values are multiplied by so much more from now on.  Local."""
        self.feedback.codec.scale(self.memory, factor)

    def forget(self) -> None:
        """Let nothing be left out.  Local."""
        self.memory.zero_()
