"""An engine's checkpoints: what of it is saved beside the slices, and what loading gives back.

The files are checkpoint/'s; counters, loss scaler, schedule and data position are read and set here.  Called by the
doors and engine.py.
"""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ..base.dropin import is_dropin_imported
from ..base.log import log_once
from ..checkpoint.catalogue import NEWEST, Keep, latest_tag, newest_good_of_all, retain
from ..checkpoint.deepspeed_load import load_deepspeed
from ..checkpoint.deepspeed_read import is_deepspeed
from ..checkpoint.deepspeed_save import misfit, save_deepspeed
from ..checkpoint.filling import KEPT_OPTIONS
from ..checkpoint.load import Loaded, LoadSettings, load
from ..checkpoint.manifest import checked_tag, together
from ..checkpoint.save import SaveSettings, Saving
from ..checkpoint.state import Contents
from .data import ShardedLoader

if TYPE_CHECKING:
    from .engine import Engine

COUNTERS = ("global_steps", "global_samples", "skipped_steps")


@dataclass(frozen=True)
class Restore:
    """What of a checkpoint an engine takes.  module_only: nothing but weights and buffers."""

    strict: bool = True
    moments: bool = True
    schedule: bool = True
    module_only: bool = False
    rng: bool = True
    verify: bool = True


class Saver:
    """The checkpoint an engine is writing, if there is one, and what goes after it.  keep: which older ones stay.

    Removing gigabytes takes a disk a while, so a thread of rank 0 does it.  It ends before the next save begins, and
    the interpreter waits for it; what a crash leaves has a hidden name, which the next removal takes too.
    """

    def __init__(self, keep: Keep | None = None) -> None:
        self.keep = keep or Keep()
        self.current: Saving | None = None
        self.commit_seconds = 0.0  # of the last one
        self._removal: threading.Thread | None = None

    def look(self) -> None:
        """Between two steps: once every rank has written its file, make the checkpoint visible.

        Collective where a checkpoint is under way.  CheckpointError on every rank where one could not write.
        """
        if self.current is None:
            return
        comm = self.current.contents.runtime.comm
        if bool(comm.rows(torch.tensor([self.current.is_over]), "whether a checkpoint is written").all()):
            self._commit()

    def finish(self) -> None:
        """Wait for the checkpoint under way, make it visible, and have removed what goes.  Collective where there is
        one under way.
        """
        self._commit()
        if self._removal is not None:
            self._removal.join()
            self._removal = None

    def _commit(self) -> None:
        saving, self.current = self.current, None
        if saving is None:
            return
        began = time.perf_counter()
        saving.commit()
        if saving.contents.runtime.comm.rank == 0:
            self._removal = threading.Thread(
                target=retain, args=(saving.final, self.keep), name="deepseek_zero removal"
            )
            self._removal.start()
        self.commit_seconds = time.perf_counter() - began


def save_checkpoint(engine: Engine, directory: str | Path, tag: Any, client: Any, settings: SaveSettings) -> Path:
    """Write `directory/tag` (`global_step<N>` without a tag).  Collective; the end of an accumulation is the time for
    it.  Without `settings.wait` a later step, or `Saver.finish`, makes it visible.
    """
    begun = engine.micro_steps % engine.config.gradient_accumulation_steps
    if begun:
        log_once(
            f"saved between two micro-batches of one step: the gradients of {begun} of them are not in the checkpoint, "
            "and a run that goes on from it takes that step from its first micro-batch again."
        )
    trainer = {name: getattr(engine, name) for name in COUNTERS}
    trainer["global_samples"] -= begun * engine.config.train_micro_batch_size_per_gpu * engine.mesh.size
    trainer["scaler"] = engine.parts.scaler.state_dict() if engine.parts.scaler is not None else None
    delay = engine.optimizer.delay if engine.optimizer is not None else None
    trainer["owed"] = delay.state_dict() if delay is not None else None
    schedule = engine.lr_scheduler
    trainer["lr_scheduler"] = schedule.state_dict() if hasattr(schedule, "state_dict") else None
    loader = engine.training_dataloader
    trainer["data"] = _position(loader, begun)
    engine.parts.saver.finish()
    contents = Contents(engine.runtime, engine.optimizer, trainer, client)
    name = str(tag) if tag is not None else f"global_step{engine.global_steps}"
    if _is_deepspeeds(engine, contents, settings):
        return save_deepspeed(Path(directory), name, contents, settings)
    saving = engine.parts.saver.current = Saving(Path(directory), name, contents, settings)
    if settings.wait:
        engine.parts.saver.finish()
    return saving.final


def _position(loader: Any, begun: int) -> Any:
    """How far the data are at the beginning of this step.  Only our own loader can tell that in the midst of one."""
    if isinstance(loader, ShardedLoader):
        return loader.state_dict(again=begun)
    return loader.state_dict() if hasattr(loader, "state_dict") else None


def _is_deepspeeds(engine: Engine, contents: Contents, settings: SaveSettings) -> bool:
    """Whether the files are DeepSpeed's.  Where nobody says: behind DeepSpeed's name, whose clients may look for them,
    unless something is asked for that only slices have.  Stage 0's files name no parameter of the optimizer: those of
    several groups could not be read back.  Collective.
    """
    told = engine.parts.saving_settings
    if told.layout != "auto":
        return told.layout == "deepspeed"
    wants_slices = not settings.wait or told.keep.last is not None or told.on_signal is not None
    if wants_slices or engine.runtime.settings.stage == 0 or not is_dropin_imported():
        return False
    problem = next(filter(None, together(engine.runtime.comm, "saving: the layout", lambda: misfit(contents))), "")
    if problem:
        log_once(f"saved as slices, not in DeepSpeed's layout: {problem}.")
    return not problem


def load_checkpoint(engine: Engine, directory: str | Path, tag: Any, restore: Restore) -> tuple[str | None, Any]:
    """Fill an engine from `directory/tag` (what `latest` names without a tag); (path, client_state).  Collective.

    tag "newest": the newest checkpoint of which every byte is right.  (None, None) and a line in the log where there
    is none, and where there is no `latest`, as DeepSpeed has it.
    """
    engine.parts.saver.finish()
    folder = Path(directory)
    verify = restore.verify
    if tag == NEWEST and not (folder / NEWEST).exists():
        tag, verify = newest_good_of_all(engine.runtime.comm, folder), False  # every byte of it has just been read
        if tag is None:
            log_once(f"no checkpoint in {folder}: training starts from the beginning.")
            return None, None
    tags = together(
        engine.runtime.comm, "loading: the tag", lambda: str(tag) if tag is not None else latest_tag(folder) or ""
    )
    chosen = tags[0]
    if not chosen:
        log_once(
            f"Unable to find latest file at {folder / 'latest'}, if trying to load latest checkpoint please ensure "
            "this file exists or pass an explicit checkpoint tag when loading a checkpoint."
        )
        return None, None
    checked_tag(chosen)
    moments = restore.moments and not restore.module_only
    contents = Contents(engine.runtime, engine.optimizer)
    theirs = together(
        engine.runtime.comm, "loading: the layout", lambda: "DeepSpeed's" if is_deepspeed(folder / chosen) else ""
    )
    read = load_deepspeed if theirs[0] else load
    settings = LoadSettings(restore.strict, moments, restore.rng and not restore.module_only, verify)
    loaded = read(folder, chosen, contents, settings)
    if not restore.module_only:
        _restore_trainer(engine, loaded, restore)
    return str(loaded.folder), loaded.client


def _restore_trainer(engine: Engine, loaded: Loaded, restore: Restore) -> None:
    saved = loaded.trainer
    for name in COUNTERS:
        setattr(engine, name, int(saved[name]))
    engine.micro_steps = engine.global_steps * engine.config.gradient_accumulation_steps
    if engine.optimizer is not None and restore.moments:
        engine.optimizer.updater.updates = engine.global_steps - engine.skipped_steps
        if engine.optimizer.delay is not None:
            engine.optimizer.delay.load_state_dict(_without_kept(saved.get("owed")))
    if restore.moments and engine.parts.scaler is not None and saved["scaler"] is not None:
        engine.parts.scaler.load_state_dict(saved["scaler"])
    if hasattr(engine.training_dataloader, "load_state_dict") and saved.get("data") is not None:
        engine.training_dataloader.load_state_dict(saved["data"])
    if restore.schedule and engine.lr_scheduler is not None and saved["lr_scheduler"] is not None:
        engine.lr_scheduler.load_state_dict(saved["lr_scheduler"])


def _without_kept(owed: dict[str, Any] | None) -> dict[str, Any] | None:
    """How to compute is the running program's to say, also for an update that a checkpoint owes."""
    if owed is None:
        return None
    hypers = [{key: value for key, value in group.items() if key not in KEPT_OPTIONS} for group in owed["hypers"]]
    return {**owed, "hypers": hypers}
