"""Random numbers along the tensor-parallel axis.

They are equal on every rank outside of split layers, and different inside. Outside, the generators
of all ranks have the same state, which `align_generators` ensures before each forward. Inside,
where each rank has its own heads, a rank uses its own stream, seeded by one number of the common
stream and the rank's index. There is thus only one state: restoring the common stream (a
recomputation, a checkpoint) also restores the other one.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import torch
from torch import Tensor

from ..base.log import log_once
from ..comm.collectives import Comm


@dataclass(eq=False)
class Streams:
    """The two random-number streams of one rank: a common one and its own.

    They use torch's default generators of the CPU and, on a GPU, of the device.

    Attributes:
        coordinate: The rank's index on the tensor-parallel axis, which seeds its own stream.
        device: The rank's device, whose generator is switched with that of the CPU.
    """

    coordinate: int
    device: torch.device
    _outside: Tensor | None = None

    def enter(self) -> None:
        """Switch to this rank's own stream. This draws one number from the common stream."""
        if self._outside is not None:
            return
        drawn = int(torch.randint(2**62, (1,), device="cpu"))
        self._outside = _generator_state(self.device)
        name = f"{drawn} {self.coordinate}".encode()
        seed = int.from_bytes(hashlib.blake2b(name, digest_size=8).digest(), "little") >> 1
        torch.default_generator.manual_seed(seed)
        if self.device.type == "cuda":
            torch.cuda.manual_seed(seed)

    def leave(self) -> None:
        """Switch back to the common stream."""
        if self._outside is not None:
            _set_generator_state(self._outside, self.device)
            self._outside = None

    def forget(self) -> None:
        """Treat the generators' current state as the common stream, without restoring the old one.

        This is for a state that other code has restored, such as a recomputation.
        """
        self._outside = None


def align_generators(comm: Comm) -> None:
    """Set torch's default generators to the first rank's state if the states differ.

    Programs often use the seed `seed + rank`. Ranks along "tp" compute one batch together, so code
    outside of split layers must draw the same numbers on all of them.

    Args:
        comm: The communicator of the ranks along "tp".

    Note:
        Collective: every rank of `comm` must call it. It sends 8 bytes to each rank, and 5 KB if
            states differ.
    """
    state = _generator_state(comm.device)
    digest = hashlib.blake2b(state.numpy().tobytes(), digest_size=8).digest()
    own = torch.tensor([int.from_bytes(digest, "little", signed=True)], device="cpu")
    digests = comm.all_gather_rows(own, "the states of generators")
    if bool((digests == digests[0]).all()):
        return
    states = comm.all_gather_rows(state, "the first rank's generators")
    _set_generator_state(states[0].clone(), comm.device)
    log_once(
        "tensor parallelism: the random generators of the ranks along tp were in different states "
        "(torch.manual_seed with another seed on each rank, for instance). These ranks compute one "
        "batch together, so all of them go on with the state of the first one."
    )


def _generator_state(device: torch.device) -> Tensor:
    """Return the state of the CPU's default generator, followed by that of a CUDA device."""
    state = torch.get_rng_state()
    if device.type == "cuda":
        state = torch.cat([state, torch.cuda.get_rng_state(device)])
    return state


def _set_generator_state(state: Tensor, device: torch.device) -> None:
    numel = torch.get_rng_state().numel()
    torch.set_rng_state(state[:numel].clone())
    if device.type == "cuda":
        torch.cuda.set_rng_state(state[numel:].clone(), device)
