"""How a reduction is cut into messages, how they are written, and the buffers that receive them."""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import torch

from ..base.device import PerDevice
from ..precision.codecs import Blocks, Cast, Codec
from .layout import BLOCK

# Elements of a sum over ranks that are added at a time: 1 MiB of fp32 stays in a core's cache; a
# GPU wants few, large kernels.
SUM_TILE_NUMEL = PerDevice(cpu=1 << 18, accelerator=1 << 24)
MAX_IN_FLIGHT = 2  # of messages of one reduction, or of units that exchange differences


class Messages(NamedTuple):
    """How one reduction is cut.  numel: elements of a message for each rank.  in_flight: messages
    under way at once.
    """

    numel: int
    in_flight: int


@cache
def messages_of(slice_numel: int, ranks: int, bucket_numel: int, most: int = 1 << 62) -> Messages:
    """A message is a slice, or as much of it as a bucket over all ranks allows, and `most`; the
    next one travels while one is waited for and added up.
    """
    numel = min(max(BLOCK, bucket_numel // ranks // BLOCK * BLOCK), slice_numel, most)
    count = -(-slice_numel // max(1, numel))
    most_in_flight = 1 if ranks == 1 else MAX_IN_FLIGHT
    return Messages(numel, min(count, most_in_flight))


@cache
def hop_wires(
    wire: Codec, summand: torch.dtype, near: int, inside: Codec | None
) -> tuple[Codec, Codec]:
    """Return how gradients are sent among the ranks of a host, and how the hosts' sums are; of one
    hop the first holds.

    Codes are for links between hosts: inside one, summands travel as they are collected, unless
    `inside` says how.
    near: as `GroupPlan` has it.
    """
    if near == 1:
        return wire, wire
    return (
        (inside or Cast(summand), wire) if isinstance(wire, Blocks) else (wire, Cast(torch.float32))
    )


@cache
def message_rooms(
    numel: int,
    wires: tuple[Codec, Codec],
    ranks: int,
    near: int,
    *,
    in_place: bool,
    near_in_place: bool,
    far_in_place: bool,
) -> tuple[tuple[torch.dtype, int], ...]:
    """Return the buffers, by dtype and elements, in which the sum of one message is received: one
    inbox, or by host the hosts' sums, their codes if they are coded, then the inboxes of both hops.

    numel, wires: elements that each rank sends to each, and how (`hop_wires`).  near: as
    `GroupPlan` has it.
    in_place: the ranks read each other's pieces; near_in_place, far_in_place: those of a host, and
    those with one place on their hosts.
    """
    (dtype, length), (far_dtype, far_length) = ((wire.dtype, wire.length(numel)) for wire in wires)
    if near == 1:
        return () if in_place else ((dtype, length * (ranks - 1)),)
    hosts = ranks // near
    found = [(torch.float32, numel * hosts)]
    found += [(far_dtype, far_length * hosts)] if isinstance(wires[1], Blocks) else []
    found += [] if near_in_place else [(dtype, length * hosts * (near - 1))]
    found += [] if far_in_place else [(far_dtype, far_length * (hosts - 1))]
    return tuple(found)
