"""Run the ranks of this machine within torch's elastic framework.

torch provides the rendezvous, rank numbers and restarts; cli/ranks.py runs the processes. torch's
LocalElasticAgent is not used: it waits thirty seconds for the other ranks after a failure, orders
failures by whole seconds, and does not end the children of a killed rank. `SimpleElasticAgent` is
torch's documented extension point. Several nodes report failures through the store of node 0. This
module imports torch, so cli/run.py imports it late.
"""

from __future__ import annotations

import logging
import math
import signal
import socket
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from types import FrameType
from typing import Any

import torch
from torch.distributed import Store  # type: ignore[attr-defined]  # public
from torch.distributed.elastic.agent.server.api import (
    RunResult,
    SimpleElasticAgent,
    Worker,
    WorkerGroup,
    WorkerSpec,
    WorkerState,
)
from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.rendezvous import (
    RendezvousHandler,
    RendezvousInfo,
    RendezvousStoreInfo,
)

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
from deepseek_zero.cli.nodes import NodePlan, visible_gpus
from deepseek_zero.cli.peers import PeerWatch, log_stopped
from deepseek_zero.cli.ranks import Command, Death, Outcome, Ranks
from deepseek_zero.comm.net.channel import Address, Refused, read_secret, warn_without_secret
from deepseek_zero.comm.net.store import NO_SECRET, RendezvousStore, keep_store, reach_store
from deepseek_zero.comm.net.tls import require_cryptography

ROLE = "default"

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
class Meeting(RendezvousHandler):
    """A rendezvous at a store of node 0.

    A single node uses a port that the system chooses when the store opens.

    Attributes:
        plan: What this machine runs.
        run_id: Mark of the launch.
        secret: Secret that all nodes and ranks of the job share.
        place: Address and port of the store, for the ranks.
    """

    plan: NodePlan
    run_id: str
    secret: bytes = field(repr=False)
    place: str = ""
    _stores: list[RendezvousStore] = field(default_factory=list)

    def get_backend(self) -> str:
        """Return the name for torch's event log."""
        return "deepseek_zero"

    @property
    def use_agent_store(self) -> bool:
        """Return False: a script may open torch's own store at MASTER_PORT.

        The library's APIs use the launcher's store (`place`) instead.
        """
        return False

    def next_rendezvous(self) -> RendezvousInfo:
        """Open or join the store.

        A restart (on a single node) opens a new store at a new port. The old store contains the
        addresses of the previous ranks, and its port is still in use.
        """
        plan = self.plan
        if plan.num_nodes > 1:
            place = f"{plan.master_addr}:{plan.master_port}"
            logger.info(f"node {plan.node_rank} of {plan.num_nodes}: rendezvous at {place}")
        wanted = 0 if self._stores else plan.master_port
        host, port = self._open(wanted)
        self.place = f"{host}:{port}"
        # For scripts that call torch's init_process_group: rank 0 listens there without a secret.
        master_port = port + 1 if plan.num_nodes > 1 else _free_port(host)
        return RendezvousInfo(
            self._stores[-1],
            plan.node_rank,
            plan.num_nodes,
            RendezvousStoreInfo(plan.master_addr, master_port),
        )

    def _open(self, port: int) -> Address:
        """Open or reach the store; return its address and port."""
        plan = self.plan
        try:
            sought = _resolved(plan.master_addr)
        except OSError as error:
            raise self._no_meeting(error) from error
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

    def is_closed(self) -> bool:
        """Return False: the rendezvous lasts as long as the launcher."""
        return False

    def set_closed(self) -> None:
        """Do nothing."""

    def num_nodes_waiting(self) -> int:
        """Return 0: the number of nodes is fixed."""
        return 0

    def get_run_id(self) -> str:
        """Return the mark of the launch."""
        return self.run_id

    def shutdown(self) -> bool:
        """Return True: the store ends with this process."""
        return True


def _resolved(host: str) -> str:
    """Return the address of a host name."""
    return str(socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][4][0])


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


def _free_port(host: str) -> int:
    """Return a port that is currently free."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as probe:
        probe.bind((host, 0))
        return int(probe.getsockname()[1])


@dataclass
class EndRequest:
    """Signals that asked this launch to end.

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

    A rank with a limit on its CPU share may be stopped at every check and run in between. If it has
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


class RankAgent(SimpleElasticAgent):
    """Run one machine's ranks for torch's elastic framework."""

    def __init__(
        self,
        spec: WorkerSpec,
        plan: NodePlan,
        ranks: Ranks,
        environment: Mapping[str, str],
        grace: float,
        dead_after: float,
    ) -> None:
        super().__init__(spec)
        assert isinstance(spec.rdzv_handler, Meeting)
        self._meeting = spec.rdzv_handler
        self._ranks = ranks
        self._environment = environment
        self._request = EndRequest(grace)
        self._plan = plan
        self._dead_after = dead_after
        # set after all machines have met, if there are several
        self._peers: PeerWatch | None = None
        self._attempt = -1
        self._failed_since: float | None = None
        self._standstill = Standstill()
        self._elsewhere: Outcome | None = None

    @property
    def world_size(self) -> int:
        """Return the number of ranks of all nodes, after they have met."""
        workers = self.get_worker_group().workers
        return int(workers[0].world_size) if workers else 0

    @property
    def _meeting_store(self) -> Store:
        return self.get_worker_group().store  # type: ignore[return-value]  # torch annotates it as None

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        self._attempt += 1
        self._failed_since = None
        plan = self._plan
        own = [worker.global_rank for worker in worker_group.workers]
        if plan.num_nodes > 1:
            # After the rendezvous, `dead_after` limits how long a machine may be silent
            self._meeting_store.set_timeout(PATIENCE)
            self._peers = PeerWatch(
                self._meeting_store, plan.node_rank, plan.num_nodes, own, self._dead_after
            )
        return self._ranks.start(
            [self._rank_environment(worker_group, worker) for worker in worker_group.workers]
        )

    def _rank_environment(self, group: WorkerGroup, worker: Worker) -> dict[str, str]:
        """Return the variables that torchrun sets for a rank, and DeepSpeed's equivalents."""
        local_world_size = str(group.spec.local_world_size)
        values = {
            "RANK": worker.global_rank,
            "LOCAL_RANK": worker.local_rank,
            "WORLD_SIZE": worker.world_size,
            "LOCAL_WORLD_SIZE": local_world_size,
            "LOCAL_SIZE": local_world_size,
            "GROUP_RANK": group.group_rank,
            "CROSS_RANK": group.group_rank,
            "GROUP_WORLD_SIZE": group.group_world_size,
            "CROSS_SIZE": group.group_world_size,
            "ROLE_RANK": worker.role_rank,
            "ROLE_NAME": group.spec.role,
            "ROLE_WORLD_SIZE": worker.role_world_size,
            "MASTER_ADDR": group.master_addr,
            "MASTER_PORT": group.master_port,
            "TORCHELASTIC_RESTART_COUNT": self._attempt,
            "TORCHELASTIC_MAX_RESTARTS": group.spec.max_restarts,
            "TORCHELASTIC_RUN_ID": group.spec.rdzv_handler.get_run_id(),
            "TORCHELASTIC_USE_AGENT_STORE": False,
            STORE: f"{self._meeting.place}/{group.master_port}",
        }
        return {**self._environment, **{name: str(value) for name, value in values.items()}}

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        # The framework sleeps between calls; waiting here returns as soon as a rank ends.
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
            return RunResult(WorkerState.HEALTHY)
        if death is not None:
            if self._remaining_restarts > 0:
                logger.warning(
                    f"{death.headline(self.world_size)}; restarting all ranks of this machine"
                )
            return RunResult(WorkerState.FAILED)
        if self._elsewhere is not None:
            return RunResult(WorkerState.FAILED)
        ended_well = self._ranks.finished or self._ranks.saved
        if ended_well and (self._peers is None or self._peers.all_finished()):
            return RunResult(
                WorkerState.SUCCEEDED, {worker.global_rank: None for worker in worker_group.workers}
            )
        return RunResult(WorkerState.HEALTHY)

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
            number: The signal.
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

    def _stop_workers(self, worker_group: WorkerGroup, *_: object) -> None:
        self._shutdown()

    def _shutdown(
        self, death_sig: signal.Signals = signal.SIGTERM, timeout: int = 0, *_: object
    ) -> None:
        if not self._ranks.finished:
            self._ranks.end(death_sig)

    def outcome(self, result: RunResult) -> Outcome:
        """Return how the launch ended, and report a failure to the other nodes.

        Args:
            result: The result of `run`.
        """
        if not result.is_failed():
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
        return Outcome(death.exit_code, death.headline(self.world_size), death.story())


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

    Raises:
        UsageError: The nodes cannot meet, or --tls is set without a secret.
    """
    if uses_tls():
        require_cryptography()
    _silence_scaffolding()
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
        spec = WorkerSpec(
            role=ROLE,
            local_world_size=plan.share.nproc,
            rdzv_handler=Meeting(plan, ranks.mark, secret),
            entrypoint=command.target,
            max_restarts=max_restarts,
            monitor_interval=0.001,
        )
        agent = RankAgent(spec, plan, ranks, environment, grace, dead_after)
        _catch_signals(agent)
        try:
            result = agent.run()
        except SignalException as error:
            return Outcome(128 + error.sigval, f"the launcher received {error.sigval.name}")
        return agent.outcome(result)


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
    raise SignalException(f"received {name.name}", name)


def _silence_scaffolding() -> None:
    """Silence torch's elastic loggers, which would repeat the launcher's messages."""
    for name in list(logging.root.manager.loggerDict):
        if name.startswith("torch.distributed.elastic"):
            logging.getLogger(name).setLevel(logging.CRITICAL)
