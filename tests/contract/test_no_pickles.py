"""Ranks exchange bytes, texts and tensors; received data is never unpickled, so it cannot run code.

The only unpickler is torch's with an allow-list, which reads files of torch.save
(`weights_only=True`).
"""

from __future__ import annotations

import ast
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import deepseek_zero
from deepseek_zero.comm.context import WorldContext

PACKAGE = Path(deepseek_zero.__path__[0])
OBJECT_COLLECTIVES = {
    name
    for name in dir(dist)
    if "object" in name and callable(getattr(dist, name)) and not name.startswith("_")
}
UNPICKLERS = {"Unpickler", "Unpickling", "loads", "load"}
MODULES = {"pickle", "_pickle", "cPickle", "dill", "cloudpickle", "marshal", "shelve", "joblib"}


def _offences(tree: ast.Module) -> Iterator[str]:
    """Yield code that unpickles or makes another package unpickle; names in tables do not count."""
    modules = {"pickle"}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            modules |= {each.asname or each.name for each in node.names if each.name in MODULES}
            yield from (each.name for each in node.names if each.name in MODULES - {"pickle"})
        elif isinstance(node, ast.ImportFrom):
            wanted = UNPICKLERS if node.module in MODULES else OBJECT_COLLECTIVES
            yield from (each.name for each in node.names if each.name in wanted)
        elif isinstance(node, ast.Attribute):
            of_pickle = isinstance(node.value, ast.Name) and node.value.id in modules
            if node.attr in OBJECT_COLLECTIVES or (
                of_pickle and node.attr.lstrip("_") in UNPICKLERS
            ):
                yield ast.unparse(node)
        elif isinstance(node, ast.Call) and ast.unparse(node.func) == "torch.load":
            safe = [each for each in node.keywords if each.arg == "weights_only"]
            if not safe or ast.unparse(safe[0].value) != "True":
                yield ast.unparse(node)


def test_src_unpickles_nothing_and_sends_no_objects() -> None:
    files = sorted(PACKAGE.rglob("*.py"))
    assert len(files) > 100
    found = [
        f"{path.relative_to(PACKAGE)}: {each}"
        for path in files
        for each in _offences(ast.parse(path.read_text()))
    ]
    assert not found


@pytest.mark.parametrize(
    ("source", "is_found"),
    [
        ("dist.all_gather_object(a, b)", True),
        ("import torch\ntorch.distributed.broadcast_object_list([1])", True),
        ("from torch.distributed import gather_object", True),
        ("import pickle as p\np.loads(b'')", True),
        ("from pickle import Unpickler", True),
        ("import pickle\nclass Own(pickle._Unpickler): pass", True),
        ("import dill", True),
        ("import torch\ntorch.load('x')", True),
        ("import torch\ntorch.load('x', weights_only=False)", True),
        ("import torch\ntorch.load('x', weights_only=True)", False),
        ("import json, pickle\njson.loads('1')\npickle.Pickler", False),
        ("ALONE = {'all_gather_object': None}", False),
    ],
)
def test_the_search_finds_uses_and_ignores_names(source: str, is_found: bool) -> None:
    assert bool(list(_offences(ast.parse(source)))) is is_found


class Mpu:
    """Two data-parallel ranks."""

    def get_data_parallel_world_size(self) -> int:
        return 2

    def get_data_parallel_rank(self) -> int:
        return dist.get_rank()


@pytest.mark.ranks(2, fresh=True)
def test_ranks_meet_train_and_save_without_unpickling(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise AssertionError("unpickled")

    for name in ("loads", "load", "Unpickler", "_Unpickler"):
        monkeypatch.setattr(pickle, name, refuse)
    monkeypatch.setattr(dist.distributed_c10d, "_unpickler", refuse)  # type: ignore[attr-defined]  # used for objects
    with pytest.raises(AssertionError, match="unpickled"):
        dist.all_gather_object([None, None], 1)
    assert WorldContext._current is None, "this test sees how ranks meet"
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "AdamW"},
        "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
    }
    data = torch.ones(4, 4)
    engine, _, loader, _ = deepseek_zero.initialize(
        model=nn.Linear(4, 4), config=config, training_data=data, mpu=Mpu()
    )
    for batch in loader:
        engine.backward(engine(batch).square().mean())
        engine.step()
    engine.save_checkpoint(tmp_path)
    engine.load_checkpoint(tmp_path)
    engine.destroy()
