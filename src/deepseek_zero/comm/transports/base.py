"""What a transport is: two movements of flat tensors between ranks, from which every collective is made.

gloo.py sends point to point, nccl.py uses NCCL's own collectives, shared_memory.py lets ranks of one host read each
other's pages, and composed.py puts two of them together.  A transport knows nothing of the order of lanes or of errors
(collectives.py, context.py).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor

from ..ids import CollectiveId

POLL_SECONDS = 1.0  # how long a wait lasts before its caller is asked whether to go on


class ConnectionLost(Exception):
    """A transport cannot go on because another rank is gone.  Whatever else goes wrong keeps its own type."""


Wait = Callable[[], None]
Use = Callable[[Sequence[Tensor]], None]


class Transport(Protocol):
    """The two movements everything is made of.  `full` is (size * slice,), rank r's slice at [r*slice, (r+1)*slice).

    Both return how to wait: until the data is here, ConnectionLost if it never will be, TimeoutError after
    POLL_SECONDS; TimeoutError already where there is no room to begin, and then nothing has begun.
    """

    @property
    def reads_in_place(self) -> bool:
        """Whether other ranks' pieces can be read where they lie, so that `exchange` needs no inbox."""
        ...

    def empty(self, numel: int, dtype: torch.dtype) -> Tensor:
        """A buffer as it travels best; its contents are arbitrary."""
        ...

    def all_gather(self, full: Tensor, cid: CollectiveId) -> Wait:
        """Fill every slice of `full` with its owner's; this rank's own slice is already in place."""
        ...

    def exchange(self, pieces: Sequence[Tensor], inbox: Sequence[Tensor | None], cid: CollectiveId, use: Use) -> Wait:
        """Send pieces[s] to rank s; receive rank s's piece for us into inbox[s], its own entry ignored.

        use(received) is called once, when everything is here and no later than the wait's end: received[s] is inbox[s],
        or a view where that is None.
        """
        ...

    def is_read(self, tensor: Tensor) -> bool:
        """Whether another rank may still read this buffer, as far as this one has heard."""
        ...

    def wait_until_read(self, tensor: Tensor) -> None:
        """Return when no other rank reads this buffer any more; TimeoutError after a while, to be called again."""
        ...

    @property
    def expects(self) -> bool:
        """Whether something is under way here that `progress` may bring on."""
        ...

    def progress(self) -> None:
        """Do what can be done without waiting."""
        ...

    def end_engine(self, engine: str) -> None:
        """An engine is gone, and with it what was kept for its lanes."""
        ...


class CopyingTransport:
    """What most transports have in common: what was sent is nobody's any more, and nothing needs a push."""

    reads_in_place = False
    device = torch.device("cpu")

    def empty(self, numel: int, dtype: torch.dtype) -> Tensor:
        return torch.empty(numel, dtype=dtype, device=self.device)

    def is_read(self, tensor: Tensor) -> bool:
        return False

    @property
    def expects(self) -> bool:
        return False

    def wait_until_read(self, tensor: Tensor) -> None:
        pass

    def progress(self) -> None:
        pass

    def end_engine(self, engine: str) -> None:
        pass


class SingleRank(CopyingTransport):
    """A world of one: nothing travels."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def all_gather(self, full: Tensor, cid: CollectiveId) -> Wait:
        return no_wait

    def exchange(self, pieces: Sequence[Tensor], inbox: Sequence[Tensor | None], cid: CollectiveId, use: Use) -> Wait:
        use(pieces)
        return no_wait


def filled(inbox: Sequence[Tensor | None], own: Tensor, rank: int) -> list[Tensor]:
    """The inbox of a transport that copies: every entry is there, this rank's own is what it would send itself."""
    received = []
    for peer, box in enumerate(inbox):
        assert box is not None or peer == rank
        received.append(own if peer == rank or box is None else box)
    return received


def first_line(error: BaseException) -> str:
    """An error's own words: without the C++ file before them and the C++ frames behind them."""
    line = (str(error).splitlines() or [""])[0]
    return line[line.find("] ") + 2 if line.startswith("[") else 0 :][:200]


def once(wait: Wait, finish: Callable[[], object]) -> Wait:
    """Wait, then finish; a wait that timed out is called again."""

    def both() -> None:
        wait()
        finish()

    return both


def no_wait() -> None:
    """What there is to wait for when nothing travels."""
