"""Read the units of a model, and the shapes of their parameters, for the planner.

Only `read_model` reads a module. Its result has names, shapes and dtypes, and holds no parameter.
It depends on the model only, so it is the same on every rank.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from math import prod

import torch
from torch import Tensor, nn

from ..base.device import without_torch_function
from ..base.errors import UsageError
from .layout import Shape
from .plan_settings import PlanSettings
from .rows import rows_of
from .split import Split, is_copy, split_of

CONTAINERS = (nn.ModuleList, nn.Sequential, nn.ModuleDict)
BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
LARGE_NUMEL = 1_000_000  # a block of this size is a unit even if it is not repeated


@dataclass(frozen=True)
class ParamShape:
    """The shape, dtype and properties of one parameter.

    Attributes:
        shape: The shape; of this rank's part if the parameter is split along "tp".
        dtype: The dtype with which the parameter was built.
        trainable: Whether the parameter requires a gradient.
        full_precision: Whether the parameter stays in fp32 if the run computes in 16 bits.
        split: How it is split along "tp"; None if it is not.
        is_copy: Whether the parameter is tied to one of an earlier pipeline stage.
        whole: For a tile of rows, the name of the whole parameter; else empty.
    """

    shape: Shape
    dtype: torch.dtype
    trainable: bool
    full_precision: bool = False
    split: Split | None = None
    is_copy: bool = False
    whole: str = ""

    @property
    def numel(self) -> int:
        """The number of elements of the parameter."""
        return prod(self.shape)


@dataclass(frozen=True)
class UnitShape:
    """A unit of the model, which is gathered and released as a whole, and its parameters.

    Attributes:
        name: The name of its module; empty for the model.
        is_layer_tile: Whether the unit is a part of a large layer, which is cut to save memory.
        params: The unit's parameters, by full name.
    """

    name: str
    is_layer_tile: bool = False
    params: dict[str, ParamShape] = field(default_factory=dict)


@dataclass(frozen=True)
class ModelShape:
    """The names, shapes and dtypes of a model's parameters, by unit.

    Attributes:
        units: Its units, the root first.
        buffer_bytes: The bytes of its buffers.
    """

    units: tuple[UnitShape, ...]
    buffer_bytes: int = 0

    @property
    def params(self) -> dict[str, ParamShape]:
        """The parameters of all units, by name."""
        return {name: param for unit in self.units for name, param in unit.params.items()}

    @property
    def wholes(self) -> dict[str, str]:
        """The name of the whole parameter, by the name of each parameter that is cut by rows."""
        return {name: param.whole for name, param in self.params.items() if param.whole}

    @property
    def cuts(self) -> dict[str, Split]:
        """How parameters are split along the tensor-parallel axis "tp", by name."""
        return {name: param.split for name, param in self.params.items() if param.split}


def read_model(model: nn.Module, settings: PlanSettings) -> ModelShape:
    """Read the names, shapes and dtypes of a model's parameters, by unit.

    The result also has `requires_grad`. It holds no values and no reference to the model.

    Args:
        model: The model, which may be on the meta device.
        settings: The ZeRO stage, dtypes, sizes and memories of the run.

    Returns:
        The units with the shapes of their parameters, the root first.

    Raises:
        UsageError: The settings name modules that the model does not have.
    """
    nbytes = sum(buffer.numel() * buffer.element_size() for buffer in model.buffers())
    return ModelShape(tuple(choose_units(model, settings)), nbytes)


def choose_units(model: nn.Module, settings: PlanSettings) -> list[UnitShape]:
    """Return the units of a model, the root first.

    Units are repeated blocks (two or more children of one class in a container) and large single
    blocks. If such a block is only a sequence of repeated blocks, those are units instead.

    A leaf module is not a unit, because its parent may read its parameters directly:
    nn.MultiheadAttention reads out_proj.weight. The parts (tiles) of a large layer are an
    exception. The class of the layer declares that it only calls its children
    (`children_are_units`), so each tile is a unit.

    A parameter that several units use belongs to the root, which stays gathered during a whole
    forward or backward. `settings.unit_names` replaces the search by names of classes or modules.
    Modules of `leaf_classes` (mixture-of-experts blocks), and modules made of small ones
    (`fuse_numel`), are not searched, because small units are sent in one message.

    Args:
        model: The model, which may be on the meta device.
        settings: The ZeRO stage, dtypes, sizes and memories of the run.

    Returns:
        The units with the shapes of their parameters.
    """
    params = _param_shapes(model, settings)
    if not settings.unit_names and _is_fine_grained(model, settings):
        return [UnitShape("", params=params)]
    found = _explicit(model, settings) if settings.unit_names else _search(model, "", settings)
    chosen = dict(found)
    tiles = dict(_tiles(model, "", settings))
    modules = [model]
    units = [UnitShape("")]
    seen = set[int]()
    for name, module in model.named_modules(remove_duplicate=False):
        if isinstance(module, torch.jit.ScriptModule):
            continue  # it cannot have hooks
        if name in chosen or (name in tiles and id(module) not in seen):
            seen.add(id(module))
            modules.append(module)
            units.append(UnitShape(name, is_layer_tile=name in tiles))
    owners = _owners(model, modules)
    for name, param in model.named_parameters():
        owner = owners[id(param)]
        units[owner.pop() if len(owner) == 1 else 0].params[name] = params[name]
    return [unit for number, unit in enumerate(units) if unit.params or number == 0]


def _param_shapes(model: nn.Module, settings: PlanSettings) -> dict[str, ParamShape]:
    whole = full_precision_names(model) if settings.policy.compute is not None else frozenset[str]()
    with without_torch_function():
        found = {}
        for name, param in model.named_parameters():
            rows = rows_of(param)
            rows_name = "" if rows is None else rows.name
            found[name] = ParamShape(
                tuple(param.shape),
                param.dtype,
                param.requires_grad,
                name in whole,
                split_of(param),
                is_copy(param),
                rows_name,
            )
        return found


def _owners(model: nn.Module, units: Sequence[nn.Module]) -> dict[int, set[int]]:
    """Return, for the id of each parameter, the numbers of the units that hold it."""
    unit_of = {id(module): number for number, module in enumerate(units)}
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
            {
                type(module).__name__
                for name, module in model.named_modules()
                if name and any(module.children())
            }
        )
        raise UsageError(
            f"units: no module has the name or the class {', '.join(missing)}.",
            "Each entry is the class name or the full name of a module with parameters.",
            f"classes of blocks in this model: {', '.join(known) or 'none'}.",
        )


def _search(
    module: nn.Module, prefix: str, settings: PlanSettings
) -> Iterator[tuple[str, nn.Module]]:
    if isinstance(module, CONTAINERS):
        yield from _search_container(module, prefix, settings)
        return
    for name, child in module.named_children():
        path = f"{prefix}{name}"
        whole = (
            _is_block(child) and not isinstance(child, CONTAINERS) and not _repeats_inside(child)
        )
        if _is_leaf_unit(path, child, settings) or (whole and _numel(child) >= LARGE_NUMEL):
            yield path, child
        else:
            yield from _search(child, f"{path}.", settings)


def _search_container(
    container: nn.Module, prefix: str, settings: PlanSettings
) -> Iterator[tuple[str, nn.Module]]:
    children = list(container.named_children())
    kinds = [type(child) for _, child in children if _is_block(child)]
    for name, child in children:
        path = f"{prefix}{name}"
        repeated = (
            _is_block(child) and not isinstance(child, CONTAINERS) and kinds.count(type(child)) >= 2
        )
        if (repeated and not _is_stage(child)) or _is_leaf_unit(path, child, settings):
            yield path, child
        else:
            yield from _search(child, f"{path}.", settings)


def _tiles(
    module: nn.Module, prefix: str, settings: PlanSettings, *, inside: bool = False
) -> Iterator[tuple[str, nn.Module]]:
    """Return the children of every class that declares them as units.

    Children of leaf units are left out. If `inside` is True, `module` is a container of such
    children.
    """
    apart = getattr(type(module), "children_are_units", False) or (
        inside and isinstance(module, CONTAINERS)
    )
    for name, child in module.named_children():
        path = f"{prefix}{name}"
        if apart and not isinstance(child, CONTAINERS):
            yield path, child
        elif not _is_leaf_unit(path, child, settings):
            yield from _tiles(child, f"{path}.", settings, inside=apart)


def _is_leaf_unit(path: str, module: nn.Module, settings: PlanSettings) -> bool:
    """Return whether the configuration makes this module one unit.

    Examples are mixture-of-experts blocks, and modules made of small ones.
    """
    named = path in settings.leaf_names or any(
        path.endswith(suffix) for suffix in settings.leaf_suffixes
    )
    # Most containers are never called
    small = not isinstance(module, CONTAINERS) and _is_fine_grained(module, settings)
    return named or small or type(module).__name__ in settings.leaf_classes


def _is_fine_grained(module: nn.Module, settings: PlanSettings) -> bool:
    """Return whether this block and the modules inside it have few elements each.

    This is DeepSpeed's granularity.
    """
    if not settings.fuse_numel or not _is_block(module):
        return False
    layers = sum(not isinstance(each, CONTAINERS) for each in module.modules())
    return _numel(module) <= settings.fuse_numel * layers


def _is_block(module: nn.Module) -> bool:
    return any(True for _ in module.children()) and any(True for _ in module.parameters())


def _repeats_inside(module: nn.Module) -> bool:
    """Return whether a module contains lists of modules.

    A tiled layer's list of tiles does not count.
    """
    if getattr(type(module), "children_are_units", False):
        return False
    if isinstance(module, CONTAINERS) and len(list(module.children())) >= 2:
        return True
    return any(map(_repeats_inside, module.children()))


def _is_stage(module: nn.Module) -> bool:
    """Return whether sequences of repeated blocks hold all parameters of a module.

    An example is a stage of a ResNet. The blocks are then the units. Only nn.Sequential guarantees
    that its blocks run one after the other; a list may hold experts.
    """
    sequences = [
        child for child in module.children() if isinstance(child, nn.Sequential) and _repeats(child)
    ]
    return bool(sequences) and sum(map(_numel, sequences)) == _numel(module)


def _repeats(container: nn.Module) -> bool:
    kinds = [type(child) for child in container.children() if _is_block(child)]
    return any(kinds.count(kind) >= 2 for kind in kinds)


def _numel(module: nn.Module) -> int:
    return sum(param.numel() for param in module.parameters())


# Attributes of transformers, on any module: names of modules and parameters that stay fp32
DECLARED_FP32 = ("_keep_in_fp32_modules", "_keep_in_fp32_modules_strict")


def full_precision_names(
    model: nn.Module,
    members: Callable[..., Iterable[tuple[str, Tensor]]] = nn.Module.named_parameters,
) -> frozenset[str]:
    """Return the names of the parameters that stay in fp32 if the run computes in 16 bits.

    These are the parameters of batch norms, because running statistics need fp32, and those that a
    module declares by a part of their name (`_keep_in_fp32_modules`,
    `_keep_in_fp32_modules_strict`).

    Args:
        model: The model whose modules are searched.
        members: The method that lists the tensors of a module; `nn.Module.named_buffers` returns
            the names of buffers instead.
    """
    found: set[str] = set()
    for prefix, module in model.named_modules():
        start = f"{prefix}." if prefix else ""
        if isinstance(module, BATCH_NORMS):
            found.update(start + name for name, _ in members(module, recurse=False))
        declared = {
            part for attribute in DECLARED_FP32 for part in getattr(module, attribute, None) or ()
        }
        if declared:
            parts = tuple(f".{part}." for part in declared)
            names = [name for name, _ in members(module)]
            found.update(
                start + name for name in names if any(part in f".{name}." for part in parts)
            )
    return frozenset(found)
