"""ZeRO-3 leaf modules: modules that are gathered and released as one unit.

An example is a mixture of experts, whose parameters are not all used in every forward. A leaf
module has DeepSpeed's attribute `_z3_leaf = True`, because programs test it. The APIs pass the
names of the leaf modules to the engine (`leaf_module_names`); no other code reads the attribute.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from torch import nn

from ..base.errors import UsageError
from ..base.log import log_once
from ..sharding.param_group import ParamGroup
from ..sharding.sharded_parameter import owner_of


class LeafNotFoundError(UsageError, ValueError):
    """Raised if a module that should become a ZeRO-3 leaf module is not in the model.

    Also a ValueError, as in DeepSpeed.
    """


def set_z3_leaf_modules(
    model: nn.Module,
    leaf_module_classes: Iterable[type[nn.Module] | str] | type[nn.Module],
    raise_if_not_found: bool = True,
) -> list[nn.Module]:
    """Make every module of the given classes a ZeRO-3 leaf module.

    A leaf module is gathered and released as one unit together with all of its submodules.

    Args:
        model: The model, before `initialize`.
        leaf_module_classes: Classes, given as types, class names, or fully qualified class names
            such as "package.file.Block". A type also selects instances of its subclasses; a name
            does not. A single class or name may be passed without a list.
        raise_if_not_found: Whether to raise an error if no module has one of the classes.

    Returns:
        The modules of these classes, which are leaf modules now. The list is empty if there are
        none and `raise_if_not_found` is false.

    Raises:
        LeafNotFoundError: `raise_if_not_found` is true and no module has one of the classes.

    Example:
        >>> set_z3_leaf_modules(model, [MixtralSparseMoeBlock])
    """
    return _mark_classes(model, leaf_module_classes, True, raise_if_not_found)


def unset_z3_leaf_modules(
    model: nn.Module,
    leaf_module_classes: Iterable[type[nn.Module] | str] | type[nn.Module],
    raise_if_not_found: bool = True,
) -> list[nn.Module]:
    """Undo `set_z3_leaf_modules` for every module of the given classes.

    Args:
        model: The model, before `initialize`.
        leaf_module_classes: Classes, given as types, class names, or fully qualified class names
            such as "package.file.Block". A type also selects instances of its subclasses; a name
            does not. A single class or name may be passed without a list.
        raise_if_not_found: Whether to raise an error if no module has one of the classes.

    Returns:
        The modules of these classes, which are no longer leaf modules. The list is empty if there
        are none and `raise_if_not_found` is false.

    Raises:
        LeafNotFoundError: `raise_if_not_found` is true and no module has one of the classes.
    """
    return _mark_classes(model, leaf_module_classes, False, raise_if_not_found)


def set_z3_leaf_modules_by_name(
    model: nn.Module, module_names: Iterable[str], raise_if_not_found: bool = True
) -> tuple[list[nn.Module], list[str]]:
    """Turn the modules with the given full names into ZeRO-3 leaf modules.

    A leaf module is gathered and released as one unit together with all of its submodules.

    Args:
        model: The model, before `initialize`.
        module_names: Names as in `model.named_modules()`, or a single name.
        raise_if_not_found: Whether to raise an error if a name belongs to no module.

    Returns:
        A pair of lists: the modules that are now leaf modules, and the names that no module has.

    Raises:
        LeafNotFoundError: `raise_if_not_found` is true, and a name belongs to no module or
            `module_names` is empty. No module is then changed.
    """
    return _mark_named(model, module_names, str.__eq__, raise_if_not_found)


def set_z3_leaf_modules_by_suffix(
    model: nn.Module, module_name_suffixes: Iterable[str], raise_if_not_found: bool = True
) -> tuple[list[nn.Module], list[str]]:
    """Turn the modules whose full names end with given suffixes into leaf modules.

    A leaf module is gathered and released as one unit together with all of its submodules.

    Args:
        model: The model, before `initialize`.
        module_name_suffixes: Suffixes of names as in `model.named_modules()`, or a single suffix.
        raise_if_not_found: Whether to raise an error if a suffix matches no module.

    Returns:
        A pair of lists: the modules that are now leaf modules, and the suffixes that match no
        module.

    Raises:
        LeafNotFoundError: `raise_if_not_found` is true, and a suffix matches no module or
            `module_name_suffixes` is empty. No module is then changed.
    """
    return _mark_named(model, module_name_suffixes, str.endswith, raise_if_not_found)


def _mark_named(
    model: nn.Module, names: Iterable[str], fits: Callable[[str, str], bool], must_find: bool
) -> tuple[list[nn.Module], list[str]]:
    # A string is an iterable of its characters.
    asked = [names] if isinstance(names, str) else list(names)
    missing = set(asked)
    found = []
    for name, module in model.named_modules():
        if matches := {each for each in asked if fits(name, each)}:
            missing -= matches
            found.append(module)
    left = [each for each in asked if each in missing]
    if must_find and (left or not found):
        raise _not_found(model, left or asked)
    for module in found:
        set_z3_leaf_module(module, True)
    return found, left


def mark_configured(model: nn.Module, section: Mapping[str, Any]) -> None:
    """Mark the modules selected by `zero_optimization.leaf_module` as ZeRO-3 leaf modules.

    Args:
        model: Model that contains the modules.
        section: The configuration's section, with "classes", "names" and "name_suffixes".
    """
    _mark_classes(model, section.get("classes", ()), True, False)
    _mark_named(model, section.get("names", ()), str.__eq__, False)
    _mark_named(model, section.get("name_suffixes", ()), str.endswith, False)


def get_z3_leaf_modules(model: nn.Module) -> list[nn.Module]:
    """Return the ZeRO-3 leaf modules of a model, in the order of `model.modules()`.

    Each of these modules is gathered and released as one unit together with its submodules. The
    list is empty if there are none.
    """
    return [module for module in model.modules() if z3_leaf_module(module)]


def leaf_module_names(model: nn.Module) -> tuple[str, ...]:
    """Return the full names of a model's ZeRO-3 leaf modules, including every alias."""
    return tuple(
        name
        for name, module in model.named_modules(remove_duplicate=False)
        if z3_leaf_module(module)
    )


def set_z3_leaf_module(model: nn.Module, flag: bool) -> None:
    """Set whether one module is a ZeRO-3 leaf module.

    If the module is already wrapped, the call has no effect on gathering, and rank 0 logs a
    warning.

    Args:
        model: Module to change, before `initialize`. Its submodules are not changed.
        flag: If True, the module is gathered and released as one unit together with its submodules.
            If False, the module is no longer a leaf module.
    """
    if any(isinstance(owner_of(param), ParamGroup) for param in model.parameters()):
        log_once(
            f"{type(model).__name__} is already wrapped, so its units are chosen: a mark of a "
            "leaf module changes nothing now.  Mark leaf modules before initialize, or name them "
            "in zero_optimization.leaf_module.",
            logging.WARNING,
        )
    model._z3_leaf = flag  # type: ignore[assignment]


def z3_leaf_module(model: nn.Module) -> bool:
    """Return whether this module itself is a ZeRO-3 leaf module."""
    return bool(model.__dict__.get("_z3_leaf", False))


def z3_leaf_parameter(param: nn.Parameter) -> bool:
    """Return False: only modules can be ZeRO-3 leaves, never parameters."""
    return False


def _mark_classes(
    model: nn.Module,
    given: Iterable[type[nn.Module] | str] | type[nn.Module],
    flag: bool,
    must_find: bool,
) -> list[nn.Module]:
    classes = [given] if isinstance(given, type | str) else list(given)
    found = [module for module in model.modules() if _is_one_of(module, classes)]
    if must_find and not found:
        raise _not_found(model, classes)
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
    types = tuple(each for each in classes if isinstance(each, type))
    return isinstance(module, types) or not names.isdisjoint(classes)
