"""Real clients of DeepSpeed, unmodified, behind its name: the losses are those of the same program without it."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.utils import clip_grad_norm_

import deepseek_zero
from tests.needs import need

HERE = Path(__file__).parent
SOURCE = str(Path(deepseek_zero.__path__[0]).parent)
OURS = [sys.executable, "-m", "deepseek_zero.cli"]
# CI's minutes: it runs one program of accelerate and one of transformers; this variable adds the others.
BY_HAND = pytest.mark.skipif(
    not os.environ.get("DEEPSEEK_ZERO_ALL_CLIENTS"), reason="DEEPSEEK_ZERO_ALL_CLIENTS=1 runs it"
)
ONE, TWO = ["exec", sys.executable], ["run", "--as-deepspeed", "--nproc", "2"]


def need_client(*names: str) -> None:
    for name in names:
        need(importlib.util.find_spec(name) is not None, name)


def start(line: list[str], program: str, *words: object) -> subprocess.Popen[str]:
    """A program in processes of its own, offline, with a core each."""
    environment = {name: value for name, value in os.environ.items() if name != "DEEPSEEK_ZERO_AS_DEEPSPEED"}
    environment |= {"PYTHONPATH": SOURCE, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    command = [*line, str(HERE / program), *map(str, words)]
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def told(process: subprocess.Popen[str]) -> dict[str, Any]:
    """What rank 0 of the program printed."""
    out, errors = process.communicate(timeout=120)
    assert process.returncode == 0, errors[-4000:]
    line = next(line for line in out.splitlines() if line.startswith("TOLD "))
    found: dict[str, Any] = json.loads(line.removeprefix("TOLD "))
    return found


def plain_accelerate_losses() -> tuple[list[float], dict[str, Any]]:
    """The loop of program_accelerate.py in torch alone: two epochs, and the weights after them."""
    from tests.clients import program_accelerate as program

    model, optimizer, data = program.parts()
    losses = []
    for micro_step in range(2 * program.ROWS // program.BATCH):
        first = micro_step * program.BATCH % program.ROWS
        x, y = data[first : first + program.BATCH]
        loss = (model(x) - y).square().mean()
        (loss / program.ACCUMULATION).backward()
        if micro_step % program.ACCUMULATION == program.ACCUMULATION - 1:
            clip_grad_norm_(model.parameters(), program.CLIP)
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.item())
    return losses, model.state_dict()


@pytest.mark.parametrize("stage", [3, pytest.param(2, marks=BY_HAND)])
def test_accelerate_launch_trains_saves_and_goes_on(stage: int, tmp_path: Path) -> None:
    need_client("accelerate")
    launch = ["exec", sys.executable, "-m", "accelerate.commands.launch", "--use_deepspeed", "--zero_stage", str(stage)]
    launch += ["--num_processes", "2", "--num_machines", "1", "--mixed_precision", "no", "--dynamo_backend", "no"]
    seen = told(start([*OURS, *launch, "--main_process_port", "0"], "program_accelerate.py", stage, tmp_path / "state"))
    losses, weights = plain_accelerate_losses()
    assert seen["world"] == 2 and seen["engine"] == "deepseek_zero.facade.deepspeed"
    assert seen["kinds"] == (["AtRest"] if stage == 3 else ["Parameter"])
    assert seen["first"] + seen["second"] == pytest.approx(losses, rel=1e-5)
    assert seen["again"] == seen["second"]
    for name, value in weights.items():
        torch.testing.assert_close(torch.tensor(seen["weights"][name]), value, rtol=1e-4, atol=1e-6)


def with_base(folder: Path) -> Path:
    """A folder with the tiny model that `pretrained` reads."""
    from transformers import LlamaConfig, LlamaForCausalLM

    from tests.clients.program_trainer import TINY

    torch.manual_seed(5)
    LlamaForCausalLM(LlamaConfig(**TINY)).save_pretrained(folder / "base")
    return folder


def assert_same_training(ours: dict[str, Any], plain: dict[str, Any]) -> None:
    for key in ("loss", "eval_loss", "norm"):
        assert ours[key] == pytest.approx(plain[key], rel=1e-4), key
    assert Path(ours["best"]).name == Path(plain["best"]).name


def test_trainer_from_pretrained_at_stage_3_is_the_trainer(tmp_path: Path) -> None:
    need_client("transformers", "accelerate")
    from transformers import LlamaForCausalLM

    plain = start([sys.executable], "program_trainer.py", -1, with_base(tmp_path / "plain"), "pretrained")
    ours = told(start([*OURS, *TWO], "program_trainer.py", 3, with_base(tmp_path / "ours"), "pretrained"))
    assert ours["world"] == 2 and ours["kinds"] == ["AtRest"]
    assert_same_training(ours, told(plain))
    saved = [LlamaForCausalLM.from_pretrained(tmp_path / each / "final").state_dict() for each in ("plain", "ours")]
    for name, value in saved[0].items():
        torch.testing.assert_close(saved[1][name], value, rtol=1e-3, atol=1e-4)


@BY_HAND
@pytest.mark.parametrize("line", [ONE, TWO], ids=["one rank", "two ranks"])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_trainer_at_every_stage_saves_and_goes_on(stage: int, line: list[str], tmp_path: Path) -> None:
    need_client("transformers", "accelerate")
    plain = told(start([sys.executable], "program_trainer.py", -1, tmp_path / "plain"))
    ours = told(start([*OURS, *line], "program_trainer.py", stage, tmp_path / "ours"))
    assert_same_training(ours, plain)
    assert ours["world"] == (2 if line is TWO else 1) and ours["kinds"] == ["AtRest" if stage == 3 else "Parameter"]
    resumed = told(start([*OURS, *line], "program_trainer.py", stage, tmp_path / "ours", "resume"))
    assert resumed["loss"] == ours["loss"] and resumed["eval_loss"] == ours["eval_loss"]


@BY_HAND
def test_peft_lora_at_stage_3(tmp_path: Path) -> None:
    need_client("transformers", "accelerate", "peft")
    plain = start([sys.executable], "program_trainer.py", -1, with_base(tmp_path / "plain"), "pretrained", "peft")
    ours = told(start([*OURS, *ONE], "program_trainer.py", 3, with_base(tmp_path / "ours"), "pretrained", "peft"))
    assert_same_training(ours, told(plain))
    assert ours["kinds"] == ["AtRest"]
    assert (tmp_path / "ours" / "final" / "adapter_model.safetensors").is_file()


SCRIPT = """
import argparse
import deepspeed
import torch

args = deepspeed.add_config_arguments(argparse.ArgumentParser()).parse_args()
deepspeed.init_distributed()
model = torch.nn.Linear(4, 4)
config = {"train_micro_batch_size_per_gpu": 2, "a_key_of_mine": 1, "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
          "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0}}
engine, *_ = deepspeed.initialize(args=args, model=model, config=config)
before = engine(torch.ones(2, 4)).square().mean()
engine.backward(before)
engine.step()
assert engine(torch.ones(2, 4)).square().mean() < before
assert type(engine) is deepspeed.DeepSpeedEngine and deepspeed.comm.get_world_size() == 2
"""


@BY_HAND
@pytest.mark.parametrize(
    "line", [TWO, ["exec", "torchrun", "--nproc-per-node", "2"], ["exec", "deepspeed", "--nproc", "2"]], ids=" ".join
)
def test_a_script_of_deepspeeds_under_every_launcher(line: list[str], tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    process = start([*OURS, *line], str(script))
    _, errors = process.communicate(timeout=120)
    assert process.returncode == 0, errors[-4000:]
    assert "a_key_of_mine: no such key, ignored" in errors


@BY_HAND
@pytest.mark.parametrize(("seed", "says"), [("seed_001", "epoch 5"), ("seed_002", "Finished Training")])
def test_the_articles_programs_import_deepspeed(seed: str, says: str, tmp_path: Path) -> None:
    examples = HERE.parents[1] / "examples"
    for path in examples.glob("*.*"):
        (tmp_path / path.name).write_text(path.read_text(encoding="utf-8"), encoding="utf-8")
    script = tmp_path / f"{seed}.py"
    source = script.read_text(encoding="utf-8")
    assert "import deepseek_zero as deepspeed" in source
    script.write_text(source.replace("import deepseek_zero as deepspeed", "import deepspeed"), encoding="utf-8")
    small = {"SEED_SAMPLES": "256" if seed == "seed_001" else "64"}
    small |= {} if seed == "seed_001" else {"SEED_BATCH": "16", "SEED_LR": "3e-3"}
    with pytest.MonkeyPatch.context() as patch:
        for name, value in small.items():
            patch.setenv(name, value)
        process = start([*OURS, "run", "--as-deepspeed", "--nproc", "2"], str(script))
    out, errors = process.communicate(timeout=300)
    assert process.returncode == 0, errors[-4000:]
    assert says in out
