"""The codecs and the receive buffers of sums that are formed host by host."""

from __future__ import annotations

from functools import cache

import torch

from ..precision.codecs import Blocks, Cast, Codec


@cache
def hop_wires(
    wire: Codec, summand: torch.dtype, near: int, inside: Codec | None
) -> tuple[Codec, Codec]:
    """Return the codecs of gradient messages within a host and between hosts.

    Quantization is meant for links between hosts. Inside a host, gradients are therefore sent in
    the dtype in which they are accumulated, unless `inside` is set. If `near` is 1, all messages
    use the first returned codec.

    Args:
        wire: The configured codec of gradients.
        summand: The dtype in which a rank accumulates its own gradient.
        near: The number of ranks per host if gradients are summed within each host first, else 1.
        inside: The codec inside a host, or None.

    Returns:
        The codec within a host, and the codec between hosts.
    """
    if near == 1:
        return wire, wire
    return (
        (inside or Cast(summand), wire) if isinstance(wire, Blocks) else (wire, Cast(torch.float32))
    )


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
