"""What the model that one rank runs is of the whole one: names, shapes, parts, and whose random
numbers go on where.

Files speak of the whole model alone.  Ranks along "tp" hold parts of its parameters, ranks along
"pp" some of its parameters.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace

from torch import Tensor, nn

from ..base.device import is_persistent_buffer
from ..base.errors import NotBuiltError, UsageError
from ..base.mesh import Mesh, mesh_of
from ..planner.layout import Shape
from ..planner.rows import rows_of
from ..planner.split import split_of
from ..sharding.group import ParamInfo
from ..sharding.runtime import Runtime
from .boxes import ParamPart, PlacedValues
from .format import Manifest
from .layouts import StateRange, StateReader
from .lockstep import run_and_gather

WHOLE_NAMES = "_zero_whole_names"
OWN_NAMES = "_zero_own_names"
SAME_NAMES = "_zero_same_names"


@dataclass(frozen=True)
class ModelPiece:
    """The piece of the model that one rank holds.  coordinate: along "tp".

    names: by its name here, the first name that the whole model has for a parameter; what is left
    out keeps its own. A parameter here may be rows of one of the whole model (planner/rows.py):
    several have its name then.
    """

    names: Mapping[str, str]
    coordinate: int

    @classmethod
    def of(cls, runtime: Runtime) -> ModelPiece:
        """Return the piece that a rank's wrapped model is."""
        names = runtime.model.__dict__.get(OWN_NAMES) or {}
        return cls(names, runtime.plan.mesh.coordinates["tp"])

    def name(self, member: ParamInfo) -> str:
        """Return a parameter's first name in the whole model."""
        return self.names.get(member.name, member.name)

    def part(self, member: ParamInfo) -> ParamPart | None:
        """Return what this rank holds of a parameter; None where that is all of it."""
        return ParamPart.of(split_of(member.param), self.coordinate)

    def shape(self, member: ParamInfo) -> Shape:
        """Return the shape of the whole parameter."""
        split = split_of(member.param)
        rows = rows_of(member.param)
        if rows is not None:
            return rows.shape
        return member.slot.shape if split is None else split.shape

    def start(self, member: ParamInfo) -> int:
        """Return where a parameter's elements begin among those of the one that files have."""
        rows = rows_of(member.param)
        return 0 if rows is None else rows.start

    def range_of(self, kind: str, member: ParamInfo, key: str, start: int, stop: int) -> StateRange:
        """Return elements [start, stop) of a parameter's state here, as files have them."""
        at = self.start(member)
        return kind, self.name(member), key, at + start, at + stop, self.part(member)

    def read(
        self, reader: StateReader, kind: str, member: ParamInfo, key: str, start: int, stop: int
    ) -> PlacedValues:
        """Yield (position, flat values) of elements [start, stop) of a parameter's state here."""
        at = self.start(member)
        for low, values in reader.read(*self.range_of(kind, member, key, start, stop)):
            yield low - at, values


def remember_names(
    model: nn.Module, names: dict[str, str], tiles: Mapping[str, str] | None = None
) -> None:
    """Let a model know the whole model's names (`whole_names`) for good, before other stages are
    taken out or layers cut.  Local.

    tiles: by the name of a tile's parameter, that of the whole one.
    """
    model.__dict__[WHOLE_NAMES], model.__dict__[OWN_NAMES] = names, {**names, **(tiles or {})}


def remember_same_names(model: nn.Module, names: tuple[str, ...]) -> None:
    """Let a model know which of its parameters have a name that another stage's parameter has too.
    Local.
    """
    model.__dict__[SAME_NAMES] = names


def refuse_same_names(model: nn.Module) -> None:
    """Raise NotBuiltError where two stages have parameters of one name that are not tied: on every
    rank.
    """
    if names := model.__dict__.get(SAME_NAMES):
        raise NotBuiltError(
            f"'{names[0]}' is a parameter of several stages, of which each trains its own: it "
            "cannot be saved.",
            "Its TiedLayerSpec ties other weights than this one, and a checkpoint has one value "
            "for a name.",
            "name it in tied_weight_attr too, or build the layer without it.",
        )


def whole_names(model: nn.Module) -> dict[str, str]:
    """Map each name in the state dict of the whole model, in its order, to the first name of the
    same tensor.
    """
    found: dict[str, str] | None = model.__dict__.get(WHOLE_NAMES)
    return state_names(model) if found is None else found


def state_names(model: nn.Module) -> dict[str, str]:
    """Map each name in the state dict, in its order, to the first name of the same parameter:
    itself, unless it is tied.
    """
    first: dict[int, str] = {}
    found: dict[str, str] = {}
    for prefix, module in model.named_modules(remove_duplicate=False):
        dot = f"{prefix}." if prefix else ""
        for name, param in module.named_parameters(recurse=False, remove_duplicate=False):
            found[dot + name] = first.setdefault(id(param), dot + name)
        for name, buffer in module.named_buffers(recurse=False, remove_duplicate=False):
            if is_persistent_buffer(module, name):
                found[dot + name] = first.setdefault(id(buffer), dot + name)
    return found


def persistent_buffers(model: nn.Module) -> dict[str, Tensor]:
    """Map names to the buffers that a state dict would hold, each once."""
    found: dict[str, Tensor] = {}
    for prefix, module in model.named_modules():
        for name, buffer in module.named_buffers(recurse=False):
            if is_persistent_buffer(module, name):
                found[f"{prefix}.{name}" if prefix else name] = buffer
    return found


def names_of(runtime: Runtime) -> list[str]:
    """Return the first names of the parameters that this rank's stage has."""
    piece = ModelPiece.of(runtime)
    return [piece.name(member) for group in runtime.groups for member in group.members]


def names_of_all(runtime: Runtime) -> frozenset[str]:
    """Return the first names of the parameters of all pieces.  Collective in the world."""
    return _of_all(runtime, names_of(runtime), "the names of all stages")


def frozen_names(runtime: Runtime) -> frozenset[str]:
    """Return the names in the whole model's state dict of parameters that are not trained.
    Collective in the world.
    """
    piece = ModelPiece.of(runtime)
    members = [member for group in runtime.groups for member in group.members]
    own = [piece.name(member) for member in members if not member.param.requires_grad]
    frozen = _of_all(runtime, own, "what all stages do not train")
    return frozenset(name for name, first in whole_names(runtime.model).items() if first in frozen)


def _of_all(runtime: Runtime, own: list[str], what: str) -> frozenset[str]:
    """Return the names that the stages say, all together.  Collective in the world where there are
    several.
    """
    if "pp" not in runtime.comm.along:
        return frozenset(own)
    found = run_and_gather(runtime.comm.whole, what, lambda: json.dumps(own))
    return frozenset(name for each in found for name in json.loads(each))


def earlier_stages(mesh: Mesh) -> list[int]:
    """Return the first rank of each stage before this rank's."""
    return [replace(mesh, rank=0).rank_at(pp=stage) for stage in range(mesh.coordinates["pp"])]


def predecessor(manifest: Manifest, mesh: Mesh) -> int | None:
    """Return the saved rank whose random numbers and buffers this rank goes on with: the one that
    saw the same data.

    None where data were shared out among another number of ranks, or there were other stages.
    Along "tp" random states are equal.
    """
    try:
        saved = mesh_of(manifest.mesh or {"dp_shard": manifest.world_size}).on_world(
            manifest.world_size
        )
    except UsageError:  # axes of a later version
        return None
    if (saved.pp, saved.data_size, saved.sp) != (mesh.pp, mesh.data_size, mesh.sp):
        return None
    here = mesh.coordinates
    replicate, shard = divmod(mesh.data_index, saved.dp_shard)
    tp = here["tp"] if saved.tp == mesh.tp else 0
    return saved.rank_at(
        pp=here["pp"], dp_replicate=replicate, dp_shard=shard, sp=here["sp"], tp=tp
    )
