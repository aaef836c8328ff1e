"""Worlds of gloo processes that run the bodies of tests marked `ranks`.

A pool is one world. Its processes are forked from a process that has imported the modules that
tests use (tests/preloaded.py), and run one test after another. The parent owns the TCP store, so no
port is guessed. The caller closes a pool after a failure, because its process groups may be out of
step. This module does not depend on pytest's items: tests/conftest.py turns a test into a Task and
an Outcome into a result.
"""

from __future__ import annotations

import ast
import faulthandler
import gc
import os
import pickle
import random
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from datetime import timedelta
from multiprocessing import connection, get_context
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.distributed as dist
from _pytest.assertion.rewrite import rewrite_asserts

from deepseek_zero.comm.transports import base
from tests.hosts import DEVICE, enter_host
from tests.hosts import hosts as make_hosts

SEED = 1234
START_SECONDS = 240.0
POLL_SECONDS = (
    # between two reads of the shared error state; ranks of one machine need no shorter interval
    0.2
)
# Seconds for the other ranks after a failure: they may be waiting for the failed rank in a
# collective.
GRACE_SECONDS = 3.0
# Longer than any test, so that the pool's own timeout takes effect first.
GROUP_TIMEOUT = timedelta(minutes=30)
PORT_ON_HOSTS = 29500  # Port of the store of rank 0, for hosts that cannot reach the parent's store


@dataclass(frozen=True)
class Task:
    """A test body: its location, its pickled arguments and the warning filters of the test."""

    module: str
    path: str
    function: str
    arguments: bytes
    filters: bytes


@dataclass(frozen=True)
class Place:
    """The location of a rank.

    Attributes:
        host: First process of its host; 0: this machine.
        store: Address and port of the world's store.
        local: Variables of the ranks on one host, which a launcher may omit.
    """

    host: int
    store: tuple[str, int]
    local: dict[str, str]


@dataclass(frozen=True)
class Answer:
    """The result of one rank: kind is "ok", "failed" or "skipped"; text: a traceback or reason."""

    kind: str
    text: str = ""


@dataclass
class Outcome:
    """The results of all ranks.

    Attributes:
        answers: By rank.
        silent: Stacks of the ranks that did not answer.
        dead: Exit codes of the ranks that died.
        crashes: Stacks of the ranks that a signal such as SIGSEGV ended.
    """

    answers: dict[int, Answer] = field(default_factory=dict)
    silent: dict[int, str] = field(default_factory=dict)
    dead: dict[int, int | None] = field(default_factory=dict)
    crashes: dict[int, str] = field(default_factory=dict)

    @property
    def failed(self) -> bool:
        return bool(
            self.silent
            or self.dead
            or any(answer.kind == "failed" for answer in self.answers.values())
        )


def seed_everything() -> None:
    """Seed every random number generator equally for every test and rank."""
    random.seed(SEED)
    torch.manual_seed(SEED)


class RankPool:
    """A world of `size` processes that the constructor starts and `close` ends.

    hosts: number of hosts (tests/hosts.py) to which consecutive ranks are assigned; 1: this
    machine.
    """

    def __init__(self, size: int, hosts: int = 1) -> None:
        self.size = size
        self._hosts = ExitStack()
        places = self._places(hosts)
        self._folder = tempfile.TemporaryDirectory(prefix="ranks-", ignore_cleanup_errors=True)
        context, environment = get_context("forkserver"), dict(os.environ)
        context.set_forkserver_preload(["tests.preloaded"])
        pairs = [context.Pipe() for _ in range(size)]
        self._pipes = [ours for ours, _ in pairs]
        self._processes = [
            context.Process(
                target=_serve,
                args=(rank, size, place, theirs, str(self._stacks(rank)), environment),
            )
            for rank, ((_, theirs), place) in enumerate(zip(pairs, places, strict=True))
        ]
        for process, (_, theirs) in zip(self._processes, pairs, strict=True):
            process.start()
            theirs.close()  # Only the parent keeps this end, so that a dead rank closes the pipe.
        started = self._collect(START_SECONDS)
        if started.failed:
            self.close()
            raise RuntimeError(f"A pool of {size} ranks did not start: {started}")

    def run(self, task: Task, timeout: float) -> Outcome:
        """Run `task` on every rank; return within about `timeout` seconds."""
        for pipe in self._pipes:
            pipe.send(task)
        return self._collect(timeout)

    def close(self) -> None:
        """End every rank, with SIGKILL if necessary."""
        for pipe in self._pipes:
            pipe.close()
        patience = time.monotonic() + 1.0
        for process in self._processes:
            process.join(max(0.0, patience - time.monotonic()))
            if process.is_alive():
                process.kill()
                process.join()
        self._hosts.close()
        self._folder.cleanup()

    def _places(self, hosts: int) -> list[Place]:
        if hosts == 1:
            self._store = dist.TCPStore(
                "127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=GROUP_TIMEOUT
            )
            numbers = [
                {"LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(self.size)}
                for rank in range(self.size)
            ]
            return [Place(0, ("127.0.0.1", self._store.port), local) for local in numbers]
        machines = self._hosts.enter_context(make_hosts(hosts))
        pids = [machines[rank * hosts // self.size].pid for rank in range(self.size)]
        return [
            Place(pid, (machines[0].address, PORT_ON_HOSTS), {"GLOO_SOCKET_IFNAME": DEVICE})
            for pid in pids
        ]

    def _collect(self, timeout: float) -> Outcome:
        outcome = Outcome()
        waiting = {pipe: rank for rank, pipe in enumerate(self._pipes)}
        deadline = time.monotonic() + timeout
        while waiting and (
            ready := connection.wait(list(waiting), max(0.0, deadline - time.monotonic()))
        ):
            for pipe in ready:
                rank = waiting.pop(pipe)
                try:
                    outcome.answers[rank] = pipe.recv()
                except (EOFError, ConnectionResetError):
                    self._processes[rank].join(GRACE_SECONDS)
                    outcome.dead[rank] = self._processes[rank].exitcode
                    if self._stacks(rank).exists():
                        outcome.crashes[rank] = self._stacks(rank).read_text()
            if any(answer.kind == "failed" for answer in outcome.answers.values()):
                deadline = min(deadline, time.monotonic() + GRACE_SECONDS)
        outcome.silent = {rank: self._stack_of(rank) for rank in waiting.values()}
        return outcome

    def _stacks(self, rank: int) -> Path:
        return Path(self._folder.name) / f"rank{rank}.txt"

    def _stack_of(self, rank: int) -> str:
        """Return the stack of a rank that hangs, even inside C code."""
        process, path = self._processes[rank], self._stacks(rank)
        if process.pid is None or not process.is_alive() or not path.exists():
            return "(no stack: the process had not started or had ended)"
        os.kill(process.pid, signal.SIGUSR1)
        for _ in range(20):
            time.sleep(0.05)  # nothing else shows that the signal handler has written
            if "most recent call first" in path.read_text():
                break
        return path.read_text().strip()


def _serve(
    rank: int,
    size: int,
    place: Place,
    pipe: connection.Connection,
    stacks: str,
    environment: dict[str, str],
) -> None:
    """Run one rank: join the world, then run tasks until the parent closes the pipe.

    environment: the parent's current variables. The process from which ranks are forked still has
    the variables of its own start.
    """
    os.environ.clear()
    os.environ.update(environment)
    # Ctrl-C reaches the whole process group; the parent ends the ranks.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    written = open(stacks, "w")  # noqa: SIM115 (open for life)
    faulthandler.register(signal.SIGUSR1, file=written, all_threads=True)
    faulthandler.enable(file=written, all_threads=True)
    if place.host:
        enter_host(place.host)
    address, port = place.store
    os.environ |= {
        **place.local,
        "RANK": str(rank),
        "WORLD_SIZE": str(size),
        "MASTER_ADDR": address,
        "MASTER_PORT": str(port),
        # A second init_process_group("env://") also joins the parent's store.
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }
    torch.set_num_threads(1)
    base.POLL_SECONDS = POLL_SECONDS
    keeps = bool(place.host) and rank == 0
    store = dist.TCPStore(
        address, port, is_master=keeps, wait_for_workers=False, timeout=GROUP_TIMEOUT
    )
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=GROUP_TIMEOUT)
    pipe.send(Answer("ok"))
    while True:
        try:
            task = pipe.recv()
        except EOFError:
            os._exit(0)  # exit immediately: destroying a group that another rank has left can block
        try:
            pipe.send(_run(task))
        except BrokenPipeError:
            os._exit(0)


def _run(task: Task) -> Answer:
    environment, folder, arguments = dict(os.environ), os.getcwd(), dict[str, Any]()
    try:
        with warnings.catch_warnings():
            warnings.resetwarnings()
            function = _load(task)
            arguments = pickle.loads(task.arguments)
            warnings.filters[:] = pickle.loads(task.filters)
            seed_everything()
            function(**arguments)
    except pytest.skip.Exception as skipped:
        return Answer("skipped", str(skipped))
    except BaseException:
        return Answer("failed", _told())
    finally:
        for patch in [
            value for value in arguments.values() if isinstance(value, pytest.MonkeyPatch)
        ]:
            patch.undo()  # a copy of the fixture's object, which pytest does not undo
        os.environ.clear()
        os.environ.update(environment)
        os.chdir(folder)
        # Destroy a test's model and engine with the test, and not during a later one.
        gc.collect()
    return Answer("ok")


def _told() -> str:
    """Return the traceback without frames of this file."""
    error = sys.exception()
    assert error is not None
    frames = error.__traceback__
    while (
        frames is not None
        and frames.tb_frame.f_code.co_filename == __file__
        and frames.tb_next is not None
    ):
        frames = frames.tb_next
    return "".join(traceback.format_exception(type(error), error, frames))


def _load(task: Task) -> Callable[..., Any]:
    """Import the test's module by its path, once per rank, with assertion rewriting."""
    if task.module not in sys.modules:
        source = Path(task.path).read_bytes()
        tree = ast.parse(source, task.path)
        rewrite_asserts(tree, source, task.path)
        module = ModuleType(task.module)
        module.__file__ = task.path
        sys.modules[task.module] = module
        try:
            exec(compile(tree, task.path, "exec"), module.__dict__)
        except BaseException:
            del sys.modules[task.module]
            raise
        gc.collect()
        # Freeze objects made by imports, so that tests that inspect all objects see only their own.
        gc.freeze()
    return getattr(sys.modules[task.module], task.function)
