"""The rendezvous of launchers: the address of node 0's store, and errors of unreachable nodes."""

from __future__ import annotations

import io
import logging
import signal
import sys
from datetime import timedelta

import pytest

from deepseek_zero.base.errors import UsageError
from deepseek_zero.base.launch import INTERFACE, TLS
from deepseek_zero.cli import agent
from deepseek_zero.cli.agent import EndedBySignal, Meeting, RankAgent
from deepseek_zero.cli.nodes import LAST_PORT, NodePlan, NodeShare
from deepseek_zero.cli.ranks import Command, Ranks, Target
from deepseek_zero.comm.net.store import NO_SECRET, keep_store
from tests.hosts import free_port

SECRET = b"s" * 32


def meeting(
    node: int, port: int, master_addr: str = "127.0.0.1", secret: bytes = SECRET
) -> Meeting:
    return Meeting(NodePlan(NodeShare(1), 2, node, master_addr, port), secret)


def test_a_store_on_an_unreachable_address_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(INTERFACE, "127.0.0.2")
    said = r"(?s)connect to 127\.0\.0\.1, .* listens at 127\.0\.0\.2.*--master_addr=127\.0\.0\.2"
    with pytest.raises(UsageError, match=said):
        meeting(0, free_port()).open()
    found = meeting(0, port := free_port(), "127.0.0.2")
    found.open()
    assert found.place == f"127.0.0.2:{port}"
    found._stores[0]._store.close()


@pytest.mark.parametrize(
    ("interface", "secret", "warnings"),
    [("127.0.0.1", NO_SECRET, 0), ("0.0.0.0", NO_SECRET, 1), ("0.0.0.0", SECRET, 0)],
)
def test_without_a_secret_a_reachable_store_is_logged_once(
    interface: str,
    secret: bytes,
    warnings: int,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setenv(INTERFACE, interface)
    found = meeting(0, free_port(), interface, secret)
    found.open()
    found._stores[0]._store.close()
    assert (
        caplog.text.count(f"launchers have no secret: anyone who can reach {found.place}")
        == warnings
    )
    assert repr(secret) not in repr(found)


def test_a_node_that_cannot_reach_node_0_logs_that_once_and_retries(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(agent, "STILL_WAITING_SECONDS", 0.05)
    monkeypatch.setattr(agent, "MEETING_TIMEOUT", timedelta(seconds=0.5))
    with pytest.raises(UsageError, match="rendezvous failed"):
        meeting(1, port := free_port()).open()
    (said,) = [line for line in caplog.messages if "still waiting" in line]
    assert said.startswith(f"still waiting for node 0 at 127.0.0.1:{port}: [Errno ")


def test_the_last_port_leaves_a_valid_one_for_torch() -> None:
    try:
        _, table, _ = keep_store("127.0.0.1", LAST_PORT, SECRET)
    except UsageError:
        pytest.skip("another program uses the last port")
    found = meeting(1, LAST_PORT)
    found.open()
    assert found.master_port == LAST_PORT - 1
    found._stores[0]._store.close()
    table.close()


def test_an_invalid_name_of_node_0_is_reported() -> None:
    with pytest.raises(UsageError, match=r"(?s)rendezvous failed at a\.\.b:.*idna"):
        meeting(1, free_port(), "a..b").open()


@pytest.mark.parametrize("node_0_ends", [False, True])
def test_a_node_that_does_not_join_is_named(node_0_ends: bool) -> None:
    store, table, (_, port) = keep_store("127.0.0.1", 0, SECRET)
    found = meeting(1, port)
    for each in (store, found.open()):
        each.set_timeout(timedelta(seconds=0.05))
    if node_0_ends:
        table.close()
    launcher = RankAgent(found, Ranks(Command(Target.SCRIPT, "train.py")), {}, 0, 0.0, 10.0)
    with pytest.raises(UsageError, match=r"(?s)Node 0 of 2 has not joined.*--node_rank"):
        launcher._sizes(found._stores[0])
    found._stores[0]._store.close()
    table.close()


def test_a_signal_in_a_handler_of_logging_ends_the_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agent.signal, "signal", lambda *_: None)

    class BlockedStream(io.StringIO):
        def write(self, text: str) -> int:
            agent._end_by(signal.SIGTERM)
            return 0

    handler = logging.StreamHandler(BlockedStream())
    agent.logger.addHandler(handler)
    try:
        with pytest.raises(EndedBySignal):
            agent.logger.warning("rank 1 is stopped")
    finally:
        agent.logger.removeHandler(handler)


@pytest.mark.parametrize("by_tls", ["0", "1"], ids=["node 1", "node 0"])
def test_tls_on_one_node_only_is_reported_immediately(
    by_tls: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(TLS, by_tls)
    _, board, (_, port) = keep_store("127.0.0.1", 0, SECRET)
    monkeypatch.setenv(TLS, str(1 - int(by_tls)))
    with pytest.raises(UsageError, match="use --tls on every host, or on none"):
        meeting(1, port).open()
    board.close()


@pytest.mark.parametrize("nodes", [1, 2])
def test_without_the_package_for_tls_a_launcher_starts_no_rank(
    nodes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(TLS, "1")
    monkeypatch.setitem(sys.modules, "cryptography", None)
    monkeypatch.delitem(sys.modules, "cryptography.x509", raising=False)
    monkeypatch.setattr(agent, "Ranks", None)  # starting a rank fails the test
    with pytest.raises(UsageError, match=r"pip install cryptography"):
        agent.run_ranks(NodePlan(NodeShare(1), nodes), Command(Target.SCRIPT, "train.py"), {})
