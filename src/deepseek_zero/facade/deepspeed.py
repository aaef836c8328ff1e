"""DeepSpeed's words for what is here: `initialize`, the engine's getters, `add_config_arguments`.

No logic: each word is a line of a table or a call of the engine room.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

from torch import nn

from ..base.errors import UsageError
from ..base.mesh import init_distributed as _join
from ..config import choose_source
from ..config.load import load
from ..engine.engine import Engine
from ..engine.start import Request, start

# DeepSpeed's getters are methods; here they are a table from name to what they return.
GETTERS: dict[str, Callable[[Engine], Any]] = {
    "train_batch_size": lambda e: e.config.train_batch_size,
    "train_micro_batch_size_per_gpu": lambda e: e.config.train_micro_batch_size_per_gpu,
    "gradient_accumulation_steps": lambda e: e.config.gradient_accumulation_steps,
    "get_batch_info": lambda e: (
        e.config.train_batch_size,
        e.config.train_micro_batch_size_per_gpu,
        e.config.gradient_accumulation_steps,
    ),
    "zero_optimization": lambda e: e.config.zero_optimization.stage > 0,
    "zero_optimization_stage": lambda e: e.config.zero_optimization.stage,
    "zero_optimization_partition_gradients": lambda e: e.config.zero_optimization.stage >= 2,
    "zero_optimization_partition_weights": lambda e: e.config.zero_optimization.stage >= 3,
    "zero_gather_16bit_weights_on_model_save": (
        lambda e: e.config.zero_optimization.stage3_gather_16bit_weights_on_model_save
    ),
    "zero_offload_optimizer": lambda e: None,
    "zero_offload_param": lambda e: None,
    "zero_cpu_offload": lambda e: False,
    "fp16_enabled": lambda e: e.config.fp16.enabled,
    "bfloat16_enabled": lambda e: e.config.bf16.enabled,
    "torch_autocast_enabled": lambda e: e.config.torch_autocast.enabled,
    "gradient_clipping": lambda e: e.config.gradient_clipping,
    "dynamic_loss_scale": lambda e: e.parts.scaler is not None and e.parts.scaler.dynamic,
    "loss_scale": lambda e: e.config.fp16.loss_scale,
    "initial_dynamic_scale": lambda e: 2.0**e.config.fp16.initial_scale_power,
    "optimizer_name": lambda e: e.config.optimizer.type,
    "optimizer_params": lambda e: e.config.optimizer.params,
    "scheduler_name": lambda e: e.config.scheduler.type,
    "scheduler_params": lambda e: e.config.scheduler.params,
    "get_lr": lambda e: [group["lr"] for group in e.optimizer.param_groups],
    "get_mom": lambda e: [group.get("momentum", group.get("betas", 0.0)) for group in e.optimizer.param_groups],
    "get_global_grad_norm": lambda e: e.optimizer.last.norm if e.optimizer is not None and e.optimizer.last else None,
    "get_data_types": lambda e: (e.runtime.settings.policy.compute, e.runtime.settings.policy.accumulate),
    "steps_per_print": lambda e: e.config.steps_per_print,
    "wall_clock_breakdown": lambda e: e.config.wall_clock_breakdown,
    "managed_gradient_accumulation": lambda e: True,
}
# What DeepSpeed keeps as attributes.
ATTRIBUTES: dict[str, Callable[[Engine], Any]] = {
    "local_rank": lambda e: e.mesh.device.index or 0 if e.mesh.device.type == "cuda" else _local_rank(),
    "global_rank": lambda e: e.mesh.rank,
    "world_size": lambda e: e.mesh.size,
    "dp_world_size": lambda e: e.mesh.size,
    "seq_dp_world_size": lambda e: e.mesh.size,
    "mp_world_size": lambda e: 1,
    "monitor": lambda e: e.observer.monitor,
    "timers": lambda e: e.observer.timers,
    "client_optimizer": lambda e: e.optimizer.inner if e.optimizer is not None else None,
    "communication_data_type": lambda e: e.runtime.settings.policy.reduce,
    "is_compiled": lambda e: False,
}


def _local_rank() -> int:
    from ..base.device import local_rank

    return local_rank()


class DeepSpeedEngine(Engine):
    """The engine under DeepSpeed's names."""

    def __getattr__(self, name: str) -> Any:
        if name in GETTERS:
            return lambda: GETTERS[name](self)
        if name in ATTRIBUTES:
            return ATTRIBUTES[name](self)
        return super().__getattr__(name)


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
    config: Any = None,
    mesh_param: Any = None,
    config_params: Any = None,
) -> tuple[DeepSpeedEngine, Any, Any, Any]:
    """Wrap a model; returns (engine, optimizer, training_dataloader, lr_scheduler).  Collective.

    config: a dict, the path of a JSON file, or base64; also as `config_params` or `args.deepspeed_config`.  The arguments are
    DeepSpeed's; `mpu` and `mesh_param` come with tensor and pipeline parallelism.
    """
    if model is None:
        raise UsageError("deepspeed.initialize requires a model", "", "pass model=your_module.")
    for name, value in (("mpu", mpu), ("mesh_param", mesh_param)):
        if value is not None:
            from ..base.errors import NotBuiltError

            raise NotBuiltError(f"initialize({name}=...) is not built yet.", "Only data parallelism is.", f"leave {name} out.")
    if dist_init_required is not False:
        _join()
    source, origin = choose_source(config, config_params, args)
    raw = load(source, origin=origin)
    request = Request(
        model,
        optimizer,
        list(model_parameters) if model_parameters is not None else None,
        lr_scheduler,
        training_data,
        collate_fn,
    )
    engine = start(raw, request, DeepSpeedEngine)
    assert isinstance(engine, DeepSpeedEngine)
    return engine, engine.optimizer, engine.training_dataloader, engine.lr_scheduler


def add_config_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add --deepspeed, --deepspeed_config and their deprecated spellings to a parser."""
    group = parser.add_argument_group("DeepSpeed", "DeepSpeed configurations")
    group.add_argument("--deepspeed", action="store_true", help="use the engine (a flag for the script to read)")
    group.add_argument("--deepspeed_config", type=str, default=None, help="path of the JSON configuration")
    group.add_argument("--deepscale", action="store_true", help="deprecated spelling of --deepspeed")
    group.add_argument("--deepscale_config", type=str, default=None, help="deprecated spelling of --deepspeed_config")
    return parser


def init_distributed(dist_backend: str | None = None, timeout: Any = None, **options: Any) -> None:
    """Join the group a launcher describes; without a launcher a world of one is started."""
    extra = {"timeout": timeout} if timeout is not None else {}
    _join(dist_backend, **extra)
