"""Test which layers are split, by which rule, and which models are refused."""

from __future__ import annotations

import copy
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from deepseek_zero.base.errors import NotBuiltError, UsageError
from deepseek_zero.extensions.gathered_parameters import join_split
from deepseek_zero.parallel.apply import parallelize, virtual
from deepseek_zero.parallel.plans import ParallelPlan, ParallelSettings, choose
from deepseek_zero.planner.split import Split
from tests.in_process import Rank, run_ranks
from tests.unit.parallel.tiny import differences, ranks_step, tiny, virtual_step


class Attention(nn.Module):
    """An attention module with known names of projections and a number of heads."""

    def __init__(self, width: int = 12, heads: int = 3) -> None:
        super().__init__()
        self.num_heads, self.head_dim = heads, width // heads
        self.q, self.k, self.v, self.o = (nn.Linear(width, width) for _ in range(4))


class Block(nn.Module):
    def __init__(self, width: int = 12, heads: int = 3) -> None:
        super().__init__()
        self.norm, self.attention = nn.LayerNorm(width), Attention(width, heads)
        self.up, self.down = nn.Linear(width, 20), nn.Linear(20, width)


class Net(nn.Module):
    def __init__(self, **sizes: int) -> None:
        super().__init__()
        self.blocks, self.head = nn.ModuleList(Block(**sizes) for _ in range(2)), nn.Linear(12, 5)


def kinds(plan: ParallelPlan) -> dict[str, str]:
    return {choice.name: choice.style for choice in plan.choices}


def test_layers_with_common_names_are_split_and_others_stay_whole() -> None:
    plan = choose(Net(), 2)
    assert kinds(plan) == {
        f"blocks.{block}.{name}": style
        for block in range(2)
        for name, style in [
            *((f"attention.{name}", "column") for name in "qkv"),
            ("attention.o", "row"),
            ("up", "column"),
            ("down", "row"),
        ]
    }
    assert plan.splits["head.weight"].kind == "equal"
    assert plan.splits["blocks.0.norm.weight"].kind == "equal"
    assert plan.splits["blocks.0.attention.o.bias"].kind == "equal"


def test_heads_stay_whole_and_the_first_ranks_get_more() -> None:
    plan = choose(Net(), 2)
    assert plan.splits["blocks.0.attention.q.weight"].ranges == (((0, 8),), ((8, 12),))
    assert plan.splits["blocks.0.attention.o.weight"].dim == 1
    assert plan.splits["blocks.0.attention.o.weight"].ranges == (((0, 8),), ((8, 12),))
    assert plan.splits["blocks.0.up.bias"].ranges == (((0, 10),), ((10, 20),))
    assert plan.attributes["blocks.0.attention", "num_heads"] == (2, 1)
    assert ("blocks.0.attention", "head_dim") not in plan.attributes


def test_partition_config_comes_first() -> None:
    layers = ((r".*\.(up|down)\.weight", "skip", 1, ()),)
    plan = choose(Net(), 2, ParallelSettings(layers=layers))
    assert all("attention" in name for name in kinds(plan))
    alone = ParallelSettings(
        layers=((r".*\.up\.", "column", 1, ()), (r".*\.down\.", "row", 1, ())),
        uses_other_rules=False,
    )
    assert set(kinds(choose(Net(), 2, alone))) == {
        f"blocks.{n}.{name}" for n in range(2) for name in ("up", "down")
    }


def test_a_named_column_layer_without_a_row_layer_is_split_by_itself() -> None:
    wished = ParallelSettings(layers=((r".*\.up\.", "column", 1, ()),), uses_other_rules=False)
    plan = choose(Net(), 2, wished)
    assert kinds(plan) == {"blocks.0.up": "column_gather", "blocks.1.up": "column_gather"}
    assert plan.splits["blocks.0.up.bias"].ranges == (((0, 10),), ((10, 20),))
    named_only = Net()
    for block in named_only.blocks:
        del block.down
    plan = choose(named_only, 2)
    assert "blocks.0.up" in plan.left and "blocks.0.up" not in kinds(plan)


def test_layers_with_different_widths_are_split_separately() -> None:
    wished = ParallelSettings(
        layers=((r".*attention\.q\.", "column", 1, ()), (r".*\.down\.", "row", 1, ())),
        uses_other_rules=False,
    )
    found = kinds(choose(Net(), 2, wished))
    assert (
        found["blocks.0.attention.q"] == "column_gather" and found["blocks.1.down"] == "row_scatter"
    )


def test_a_projection_that_is_narrower_than_a_head_leaves_its_attention_whole() -> None:
    net = Net()
    for block in net.blocks:
        block.attention.gate = nn.Linear(12, 3)
    plan = choose(net, 3)
    assert {choice.name.split(".")[-1] for choice in plan.choices} == {"up", "down"}
    why = "a width of 3 is not a multiple of the head size 4"
    assert plan.left["blocks.0.attention.q"] == why
    with pytest.raises(UsageError, match=f"Layer 'q' stays whole: {why}"):
        choose(net.blocks[0].attention, 3)
    layers = ((r".*\b(q|k|v|gate)\b", "column", 1, ()), (r".*\bo\b", "row", 1, ()))
    styles = kinds(choose(net, 3, ParallelSettings(layers=layers)))
    assert styles["blocks.0.attention.gate"] == "column_gather"
    assert styles["blocks.0.attention.o"] == "row_scatter"


def test_a_model_with_only_skipped_layers_stays_whole() -> None:
    wished = ParallelSettings(layers=((".*", "skip", 1, ()),), needs_a_split=False)
    plan = choose(Net(), 2, wished)
    assert not plan.choices and all(split.kind == "equal" for split in plan.splits.values())


@pytest.mark.parametrize("kind", ["row", "column", "column_gather"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_single_layers_compute_what_whole_ones_do(kind: str, dtype: torch.dtype) -> None:
    """Also covers fused parts of different widths, uneven shards, and consecutive layers."""
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(6, 13), nn.Tanh(), nn.Linear(13, 7), nn.Linear(7, 10)).to(
        dtype
    )
    parts = ((r"3\.", "column", (4, 3, 3), ()),) if kind == "column" else ()
    settings = ParallelSettings(layers=(*parts, (r"\d\.", kind, 1, ())))
    x = torch.randn(4, 6, dtype=dtype)

    def step(model: nn.Module) -> list[torch.Tensor]:
        inputs = x.clone().requires_grad_()
        model(inputs).float().square().sum().backward()
        return [inputs.grad, *(each.grad for each in model.parameters())]  # type: ignore[list-item]

    def body(rank: Rank) -> list[torch.Tensor]:
        own = copy.deepcopy(layers)
        splits = parallelize(own, rank.comm, settings)
        assert any(split.kind == "split" for split in splits.values())
        of_input, *grads = step(own)
        return [
            of_input,
            *(
                join_of(each, split, rank)
                for each, split in zip(grads, splits.values(), strict=True)
            ),
        ]

    def join_of(own: torch.Tensor, split: Split, rank: Rank) -> torch.Tensor:
        return (
            own
            if split.kind != "split"
            else join_split(own.reshape(-1), split, rank.comm, "").view(split.shape)
        )

    plain, whole = step(copy.deepcopy(layers)), step(virtual(copy.deepcopy(layers), 3, settings))
    for found in run_ranks(3, body):
        for own, expected, exact in zip(found, plain, whole, strict=True):
            assert torch.equal(own, exact)
            torch.testing.assert_close(
                own, expected, atol=1e-5 if dtype == torch.float32 else 0.3, rtol=0.02
            )


def test_a_rank_without_a_head_is_refused_by_name() -> None:
    with pytest.raises(
        UsageError, match=r"layer 'blocks\.0\.attention\.o' has 3 heads and 3 key/value heads"
    ):
        choose(Net(), 4)


def test_a_model_without_supported_layers_is_refused() -> None:
    with pytest.raises(UsageError, match="no layer of Sequential is split over tp=2"):
        choose(nn.Sequential(nn.Linear(4, 4)), 2)


def test_strict_mode_names_a_layer_that_is_left() -> None:
    net = Net()
    for block in net.blocks:
        del block.down
    with pytest.raises(UsageError, match=r"strict_mode: layer 'blocks\.0\.up' is not split"):
        choose(net, 2, ParallelSettings(is_strict=True))


@pytest.mark.parametrize("family", ["bloom", "t5"])
def test_families_that_are_not_built_are_refused_by_name(family: str) -> None:
    net = Net()
    net.config = SimpleNamespace(model_type=family)  # type: ignore[assignment]
    with pytest.raises(NotBuiltError, match=f"tensor parallelism of the family '{family}'"):
        choose(net, 2)


def test_a_style_that_is_not_built_is_refused_by_name() -> None:
    net = Net()
    net.config = SimpleNamespace(base_model_tp_plan={"blocks.*.up": "grouped_gemm"})  # type: ignore[assignment]
    net.base_model_prefix = ""  # type: ignore[assignment]
    with pytest.raises(
        NotBuiltError, match=r"layer 'blocks\.0\.up' is to be split as 'grouped_gemm'"
    ):
        choose(net, 2)


def test_an_unknown_preset_is_refused() -> None:
    with pytest.raises(UsageError, match="preset_model 'gpt99' is not known"):
        choose(Net(), 2, ParallelSettings(preset="gpt99"))


def test_the_table_counts_blocks() -> None:
    lines = choose(Net(), 2).table().splitlines()
    assert lines[0].split() == ["layer", "becomes", "each", "rank", "by"]
    assert lines[1].split() == [
        "blocks.*.attention.q",
        "column",
        "8",
        "+",
        "4",
        "of",
        "12",
        "names",
        "x2",
    ]


class TestTransformers:
    """Plans for unmodified models."""

    @pytest.fixture(autouse=True)
    def _needed(self) -> None:
        pytest.importorskip("transformers")

    def test_fused_projections(self) -> None:
        gpt2 = choose(tiny("gpt2"), 2).splits["transformer.h.0.attn.c_attn.weight"]
        assert (gpt2.dim, gpt2.ranges[0]) == (1, ((0, 16), (32, 48), (64, 80)))
        neox = choose(tiny("gpt_neox"), 2).splits[
            "gpt_neox.layers.0.attention.query_key_value.weight"
        ]
        assert (neox.dim, neox.ranges) == (0, (((0, 48),), ((48, 96),)))

    def test_tied_tables_are_cut_once(self) -> None:
        plan = choose(tiny("qwen2"), 2)
        assert (
            kinds(plan)["model.embed_tokens"] == "vocabulary" and kinds(plan)["lm_head"] == "head"
        )
        assert plan.splits["model.embed_tokens.weight"].ranges == (((0, 34),), ((34, 67),))

    def test_key_value_heads_that_ranks_share(self) -> None:
        split = choose(tiny("llama", num_key_value_heads=2), 4).splits[
            "model.layers.0.self_attn.k_proj.weight"
        ]
        assert split.ranges == (((0, 8),), ((0, 8),), ((8, 16),), ((8, 16),))
        assert split.sharers(3) == (2, 3)
        with pytest.raises(
            UsageError, match=r"self_attn\.o_proj' has 4 heads and 2 key/value heads.*tp=3"
        ):
            choose(tiny("llama", num_key_value_heads=2), 3)

    def test_a_preset_is_a_familys_table(self) -> None:
        plan = choose(tiny("bert"), 2, ParallelSettings(preset="bert"))
        assert {choice.source for choice in plan.choices} == {"preset bert", "embeddings"}

    @pytest.mark.parametrize(
        ("name", "attribute", "value"),
        [
            ("gpt2", "transformer.h.0.attn.split_size", (16, 16)),
            ("gpt2", "transformer.h.0.attn.num_heads", (2, 2)),
            ("opt", "model.decoder.layers.0.self_attn.num_heads", (2, 2)),
            ("bert", "bert.encoder.layer.0.attention.self.all_head_size", (16, 16)),
        ],
    )
    def test_attributes_that_count_heads(self, name: str, attribute: str, value: Any) -> None:
        module, _, attribute = attribute.rpartition(".")
        assert choose(tiny(name), 2).attributes[module, attribute] == value


def test_nothing_changes_in_a_model_that_is_refused() -> None:
    net = Net()
    before = {name: type(module) for name, module in net.named_modules()}
    values = {name: each.clone() for name, each in net.named_parameters()}
    with pytest.raises(UsageError):
        choose(net, 4)
    assert {name: type(module) for name, module in net.named_modules()} == before
    assert all(torch.equal(each, values[name]) for name, each in net.named_parameters())


def test_feed_forward_layers_and_vocabularies_are_cut_at_multiples_of_a_grain() -> None:
    """Like DeepSpeed's tp_grain_size.

    Attention is split by heads. A width with too few grains is split evenly.
    """
    model = tiny("llama")
    widths = {
        choice.name: choice.part.weight.widths
        for choice in choose(model, 2, ParallelSettings(grain=32)).choices
    }
    assert widths["lm_head"] == [32, 35] and widths["model.layers.0.self_attn.q_proj"] == [16, 16]
    assert (
        widths["model.layers.0.mlp.up_proj"] == widths["model.layers.0.mlp.down_proj"] == [24, 24]
    )
    narrow = {
        choice.name: choice.part.weight.widths
        for choice in choose(model, 2, ParallelSettings(grain=16)).choices
    }
    assert narrow["model.layers.0.mlp.up_proj"] == [32, 16] and narrow["lm_head"] == [32, 35]
    steps = ranks_step(model, 2, ParallelSettings(grain=16))
    assert differences(steps, virtual_step(model, 2, ParallelSettings(grain=16))) == []
