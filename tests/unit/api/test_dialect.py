"""Each API call uses one dialect, and the dialect's changes apply before anything is built."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import deepseek_zero
from deepseek_zero import zero
from deepseek_zero.api import dialect
from deepseek_zero.api.dialect import Dialect, current_dialect
from deepseek_zero.api.engine import ZeroEngine
from deepseek_zero.base.errors import ConfigError
from deepseek_zero.compat.deepspeed import dialect as deepspeed_dialect
from deepseek_zero.compat.deepspeed.dialect import DeepSpeedDropIn, DeepSpeedNames
from deepseek_zero.compat.deepspeed.optimizer import FlatStates, NamedOptimizer
from deepseek_zero.compat.deepspeed.zero import DropInInit
from deepseek_zero.optim.sharded import ShardedOptimizer

PACKAGE = Path(deepseek_zero.__file__).parent
CONFIG: dict[str, Any] = {
    "train_micro_batch_size_per_gpu": 2,
    "zero_optimization": {"stage": 1},
    "optimizer": {"type": "Adam", "params": {"lr": 0.1}},
}
WITHOUT_WRITES = [
    *(PACKAGE / "api").glob("*.py"),
    PACKAGE / "compat" / "deepspeed" / "dialect.py",
    PACKAGE / "compat" / "deepspeed" / "engine.py",
]


def engine_with(**words: Any) -> Any:
    return deepseek_zero.initialize(model=nn.Linear(4, 4), config={**CONFIG, **words})[0]


def test_the_dialect_follows_from_the_name_that_was_imported(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert type(current_dialect()) is DeepSpeedNames
    monkeypatch.setattr(deepspeed_dialect, "is_dropin_imported", lambda: True)
    assert type(current_dialect()) is DeepSpeedDropIn
    monkeypatch.setattr(dialect, "contributions", lambda topic: [])
    assert type(current_dialect()) is Dialect


def test_the_plain_dialect_makes_an_engine_without_deepspeeds_names(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(dialect, "contributions", lambda topic: [])
    engine = engine_with()
    assert type(engine) is ZeroEngine and type(engine.optimizer) is ShardedOptimizer
    engine.backward(engine(torch.ones(2, 4)).sum())
    engine.step()
    assert engine.get_lr() == [0.1] and engine.get_global_grad_norm() is not None
    assert not hasattr(engine, "get_mom") and not hasattr(engine.optimizer, "cur_scale")
    engine.destroy()
    with pytest.raises(ConfigError, match="no_such_key"):
        engine_with(no_such_key=1)


def test_only_the_name_deepspeed_has_other_defaults(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = engine_with()
    assert engine.optimizer.settings.max_norm == 0 and type(engine.optimizer) is NamedOptimizer
    assert engine.optimizer.optimizer is engine.optimizer.inner
    engine.destroy()
    monkeypatch.setattr(deepspeed_dialect, "is_dropin_imported", lambda: True)
    engine = engine_with(no_such_key=1)
    assert engine.optimizer.settings.max_norm == 1
    shown = engine.optimizer.optimizer
    assert type(shown) is FlatStates and shown is engine.basic_optimizer
    assert isinstance(shown, torch.optim.Adam) and shown.adam_w_mode
    assert shown == engine.optimizer.inner and shown.param_groups is engine.optimizer.param_groups
    engine.destroy()
    dist.destroy_process_group()  # the group of one rank that DeepSpeed starts


def test_a_group_that_the_program_must_have_created_is_required() -> None:
    with pytest.raises(AssertionError, match="dist_init_required is False"):
        deepseek_zero.initialize(
            model=nn.Linear(4, 4), config=dict(CONFIG), dist_init_required=False
        )


def test_a_subclass_of_init_has_what_the_dialect_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    class Own(zero.Init):
        pass

    assert type(Own(enabled=False)) is Own
    monkeypatch.setattr(deepspeed_dialect, "is_dropin_imported", lambda: True)
    made = Own(enabled=False)
    assert isinstance(made, Own) and isinstance(made, DropInInit) and type(made).__name__ == "Own"
    assert type(zero.Init(enabled=False)) is DropInInit


def test_the_api_writes_into_no_finished_object() -> None:
    found = {path.name: list(writes(path.read_text())) for path in WITHOUT_WRITES}
    assert len(found) > 10
    assert {name: lines for name, lines in found.items() if lines} == {}


@pytest.mark.parametrize(
    "line", ["x.__class__ = y", "vars(x)['a'] = 1", "x.__dict__['a'] = 1", "vars(x).update(y)"]
)
def test_a_write_into_a_constructed_object_is_detected(line: str) -> None:
    assert list(writes(line)) == [1]


def writes(text: str) -> Iterator[int]:
    """Yield the lines that assign `__class__` or write to the `__dict__` of an object."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Attribute | ast.Subscript) and isinstance(node.ctx, ast.Store):
            target = ast.unparse(node)
            if target.endswith(".__class__") or "vars(" in target or ".__dict__[" in target:
                yield node.lineno
        elif isinstance(node, ast.Call) and ast.unparse(node.func).startswith("vars("):
            yield node.lineno


def test_initialize_has_at_most_60_lines_without_its_docstring() -> None:
    tree = ast.parse((PACKAGE / "api" / "initialize.py").read_text())
    (function,) = [
        node
        for node in tree.body
        if isinstance(node, ast.FunctionDef) and node.name == "initialize"
    ]
    docstring = function.body[0]
    assert isinstance(docstring, ast.Expr)
    assert function.end_lineno is not None
    assert docstring.end_lineno is not None
    lines = function.end_lineno - function.lineno + 1
    assert lines - (docstring.end_lineno - docstring.lineno + 1) <= 60
