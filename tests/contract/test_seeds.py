"""The examples seed_000, 001 and 002 are the articles' programs, and every changed line has a
reason.

`pytest -s tests/contract/test_seeds.py` prints the three differences, with the changed lines
grouped by reason.
"""

from __future__ import annotations

import ast
import difflib
import json
import os
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SEEDS = Path(__file__).with_name("seeds")
REMOVED = {"000": 2, "001": 1, "002": 16}
"""How many lines of each article its example replaces; only ever lower these."""

REASONS = {
    "our package": r"import (deepspeed|deepseek_zero as deepspeed)"
    r"|from deepseek_zero import DeepSeekZeRO3(, comm)?",
    "missing num_epochs": r"num_epochs = \d+|for epoch in range\(num_epochs\):"
    r"|sampler\.set_epoch\(epoch\)|print\(f.epoch.*",
    "missing args": r"import argparse|from pathlib import Path|parser\b.*"
    r"|args = parser\.parse_args\(\)",
    "missing model and optimizer": r"from torch import nn|(model|criterion) = nn\..*"
    r"|(optimizer|lr_scheduler) = torch\..*",
    "missing dataset": r"from (digits|torch\.utils\.data) import .*"
    r"|(digits|sampler|dataloader) = .*|inputs, labels = \(tensor.*in batch\)",
    "JSON words in Python": r"(?!)",  # found by translation, see `_translated`
    "CUDA-only calls": r"torch\.cuda\.set_device\(local_rank\)|cuda = .*|device = .*"
    r"|model = model\.to\(\w+\)|inputs, labels = data\[0\]\.to\(\w+\), data\[1\]\.to\(\w+\)",
    "fp16 needs a GPU to be fast": r'"enabled": (true|cuda),',
    "CIFAR-10's files or digits, no download": r"trainset = "
    r"(torchvision\.datasets|vision)\.CIFAR10\(.*|download=True, transform=transform\)",
    "torchvision does not import everywhere": r"import torchvision(\.transforms as transforms)?"
    r"|import vision( as \w+)?|model = [\w.]+\.resnet101\(pretrained=False\)",
    "shorter in CI": r"import os|.*SEED_(SAMPLES|BATCH|LR).*|trainloader = .*batch_size=128,"
    r'|"warmup_max_lr": 0\.0001,',
    "repeatable": r"torch\.manual_seed\(0\)",
    "state_dict() on all ranks, one writes, a barrier": r"torch\.save\("
    r"model\.state_dict\(\), 'model\.pth'\)|state = model\.state_dict\(\)"
    r"|if comm\.get_rank\(\) == 0: torch\.save\(.*|comm\.barrier\(\)",
    "the loss is seen to fall": r"losses.*|deepspeed\.comm\.all_reduce\(losses.*"
    r"|(first|last|fall)\b.*|assert .*|print\(f'mean loss.*",
    "a comment": r"#.*",
}


def changes(article: str, program: str) -> list[tuple[str, str]]:
    """Return (sign, line) of every changed line, ignoring indentation, blank lines and the
    docstring.
    """
    return [
        (line[0], line[1:])
        for line in difflib.unified_diff(_lines(article), _lines(program), n=0, lineterm="")
        if line[0] in "+-" and not line.startswith(("---", "+++"))
    ]


def _lines(source: str) -> list[str]:
    if docstring := re.match(r'""".*?"""\n', source, re.DOTALL):
        source = source[docstring.end() :]
    return [re.sub(r"\s+#", " #", line.strip()) for line in source.splitlines() if line.strip()]


def _translated(line: str) -> str:
    """Return a line of JSON as Python."""
    return re.sub(r"\s*//", " #", re.sub(r"\btrue\b", "True", line))


def reasons(changed: list[tuple[str, str]]) -> list[str | None]:
    """Return the reason of each changed line, or None if there is none."""
    removed, added = ({line for sign, line in changed if sign == which} for which in "-+")
    json_words = {
        line for line in removed if _translated(line) != line and _translated(line) in added
    }
    json_words |= {_translated(line) for line in json_words}
    return [
        "JSON words in Python" if line in json_words else _matching(line) for _, line in changed
    ]


def _matching(line: str) -> str | None:
    return next(
        (reason for reason, pattern in REASONS.items() if re.fullmatch(pattern, line)), None
    )


def difference(number: str) -> list[tuple[str, str]]:
    """Return the differences between a seed's article and our example."""
    article, program = SEEDS / f"{number}.txt", ROOT / "examples" / f"seed_{number}.py"
    return changes(article.read_text(encoding="utf-8"), program.read_text(encoding="utf-8"))


def report(number: str) -> str:
    """Return the difference as text, with the changed lines grouped by reason."""
    changed = difference(number)
    found = reasons(changed)
    text = [f"seed {number} -> examples/seed_{number}.py"]
    for reason in dict.fromkeys(found):
        text.append(f"  {reason or 'NO REASON'}")
        text += [
            f"    {sign} {line}"
            for (sign, line), its in zip(changed, found, strict=True)
            if its == reason
        ]
    return "\n".join(text)


@pytest.mark.parametrize("number", REMOVED)
def test_each_line_that_differs_from_the_seed_has_a_stated_reason(number: str) -> None:
    changed = difference(number)
    print(f"\n{report(number)}")  # noqa: T201
    assert None not in reasons(changed)
    assert sum(sign == "-" for sign, _ in changed) == REMOVED[number]


def test_each_reason_is_needed() -> None:
    found = {reason for number in REMOVED for reason in reasons(difference(number))}
    assert found == set(REASONS)


@pytest.mark.parametrize(
    ("article", "program"),
    [
        ("loss.backward()", "engine.backward(loss)"),
        ("lr = 1e-4", "lr = 1e-3"),
        ('"stage": 3,', '"stage": 2,'),
    ],
)
def test_a_change_that_is_not_stated_is_found(article: str, program: str) -> None:
    assert reasons(changes(article, program)) == [None, None]


def test_the_configuration_of_seed_001_is_the_articles_to_the_last_character() -> None:
    article = (SEEDS / "001_config.txt").read_text(encoding="utf-8")
    ours = (ROOT / "examples/seed_001_config.json").read_text(encoding="utf-8")
    assert "".join(ours.split()) == "".join(article.split())
    assert json.loads(ours) == json.loads(article)


def test_the_configuration_of_seed_002_keeps_the_articles_values(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("SEED_LR", raising=False)
    article = (SEEDS / "002.txt").read_text(encoding="utf-8")
    text = article[
        article.index("config = {") + len("config = ") : article.index("# 初始化 DeepSpeed 引擎")
    ]
    stated = json.loads(re.sub(r"//.*", "", text))
    tree = ast.parse((ROOT / "examples/seed_002.py").read_text(encoding="utf-8"))
    value = next(
        node.value
        for node in tree.body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "config"
    )
    assert eval(ast.unparse(value), {"os": os, "cuda": True}) == stated
