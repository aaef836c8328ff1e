"""DeepSpeed's named random streams, for programs that split layers themselves.

A stream is a state of the device's default generator. `fork` draws from it and then restores the
default state. A recomputed checkpoint draws the same numbers from every stream as in forward.
Layers that this library splits do not need streams (parallel/streams.py).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from ...activations import recompute
from ...api.checkpointing import remembered_mpu
from ...base.device import default_device
from ...base.errors import UsageError
from . import groups

MODEL_PARALLEL = "model-parallel-rng"
# added, with the tensor-parallel rank, to the seed of that stream
OFFSET = 2718


class RandomStreams:
    """Random generators by name, each with a separate seed and state."""

    def __init__(self) -> None:
        self._states: dict[str, Tensor] = {}
        self._seeds: dict[str, int] = {}

    def reset(self) -> None:
        """Delete all streams."""
        self._states = {}
        self._seeds = {}

    def get_states(self) -> dict[str, Tensor]:
        """Return the generator state of each stream by name."""
        return dict(self._states)

    def set_states(self, states: dict[str, Tensor]) -> None:
        """Replace the states of all streams by those that `get_states` returned."""
        self._states = dict(states)

    def add(self, name: str, seed: int) -> None:
        """Create a stream.

        Args:
            name: Name of the stream.
            seed: Seed of the stream.

        Raises:
            UsageError: Another stream has the name or the seed.
        """
        if seed in self._seeds.values() or name in self._states:
            taken = f"the name '{name}'" if name in self._states else f"the seed {seed}"
            raise UsageError(
                f"another stream has {taken}.",
                "Two streams would draw alike.",
                "take another, or reset().",
            )
        device = _device()
        before = device.get_rng_state()
        device.manual_seed(seed)
        self._states[name] = device.get_rng_state()
        self._seeds[name] = seed
        device.set_rng_state(before)
        recompute.preserve(self)

    def reseed(self, name: str, seed: int) -> None:
        """Set a new seed for a stream.

        Args:
            name: Name of the stream.
            seed: The new seed. `add` no longer refuses the old one.

        Raises:
            UsageError: There is no stream with this name.
        """
        with self.fork(name):
            _device().manual_seed(seed)
        self._seeds[name] = seed

    @contextmanager
    def fork(self, name: str = MODEL_PARALLEL) -> Iterator[None]:
        """Draw random numbers from a stream inside the `with` block.

        Raises:
            UsageError: There is no stream with this name.
        """
        if name not in self._states:
            raise UsageError(
                f"there is no stream '{name}'.",
                "It is made from a seed.",
                "call model_parallel_cuda_manual_seed(seed), or add(name, seed).",
            )
        device = _device()
        before = device.get_rng_state()
        device.set_rng_state(self._states[name])
        try:
            yield
        finally:
            self._states[name] = device.get_rng_state()
            device.set_rng_state(before)


_STREAMS = RandomStreams()  # of this process


def _tensor_rank() -> int:
    mpu = remembered_mpu()
    for name in ("get_tensor_model_parallel_rank", "get_model_parallel_rank"):
        if hasattr(mpu, name):
            return int(getattr(mpu, name)())
    return int(groups.get_tensor_model_parallel_rank())


def get_cuda_rng_tracker() -> RandomStreams:
    """Return the `RandomStreams` object of this process.

    Inside `with get_cuda_rng_tracker().fork(name):`, the random numbers of this rank's device come
    from the stream `name`.
    """
    return _STREAMS


def model_parallel_cuda_manual_seed(seed: int) -> None:
    """Seed the device's default generator and the stream of tensor-parallel layers.

    The stream "model-parallel-rng" is for layers that are split over tensor-parallel ranks. All
    other streams are deleted.

    Args:
        seed: Seed of the default generator. The seed of the stream is the sum of this number, 2718
            and this rank's tensor-parallel index. The index comes from the mpu that was passed to
            `checkpointing.configure`, otherwise from the mesh of the newest engine. Without both,
            it is 0.
    """
    _STREAMS.reset()
    _device().manual_seed(seed)
    _STREAMS.add(MODEL_PARALLEL, seed + OFFSET + _tensor_rank())


def model_parallel_reconfigure_tp_seed(seed: int) -> None:
    """Set a new seed for the random stream of tensor-parallel layers.

    The state of the device's default generator is not changed.

    Args:
        seed: The new seed of the stream "model-parallel-rng" is the sum of this number, 2718 and
            this rank's tensor-parallel index, as in `model_parallel_cuda_manual_seed`.

    Raises:
        UsageError: The stream does not exist, because `model_parallel_cuda_manual_seed` has not
            been called.
    """
    _STREAMS.reseed(MODEL_PARALLEL, seed + OFFSET + _tensor_rank())


def _device() -> Any:
    """Return the module with the functions that seed the device's generator."""
    device = default_device()
    return torch.random if device.type == "cpu" else torch.get_device_module(device)
