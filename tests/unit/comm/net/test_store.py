"""The rendezvous store returns the results of torch's own store and applies each request once."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from deepseek_zero.base.launch import SECRET_FILE, STORE
from deepseek_zero.comm.net.channel import Listener, Refused, Role
from deepseek_zero.comm.net.key_value_store import KeyValueStore, Operation, StoreClient
from deepseek_zero.comm.net.store import RendezvousStore, launchers_store

SECRET, SOON = b"s" * 32, timedelta(seconds=0.2)


@pytest.fixture
def stores() -> Iterator[tuple[KeyValueStore, RendezvousStore, RendezvousStore]]:
    """Yield a key-value store with the rendezvous stores of its own process and of another one."""
    listener = Listener("127.0.0.1", SECRET, 0)
    table = KeyValueStore(listener, Role.STORE)
    far = StoreClient(listener.address, SECRET, 1, role=Role.STORE)
    yield (
        table,
        RendezvousStore(table, timedelta(seconds=20)),
        RendezvousStore(far, timedelta(seconds=20)),
    )
    far.close()
    listener.close()


CALLS: list[Callable[[Any], Any]] = [
    lambda store: store.set("a", "text"),
    lambda store: store.set("b", bytes(range(256))),
    lambda store: (store.get("a"), store.get("b")),
    lambda store: store.add("n", 3),
    lambda store: store.add("n", -5),
    lambda store: store.get("n"),
    lambda store: store.compare_set("new", "", "first"),
    lambda store: store.compare_set("new", "wrong", "second"),
    lambda store: store.compare_set("new", "first", "third"),
    lambda store: store.compare_set("none", "expected", "wanted"),
    lambda store: store.check(["a", "b"]),
    lambda store: store.check(["a", "nowhere"]),
    lambda store: store.wait(["a", "n"], SOON),
    lambda store: store.multi_get(["a", "n"]),
    lambda store: store.delete_key("a"),
    lambda store: store.delete_key("a"),
    lambda store: store.check(["a"]),
    lambda store: store.num_keys(),
]


def test_calls_return_the_results_of_torchs_store(
    stores: tuple[KeyValueStore, RendezvousStore, RendezvousStore],
) -> None:
    _, near, far = stores
    for number, ours in enumerate((near, far)):
        torchs = dist.HashStore()  # type: ignore[attr-defined]
        views = [dist.PrefixStore(f"{number}", each) for each in (ours, torchs)]  # type: ignore[attr-defined]
        for at, call in enumerate(CALLS[:-1]):
            found, expected = (call(each) for each in views)
            assert found == expected, f"call {at}"
    assert near.num_keys() == far.num_keys() == 2 * torchs.num_keys()


def test_adding_to_a_text_raises_an_error_at_once(
    stores: tuple[KeyValueStore, RendezvousStore, RendezvousStore],
) -> None:
    _, near, far = stores
    near.set("a", "text")
    for store in (near, far):
        with pytest.raises(dist.DistStoreError, match="'a' is not a number"):
            store.add("a", 1)
    assert far.get("a") == b"text"


def test_a_wait_ends_when_the_key_is_set_or_the_timeout_expires(
    stores: tuple[KeyValueStore, RendezvousStore, RendezvousStore],
) -> None:
    _, near, far = stores
    threading.Timer(0.1, lambda: near.set("later", b"here")).start()
    assert far.get("later") == b"here"
    began = time.monotonic()
    with pytest.raises(dist.DistStoreError, match="no rank wrote 'never'"):  # type: ignore[attr-defined]
        far.wait(["never"], SOON)
    assert 0.2 <= time.monotonic() - began < 10.0
    assert far.clone().check(["later"])


def test_a_store_is_polled_with_pauses(
    stores: tuple[KeyValueStore, RendezvousStore, RendezvousStore], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A silent host does not answer; retries without a pause would occupy a CPU core."""
    _, _, far = stores
    asked: list[str] = []
    monkeypatch.setattr(far._store, "request", lambda operation, key, value: asked.append(key))
    far.set_timeout(timedelta(seconds=0.5))
    with pytest.raises(dist.DistStoreError, match="has not answered"):  # type: ignore[attr-defined]
        far.set("a", "b")
    assert 1 < len(asked) <= 12


def test_a_repeated_add_request_over_a_second_connection_is_applied_once(
    stores: tuple[KeyValueStore, RendezvousStore, RendezvousStore],
) -> None:
    table, near, far = stores
    again = json.dumps(["somebody", 7, 5])
    assert [table.request(Operation.ADD, "n", again).text for _ in range(2)] == ["5", "5"]
    assert table.request(Operation.ADD, "n", json.dumps(["somebody", 8, 5])).text == "10"
    adders = [
        threading.Thread(target=lambda each=each: [each.add("n", 1) for _ in range(50)])
        for each in (near, far)
    ]
    for adder in adders:
        adder.start()
    for adder in adders:
        adder.join()
    assert near.get("n") == b"110"


@pytest.mark.parametrize("value", ["", "[1]", '["who", 1, "much"]', "{}", "[[], 1, 1]"])
def test_an_invalid_request_closes_only_its_connection(
    stores: tuple[KeyValueStore, RendezvousStore, RendezvousStore], value: str
) -> None:
    _, _, far = stores
    assert far._store.request(Operation.ADD, "n", value) is None
    far._store._quiet_until = 0.0  # type: ignore[union-attr]
    assert far.add("n", 2) == 2


def test_ranks_take_their_own_launchers_store_and_no_other(
    stores: tuple[KeyValueStore, RendezvousStore, RendezvousStore],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    table, near, _ = stores
    secret = tmp_path / "secret"
    secret.touch(mode=0o600)
    secret.write_bytes(SECRET)
    host, port = table._listener.address
    for name, value in {
        SECRET_FILE: str(secret),
        STORE: f"{host}:{port}/29501",
        "MASTER_PORT": "29501",
    }.items():
        monkeypatch.setenv(name, value)
    near.set("here", b"yes")
    found = launchers_store()
    assert found is not None and found.get("here") == b"yes"
    found._store.close()  # the library keeps it open until the process ends
    monkeypatch.setenv("MASTER_PORT", "29500")
    assert launchers_store() is None, "a launcher that a rank started"
    monkeypatch.delenv(STORE)
    monkeypatch.delenv("MASTER_PORT")
    assert launchers_store() is None


def test_the_store_requires_the_secret_and_is_not_the_flight_recorder(
    stores: tuple[KeyValueStore, RendezvousStore, RendezvousStore],
) -> None:
    table, _, _ = stores
    address = table._listener.address
    with pytest.raises(Refused):
        StoreClient(address, b"o" * 32, 1, role=Role.STORE)
    stray = StoreClient(address, SECRET, 1)  # the store rejects records of the flight recorder
    assert not stray.set("raised/1", "nonsense")
    assert table.get("raised/1") is None
    stray.close()
