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
    """Return the buffers that sum one message within each host, then between hosts.

    They hold the sums of hosts, their quantized form if they are sent quantized, and received
    messages.

    Args:
        numel: The number of elements that each rank sends to each other rank.
        wires: The codecs within a host and between hosts (`hop_wires`).
        ranks: The number of ranks that exchange messages.
        near: The number of ranks per host.
        near_in_place: Whether the ranks of one host read each other's memory, so they need no
            receive buffer.
        far_in_place: Whether the ranks with the same local rank read each other's memory across
            hosts.

    Returns:
        The dtype and the number of elements of each buffer.
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
