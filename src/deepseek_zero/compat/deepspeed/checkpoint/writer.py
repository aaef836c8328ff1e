"""Write any checkpoint in DeepSpeed's layout, one file at a time.

Ranks may share the work. The files are those that DeepSpeed would have written for this number of
ranks and this stage, so DeepSpeed and its tools can read them. They contain tensors, plain values,
and objects of DeepSpeed's classes, which are pickled by name only.
"""

from __future__ import annotations

import logging
import pickle
import secrets
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from ....base.errors import CheckpointError, UsageError
from ....base.given import whole_number
from ....base.log import log_once
from ....checkpoint import files
from ....checkpoint.contents import IMPLEMENTATION_OPTIONS
from ....checkpoint.format import CLIENT, MOMENT, WEIGHT, WHOLE, StateRange
from ....checkpoint.layouts import OpenCheckpoint, layout_of
from ....checkpoint.numpy_values import all_to_plain
from ....checkpoint.read import client_of_rank, open_checkpoint, tensors_of
from ....checkpoint.safetensors_file import cast, dtype_name, dtype_named
from ....checkpoint.staging import staged_output
from ....checkpoint.state import scalar_value
from ....precision.loss_scale import LossScaleSettings
from .reader import (
    BATCH_SIZES,
    IDENTITY_KEY,
    MODEL,
    MODEL_OF_RANK,
    RESERVED_KEYS,
    STAND_INS,
    DynamicLossScaler,
    FragmentAddress,
    LossScaler,
    Spans,
    flat_ranges,
    flat_spans,
    partition_slice,
    partition_spans,
)

Groups = Sequence[Sequence[str]]  # names of the parameters in each group of the optimizer
State = dict[str, Any]  # a dictionary of a file

LAYOUT = "0.19.8"  # the version of DeepSpeed whose layout is written
# DeepSpeed's default: stage 3 starts a new flat tensor when a rank's part has this many elements.
SUB_GROUP_NUMEL = 1_000_000_000
# File patterns that an earlier conversion may have written
FILE_PATTERNS = ("*_model_states.pt", "*_optim_states.pt")
SCRIPT_NAME = "zero_to_fp32.py"
SCRIPT = '''"""Writes the whole fp32 weights of the checkpoints beside it: \
python zero_to_fp32.py . OUTPUT_FOLDER"""

from deepseek_zero.utils.zero_to_fp32 import main

if __name__ == "__main__":
    main()
'''


@dataclass(frozen=True)
class DeepSpeedTarget:
    """Properties of the checkpoint to write.

    Attributes:
        stage: ZeRO stage.
        ranks: Number of ranks.
        dtype: Dtype of the computation.
        run: Identity of the save.
        scaling: Settings of the loss scaler.
    """

    stage: int
    ranks: int
    dtype: torch.dtype
    run: str
    scaling: LossScaleSettings = field(default_factory=LossScaleSettings)

    @classmethod
    def of(
        cls, source: OpenCheckpoint, stage: int | None = None, ranks: int | None = None
    ) -> DeepSpeedTarget:
        """Create a target with the properties of an existing checkpoint.

        Args:
            source: The open checkpoint that will be converted.
            stage: Replaces the checkpoint's stage if given.
            ranks: Replaces the checkpoint's number of ranks if given.

        Returns:
            A target with the checkpoint's run id, weight dtype, stage and number of ranks, of which
            the arguments replace the last two.
        """
        manifest = source.manifest
        rows = " ".join(row["weight"] for row in manifest.plan.values())
        low = next(
            (dtype for dtype in (torch.bfloat16, torch.float16) if dtype_name(dtype) in rows),
            torch.float32,
        )
        run = manifest.run or secrets.token_hex(8)
        if stage is None:
            stage = manifest.stage
        return cls(stage, ranks or manifest.world_size, low, run)

    @property
    def files(self) -> list[int]:
        """Return the ranks whose files the checkpoint contains: only rank 0 at stage 0."""
        count = self.ranks if self.stage else 1
        return list(range(count))


def write_rank(source: OpenCheckpoint, folder: Path, layout: DeepSpeedTarget, rank: int) -> None:
    """Write the files of one rank.

    It holds the rank's shards of main weights and moments in memory. For rank 0 at stages 0 to 2 it
    also holds all weights.

    Args:
        source: The checkpoint to convert.
        folder: Folder to write to.
        layout: Properties of the new checkpoint.
        rank: Rank whose files are written.

    Raises:
        CheckpointError: Writing to the disk failed.
    """
    groups = _groups(source)
    if layout.stage == 3 or rank == 0:
        name = MODEL_OF_RANK.format(rank) if layout.stage == 3 else MODEL
        _save(_model_state(source, layout, rank, groups), folder / name)
    if layout.stage:
        prefix = "bf16_" if layout.dtype == torch.bfloat16 else ""
        state = (
            _partitioned(source, layout, rank, groups)
            if layout.stage == 3
            else _flat(source, layout, rank, groups)
        )
        param_groups = {
            "optimizer_state_dict": state,
            "ds_config": _config(source, layout, rank),
            "ds_version": LAYOUT,
        }
        if layout.stage < 3 and str(rank) in source.manifest.extra.get("clients", {}):
            param_groups[CLIENT] = _client(source, layout, rank)
        _save(param_groups, folder / f"{prefix}zero_pp_rank_{rank}_mp_rank_00_optim_states.pt")


def _config(source: OpenCheckpoint, layout: DeepSpeedTarget, rank: int) -> State:
    """Return the ds_config entry, which identifies the save and rank of a file.

    DeepSpeed does not read it.
    """
    identity: State = {"run": layout.run, "rank": rank}
    if not layout.stage:
        identity |= _names_at_stage_0(source, layout)
    return {
        IDENTITY_KEY: identity,
        "zero_optimization": {"stage": layout.stage},
        "bf16": {"enabled": layout.dtype == torch.bfloat16},
        "fp16": {"enabled": layout.dtype == torch.float16},
        **{
            BATCH_SIZES[name]: value
            for name, value in (source.plain["trainer"].get("batch") or {}).items()
        },
    }


def _names_at_stage_0(source: OpenCheckpoint, layout: DeepSpeedTarget) -> State:
    """Return the entries that DeepSpeed's files of stage 0 do not have.

    They are the names of the numbered parameters by group, those of frozen and tied parameters, and
    the client_state of each rank that passed its own.
    """
    groups = _groups(source)
    trained = {name for group in groups for name in group}
    numbered = _numbered(source, layout, groups)
    ranks = source.manifest.extra.get("clients", {})
    return {
        "groups": numbered,
        "frozen": [name for group in numbered for name in group if name not in trained],
        "tied": _tied(source),
        "clients": {int(rank): _client(source, layout, int(rank)) for rank in ranks},
    }


def _tied(source: OpenCheckpoint) -> dict[str, str]:
    """Return for each further name of a tied parameter its first name."""
    parameters = source.manifest.parameters
    return {name: first for name, first in source.tied.items() if first in parameters}


def _groups(source: OpenCheckpoint) -> list[list[str]]:
    """Return the names of trained parameters by group, in the optimizer's order.

    Raises:
        CheckpointError: The checkpoint does not record the groups, or a state does not have the
            shape of its parameter.
    """
    groups: list[list[str]] = source.manifest.extra.get("groups") or []
    if not groups and not source.plain["groups"]:
        groups = [[name for name, facts in source.manifest.parameters.items() if facts["trained"]]]
    if len(groups) != max(len(source.plain["groups"]), 1):
        raise CheckpointError(
            f"{source.folder} does not say which parameter is in which group of the optimizer.",
            "DeepSpeed's layout has no other names for masters and moments.",
            "load it into an engine and save it again.",
        )
    rows = [name for group in groups for name in group if source.values.keys(WHOLE, name)]
    if rows:
        raise CheckpointError(
            f"the optimizer's states of '{rows[0]}' do not have the parameter's shape.",
            "DeepSpeed's layout shards every state as it shards the parameter.",
            "save it in our own layout.",
        )
    return groups


def convert_to_deepspeed(
    path: Path,
    out: Path,
    *,
    tag: str | None = None,
    stage: int | None = None,
    ranks: int | None = None,
) -> None:
    """Convert a checkpoint to DeepSpeed's layout.

    The conversion holds one rank's shards of main weights and moments in memory. If `stage` is at
    most 2, it also holds all weights. Nothing is written if an error is raised.

    Args:
        path: The checkpoint, or the directory of checkpoints.
        out: Folder to write. In an existing folder, files of an earlier conversion are removed, and
            other files are kept.
        tag: Name of the checkpoint in `path`; None for the one that the file `latest` names.
        stage: ZeRO stage with which DeepSpeed will run, from 0 to 3; None for the stage of the
            checkpoint.
        ranks: Number of ranks with which DeepSpeed will run; None for the number of ranks that
            saved the checkpoint.

    Raises:
        CheckpointError: The checkpoint does not exist, is damaged or has no optimizer states. It is
            also raised if DeepSpeed's layout cannot represent the states.
        UsageError: `stage` is not from 0 to 3, or `ranks` is not a positive integer.
    """
    if ranks is not None:
        whole_number("convert_to_deepspeed", "ranks", ranks, 1)
    if stage not in (None, 0, 1, 2, 3):
        raise UsageError(
            f"convert_to_deepspeed was given stage {stage}.",
            "DeepSpeed has the ZeRO stages 0 to 3.",
            "pass 0, 1, 2 or 3, or leave stage out to keep the stage of the checkpoint.",
        )
    with ExitStack() as stack:
        source = open_checkpoint(path, tag, stack)
        found = layout_of(source.folder)
        if found is not None and not found.has_states:
            raise CheckpointError(
                f"{source.folder} contains only weights.",
                "DeepSpeed's layout has main weights and moments, and DeepSpeed does not load it "
                "without them.",
                "convert the checkpoint from which these weights were exported, or load them with "
                "engine.load_weights and save.",
            )
        layout = DeepSpeedTarget.of(source, stage, ranks)
        output = stack.enter_context(staged_output(out))
        for rank in layout.files:
            write_rank(source, output.path, layout, rank)
        output.publish_folder(FILE_PATTERNS)


# -- model files


def _model_state(
    source: OpenCheckpoint, layout: DeepSpeedTarget, rank: int, groups: Groups
) -> State:
    """Return one rank's model file as a dictionary with DeepSpeed's keys."""
    manifest = source.manifest
    trainer = source.plain["trainer"]
    trained = {name for group in groups for name in group}
    frozen = [
        name
        for name in manifest.parameters
        if name not in trained and source.values.has(WEIGHT, name)
    ]
    has_zero = layout.stage > 0
    has_frozen = layout.stage > 1
    parts = {name: _frozen(source, layout, name, rank) for name in frozen if has_frozen}
    subs = [sub for group in groups for sub in _sub_groups(source, group, layout)]
    return {
        "module": _module(source, layout, rank),
        "buffer_names": list(manifest.buffers),
        "optimizer": None if has_zero else _replicated(source, layout, groups),
        "param_shapes": [_shapes(source, sub) for sub in subs] if has_zero else None,
        "frozen_param_shapes": _shapes(source, frozen) if has_frozen else None,
        "shared_params": _tied(source) if has_zero else None,
        "frozen_param_fragments": OrderedDict(parts) if has_frozen else None,
        "lr_scheduler": all_to_plain(trainer.get("lr_scheduler")),
        "data_sampler": _curriculum(trainer.get("data")),
        "random_ltd": None,
        **{name: trainer[name] for name in ("skipped_steps", "global_steps", "global_samples")},
        "dp_world_size": layout.ranks,
        "mp_world_size": 1,
        "ds_config": _config(source, layout, rank),
        "ds_version": LAYOUT,
        **_client(source, layout, rank),
    }


def _curriculum(position: Any) -> Any:
    """Return the state of the data curriculum, or None."""
    return position.get("curriculum") if isinstance(position, Mapping) else None


def _client(source: OpenCheckpoint, layout: DeepSpeedTarget, rank: int) -> State:
    """Return the caller's client_state for the dictionary of a model file.

    Raises:
        CheckpointError: A key of client_state is one of DeepSpeed's.
    """
    client = dict(source.plain["client"] or {})
    if layout.ranks == source.manifest.world_size and source.manifest.extra.get("clients"):
        client = dict(client_of_rank(source.folder, source.manifest, rank, client))
    taken = sorted(RESERVED_KEYS & client.keys())
    if taken:
        raise CheckpointError(
            f"client_state has the key '{taken[0]}', which is DeepSpeed's own in its layout.",
            "One of the two would be lost.",
            "give it another name.",
        )
    return {name: all_to_plain(value) for name, value in client.items()}


def _module(source: OpenCheckpoint, layout: DeepSpeedTarget, rank: int) -> OrderedDict[str, Tensor]:
    """Return the module's state dict, with weights in the dtype of the computation.

    At stage 3 the weights are empty and the buffers are this rank's. Otherwise the buffers are rank
    0's.
    """
    found: dict[str, Tensor] = {}
    for name, lazy in tensors_of(source).items():
        if name in source.manifest.buffers:
            found[name] = source.values.of_rank(name, rank).view(lazy.shape).clone()
        elif layout.stage == 3:
            found[name] = torch.empty(0, dtype=_computes_in(lazy.dtype, layout), device="cpu")
        else:
            found[name] = cast(lazy.contiguous().view(-1), _computes_in(lazy.dtype, layout)).view(
                lazy.shape
            )
    names = source.manifest.extra.get("names") or {name: name for name in found}
    return OrderedDict((name, found[first]) for name, first in names.items() if first in found)


def _computes_in(own: torch.dtype, layout: DeepSpeedTarget) -> torch.dtype:
    return layout.dtype if own.is_floating_point else own


def _frozen(source: OpenCheckpoint, layout: DeepSpeedTarget, name: str, rank: int) -> Tensor:
    """Return one rank's padded shard of a frozen weight at stage 3, else all of it."""
    facts = source.manifest.parameters[name]
    numel = prod(facts["shape"])
    own = dtype_named(facts["dtype"])
    cut = partition_slice(numel, rank, layout.ranks) if layout.stage == 3 else slice(0, numel)
    length = -(-numel // layout.ranks) if layout.stage == 3 else numel
    values = torch.zeros(length, dtype=_computes_in(own, layout), device="cpu")
    for low, part in source.values.read(StateRange(WEIGHT, name, "", cut.start, cut.stop)):
        at = low - cut.start
        values[at : at + part.numel()] = cast(part.reshape(-1), values.dtype)
    return values if layout.stage == 3 else values.view(facts["shape"])


def _shapes(source: OpenCheckpoint, names: Sequence[str]) -> OrderedDict[str, torch.Size]:
    return OrderedDict(
        (name, torch.Size(source.manifest.parameters[name]["shape"])) for name in names
    )


# -- optimizer states


def _fill(source: OpenCheckpoint, what: tuple[str, str, str], cut: slice, into: Tensor) -> None:
    """Read a range of a state into a tensor.

    If the parameter does not have the state, the tensor keeps its zeros.
    """
    if source.values.has(*what):
        for low, part in source.values.read(StateRange(*what, cut.start, cut.stop)):
            into[low - cut.start : low - cut.start + part.numel()] = part.reshape(-1)


def _numels(source: OpenCheckpoint, names: Sequence[str]) -> dict[str, int]:
    return {name: prod(source.manifest.parameters[name]["shape"]) for name in names}


def _numbers(source: OpenCheckpoint, names: Sequence[str]) -> State:
    """Return the counters of a parameter group.

    The files have one set of counters for each group: that of its parameter with the most updates.
    """
    each_one = {name: source.manifest.scalars.get(name, {}) for name in names}
    found = max(
        each_one.values(),
        key=lambda each: float(each.get("step", {}).get("value") or 0),
        default={},
    )
    if other := [name for name, each in each_one.items() if each != found]:
        log_once(
            f"DeepSpeed's files have one step count for a group of parameters; '{other[0]}' and "
            f"{len(other) - 1} more were updated less often (frozen for a time, or their gradients "
            "dropped) and get the count of the others.",
            logging.WARNING,
        )
    return {key: scalar_value(each) for key, each in found.items()}


def _group(source: OpenCheckpoint, number: int, params: list[int]) -> State:
    """Return a group's hyper-parameters with neutral implementation options."""
    saved = source.plain["groups"][number] if source.plain["groups"] else {}
    kept = {key: value for key, value in saved.items() if key not in IMPLEMENTATION_OPTIONS}
    how = {"fused": None, "foreach": None, "capturable": False, "differentiable": False}
    return {"bias_correction": True, **kept, **how, "params": params}


def _flat(source: OpenCheckpoint, layout: DeepSpeedTarget, rank: int, groups: Groups) -> State:
    """Return the optimizer state of stages 1 and 2.

    Each group is concatenated, padded at the end, and cut into equal parts.
    """
    masters = []
    states = {}
    paddings = []
    addresses = []
    for number, names in enumerate(groups):
        numels = _numels(source, names)
        total = sum(numels.values())
        size = -(-total // (2 * layout.ranks)) * 2
        low = rank * size
        here = flat_spans(flat_ranges(numels), low, low + size)
        vector = _Vector(source, here, size)
        held = max(min(size, total - low), 0)
        masters.append(vector.of(WEIGHT, "")[:held].clone())
        if found := vector.states(names):
            states[number] = found
        paddings.append(size - held)
        spans = {
            name: FragmentAddress(numel=cut.stop - cut.start, start=at)
            for name, (cut, at) in here.items()
        }
        addresses.append(OrderedDict(spans))
    return {
        **_scaler(source, layout),
        "base_optimizer_state": {
            "state": states,
            "param_groups": [_group(source, number, [number]) for number in range(len(groups))],
        },
        "single_partition_of_fp32_groups": masters,
        "zero_stage": layout.stage,
        "group_paddings": paddings,
        "param_alignment_paddings": [[0] * len(names) for names in groups],
        "partition_count": [layout.ranks] * len(groups),
        "ds_version": LAYOUT,
        "param_slice_mappings": addresses,
    }


@dataclass(frozen=True)
class _Vector:
    """A flat tensor to fill.

    Attributes:
        source: The checkpoint to read.
        here: For each parameter its range of elements and its offset in the tensor.
        numel: Number of elements of the tensor.
    """

    source: OpenCheckpoint
    here: Spans
    numel: int

    def of(self, kind: str, key: str) -> Tensor:
        """Read one state of the parameters into a new fp32 tensor with zero padding.

        Args:
            kind: WEIGHT or MOMENT.
            key: Name of the optimizer state; "" for weights.
        """
        values = torch.zeros(self.numel, dtype=torch.float32, device="cpu")
        for name, (cut, at) in self.here.items():
            _fill(self.source, (kind, name, key), cut, values[at:])
        return values

    def states(self, names: Sequence[str]) -> State:
        """Return the optimizer states of a group of parameters; {} if there are none."""
        keys = dict.fromkeys(key for name in names for key in self.source.values.keys(MOMENT, name))
        moments = {key: self.of(MOMENT, key) for key in keys}
        return _numbers(self.source, names) | moments if moments else {}


def _sub_groups(
    source: OpenCheckpoint, names: Sequence[str], layout: DeepSpeedTarget
) -> list[list[str]]:
    """Split a group's parameters into the flat tensors of stage 3; other stages have one tensor.

    A new tensor starts when a rank's part has `SUB_GROUP_NUMEL` elements.
    """
    if layout.stage < 3:
        return [list(names)]
    found: list[list[str]] = [[]]
    filled = 0
    for name in names:
        if filled >= SUB_GROUP_NUMEL:
            found.append([])
            filled = 0
        found[-1].append(name)
        filled += -(-prod(source.manifest.parameters[name]["shape"]) // layout.ranks)
    return found


def _partitioned(
    source: OpenCheckpoint, layout: DeepSpeedTarget, rank: int, groups: Groups
) -> State:
    """Return the optimizer state of stage 3.

    Each parameter is padded and cut separately, and a rank's parts are concatenated.
    """
    masters: list[Tensor] = []
    states = {}
    param_groups = []
    for number, group in enumerate(groups):
        first = len(masters)
        for names in _sub_groups(source, group, layout):
            vector = _Vector(source, *partition_spans(_numels(source, names), rank, layout.ranks))
            if found := vector.states(names):
                states[len(masters)] = found
            masters.append(vector.of(WEIGHT, ""))
        param_groups.append(_group(source, number, list(range(first, len(masters)))))
    return {
        "zero_stage": 3,
        **_scaler(source, layout),
        "partition_count": layout.ranks,
        "optimizer_state_dict": {"state": states, "param_groups": param_groups},
        "fp32_flat_groups": masters,
        "ds_version": LAYOUT,
    }


def _replicated(source: OpenCheckpoint, layout: DeepSpeedTarget, groups: Groups) -> State:
    """Return the optimizer entry of stage 0, which is the inner optimizer's state.

    Below fp32 it includes the main weights of the trained parameters.
    """
    groups = _numbered(source, layout, groups)
    states: dict[int, State] = {}
    param_groups: list[State] = []
    masters: list[list[Tensor]] = []
    count = 0
    for number, group in enumerate(groups):
        param_groups.append(_group(source, number, list(range(count, count + len(group)))))
        masters.append([])
        for index, name in enumerate(group, start=count):
            shape = source.manifest.parameters[name]["shape"]
            vector = _Vector(source, {name: (slice(0, prod(shape)), 0)}, prod(shape))
            if found := vector.states([name]):
                moments = {key: found[key].view(shape) for key in source.values.keys(MOMENT, name)}
                states[index] = found | moments
            if layout.dtype != torch.float32:
                masters[-1].append(vector.of(WEIGHT, "").view(shape))
        count += len(group)
    base = {"state": states, "param_groups": param_groups}
    if layout.dtype == torch.float32:
        return base
    scaler = source.plain["trainer"].get("scaler") or {}
    return {
        "dynamic_loss_scale": bool(scaler.get("dynamic", False)),
        "cur_scale": float(scaler.get("scale", 1.0)),
        "cur_iter": int(scaler.get("cur_iter", 0)),
        "last_overflow_iter": int(scaler.get("last_overflow_iter", -1)),
        "cur_hysteresis": int(scaler.get("cur_hysteresis", layout.scaling.hysteresis)),
        "scale_factor": 2.0,
        "scale_window": layout.scaling.loss_scale_window,
        "optimizer_state_dict": base,
        "fp32_groups": masters,
    }


def _numbered(source: OpenCheckpoint, layout: DeepSpeedTarget, groups: Groups) -> Groups:
    """Return the names that the optimizer of stage 0 numbers, by group."""
    # In this case DeepSpeed numbers the frozen parameters, too.
    if layout.dtype == torch.float32 and len(groups) == 1:
        names = source.manifest.extra.get("names") or {}
        everything = source.manifest.parameters
        return [[name for name, first in names.items() if name == first and name in everything]]
    return groups


def _scaler(source: OpenCheckpoint, layout: DeepSpeedTarget) -> State:
    """Return the loss scaler as DeepSpeed's object, which stage 3 requires."""
    saved = source.plain["trainer"].get("scaler") or {}
    is_dynamic = bool(saved.get("dynamic", False))
    scaler: Any = LossScaler(cur_scale=float(saved.get("scale", 1.0)), dynamic=False)
    if is_dynamic:
        scaler = DynamicLossScaler(
            cur_scale=float(saved["scale"]),
            dynamic=True,
            cur_iter=int(saved["cur_iter"]),
            last_overflow_iter=int(saved["last_overflow_iter"]),
            scale_factor=2.0,
            scale_window=layout.scaling.loss_scale_window,
            min_scale=layout.scaling.min_loss_scale,
            delayed_shift=layout.scaling.hysteresis,
            cur_hysteresis=int(saved["cur_hysteresis"]),
            consecutive_hysteresis=layout.scaling.consecutive_hysteresis,
            raise_error_at_min_scale=True,
            dtype=torch.float16,
        )
    return {"loss_scaler": scaler, "dynamic_loss_scale": is_dynamic, "overflow": False}


# -- pickling


class _Pickler(pickle._Pickler):  # the Python implementation, whose methods can be overridden
    """Pickle our stand-ins under the names of DeepSpeed's classes."""

    def save_global(self, obj: Any, name: str | None = None) -> None:
        """Pickle a class by name, a stand-in by that of DeepSpeed's class.

        Args:
            obj: The class or function.
            name: Its name, as in the base class.
        """
        known = STAND_INS.get(obj) if obj is not int and isinstance(obj, type) else None
        if known is None:
            super().save_global(obj, name)  # type: ignore[misc]
            return
        module, _, word = known.rpartition(".")
        self.write(pickle.GLOBAL + f"{module}\n{word}\n".encode())  # type: ignore[attr-defined]
        self.memoize(obj)  # type: ignore[attr-defined]


_PICKLE: Any = SimpleNamespace(__name__="pickle", Pickler=_Pickler)


def _save(state: State, path: Path) -> None:
    """Write a file with torch.save, with stand-ins pickled as DeepSpeed's classes.

    Raises:
        CheckpointError: Writing to the disk failed.
    """
    with files.describing_errors(f"writing '{path}'"), files.new_file(path) as stream:
        torch.save(state, stream, pickle_module=_PICKLE)
