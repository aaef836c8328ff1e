"""What seed 002 takes from torchvision, in its words: four transforms, CIFAR-10 and ResNet-101.

torchvision's wheel does not import beside a CPU build of torch, so the network comes from
torchvision where that imports and from transformers elsewhere (the same layers, the same 44.5
million weights).  The transforms work on
tensors, and `CIFAR10` downloads nothing: where its files are missing it holds scikit-learn's
digits.  Imported by seed_002.py and resnet101_digits.py.
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
    """(image, class) pairs, each image transformed anew whenever it is read."""

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
    """One transform after the other."""

    def __init__(self, transforms: Sequence[nn.Module]) -> None:
        super().__init__(*transforms)


class RandomCrop(nn.Module):
    """A square of the image, at a random place, after a black border was added."""

    def __init__(self, size: int, padding: int = 0) -> None:
        super().__init__()
        self.size, self.padding = size, padding

    def forward(self, image: Tensor) -> Tensor:
        image = pad(image, [self.padding] * 4)
        top, left = (int(torch.randint(length - self.size + 1, ())) for length in image.shape[-2:])
        return image[..., top : top + self.size, left : left + self.size]


class RandomHorizontalFlip(nn.Module):
    """Every second image, by chance, mirrored."""

    def forward(self, image: Tensor) -> Tensor:
        return image.flip(-1) if torch.rand(()) < 0.5 else image


class ToTensor(nn.Module):
    """Bytes to floats in [0, 1]."""

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
    """ResNet-101 for 1,000 classes whose last layer is `fc`; its weights are random.

    Each block starts as the identity (torchvision's `zero_init_residual`).  Otherwise 33 batch
    norms over 2 x 2 points multiply the gradient at 32 x 32 images (its norm is 10,000 and the loss
    stands still for dozens of steps).
    """
    if pretrained:
        raise ValueError("pretrained weights would have to be downloaded")
    try:
        from torchvision import models  # noqa: PLC0415
    except (
        ImportError,
        RuntimeError,
    ):  # RuntimeError: torchvision's operators do not fit this torch
        return _ResNet101()
    network: nn.Module = models.resnet101(zero_init_residual=True)
    return network


class _ResNet101(nn.Module):
    """transformers' network under torchvision's manners: images in, logits out."""

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
