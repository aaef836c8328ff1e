"""The loop that tests of the truth contract share: one engine, a few steps, what a run may vary.

Owns the description of a run and its loop.  Models and batches are tests/models.py's; the run
without sharding is tests/reference.py's.
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
    """What the truth contract is parametrised over. ahead: stage3_prefetch_bucket_size; fused: take
    torch's default
    kernels.  tier: where everything rests that the stage lets rest elsewhere.  updates: keys of
    offload_optimizer.
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
        """The run in DeepSpeed's words."""
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
    """The keys that put states, weights, or both to rest on a tier ("none", "cpu", "nvme").  keys:
    of offload_optimizer too.
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
    """A block that must end in an error on every rank, since `os.call` of this rank gives errno
    `number`: StorageError there, on the others a PeerError that quotes it.
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
    """The engine of a run over `model`, with the run's optimizer or `make`'s.  Collective in a
    world of several.
    """
    optimizer = (make or OPTIMIZERS[run.optimizer])(list(model.parameters()))
    return deepseek_zero.initialize(model=model, optimizer=optimizer, config=run.config())[0]


def train_step(engine: Any, run: Run, step: int) -> list[Tensor]:
    """One optimizer step on this rank's micro-batches; their losses."""
    losses = []
    for micro in range(run.accumulation):
        batch = batch_of(step, micro, dist.get_rank())
        loss = engine(batch.tokens, batch.targets)
        engine.backward(loss)
        engine.step()
        losses.append(loss.detach())
    return losses


def assert_is_sharded(engine: Any) -> None:
    """Stage 3 with persistence 0: every parameter is at rest and each rank stores padded numel /
    ranks elements.
    """
    ranks = dist.get_world_size()
    assert all(type(parameter) is ShardedParameter for parameter in engine.module.parameters())
    for group in engine.runtime.groups:
        assert group.weight.memory.numel() * ranks == group.layout.padded_numel
        assert group.layout.numel <= group.layout.padded_numel < group.layout.numel + 1024 * ranks
