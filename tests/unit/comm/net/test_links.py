"""Socket links between two ranks of this process, over a relay (tests/wire.py) with faults."""

from __future__ import annotations

import os
import socket
import threading
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress

import pytest
import torch
from torch import Tensor

from deepseek_zero.base.device import storage_users
from deepseek_zero.base.errors import ModelMismatchError
from deepseek_zero.base.launch import TLS
from deepseek_zero.comm.ids import CollectiveId, lane_number, tag_of
from deepseek_zero.comm.net import links as module
from deepseek_zero.comm.net.channel import Hello, Listener, Role, dial, introduce
from deepseek_zero.comm.net.link import (
    EAGER_BUDGET,
    EAGER_BYTES,
    PIECE_BYTES,
    Frame,
    FrameKind,
    Header,
    Link,
)
from deepseek_zero.comm.net.links import Links
from deepseek_zero.comm.transports.base import ConnectionLost, Wait
from deepseek_zero.comm.transports.tcp import Tcp
from tests.wire import Wire

SECRET = b"s" * 32
SMALL, MEDIUM, LARGE = 1000, EAGER_BYTES, 5 * PIECE_BYTES + 12  # in bytes
MANY = EAGER_BUDGET // EAGER_BYTES * 5 // 4
PATIENCE = 20.0  # in seconds; the test process may be suspended for a while


@contextmanager
def two_ranks() -> Iterator[tuple[Links, Links, Wire]]:
    """Yield the links of ranks 0 and 1 and the relay between them."""
    doors = [Listener("127.0.0.1", SECRET, rank) for rank in (0, 1)]
    wire = Wire(doors[0].address)
    ranks = (
        Links(0, SECRET, doors[0], {1: doors[1].address}),
        Links(1, SECRET, doors[1], {0: wire.address}, ["h0"]),
    )
    try:
        on_both(lambda links: links.connect(), ranks)
        assert all(link.resumed for links in ranks for link in links.links.values())
        yield *ranks, wire
    finally:
        on_both(lambda links: links.close(), ranks)
        wire.close()


def on_both(call: Callable[[Links], object], ranks: Sequence[Links]) -> None:
    threads = [threading.Thread(target=call, args=(links,)) for links in ranks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def cid(place: int, lane: str = "gather", engine: int = 1) -> CollectiveId:
    name = f"engine {engine}/{lane}"
    return CollectiveId(name, lane_number(engine, lane), place, zlib.crc32(str(place).encode()), [])


def random(numel: int) -> Tensor:
    return torch.randint(0, 255, (numel,), dtype=torch.uint8)


def until(wait: Wait) -> None:
    """Call `wait` again after each TimeoutError, like a collective."""
    deadline = time.monotonic() + PATIENCE
    while True:
        try:
            return wait()
        except TimeoutError:
            assert time.monotonic() < deadline, "nothing came"


def until_true(found: Callable[[], object], what: str) -> None:
    deadline = time.monotonic() + PATIENCE
    while not found():
        assert time.monotonic() < deadline, f"never: {what}"
        time.sleep(0.01)


def swap(first: Links, second: Links, numel: int, place: int) -> Callable[[], None]:
    """Start an exchange of `numel` bytes each way; the returned function waits and compares."""
    sent, found = (
        [random(numel), random(numel)],
        [torch.zeros(numel, dtype=torch.uint8) for _ in range(2)],
    )
    begun = [
        links.start({1 - rank: (sent[rank], found[rank])}, cid(place))
        for rank, links in enumerate((first, second))
    ]

    def finish() -> None:
        for wait in begun:
            until(wait)
        assert torch.equal(found[0], sent[1])
        assert torch.equal(found[1], sent[0])

    return finish


@pytest.fixture(params=["plain", "tls"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Run the test without and with encrypted connections."""
    monkeypatch.setenv(TLS, str(int(request.param == "tls")))
    return str(request.param)


def test_data_is_readable_on_the_network_only_without_tls(way: str) -> None:
    marker = b"marked by nobody"
    with two_ranks() as (first, second, wire):
        tensor = torch.frombuffer(bytearray(marker * 40_000), dtype=torch.uint8)
        boxes = [torch.zeros_like(tensor), torch.zeros_like(tensor)]
        for wait in [
            each.start({1 - at: (tensor, boxes[at])}, cid(0))
            for at, each in enumerate((first, second))
        ]:
            until(wait)
        assert all(torch.equal(box, tensor) for box in boxes)
        on_the_wire = b"".join(wire.passed)
    assert len(on_the_wire) > 2 * tensor.numel()
    assert (marker in on_the_wire, b"dszero" in on_the_wire) == (
        (True, True) if way == "plain" else (False, False)
    )


@pytest.mark.parametrize("numel", [1, SMALL, MEDIUM, MEDIUM + 1, PIECE_BYTES, LARGE])
def test_tensors_of_any_size_arrive_both_ways_at_once(numel: int, way: str) -> None:
    with two_ranks() as (first, second, _):
        for each in [swap(first, second, numel, place) for place in range(5)]:
            each()


def test_collectives_arrive_in_any_order_and_dtype_and_are_released(way: str) -> None:
    with two_ranks() as (first, second, _):
        outgoing = [torch.randn(300_000).bfloat16(), torch.randn(40_000), torch.arange(7)]
        boxes = [torch.zeros_like(each) for each in outgoing]
        sends = [
            first.start({1: (each, each[:0])}, cid(place)) for place, each in enumerate(outgoing)
        ]
        for place in (2, 0, 1):
            until(second.start({0: (boxes[place][:0], boxes[place])}, cid(place)))
        for wait in sends:
            until(wait)
        assert all(map(torch.equal, boxes, outgoing))
        for links in (first, second):
            link = links.links[1 - links.rank]
            assert not (link.boxes or link.offers or link.early or link.ready or link.eager)
        assert [storage_users(each) for each in (*boxes, *outgoing)] == [1] * 6, (
            "the pool takes no viewed buffer back"
        )


def test_unread_small_tensors_are_bounded_at_their_receiver(way: str) -> None:
    with two_ranks() as (first, second, _):
        tensors = [random(EAGER_BYTES) for _ in range(MANY)]
        sends = [
            first.start({1: (each, each[:0])}, cid(place)) for place, each in enumerate(tensors)
        ]
        until(sends[0])
        with pytest.raises(TimeoutError):
            sends[-1]()  # the sender holds it back
        link = second.links[0]
        assert 0 < sum(map(len, link.early.values())) <= EAGER_BUDGET
        for place in reversed(range(MANY)):
            box = torch.zeros_like(tensors[place])
            until(second.start({0: (box[:0], box)}, cid(place)))
            assert torch.equal(box, tensors[place])
        for wait in sends:
            until(wait)
        assert link.used == EAGER_BUDGET, "and there is room again"


def test_a_receive_box_created_during_an_arrival_is_filled() -> None:
    sent = random(SMALL)
    with two_ranks() as (_, second, _):
        link, tag, found = second.links[0], tag_of(cid(0)), torch.zeros_like(sent)
        payload = bytes(sent.tolist())
        # Imitate the receive thread when the header and the payload arrive separately.
        with second._lock:
            link.header[:] = Header(
                FrameKind.EAGER, link.received + 1, tag, SMALL, zlib.crc32(payload), total=SMALL
            ).pack()
            link.take_header()
            link.urgent.append(Frame(FrameKind.READY, tag + 1))  # of another tensor
            link.resumed = False  # stops all sending
            wait = second.start({0: (sent[:0], found)}, cid(0))
            link.into[:], link.crc = payload, zlib.crc32(payload)
            for exchange in link.take_payload():
                exchange.end_one()
            assert [frame.tag for frame in link.urgent] == [tag + 1], "it is asked for no more"
            link.urgent.clear()
        until(wait)
        assert torch.equal(found, sent) and not link.early and not link.boxes and link.used == SMALL


def test_a_small_tensor_waits_for_no_large_one() -> None:
    numel = 16 << 20  # more than the buffers of the kernel and the relay

    def slowly(data: bytes) -> bytes:
        time.sleep(0.005)
        return data

    with two_ranks() as (first, second, wire):
        wire.garble = slowly
        queues = [first.links[1].queue, second.links[0].queue]
        large = swap(first, second, numel, 0)
        until_true(lambda: all(queues), "both are asked for it")
        swap(first, second, SMALL, 1)()
        assert all(queues), "most of it waits"
        wire.garble = bytes
        large()


def test_unacknowledged_messages_are_sent_first_and_small_ones_before_large_ones() -> None:
    link = Link(1, ("127.0.0.1", 1), "h1", threading.Condition(), memoryview(b""))
    again, large, small = (
        Frame(kind, tag)
        for tag, kind in enumerate((FrameKind.PIECE, FrameKind.PIECE, FrameKind.READY))
    )
    again.number = 7
    link.queue.extend([again, large])
    link.urgent.append(small)
    assert [link.next_frame() for _ in range(4)] == [again, small, large, None]


def test_a_destroyed_engine_leaves_no_memory_and_no_slot() -> None:
    with two_ranks() as (first, second, _):
        for engine in range(1, 4):
            # The second rank also takes part in this lane.
            second.start({0: (random(0), random(1))}, cid(MANY, engine=engine))
            for place in range(MANY):
                first.start(
                    {1: (random(EAGER_BYTES), random(EAGER_BYTES))}, cid(place, engine=engine)
                )
            early = second.links[0].early
            until_true(
                lambda early=early: sum(map(len, early.values())) >= EAGER_BUDGET, "all of it came"
            )  # type: ignore[misc]
            assert sum(map(len, early.values())) == EAGER_BUDGET
            for links in (first, second):
                links.end_engine(f"engine {engine}")
            assert not (second.links[0].early or first.links[1].boxes or first.links[1].offers)
            # The receipt of this exchange returns the buffer budget to the sender.
            swap(first, second, SMALL, engine * 1000)()


def test_a_connection_that_breaks_repeatedly_resumes_its_transfer(way: str) -> None:
    with two_ranks() as (first, second, wire):
        made = 0
        for turn in range(6):
            until_true(lambda made=made: wire.connections > made, "a connection that can break")  # type: ignore[misc]
            under_way = [
                swap(first, second, numel, 10 * turn + k)
                for k, numel in enumerate((LARGE, SMALL, LARGE))
            ]
            time.sleep(0.002 * turn)
            made = wire.connections
            wire.reset()
            for each in under_way:
                each()
        assert wire.connections > 5


def test_a_message_with_a_flipped_bit_is_sent_again(caplog: pytest.LogCaptureFixture) -> None:
    places, passed = [PIECE_BYTES, 6 * PIECE_BYTES], [0]

    def flip(data: bytes) -> bytes:
        passed[0] += len(data)
        if not places or passed[0] < places[0]:
            return data
        places.pop(0)
        return data[:-1] + bytes([data[-1] ^ 1])

    with two_ranks() as (first, second, wire):
        wire.garble = flip
        for place in range(3):
            swap(first, second, LARGE, place)()
    assert not places
    assert any("is replaced" in line and "damaged" in line for line in caplog.messages)


def test_silence_is_logged_and_the_connection_replaced_after_it(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(module, "SILENT_SECONDS", 0.6)
    # Longer than a suspension of this process, which looks like silence.
    monkeypatch.setattr(module, "TELL_AFTER", 2.5)
    monkeypatch.setattr(module, "BEAT_SECONDS", 0.2)

    def lines() -> list[str]:
        # A busy machine may log other lines.
        return [line for line in caplog.messages if line.startswith("rank")]

    def told() -> list[tuple[bool, bool]]:
        return [("is silent" in line, "again" in line) for line in lines()]

    with two_ranks() as (first, second, wire):
        swap(first, second, SMALL, 0)()
        wire.silent.set()
        under_way = swap(first, second, LARGE, 1)
        until_true(lambda: len(told()) >= 2, "both have told it")
        wire.silent.clear()
        under_way()
        until_true(lambda: len(told()) >= 4, "both have told that it is over")
    assert told() == [(True, False)] * 2 + [(False, True)] * 2
    assert all(
        "rank 1 on 127.0.0.1 " in line or "rank 0 on h0 (127.0.0.1) " in line for line in lines()
    )


@pytest.mark.parametrize("has_unanswered", [True, False])
def test_a_stalled_connection_is_replaced_when_the_peer_answers_again(
    has_unanswered: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regression test: after a cut of 7 s, lost data was resent 3 s after the peer answered."""
    monkeypatch.setattr(module, "SILENT_SECONDS", 0.6)
    monkeypatch.setattr(module, "BEAT_SECONDS", 0.2)
    monkeypatch.setattr(module, "has_unanswered", lambda connection: has_unanswered)
    reach, is_back = module._Recovery._reach, threading.Event()

    def reach_when_back(recovery: module._Recovery, seconds: float) -> None:
        if not is_back.is_set():
            time.sleep(0.05)
            raise OSError("no answer")
        reach(recovery, seconds)

    with two_ranks() as (first, second, wire):
        link = second.links[0]  # the second rank dials
        swap(first, second, SMALL, 0)()
        until_true(lambda: not link.recovering, "it is connected, and knows it")
        monkeypatch.setattr(module._Recovery, "_reach", reach_when_back)
        wire.silent.set()
        until_true(lambda: link.recovering, "a new connection is looked for")
        wire.silent.clear()
        healed = time.monotonic()
        until_true(lambda: link.heard > healed, "the old connection is heard again")
        if has_unanswered:
            is_back.set()
            until_true(lambda: link.generation == 2 and link.resumed, "a new connection")
        until_true(lambda: not link.recovering, "nothing more is looked for")
        assert link.generation == (2 if has_unanswered else 1)
        swap(first, second, LARGE, 1)()


def test_poll_returns_after_a_large_part_of_a_payload_arrived() -> None:
    """Otherwise, a slow connection would wake the thread for each packet."""
    goes_on, reached = threading.Event(), threading.Event()

    def half(data: bytes) -> bytes:
        if sum(map(len, wire.passed)) > LARGE // 2:
            reached.set()
            goes_on.wait(PATIENCE)
        return data

    with two_ranks() as (first, second, wire):
        link, sent, came = second.links[0], random(LARGE), torch.zeros(LARGE, dtype=torch.uint8)
        wire.garble = half
        waits = [
            first.start({1: (sent, sent[:0])}, cid(0)),
            second.start({0: (came[:0], came)}, cid(0)),
        ]
        assert reached.wait(PATIENCE)
        assert link.connection is not None
        until_true(lambda: 1 < wakes_at(link) <= module.WAKE_BYTES, "it waits for much of the rest")
        goes_on.set()
        for wait in waits:
            until(wait)
        assert torch.equal(came, sent)
        until_true(lambda: wakes_at(link) == 1, "it hears of every byte again")


def test_a_receiver_waits_only_for_bytes_that_will_arrive(monkeypatch: pytest.MonkeyPatch) -> None:
    """If reading stops for another connection, fewer bytes than SO_RCVLOWAT may remain."""
    found: list[tuple[int, int]] = []
    read = Links._read

    def noted(links: Links, link: Link) -> None:
        read(links, link)
        found.append((link.wakes_at, len(link.into) if link.reads is not None else 1))

    monkeypatch.setattr(module, "_READ_AT_ONCE", PIECE_BYTES // 3)
    monkeypatch.setattr(Links, "_read", noted)
    with two_ranks() as (first, second, _):
        for place in range(5):
            sent, came = random(LARGE), torch.zeros(LARGE, dtype=torch.uint8)
            waits = [
                first.start({1: (sent, sent[:0])}, cid(place)),
                second.start({0: (came[:0], came)}, cid(place)),
            ]
            for wait in waits:
                until(wait)
            assert torch.equal(came, sent)
    assert any(at > 1 for at, _ in found)
    assert all(at <= sure for at, sure in found)


def wakes_at(link: Link) -> int:
    assert link.connection is not None
    return link.connection.getsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT)


def test_a_rank_that_ends_is_named_in_current_and_later_waits() -> None:
    with two_ranks() as (first, second, _):
        tensor = random(LARGE)
        wait = first.start({1: (tensor, tensor)}, cid(0))
        began = time.monotonic()
        second.close()
        with pytest.raises(
            ConnectionLost, match=r"rank 1 is lost: its process has ended"
        ) as caught:
            until(wait)
        # Much faster than a detection by silence.
        assert (caught.value.rank, time.monotonic() - began < module.dead_after() / 2) == (1, True)
        with pytest.raises(ConnectionLost):
            first.start({1: (tensor, tensor)}, cid(1))()


def test_a_host_without_answers_is_lost_after_the_limit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "dead_after", lambda: 1.0)
    for name, value in {"SILENT_SECONDS": 0.3, "BEAT_SECONDS": 0.1}.items():
        monkeypatch.setattr(module, name, value)

    def unreachable(*_: object) -> socket.socket:
        raise TimeoutError("no route")

    with two_ranks() as (first, _, wire):
        tensor = random(LARGE)
        wait = first.start({1: (tensor, tensor)}, cid(0))
        began = time.monotonic()
        monkeypatch.setattr(module, "dial", unreachable)
        wire.silent.set()
        with pytest.raises(
            ConnectionLost, match=r"rank 1 is lost: its host 127.0.0.1 has not answered for 1 s"
        ):
            until(wait)
        assert 1.0 < time.monotonic() - began < 10.0
        monkeypatch.undo()


def test_a_rank_that_is_busy_for_long_is_not_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its threads are blocked, but its host answers, like the kernel of a stopped process."""
    monkeypatch.setattr(module, "dead_after", lambda: 0.5)
    for name, value in {"SILENT_SECONDS": 0.2, "BEAT_SECONDS": 0.1}.items():
        monkeypatch.setattr(module, name, value)
    with two_ranks() as (first, second, _):
        tensor, box = random(LARGE), torch.zeros(LARGE, dtype=torch.uint8)
        stands_still = threading.Event()
        monkeypatch.setattr(second.listener, "_look_at", lambda descriptor: stands_still.wait())
        with second._lock:
            wait = first.start({1: (tensor, box[:0])}, cid(0))
            deadline = time.monotonic() + 2.0
            while time.monotonic() < deadline:
                with pytest.raises(TimeoutError):
                    wait()
        stands_still.set()
        monkeypatch.undo()
        until(second.start({0: (box[:0], box)}, cid(0)))
        until(wait)
        assert torch.equal(box, tensor)


def test_another_size_is_an_error_with_both_sizes_and_not_the_end() -> None:
    with two_ranks() as (first, second, _):
        for place, (here, there) in enumerate(
            [(SMALL, 4), (SMALL, 2 * SMALL), (LARGE, SMALL), (SMALL, LARGE)]
        ):
            first.start({1: (random(here), random(0))}, cid(place))
            wait = second.start({0: (random(0), random(there))}, cid(place))
            with pytest.raises(
                ModelMismatchError,
                match=f"rank 0 sent {here} bytes where this rank expects {there}",
            ):
                until(wait)
        swap(first, second, LARGE, 100)()


def test_a_peer_with_a_false_length_is_disconnected_before_memory_is_allocated() -> None:
    with two_ranks() as (first, second, _):
        with dial(first.listener.address, PATIENCE) as liar:
            introduce(liar, SECRET, Hello(Role.DATA, 1, 0))
            liar.sendall(Header(FrameKind.RESUME, 0).pack())
            liar.sendall(Header(FrameKind.PIECE, 1, 5, 1 << 30, 0, 0, 1 << 30).pack())
            liar.settimeout(PATIENCE)
            with suppress(ConnectionError):
                while liar.recv(1 << 16):
                    pass
        swap(first, second, LARGE, 0)()


def test_a_forked_child_does_not_hide_the_end_of_its_rank(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # The closed connection must be detected, not the silence.
    monkeypatch.setattr(module, "SILENT_SECONDS", 60.0)
    with two_ranks() as (first, second, _):
        reader, writer = os.pipe()
        child = os.fork()
        if child == 0:
            os.close(writer)
            os.read(reader, 1)
            os._exit(0)
        try:
            second.close()
            until_true(lambda: first.links[1].gone, "the end is seen")
            assert first.links[1].gone == "its process has ended"
        finally:
            os.close(writer)
            os.close(reader)
            os.waitpid(child, 0)


def test_a_group_counts_its_ranks_by_itself() -> None:
    with two_ranks() as (first, second, _):
        found = []
        for rank, links in enumerate((first, second)):
            full = torch.zeros(6)
            full.chunk(2)[rank].fill_(rank + 1)
            found.append((full, Tcp(rank, (0, 1), (1 - rank,), links).all_gather(full, cid(0))))
        for full, wait in found:
            until(wait)
            assert full.tolist() == [1.0] * 3 + [2.0] * 3
