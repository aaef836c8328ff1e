"""The number of CPU ranks that accelerate finds, with a stand-in for its `PartialState`."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest

import deepseek_zero
from deepseek_zero.compat.deepspeed.accelerate_ranks import CPU_RANKS, accelerate_statements
from deepseek_zero.engine.mesh_statements import MeshStatement


class PartialState:
    """Initialize the process group through `deepspeed.comm`, then count the ranks."""

    _shared_state: ClassVar[dict[str, Any]] = {}

    def __init__(self) -> None:
        comm = deepseek_zero.comm
        self.__dict__ = self._shared_state
        self.backend = None
        if not comm.is_initialized():
            comm.init_distributed(dist_backend=self.backend)
        self.num_processes = 1 if self.backend is None else comm.get_world_size()


@pytest.mark.ranks(2)
@pytest.mark.parametrize(("asked", "counted"), [("1", 2), ("0", 1), ("", 1)])
def test_accelerate_counts_the_process_group_on_request(asked: str, counted: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(CPU_RANKS, asked)
        patch.setitem(sys.modules, "accelerate.state", SimpleNamespace(PartialState=PartialState))
        PartialState._shared_state.clear()
        assert PartialState().num_processes == counted
        PartialState._shared_state["backend"] = None
        deepseek_zero.comm.is_initialized()
        assert PartialState._shared_state["backend"] is None, (
            "a state that has counted stays as it is"
        )


def test_a_state_without_a_group_is_unchanged(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(CPU_RANKS, "1")
    shared: dict[str, Any] = {"backend": None}
    state = SimpleNamespace(PartialState=SimpleNamespace(_shared_state=shared))
    monkeypatch.setitem(sys.modules, "accelerate.state", state)
    assert not deepseek_zero.comm.is_initialized()
    assert shared == {"backend": None}


def test_accelerates_parallelism_is_used_except_for_its_data_axes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delitem(sys.modules, "accelerate.state", raising=False)
    assert accelerate_statements() == ()
    config = SimpleNamespace(dp_replicate_size=8, dp_shard_size=1, tp_size=2, sp_size=1, cp_size=1)
    state = SimpleNamespace(
        AcceleratorState=SimpleNamespace(_shared_state={"parallelism_config": config})
    )
    monkeypatch.setitem(sys.modules, "accelerate.state", state)
    assert accelerate_statements() == (MeshStatement("accelerate's ParallelismConfig", {"tp": 2}),)
