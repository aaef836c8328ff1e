"""Codecs are chosen by the estimated times of link and codec."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from deepseek_zero.base.mesh import Mesh
from deepseek_zero.config import Config
from deepseek_zero.engine import planning
from deepseek_zero.planner.codec_choice import (
    CodecRate,
    Open,
    choose_codes,
    gather_traffic,
    reduce_traffic,
)
from deepseek_zero.planner.plan_settings import Compression, PlanSettings
from deepseek_zero.precision.codecs import Blocks
from deepseek_zero.precision.policy import Policy

INT8, INT4 = Blocks(8, 256), Blocks(4, 128)
# elements per second and core
RATES = {INT8: CodecRate(INT8, 1.1e9, 2.5e9), INT4: CodecRate(INT4, 1.1e9, 1.1e9)}
MBIT = 1e6 / 8


def chosen(link: float, ranks: int = 2, here: int = 1, near: int = 1) -> Compression:
    weights = Open(gather_traffic(ranks, here, near, 2), (RATES[INT8],))
    gradients = Open(reduce_traffic(ranks, here, near, 2), (RATES[INT8], RATES[INT4]))
    return choose_codes(Compression(left_open=("weights", "gradients")), link, weights, gradients)


@pytest.mark.parametrize(
    ("link", "weights", "gradients"),
    [(100 * MBIT, INT8, INT4), (1000 * MBIT, INT8, INT4), (10_000 * MBIT, None, None)],
)
def test_slow_links_use_few_bits_and_fast_links_no_compression(
    link: float, weights: Blocks | None, gradients: Blocks | None
) -> None:
    found = chosen(link)
    assert (found.weights, found.gradients) == (weights, gradients)
    assert found == chosen(link), "the same numbers make the same choice"


def test_the_break_even_is_the_rate_of_equal_times() -> None:
    """A reduction over two ranks sends 1/2 x 2 bytes, or 1/2 x 0.53125 bytes after encoding.

    The latter also encodes and decodes.
    """
    codes = 1 / 1.1e9 + 1 / 1.1e9
    even = (0.9 * 1.0 - 0.53125 / 2) / codes  # where codes take 90 % of the time
    assert chosen(even * 0.999).gradients == INT4 and chosen(even * 1.001).gradients != INT4
    assert reduce_traffic(2, 1, 1, 2).seconds(even, RATES[INT4]) == pytest.approx(0.9 * 1.0 / even)


def test_by_host_a_rank_codes_a_part_and_sends_fp32_as_it_is() -> None:
    flat, by_host = reduce_traffic(4, 2, 1, 2), reduce_traffic(4, 2, 2, 2)
    assert (flat.far, flat.encoded, flat.decoded, flat.plain_bytes) == (0.5, 1.0, 1.0, 2)
    assert (by_host.far, by_host.encoded, by_host.decoded, by_host.plain_bytes) == (
        0.25,
        0.5,
        0.5,
        4,
    )
    assert gather_traffic(4, 2, 1, 2).far == 0.5 and gather_traffic(4, 2, 2, 2).far == 0.25


def test_stated_values_are_kept_and_the_numbers_are_logged() -> None:
    asked = Compression(weights=INT8, left_open=("gradients",))
    gradients = Open(reduce_traffic(2, 1, 1, 2), (RATES[INT8], RATES[INT4]))
    found = choose_codes(asked, 100 * MBIT, gradients=gradients)
    assert replace(found, why="") == replace(asked, gradients=INT4)
    assert "a rank sends 11.9 MiB/s to other hosts" in found.why and "weights" not in found.why
    assert (
        "gradients int4/128 (ns per element: unquantized 80.00, int8/256 41.93, int4/128 23.07)"
        in found.why
    )


@pytest.mark.parametrize(
    ("stage", "weights", "is_said"), [(2, None, True), (2, INT8, False), (3, None, False)]
)
def test_weights_without_automatic_codes_at_stages_1_and_2_are_logged(
    stage: int, weights: Blocks | None, is_said: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = list[str]()
    monkeypatch.setattr(planning, "log_once", said.append)
    alone: Any = SimpleNamespace(
        shard=SimpleNamespace(inter_node=frozenset()),
        whole=SimpleNamespace(all_gather_rows=lambda row, what: row[None]),
    )
    settings = PlanSettings(
        stage, compression=Compression(weights=weights, left_open=("gradients",))
    )
    planning.with_chosen_codes(Config(), settings, alone, Mesh())
    assert any("Set them with compression.weights.bits" in line for line in said) == is_said


@pytest.mark.parametrize(
    ("stage", "accumulation", "reduce", "gradients"),
    [
        (1, 1, None, 2),
        (1, 4, None, 4),  # partial gradients are accumulated in fp32
        (3, 4, None, 2),  # each micro-batch is reduced without accumulation
        (3, 1, torch.float32, 4),
        (0, 4, torch.float16, 2),
    ],
)
def test_gradients_are_counted_in_the_dtype_in_which_they_are_sent(
    stage: int,
    accumulation: int,
    reduce: torch.dtype | None,
    gradients: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    priced: dict[str, Open] = {}

    def choose(asked: Compression, link: float, **states: Open) -> Compression:
        priced.update(states)
        return replace(asked, why="")

    monkeypatch.setattr(planning, "inter_node_rate", lambda comm, what: MBIT)
    monkeypatch.setattr(planning, "measured_rates", lambda codec, device: (1e9, 1e9))
    monkeypatch.setattr(planning, "choose_codes", choose)
    comm: Any = SimpleNamespace(
        shard=SimpleNamespace(inter_node=frozenset({1})),
        whole=SimpleNamespace(all_gather_rows=lambda row, what: row[None]),
    )
    policy = Policy(torch.bfloat16, reduce=reduce)
    asked = Compression(left_open=("weights", "gradients"))
    settings = PlanSettings(stage, policy=policy, accumulation=accumulation, compression=asked)
    planning.with_chosen_codes(Config(), settings, comm, Mesh(dp_shard=2))
    assert {state: each.traffic.plain_bytes for state, each in priced.items()} == {
        "weights": 2,
        "gradients": gradients,
    }
