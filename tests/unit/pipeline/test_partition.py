"""Partitions of a chain of layers are balanced, never empty, and the same on every rank."""

from __future__ import annotations

import itertools
import random

import pytest

from deepseek_zero.base.errors import NotBuiltError, UsageError
from deepseek_zero.pipeline.partition import LayerCost, balanced, partition, uniform


def heaviest(weights: list[int], cut: tuple[int, ...]) -> int:
    return max(sum(weights[start:stop]) for start, stop in itertools.pairwise(cut))


def all_cuts(layers: int, stages: int) -> list[tuple[int, ...]]:
    return [(0, *inner, layers) for inner in itertools.combinations(range(1, layers), stages - 1)]


def test_uniform_gives_the_first_stages_more() -> None:
    assert uniform(10, 4) == (0, 3, 6, 8, 10)
    assert uniform(4, 4) == (0, 1, 2, 3, 4)


def test_balanced_is_the_best_there_is() -> None:
    generator = random.Random(3)
    for _ in range(200):
        layers, stages = generator.randint(1, 8), generator.randint(1, 5)
        stages = min(stages, layers)
        weights = [generator.choice([0, 1, 2, 5, 9]) for _ in range(layers)]
        found = balanced(weights, stages)
        assert found in all_cuts(layers, stages)
        assert heaviest(weights, found) == min(
            heaviest(weights, cut) for cut in all_cuts(layers, stages)
        )


def test_parameters_count_what_is_trained() -> None:
    layers = [LayerCost(trainable=size) for size in (10, 1, 1, 1, 1, 6)]
    assert partition("parameters", layers, 2) == (0, 1, 6)
    frozen = [LayerCost(trainable=size) for size in (0, 1, 1, 1, 1, 0)]
    assert partition("Parameters", frozen, 2) == (0, 3, 6)


def test_type_counts_layers_whose_class_matches() -> None:
    kinds = ["Embedding", "Block", "Lambda", "Block", "Block", "Norm", "Block", "Linear"]
    layers = [LayerCost(kind) for kind in kinds]
    cut = partition("type:block", layers, 2)
    assert [
        sum("Block" in kind for kind in kinds[start:stop])
        for start, stop in itertools.pairwise(cut)
    ] == [2, 2]
    with pytest.raises(UsageError, match="matches no layer"):
        partition("type:attention", layers, 2)


def test_best_weighs_work_first_and_memory_among_equals() -> None:
    layers = [LayerCost(flops=4, state_bytes=size, saved_bytes=1) for size in (9, 1, 1, 1, 1)]
    # Both 2 + 3 and 3 + 2 balance the work. The first stage has the large layer and more
    # micro-batches in flight.
    assert partition("best", layers, 2, (2, 1)) == (0, 2, 5)
    assert partition("best", [LayerCost(flops=4) for _ in range(6)], 3) == (0, 2, 4, 6)
    assert partition("best", [LayerCost(flops=size) for size in (1, 1, 1, 9)], 2) == (0, 3, 4)


def test_best_finds_the_smallest_bottleneck() -> None:
    generator = random.Random(5)
    for _ in range(100):
        stages, layers = 3, generator.randint(3, 8)
        work = [generator.randint(50, 90) for _ in range(layers)]
        found = partition("best", [LayerCost(flops=each) for each in work], stages)
        assert heaviest(work, found) <= 1.02 * min(
            heaviest(work, cut) for cut in all_cuts(layers, stages)
        )


def test_invalid_layouts_are_refused() -> None:
    with pytest.raises(UsageError, match="2 layers are cut into 3 stages"):
        partition("uniform", [LayerCost()] * 2, 3)
    with pytest.raises(NotImplementedError, match="profile"):
        partition("profile", [LayerCost()] * 3, 3)
    with pytest.raises(UsageError, match="Partitioning method even not implemented"):
        partition("even", [LayerCost()] * 3, 3)
    with pytest.raises(UsageError, match="is no regular expression: unterminated"):
        partition("type:[", [LayerCost()] * 3, 3)
    assert issubclass(NotBuiltError, NotImplementedError)


def test_a_thousand_layers_are_cut_quickly() -> None:
    generator = random.Random(7)
    layers = [
        LayerCost(trainable=generator.randint(1, 100), flops=generator.randint(1, 100))
        for _ in range(1000)
    ]
    for method in ("parameters", "best", "uniform"):
        assert len(partition(method, layers, 128)) == 129
