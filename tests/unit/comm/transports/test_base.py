"""Only network errors of gloo and NCCL count as lost connections."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import torch.distributed as dist

from deepseek_zero.comm.ids import CollectiveId
from deepseek_zero.comm.transports import gloo, shared_memory
from deepseek_zero.comm.transports.base import ConnectionLost, first_line
from deepseek_zero.comm.transports.nccl import Nccl
from tests.needs import need

GLOO = (
    "[/src/gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:40143. This is "
    "typically ..."
)
TRACE = (
    "\nException raised from recvBytes at /src/Utils.hpp:787 (most recent call first):\nframe #0: "
    "c10::Error::Error"
)


def nccl_that_raises(
    error: Exception, monkeypatch: pytest.MonkeyPatch, at: str
) -> tuple[Nccl, CollectiveId]:
    class Work:
        def wait(self) -> None:
            raise error

    def issue(*args: Any, **kwargs: Any) -> Work:
        if at == "issue":
            raise error
        return Work()

    monkeypatch.setattr(dist, "all_gather_into_tensor", issue)
    return Nccl(0, 2, {"gather": None}, torch.device("cpu")), CollectiveId(
        "engine 0/gather", 4, 0, 0, []
    )


@pytest.mark.parametrize("at", ["issue", "wait"])
@pytest.mark.parametrize(
    "error, expected",
    [
        (
            dist.DistBackendError("NCCL error: remote process exited, ncclRemoteError" + TRACE),
            ConnectionLost,
        ),
        (
            dist.DistBackendError("NCCL error: unhandled system error, ncclSystemError"),
            ConnectionLost,
        ),
        (
            dist.DistBackendError("NCCL error: ncclInvalidUsage, duplicate GPU detected"),
            dist.DistBackendError,
        ),
        (torch.OutOfMemoryError("CUDA out of memory"), torch.OutOfMemoryError),
        (RuntimeError("Unconvertible NCCL type ComplexHalf"), RuntimeError),
    ],
    ids=["a peer gone", "a network gone", "misuse", "no memory", "a dtype"],
)
def test_of_nccls_errors_only_a_lost_peer_is_a_lost_connection(
    error: Exception, expected: type[Exception], at: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    nccl, mark = nccl_that_raises(error, monkeypatch, at)
    with pytest.raises(expected) as caught:
        nccl.all_gather(torch.zeros(4), mark)()
    assert type(caught.value) is expected
    assert expected is not ConnectionLost or "frame" not in str(caught.value)


def test_of_gloos_errors_only_its_transports_are_lost_connections() -> None:
    for error, is_lost in (
        (RuntimeError(GLOO), True),
        (dist.DistNetworkError("Connection reset by peer" + TRACE), True),
        (RuntimeError("Invalid scalar type"), False),
        (RuntimeError("a model of gloo/transport/ fame has a bad shape"), False),
        (torch.OutOfMemoryError("no memory"), False),
    ):
        found = gloo._gloo_error(error)
        assert isinstance(found, ConnectionLost) is is_lost
        assert is_lost or found is error


def test_an_error_is_quoted_without_files_and_frames_of_cpp() -> None:
    assert first_line(RuntimeError(GLOO)).startswith("Connection closed by peer [127.0.0.1]:40143.")
    assert first_line(RuntimeError("Broken pipe" + TRACE)) == "Broken pipe"
    assert first_line(RuntimeError()) == ""


KNOCK = """
import os, socket, struct, sys
os.setgid(65534), os.setuid(65534)
with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as knock:
    knock.connect("\\0" + sys.argv[1])
    try:
        knock.send(bytes.fromhex(sys.argv[2]))
        print(len(knock.recv(1)))
    except (BrokenPipeError, ConnectionResetError):  # turned away before it had said anything
        print(0)
"""


def test_another_user_of_this_host_does_not_join_the_sockets_of_ranks() -> None:
    need(os.geteuid() == 0, "root, to become another user")
    listener, address = shared_memory._listen()
    hello = shared_memory._HELLO.pack(1)
    with listener, ThreadPoolExecutor(1) as other:
        joined = other.submit(shared_memory._connect, 0, [1], listener, ["", ""])
        words = [sys.executable, "-S", "-c", KNOCK, address[1:], hello.hex()]
        stranger = subprocess.run(words, capture_output=True, text=True, timeout=10)
        assert stranger.stdout == "0\n", stranger.stderr
        assert not joined.done()
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as rank:
            rank.connect(address)
            rank.send(hello)
            found = joined.result(10)
        assert list(found) == [1]
        found[1].close()
