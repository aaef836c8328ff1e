"""Test the names of `deepspeed.pipe`: topologies, schedules and `PipelineModule`."""

from __future__ import annotations

import importlib
from typing import Any

import pytest
import torch
from torch import nn

import deepseek_zero
from deepseek_zero.base.errors import NotBuiltError, UsageError
from deepseek_zero.base.mesh import Mesh
from deepseek_zero.compat.deepspeed.pipe import (
    LayerSpec,
    PipelineError,
    PipelineModule,
    partition_balanced,
    partition_uniform,
)
from deepseek_zero.compat.deepspeed.pipe_schedule import (
    DataParallelSchedule,
    InferenceSchedule,
    TrainSchedule,
)
from deepseek_zero.compat.deepspeed.pipe_topology import (
    PipeDataParallelTopology,
    PipelineParallelGrid,
    PipeModelDataParallelTopology,
    ProcessTopology,
)


def test_a_topology_is_row_major() -> None:
    topology = ProcessTopology(axes=["x", "y"], dims=[2, 3])
    assert topology.get_rank(x=0, y=1) == 1
    assert topology.get_coord(4).x == 1
    assert topology.get_dim("y") == 3
    assert topology.get_dim("z") == 0
    assert topology.get_axis_list("y", 0) == [0, 3]
    assert topology.world_size() == 6
    with pytest.raises(ValueError, match="does not support slices"):
        topology.get_rank(x=0)
    with pytest.raises(ValueError, match="rank 6 not found in topology"):
        topology.get_coord(6)


def test_pipe_data_model_is_the_order_of_our_mesh() -> None:
    topology = PipeModelDataParallelTopology(num_pp=2, num_mp=2, num_dp=2)
    assert topology.get_axis_names() == ["pipe", "data", "model"]
    assert topology.get_axis_comm_lists("pipe") == [[0, 4], [1, 5], [2, 6], [3, 7]]
    assert topology.filter_match(pipe=0, data=1) == [2, 3]
    assert topology.get_rank_repr(3) == "model_01"
    assert topology.get_rank_repr(3, omit_axes=["model"]) == "pipe_00-data_01"
    for rank in range(8):
        ours = Mesh(pp=2, dp_shard=2, tp=2).on_world(8, rank).coordinates
        assert topology.get_coord(rank) == (ours["pp"], ours["dp_shard"], ours["tp"])
    assert PipeDataParallelTopology(2, 3).get_axis_comm_lists("data") == [[0, 1, 2], [3, 4, 5]]


def test_a_grid_of_one() -> None:
    grid = PipelineParallelGrid()
    assert grid.get_pipe_parallel_world_size() == grid.get_data_parallel_world_size() == 1
    assert (
        grid.get_stage_id(),
        grid.get_model_parallel_rank(),
        grid.get_slice_parallel_rank(),
    ) == (0, 0, 0)
    assert grid.get_pipe_parallel_group() is None
    assert grid.stage_to_global(0) == 0
    with pytest.raises(AssertionError, match="Invalid Grid"):
        PipelineParallelGrid(PipeDataParallelTopology(2, 1))


def words(schedule: TrainSchedule | InferenceSchedule | DataParallelSchedule) -> list[list[str]]:
    return [[repr(each) for each in tick] for tick in schedule]


def test_the_train_schedule_of_a_middle_stage() -> None:
    schedule = TrainSchedule(micro_batches=2, stages=3, stage_id=1)
    assert schedule.num_pipe_buffers() == 2
    assert words(schedule) == [
        [],
        ["RecvActivation(buffer_id=0)", "ForwardPass(buffer_id=0)"],
        ["SendActivation(buffer_id=0)"],
        ["RecvActivation(buffer_id=1)", "ForwardPass(buffer_id=1)"],
        ["SendActivation(buffer_id=1)", "RecvGrad(buffer_id=0)", "BackwardPass(buffer_id=0)"],
        ["SendGrad(buffer_id=0)"],
        ["RecvGrad(buffer_id=1)", "BackwardPass(buffer_id=1)"],
        ["SendGrad(buffer_id=1)", "ReduceTiedGrads()", "ReduceGrads()", "OptimizerStep()"],
    ]


@pytest.mark.parametrize("stages", [1, 2, 3, 4])
@pytest.mark.parametrize("many", [1, 2, 5, 8])
def test_train_schedules_of_stages_match(stages: int, many: int) -> None:
    schedules = [TrainSchedule(many, stages, stage) for stage in range(stages)]
    ticks = [words(schedule) for schedule in schedules]
    for stage, found in enumerate(ticks):
        assert len(found) == 2 * (many + stages - 1)
        flat = [word.partition("(")[0] for tick in found for word in tick]
        assert flat.count("ForwardPass") == flat.count("BackwardPass") == many
        assert flat.count("SendActivation") == (many if stage < stages - 1 else 0)
        assert flat.count("RecvActivation") == flat.count("SendGrad") == (many if stage else 0)
        assert flat[-3:] == ["ReduceTiedGrads", "ReduceGrads", "OptimizerStep"]
        assert schedules[stage].num_pipe_buffers() == max(2, min(stages - stage, many))
    for stage in range(stages - 1):
        for tick in range(len(ticks[stage])):
            sends = sum("SendActivation" in word for word in ticks[stage][tick])
            assert sends == sum("RecvActivation" in word for word in ticks[stage + 1][tick])


def test_the_inference_and_the_data_parallel_schedule() -> None:
    assert words(InferenceSchedule(2, 2, 0)) == [
        ["LoadMicroBatch(buffer_id=0)", "ForwardPass(buffer_id=0)"],
        ["LoadMicroBatch(buffer_id=1)", "SendActivation(buffer_id=0)", "ForwardPass(buffer_id=1)"],
        ["SendActivation(buffer_id=1)"],
    ]
    found = words(DataParallelSchedule(2, 1, 0))
    assert found[0] == [
        "LoadMicroBatch(buffer_id=0)",
        "ForwardPass(buffer_id=0)",
        "BackwardPass(buffer_id=0)",
    ]
    assert found[1][-2:] == ["ReduceGrads()", "OptimizerStep()"]


def test_a_pipeline_module_on_one_process_is_the_model() -> None:
    module = PipelineModule([LayerSpec(nn.Linear, 3, 4), torch.relu, nn.Linear(4, 2)], num_stages=1)
    names = [name for name, _ in module.named_parameters()]
    assert names == ["0.weight", "0.bias", "2.weight", "2.bias"]
    assert module(torch.ones(1, 3)).shape == (1, 2)
    assert module.num_pipeline_stages() == 1
    assert module.mesh == Mesh(dp_shard=1)
    assert module.mpu().topology() is module.topology()


def test_errors_are_deepspeeds() -> None:
    with pytest.raises(RuntimeError, match="must provide num_stages or topology"):
        PipelineModule([nn.Linear(2, 2)])
    with pytest.raises(
        RuntimeError, match=r"num_stages \(2\) must divide distributed world size \(1\)"
    ):
        PipelineModule([nn.Linear(2, 2)] * 2, num_stages=2)
    with pytest.raises(NotImplementedError, match="Partitioning method profile not implemented"):
        PipelineModule([nn.Linear(2, 2)], num_stages=1, partition_method="profile")
    assert issubclass(PipelineError, Exception)


def test_a_pipeline_without_stages_is_refused() -> None:
    layers = [nn.Linear(2, 2)]
    with pytest.raises(UsageError, match="cannot have 0 stages"):
        PipelineModule(layers, num_stages=0)
    with pytest.raises(UsageError, match="no axis named pipe"):
        PipelineModule(layers, topology=ProcessTopology(axes=["data"], dims=[1]))


@pytest.mark.parametrize("one_shot", [False, True])
def test_a_loader_that_yields_nothing_ends_training(one_shot: bool) -> None:
    """It would be read again forever."""
    module = PipelineModule([nn.Linear(2, 2)], num_stages=1, loss_fn=nn.MSELoss())
    config = {"train_micro_batch_size_per_gpu": 1, "optimizer": {"type": "SGD"}}
    engine = deepseek_zero.initialize(model=module, config=config)[0]
    batch = (torch.ones(1, 2), torch.ones(1, 2))
    engine.set_dataloader(iter([batch]) if one_shot else [])
    if one_shot:
        engine.train_batch()
    with pytest.raises(UsageError, match="yields no batch"):
        engine.train_batch()


def test_a_list_of_batches_is_refused_with_a_batch_function() -> None:
    """Every step would read the first batches."""
    module = PipelineModule([nn.Linear(2, 2)], num_stages=1, loss_fn=nn.MSELoss())
    config = {"train_micro_batch_size_per_gpu": 1, "optimizer": {"type": "SGD"}}
    engine = deepseek_zero.initialize(model=module, config=config)[0]
    engine.set_batch_fn(lambda batch: batch)
    with pytest.raises(UsageError, match="data_iter"):
        engine.train_batch([(torch.ones(1, 2), torch.ones(1, 2))])


def test_a_pipeline_has_the_names_that_megatron_reads() -> None:
    module = PipelineModule([nn.Linear(2, 2), nn.ReLU()], num_stages=1, loss_fn=nn.MSELoss())
    config = {"train_micro_batch_size_per_gpu": 3, "optimizer": {"type": "SGD"}}
    engine = deepseek_zero.initialize(model=module, config=config)[0]
    assert engine.get_additional_losses() is None
    assert (engine.micro_batch_size, engine.prev_stage, engine.next_stage) == (3, -1, 1)
    assert (module._local_start, module._local_stop) == (0, 2)
    module.get_additional_losses = lambda: {"auxiliary": 1.0}
    with pytest.raises(NotBuiltError, match="get_additional_losses of PipelineModule"):
        engine.get_additional_losses()


def test_a_batch_function_is_called_with_none_on_a_rank_without_data() -> None:
    """Megatron's functions receive the batch from another tensor-parallel rank."""
    module = PipelineModule([nn.Linear(2, 2)], num_stages=1, loss_fn=nn.MSELoss())
    config = {"train_micro_batch_size_per_gpu": 1, "optimizer": {"type": "SGD"}}
    engine = deepseek_zero.initialize(model=module, config=config)[0]
    seen = []

    def received(batch: Any) -> Any:
        seen.append(batch)
        return torch.ones(1, 2), torch.ones(1, 2)

    engine.set_batch_fn(received)
    losses = [engine.train_batch(), engine.eval_batch(None)]
    assert seen == [None, None] and all(torch.isfinite(loss) for loss in losses)


def test_a_modules_stages_and_the_runs_are_the_same() -> None:
    module = PipelineModule([nn.Linear(2, 2)], num_stages=1)
    with pytest.raises(UsageError, match="mesh= has pp=2, but PipelineModule has pp=1"):
        deepseek_zero.initialize(
            model=module, config={"train_micro_batch_size_per_gpu": 1}, mesh={"pp": 2}
        )


def test_partitions_by_deepspeeds_functions() -> None:
    assert partition_uniform(num_items=10, num_parts=4) == [0, 3, 6, 8, 10]
    assert partition_uniform(2, 4) == [0, 1, 2, 2, 2]
    assert partition_balanced([1, 1, 1, 9], 2) == [0, 3, 4]


def test_the_drop_in_has_them(as_deepspeed: None) -> None:
    for path, name in (
        ("deepspeed", "PipelineModule"),
        ("deepspeed.pipe", "TiedLayerSpec"),
        ("deepspeed.runtime.pipe", "ProcessTopology"),
        ("deepspeed.runtime.pipe.module", "PipelineError"),
        ("deepspeed.runtime.pipe.topology", "PipeModelDataParallelTopology"),
        ("deepspeed.runtime.pipe.schedule", "TrainSchedule"),
        ("deepspeed.runtime.utils", "partition_balanced"),
    ):
        assert getattr(importlib.import_module(path), name).__module__.startswith("deepseek_zero.")
