"""A world of ranks in one process: threads that run one at a time, and a transport between them.

Another rank runs only when the current one waits: the next rank that can continue or, with a seed,
a random one. A run therefore repeats exactly, a failure has a useful traceback, and a deadlock is
detected immediately (`Deadlock` names the condition of each rank). Everything above the transport
is the library's own code.

The transport is the strictest one that `Transport` allows: data moves as late as possible and for
all ranks at once, and until then receive buffers hold NaN. Code that reads before `wait()` or
modifies a send buffer in use gets wrong numbers.
"""

from __future__ import annotations

import ctypes
import random
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor, nn

from deepseek_zero.base.device import fake_tensors
from deepseek_zero.base.mesh import Mesh
from deepseek_zero.comm.bootstrap import Hosts
from deepseek_zero.comm.collectives import Comm
from deepseek_zero.comm.context import WorldContext
from deepseek_zero.comm.flight_recorder import FlightRecorder
from deepseek_zero.comm.ids import CollectiveId
from deepseek_zero.comm.transports import base
from deepseek_zero.comm.transports.base import Transport, Use, Wait
from deepseek_zero.engine.connecting import compare_ranks
from deepseek_zero.extensions.group_parts import group_parts
from deepseek_zero.extensions.idle_memory import free_idle_memory
from deepseek_zero.extensions.layer_tiles import follow_tiles
from deepseek_zero.extensions.loss_factor import LossFactor
from deepseek_zero.extensions.model_changes import watch_changes
from deepseek_zero.extensions.root_parts import gather_parts
from deepseek_zero.extensions.state_dicts import StateDicts
from deepseek_zero.extensions.zero_init import ready_units
from deepseek_zero.optim.shard_set import ShardSet
from deepseek_zero.optim.sharded import ShardedOptimizer
from deepseek_zero.optim.step_settings import StepSettings
from deepseek_zero.planner.messages import SUM_TILE_NUMEL
from deepseek_zero.planner.plan import plan_model
from deepseek_zero.planner.plan_settings import Machine, PlanSettings
from deepseek_zero.sharding.comm_context import CommContext
from deepseek_zero.sharding.group_build import build_group
from deepseek_zero.sharding.param_group import ParamGroup
from deepseek_zero.sharding.pool import Pool
from deepseek_zero.sharding.runtime import Runtime
from deepseek_zero.sharding.wrap import wrap_model
from deepseek_zero.tiers.tier import Tiers
from tests.reference import MakeOptimizer

# PyTorch 2.11, built for CUDA but without a GPU, crashes if only threads other than the main one
# enter this mode, and here ranks are threads.
with fake_tensors():
    pass

CPU = torch.device("cpu")
T = TypeVar("T")
Ready = Callable[[], bool]


class Deadlock(AssertionError):
    """No rank can continue."""


class Baton:
    """Let one of several threads run at a time.

    Args:
        seed: Chooses the next rank at every wait. None: a rank runs until it has to wait, then the
            next one that can continue.
        timeouts: Number of TimeoutErrors that waiting ranks get, if no rank can continue, before it
            counts as a deadlock.
    """

    def __init__(self, size: int, seed: int | None, timeouts: int) -> None:
        self._turns = [threading.Semaphore(0) for _ in range(size)]
        self._waits: dict[int, tuple[Ready, str]] = dict.fromkeys(
            range(size), (lambda: True, "its first turn")
        )
        self._random = None if seed is None else random.Random(seed)
        self._timeouts = self._timeouts_left = timeouts
        self._deadlock = ""

    def run(self, bodies: Sequence[Callable[[], None]]) -> None:
        """Run one thread for each rank; return when all have ended."""

        def run_one(rank: int) -> None:
            self._turns[rank].acquire()
            try:
                bodies[rank]()
            finally:
                del self._waits[rank]
                self._pass_on(rank)

        threads = [
            threading.Thread(target=run_one, args=(rank,), daemon=True)
            for rank in range(len(bodies))
        ]
        for thread in threads:
            thread.start()
        self._pass_on(-1)
        for thread in threads:
            thread.join()

    def wait(self, rank: int, ready: Ready, what: str) -> None:
        """Run other ranks until `ready`; raise TimeoutError or Deadlock if none can continue."""
        if self._random is None and ready():
            return
        self._waits[rank] = ready, what
        self._pass_on(rank)
        self._turns[rank].acquire()
        if not ready():
            raise Deadlock(self._deadlock) if self._deadlock else TimeoutError

    def _pass_on(self, rank: int) -> None:
        size = len(self._turns)
        waiting = [
            each for step in range(1, size + 1) if (each := (rank + step) % size) in self._waits
        ]
        able = [each for each in waiting if self._waits[each][0]()]
        if able:
            self._timeouts_left = self._timeouts
        elif waiting and self._timeouts_left:
            self._timeouts_left -= 1
        elif waiting and not self._deadlock:
            self._deadlock = "; ".join(
                f"rank {each} waits for {self._waits[each][1]}" for each in sorted(waiting)
            )
        chosen = able if able and self._random is not None else (able or waiting)[:1]
        if chosen:
            self._turns[
                self._random.choice(chosen) if self._random is not None else chosen[0]
            ].release()


class Texts(dict[str, str]):
    """A key-value store for the flight recorders of a world."""

    set = dict.__setitem__
    get = dict.get

    def silences(self) -> dict[int, float]:
        return {}

    def send_farewell(self) -> None:
        pass


class Piece:
    """A tensor that other ranks read or write in place; only its owner holds a reference."""

    def __init__(self, tensor: Tensor) -> None:
        self.storage = tensor.untyped_storage()  # keeps the memory and is not a view of it
        self.seen = torch.empty(0, dtype=tensor.dtype)
        if tensor.numel():
            assert tensor.is_contiguous()
            memory = (ctypes.c_byte * tensor.nbytes).from_address(tensor.data_ptr())
            self.seen = torch.frombuffer(memory, dtype=tensor.dtype)


@dataclass
class Message:
    """A collective in progress.

    By member: its send buffers, its receive buffers, and which members have received.
    """

    size: int
    outgoing: dict[int, list[Piece]] = field(default_factory=dict)
    incoming: dict[int, list[Piece | None]] = field(default_factory=dict)
    done: set[int] = field(default_factory=set)
    # Of every member that has arrived, to record arrival times.
    arrivals: list[list[float]] = field(default_factory=list)
    has_travelled: bool = False

    @property
    def is_complete(self) -> bool:
        """Return whether every member has arrived."""
        return len(self.outgoing) == self.size

    def travel(self) -> None:
        """Fill the buffers of every member at once."""
        for member in () if self.has_travelled else self.incoming:
            self.fill(member)
        self.has_travelled = True

    def fill(self, member: int) -> None:
        """Fill the buffers of one member."""
        for peer, box in enumerate(self.incoming[member]):
            if peer != member and box is not None:
                box.seen.copy_(self.outgoing[peer][member].seen)


@dataclass(eq=False)
class Receipt:
    """The pending result of one member, which is read once all members have arrived."""

    message: Message
    member: int
    own: Tensor
    inbox: Sequence[Tensor | None]
    use: Use
    is_taken: bool = False

    def take(self, *, in_place: bool) -> None:
        if self.is_taken:
            return
        self.is_taken, message = True, self.message
        with torch.no_grad():
            if in_place:
                message.fill(self.member)
            else:
                message.travel()
            found = [
                message.outgoing[peer][self.member].seen if box is None else box
                for peer, box in enumerate(self.inbox)
            ]
            found[self.member] = self.own
            self.use(found)
        message.done.add(self.member)


class InProcess:
    """A `Transport` between threads.

    If ranks read in place, a rank that waits for anything also completes its other finished
    collectives, as `SharedMemory` does.

    Args:
        ranks: Members of the group.
        rank: Index of this rank.
    """

    device = CPU
    description = "threads"
    limitation = ""
    reports_arrival = True
    shares_pages = False

    def __init__(self, world: World, context: Context, ranks: Sequence[int]) -> None:
        self.world, self.context, self.ranks = world, context, tuple(ranks)
        self.rank, self.reads_in_place = self.ranks.index(context.rank), world.reads_in_place

    def empty(self, numel: int, dtype: torch.dtype) -> Tensor:
        return poisoned(torch.empty(numel, dtype=dtype))

    def all_gather(self, full: Tensor, cid: CollectiveId) -> Wait:
        slices = full.chunk(len(self.ranks))
        return self._issue([slices[self.rank]] * len(slices), slices, cid, lambda received: None)

    def exchange(
        self, pieces: Sequence[Tensor], inbox: Sequence[Tensor | None], cid: CollectiveId, use: Use
    ) -> Wait:
        assert self.reads_in_place or all(
            box is not None for peer, box in enumerate(inbox) if peer != self.rank
        )
        return self._issue(pieces, inbox, cid, use)

    def _issue(
        self, pieces: Sequence[Tensor], inbox: Sequence[Tensor | None], cid: CollectiveId, use: Use
    ) -> Wait:
        name = self.context.position(cid.lane, cid.sequence, self.ranks).name()
        self.world.issued[self.context.rank].append((cid.lane, name))
        for peer, box in enumerate(inbox):
            if peer != self.rank and box is not None and not self.is_read(box):
                poisoned(box)
        key = (self.ranks, cid.lane, cid.sequence, cid.check)
        message = self.world.messages.setdefault(key, Message(len(self.ranks)))
        message.outgoing[self.rank] = [Piece(piece) for piece in pieces]
        message.incoming[self.rank] = [None if box is None else Piece(box) for box in inbox]
        message.arrivals.append(cid.arrived)
        if message.is_complete:
            self.world.completed += 1
            for arrived in message.arrivals:
                arrived.append(time.perf_counter())
        receipt = Receipt(message, self.rank, pieces[self.rank], inbox, use)
        self.context.expected.append(receipt)

        def wait() -> None:
            what = f"'{name}', number {cid.sequence} of {cid.lane}"
            self._wait(lambda: message.is_complete or self._has_news(cid), what)
            if not message.is_complete:
                self.context.seen = self.world.completed
                raise TimeoutError
            if receipt in self.context.expected:
                self.context.expected.remove(receipt)
            receipt.take(in_place=self.reads_in_place)
            if len(message.done) == message.size:
                self.world.messages.pop(key, None)

        return wait

    def _has_news(self, cid: CollectiveId) -> bool:
        """Return whether a collective has completed since this rank last had the chance to issue
        work.
        """
        is_hurried = cid.poll_interval is not None and cid.poll_interval() < base.POLL_SECONDS
        return is_hurried and self.context.seen < self.world.completed

    def is_read(self, tensor: Tensor) -> bool:
        """Return whether a member of any group still reads a buffer of this rank."""
        if not self.reads_in_place:
            return False
        memory, here = tensor.untyped_storage().data_ptr(), self.context.rank
        return any(
            piece.seen.numel()
            and piece.storage.data_ptr() == memory
            and member not in message.done | {mine}
            for (ranks, *_), message in self.world.messages.items()
            if here in ranks and (mine := ranks.index(here)) in message.outgoing
            for member, piece in enumerate(message.outgoing[mine])
        )

    def wait_until_read(self, tensor: Tensor) -> None:
        self._wait(lambda: not self.is_read(tensor), "others to have read a buffer")

    def _wait(self, ready: Ready, what: str) -> None:
        baton, rank = self.world.baton, self.context.rank
        while self.reads_in_place and not ready():
            baton.wait(rank, lambda: ready() or self._has_come(), what)
            self.progress()
        baton.wait(rank, ready, what)

    def _has_come(self) -> bool:
        return any(receipt.message.is_complete for receipt in self.context.expected)

    @property
    def expects(self) -> bool:
        return self.reads_in_place and bool(self.context.expected)

    def progress(self) -> None:
        for receipt in [each for each in self.context.expected if each.message.is_complete]:
            # The reduction may wait for memory and call this method recursively.
            if receipt in self.context.expected:
                self.context.expected.remove(receipt)
                receipt.take(in_place=True)

    def end_engine(self, engine: str) -> None:
        pass


class Context(WorldContext):
    """The view that one rank has of a `World`."""

    def __init__(self, world: World, rank: int) -> None:
        self._in_process = world
        self.expected: list[Receipt] = []  # issued by this rank and not yet received
        # Number of completed collectives when this rank last returned from a wait.
        self.seen = 0
        keys = tuple(f"host {each * world.hosts // world.size}" for each in range(world.size))
        hosts = Hosts(rank, keys, keys)
        super().__init__(hosts, FlightRecorder(hosts, world.store))

    def gloo_over(self, ranks: Sequence[int]) -> Transport:  # type: ignore[override]
        return InProcess(self._in_process, self, ranks)

    def transport_over(self, name: str, ranks: Sequence[int]) -> Transport:
        return self.gloo_over(ranks)


@dataclass
class Rank:
    """The arguments of one rank's thread."""

    comm: Comm
    world: World

    @property
    def index(self) -> int:
        return self.comm.rank

    @property
    def size(self) -> int:
        return self.comm.size

    def issued(self, lane: str) -> list[str]:
        """Return the names of this rank's collectives in one lane ("engine 0/gather"), in order."""
        return [name for each, name in self.world.issued[self.index] if each == lane]


class World(Generic[T]):
    """Ranks that run one at a time.

    Args:
        seed: See `Baton`.
        timeouts: See `Baton`.
        hosts: Number of hosts, to which consecutive ranks are assigned.
        reads_in_place: Ranks read each other's memory, as ranks of one host do.

    Attributes:
        issued: By rank, lane and name of every collective in order.
    """

    def __init__(
        self,
        size: int,
        *,
        seed: int | None = None,
        reads_in_place: bool = False,
        timeouts: int = 0,
        hosts: int = 1,
    ) -> None:
        self.size, self.reads_in_place, self.hosts = size, reads_in_place, hosts
        self.baton = Baton(size, seed, timeouts)
        self.store = Texts()
        self.messages: dict[tuple[tuple[int, ...], str, int, int], Message] = {}
        self.issued: list[list[tuple[str, str]]] = [[] for _ in range(size)]
        self.completed = 0  # number of collectives at which every member has arrived

    def outcomes(self, body: Callable[[Rank], T]) -> list[T | Exception]:
        """Run `body` on every rank, once per world; return by rank its result or exception."""
        found: list[Any] = [None] * self.size
        self.errors: list[Exception] = []  # in the order in which they were raised

        def run(rank: int) -> None:
            try:
                world = Context(self, rank) if self.size > 1 else None
                found[rank] = body(Rank(Comm(CPU, world=world), self))
            except Exception as error:
                found[rank] = error
                self.errors.append(error)

        self.baton.run([lambda rank=rank: run(rank) for rank in range(self.size)])
        return found

    def run(self, body: Callable[[Rank], T]) -> list[T]:
        """Return the results of `outcomes`, or raise the first error.

        A Deadlock has the lowest priority.
        """
        found = self.outcomes(body)
        for error in sorted(self.errors, key=lambda error: isinstance(error, Deadlock)):
            raise error
        return found  # type: ignore[return-value]


def run_ranks(size: int, body: Callable[[Rank], T], **options: Any) -> list[T]:
    """Run `body` on ranks that take turns and return the results. options: arguments of `World`."""
    return World[T](size, **options).run(body)


def poisoned(tensor: Tensor) -> Tensor:
    """Fill a tensor with NaN or the largest integer, and return it."""
    with torch.no_grad():
        return tensor.fill_(
            float("nan") if tensor.dtype.is_floating_point else torch.iinfo(tensor.dtype).max
        )


def build_one(rank: Rank, model: nn.Module, **settings: Any) -> ParamGroup:
    """Build the single parameter group of a model that is one unit of one dtype, without hooks.

    settings: arguments of `PlanSettings`.
    """
    chosen = PlanSettings(**{"persistence_numel": 0, **settings})
    plan = plan_model(model, chosen, Mesh().on_world(rank.size, rank.index))
    (planned,) = plan.units[0].groups
    pool = Pool(CPU, rank.comm, SUM_TILE_NUMEL.on(CPU))
    comm_ctx = CommContext(rank.comm, pool, chosen.bucket_numel)
    return build_group(
        planned, dict(model.named_parameters()), comm_ctx, group_parts(plan, rank.comm, comm_ctx)
    )


def sharded(rank: Rank, model: nn.Module, mesh: Mesh | None = None, **settings: Any) -> Runtime:
    """Wrap a model on this rank.

    settings: arguments of `PlanSettings`; parameters of any size are sharded by default.
    """
    runtime = bare(rank, model, mesh, **settings)
    StateDicts(runtime)
    return runtime


def bare(rank: Rank, model: nn.Module, mesh: Mesh | None = None, **settings: Any) -> Runtime:
    """Wrap a model like `sharded`, but keep torch's own state dict."""
    here = (mesh or Mesh()).on_world(rank.size, rank.index)
    chosen = PlanSettings(**{"persistence_numel": 0, **settings})
    in_place = rank.comm.reads_in_place
    plan = plan_model(
        model,
        chosen,
        here,
        Machine(in_place, near_read_in_place=in_place, far_read_in_place=in_place),
    )
    comm = rank.comm.lay_out(here)
    compare_ranks(model, plan, comm)
    runtime = wrap_model(model, plan, comm, Tiers(), group_parts, ready_units)
    attach_extensions(runtime)
    return runtime


def attach_extensions(runtime: Runtime) -> None:
    """Attach the extensions that every engine has to a wrapped model."""
    LossFactor(runtime)
    gather_parts(runtime)
    watch_changes(runtime)
    follow_tiles(runtime)
    free_idle_memory(runtime)


def optimizer_over(
    runtime: Runtime, make: MakeOptimizer, max_norm: float = 0.0
) -> ShardedOptimizer:
    """Return an optimizer over the shards of a wrapped model."""
    groups = [{"params": list(runtime.model.parameters())}]
    return ShardedOptimizer(ShardSet(runtime, groups, make, StepSettings(max_norm=max_norm)))
