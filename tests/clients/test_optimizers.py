"""Optimizers of other libraries train, save and resume with the same losses.

Errors report states of another optimizer.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch

from deepseek_zero.base.errors import CheckpointError
from tests.clients.running import BY_HAND, need_client
from tests.unit.checkpoint import test_state as toys

Make = Callable[[Iterable[Any]], torch.optim.Optimizer]


def bitsandbytes(name: str) -> Make:
    import bitsandbytes as library

    # States of at least `min_8bit_size` elements use 8 bits.
    return lambda params: getattr(library.optim, name)(
        params, lr=1e-2, **({"min_8bit_size": 1} if "8" in name else {})
    )


def torchao(name: str) -> Make:
    import torchao.optim as library

    return lambda params: getattr(library, name)(params, lr=1e-2)


def schedulefree(name: str) -> Make:
    import schedulefree as library

    def make(params: Iterable[Any]) -> Any:
        made = getattr(library, name)(params, lr=1e-2)
        made.train()
        return made

    return make


def galore(name: str) -> Make:
    import galore_torch as library

    def make(params: Iterable[Any]) -> Any:
        params = list(params)
        flat, square = (
            [each for each in params if (each.dim() < 2) is is_flat] for is_flat in (True, False)
        )
        groups = [
            {"params": flat},
            {"params": square, "rank": 8, "update_proj_gap": 3, "scale": 0.25, "proj_type": "std"},
        ]
        return getattr(library, name)(groups, lr=1e-2)

    return make


CASES = [
    ("bitsandbytes", bitsandbytes, "AdamW"),
    ("bitsandbytes", bitsandbytes, "AdamW8bit"),
    ("bitsandbytes", bitsandbytes, "Lion"),
    ("torchao", torchao, "AdamW8bit"),
    ("torchao", torchao, "AdamW4bit"),
    ("torchao", torchao, "AdamWFp8"),
    ("schedulefree", schedulefree, "AdamWScheduleFree"),
]


@BY_HAND
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("stage", [0, 2, 3])
@pytest.mark.parametrize(
    ("package", "way", "name"), CASES, ids=[f"{package}-{name}" for package, _, name in CASES]
)
def test_an_optimizer_continues_after_a_load(
    tmp_path: Path, stage: int, package: str, way: Any, name: str
) -> None:
    need_client(package)
    with (
        torch.compiler.set_stance("force_eager")
        if package == "torchao"
        else contextlib.nullcontext()
    ):
        toys.goes_on(tmp_path, stage, way(name))


@BY_HAND
@pytest.mark.filterwarnings("ignore")
def test_galores_projector_is_named_with_what_to_do(tmp_path: Path) -> None:
    need_client("galore_torch")

    def body(here: Any, rank: Any) -> str:
        engine = toys.build(here, rank, 2, galore("GaLoreAdamW"))
        toys.steps(engine, range(2), rank.index)
        with pytest.raises(CheckpointError) as found:
            engine.save_checkpoint(tmp_path)
        engine.destroy()
        return str(found.value)

    assert all(
        "GaLoreProjector" in each and "engine.export" in each for each in toys.on_ranks(body)
    )
