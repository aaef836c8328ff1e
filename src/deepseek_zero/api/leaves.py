"""Marks on modules that are gathered as one unit, such as mixtures of experts.

The mark is DeepSpeed's attribute `_z3_leaf = True` on the module, because programs test it. The
APIs pass the names of the marked modules to the engine (`leaf_module_names`); no other code reads
the mark.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import nn

from ..base.errors import UsageError
from ..base.log import log_once
from ..sharding.param_group import ParamGroup
from ..sharding.sharded_parameter import owner_of


class LeafNotFoundError(UsageError, ValueError):
    """A module to mark is not in the model. Also a ValueError, as in DeepSpeed."""


def set_z3_leaf_modules(
    model: nn.Module,
    leaf_module_classes: Sequence[type[nn.Module] | str],
    raise_if_not_found: bool = True,
) -> list[nn.Module]:
    """Mark every module of the given classes as one unit.

    Args:
        model: The model, before `initialize`.
        leaf_module_classes: Types, class names, or full class names.
        raise_if_not_found: Raise if no module has one of the classes.

    Returns:
        The marked modules.

    Raises:
        LeafNotFoundError: No module matches.

    Example:
        >>> set_z3_leaf_modules(model, [MixtralSparseMoeBlock])
    """
    return _mark_classes(model, leaf_module_classes, True, raise_if_not_found)


def unset_z3_leaf_modules(
    model: nn.Module,
    leaf_module_classes: Sequence[type[nn.Module] | str],
    raise_if_not_found: bool = True,
) -> list[nn.Module]:
    """Remove the mark from every module of the given classes.

    Args:
        model: The model, before `initialize`.
        leaf_module_classes: Types, class names, or full class names.
        raise_if_not_found: Raise if no module has one of the classes.

    Returns:
        The modules that matched.

    Raises:
        LeafNotFoundError: No module matches.
    """
    return _mark_classes(model, leaf_module_classes, False, raise_if_not_found)


def set_z3_leaf_modules_by_name(
    model: nn.Module, module_names: Sequence[str], raise_if_not_found: bool = True
) -> tuple[list[nn.Module], list[str]]:
    """Mark modules by their full names in the model.

    Args:
        model: The model, before `initialize`.
        module_names: Names as in `model.named_modules()`.
        raise_if_not_found: Raise if a name is missing.

    Returns:
        The marked modules, and the names that no module has.

    Raises:
        LeafNotFoundError: A name is missing.
    """
    return _mark_each(model, module_names, str.__eq__, raise_if_not_found)


def set_z3_leaf_modules_by_suffix(
    model: nn.Module, module_name_suffixes: Sequence[str], raise_if_not_found: bool = True
) -> tuple[list[nn.Module], list[str]]:
    """Mark modules whose full names have one of the suffixes.

    Args:
        model: The model, before `initialize`.
        module_name_suffixes: Suffixes of names as in `model.named_modules()`.
        raise_if_not_found: Raise if no name has a suffix.

    Returns:
        The marked modules, and the suffixes that no name has.

    Raises:
        LeafNotFoundError: No name has a suffix.
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


def mark_configured(model: nn.Module, section: Mapping[str, Any]) -> None:
    """Mark the modules that `zero_optimization.leaf_module` names.

    Args:
        model: The model.
        section: The configuration's section, with "classes", "names" and "name_suffixes".
    """
    _mark_classes(model, section.get("classes", ()), True, False)
    _mark_each(model, section.get("names", ()), str.__eq__, False)
    _mark_each(model, section.get("name_suffixes", ()), str.endswith, False)


def get_z3_leaf_modules(model: nn.Module) -> list[nn.Module]:
    """Return the marked modules of a model."""
    return [module for module in model.modules() if z3_leaf_module(module)]


def leaf_module_names(model: nn.Module) -> tuple[str, ...]:
    """Return the full names of the marked modules, including every alias."""
    return tuple(
        name
        for name, module in model.named_modules(remove_duplicate=False)
        if z3_leaf_module(module)
    )


def set_z3_leaf_module(model: nn.Module, flag: bool) -> None:
    """Mark one module, or remove its mark.

    Args:
        model: The module. Its children are not changed.
        flag: True to mark it.
    """
    _log_wrapped(model)
    model._z3_leaf = flag  # type: ignore[assignment]


def z3_leaf_module(model: nn.Module) -> bool:
    """Return whether this module itself is marked."""
    return bool(model.__dict__.get("_z3_leaf", False))


def z3_leaf_parameter(param: nn.Parameter) -> bool:
    """Return False: only modules are marked, never parameters."""
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
    for each in classes:
        is_match = each in names if isinstance(each, str) else isinstance(module, each)
        if is_match:
            return True
    return False


def _log_wrapped(module: nn.Module) -> None:
    if any(isinstance(owner_of(param), ParamGroup) for param in module.parameters()):
        log_once(
            f"{type(module).__name__} is already wrapped, so its units are chosen: a mark of a "
            "leaf module changes nothing now.  Mark leaf modules before initialize, or name them "
            "in zero_optimization.leaf_module.",
            logging.WARNING,
        )
