"""Writes a checkpoint in DeepSpeed's layout from any checkpoint folder, file by file: ranks may
share the work.

The files are what DeepSpeed itself would have written for so many ranks at that stage, so that
DeepSpeed loads them and its tools work on them.  They hold tensors and plain values, and objects of
two of DeepSpeed's classes, by name alone.
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

from ....base.errors import CheckpointError
from ....base.log import log_once
from ....checkpoint import files
from ....checkpoint.contents import IMPLEMENTATION_OPTIONS
from ....checkpoint.format import CLIENT, MOMENT, WEIGHT, WHOLE
from ....checkpoint.layouts import OpenCheckpoint, layout_of
from ....checkpoint.numpy_values import all_to_plain
from ....checkpoint.read import client_of_rank, open_checkpoint, tensors_of
from ....checkpoint.safetensors_file import cast, dtype_name, dtype_named
from ....checkpoint.staging import staged_output
from ....precision.loss_scale import LossScaleSettings
from .reader import (
    BATCH_KEYS,
    IDENTITY_KEY,
    MODEL,
    MODEL_OF_RANK,
    RESERVED_KEYS,
    STAND_INS,
    DynamicLossScaler,
    FragmentAddress,
    LossScaler,
    partition_slice,
)

LAYOUT = "0.19.8"  # the version of DeepSpeed whose layout this is
# Elements of a rank's part after which stage 3 starts another flat tensor: its default
SUB_GROUP_NUMEL = 1_000_000_000
SCRIPT = '''"""Writes the whole fp32 weights of the checkpoints beside it: \
python zero_to_fp32.py . OUTPUT_FOLDER"""

from deepseek_zero.utils.zero_to_fp32 import main

if __name__ == "__main__":
    main()
'''


@dataclass(frozen=True)
class DeepSpeedTarget:
    """The checkpoint to write: its stage, its number of ranks, the dtype that its weights compute
    in, its identity, and how its loss is scaled.
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
        """Return the target that a checkpoint itself describes, but for the stage and the ranks
        that are asked for.
        """
        manifest = source.manifest
        rows = " ".join(row["weight"] for row in manifest.plan.values())
        low = next(
            (dtype for dtype in (torch.bfloat16, torch.float16) if dtype_name(dtype) in rows),
            torch.float32,
        )
        run = manifest.run or secrets.token_hex(8)
        return cls(
            manifest.stage if stage is None else stage, ranks or manifest.world_size, low, run
        )

    @property
    def files(self) -> list[int]:
        """Return the ranks that have a file."""
        return list(range(self.ranks if self.stage else 1))


def write_rank(source: OpenCheckpoint, folder: Path, layout: DeepSpeedTarget, rank: int) -> None:
    """Write the files of one rank.  Holds its part of masters and moments in memory, and for rank 0
    at stages 0 to 2 all weights.  CheckpointError where the disk refuses.
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


def _config(source: OpenCheckpoint, layout: DeepSpeedTarget, rank: int) -> dict[str, Any]:
    """Return the ds_config entry: it says which save and rank a file belongs to.  DeepSpeed reads
    nothing back.
    """
    return {
        IDENTITY_KEY: {"run": layout.run, "rank": rank},
        "zero_optimization": {"stage": layout.stage},
        "bf16": {"enabled": layout.dtype == torch.bfloat16},
        "fp16": {"enabled": layout.dtype == torch.float16},
        **{
            BATCH_KEYS[name]: value
            for name, value in (source.plain["trainer"].get("batch") or {}).items()
        },
    }


def _groups(source: OpenCheckpoint) -> list[list[str]]:
    """Return the trained names by parameter group, in the optimizer's order; CheckpointError if
    nothing says them.
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
            f"the optimizer's states of '{rows[0]}' have shapes of their own.",
            "DeepSpeed's layout cuts every state as its parameter is cut.",
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
    """Write a checkpoint in DeepSpeed's layout into the folder `out`.

    stage, ranks: those that DeepSpeed will run with, which must match; by default the checkpoint's
    own.  Holds one rank's part of masters and moments in memory, and at stages 0 to 2 all weights.
    CheckpointError where the source is damaged or has no optimizer states; then nothing is written.
    """
    with ExitStack() as stack:
        source = open_checkpoint(path, tag, stack)
        found = layout_of(source.folder)
        if found is not None and not found.has_states:
            raise CheckpointError(
                f"{source.folder} holds weights alone.",
                "DeepSpeed's layout is of masters and moments, and DeepSpeed does not load it "
                "without them.",
                "convert the checkpoint that these weights are of, or load them with "
                "engine.load_weights and save.",
            )
        layout = DeepSpeedTarget.of(source, stage, ranks)
        output = stack.enter_context(staged_output(out))
        for rank in layout.files:
            write_rank(source, output.path, layout, rank)
        output.publish_folder()


# -- model files


def _model_state(
    source: OpenCheckpoint, layout: DeepSpeedTarget, rank: int, groups: Sequence[Sequence[str]]
) -> dict[str, Any]:
    """Make one rank's model file, with the keys that DeepSpeed looks for."""
    manifest = source.manifest
    trainer = source.plain["trainer"]
    trained = {name for group in groups for name in group}
    frozen = [
        name
        for name in manifest.parameters
        if name not in trained and source.values.has(WEIGHT, name)
    ]
    is_sharded = layout.stage == 3
    has_zero = layout.stage > 0
    shapes = OrderedDict((name, torch.Size(manifest.parameters[name]["shape"])) for name in frozen)
    parts = (
        OrderedDict((name, _frozen(source, layout, name, rank)) for name in frozen)
        if layout.stage > 1
        else None
    )
    tied = {name: first for name, first in source.tied.items() if first in manifest.parameters}
    client = _client(source, layout, rank)
    subs = (
        [sub for group in groups for sub in _sub_groups(source, group, layout)]
        if is_sharded
        else groups
    )
    return {
        "module": _module(source, layout, rank),
        "buffer_names": list(manifest.buffers),
        "optimizer": None if has_zero else _replicated(source, layout, groups),
        "param_shapes": [_shapes(source, sub) for sub in subs] if has_zero else None,
        "frozen_param_shapes": shapes if layout.stage > 1 else None,
        "shared_params": tied if has_zero else None,
        "frozen_param_fragments": parts,
        "lr_scheduler": all_to_plain(trainer.get("lr_scheduler")),
        "data_sampler": _curriculum(trainer.get("data")),
        "random_ltd": None,
        **{name: trainer[name] for name in ("skipped_steps", "global_steps", "global_samples")},
        "dp_world_size": layout.ranks,
        "mp_world_size": 1,
        "ds_config": _config(source, layout, rank),
        "ds_version": LAYOUT,
        **client,
    }


def _curriculum(position: Any) -> Any:
    """Return the state of the curriculum that deals the data, None without one."""
    return position.get("curriculum") if isinstance(position, Mapping) else None


def _client(source: OpenCheckpoint, layout: DeepSpeedTarget, rank: int) -> dict[str, Any]:
    """Return the caller's values, which lie among DeepSpeed's own.  CheckpointError where a key is
    taken.
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
    """Read weights as they compute, empty at stage 3, and buffers: this rank's at stage 3, else
    rank 0's.
    """
    found: dict[str, Tensor] = {}
    for name, lazy in tensors_of(source).items():
        if name in source.manifest.buffers:
            found[name] = source.values.of_rank(name, rank).view(lazy.shape).clone()
        elif layout.stage == 3:
            found[name] = torch.empty(0, dtype=_computes_in(lazy.dtype, layout))
        else:
            found[name] = cast(lazy.contiguous().view(-1), _computes_in(lazy.dtype, layout)).view(
                lazy.shape
            )
    names = source.manifest.extra.get("names") or {name: name for name in found}
    return OrderedDict((name, found[first]) for name, first in names.items() if first in found)


def _computes_in(own: torch.dtype, layout: DeepSpeedTarget) -> torch.dtype:
    return layout.dtype if own.is_floating_point else own


def _frozen(source: OpenCheckpoint, layout: DeepSpeedTarget, name: str, rank: int) -> Tensor:
    """Read one rank's part of a frozen weight: padded and cut at stage 3, else whole."""
    facts = source.manifest.parameters[name]
    numel = prod(facts["shape"])
    own = dtype_named(facts["dtype"])
    cut = partition_slice(numel, rank, layout.ranks) if layout.stage == 3 else slice(0, numel)
    values = torch.zeros(
        -(-numel // layout.ranks) if layout.stage == 3 else numel, dtype=_computes_in(own, layout)
    )
    for low, part in source.values.read(WEIGHT, name, "", cut.start, cut.stop):
        at = low - cut.start
        values[at : at + part.numel()] = cast(part.reshape(-1), values.dtype)
    return values if layout.stage == 3 else values.view(facts["shape"])


def _shapes(source: OpenCheckpoint, names: Sequence[str]) -> OrderedDict[str, torch.Size]:
    return OrderedDict(
        (name, torch.Size(source.manifest.parameters[name]["shape"])) for name in names
    )


# -- optimizer states


def _fill(source: OpenCheckpoint, what: tuple[str, str, str], cut: slice, into: Tensor) -> None:
    """Read elements of a state into a tensor, which keeps its zeros where a parameter never had the
    state.
    """
    if source.values.has(*what):
        for low, part in source.values.read(*what, cut.start, cut.stop):
            into[low - cut.start : low - cut.start + part.numel()] = part.reshape(-1)


def _keys(source: OpenCheckpoint, names: Sequence[str]) -> list[str]:
    return list(dict.fromkeys(key for name in names for key in source.values.keys(MOMENT, name)))


def _numbers(source: OpenCheckpoint, names: Sequence[str]) -> dict[str, Any]:
    """Return the counters that a group's parameters share in these files: those of the one updated
    most often.
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
    return {
        key: each["value"]
        if each["dtype"] is None
        else torch.tensor(each["value"], dtype=dtype_named(each["dtype"]))
        for key, each in found.items()
    }


def _group(source: OpenCheckpoint, number: int, params: list[int]) -> dict[str, Any]:
    """Return a group's hyper-parameters, without those that say how to compute."""
    saved = source.plain["groups"][number] if source.plain["groups"] else {}
    kept = {key: value for key, value in saved.items() if key not in IMPLEMENTATION_OPTIONS}
    how = {"fused": None, "foreach": None, "capturable": False, "differentiable": False}
    return {"bias_correction": True, **kept, **how, "params": params}


def _flat(
    source: OpenCheckpoint, layout: DeepSpeedTarget, rank: int, groups: Sequence[Sequence[str]]
) -> dict[str, Any]:
    """Make the optimizer file of stages 1 and 2: each group end to end, padded at the end, cut into
    equal parts.
    """
    masters = []
    states = {}
    paddings = []
    addresses = []
    for number, names in enumerate(groups):
        places = {}
        total = 0
        for name in names:
            places[name] = total
            total += prod(source.manifest.parameters[name]["shape"])
        size = -(-total // (2 * layout.ranks)) * 2
        low = rank * size
        here = {}
        for name, place in places.items():
            numel = prod(source.manifest.parameters[name]["shape"])
            cut = slice(max(low - place, 0), min(low + size - place, numel))
            if cut.start < cut.stop:
                here[name] = (cut, place + cut.start - low)
        vector = _Vector(source, here, size)
        held = max(min(size, total - low), 0)
        masters.append(vector.of(WEIGHT, "")[:held].clone())
        keys = _keys(source, names)
        if keys:
            states[number] = _numbers(source, names) | {key: vector.of(MOMENT, key) for key in keys}
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
    """A flat tensor to be filled: which elements of each parameter it holds, and where."""

    source: OpenCheckpoint
    here: dict[str, tuple[slice, int]]
    numel: int

    def of(self, kind: str, key: str) -> Tensor:
        """Read one state of the parameters into a new fp32 tensor, with zeros where nothing
        belongs.
        """
        values = torch.zeros(self.numel)
        for name, (cut, at) in self.here.items():
            _fill(self.source, (kind, name, key), cut, values[at:])
        return values


def _sub_groups(
    source: OpenCheckpoint, names: Sequence[str], layout: DeepSpeedTarget
) -> list[list[str]]:
    """Cut a group's parameters into stage 3's flat tensors: a new one begins when a rank's part is
    large enough.
    """
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
    source: OpenCheckpoint, layout: DeepSpeedTarget, rank: int, groups: Sequence[Sequence[str]]
) -> dict[str, Any]:
    """Make the optimizer file of stage 3: each parameter padded and cut by itself, a rank's parts
    end to end.
    """
    masters: list[Tensor] = []
    states = {}
    param_groups = []
    for number, group in enumerate(groups):
        first = len(masters)
        for names in _sub_groups(source, group, layout):
            here = {}
            place = 0
            for name in names:
                numel = prod(source.manifest.parameters[name]["shape"])
                here[name] = (partition_slice(numel, rank, layout.ranks), place)
                place += -(-numel // layout.ranks)
            vector = _Vector(source, here, place)
            keys = _keys(source, names)
            if keys:
                states[len(masters)] = _numbers(source, names) | {
                    key: vector.of(MOMENT, key) for key in keys
                }
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


def _replicated(
    source: OpenCheckpoint, layout: DeepSpeedTarget, groups: Sequence[Sequence[str]]
) -> dict[str, Any]:
    """Make the optimizer entry of stage 0: the inner optimizer's own state; below fp32 with masters
    of the trained parameters.
    """
    # Then DeepSpeed numbers frozen parameters too
    if layout.dtype == torch.float32 and len(groups) == 1:
        names = source.manifest.extra.get("names") or {}
        groups = [
            [
                name
                for name, first in names.items()
                if name == first and name in source.manifest.parameters
            ]
        ]
    states: dict[int, dict[str, Any]] = {}
    param_groups: list[dict[str, Any]] = []
    masters: list[list[Tensor]] = []
    count = 0
    for number, group in enumerate(groups):
        param_groups.append(_group(source, number, list(range(count, count + len(group)))))
        masters.append([])
        for index, name in enumerate(group, start=count):
            shape = source.manifest.parameters[name]["shape"]
            vector = _Vector(source, {name: (slice(0, prod(shape)), 0)}, prod(shape))
            keys = source.values.keys(MOMENT, name)
            if keys:
                moments = {key: vector.of(MOMENT, key).view(shape) for key in keys}
                states[index] = _numbers(source, [name]) | moments
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
        "scale_factor": 2.0,
        "scale_window": layout.scaling.loss_scale_window,
        "optimizer_state_dict": base,
        "fp32_groups": masters,
    }


def _scaler(source: OpenCheckpoint, layout: DeepSpeedTarget) -> dict[str, Any]:
    """Return the loss scaler as an object of DeepSpeed's, which stage 3 requires."""
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


class _Pickler(pickle._Pickler):  # the one in Python: its steps can be replaced
    """Writes our stand-ins under the names of the classes they stand for."""

    def save_global(self, obj: Any, name: str | None = None) -> None:
        known = STAND_INS.get(obj) if obj is not int and isinstance(obj, type) else None
        if known is None:
            super().save_global(obj, name)  # type: ignore[misc]
            return
        module, _, word = known.rpartition(".")
        self.write(pickle.GLOBAL + f"{module}\n{word}\n".encode())  # type: ignore[attr-defined]
        self.memoize(obj)  # type: ignore[attr-defined]


_PICKLE: Any = SimpleNamespace(__name__="pickle", Pickler=_Pickler)


def _save(state: dict[str, Any], path: Path) -> None:
    """Write a file with torch.save, stand-ins named as DeepSpeed's classes.  CheckpointError where
    the disk refuses.
    """
    with files.describing_errors(f"writing '{path}'"), files.new_file(path) as stream:
        torch.save(state, stream, pickle_module=_PICKLE)
