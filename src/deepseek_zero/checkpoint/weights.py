"""Load weights from safetensors files directly into parameter shards.

Each rank reads only the elements that it holds. Main weights are written too, cast to their dtype.
All ranks complete their checks before any rank changes its model.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn

from ..base.device import default_device
from ..base.errors import CheckpointError
from ..base.expanded import copy_into
from ..base.progress import LongWork
from ..extensions.param_states import optimizer_of
from ..extensions.zero_init import Init, take_slice
from ..optim.sharded import ShardedOptimizer
from ..sharding.param_group import ParamGroup
from ..sharding.param_info import ParamInfo
from ..sharding.runtime import Runtime
from ..sharding.sharded_parameter import owner_of
from .boxes import PlacedValues
from .contents import Contents
from .format import WEIGHT, StateRange
from .hf_folder import SafetensorsFolder
from .load import replace_states, store_weights, write_weight
from .lockstep import run_on_all
from .piece import ModelPiece, persistent_buffers, whole_names
from .verify import ALL_FILES, FileSubset, first_few, raise_faults, verify


def _verify_own_files(path: Path, subset: FileSubset = ALL_FILES) -> None:
    """Verify this rank's part of the files if this library exported them.

    Files of other programs have no checksums.
    """
    with ExitStack() as stack:
        is_ours = SafetensorsFolder(path, stack).runs != {None}
    if is_ours:
        raise_faults(path, verify(path, subset, read_again=True))


def load_weights_into(runtime: Runtime, path: Path, *, strict: bool = True) -> None:
    """Load the weights of safetensors files into a wrapped model.

    Parameter shards, main weights and persistent buffers are replaced. Accumulated gradients and
    deferred updates are discarded. Optimizer moments and step counters are kept.

    Args:
        runtime: Runtime of the wrapped model, which holds its parameter shards.
        path: A safetensors file, or a folder in the layout of Hugging Face.
        strict: Whether to require the same names in the model and the files. If False, tensors that
            the files do not contain keep their values.

    Raises:
        CheckpointError: The files do not exist or are damaged, shapes differ, or names differ and
            `strict` is true. It is raised on every rank. The model is unchanged if a check before
            the load fails. If reading the tensors fails, the values of the model are undefined.

    Note:
        Collective: every rank must call it.
    """
    with ExitStack() as stack, torch.no_grad():

        def match_files() -> tuple[SafetensorsFolder, dict[str, str]]:
            files = SafetensorsFolder(path, stack)
            shapes = ModelPiece.of(runtime).shapes(runtime)
            return files, match_names(files, runtime.model, shapes, path, strict=strict)

        comm = runtime.comm.whole
        subset = FileSubset(comm.rank, comm.size)
        run_on_all(comm, "loading weights: checksums", lambda: _verify_own_files(path, subset))
        files, found = run_on_all(comm, "loading weights: the names", match_files)
        replace_states(
            Contents(runtime, _optimizer_of(runtime)),
            "weights",
            lambda: _restore(runtime, files, found),
        )


def _optimizer_of(runtime: Runtime) -> ShardedOptimizer | None:
    """Return the optimizer of these weights, if any.

    Its deferred and delayed updates belong to the old weights.
    """
    found = (optimizer_of(group.members[0].param) for group in runtime.trained_groups)
    return next((optimizer for optimizer in found if optimizer is not None), None)


def load_weights(model: nn.Module, path: str | Path, strict: bool = True) -> None:
    """Load the weights of safetensors files into a model.

    The model may be wrapped or not. A model that is not wrapped yet may be on the meta device or
    built under `zero.Init`. Each rank then loads only its shards, and `initialize` uses them. In a
    wrapped model, accumulated gradients and deferred updates are discarded.

    Args:
        model: Model whose parameters and persistent buffers are replaced.
        path: A safetensors file, or a folder in the layout of Hugging Face.
        strict: Whether to require the same names in the model and the files. If False, tensors that
            the files do not contain keep their values. Shapes must match in any case.

    Raises:
        CheckpointError: The files do not exist, do not fit the model or are damaged.

    Note:
        Collective if the model is wrapped, on the meta device or built under `zero.Init`: every
        rank must call it.
    """
    runtime = next(
        (each for each in map(_runtime_of, model.parameters()) if each is not None), None
    )
    if runtime is not None:
        load_weights_into(runtime, Path(path), strict=strict)
        return
    session = Init()
    with ExitStack() as stack, torch.no_grad():
        _verify_own_files(Path(path))
        files = SafetensorsFolder(Path(path), stack)
        shapes = {name: tuple(param.shape) for name, param in model.named_parameters()}
        found = match_names(files, model, shapes, Path(path), strict=strict)
        for name, param in model.named_parameters():
            if name not in found:
                continue
            if param.is_meta or owner_of(param) is not None:
                take_slice(param, session, partial(_read_range, files, found[name]))
            else:
                param.copy_(files.tensor(found[name]))
        for name, buffer in persistent_buffers(model).items():
            if name in found:
                prefix, _, leaf = name.rpartition(".")
                value = files.tensor(found[name]).to(buffer.dtype)
                device = default_device() if buffer.is_meta else buffer.device
                setattr(
                    model.get_submodule(prefix),
                    leaf,
                    value.to(device),
                )


def _read_range(files: SafetensorsFolder, name: str, start: int, stop: int) -> PlacedValues:
    return files.read(StateRange(WEIGHT, name, "", start, stop))


def _runtime_of(param: nn.Parameter) -> Runtime | None:
    owner = owner_of(param)
    return owner.runtime() if isinstance(owner, ParamGroup) else None


def match_names(
    files: SafetensorsFolder,
    model: nn.Module,
    parameters: Mapping[str, tuple[int, ...]],
    path: Path,
    *,
    strict: bool,
) -> dict[str, str]:
    """Return, for each parameter and buffer of this rank, its name in the files.

    Args:
        files: Open files whose names are searched.
        model: Model of this rank.
        parameters: Whole shapes of its parameters, by first name.
        path: The path in error messages.
        strict: Whether to require the same names in the model and the files.

    Returns:
        The name in the files by the name in the model. Tensors that the files do not contain are
        missing.

    Raises:
        CheckpointError: Names (if `strict`) or shapes differ.
    """
    shapes = dict(parameters)
    for name, buffer in persistent_buffers(model).items():
        shapes[name] = tuple(buffer.shape)
    names = whole_names(model)
    tied: dict[str, list[str]] = {}  # all names of each tensor, by first name
    for name, first in names.items():
        tied.setdefault(first, []).append(name)
    there = {
        name: next((each for each in tied.get(name, [name]) if each in files.locations), "")
        for name in shapes
    }
    found = {name: other for name, other in there.items() if other}
    missing = [name for name in shapes if name not in found]
    unexpected = [name for name in files.locations if name not in names]
    if strict and (missing or unexpected):
        raise CheckpointError(
            f"{path} lacks {first_few(missing) or 'nothing'} and has "
            f"{first_few(unexpected) or 'nothing'} too many.",
            "strict=True wants the same names on both sides.",
            "build the model these weights belong to, or pass strict=False.",
        )
    different = []
    for name, other in found.items():
        saved = files.locations[other].shape
        if saved != shapes[name]:
            different.append(
                f"'{other}' is {list(saved)} in the file and {list(shapes[name])} in the model"
            )
    if different:
        raise CheckpointError(
            f"{len(different)} shape(s) differ: {first_few(different)}.",
            fix="build the model with the sizes these weights were saved with.",
        )
    return found


def _restore(runtime: Runtime, files: SafetensorsFolder, found: Mapping[str, str]) -> None:
    """Write this rank's weights and all buffers."""
    piece = ModelPiece.of(runtime)
    with LongWork(
        "reading weights", sum(group.layout.numel for group in runtime.groups), "parameters"
    ) as work:
        for group in runtime.groups:
            for member in group.members:
                if (name := piece.name(member)) in found:
                    write_weight(
                        group,
                        member,
                        partial(_read_exact, files, found[name], group, member, piece),
                    )
            store_weights(group)
            work.advance(group.layout.numel)
    for name, buffer in persistent_buffers(runtime.model).items():
        if name in found:
            copy_into(buffer.data, files.tensor(found[name]))


def _read_exact(
    files: SafetensorsFolder,
    name: str,
    group: ParamGroup,
    member: ParamInfo,
    piece: ModelPiece,
    start: int,
    stop: int,
) -> Iterator[tuple[int, Tensor]]:
    """Yield a parameter's elements in the main weight's dtype, or in fp32 without one.

    `name` is the parameter's name in the files.
    """
    at = piece.start(member)
    wanted = StateRange(WEIGHT, name, "", at + start, at + stop, part=piece.part(member))
    for low, values in files.read(wanted):
        exact = group.master.dtype if group.master is not None else torch.float32
        yield (
            low - at,
            values.to(exact) if group.master is not None or values.is_floating_point() else values,
        )
