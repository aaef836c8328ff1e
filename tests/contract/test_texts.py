"""Messages name this library and not DeepSpeed, and errors about a misspelt name suggest the
correct one.
"""

from __future__ import annotations

import ast
import copy
import pickle
import re
from pathlib import Path
from typing import Any

import pytest
from torch import nn

import deepseek_zero
from deepseek_zero.base.given import NoSuchNameError

PACKAGE = Path(__file__).resolve().parents[2] / "src" / "deepseek_zero"
# Messages with DeepSpeed as the subject, and its calls, are wrong for users who import
# deepseek_zero.
FOREIGN = re.compile(
    r"^(DeepSpeed (requires|does not|can ?not|only|expects|needs)\b|Not sure how)"
    r"|\bin DeepSpeed config\b"
)
CALL = re.compile(r"\bdeepspeed\.(initialize|init_distributed)\b")
SAYS = re.compile(r"(Error|refuse|log_once|log_first|warning|info|error|add|warn)$")


def foreign_texts(tree: ast.AST) -> list[str]:
    """Return the error and log messages in a file that name DeepSpeed as the subject."""
    found = []
    constants = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant | ast.JoinedStr):
            constants.update(
                {target.id: node.value for target in node.targets if isinstance(target, ast.Name)}
            )
        if not isinstance(node, ast.Call) or not SAYS.search(ast.unparse(node.func)):
            continue
        for part in ast.walk(node):
            value = constants.get(part.id) if isinstance(part, ast.Name) else part
            for text in ast.walk(value) if value is not None else ():
                said = text.value if isinstance(text, ast.Constant) else None
                if isinstance(said, str) and (FOREIGN.search(said) or CALL.search(said)):
                    found.append(f"{node.lineno}: {said[:100]}")
    return found


def test_no_error_or_log_line_is_in_deepspeeds_name() -> None:
    found = [
        f"{path.relative_to(PACKAGE)}:{each}"
        for path in sorted(PACKAGE.rglob("*.py"))
        for each in foreign_texts(ast.parse(path.read_text(encoding="utf-8")))
    ]
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    "line",
    [
        'raise ConfigError("DeepSpeed requires --deepspeed_config")',
        'X = "DeepSpeed requires a file"\nraise ConfigError(X, fix="a")',
        'log_once("call deepspeed.initialize() first")',
        'problems.add("", f"Duplicate keys in DeepSpeed config: {names}")',
    ],
)
def test_such_a_line_would_be_found(line: str) -> None:
    assert foreign_texts(ast.parse(line))


@pytest.fixture(scope="module")
def engine() -> Any:
    config = {"train_batch_size": 2, "optimizer": {"type": "AdamW"}, "steps_per_print": None}
    engine = deepseek_zero.initialize(model=nn.Sequential(nn.Linear(2, 2)), config=config)[0]
    engine.module.register_buffer("position_table", None)
    yield engine
    engine.destroy()


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("savecheckpoint", "save_checkpoint"),
        ("global_step", "global_steps"),
        ("get_grad_norm", "get_global_grad_norm"),
        ("optimiser_", "optimizer"),
        ("load_checkpoints", "load_checkpoint"),
    ],
)
def test_a_misspelt_attribute_of_the_engine_names_the_near_one(
    engine: Any, name: str, meant: str
) -> None:
    with pytest.raises(
        AttributeError, match=rf"no attribute '{name}' \(did you mean '{meant}'\?\)"
    ):
        getattr(engine, name)
    assert not hasattr(engine, name) and getattr(engine, name, 7) == 7


def test_a_name_like_no_other_gets_no_suggestion(engine: Any) -> None:
    with pytest.raises(NoSuchNameError) as caught:
        getattr(engine, "zzzzzzzz")  # noqa: B009
    assert "did you mean" not in str(caught.value)
    assert "'Sequential'" in str(caught.value)
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)
    assert str(copy.copy(caught.value)) == str(caught.value)


@pytest.mark.parametrize(
    ("name", "meant"),
    [("initializer", "initialize"), ("DeepSeekZero3", "DeepSeekZeRO3"), ("zer", "zero")],
)
def test_a_misspelt_name_of_the_package_names_the_near_one(name: str, meant: str) -> None:
    with pytest.raises(
        AttributeError,
        match=rf"'deepseek_zero' has no attribute '{name}' \(did you mean '{meant}'\?\)",
    ):
        getattr(deepseek_zero, name)
