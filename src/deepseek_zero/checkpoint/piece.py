"""Relate the piece of the model that one rank runs to the whole model.

Checkpoints describe only the whole model. A rank along "tp" has parts of its parameters, and a rank
along "pp" has some of its parameters. This module translates names, shapes and ranges, and finds
the saved rank whose random state a rank continues.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from torch import Tensor, nn

from ..base.device import is_persistent_buffer, state_names
from ..base.errors import NotBuiltError, UsageError
from ..base.mesh import Mesh, mesh_of
from ..planner.layout import Shape
from ..planner.rows import rows_of
from ..planner.split import split_of
from ..sharding.param_info import ParamInfo
from ..sharding.runtime import Runtime
from .boxes import ParamPart, PlacedValues
from .format import Manifest, StateRange, StateReader
from .lockstep import run_and_gather

WHOLE_NAMES = "_zero_whole_names"
OWN_NAMES = "_zero_own_names"
SAME_NAMES = "_zero_same_names"


@dataclass(frozen=True)
class ModelPiece:
    """The part of the model that one rank runs: its pipeline stages and its "tp" shards.

    A local parameter may be some rows of a parameter of the whole model (planner/rows.py). In that
    case several local parameters map to the same name.

    Attributes:
        names: Maps a local name to the first name of the parameter in the whole model. A parameter
            that is missing here has the same name in both.
        coordinate: The rank's coordinate along "tp".
    """

    names: Mapping[str, str]
    coordinate: int

    @classmethod
    def of(cls, runtime: Runtime) -> ModelPiece:
        """Return the part of the model that a rank's runtime holds."""
        names = runtime.model.__dict__.get(OWN_NAMES) or {}
        return cls(names, runtime.plan.mesh.coordinates["tp"])

    def name(self, member: ParamInfo) -> str:
        """Return the first name of a parameter in the whole model."""
        return self.names.get(member.name, member.name)

    def part(self, member: ParamInfo) -> ParamPart | None:
        """Return the part of a parameter on this rank; None if it is the whole parameter."""
        return ParamPart.of(split_of(member.param), self.coordinate)

    def shape(self, member: ParamInfo) -> Shape:
        """Return the shape that a local parameter has in the whole model."""
        split = split_of(member.param)
        rows = rows_of(member.param)
        if rows is not None:
            return rows.shape
        return member.slot.shape if split is None else split.shape

    def start(self, member: ParamInfo) -> int:
        """Return the position of a local parameter's first element in the saved parameter."""
        rows = rows_of(member.param)
        return 0 if rows is None else rows.start

    def shapes(self, runtime: Runtime) -> dict[str, Shape]:
        """Return the shapes of the whole parameters of this rank's stage, by first name."""
        return {
            self.name(member): self.shape(member)
            for group in runtime.groups
            for member in group.members
        }

    def range_of(self, kind: str, member: ParamInfo, key: str, start: int, stop: int) -> StateRange:
        """Return the range of a checkpoint that contains elements [start, stop) of a local state.

        Args:
            kind: Kind of state, for example "weight", "buffer" or "moment".
            member: Parameter of this rank's model.
            key: The optimizer's name of the state.
            start: First element of the local parameter.
            stop: Index after the last element of the range.

        Returns:
            The range in terms of the whole model's parameter.
        """
        at = self.start(member)
        return StateRange(
            kind, self.name(member), key, at + start, at + stop, part=self.part(member)
        )

    def read(
        self, reader: StateReader, kind: str, member: ParamInfo, key: str, start: int, stop: int
    ) -> PlacedValues:
        """Yield elements [start, stop) of a local parameter's state.

        Args:
            reader: Open checkpoint to read from.
            kind: Kind of state, for example "weight", "buffer" or "moment".
            member: Parameter of this rank's model.
            key: The optimizer's name of the state.
            start: First element of the local parameter.
            stop: Index after the last element of the range.

        Yields:
            Pairs of local position and flat values, in order.
        """
        at = self.start(member)
        for low, values in reader.read(self.range_of(kind, member, key, start, stop)):
            yield low - at, values


def remember_names(
    model: nn.Module, names: dict[str, str], tiles: Mapping[str, str] | None = None
) -> None:
    """Store the whole model's names in a model, for `whole_names`.

    It must be called before other stages are removed or layers are cut.

    Args:
        model: The model of this rank.
        names: Maps each name in the whole state dict to the first name of the same tensor.
        tiles: Maps the name of a tile's parameter to the name of the whole parameter.
    """
    model.__dict__[WHOLE_NAMES] = names
    model.__dict__[OWN_NAMES] = {**names, **(tiles or {})}


def remember_same_names(model: nn.Module, names: tuple[str, ...]) -> None:
    """Store the names that untied parameters of several stages have in common.

    Args:
        model: The model of this rank.
        names: Names that occur on more than one stage.
    """
    model.__dict__[SAME_NAMES] = names


def refuse_same_names(model: nn.Module) -> None:
    """Raise an error if several stages have an untied parameter of the same name.

    Raises:
        NotBuiltError: There is such a parameter. It is raised on every rank.
    """
    if names := model.__dict__.get(SAME_NAMES):
        raise NotBuiltError(
            f"'{names[0]}' is a parameter of several stages, and each stage trains its own copy: "
            "it cannot be saved.",
            "Its TiedLayerSpec ties other weights than this one, and a checkpoint has one value "
            "for a name.",
            "name it in tied_weight_attr too, or build the layer without it.",
        )


def whole_names(model: nn.Module) -> dict[str, str]:
    """Return, for each name in the whole model's state dict, the first name of its tensor."""
    found: dict[str, str] | None = model.__dict__.get(WHOLE_NAMES)
    return state_names(model) if found is None else found


def persistent_buffers(model: nn.Module) -> dict[str, Tensor]:
    """Return the buffers that a state dict would contain by name, each buffer once."""
    found: dict[str, Tensor] = {}
    for prefix, module in model.named_modules():
        for name, buffer in module.named_buffers(recurse=False):
            if is_persistent_buffer(module, name):
                found[f"{prefix}.{name}" if prefix else name] = buffer
    return found


def names_of(runtime: Runtime) -> list[str]:
    """Return the first names of the parameters of this rank's stage."""
    return list(ModelPiece.of(runtime).shapes(runtime))


def names_of_all(runtime: Runtime) -> frozenset[str]:
    """Return the first names of the parameters of all stages.

    Note:
        Collective: every rank of the world must call it.
    """
    return _of_all(runtime, names_of(runtime), "the names of all stages")


def frozen_names(runtime: Runtime) -> frozenset[str]:
    """Return the names of frozen parameters in the whole model's state dict.

    Note:
        Collective: every rank of the world must call it.
    """
    piece = ModelPiece.of(runtime)
    members = [member for group in runtime.groups for member in group.members]
    own = [piece.name(member) for member in members if not member.param.requires_grad]
    frozen = _of_all(runtime, own, "what all stages do not train")
    return frozenset(name for name, first in whole_names(runtime.model).items() if first in frozen)


def _of_all(runtime: Runtime, own: list[str], what: str) -> frozenset[str]:
    """Return the union of the names of all stages.

    If there are several stages, every rank of the world must call it.
    """
    if "pp" not in runtime.comm.along:
        return frozenset(own)
    found = run_and_gather(runtime.comm.whole, what, lambda: own)
    return frozenset(name for names in found for name in names)


def earlier_stages(mesh: Mesh) -> list[int]:
    """Return the first rank of each stage before this rank's stage."""
    return [replace(mesh, rank=0).rank_at(pp=stage) for stage in range(mesh.coordinates["pp"])]


def predecessor(manifest: Manifest, mesh: Mesh) -> int | None:
    """Return the saved rank whose random state and buffers this rank continues.

    It is the rank that processed the same part of the data. Random states are equal along "tp".

    Args:
        manifest: The manifest of the checkpoint.
        mesh: The mesh of this run.

    Returns:
        The saved rank, or None if the data were divided among another number of ranks or the number
        of stages differs.
    """
    try:
        saved = mesh_of(manifest.mesh or {"dp_shard": manifest.world_size}).on_world(
            manifest.world_size
        )
    except UsageError:  # the axes of a later version
        return None
    if (saved.pp, saved.data_size, saved.sp) != (mesh.pp, mesh.data_size, mesh.sp):
        return None
    here = mesh.coordinates
    replicate, shard = divmod(mesh.data_index, saved.dp_shard)
    tp = here["tp"] if saved.tp == mesh.tp else 0
    return saved.rank_at(
        pp=here["pp"], dp_replicate=replicate, dp_shard=shard, sp=here["sp"], tp=tp
    )
