"""Train ResNet-101 on real images with `initialize` and ZeRO-3, with every block's weights sharded.

    deepseek-zero run --nproc 2 examples/resnet101_digits.py
    python examples/resnet101_digits.py --images 800 --epochs 6

Reads handwritten digits, or CIFAR-10 if ./data has its files. Ends with an error unless the loss
fell by 0.5 nats. The defaults suit two cores: the network memorizes 64 images within a minute.
"""

from __future__ import annotations

import argparse

import torch
from digits import dataset
from torch.nn.functional import cross_entropy
from vision import resnet101

import deepseek_zero as dz

LEAST_FALL = 0.5

CONFIG = {
    "train_micro_batch_size_per_gpu": 8,
    "gradient_clipping": 1.0,
    "steps_per_print": None,
    "optimizer": {"type": "AdamW", "params": {"lr": 5e-4, "weight_decay": 0.01}},
    "zero_optimization": {
        "stage": 3,
        # Also shard the batch norms: with the default threshold such small parameters stay whole on
        # every rank.
        "stage3_param_persistence_threshold": 0,
    },
}


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--images", type=int, default=64, help="how many to train on (default: 64)")
    parser.add_argument("--epochs", type=int, default=5)
    options = parser.parse_args()
    if min(options.images, options.epochs) < 1:
        parser.error("--images and --epochs must be at least 1")
    return options


def main() -> None:
    options = parse()
    torch.manual_seed(0)
    network = resnet101()
    network.fc = torch.nn.Linear(network.fc.in_features, 10)
    digits = dataset(limit=options.images)
    engine, _, loader, _ = dz.initialize(model=network, training_data=digits, config=CONFIG)

    losses = []
    for epoch in range(1, options.epochs + 1):
        for images, labels in loader:
            loss = cross_entropy(engine(images), labels)
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
        if engine.global_rank == 0:
            print(
                f"epoch {epoch}: loss {sum(losses[-len(loader) :]) / len(loader):.3f}", flush=True
            )

    fall = sum(losses[: len(loader)]) / len(loader) - sum(losses[-len(loader) :]) / len(loader)
    if engine.global_rank == 0:
        print(f"the loss fell by {fall:.2f} nats")
    assert fall >= LEAST_FALL, f"the loss fell by {fall:.2f} nats; the margin is {LEAST_FALL}"


if __name__ == "__main__":
    main()
