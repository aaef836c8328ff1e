"""Exchange the state of ranks between the launchers of several machines.

A thread of each launcher polls the store of node 0 twice a second. It writes a heartbeat and the
list of stopped ranks, and reads those of the others. Access to a store on an unreachable machine
can block for minutes, so the launcher itself only reads results of this thread.
"""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Collection, Sequence
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

from deepseek_zero.base.errors import host_and_ranks
from deepseek_zero.base.launch import TELL_AFTER
from deepseek_zero.base.log import logger
from deepseek_zero.cli.ranks import Outcome
from deepseek_zero.comm.net.key_value_store import GONE

if TYPE_CHECKING:
    from torch.distributed import Store  # type: ignore[attr-defined]  # public

ASK_SECONDS = 0.5
FAREWELL_SECONDS = 2.0
"""How long a launcher stays after its own failure, so that the others can read the message."""

LOST_STORY = (
    "It lost its power or its network, or this host did. --dead-after sets how long a host may be "
    "silent."
)
ENDED_STORY = (
    "Its launcher was killed or terminated, or that machine was shut down; see the output of that "
    "launcher."
)
FAILED_KEY = "deepseek_zero/failed"
FINISHED_KEY = "deepseek_zero/finished"
ALIVE_KEY = "deepseek_zero/alive"


class PeerWatch:
    """Exchange failures with the other machines' launchers, and detect lost machines.

    Only this machine's clock is used: a machine is lost if its heartbeat has not changed for
    `dead_after` seconds (inf: never).
    """

    def __init__(
        self, store: Store, node: int, nodes: int, ranks: Sequence[int], dead_after: float
    ) -> None:
        """Start the thread.

        Args:
            store: The store of node 0. Its methods raise RuntimeError if it is gone.
            node: Number of this node.
            nodes: Number of nodes.
            ranks: Global ranks of this machine.
            dead_after: Seconds without a change after which a machine is lost.
        """
        self._store = store
        self._node = node
        self._nodes = nodes
        self._dead_after = dead_after
        self._host = socket.gethostname()
        self._ranks = list(ranks)
        # Ranks of this machine that have been stopped for TELL_AFTER seconds
        self.stopped: Collection[int] = ()
        self._stopped_elsewhere: dict[int, set[int]] = {}  # by node
        # By node: its last entry, and when this launcher first saw it
        self._seen: dict[int, tuple[str, float]] = {}
        self._names: dict[int, str] = {0: "node 0, which holds the store,"}
        self._logged_silent: set[int] = set()  # nodes whose silence has been logged
        self._answered = time.monotonic()  # last time the store answered
        self._poll_started: float | None = None  # start of the current poll; None between polls
        self._failure = ""  # JSON of this machine's failure
        self._is_failure_stored = threading.Event()
        self._has_news = threading.Event()
        self._has_finished = self._have_all_finished = self._is_store_gone = False
        self._failure_elsewhere: Outcome | None = None
        threading.Thread(target=self._serve, daemon=True, name="deepseek-zero-peers").start()

    def report_failure(self, outcome: Outcome) -> None:
        """Report a failure to the others, and wait until they can have read it.

        Only the first reported failure is kept.
        """
        self.post_failure(outcome)
        self._is_failure_stored.wait(FAREWELL_SECONDS)
        if self._node == 0:
            time.sleep(FAREWELL_SECONDS)

    def post_failure(self, outcome: Outcome) -> None:
        """Report a failure without waiting; only this machine's first one is kept."""
        told = replace(outcome, headline=f"{outcome.headline}, on {self._host}")
        self._failure = self._failure or json.dumps(asdict(told))
        self._has_news.set()

    def failure_of_others(self) -> Outcome | None:
        """Return the failure of another machine if it reported one, ended or is silent."""
        return self._failure_elsewhere or self._silence()

    def all_finished(self) -> bool:
        """Return whether the ranks of every machine have finished successfully.

        Call it repeatedly after this machine's ranks have finished.
        """
        if not self._has_finished:
            self._has_finished = True
            self._has_news.set()
        return self._have_all_finished or self._is_store_gone

    def stay_for_others(self) -> None:
        """Keep the store open until other machines can have read a reported failure."""
        if self._node == 0 and self._nodes > 2 and self._failure_elsewhere is not None:
            time.sleep(2 * ASK_SECONDS)

    def _silence(self) -> Outcome | None:
        now = time.monotonic()
        answered = self._answered
        poll_started = self._poll_started
        seen = dict(self._seen)  # the thread adds nodes
        silent = {node: answered - at for node, (_, at) in seen.items()}
        if poll_started is not None and now - poll_started > 2 * ASK_SECONDS:
            # If the store does not answer, the entries of the other nodes are outdated, too. Time
            # before the poll is not counted, because this launcher itself may have been stopped.
            silent = {0: now - max(answered, poll_started - ASK_SECONDS)}
        for node, seconds in silent.items():
            name = self._names.get(node, f"node {node}")
            if seconds > self._dead_after:
                return Outcome(
                    1,
                    f"HostLost: {name} silent for {self._dead_after:g} s",
                    LOST_STORY,
                    is_silence=True,
                )
            if seconds > TELL_AFTER and node not in self._logged_silent:
                self._logged_silent.add(node)
                logger.warning(f"{name} silent for {TELL_AFTER:g} s")
            elif seconds < TELL_AFTER and node in self._logged_silent:
                self._logged_silent.discard(node)
                logger.warning(f"{name} answers again")
        return None

    def _serve(self) -> None:
        """Exchange messages until the store is gone."""
        beats = 0
        try:
            while not self._have_all_finished:
                beats += 1
                self._poll_started = time.monotonic()
                entry = {
                    "beat": beats,
                    "host": self._host,
                    "ranks": self._ranks,
                    "stopped": sorted(self.stopped),
                }
                self._store.set(f"{ALIVE_KEY}/{self._node}", json.dumps(entry))
                if self._failure and not self._is_failure_stored.is_set():
                    self._store.compare_set(FAILED_KEY, "", self._failure)
                    self._is_failure_stored.set()
                if self._failure_elsewhere is None and self._store.check([FAILED_KEY]):
                    self._failure_elsewhere = Outcome(**json.loads(self._store.get(FAILED_KEY)))
                self._look_at_others()
                self._look_for_ended()
                self._answered = time.monotonic()
                if self._has_finished:
                    self._store.set(f"{FINISHED_KEY}/{self._node}", "1")
                    places = [f"{FINISHED_KEY}/{node}" for node in range(self._nodes)]
                    self._have_all_finished = self._store.check(places)
                self._poll_started = None
                self._has_news.wait(ASK_SECONDS)
                self._has_news.clear()
        except RuntimeError:
            self._is_store_gone = True
            if not self._has_finished:
                self._failure_elsewhere = self._failure_elsewhere or Outcome(
                    1, f"{self._names[0]} has ended", ENDED_STORY
                )

    def _look_at_others(self) -> None:
        for node in range(self._nodes):
            key = f"{ALIVE_KEY}/{node}"
            if node != self._node and self._store.check([key]):
                entry = self._store.get(key).decode()
                if self._seen.get(node, ("", 0.0))[0] != entry:
                    self._seen[node] = entry, time.monotonic()
                    self._take_in(node, json.loads(entry))

    def _look_for_ended(self) -> None:
        """Detect launchers that ended without a message: the store notices the disconnect."""
        for node in range(1, self._nodes) if self._failure_elsewhere is None else ():
            if (
                node != self._node
                and self._store.check([f"{GONE}/{node}"])
                and not self._store.check([f"{FINISHED_KEY}/{node}"])
                and not self._store.check([FAILED_KEY])
            ):
                self._failure_elsewhere = Outcome(
                    1, f"{self._names.get(node, f'node {node}')} has ended", ENDED_STORY
                )
                return

    def _take_in(self, node: int, entry: dict[str, Any]) -> None:
        self._names[node] = host_and_ranks(entry["host"], entry["ranks"])
        stopped = set(entry["stopped"])
        before = self._stopped_elsewhere.get(node, set())
        log_stopped(entry["host"], before, stopped)
        self._stopped_elsewhere[node] = stopped


def log_stopped(host: str, before: Collection[int], now: Collection[int]) -> None:
    """Log which ranks of a host have been stopped, and which have resumed.

    Args:
        host: Name of the host.
        before: Ranks that were stopped at the previous check.
        now: Ranks that are stopped now.
    """
    for rank in sorted(set(now) - set(before)):
        logger.warning(f"rank {rank} on {host} is stopped; the others wait for it")
    for rank in sorted(set(before) - set(now)):
        logger.warning(f"rank {rank} on {host} continues")
