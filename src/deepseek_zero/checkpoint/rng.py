"""Capture and restore the random generators of torch, CUDA, Python and numpy."""

from __future__ import annotations

import random
import struct
from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor


def capture_rng(device: torch.device) -> dict[str, Tensor]:
    """Copy the states of this process's random generators into tensors.

    The CUDA generator is that of `device`.
    """
    found = {"torch": torch.get_rng_state()}
    if device.type == "cuda":
        found["cuda"] = torch.cuda.get_rng_state(device)
    version, words, gauss = random.getstate()
    found["python"] = torch.tensor(
        [version, *words, gauss is not None, _float_bits(gauss or 0.0)], dtype=torch.int64
    )
    name, keys, place, has_gauss, cached = np.random.get_state(legacy=True)
    if name == "MT19937":
        found["numpy"] = torch.tensor(
            [*map(int, keys), place, has_gauss, _float_bits(float(cached))], dtype=torch.int64
        )
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
        version, *words, has_gauss, bits = states["python"].tolist()
        gauss = _float_of_bits(bits) if has_gauss else None
        random.setstate((version, tuple(words), gauss))
    if "numpy" in states:
        *keys, place, has_gauss, bits = states["numpy"].tolist()
        np.random.set_state(
            ("MT19937", np.array(keys, dtype=np.uint32), place, has_gauss, _float_of_bits(bits))
        )


def _float_bits(number: float) -> int:
    return int(struct.unpack("<q", struct.pack("<d", number))[0])


def _float_of_bits(bits: int) -> float:
    return float(struct.unpack("<d", struct.pack("<q", bits))[0])
