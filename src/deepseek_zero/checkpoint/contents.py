"""What an engine hands to a layout and what it gets back: the states, how they are saved and
loaded, the plain values.

Every layout that an engine can save in speaks in these words (`EngineLayout`, and save.py and
load.py for our own).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..optim.sharded import ShardedOptimizer
from ..sharding.runtime import Runtime

# What a group says about how to compute, not about what was learnt: the running program decides.
IMPLEMENTATION_OPTIONS = frozenset(
    {"params", "param_names", "fused", "foreach", "capturable", "differentiable"}
)


@dataclass
class Contents:
    """The states that a checkpoint is made of.

    trainer: counters, scaler and schedule.  client: the caller's own.  Both are plain values and
    tensors.
    """

    runtime: Runtime
    optimizer: ShardedOptimizer | None
    trainer: dict[str, Any] = field(default_factory=dict)
    client: Any = None


@dataclass(frozen=True)
class SaveSettings:
    """How a checkpoint is saved.

    latest: point `latest` at it.  exclude_frozen: leave out parameters that are not trained.
    tag_validation: Ignore, Warn or Fail when ranks name different tags.  wait: return when it is on
    the disk; else write while training goes on, where no state rests on a disk.  snapshot_bytes:
    how much each rank may copy meanwhile of states that a step is
    about to change.  folders: the folder that each rank names, if they differ; empty if all ranks
    name one.
    """

    latest: bool = True
    exclude_frozen: bool = False
    tag_validation: str = "Warn"
    wait: bool = True
    snapshot_bytes: int = 1 << 30
    folders: tuple[str, ...] = ()


@dataclass(frozen=True)
class LoadSettings:
    """What a load restores, and what it compares first.

    strict: names of the model and of the checkpoint must be the same.  moments: restore the
    optimizer's state.  rng: restore random generators, at the world size they were saved with.
    verify: compare every byte with its checksum before anything changes; each rank reads its part
    of the files, and moments twice only where they replace others.
    """

    strict: bool = True
    moments: bool = True
    rng: bool = True
    verify: bool = True


@dataclass(frozen=True)
class Loaded:
    """The plain values of a checkpoint that was loaded, as they were saved."""

    folder: Path
    trainer: dict[str, Any]
    client: Any
