"""A model whose parameters have every kind of split along "tp" and "pp".

Its steps are the same on every mesh: its gradients are given, element by element of the whole
parameters, and the mesh only decides where an element is stored. Ranks compute nothing along the
axes. Tests check where states are stored and the contents of files.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from deepseek_zero.base.device import state_names
from deepseek_zero.base.mesh import Mesh
from deepseek_zero.checkpoint.piece import remember_names
from deepseek_zero.planner.split import Split, set_split, split_of

WIDTH, HIDDEN, VOCABULARY, BLOCKS = 8, 10, 11, 4


class Held(nn.Module):
    """Parameters by name. The output has the gradients passed to `forward`."""

    def __init__(self, **shapes: tuple[int, ...]) -> None:
        super().__init__()
        for name, shape in shapes.items():
            self.register_parameter(name, nn.Parameter(torch.randn(shape)))

    def forward(self, gradients: dict[str, Tensor], prefix: str) -> Tensor:
        own = {name: param for name, param in self.named_parameters() if param.requires_grad}
        return torch.stack(
            [(param * gradients[f"{prefix}.{name}"]).sum() for name, param in own.items()]
        ).sum()


class Absent(nn.Module):
    """Replaces a module that belongs to another stage."""

    def forward(self, gradients: dict[str, Tensor], prefix: str) -> Tensor:
        return torch.zeros(())


class SplitModel(nn.Module):
    """An embedding, blocks, a norm declared before them, and a head tied to the embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = Held(weight=(VOCABULARY, WIDTH), scale=())
        self.norm = Held(weight=(WIDTH,), bias=(WIDTH,))
        self.blocks = nn.ModuleList(
            Held(
                qkv=(3 * WIDTH, WIDTH),
                fused=(WIDTH, 3 * WIDTH),
                kv=(4, WIDTH),
                down=(WIDTH, HIDDEN),
                kernel=(3, HIDDEN, 2, 3),
                bias=(HIDDEN,),
                frozen=(WIDTH, 2),
            )
            for _ in range(BLOCKS)
        )
        for block in self.blocks:
            block.get_parameter("frozen").requires_grad_(False)
        self.head = Held(weight=(VOCABULARY, WIDTH))
        self.head.weight = self.embed.weight
        self.norm.register_buffer("count", torch.zeros(2))
        self.uses_head = False

    def forward(self, gradients: dict[str, Tensor]) -> Tensor:
        total = self.embed(gradients, "embed") + self.norm(gradients, "norm")
        for number, block in enumerate(self.blocks):
            total = total + block(gradients, f"blocks.{number}")
        if self.uses_head:  # the copy on the last stage gets the sum over tied parameters
            total = total + self.head(gradients, "head")
        return total


def splits_of(model: nn.Module, tp: int, *, pads: bool) -> dict[str, Split]:
    """Return how the parameters of a whole model are split over `tp` ranks."""
    return {
        name: _split_of(name.rpartition(".")[2], tuple(param.shape), tp, pads=pads)
        for name, param in model.named_parameters()
    }


def _split_of(leaf: str, shape: tuple[int, ...], tp: int, *, pads: bool) -> Split:
    if leaf == "kv":  # 2 heads, so that each of 4 ranks shares one with another rank
        edges = [4 * rank // tp for rank in range(tp + 1)]
        rows = [
            (edges[rank], edges[rank + 1]) if tp < 4 else (rank // 2 * 2, rank // 2 * 2 + 2)
            for rank in range(tp)
        ]
        return (
            Split("split", shape, 0, tuple((each,) for each in rows))
            if tp > 1
            else Split.whole("equal", shape, tp)
        )
    # Padded to a multiple: the last range ends after the end of the table.
    if leaf == "weight" and len(shape) == 2:
        each = -(-shape[0] // tp)
        most = each * tp if pads else shape[0]
        return Split(
            "split",
            shape,
            0,
            tuple(((rank * each, min(most, rank * each + each)),) for rank in range(tp)),
        )
    if leaf in ("qkv", "fused"):  # three blocks, split unevenly into heads of 2
        dim = 0 if leaf == "qkv" else 1
        heads = [4 // tp + (rank < 4 % tp) for rank in range(tp)]
        ends = [2 * sum(heads[: rank + 1]) for rank in range(tp)]
        return Split(
            "split",
            shape,
            dim,
            tuple(
                tuple((WIDTH * block + end - 2 * many, WIDTH * block + end) for block in range(3))
                for many, end in zip(heads, ends, strict=True)
            ),
        )
    if leaf in ("down", "kernel"):
        edges = [HIDDEN * rank // tp for rank in range(tp + 1)]
        return Split(
            "split", shape, 1, tuple(((edges[rank], edges[rank + 1]),) for rank in range(tp))
        )
    return Split.whole("partial" if leaf == "bias" else "equal", shape, tp)


def cut(whole: Tensor, split: Split, coordinate: int) -> Tensor:
    """Return one rank's part, with zeros after the end of the whole tensor."""
    if split.kind != "split":
        return whole.clone()
    found = torch.zeros(split.local_shape(coordinate))
    reached = 0
    for start, stop in split.ranges[coordinate]:
        end = min(stop, split.shape[split.dim])
        if start < end:
            found.narrow(split.dim, reached, end - start).copy_(
                whole.narrow(split.dim, start, end - start)
            )
        reached += stop - start
    return found


@dataclass
class MadePiece:
    """One rank's piece of the model, and its gradients."""

    model: SplitModel
    splits: dict[str, Split]
    mesh: Mesh

    def gradients(self, step: int) -> dict[str, Tensor]:
        """Return this rank's gradients by name.

        For partial sums along "tp" the first is the whole gradient and the others are zero.
        """
        found, coordinate = {}, self.mesh.coordinates["tp"]
        for name, split in self.splits.items():
            generator = torch.Generator().manual_seed(1000 * step + sum(map(ord, name)))
            whole = torch.randn(split.shape, generator=generator)
            others = [
                each for each in split.summands(coordinate, self.mesh.tp) if each < coordinate
            ]
            found[name] = cut(whole, split, coordinate) * (0 if others else 1)
        found["head.weight"] = found["embed.weight"]
        return found


def piece_of(mesh: Mesh, seed: int = 5, *, pads: bool = True) -> MadePiece:
    """Return the piece of one rank; whole values depend only on the seed.

    pads: pad the embedding to a multiple of "tp"; otherwise split it unevenly.
    """
    torch.manual_seed(seed)
    model = SplitModel()
    model.norm.get_buffer("count").fill_(seed)
    splits = splits_of(model, mesh.tp, pads=pads)
    remember_names(model, state_names(model))
    if mesh.tp > 1:
        for name, param in model.named_parameters():
            param.data = cut(param.data, splits[name], mesh.coordinates["tp"])
            set_split(param, splits[name])
    if mesh.pp > 1:
        _take_stage(model, mesh)
    return MadePiece(model, splits, mesh)


def _take_stage(model: SplitModel, mesh: Mesh) -> None:
    stage, each = mesh.coordinates["pp"], BLOCKS // mesh.pp
    for number in range(BLOCKS):
        if number // each != stage:
            model.blocks[number] = Absent()
    if stage < mesh.pp - 1:
        model.norm, model.head = Absent(), Absent()  # type: ignore[assignment]
    if stage == mesh.pp - 1:
        model.uses_head = True
        # The copy keeps its first name, as in a stage that is extracted from a model.
        if mesh.pp == 2:
            del model.embed.scale
            model.embed.forward = Absent().forward  # type: ignore[method-assign]
            return
        copy = nn.Parameter(model.embed.weight.data.clone())
        if (split := split_of(model.embed.weight)) is not None:
            set_split(copy, split)
        model.head.weight = copy
    if stage > 0:
        model.embed = Absent()  # type: ignore[assignment]
