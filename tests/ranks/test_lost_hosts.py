"""A silent host is reported as lost on every other rank, with its name, within the time limit.

This holds for every launcher.
"""

from __future__ import annotations

import logging
import math
import os
import pickle
import socket
import subprocess
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from deepseek_zero.base import launch
from deepseek_zero.base.errors import HostLost, PeerError, UsageError
from deepseek_zero.base.launch import DEAD_AFTER, dead_after
from deepseek_zero.base.log import logger
from deepseek_zero.comm.collectives import Comm
from deepseek_zero.comm.context import WorldContext
from deepseek_zero.comm.net.channel import end_with_the_host
from deepseek_zero.comm.net.key_value_store import KeyValueStore, StoreClient
from deepseek_zero.comm.transports.gloo import for_connections, open_files
from tests.hosts import DEVICE

NOTHING_LEAVES = f"tc qdisc replace dev {DEVICE} root tbf rate 8bit burst 10 limit 10"
# Seconds of silence until a host is lost, and until every rank has the error on an idle machine
LIMIT, LATE = (2.0, 1.0)


@pytest.mark.ranks(4, hosts=2, fresh=True)
def test_a_cut_is_a_lost_host_on_every_rank_of_both_sides(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv(DEAD_AFTER, f"{LIMIT:g}")
    comm, rank = Comm(torch.device("cpu")), dist.get_rank()
    mine = rank // 2
    comm.barrier("all are here")
    # A rank may still wait in the barrier when another one has left it
    (tmp_path / str(rank)).touch()
    assert within(30.0, lambda: len(list(tmp_path.iterdir())) == 4)
    began = time.monotonic()
    if rank % 2 == 0:
        subprocess.run(NOTHING_LEAVES.split(), check=True)
    time.sleep(LATE)  # until the link is cut in both directions
    with pytest.raises(HostLost) as caught:
        comm.all_gather(torch.zeros(4 << 10), "gather", "nobody's").wait()
    assert isinstance(caught.value, PeerError)
    seconds = time.monotonic() - began
    there = {0: ("h0", [0, 1]), 1: ("h1", [2, 3])}[1 - mine]
    assert caught.value.hosts == [there]
    assert caught.value.what == f"{there[0]} (ranks {there[1][0]}, {there[1][1]}) silent for 2 s"
    assert LIMIT - 0.1 < seconds < LIMIT + 5 * LATE
    with pytest.raises(PeerError, match="silent for 2 s"):
        comm.barrier("the next one")
    assert time.monotonic() - began < seconds + 10.0


@pytest.mark.ranks(2, hosts=2, fresh=True)
def test_a_connection_with_keepalive_survives_silence_which_is_logged_with_the_host() -> None:
    """The kernel sends at most 127 keepalive probes, in two minutes.

    Here it sends two, and the silence lasts longer.
    """
    comm, world = Comm(torch.device("cpu")), WorldContext.of_this_world()
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logger.addHandler(handler)
    comm.barrier("all are here")
    store = world.recorder._store
    assert isinstance(store, KeyValueStore | StoreClient)
    assert within(10.0, lambda: store.silences())
    (life,) = store._idle.values() if isinstance(store, KeyValueStore) else [store._idle]
    assert life is not None
    life.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 2)
    # tc would not do: the kernel does not count packets that this host's queue drops
    if dist.get_rank():
        subprocess.run(["ip", "link", "set", DEVICE, "down"], check=True)
    time.sleep(6.5)
    assert world.recorder.find_lost_host(reads_store=False) is None
    assert launch.TELL_AFTER < store.silences()[1 - dist.get_rank()] < math.inf
    if dist.get_rank():
        subprocess.run(["ip", "link", "set", DEVICE, "up"], check=True)
    assert within(10.0, lambda: store.silences()[1 - dist.get_rank()] < 2.5)
    comm.barrier("nobody is lost")
    logger.removeHandler(handler)
    far = ["h1 (rank 1)", "h0 (rank 0)"][dist.get_rank()]
    assert [line for line in lines if far in line] == [
        f"{far} silent for 5 s",
        f"{far} answers again",
    ]


@pytest.mark.ranks(2)
def test_the_kernel_ends_the_connections_that_gloo_opens_with_a_group() -> None:
    before = open_files()
    group = dist.new_group(backend="gloo")
    opened = {number: file for number, file in open_files().items() if before.get(number) != file}
    found = for_connections(opened, lambda connection: end_with_the_host(connection, 13.0))
    assert found == 1, "one to the other rank"
    limits = []
    for descriptor in opened:
        with suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as connection:
            limits.append(connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT))
    assert 13_000 in limits
    dist.all_reduce(torch.ones(1), group=group)


def test_the_error_of_a_lost_host_names_hosts_and_ranks_and_can_be_pickled() -> None:
    error = HostLost([("h1", [2, 3]), ("h2", [4]), ("h3", list(range(6, 20)))], 10.0)
    assert error.what == "h1 (ranks 2, 3) and h2 (rank 4) and h3 (ranks 6 to 19) silent for 10 s"
    assert str(pickle.loads(pickle.dumps(error))) == str(error)


def test_how_long_a_host_may_be_silent_is_read_or_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(DEAD_AFTER, raising=False)
    assert dead_after() == 10.0
    for text, seconds in (("30", 30.0), ("inf", float("inf")), ("2", 2.0)):
        monkeypatch.setenv(DEAD_AFTER, text)
        assert dead_after() == seconds
    for text in ("1", "0", "-3", "nan", "soon"):
        monkeypatch.setenv(DEAD_AFTER, text)
        with pytest.raises(UsageError, match=DEAD_AFTER):
            dead_after()


def within(seconds: float, found: Callable[[], object]) -> object:
    until = time.monotonic() + seconds
    while not (value := found()) and time.monotonic() < until:
        time.sleep(0.05)
    return value
