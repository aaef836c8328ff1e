"""Load a checkpoint into an engine of any mesh and stage, by parameter name.

Each rank reads only the elements that it holds. Every rank completes its checks before any rank
changes anything. After that, the `restore_*` functions write weights, main weights, moments and
buffers, group by group.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .. import extensions
from ..base.errors import CheckpointError
from ..base.expanded import copy_into
from ..base.log import log_first
from ..base.memory import trim_heap
from ..base.mesh import AXES
from ..base.nested import inner_tensors, is_subclass
from ..comm.agreement import gather_outcomes
from ..extensions.model_changes import follow_requires_grad
from ..optim.inner_states import discard_updates, load_inner, reset_states
from ..optim.master_shard import MasterShard
from ..optim.param_overlap import ParamOverlap, overlaps_of
from ..optim.sharded import ShardedOptimizer
from ..precision.codecs import Blocks
from ..precision.policy import cast_master
from ..sharding.param_group import ParamGroup
from ..sharding.param_info import ParamInfo
from ..sharding.param_ranges import local_range, owned_view, write_main
from ..sharding.regroup import send_as
from ..sharding.runtime import Runtime
from .catalogue import existing_folder
from .contents import IMPLEMENTATION_OPTIONS, Contents, Loaded, LoadSettings
from .format import (
    BUFFER,
    INNER,
    MANIFEST,
    MOMENT,
    OWN,
    REPLICA,
    RNG,
    WEIGHT,
    WHOLE,
    Manifest,
    StateRange,
    StateReader,
)
from .lockstep import run_on_all
from .numpy_values import Plain
from .piece import ModelPiece, names_of_all, persistent_buffers, predecessor
from .read import CheckpointReader, client_of_rank, plain_values, tensors_of_rank
from .rng import restore_rng
from .safetensors_file import dtype_name
from .state import exact_storages, package_of, place_of, scalar_value
from .verify import FileSubset, first_few, raise_faults, verify


def load_slices(directory: Path, tag: str, contents: Contents, settings: LoadSettings) -> Loaded:
    """Load a checkpoint in this library's layout into an engine.

    Weights, main weights and buffers are restored. `settings` select whether moments and random
    generators are restored, too. A rank keeps its random generators if no saved rank corresponds to
    it. Accumulated gradients and deferred updates are discarded. Any number of ranks on any mesh
    may have saved the checkpoint. All ranks check shapes, names and the optimizer before any rank
    changes its states. If `settings.verify` is true, the ranks also verify the checksums of the
    files.

    Args:
        directory: Directory of checkpoints.
        tag: Name of the checkpoint.
        contents: States of the engine, which are overwritten.
        settings: What to load and verify.

    Returns:
        A `Loaded` with the path of the checkpoint, the counters and schedules of the run, and the
        `client_state`.

    Raises:
        CheckpointError: The checkpoint does not fit the engine or is damaged. It is raised on every
            rank. The engine is unchanged if a check before the load fails. If reading the slices
            fails, the values of the engine are undefined.

    Note:
        Collective: every rank must call it.
    """
    runtime = contents.runtime
    comm = runtime.comm.whole
    follow_requires_grad(runtime)
    names = names_of_all(runtime)
    optimizer = contents.optimizer if settings.moments else None

    def read_manifest() -> tuple[Path, Manifest, bool]:
        folder = existing_folder(directory, tag)
        manifest = Manifest.read(folder / MANIFEST)
        check(manifest, contents, settings, names)
        check_buffers(manifest, contents, settings)
        if optimizer is None:
            return folder, manifest, False
        with ExitStack() as stack:
            reader = CheckpointReader(folder, manifest.chunks, stack)
            split_as_saved(manifest, reader, optimizer)
            return folder, manifest, _takes_new_moments(reader, optimizer)

    (folder, manifest, _), answers = gather_outcomes(
        comm,
        f"loading {tag}: the manifest",
        read_manifest,
        lambda found: found[2],
        CheckpointError,
    )
    checks_moments = settings.verify and all(answers)

    def check_files() -> None:
        subset = FileSubset(comm.rank, comm.size)
        except_kind = MOMENT if checks_moments else ""
        raise_faults(folder, verify(folder, subset, read_again=True, except_kind=except_kind))

    if settings.verify:
        run_on_all(comm, f"loading {tag}: checksums", check_files)

    def read_values() -> tuple[Plain, list[GroupStates] | None]:
        plain = plain_values(folder, manifest)
        if contents.check_trainer is not None:
            contents.check_trainer(plain["trainer"])
        rank = predecessor(manifest, runtime.plan.mesh)
        plain["client"] = client_of_rank(folder, manifest, rank or 0, plain["client"])
        if not checks_moments or optimizer is None:
            return plain, None
        with ExitStack() as stack:
            reader = CheckpointReader(folder, manifest.chunks, stack, verifies=True)
            reader.prefetch(moment_ranges(reader, optimizer))
            return plain, list(read_states(reader, manifest, optimizer, {}))

    plain, states = run_on_all(comm, f"loading {tag}: values", read_values)

    def fill() -> None:
        with ExitStack() as stack:
            reader = CheckpointReader(folder, manifest.chunks, stack)
            wanted = list(weight_ranges(reader, contents))
            if optimizer is not None and states is None:
                wanted += moment_ranges(reader, optimizer)
            reader.prefetch(wanted)
            restore_weights(reader, contents)
            restore_buffers(reader, manifest, contents)
            if optimizer is not None:
                restore_optimizer(reader, manifest, plain["groups"], optimizer, states)
                restore_kept_gradients(reader, optimizer)
                _restore_own_states(reader, manifest, optimizer)
            rank = predecessor(manifest, runtime.plan.mesh)
            # Without a predecessor, no saved random sequence continues on this rank
            if settings.rng and rank is not None:
                states_of_rank = tensors_of_rank(folder, manifest, RNG, rank)
                restore_rng(states_of_rank, runtime.comm_ctx.pool.device)

    replace_states(contents, tag, fill, manifest.lifted)
    here = runtime.settings.ranks_per_host or 1
    if manifest.world_size == comm.size and manifest.ranks_per_host != here:
        log_first(
            f"{tag} was trained with sums over {manifest.ranks_per_host} neighbours first, and "
            f"this run with {here}: results differ in their last bits; ranks_per_host = "
            f"{manifest.ranks_per_host} continues with the same bits"
        )
    if manifest.world_size == comm.size:
        repeat_codes(manifest, runtime)
    return Loaded(folder, plain["trainer"], plain["client"])


def repeat_codes(manifest: Manifest, runtime: Runtime) -> None:
    """Use the codecs of the saved run instead of those that this run measured.

    Only states whose codec this run chose by measurement are affected. Every rank must call this,
    and makes the same change.

    Args:
        manifest: Manifest of the checkpoint.
        runtime: The runtime to change.
    """
    here = runtime.settings.compression
    chosen: Plain = {
        state: Blocks(*codec) if codec is not None else None
        for state, codec in manifest.extra.get("codes", {}).items()
        if state in here.left_open
    }
    found = replace(here, **chosen)
    if found != here:
        said = ", ".join(f"{state} {codec or 'as they are'}" for state, codec in chosen.items())
        log_first(
            f"the run that is gone on with had chosen {said}: so does this one, whatever it "
            "measured"
        )
        send_as(runtime, replace(found, why=f"{said}, as the run that was gone on with had chosen"))


def replace_states(
    contents: Contents, tag: str, fill: Callable[[], None], lifted: Sequence[str] | None = None
) -> None:
    """Replace the engine's weights, main weights and moments by calling `fill`.

    Gathered weights, gradients and deferred updates belong to the old values and are dropped.
    Weights are updated from their main weights afterwards. The engine is then in the state between
    two steps.

    Args:
        contents: The states to overwrite.
        tag: Name of the checkpoint in error messages.
        fill: Writes the new values of this rank.
        lifted: Units that compute in fp32 from now on; None keeps the current ones.

    Raises:
        CheckpointError: `fill` failed on a rank. It is raised on every rank, and the engine's
            values are undefined.

    Note:
        Collective: every rank must call it.
    """
    runtime = contents.runtime
    optimizer = contents.optimizer
    with torch.no_grad():
        runtime.gathers.reshard_all()
        runtime.backward.discard_step()
        if optimizer is not None:
            discard_updates(optimizer.shard_set)
            adaptive = optimizer.policy(extensions.AdaptivePrecision)
            if adaptive is not None and lifted is not None:
                adaptive.restore(lifted)
        for group in runtime.trained_groups:
            group.gradient.reduction.forget()
        run_on_all(runtime.comm.whole, f"loading {tag}: slices", fill)
        for group in runtime.groups:
            group.weight_gather.changed()
        for unit in runtime.units:
            for group in unit.trained:
                group.refresh(unit.name).wait()


def _restore_own_states(
    reader: CheckpointReader, manifest: Manifest, optimizer: ShardedOptimizer
) -> None:
    """Restore this rank's error feedback if the same rank of the same mesh saved it.

    Otherwise it is dropped and a message is logged.
    """
    runtime = optimizer.runtime
    saved = [chunk for chunk in manifest.chunks if chunk.kind == OWN]
    policies = [policy for policy in optimizer.policies if policy.keeps_own_states]
    if not saved or not policies:
        return
    is_same = manifest.mesh == dict(zip(AXES, runtime.plan.mesh.sizes, strict=True))
    own = [chunk for chunk in saved if is_same and chunk.rank == runtime.comm.whole.rank]
    piece = ModelPiece.of(runtime)
    known = 0
    for group in runtime.trained_groups:
        name, lies = place_of(group, piece)
        values = {}
        for chunk in own:
            state, _, layout = chunk.key.partition(" ")
            if (chunk.name, layout) == (name, lies):
                values[state] = reader.tensor(chunk)
        for policy in policies:
            policy.restore_own_states(group, values)
        known += len(values)
    if not known or known < len(own):
        log_first(
            f"{reader.folder.name} was saved on another mesh or with another quantization: the "
            "error feedback of its gradients is dropped"
        )


# -- checks


def check(
    manifest: Manifest, contents: Contents, settings: LoadSettings, names: Collection[str]
) -> None:
    """Raise an error if the checkpoint does not fit the engine.

    The result is the same on every rank of a stage.

    Args:
        manifest: Manifest of the checkpoint.
        contents: The states to overwrite.
        settings: What to load.
        names: Names of the whole model's parameters (`names_of_all`).

    Raises:
        CheckpointError: Names, shapes or the optimizer do not match.
    """
    piece = ModelPiece.of(contents.runtime)
    shapes: dict[str, str] = {}
    missing: dict[str, None] = {}
    for group in contents.runtime.groups:
        for member in group.members:
            name = piece.name(member)
            shape = list(piece.shape(member))
            saved = manifest.parameters.get(name)
            if saved is not None and saved["shape"] != shape:
                shapes[name] = (
                    f"'{name}' is {saved['shape']} in the checkpoint and {shape} in the model"
                )
            if saved is None or (group.trainable and name in manifest.excluded):
                missing[name] = None
    if shapes:
        raise CheckpointError(
            f"{len(shapes)} shape(s) differ: {first_few([*shapes.values()])}.",
            fix="build the model with the sizes it was saved with.",
        )
    unexpected = [name for name in manifest.parameters if name not in names]
    if settings.strict and (missing or unexpected):
        raise CheckpointError(
            f"the checkpoint lacks {first_few([*missing]) or 'nothing'} and has "
            f"{first_few(unexpected) or 'nothing'} too many.",
            "load_module_strict wants the same names on both sides.",
            "load into the model that was saved, or pass load_module_strict=False.",
        )
    if settings.moments and contents.optimizer is not None:
        _check_optimizer(manifest, contents.optimizer)


def check_buffers(manifest: Manifest, contents: Contents, settings: LoadSettings) -> None:
    """Raise an error if buffers of the model are missing or have other shapes.

    Tensor parallelism splits some buffers, so shapes are compared only without it.

    Args:
        manifest: Manifest of the checkpoint.
        contents: The states to overwrite.
        settings: What to load.

    Raises:
        CheckpointError: Buffers do not match.
    """
    buffers = persistent_buffers(contents.runtime.model)
    missing = [name for name in buffers if name not in manifest.buffers]
    if missing and settings.strict:
        raise CheckpointError(
            f"the checkpoint lacks the buffers {first_few(missing)}.",
            "load_module_strict wants the same names on both sides.",
            "load into the model that was saved, or pass load_module_strict=False.",
        )
    if contents.runtime.plan.mesh.tp > 1 or (manifest.mesh or {}).get("tp", 1) > 1:
        return
    for name, buffer in buffers.items():
        saved = manifest.buffers.get(name)
        if saved is not None and saved["shape"] != list(buffer.shape):
            raise CheckpointError(
                f"the buffer '{name}' is {saved['shape']} in the checkpoint and "
                f"{list(buffer.shape)} in the model.",
                "A buffer is restored in place.",
                "give the buffer its saved shape before load_checkpoint, or register it with "
                "persistent=False.",
            )


def _check_optimizer(manifest: Manifest, optimizer: ShardedOptimizer) -> None:
    """Raise CheckpointError if the saved optimizer states belong to another optimizer."""
    mine = type(optimizer.inner).__name__
    groups = len(manifest.plain["groups"])
    package = manifest.extra.get("optimizer_package")
    own_package = package_of(optimizer.inner)
    known = ("torch", "deepseek_zero")
    problem = ""
    if manifest.optimizer != mine:
        problem = f"the state of {manifest.optimizer}, the engine runs {mine}"
    elif package is not None and (package in known) != (own_package in known):
        problem = f"the state of {package}'s {mine}, the engine runs {own_package}'s"
    elif groups != len(optimizer.param_groups):
        problem = f"{groups} parameter groups, the optimizer has {len(optimizer.param_groups)}"
    if problem:
        raise CheckpointError(
            f"the checkpoint has {problem}.",
            fix="load with load_optimizer_states=False, or use the optimizer that was saved.",
        )
    is_owed = manifest.plain["trainer"].get("owed") is not None
    if is_owed and optimizer.policy(extensions.DelayedUpdate) is None:
        raise CheckpointError(
            "the checkpoint owes an update that was delayed.",
            "It was saved with delayed_update_after, which this run does not have.",
            "set delayed_update_after, save after engine.optimizer.flush(), or load with "
            "load_optimizer_states=False.",
        )


# -- reading into the engine


def _takes_new_moments(reader: CheckpointReader, optimizer: ShardedOptimizer) -> bool:
    """Return whether this rank's moments can be read as whole chunks into new memory.

    In that case they are verified while they are read, because nothing changes until all ranks have
    read theirs.
    """
    runtime = optimizer.runtime
    if optimizer.inner.state or runtime.comm_ctx.pool.device.type != "cpu":
        return False
    if any(group.plan.moments_external for group in runtime.trained_groups):
        return False
    return reader.reads_whole(moment_ranges(reader, optimizer))


GroupStates = tuple[ParamGroup, dict[int, Plain]]  # states by shard number


def weight_ranges(reader: StateReader, contents: Contents) -> Iterator[StateRange]:
    """Yield the ranges of weights that this rank needs, in the order of `restore_weights`.

    Args:
        reader: Open checkpoint to read from.
        contents: The states to overwrite.

    Returns:
        An iterator over the ranges, from which a reader can prefetch.
    """
    piece = ModelPiece.of(contents.runtime)
    for group in contents.runtime.groups:
        for member in group.members:
            if reader.has(WEIGHT, piece.name(member)):
                buffer = group.weight if group.master is None else group.master.buffer
                start, stop, _ = local_range(buffer, member.slot, group.comm_ctx.comm.rank)
                yield piece.range_of(WEIGHT, member, "", start, stop)


def moment_ranges(reader: StateReader, optimizer: ShardedOptimizer) -> Iterator[StateRange]:
    """Yield the ranges of moments that this rank needs, in the order of `read_states`.

    Args:
        reader: Open checkpoint to read from.
        optimizer: Sharded optimizer whose states are restored.

    Returns:
        An iterator over the ranges, from which a reader can prefetch.
    """
    piece = ModelPiece.of(optimizer.runtime)
    for _, shard in _shards_by_group(optimizer):
        overlaps = list(overlaps_of(shard))
        for key in _moment_keys(reader, overlaps, piece):
            for overlap in overlaps:
                yield piece.range_of(MOMENT, member_of(overlap), key, overlap.start, overlap.stop)


def member_of(overlap: ParamOverlap) -> ParamInfo:
    """Return the parameter to which the elements of a shard's overlap belong."""
    return overlap.shard.group.members[overlap.number]


def _shards_by_group(optimizer: ShardedOptimizer) -> list[tuple[int, MasterShard]]:
    """Return the numbered shards ordered by group, which is the order of the files."""
    order = {id(group): number for number, group in enumerate(optimizer.runtime.groups)}
    return sorted(enumerate(optimizer.shards()), key=lambda item: order[id(item[1].group)])


def _moment_keys(reader: StateReader, overlaps: list[ParamOverlap], piece: ModelPiece) -> list[str]:
    names = [piece.name(member_of(overlap)) for overlap in overlaps]
    return list(dict.fromkeys(key for name in names for key in reader.keys(MOMENT, name)))


def restore_weights(reader: StateReader, contents: Contents) -> None:
    """Write this rank's ranges of main weights, or of weights without a main weight.

    Weights with a main weight are updated later by `ParamGroup.refresh`. The function does
    not communicate.

    Args:
        reader: Open checkpoint to read from.
        contents: The states to overwrite.
    """
    piece = ModelPiece.of(contents.runtime)
    for group in contents.runtime.groups:
        for member in group.members:
            if reader.has(WEIGHT, piece.name(member)):
                write_weight(group, member, partial(piece.read, reader, WEIGHT, member, ""))
                if isinstance(group.weight_gather, extensions.WeightDifferences):
                    _write_replica(reader, group.weight_gather, member, piece)
        store_weights(group)


def _write_replica(
    reader: StateReader,
    weight: extensions.WeightDifferences,
    member: ParamInfo,
    piece: ModelPiece,
) -> None:
    """Write this rank's slice of a weight that is updated by differences.

    If none was saved, the weight becomes the cast of its main weight.
    """
    slot = member.slot
    group = weight.group
    start, stop = group.layout.owned(slot, group.comm_ctx.comm.rank)
    if start >= stop:
        return
    if not reader.has(REPLICA, piece.name(member)):
        weight.write(slot, None)
        return
    low = start - slot.start
    for at, values in piece.read(reader, REPLICA, member, "", low, stop - slot.start):
        weight.write(slot, values, at - low)


def write_weight(
    group: ParamGroup, member: ParamInfo, read: Callable[[int, int], Iterator[tuple[int, Tensor]]]
) -> None:
    """Write this rank's elements of a parameter into its main weight or weight.

    Args:
        group: Parameter group that contains the parameter.
        member: Parameter to write.
        read: A function that yields (position, flat values) for elements [start, stop) of the
            parameter, on any device. They are cast with the rounding of an update.
    """
    device = group.comm_ctx.pool.device
    master = group.master
    buffer = group.weight if master is None else master.buffer
    start, stop, place = local_range(buffer, member.slot, group.comm_ctx.comm.rank)
    if master is not None:
        for low, part in read(start, stop):
            write_main(master, place + low - start, part.to(device))
        return
    with buffer.writing(place, place + stop - start) as view:
        for low, part in read(start, stop):
            cast_master(part.to(device), view[low - start : low - start + part.numel()])


def store_weights(group: ParamGroup) -> None:
    """Store a group's new weights in their offload memory, and wait.

    Waiting keeps only one group on the device at a time.
    """
    for pending in [storage.store(0, storage.memory.numel()) for storage in exact_storages(group)]:
        pending.wait()


def restore_buffers(reader: StateReader, manifest: Manifest, contents: Contents) -> None:
    """Write the buffers of the saved rank that processed the same data.

    If there is no such rank, rank 0's buffers are used. The function does not
    communicate.

    Args:
        reader: Open checkpoint to read from.
        manifest: Names, shapes and counters of the checkpoint.
        contents: The states to overwrite.
    """
    rank = predecessor(manifest, contents.runtime.plan.mesh) or 0
    for name, buffer in persistent_buffers(contents.runtime.model).items():
        if reader.has(BUFFER, name) and manifest.buffers[name]["shape"] == list(buffer.shape):
            copy_into(buffer.data, reader.of_rank(name, rank).view(buffer.shape))


def read_states(
    reader: StateReader,
    manifest: Manifest,
    optimizer: ShardedOptimizer,
    before: dict[Tensor, Plain],
) -> Iterator[GroupStates]:
    """Yield the new optimizer states, group by group.

    Args:
        reader: Open checkpoint to read from.
        manifest: Names, shapes and counters of the checkpoint.
        optimizer: Sharded optimizer whose states are restored.
        before: The old states by parameter; their memory is reused, and used ones are removed.

    Returns:
        An iterator over pairs of a parameter group and its new states by shard number.
    """
    for group, shards in groupby(_shards_by_group(optimizer), key=lambda item: item[1].group):
        found = {}
        for number, shard in shards:
            old = before.pop(shard.param, {})
            state = _shard_state(reader, manifest, shard, old)
            found[number] = _with_subclasses(state, optimizer, shard, old)
        yield group, found


def _with_subclasses(
    state: Plain, optimizer: ShardedOptimizer, shard: MasterShard, before: Plain
) -> Plain:
    """Return a state in which saved inner tensors are put back into tensor subclasses.

    Files contain no classes, so the optimizer creates the objects. Raises CheckpointError if their
    inner tensors have other names, dtypes or shapes than the saved ones.
    """
    found = {key: value for key, value in state.items() if INNER not in key}
    subclasses: dict[str, dict[str, Tensor]] = {}  # inner tensors by key and name
    for path, value in state.items():
        if INNER in path:
            key, _, name = path.partition(INNER)
            subclasses.setdefault(key, {})[name] = value
    if not subclasses:
        return found
    made = before
    if not subclasses.keys() <= before.keys():
        made = optimizer.shard_set.state_of_first_step(shard)
    for key, saved in subclasses.items():
        here = inner_tensors(made[key]) if is_subclass(made.get(key)) else {}
        if _kinds_of(here) != _kinds_of(saved):
            raise CheckpointError(
                f"optimizer state '{key}' of '{shard.names[0]}' was saved as {_kinds_of(saved)}, "
                f"and {type(optimizer.inner).__name__} has {_kinds_of(here) or 'a plain tensor'} "
                "here.",
                "It is stored in other blocks or bits.",
                "use the optimizer as it was when it saved, or load with "
                "load_optimizer_states=False.",
            )
        with torch.no_grad():
            for name, tensor in here.items():
                tensor.copy_(saved[name])
        found[key] = made[key]
    return found


def _kinds_of(tensors: dict[str, Tensor]) -> dict[str, str]:
    """Return the dtype and shape of each tensor as text."""
    return {
        name: f"{dtype_name(each.dtype)} {list(each.shape)}"
        for name, each in sorted(tensors.items())
    }


def restore_optimizer(
    reader: StateReader,
    manifest: Manifest,
    groups: list[Plain],
    optimizer: ShardedOptimizer,
    states: Iterable[GroupStates] | None = None,
) -> None:
    """Load states and hyperparameters through the inner optimizer's load_state_dict.

    It proceeds group by group, so at most one group's states exist twice. The function
    does not communicate.

    Args:
        reader: Open checkpoint to read from.
        manifest: Names, shapes and counters of the checkpoint.
        groups: The saved parameter groups of the optimizer.
        optimizer: Sharded optimizer whose states are restored.
        states: The states, if they have been read already.
    """
    count = 0
    restored = []
    for mine, saved in zip(optimizer.param_groups, groups, strict=True):
        numbers = list(range(count, count + len(mine["params"])))
        count += len(numbers)
        kept = {key: value for key, value in mine.items() if key in IMPLEMENTATION_OPTIONS}
        restored.append({**mine, **saved, **kept, "params": numbers})
    before = reset_states(optimizer.shard_set)
    load_inner(
        optimizer.shard_set, {"state": {}, "param_groups": restored}
    )  # a rank may have no state
    for group, found in (
        states if states is not None else read_states(reader, manifest, optimizer, before)
    ):
        state = {number: values for number, values in found.items() if values}
        load_inner(optimizer.shard_set, {"state": state, "param_groups": restored})
        if group.plan.moments_external:
            found = state = {}
            trim_heap()
    optimizer.shard_set.add_missing_states()


def split_as_saved(manifest: Manifest, reader: StateReader, optimizer: ShardedOptimizer) -> None:
    """Split shards whose parameters were saved with different counters or moments.

    This happens if some parameters were frozen for a time or their gradients were dropped. The
    function does not communicate.

    Args:
        manifest: Manifest of the checkpoint.
        reader: Reader of the checkpoint's states.
        optimizer: Sharded optimizer whose states are restored.
    """
    piece = ModelPiece.of(optimizer.runtime)

    def saved(overlap: ParamOverlap) -> tuple[Plain, frozenset[str]]:
        name = piece.name(member_of(overlap))
        return manifest.scalars.get(name, {}), frozenset(reader.keys(MOMENT, name))

    optimizer.shard_set.cut_apart(saved)


def restore_kept_gradients(reader: StateReader, optimizer: ShardedOptimizer) -> None:
    """Restore the gradients that a later update needs.

    The trainer's saved values record whether such an update is pending.

    Args:
        reader: Open checkpoint to read from.
        optimizer: Sharded optimizer whose states are restored.
    """
    piece = ModelPiece.of(optimizer.runtime)
    for group in optimizer.runtime.trained_groups:
        rank = group.comm_ctx.comm.rank
        for kept in group.gradient.kept.values():
            absent = set()
            for number, member in enumerate(group.members):
                if not reader.has(kept.saved_as, piece.name(member)):
                    absent.add(number)
                    continue
                start, stop = group.layout.owned(member.slot, rank)
                low = start - member.slot.start
                high = max(low, stop - member.slot.start)
                group.guard.before_write()
                view = owned_view(kept.ensure(), member.slot, rank)
                for at, values in piece.read(reader, kept.saved_as, member, "", low, high):
                    view[at - low : at - low + values.numel()].copy_(values)
            kept.absent = absent if len(absent) < len(group.members) else None


def _shard_state(
    reader: StateReader, manifest: Manifest, shard: MasterShard, before: Plain
) -> Plain:
    """Read the state of one shard: moments, states of other shapes, and counters."""
    overlaps = list(overlaps_of(shard))
    piece = ModelPiece.of(shard.group.runtime())
    state: Plain = {}
    for key in _moment_keys(reader, overlaps, piece):
        state[key] = _moment(reader, shard, overlaps, piece, key, before.get(key))
    members = [member_of(overlap) for overlap in overlaps]
    for member in members:
        name = piece.name(member)
        part = piece.part(member)
        state |= {key: reader.whole(name, key, part) for key in reader.keys(WHOLE, name)}
    return state | _numbers(manifest, [piece.name(member) for member in members])


def _moment(
    reader: StateReader,
    shard: MasterShard,
    overlaps: list[ParamOverlap],
    piece: ModelPiece,
    key: str,
    before: Any,
) -> Tensor:
    """Read one moment of a shard; gaps between its parameters are zero."""
    value: Tensor | None = None
    for overlap in overlaps:
        member = member_of(overlap)
        for low, values in piece.read(reader, MOMENT, member, key, overlap.start, overlap.stop):
            if value is None:
                value = _moment_memory(shard, values.dtype, before)
                if (
                    piece.part(member) is not None
                    or sum(each.stop - each.start for each in overlaps) < shard.numel
                ):
                    value.zero_()  # also clears the padding of a part
            at = overlap.offset + low - overlap.start
            value[at : at + values.numel()].copy_(values)
    assert value is not None
    return value.view(shard.param.shape)


def _moment_memory(shard: MasterShard, dtype: torch.dtype, before: Any) -> Tensor:
    """Return memory for a moment, reusing the old moment if it is suitable.

    Allocating new pages takes as long as the copy.
    """
    if (
        isinstance(before, Tensor)
        and (before.device.type, before.dtype, before.numel()) == ("cpu", dtype, shard.numel)
        and before.is_contiguous()
        and not shard.group.plan.moments_external
    ):
        return before.view(-1)
    return torch.empty(shard.numel, dtype=dtype, device="cpu")


def _numbers(manifest: Manifest, names: list[str]) -> Plain:
    """Return the counters that a shard's parameters share after `split_as_saved`.

    Raises CheckpointError if they differ.
    """
    saved = [manifest.scalars.get(name, {}) for name in names]
    different = next((k for k, each in enumerate(saved) if each != saved[0]), None)
    if different is not None:
        raise CheckpointError(
            f"'{names[0]}' and '{names[different]}' were saved with different optimizer counters "
            f"({saved[0]} and {saved[different]}) and share one stretch of optimizer state here.",
            "They were not always trained together.",
            "give them separate parameter groups, or load with load_optimizer_states=False.",
        )
    return {key: scalar_value(number) for key, number in saved[0].items()} if saved else {}
