"""All ranks read every record of the key-value store; processes outside the job have no access."""

from __future__ import annotations

import json
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress

import pytest

from deepseek_zero.base.errors import UsageError
from deepseek_zero.base.launch import INTERFACE, SECRET_FILE, TLS
from deepseek_zero.comm.bootstrap import Hosts
from deepseek_zero.comm.net import key_value_store as module
from deepseek_zero.comm.net.channel import Address, Hello, Listener, Refused, Role, dial, introduce
from deepseek_zero.comm.net.key_value_store import (
    ANSWER_SECONDS,
    MOST_TEXT,
    KeyValueStore,
    Operation,
    StoreClient,
    open_store,
)
from tests.wire import Wire

SECRET = b"s" * 32
PATIENCE = 20.0  # in seconds; the test process may be suspended for a while


@pytest.fixture
def listener() -> Iterator[Listener]:
    found = Listener("127.0.0.1", SECRET, 0)
    yield found
    found.close()


@pytest.fixture
def far(listener: Listener) -> Iterator[Callable[[int], StoreClient]]:
    """Yield a function that creates the store clients of other ranks."""
    made: list[StoreClient] = []

    def make(rank: int) -> StoreClient:
        made.append(StoreClient(listener.address, SECRET, rank))
        return made[-1]

    yield make
    for each in made:
        each.close()


Make = Callable[[int], StoreClient]


def test_lines_are_read_by_all_and_written_over(listener: Listener, far: Make) -> None:
    store = KeyValueStore(listener)
    first, second = far(1), far(2)
    assert first.get("waiting/1") is None
    first.set("waiting/1", "für " + "x" * 300_000)
    assert store.get("waiting/1") == second.get("waiting/1") == "für " + "x" * 300_000
    store.set("waiting/1", "")
    assert second.get("waiting/1") == ""


def test_records_are_readable_after_the_process_with_the_store_ended(
    listener: Listener, far: Make
) -> None:
    store, first, second = KeyValueStore(listener), far(1), far(2)
    first.set("waiting/1", "a collective")
    store.set("ended/0", "its program finished")
    store.send_farewell()
    listener.close()
    for each in (first, second):
        assert (each.get("waiting/1"), each.get("ended/0")) == (
            "a collective",
            "its program finished",
        )
        assert each.get("raised/0") is None
        assert not each.set("waiting/1", "a later one")


def test_the_end_of_the_store_without_a_closing_message_is_an_error(
    listener: Listener, far: Make
) -> None:
    KeyValueStore(listener)
    first = far(1)
    listener.close()
    with pytest.raises(RuntimeError, match="rank 0, which holds the key-value store, has ended"):
        first.get("ended/0")


def test_an_unauthenticated_peer_changes_nothing_and_the_job_continues(
    listener: Listener, far: Make
) -> None:
    store, friend = KeyValueStore(listener), far(1)
    with pytest.raises(Refused):
        StoreClient(listener.address, b"o" * 32, 1)
    with dial(listener.address, PATIENCE) as stranger:
        stranger.sendall(b"\x01" + b"raised/1".ljust(200))
        with suppress(ConnectionResetError):
            assert stranger.recv(1 << 12) == b""
    friend.set("ended/1", "well")
    assert (store.get("ended/1"), store.get("raised/1")) == ("well", None)


@pytest.mark.parametrize(
    "request_",
    [struct.pack("!BII", Operation.SET, 5, 1 << 30), struct.pack("!BII", 7, 1, 1), b"\xff" * 40],
)
def test_an_announced_gigabyte_and_nonsense_end_the_connection(
    listener: Listener, far: Make, request_: bytes
) -> None:
    store = KeyValueStore(listener)
    with dial(listener.address, PATIENCE) as connection:
        introduce(connection, SECRET, Hello(Role.RECORDER, 1, 0))
        connection.sendall(request_)
        assert connection.recv(1) == b""
    assert MOST_TEXT < 1 << 30
    assert far(1).get("x") is store.get("x") is None


def test_a_broken_connection_is_reopened_and_the_end_of_rank_0_is_detected(
    listener: Listener, far: Make
) -> None:
    store, friend = KeyValueStore(listener), far(1)
    assert friend._connection is not None
    friend._connection.shutdown(socket.SHUT_RDWR)
    friend.set("a", "b")
    assert store.get("a") == "b"
    listener.close()
    friend._connection.shutdown(socket.SHUT_RDWR)
    with pytest.raises(RuntimeError, match="rank 0"):
        friend.get("a")


@pytest.mark.parametrize("uses_tls", [False, True])
# Number of messages before the damaged one, which is the request or the answer.
@pytest.mark.parametrize("passes", [0, 1])
def test_a_flipped_byte_closes_a_connection_and_loses_no_record(
    uses_tls: bool, passes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """TLS raises an error that is no ConnectionError; without TLS, the received text is invalid."""
    monkeypatch.setenv(TLS, str(int(uses_tls)))
    listener = Listener("127.0.0.1", SECRET, 0)
    store, wire = KeyValueStore(listener), Wire(listener.address)
    friend = StoreClient(wire.address, SECRET, 1)
    assert friend.set("a", "b")  # the handshake is complete
    flips = [False] * passes + [True]
    wire.garble = lambda data: (
        data[:-1] + bytes([data[-1] ^ 0x80]) if flips and flips.pop(0) else data
    )
    assert friend.get("a") == "b"
    assert not flips and wire.connections == 2
    assert friend.set("c", "d") and store.get("c") == "d"
    friend.close()
    wire.close()
    listener.close()


def test_a_stopped_rank_0_is_not_lost_and_blocks_no_rank(
    listener: Listener, far: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, friend = KeyValueStore(listener), far(1)
    monkeypatch.setattr("deepseek_zero.comm.net.key_value_store.HURRIED_SECONDS", 0.2)
    monkeypatch.setattr("deepseek_zero.comm.net.key_value_store.ANSWER_SECONDS", 0.4)
    monkeypatch.setattr("deepseek_zero.comm.net.key_value_store.QUIET_SECONDS", 0.5)
    store.set("a", "b")
    goes_on = threading.Event()
    look_at = listener._look_at
    monkeypatch.setattr(
        listener, "_look_at", lambda descriptor: (goes_on.wait(), look_at(descriptor))
    )
    began = time.monotonic()
    assert not friend.set("c", "d")
    assert [friend.get("a") for _ in range(100)] == [None] * 100
    assert time.monotonic() - began < 10.0, "not 100 times HURRIED_SECONDS"
    goes_on.set()
    assert until(lambda: friend.set("c", "d")) and until(lambda: friend.get("a")) == "b"
    assert store.get("c") == "d"


def test_a_stopped_rank_0_is_queried_over_the_existing_connection(
    listener: Listener, far: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A new connection for each retry would fill the listen queue of the stopped process."""
    store, friend = KeyValueStore(listener), far(1)
    monkeypatch.setattr("deepseek_zero.comm.net.key_value_store.HURRIED_SECONDS", 0.1)
    monkeypatch.setattr("deepseek_zero.comm.net.key_value_store.ANSWER_SECONDS", 0.1)
    monkeypatch.setattr("deepseek_zero.comm.net.key_value_store.QUIET_SECONDS", 0.1)
    monkeypatch.setattr("deepseek_zero.comm.net.key_value_store.POLL_SECONDS", 0.02)
    dialled: list[Address] = []

    def dial_noted(address: Address, seconds: float) -> socket.socket:
        dialled.append(address)
        return dial(address, seconds)

    monkeypatch.setattr("deepseek_zero.comm.net.key_value_store.dial", dial_noted)
    goes_on = threading.Event()
    look_at = listener._look_at
    monkeypatch.setattr(
        listener, "_look_at", lambda descriptor: (goes_on.wait(), look_at(descriptor))
    )
    for number in range(8):
        assert not friend.set("a", str(number))
    goes_on.set()
    assert until(lambda: friend.set("b", "c"))
    assert store.get("a") == "0", "what was under way is done, and its answer is no other's"
    assert until(lambda: friend.get("b")) == "c"
    assert not dialled


@pytest.mark.parametrize("watches", [False, True])
def test_a_full_queue_is_no_evidence_if_the_host_answers_or_is_local(
    listener: Listener, watches: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = KeyValueStore(listener)
    friend = StoreClient(listener.address, SECRET, 1, watches=watches, dead_after=0.0)
    assert not watches or until(store.silences)
    monkeypatch.setattr("deepseek_zero.comm.net.key_value_store.HURRIED_SECONDS", 0.1)
    goes_on = threading.Event()
    look_at = listener._look_at
    monkeypatch.setattr(
        listener, "_look_at", lambda descriptor: (goes_on.wait(), look_at(descriptor))
    )
    listener._listener.listen(0)
    queue: list[socket.socket] = []
    with suppress(TimeoutError):
        while len(queue) < 10:
            queue.append(dial(listener.address, 0.1))
    assert 0 < len(queue) < 10, "the kernel takes no more"
    friend._drop()
    for _ in range(3):
        assert not friend.set("a", "b")
    goes_on.set()
    assert until(lambda: friend.set("a", "b")) and store.get("a") == "b"
    for each in queue:
        each.close()
    friend.close()


def test_a_host_without_keepalive_answers_is_lost_after_the_limit(
    listener: Listener, monkeypatch: pytest.MonkeyPatch
) -> None:
    KeyValueStore(listener)
    friend = StoreClient(listener.address, SECRET, 1, watches=True)
    friend.close()

    def unreachable(*_: object) -> socket.socket:
        raise TimeoutError("no route")

    monkeypatch.setattr("deepseek_zero.comm.net.key_value_store.dial", unreachable)
    assert not friend.set("a", "b")
    assert friend.get("a") is None
    friend._dead_after = 0.0
    with pytest.raises(RuntimeError, match="rank 0's host has not answered"):
        friend.set("a", "b")


def test_idle_connections_stay_alive_and_an_ended_process_is_detected(listener: Listener) -> None:
    store = KeyValueStore(listener)
    friend = StoreClient(listener.address, SECRET, 3, watches=True)
    assert until(lambda: 3 in store.silences())
    time.sleep(2.5)
    # Without requests, the silence would only grow.
    assert until(lambda: store.silences()[3] < 1.5 and friend.silences()[0] < 1.5), (
        "each asks the other every second"
    )
    assert store.get("gone/3") is None
    friend.close()
    assert until(lambda: store.get("gone/3"))
    assert store.silences() == {}


def test_connections_are_reopened_after_a_middlebox_reset_them(
    listener: Listener,
) -> None:
    store, friend = KeyValueStore(listener), StoreClient(listener.address, SECRET, 3, watches=True)
    assert until(lambda: 3 in store.silences())
    for each in (friend._connection, friend._idle):
        assert each is not None
        each.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        each.close()
    assert until(lambda: not store.silences())
    friend.set("a", "b")
    assert until(lambda: 3 in store.silences()) and 0 in friend.silences()
    assert store.get("gone/3") is None
    friend.close()
    assert until(lambda: store.get("gone/3"))


def test_a_flight_recorder_on_a_silent_host_blocks_no_rank(
    listener: Listener, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = KeyValueStore(listener)
    friend = StoreClient(listener.address, SECRET, 1, watches=True)
    monkeypatch.setattr("deepseek_zero.comm.net.key_value_store.silence_of", lambda connection: 4.0)
    monkeypatch.setattr("deepseek_zero.comm.net.key_value_store.POLL_SECONDS", 0.05)
    # The listener answers no request.
    monkeypatch.setattr(listener, "_look_at", lambda descriptor: time.sleep(0.01))
    began = time.monotonic()
    assert not friend.set("a", "b") and friend.get("a") is None
    assert time.monotonic() - began < ANSWER_SECONDS / 3
    assert friend.silences() == {0: 4.0} and store.get("a") is None
    friend.close()


def until(true: Callable[[], object]) -> object:
    deadline = time.monotonic() + PATIENCE
    while not (value := true()) and time.monotonic() < deadline:
        time.sleep(0.01)
    return value


@pytest.mark.parametrize(("interface", "warnings"), [("127.0.0.1", 0), ("0.0.0.0", 1)])
def test_without_a_secret_a_reachable_flight_recorder_is_logged_once_also_on_one_host(
    interface: str, warnings: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delenv(SECRET_FILE, raising=False)
    monkeypatch.setenv(INTERFACE, interface)
    monkeypatch.setattr(module, "all_gather_text", lambda text, *_: [text])
    _, _, listener = open_store(0, 1, Hosts(0, ("this host",)), None)
    assert listener is not None
    listener.close()
    assert (
        caplog.text.count(
            f"ranks have no secret: anyone who can reach {interface}:{listener.address[1]}"
        )
        == warnings
    )


def test_if_one_rank_lacks_the_package_for_tls_every_rank_raises_and_names_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(TLS, "1")
    monkeypatch.delenv(SECRET_FILE, raising=False)
    others = json.dumps({"mark": ""})
    one_host = Hosts(0, ("this host",) * 3)
    said: list[str] = []

    def gather(text: str, *_: object) -> list[str]:
        said.append(text)
        return [others, said[0], others]  # rank 1's record is gathered first

    monkeypatch.setattr(module, "all_gather_text", gather)
    error = r"rank 1 cannot connect to the others: .*cryptography[^$]*pip install cryptography"
    with monkeypatch.context() as missing:
        missing.setitem(sys.modules, "cryptography", None)
        missing.delitem(sys.modules, "cryptography.x509", raising=False)
        with pytest.raises(UsageError, match=error):
            open_store(1, 3, one_host, None)
    with pytest.raises(UsageError, match=error):
        open_store(2, 3, one_host, None)


def test_rank_0_closes_its_store_if_another_rank_cannot_connect(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    addresses: list[tuple[str, int]] = []

    def gather(text: str, *_: object) -> list[str]:
        host, port = json.loads(text)["address"]
        addresses.append((host, port))
        socket.create_connection((host, port)).close()  # the listener accepts connections
        return [text, json.dumps({"mark": "", "error": "no secret"})]

    monkeypatch.delenv(TLS, raising=False)
    monkeypatch.delenv(SECRET_FILE, raising=False)
    monkeypatch.setattr(module, "all_gather_text", gather)
    with pytest.raises(UsageError, match="rank 1 cannot connect to the others: no secret"):
        open_store(0, 2, Hosts(0, ("this host",) * 2), None)
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(addresses[0])
