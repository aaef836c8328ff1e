"""Train a vision transformer on real images with seed 000's API: wrap the model, keep the loop.

    deepseek-zero run --nproc 2 examples/vit_digits.py
    python examples/vit_digits.py --epochs 20

Reads handwritten digits, or CIFAR-10 if ./data has its files. The loop is plain PyTorch. Ends with
an error unless the loss fell by 0.5 nats.
"""

from __future__ import annotations

import argparse

import torch
from digits import dataset
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, DistributedSampler

from deepseek_zero import DeepSeekZeRO3, ZeroOptimizer, comm

LEAST_FALL = 0.5


class VisionTransformer(nn.Module):
    """Patches of 4 x 4 pixels, a few transformer blocks, the mean of the patches, ten classes."""

    def __init__(
        self, dim: int = 96, num_heads: int = 4, num_blocks: int = 4, size: int = 32, patch: int = 4
    ) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, dim, patch, patch)
        self.position = nn.Parameter(torch.randn((size // patch) ** 2, dim) * 0.02)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(
                dim, num_heads, 4 * dim, 0.0, "gelu", batch_first=True, norm_first=True
            )
            for _ in range(num_blocks)
        )
        self.norm = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, 10)

    def forward(self, images: Tensor) -> Tensor:
        tokens = self.patches(images).flatten(2).transpose(1, 2) + self.position
        for block in self.blocks:
            tokens = block(tokens)
        return self.head(self.norm(tokens).mean(1))


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--images", type=int, default=512, help="how many to train on (default: 512)"
    )
    parser.add_argument("--epochs", type=int, default=5)
    options = parser.parse_args()
    if min(options.images, options.epochs) < 1:
        parser.error("--images and --epochs must be at least 1")
    return options


def main() -> None:
    options = parse()
    comm.init_distributed()
    rank, num_ranks = comm.get_rank(), comm.get_world_size()
    torch.manual_seed(0)
    model = VisionTransformer()
    DeepSeekZeRO3(model, stage=3, zero_optimization={"stage3_param_persistence_threshold": 0})
    optimizer = ZeroOptimizer(model.parameters(), lr=1e-3, optimizer_type="adamw")
    device = model.head.weight.device

    digits = dataset(limit=options.images)
    sampler = DistributedSampler(digits, num_ranks, rank)
    loader = DataLoader(digits, batch_size=32 // num_ranks, sampler=sampler)
    means = []
    for epoch in range(options.epochs):
        sampler.set_epoch(epoch)
        losses = []
        for images, labels in loader:
            loss = cross_entropy(model(images.to(device)), labels.to(device))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        means.append(sum(losses) / len(losses))
        if rank == 0:
            print(f"epoch {epoch + 1}: loss {means[-1]:.3f}", flush=True)

    with torch.no_grad():
        model.eval()
        images, labels = dataset(train=False, limit=256).tensors
        right = (model(images.to(device)).argmax(-1).cpu() == labels).float().mean()
    if rank == 0:
        print(
            f"the loss fell by {means[0] - means[-1]:.2f} nats; {right:.0%} of held-out images are "
            "named rightly"
        )
    assert means[0] - means[-1] >= LEAST_FALL, f"the loss fell by less than {LEAST_FALL} nats"


if __name__ == "__main__":
    main()
