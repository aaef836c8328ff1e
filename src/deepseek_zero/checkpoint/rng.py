"""The states of a rank's random generators, as tensors: torch's, its GPU's, Python's and NumPy's.

Called by save.py and load.py.
"""

from __future__ import annotations

import random
import struct
from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor


def capture(device: torch.device) -> dict[str, Tensor]:
    """What `restore` takes, by generator."""
    found = {"torch": torch.get_rng_state()}
    if device.type == "cuda":
        found["cuda"] = torch.cuda.get_rng_state(device)
    version, words, gauss = random.getstate()
    found["python"] = torch.tensor([version, *words, gauss is not None, _bits(gauss or 0.0)], dtype=torch.int64)
    name, keys, place, has_gauss, cached = np.random.get_state(legacy=True)
    if name == "MT19937":
        found["numpy"] = torch.tensor([*map(int, keys), place, has_gauss, _bits(float(cached))], dtype=torch.int64)
    return found


def restore(states: Mapping[str, Tensor], device: torch.device) -> None:
    """Go on where `capture` was called; a generator that has no state goes on where it is."""
    if "torch" in states:
        torch.set_rng_state(states["torch"])
    if "cuda" in states and device.type == "cuda":
        torch.cuda.set_rng_state(states["cuda"], device)
    if "python" in states:
        version, *words, has_gauss, bits = states["python"].tolist()
        random.setstate((version, tuple(words), _float(bits) if has_gauss else None))
    if "numpy" in states:
        *keys, place, has_gauss, bits = states["numpy"].tolist()
        np.random.set_state(("MT19937", np.array(keys, dtype=np.uint32), place, has_gauss, _float(bits)))


def _bits(number: float) -> int:
    return int(struct.unpack("<q", struct.pack("<d", number))[0])


def _float(bits: int) -> float:
    return float(struct.unpack("<d", struct.pack("<q", bits))[0])
