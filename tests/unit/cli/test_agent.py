"""Where launchers meet: at which address node 0's store listens, and what a node says that does not reach it."""

from __future__ import annotations

import pytest

from deepseek_zero.base.errors import UsageError
from deepseek_zero.base.launch import INTERFACE
from deepseek_zero.cli.agent import Meeting
from deepseek_zero.cli.nodes import NodePlan, Share
from tests.hosts import free_port

SECRET = b"s" * 32


def meeting(node: int, port: int, master_addr: str = "127.0.0.1") -> Meeting:
    return Meeting(NodePlan(Share(1), 2, node, master_addr, port), "a run", SECRET)


def test_a_store_that_would_listen_where_the_others_do_not_come_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(INTERFACE, "127.0.0.2")
    said = r"(?s)come to 127\.0\.0\.1, .* listens at 127\.0\.0\.2.*--master_addr=127\.0\.0\.2"
    with pytest.raises(UsageError, match=said):
        meeting(0, free_port()).next_rendezvous()
    found = meeting(0, port := free_port(), "127.0.0.2")
    found.next_rendezvous()
    assert found.place == f"127.0.0.2:{port}"
