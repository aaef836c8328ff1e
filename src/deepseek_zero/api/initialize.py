"""`initialize`: create an engine from a model and a configuration."""

from __future__ import annotations

import argparse
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from torch import nn

from ..base.device import ScalesItself
from ..base.errors import UsageError
from ..base.given import refuse, whole_number
from ..config import choose_source
from ..engine.data import ShardedLoader
from ..engine.request import Request, parameters_of
from ..engine.start import prepare_process, start
from ..optim.sharded import ShardedOptimizer
from .dialect import current_dialect
from .engine import ZeroEngine
from .leaves import leaf_module_names, mark_configured
from .mesh_arguments import mesh_param_statement, mpu_statement

if TYPE_CHECKING:
    from .configuration import Configuration

__all__ = ["initialize"]


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
) -> tuple[ZeroEngine, ShardedOptimizer | None, ShardedLoader | None, Any]:
    """Shard a model and return the engine that trains it.

    The model is changed in place and stays available as `engine.module`.

    Args:
        args: A namespace whose `deepspeed_config` is used if `config` and `config_params` are None.
        model: The module to train. This argument is required.
        optimizer: An optimizer over the model's parameters, or a callable that creates one from
            parameters. By default, the configuration's `optimizer` section is used.
        model_parameters: Parameters or parameter groups to train. By default, all parameters that
            require a gradient are trained. Ignored if `optimizer` is an optimizer object.
        training_data: A dataset from which the returned loader yields this rank's samples.
        lr_scheduler: A learning-rate schedule, or a callable that creates one from the optimizer.
            By default, the configuration's `scheduler` section is used.
        distributed_port: Port of the rendezvous, if the launcher does not define one.
        mpu: An object with the getters of a Megatron mpu. The group sizes and ranks that it returns
            must be those of the mesh.
        dist_init_required: False states that the program has already joined a process group. If it
            has not, the call raises an error.
        collate_fn: Collate function of the loader of `training_data`.
        config: A dict, the path of a JSON file, JSON text, or JSON text encoded in base64.
        mesh_param: A pair of the number of data-parallel ranks and of sequence-parallel ranks.
        config_params: Another name of `config`. If both are given, `config` is used.
        mesh: Axes over the ranks, such as `{"dp_replicate": 2, "dp_shard": 4}`, a `Mesh`, or a
            `DeviceMesh` with names. By default, the configuration's `mesh` section is used.

    Returns:
        The tuple (engine, optimizer, training_dataloader, lr_scheduler). The optimizer, the loader
        and the schedule are None if the arguments and the configuration do not define them.

    Raises:
        ConfigError: The configuration is missing, given twice or unreadable, or it has an unknown
            key or a value that cannot be used.
        NotBuiltError: The configuration requires a feature that is not implemented.
        PeerError: Another rank failed or did not connect.
        UsageError: An argument is missing or cannot be used.

    Note:
        Collective: every rank must call it with the same model and configuration.

    Example:
        >>> engine, optimizer, _, _ = deepseek_zero.initialize(
        ...     model=model, config={"train_batch_size": 8, "optimizer": {"type": "AdamW"}}
        ... )
        >>> loss = engine(batch)
        >>> engine.backward(loss)
        >>> engine.step()
    """
    if model is None:
        raise UsageError("initialize requires a model.", "", "pass model=your_module.")
    whole_number("initialize", "distributed_port", distributed_port, 0, 65_535)
    if dist_init_required not in (None, True, False):
        wanted = "True, False or None"
        raise refuse(
            "initialize", "dist_init_required", dist_init_required, wanted, "leave it out."
        )
    parameters = None
    if model_parameters is not None:
        parameters = parameters_of("initialize", "model_parameters", model_parameters)
    source, origin = choose_source(config, config_params, args)
    dialect = current_dialect()
    raw = dialect.load(source, origin)
    prepare_process(raw)
    dialect.join(distributed_port, dist_init_required)
    if isinstance(optimizer, ScalesItself):  # a ZeroOptimizer, whose file is not loaded here
        optimizer = getattr(optimizer, "client", optimizer)
    request = Request(
        model,
        optimizer,
        parameters,
        lr_scheduler,
        training_data,
        collate_fn,
        mesh=mesh,
        sequence=getattr(mpu, "sequence_settings", None),
        mpu=mpu,
    )
    request = dialect.complete(raw, request)
    statements = request.mesh_statements
    if mpu is not None:
        statements = (*statements, mpu_statement(mpu))
    if mesh_param is not None:
        statements = (*statements, mesh_param_statement(mesh_param))
    leaf_modules = leaf_module_names(model)
    request = replace(request, mesh_statements=statements, leaf_modules=leaf_modules)
    mark_configured(model, raw.get("zero_optimization.leaf_module") or {})
    engine = start(raw, request, dialect)
    return engine, engine.optimizer, engine.training_dataloader, engine.lr_scheduler
