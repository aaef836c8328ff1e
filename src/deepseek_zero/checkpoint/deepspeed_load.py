"""Loads a genuine DeepSpeed checkpoint into an engine of any world size and stage, by the same reshape as ours.

Called by engine/saving.py.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from ..base.errors import CheckpointError
from ..optim.sharded import ShardedOptimizer
from .deepspeed_read import DeepSpeedCheckpoint, read_deepspeed
from .format import MOMENT, run_and_gather
from .load import (
    Loaded,
    LoadSettings,
    check,
    replace_states,
    restore_buffers,
    restore_optimizer,
    restore_weights,
    split_as_saved,
)
from .state import Contents
from .verify import FileSubset, raise_faults, verify

# States of an optimizer with elements, where it has them from its first step on: what tells one from another in a file
# that says no name.
STATES = {
    "Adam": {"exp_avg", "exp_avg_sq"},
    "AdamW": {"exp_avg", "exp_avg_sq"},
    "Lamb": {"exp_avg", "exp_avg_sq"},
    "Lion": {"exp_avg"},
    "Adagrad": {"sum"},
    "SGD": {"momentum_buffer"},
}


def load_deepspeed(directory: Path, tag: str, contents: Contents, settings: LoadSettings) -> Loaded:
    """Fill weights, masters and moments from DeepSpeed's files in `directory/tag`.  Collective.

    settings.verify: compare the records of the files with the CRC-32s in them first, which is all they have: each rank
    reads its share of the files.
    """
    runtime, folder = contents.runtime, directory / tag
    opened: list[DeepSpeedCheckpoint] = []
    runtime.follow_requires_grad()
    trained = frozenset(member.name for group in runtime.trained_groups for member in group.members)

    def look() -> str:
        found = read_deepspeed(folder, trained)
        check(found.manifest, contents, replace(settings, moments=False))
        if settings.moments and contents.optimizer is not None:
            _check_states(found, contents.optimizer)
            split_as_saved(found.manifest, lambda name: found.keys(MOMENT, name), contents.optimizer)
        opened.append(found)
        return ""

    def fill() -> str:
        reader: Any = found  # reads as load.Reader does
        restore_weights(reader, contents)
        restore_buffers(reader, found.manifest, contents)
        if settings.moments and contents.optimizer is not None:
            groups = _known(found.plain["groups"], contents.optimizer)
            restore_optimizer(reader, found.manifest, groups, contents.optimizer)
        return ""

    def check_bytes() -> str:
        raise_faults(folder, verify(folder, FileSubset(runtime.comm.rank, runtime.comm.size)))
        return ""

    if settings.verify:
        run_and_gather(runtime.comm, f"loading {tag}: checksums", check_bytes)
    run_and_gather(runtime.comm, f"loading {tag}: DeepSpeed's files", look)
    found = opened[0]
    replace_states(contents, tag, fill)
    return Loaded(folder, found.plain["trainer"], found.plain["client"])


def _check_states(found: DeepSpeedCheckpoint, optimizer: ShardedOptimizer) -> None:
    """Raise if the files' moments are another optimizer's."""
    fix = "load with load_optimizer_states=False, or use the optimizer that was saved."
    if found.moments_problem:
        raise CheckpointError(f"the moments in {found.folder} cannot be used: {found.moments_problem}.", fix=fix)
    mine = type(optimizer.inner).__name__
    there = {key for (kind, _), states in found.segments.items() if kind == MOMENT for key in states}
    wanted = STATES.get(mine)
    if wanted is not None and there and there != wanted:
        raise CheckpointError(
            f"the checkpoint has the states {', '.join(sorted(there))}; {mine} has {', '.join(sorted(wanted))}.",
            fix=fix,
        )
    groups = len(found.plain["groups"])
    if groups != len(optimizer.param_groups):
        raise CheckpointError(
            f"the checkpoint has {groups} parameter groups, the optimizer has {len(optimizer.param_groups)}.", fix=fix
        )


def _known(groups: list[dict[str, Any]], optimizer: ShardedOptimizer) -> list[dict[str, Any]]:
    """Of the saved hyper-parameters those that the optimizer has too; DeepSpeed's kernels have words of their own."""
    return [
        {key: value for key, value in saved.items() if key in mine}
        for saved, mine in zip(groups, optimizer.param_groups, strict=True)
    ]
