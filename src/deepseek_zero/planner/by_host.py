"""The receive buffers of sums that are formed host by host."""

from __future__ import annotations

from functools import cache

import torch

from ..precision.codecs import Blocks, Codec


@cache
def hop_buffer_sizes(
    numel: int,
    wires: tuple[Codec, Codec],
    ranks: int,
    near: int,
    *,
    near_in_place: bool,
    far_in_place: bool,
) -> tuple[tuple[torch.dtype, int], ...]:
    """Return the buffers for the sum of one message over two hops, as (dtype, elements).

    They are the sums of hosts, their codes if they are coded, and the inboxes of both hops.

    Args:
        numel: The number of elements that each rank sends to each other rank.
        wires: The codecs of both hops (`hop_wires`).
        ranks: The number of ranks that exchange messages.
        near: The number of ranks per host.
        near_in_place: The ranks of one host read each other's memory, so there is no inbox.
        far_in_place: The ranks with the same local rank read each other's memory across hosts.
    """
    (dtype, length), (far_dtype, far_length) = ((wire.dtype, wire.length(numel)) for wire in wires)
    hosts = ranks // near
    found = [(torch.float32, numel * hosts)]
    if isinstance(wires[1], Blocks):
        found.append((far_dtype, far_length * hosts))
    if not near_in_place:
        found.append((dtype, length * hosts * (near - 1)))
    if not far_in_place:
        found.append((far_dtype, far_length * (hosts - 1)))
    return tuple(found)
