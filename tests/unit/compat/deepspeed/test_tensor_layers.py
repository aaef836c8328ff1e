"""DeepSpeed's tensor-parallel layers on one process: shard sizes, attributes, and plans."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
from torch import nn

from deepseek_zero.base.errors import NotBuiltError, UsageError
from deepseek_zero.compat.deepspeed.autotp import (
    AutoTPConfig,
    AutoTPMeta,
    _get_hf_tp_plan,
    get_shard_size,
    get_shard_size_list,
)
from deepseek_zero.compat.deepspeed.tensor_checkpoint_info import (
    collect_autotp_universal_checkpoint_info,
)
from deepseek_zero.compat.deepspeed.tensor_injection import AutoTP
from deepseek_zero.compat.deepspeed.tensor_layers import (
    GateUpPack_LinearLayer,
    LinearAllreduce,
    LinearLayer,
    SubParamLinearLayer,
)


@pytest.mark.parametrize(
    ("total", "ranks", "options", "expected"),
    [
        (10, 3, {}, [4, 3, 3]),
        (12, 2, {"num_kv_heads": 3}, [8, 4]),
        (13, 2, {"num_kv_heads": 3}, [7, 6]),  # the number of heads does not divide 13
        (101, 2, {"tp_grain_size": 10}, [50, 51]),
        (5, 2, {"tp_grain_size": 10}, [3, 2]),
    ],
)
def test_shares_of_a_dimension(
    total: int, ranks: int, options: dict[str, int], expected: list[int]
) -> None:
    meta = AutoTPMeta(**options)
    assert get_shard_size_list(total, ranks, meta, "q_proj") == expected
    assert [get_shard_size(total, ranks, meta, "q_proj", rank) for rank in range(ranks)] == expected


def test_layers_of_no_heads_are_shared_evenly() -> None:
    meta = AutoTPMeta.from_model_config(
        SimpleNamespace(num_key_value_heads=3, num_attention_heads=6, hidden_size=12)
    )
    assert meta == AutoTPMeta(3, 6, 12)
    assert (
        get_shard_size_list(12, 2, meta, "model.mlp.dense")
        == [6, 6]
        == get_shard_size_list(12, 2, meta, "lm_head")
    )
    assert get_shard_size_list(12, 2, "q_proj") == [6, 6]  # the signature of earlier versions


def test_a_summary_lists_how_each_parameter_was_cut() -> None:
    model = nn.Module()
    model.fused = SubParamLinearLayer(nn.Linear(2, 12), None, ((6, 3, 3), -1), name="fused")
    model.row, model.column = LinearAllreduce(nn.Linear(16, 8), None), LinearLayer(nn.Linear(8, 5))
    model.lm_head, model.norm = LinearLayer(nn.Linear(8, 101, bias=False)), nn.LayerNorm(8)
    model.packed = GateUpPack_LinearLayer(nn.Linear(4, 12, bias=False))
    fused: Any = model.fused
    fused.tp_world_size = 2
    fused._freeze_partition_sizes(12)
    fused._mark_uc_metadata()
    found = collect_autotp_universal_checkpoint_info(model)
    assert found["parameter_with_row_parallelism_patterns"] == [r"^row\.weight$"]
    replicated = [r"^norm\.bias$", r"^norm\.weight$", r"^row\.bias$"]
    assert found["tp_replicated_parameter_patterns"] == replicated
    assert (
        found["vocabulary_parameter_patterns"] == [r"^lm_head\.weight$"]
        and found["original_vocab_size"] == 101
    )
    shapes = {each["patterns"][0]: each["shape"] for each in found["parameter_with_sub_params"]}
    assert shapes == {
        r"^fused\.weight$": [(6, 3, 3), -1],
        r"^fused\.bias$": [(6, 3, 3)],
        r"^packed\.weight$": [(6, 6), 4],
    }
    assert found["sub_param_shard_widths"][r"^fused\.bias$"] == [[3, 3], [2, 1], [2, 1]]


def test_parts_that_do_not_add_up_are_refused() -> None:
    with pytest.raises(UsageError, match="do not make up its 12 rows"):
        SubParamLinearLayer(nn.Linear(2, 12), None, ((6, 3), -1))
    with pytest.raises(NotBuiltError, match="without a partition_config is not built"):
        AutoTP(nn.Linear(2, 2))


def test_a_layer_that_shares_its_weight_stays() -> None:
    model = nn.Module()
    model.embed, model.head, model.other = (
        nn.Embedding(9, 4),
        nn.Linear(4, 9, bias=False),
        nn.Linear(4, 9),
    )
    model.head.weight = model.embed.weight
    rules = AutoTPConfig.from_dict({"layer_specs": [{"patterns": [".*"], "gather_output": True}]})
    AutoTP(model, partition_config=rules)._replace_module(model)
    assert (
        type(model.head) is nn.Linear
        and isinstance(model.other, LinearLayer)
        and model.other.gather_output
    )
    x = torch.randn(3, 4)
    assert torch.equal(
        model.other(x), nn.functional.linear(x, model.other.weight, model.other.bias)
    )


def test_plans_of_base_class_and_model_are_one() -> None:
    class Model:
        _tp_plan: ClassVar[Any] = {"lm_head": "colwise_rep"}

        def __init__(self) -> None:
            self.config = SimpleNamespace(base_model_tp_plan={"layers.*.q_proj": "colwise"})
            self._tp_plan = {"model.layers.*.q_proj": "colwise", "extra": "rowwise"}

    assert _get_hf_tp_plan(Model()) == {
        "layers.*.q_proj": "colwise",
        "lm_head": "colwise_rep",
        "extra": "rowwise",
    }
    assert _get_hf_tp_plan(nn.Linear(2, 2)) is None
