"""Test the arguments of whole steps."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

import deepseek_zero
from deepseek_zero.base.errors import UsageError

BATCH = torch.ones(1, 2)


class Mean(torch.nn.Linear):
    """Returns the mean of its outputs as the loss."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return super().forward(input).mean()


def started(samples: int = 1, **more: Any) -> Any:
    config = {"train_batch_size": 1, "optimizer": {"type": "SGD", "params": {"lr": 0.1}}} | more
    data = [BATCH[0] * number for number in range(samples)]
    return deepseek_zero.initialize(model=Mean(2, 2), config=config, training_data=data)[0]


@pytest.mark.parametrize(("stage", "has_no_sync"), [(0, False), (0, True), (3, False)])
def test_a_step_has_the_gradients_of_backwards_that_were_not_its_end(
    stage: int, has_no_sync: bool
) -> None:
    accumulation = 1 if has_no_sync else 2
    keys = {"train_batch_size": accumulation, "gradient_accumulation_steps": accumulation}
    engine = started(**keys, zero_optimization={"stage": stage})
    before = {name: value.clone() for name, value in engine.module.state_dict().items()}
    with engine.no_sync() if has_no_sync else nullcontext():
        engine.backward(engine(BATCH))  # the gradient of each weight is 1/2
    engine.set_gradient_accumulation_boundary(True)
    engine.step()
    for name, value in engine.module.state_dict().items():
        torch.testing.assert_close(value, before[name] - 0.1 / 2 / accumulation)


def test_a_step_that_no_sync_refuses_does_not_reduce_gradients() -> None:
    engine = started(zero_optimization={"stage": 0})
    with engine.no_sync():
        engine.backward(engine(BATCH))
        engine.set_gradient_accumulation_boundary(True)
        with pytest.raises(UsageError, match="inside no_sync"):
            engine.step()
    assert not any(group.gradient.sum.is_reduced for group in engine.runtime.trained_groups)


def test_micro_batches_that_are_not_an_iterator_are_refused() -> None:
    engine = started()
    for given in ([], [BATCH], torch.utils.data.DataLoader([BATCH])):
        with pytest.raises(UsageError, match=r"train_batch\(data_iter=(.|\n)*iterator"):
            engine.train_batch(given)
        with pytest.raises(UsageError, match=r"eval_batch\(data_iter=(.|\n)*iterator"):
            engine.eval_batch(given)
    assert engine.global_steps == 0


@pytest.mark.parametrize("many", [0, -1, True, "2"])
def test_an_evaluation_of_no_micro_batches_is_refused(many: Any) -> None:
    with pytest.raises(UsageError, match="num_micro_batches"):
        started().eval_batch(iter([BATCH, BATCH]), many)


@pytest.mark.parametrize("samples", [0, 3])
def test_a_loader_without_batches_is_refused(samples: int) -> None:
    engine = started(samples, train_batch_size=4, dataloader_drop_last=True)
    with pytest.raises(UsageError, match="yields no batch"):
        engine.train_batch()


def test_a_loader_is_read_again_after_an_epoch() -> None:
    engine = started(2)
    for _ in range(5):
        engine.train_batch()
    assert engine.global_steps == 5


def test_a_run_continues_from_the_end_of_an_epoch() -> None:
    engine = started(2)
    engine.train_batch()
    engine.train_batch()
    resumed = started(2)
    resumed.training_dataloader.load_state_dict(engine.training_dataloader.state_dict())
    resumed.train_batch()
    assert resumed.training_dataloader.epoch == 1


def test_a_load_rewinds_the_batches_of_train_batch(tmp_path: Path) -> None:
    engine = started(8)
    engine.train_batch()
    engine.save_checkpoint(tmp_path)
    before = engine.training_dataloader.state_dict()
    seen = []
    engine.module.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0].clone()))
    engine.train_batch()
    engine.train_batch()
    engine.load_checkpoint(tmp_path)
    assert engine.training_dataloader.state_dict() == before
    engine.train_batch()
    engine.train_batch()
    assert torch.equal(torch.cat(seen[2:]), torch.cat(seen[:2]))


def test_a_load_discards_the_count_of_a_begun_step(tmp_path: Path) -> None:
    engine = started(managed_gradient_accumulation=False)
    engine.save_checkpoint(tmp_path)
    engine.backward(engine(BATCH))
    engine.load_checkpoint(tmp_path)
    engine.backward(engine(BATCH))
    engine.step()
    assert (engine.global_steps, engine.micro_steps, engine.global_samples) == (1, 1, 1)
