"""What DeepSpeed's calls say of a model before it is wrapped: which blocks are leaves, and that
layers are to be split.

Leaf modules travel as one piece (mixtures of experts).  Their mark is DeepSpeed's own attribute,
`_z3_leaf = True` on the module, which clients test.  The doors hand the names of the marked modules
down when they wrap a model (`leaf_module_names`); nothing below them reads the mark.
`deepseek_zero.utils` re-exports what users know.

`tp_model_init` records what is asked for, and `initialize` of the same model does it.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ...base.errors import ConfigError, UsageError
from ...base.given import refuse, whole_number
from ...base.log import log_once
from ...config import RawConfig
from ...config.raw_config import lookup
from ...engine.mesh_statements import MeshStatement
from ...sharding.param_group import ParamGroup
from ...sharding.sharded_parameter import owner_of
from .autotp import set_autotp_mode

_SIZE = "tensor_parallel.autotp_size"
DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}


def low_precision(values: Mapping[str, Any]) -> str | None:
    """Return the section of the 16 bits that a configuration's values ask to compute in; None where
    they do not.
    """
    return next((name for name in DTYPES if lookup(values, f"{name}.enabled") is True), None)


class LeafNotFoundError(UsageError, ValueError):
    """A module that was to be marked is not in the model; DeepSpeed's error is a ValueError."""


def set_z3_leaf_modules(
    model: nn.Module,
    leaf_module_classes: Sequence[type[nn.Module] | str],
    raise_if_not_found: bool = True,
) -> list[nn.Module]:
    """Mark every module of these classes (types, class names, or full class names); returns
    them.
    """
    return _mark_classes(model, leaf_module_classes, True, raise_if_not_found)


def unset_z3_leaf_modules(
    model: nn.Module,
    leaf_module_classes: Sequence[type[nn.Module] | str],
    raise_if_not_found: bool = True,
) -> list[nn.Module]:
    """Take the mark off every module of these classes; returns them."""
    return _mark_classes(model, leaf_module_classes, False, raise_if_not_found)


def set_z3_leaf_modules_by_name(
    model: nn.Module, module_names: Sequence[str], raise_if_not_found: bool = True
) -> tuple[list[nn.Module], list[str]]:
    """Mark modules by their full names in the model; returns them, and the names that no module
    has.
    """
    return _mark_each(model, module_names, str.__eq__, raise_if_not_found)


def set_z3_leaf_modules_by_suffix(
    model: nn.Module, module_name_suffixes: Sequence[str], raise_if_not_found: bool = True
) -> tuple[list[nn.Module], list[str]]:
    """Mark modules whose full names end like this; returns them, and the endings that no name
    has.
    """
    return _mark_each(model, module_name_suffixes, str.endswith, raise_if_not_found)


def _mark_each(
    model: nn.Module, asked: Sequence[str], fits: Callable[[str, str], bool], must_find: bool
) -> tuple[list[nn.Module], list[str]]:
    names = [name for name, _ in model.named_modules()]
    missing = [each for each in asked if not any(fits(name, each) for name in names)]
    if missing and must_find:
        raise _not_found(model, missing)
    return _mark(
        model, lambda name, module: any(fits(name, each) for each in asked), True, False, asked
    ), missing


def mark_configured(
    model: nn.Module, classes: Sequence[str], names: Sequence[str], suffixes: Sequence[str]
) -> None:
    """Mark the modules that the configuration names (`zero_optimization.leaf_module`)."""
    _mark(model, lambda name, module: _is_one_of(module, classes), True, False, classes)
    _mark_each(model, names, str.__eq__, False)
    _mark_each(model, suffixes, str.endswith, False)


def get_z3_leaf_modules(model: nn.Module) -> list[nn.Module]:
    """Return the marked modules."""
    return [module for module in model.modules() if z3_leaf_module(module)]


def leaf_module_names(model: nn.Module) -> tuple[str, ...]:
    """Return the full names of the marked modules; all of them where a module has several."""
    return tuple(
        name
        for name, module in model.named_modules(remove_duplicate=False)
        if z3_leaf_module(module)
    )


def set_z3_leaf_module(model: nn.Module, flag: bool) -> None:
    """Mark one module, or take its mark off."""
    _tell_of_wrapped(model)
    model._z3_leaf = flag  # type: ignore[assignment]


def z3_leaf_module(model: nn.Module) -> bool:
    """Return whether this very module is marked."""
    return bool(model.__dict__.get("_z3_leaf", False))


def z3_leaf_parameter(param: nn.Parameter) -> bool:
    """Return False: modules are marked here, and parameters never."""
    return False


def _mark_classes(
    model: nn.Module, classes: Sequence[type[nn.Module] | str], flag: bool, must_find: bool
) -> list[nn.Module]:
    return _mark(model, lambda name, module: _is_one_of(module, classes), flag, must_find, classes)


def _mark(
    model: nn.Module,
    wanted: Callable[[str, nn.Module], bool],
    flag: bool,
    must_find: bool,
    asked: Sequence[object],
) -> list[nn.Module]:
    found = [module for name, module in model.named_modules() if wanted(name, module)]
    if must_find and not found:
        raise _not_found(model, asked)
    for module in found:
        set_z3_leaf_module(module, flag)
    return found


def _not_found(model: nn.Module, asked: Sequence[object]) -> LeafNotFoundError:
    classes = sorted({type(module).__name__ for module in model.modules()})
    return LeafNotFoundError(
        f"no module of the model matches {', '.join(str(each) for each in asked)}.",
        fix=f"name one of the classes {', '.join(classes)}, or pass raise_if_not_found=False.",
    )


def _is_one_of(module: nn.Module, classes: Sequence[type[nn.Module] | str]) -> bool:
    kind = type(module)
    names = {kind.__name__, kind.__qualname__, f"{kind.__module__}.{kind.__qualname__}"}
    return any(
        each in names if isinstance(each, str) else isinstance(module, each) for each in classes
    )


def _tell_of_wrapped(module: nn.Module) -> None:
    if any(isinstance(owner_of(param), ParamGroup) for param in module.parameters()):
        log_once(
            f"{type(module).__name__} is already wrapped, so its units are chosen: a mark of a "
            "leaf module changes nothing now.  Mark leaf modules before initialize, or name them "
            "in zero_optimization.leaf_module.",
            logging.WARNING,
        )


@dataclass(frozen=True)
class TensorParallelRequest:
    """What `tp_model_init` was given.  ranks: of tp_group; None without one."""

    tp_size: int
    dtype: torch.dtype | None = None
    ranks: tuple[int, ...] | None = None


_asked: weakref.WeakKeyDictionary[nn.Module, TensorParallelRequest] = weakref.WeakKeyDictionary()


def tp_model_init(
    model: nn.Module,
    tp_size: int,
    dtype: torch.dtype | None,
    config: Any = None,
    tp_group: Any = None,
    **kwargs: Any,
) -> nn.Module:
    """Ask for tensor parallelism of a model over so many ranks; returns the model as it is.  Local.

    `initialize` splits it: its layers are whole until then.  dtype: compared with the
    configuration's.  config: not
    read: the one given to `initialize` is.  tp_group: the ranks that share a layer, compared with
    the mesh's.
    """
    if not isinstance(model, nn.Module):
        raise refuse(
            "tp_model_init",
            "model",
            model,
            "the model that initialize() will get",
            "pass a torch.nn.Module.",
        )
    whole_number("tp_model_init", "tp_size", tp_size, 1)
    if dtype is not None and not isinstance(dtype, torch.dtype):
        raise refuse(
            "tp_model_init", "dtype", dtype, "a torch.dtype", "pass for example torch.bfloat16."
        )
    ranks = None
    if tp_group is not None:
        ranks = tuple(dist.get_process_group_ranks(tp_group))
        if len(ranks) != tp_size:
            raise UsageError(
                f"tp_model_init(tp_size={tp_size}) was given a tp_group of {len(ranks)} ranks.",
                "They are the same ranks.",
                "leave tp_group out.",
            )
    _asked[model] = TensorParallelRequest(tp_size, dtype, ranks)
    set_autotp_mode(training=True)
    return model


def asked_tp_size(model: nn.Module) -> int:
    """Return what `tp_model_init` was given for a model, 0 where it was not called."""
    asked = _asked.get(model)
    return asked.tp_size if asked is not None else 0


def tensor_parallel_statement(model: Any, raw: RawConfig, has_mpu: bool) -> MeshStatement | None:
    """Return what `tp_model_init` recorded of a model, None where it did not; ConfigError in
    DeepSpeed's words where the configuration says otherwise.
    """
    asked = _asked.get(model) if isinstance(model, nn.Module) else None  # else `Request` refuses it
    if asked is None:
        return None
    if asked.ranks is not None and has_mpu:
        raise ConfigError("tp_model_init provided tp_group; initialize must not receive mpu.")
    stated = raw.get(_SIZE, 0)
    if stated not in (0, asked.tp_size):
        raise ConfigError(
            f"Conflicting {_SIZE} in config ({stated}) and tp_model_init ({asked.tp_size})."
        )
    for name, dtype in DTYPES.items():
        if raw.get(f"{name}.enabled") is True and asked.dtype not in (None, dtype):
            raise ConfigError(
                f"Conflicting dtype in config ({dtype}) and tp_model_init ({asked.dtype})."
            )
    return MeshStatement(
        "tp_model_init", {"tp": asked.tp_size}, groups={"tp": asked.ranks} if asked.ranks else {}
    )
