"""Real images without a download: scikit-learn's digits, or CIFAR-10 if its files are present.

The digits are 1,797 scans of 8 x 8 points. They are resized to 32 x 32 in three equal channels, so
that networks for CIFAR-10 accept them. CIFAR-10 is read from `<root>/cifar-10-batches-py` (its
"python version", unpacked).
"""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import numpy as np
import torch
from sklearn.datasets import load_digits
from torch import Tensor
from torch.nn.functional import interpolate
from torch.utils.data import TensorDataset

CIFAR_FOLDER = "cifar-10-batches-py"
HELD_OUT_EVERY = 5  # every fifth digit is never trained on


def load_images(train: bool = True, root: str | Path = "data") -> tuple[Tensor, Tensor]:
    """Return images (n, 3, 32, 32) as uint8 and their classes (n,) as int64; there are ten
    classes.
    """
    folder = Path(root) / CIFAR_FOLDER
    return _cifar(folder, train) if folder.is_dir() else _digits(train)


def dataset(
    train: bool = True, root: str | Path = "data", limit: int | None = None
) -> TensorDataset:
    """Return a dataset of (image, class) pairs with float32 images in [-1, 1].

    limit: use only the first `limit` pairs.
    """
    images, labels = load_images(train, root)
    return TensorDataset(images[:limit].float() / 127.5 - 1.0, labels[:limit])


def _digits(train: bool) -> tuple[Tensor, Tensor]:
    found = load_digits()
    kept = (torch.arange(len(found.target)) % HELD_OUT_EVERY != 0) == train
    images = torch.from_numpy(found.images).float().unsqueeze(1)[kept] * (255.0 / 16.0)
    large = interpolate(images, size=(32, 32), mode="bilinear", align_corners=False)
    return large.round().to(torch.uint8).expand(-1, 3, -1, -1).contiguous(), torch.from_numpy(
        found.target
    ).long()[kept]


def _cifar(folder: Path, train: bool) -> tuple[Tensor, Tensor]:
    names = [f"data_batch_{number}" for number in range(1, 6)] if train else ["test_batch"]
    batches = []
    for name in names:
        with (folder / name).open("rb") as file:
            batches.append(_ArraysOnly(file, encoding="bytes").load())
    images = np.concatenate([batch[b"data"] for batch in batches]).reshape(-1, 3, 32, 32)
    return torch.from_numpy(images), torch.tensor(
        [label for batch in batches for label in batch[b"labels"]]
    )


class _ArraysOnly(pickle.Unpickler):
    """An unpickler for numpy arrays only, because a pickle may name any function to call."""

    def find_class(self, module: str, name: str) -> Any:
        arrays = module.partition(".")[0] == "numpy" and name in {
            "_reconstruct",
            "ndarray",
            "dtype",
        }
        # `_codecs.encode`: bytes as Python 3 writes them for Python 2.
        if arrays or (module, name) == ("_codecs", "encode"):
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"{module}.{name} has no place in a CIFAR-10 file")
