"""What the launchers of several machines know of each other: that they live, that ranks failed,
stand still, finished.

Each machine's launcher has one thread that asks the store where they meet, twice a second, and
writes there that it lives and which of its ranks are stopped.  A store whose machine is unreachable
can keep who asks waiting for minutes; the launcher itself asks only this thread.
"""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Collection, Sequence
from typing import Any, Protocol

from deepseek_zero.base.errors import host_and_ranks
from deepseek_zero.base.launch import TELL_AFTER
from deepseek_zero.base.log import logger
from deepseek_zero.cli.ranks import Outcome
from deepseek_zero.comm.net.key_value_store import GONE

ASK_SECONDS = 0.5
FAREWELL_SECONDS = 2.0
"""How long a launcher stays after a failure of its own, so that the others can read of it."""

LOST_STORY = (
    "It lost its power or its network, or this host did. --dead-after says how long a host may be "
    "silent."
)
ENDED_STORY = (
    "Its launcher was killed or asked to end, or that machine was shut down; what it wrote says "
    "more."
)
FAILED_KEY = "deepseek_zero/failed"
FINISHED_KEY = "deepseek_zero/finished"
ALIVE_KEY = "deepseek_zero/alive"


class RendezvousKeys(Protocol):
    """The part of torch's stores that launchers use. RuntimeError if it is gone."""

    def set(self, key: str, value: str) -> None: ...

    def get(self, key: str) -> bytes: ...

    def check(self, keys: list[str]) -> bool: ...

    def compare_set(self, key: str, expected: str, desired: str) -> bytes: ...


class PeerWatch:
    """Tells the launchers of the other machines of a failure, and hears of theirs and of their
    silence.

    dead_after: seconds of silence after which a machine is lost; inf: never. Clocks are this
    machine's own: what counts is how long it has seen no change.
    """

    def __init__(
        self, store: RendezvousKeys, node: int, nodes: int, ranks: Sequence[int], dead_after: float
    ) -> None:
        """ranks: of this machine."""
        self._store = store
        self._node = node
        self._nodes = nodes
        self._dead_after = dead_after
        self._host = socket.gethostname()
        self._ranks = list(ranks)
        self.stopped: Collection[
            int
        ] = ()  # ranks of this machine that have been stopped for TELL_AFTER
        self._stopped_elsewhere: dict[int, set[int]] = {}  # by node
        self._seen: dict[
            int, tuple[str, float]
        ] = {}  # by node: what it wrote last, and when this one saw it change
        self._names: dict[int, str] = {0: "node 0, which holds the store,"}
        self._told: set[int] = set()  # whose silence is told
        self._answered = time.monotonic()  # the store, last
        self._asked: float | None = None  # when what is asked now was begun; None: nothing is
        self._failure = ""  # to tell the others
        self._is_failure_told = threading.Event()
        self._has_news = threading.Event()
        self._has_finished = self._have_all_finished = self._is_store_gone = False
        self._heard: Outcome | None = None
        threading.Thread(target=self._serve, daemon=True, name="deepseek-zero-peers").start()

    def tell_failure(self, outcome: Outcome) -> None:
        """Make a failure known to the others; the first one told stays. Waits until they can have
        read of it.
        """
        self.begin_to_tell(outcome)
        self._is_failure_told.wait(FAREWELL_SECONDS)
        if self._node == 0:
            time.sleep(FAREWELL_SECONDS)

    def begin_to_tell(self, outcome: Outcome) -> None:
        """Make a failure known without waiting; of several of this machine's the first."""
        headline = f"{outcome.headline}, on {self._host}"
        told = {"exit_code": outcome.exit_code, "headline": headline, "story": outcome.story}
        self._failure = self._failure or json.dumps(told)
        self._has_news.set()

    def heard_failure(self) -> Outcome | None:
        """Return what another machine told, if it told of a failure, went away or is silent."""
        return self._heard or self._silence()

    def all_finished(self) -> bool:
        """Return whether the ranks of every machine have ended well; call it repeatedly once ours
        have.
        """
        if not self._has_finished:
            self._has_finished = True
            self._has_news.set()
        return self._have_all_finished or self._is_store_gone

    def stay_for_others(self) -> None:
        """Keep the store until other machines can have read of a failure that one of them told."""
        if self._node == 0 and self._nodes > 2 and self._heard is not None:
            time.sleep(2 * ASK_SECONDS)

    def _silence(self) -> Outcome | None:
        now = time.monotonic()
        answered = self._answered
        asked = self._asked
        silent = {node: answered - at for node, (_, at) in self._seen.items()}
        if asked is not None and now - asked > 2 * ASK_SECONDS:
            # What it says of the others is as old.  Not from before it was asked: this launcher may
            # have stood still.
            silent = {0: now - max(answered, asked - ASK_SECONDS)}
        for node, seconds in silent.items():
            name = self._names.get(node, f"node {node}")
            if seconds > self._dead_after:
                return Outcome(
                    1,
                    f"HostLost: {name} silent for {self._dead_after:g} s",
                    LOST_STORY,
                    is_silence=True,
                )
            if seconds > TELL_AFTER and node not in self._told:
                self._told.add(node)
                logger.warning(f"{name} silent for {TELL_AFTER:g} s")
            elif seconds < TELL_AFTER and node in self._told:
                self._told.discard(node)
                logger.warning(f"{name} heard again")
        return None

    def _serve(self) -> None:
        """Ask and tell until the store is gone."""
        beats = 0
        try:
            while not self._have_all_finished:
                beats += 1
                self._asked = time.monotonic()
                said = {
                    "beat": beats,
                    "host": self._host,
                    "ranks": self._ranks,
                    "stopped": sorted(self.stopped),
                }
                self._store.set(f"{ALIVE_KEY}/{self._node}", json.dumps(said))
                if self._failure and not self._is_failure_told.is_set():
                    self._store.compare_set(FAILED_KEY, "", self._failure)
                    self._is_failure_told.set()
                if self._heard is None and self._store.check([FAILED_KEY]):
                    told = json.loads(self._store.get(FAILED_KEY))
                    self._heard = Outcome(int(told["exit_code"]), told["headline"], told["story"])
                self._look_at_others()
                self._look_for_ended()
                self._answered = time.monotonic()
                if self._has_finished:
                    self._store.set(f"{FINISHED_KEY}/{self._node}", "1")
                    places = [f"{FINISHED_KEY}/{node}" for node in range(self._nodes)]
                    self._have_all_finished = self._store.check(places)
                self._asked = None
                self._has_news.wait(ASK_SECONDS)
                self._has_news.clear()
        except RuntimeError:
            self._is_store_gone = True
            if not self._has_finished:
                self._heard = self._heard or Outcome(1, f"{self._names[0]} has ended", ENDED_STORY)

    def _look_at_others(self) -> None:
        for node in range(self._nodes):
            key = f"{ALIVE_KEY}/{node}"
            if node != self._node and self._store.check([key]):
                said = self._store.get(key).decode()
                if self._seen.get(node, ("", 0.0))[0] != said:
                    self._seen[node] = said, time.monotonic()
                    self._take_in(node, json.loads(said))

    def _look_for_ended(self) -> None:
        """Hear of machines whose launcher has ended without a word: the store sees its connection
        end.
        """
        for node in range(1, self._nodes) if self._heard is None else ():
            if (
                node != self._node
                and self._store.check([f"{GONE}/{node}"])
                and not self._has_said_its_end(node)
            ):
                self._heard = Outcome(
                    1, f"{self._names.get(node, f'node {node}')} has ended", ENDED_STORY
                )
                return

    def _has_said_its_end(self, node: int) -> bool:
        return self._store.check([f"{FINISHED_KEY}/{node}"]) or self._store.check([FAILED_KEY])

    def _take_in(self, node: int, said: dict[str, Any]) -> None:
        self._names[node] = host_and_ranks(said["host"], said["ranks"])
        stopped = set(said["stopped"])
        before = self._stopped_elsewhere.get(node, set())
        tell_stopped(said["host"], before, stopped)
        self._stopped_elsewhere[node] = stopped


def tell_stopped(host: str, before: Collection[int], now: Collection[int]) -> None:
    """Say which ranks of a host are stopped now, and which run again."""
    for rank in sorted(set(now) - set(before)):
        logger.warning(f"rank {rank} on {host} is stopped; the others wait for it")
    for rank in sorted(set(before) - set(now)):
        logger.warning(f"rank {rank} on {host} runs again")
