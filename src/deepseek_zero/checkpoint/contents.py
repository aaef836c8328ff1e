"""Define the data that an engine and a checkpoint layout exchange.

Every layout that an engine can save to uses these classes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..optim.sharded import ShardedOptimizer
from ..sharding.runtime import Runtime
from .numpy_values import Plain

# Options of the implementation, which the running program sets. They are not learned state.
IMPLEMENTATION_OPTIONS = frozenset(
    {"params", "param_names", "fused", "foreach", "capturable", "differentiable"}
)


@dataclass
class Contents:
    """The states of an engine that a checkpoint saves or restores.

    Attributes:
        runtime: The runtime with the model's parameters and buffers.
        optimizer: The optimizer, if any.
        trainer: Counters, loss scaler and schedule, as plain values and tensors.
        client: The caller's own plain values and tensors.
        check_trainer: A load calls it with the saved `trainer` before it changes the engine. It
            raises CheckpointError if the engine cannot take these values.
    """

    runtime: Runtime
    optimizer: ShardedOptimizer | None
    trainer: Plain = field(default_factory=dict)
    client: Any = None
    check_trainer: Callable[[Plain], None] | None = None


@dataclass(frozen=True)
class SaveSettings:
    """What a save writes, and whether it returns before the files are complete.

    Attributes:
        latest: Whether to write the tag into the file `latest`.
        exclude_frozen: Whether to omit parameters that are not trained.
        tag_validation: "Ignore", "Warn" or "Fail" if ranks pass different tags.
        wait: Whether to return after the checkpoint is on the disk. Otherwise it is written during
            training, unless a state is stored on a disk.
        snapshot_bytes: Maximum bytes per rank for copies of unwritten states that a step is about
            to change.
        folders: The folder of each rank if they differ; empty if all ranks use the same folder.
    """

    latest: bool = True
    exclude_frozen: bool = False
    tag_validation: str = "Warn"
    wait: bool = True
    snapshot_bytes: int = 1 << 30
    folders: tuple[str, ...] = ()


@dataclass(frozen=True)
class LoadSettings:
    """What a load restores, and how it checks the files.

    Attributes:
        strict: Whether to require the same names in the model and the checkpoint.
        moments: Whether to restore the optimizer's state.
        rng: Whether to restore random generators if the data are divided among as many ranks as
            when saving.
        verify: Whether to compare every byte with its checksum before anything changes. Each rank
            reads its part of the files; moments are read twice only if they replace existing ones.
    """

    strict: bool = True
    moments: bool = True
    rng: bool = True
    verify: bool = True


@dataclass(frozen=True)
class Loaded:
    """The plain values of a loaded checkpoint.

    Attributes:
        folder: Path of the loaded checkpoint.
        trainer: Counters, loss scaler and learning-rate schedule.
        client: The `client_state` that the caller saved.
    """

    folder: Path
    trainer: Plain
    client: Any
