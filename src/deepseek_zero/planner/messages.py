"""The sizes and codecs of reduction messages, and their receive buffers."""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import torch

from ..base.device import PerDevice
from ..precision.codecs import Codec
from .layout import BLOCK

# The number of elements that a sum over ranks adds at a time. 1 MiB of fp32 stays in the cache of a
# core; a GPU needs few, large kernels.
SUM_TILE_NUMEL = PerDevice(cpu=1 << 18, accelerator=1 << 24)
# Maximum messages of one reduction in flight, or groups that exchange coded weight differences
MAX_IN_FLIGHT = 2


class Messages(NamedTuple):
    """The size and the number of the messages of one gradient reduction.

    Attributes:
        numel: The number of elements that one message contains for each rank.
        in_flight: The number of messages in flight at the same time.
    """

    numel: int
    in_flight: int


@cache
def messages_of(slice_numel: int, ranks: int, bucket_numel: int, most: int = 1 << 62) -> Messages:
    """Return how a reduction is cut into messages: a whole slice, or parts that fit a bucket.

    The next message is sent while the last one is received and added.

    Args:
        slice_numel: The elements of a slice.
        ranks: The number of ranks that exchange messages.
        bucket_numel: The largest number of elements of one message over all ranks.
        most: A further limit of the elements of a message to one rank, as that of a codec.
    """
    numel = min(max(BLOCK, bucket_numel // ranks // BLOCK * BLOCK), slice_numel, most)
    count = -(-slice_numel // max(1, numel))
    most_in_flight = 1 if ranks == 1 else MAX_IN_FLIGHT
    return Messages(numel, min(count, most_in_flight))


def inbox_sizes(
    numel: int, wire: Codec, ranks: int, *, in_place: bool
) -> tuple[tuple[torch.dtype, int], ...]:
    """Return the dtype and the number of elements of each receive buffer for one message.

    Args:
        numel: The number of elements that each rank sends to each other rank.
        wire: The codec in which the elements are sent.
        ranks: The number of ranks that exchange messages.
        in_place: Whether all ranks read each other's memory, so they need no receive buffer.
    """
    if in_place:
        return ()
    return ((wire.dtype, wire.length(numel) * (ranks - 1)),)
