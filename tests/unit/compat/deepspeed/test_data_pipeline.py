"""Curriculum learning: schedules, index files, the order of samples, and resuming."""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import deepseek_zero as dz
from deepseek_zero.base.errors import NotBuiltError, UsageError
from deepseek_zero.compat.deepspeed import module_stub
from deepseek_zero.compat.deepspeed.data_pipeline import data_sampler
from deepseek_zero.compat.deepspeed.data_pipeline.config import get_data_efficiency_config
from deepseek_zero.compat.deepspeed.data_pipeline.curriculum_scheduler import CurriculumScheduler
from deepseek_zero.compat.deepspeed.data_pipeline.data_sampler import DeepSpeedDataSampler
from deepseek_zero.compat.deepspeed.data_pipeline.indexed_dataset import (
    MMapIndexedDataset,
    close_mmap_dataset_builder,
    create_mmap_dataset_builder,
    find_fit_int_dtype,
    split_dataset,
)
from deepseek_zero.config.load import load

# -- schedules


def scheduler(
    kind: str, schedule: dict[str, Any], least: int = 2, most: int = 10
) -> CurriculumScheduler:
    bounds = {"min_difficulty": least, "max_difficulty": most}
    return CurriculumScheduler({**bounds, "schedule_type": kind, "schedule_config": schedule})


@pytest.mark.parametrize(
    ("kind", "schedule", "expected"),
    [
        (
            "fixed_linear",
            {"total_curriculum_step": 8, "difficulty_step": 2},
            [2, 4, 4, 6, 6, 8, 8, 10, 10, 10],
        ),
        (
            "fixed_discrete",
            {"difficulty": [2, 3, 4, 10], "max_step": [2, 4, 6]},
            [2, 2, 3, 3, 4, 4, 10, 10],
        ),
        # 2 + 8 * sqrt(step / 16): 4, 4.8, 5.5, 6, 6.5, 6.9, 7.3, 7.7, 8
        (
            "fixed_root",
            {"total_curriculum_step": 16, "difficulty_step": 1, "root_degree": 2},
            [4, 4, 5, 6, 6, 6, 7, 7, 8],
        ),
    ],
)
def test_difficulties_rise_as_deepspeeds_do(
    kind: str, schedule: dict[str, Any], expected: list[int]
) -> None:
    made = scheduler(kind, schedule)
    assert made.get_current_difficulty() == 2
    assert [made.update_difficulty(step) for step in range(1, len(expected) + 1)] == expected
    assert made.get_state()["current_difficulty"] == made.get_current_difficulty() == expected[-1]


def test_no_difficulty_is_below_the_first_multiple_that_may_be_one() -> None:
    made = scheduler(
        "fixed_linear", {"total_curriculum_step": 100, "difficulty_step": 16}, least=8, most=64
    )
    assert made.update_difficulty(1) == 16


def test_a_custom_schedule_is_the_programs_and_ends_at_the_maximum() -> None:
    made = scheduler("custom", {})
    with pytest.raises(UsageError, match="no function"):
        made.update_difficulty(1)
    made.set_custom_get_difficulty(lambda step: 3 * step)
    assert [made.update_difficulty(step) for step in (1, 2, 4, 1)] == [3, 6, 12, 12]


@pytest.mark.parametrize(
    ("kind", "schedule", "match"),
    [
        ("fixed_linear", {"difficulty_step": 2}, "total_curriculum_step"),
        ("fixed_discrete", {"difficulty": [1, 2], "max_step": [1, 2]}, "2 difficulties and 2"),
        ("steeper", {}, "steeper"),
        (
            "fixed_linear",
            {"total_curriculum_step": 0, "difficulty_step": 2},
            "total_curriculum_step=0",
        ),
    ],
)
def test_a_schedule_without_what_it_needs_is_refused(
    kind: str, schedule: dict[str, Any], match: str
) -> None:
    with pytest.raises(UsageError, match=match):
        scheduler(kind, schedule)


# -- index files


def write(path: Path, rows: list[list[int]], dtype: Any = np.uint16) -> str:
    builder = create_mmap_dataset_builder(path, dtype)
    for row in rows:
        builder.add_item(torch.tensor(row, dtype=torch.int64))
    close_mmap_dataset_builder(builder, path)
    return str(path)


def test_rows_are_read_back_and_files_have_megatrons_format(tmp_path: Path) -> None:
    rows = [[3, 1], [], [65535, 7, 9]]
    read = MMapIndexedDataset(write(tmp_path / "a", rows))
    assert [row.tolist() for row in read[:]] == rows and len(read) == 3 and read.dtype == np.uint16
    assert read.get(2, 1, 1).tolist() == [7] and read[-1].tolist() == rows[-1]
    expected = b"MMIDIDX\x00\x00" + struct.pack("<QBQQ3i3q2q", 1, 6, 3, 2, 2, 0, 3, 0, 4, 4, 0, 3)
    assert (tmp_path / "a.idx").read_bytes() == expected
    assert (tmp_path / "a.bin").read_bytes() == struct.pack("<5H", 3, 1, 65535, 7, 9)


def test_datasets_are_merged_and_split(tmp_path: Path) -> None:
    write(tmp_path / "a", [[1], [2, 3]])
    builder = create_mmap_dataset_builder(tmp_path / "b", np.uint16)
    builder.add_items([np.array([9])])
    builder.merge_file_(tmp_path / "a")
    close_mmap_dataset_builder(builder, tmp_path / "b")
    assert [row.tolist() for row in MMapIndexedDataset(tmp_path / "b")[:]] == [[9], [1], [2, 3]]
    assert split_dataset(range(10), 3, 1, 2) == ([[0, 4], [4, 8], [8, 10]], [[4, 6], [6, 8]])
    assert [find_fit_int_dtype(*span) for span in ((0, 255), (0, 256), (-1, 127), (0, 2**32))] == [
        np.uint8,
        np.uint16,
        np.int8,
        np.uint64,
    ]


def test_a_missing_short_or_wrong_file_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "a", [[1, 2, 3]])
    with pytest.raises(UsageError, match="not both there"):
        MMapIndexedDataset(tmp_path / "nowhere")
    whole = (tmp_path / "a.bin").read_bytes()
    (tmp_path / "a.bin").write_bytes(whole[:-1])
    with pytest.raises(UsageError, match=r"a\.bin"):
        MMapIndexedDataset(path)
    (tmp_path / "a.idx").write_bytes(b"TNTIDX\x00\x00" + bytes(40))
    with pytest.raises(UsageError, match=r"a\.idx"):
        MMapIndexedDataset(path)


# -- the order of samples

MANY = 60
LENGTHS = [(7 * sample) % 12 + 1 for sample in range(MANY)]
RARITIES = [(5 * sample) % 9 for sample in range(MANY)]


def index_files(folder: Path, name: str, values: list[int]) -> dict[str, str]:
    """Write the files of a data analysis: samples sorted by value, and the value of each row."""
    levels = sorted(set(values))
    rows = [[sample for sample in range(MANY) if values[sample] == level] for level in levels]
    return {
        "index_to_sample_path": write(folder / f"{name}_samples", rows),
        "index_to_metric_path": write(folder / f"{name}_values", [[level] for level in levels]),
    }


def metric(kind: str, least: int, most: int, steps: int, **more: Any) -> dict[str, Any]:
    return {
        "difficulty_type": kind,
        "clustering_type": "schedule_based",
        "min_difficulty": least,
        "max_difficulty": most,
        "schedule_type": "fixed_linear",
        "schedule_config": {"total_curriculum_step": steps, "difficulty_step": 1},
        **more,
    }


def settings(metrics: dict[str, Any], seed: int = 5, epochs: int = 4) -> dict[str, Any]:
    curriculum = {"enabled": True, "curriculum_metrics": metrics}
    sampling = {"num_epochs": epochs, "curriculum_learning": curriculum}
    return {"seed": seed, "data_sampling": sampling}


def sampler(
    metrics: dict[str, Any], rank: int = 0, ranks: int = 1, **more: Any
) -> DeepSpeedDataSampler:
    asked = get_data_efficiency_config({"data_efficiency": settings(metrics)})
    accumulation = 12 // (3 * ranks) if ranks < 4 else 1
    return DeepSpeedDataSampler(
        asked, MANY, 3, rank, ranks, None, accumulation, rank, **{"drop_last": True, **more}
    )


CASES: dict[str, Callable[[Path], dict[str, Any]]] = {
    "by value": lambda folder: {
        "length": metric("value", 3, 12, 9, **index_files(folder, "length", LENGTHS))
    },
    "by percentile": lambda folder: {
        "rare": metric("percentile", 2, 7, 5, **index_files(folder, "rare", RARITIES))
    },
    "by two": lambda folder: {
        "rare": metric("percentile", 2, 7, 5, **index_files(folder, "rare", RARITIES)),
        "length": metric("value", 4, 12, 5, **index_files(folder, "length", LENGTHS)),
    },
    "one cluster": lambda folder: {
        "any": metric("value", 2, 10, 8, clustering_type="single_cluster")
    },
}


def difficulty(config: dict[str, Any], step: int) -> int:
    least, most, total = (
        config["min_difficulty"],
        config["max_difficulty"],
        config["schedule_config"],
    )
    return min(most, math.floor(step / total["total_curriculum_step"] * (most - least) + least))


def is_let_in(name: str, config: dict[str, Any], sample: int, level: int) -> bool:
    """Return whether the sample is at most as difficult as the level of this metric."""
    if config["clustering_type"] == "single_cluster":
        return True
    values = LENGTHS if name == "length" else RARITIES
    if config["difficulty_type"] == "value":
        return values[sample] <= level
    place = sorted(range(MANY), key=lambda each: (values[each], each)).index(sample)
    return place < (
        MANY if level == config["max_difficulty"] else MANY // config["max_difficulty"] * level
    )


def slow_order(metrics: dict[str, Any], steps: int, step_samples: int = 12) -> list[list[int]]:
    """Return the samples of each step, drawn with the same NumPy generator."""
    generator, clusters, places = np.random.default_rng(5), list[list[int]](), list[int]()
    given, levels = [], dict[str, int]()
    for step in range(1, steps + 1):
        now = {name: difficulty(config, step) for name, config in metrics.items()}
        if now != levels:
            taken = {sample for cluster in clusters for sample in cluster}
            new = [
                sample
                for sample in range(MANY)
                if sample not in taken
                and all(is_let_in(name, metrics[name], sample, now[name]) for name in metrics)
            ]
            # Index files list samples by value
            if len(metrics) == 1 and metrics.get("any") is None:
                values = LENGTHS if "length" in metrics else RARITIES
                new.sort(key=lambda sample: (values[sample], sample))
            if new:
                generator.shuffle(new)
                clusters, places = [*clusters, new], [*places, 0]
        levels = now
        sizes = [len(cluster) / sum(map(len, clusters)) for cluster in clusters]
        wanted = generator.choice(len(clusters), step_samples, p=sizes).tolist()
        batch: list[int] = []
        for number, cluster in enumerate(clusters):
            many = wanted.count(number)
            found = cluster[places[number] : places[number] + many]
            places[number] += many
            if len(found) < many:
                generator.shuffle(cluster)
                places[number] = many - len(found)
                found += cluster[: places[number]]
            batch += found
        generator.shuffle(batch)
        given.append(batch)
    return given


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("case", CASES)
def test_samples_have_the_order_of_a_simple_reference(
    case: str, ranks: int, tmp_path: Path
) -> None:
    metrics = CASES[case](tmp_path)
    each = [list(sampler(metrics, rank, ranks)) for rank in range(ranks)]
    flat = [sample for turn in zip(*each, strict=True) for mine in turn for sample in mine]
    steps = [flat[at : at + 12] for at in range(0, len(flat), 12)]
    expected = slow_order(metrics, len(steps))
    assert steps[:-1] == expected[:-1] and steps[-1] == expected[-1][: len(steps[-1])]
    assert (
        sum(map(len, steps)) == 4 * MANY + 3 * ranks
    )  # DeepSpeed also adds one micro-batch after the last epoch
    assert len(each[0]) == sampler(metrics, 0, ranks).micro_batches
    if case == "by value":
        assert (
            max(LENGTHS[sample] for sample in steps[0])
            <= 4
            < max(LENGTHS[sample] for sample in steps[-1])
        )


@pytest.mark.parametrize("case", CASES)
def test_a_resumed_sampler_returns_the_same_samples(case: str, tmp_path: Path) -> None:
    metrics = CASES[case](tmp_path)
    whole = list(sampler(metrics))
    for given in (0, 1, 4, 30, 61):
        first = sampler(metrics)
        list(islice(first, given))
        saved = json.loads(json.dumps(first.state_dict()))
        later = sampler(metrics)
        later.load_state_dict(saved)
        assert list(later) == whole[given:]
        # an unfinished step is repeated from its first micro-batch
        again = sampler(metrics)
        again.load_state_dict(first.state_dict(again=given % 4))
        assert list(again) == whole[given - given % 4 :]
    assert first.curriculum_step > 9 and len(first.data_clusters) >= 1


def test_a_state_resumes_on_another_number_of_ranks(tmp_path: Path) -> None:
    metrics = CASES["by value"](tmp_path)
    first = sampler(metrics)
    list(islice(first, 8))
    saved, each = first.state_dict(), []
    whole = list(first)
    for rank in range(2):
        later = sampler(metrics, rank, 2)
        later.load_state_dict(saved)
        each.append(list(later))
    together = [sample for turn in zip(*each, strict=True) for part in turn for sample in part]
    flat = [sample for batch in whole for sample in batch]
    assert together[: len(flat)] == flat


def test_a_state_of_deepspeed_continues_in_a_new_order(tmp_path: Path) -> None:
    metrics = CASES["by value"](tmp_path)
    first = sampler(metrics)
    list(islice(first, 16))
    state = {name: value for name, value in first.state_dict().items() if name != "clusters"}
    later = sampler(metrics)
    later.load_state_dict(state)
    batch = next(iter(later))
    assert later.curriculum_step == 5 and later.current_difficulties == {"length": 8}
    assert len(batch) == 3 and all(LENGTHS[sample] <= 8 for sample in batch)


def test_samples_without_a_possible_batch_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = index_files(tmp_path, "length", LENGTHS)
    with pytest.raises(UsageError, match="as easy as the curriculum begins"):
        next(iter(sampler({"length": metric("value", 0, 1, 100, **files)})))
    few = metric("value", 1, 1, 1, **files)  # only five samples have this length
    with pytest.raises(UsageError, match="finds 10 samples"):
        list(sampler({"length": few}, 0, 4))
    monkeypatch.setattr(data_sampler, "_MOST_EMPTY_STEPS", 9)
    stays = sampler({"length": few | {"schedule_type": "custom", "max_difficulty": 5}}, 0, 4)
    stays.set_custom_curriculum_learning_schedule({"length": lambda step: 1})
    with pytest.raises(UsageError, match="takes 12"):  # it never reaches its maximum
        next(iter(stays))
    with pytest.raises(UsageError, match="difficulty_type"):
        sampler({"length": metric("rank", 1, 2, 1)})
    with pytest.raises(UsageError, match="curriculum_metrics"):
        get_data_efficiency_config({"data_efficiency": settings({})})


# -- the engine


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.head = nn.Linear(2, 1)
        self.seen: list[list[int]] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen.append(x[:, 0].int().tolist())
        return self.head(x / 60).square().mean()


def engine_of(metrics: dict[str, Any], **more: Any) -> Any:
    section = settings(metrics)
    config = {
        "train_batch_size": 6,
        "train_micro_batch_size_per_gpu": 3,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01}},
        "zero_optimization": {"stage": 2},
        "data_efficiency": section,
        **more,
    }
    data = TensorDataset(torch.arange(float(MANY))[:, None].repeat(1, 2))
    engine, _, loader, _ = dz.initialize(
        model=Net(), config=config, training_data=data, collate_fn=rows
    )
    assert loader is engine.training_dataloader
    return engine


def rows(samples: list[Any]) -> torch.Tensor:
    return torch.stack([sample[0] for sample in samples])


@pytest.mark.parametrize("layout", ["slices", "deepspeed"])
def test_an_engine_resumes_with_the_same_samples(layout: str, tmp_path: Path) -> None:
    metrics = CASES["by value"](tmp_path)
    keys = {"checkpoint": {"layout": layout}}
    whole = engine_of(metrics, **keys)
    for _ in range(5):
        whole.train_batch()
    asked = get_data_efficiency_config({"data_efficiency": settings(metrics)})
    expected = list(islice(DeepSpeedDataSampler(asked, MANY, 3, 0, 1, None, 2), 10))
    assert whole.module.seen == expected
    first = engine_of(metrics, **keys)
    for _ in range(3):
        first.train_batch()
    first.backward(first(next(iter(first.training_dataloader))))
    first.step()  # the first of two micro-batches, so the checkpoint is saved inside a step
    first.save_checkpoint(tmp_path / "saved", tag="3")
    later = engine_of(metrics, **keys)
    later.load_checkpoint(tmp_path / "saved", tag="3")
    for _ in range(2):
        later.train_batch()
    assert later.module.seen == expected[6:]
    assert all(
        torch.equal(a, b) for a, b in zip(later.parameters(), whole.parameters(), strict=True)
    )
    plain = dz.initialize(
        model=Net(),
        config={
            "train_batch_size": 3,
            "optimizer": {"type": "AdamW"},
            "zero_optimization": {"stage": 2},
        },
        training_data=TensorDataset(torch.ones(4, 2)),
    )[0]
    plain.load_checkpoint(tmp_path / "saved", tag="3")  # data_efficiency is not needed
    for engine in (whole, first, later, plain):
        engine.destroy()


def test_functions_of_the_program_are_called(tmp_path: Path) -> None:
    files = index_files(tmp_path, "length", LENGTHS)
    engine = engine_of(
        {"length": metric("value", 1, 12, 9, **{**files, "schedule_type": "custom"})}
    )
    engine.set_custom_curriculum_learning_schedule({"length": lambda step: 2 * step})
    told = []

    def process(batch: torch.Tensor, state: dict[str, Any]) -> torch.Tensor:
        told.append(state["current_difficulties"])
        return -batch

    engine.set_data_post_process_func(process)
    engine.train_batch()
    engine.train_batch()
    assert told == [{"length": 2}, {"length": 2}, {"length": 4}, {"length": 4}]
    assert all(sample <= 0 for batch in engine.module.seen for sample in batch)
    assert engine.curriculum_learning_enabled() and not engine.random_ltd_enabled()
    assert engine.data_efficiency_config()["data_sampling"]["num_epochs"] == 4
    in_order = engine.deepspeed_io(TensorDataset(torch.arange(6.0)[:, None]), route="eval")
    assert [sample for (batch,) in in_order for sample in batch[:, 0].tolist()] == [
        0,
        1,
        2,
        3,
        4,
        5,
    ]
    engine.destroy()


def test_an_engine_after_its_last_epoch_raises_an_error(tmp_path: Path) -> None:
    metrics = CASES["one cluster"](tmp_path)
    engine = engine_of(metrics)
    engine.training_dataloader.data_sampler.consumed_samples = 4 * MANY
    assert len(list(engine.training_dataloader)) == 1
    with pytest.raises(UsageError, match="all its epochs were used"):
        list(engine.training_dataloader)
    engine.destroy()


def test_token_dropping_is_refused_and_layers_compute_all_tokens_under_deepspeeds_name() -> None:
    off = {
        "enabled": True,
        "data_routing": {"enabled": False, "random_ltd": {"enabled": False, "total_layer_num": 4}},
    }
    load({"train_batch_size": 1, "data_efficiency": off})
    on = {
        "train_batch_size": 1,
        "data_efficiency": {"data_routing": {"random_ltd": {"enabled": True}}},
    }
    with pytest.raises(NotBuiltError, match="data_routing"):
        load(on)
    assert any("layers compute all tokens" in note for note in load(on, unknown="warn").notes)
    with pytest.raises(NotBuiltError, match="Dropping tokens"):
        module_stub.placeholder(
            "deepspeed.runtime.data_pipeline.data_routing.helper", "convert_to_random_ltd"
        )(None)
