"""The layouts in which this library writes states and weights, told apart by what lies there.

slices         a folder with manifest.json: a checkpoint of ours
deepspeed      a folder of DeepSpeed's .pt files
safetensors    a folder as Hugging Face lays it out, or one such file: weights alone
torch          one file of torch.save (.pth, .pt, .bin): weights alone
"""

from __future__ import annotations

from enum import Enum
from pathlib import Path

from .deepspeed_read import is_deepspeed
from .format import MANIFEST
from .hf_folder import INDEX, STEM


class Layout(Enum):
    """How something lies on the disk."""

    SLICES = "slices"
    DEEPSPEED = "deepspeed"
    SAFETENSORS = "safetensors"
    TORCH = "torch"

    @property
    def has_states(self) -> bool:
        """Whether there is more than weights: optimizer states, counters."""
        return self in (Layout.SLICES, Layout.DEEPSPEED)


def layout_of(path: Path) -> Layout | None:
    """The layout of one checkpoint or export; None where the path is neither."""
    if path.is_file():
        return Layout.SAFETENSORS if path.suffix == ".safetensors" else Layout.TORCH
    if (path / MANIFEST).exists() or any(path.glob("rank_*.safetensors")):
        return Layout.SLICES
    if is_deepspeed(path):
        return Layout.DEEPSPEED
    is_export = (path / INDEX).exists() or any(path.glob(f"{STEM}*.safetensors"))
    return Layout.SAFETENSORS if is_export else None
