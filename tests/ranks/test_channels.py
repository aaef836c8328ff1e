"""NCCL groups, counted over gloo: shared between Comm objects, destroyed with the last one."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
import torch.distributed as dist

from deepseek_zero.comm.collectives import Comm
from deepseek_zero.comm.transports import nccl
from deepseek_zero.comm.transports.nccl import Nccl

GPU = torch.device("cuda", 0)  # only a name: no test uses the GPU


def groups_of(comm: Comm) -> list[dist.ProcessGroup | None]:
    assert isinstance(comm.lanes.transport, Nccl)
    return list(comm.lanes.transport.groups.values())


@pytest.mark.ranks(2)
def test_groups_are_shared_and_destroyed_with_their_last_user(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    Comm(torch.device("cpu"))  # create the connections and their world group first
    made: list[dist.ProcessGroup] = []
    gone: list[dist.ProcessGroup] = []
    new_group, destroy = dist.new_group, dist.destroy_process_group

    def counted(*args: Any, backend: str, **kwargs: Any) -> Any:
        made.append(new_group(*args, backend="gloo", **kwargs))
        return made[-1]

    def destroyed(group: dist.ProcessGroup) -> None:
        gone.append(group)
        destroy(group)

    monkeypatch.setattr(nccl.dist, "new_group", counted)
    monkeypatch.setattr(nccl.dist, "destroy_process_group", destroyed)
    building, loading = Comm(GPU, trains=False), Comm(GPU, trains=False)
    engine = Comm(GPU)
    assert len(made) == 2, "a pair for zero.Init, a load and the engine"
    assert groups_of(building) == groups_of(loading) == groups_of(engine)
    del building, loading
    second = Comm(GPU)
    assert len(made) == 4, "two engines may interleave differently on different ranks"
    assert not set(map(id, groups_of(second))) & set(map(id, groups_of(engine)))
    third = Comm(GPU, trains=False)
    assert len(made) == 6, "what is built meanwhile will be trained beside them"
    del third
    if dist.get_rank() == 1:
        del second  # earlier than on the other rank
    after = Comm(GPU, trains=False)
    assert (len(made), len(gone)) == (6, 0), "the pair that is free everywhere"
    if dist.get_rank() == 0:
        del second
    del after
    gc.collect()
    dist.barrier()
    again = Comm(GPU, trains=False)
    assert len(made) == 6
    assert gone == made[4:], "the third pair has no user left; the second has a new one"
    del again, engine
    gc.collect()
    dist.barrier()
    last = Comm(GPU)
    assert gone == [*made[4:], *made[2:4]]
    assert groups_of(last) == made[:2]
    del last
    for group in made[:2]:
        destroy(group)
    monkeypatch.undo()
    from deepseek_zero.comm.context import WorldContext

    WorldContext._current = None  # drop the channels that this test created
