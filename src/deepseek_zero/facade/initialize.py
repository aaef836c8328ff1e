"""DeepSpeed's `initialize` and `add_config_arguments`: the door of facade/deepspeed.py's engine.

Apart from the engine, because only this reads a configuration: `from deepspeed import DeepSpeedEngine` is asked often
(accelerate's `unwrap_model`) and pays for no pydantic.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping
from typing import Any

from torch import nn

from ..base.dropin import is_dropin_imported
from ..base.errors import NotBuiltError, UsageError
from ..base.given import refuse, whole_number
from ..comm.start import init_distributed, join
from ..config import choose_source
from ..config.keywords import ConfigKeywords
from ..config.load import load
from ..engine.start import Request, module_of, parameters_of, start
from . import again
from .counting import refuse_miscount
from .deepspeed import DeepSpeedEngine
from .views import ParameterOffload, show_ds_names

# A dict that a program has put together is any Mapping; annotate it as ConfigKeywords to have its keys checked.
Configuration = ConfigKeywords | Mapping[str, Any] | str | os.PathLike[str] | None

__all__ = ["ConfigKeywords", "add_config_arguments", "initialize"]


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
) -> tuple[DeepSpeedEngine, Any, Any, Any]:
    """Wrap a model; returns (engine, optimizer, training_dataloader, lr_scheduler).  Collective.

    config: a dict, the path of a JSON file, or base64; also as `config_params` or `args.deepspeed_config`.
    optimizer: an optimizer, or a callable that makes one from parameters; else the configuration's.  lr_scheduler: a
    schedule, or a callable that makes one from the optimizer; else the configuration's.  model_parameters: parameters
    or groups to train.  `mpu` and `mesh_param` come with tensor and pipeline parallelism.
    """
    if model is None:
        raise UsageError("deepspeed.initialize requires a model", "", "pass model=your_module.")
    for name, value in (("mpu", mpu), ("mesh_param", mesh_param)):
        if value is not None:
            raise NotBuiltError(
                f"initialize({name}=...) is not built yet.", "Only data parallelism is.", f"leave {name} out."
            )
    if dist_init_required not in (None, True, False):
        raise refuse("initialize", "dist_init_required", dist_init_required, "True, False or None", "leave it out.")
    whole_number("initialize", "distributed_port", distributed_port, 0, 65_535)
    parameters = None
    if model_parameters is not None:
        parameters = parameters_of("initialize", "model_parameters", model_parameters)
    source, origin = choose_source(config, config_params, args)
    # Behind DeepSpeed's name stand programs written for it: they put keys of their own into the configuration, and ask
    # torch.distributed for their rank even where they are alone.
    unchanged = is_dropin_imported()
    raw = load(source, origin=origin, unknown="warn" if unchanged else "error")
    if dist_init_required is not False:
        (init_distributed if unchanged else join)(distributed_port=distributed_port)
    if unchanged:
        refuse_miscount()
        again.end_engine_of(module_of(model))
    engine = start(raw, Request(model, optimizer, parameters, lr_scheduler, training_data, collate_fn), DeepSpeedEngine)
    assert isinstance(engine, DeepSpeedEngine)
    if engine.config.zero_optimization.stage == 3:
        show_ds_names(engine.runtime)
        if engine.optimizer is not None:
            vars(engine.optimizer)["parameter_offload"] = ParameterOffload()
    again.remember(engine)
    engine.client_optimizer, engine.client_lr_scheduler = optimizer, lr_scheduler
    return engine, engine.optimizer, engine.training_dataloader, engine.lr_scheduler


def add_config_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add --deepspeed, --deepspeed_config and their deprecated spellings to a parser."""
    group = parser.add_argument_group("DeepSpeed", "DeepSpeed configurations")
    group.add_argument("--deepspeed", action="store_true", help="use the engine (a flag for the script to read)")
    group.add_argument("--deepspeed_config", type=str, default=None, help="path of the JSON configuration")
    group.add_argument("--deepscale", action="store_true", help="deprecated spelling of --deepspeed")
    group.add_argument("--deepscale_config", type=str, default=None, help="deprecated spelling of --deepspeed_config")
    return parser
