"""Building sharded, gathering parameters, and announcing external ones: `deepseek_zero.zero`."""

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
from ..sharding.param_group import ParamGroup
from ..sharding.runtime import Runtime
from ..sharding.sharded_parameter import owner_of
from ..sharding.unit import Unit
from .dialect import current_dialect

# Arguments of DeepSpeed's zero.Init; they change nothing.
WITHOUT_EFFECT = frozenset(
    "data_parallel_group mem_efficient_linear remote_device pin_memory config mpu "
    "zero_param_parallel_group zero_quantized_weights zero_quantized_nontrainable_weights "
    "sequence_data_parallel_group param_swapper".split()
)


def _class_of(cls: Any, base: type, chosen: Any) -> Any:
    """Return the class of a new object: `chosen`, which the dialect has for `base`, or a program's
    own subclass of `base` with what `chosen` changes.
    """
    if chosen is None or issubclass(cls, chosen):
        return cls
    return chosen if cls is base else _both(cls, chosen)


@cache
def _both(cls: Any, chosen: Any) -> Any:
    return type(cls.__name__, (cls, chosen), {"__module__": cls.__module__})


class Init(zero_init.Init):
    """Context in which modules are built sharded.  Collective: every rank builds the same model.

    module: shard one that exists already. dtype: cast the values when they are cut. enabled=False
    does nothing. Without a launcher (a world of one) each slice is the whole parameter and the same
    code runs.  DeepSpeed's other arguments are accepted and change nothing; a model built so
    answers to `ds_*` before there is an engine.
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
        **deepspeed_words: Any,
    ) -> None:
        if unknown := sorted(set(deepspeed_words) - WITHOUT_EFFECT):
            known = ", ".join(sorted(WITHOUT_EFFECT))
            raise UsageError(
                f"zero.Init does not know {', '.join(unknown)}.", "", f"its words are {known}."
            )
        config = deepspeed_words.get("config")
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
        """Return the dtype to cast values to, before anything is built."""
        return dtype


class GatheredParameters(gathered_parameters.GatheredParameters):
    """Whole parameters inside the `with` block.  Collective at entry and at exit.

    A change without a modifier_rank is an error.
    """

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        chosen = current_dialect().gathered_class
        made: Self = object.__new__(_class_of(cls, GatheredParameters, chosen))
        return made


def load_weights(model: nn.Module, path: str | Path, strict: bool = True) -> None:
    """Give a model the weights of a safetensors folder or file.  Collective where ranks share the
    model.

    A wrapped model takes them into slices and masters.  One that will be wrapped may be on the meta
    device or built
    under zero.Init: each rank reads its slices alone, and `initialize` goes on from there.
    """
    checkpoint.load_weights(model, path_of("load_weights", "path", path), strict)
    for session in {
        shard.session
        for shard in map(owner_of, model.parameters())
        if isinstance(shard, zero_init.InitShard)
    }:
        current_dialect().show_names(session)


def register_external_parameter(module: nn.Module, parameter: nn.Parameter) -> None:
    """Announce that a module's forward reads a parameter of another unit.  Local; every rank
    announces the same.

    Found by itself at the first use inside a forward; announcing it saves that first search.
    """
    runtime, owner = _home(parameter)
    for reader in _units_around(module, runtime):
        runtime.executor.gathers.remember_external(reader, owner)


def unregister_external_parameter(module: nn.Module, parameter: nn.Parameter) -> None:
    """Take an announcement back.  Local; every rank does the same.  Should the module read it
    again, it is found.
    """
    runtime, owner = _home(parameter)
    for reader in _units_around(module, runtime):
        runtime.executor.gathers.forget_external(reader, owner)


def _home(parameter: nn.Parameter) -> tuple[Runtime, Unit]:
    """Return the engine and the unit of a wrapped parameter; a UsageError for any other."""
    owner = owner_of(parameter)
    runtime = owner.runtime() if isinstance(owner, ParamGroup) else None
    if runtime is None or not isinstance(owner, ParamGroup):
        raise UsageError(
            "an external parameter was announced that no engine has wrapped.",
            "Only a wrapped parameter has a unit to gather.",
            "call it after initialize (or DeepSeekZeRO3).",
        )
    return runtime, runtime.unit_of(owner)


def _units_around(module: nn.Module, runtime: Runtime) -> list[Unit]:
    return [
        unit for unit in runtime.units[1:] if any(each is module for each in unit.module.modules())
    ]
