"""Detect that a wait for another rank can never end.

A rank that waits longer than a second writes the collective it waits for into a small key-value
store. A rank that raises or exits writes that, too. The steady state never uses the store. A wait
ends with a `PeerError` only on evidence (a rank raised, exited, or is in another collective), never
on a timeout: a rank that loads data for an hour is late, not dead.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import math
import sys
import time
import weakref
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field

from ..base import launch
from ..base.errors import HostLost, PeerError, host_and_ranks
from ..base.log import logger
from ..base.mesh import Mesh
from .bootstrap import Hosts
from .net.key_value_store import GONE, KeyValueStore, StoreClient

# Rank 0 stays this long, so that others can read the cause of its failure from its store
STAY_SECONDS = 2.0
LOOK_SECONDS = 0.02
UNHEARD = 0.5  # Mean seconds from a host's last sign of life to a network cut
SILENT = "silent hosts"  # Key of rank 0's findings: one rank of each silent host
# Topic of a rank that lost a connection, for ranks that share no group with either end
LOST = "lost"
KILLED_WHY = "A rank was killed, ran out of memory or lost its network."
KILLED_FIX = (
    "look at the end of the other ranks' output and at the system's log (dmesg) for the "
    "out-of-memory killer."
)
# Consecutive checks that must agree: lines are posted shortly before or after ranks move
CONFIRMED = 3


def raised_in(engine: str) -> str:
    """Return the topic under which ranks post the errors of one engine.

    The rank may still catch the error and continue.
    """
    return f"raised in {engine}"


@dataclass
class Position:
    """The collectives that a rank has issued, and the one it waits for.

    Lanes ("engine 0/gather") are independent sequences of collectives. A rank outside a group never
    waits in the lanes of that group.

    Attributes:
        lane: The lane of the collective that the rank waits for.
        sequence: The number of that collective in its lane.
        ranks: The world ranks of its group.
        issued: Number of collectives issued so far, by lane.
        log: The names of the last few collectives, by lane and number.
    """

    lane: str
    sequence: int
    ranks: list[int]
    issued: dict[str, int] = field(default_factory=dict)
    log: dict[str, dict[str, str]] = field(default_factory=dict)

    @property
    def engine(self) -> str:
        """Return the name of the engine to which the lane of this position belongs."""
        return self.lane.partition("/")[0]

    def name(self, lane: str | None = None, sequence: int | None = None) -> str:
        """Return the name of a collective, or "" if it is no longer in the log.

        Args:
            lane: Its lane; None for the lane that the rank waits in.
            sequence: Its number; None for the collective that the rank waits for.

        Returns:
            The name that the collective's caller gave it, or "".
        """
        number = self.sequence if sequence is None else sequence
        return self.log.get(lane or self.lane, {}).get(str(number), "")

    def has_issued(self, other: Position) -> bool:
        """Return whether this rank has issued the collective that `other` waits for."""
        return self.issued.get(other.lane, 0) > other.sequence


class FlightRecorder:
    """Write and read lines about the state of ranks in a small key-value store.

    No method waits for another rank.

    Args:
        hosts: The hosts of all ranks.
        store: The key-value store.
        dead_after: Seconds of silence after which another host is lost.
    """

    def __init__(
        self, hosts: Hosts, store: KeyValueStore | StoreClient, dead_after: float = math.inf
    ) -> None:
        self.rank = hosts.rank
        self.size = len(hosts.keys)
        self._hosts = hosts
        self._store = store
        self._dead_after = dead_after
        self.logged_silent: set[str] = set()  # Hosts that were logged as silent
        self._logs_silence = self.rank == hosts.local_ranks[0] and launch.place_of_store() is None
        self.meshes: dict[str, Mesh] = {}  # By engine, for engines that have one
        self._posted: dict[str, str] = {}
        self.is_waiting = False  # Whether this rank has a line under "waiting"
        # Whether rank 0 is gone. On another request torch would print another page of C++ frames.
        self._is_gone = False
        self._suspicion: tuple[tuple[int, str, int], ...] = ()
        self._looks = 0  # Consecutive checks with this suspicion
        # Seconds waited at the last log line, by collective and absent ranks
        self._logged_waits: dict[tuple[str, tuple[int, ...]], float] = {}
        atexit.register(_post_end, weakref.ref(self))

    def post(self, topic: str, text: str) -> None:
        """Write this rank's line under a topic; do nothing if the store has ended.

        Args:
            topic: "raised", "raised in engine 0", "ended" or "waiting".
            text: The line; "" removes it.
        """
        if self._is_gone or self._posted.get(topic, "") == text:
            return
        if topic == "waiting":
            self.is_waiting = bool(text)
        try:
            if self._store.set(f"{topic}/{self.rank}", text):
                self._posted[topic] = text
        except RuntimeError:
            self._is_gone = True

    def send_farewell(self) -> None:
        """Make the lines readable after this process has exited, if it holds the store."""
        with contextlib.suppress(RuntimeError):  # rank 0 is gone
            self._store.send_farewell()

    def withdraw(self, topic: str) -> None:
        """Remove the line that this rank posted under a topic."""
        self.post(topic, "")

    def read(self, topic: str, rank: int) -> str:
        """Return another rank's line under a topic, or "" if there is none.

        Args:
            topic: "raised", "raised in engine 0", "ended" or "waiting".
            rank: World rank that wrote the line.

        Returns:
            The text that the rank posted last, or "".
        """
        if self._is_gone:
            return ""
        try:
            return self._store.get(f"{topic}/{rank}") or ""
        except RuntimeError:
            self._is_gone = True
            return ""

    def name(self, rank: int, engine: str) -> str:
        """Return the name of a rank for errors of an engine.

        The name includes the rank's coordinates if the engine's mesh has several axes.

        Args:
            rank: World rank to name.
            engine: The name of the engine.

        Returns:
            Text such as "rank 3 (tp 1)": the rank and its coordinates in the mesh of the engine.
        """
        mesh = self.meshes.get(engine)
        place = mesh.place_of(rank) if mesh is not None and mesh.world_size == self.size else ""
        return f"rank {rank} ({place})" if place else f"rank {rank}"

    def find_lost_host(self, *, reads_store: bool) -> HostLost | None:
        """Return an error that names the hosts that were silent too long, or None.

        The kernel of rank 0 receives signs of life from all hosts, and the kernels of the other
        ranks receive those of rank 0's host.

        Args:
            reads_store: Whether to also read rank 0's findings from the store, which may take a
                moment. Otherwise the call does not block.
        """
        silences = self.log_silences()
        silent = [
            rank for rank, seconds in silences.items() if seconds > self._dead_after + UNHEARD
        ]
        if silent and self.rank == 0:
            self._store.set(SILENT, json.dumps(silent))
        if not silent and reads_store and not self._is_gone:
            with contextlib.suppress(RuntimeError):  # The next read of a line finds that out, too
                silent = json.loads(self._store.get(SILENT) or "[]")
        return self.host_lost(silent) if silent else None

    def log_silences(self) -> dict[int, float]:
        """Return the hosts' silences in seconds, and log hosts that became silent or answer again.

        Each change is logged once, by one rank per host, unless this library's launcher watches the
        hosts.
        """
        silences = self._store.silences()
        if not self._logs_silence:
            return silences
        found: dict[str, float] = {}
        for rank, seconds in silences.items():
            host = host_and_ranks(*self._hosts.shared_with(rank))
            found[host] = min(seconds, found.get(host, math.inf))
        silent = {host for host, seconds in found.items() if seconds > launch.TELL_AFTER}
        for host in silent - self.logged_silent:
            logger.warning(f"{host} silent for {launch.TELL_AFTER:g} s")
        for host in self.logged_silent - silent:
            logger.warning(f"{host} answers again")
        self.logged_silent = silent
        return silences

    def host_lost(self, silent: Sequence[int]) -> HostLost:
        """Return an error that names the hosts of these ranks as silent for too long."""
        lost = {tuple(ranks): name for name, ranks in map(self._hosts.shared_with, silent)}
        return HostLost([(name, ranks) for ranks, name in lost.items()], self._dead_after)

    def stay_for_others(self) -> None:
        """Wait until every rank on other hosts has exited or posted why it will exit.

        Return after `STAY_SECONDS` in any case. Rank 0 calls this after a failure, because its
        process holds the store: otherwise ranks that look for the cause of the same failure a
        moment later would find no store and blame rank 0.
        """
        until = time.monotonic() + STAY_SECONDS
        while time.monotonic() < until:
            silent = [
                rank
                for rank, seconds in self._store.silences().items()
                if seconds > self._dead_after
            ]
            waited_for = set(range(self.size)).difference(self._hosts.local_ranks, silent)
            if all(
                any(self.read(topic, rank) for topic in ("raised", "ended", GONE))
                for rank in waited_for
            ):
                return
            time.sleep(LOOK_SECONDS)

    def find_failure(self, waits: str, engine: str, survived: str = "") -> PeerError | None:
        """Return an error that names the first rank that failed or exited, or None.

        This includes ranks whose loss another rank has posted, and the loss of rank 0, which holds
        the store. A rank that raised because of another rank is reported only if there is nothing
        else.

        Args:
            waits: What this rank did meanwhile, as a clause.
            engine: The name of the engine in which this rank waits.
            survived: An error that is ignored while its rank runs, because this rank had the same
                one and continued.

        Returns:
            The error, which the caller raises, or None if no rank has failed.
        """
        if lost := self.find_lost_host(reads_store=True):
            return lost
        follows: PeerError | None = None
        for rank in range(self.size):
            if rank == self.rank:
                continue
            text = self.read(raised_in(engine), rank)
            if survived and text == survived:
                text = ""
            if text := text or self.read("raised", rank):
                error = PeerError(
                    f"{self.name(rank, engine)} raised an error while {waits}: {text}",
                    "A collective needs every rank.",
                    f"fix the error of rank {rank}; its traceback is in that rank's output.",
                )
                if not text.startswith(f"{PeerError.__name__}: "):
                    return error
                follows = follows or error
                continue
            if text := self.read("ended", rank):
                return PeerError(
                    f"{self.name(rank, engine)} has ended ({text}) while {waits}.",
                    "Ranks made different numbers of calls: different numbers of batches, or a "
                    "collective on some ranks only.",
                    "give every rank the same number of batches; call state_dict(), save and step "
                    "on all ranks.",
                )
            if text := self.read(LOST, rank):
                return PeerError(f"{text}, while {waits}.", KILLED_WHY, KILLED_FIX)
        if self._is_gone and follows is None:
            return PeerError(
                f"{self.name(0, engine)}, which holds the key-value store, has ended while "
                f"{waits}.",
                "It was killed, ran out of memory, lost its network, or its program ended first.",
                "look at the end of rank 0's output and at the system's log (dmesg) for the "
                "out-of-memory killer.",
            )
        return follows

    def find_desync(self, mine: Position, engine: str, survived: str = "") -> PeerError | None:
        """Return an error if ranks wait for each other in different collectives, or None.

        The call posts `mine` for the other ranks. A suspicion is reported only after `CONFIRMED`
        consecutive calls.

        Args:
            mine: The position of this rank.
            engine: The name of the engine in which this rank waits.
            survived: As in `find_failure`.

        Returns:
            The error, which the caller raises, or None if the ranks may still proceed.
        """
        self.post("waiting", json.dumps(asdict(mine)))
        waits = f"rank {self.rank} waits for it in '{mine.name()}'"
        if error := self.find_failure(waits, engine, survived):
            return error
        positions = self._positions(mine)
        suspects = {rank: positions[rank] for rank in desynced_ranks(positions, self.rank)}
        places = tuple((rank, place.lane, place.sequence) for rank, place in suspects.items())
        self._looks = self._looks + 1 if places and places == self._suspicion else int(bool(places))
        self._suspicion = places
        if self._looks < CONFIRMED:
            return None
        engines = {place.engine for place in suspects.values()}
        described = []
        for rank, place in suspects.items():
            of_engine = f" of {place.engine}" if len(engines) > 1 else ""
            described.append(f"{self.name(rank, engine)} is in '{place.name()}'{of_engine}")
        names = ", ".join(described)
        return PeerError(
            f"ranks called different collectives: {names}.",
            "Every rank must make the same sequence of calls; no data was exchanged between "
            "different collectives.",
            "look for a branch that depends on the rank: state_dict() on one rank, unequal "
            "batches, another model.",
        )

    def _positions(self, mine: Position) -> dict[int, Position]:
        """Return the positions of this rank and of all ranks that wait in a collective."""
        found = {self.rank: mine}
        for rank in range(self.size):
            if rank != self.rank and (line := self.read("waiting", rank)):
                found[rank] = Position(**json.loads(line))
        return found

    def log_absent_ranks(self, mine: Position, engine: str, waited: float) -> None:
        """Log which ranks have not yet reached the collective that this rank waits for.

        The lowest of the waiting ranks logs after 5 s, and again each time the wait has doubled. An
        absent rank is late, or it waits in a call outside any engine for a rank that waits here.
        These two cases cannot be distinguished.

        Args:
            mine: The position of this rank.
            engine: The name of the engine in which this rank waits.
            waited: Seconds that this rank has waited.
        """
        if waited < launch.TELL_AFTER:
            return
        positions = self._positions(mine)
        here = [
            rank
            for rank, each in positions.items()
            if (each.lane, each.sequence) == (mine.lane, mine.sequence)
        ]
        absent = [rank for rank in mine.ranks if rank not in positions]
        case = mine.name(), tuple(absent)
        if not absent or min(here) < self.rank or waited < 2 * self._logged_waits.get(case, 0.0):
            return
        self._logged_waits[case] = waited
        names = ", ".join(self.name(rank, engine) for rank in absent)
        logger.warning(
            f"{self.name(self.rank, engine)} has waited {waited:.0f} s in '{mine.name()}'.  Not "
            "in a "
            f"collective of an engine: {names}.  Such a rank computes, loads data, or waits in a "
            "call of torch.distributed, such as barrier().  In the last case no rank can "
            "continue: look for a call that only some ranks make."
        )


def desynced_ranks(positions: dict[int, Position], me: int) -> list[int]:
    """Return the ranks that wait for each other in different collectives.

    The result is empty as long as one of them can still make progress.

    Args:
        positions: Positions by rank, including that of `me`.
        me: The rank to start from.

    Returns:
        The ranks in ascending order; empty if the ranks may still proceed.
    """
    chain = [me]
    while True:
        here = positions[chain[-1]]
        members = {
            rank: each
            for rank, each in positions.items()
            if rank in here.ranks and rank != chain[-1]
        }
        for rank, there in members.items():
            name = there.name(here.lane, here.sequence)
            if name and name != here.name():
                return sorted({chain[-1], rank})
        blockers = [rank for rank, there in members.items() if not there.has_issued(here)]
        if not blockers:
            return []
        if blockers[0] in chain:
            return sorted(chain[chain.index(blockers[0]) :])
        chain.append(blockers[0])


def _post_end(reference: weakref.ref[FlightRecorder]) -> None:
    """Post why this process ends. `atexit` calls this."""
    recorder = reference()
    if recorder is None:
        return
    # The interpreter keeps the exception that ended the program here
    uncaught = getattr(sys, "last_value", None)
    if uncaught is None:
        recorder.post("ended", "its program finished")
    else:
        recorder.post("raised", f"{type(uncaught).__name__}: {uncaught}"[:300])
        if recorder.rank == 0:
            recorder.stay_for_others()
    recorder.send_farewell()
