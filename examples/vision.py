"""The parts of torchvision that seed 002 uses: four transforms, CIFAR-10 and ResNet-101.

torchvision's wheel cannot be imported with a CPU build of torch. The network then comes from
transformers, with the same layers and the same 44.5 million weights. The transforms work on
tensors. `CIFAR10` downloads nothing: without its files it has scikit-learn's digits. seed_002.py
and resnet101_digits.py import this module.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from digits import load_images
from torch import Tensor, nn
from torch.nn.functional import pad
from torch.utils.data import Dataset

Transform = Callable[[Tensor], Tensor]


class CIFAR10(Dataset[tuple[Tensor, int]]):
    """A dataset of (image, class) pairs that transforms an image at every access."""

    def __init__(
        self, root: str | Path, train: bool = True, transform: Transform | None = None
    ) -> None:
        self.images, self.labels = load_images(train, root)
        self.transform = transform

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        image = self.images[index]
        return image if self.transform is None else self.transform(image), int(self.labels[index])


class Compose(nn.Sequential):
    """Apply transforms in order."""

    def __init__(self, transforms: Sequence[nn.Module]) -> None:
        super().__init__(*transforms)


class RandomCrop(nn.Module):
    """Add a black border, then take a square at a random position."""

    def __init__(self, size: int, padding: int = 0) -> None:
        super().__init__()
        self.size, self.padding = size, padding

    def forward(self, image: Tensor) -> Tensor:
        image = pad(image, [self.padding] * 4)
        top, left = (int(torch.randint(length - self.size + 1, ())) for length in image.shape[-2:])
        return image[..., top : top + self.size, left : left + self.size]


class RandomHorizontalFlip(nn.Module):
    """Mirror an image with probability 1/2."""

    def forward(self, image: Tensor) -> Tensor:
        return image.flip(-1) if torch.rand(()) < 0.5 else image


class ToTensor(nn.Module):
    """Convert bytes to floats in [0, 1]."""

    def forward(self, image: Tensor) -> Tensor:
        return image.float() / 255.0


class Normalize(nn.Module):
    """Shift and scale each channel."""

    def __init__(self, mean: Sequence[float], std: Sequence[float]) -> None:
        super().__init__()
        self.mean, self.std = (torch.tensor(values).view(-1, 1, 1) for values in (mean, std))

    def forward(self, image: Tensor) -> Tensor:
        return (image - self.mean) / self.std


def resnet101(pretrained: bool = False) -> nn.Module:
    """Return a ResNet-101 for 1,000 classes with random weights, whose last layer is `fc`.

    Each block starts as the identity (torchvision's `zero_init_residual`). Otherwise 33 batch norms
    over 2 x 2 points amplify the gradient of 32 x 32 images: its norm is 10,000, and the loss does
    not fall for dozens of steps.
    """
    if pretrained:
        raise ValueError("pretrained weights would have to be downloaded")
    try:
        from torchvision import models  # noqa: PLC0415
    except (
        ImportError,
        RuntimeError,
    ):  # RuntimeError: torchvision's operators do not match this torch
        return _ResNet101()
    network: nn.Module = models.resnet101(zero_init_residual=True)
    return network


class _ResNet101(nn.Module):
    """transformers' network with torchvision's interface: images in, logits out."""

    def __init__(self) -> None:
        super().__init__()
        from transformers import ResNetConfig, ResNetModel  # noqa: PLC0415

        self.body: Any = ResNetModel(ResNetConfig(depths=[3, 4, 23, 3]))
        self.fc = nn.Linear(2048, 1000)
        for block in self.body.modules():
            if type(block).__name__ == "ResNetBottleNeckLayer":
                nn.init.zeros_(block.layer[-1].normalization.weight)

    def forward(self, images: Tensor) -> Tensor:
        return self.fc(self.body(images).pooler_output.flatten(1))
