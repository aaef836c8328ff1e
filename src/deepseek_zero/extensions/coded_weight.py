"""Quantized weights: a rank stores codes and decodes them for every use."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from ..base.quantities import rounded_up
from ..comm.pending import Pending
from ..precision.codecs import Blocks, codec_scratch
from ..sharding.buffer import FlatBuffer
from ..sharding.coded_message import CodedMessage, gather_message
from ..sharding.weight_gather import WeightGather
from ..tiers.tier import Storage


class CodedStorage(Storage):
    """Storage that keeps elements quantized.

    Attributes:
        codec: The codec that quantizes written elements and dequantizes read ones.
        dtype: The dtype of dequantized elements.
    """

    has_elements = False

    def __init__(self, codec: Blocks, numel: int, dtype: torch.dtype, device: torch.device) -> None:
        """Allocate the quantized form of zeros.

        Args:
            codec: The codec that quantizes written elements and dequantizes read ones.
            numel: The number of elements that the storage holds.
            dtype: The dtype of dequantized elements.
            device: The device that holds the quantized elements.
        """
        super().__init__(torch.zeros(codec.length(numel), dtype=codec.dtype, device=device))
        self.codec = codec
        self.dtype = dtype
        self._numel = numel

    @property
    def numel(self) -> int:
        return self._numel

    def read(self, low: int, high: int) -> Tensor:
        """Dequantize elements [low, high) into a new tensor.

        Args:
            low: The first element of the range.
            high: The end of the range.

        Returns:
            A flat tensor of ``high - low`` elements.
        """
        start, stop = self._blocks(low, high)
        found = torch.empty(stop - start, dtype=self.dtype, device=self.memory.device)
        scratch = codec_scratch(self.codec, stop - start, found.device)
        self.codec.decode(self.memory, start, stop, found, scratch)
        return found[low - start : high - start]

    def read_now(self, low: int, high: int) -> Tensor:
        """Dequantize elements [low, high) into a new tensor, exactly as `read` does.

        Args:
            low: The first element of the range.
            high: The end of the range.

        Returns:
            A flat tensor of ``high - low`` elements.
        """
        return self.read(low, high)

    @contextmanager
    def writing(self, low: int, high: int) -> Iterator[Tensor]:
        """Return a context that yields elements [low, high), and quantizes them at its end.

        The codec quantizes blocks of elements. If the range ends within a block, the rest of the
        block is quantized again, which may change its values.

        Args:
            low: The first element of the range.
            high: The end of the range.
        """
        start, stop = self._blocks(low, high)
        held = self.read(start, stop)
        yield held[low - start : high - start]
        self.codec.encode(
            held, self.memory, codec_scratch(self.codec, stop - start, held.device), start
        )

    def _blocks(self, low: int, high: int) -> tuple[int, int]:
        """Return the range of all blocks that overlap [low, high), in elements."""
        granule = self.codec.granule
        return low // granule * granule, rounded_up(high, granule)


class CodedWeight(WeightGather):
    """All-gathers a weight whose slices are stored in quantized form.

    Each rank sends its quantized slice, and every rank dequantizes the gathered weight.

    Args:
        group: The parameter group to which the weight belongs.
    """

    def allocate(self, what: str) -> FlatBuffer:
        group = self.group
        spec = group.plan.weight
        numel = spec.numel(group.layout.padded_numel, group.layout.ranks)
        storage = CodedStorage(self._codec, numel, spec.dtype, group.comm_ctx.pool.device)
        return FlatBuffer(group.layout, spec, storage.memory, storage).counted(group.comm_ctx, what)

    def gather(self, whole: FlatBuffer, what: str) -> Pending:
        """Start to all-gather the quantized slices of all ranks.

        With one rank, nothing is sent.

        Args:
            whole: The output, which receives the dequantized weight.
            what: The name of the unit, used in error messages.

        Returns:
            A handle. Its `wait()` dequantizes the slices into `whole`, which may be read after
            that. `wait()` raises `PeerError` if another rank failed.

        Note:
            Collective: every rank of the shard group must call it in the same order.
        """
        comm_ctx = self.group.comm_ctx
        comm = comm_ctx.comm
        codes = self.group.weight.memory
        if comm.size == 1:
            message = CodedMessage(self._codec, codes, comm_ctx.pool)
        else:
            message = CodedMessage.of(whole.memory, self._codec, comm_ctx.pool)
            numel = self.group.layout.slice_numel
            message.piece(comm.rank * numel, (comm.rank + 1) * numel).copy_(codes)
        return gather_message(message, whole, comm_ctx, what)

    @property
    def _codec(self) -> Blocks:
        codec = self.group.plan.weight.stored_as
        assert codec is not None
        return codec
