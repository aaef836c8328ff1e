"""A rank that hangs in a torch.distributed call is named in the warning of the waiting rank."""

from __future__ import annotations

import logging
import threading
import time

import pytest
import torch
import torch.distributed as dist

from deepseek_zero.base import launch
from deepseek_zero.base.log import logger
from deepseek_zero.comm.collectives import Comm


@pytest.mark.ranks(2)
@pytest.mark.parametrize("transport", ["fastest", "gloo"])
def test_a_rank_in_torchs_own_barrier_is_named_by_the_one_that_waits_for_it(transport: str) -> None:
    lines: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    comm = Comm(torch.device("cpu"), transport=transport)
    logger.addHandler(handler)
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(launch, "TELL_AFTER", 0.5)
            if comm.rank == 0:
                ours = threading.Thread(target=comm.barrier, args=("the end of an epoch",))
                ours.start()
                until = time.monotonic() + 30
                while not lines and time.monotonic() < until:
                    time.sleep(0.05)
                dist.barrier()
                ours.join()
            else:
                dist.barrier()
                comm.barrier("the end of an epoch")
    finally:
        logger.removeHandler(handler)
    if comm.rank == 0:
        assert (
            "in 'agree on the end of an epoch'.  Not in a collective of an engine: rank 1."
            in lines[0]
        )
        assert "barrier()" in lines[0]
    else:
        assert not lines
