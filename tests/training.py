"""The training loop of the bitwise-equality tests: one engine, a few steps, and the options of a
run.

Models and batches are in tests/models.py, and the unsharded run is in tests/reference.py.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import deepseek_zero
from deepseek_zero.base.errors import PeerError, StorageError
from deepseek_zero.sharding.sharded_parameter import ShardedParameter
from tests.models import batch_of
from tests.reference import OPTIMIZERS, MakeOptimizer

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
ALL = 10**9  # a window that never closes


@dataclass(frozen=True)
class Run:
    """The options of a run in the bitwise-equality tests.

    Attributes:
        ahead: stage3_prefetch_bucket_size.
        fused: Use torch's default kernels.
        tier: Where everything is offloaded that the stage can offload.
        updates: Keys of offload_optimizer.
    """

    stage: int
    dtype: str = "fp32"
    accumulation: int = 1
    window: int = 0
    clipping: float = 0.0
    optimizer: str = "sgd"
    persistence: int = 0
    ahead: int = 50_000_000
    keep: int = ALL
    bucket: int = 500_000_000
    overlap: bool = True
    transport: str = "fastest"
    master: str = "split"
    tier: str = "none"
    moments: str = "fp32"
    updates: tuple[tuple[str, Any], ...] = ()
    ranks_per_host: int | None = None

    def config(self) -> dict[str, Any]:
        """Return the run as a DeepSpeed configuration."""
        return {
            "train_micro_batch_size_per_gpu": 2,
            "gradient_accumulation_steps": self.accumulation,
            "gradient_clipping": self.clipping,
            "steps_per_print": None,
            "transport": self.transport,
            "ranks_per_host": self.ranks_per_host,
            "optimizer": {"moments": self.moments},
            "bf16": {"enabled": self.dtype == "bf16", "master": self.master},
            "zero_optimization": {
                "stage": self.stage,
                "stage3_param_persistence_threshold": self.persistence,
                "stage3_max_live_parameters": self.window,
                "stage3_max_reuse_distance": self.keep,
                "stage3_prefetch_bucket_size": self.ahead,
                "reduce_bucket_size": self.bucket,
                "overlap_comm": self.overlap,
                **offload(
                    self.tier, states=self.stage >= 1, weights=self.stage == 3, **dict(self.updates)
                ),
            },
        }


def offload(tier: str, *, states: bool = True, weights: bool = True, **keys: Any) -> dict[str, Any]:
    """Return keys that offload states, weights or both to a tier ("none", "cpu" or "nvme").

    keys: additional keys of offload_optimizer.
    """
    place = {"device": tier, "nvme_path": tempfile.gettempdir()}
    asked = {"offload_optimizer": states, "offload_param": weights}
    return {
        name: place | (keys if states and name == "offload_optimizer" else {})
        for name in asked
        if asked[name]
    }


@contextmanager
def a_disk_that_refuses(
    call: str, number: int, monkeypatch: pytest.MonkeyPatch, *, rank: int
) -> Iterator[None]:
    """Make `os.call` fail with errno `number` on one rank within a block.

    The block must raise StorageError on that rank, and on the others a PeerError that quotes it.
    """

    def refuse(*given: object) -> int:
        raise OSError(number, os.strerror(number))

    is_here = dist.get_rank() == rank
    with monkeypatch.context() as broken:
        if is_here:
            broken.setattr(os, call, refuse)
        with pytest.raises(StorageError if is_here else PeerError, match=os.strerror(number)):
            yield


def start_engine(run: Run, model: nn.Module, make: MakeOptimizer | None = None) -> Any:
    """Return the engine of a run over `model`, with the run's optimizer or `make`'s.

    Collective over all ranks.
    """
    optimizer = (make or OPTIMIZERS[run.optimizer])(list(model.parameters()))
    return deepseek_zero.initialize(model=model, optimizer=optimizer, config=run.config())[0]


def train_step(engine: Any, run: Run, step: int) -> list[Tensor]:
    """Run one optimizer step on this rank's micro-batches and return their losses."""
    losses = []
    for micro in range(run.accumulation):
        batch = batch_of(step, micro, dist.get_rank())
        loss = engine(batch.tokens, batch.targets)
        engine.backward(loss)
        engine.step()
        losses.append(loss.detach())
    return losses


def assert_is_sharded(engine: Any) -> None:
    """Check that stage 3 with persistence 0 shards every parameter.

    Each rank must store `padded_numel / ranks` elements of each group.
    """
    ranks = dist.get_world_size()
    assert all(type(parameter) is ShardedParameter for parameter in engine.module.parameters())
    for group in engine.runtime.groups:
        assert group.weight.memory.numel() * ranks == group.layout.padded_numel
        assert group.layout.numel <= group.layout.padded_numel < group.layout.numel + 1024 * ranks
