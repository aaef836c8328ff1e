"""DeepSpeed's `deepspeed.zero`: Init with its arguments, and the announcement of external
parameters.

`deepseek_zero.zero` re-exports them beside what needs no translation.
"""

from __future__ import annotations

import logging
import os
import weakref
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook

from ...base.errors import UsageError
from ...base.given import path_of, refuse
from ...base.log import log_once
from ...checkpoint import weights
from ...config.raw_config import lookup
from ...config.text import read
from ...sharding import access, init
from ...sharding.executor import Unit
from ...sharding.param_group import ParamGroup
from ...sharding.runtime import Runtime
from ...sharding.sharded_parameter import owner_of
from .before_initialize import DTYPES, low_precision
from .comm import init_distributed
from .dropin import is_dropin_imported
from .parameters import show_ds_names

# Arguments of DeepSpeed's zero.Init that change nothing here.
WITHOUT_EFFECT = frozenset(
    "data_parallel_group mem_efficient_linear remote_device pin_memory config mpu "
    "zero_param_parallel_group zero_quantized_weights zero_quantized_nontrainable_weights "
    "sequence_data_parallel_group param_swapper".split()
)


class Init(init.Init):
    """Context in which modules are built sharded.  Collective: every rank builds the same model.

    module: shard one that exists already. dtype: cast the values when they are cut. enabled=False
    does nothing. Without a launcher (a world of one) each slice is the whole parameter and the same
    code runs.  DeepSpeed's other arguments are accepted and change nothing; a model built so
    answers to `ds_*` before there is an engine.
    """

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
        for name, value in (
            ("config_dict_or_path", config_dict_or_path),
            ("config", deepspeed_words.get("config")),
        ):
            if not isinstance(value, Mapping | str | os.PathLike | None):
                raise refuse(
                    "zero.Init",
                    name,
                    value,
                    "a configuration",
                    "pass a dict or a path, or leave it out.",
                )
        self._begun: list[weakref.ref[nn.Module]] = []
        self._parameters_seen: Any = None
        if enabled:
            show_ds_names(self)
            if is_dropin_imported():
                # As DeepSpeed's does: behind its name stand programs that ask torch for their rank
                init_distributed()
                given = (
                    config_dict_or_path
                    if config_dict_or_path is not None
                    else deepspeed_words.get("config")
                )
                dtype = self._follow(given, dtype)
        super().__init__(module, dtype=dtype, enabled=enabled)

    def _follow(self, given: Any, dtype: torch.dtype | None) -> torch.dtype | None:
        """Return the dtype that a configuration computes in, where none was given; hear what it
        says of checks.
        """
        if given is None:
            return dtype
        values = read(given, None, lenient=True).values
        GatheredParameters.follow(values)
        name = low_precision(values)
        return DTYPES[name] if dtype is None and name is not None else dtype

    def __enter__(self) -> Init:
        super().__enter__()
        if self.enabled and is_dropin_imported():
            self._parameters_seen = register_module_parameter_registration_hook(self._on_parameter)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        """Cut, too, what no parent has registered: the outermost module's own parameters."""
        super().__exit__(kind, error, at)
        if self._parameters_seen is not None:
            self._parameters_seen.remove()
            self._parameters_seen = None
            modules = [module for reference in self._begun if (module := reference()) is not None]
            self._begun = []
            for module in modules if kind is None else ():
                self.shard(module)

    def _on_parameter(self, module: nn.Module, name: str, param: nn.Parameter | None) -> None:
        if not self._begun or self._begun[-1]() is not module:
            self._begun.append(weakref.ref(module))


class GatheredParameters(access.GatheredParameters):
    """Whole parameters inside the `with` block.  Collective at entry and at exit.

    Behind DeepSpeed's name a change without a modifier_rank is lost with a warning, said once,
    unless `zero_optimization.enable_sanity_checks` asks for an error, which it is at every other
    door.
    """

    has_checks = False

    @classmethod
    def follow(cls, values: Mapping[str, Any]) -> None:
        """Hear what the configuration that was read last says of checks."""
        cls.has_checks = bool(lookup(values, "zero_optimization.enable_sanity_checks", False))

    def _refuse_changes(self) -> None:
        try:
            super()._refuse_changes()
        except UsageError as error:
            if self.has_checks or not is_dropin_imported():
                raise
            log_once(f"{str(error).splitlines()[0]}  The change is lost.", logging.WARNING)


def _contradicting_single_rank_pg_error(
    dp_world_size: int, explicit_process_group: Any, env: Mapping[str, Any] | None = None
) -> str | None:
    """Return what is wrong where a launcher started several processes and this one would shard
    among itself alone.

    explicit_process_group: one that the program named is meant as it is.  env: of the launcher;
    None: this process's.
    """
    said = str((os.environ if env is None else env).get("WORLD_SIZE") or "")
    if (
        explicit_process_group is not None
        or dp_world_size != 1
        or not said.isdigit()
        or int(said) <= 1
    ):
        return None
    return (
        f"zero.Init would shard among one rank, and the launcher says WORLD_SIZE={said}: every "
        "process would keep the whole model.  Call init_distributed() first."
    )


def load_weights(model: nn.Module, path: str | Path, strict: bool = True) -> None:
    """Give a model the weights of a safetensors folder or file.  Collective where ranks share the
    model.

    A wrapped model takes them into slices and masters.  One that will be wrapped may be on the meta
    device or built
    under zero.Init: each rank reads its slices alone, and `initialize` goes on from there.
    """
    weights.load_weights(model, path_of("load_weights", "path", path), strict)
    for session in {
        shard.session
        for shard in map(owner_of, model.parameters())
        if isinstance(shard, init.InitShard)
    }:
        show_ds_names(session)


def register_external_parameter(module: nn.Module, parameter: nn.Parameter) -> None:
    """Announce that a module's forward reads a parameter of another unit.  Local; every rank
    announces the same.

    Found by itself at the first use inside a forward; announcing it saves that first search.
    """
    runtime, owner = _home(parameter)
    for reader in _units_around(module, runtime):
        runtime.executor.remember_external(reader, owner)


def unregister_external_parameter(module: nn.Module, parameter: nn.Parameter) -> None:
    """Take an announcement back.  Local; every rank does the same.  Should the module read it
    again, it is found.
    """
    runtime, owner = _home(parameter)
    for reader in _units_around(module, runtime):
        runtime.executor.forget_external(reader, owner)


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
