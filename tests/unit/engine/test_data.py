"""The samples of a step are the same for every number of ranks, also after resuming."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from typing import Any

import pytest
import torch
from torch.utils.data import IterableDataset, TensorDataset
from torch.utils.data.distributed import DistributedSampler

from deepseek_zero.base.mesh import Mesh
from deepseek_zero.engine.data import ShardedLoader

STEP = 48  # samples per step, for each number of ranks and each micro-batch size below
WORLDS = [(ranks, micro) for ranks in (1, 2, 3, 4) for micro in (1, 2, 4)]
DATA = TensorDataset(torch.arange(110))


def loaders(ranks: int, micro: int, **more: Any) -> list[ShardedLoader]:
    """Return one loader per rank."""
    meshes = [Mesh(dp_shard=ranks, rank=rank) for rank in range(ranks)]
    return [
        ShardedLoader(more.get("data", DATA), micro, mesh, step_samples=STEP, **more.get("how", {}))
        for mesh in meshes
    ]


def steps(world: list[ShardedLoader], count: int) -> Iterator[list[int]]:
    """Yield the samples of `count` steps, ordered by micro-batch and rank."""
    streams = [iter(()) for _ in world]
    for _ in range(count):
        seen: list[int] = []
        while len(seen) < STEP:
            for rank, loader in enumerate(world):
                batch = next(streams[rank], None)
                if batch is None:
                    streams[rank] = iter(loader)
                    batch = next(streams[rank])
                seen += batch[0].tolist()
        yield seen


def test_the_state_of_another_loader_is_a_warning_and_the_data_start_again(
    caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    (loader,) = loaders(1, 2)
    first = next(iter(loader))[0]
    loader.load_state_dict({"_num_yielded": 3})
    assert torch.equal(next(iter(loader))[0], first)
    assert "another class of data loader" in caplog.text + capsys.readouterr().err


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize(("ranks", "micro"), WORLDS)
def test_a_step_has_the_same_samples_at_every_number_of_ranks(
    ranks: int, micro: int, drop_last: bool
) -> None:
    world = loaders(ranks, micro, how={"drop_last": drop_last})
    per_epoch = 2 if drop_last else 3  # steps of 48 among 110 samples
    assert [len(loader) for loader in world] == [per_epoch * STEP // (ranks * micro)] * ranks
    found = list(steps(world, 3 * per_epoch))
    for epoch in range(3):
        order = torch.randperm(110, generator=torch.Generator().manual_seed(epoch)).tolist()
        expected = (order + order[: 3 * STEP - 110])[: per_epoch * STEP]
        assert list(chain(*found[epoch * per_epoch : (epoch + 1) * per_epoch])) == expected


@pytest.mark.parametrize(("ranks", "micro"), [(1, 4), (2, 2), (3, 4), (4, 1)])
@pytest.mark.parametrize("done", range(7))
def test_another_number_of_ranks_continues_with_the_next_sample(
    ranks: int, micro: int, done: int
) -> None:
    """A step that was interrupted is repeated from its first micro-batch."""
    undisturbed = list(steps(loaders(1, 1), 9))
    first = loaders(3, 2)
    taken = steps(first, done)
    assert list(taken) == undisturbed[:done]
    begun = 0
    if done % 3:  # at the end of an epoch, a new iterator would start the next epoch
        again = loaders(3, 2)
        for loader in again:
            loader.load_state_dict(first[0].state_dict())
        for _, _ in zip(range(5), again[0], strict=False):
            begun += 1
        state = again[0].state_dict(again=begun)
    else:
        state = first[0].state_dict()
    assert state["samples"] == (done % 3 or (3 if done else 0)) * STEP
    resumed = loaders(ranks, micro)
    for loader in resumed:
        loader.load_state_dict(state)
        if done and done % 3 == 0:
            assert list(loader) == [], "an epoch whose last batch was given has no more"
    assert list(steps(resumed, 9 - done)) == undisturbed[done:]


def test_a_step_that_began_in_the_previous_epoch_is_repeated_there() -> None:
    loader = ShardedLoader(DATA, 10, Mesh(dp_shard=2))  # 6 micro-batches per epoch
    assert len(list(loader)) == len(loader) == 6
    next(iter(loader))
    assert {name: loader.state_dict(again=3)[name] for name in ("epoch", "samples")} == {
        "epoch": 0,
        "samples": 80,
    }


def test_a_batch_size_that_changes_between_epochs_is_that_of_the_next_ones_end() -> None:
    loader = ShardedLoader(TensorDataset(torch.arange(20)), 4, Mesh(dp_shard=1), step_samples=4)
    assert len(list(loader)) == len(loader) == 5
    loader.deal_steps_of(12)
    assert len(list(loader)) == len(loader) == 6


def test_changed_training_data_is_reported(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("deepseek_zero.base.log.logger.propagate", True)
    saved, same, other = (
        ShardedLoader(data, 2, Mesh(dp_shard=1))
        for data in (DATA, DATA, TensorDataset(torch.arange(90)))
    )
    next(iter(saved))
    same.load_state_dict(saved.state_dict())
    same.load_state_dict({"epoch": 0, "samples": 2})  # an older checkpoint
    assert not caplog.records
    other.load_state_dict(saved.state_dict())
    assert "(90 samples; it had 110)" in caplog.text and "sample 2 " in caplog.text


def test_the_epoch_that_a_program_sets_in_its_sampler_is_used() -> None:
    data = TensorDataset(torch.arange(10))
    sampler = DistributedSampler(data, 2, 1)
    loader = ShardedLoader(data, 1, Mesh(dp_shard=2, rank=1), sampler=sampler)
    for epoch in (5, 6, 2):
        sampler.set_epoch(epoch)
        expected = list(sampler)
        assert [int(batch[0]) for batch in loader] == expected
    next(iter(loader))  # an epoch that is left early
    sampler.set_epoch(4)
    expected = list(sampler)
    assert [int(batch[0]) for batch in loader] == expected
    assert [int(batch[0]) for batch in loader] != expected, "the next epoch has another order"
    sampler.set_epoch(0)
    expected = list(sampler)
    for _ in range(3):
        sampler.set_epoch(0)
        assert [int(batch[0]) for batch in loader] == expected, "the same epoch again"


def test_epochs_advance_with_a_sampler_that_stores_them_as_plain_numbers() -> None:
    class Plain(DistributedSampler):  # type: ignore[type-arg]
        def set_epoch(self, epoch: int) -> None:
            self.epoch = int(epoch)

    data = TensorDataset(torch.arange(10))
    sampler = Plain(data, 2, 1)
    loader = ShardedLoader(data, 1, Mesh(dp_shard=2, rank=1), sampler=sampler)
    for epoch in range(3):
        found = [int(batch[0]) for batch in loader]
        sampler.set_epoch(epoch)
        assert found == list(sampler)


class Counting(IterableDataset):  # type: ignore[type-arg]
    def __iter__(self) -> Iterator[int]:
        return iter(range(10))


def test_the_order_of_a_users_sampler_is_kept() -> None:
    data = TensorDataset(torch.arange(10))
    mesh = Mesh(dp_shard=2, rank=1)
    loader = ShardedLoader(data, 2, mesh, sampler=DistributedSampler(data, 2, 1, shuffle=False))
    assert [batch[0].tolist() for batch in loader] == [[1, 3], [5, 7], [9]]
    loader.load_state_dict({"epoch": 1, "samples": 6})
    assert [batch[0].tolist() for batch in loader] == [[5, 7], [9]], (
        "a batch that is cut is given again"
    )
    endless = ShardedLoader(Counting(), 4, mesh)
    endless.load_state_dict({"epoch": 0, "samples": 8})
    assert [batch.tolist() for batch in endless] == [[4, 5, 6, 7], [8, 9]]
