"""Where launchers meet: at which address node 0's store listens, and what a node says that does not reach it."""

from __future__ import annotations

import pytest

from deepseek_zero.base.errors import UsageError
from deepseek_zero.base.launch import INTERFACE
from deepseek_zero.cli.agent import Meeting
from deepseek_zero.cli.nodes import NodePlan, Share
from deepseek_zero.comm.store import NO_SECRET
from tests.hosts import free_port

SECRET = b"s" * 32


def meeting(node: int, port: int, master_addr: str = "127.0.0.1", secret: bytes = SECRET) -> Meeting:
    return Meeting(NodePlan(Share(1), 2, node, master_addr, port), "a run", secret)


def test_a_store_that_would_listen_where_the_others_do_not_come_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(INTERFACE, "127.0.0.2")
    said = r"(?s)come to 127\.0\.0\.1, .* listens at 127\.0\.0\.2.*--master_addr=127\.0\.0\.2"
    with pytest.raises(UsageError, match=said):
        meeting(0, free_port()).next_rendezvous()
    found = meeting(0, port := free_port(), "127.0.0.2")
    found.next_rendezvous()
    assert found.place == f"127.0.0.2:{port}"
    found._stores[0]._board.close()


@pytest.mark.parametrize(
    ("interface", "secret", "warnings"),
    [("127.0.0.1", NO_SECRET, 0), ("0.0.0.0", NO_SECRET, 1), ("0.0.0.0", SECRET, 0)],
)
def test_without_a_secret_a_store_that_others_reach_says_so_once(
    interface: str, secret: bytes, warnings: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv(INTERFACE, interface)
    found = meeting(0, free_port(), interface, secret)
    found.next_rendezvous()
    found._stores[0]._board.close()
    assert caplog.text.count(f"launchers hold no secret: whoever reaches {found.place}") == warnings
    assert repr(secret) not in repr(found)
