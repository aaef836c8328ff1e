"""A message reaches its collective even if names collide, and an error keeps its type.

The error is also reported to the other ranks.
"""

from __future__ import annotations

import time
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from deepseek_zero.base.errors import PeerError, UsageError
from deepseek_zero.comm.collectives import Comm
from deepseek_zero.comm.transports import base
from tests.plain import STAGE_3, engine_for, seeded
from tests.ranks.test_misuse import Model, one_good_step
from tests.ranks.test_same_host import hosts

CPU = torch.device("cpu")
on_all_transports = pytest.mark.parametrize("transport", ["fastest", "gloo", "tcp"])


@contextmanager
def apart(transport: str) -> Iterator[None]:
    """Give each rank a simulated host for "tcp", so that it creates new connections."""
    with hosts(str) if transport == "tcp" else nullcontext():
        yield


def names_of_one_crc(comm: Comm) -> tuple[str, str]:
    """Return a name in each of two lanes with the same 31-bit CRC.

    Such collisions occur in runs of some million steps.
    """
    seen: dict[int, str] = {}
    for number in range(1 << 19):
        name = f"{number * 0x9E3779B97F4A7C15 % (1 << 64):016x}"
        seen[zlib.crc32(f"{comm.lanes.name}/gather/0/gather {name}".encode()) & 0x7FFFFFFF] = name
        if other := seen.get(
            zlib.crc32(f"{comm.lanes.name}/reduce/0/gather {name[::-1]}".encode()) & 0x7FFFFFFF
        ):
            return other, name[::-1]
    raise AssertionError("no pair found")


@pytest.mark.ranks(2)
@on_all_transports
def test_names_of_one_crc_in_two_lanes_that_interleave_differently(transport: str) -> None:
    with apart(transport):
        comm, rank = Comm(CPU, transport=transport), dist.get_rank()
        names = names_of_one_crc(comm)
        calls = [("gather", names[0], 1.0), ("reduce", names[1], 100.0)]
        under_way = []
        for lane, name, value in calls if rank == 0 else calls[::-1]:
            full = torch.zeros(2 * 50)
            full.chunk(2)[rank].fill_(value + rank)
            under_way.append((value, full, comm.all_gather(full, lane, name)))
        for value, full, pending in under_way:
            pending.wait()
            assert [float(part.sum()) / 50 for part in full.chunk(2)] == [value, value + 1]
        dist.barrier()


@pytest.mark.ranks(2)
@on_all_transports
def test_a_rank_with_a_different_collective_at_the_same_position_gets_no_data(
    transport: str,
) -> None:
    with apart(transport):
        comm, rank = Comm(CPU, transport=transport), dist.get_rank()
        full = torch.full((100,), -1.0)
        with pytest.raises(PeerError, match=r"different collectives.*gather [xy]"):
            comm.all_gather(full, "gather", "xy"[rank]).wait()
        assert (full == -1.0).all()
        dist.barrier()


class Boom(Exception):
    """A bug in a sum."""


def no_memory(received: Sequence[Tensor]) -> None:
    raise torch.OutOfMemoryError("out of memory: tried to allocate 2 GiB")


def bad_shape(received: Sequence[Tensor]) -> None:
    received[0] + torch.ones(3, 3, 3)


def boom(received: Sequence[Tensor]) -> None:
    raise Boom("no such sum")


FAULTS = {
    "no memory": (no_memory, torch.OutOfMemoryError, "tried to allocate"),
    "a shape": (bad_shape, RuntimeError, "must match the size"),
    "a bug": (boom, Boom, "no such sum"),
}


@pytest.mark.ranks(2)
@on_all_transports
@pytest.mark.parametrize("fault", FAULTS)
def test_a_failure_inside_a_collective_on_one_rank_is_no_lost_connection(
    fault: str, transport: str
) -> None:
    with apart(transport):
        raises, kind, said = FAULTS[fault]
        comm, rank = Comm(CPU, transport=transport), dist.get_rank()
        pieces, boxes = [torch.ones(20), torch.ones(20)], [torch.empty(20), torch.empty(20)]
        pending = comm.exchange(
            pieces, boxes, "reduce", "sums", raises if rank == 1 else lambda received: None
        )
        if rank == 1:
            # Another collective may receive the pieces, but must not raise their error.
            with pytest.raises(kind, match=said) as caught:
                pending.wait()
            assert not isinstance(caught.value, PeerError)
            with pytest.raises(kind, match=said):
                pending.wait()  # repeated waits raise the same error
        else:
            pending.wait()
            with pytest.raises(
                PeerError, match=rf"rank 1 raised an error.*{kind.__name__}.*{said}"
            ):
                comm.barrier("the next step")
        dist.barrier()


@pytest.mark.ranks(2)
def test_a_fault_in_one_collective_is_not_raised_by_another_ones_wait() -> None:
    comm, rank = Comm(CPU), dist.get_rank()
    pending = comm.exchange(
        [torch.ones(20)] * 2,
        [torch.empty(20)] * 2,
        "reduce",
        "sums",
        boom if rank == 1 else lambda received: None,
    )
    comm.barrier("a row, which takes the pieces in")
    if rank == 1:
        with pytest.raises(Boom):
            pending.wait()
    else:
        pending.wait()
    dist.barrier()


@pytest.mark.ranks(2)
def test_a_transport_that_refuses_to_send_is_no_lost_connection(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    comm, rank = Comm(CPU, transport="gloo"), dist.get_rank()

    def refuse(*args: object, **kwargs: object) -> None:
        raise RuntimeError("Invalid scalar type")

    if rank == 1:
        monkeypatch.setattr(dist, "isend", refuse)
        with pytest.raises(RuntimeError, match="Invalid scalar type") as caught:
            comm.barrier("a dtype that gloo does not know")
        assert type(caught.value) is RuntimeError
    else:
        with pytest.raises(PeerError, match=r"rank 1 raised an error.*Invalid scalar type"):
            comm.barrier("a dtype that gloo does not know")
    monkeypatch.undo()
    dist.barrier()


@pytest.mark.ranks(2)
def test_an_update_without_memory_in_a_reduction_reaches_the_other_rank_by_name(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The same in an engine, where any collective that polls may form the sum."""
    from deepseek_zero.sharding import message

    engine = engine_for(seeded(Model), STAGE_3)
    one_good_step(engine)
    rank = dist.get_rank()

    def no_room(*args: object, **kwargs: object) -> None:
        raise torch.OutOfMemoryError("out of memory: tried to allocate 2 GiB")

    began = time.monotonic()
    if rank == 1:
        monkeypatch.setattr(message, "ordered_sum", no_room)
    with pytest.raises(
        torch.OutOfMemoryError if rank == 1 else PeerError,
        match="tried to allocate" if rank == 1 else "rank 1 raised an error.*OutOfMemoryError",
    ):
        one_good_step(engine)
    assert time.monotonic() - began < 15
    dist.barrier()


@pytest.mark.ranks(2)
def test_gloo_tags_stay_unique_after_wrapping() -> None:
    comm, rank = Comm(CPU, transport="gloo"), dist.get_rank()
    boxes = [[torch.empty(1) for _ in range(2)] for _ in range(3000)]
    pending = [
        comm.exchange([torch.tensor([float(turn + rank)])] * 2, box, "reduce", f"number {turn % 3}")
        for turn, box in enumerate(boxes)
    ]
    for each in pending:
        each.wait()
    assert [float(box[1 - rank]) for box in boxes] == [
        float(turn + 1 - rank) for turn in range(3000)
    ]


@pytest.mark.ranks(2, timeout=60)
def test_created_and_destroyed_engines_do_not_exhaust_gloo_slots() -> None:
    for _ in range(70):
        comm = Comm(CPU, transport="gloo")
        comm.barrier("alive")
        del comm
    living = []
    with pytest.raises(UsageError, match="63 engines"):
        for _ in range(70):
            living.append(Comm(CPU, transport="gloo"))
    assert len(living) > 30
    living.clear()
    Comm(CPU, transport="gloo").barrier("room again")
    assert base.POLL_SECONDS > 0
