"""End each wait of an engine with the data, or with an error that names a rank.

A waiting rank writes its position into the flight recorder, and reads there whether another rank
can still come. All communicators of an engine use one `Waits`, so an error that a rank raises in
one group reaches the ranks that wait in the other groups.
"""

from __future__ import annotations

import functools
import sys
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Protocol, TypeVar

from ..base.errors import PeerError, UsageError
from .context import Lane, WorldContext
from .flight_recorder import KILLED_FIX, KILLED_WHY, LOST, raised_in
from .outside_calls import outside_call
from .transports import base
from .transports.base import ConnectionLost, Transport, first_line

T = TypeVar("T")
LIFE_SECONDS = 0.25  # Between checks of other hosts during a wait
HOP_SECONDS = 1e-3  # Timeout of a wait while a second hop may have to be issued


@dataclass(frozen=True)
class IssuedCollective:
    """One collective and its place in its lane.

    Attributes:
        lane: Lane in which it was issued.
        kind: The last part of the lane's name ("gather", "reduce" or "rows").
        sequence: Its number in the lane.
        what: Its name, the same on all ranks.
        ranks: The world ranks of its group.
        issued: The time when it was issued (`time.perf_counter`).
        arrived: The time when its data arrived; empty until then.
    """

    lane: Lane
    kind: str
    sequence: int
    what: str
    ranks: tuple[int, ...]
    issued: float
    arrived: list[float] = field(default_factory=list)


class Hops(Protocol):
    """Two-hop collectives, whose second hop is issued during any wait of the engine."""

    @property
    def is_open(self) -> bool:
        """Return whether a second hop is still to be issued."""

    def advance(self) -> None:
        """Issue all hops that can be issued, without waiting."""


@dataclass
class Waits:
    """End the waits of one engine, in all of its groups, with data or with an error.

    Attributes:
        world: The connections of this rank; None in a world of one rank.
        name: The name of the engine, part of the topic of its errors in the flight recorder.
        has_given_up: Whether a wait ended in an error that another rank caused.
        raised: The error of this rank that is posted; "" for none.
        survived: The last error that this rank has withdrawn, until it completes a collective that
            was issued later. Another rank that has posted the same error probably continues, too.
    """

    world: WorldContext | None = None
    name: str = "engine"
    has_given_up: bool = False
    raised: str = ""
    survived: str = ""
    _withdrawn: float = 0.0  # The time of the last withdrawal (`time.perf_counter`)
    _lone_call: str = ""  # The current call of `lone_call`
    # A list, because `len` of a WeakSet costs more than all its uses here
    _hops: list[weakref.ref[Hops]] = field(default_factory=list)

    @functools.cached_property
    def spans_hosts(self) -> bool:
        """Return whether ranks of the world are on several hosts.

        The value is cached, because every wait reads it.
        """
        return self.world is not None and not self.world.hosts.is_one

    # -- second hops

    def add_hops(self, hops: Hops) -> None:
        """Issue these second hops during waits, for as long as the object exists."""
        self._hops.append(weakref.ref(hops, self._hops.remove))

    def advance(self) -> None:
        """Issue the second hop of each two-hop collective whose first hop is complete."""
        for each in list(self._hops):
            if (hops := each()) is not None:
                hops.advance()

    @property
    def polls_often(self) -> bool:
        """Return whether a wait times out earlier than the transport's default."""
        return bool(self._hops) or self.spans_hosts

    def poll_interval(self) -> float:
        """Return the seconds after which a wait issues second hops or checks other hosts."""
        if any((hops := each()) is not None and hops.is_open for each in self._hops):
            return HOP_SECONDS
        return min(base.POLL_SECONDS, LIFE_SECONDS) if self.spans_hosts else base.POLL_SECONDS

    # -- errors that ranks post for each other

    def post_error(self, error: BaseException) -> None:
        """Post an error to the ranks that wait for this one.

        An error that another rank caused is not posted.
        """
        if self.world is not None and not self.has_given_up:
            first_line = (str(error).splitlines() or [""])[0]
            self.raised = f"{type(error).__name__}: {first_line}"[:300]
            self.world.recorder.post(raised_in(self.name), self.raised)

    def withdraw_error(self) -> None:
        """Withdraw a posted error, because this rank continues."""
        self.has_given_up = False
        if self.raised and self.world is not None:
            self.survived = self.raised
            self._withdrawn = time.perf_counter()
            self.raised = ""
            self.world.recorder.withdraw(raised_in(self.name))

    @contextmanager
    def lone_call(self, what: str) -> Iterator[None]:
        """Open a block of collectives that a program may call on some ranks by mistake.

        A wait in the block ends with `UsageError` if another member waits for this rank in a
        torch.distributed call. The other ranks of the engine raise at their next collective.
        """
        before = self._lone_call
        self._lone_call = what
        try:
            yield
        finally:
            self._lone_call = before

    # -- one wait

    def wait_or_raise(
        self,
        world: WorldContext,
        transport: Transport,
        issued: IssuedCollective,
        action: Callable[[], T],
    ) -> T:
        """Call `action` until it returns or there is evidence that it never will.

        An error other than `TimeoutError` and `ConnectionLost` is this rank's own (out of memory, a
        shape, a dtype). It keeps its type, and is posted to the ranks that wait for this one.

        Args:
            world: The connections of this rank.
            transport: The transport of the collective.
            issued: The collective that the rank waits for.
            action: Waits for other ranks, and raises `TimeoutError` after the poll interval.

        Returns:
            The result of `action`.

        Raises:
            PeerError: A rank has ended, or has issued another collective.
            UsageError: This rank is in a `lone_call` that another rank will not make.
        """
        if self.raised and sys.exception() is None:
            self.withdraw_error()  # the program has handled the error
        began = looked = time.perf_counter()
        while True:
            try:
                found = action()
                if self.survived and issued.issued > self._withdrawn:
                    self.survived = ""
                return found
            except TimeoutError:
                self.advance()
                now = time.perf_counter()
                error: PeerError | UsageError | None
                if self.polls_often and now - looked < base.POLL_SECONDS:
                    reads_store = now - began > base.POLL_SECONDS
                    error = None
                    if self.spans_hosts:
                        error = world.recorder.find_lost_host(reads_store=reads_store)
                    if error is None:
                        continue
                else:
                    looked = now
                    here = world.position(issued.lane.name, issued.sequence, issued.ranks)
                    error = world.recorder.find_desync(here, self.name, self.survived)
                    if error is None:
                        world.recorder.log_absent_ranks(here, self.name, now - began)
                        error = self._find_lone_call(world, issued.ranks)
                if error is not None:
                    self.has_given_up = True
                    raise error from None
                # While this rank waits for another host, it must still serve the ranks of its own
                # host
                transport.progress()
            except ConnectionLost as caught:
                raise self._connection_lost(world, issued.what, caught) from None
            except Exception as error:
                self.post_error(error)
                raise

    def _find_lone_call(self, world: WorldContext, ranks: tuple[int, ...]) -> UsageError | None:
        """Return the error of a `lone_call` that another rank will not make, or None."""
        what = self._lone_call
        if not what:
            return None
        calls = [(rank, outside_call(world.recorder, rank)) for rank in ranks if rank != world.rank]
        rank, call = next(((rank, call) for rank, call in calls if call), (-1, ""))
        if not call:
            return None
        error = UsageError(
            f"{what} was called on rank {world.rank}, but rank {rank} waits for it in "
            f"torch.distributed's {call}().",
            f"{what} gathers sharded parameters, so every rank must call it.",
            f"call {what} on all ranks, and use the result on one.",
        )
        # No later forward of this rank withdraws it: its collectives are now one ahead of the
        # others'
        text = f"{type(error).__name__}: {error.what}"
        world.recorder.post(raised_in(self.name), text[:300])
        return error

    def _connection_lost(self, world: WorldContext, what: str, caught: ConnectionLost) -> PeerError:
        """Return the error for a broken connection.

        The flight recorder may know more than the socket. The lost rank's name is posted for ranks
        that wait for this one and share no group with the lost rank.
        """
        recorder = world.recorder
        self.has_given_up = True
        # Observed here, even if other ranks have seen the host answer since
        if caught.is_silence and caught.rank is not None:
            return recorder.find_lost_host(reads_store=True) or recorder.host_lost([caught.rank])
        if error := recorder.find_failure(f"rank {world.rank} was in '{what}'", self.name):
            return error
        me = recorder.name(world.rank, self.name)
        other = "another rank" if caught.rank is None else recorder.name(caught.rank, self.name)
        found = f"{me} lost its connection to {other} in '{what}': {first_line(caught)}"
        recorder.post(LOST, found)
        return PeerError(found, KILLED_WHY, KILLED_FIX)
