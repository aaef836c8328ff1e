"""Save and load checkpoints of an engine.

The package checkpoint/ reads and writes the files. Counters, loss scaler, learning-rate schedule
and data position are collected and restored here.
"""

from __future__ import annotations

import logging
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch

from .. import checkpoint
from ..base.errors import CheckpointError
from ..base.log import log_once
from ..base.mesh import Mesh
from ..checkpoint.catalogue import (
    Retention,
    apply_retention,
    existing_folder,
    latest_tag,
    near_directories,
    newest_good,
    tags_in,
)
from ..checkpoint.contents import (
    IMPLEMENTATION_OPTIONS,
    Contents,
    Loaded,
    LoadSettings,
    SaveSettings,
)
from ..checkpoint.extra_state import extra_states_of_all, restore_extra_states
from ..checkpoint.format import LATEST, NEWEST, checked_tag, tag_to_save
from ..checkpoint.layouts import EngineLayout, is_checkpoint, layout_named, layout_of
from ..checkpoint.lockstep import run_and_gather, run_on_first_rank
from ..checkpoint.piece import refuse_same_names
from ..checkpoint.writer_lock import WriterLock
from ..comm.collectives import Comm
from ..optim.sharded import ShardedOptimizer
from ..precision.loss_scale import LossScaler
from ..sharding.runtime import Runtime
from .data import ShardedLoader

if TYPE_CHECKING:  # as in engine.py
    from ..config import Batch, Config

COUNTERS = ("global_steps", "global_samples", "skipped_steps")


@dataclass(frozen=True)
class Restore:
    """The parts of a checkpoint that a load restores.

    Attributes:
        strict: Whether the names of parameters must match.
        moments: Whether to restore the states of the optimizer.
        schedule: Whether to restore the learning-rate schedule.
        module_only: Whether to restore only weights and buffers.
        verify: Whether to check all bytes before anything is changed.
    """

    strict: bool = True
    moments: bool = True
    schedule: bool = True
    module_only: bool = False
    verify: bool = True


class TrainerParts(Protocol):
    """The parts of an engine that a checkpoint needs."""

    saver: Saver
    scaler: LossScaler | None


class Trainer(Protocol):
    """Interface of an engine: attributes that a save reads and a load sets."""

    config: Config
    optimizer: ShardedOptimizer | None
    lr_scheduler: Any
    training_dataloader: Any
    own_batches: Iterator[Any] | None
    mesh: Mesh
    client_state: Callable[[], Mapping[str, Any]] | None
    global_steps: int
    global_samples: int
    skipped_steps: int
    micro_steps: int
    _backwards: int

    @property
    def begun(self) -> int: ...

    @property
    def runtime(self) -> Runtime: ...

    @property
    def parts(self) -> TrainerParts: ...


class Saver:
    """Publishes the checkpoints of one engine and removes older ones.

    Removing gigabytes takes time, so a thread of rank 0 does it. If ranks save into different
    folders, the first rank of each other folder has a thread that removes only the replaced
    checkpoint. The threads end before the next save begins, and the interpreter waits for them.
    After a crash, hidden folders may be left; the next removal deletes those of rank 0's folder.

    Args:
        retention: Which older checkpoints are kept.
    """

    def __init__(self, retention: Retention | None = None) -> None:
        self.retention = retention or Retention()
        self.current: checkpoint.PendingSave | None = None
        self.commit_seconds = 0.0  # time to publish the last checkpoint
        # Sizes of the data and model axes of the run that saved the loaded checkpoint
        self.loaded_ranks: Mapping[str, int] | None = None
        self._removal: threading.Thread | None = None
        self._writer_lock = WriterLock()
        self._end = weakref.finalize(self, self._writer_lock.release)

    def claim_directory(self, comm: Comm, directory: Path) -> None:
        """Lock a directory for this job.

        Args:
            comm: The communicator of all ranks, on which an error of one rank is raised on all.
            directory: The directory of the checkpoints.

        Raises:
            CheckpointError: Another job writes there; raised on every rank.

        Note:
            Collective: every rank must call it.
        """
        run_on_first_rank(
            comm,
            "saving: one job in the directory",
            lambda: self._writer_lock.acquire(directory),
        )

    def close(self) -> None:
        """Release the lock on the checkpoint directory. The engine cannot save afterwards."""
        self._writer_lock.release()

    def commit_if_written(self) -> None:
        """Publish the checkpoint in progress if every rank has written its file.

        This is called between two steps.

        Raises:
            CheckpointError: A rank could not write; raised on every rank.

        Note:
            Collective if a checkpoint is in progress.
        """
        if self.current is None:
            return
        comm = self.current.contents.runtime.comm.whole
        if bool(
            comm.all_gather_rows(
                torch.tensor([self.current.write.is_over], device="cpu"),
                "whether a checkpoint is written",
            ).all()
        ):
            self._commit()

    def finish(self) -> None:
        """Wait for the checkpoint in progress and publish it.

        Also wait until older checkpoints are removed.

        Raises:
            CheckpointError: A rank could not write; raised on every rank.

        Note:
            Collective if a checkpoint is in progress.
        """
        self._commit()
        if self._removal is not None:
            self._removal.join()
            self._removal = None

    def _commit(self) -> None:
        saving = self.current
        self.current = None
        if saving is None:
            return
        began = time.perf_counter()
        saving.commit()
        if saving.completes_folder:
            is_first = saving.contents.runtime.comm.whole.rank == 0
            # Without a manifest, a part that a crash left hidden looks like an unfinished save
            retention = self.retention if is_first else Retention()
            self._removal = threading.Thread(
                target=apply_retention,
                args=(saving.final, retention),
                name="deepseek_zero removal",
            )
            self._removal.start()
        self.commit_seconds = time.perf_counter() - began


def save_checkpoint(
    engine: Trainer,
    directory: str | Path,
    tag: Any,
    client: Any,
    settings: SaveSettings,
    *,
    preferred: str = "",
) -> Path:
    """Write a checkpoint of an engine between two steps and return its path.

    Args:
        engine: The engine whose state is saved or restored.
        directory: The directory of the checkpoints.
        tag: The name of the checkpoint; None for `global_step<N>`.
        client: The values of the program to save.
        settings: How to save. Without `wait`, a later step or `Saver.finish` publishes the
            checkpoint.
        preferred: The name of the layout to use if the configuration names none and the layout can
            hold what is saved.

    Returns:
        The path of the checkpoint.

    Raises:
        CheckpointError: A rank could not write; raised on every rank. The previous checkpoint
            stays.

    Note:
        Collective: every rank must call it.
    """
    asked = tag if tag is not None else f"global_step{engine.global_steps}"
    refuse_same_names(engine.runtime.model)
    comm = engine.runtime.comm.whole
    name = run_and_gather(comm, "saving: the tag", lambda: tag_to_save(asked))[comm.rank]
    settings = replace(settings, folders=_different_folders(comm, Path(directory)))
    num_begun = engine.begun
    if num_begun:
        log_once(
            f"saved between two micro-batches of a step: the gradients of {num_begun} of them "
            "are not in the checkpoint, and a resumed run repeats that step from its "
            "first micro-batch."
        )
    trainer = {name: getattr(engine, name) for name in COUNTERS}
    batch = engine.config.batch
    trainer["global_samples"] -= num_begun * batch.micro * batch.data_size
    trainer["batch"] = _sizes(batch)
    trainer["ranks"] = {"data": engine.mesh.data_size, "model": engine.mesh.tp}
    trainer["scaler"] = (
        engine.parts.scaler.state_dict() if engine.parts.scaler is not None else None
    )
    trainer["owed"] = None
    trainer["extra_state"] = extra_states_of_all(engine.runtime)
    for policy in engine.optimizer.policies if engine.optimizer is not None else ():
        if policy.checkpoint_key:
            trainer[policy.checkpoint_key] = policy.state_dict()
    schedule = engine.lr_scheduler
    trainer["lr_scheduler"] = schedule.state_dict() if hasattr(schedule, "state_dict") else None
    loader = engine.training_dataloader
    trainer["has_own_loader"] = isinstance(loader, ShardedLoader)
    if isinstance(loader, ShardedLoader):  # only our own loader knows where the step began
        trainer["data"] = loader.state_dict(again=num_begun)
    else:
        trainer["data"] = loader.state_dict() if hasattr(loader, "state_dict") else None
    engine.parts.saver.finish()
    engine.parts.saver.claim_directory(comm, Path(directory))
    contents = Contents(engine.runtime, engine.optimizer, trainer, client)
    foreign = _foreign_layout(engine, contents, settings, preferred)
    if foreign is not None:
        return foreign.save(Path(directory), name, contents, settings)
    saving = checkpoint.PendingSave(Path(directory), name, contents, settings)
    engine.parts.saver.current = saving
    if settings.wait:
        engine.parts.saver.finish()
    return saving.final


def _different_folders(comm: Comm, directory: Path) -> tuple[str, ...]:
    """Return the folder of each rank, or nothing if all are the same.

    Note:
        Collective: every rank must call it.
    """
    folders = run_and_gather(comm, "saving: the folders", lambda: os.path.realpath(directory))
    other = next((rank for rank, folder in enumerate(folders) if folder != folders[0]), None)
    if other is None:
        return ()
    log_once(
        f"ranks save into different folders: rank 0 into {folders[0]}, rank {other} into "
        f"{folders[other]}.  Each rank writes its own file there; put the folders together in one "
        "place before they are loaded.",
        logging.WARNING,
    )
    return tuple(folders)


def _foreign_layout(
    engine: Trainer, contents: Contents, settings: SaveSettings, preferred: str
) -> EngineLayout | None:
    """Return the layout to save in; None for our own. Every rank must call it.

    If the configuration names none, the preferred layout is used, unless something is saved that
    only our own can hold.
    """
    chosen = engine.config.checkpoint
    if chosen.layout != "auto":
        named = layout_named(chosen.layout)
        if isinstance(named, EngineLayout) and settings.folders:
            raise CheckpointError(
                f"ranks save into different folders, but checkpoint.layout is {named.title}.",
                "Files in that layout contain the states of several ranks.",
                'pass one folder on all ranks, or set checkpoint.layout to "slices".',
            )
        if not isinstance(named, EngineLayout):
            return None
        unused = ["wait=False"] if not settings.wait else []
        unused += ["checkpoint.keep_last"] if chosen.keep_last is not None else []
        if unused:
            log_once(
                f"{' and '.join(unused)}: no effect, because checkpoint.layout is {named.title}.",
                logging.WARNING,
            )
        return named
    wants_slices = (
        not settings.wait or chosen.keep_last is not None or chosen.save_on_signal.path is not None
    )
    if not preferred or wants_slices or settings.folders:
        return None
    layout = layout_named(preferred)
    assert isinstance(layout, EngineLayout)
    reasons = run_and_gather(
        engine.runtime.comm.whole,
        "saving: the layout",
        lambda: layout.unsupported_reason(contents),
    )
    reason = next(filter(None, reasons), "")
    if reason:
        log_once(f"saved as slices, not in {layout.title}: {reason}.")
        return None
    return layout


def load_checkpoint(
    engine: Trainer, directory: str | Path, tag: Any, restore: Restore
) -> tuple[str | None, Any]:
    """Load a checkpoint into an engine, and return (path, client_state).

    The tag "newest" takes the newest checkpoint whose bytes are all correct, in any layout. It is
    also used, with a warning, if `latest` is missing or empty next to checkpoints, so that a run
    with checkpoints never starts from the beginning. Without any checkpoint the result is (None,
    None), and a warning is logged; for "newest" only a line, unless a folder with a similar name
    has checkpoints.

    Args:
        engine: The engine whose state is saved or restored.
        directory: The directory of the checkpoints.
        tag: The name of the checkpoint; None for the one that `latest` names.
        restore: Which parts of the checkpoint are applied.

    Returns:
        The path of the loaded checkpoint and its client state; (None, None) if there is none.

    Raises:
        CheckpointError: The checkpoint does not fit or is damaged; raised on every rank. The engine
            has not changed.

    Note:
        Collective: every rank must call it.
    """
    engine.parts.saver.finish()
    comm = engine.runtime.comm.whole
    folder, chosen, is_verified = _choose_checkpoint(comm, Path(directory), tag)
    if not chosen:
        return None, None
    verify = restore.verify and not is_verified
    moments = restore.moments and not restore.module_only
    contents = Contents(engine.runtime, engine.optimizer)
    if not restore.module_only:
        contents.check_trainer = partial(_refuse_other_loader, engine.training_dataloader)

    def name_of_layout() -> str:
        layout = layout_of(existing_folder(folder, chosen))
        return layout.name if isinstance(layout, EngineLayout) else ""

    name = run_and_gather(comm, "loading: the layout", name_of_layout)[0]
    layout = layout_named(name) if name else None
    settings = LoadSettings(restore.strict, moments, not restore.module_only, verify)
    read = layout.load if isinstance(layout, EngineLayout) else checkpoint.load_slices
    # States that inference mode creates could not be updated outside of it.
    with torch.inference_mode(_is_inference(engine.runtime)):
        loaded = read(folder, chosen, contents, settings)
    restore_extra_states(engine.runtime.model, loaded.trainer.get("extra_state") or {})
    if not restore.module_only:
        _restore_counters(
            engine, loaded, has_moments=restore.moments, has_schedule=restore.schedule
        )
    return str(loaded.folder), loaded.client


def _refuse_other_loader(loader: Any, saved: Mapping[str, Any]) -> None:
    """Raise CheckpointError if a loader of the program would load the state of our own loader.

    The opposite case is only a warning of our own loader, which then begins again.
    """
    is_own = isinstance(loader, ShardedLoader) or not hasattr(loader, "load_state_dict")
    if not is_own and saved.get("has_own_loader"):
        name = type(loader).__name__
        raise CheckpointError(
            "the checkpoint has the position of the loader that initialize returned, and "
            f"engine.training_dataloader is of the class {name}.",
            f"{name}.load_state_dict cannot read the state of another class.",
            "pass the data to initialize as before, or set engine.training_dataloader after "
            "load_checkpoint, which starts these data from their beginning.",
        )


def _is_inference(runtime: Runtime) -> bool:
    """Return whether the engine was built in inference mode, so that it can only run inference."""
    return any(group.weight.memory.is_inference() for group in runtime.groups)


def _choose_checkpoint(comm: Comm, folder: Path, tag: Any) -> tuple[Path, str, bool]:
    """Return the checkpoint to load. Rank 0 decides, and every rank must call it.

    Returns:
        The directory, the tag (empty if there is no checkpoint), and whether all its bytes have
        just been read.
    """

    def choose() -> tuple[str, str]:
        if folder.is_file():
            raise CheckpointError(
                f"load_checkpoint() got the file '{folder}'.",
                "It loads from a directory of checkpoints, which save_checkpoint() was given.",
                "pass that directory; weights in a safetensors file are loaded by load_weights().",
            )
        if tag in (None, NEWEST) and is_checkpoint(folder) and not tags_in(folder):
            return "itself", folder.absolute().name
        named = latest_tag(folder) if tag is None else tag
        # The name of a checkpoint takes precedence over its meaning
        if named is None or (named == NEWEST and not (folder / NEWEST).exists()):
            return "newest", named or ""
        return "named", checked_tag(named)

    way, chosen = run_and_gather(comm, "loading: the tag", choose)[0]
    if way == "itself":
        log_once(
            f"{folder} is a checkpoint itself: tag '{chosen}' of {folder.parent} is loaded.",
            logging.WARNING,
        )
        return folder.absolute().parent, chosen, False
    if way == "named":
        return folder, chosen, False
    newest = newest_good(comm, folder)
    if newest is not None and not chosen:
        log_once(
            f"{folder / LATEST} is missing or empty: '{newest}', the newest good checkpoint there, "
            "is loaded. Pass a tag to load another one.",
            logging.WARNING,
        )
    elif newest is None and comm.rank == 0:
        _warn_of_nothing(folder, is_expected=bool(chosen))
    return folder, newest or "", True


def _warn_of_nothing(folder: Path, *, is_expected: bool) -> None:
    """Log that a folder has no checkpoint, and which ones may be meant.

    Args:
        folder: The folder.
        is_expected: Whether the program asks for the newest checkpoint at each start, so it finds
            none at first.
    """
    near = near_directories(folder)
    where = (
        f"no checkpoint in '{folder.absolute()}'"
        if folder.is_dir()
        else f"'{folder.absolute()}' does not exist"
    )
    hint = f" Did you mean {' or '.join(repr(str(path)) for path in near)}?" if near else ""
    level = logging.INFO if is_expected and not near else logging.WARNING
    log_once(f"{where}: nothing is loaded, and training starts from the beginning.{hint}", level)


def _restore_counters(
    engine: Trainer, loaded: Loaded, *, has_moments: bool, has_schedule: bool
) -> None:
    saved = loaded.trainer
    optimizer = engine.optimizer
    for name in COUNTERS:
        setattr(engine, name, int(saved[name]))
    engine.micro_steps = engine.global_steps * engine.config.gradient_accumulation_steps
    engine._backwards = 0  # the load has dropped their gradients
    engine.parts.saver.loaded_ranks = saved.get("ranks")
    _warn_of_other_batch(engine, saved.get("batch"))
    scaler = saved["scaler"]
    if has_moments and engine.parts.scaler is not None and scaler is not None:
        engine.parts.scaler.load_state_dict(scaler)
    if optimizer is not None:
        if has_moments:
            optimizer.updater.updates = engine.global_steps - engine.skipped_steps
        for policy in optimizer.policies:
            if policy.checkpoint_key and (has_moments or not policy.needs_moments):
                state = saved.get(policy.checkpoint_key)
                for group in (state or {}).get("hypers", ()):
                    # The running program chooses the implementation of an update
                    for option in IMPLEMENTATION_OPTIONS:
                        group.pop(option, None)
                policy.load_state_dict(state)
        saved_scale = scaler["scale"] if scaler is not None else 1.0
        for policy in optimizer.policies if has_moments else ():
            policy.states_loaded(optimizer.loss_scale / saved_scale)
    if hasattr(engine.training_dataloader, "load_state_dict") and saved.get("data") is not None:
        engine.training_dataloader.load_state_dict(saved["data"])
        engine.own_batches = None  # an iterator of before would continue at its own position
    if has_schedule and engine.lr_scheduler is not None and saved["lr_scheduler"] is not None:
        if hasattr(engine.lr_scheduler, "load_state_dict"):
            engine.lr_scheduler.load_state_dict(saved["lr_scheduler"])
        else:
            log_once(
                f"the learning-rate schedule {type(engine.lr_scheduler).__name__} has no "
                "load_state_dict: it starts from its beginning.",
                logging.WARNING,
            )


def _warn_of_other_batch(engine: Trainer, saved: Mapping[str, Any] | None) -> None:
    """Warn if a step takes another number of samples than before the checkpoint."""
    now = _sizes(engine.config.batch)
    if saved is None or saved["train"] == now["train"]:
        return
    before, after = (
        f"{each['micro']} x {each['accumulation']} x "
        f"{each['train'] // (each['micro'] * each['accumulation'])}"
        for each in (saved, now)
    )
    log_once(
        f"the global batch was {saved['train']} samples a step when the checkpoint was saved, and "
        f"is {now['train']} now: micro-batch x accumulation x ranks was {before} and is {after}.  "
        "The losses will differ from those of an uninterrupted run.  To keep the batch, set "
        f'"train_batch_size": {saved["train"]} in the configuration and remove '
        '"gradient_accumulation_steps"; otherwise adjust the learning rate.',
        logging.WARNING,
    )


def _sizes(batch: Batch) -> dict[str, int]:
    return {"train": batch.train, "micro": batch.micro, "accumulation": batch.accumulation}
