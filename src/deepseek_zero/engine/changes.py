"""Changes to a model that a configuration requests.

They are made in place, before the model is planned.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from torch import nn

from .. import activations, attention, extensions
from ..activations.recompute import RecomputeSettings
from ..activations.tiles import TileSettings
from ..base.errors import NotBuiltError
from ..base.log import log_once
from ..base.mesh import Mesh
from ..checkpoint.piece import remember_names, whole_names
from ..comm.agreement import AllRanks
from ..comm.collectives import Comm
from ..optim.shard_set import refuse_parts
from ..planner.auto_wrap_policy import ModelShape
from ..planner.split import refuse_other_cuts
from ..planner.update import ParamGroupPlan
from .optimizer import OptimizerParts
from .settings import policy_of, tile_settings_of

if TYPE_CHECKING:  # as in engine.py
    from ..config import Config


def change_whole(
    model: nn.Module,
    comm: Comm,
    recomputing: RecomputeSettings,
    sparse: attention.SparseAttention | None,
) -> None:
    """Enable recomputation and sparse attention in a model before it is cut along mesh axes.

    Args:
        model: The whole model; changed in place.
        comm: The communicator of the ranks that call this function.
        recomputing: Which activations are recomputed and where checkpoints are kept.
        sparse: The sparse attention that replaces the model's attention; None to keep it.

    Note:
        Collective: every rank must call it. An error on one rank is raised on all.
    """
    if recomputing != RecomputeSettings():
        with AllRanks(comm, "checkpoints of layers"):
            activations.route_checkpoints(model)
        if recomputing.policy is not None:
            with AllRanks(comm, "recomputation of layers"):
                activations.recompute_layers(model)
    if sparse is None:
        return
    with AllRanks(comm, "sparse attention"):
        if attention.is_of_transformers(model):
            attention.attend_sparsely(model, sparse)
        else:
            log_once(
                f"sparse_attention: {type(model).__name__} is not a transformers model; call "
                "engine.sparse_attention(query, key, value) for the configured attention."
            )


def change_piece(model: nn.Module, comm: Comm, config: Config) -> None:
    """Apply the configured changes to the part of the model that this rank holds.

    Args:
        model: The layers, or slices of layers, of this rank; changed in place.
        comm: The communicator of the ranks that call this function.
        config: The run's configuration, from which the settings are read.

    Note:
        Collective: every rank must call it. An error on one rank is raised on all.
    """
    tiles = tile_settings_of(config)
    if tiles.mlp is not None:
        with AllRanks(comm, "tiles of feed-forward layers"):
            activations.tile_mlps(model, tiles.mlp)
    if tiles.loss is not None:
        with AllRanks(comm, "tiles of the loss"):
            activations.tile_loss(model, tiles.loss)
    if config.zero_optimization.tile_above is not None:
        with AllRanks(comm, "layers that become tiles"):
            _cut_large_layers(model, config)


def _cut_large_layers(model: nn.Module, config: Config) -> None:
    """Cut the layers above `zero_optimization.tile_above` into tiles."""
    choice = _choose_tiles(config, model)
    for cut in choice.cuts:
        if cut.weight.is_meta:
            raise NotBuiltError(
                f"zero_optimization.tile_above would split '{cut.name}', which has no values yet "
                "(meta device).",
                "Initialized tile by tile, its values would differ from those of the whole layer.",
                "build the model under `with deepseek_zero.zero.Init():`, or load its weights "
                "(zero.load_weights).",
            )
    if choice.left:
        log_once(
            f"{len(choice.left)} parameters above zero_optimization.tile_above are not split, "
            "among "
            f"them '{choice.left[0]}': only torch's own Linear and Embedding are split.",
            logging.WARNING,
        )
    if choice.cuts:
        names = dict(whole_names(model))
        remember_names(model, names, choice.cut())


def plan_large_layers(config: Config, model: nn.Module, parts: OptimizerParts) -> OptimizerParts:
    """Plan how large layers are cut into tiles, on a model on the meta device.

    Args:
        config: The run's configuration, from which the settings are read.
        model: A copy of the model on the meta device, whose large layers are cut in place.
        parts: The parts of the optimizer; its parameter groups name whole parameters.

    Returns:
        The same parts, whose parameter groups name the tiles of the layers that were cut.
    """
    choice = _choose_tiles(config, model)
    wholes = choice.cut()
    tiles = dict[str, set[str]]()
    for name in (name for name, _ in model.named_parameters() if name in wholes):
        tiles.setdefault(wholes[name], set()).add(name)

    def renamed(group: ParamGroupPlan) -> ParamGroupPlan:
        return replace(
            group, names=frozenset(each for name in group.names for each in tiles.get(name, {name}))
        )

    found = replace(parts, planned=tuple(map(renamed, parts.planned)))
    refuse_whole_states(found, wholes)
    return found


def refuse_cuts(parts: OptimizerParts, model: nn.Module, shape: ModelShape, tp: int) -> None:
    """Raise an error if a parameter is cut in a way that its optimizer or the mesh does not allow.

    Args:
        parts: The parts of the optimizer, with the names of its parameters.
        model: This rank's piece of the model.
        shape: The shapes of its parameters, and how they are cut.
        tp: The number of ranks along "tp".
    """
    refuse_whole_states(parts, shape.wholes)
    refuse_split_states(parts, model)
    refuse_other_cuts(shape.cuts, tp)


def refuse_whole_states(parts: OptimizerParts, tiles: Mapping[str, str]) -> None:
    """Raise `NotBuiltError` if an optimizer needs a whole matrix that is cut into tiles.

    Args:
        parts: The parts of the optimizer, with the names of its parameters.
        tiles: The name of the whole parameter, by the name of each tile.
    """
    for group in parts.planned:
        cut = sorted(group.names & tiles.keys())
        if group.is_uncut and cut:
            raise NotBuiltError(
                f"zero_optimization.tile_above splits '{tiles[cut[0]]}', but "
                f"{getattr(parts.cls, '__name__', '')} needs whole parameters.",
                "Its update of a tile would differ from that of the whole parameter.",
                "remove tile_above, or train that parameter with an optimizer that works "
                "element by element.",
            )


def refuse_split_states(parts: OptimizerParts, model: nn.Module) -> None:
    """Raise `NotBuiltError` if an optimizer needs a whole tensor that is split along "tp".

    Args:
        parts: The parts of the optimizer, with the names of its parameters.
        model: The model, or this rank's piece of it; the split is recorded on its parameters.
    """
    trained = [(name, param) for name, param in model.named_parameters() if param.requires_grad]
    for group in parts.planned:
        if group.is_uncut:
            named = [(name, param) for name, param in trained if name in group.names]
            refuse_parts(getattr(parts.cls, "__name__", ""), named)


def refuse_changes_on(config: Config, mesh: Mesh) -> None:
    """Raise `NotBuiltError` if changes conflict with each other or with an axis.

    Args:
        config: The run's configuration, from which the settings are read.
        mesh: The device mesh: the size of each axis and this rank's coordinates.

    Raises:
        NotBuiltError: Two changes affect one layer, or a change affects a layer that an axis cuts.
    """
    tiles = tile_settings_of(config)
    if tiles != TileSettings() and mesh.pp > 1:
        raise NotBuiltError(
            "activation_checkpointing.tiled_loss and tiled_mlp on a mesh with stages (pp) are not "
            "built.",
            "A stage runs the model's own forward with placeholders for the blocks of other "
            "stages.",
            "remove them, or pp.",
        )
    if config.zero_optimization.tile_above is not None and tiles != TileSettings():
        raise NotBuiltError(
            "zero_optimization.tile_above with activation_checkpointing.tiled_loss or tiled_mlp.",
            "These read a layer's weight directly, or call the layer for a part of the tokens at "
            "a time.",
            "remove one of them.",
        )
    for axis, size in (("tp", mesh.tp), ("pp", mesh.pp)):
        if size > 1 and config.zero_optimization.tile_above is not None:
            raise NotBuiltError(
                f"zero_optimization.tile_above on a mesh with {axis} = {size}.",
                "Layers that are split over tp are tiles already, and stages of a pipeline share "
                "whole weights.",
                f"remove tile_above, or {axis}.",
            )


def _choose_tiles(config: Config, model: nn.Module) -> extensions.CutChoice:
    limit = config.zero_optimization.tile_above
    assert limit is not None
    return extensions.choose_cuts(model, limit, policy_of(config).weight_dtype)
