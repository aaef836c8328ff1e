"""Chooses the modules that become units, and the parameters that share a group.

Decides from the model alone, the same on every rank; moves nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import nn

from ..base.errors import UsageError
from .spec import PlanSettings

CONTAINERS = (nn.ModuleList, nn.Sequential, nn.ModuleDict)
BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
LARGE_NUMEL = 1_000_000  # a lone block of this many elements is a unit though nothing repeats it


@dataclass
class UnitChoice:
    """A module chosen as unit and the parameters it owns, by full name.  is_tile: see `choose_units`."""

    name: str
    module: nn.Module
    is_tile: bool = False
    params: dict[str, nn.Parameter] = field(default_factory=dict)


def choose_units(model: nn.Module, settings: PlanSettings) -> list[UnitChoice]:
    """Units of a model, root first.

    Repeated blocks (two or more children of one class in a container) and large lone blocks are units; where such a
    block is itself but a sequence of repeated blocks, those are.  A leaf module never is, because its parent may read
    its parameters directly (nn.MultiheadAttention reads out_proj.weight), unless the parent's class says that it only
    calls its children (`children_are_units`, tiled.py): those, its tiles, are units wherever they stand, inside others
    too.  A parameter used in several units belongs to the root, which is gathered throughout. `settings.unit_names`
    overrides the search by class or module name; `leaf_classes` (mixture-of-experts blocks), and modules made of small
    ones (`fuse_numel`), are never looked into: small units travel in one message.
    """
    if not settings.unit_names and _is_fine_grained(model, settings):
        return [UnitChoice("", model, params=dict(model.named_parameters()))]
    chosen = dict(_explicit(model, settings) if settings.unit_names else _search(model, "", settings))
    tiles = dict(_tiles(model, "", settings))
    units = [UnitChoice("", model)]
    for name, module in model.named_modules(remove_duplicate=False):
        if name in chosen or name in tiles:
            units.append(UnitChoice(name, module, is_tile=name in tiles))
    owners = _owners(model, units)
    for name, param in model.named_parameters():
        owner = owners[id(param)]
        units[owner.pop() if len(owner) == 1 else 0].params[name] = param
    return [unit for number, unit in enumerate(units) if unit.params or number == 0]


def _owners(model: nn.Module, units: Sequence[UnitChoice]) -> dict[int, set[int]]:
    """id(param) -> the units whose modules hold it."""
    unit_of = {id(unit.module): number for number, unit in enumerate(units)}
    owners: dict[int, set[int]] = {}

    def visit(module: nn.Module, unit: int) -> None:
        unit = unit_of.get(id(module), unit)
        for param in module.parameters(recurse=False):
            owners.setdefault(id(param), set()).add(unit)
        for child in module.children():
            visit(child, unit)

    visit(model, 0)
    return owners


def _explicit(model: nn.Module, settings: PlanSettings) -> Iterator[tuple[str, nn.Module]]:
    wanted = set(settings.unit_names)
    found: set[str] = set()
    for name, module in model.named_modules():
        match = wanted & {name, type(module).__name__}
        if name and match and any(True for _ in module.parameters()):
            found |= match
            yield name, module
    if missing := sorted(wanted - found):
        known = sorted(
            {type(module).__name__ for name, module in model.named_modules() if name and any(module.children())}
        )
        raise UsageError(
            f"units: no module is called {', '.join(missing)}.",
            "Each entry is the class name or the full name of a module with parameters.",
            f"classes of blocks in this model: {', '.join(known) or 'none'}.",
        )


def _search(module: nn.Module, prefix: str, settings: PlanSettings) -> Iterator[tuple[str, nn.Module]]:
    if isinstance(module, CONTAINERS):
        yield from _search_container(module, prefix, settings)
        return
    for name, child in module.named_children():
        path = f"{prefix}{name}"
        whole = _is_block(child) and not isinstance(child, CONTAINERS) and not _repeats_inside(child)
        if _is_leaf_unit(path, child, settings) or (whole and _numel(child) >= LARGE_NUMEL):
            yield path, child
        else:
            yield from _search(child, f"{path}.", settings)


def _search_container(container: nn.Module, prefix: str, settings: PlanSettings) -> Iterator[tuple[str, nn.Module]]:
    children = list(container.named_children())
    kinds = [type(child) for _, child in children if _is_block(child)]
    for name, child in children:
        path = f"{prefix}{name}"
        repeated = _is_block(child) and not isinstance(child, CONTAINERS) and kinds.count(type(child)) >= 2
        if (repeated and not _is_stage(child)) or _is_leaf_unit(path, child, settings):
            yield path, child
        else:
            yield from _search(child, f"{path}.", settings)


def _tiles(
    module: nn.Module, prefix: str, settings: PlanSettings, *, inside: bool = False
) -> Iterator[tuple[str, nn.Module]]:
    """The children of every class that says they are units, looking through containers and into no leaf.

    inside: whether `module` is a container of such children.
    """
    apart = getattr(type(module), "children_are_units", False) or (inside and isinstance(module, CONTAINERS))
    for name, child in module.named_children():
        path = f"{prefix}{name}"
        if apart and not isinstance(child, CONTAINERS):
            yield path, child
        elif not _is_leaf_unit(path, child, settings):
            yield from _tiles(child, f"{path}.", settings, inside=apart)


def _is_leaf_unit(path: str, module: nn.Module, settings: PlanSettings) -> bool:
    """Return whether the configuration says that this module travels as one piece (mixture-of-experts blocks, small
    ones).
    """
    named = path in settings.leaf_names or any(path.endswith(suffix) for suffix in settings.leaf_suffixes)
    small = not isinstance(module, CONTAINERS) and _is_fine_grained(module, settings)  # few containers are called
    return named or small or type(module).__name__ in settings.leaf_classes


def _is_fine_grained(module: nn.Module, settings: PlanSettings) -> bool:
    """Return whether it is a block whose modules have few elements each, itself counted (DeepSpeed's granularity)."""
    if not settings.fuse_numel or not _is_block(module):
        return False
    layers = sum(not isinstance(each, CONTAINERS) for each in module.modules())
    return _numel(module) <= settings.fuse_numel * layers


def _is_block(module: nn.Module) -> bool:
    return any(True for _ in module.children()) and any(True for _ in module.parameters())


def _repeats_inside(module: nn.Module) -> bool:
    """Return whether there are lists of modules inside; a tiled layer's list of tiles is no sign of blocks."""
    if getattr(type(module), "children_are_units", False):
        return False
    if isinstance(module, CONTAINERS) and len(list(module.children())) >= 2:
        return True
    return any(map(_repeats_inside, module.children()))


def _is_stage(module: nn.Module) -> bool:
    """Return whether all of a module's parameters stand in sequences of repeated blocks (a ResNet's stage): those are
    the units.

    Only nn.Sequential tells that its blocks run one after the other; a list may hold experts.
    """
    sequences = [child for child in module.children() if isinstance(child, nn.Sequential) and _repeats(child)]
    return bool(sequences) and sum(map(_numel, sequences)) == _numel(module)


def _repeats(container: nn.Module) -> bool:
    kinds = [type(child) for child in container.children() if _is_block(child)]
    return any(kinds.count(kind) >= 2 for kind in kinds)


def _numel(module: nn.Module) -> int:
    return sum(param.numel() for param in module.parameters())


@dataclass(frozen=True)
class GroupKey:
    """Parameters of one unit with the same key lie in one flat buffer: one row of the plan."""

    dtype: torch.dtype
    trainable: bool
    persistent: bool
    full_precision: bool


def group_params(
    unit: UnitChoice, persistent: frozenset[str], full_precision: frozenset[str]
) -> dict[GroupKey, list[str]]:
    """A unit's parameter names by group, in the order the model declares them."""
    groups: dict[GroupKey, list[str]] = {}
    for name, param in unit.params.items():
        key = GroupKey(param.dtype, param.requires_grad, name in persistent, name in full_precision)
        groups.setdefault(key, []).append(name)
    return groups


def persistent_names(units: Sequence[UnitChoice], settings: PlanSettings) -> frozenset[str]:
    """Parameters too small to be worth gathering, smallest first while their sum allows.  Stage 3 only."""
    if settings.stage < 3 or settings.persistence_numel <= 0:
        return frozenset()
    sizes = sorted((param.numel(), name) for unit in units for name, param in unit.params.items())
    names, total = set(), 0
    for numel, name in sizes:
        total += numel
        if numel > settings.persistence_numel or total > settings.persistence_total_numel:
            break
        names.add(name)
    return frozenset(names)


def full_precision_names(model: nn.Module) -> frozenset[str]:
    """Parameters that stay fp32 under a 16-bit policy: batch norm's, whose running statistics 16 bits would ruin."""
    return frozenset(
        f"{prefix}.{name}" if prefix else name
        for prefix, module in model.named_modules()
        if isinstance(module, BATCH_NORMS)
        for name, _ in module.named_parameters(recurse=False)
    )
