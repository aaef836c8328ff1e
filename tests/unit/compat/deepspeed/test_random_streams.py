"""Named RNG states are separate from the default generator and restored for recomputation."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from deepseek_zero import checkpointing
from deepseek_zero.activations import recompute
from deepseek_zero.api.checkpointing import remember_mpu
from deepseek_zero.base.errors import UsageError


@pytest.fixture(autouse=True)
def _alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recompute._Process, "preserved", [])


def drawn(coordinate: int) -> tuple[Tensor, Tensor]:
    """Return random values from the model-parallel state and from the default generator."""
    remember_mpu(SimpleNamespace(get_model_parallel_rank=lambda: coordinate))
    try:
        checkpointing.model_parallel_cuda_manual_seed(7)
    finally:
        remember_mpu(None)
    with checkpointing.get_cuda_rng_tracker().fork():
        inside = torch.rand(4)
    return inside, torch.rand(4)


def test_ranks_draw_alike_outside_and_not_inside() -> None:
    (first, outside), (second, also_outside) = drawn(0), drawn(1)
    assert torch.equal(outside, also_outside) and not torch.equal(first, second)
    assert torch.equal(outside, torch.rand(4, generator=torch.Generator().manual_seed(7)))
    assert torch.equal(second, torch.rand(4, generator=torch.Generator().manual_seed(7 + 2718 + 1)))


def test_a_recomputation_draws_what_forward_drew() -> None:
    def layer(x: Tensor) -> Tensor:
        with checkpointing.get_cuda_rng_tracker().fork():
            return F.dropout(torch.tanh(x), 0.5) * torch.rand(())

    found = []
    for run in (lambda function, x: function(x), checkpointing.checkpoint):
        checkpointing.model_parallel_cuda_manual_seed(3)
        x = torch.ones(64, requires_grad=True)
        run(layer, run(layer, x * 1)).sum().backward()
        states = checkpointing.get_cuda_rng_tracker().get_states()
        found.append((x.grad, states["model-parallel-rng"]))
    assert all(map(torch.equal, *found))  # type: ignore[arg-type]


def test_streams_are_seeded_anew_and_wrong_ones_refused() -> None:
    checkpointing.model_parallel_cuda_manual_seed(3)
    streams = checkpointing.get_cuda_rng_tracker()
    with pytest.raises(UsageError, match=r"another stream has the seed 2721"):
        streams.add("other", 3 + 2718)
    with pytest.raises(UsageError, match=r"the name 'model-parallel-rng'"):
        streams.add("model-parallel-rng", 1)
    with pytest.raises(UsageError, match=r"there is no stream 'expert'"), streams.fork("expert"):
        pass
    checkpointing.model_parallel_reconfigure_tp_seed(5)
    with pytest.raises(UsageError, match=r"another stream has the seed 2723"):
        streams.add("other", 5 + 2718)
    streams.add("other", 3 + 2718)  # free again
    with streams.fork():
        assert torch.equal(
            torch.rand(3), torch.rand(3, generator=torch.Generator().manual_seed(5 + 2718))
        )
    states = streams.get_states()
    streams.reset()
    assert not streams.get_states()
    streams.set_states(states)
    assert streams.get_states().keys() == states.keys()
