"""Features for long sequences on each axis give the losses of a data-parallel run, or an error.

TABLE lists the expected results. Two runs of two steps on two ranks check each cell and give the
same bits. CI checks each feature on one or two axes, DEEPSEEK_ZERO_FULL=1 on all.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

import deepseek_zero
from deepseek_zero.base.errors import NotBuiltError
from deepseek_zero.extensions.adaptive_precision import AdaptivePrecision
from deepseek_zero.extensions.cut_layers import CutLayer
from deepseek_zero.parallel.sequence_model import own_part
from tests.pairwise import is_full
from tests.unit.parallel.tiny import batch, tiny

pytest.importorskip("transformers")
STEPS, MANY = 2, 1
CHECKPOINTS = "activation_checkpointing"
WINDOW = {
    "mode": "localslidingwindow",
    "block": 2,
    "num_sliding_window_blocks": 3,
    "attention": "unidirectional",
}
# The section of each feature, and a check that the feature was used by a trained engine.
FEATURES: dict[str, tuple[dict[str, Any], Callable[[Any], bool]]] = {
    "sparse_attention": (
        {"sparse_attention": WINDOW},
        lambda engine: engine.sparse_attention is not None,
    ),
    "policy": (
        {CHECKPOINTS: {"policy": "attention"}},
        lambda engine: bool(engine.parts.recompute.operators),
    ),
    "tiled_loss": ({CHECKPOINTS: {"tiled_loss": 5}}, lambda engine: has(engine, "TiledHead")),
    "tiled_mlp": ({CHECKPOINTS: {"tiled_mlp": 3}}, lambda engine: has(engine, "TiledMlp")),
    "tiled_mlp in bf16": (
        {CHECKPOINTS: {"tiled_mlp": 3}, "bf16": {"enabled": True}},
        lambda engine: has(engine, "TiledMlp"),
    ),
    "tile_above": (
        {"zero_optimization": {"tile_above": 2048}},
        lambda engine: any(isinstance(each, CutLayer) for each in engine.module.modules()),
    ),
    "parking": (
        {CHECKPOINTS: {"policy": "full", "device": "cpu"}},
        # The second stage has one checkpoint, whose input is a message that the pipeline keeps
        # anyway.
        lambda engine: (
            (engine.parts.recompute.parking.peak_bytes > 0) == (not engine.mesh.coordinates["pp"])
        ),
    ),
    "partition_activations": (
        {CHECKPOINTS: {"policy": "full", "partition_activations": True}},
        lambda engine: engine.runtime.comm.along["tp"].meter.sent_bytes["activations"] > 0,
    ),
    "precision": (
        {"fp16": {"enabled": True, "loss_scale": 1.0}, "precision": "auto", "precision_window": 2},
        lambda engine: engine.optimizer.policy(AdaptivePrecision) is not None,
    ),
}
# These features change the result; the others change only how it is computed
CHANGES = ("sparse_attention", "tiled_mlp in bf16", "precision")
BUILT, NOTHING = "built", "nothing is cut"
AXES = ("tp", "sp", "pp")
TABLE = {  # any other value is the expected error message
    "sparse_attention": (BUILT, BUILT, BUILT),
    "policy": (BUILT, BUILT, BUILT),
    "tiled_loss": (
        BUILT,
        BUILT,
        r"tiled_loss and tiled_mlp on a mesh with stages \(pp\) are not built",
    ),
    "tiled_mlp": (
        BUILT,
        BUILT,
        r"tiled_loss and tiled_mlp on a mesh with stages \(pp\) are not built",
    ),
    "tiled_mlp in bf16": (
        BUILT,
        BUILT,
        r"tiled_loss and tiled_mlp on a mesh with stages \(pp\) are not built",
    ),
    "tile_above": ("tile_above on a mesh with tp = 2", BUILT, "tile_above on a mesh with pp = 2"),
    "parking": (BUILT, BUILT, BUILT),
    "partition_activations": (BUILT, NOTHING, NOTHING),
    "precision": (BUILT, BUILT, r"precision auto on a mesh with stages \(pp\)"),
}


CELLS = [
    (feature, axis)
    for number, feature in enumerate(TABLE)
    for axis in (AXES if is_full() else AXES[number % 2 :: 2])
]


def has(engine: Any, name: str) -> bool:
    return any(
        name in [base.__name__ for base in type(each).__mro__] for each in engine.module.modules()
    )


def start(section: dict[str, Any], mesh: dict[str, int]) -> Any:
    zero = {"stage": 3 if "pp" not in mesh else 1, "stage3_param_persistence_threshold": 0}
    config = {
        "train_micro_batch_size_per_gpu": 3,
        "gradient_accumulation_steps": MANY,
        "steps_per_print": None,
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
        **section,
        "zero_optimization": zero | section.get("zero_optimization", {}),
    }
    return deepseek_zero.initialize(model=tiny("llama"), config=config, mesh=mesh)[0]


def given(seed: int) -> dict[str, Tensor]:
    # Large enough to be offloaded
    return {name: value.repeat(1, 4) for name, value in batch(seed).items()}


def train(engine: Any) -> tuple[list[float], list[Tensor]]:
    """Train on the same batches on every rank.

    Returns the mean loss of each step and this rank's weights.
    """
    losses = []
    for step in range(STEPS):
        batches = [given(10 * step + micro) for micro in range(MANY)]
        if engine.mesh.pp > 1:
            losses.append(engine.train_batch(iter(batches)).item())
            continue
        found = 0.0
        for whole in batches:
            own = own_part(engine.module, whole) if engine.mesh.sp > 1 else whole
            loss = engine(**own, use_cache=False).loss
            engine.backward(loss)
            engine.step()
            found += loss.item() / MANY
        losses.append(found)
    return losses, [value.clone() for value in engine.module.state_dict().values()]


@cache
def alone(feature: str | None) -> list[float]:
    """Return the losses of two data-parallel ranks, with or without the feature. Collective,
    cached.
    """
    engine = start({} if feature is None else FEATURES[feature][0], {"dp_shard": 2})
    losses, _ = train(engine)
    engine.destroy()
    return losses


@pytest.mark.ranks(2)
@pytest.mark.parametrize(("feature", "axis"), CELLS)
def test_each_is_the_same_on_an_axis_or_refused_by_name(feature: str, axis: str) -> None:
    (section, is_in_force), expected = FEATURES[feature], TABLE[feature][AXES.index(axis)]
    if expected not in (BUILT, NOTHING):
        with pytest.raises(NotBuiltError, match=expected):
            start(section, {axis: 2})
        return
    wanted = alone(feature if feature in CHANGES else None)
    assert feature not in CHANGES or wanted != alone(None)
    runs = []
    for _ in range(2):
        engine = start(section, {axis: 2})
        runs.append(train(engine))
        if expected is BUILT:
            assert is_in_force(engine), feature
        else:
            assert engine.parts.recompute.partition is None
        engine.destroy()
    (losses, weights), (again, same) = runs
    assert losses == pytest.approx(wanted, rel=1e-5 if feature not in CHANGES[1:] else 5e-3)
    assert losses == again and all(map(torch.equal, weights, same))
