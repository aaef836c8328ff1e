"""Test the collectives of `deepspeed.comm`."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist

from deepseek_zero.compat.deepspeed import comm


@pytest.fixture(params=[False, True])
def group(request: pytest.FixtureRequest) -> Iterator[None]:
    """Run with no process group and with a group of one rank."""
    if request.param:
        comm.init_distributed()
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


@pytest.mark.parametrize(
    ("name", "output"),
    [
        ("all_gather_into_tensor", "output_tensor"),
        ("allgather_fn", "output_tensor"),
        ("reduce_scatter_tensor", "output_tensor"),
        ("reduce_scatter_fn", "output_tensor"),
        ("all_to_all_single", "output"),
    ],
)
def test_tensors_may_be_given_by_deepspeeds_keywords(group: None, name: str, output: str) -> None:
    call = getattr(comm, name)
    for words in ({output: torch.zeros(2), "tensor": torch.ones(2)}, {"tensor": torch.ones(2)}):
        given = words.get(output, torch.zeros(2))
        positional = () if output in words else (given,)
        call(*positional, **words, group=None)
        assert given.tolist() == [1, 1]
