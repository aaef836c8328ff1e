"""The engine that `initialize` returns: steps, checkpoints, exports, memory and compilation."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from .. import attention, checkpoint, report
from ..base.errors import NotBuiltError, UsageError
from ..base.given import path_of, refuse
from ..base.log import log_once
from ..base.mesh import Mesh
from ..base.world import is_rank_zero
from ..checkpoint.contents import SaveSettings
from ..checkpoint.format import LATEST, LATEST_UNIVERSAL
from ..checkpoint.hf_folder import MAX_SHARD_BYTES
from ..checkpoint.piece import frozen_names
from ..engine import exporting, saving
from ..engine.compiling import compile_units, restore
from ..engine.engine import Engine, Parts
from ..engine.explaining import lines_about_network, lines_about_steps
from ..engine.memory import memory_report, traced
from ..engine.state_offload import KINDS, StateOffload
from ..sharding.step_state import Phase

if TYPE_CHECKING:  # as in engine/engine.py
    from ..config import Config


class NoFolderError(UsageError, ValueError):
    """A checkpoint is to be saved, and no folder is named; a ValueError, as in DeepSpeed."""


class ZeroEngine(Engine):
    """An engine with everything that a program asks for beside its steps."""

    preferred_layout = ""  # the name of that of checkpoints, if the configuration names none

    def __init__(
        self,
        config: Config,
        mesh: Mesh,
        parts: Parts,
        lr_scheduler: Any = None,
        training_dataloader: Any = None,
    ) -> None:
        super().__init__(config, mesh, parts, lr_scheduler, training_dataloader)
        self._states = StateOffload(parts.runtime, parts.optimizer)
        self._compiled_units: list[Any] = []

    # -- names of the optimizer, which Lightning looks for on the engine

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return self.optimizer.param_groups if self.optimizer is not None else []

    @property
    def state(self) -> Any:
        return self.optimizer.load_states() if self.optimizer is not None else {}

    @property
    def defaults(self) -> dict[str, Any]:
        return self.optimizer.defaults if self.optimizer is not None else {}

    # -- figures

    def train_batch_size(self) -> int:
        """Return the samples of a step, over all ranks."""
        return self.config.train_batch_size

    def train_micro_batch_size_per_gpu(self) -> int:
        """Return the samples of a micro-batch of one rank."""
        return self.config.train_micro_batch_size_per_gpu

    def gradient_accumulation_steps(self) -> int:
        """Return how many micro-batches a step sums."""
        return self.config.gradient_accumulation_steps

    def get_global_grad_norm(self) -> float | None:
        """Return the norm of the gradients of the last step; None before the first one."""
        optimizer = self.optimizer
        return optimizer.last_norm if optimizer is not None and optimizer.last is not None else None

    def get_lr(self) -> list[float]:
        """Return the learning rate of each parameter group."""
        return [group["lr"] for group in self.param_groups]

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
        """Write `save_dir/tag`; True.  Collective; every rank needs the same `save_dir`.

        client_state: plain values, tensors, numpy arrays, of each rank.  wait=False: write while
        training goes on; the first step after the last byte makes it visible, or raises what went
        wrong, as `finish_saving` does at once.
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
        told = self.parts.settings.saving
        self._states.refuse()
        settings = SaveSettings(
            save_latest, exclude_frozen_parameters, told.tag_validation, wait, told.snapshot_bytes
        )
        state = dict(client_state or {})
        saving.save_checkpoint(self, folder, tag, state, settings, preferred=self.preferred_layout)
        return True

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
        """Go on from a checkpoint of any world size and stage: (path, client_state), (None, None)
        without one.

        tag: None for what `latest` names, "newest" for the newest one of which every byte is right.
        Collective.
        """
        _refuse_load_fn("load_checkpoint", custom_load_fn)
        self._states.refuse()
        folder = path_of("load_checkpoint", "load_dir", load_dir)
        restore = saving.Restore(
            load_module_strict, load_optimizer_states, load_lr_scheduler_states, load_module_only
        )
        if (
            tag is None
            and not (folder / LATEST).exists()
            and (converted := folder / LATEST_UNIVERSAL).exists()
        ):
            tag = converted.read_text(encoding="utf-8").strip()
        return saving.load_checkpoint(self, folder, tag, restore)

    def finish_saving(self) -> None:
        """Wait for a checkpoint that is written while training goes on.  Collective where there is
        one.
        """
        self.parts.saver.finish()

    def module_state_dict(self, exclude_frozen_parameters: bool = False) -> dict[str, Any]:
        """Return the model's whole state dict, on every rank.  Collective.

        exclude_frozen_parameters: leave out parameters that no stage trains.
        """
        frozen = frozen_names(self.runtime) if exclude_frozen_parameters else frozenset()
        with self.parts.state_dicts.gathering():
            whole = self.module.state_dict()
        return {name: value for name, value in whole.items() if name not in frozen}

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Return the whole state dict, with "module." before each name.

        Note:
            Collective, also if `engine.module.state_dict()` is local.
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
        """Load a whole state dict (or {"module": state dict}); every rank passes it and keeps its
        slices.
        """
        _refuse_load_fn("load_module_state_dict", custom_load_fn)
        if not isinstance(checkpoint, Mapping):
            wanted = 'a whole state dict, or {"module": state dict}'
            raise refuse(
                "load_module_state_dict",
                "checkpoint",
                checkpoint,
                wanted,
                "pass module_state_dict()'s result.",
            )
        inner = checkpoint.get("module")
        self.module.load_state_dict(
            inner if isinstance(inner, Mapping) else dict(checkpoint), strict=strict
        )

    def save_16bit_model(
        self,
        save_dir: str | Path,
        save_filename: str = "pytorch_model.bin",
        exclude_frozen_parameters: bool = False,
    ) -> bool:
        """Write the whole weights, in the dtype they compute in, as one file of rank 0.
        Collective.

        A name that ends in .safetensors is written as such, tied weights once.  False at stage 3
        without stage3_gather_16bit_weights_on_model_save, as in DeepSpeed.
        """
        target = path_of("save_16bit_model", "save_dir", save_dir)
        target /= path_of("save_16bit_model", "save_filename", save_filename)
        if self.runtime.settings.stage == 3 and not self.parts.settings.saving.gather_16bit:
            log_once(
                f"Did not save the model {target} because "
                "stage3_gather_16bit_weights_on_model_save is False."
            )
            return False
        settings = checkpoint.ExportSettings(exclude_frozen=exclude_frozen_parameters)
        checkpoint.export_file(self.runtime, target, settings)
        return True

    save_fp16_model = save_16bit_model

    def export(
        self,
        path: str | Path,
        dtype: torch.dtype | str | None = None,
        max_shard_bytes: int = MAX_SHARD_BYTES,
        exclude_frozen: bool = False,
    ) -> Path:
        """Write the whole weights for others to read: a folder that `from_pretrained` loads, or one
        file.  Collective.

        path: a folder of safetensors, or a file that ends in .safetensors, .pth, .pt or .bin.
        dtype: "fp32", "bf16", a torch.dtype; None: what the weights compute in.
        """
        return exporting.export(self.runtime, path, dtype, max_shard_bytes, exclude_frozen)

    def load_weights(self, path: str | Path, strict: bool = True) -> None:
        """Take weights from safetensors (Hugging Face's folder, or a file), each rank its slices
        alone.  Collective.
        """
        exporting.load_weights(self.runtime, path, strict)

    # -- memory and speed

    def empty_partition_cache(self) -> None:
        """Reshard every unit and free the buffers kept for the next gather.  Collective; between
        steps.
        """
        with torch.no_grad():
            self.runtime.executor.gathers.reshard_all()
        for group in self.runtime.groups:
            group.comm_ctx.pool.clear()

    def offload_states(
        self,
        include: Iterable[Any] | None = None,
        device: Any = "cpu",
        pin_memory: bool = True,
        non_blocking: bool = False,
    ) -> None:
        """Return the memory of states to the system until `reload_states`.  Collective, between two
        steps.

        States of an accelerator go to host memory.  States of the CPU go to a file, since there is
        no other memory: in `nvme_path` if an offload section has one, else in the folder for
        temporary files.  Whoever uses an offloaded state meanwhile gets a UsageError.

        Args:
            include: Kinds of state, as `OffloadStateTypeEnum` or its values; None: all.
                `hp_params` are the main weights, `lp_params` the weights that compute (in fp32
                these are the same, and stay unless `lp_params` are named), `lp_grads` the memory
                of gradients, `contiguous_grad_buffer` that of messages.
            device: "cpu"; "nvme" takes the file for everything; "none" does nothing.
            pin_memory: Page-lock the host memory that a GPU's states go to.
            non_blocking: Accepted; the states have been moved when this returns.

        Raises:
            UsageError: An unknown kind of state or device, or a call inside a forward or backward.
            StorageError: The file cannot be written.
        """
        asked = (
            KINDS if include is None else [str(getattr(kind, "value", kind)) for kind in include]
        )
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
        """Bring back what `offload_states` moved away, with the same bits.  Collective; harmless
        without an offload.

        non_blocking: accepted; the states are there when this returns.
        """
        self._states.reload()

    @property
    def offloaded_states(self) -> set[Any]:
        """Return the kinds of state that `offload_states` has moved away."""
        return set(self._states.offloaded)

    def step(self, lr_kwargs: dict[str, Any] | None = None) -> None:
        """Take a step as `Engine.step` does; refused while states are offloaded.  Collective."""
        self._states.refuse()
        super().step(lr_kwargs)

    # -- looking

    @property
    def sparse_attention(self) -> attention.SparseAttention | None:
        """Return attention by the layout that the configuration's section says, None without one.

        A model of transformers has it already; another one calls it with query, key and value.
        """
        return self.parts.sparse_attention

    def memory_report(self) -> Any:
        """Predicted and measured bytes of this rank, by state (report.measure.MemoryReport)."""
        parked = self.parts.recompute.offloaded() if self.parts.recompute is not None else []
        return memory_report(self.runtime, self.optimizer, parked, self.parts.pipeline)

    def explain(self, picture: Path | str | None = None) -> str:
        """The plan, and where this rank's steps went since the second one: computing, waiting,
        updating.  Local.

        picture: where rank 0 also draws plan and schedule, mesh and pipeline, as a PNG.
        """
        if picture is not None:
            path_of("explain", "picture", picture)
        if picture is not None and is_rank_zero():
            report.draw(self.current_plan(), picture)
        parked = self.parts.recompute.explain() if self.parts.recompute is not None else []
        capabilities = [
            "capabilities:",
            *(f"  {line}" for line in self.parts.capabilities.explain()),
        ]
        steps = lines_about_steps(self.runtime, self.optimizer)
        network = lines_about_network(self.runtime, self.current_plan())
        stragglers = self.step_fields.stragglers
        if stragglers is not None and stragglers.link:
            network.append(stragglers.link)
        return "\n".join([self.plan(), *capabilities, *steps, *network, *parked])

    @contextmanager
    def timeline(self) -> Iterator[report.Timeline]:
        """A log of the block: each collective and each transfer to or from another memory, with its
        times.
        """
        meter = self.runtime.comm.meter
        tiers = self.runtime.comm_ctx.tiers
        seen = report.Timeline()
        meter.events = seen.collectives
        tiers.record(seen.transfers)
        try:
            yield seen
        finally:
            meter.events = None
            tiers.record(None)

    @contextmanager
    def memory_trace(self, picture: Path | str | None = None) -> Iterator[report.MemoryTrace]:
        """Follow every storage that the block makes, by kind: a forward, a backward and a step,
        say.  Local.

        picture: where rank 0 draws bytes over operators, as a PNG.  Operators take longer
        meanwhile.
        """
        if picture is not None:
            path_of("memory_trace", "picture", picture)
        recompute = self.parts.recompute
        trace = traced(
            self.runtime,
            self.optimizer,
            recompute.offloaded if recompute is not None else list,
            self.parts.pipeline,
        )
        with trace.recording():
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
        """Compile each unit's forward by torch.compile; gathering and reduction stay outside the
        graphs.
        """
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
            self._compiled_units = compile_units(
                self.runtime, {"backend": backend, **(compile_kwargs or {})}
            )

    @property
    def is_compiled(self) -> bool:
        """Whether compile() was called and not undone."""
        return bool(self._compiled_units)

    def destroy(self) -> None:
        """Unhook the model, undo compile() and close the records; calling it twice is harmless.

        Offloaded states are restored first, without communication.
        """
        if self._states.offloaded:
            self._states.release()
        restore(self._compiled_units)
        self._compiled_units = []
        super().destroy()


def _refuse_load_fn(owner: str, given: Any) -> None:
    if given is not None:
        raise NotBuiltError(
            f"{owner}(custom_load_fn=...) is not built yet.",
            "Each rank reads only its own slices, so there is no whole state dict to hand over.",
            "load with load_module_strict=False, or change weights inside zero.GatheredParameters.",
        )
