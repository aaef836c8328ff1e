"""Test the plan that an engine makes from its settings, and the log messages about it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

import deepseek_zero
import deepseek_zero as dz
from deepseek_zero.base.device import CPU
from deepseek_zero.base.errors import UsageError
from deepseek_zero.base.mesh import Mesh
from deepseek_zero.config import Config, Facts, resolve
from deepseek_zero.config.load import load
from deepseek_zero.engine.planning import (
    log_fixed_bits,
    log_unquantized,
    with_useful_copies,
)
from deepseek_zero.engine.settings import step_settings_of
from deepseek_zero.optim.step_settings import TILE_NUMEL
from deepseek_zero.planner.extras import second_copy_of
from deepseek_zero.planner.plan import plan_model
from deepseek_zero.planner.plan_settings import Compression, Machine, PlanSettings, UnitTiers
from deepseek_zero.precision.codecs import Blocks
from deepseek_zero.tiers.tier import Tier
from tests.compositions import engines_of_threads
from tests.in_process import Rank, run_ranks
from tests.models import batch_of, seeded

ONE_BIT: dict[str, Any] = {
    "train_micro_batch_size_per_gpu": 2,
    "steps_per_print": None,
    "optimizer": {"type": "OneBitAdam", "params": {"lr": 0.01, "freeze_step": 1}},
    "zero_optimization": {"stage": 1},
}


def test_between_hosts_momenta_are_exchanged_rank_by_rank_unless_an_order_by_host_is_stated(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def train(rank: Rank, **keys: Any) -> list[float]:
        engine = here.start(rank, seeded(), ONE_BIT | keys)
        assert engine.runtime.settings.ranks_per_host == 1
        losses = []
        for step in range(3):
            batch = batch_of(step, 0, rank.index)
            losses.append(engine(batch.tokens, batch.targets))
            engine.backward(losses[-1])
            engine.step()
        engine.destroy()
        return [loss.item() for loss in losses]

    with engines_of_threads() as here, caplog.at_level("INFO", logger="deepseek_zero"):
        unstated = run_ranks(4, train, hosts=2)
        said = [
            line for line in caplog.messages if "OneBitAdam exchanges momenta rank by rank" in line
        ]
        assert len(said) == 4, "each thread is rank 0 of its process"
        assert unstated == run_ranks(4, train)
        with pytest.raises(
            UsageError, match=r'ranks_per_host above 1 \("ranks_per_host": 1 goes\)'
        ):
            run_ranks(4, lambda rank: train(rank, ranks_per_host=2), hosts=2)


def test_a_plan_of_several_hosts_has_the_order_that_a_run_of_momenta_takes() -> None:
    with torch.device("meta"):
        model = seeded()
    for name, expected in (("OneBitAdam", 1), ("AdamW", 2)):
        config = ONE_BIT | {"optimizer": {"type": name, "params": {"lr": 0.01}}}
        assert (
            deepseek_zero.plan(model, config, ranks=4, hosts=2).settings.ranks_per_host == expected
        )


def test_the_host_updates_in_the_tiles_of_a_cpu_whatever_device_trains() -> None:
    config = resolve(
        load({"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 3}}), Facts()
    )
    beside = step_settings_of(config, (), torch.device("cuda", 0))
    alone = step_settings_of(config, (), CPU)
    assert beside.host_tile_numel == alone.tile_numel == alone.host_tile_numel == TILE_NUMEL.cpu
    assert beside.tile_numel == TILE_NUMEL.accelerator


MESH = Mesh(dp_replicate=2, dp_shard=4).on_world(8)


@pytest.mark.parametrize(
    ("settings", "in_place", "words"),
    [
        ({"secondary_ranks": 2}, True, "a gather copies nothing"),
        ({"secondary_ranks": 2, "stage": 2}, False, "stage 2 keeps whole weights"),
        (
            {"secondary_ranks": 2, "weight_tier": Tier.HOST},
            False,
            "offload_param moves the weights off the device",
        ),
        ({"secondary_ranks": 4}, False, "there is no smaller group"),
        ({"secondary_ranks": 8}, False, "there is no smaller group"),
    ],
)
def test_a_second_copy_that_would_not_be_read_is_not_created(
    settings: dict[str, Any], in_place: bool, words: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("INFO", logger="deepseek_zero"):
        found = with_useful_copies(PlanSettings(**settings), MESH, in_place=in_place)
    assert found.secondary_ranks == 1
    assert any("zero_hpz_partition_size = " in line and words in line for line in caplog.messages)


def test_otherwise_the_settings_stay_and_nothing_is_logged(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level("INFO", logger="deepseek_zero"):
        for size in (1, 2, 3):
            settings = PlanSettings(secondary_ranks=size)
            assert with_useful_copies(settings, MESH, in_place=size == 1) is settings
    assert not caplog.messages


def test_units_with_offloaded_weights_have_no_second_copy_and_the_plan_states_it() -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    settings = PlanSettings(persistence_numel=0, secondary_ranks=2)
    for tiers, many in (
        (settings.unit_tiers, 0),
        ((UnitTiers("root", Tier.HOST, Tier.DEVICE),), 1),
    ):
        plan = plan_model(model, replace(settings, unit_tiers=tiers), MESH)
        said = [
            line
            for line in plan.explain()
            if "no second copy of the weights of 1 of 1 units" in line
        ]
        assert len(said) == many
        groups = [group for unit in plan.units for group in unit.sharded]
        assert groups and all(
            (second_copy_of(group.plan) is None) is bool(many) for group in groups
        )


@pytest.mark.parametrize(
    ("stage", "ranks", "min_numel", "words"),
    [
        (3, 1, 0, ["weights are", "no other rank", "gradients are", "no other rank"]),
        (0, 2, 0, ["weights are", "stage 0"]),
        (
            3,
            2,
            65,
            ["weights are", "matrices of 65 elements", "gradients are", "matrices of 65 elements"],
        ),
        (3, 2, 64, []),
        (1, 2, 64, []),
    ],
)
def test_states_that_are_not_coded_as_configured_are_logged(
    stage: int, ranks: int, min_numel: int, words: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    compression = Compression(Blocks(8, 256), Blocks(4, 128), min_numel=min_numel)
    settings = PlanSettings(stage, persistence_numel=0, compression=compression)
    with caplog.at_level("INFO", logger="deepseek_zero"):
        log_unquantized(
            plan_model(nn.Linear(8, 8), settings, Mesh(dp_shard=ranks)), among_hosts=False
        )
    said = " ".join(caplog.messages)
    assert len(caplog.messages) == len(words) // 2 and all(word in said for word in words)


@pytest.mark.parametrize(
    ("among_hosts", "spans_hosts", "compression", "is_said"),
    [
        (True, False, Compression(gradients=Blocks(4, 128)), True),
        (True, False, Compression(Blocks(8, 256)), True),
        (True, False, Compression(), False),
        (True, True, Compression(gradients=Blocks(4, 128)), False),
        (False, False, Compression(gradients=Blocks(4, 128)), False),
    ],
)
def test_codes_inside_a_host_with_local_slices_are_logged(
    among_hosts: bool,
    spans_hosts: bool,
    compression: Compression,
    is_said: bool,
    caplog: pytest.LogCaptureFixture,
) -> None:
    settings = PlanSettings(persistence_numel=0, compression=compression)
    plan = plan_model(nn.Linear(8, 8), settings, MESH, Machine(spans_hosts=spans_hosts))
    with caplog.at_level("INFO", logger="deepseek_zero"):
        log_unquantized(plan, among_hosts=among_hosts)
    assert (
        any("quantization saves no bytes between hosts" in line for line in caplog.messages)
        == is_said
    )


@pytest.mark.parametrize("precision", ["auto", "bf16"])
@pytest.mark.parametrize("codec", [Blocks(4, 128), None])
def test_error_feedback_with_precision_auto_is_turned_off_with_a_log_line(
    precision: str, codec: Blocks | None, caplog: pytest.LogCaptureFixture
) -> None:
    settings = PlanSettings(compression=Compression(gradients=codec))
    config = Config.model_validate({"precision": precision})
    with caplog.at_level("INFO", logger="deepseek_zero"):
        log_fixed_bits(config, settings)
    said = any("it does not read their quantization error" in line for line in caplog.messages)
    assert said is (precision == "auto" and codec is not None)


WORDS = "stage3_param_persistence_threshold"


def layers(*widths: int) -> nn.Module:
    return nn.Sequential(*(nn.Linear(width, width, bias=False) for width in widths))


@pytest.mark.parametrize("door", ["initialize", "DeepSeekZeRO3"])
@pytest.mark.parametrize(
    ("model", "zero", "says"),
    [
        (layers(8), {}, "all 64 parameters"),
        (
            layers(300, 300, 300),
            {},
            "all 270000 parameters",
        ),  # each is below the threshold, their sum is above it
        (layers(400, *[300] * 20), {}, "1800000 of 1960000 parameters"),
        (layers(400, 300), {}, ""),
        (layers(8), {WORDS: 0}, ""),
        (layers(8), {"stage": 2}, ""),
        (layers(300), {"stage3_model_persistence_threshold": 0}, ""),
    ],
)
def test_parameters_that_stay_whole_at_stage_3_are_logged_with_the_key(
    door: str, model: nn.Module, zero: dict[str, Any], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    section = {"stage": 3, **zero}
    if door == "initialize":
        dz.initialize(model=model, config={"zero_optimization": section})[0].destroy()
    else:
        dz.DeepSeekZeRO3(model, zero_optimization=section)
    lines = [line for line in capsys.readouterr().err.splitlines() if WORDS in line]
    assert len(lines) == bool(says)
    assert all(says in line and "INFO" in line for line in lines)
