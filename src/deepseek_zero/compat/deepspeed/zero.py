"""`zero.Init` and `GatheredParameters` for programs that imported `deepspeed`."""

from __future__ import annotations

import logging
import os
import weakref
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook

from ...api import zero
from ...api.precision import DTYPES, low_precision
from ...api.zero import GatheredParameters, Init
from ...base.errors import UsageError
from ...base.log import log_first
from ...config.problems import lookup
from ...config.text import read
from ...sharding.param_group import ParamGroup
from ...sharding.sharded_parameter import owner_of
from .comm import init_distributed


class DropInInit(Init):
    """`zero.Init` with DeepSpeed's behavior.

    It joins the process group, uses the dtype of the configuration, and also shards parameters of
    modules without a registered parent.
    """

    def _begin(self, config: Any, dtype: torch.dtype | None) -> torch.dtype | None:
        self._begun: list[weakref.ref[nn.Module]] = []
        self._parameters_seen: Any = None
        # Programs written for DeepSpeed query torch.distributed for their rank.
        init_distributed()
        if config is None:
            return dtype
        values = read(config, None, lenient=True).values
        DropInGatheredParameters.follow(values)
        name = low_precision(values)
        return DTYPES[name] if dtype is None and name is not None else dtype

    def __enter__(self) -> DropInInit:
        super().__enter__()
        if self.enabled:
            self._parameters_seen = register_module_parameter_registration_hook(self._on_parameter)
        return self

    def _complete(self) -> None:
        """Also shard modules without a registered parent, such as the outermost module."""
        super()._complete()
        modules = [module for reference in self._begun if (module := reference()) is not None]
        self._begun = []
        for module in modules:
            self.shard(module)

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        if self.enabled and self._parameters_seen is not None:
            self._parameters_seen.remove()
            self._parameters_seen = None
            self._begun = []

    def _on_parameter(self, module: nn.Module, name: str, param: nn.Parameter | None) -> None:
        if not self._begun or self._begun[-1]() is not module:
            self._begun.append(weakref.ref(module))


class DropInGatheredParameters(GatheredParameters):
    """`GatheredParameters` with DeepSpeed's behavior.

    A change without a modifier_rank is discarded and a warning is logged once. With
    `zero_optimization.enable_sanity_checks` it is an error.
    """

    has_checks = False

    @classmethod
    def follow(cls, values: Mapping[str, Any]) -> None:
        """Apply the settings of a configuration to all later blocks."""
        cls.has_checks = bool(lookup(values, "zero_optimization.enable_sanity_checks", False))

    def _refuse_changes(self) -> None:
        try:
            super()._refuse_changes()
        except UsageError as error:
            if self.has_checks:
                raise
            log_first(f"{str(error).splitlines()[0]}  The change is lost.", logging.WARNING)


def register_external_parameter(module: nn.Module, parameter: nn.Parameter) -> None:
    """Declare that a module's forward reads a parameter of another module.

    As in DeepSpeed, a constructor may call it. Before `initialize` it has no effect, because the
    engine detects the first use.

    Args:
        module: The module that reads the parameter.
        parameter: A parameter of the model.

    Raises:
        RuntimeError: `parameter` is not a parameter.
    """
    _change_external(zero.register_external_parameter, module, parameter)


def unregister_external_parameter(module: nn.Module, parameter: nn.Parameter) -> None:
    """Undo `register_external_parameter`.

    Args:
        module: The module that read the parameter.
        parameter: A parameter of the model.

    Raises:
        RuntimeError: `parameter` is not a parameter.
    """
    _change_external(zero.unregister_external_parameter, module, parameter)


def _change_external(
    change: Callable[[nn.Module, nn.Parameter], None], module: nn.Module, parameter: nn.Parameter
) -> None:
    if not isinstance(parameter, nn.Parameter):
        raise RuntimeError("Parameter is not a torch.nn.Parameter")
    if isinstance(owner_of(parameter), ParamGroup):
        change(module, parameter)


def _contradicting_single_rank_pg_error(
    dp_world_size: int, explicit_process_group: Any, env: Mapping[str, Any] | None = None
) -> str | None:
    """Return the error message if a process would shard its model over itself only.

    A launcher has then started several processes. If the program passed a process group explicitly,
    there is no error. `env` is the environment of the launcher; None for this process's.
    """
    environment = os.environ if env is None else env
    said = str(environment.get("WORLD_SIZE") or "")
    if (
        explicit_process_group is not None
        or dp_world_size != 1
        or not said.isdigit()
        or int(said) <= 1
    ):
        return None
    return (
        f"zero.Init would shard over one rank, and the launcher sets WORLD_SIZE={said}: every "
        "process would keep the whole model. Call init_distributed() first."
    )
