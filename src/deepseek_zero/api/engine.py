"""The engine that `initialize` returns.

`ZeroEngine` adds checkpoints, exports, state offload, reports and compilation to the training loop
of `Engine`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .. import attention, checkpoint, engine, report
from ..base.errors import NotBuiltError, UsageError
from ..base.given import path_of, refuse, whole_number
from ..base.log import log_once
from ..base.mesh import Mesh
from ..base.world import is_rank_zero
from ..checkpoint.contents import SaveSettings
from ..checkpoint.format import LATEST, LATEST_UNIVERSAL
from ..checkpoint.piece import frozen_names
from ..comm.collectives import propagate_errors
from ..engine import saving
from ..engine.data import ShardedLoader
from ..engine.engine import Engine
from ..engine.exporting import Exports
from ..engine.memory import memory_report, traced
from ..engine.micro_batches import change_accumulation, refuse_destroyed
from ..engine.parts import Parts
from ..engine.state_offload import KINDS, StateOffload
from ..optim.inner_states import load_states
from ..report.measure import MemoryReport
from ..sharding.irregular_passes import reduce_step
from ..sharding.step_state import Phase

if TYPE_CHECKING:  # as in engine.py
    from ..config import Config


class NoFolderError(UsageError, ValueError):
    """Raised if `save_checkpoint` is called without a folder.

    Also a ValueError, as in DeepSpeed.
    """


class ZeroEngine(Exports, Engine):
    """A training engine: a sharded model with its optimizer and learning-rate schedule.

    `initialize` creates it. Attributes that the engine does not have are looked up in the model.

    Attributes:
        client_state: A function that returns the `client_state` of checkpoints that the program
            does not request itself (`checkpoint.save_on_signal`), or None.
        preferred_layout: Layout of checkpoints if the configuration names none.

    Example:
        >>> for batch in loader:
        ...     loss = engine(batch)
        ...     engine.backward(loss)
        ...     engine.step()
        >>> engine.save_checkpoint("checkpoints")
    """

    preferred_layout = ""  # layout of checkpoints if the configuration names none
    _compiled_units: Sequence[Callable[[], None]] = ()
    _timeline: report.Timeline | None = None  # of the innermost `timeline` block
    _has_logged_direct_step = False

    def __init__(
        self,
        config: Config,
        mesh: Mesh,
        parts: Parts,
        lr_scheduler: Any = None,
        training_dataloader: Any = None,
    ) -> None:
        super().__init__(config, mesh, parts, lr_scheduler, training_dataloader)
        if parts.optimizer is not None:
            parts.optimizer.step_through(self._step_directly)

    @cached_property
    def _states(self) -> StateOffload:
        return StateOffload(self.runtime, self.parts.optimizer)

    # -- attributes of the optimizer, which Lightning reads from the engine

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """Return the optimizer's parameter groups, or an empty list without an optimizer."""
        return self.optimizer.param_groups if self.optimizer is not None else []

    @property
    def state(self) -> Any:
        """Return the optimizer's state by parameter, or {} without an optimizer.

        States on another memory tier are fetched first.
        """
        return load_states(self.optimizer.shard_set) if self.optimizer is not None else {}

    @property
    def defaults(self) -> dict[str, Any]:
        """Return the optimizer's default hyperparameters, or {} without an optimizer."""
        return self.optimizer.defaults if self.optimizer is not None else {}

    # -- batch size, gradient norm and learning rate

    def train_batch_size(self) -> int:
        """Return the number of samples per step, over all ranks."""
        return self.config.train_batch_size

    def train_micro_batch_size_per_gpu(self) -> int:
        """Return the number of samples per micro-batch of one rank."""
        return self.config.train_micro_batch_size_per_gpu

    def gradient_accumulation_steps(self) -> int:
        """Return the number of micro-batches whose gradients one step accumulates."""
        return self.config.gradient_accumulation_steps

    def get_global_grad_norm(self) -> float | None:
        """Return the global gradient norm of the last step, or None before the first one."""
        optimizer = self.optimizer
        return optimizer.last_norm if optimizer is not None and optimizer.last is not None else None

    def get_lr(self) -> list[float]:
        """Return the learning rate of each parameter group."""
        return [group["lr"] for group in self.param_groups]

    # -- batches

    def train_batch(self, data_iter: Iterator[Any] | None = None) -> Tensor:
        """Train on one batch: `gradient_accumulation_steps` micro-batches, then one update.

        Args:
            data_iter: Iterator over micro-batches. All stages of a pipeline must get the same
                micro-batches. The ranks of one sequence must get the whole sequence, or each its
                part of it. With None, they are read from the engine's own loader, which starts
                again after each epoch.

        Returns:
            The mean loss over the micro-batches of all ranks, a scalar, the same on every rank.

        Note:
            Collective: every rank of the world must call it.
        """
        return engine.train_batch(self, data_iter)

    def eval_batch(self, data_iter: Iterator[Any], num_micro_batches: int | None = None) -> Tensor:
        """Return the mean loss of micro-batches, computed without a backward.

        Args:
            data_iter: Iterator over micro-batches. All stages of a pipeline must get the same
                micro-batches. The ranks of one sequence must get the whole sequence, or each its
                part of it.
            num_micro_batches: The number of micro-batches; None means
                `gradient_accumulation_steps`.

        Returns:
            The mean loss over the micro-batches of all ranks, a scalar, the same on every rank.

        Note:
            Collective: every rank of the world must call it.
        """
        found, _ = engine.evaluate(self, data_iter, num_micro_batches)
        assert found is not None
        return found

    def set_gradient_accumulation_boundary(self, is_boundary: bool) -> None:
        """Set whether the following micro-batches end the accumulation of gradients.

        The setting is valid until the next call, and replaces the count of
        `gradient_accumulation_steps`.

        Args:
            is_boundary: Whether `step` after the next backward updates the weights.

        Raises:
            UsageError: `managed_gradient_accumulation` is false.

        Note:
            Every rank must make the same call. It does not communicate.
        """
        if not self.config.managed_gradient_accumulation:
            raise UsageError(
                "set_gradient_accumulation_boundary() has no meaning where "
                "managed_gradient_accumulation is false.",
                "Every step() updates there.",
                "call step() where the accumulation ends, or leave the key out.",
            )
        self._boundary = is_boundary

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulate gradients without reducing them; only for stages 0 and 1.

        Their gradients are whole on every rank until the accumulation boundary.

        Raises:
            UsageError: Gradients are sharded, or the call is inside another such context.
        """
        if self.runtime.settings.stage >= 2:
            raise UsageError(
                "no_sync context manager is incompatible with gradients that are sharded: ZeRO "
                f"stage {self.runtime.settings.stage}.",
                "A sharded gradient has nowhere to wait: each rank keeps only its slice, so every "
                "backward reduces.",
                "use gradient_accumulation_steps, or stage 0 or 1.",
            )
        with self.held_reductions.inside("no_sync"):
            held = self._boundary
            self._boundary = False
            try:
                yield
            finally:
                self._boundary = held

    def set_train_batch_size(self, train_batch_size: int) -> None:
        """Change the samples per step by accumulating more or fewer micro-batches.

        Args:
            train_batch_size: The samples of a step, over all ranks.

        Raises:
            UsageError: The size is not a multiple of the samples of one micro-batch of all ranks,
                or the call is inside an accumulation.

        Note:
            Every rank must call it, between two steps. It does not communicate.
        """
        whole_number("set_train_batch_size", "train_batch_size", train_batch_size, 1)
        batch = self.config.batch
        per_micro = batch.micro * batch.data_size
        if train_batch_size < per_micro or train_batch_size % per_micro:
            raise UsageError(
                "Train batch size must be divisible by micro-batch data parallelism: "
                f"{train_batch_size} is not a multiple of {per_micro} ({batch.micro} per "
                f"rank x {batch.data_size} ranks).",
                "Only the number of micro-batches per step can change.",
                f"choose a multiple of {per_micro}.",
            )
        self._resize(batch.micro, train_batch_size // per_micro)

    def set_train_micro_batch_size(self, micro_batch_size: int) -> None:
        """Change the samples per micro-batch; the accumulation steps do not change.

        Existing data loaders keep their batch size.

        Args:
            micro_batch_size: The samples of a micro-batch of one rank.

        Raises:
            UsageError: The size is not a positive integer, or the call is inside an accumulation.

        Note:
            Every rank must call it, between two steps. It does not communicate.
        """
        whole_number("set_train_micro_batch_size", "micro_batch_size", micro_batch_size, 1)
        self._resize(micro_batch_size, self.config.gradient_accumulation_steps)

    def _resize(self, micro: int, accumulation: int) -> None:
        if self.begun:
            raise UsageError(
                "the batch size was changed between two micro-batches of one step.",
                "Gradients already summed would be divided by the wrong number.",
                "change it right after a step() that updated the weights.",
            )
        before = self.config.batch
        train = micro * accumulation * before.data_size
        self.parts.advice.batch = micro, accumulation
        changes = {
            "train_micro_batch_size_per_gpu": micro,
            "gradient_accumulation_steps": accumulation,
            "train_batch_size": train,
        }
        # `engine.config` shows the new sizes.
        self.config = self.config.model_copy(update=changes)
        if accumulation != before.accumulation:
            self.micro_steps = self.global_steps * accumulation
            change_accumulation(self.runtime, self.optimizer, accumulation)
        if micro == before.micro and isinstance(self.training_dataloader, ShardedLoader):
            self.training_dataloader.deal_steps_of(train)

    # -- saving

    def save_checkpoint(
        self,
        save_dir: str | Path,
        tag: Any = None,
        client_state: Mapping[str, Any] | None = None,
        save_latest: bool = True,
        exclude_frozen_parameters: bool = False,
        wait: bool = True,
    ) -> bool:
        """Save a checkpoint to `save_dir/tag`.

        Args:
            save_dir: The folder of all checkpoints of the run, the same on every rank.
            tag: Name of the checkpoint. By default it contains the number of steps.
            client_state: This rank's own values to save: plain values, tensors and NumPy arrays.
            save_latest: Whether to write the name of this checkpoint to the file `latest`.
            exclude_frozen_parameters: Whether to omit parameters that no pipeline stage trains.
            wait: If True, return after the checkpoint is complete. If False, the checkpoint is
                written in the background. The first step after the last byte is written publishes
                it, or raises an error if the write failed. `finish_saving` waits for both.

        Returns:
            True.

        Raises:
            NoFolderError: `save_dir` is None or empty.
            UsageError: `client_state` is not a mapping, states are offloaded, or the engine is
                destroyed.
            StorageError: The checkpoint cannot be written.

        Note:
            Collective: every rank must call it.
        """
        if save_dir is None or save_dir == "":
            raise NoFolderError(
                f"save_checkpoint(save_dir={save_dir!r}) names no folder.",
                fix="pass a folder's path.",
            )
        folder = path_of("save_checkpoint", "save_dir", save_dir)
        if not isinstance(client_state, Mapping | None):
            wanted = "a dict of plain values and tensors"
            raise refuse(
                "save_checkpoint",
                "client_state",
                client_state,
                wanted,
                "pass a dict, or leave it out.",
            )
        told = self.config.checkpoint
        refuse_destroyed(self.runtime, "save_checkpoint")
        self._states.refuse()
        settings = SaveSettings(
            save_latest, exclude_frozen_parameters, told.tag_validation, wait, told.snapshot_bytes
        )
        state = dict(client_state or {})
        self._save(folder, tag, state, settings)
        return True

    def _save(self, folder: Path, tag: Any, client: dict[Any, Any], settings: SaveSettings) -> None:
        """Save a checkpoint with checked arguments. A subclass overrides it to accept other tags.

        Note:
            Collective: every rank must call it.
        """
        saving.save_checkpoint(self, folder, tag, client, settings, preferred=self.preferred_layout)

    def load_checkpoint(
        self,
        load_dir: str | Path,
        tag: Any = None,
        load_module_strict: bool = True,
        load_optimizer_states: bool = True,
        load_lr_scheduler_states: bool = True,
        load_module_only: bool = False,
        custom_load_fn: Callable[..., Any] | None = None,
    ) -> tuple[str | None, Any]:
        """Restore a checkpoint that was saved with any number of ranks and any stage.

        Every byte is verified on all ranks before any rank changes its state.

        Args:
            load_dir: The folder of all checkpoints.
            tag: Name of the checkpoint. None selects the checkpoint that the file `latest` names.
                "newest" selects the newest checkpoint in which every byte is valid.
            load_module_strict: Whether to raise an error if the checkpoint and the model have
                different parameters.
            load_optimizer_states: Whether to restore the optimizer states.
            load_lr_scheduler_states: Whether to restore the learning-rate schedule.
            load_module_only: Whether to restore only the weights.
            custom_load_fn: Called with `src`, the whole state dict of the checkpoint, and `dst`,
                the model, after all else is restored. It loads the weights into the model.

        Returns:
            The path of the checkpoint and its `client_state`; (None, None) if there is no
            checkpoint.

        Raises:
            UsageError: `custom_load_fn` is not callable, or states are offloaded.
            CheckpointError: The checkpoint does not fit or is damaged.

        Note:
            Collective: every rank must call it.
        """
        _refuse_no_function("load_checkpoint", custom_load_fn)
        self._states.refuse()
        folder = path_of("load_checkpoint", "load_dir", load_dir)
        restore = saving.Restore(
            load_module_strict and custom_load_fn is None,
            load_optimizer_states,
            load_lr_scheduler_states,
            load_module_only,
        )
        if (
            tag is None
            and not (folder / LATEST).exists()
            and (converted := folder / LATEST_UNIVERSAL).exists()
        ):
            tag = converted.read_text(encoding="utf-8").strip()
        found, client_state = self._load(folder, tag, restore)
        if found is not None and custom_load_fn is not None:
            custom_load_fn(src=checkpoint.state_dict_of(Path(found)), dst=self.module)
        return found, client_state

    def _load(self, folder: Path, tag: Any, restore: saving.Restore) -> tuple[str | None, Any]:
        """Load a checkpoint with checked arguments. A subclass overrides it to accept other tags.

        Note:
            Collective: every rank must call it.
        """
        return saving.load_checkpoint(self, folder, tag, restore)

    def finish_saving(self) -> None:
        """Wait for a checkpoint that is written in the background, and publish it.

        Note:
            Collective if there is such a checkpoint: every rank must call it.
        """
        self.parts.saver.finish()

    def module_state_dict(
        self,
        destination: dict[str, Any] | None = None,
        prefix: str = "",
        keep_vars: bool = False,
        exclude_frozen_parameters: bool = False,
    ) -> dict[str, Any]:
        """Return the full state dict of the model on every rank.

        Args:
            destination: A dict to which the tensors are added, and which is returned.
            prefix: Text in front of each name.
            keep_vars: Whether parameters that are not sharded are returned themselves.
            exclude_frozen_parameters: Whether to omit parameters that no pipeline stage trains.

        Returns:
            Full tensors by the model's own names.

        Note:
            Collective: every rank must call it.
        """
        frozen = frozen_names(self.runtime) if exclude_frozen_parameters else frozenset()
        into: Any = destination
        with self.parts.state_dicts.gathering():
            whole: dict[str, Any] = self.module.state_dict(
                destination=into, prefix=prefix, keep_vars=keep_vars
            )
        for name in frozen:
            whole.pop(prefix + name, None)
        return whole

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Return the full state dict, with "module." in front of each name.

        Note:
            Collective, even if `engine.module.state_dict()` is configured to be local.
        """
        with self.parts.state_dicts.gathering():
            return super().state_dict(*args, **kwargs)

    def load_module_state_dict(
        self,
        checkpoint: Mapping[str, Any],
        strict: bool = True,
        custom_load_fn: Callable[..., Any] | None = None,
        fetch_z3_params: bool = False,
    ) -> None:
        """Load a full state dict; each rank keeps its shards.

        Args:
            checkpoint: A full state dict, or `{"module": state_dict}`; the same on every rank.
            strict: Whether to raise an error if names are missing or unexpected.
            custom_load_fn: Called with `src`, the state dict, and `dst`, the model, to load it.
            fetch_z3_params: Accepted and ignored.

        Raises:
            UsageError: `checkpoint` is not a mapping, or `custom_load_fn` is not callable.

        Note:
            Collective: every rank must call it.
        """
        states: Any = checkpoint
        if isinstance(checkpoint, Mapping) and not isinstance(checkpoint.get("module"), Tensor):
            states = checkpoint.get("module", checkpoint)
        if not isinstance(states, Mapping):
            wanted = 'a whole state dict, or {"module": state dict}'
            raise refuse(
                "load_module_state_dict",
                "checkpoint",
                checkpoint,
                wanted,
                "pass module_state_dict()'s result.",
            )
        _refuse_no_function("load_module_state_dict", custom_load_fn)
        if custom_load_fn is not None:
            custom_load_fn(src=states, dst=self.module)
        else:
            self.module.load_state_dict(states, strict=strict)

    def save_16bit_model(
        self,
        save_dir: str | Path,
        save_filename: str = "pytorch_model.bin",
        exclude_frozen_parameters: bool = False,
    ) -> bool:
        """Write the full weights to one file, in the dtype they compute in.

        Rank 0 writes the file.

        Args:
            save_dir: Folder to write the file into.
            save_filename: Name of the file. With the suffix .safetensors it has that format, with
                tied weights stored once.
            exclude_frozen_parameters: Whether to omit parameters that no pipeline stage trains.

        Returns:
            Whether the file was written. As in DeepSpeed, False at stage 3 unless
            `stage3_gather_16bit_weights_on_model_save` is set.

        Note:
            Collective: every rank must call it.
        """
        target = path_of("save_16bit_model", "save_dir", save_dir)
        target /= path_of("save_16bit_model", "save_filename", save_filename)
        zero = self.config.zero_optimization
        if self.runtime.settings.stage == 3 and not zero.stage3_gather_16bit_weights_on_model_save:
            log_once(
                f"Did not save the model {target} because "
                "stage3_gather_16bit_weights_on_model_save is False.",
                logging.WARNING,
            )
            return False
        settings = checkpoint.ExportSettings(exclude_frozen=exclude_frozen_parameters)
        checkpoint.export_file(self.runtime, target, settings)
        return True

    save_fp16_model = save_16bit_model

    # -- memory and speed

    def empty_partition_cache(self) -> None:
        """Reshard every unit and free the pooled gather buffers.

        Call it between two steps.

        Note:
            Collective: every rank must call it.
        """
        with torch.no_grad():
            self.runtime.gathers.reshard_all()
        for group in self.runtime.groups:
            group.comm_ctx.pool.clear()

    def offload_states(
        self,
        include: Iterable[Any] | None = None,
        device: Any = "cpu",
        pin_memory: bool = True,
        non_blocking: bool = False,
    ) -> None:
        """Release the memory of states until `reload_states` is called.

        States of an accelerator are moved to host memory. States of the CPU are moved to a file,
        because there is no other memory. The file is in the `nvme_path` of an offload section, or
        else in the folder for temporary files. Any use of an offloaded state raises UsageError.

        Args:
            include: One or several kinds of state, as `OffloadStateTypeEnum` or its values. By
                default all.
                `hp_params` are the main weights, `lp_params` the weights that compute (in fp32
                these are the same, and stay unless `lp_params` is given), `lp_grads` the memory of
                gradients, `contiguous_grad_buffer` that of messages.
            device: "cpu", "nvme" to use the file for all states, or "none" to do nothing.
            pin_memory: Whether to page-lock the host memory that a GPU's states are moved to.
            non_blocking: Accepted; the states have been moved when this returns.

        Raises:
            UsageError: An unknown kind of state or device, or a call inside a forward or
                backward, or after `destroy`.
            StorageError: The file cannot be written.

        Note:
            Collective: every rank must call it, between two steps.
        """
        given = [include] if isinstance(include, str) else include
        if not isinstance(given, Iterable | None):
            fix = "pass a list of kinds, or leave include out."
            raise refuse("offload_states", "include", given, "one or several kinds of state", fix)
        asked = KINDS if given is None else [str(getattr(kind, "value", kind)) for kind in given]
        if unknown := sorted(set(asked) - set(KINDS)):
            wanted = f"kinds of state: {', '.join(KINDS)}"
            raise refuse(
                "offload_states",
                "include",
                unknown[0],
                wanted,
                "name some of these, or leave include out.",
            )
        where = str(getattr(device, "value", device) or "none")
        if where not in ("cpu", "nvme", "none"):
            raise refuse(
                "offload_states", "device", device, '"cpu", "nvme" or "none"', "leave it out."
            )
        if where == "none":
            return
        refuse_destroyed(self.runtime, "offload_states")
        if self.runtime.step.phase is not Phase.IDLE:
            raise UsageError(
                "offload_states() was called inside a forward or backward.",
                "They use the states.",
                "call it after step().",
            )
        self.parts.saver.finish()
        zero = self.config.zero_optimization
        paths = (zero.offload_optimizer.nvme_path, zero.offload_param.nvme_path)
        folder = next((str(path) for path in paths if path), None)
        is_pinned = pin_memory and self.device.type == "cuda"
        self._states.offload(asked, pinned=is_pinned, in_file=where == "nvme", folder=folder)

    def reload_states(self, non_blocking: bool = False) -> None:
        """Restore the states that `offload_states` moved, bit for bit.

        Without offloaded states it does nothing.

        Args:
            non_blocking: Accepted; the states have been restored when this returns.

        Note:
            Collective: every rank must call it.
        """
        self._states.reload()

    @property
    def offloaded_states(self) -> set[Any]:
        """Return the kinds of state that are currently offloaded."""
        return set(self._states.offloaded)

    def step(self, lr_kwargs: dict[str, Any] | None = None) -> None:
        """Update the weights if this micro-batch ends the accumulation of gradients.

        Args:
            lr_kwargs: Keyword arguments for the `step` of the learning-rate schedule.

        Raises:
            UsageError: `offload_states` has moved states, and `reload_states` was not called, or
                the engine is destroyed.

        Note:
            Collective: every rank must call it.
        """
        refuse_destroyed(self.runtime, "step")
        self._states.refuse()
        self._refuse_open_blocks()
        if self.is_gradient_accumulation_boundary():
            self._reduce_held()
        super().step(lr_kwargs)

    def _reduce_held(self) -> None:
        """Reduce the gradients if the last backward has held them back. Collective."""
        runtime = self.runtime
        is_held = runtime.step.backwards and not runtime.backward.reductions.ends_step
        if self.parts.loop is None and is_held:
            with propagate_errors(runtime.comm):
                reduce_step(runtime.backward)

    def _step_directly(self) -> None:
        """Update the weights with all gradients since the last step, for `optimizer.step()`.

        It may be called at any point of an accumulation. Counters and the learning rate change as
        at the end of an accumulation in `step`. The first call logs a message about this.

        Note:
            Collective: every rank of the world must call it.
        """
        assert self.optimizer is not None
        refuse_destroyed(self.runtime, "optimizer.step")
        self._refuse_open_blocks()
        if not self._has_logged_direct_step:
            self._has_logged_direct_step = True
            log_once(
                "optimizer.step() was called directly: it counts as a step of the engine and "
                "advances its learning-rate schedule, like engine.step() at the end of an "
                "accumulation.  Do not call lr_scheduler.step() as well."
            )
        is_managed = self.config.managed_gradient_accumulation
        counted = self.begun if is_managed else 0
        taken = 1
        if self.parts.loop is None:
            taken = max(1, self.runtime.step.backwards - counted)
        self._reduce_held()
        self._count(taken)
        if is_managed:
            self.micro_steps = (self.global_steps + 1) * self.config.gradient_accumulation_steps
        self._end_step(self.optimizer.update, {})

    # -- inspection

    @property
    def sparse_attention(self) -> attention.SparseAttention | None:
        """Return the configured sparse attention, or None.

        Hugging Face models use it automatically. In other models, call it with query, key and
        value.
        """
        return self.parts.sparse_attention

    def memory_report(self) -> MemoryReport:
        """Return the predicted and measured bytes of this rank by kind of state.

        Print the result to see a table.
        """
        return memory_report(self.parts)

    def explain(self, picture: Path | str | None = None) -> str:
        """Return a text that describes the plan and the time of each part of a step.

        The parts include computing, waiting for other ranks, and updating. The times are
        measured on this rank from the second step on.

        Args:
            picture: Path of a PNG to which rank 0 also draws the plan, the schedule, the mesh and
                the pipeline.

        Returns:
            Text of several lines.
        """
        if picture is not None:
            path_of("explain", "picture", picture)
        if picture is not None and is_rank_zero():
            report.draw(self.plan(), picture)
        parked = self.parts.recompute.explain() if self.parts.recompute is not None else []
        capabilities = [
            "capabilities:",
            *(f"  {line}" for line in self.parts.capabilities.explain()),
        ]
        steps = engine.lines_about_steps(self.runtime, self.optimizer)
        plan = self.plan()
        network = engine.lines_about_network(self.runtime, plan)
        stragglers = self.parts.step_fields.stragglers
        if stragglers is not None and stragglers.link:
            network.append(stragglers.link)
        return "\n".join([*plan.explain(), *capabilities, *steps, *network, *parked])

    @contextmanager
    def timeline(self) -> Iterator[report.Timeline]:
        """Record the times of each collective and each transfer between memories.

        Blocks may be nested. Every block contains what was recorded in its inner blocks.

        Yields:
            A `report.Timeline` that is filled while the block runs.

        Example:
            >>> with engine.timeline() as timeline:
            ...     engine.backward(engine(batch))
            ...     engine.step()
        """
        outer = self._timeline
        seen = report.Timeline()
        self._record(seen)
        try:
            yield seen
        finally:
            self._record(outer)
            if outer is not None:
                outer.collectives += seen.collectives
                outer.transfers += seen.transfers

    def _record(self, timeline: report.Timeline | None) -> None:
        self._timeline = timeline
        self.runtime.comm.meter.events = timeline.collectives if timeline is not None else None
        self.runtime.comm_ctx.tiers.record(timeline.transfers if timeline is not None else None)

    @contextmanager
    def memory_trace(self, picture: Path | str | None = None) -> Iterator[report.MemoryTrace]:
        """Record the memory of each kind of tensor while the body of a `with` statement runs.

        The body is usually one forward, backward and step. Operators are slower while memory is
        recorded.

        Args:
            picture: Path of a PNG to which rank 0 draws the bytes over the operators.

        Yields:
            A `report.MemoryTrace` that is filled while the block runs.

        Raises:
            NotBuiltError: `picture` is given, and matplotlib is not installed.
        """
        if picture is not None:
            path_of("memory_trace", "picture", picture)
        trace = traced(self.parts)
        with trace.recording(is_drawn=picture is not None):
            yield trace
        if picture is not None and is_rank_zero():
            trace.draw(picture)

    # -- compilation

    def compile(
        self,
        backend: Any = "inductor",
        compile_kwargs: Mapping[str, Any] | None = None,
        schedule: Any = None,
        compiled_autograd_enabled: bool = False,
    ) -> None:
        """Compile each unit's forward with `torch.compile`.

        Gathers and reductions stay outside the graphs.

        Args:
            backend: Backend of `torch.compile`.
            compile_kwargs: Other arguments of `torch.compile`.
            schedule: Not implemented; must be None.
            compiled_autograd_enabled: Not implemented; must be False.

        Raises:
            NotBuiltError: One of the last two arguments is set, or `vertical_micro_batches` is
                enabled.
            UsageError: The engine is destroyed.
        """
        refuse_destroyed(self.runtime, "compile")
        if schedule is not None or compiled_autograd_enabled:
            raise NotBuiltError(
                "engine.compile(schedule=..., compiled_autograd_enabled=True) is not built.",
                "Those are DeepCompile's passes; units are compiled one by one here.",
                "leave both out.",
            )
        if self.parts.vertical is not None:
            raise NotBuiltError(
                "engine.compile() beside vertical_micro_batches is not built.",
                "Both stand in for the forward of a unit.",
                "leave one of the two out.",
            )
        if not self.is_compiled:
            self._compiled_units = engine.compile_units(
                self.runtime, {"backend": backend, **(compile_kwargs or {})}
            )

    @property
    def is_compiled(self) -> bool:
        """Return whether `compile` was called and the engine is not destroyed."""
        return bool(self._compiled_units)

    def destroy(self) -> None:
        """Remove the hooks from the model, undo `compile` and close the records.

        Offloaded states are restored first, without communication. Rank 0 logs the time of each
        part of its steps, unless `steps_per_print` is off. A second call does nothing.

        Note:
            Collective if a checkpoint is being written, because that is completed first.
        """
        if self._states.offloaded:
            self._states.release()
        for restore in self._compiled_units:
            restore()
        self._compiled_units = ()
        prints = self.config.steps_per_print and self.global_steps > 1
        if prints and not self.runtime.is_destroyed:
            steps = engine.lines_about_steps(self.runtime, self.optimizer)
            log_once("\n".join(["where the run went", *steps]))
        super().destroy()


def _refuse_no_function(call: str, custom_load_fn: Any) -> None:
    """Raise `UsageError` if a `custom_load_fn` is given that is not callable."""
    if custom_load_fn is not None and not callable(custom_load_fn):
        wanted = "a function of `src`, a state dict, and `dst`, the model"
        fix = "pass such a function, or leave it out."
        raise refuse(call, "custom_load_fn", custom_load_fn, wanted, fix)
