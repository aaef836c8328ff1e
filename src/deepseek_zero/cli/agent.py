"""Run the ranks of this machine: rendezvous, rank numbers, restarts and failures.

cli/ranks.py runs the processes. The environment of a rank is that of torchrun, whose agent is not
used: it waits thirty seconds for the other ranks after a failure, orders failures by whole seconds,
and does not end the children of a killed rank. Several nodes report failures through the store of
node 0. This module imports torch, so cli/run.py imports it late.
"""

from __future__ import annotations

import math
import signal
import socket
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from types import FrameType

import torch

from deepseek_zero.base.errors import UsageError
from deepseek_zero.base.launch import (
    SAVED_EXIT_CODE,
    SECRET_BYTES,
    SECRET_FILE,
    STORE,
    TELL_AFTER,
    uses_tls,
)
from deepseek_zero.base.log import logger
from deepseek_zero.base.mesh import PATIENCE
from deepseek_zero.base.network import listening_address, reached_at
from deepseek_zero.cli.nodes import LAST_PORT, NodePlan, visible_gpus
from deepseek_zero.cli.peers import PeerWatch, log_stopped
from deepseek_zero.cli.ranks import Command, Death, Outcome, Ranks
from deepseek_zero.comm.net.channel import Address, Refused, read_secret, warn_without_secret
from deepseek_zero.comm.net.store import NO_SECRET, RendezvousStore, keep_store, reach_store
from deepseek_zero.comm.net.tls import require_cryptography

ROLE = "default"

SIZE_KEY = "deepseek_zero/ranks"
"""Prefix of the keys with the number of ranks of each node."""

POLL_SECONDS = 0.1

MEETING_TIMEOUT = timedelta(minutes=15)
"""How long a node waits for the others to start."""

STILL_WAITING_SECONDS = 10.0
"""Time after which a node that cannot reach node 0 logs a warning, once."""

FOLLOW_SECONDS = 2.0
"""How long to wait for more reports after the loss of a machine.

Ranks report their errors, and another machine may report the cause.
"""

SAY_SECONDS = 0.5
"""How long to wait for the errors of other ranks after the first one.

A failure of a step often affects every rank.
"""

LOOK_SECONDS = 1.0
"""Interval of the checks for stopped ranks."""

ENDING_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)

REQUESTS = (signal.SIGTERM, signal.SIGUSR1)
"""Signals that are forwarded to ranks that save before they end (engine/preemption.py)."""


def gpus_of_this_machine(environment: Mapping[str, str]) -> tuple[str, ...]:
    """Return the names of the GPUs that torch can use, without initializing CUDA."""
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return visible_gpus(count, environment)


@dataclass
class Meeting:
    """A rendezvous at a store of node 0.

    A single node uses a port that the system chooses when the store opens.

    Attributes:
        plan: What this machine runs.
        secret: Secret that all nodes and ranks of the job hold.
        place: Address and port of the store, for the ranks.
        master_port: Port at which rank 0 may open a store of torch, without a secret.
    """

    plan: NodePlan
    secret: bytes = field(repr=False)
    place: str = ""
    master_port: int = 0
    _stores: list[RendezvousStore] = field(default_factory=list)

    def open(self) -> RendezvousStore:
        """Open the store of node 0 or connect to it.

        A restart (on a single node) opens a new store at a new port. The old store contains the
        addresses of the previous ranks, and its port is still in use.

        Raises:
            UsageError: The store cannot be opened or reached.
        """
        plan = self.plan
        if plan.num_nodes > 1:
            place = f"{plan.master_addr}:{plan.master_port}"
            logger.info(f"node {plan.node_rank} of {plan.num_nodes}: rendezvous at {place}")
        wanted = 0 if self._stores else plan.master_port
        host, port = self._open(wanted)
        self.place = f"{host}:{port}"
        # For scripts that call torch's init_process_group: rank 0 listens there without a secret.
        self.master_port = _port_beside(port) if plan.num_nodes > 1 else _free_port(host)
        return self._stores[-1]

    def _open(self, port: int) -> Address:
        """Open or reach the store; return its address and port."""
        plan = self.plan
        try:
            found = socket.getaddrinfo(plan.master_addr, None, type=socket.SOCK_STREAM)
        except (OSError, UnicodeError) as error:  # the second one: an invalid name
            raise self._no_meeting(error) from error
        sought = str(found[0][4][0])
        host = sought if plan.node_rank > 0 else self._own_address(sought)
        try:
            if plan.node_rank > 0:
                store = _reach(host, port, self.secret, plan.node_rank)
            else:
                store, _, (_, port) = keep_store(host, port, self.secret)
                if self.secret == NO_SECRET:
                    warn_without_secret((host, port), "launchers")
        except (RuntimeError, OSError) as error:
            raise self._no_meeting(error) from error
        self._stores.append(store)
        return host, port

    def _own_address(self, sought: str) -> str:
        """Return the address at which node 0's store listens.

        `sought` is the address that `master_addr` resolves to. Raises UsageError if the other nodes
        would connect to a different address of this machine.
        """
        plan = self.plan
        host = listening_address(plan.num_nodes == 1, plan.master_addr)
        if plan.num_nodes > 1 and reached_at(plan.master_addr) == sought != host:
            raise UsageError(
                f"The other nodes would connect to {sought}, and the store listens at {host} "
                "(--interface).",
                why=f"{plan.master_addr}, the rendezvous address, is another address of this "
                "machine.",
                fix=(
                    f"Use --master_addr={host} on every machine (MASTER_ADDR under Slurm), or name "
                    "that interface."
                ),
            )
        return host

    def _no_meeting(self, error: Exception) -> UsageError:
        return UsageError(
            f"The rendezvous failed at {self.plan.master_addr}:{self.plan.master_port}.",
            why=(str(error).splitlines() or [type(error).__name__])[0],
            fix="Another program may use the port (without --master_port, a single node uses "
            "a free one), or node 0 is not running there, or the address cannot be "
            "reached from here.",
        )


def _reach(host: str, port: int, secret: bytes, node: int) -> RendezvousStore:
    """Return node 0's store as soon as it is available.

    Raises Refused if another program, version or secret is there, and OSError after a timeout.
    """
    began = time.monotonic()
    is_logged = False
    while True:
        try:
            return reach_store((host, port), secret, node, watches=True)
        except Refused:
            raise
        except OSError as error:
            waited = time.monotonic() - began
            if waited > MEETING_TIMEOUT.total_seconds():
                raise
            if waited > STILL_WAITING_SECONDS and not is_logged:
                logger.warning(
                    f"still waiting for node 0 at {host}:{port}: "
                    f"{str(error) or 'it does not answer'}"
                )
                is_logged = True
            time.sleep(POLL_SECONDS)


def _port_beside(port: int) -> int:
    """Return the next port, or the one before the last port; equal on all nodes."""
    return port + 1 if port < LAST_PORT else port - 1


def _free_port(host: str) -> int:
    """Return a port that is currently free."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as probe:
        probe.bind((host, 0))
        return int(probe.getsockname()[1])


@dataclass
class EndRequest:
    """Signals that requested the end of this launch.

    Attributes:
        grace: Seconds from SIGTERM until the ranks are ended by force.
        received: The signals, in order.
    """

    grace: float
    received: list[signal.Signals] = field(default_factory=list)
    _answered: int = 0
    _deadline: float = float("inf")

    def unanswered(self) -> list[signal.Signals]:
        """Return the signals since the last call."""
        new = self.received[self._answered :]
        self._answered += len(new)
        if signal.SIGTERM in new:  # SIGUSR1 announces a later SIGTERM
            self._deadline = time.monotonic() + self.grace
        return new

    @property
    def is_overdue(self) -> bool:
        """Return whether the grace period after SIGTERM is over."""
        return time.monotonic() > self._deadline


@dataclass
class Standstill:
    """Detect ranks of this machine that have been stopped.

    A rank with a CPU limit may be stopped at every check and run in between. If it has
    used CPU time since the last check, the waiting time restarts.

    Attributes:
        logged_stopped: Ranks that have been reported and are still stopped.
    """

    logged_stopped: set[int] = field(default_factory=set)
    # By rank and CPU ticks
    _since: dict[tuple[int, int], float] = field(default_factory=dict)
    _looked: float = 0.0

    def look(self, ranks: Ranks) -> None:
        """Check the ranks at most once a second, and log stopped and resumed ranks."""
        now = time.monotonic()
        if now - self._looked < LOOK_SECONDS:
            return
        self._looked = now
        self._since = {each: self._since.get(each, now) for each in ranks.stopped()}
        stopped = {rank for (rank, _), since in self._since.items() if now - since >= TELL_AFTER}
        log_stopped(socket.gethostname(), self.logged_stopped, stopped)
        self.logged_stopped = stopped


class EndedBySignal(BaseException):
    """A signal ends the launch.

    It is no Exception, because a handler of logging would catch it. The signal would be lost, and
    later ones are ignored.
    """

    def __init__(self, name: signal.Signals) -> None:
        super().__init__(name)
        self.name = name


class RankAgent:
    """Run one machine's ranks, and restart them after failures.

    Args:
        meeting: The rendezvous of the nodes.
        ranks: The processes.
        environment: Variables of every rank, in addition to its place in the world.
        max_restarts: How often to restart all ranks after a failure.
        grace: Seconds for ranks that save on SIGTERM.
        dead_after: Seconds of silence after which another machine is lost.
    """

    def __init__(
        self,
        meeting: Meeting,
        ranks: Ranks,
        environment: Mapping[str, str],
        max_restarts: int,
        grace: float,
        dead_after: float,
    ) -> None:
        self._meeting = meeting
        self._plan = meeting.plan
        self._ranks = ranks
        self._environment = environment
        self._request = EndRequest(grace)
        self._dead_after = dead_after
        # set after all machines have met, if there are several
        self._peers: PeerWatch | None = None
        self._attempt = -1
        self._max_restarts = self._remaining_restarts = max_restarts
        self._world_size = 0
        self._failed_since: float | None = None
        self._standstill = Standstill()
        self._elsewhere: Outcome | None = None

    def run(self) -> Outcome:
        """Run the ranks until they end, and return how.

        Raises:
            UsageError: The nodes cannot connect.
            EndedBySignal: The launcher received a signal that ends it.
        """
        self._start()
        while True:
            succeeded = self._look()
            if succeeded is None:
                continue
            if succeeded or not self._remaining_restarts:
                break
            self._remaining_restarts -= 1
            self._ranks.end()
            self._start()
        if not self._ranks.finished:
            self._ranks.end()
        return self._outcome(succeeded)

    def _start(self) -> None:
        """Meet the other nodes, and start the ranks."""
        self._attempt += 1
        self._failed_since = None
        plan = self._plan
        store = self._meeting.open()
        nproc = plan.share.nproc
        sizes = self._sizes(store) if plan.num_nodes > 1 else [nproc]
        first = sum(sizes[: plan.node_rank])
        self._world_size = sum(sizes)
        if plan.num_nodes > 1:
            # After the rendezvous, `dead_after` limits how long a machine may be silent
            store.set_timeout(PATIENCE)
            own = list(range(first, first + nproc))
            self._peers = PeerWatch(store, plan.node_rank, plan.num_nodes, own, self._dead_after)
        self._ranks.start(
            [self._rank_environment(first + local_rank, local_rank) for local_rank in range(nproc)]
        )

    def _sizes(self, store: RendezvousStore) -> list[int]:
        """Return the number of ranks of each node.

        Raises UsageError if a node does not join in time, or if node 0 ends.
        """
        plan = self._plan
        sizes: list[int] = []
        try:
            store.set(f"{SIZE_KEY}/{plan.node_rank}", str(plan.share.nproc))
            for node in range(plan.num_nodes):
                sizes.append(int(store.get(f"{SIZE_KEY}/{node}")))
        except RuntimeError as error:
            raise UsageError(
                f"Node {len(sizes)} of {plan.num_nodes} has not joined, or node 0 has ended.",
                why=str(error),
                fix="Run the command on every machine, each with its own --node_rank (0, 1, ...), "
                "and look at the output of node 0.",
            ) from error
        return sizes

    def _rank_environment(self, rank: int, local_rank: int) -> dict[str, str]:
        """Return the variables that torchrun sets for a rank, and DeepSpeed's equivalents."""
        plan = self._plan
        values = {
            "RANK": rank,
            "LOCAL_RANK": local_rank,
            "WORLD_SIZE": self._world_size,
            "LOCAL_WORLD_SIZE": plan.share.nproc,
            "LOCAL_SIZE": plan.share.nproc,
            "GROUP_RANK": plan.node_rank,
            "CROSS_RANK": plan.node_rank,
            "GROUP_WORLD_SIZE": plan.num_nodes,
            "CROSS_SIZE": plan.num_nodes,
            "ROLE_RANK": rank,
            "ROLE_NAME": ROLE,
            "ROLE_WORLD_SIZE": self._world_size,
            "MASTER_ADDR": plan.master_addr,
            "MASTER_PORT": self._meeting.master_port,
            "TORCHELASTIC_RESTART_COUNT": self._attempt,
            "TORCHELASTIC_MAX_RESTARTS": self._max_restarts,
            "TORCHELASTIC_RUN_ID": self._ranks.mark,
            "TORCHELASTIC_USE_AGENT_STORE": False,
            STORE: f"{self._meeting.place}/{self._meeting.master_port}",
        }
        return {**self._environment, **{name: str(value) for name, value in values.items()}}

    def _look(self) -> bool | None:
        """Wait a moment; return whether the ranks succeeded, or None if they still run."""
        self._ranks.wait(POLL_SECONDS)
        self._act_on_request()
        death = self._ranks.poll()
        self._standstill.look(self._ranks)
        if self._peers is not None:
            self._peers.stopped = self._standstill.logged_stopped
            if self._elsewhere is None and (heard := self._peers.failure_of_others()) is not None:
                self._elsewhere = heard
                logger.warning(f"{heard.headline}; ending the ranks here")
            if death is not None and not death.secondary:
                # Report it before the other ranks of this machine have ended
                self._peers.post_failure(self._outcome_of(death))
        if self._is_early(death):
            return None
        if death is not None:
            if self._remaining_restarts > 0:
                logger.warning(
                    f"{death.headline(self._world_size)}; restarting all ranks of this machine"
                )
            return False
        if self._elsewhere is not None:
            return False
        ended_well = self._ranks.finished or self._ranks.saved
        return True if ended_well and (self._peers is None or self._peers.all_finished()) else None

    def _is_early(self, death: Death | None) -> bool:
        """Return whether to wait for further reports about a failure, here or elsewhere."""
        if death is None and self._elsewhere is None:
            return False
        now = time.monotonic()
        self._failed_since = self._failed_since or now
        return now - self._failed_since < self._patience_after(death)

    def _patience_after(self, death: Death | None) -> float:
        """Return how many seconds to wait for further reports.

        `death` is the failure of a rank of this machine, if any.
        """
        if (
            death is not None
            and death.secondary
            and self._peers is not None
            and self._elsewhere is None
        ):
            return FOLLOW_SECONDS  # another machine has the cause and reports it
        if self._ranks.have_all_ended:
            return 0.0
        if self._elsewhere is not None:
            return FOLLOW_SECONDS if self._elsewhere.is_silence else SAY_SECONDS
        return SAY_SECONDS if death is not None and death.report is not None else 0.0

    def hear(self, number: int, _: FrameType | None = None) -> None:
        """Handle a signal: forward it to ranks that save, or end the launch.

        Args:
            number: Number of the signal.
        """
        name = signal.Signals(number)
        if name in REQUESTS and self._ranks.save_on(name) and name not in self._request.received:
            self._request.received.append(name)
        elif name is not signal.SIGUSR1:
            # Without ranks that save, SIGUSR1 has no meaning and must not end the launcher
            _end_by(name)

    def _act_on_request(self) -> None:
        """Forward new signals to the ranks, and end the ranks after the grace period."""
        request = self._request
        for name in request.unanswered():
            logger.info(
                f"received {name.name}: the ranks save at their next step and end "
                f"({request.grace:g} s for it)"
            )
            # After a request to end there is no restart, even if saving fails
            self._remaining_restarts = 0
            self._ranks.pass_on(name)
        if request.is_overdue and not (self._ranks.saved or self._ranks.finished):
            logger.warning(
                f"the ranks have not saved and ended within {request.grace:g} s of SIGTERM "
                "(--save-grace)"
            )
            _end_by(signal.SIGTERM)

    def _outcome(self, succeeded: bool) -> Outcome:
        """Return how the launch ended, and report a failure to the other nodes."""
        if succeeded:
            if not self._ranks.saved:
                return Outcome()
            logger.info(
                f"all ranks saved and ended (exit code {SAVED_EXIT_CODE}); run the same command "
                "again to continue"
            )
            return Outcome(SAVED_EXIT_CODE)
        death = self._ranks.cause()
        # A rank that only lost its peer has less information than the node of that peer.
        if self._elsewhere and (death is None or death.secondary):
            if self._peers is not None:
                self._peers.stay_for_others()
            return self._elsewhere
        if death is None:
            return Outcome(1, "a rank failed without a traceback")
        outcome = self._outcome_of(death)
        if self._peers is not None:
            self._peers.report_failure(outcome)
        return outcome

    def _outcome_of(self, death: Death) -> Outcome:
        return Outcome(death.exit_code, death.headline(self._world_size), death.story())


def run_ranks(
    plan: NodePlan,
    command: Command,
    environment: Mapping[str, str],
    max_restarts: int = 0,
    grace: float = 0.0,
    dead_after: float = math.inf,
) -> Outcome:
    """Run this machine's ranks until they end.

    Args:
        plan: What this machine runs.
        command: What each rank runs.
        environment: Variables of every rank, in addition to its place in the world.
        max_restarts: How often to restart all ranks after a failure.
        grace: Seconds for ranks that save on SIGTERM.
        dead_after: Seconds of silence after which another machine is lost.

    Returns:
        The exit code and, after a failure, its description.

    Raises:
        UsageError: The nodes cannot connect, or --tls is set without a secret.
    """
    if uses_tls():
        require_cryptography()
    with Ranks(command) as ranks:
        secret = read_secret()
        # only for a single node: other nodes could not get the secret
        if secret is None and plan.num_nodes == 1:
            secret = ranks.make_secret()
            environment = {**environment, SECRET_FILE: ranks.secret_file}
        elif secret is None and uses_tls():
            raise UsageError(
                "--tls needs the job's secret.",
                "The certificate is made from it, the same on every host.",
                f"name a file of {SECRET_BYTES} random bytes, mode 0600, the same on every host, "
                f"in {SECRET_FILE}.",
            )
        elif secret is None:
            secret = NO_SECRET
        meeting = Meeting(plan, secret)
        agent = RankAgent(meeting, ranks, environment, max_restarts, grace, dead_after)
        _catch_signals(agent)
        try:
            return agent.run()
        except EndedBySignal as ended:
            if not ranks.finished:
                ranks.end(ended.name)
            return Outcome(128 + ended.name, f"the launcher received {ended.name.name}")


def _catch_signals(agent: RankAgent) -> None:
    for number in (*ENDING_SIGNALS, signal.SIGUSR1):
        # Signals that are ignored at the start (nohup) stay ignored
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, agent.hear)


def _end_by(name: signal.Signals) -> None:
    # Ending the ranks takes a few seconds at most. A second Ctrl-C must not interrupt it and leave
    # orphans.
    for each in ENDING_SIGNALS:
        signal.signal(each, signal.SIG_IGN)
    raise EndedBySignal(name)
