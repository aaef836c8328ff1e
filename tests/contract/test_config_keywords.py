"""config/keywords.py says what the schema says, and a type checker takes right programs and refuses a wrong key."""

from __future__ import annotations

import inspect
import subprocess
import sys
import typing
from pathlib import Path
from typing import Any

import deepseek_zero as dz
from deepseek_zero.config import Config
from deepseek_zero.config import keywords as written
from deepseek_zero.config.fields import rows
from deepseek_zero.config.keywords import ConfigKeywords, ZeroKeywords
from deepseek_zero.config.not_built import NOT_BUILT
from deepseek_zero.config.typed import render

ROOT = Path(__file__).resolve().parents[2]
SOURCE = ROOT / "src" / "deepseek_zero"

RIGHT = """
import json
from typing import Any
import torch
import deepseek_zero as dz
from deepseek_zero import ConfigKeywords

model = torch.nn.Linear(2, 2)
config: ConfigKeywords = {
    "train_batch_size": "auto",
    "bf16": {"enabled": True},
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
    "zero_optimization": {
        "stage": 3,
        "reduce_bucket_size": 5e8,
        "offload_param": {"device": "nvme", "nvme_path": None},
        "cpu_offload": True,
    },
    "communication_data_type": "bfloat16",
    "units": "Block",
}
config["gradient_clipping"] = 1.0
loaded: dict[str, Any] = json.loads("{}")
dz.initialize(model=model, config=config)
dz.initialize(model=model, config={"zero_optimization": {"stage": 2}, "steps_per_print": None})
dz.initialize(model=model, config=loaded)
dz.initialize(model=model, config="config.json")
dz.initialize(model=model, config_params=json.loads("{}"))
dz.DeepSeekZeRO3(model, stage=2, lr=1e-3, optimizer="adam", gradient_clipping=1.0, zero_optimization={"stage": 2})
dz.DeepSeekZeRO3(model, **loaded)
dz.DeepSeekZeRO3(model)
"""
WRONG = {
    'dz.DeepSeekZeRO3(model, gradient_cliping=1.0)': "gradient_cliping",
    'dz.DeepSeekZeRO3(model, stage=4)': "stage",
    'dz.DeepSeekZeRO3(model, zero_optimization={"stag": 3})': "zero_optimization",
    'dz.DeepSeekZeRO3(model, bf16=True)': "bf16",
    'c1: ConfigKeywords = {"zero_optimisation": {"stage": 3}}': "zero_optimisation",
    'c2: ConfigKeywords = {"zero_optimization": {"stage3_prefetch_bucket": 0}}': "zero_optimization",
    'c3: ConfigKeywords = {"optimizer": {"type": 3}}': "optimizer",
    'c4: ConfigKeywords = {"bf16": {"master": "double"}}': "bf16",
    'dz.initialize(model=model, config=5)': "config",
}  # fmt: skip


def test_the_file_is_what_the_generator_writes() -> None:
    assert (SOURCE / "config" / "keywords.py").read_text(encoding="utf-8") == render(), "run scripts/config_keywords"


def keys_of(kind: Any, prefix: str = "") -> set[str]:
    """Dotted keys of a TypedDict and of those inside it."""
    found = set[str]()
    for name, hint in typing.get_type_hints(kind, vars(written)).items():
        inner = [option for option in typing.get_args(hint) if typing.is_typeddict(option)]
        found |= keys_of(inner[0], f"{prefix}{name}.") if inner else {prefix + name}
    return found


def test_every_key_of_the_schema_can_be_completed_at_both_doors() -> None:
    schema = {row.path for row in rows(Config)} | NOT_BUILT.keys()
    sections = {path for path in schema if any(other.startswith(path + ".") for other in schema)}  # null or an object
    assert schema - sections <= keys_of(ConfigKeywords)
    assert schema - sections <= keys_of(ZeroKeywords)
    assert {"stage", "lr"} <= keys_of(ZeroKeywords)


def test_the_doors_say_so_in_their_signatures() -> None:
    for name in ("config", "config_params"):
        assert "Configuration" in str(inspect.signature(dz.initialize).parameters[name].annotation)
    hints = typing.get_type_hints(dz.DeepSeekZeRO3.__init__)
    assert typing.get_args(hints["zero_config"]) == (ZeroKeywords,)


def test_a_type_checker_takes_right_programs_and_refuses_wrong_keys(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(RIGHT + "\n".join(WRONG) + "\n", encoding="utf-8")
    first = len(RIGHT.splitlines()) + 1
    # Only the doors are looked at: torch and the rest of the house would take a minute and say nothing new.
    files = [SOURCE / "__init__.py", SOURCE / "config" / "keywords.py"]
    files += [
        SOURCE / name
        for name in (
            "deepseek.py",
            "compat/__init__.py",
            "compat/deepspeed/__init__.py",
            "compat/deepspeed/configuration.py",
            "compat/deepspeed/initialize.py",
        )
    ]
    command = [sys.executable, "-m", "mypy", "--strict", "--follow-imports=skip", "--config-file=", "--no-pretty"]
    command += ["--explicit-package-bases", f"--cache-dir={tmp_path / 'cache'}", str(program), *map(str, files)]
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env={"MYPYPATH": str(ROOT / "src"), "PATH": ""},
        check=False,
    )
    errors: dict[int, str] = {}
    for line in done.stdout.splitlines():
        if line.startswith("program.py:"):
            number = int(line.split(":")[1])
            errors[number] = errors.get(number, "") + line
    assert set(errors) == set(range(first, first + len(WRONG))), done.stdout + done.stderr
    for number, (code, word) in enumerate(WRONG.items(), first):
        assert word in errors[number], code
