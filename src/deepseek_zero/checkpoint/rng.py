"""Capture and restore the random generators of torch, CUDA, Python and numpy."""

from __future__ import annotations

import random
import struct
from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor


def capture_rng(device: torch.device) -> dict[str, Tensor]:
    """Return the states of this process's random generators as tensors.

    The CUDA generator is that of `device`.
    """
    found = {"torch": torch.get_rng_state()}
    if device.type == "cuda":
        found["cuda"] = torch.cuda.get_rng_state(device)
    version, words, gauss = random.getstate()
    found["python"] = _pack([version, *words], gauss)
    name, keys, place, has_gauss, cached = np.random.get_state(legacy=True)
    if name == "MT19937":
        gauss = float(cached) if has_gauss else None
        found["numpy"] = _pack([*map(int, keys), int(place)], gauss)
    return found


def restore_rng(states: Mapping[str, Tensor], device: torch.device) -> None:
    """Set the random generators to captured states.

    Args:
        states: The result of `capture_rng`; a generator without a state is not changed.
        device: The device whose CUDA generator is set.
    """
    if "torch" in states:
        torch.set_rng_state(states["torch"])
    if "cuda" in states and device.type == "cuda":
        torch.cuda.set_rng_state(states["cuda"], device)
    if "python" in states:
        (version, *words), gauss = _unpack(states["python"])
        random.setstate((version, tuple(words), gauss))
    if "numpy" in states:
        (*keys, place), gauss = _unpack(states["numpy"])
        numpy_words = np.array(keys, dtype=np.uint32)
        np.random.set_state(("MT19937", numpy_words, place, int(gauss is not None), gauss or 0.0))


def _pack(numbers: list[int], gauss: float | None) -> Tensor:
    """Return the words of a generator and its cached normal value, if any, as one tensor."""
    bits = struct.unpack("<q", struct.pack("<d", gauss or 0.0))[0]
    return torch.tensor([*numbers, gauss is not None, bits], dtype=torch.int64, device="cpu")


def _unpack(packed: Tensor) -> tuple[list[int], float | None]:
    *numbers, has_gauss, bits = packed.tolist()
    gauss = struct.unpack("<d", struct.pack("<q", bits))[0]
    return numbers, gauss if has_gauss else None
