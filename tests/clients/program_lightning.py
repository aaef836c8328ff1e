"""Run Lightning's Trainer or Fabric on a small model.

Arguments: KIND (fit, resume, convert, fabric) STAGE (-1: plain) FOLDER. KIND resume continues from
the checkpoint of the first epoch. KIND convert writes the last checkpoint as one file, in one
process. Rank 0 prints JSON.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import lightning
import torch
from lightning.fabric.strategies import DeepSpeedStrategy as FabricStrategy
from lightning.pytorch.strategies import DeepSpeedStrategy
from lightning.pytorch.utilities.deepspeed import convert_zero_checkpoint_to_fp32_state_dict
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from tests.clients.lightning_gate import lift

ROWS, BATCH, ACCUMULATION, EPOCHS = 32, 4, 2, 2
WORLD = int(os.environ.get("WORLD_SIZE", "1"))


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))


def loader() -> DataLoader[Any]:
    """Return this rank's rows, so that the global batch is the same for every world size."""
    torch.manual_seed(1)
    x = torch.randn(ROWS, 8)
    data = TensorDataset(x, x.sum(1, keepdim=True))
    sampler = DistributedSampler(data, WORLD, int(os.environ.get("RANK", "0")), shuffle=False)
    return DataLoader(data, batch_size=BATCH // WORLD, sampler=sampler)


class Regression(lightning.LightningModule):
    """A regression that records the mean loss over ranks of every micro-batch and validation."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[float] = []
        self.validated: list[float] = []
        self.net: nn.Module | None = None

    def configure_model(self) -> None:
        if self.net is None:
            self.net = network()  # under zero.Init at stage 3

    def loss(self, batch: Any) -> torch.Tensor:
        x, y = batch
        return (self.net(x) - y).square().mean()

    def training_step(self, batch: Any, index: int) -> torch.Tensor:
        loss = self.loss(batch)
        self.seen.append(self.trainer.strategy.reduce(loss.detach(), reduce_op="mean").item())
        return loss

    def validation_step(self, batch: Any, index: int) -> None:
        self.log("val", self.loss(batch), sync_dist=True)

    def on_validation_epoch_end(self) -> None:
        if not self.trainer.sanity_checking:
            self.validated.append(self.trainer.callback_metrics["val"].item())

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def deepspeed_config(stage: int) -> dict[str, Any]:
    zero = {"stage": stage, "stage3_param_persistence_threshold": 0}
    return {"zero_allow_untested_optimizer": True, "zero_optimization": zero}


def fit(stage: int, folder: Path, resume: bool) -> dict[str, Any]:
    strategy: Any = DeepSpeedStrategy(config=deepspeed_config(stage)) if stage >= 0 else "auto"
    checkpoints = lightning.pytorch.callbacks.ModelCheckpoint(
        folder / "run", filename="{epoch}", save_top_k=-1, monitor="val"
    )
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=WORLD,
        strategy=strategy,
        max_epochs=EPOCHS,
        accumulate_grad_batches=ACCUMULATION,
        gradient_clip_val=0.5,
        callbacks=[checkpoints],
        logger=False,
        enable_progress_bar=False,
        default_root_dir=folder,
        use_distributed_sampler=False,
    )
    model = Regression()
    trainer.fit(
        model,
        loader(),
        loader(),
        ckpt_path=str(folder / "run" / "epoch=0.ckpt") if resume else None,
    )
    told = {
        "loss": model.seen,
        "val": [*model.validated],
        "steps": trainer.global_step,
        "world": trainer.world_size,
    }
    trainer.validate(model, loader(), verbose=False)  # creates a new engine for the same model
    return told | {"after": model.validated[-1], "kinds": kinds(model)}


def convert(folder: Path) -> dict[str, Any]:
    """Convert the last checkpoint to Lightning's file format and load it with Lightning."""
    file = folder / "whole.ckpt"
    convert_zero_checkpoint_to_fp32_state_dict(folder / "run" / "epoch=1.ckpt", file)
    model = Regression()
    model.configure_model()
    model.load_state_dict(torch.load(file, weights_only=False)["state_dict"])
    trainer = lightning.Trainer(
        accelerator="cpu", devices=1, logger=False, enable_progress_bar=False
    )
    return {"val": trainer.validate(model, loader(), ckpt_path=file, weights_only=False)[0]["val"]}


def fabric(stage: int, folder: Path) -> dict[str, Any]:
    strategy: Any = (
        FabricStrategy(config=deepspeed_config(stage) | {"gradient_clipping": 0.5})
        if stage >= 0
        else "auto"
    )
    fabric = lightning.Fabric(accelerator="cpu", devices=WORLD, strategy=strategy)
    fabric.launch()
    with fabric.init_module():
        model = network()
    model, optimizer = fabric.setup(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
    data = fabric.setup_dataloaders(loader(), use_distributed_sampler=False)

    def epoch() -> list[float]:
        losses = []
        for x, y in data:
            loss = (model(x) - y).square().mean()
            fabric.backward(loss)
            if stage < 0:
                nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(fabric.all_reduce(loss.detach(), reduce_op="mean").item())
        return losses

    told: dict[str, Any] = {"first": epoch()}
    state = {"model": model, "optimizer": optimizer, "epochs": 1}
    fabric.save(folder / "state", state)
    told["second"] = epoch()
    fabric.load(folder / "state", state)
    told["again"] = epoch()
    told |= {"kinds": kinds(model), "world": fabric.world_size}
    return told


def kinds(model: nn.Module) -> list[str]:
    return sorted({type(param).__name__ for param in model.parameters()})


def main(kind: str, stage: int, folder: Path) -> None:
    lift()
    if kind == "convert":
        told = convert(folder)
    else:
        told = (
            fabric(stage, folder)
            if kind == "fabric"
            else fit(stage, folder, resume=kind == "resume")
        )
    if int(os.environ.get("RANK", "0")) == 0:
        print("TOLD", json.dumps(told))  # noqa: T201


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), Path(sys.argv[3]))
