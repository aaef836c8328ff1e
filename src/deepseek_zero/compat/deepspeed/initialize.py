"""DeepSpeed's `initialize`: reads a configuration and makes a DeepSpeedEngine.

The engine's class stands in engine.py, because `from deepspeed import DeepSpeedEngine` is asked
often (accelerate's `unwrap_model`) and pays for no pydantic there.

Behind the name `deepspeed` (dropin.py) stand programs that were written for DeepSpeed, and
`initialize` does more for
them: it takes unknown keys with a warning, joins a group where a process is alone, ends the engine
that a model was in (the Trainer evaluates before it trains, Lightning tests after it has fitted,
and neither destroys its first engine), refuses a world that accelerate counted wrongly, and takes
DeepSpeed's defaults where they are others (`defaults_of`).
"""

from __future__ import annotations

import argparse
import sys
import weakref
from collections.abc import Callable, Mapping
from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Adagrad, Adam, AdamW, Optimizer

from ...base.errors import BatchMismatchError, NotBuiltError, UsageError
from ...base.given import refuse, whole_number
from ...config import choose_source
from ...config.load import load
from ...config.raw_config import RawConfig, lookup
from ...engine.engine import Engine
from ...engine.start import Request, parameters_of, prepare_process, start
from ...optimizers.lion import Lion
from ...planner.auto_wrap_policy import full_precision_names
from ...sharding.init import InitShard
from ...sharding.param_group import ParamGroup
from ...sharding.sharded_parameter import owner_of
from . import cpu_adam, groups
from .accelerate_ranks import CPU_RANKS
from .autotp import set_autotp_mode
from .before_initialize import (
    DTYPES,
    leaf_module_names,
    low_precision,
    mark_configured,
    tensor_parallel_statement,
)
from .comm import init_distributed, join
from .dropin import is_dropin_imported
from .engine import DeepSpeedEngine
from .mpu import accelerate_statements, mesh_param_statement, mpu_statement
from .muon import mark_parameters
from .optimizer import class_of, scale_at_stage_0, show_flat_states
from .parameters import ParameterOffload, show_ds_names
from .runtime_utils import ZeRORuntimeException
from .torch_autocast import init_autocast_params
from .zero import GatheredParameters

if TYPE_CHECKING:
    from .configuration import Configuration

__all__ = ["initialize"]

_SUMS = "grad_accum_dtype"
DEFAULT_CLIPPING = 1.0  # of DeepSpeed since 2026; this library's own is not to clip


def initialize(
    args: argparse.Namespace | None = None,
    model: nn.Module | None = None,
    optimizer: Any = None,
    model_parameters: Any = None,
    training_data: Any = None,
    lr_scheduler: Any = None,
    distributed_port: int = 29500,
    mpu: Any = None,
    dist_init_required: bool | None = None,
    collate_fn: Any = None,
    config: Configuration = None,
    mesh_param: Any = None,
    config_params: Configuration = None,
    mesh: Any = None,
) -> tuple[DeepSpeedEngine, Any, Any, Any]:
    """Wrap a model; returns (engine, optimizer, training_dataloader, lr_scheduler).  Collective.

    config: a dict, the path of a JSON file, or base64; also as `config_params` or
    `args.deepspeed_config`.
    optimizer: an optimizer, or a callable that makes one from parameters; else the configuration's.
    lr_scheduler: a schedule, or a callable that makes one from the optimizer; else the
    configuration's.  model_parameters: parameters
    or groups to train.  mesh: axes over the ranks ({"dp_replicate": 2, "dp_shard": 4}, a Mesh, or a
    DeviceMesh with names); also the configuration's.  mpu: an object that tells sizes and places of
    groups, which are compared with the mesh (mpu.py).  mesh_param: (data-parallel ranks,
    sequence-parallel ranks).
    """
    if model is None:
        raise UsageError("initialize requires a model.", "", "pass model=your_module.")
    if dist_init_required not in (None, True, False):
        raise refuse(
            "initialize",
            "dist_init_required",
            dist_init_required,
            "True, False or None",
            "leave it out.",
        )
    whole_number("initialize", "distributed_port", distributed_port, 0, 65_535)
    parameters = None
    if model_parameters is not None:
        parameters = parameters_of("initialize", "model_parameters", model_parameters)
    optimizer = _without_accelerates_wrapper(optimizer)
    source, origin = choose_source(config, config_params, args)
    # Behind DeepSpeed's name stand programs written for it: they put keys of their own into the
    # configuration, and ask torch.distributed for their rank even where they are alone.
    unchanged = is_dropin_imported()
    raw = load(source, origin=origin, unknown="warn" if unchanged else "error")
    prepare_process(raw)
    if unchanged:
        raw = raw.changed(defaults_of(raw))
        init_distributed(distributed_port=distributed_port, dist_init_required=dist_init_required)
    elif dist_init_required is not False:
        join(distributed_port=distributed_port)
    if unchanged:
        refuse_miscount()
        refuse_unmanaged(raw, model)
        refuse_other_sums(raw)
        refuse_odd_bucket(raw)
        refuse_slow_optimizer(raw, optimizer)
        refuse_untested_optimizer(raw, optimizer)
    statements = [*accelerate_statements()] if unchanged else []
    if (asked := tensor_parallel_statement(model, raw, mpu is not None)) is not None:
        statements.append(asked)
    if mpu is not None:
        statements.append(mpu_statement(mpu))
    listed: Any = model if hasattr(model, "mesh_statement") else None  # a PipelineModule
    if listed is not None:
        statements.append(listed.mesh_statement())
        listed.take_configured(raw.get("pipeline") or {})
    engine_class = DeepSpeedEngine if listed is None else listed.engine_class
    if mesh_param is not None:
        statements.append(mesh_param_statement(mesh_param))
    request = Request(
        model,
        optimizer,
        parameters,
        lr_scheduler,
        training_data,
        collate_fn,
        mesh=mesh,
        mesh_statements=tuple(statements),
        counts_model_ranks=_counted_by_accelerate() is not None,
        drops_idle_schedule=unchanged,
        sequence=getattr(mpu, "sequence_settings", None),
        shuffles=listed is None,  # a list of layers reads its samples in order, as in DeepSpeed
    )
    if unchanged:
        GatheredParameters.follow(raw.values)
        end_engine_of(model)
        if str(lookup(raw.values, "optimizer.type", "")).lower() == "muon":
            mark_parameters(model)
        round_values(model, raw)
    request.leaf_modules = leaf_module_names(model)
    leaves = raw.get("zero_optimization.leaf_module") or {}
    mark_configured(
        model, *(leaves.get(name, ()) for name in ("classes", "names", "name_suffixes"))
    )
    engine = start(raw, request, engine_class)
    assert isinstance(engine, DeepSpeedEngine)
    if listed is not None and engine.parts.pipeline is not None:
        engine.parts.pipeline.is_dynamic = listed.dynamic_shape
    if training_data is not None and engine.curriculum_learning_enabled():
        engine.training_dataloader = engine.deepspeed_io(training_data, collate_fn=collate_fn)
    if engine.optimizer is not None:
        engine.optimizer.__class__ = class_of(engine.optimizer)
        scaler = engine.optimizer.scaler
        if unchanged and scaler is not None and engine.runtime.settings.stage == 0:
            scale_at_stage_0(scaler)
        if unchanged and engine.runtime.settings.stage:
            show_flat_states(engine.optimizer)
        if isinstance(engine.optimizer.inner, Adam):
            vars(engine.optimizer.inner)["adam_w_mode"] = isinstance(engine.optimizer.inner, AdamW)
    if unchanged:
        # A pipeline scales its loss by itself
        engine.runtime.loss_factor.is_strict = engine.parts.pipeline is None
        engine.runtime.forward.structure.takes_strangers = True
    if engine.runtime.settings.stage == 3:
        if unchanged:
            engine.refuse_graphless_leaves()
        show_ds_names(engine.runtime)
        if engine.optimizer is not None:
            vars(engine.optimizer)["parameter_offload"] = ParameterOffload()
    if unchanged and (autocast := engine.runtime.settings.policy.autocast) is not None:
        init_autocast_params(
            engine, autocast, raw.not_built.get("torch_autocast.lower_precision_safe_modules")
        )
    _engines[engine.module] = weakref.ref(engine), engine.runtime.hooks
    engine.client_optimizer = optimizer
    engine.client_lr_scheduler = lr_scheduler
    engine.client_mpu = mpu
    groups.tell_of(engine)
    if unchanged:
        groups.make_groups(engine.mesh)
    if engine.mesh.tp > 1:
        set_autotp_mode(training=True)
        # A run without this axis imports none of its layers.
        import_module(".tensor_layers", __package__).show_names(engine)
        if unchanged:
            vars(engine)["forward"] = partial(_in_deepspeeds_words, engine.forward)
    return engine, engine.optimizer, engine.training_dataloader, engine.lr_scheduler


def defaults_of(raw: RawConfig) -> dict[str, Any]:
    """Return the values of DeepSpeed's where they are other than this library's, for keys that are
    not stated.

    Gradients are clipped at 1.0; those of several micro-batches are summed in the dtype of the
    weights, where a stage shards anything.
    """
    values = raw.values
    found = dict[str, Any]()
    # OneBitAdam's ranks have no sum of gradients whose norm could be clipped.
    exchanges = str(lookup(values, "optimizer.type", "")).lower() == "onebitadam"
    if "gradient_clipping" not in values and "gradient_clipping" not in raw.autos and not exchanges:
        found["gradient_clipping"] = DEFAULT_CLIPPING
    types = values.get("data_types") or {}
    if (
        (name := low_precision(raw.values))
        and lookup(values, "zero_optimization.stage")
        and not types.get(_SUMS)
    ):
        found["data_types"] = {**types, _SUMS: name}
    return found


def round_values(model: nn.Module, raw: RawConfig) -> None:
    """Round fp32 values to the 16 bits that are computed in, as DeepSpeed casts a model before it
    copies masters of it.

    Local.  Parameters that stay in fp32 are left alone, and those that have no values yet.
    """
    name = low_precision(raw.values)
    if name is None:
        return
    dtype = DTYPES[name]
    whole = full_precision_names(model)
    with torch.no_grad():
        for key, param in model.named_parameters():
            owner = owner_of(param)
            values = (
                owner.slice
                if isinstance(owner, InitShard)
                else param.data
                if owner is None
                else None
            )
            if (
                values is not None
                and values.dtype is torch.float32
                and not values.is_meta
                and key not in whole
            ):
                values.copy_(values.to(dtype))


def _in_deepspeeds_words(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Run an engine's forward; where ranks were given different batches, programs compare the text
    of the error.
    """
    try:
        return forward(*args, **kwargs)
    except BatchMismatchError as error:
        raise BatchMismatchError(f"{error.what.partition(': ')[0]}.") from error


# Model -> its engine, both weakly, and the engine's hooks, which stay on the model when it is gone.
_engines: weakref.WeakKeyDictionary[nn.Module, tuple[weakref.ref[Engine], list[Any]]] = (
    weakref.WeakKeyDictionary()
)


def end_engine_of(model: nn.Module) -> None:
    """Destroy the engine that the model is in, if there is one, after its last update has been
    made.
    """
    reference, hooks = _engines.pop(model, (None, []))
    engine = reference() if reference is not None else None
    owners = {owner_of(param) for param in model.parameters()}
    for group in [owner for owner in owners if isinstance(owner, ParamGroup)]:
        optimizer = group.optimizer()
        if optimizer is not None:
            optimizer.finish()
        runtime = group.runtime()
        # The engine is gone already; its optimizer is still held
        if engine is None and runtime is not None:
            runtime.remove_hooks()
    if engine is not None:
        engine.destroy()
    for hook in hooks:  # of an engine that is gone with its optimizer
        hook.remove()


def refuse_unmanaged(raw: RawConfig, model: nn.Module) -> None:
    """Raise where DeepSpeed has no accumulation that the program manages: beside stages, and beside
    overlapped reductions of whole gradients.
    """
    if raw.values.get("managed_gradient_accumulation", True):
        return
    zero = raw.values.get("zero_optimization", {})
    if hasattr(model, "mesh_statement"):
        what = "managed_gradient_accumulation=false is not supported with pipeline parallelism."
    elif zero.get("overlap_comm") is True and zero.get("stage", 0) < 2:
        what = (
            "managed_gradient_accumulation=false supports overlap_comm only with ZeRO stage 2 or 3."
        )
    else:
        return
    raise UsageError(what, fix="leave one of the two keys out.")


def refuse_other_sums(raw: RawConfig) -> None:
    """Raise NotBuiltError where DeepSpeed does: at stage 0 it sums gradients in the dtype of the
    weights alone.
    """
    asked = lookup(raw.values, "data_types.grad_accum_dtype")
    if asked is None or lookup(raw.values, "zero_optimization.stage", 0) != 0:
        return
    computes = low_precision(raw.values) or "fp32"
    if asked in ("fp16", "bf16", "fp32") and asked != computes:
        raise NotBuiltError(
            f"unsupported mix of model_dtype={computes} and grad_accum_dtype={asked} at stage 0.",
            "DeepSpeed refuses it, too.",
            "leave data_types.grad_accum_dtype out, or use stage 1.",
        )


def refuse_odd_bucket(raw: RawConfig) -> None:
    """Raise, as DeepSpeed does at stages 1 and 2, where a gathered bucket would not start at an
    even element.
    """
    zero = raw.values.get("zero_optimization", {})
    size = zero.get("allgather_bucket_size", 0)
    if zero.get("stage") in (1, 2) and size % 2:
        raise UsageError(
            "allgather_bucket_size must be a multiple of nccl_start_alignment_factor, 2; it is "
            f"{size:g}.",
            fix="choose an even number.",
        )


def refuse_slow_optimizer(raw: RawConfig, optimizer: Any) -> None:
    """Raise, as DeepSpeed does, where an offloaded optimizer must be one of its own and another is
    given.
    """
    is_offloaded = (
        lookup(raw.values, "zero_optimization.offload_optimizer.device", "none") != "none"
    )
    if (
        raw.get("zero_force_ds_cpu_optimizer") is not True
        or not is_offloaded
        or not isinstance(optimizer, Optimizer)
    ):
        return
    if not isinstance(optimizer, cpu_adam.Adam | cpu_adam.AdamW | Adagrad | Lion):
        raise ZeRORuntimeException(
            "zero_force_ds_cpu_optimizer is on, and the offloaded optimizer is a "
            f"{type(optimizer).__name__}.",
            "The key asks for an optimizer of DeepSpeed's for CPUs.",
            "pass deepspeed.ops.adam.DeepSpeedCPUAdam, or leave the key out: any optimizer is fast "
            "here.",
        )


def refuse_untested_optimizer(raw: RawConfig, optimizer: Any) -> None:
    """Raise, as DeepSpeed does, where a configuration that shards says that no optimizer may run
    that was not tested: here one whose class is neither torch's nor this library's.  Where it says
    nothing any may, unlike there.
    """
    if raw.get("zero_allow_untested_optimizer") is not False or not lookup(
        raw.values, "zero_optimization.stage", 0
    ):
        return
    kind = type(optimizer)
    if isinstance(optimizer, Optimizer) and kind.__module__.partition(".")[0] not in _TESTED:
        raise UsageError(
            "zero_allow_untested_optimizer is false, and the optimizer is a "
            f"{kind.__module__}.{kind.__qualname__}.",
            f"Sharded states are tested with the optimizers of {' and '.join(_TESTED)}.",
            "set the key to true, or leave it out: any optimizer that updates element by element "
            "is right.",
        )


_TESTED = ("torch", __name__.partition(".")[0])


def refuse_miscount() -> None:
    """Raise where accelerate drives this process as DeepSpeed's launcher and counted another world.

    accelerate counts before DeepSpeed starts the group, and takes CPU ranks for one process each
    unless it is told how they talk.  Its batch sizes are then those of one process, and its loaders
    give every rank the same batches: an error, even where the sizes happen to fit.  Local, and the
    same on every rank.
    """
    size = dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1
    counted = _counted_by_accelerate()
    if counted is None or counted == size:
        return
    raise UsageError(
        f"accelerate counted {counted} {'process' if counted == 1 else 'processes'}, and this "
        f"world has {size}.",
        "Its batch sizes would not fit, and every rank would be given the same batches.  On CPUs "
        "it counts 1 unless it is told how they talk.",
        f'set {CPU_RANKS}=1, pass kwargs_handlers=[InitProcessGroupKwargs(backend="gloo")] to '
        "Accelerator, or start one process; docs/how-to/accelerate.md and trainer.md have programs "
        "that run.",
    )


def _without_accelerates_wrapper(optimizer: Any) -> Any:
    """Return the optimizer in an AcceleratedOptimizer: accelerate wraps it before it calls
    `initialize` where its ParallelismConfig has tensor-parallel ranks, and wraps what comes back
    again.  accelerate is not imported for it.
    """
    kind: Any = getattr(sys.modules.get("accelerate.optimizer"), "AcceleratedOptimizer", ())
    return optimizer.optimizer if isinstance(optimizer, kind) else optimizer


def _counted_by_accelerate() -> int | None:
    """Return accelerate's number of processes where it was started for DeepSpeed, else None;
    accelerate is not imported for it.
    """
    state: Any = getattr(sys.modules.get("accelerate.state"), "PartialState", None)
    shared = getattr(state, "_shared_state", None)
    if not isinstance(shared, Mapping) or "DEEPSPEED" not in str(shared.get("distributed_type")):
        return None
    count = shared.get("num_processes")
    return count if isinstance(count, int) else None
