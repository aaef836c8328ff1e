"""The code of benchmarks/gpu that runs without a GPU: sizes, FLOPs, figures and dry runs."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.cells import Shape
from benchmarks.gpu.throughput import SIZES, VOCABULARY, Model, Row, Size, figures
from benchmarks.gpu.tiers import KINDS, LADDERS, Kind, largest

SCRIPT = Path(__file__).resolve().parents[3] / "benchmarks" / "gpu" / "throughput.py"


def test_the_models_are_as_large_as_their_names() -> None:
    for name, kind in KINDS.items():
        assert kind.params / 1e9 == pytest.approx(float(name.partition("b")[0]), rel=0.05)


def test_the_largest_is_the_last_before_the_first_that_does_not_fit() -> None:
    asked: list[int] = []

    def fits(kind: Kind) -> bool:
        asked.append(kind.size.shape.layers)
        return kind.size.shape.layers < 6

    found = largest(LADDERS["plain"], fits)
    assert found is not None and found.size.shape.layers == 5 and asked == [3, 4, 5, 6]
    assert largest(LADDERS["ours"], fits) is None


@pytest.mark.slow  # runs in `make slow`; `make gpu-dry-run` uses the same models
def test_the_tiers_dry_run_uses_all_memories_and_reports_its_clipping() -> None:
    done = subprocess.run(
        [sys.executable, str(SCRIPT.with_name("tiers.py")), "--dry-run", "--steps", "1"],
        env={**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert "plain" in done.stdout and "ours" in done.stdout and "times" in done.stdout, done.stderr
    assert done.stdout.count("clipping by the exact global norm") == 2
    assert "nvme: weights" in done.stdout and "host: weights" in done.stdout


def test_flops_are_those_of_the_products_that_torch_counts() -> None:
    size = Size(Shape(2, 64), 32, 2, ())
    tokens = torch.randint(0, VOCABULARY, (2, 32))
    with FlopCounterMode(display=False) as counter:
        Model(size)(tokens, tokens).backward()
    # FlopCounterMode does not count the CPU's attention kernel. It has two products, which count
    # once in forward and twice in backward; the causal mask halves them.
    attention = 3 * 2 * 2 * size.shape.layers * size.context * size.shape.width * size.tokens / 2
    assert counter.get_total_flops() == size.flops - attention


def test_figures_are_ratios_of_medians_and_list_what_did_not_fit() -> None:
    rows = {
        "plain": Row([1.0, 2.0, 9.0], [3.0, 2.0], 5),
        "ours-3": Row([3.0, 1.0, 2.0], [3.0, 2.25], 4, (7, 7)),
        "fsdp2": Row(failed="out of memory"),
    }
    found = figures(SIZES["350m"], rows)
    assert found["fsdp2"] == {"failed": "out of memory"}
    assert found["ours-3"]["over_plain"] == 1.0
    assert found["ours-3"]["over_fsdp2"] is None
    rows["fsdp2"] = Row([4.0], [3.0, 2.0], 5)
    assert figures(SIZES["350m"], rows)["ours-3"]["over_fsdp2"] == 0.5
    assert found["ours-3"]["loss_gap"] == 0.25
    assert found["ours-3"]["tokens_per_second"] == 8 * 1024 / 2


@pytest.mark.slow  # runs in `make slow`; `make gpu-dry-run` uses the same models
def test_it_runs_dry_without_a_gpu() -> None:
    done = subprocess.run(
        [sys.executable, str(SCRIPT), "--dry-run"],
        env=os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        check=True,
    )
    for name in SIZES["tiny"].systems:
        assert f"  {name} " in done.stdout, done.stderr
