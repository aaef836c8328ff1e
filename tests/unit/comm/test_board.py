"""The board: what one rank writes every rank reads, and nobody else."""

from __future__ import annotations

import socket
import struct
from collections.abc import Callable, Iterator
from contextlib import suppress

import pytest

from deepseek_zero.comm.board import MOST_TEXT, Board, FarBoard, Operation
from deepseek_zero.comm.channel import Door, Hello, Refused, Role, dial, introduce

SECRET = b"s" * 32


@pytest.fixture
def door() -> Iterator[Door]:
    found = Door("127.0.0.1", SECRET, 0)
    yield found
    found.close()


@pytest.fixture
def far(door: Door) -> Iterator[Callable[[int], FarBoard]]:
    """Makes boards of other ranks."""
    made: list[FarBoard] = []

    def make(rank: int) -> FarBoard:
        made.append(FarBoard(door.address, SECRET, rank))
        return made[-1]

    yield make
    for each in made:
        each.close()


Make = Callable[[int], FarBoard]


def test_lines_are_read_by_all_and_written_over(door: Door, far: Make) -> None:
    board = Board(door)
    first, second = far(1), far(2)
    assert first.look("waiting/1") is None
    first.set("waiting/1", "für " + "x" * 300_000)
    assert board.look("waiting/1") == second.look("waiting/1") == "für " + "x" * 300_000
    board.set("waiting/1", "")
    assert second.look("waiting/1") == ""


def test_a_stranger_writes_nothing_and_the_others_go_on(door: Door, far: Make) -> None:
    board, friend = Board(door), far(1)
    with pytest.raises(Refused):
        FarBoard(door.address, b"o" * 32, 1)
    with dial(door.address, 1.0) as stranger:
        stranger.sendall(b"\x01" + b"raised/1".ljust(200))
        with suppress(ConnectionResetError):
            assert stranger.recv(1 << 12) == b""
    friend.set("ended/1", "well")
    assert (board.look("ended/1"), board.look("raised/1")) == ("well", None)


@pytest.mark.parametrize(
    "request_", [struct.pack("!BII", Operation.SET, 5, 1 << 30), struct.pack("!BII", 7, 1, 1), b"\xff" * 40]
)
def test_an_announced_gigabyte_and_nonsense_end_the_connection(door: Door, far: Make, request_: bytes) -> None:
    board = Board(door)
    with dial(door.address, 1.0) as connection:
        introduce(connection, SECRET, Hello(Role.BOARD, 1, 0))
        connection.sendall(request_)
        assert connection.recv(1) == b""
    assert MOST_TEXT < 1 << 30
    assert far(1).look("x") is board.look("x") is None


def test_a_broken_connection_is_made_again_and_an_ended_rank_0_is_known(door: Door, far: Make) -> None:
    board, friend = Board(door), far(1)
    assert friend._connection is not None
    friend._connection.shutdown(socket.SHUT_RDWR)
    friend.set("a", "b")
    assert board.look("a") == "b"
    door.close()
    friend._connection.shutdown(socket.SHUT_RDWR)
    with pytest.raises(RuntimeError, match="rank 0"):
        friend.look("a")
