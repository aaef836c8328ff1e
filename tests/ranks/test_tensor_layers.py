"""DeepSpeed's tensor-parallel layers, separately and in a trained model, equal unsplit layers."""

from __future__ import annotations

from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import deepseek_zero
from deepseek_zero.base.errors import UsageError
from deepseek_zero.compat.deepspeed import groups
from deepseek_zero.compat.deepspeed.autotp import AutoTPConfig
from deepseek_zero.compat.deepspeed.tensor_injection import AutoTP
from deepseek_zero.compat.deepspeed.tensor_layers import (
    GatherReplacedLayerParams,
    LinearAllreduce,
    LinearAllreduceWithReplicatedInput,
    LinearLayer,
    SubParamLinearLayer,
)
from deepseek_zero.planner.split import split_of

WIDTH, OUT, PARTS = 6, 13, (6, 4, 3)


def gradients(layer: Any, x: Tensor) -> tuple[Tensor, list[Tensor]]:
    """Return the output, and the gradients of input and parameters."""
    read = x.clone().requires_grad_()
    found = layer(read)
    (found * found.detach().cos()).sum().backward()
    return found.detach(), [read.grad, *(each.grad for each in layer.parameters())]  # type: ignore[list-item]


@pytest.mark.ranks(2)
def test_layers_compute_what_whole_ones_do() -> None:
    torch.manual_seed(1)
    group, rank = dist.group.WORLD, dist.get_rank()
    plain, x = nn.Linear(WIDTH, OUT), torch.randn(3, 2, WIDTH)
    expected, (of_input, of_weight, of_bias) = gradients(plain, x)

    column = LinearLayer(deepcopy(plain), group, gather_output=True)
    parts = SubParamLinearLayer(deepcopy(plain), group, shape=(PARTS, -1), gather_output=True)
    for layer in (column, parts):
        assert sum(each.numel() for each in layer.parameters()) < sum(
            each.numel() for each in plain.parameters()
        )
        found, (input_grad, weight_grad, bias_grad) = gradients(layer, x)
        torch.testing.assert_close(found, expected)
        torch.testing.assert_close(input_grad, of_input)
        rows = split_of(layer.weight).ranges[rank]  # type: ignore[union-attr]
        own = torch.cat([torch.arange(*each) for each in rows])
        torch.testing.assert_close(weight_grad, of_weight[own])
        torch.testing.assert_close(bias_grad, of_bias[own])
    assert split_of(parts.weight).ranges == (
        ((0, 3), (6, 8), (10, 12)),
        ((3, 6), (8, 10), (12, 13)),
    )  # type: ignore[union-attr]

    row = LinearAllreduceWithReplicatedInput(deepcopy(plain), group)
    found, (input_grad, weight_grad, bias_grad) = gradients(row, x)
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(input_grad, of_input)
    torch.testing.assert_close(weight_grad, of_weight[:, rank * 3 : rank * 3 + 3])
    torch.testing.assert_close(bias_grad, of_bias)

    pair = nn.Sequential(
        LinearLayer(nn.Linear(4, 5), group), nn.Tanh(), LinearAllreduce(nn.Linear(5, 4), group)
    )
    assert pair(torch.randn(2, 4)).shape == (2, 4) and pair[0].weight.shape == (3 - rank, 4)


@pytest.mark.ranks(2)
def test_parameters_are_whole_inside_the_block_and_sharded_after() -> None:
    torch.manual_seed(1)
    plain = nn.Linear(WIDTH, OUT)
    for kind, options in (
        (LinearLayer, {}),
        (LinearAllreduce, {}),
        (SubParamLinearLayer, {"shape": (PARTS, -1)}),
    ):
        layer = kind(deepcopy(plain), dist.group.WORLD, **options)  # type: ignore[operator]
        before, memory = layer.weight.detach().clone(), layer.weight.data_ptr()
        with GatherReplacedLayerParams(layer.parameters(), layer):
            assert torch.equal(layer.weight, plain.weight) and torch.equal(layer.bias, plain.bias)
            layer.weight.data += 1
        assert torch.equal(layer.weight, before + 1) and layer.weight.data_ptr() == memory
        copy = deepcopy(layer)
        assert copy.mp_group is layer.mp_group and copy.weight.gather_params.__self__ is copy


class Net(nn.Module):
    """Paired and single tensor-parallel layers, next to unsplit modules."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.first, self.layers = (
            nn.Linear(WIDTH, 8),
            nn.ModuleList(nn.Linear(8, 8) for _ in range(4)),
        )
        self.norm = nn.LayerNorm(8)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return self.norm(x)


CONFIG: dict[str, Any] = {
    "train_micro_batch_size_per_gpu": 4,
    "gradient_clipping": 0.1,
    "optimizer": {"type": "AdamW", "params": {"lr": 0.01}},
}
RULES = {
    "use_default_specs": False,
    "layer_specs": [
        {"patterns": [r"first\.weight"], "partition_type": "column", "gather_output": True},
        {"patterns": [r"layers\.1\.weight"], "partition_type": "column"},
        {"patterns": [r"layers\.2\.weight"], "partition_type": "row"},
        {"patterns": [r".*"], "partition_type": "skip"},
    ],
}


def steps(engine: Any) -> list[float]:
    losses = []
    for number in range(3):
        x = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(number))
        loss = engine(x).square().sum() + engine(x)[..., 0].sum()
        engine.backward(loss)
        engine.step()
        losses += [loss.item(), engine.get_global_grad_norm()]
    return losses


def unsplit() -> tuple[list[float], dict[str, Tensor]]:
    """Return the losses, norms and weights of plain torch."""
    model = Net()
    optimizer, losses = torch.optim.AdamW(model.parameters(), 0.01, weight_decay=0.0), []
    for number in range(3):
        x = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(number))
        loss = model(x).square().sum() + model(x)[..., 0].sum()
        loss.backward()
        losses += [loss.item(), nn.utils.clip_grad_norm_(model.parameters(), 0.1).item()]
        optimizer.step()
        optimizer.zero_grad()
    return losses, model.state_dict()


@pytest.mark.ranks(2)
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("way", ["layers", "rules"])
def test_a_model_with_single_layers_trains_as_a_whole_one(
    stage: int, way: str, tmp_path: Path
) -> None:
    """Checks losses, norms over all ranks and full weights, and resumes from a checkpoint."""
    tensor: dict[str, Any] = {"autotp_size": 2}
    if way == "rules":
        tensor["partition_config"] = RULES

    def engine_of() -> Any:
        model = Net()
        if way == "layers":
            group = dist.group.WORLD
            model.layers[1], model.layers[2] = (
                LinearLayer(model.layers[1], group),
                LinearAllreduce(model.layers[2], group),
            )
            # modules between the two layers run on this rank's shard
        config = CONFIG | {"tensor_parallel": tensor, "zero_optimization": {"stage": stage}}
        if way == "layers":
            config["tensor_parallel"] = tensor | {
                "partition_config": {
                    "layer_specs": [{"patterns": [".*"], "partition_type": "skip"}]
                }
            }
        return deepseek_zero.initialize(model=model, config=config)[0]

    engine, (expected, weights) = engine_of(), unsplit()
    assert sum(each.numel() for each in engine.module.parameters()) < sum(
        each.numel() for each in weights.values()
    )
    assert isinstance(engine.module.layers[1], LinearLayer) and isinstance(
        engine.module.layers[2], LinearAllreduce
    )
    assert not isinstance(engine.module.layers[0], LinearLayer) and not isinstance(
        engine.module.layers[2], LinearLayer
    )
    assert steps(engine) == pytest.approx(expected, rel=1e-4)
    found = engine._consolidated_16bit_state_dict()
    if dist.get_rank():
        assert found is None
    else:
        assert found.keys() == weights.keys()
        for name, value in weights.items():
            torch.testing.assert_close(found[name], value, rtol=1e-4, atol=1e-5)
    folder = Path(everyones(str(tmp_path)))
    engine.save_checkpoint(folder)
    again = engine_of()
    again.load_checkpoint(folder)
    assert steps(again) == steps(engine)


def everyones(value: str) -> str:
    told = [value]
    dist.broadcast_object_list(told)
    return told[0]


@pytest.mark.ranks(2)
def test_an_engines_layers_have_deepspeeds_attributes() -> None:
    model = Net()
    whole = model.first.weight.detach().clone()
    config = CONFIG | {"tensor_parallel": {"autotp_size": 2, "partition_config": RULES}}
    engine = deepseek_zero.initialize(model=model, config=config)[0]
    first: Any = engine.module.first
    assert first.gather_output and not hasattr(engine.module.layers[2], "gather_output")
    memory = first.weight.data_ptr()
    first.weight.gather_params([first.weight])
    assert torch.equal(first.weight, whole)
    first.weight._tp_partition([first.weight])
    assert first.weight.shape == (4, WIDTH) and first.weight.data_ptr() == memory


@pytest.mark.ranks(2)
def test_a_program_splits_a_model_by_itself() -> None:
    _, tensor = groups._init_tp_mesh_device(tensor_model_parallel_size=2)
    assert (
        groups.get_tensor_model_parallel_world_size() == 2
        and groups.get_data_parallel_world_size() == 1
    )
    model, x = Net(), torch.randn(2, WIDTH, generator=torch.Generator().manual_seed(0))
    expected = model(x)
    auto = AutoTP(model, partition_config=AutoTPConfig.from_dict(RULES))
    auto.set_tensor_parallel_config(2, tensor)
    auto._replace_module(model)
    assert [type(each) for each in model.layers] == [
        nn.Linear,
        LinearLayer,
        LinearAllreduce,
        nn.Linear,
    ]
    torch.testing.assert_close(model(x), expected)


@pytest.mark.ranks(2)
def test_layers_of_another_group_are_refused() -> None:
    alone = dist.new_group([dist.get_rank()], use_local_synchronization=True)
    model = Net()
    model.layers[1] = LinearLayer(model.layers[1], alone)  # one rank: not split
    model.layers[2] = LinearLayer(model.layers[2], dist.group.WORLD)
    with pytest.raises(
        UsageError, match=r"'layers\.2\.weight' is split into 2 parts, but this mesh has tp=1"
    ):
        deepseek_zero.initialize(model=model, config=CONFIG)
