"""Random numbers along the tensor-parallel axis: equal on every rank outside of split layers, different inside.

Outside, ranks draw the same numbers because they were seeded alike and draw alike. Inside, where each holds its own
heads, a rank draws from a stream of its own, made of one number of the common stream and its coordinate. So there is
one state: who restores the common stream (a recomputation, a checkpoint) has restored the other one too.
"""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor


class Streams:
    """The two streams of one rank, in torch's default generator of the CPU and, on a GPU, of the device."""

    def __init__(self, coordinate: int, device: torch.device) -> None:
        self._coordinate = coordinate
        self._cuda = device if device.type == "cuda" else None
        self._outside: tuple[Tensor, Tensor | None] | None = None

    def enter(self) -> None:
        """Draw from this rank's stream from now on. Draws one number of the common stream."""
        if self._outside is not None:
            return
        drawn = int(torch.randint(2**62, (1,)))
        on_device = None if self._cuda is None else torch.cuda.get_rng_state(self._cuda)
        self._outside = torch.get_rng_state(), on_device
        name = f"{drawn} {self._coordinate}".encode()
        seed = int.from_bytes(hashlib.blake2b(name, digest_size=8).digest(), "little") >> 1
        torch.default_generator.manual_seed(seed)
        if self._cuda is not None:
            torch.cuda.manual_seed(seed)

    def leave(self) -> None:
        """Go back to the common stream."""
        if self._outside is None:
            return
        (state, on_device), self._outside = self._outside, None
        torch.set_rng_state(state)
        if self._cuda is not None and on_device is not None:
            torch.cuda.set_rng_state(on_device, self._cuda)

    def forget(self) -> None:
        """Stay where torch's generators are: somebody else has put them back."""
        self._outside = None
