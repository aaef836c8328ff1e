"""Communicators over a part of the world give the same bits and errors without other ranks."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from deepseek_zero.base.errors import PeerError
from deepseek_zero.base.mesh import Mesh
from deepseek_zero.comm.collectives import Comm, ordered_sum
from deepseek_zero.comm.transports.composed import Hierarchical
from deepseek_zero.comm.transports.gloo import Gloo
from deepseek_zero.comm.transports.shared_memory import SharedMemory

from .test_same_host import hosts

CPU = torch.device("cpu")
SIZES = [0, 3, 50_000]  # empty, inline in the message, and in separate memory


def one_host(rank: int) -> str:
    return "one"


def rows(rank: int) -> str:
    return f"host {rank // 2}"


def columns(rank: int) -> str:
    return f"host {rank % 2}"


def split(comm: Comm, axis: str) -> Comm:
    mesh = Mesh(dp_replicate=2, dp_shard=2).on_world(4, dist.get_rank())
    return comm.split(mesh.groups_along(axis), axis)


def gathered(comm: Comm, numel: int) -> Tensor:
    full = comm.empty(numel * comm.size, torch.float32)
    full.chunk(comm.size)[comm.rank].fill_(10.0 + comm.ranks[comm.rank]) if numel else None
    comm.all_gather(full, "gather", "a tensor").wait()
    return full.clone()


def reduced(comm: Comm, numel: int) -> Tensor:
    pieces = [
        comm.empty(numel, torch.float32).fill_(comm.ranks[comm.rank] + 0.1 * to)
        for to in range(comm.size)
    ]
    boxes: list[Tensor | None] = [torch.empty(numel) for _ in range(comm.size)]
    found, scratch = torch.empty(numel), torch.empty(1 << 10)
    comm.exchange(
        pieces, boxes, "reduce", "a tensor", lambda got: ordered_sum(got, found, scratch)
    ).wait()
    return found


@pytest.mark.ranks(4)
@pytest.mark.parametrize("transport", ["fastest", "gloo", "tcp"])
@pytest.mark.parametrize("key_of", [one_host, rows, columns])
def test_a_group_communicates_among_its_members_only(
    transport: str, key_of: Callable[[int], str]
) -> None:
    with hosts(key_of):
        comm = Comm(CPU, transport=transport)
        for axis in ("dp_shard", "dp_replicate"):
            group, rank = split(comm, axis), dist.get_rank()
            assert (group.size, group.ranks[group.rank]) == (2, rank)
            for numel in SIZES:
                expected = torch.tensor(
                    [10.0 + member for member in group.ranks]
                ).repeat_interleave(numel)
                assert torch.equal(gathered(group, numel), expected)
                values = [torch.full((numel,), member + 0.1 * group.rank) for member in group.ranks]
                assert torch.equal(reduced(group, numel), values[0] + values[1])
            assert group.all_gather_text(f"rank {rank}", "names") == [
                f"rank {member}" for member in group.ranks
            ]
        assert comm.all_gather_text(str(dist.get_rank()), "names") == list("0123")


@pytest.mark.ranks(4)
def test_the_message_dtype_of_a_group_fits_all_its_members() -> None:
    with hosts(rows):
        comm = Comm(CPU)
        assert isinstance(comm.lanes.transport, Hierarchical)
        assert isinstance(split(comm, "dp_shard").lanes.transport, SharedMemory)
        assert isinstance(split(comm, "dp_replicate").lanes.transport, Gloo)


@pytest.mark.ranks(4)
def test_weights_are_shared_by_a_group_of_one_host() -> None:
    with hosts(rows):
        group = split(Comm(CPU), "dp_shard")
        weights = group.in_place.allocate(2048, torch.float32, "weights")
        assert weights is not None
        weights.own.fill_(float(dist.get_rank()))
        group.in_place.begin("forward")
        group.in_place.gather(weights, "weights").wait()
        expected = torch.tensor([float(rank) for rank in group.ranks]).repeat_interleave(1024)
        assert torch.equal(weights.whole, expected)
        group.in_place.end()
        group.barrier("the end")


@pytest.mark.ranks(4)
def test_ranks_of_another_group_may_be_anywhere_and_a_group_counts_what_it_sends() -> None:
    comm = Comm(CPU)
    group = split(comm, "dp_shard")
    comm.meter.reset()
    if dist.get_rank() < 2:
        for _ in range(3):
            gathered(group, 1000)
        assert comm.meter.sent_bytes["all_gather"] == 3 * 4000
    else:
        assert comm.meter.total_bytes() == 0
    comm.barrier("the end")


@pytest.mark.ranks(4, timeout=60)
def test_a_deviating_rank_is_named_in_its_group_only() -> None:
    comm = Comm(CPU)
    group, rank = split(comm, "dp_shard"), dist.get_rank()
    if rank < 2:
        with pytest.raises(
            PeerError, match=r"ranks called different collectives: rank 0 is in .*, rank 1 is in"
        ):
            group.barrier(f"the {'first' if rank == 0 else 'second'} thing")
    else:
        group.barrier("the same thing")
    dist.barrier()


@pytest.mark.ranks(4, timeout=60)
def test_an_error_of_one_rank_ends_waits_in_its_group() -> None:
    comm = Comm(CPU)
    replicas, rank = split(comm, "dp_replicate"), dist.get_rank()
    if rank == 1:
        comm.waits.post_error(ValueError("no batch"))
    elif rank == 3:
        with pytest.raises(PeerError, match=r"rank 1 raised an error while rank 3 waits.*no batch"):
            replicas.barrier("the outer sum")
    dist.barrier()
    comm.waits.withdraw_error()


@pytest.mark.ranks(2)
def test_a_group_of_all_ranks_is_the_communicator_and_a_group_of_one_sends_nothing() -> None:
    comm = Comm(CPU)
    assert comm.split(((0, 1),), "dp_shard") is comm
    alone = comm.split(((0,), (1,)), "dp_replicate")
    assert (alone.size, alone.rank, alone.ranks) == (1, 0, (dist.get_rank(),))
    comm.meter.reset()
    assert alone.all_gather_rows(torch.ones(1), "a row").tolist() == [[1.0]]
    assert comm.meter.total_bytes() == 0
