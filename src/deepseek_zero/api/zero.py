"""`deepseek_zero.zero`: sharded construction and access to full parameters."""

from __future__ import annotations

import os
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any, Self

import torch
from torch import nn

from .. import checkpoint
from ..base.errors import UsageError
from ..base.given import path_of, refuse
from ..extensions import gathered_parameters, zero_init
from ..sharding.external_params import forget_external, remember_external, unit_of
from ..sharding.param_group import ParamGroup
from ..sharding.sharded_parameter import owner_of
from ..sharding.unit import Unit
from .dialect import current_dialect

# Arguments of DeepSpeed's zero.Init that have no effect.
WITHOUT_EFFECT = frozenset(
    "data_parallel_group mem_efficient_linear remote_device pin_memory config mpu "
    "zero_param_parallel_group zero_quantized_weights zero_quantized_nontrainable_weights "
    "sequence_data_parallel_group param_swapper".split()
)


def _class_of(cls: Any, base: type, chosen: Any) -> Any:
    """Return the class to instantiate in place of `base` or of a subclass of it.

    This is `chosen`, the dialect's subclass of `base`, or for a program's own subclass a class that
    combines both.
    """
    if chosen is None or issubclass(cls, chosen):
        return cls
    return chosen if cls is base else _both(cls, chosen)


@cache
def _both(cls: Any, chosen: Any) -> Any:
    return type(cls.__name__, (cls, chosen), {"__module__": cls.__module__})


class Init(zero_init.Init):
    """Context manager that shards each module when it is assigned to its parent module.

    Each rank keeps an equal shard of each parameter, with the values of rank 0. With several ranks,
    no rank therefore holds the whole model while it is constructed. With one rank, each shard is
    the whole parameter.
    In a program that imports `deepspeed`, the parameters also have DeepSpeed's `ds_*` attributes.
    Only in such a program are the parameters sharded that belong to the outermost module itself.

    Args:
        module: An existing module to shard immediately, or None.
        dtype: The dtype to which floating-point values are cast when they are sharded; None keeps
            their dtype. Parameters that a module declares as fp32 are not cast.
        enabled: If False, the context has no effect.
        config_dict_or_path: A configuration. In a program that imports `deepspeed`, the dtype of
            this configuration is used if `dtype` is None. Otherwise the configuration has no
            effect.
        **deepspeed_options: DeepSpeed's other arguments. `config` is another name of
            `config_dict_or_path`. The others are accepted and have no effect.

    Raises:
        UsageError: An argument is unknown or cannot be used, or the object is entered inside its
            own block.

    Note:
        Collective: every rank must construct the same model.

    Example:
        >>> with deepseek_zero.zero.Init():
        ...     model = Model()
        >>> engine, *_ = deepseek_zero.initialize(model=model, config=config)
    """

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        made: Self = object.__new__(_class_of(cls, Init, current_dialect().init_class))
        return made

    def __init__(
        self,
        module: nn.Module | None = None,
        *,
        dtype: torch.dtype | None = None,
        enabled: bool = True,
        config_dict_or_path: Any = None,
        **deepspeed_options: Any,
    ) -> None:
        if unknown := sorted(set(deepspeed_options) - WITHOUT_EFFECT):
            known = ", ".join(sorted(WITHOUT_EFFECT))
            raise UsageError(
                f"zero.Init does not know {', '.join(unknown)}.", "", f"its words are {known}."
            )
        config = deepspeed_options.get("config")
        for name, value in (("config_dict_or_path", config_dict_or_path), ("config", config)):
            if not isinstance(value, Mapping | str | os.PathLike | None):
                raise refuse(
                    "zero.Init",
                    name,
                    value,
                    "a configuration",
                    "pass a dict or a path, or leave it out.",
                )
        if enabled:
            current_dialect().show_names(self)
            given = config_dict_or_path if config_dict_or_path is not None else config
            dtype = self._begin(given, dtype)
        super().__init__(module, dtype=dtype, enabled=enabled)

    def _begin(self, config: Any, dtype: torch.dtype | None) -> torch.dtype | None:
        """Return the dtype to cast values to. Called before any module is built."""
        return dtype


class GatheredParameters(gathered_parameters.GatheredParameters):
    """Context manager in which sharded parameters have their full values.

    Parameters are ignored if they belong to no wrapped model and were not built under `zero.Init`.
    If the block raises an error, changes of the values are discarded.

    Args:
        params: A parameter, several parameters, or a module. None is ignored.
        modifier_rank: The rank whose in-place changes all ranks adopt at exit. If the model has
            several parts ("tp", "pp"), its number among the ranks of a part. If None, the values
            are read-only.
        fwd_module: Accepted and ignored.
        enabled: If False, the context has no effect.

    Raises:
        UsageError: A parameter was changed although `modifier_rank` is None. All ranks raise this
            error at exit. It is also raised if the memory of a parameter was replaced by a tensor
            of another shape or dtype, if the engine of a parameter was deleted, or if
            `modifier_rank` is no rank.

    Note:
        Collective when the block begins and ends: every rank must pass the same parameters.

    Example:
        >>> with deepseek_zero.zero.GatheredParameters(model.head.weight, modifier_rank=0):
        ...     if rank == 0:
        ...         model.head.weight.zero_()
    """

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        chosen = current_dialect().gathered_class
        made: Self = object.__new__(_class_of(cls, GatheredParameters, chosen))
        return made


def load_weights(model: nn.Module, path: str | Path, strict: bool = True) -> None:
    """Load weights from a safetensors folder or file into a model.

    In a wrapped model, the shards, the main weights and the persistent buffers are replaced, and
    accumulated gradients are discarded. A model that is not wrapped yet may be on the meta device
    or constructed under `zero.Init`. Each rank then loads only its shards, and `initialize` uses
    them.

    Args:
        model: Model to load into, before or after `initialize`.
        path: A folder in the layout of Hugging Face, or one safetensors file.
        strict: Whether to raise an error if the files and the model have different names. If False,
            tensors that the files do not contain keep their values.

    Raises:
        CheckpointError: The files do not exist, do not fit the model or are damaged.
        NotBuiltError: `path` is a URL.
        UsageError: `path` is neither a string nor a path.

    Note:
        Collective if the model is wrapped, on the meta device or constructed under `zero.Init`:
        every rank must call it.
    """
    checkpoint.load_weights(model, path_of("load_weights", "path", path), strict)
    for session in {
        shard.session
        for shard in map(owner_of, model.parameters())
        if isinstance(shard, zero_init.InitShard)
    }:
        current_dialect().show_names(session)


def register_external_parameter(module: nn.Module, parameter: nn.Parameter) -> None:
    """Declare that a module's forward reads a parameter of another unit.

    A unit is a module whose parameters are gathered together. The call is optional. If it is left
    out, the library detects the parameter at its first use in a forward, and gathers it then.

    Args:
        module: The module that reads the parameter, in the same wrapped model.
        parameter: A parameter of a wrapped model.

    Raises:
        UsageError: The parameter belongs to no wrapped model, or an argument has another type.

    Note:
        Every rank must make the same calls, although the calls do not communicate.
    """
    owner, readers = _readers(module, parameter)
    for reader in readers:
        remember_external(reader, owner)


def unregister_external_parameter(module: nn.Module, parameter: nn.Parameter) -> None:
    """Undo `register_external_parameter`.

    If the module reads the parameter after this call, the library detects the parameter at its
    first use and gathers it then.

    Args:
        module: The module that read the parameter.
        parameter: A parameter of a wrapped model.

    Raises:
        UsageError: The parameter belongs to no wrapped model, or an argument has another type.

    Note:
        Every rank must make the same calls, although the calls do not communicate.
    """
    owner, readers = _readers(module, parameter)
    for reader in readers:
        forget_external(reader, owner)


def _readers(module: nn.Module, parameter: nn.Parameter) -> tuple[Unit, list[Unit]]:
    """Return the unit of a wrapped parameter, and the units that contain a module.

    Raises:
        UsageError: No engine has wrapped the parameter, or an argument has another type.
    """
    for name, value, kind in (
        ("module", module, nn.Module),
        ("parameter", parameter, nn.Parameter),
    ):
        if not isinstance(value, kind):
            fix = "pass a module and a parameter of the wrapped model."
            raise refuse("register_external_parameter", name, value, f"an nn.{kind.__name__}", fix)
    owner = owner_of(parameter)
    runtime = owner.runtime() if isinstance(owner, ParamGroup) else None
    if runtime is None or not isinstance(owner, ParamGroup):
        raise UsageError(
            "an external parameter was announced that no engine has wrapped.",
            "Only a wrapped parameter has a unit to gather.",
            "call it after initialize (or DeepSeekZeRO3).",
        )
    readers = [
        unit for unit in runtime.units[1:] if any(each is module for each in unit.module.modules())
    ]
    return unit_of(owner, runtime.units), readers
