"""Read a checkpoint that DeepSpeed wrote at stages 0 to 3, by name and flat range.

    mp_rank_00_model_states.pt                          stages 0 to 2: the whole weights;
                                                        at stage 0 also the optimizer
    zero_pp_rank_R_mp_rank_00_model_states.pt           stage 3: buffers, and rank R's shards of
                                                        frozen weights
    [bf16_]zero_pp_rank_R_mp_rank_00_optim_states.pt    stages 1 to 3: rank R's shards of main
                                                        weights and moments
    layer_LL[-model_00]-model_states.pt                 pipeline: the weights of layer LL;
                                                        mp_rank_PP is then a stage

The files are pickles. They are read with weights_only=True, which builds only tensors and plain
values, and with stand-ins for the four classes of DeepSpeed that they contain. Anything else is an
error. Tensors are memory-mapped, so a rank reads only the bytes that it copies.
"""

from __future__ import annotations

import re
from argparse import Namespace
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ....base.errors import CheckpointError, brief
from ....base.quantities import ceil_div
from ....checkpoint.format import CLIENT, MOMENT, WEIGHT, Manifest, missing_elements
from ....checkpoint.numpy_values import all_from_plain
from ....checkpoint.safetensors_file import dtype_name
from ....checkpoint.state import saved_scalar
from ....checkpoint.torch_file import MappedCheckpoint, load_mapped, parameter_facts
from ....config.batch import BATCH_KEYS, BatchRequest, solve
from ....config.problems import Problem

State = Mapping[str, Any]  # a dictionary of a file

MODEL = "mp_rank_00_model_states.pt"
MODEL_OF_RANK = "zero_pp_rank_{}_mp_rank_00_model_states.pt"
MODEL_FILE = re.compile(r"(?:zero_pp_rank_(\d+)_)?mp_rank_(\d+)_model_states\.pt")
LAYER_FILE = re.compile(r"layer_(\d+)(?:-model_(\d+))?-model_states\.pt")
OPTIMIZER_FILE = re.compile(r"(?:bf16_|fp16_)?zero_pp_rank_(\d+)_mp_rank_(\d+)_?optim_states\.pt")
# Keys of ds_config, by our names
BATCH_SIZES = dict(zip(("train", "micro", "accumulation"), BATCH_KEYS, strict=True))
# Key of ds_config for this library's own entry: {"run": identity of the save, "rank": rank}
IDENTITY_KEY = "deepseek_zero"
# Keys that DeepSpeed stores next to those of the caller's client_state
RESERVED_KEYS = frozenset(
    "module buffer_names optimizer param_shapes frozen_param_shapes shared_params "
    "frozen_param_fragments lr_scheduler data_sampler random_ltd sparse_tensor_module_names "
    "skipped_steps global_steps global_samples dp_world_size mp_world_size ds_config ds_version "
    "checkpoint_parallel_dimensions universal_checkpoint_info".split()
)


class PickledObject:
    """An unpickled object of one of DeepSpeed's classes: attributes without methods."""

    def __init__(self, **attributes: Any) -> None:
        self.__dict__.update(attributes)


class LossScaler(PickledObject): ...


class DynamicLossScaler(PickledObject): ...


class FragmentAddress(PickledObject): ...


STAND_INS: dict[Any, str] = {
    LossScaler: "deepspeed.runtime.fp16.loss_scaler.LossScaler",
    DynamicLossScaler: "deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler",
    FragmentAddress: "deepspeed.utils.tensor_fragment.fragment_address",
    int: "deepspeed.runtime.zero.config.ZeroStageEnum",
}
# Types of client_state that execute no code, and are not among those that torch loads
PLAIN_TYPES: dict[Any, str] = {
    kind: f"{kind.__module__}.{kind.__qualname__}" for kind in (Namespace, frozenset, type(Path()))
}


def deepspeed_files(folder: Path) -> list[Path]:
    """Return the files in a folder whose names are those of DeepSpeed's layout."""
    paths = sorted(folder.iterdir()) if folder.is_dir() else []
    return [
        path
        for path in paths
        if any(kind.fullmatch(path.name) for kind in (MODEL_FILE, OPTIMIZER_FILE, LAYER_FILE))
    ]


@dataclass
class DeepSpeedCheckpoint(MappedCheckpoint):
    """An open checkpoint in DeepSpeed's layout.

    Attributes:
        moments_problem: Why the moments in the files cannot be used; "" if they can.
        clients: client_state by rank, of the ranks that passed their own.
    """

    moments_problem: str = ""
    clients: dict[int, State] = field(default_factory=dict)


def open_file(path: Path) -> State:
    """Load one file, with mapped tensors and inert replacements of DeepSpeed's objects.

    Returns:
        The dictionary that the file contains.

    Raises:
        CheckpointError: The file is missing, damaged, or contains other objects.
    """
    return load_mapped(path, STAND_INS | PLAIN_TYPES, ", and four classes of DeepSpeed's,")


def read_deepspeed(folder: Path, trained: frozenset[str] = frozenset()) -> DeepSpeedCheckpoint:
    """Open the checkpoint in a folder.

    Only names, shapes and positions are read; tensors are read on demand.

    Args:
        folder: Folder of the checkpoint.
        trained: Names of the parameters that the caller's model trains. The files of stage 0 do not
            record them.

    Returns:
        The open checkpoint, which reads states by name and flat range.

    Raises:
        CheckpointError: The checkpoint is incomplete, damaged, or of an unsupported kind.
    """
    try:
        return _read(folder, trained)
    except (LookupError, TypeError, AttributeError, ValueError, ArithmeticError, OSError) as error:
        raise CheckpointError(
            f"{folder} is not laid out as expected: {brief(error)}.",
            "Checkpoints of DeepSpeed's stages 0 to 3 and of its pipelines are read, others "
            "(experts) are not.",
            "convert it with DeepSpeed's own tools first.",
        ) from error


def _read(folder: Path, trained: frozenset[str]) -> DeepSpeedCheckpoint:
    """Read the first model file, which shows the kind of the checkpoint, and then the others."""
    is_third = not (folder / MODEL).exists()
    name = MODEL_OF_RANK.format(0) if is_third else MODEL
    first = open_file(folder / name)
    ranks = int(first["dp_world_size"])
    if first.get("module") is None:
        return _read_pipeline(folder, first, ranks, trained)
    if int(first.get("mp_world_size") or 1) > 1:
        raise _tensor_parallel(folder, first["mp_world_size"])
    models = [first]
    if is_third:
        models += [open_file(folder / MODEL_OF_RANK.format(rank)) for rank in range(1, ranks)]
    files = _optimizer_files(folder, ranks, first)
    optimizers = [each["optimizer_state_dict"] for each in files]
    _refuse_others(folder, [*enumerate(models), *enumerate(files)])
    buffers = set(first["buffer_names"] or ())
    found = DeepSpeedCheckpoint(folder, _manifest(first, ranks, is_third))
    if is_third:
        found.clients = {rank: _client(each) for rank, each in enumerate(models)}
    else:
        found.clients = {
            rank: all_from_plain(dict(each[CLIENT]))
            for rank, each in enumerate(files)
            if isinstance(each.get(CLIENT), Mapping)
        }
        stated = _identity(first).get("clients") or {}
        found.clients |= {rank: all_from_plain(client) for rank, client in stated.items()}
    found.buffers = [
        {name: each["module"][name] for name in buffers if name in each["module"]}
        for each in models
    ]
    found.manifest.buffers = {
        name: {"shape": list(value.shape), "dtype": dtype_name(value.dtype)}
        for name, value in found.buffers[0].items()
    }
    if is_third:
        _add_partitioned(found, models, optimizers)
    else:
        found.add_weights(first["module"], leave_out=buffers)
        if optimizers:
            groups = _add_flat(found, first["param_shapes"], optimizers)
            found.manifest.extra["groups"] = groups
        elif first.get("optimizer"):
            _add_replicated(found, first["optimizer"], trained, _identity(first))
    return _completed(found, first, optimizers)


def _identity(file: State) -> State:
    """Return the entry of this library in a file; {} if DeepSpeed wrote the file."""
    identity: State = (file.get("ds_config") or {}).get(IDENTITY_KEY) or {}
    return identity


def _completed(
    found: DeepSpeedCheckpoint, first: State, optimizers: Sequence[State]
) -> DeepSpeedCheckpoint:
    """Add the plain values and return the checkpoint.

    Raises:
        CheckpointError: Elements of a weight or moment are missing.
    """
    optimizer = optimizers[0] if optimizers else first.get("optimizer") or {}
    trainer: dict[str, Any] = {
        "global_steps": int(first.get("global_steps") or 0),
        "global_samples": int(first.get("global_samples") or 0),
        "skipped_steps": int(first.get("skipped_steps") or 0),
        "scaler": _scaler(first, optimizers),
        "lr_scheduler": all_from_plain(first.get("lr_scheduler")),
        "batch": _batch(first),
        "ranks": {
            "data": int(first["dp_world_size"]),
            "model": int(first.get("mp_world_size") or 1),
        },
    }
    if (curriculum := first.get("data_sampler")) is not None:
        given = int(curriculum.get("consumed_samples", 0))
        trainer["data"] = {"epoch": 0, "samples": given, "curriculum": curriculum}
    _refuse_gaps(found)
    found.plain = {"groups": _groups(optimizer), "trainer": trainer, "client": _client(first)}
    return found


def _batch(first: State) -> dict[str, int] | None:
    """Return the batch sizes of the run that saved the checkpoint, or None if unknown."""
    config = first.get("ds_config") or {}
    train, micro, accumulation = (_size(config.get(key)) for key in BATCH_SIZES.values())
    ranks = _size(first.get("dp_world_size"))
    if ranks is None or (train is None and micro is None):
        return None
    batch = solve(BatchRequest(ranks, train, micro, accumulation))
    if isinstance(batch, Problem):
        return None
    return {name: getattr(batch, name) for name in BATCH_SIZES}


def _size(value: Any) -> int | None:
    """Return a size from the configuration; None for "auto" or a missing value."""
    return value if isinstance(value, int) and value > 0 else None


def _client(model: State) -> State:
    """Return the caller's client_state in a model file."""
    return {
        name: all_from_plain(value) for name, value in model.items() if name not in RESERVED_KEYS
    }


def _tensor_parallel(folder: Path, ranks: int) -> CheckpointError:
    """Create the error for a checkpoint whose parameters are split over ranks."""
    return CheckpointError(
        f"{folder} was saved with tensor parallelism of {ranks}.",
        "Its files do not say which part of a parameter each of them holds.",
        "convert it with DeepSpeed's own tools first.",
    )


def _refuse_gaps(found: DeepSpeedCheckpoint) -> None:
    """Raise CheckpointError if elements of a weight or of a saved moment are missing."""
    wanted = {(WEIGHT, name, "") for name in found.manifest.parameters}
    wanted |= {(*state, key) for state, keys in found.states.items() for key in keys}
    for kind, name, key in sorted(wanted):
        reached = 0
        numel = prod(found.manifest.parameters[name]["shape"])
        segments = found.states.get((kind, name), {}).get(key, ())
        for segment in sorted(segments, key=lambda each: each.start):
            if segment.start <= reached:
                reached = max(reached, segment.start + segment.values.numel())
        if reached != numel:
            raise missing_elements(
                found.folder,
                f"elements {reached} to {numel} of '{name}' ({f'{kind} {key}'.strip()})",
            )


def _refuse_others(folder: Path, files: Sequence[tuple[int, State]]) -> None:
    """Raise CheckpointError if a file is of another save or another rank.

    Only files that this library wrote record their save and rank.
    """
    identities = [(rank, _identity(each) or None) for rank, each in files]
    own = next((each["run"] for _, each in identities if each is not None), None)
    for rank, each in identities:
        if own is not None and (each is None or (each["run"], each["rank"]) != (own, rank)):
            raise CheckpointError(
                f"{folder} holds a file of rank {rank} that is of another rank or another save: "
                f"{each}, not {own}.",
                "Files were exchanged, or copied from another checkpoint.",
                "copy the whole folder, or load another tag.",
            )


def _optimizer_files(folder: Path, ranks: int, first: State, stage: int = 0) -> list[State]:
    """Load the optimizer files of all ranks of a pipeline stage; [] if there are none.

    Raises:
        CheckpointError: Some of the files are missing.
    """
    numbered = {}
    for path in folder.iterdir():
        found = OPTIMIZER_FILE.fullmatch(path.name)
        if found and int(found[2]) == stage:
            numbered[int(found[1])] = path
    if not numbered and first.get("param_shapes") is None:
        return []
    missing = sorted(set(range(ranks)) - set(numbered))
    if missing:
        raise CheckpointError(
            f"{folder} lacks the optimizer files of ranks {missing[:5]} of {ranks}.",
            "Each rank wrote its own part.",
            "copy the whole folder, or load another tag.",
        )
    return [open_file(numbered[rank]) for rank in range(ranks)]


def _manifest(first: State, ranks: int, is_third: bool) -> Manifest:
    """Build a manifest without parameters and buffers from the first model file."""
    config = first.get("ds_config") or {}
    stage = 3 if is_third else int((config.get("zero_optimization") or {}).get("stage") or 0)
    tied = first.get("shared_params") or _identity(first).get("tied") or {}
    module = first["module"] or {}
    names = {name: tied.get(name, name) for name in module}
    dtypes = [
        dtype_name(value.dtype)
        for name, value in module.items()
        if name not in first["buffer_names"]
    ]
    plan = {"module": {"weight": next(iter(dtypes), "float32")}}
    run = str(_identity(first).get("run", ""))
    extra = {"names": names, "groups": []}
    return Manifest(
        ranks,
        stage,
        plan,
        {},
        {},
        [],
        None,
        {},
        [],
        run=run,
        format="DeepSpeed",
        version=0,
        extra=extra,
    )


def _groups(optimizer: State) -> list[State]:
    """Return the optimizer's parameter groups without their parameters."""
    states = _base(optimizer)
    groups = states.get("param_groups", []) if isinstance(states, Mapping) else []
    return [{key: value for key, value in group.items() if key != "params"} for group in groups]


def _base(optimizer: State) -> Any:
    """Return the state dict of the inner optimizer.

    DeepSpeed's optimizers keep it under different names.
    """
    for name in ("base_optimizer_state", "optimizer_state_dict"):
        if name in optimizer:
            return optimizer[name]
    return optimizer


# -- stages 0 to 2: the files have the whole weights


def _master(
    found: DeepSpeedCheckpoint, name: str, shape: Sequence[int], dtype: torch.dtype
) -> None:
    """Register a parameter's main weight, which replaces the weight of the model file."""
    found.states.pop((WEIGHT, name), None)
    found.manifest.parameters[name] = parameter_facts(shape, dtype, trained=True)


# -- stages 1 and 2: each parameter group is one flat tensor, cut into one part for each rank


def _add_flat(
    found: DeepSpeedCheckpoint,
    shapes: Sequence[State],
    optimizers: Sequence[State],
    elsewhere: Collection[str] = (),
) -> list[list[str]]:
    """Add main weights and states of stages 1 and 2, and return the names by group.

    Rank r has the r-th part of each group's flat tensor.

    Args:
        found: The checkpoint to add them to.
        shapes: Shapes by name, for each parameter group.
        optimizers: Optimizer state dicts by rank.
        elsewhere: Names that an earlier stage of the pipeline has already added.
    """
    groups = []
    gaps = optimizers[0].get("param_alignment_paddings")
    for number, of_group in enumerate(shapes):
        paddings = gaps[number] if gaps is not None else ()
        ranges = flat_ranges({name: prod(shape) for name, shape in of_group.items()}, paddings)
        groups.append(list(ranges))
        new = {name: ranges[name] for name in ranges if name not in elsewhere}
        for name in new:
            dtype = optimizers[0]["single_partition_of_fp32_groups"][number].dtype
            _master(found, name, of_group[name], dtype)
        for rank, optimizer in enumerate(optimizers):
            part = optimizer["single_partition_of_fp32_groups"][number]
            size = part.numel()
            # ZeRO's optimizer removes the padding before it saves; the bf16 optimizer does not.
            if "zero_stage" in optimizer:
                size += int(optimizer["group_paddings"][number])
            low = rank * size
            spans = flat_spans(new, low, low + part.numel())
            _add_spans(found, spans, part, _states(optimizer, number))
    return groups


Spans = dict[str, tuple[slice, int]]  # elements of a parameter, and their offset in a flat tensor


def flat_ranges(numels: Mapping[str, int], paddings: Sequence[int] = ()) -> dict[str, range]:
    """Return the range of each parameter in a flat tensor of the whole parameters.

    Args:
        numels: Number of elements of each parameter by name, in the order of the flat tensor.
        paddings: Number of elements after each parameter; empty for none.

    Returns:
        For each parameter name, the range of its elements in the flat tensor.
    """
    found = {}
    start = 0
    for index, (name, numel) in enumerate(numels.items()):
        found[name] = range(start, start + numel)
        start += numel + (paddings[index] if paddings else 0)
    return found


def flat_spans(ranges: Mapping[str, range], low: int, high: int) -> Spans:
    """Return the parts of parameters in the range [low, high) of a flat tensor.

    Args:
        ranges: Range of each parameter in the flat tensor.
        low: Index of the first element in the flat tensor.
        high: Index after the last element.

    Returns:
        For each parameter with elements in the range, the slice of the flattened parameter and its
        offset from `low`.
    """
    found = {}
    for name, own in ranges.items():
        first = max(low, own.start)
        last = min(high, own.stop)
        if first < last:
            found[name] = slice(first - own.start, last - own.start), first - low
    return found


def partition_spans(numels: Mapping[str, int], rank: int, ranks: int) -> tuple[Spans, int]:
    """Return the parts of parameters in a rank's flat tensor at stage 3, and its length.

    Args:
        numels: Number of elements of each parameter.
        rank: Rank whose flat tensor is described.
        ranks: Number of ranks.

    Returns:
        The parts of parameters, in the order in which the flat tensor contains them, and its length
        in elements, including padding.
    """
    found = {}
    offset = 0
    for name, numel in numels.items():
        found[name] = partition_slice(numel, rank, ranks), offset
        offset += ceil_div(numel, ranks)
    return found, offset


def _add_spans(found: DeepSpeedCheckpoint, spans: Spans, flat: Tensor, states: State) -> None:
    """Add parts of main weights and their states from flat tensors."""
    for name, (cut, offset) in spans.items():
        here = slice(offset, offset + cut.stop - cut.start)
        if cut.start < cut.stop:
            found.add(WEIGHT, name, "", cut.start, flat[here])
            _add_states(found, name, states, cut.start, here)


def _states(optimizer: State, number: int) -> State:
    """Return the states of one flat parameter, including its group's step."""
    base = _base(optimizer)
    if isinstance(base, list):  # the elastic format has a list of groups
        states = dict(base[number])
        step = optimizer.get("base_optimizer_state_step")
    else:
        params = [(param, group) for group in base["param_groups"] for param in group["params"]]
        param, group = params[number]
        states = dict(base["state"].get(param, {}))
        step = group.get("step")
    if states and step is not None:
        states.setdefault("step", step)
    return states


def _add_states(
    found: DeepSpeedCheckpoint, name: str, states: State, start: int, cut: slice
) -> None:
    """Add the optimizer states of a parameter or of a range of it.

    Args:
        found: The checkpoint to add them to.
        name: Name of the parameter.
        states: States by key. All numbers are added.
        start: Offset in the parameter of the first element.
        cut: Elements of the flat state tensors to add.
    """
    for key, value in states.items():
        if isinstance(value, Tensor) and value.dim():
            found.add(MOMENT, name, key, start, value.reshape(-1)[cut])
        elif not isinstance(value, str) and (number := saved_scalar(value)) is not None:
            found.manifest.scalars.setdefault(name, {})[key] = number


# -- pipelines: one file for each layer; each stage also has the files of a data-parallel run


def _read_pipeline(
    folder: Path, first: State, ranks: int, trained: frozenset[str]
) -> DeepSpeedCheckpoint:
    """Read the checkpoint of a PipelineModule.

    Its parameters are named "LAYER.weight" and "tied_modules.KEY.weight". Stages with ZeRO record
    the names of their trained parameters. For other stages, `trained` is used to recognize tied
    layers. If two stages have the same name, the first one is used.
    """
    layers: dict[int, list[Path]] = {}
    for path in sorted(folder.iterdir()):
        if match := LAYER_FILE.fullmatch(path.name):
            layers.setdefault(int(match[1]), []).append(path)
    if most := max((len(paths) for paths in layers.values() if len(paths) > 1), default=0):
        raise _tensor_parallel(folder, most)
    stages = range(int(first.get("mp_world_size") or 1))
    models = [first]
    models += [open_file(folder / f"mp_rank_{stage:02d}_model_states.pt") for stage in stages[1:]]
    shapes: dict[str, Any] = {}
    for model in models:
        for of_group in model["param_shapes"] or ():
            shapes.update(of_group)
    found = DeepSpeedCheckpoint(folder, _manifest(first, ranks, is_third=False))
    found.buffers = [{}]
    for layer, (path,) in sorted(layers.items()):
        _add_layer(found, layer, open_file(path), shapes or dict.fromkeys(trained))
    by_stage: list[list[State]] = []
    groups: list[list[str]] = []
    for stage, model in enumerate(models):
        files = _optimizer_files(folder, ranks, model, stage)
        of_stage = [each["optimizer_state_dict"] for each in files]
        by_stage.append(of_stage)
        if of_stage:
            added = {name for names in groups for name in names}
            of_groups = _add_flat(found, model["param_shapes"], of_stage, added)
            groups += [[] for _ in of_groups[len(groups) :]]
            for names, more in zip(groups, of_groups, strict=True):
                names += [name for name in more if name not in names]
        elif model.get("optimizer"):
            found.moments_problem = (
                "the optimizer's parameters are numbered within a stage, and have no names"
            )
    found.manifest.extra |= {
        "groups": groups,
        "names": {name: name for name in found.manifest.parameters},
    }
    dtypes = [facts["dtype"] for facts in found.manifest.parameters.values()]
    found.manifest.plan = {"module": {"weight": next(iter(dtypes), "float32")}}
    return _completed(found, first, by_stage[0])


def _add_layer(
    found: DeepSpeedCheckpoint, layer: int, state: Mapping[str, Tensor], known: State
) -> None:
    """Add the weights of a layer's file under their names in the module.

    Args:
        found: The checkpoint to add them to.
        layer: Index of the layer.
        state: State dict of the layer.
        known: Known parameter names, with their shapes if the files record them.
    """
    prefix = f"{layer}."
    if known and not any(prefix + leaf in known for leaf in state):
        keys = dict.fromkeys(
            name.split(".")[1] for name in known if name.startswith("tied_modules.")
        )
        fitting = [
            key
            for key in keys
            if all(_is_tied(known, key, leaf, value) for leaf, value in state.items())
        ]
        if len(fitting) > 1:
            raise CheckpointError(
                f"layer {layer} of {found.folder} may be each of the tied modules "
                f"{', '.join(fitting)}.",
                "A layer's file does not say its name, and their weights have the same shapes.",
                "convert it with DeepSpeed's own tools first.",
            )
        prefix = f"tied_modules.{fitting[0]}." if fitting and state else prefix
    parameters = found.manifest.parameters
    for leaf, value in state.items():
        name = prefix + leaf
        if name not in parameters:
            trained = not known or name in known
            parameters[name] = parameter_facts(value.shape, value.dtype, trained=trained)
            found.add(WEIGHT, name, "", 0, value)


def _is_tied(known: State, key: str, leaf: str, value: Tensor) -> bool:
    """Return whether a weight of a layer fits a tied module."""
    name = f"tied_modules.{key}.{leaf}"
    return name in known and known[name] in (None, value.shape)


# -- stage 3: each parameter is cut into one part for each rank


def _add_partitioned(
    found: DeepSpeedCheckpoint,
    models: Sequence[State],
    optimizers: Sequence[State],
) -> None:
    """Add main weights, states and frozen weights of stage 3.

    Rank r has the r-th part of each parameter.
    """
    ranks = len(models)
    groups = _base(optimizers[0])["param_groups"]
    owner = [number for number, group in enumerate(groups) for _ in group["params"]]
    found.manifest.extra["groups"] = [[] for _ in groups]
    for name, shape in (models[0].get("frozen_param_shapes") or {}).items():
        parts = [model["frozen_param_fragments"][name] for model in models]
        found.manifest.parameters[name] = parameter_facts(shape, parts[0].dtype, trained=False)
        for rank, part in enumerate(parts):
            cut = partition_slice(prod(shape), rank, ranks)
            found.add(WEIGHT, name, "", cut.start, part.reshape(-1)[: cut.stop - cut.start])
    for number, of_group in enumerate(models[0]["param_shapes"]):
        numels = {name: prod(shape) for name, shape in of_group.items()}
        for rank, optimizer in enumerate(optimizers):
            flat = optimizer["fp32_flat_groups"][number]
            spans, length = partition_spans(numels, rank, ranks)
            if length > flat.numel():
                raise CheckpointError(
                    f"{found.folder} holds masters of {flat.numel()} elements where more belong.",
                    "DeepSpeed leaves what it offloads to NVMe out of these files, in a folder "
                    "offloaded_tensors.",
                    "save without NVMe offload, or convert it with DeepSpeed's own tools first.",
                )
            if not rank:
                for name, shape in of_group.items():
                    _master(found, name, shape, flat.dtype)
                found.manifest.extra["groups"][owner[number]] += of_group
            _add_spans(found, spans, flat, _states(optimizer, number))


def partition_slice(numel: int, rank: int, ranks: int) -> slice:
    """Return the range of a parameter's elements that stage 3 assigns to a rank.

    The last ranks may have fewer elements, or none.

    Args:
        numel: Number of elements of the parameter.
        rank: Rank whose range is returned.
        ranks: Number of ranks.

    Returns:
        The range of elements in the flattened parameter.
    """
    size = ceil_div(numel, ranks)
    return slice(min(rank * size, numel), min((rank + 1) * size, numel))


# -- stage 0: the optimizer's state has no names


def _add_replicated(
    found: DeepSpeedCheckpoint, optimizer: State, trained: frozenset[str], identity: State
) -> None:
    """Add optimizer states that are numbered in the order of the model's parameters.

    The numbers cover either all parameters or the trained ones, whichever has matching shapes. A
    checkpoint of this library has the names of the numbered parameters.

    Args:
        found: The checkpoint to add them to.
        optimizer: State dict of the optimizer.
        trained: Names of the parameters that the caller's model trains.
        identity: The entry of this library in the file; {} if DeepSpeed wrote the file.
    """
    base = _base(optimizer)
    parameters = found.manifest.parameters
    flats: list[Tensor] | None = optimizer.get("fp32_groups_flat")
    masters: list[Tensor] = [each for group in optimizer.get("fp32_groups", []) for each in group]
    numbers = [param for group in base["param_groups"] for param in group["params"]]
    states = [dict(base["state"].get(number, {})) for number in numbers]
    like: list[Tensor | None] = [*masters] or [
        next((v for v in each.values() if isinstance(v, Tensor) and v.dim()), None)
        for each in states
    ]
    stated = [name for group in identity.get("groups", ()) for name in group]
    orders = [list(parameters), [name for name in parameters if name in trained]]
    # Frozen parameters that were not saved have numbers, but no shape
    not_saved = {"shape": ()}
    for names in [stated] if stated else orders:
        shapes = [tuple(parameters.get(name, not_saved)["shape"]) for name in names]
        if flats is not None:
            if sum(flat.numel() for flat in flats) == sum(map(prod, shapes)):
                found.manifest.extra["groups"] = _add_flat_masters(found, optimizer, flats, names)
                return
        elif len(like) == len(shapes):
            pairs = zip(like, shapes, strict=True)
            if all(value is None or tuple(value.shape) == shape for value, shape in pairs):
                break
    else:
        found.moments_problem = (
            "the optimizer's parameters are numbered, and are neither all of the model's nor the "
            "trained ones"
        )
        return
    is_used = [bool(state) or not any(states) for state in states]
    if stated:
        is_used = [name not in identity["frozen"] for name in stated]
    for index, (name, shape) in enumerate(zip(names, shapes, strict=True)):
        if name not in parameters:
            continue
        if masters:
            _master(found, name, shape, masters[index].dtype)
            found.add(WEIGHT, name, "", 0, masters[index])
        parameters[name]["trained"] = is_used[index]
        _add_states(found, name, states[index], 0, slice(0, prod(shape)))
    named = iter(zip(names, is_used, strict=True))
    found.manifest.extra["groups"] = [
        [name for name, used in islice(named, len(group["params"])) if used]
        for group in base["param_groups"]
    ]


def _add_flat_masters(
    found: DeepSpeedCheckpoint,
    optimizer: State,
    flats: Sequence[Tensor],
    names: Sequence[str],
) -> list[list[str]]:
    """Add the fp16 main weights of stage 0 and return their names by group.

    Each group's parameters are concatenated without padding.
    """
    groups: list[list[str]] = []
    shapes = {name: found.manifest.parameters[name]["shape"] for name in names}
    ranges = flat_ranges({name: prod(shape) for name, shape in shapes.items()})
    start = 0
    for number, flat in enumerate(flats):
        spans = flat_spans(ranges, start, start + flat.numel())
        for name in spans:
            _master(found, name, shapes[name], flat.dtype)
        _add_spans(found, spans, flat, _states(optimizer, number))
        groups.append(list(spans))
        start += flat.numel()
    return groups


def _scaler(first: State, optimizers: Sequence[State]) -> State | None:
    """Convert DeepSpeed's loss scaler to our state dict; None if there is no scaler."""
    saved_scaler = first.get("optimizer") or {}
    if optimizers and isinstance(optimizers[0].get("loss_scaler"), PickledObject):
        saved_scaler = vars(optimizers[0]["loss_scaler"])
    if "cur_scale" not in saved_scaler:
        return None
    fp16 = (first.get("ds_config") or {}).get("fp16") or {}
    return {
        "dynamic": bool(saved_scaler.get("dynamic", saved_scaler.get("dynamic_loss_scale", False))),
        "scale": float(saved_scaler["cur_scale"]),
        "cur_iter": int(saved_scaler.get("cur_iter", 0)),
        "last_overflow_iter": int(saved_scaler.get("last_overflow_iter", -1)),
        "cur_hysteresis": int(saved_scaler.get("cur_hysteresis", fp16.get("hysteresis", 2))),
    }
