"""Our elastic agent: torch's scaffolding (rendezvous, rank numbers, restarts) around cli/ranks.py.

torch's own LocalElasticAgent is not used because it waits thirty seconds for the survivors of a
failure, orders failures by whole seconds, and leaves the children of a killed rank alone;
SimpleElasticAgent is the extension point torch documents for this.  Several nodes tell each other
of a failure through the store they meet at. Importing this module imports torch, so cli/run.py does
it late.
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
from deepseek_zero.cli.peers import PeerWatch, tell_stopped
from deepseek_zero.cli.ranks import Command, Death, Outcome, Ranks
from deepseek_zero.comm.net.channel import Address, Refused, read_secret, warn_without_secret
from deepseek_zero.comm.net.store import NO_SECRET, RendezvousStore, keep_store, reach_store
from deepseek_zero.comm.net.tls import require_cryptography

ROLE = "default"

POLL_SECONDS = 0.1

MEETING_TIMEOUT = timedelta(minutes=15)
"""How long a node waits for the others to be started."""

STILL_WAITING_SECONDS = 10.0
"""After which a node that does not reach node 0 says so, once."""

FOLLOW_SECONDS = 2.0
"""How long ranks may take to say what the loss of a machine did to them, and the cause of their
failure to be heard.
"""

SAY_SECONDS = 0.5
"""How long ranks may take to raise their own error after another's: what fails a step often fails
it on every rank.
"""

LOOK_SECONDS = 1.0
"""Between looks whether ranks are stopped."""

ENDING_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)

REQUESTS = (signal.SIGTERM, signal.SIGUSR1)
"""Passed on to ranks that save when they are asked to end (engine/preemption.py)."""


def gpus_of_this_machine(environment: Mapping[str, str]) -> tuple[str, ...]:
    """Return the names of the GPUs torch can use here; counting them does not start CUDA in this
    process.
    """
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return visible_gpus(count, environment)


@dataclass
class Meeting(RendezvousHandler):
    """Where the nodes meet: a store held by node 0; on a single node at a port the system chose
    while opening it.

    secret: which all nodes and ranks of the job hold. place: where its store listens, for ranks.
    """

    plan: NodePlan
    run_id: str
    secret: bytes = field(repr=False)
    place: str = ""
    _stores: list[RendezvousStore] = field(default_factory=list)

    def get_backend(self) -> str:
        """Name for torch's event log."""
        return "deepseek_zero"

    @property
    def use_agent_store(self) -> bool:
        """No: at MASTER_PORT a script may open a store of torch's; our own doors take the
        launcher's (`place`).
        """
        return False

    def next_rendezvous(self) -> RendezvousInfo:
        """Open or join the store.

        A restart (single node) opens a new one at a new port: in the old one the ranks would read
        the addresses of their predecessors, and its port is still held.
        """
        plan = self.plan
        if plan.num_nodes > 1:
            place = f"{plan.master_addr}:{plan.master_port}"
            logger.info(f"node {plan.node_rank} of {plan.num_nodes}: meeting the others at {place}")
        wanted = 0 if self._stores else plan.master_port
        host, port = self._open(wanted)
        self.place = f"{host}:{port}"
        # For scripts that call torch's own init_process_group: there rank 0 listens, and asks for
        # no secret.
        master_port = port + 1 if plan.num_nodes > 1 else _free_port(host)
        return RendezvousInfo(
            self._stores[-1],
            plan.node_rank,
            plan.num_nodes,
            RendezvousStoreInfo(plan.master_addr, master_port),
        )

    def _open(self, port: int) -> Address:
        """Open or reach the store; return where it listens."""
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
        """Return where node 0's store listens. Raises `UsageError` where the others would look for
        it elsewhere.

        sought: what master_addr means on this machine; where another machine has that address, it
        leads here.
        """
        plan = self.plan
        host = listening_address(plan.num_nodes == 1, plan.master_addr)
        if plan.num_nodes > 1 and reached_at(plan.master_addr) == sought != host:
            raise UsageError(
                f"The other nodes would come to {sought}, and the store listens at {host} "
                "(--interface).",
                why=f"{plan.master_addr}, where all meet, is another address of this machine.",
                fix=(
                    f"Say --master_addr={host} on every machine (MASTER_ADDR under Slurm), or name "
                    "that interface."
                ),
            )
        return host

    def _no_meeting(self, error: Exception) -> UsageError:
        return UsageError(
            f"The nodes cannot meet at {self.plan.master_addr}:{self.plan.master_port}.",
            why=(str(error).splitlines() or [type(error).__name__])[0],
            fix="Another program may hold the port (leave --master_port out on a single node, and "
            "a free one is taken), or node 0 is not running there, or the address cannot be "
            "reached from here.",
        )

    def is_closed(self) -> bool:
        """Never: the meeting lasts as long as the launcher."""
        return False

    def set_closed(self) -> None:
        """Nothing to close."""

    def num_nodes_waiting(self) -> int:
        """The number of nodes is fixed, so nobody joins later."""
        return 0

    def get_run_id(self) -> str:
        """The launch's mark."""
        return self.run_id

    def shutdown(self) -> bool:
        """The store goes with this process."""
        return True


def _resolved(host: str) -> str:
    """Return the address of a name; OSError if it has none."""
    return str(socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][4][0])


def _reach(host: str, port: int, secret: bytes, node: int) -> RendezvousStore:
    """Return node 0's store, as soon as it is there. Raises `Refused` if another's listens there,
    OSError if nobody does for long.
    """
    began = time.monotonic()
    is_told = False
    while True:
        try:
            return reach_store((host, port), secret, node, watches=True)
        except Refused:
            raise
        except OSError as error:
            waited = time.monotonic() - began
            if waited > MEETING_TIMEOUT.total_seconds():
                raise
            if waited > STILL_WAITING_SECONDS and not is_told:
                logger.warning(
                    f"still waiting for node 0 at {host}:{port}: "
                    f"{str(error) or 'it does not answer'}"
                )
                is_told = True
            time.sleep(POLL_SECONDS)


def _free_port(host: str) -> int:
    """Return a port that nobody listens at now."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as probe:
        probe.bind((host, 0))
        return int(probe.getsockname()[1])


@dataclass
class EndRequest:
    """Signals by which somebody asked this launch to end.  grace: seconds from SIGTERM to the end
    by force.
    """

    grace: float
    received: list[signal.Signals] = field(default_factory=list)
    _answered: int = 0
    _deadline: float = float("inf")

    def unanswered(self) -> list[signal.Signals]:
        """Return the signals that came since the last call."""
        new = self.received[self._answered :]
        self._answered += len(new)
        if signal.SIGTERM in new:  # SIGUSR1 says beforehand that SIGTERM will come
            self._deadline = time.monotonic() + self.grace
        return new

    @property
    def is_overdue(self) -> bool:
        return time.monotonic() > self._deadline


@dataclass
class Standstill:
    """Names ranks of this machine that somebody has stopped. told: of those that still are.

    A rank that is stopped at every look may run between them (a limit on its share of a core): one
    that has had CPU time since is not the same standstill.
    """

    told: set[int] = field(default_factory=set)
    # By rank and ticks of CPU time
    _since: dict[tuple[int, int], float] = field(default_factory=dict)
    _looked: float = 0.0

    def look(self, ranks: Ranks) -> None:
        """Look at the ranks' states, once a second at most; say who has been stopped for long, and
        who runs again.
        """
        now = time.monotonic()
        if now - self._looked < LOOK_SECONDS:
            return
        self._looked = now
        self._since = {each: self._since.get(each, now) for each in ranks.stopped()}
        stopped = {rank for (rank, _), since in self._since.items() if now - since >= TELL_AFTER}
        tell_stopped(socket.gethostname(), self.told, stopped)
        self.told = stopped


class RankAgent(SimpleElasticAgent):
    """Runs one machine's ranks for torch's elastic scaffolding."""

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
        self._peers: PeerWatch | None = None  # where there are other machines, once all have met
        self._attempt = -1
        self._failed_since: float | None = None
        self._standstill = Standstill()
        self.elsewhere: Outcome | None = None

    @property
    def world_size(self) -> int:
        """Number of ranks over all nodes, once they have met."""
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
            # All have met: how long one may be silent is `dead_after`
            self._meeting_store.set_timeout(PATIENCE)
            self._peers = PeerWatch(
                self._meeting_store, plan.node_rank, plan.num_nodes, own, self._dead_after
            )
        return self._ranks.start(
            [self._rank_environment(worker_group, worker) for worker in worker_group.workers]
        )

    def _rank_environment(self, group: WorkerGroup, worker: Worker) -> dict[str, str]:
        """Return everything that torchrun sets for a rank, and DeepSpeed's names for the same."""
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
        # The scaffolding sleeps between calls; waiting here instead ends at the very moment a rank
        # does.
        self._ranks.wait(POLL_SECONDS)
        self._act_on_request()
        death = self._ranks.poll()
        self._standstill.look(self._ranks)
        if self._peers is not None:
            self._peers.stopped = self._standstill.told
            if self.elsewhere is None and (heard := self._peers.heard_failure()) is not None:
                self.elsewhere = heard
                logger.warning(f"{heard.headline}; ending the ranks here")
            if death is not None and not death.secondary:
                # Before the others here have ended
                self._peers.begin_to_tell(self._words_of(death))
        if self._is_early(death):
            return RunResult(WorkerState.HEALTHY)
        if death is not None:
            if self._remaining_restarts > 0:
                logger.warning(
                    f"{death.headline(self.world_size)}; restarting all ranks of this machine"
                )
            return RunResult(WorkerState.FAILED)
        if self.elsewhere is not None:
            return RunResult(WorkerState.FAILED)
        ended_well = self._ranks.finished or self._ranks.saved
        if ended_well and (self._peers is None or self._peers.all_finished()):
            return RunResult(
                WorkerState.SUCCEEDED, {worker.global_rank: None for worker in worker_group.workers}
            )
        return RunResult(WorkerState.HEALTHY)

    def _is_early(self, death: Death | None) -> bool:
        """Return whether to wait a moment longer for what is still to be said of a failure, here or
        elsewhere.
        """
        if death is None and self.elsewhere is None:
            return False
        now = time.monotonic()
        self._failed_since = self._failed_since or now
        return now - self._failed_since < self._patience_after(death)

    def _patience_after(self, death: Death | None) -> float:
        """Return for how many seconds the ranks here may still speak. death: of one of them, the
        one to act on.
        """
        if (
            death is not None
            and death.secondary
            and self._peers is not None
            and self.elsewhere is None
        ):
            return FOLLOW_SECONDS  # its cause is another machine's, which tells it
        if self._ranks.have_all_ended:
            return 0.0
        if self.elsewhere is not None:
            return FOLLOW_SECONDS if self.elsewhere.is_silence else SAY_SECONDS
        return SAY_SECONDS if death is not None and death.report is not None else 0.0

    def hear(self, number: int, _: FrameType | None = None) -> None:
        """Take a signal sent to the launcher: a request for ranks that save when asked, else the
        end of all.
        """
        name = signal.Signals(number)
        if name in REQUESTS and self._ranks.save_on(name) and name not in self._request.received:
            self._request.received.append(name)
        elif name is not signal.SIGUSR1:
            # Without ranks that save it means nothing, and must not end the launcher
            _end_by(name)

    def _act_on_request(self) -> None:
        """Pass signals on to the ranks; end them when they take longer than the grace."""
        request = self._request
        for name in request.unanswered():
            logger.info(
                f"received {name.name}: the ranks save at their next step and end "
                f"({request.grace:g} s for it)"
            )
            self._remaining_restarts = (
                0  # whoever asks for the end wants no restart, should saving fail
            )
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

    def stay_for_others(self) -> None:
        """Let the other nodes read what one of them told."""
        if self._peers is not None:
            self._peers.stay_for_others()

    def tell_failure(self, death: Death) -> None:
        """Tell the other nodes, if there are any."""
        if self._peers is not None:
            self._peers.tell_failure(self._words_of(death))

    def _words_of(self, death: Death) -> Outcome:
        return Outcome(death.exit_code, death.headline(self.world_size), death.story())


def run_ranks(
    plan: NodePlan,
    command: Command,
    environment: Mapping[str, str],
    max_restarts: int = 0,
    grace: float = 0.0,
    dead_after: float = math.inf,
) -> Outcome:
    """Run this machine's ranks to their end; environment: what every rank gets besides its place in
    the world.

    grace: seconds that ranks have to save after SIGTERM, where they said that they do. dead_after:
    seconds of silence after which another machine is lost.
    """
    if uses_tls():
        require_cryptography()
    _silence_scaffolding()
    with Ranks(command) as ranks:
        secret = read_secret()
        if secret is None and plan.num_nodes == 1:  # other nodes could not know ours
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
        return _outcome(agent, ranks, result)


def _outcome(agent: RankAgent, ranks: Ranks, result: RunResult) -> Outcome:
    if not result.is_failed():
        if not ranks.saved:
            return Outcome()
        logger.info(
            f"all ranks saved and ended (exit code {SAVED_EXIT_CODE}); the same command again goes "
            "on from there"
        )
        return Outcome(SAVED_EXIT_CODE)
    death = ranks.cause()
    # A rank here that only lost its peer says less than the node on which that peer failed.
    if agent.elsewhere and (death is None or death.secondary):
        agent.stay_for_others()
        return agent.elsewhere
    if death is None:
        return Outcome(1, "a rank failed and left no trace")
    agent.tell_failure(death)
    return Outcome(death.exit_code, death.headline(agent.world_size), death.story())


def _catch_signals(agent: RankAgent) -> None:
    for number in (*ENDING_SIGNALS, signal.SIGUSR1):
        # Nohup means it: what we were started to ignore stays so
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, agent.hear)


def _end_by(name: signal.Signals) -> None:
    # Once is enough: ending the ranks takes seconds at most, and an impatient second Ctrl-C must
    # not leave orphans.
    for each in ENDING_SIGNALS:
        signal.signal(each, signal.SIG_IGN)
    raise SignalException(f"received {name.name}", name)


def _silence_scaffolding() -> None:
    """Silence torch's elastic loggers, which would tell in their words what the launcher says once
    in ours.
    """
    for name in list(logging.root.manager.loggerDict):
        if name.startswith("torch.distributed.elastic"):
            logging.getLogger(name).setLevel(logging.CRITICAL)
