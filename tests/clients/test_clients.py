"""Unmodified clients of DeepSpeed have the same losses with the drop-in as without it."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.utils import clip_grad_norm_

from tests.clients.running import BY_HAND, HERE, OURS, need_client, start, told


def plain_accelerate_losses() -> tuple[list[float], dict[str, Any]]:
    """Run the loop of program_accelerate.py with only torch: two epochs and the final weights."""
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


BY_HAND_TOO = [
    pytest.param(stage, ranks, marks=BY_HAND) for stage, ranks in ((2, 2), (3, 1), (2, 1))
]


@pytest.mark.parametrize(("stage", "ranks"), [(3, 2), *BY_HAND_TOO])
def test_accelerate_launch_trains_saves_and_resumes(stage: int, ranks: int, tmp_path: Path) -> None:
    need_client("accelerate")
    launch = [
        "exec",
        sys.executable,
        "-m",
        "accelerate.commands.launch",
        "--use_deepspeed",
        "--zero_stage",
        str(stage),
    ]
    launch += ["--num_processes", str(ranks), "--num_machines", "1"]
    launch += ["--mixed_precision", "no", "--dynamo_backend", "no"]
    seen = told(
        start(
            [*OURS, *launch, "--main_process_port", "0"],
            "program_accelerate.py",
            stage,
            tmp_path / "state",
        )
    )
    losses, weights = plain_accelerate_losses()
    assert seen["world"] == ranks and seen["engine"] == "deepseek_zero.compat.deepspeed.engine"
    assert seen["kinds"] == (["ShardedParameter"] if stage == 3 else ["Parameter"])
    assert seen["first"] + seen["second"] == pytest.approx(losses, rel=1e-5)
    assert seen["again"] == seen["second"]
    for name, value in weights.items():
        torch.testing.assert_close(torch.tensor(seen["weights"][name]), value, rtol=1e-4, atol=1e-6)


@BY_HAND
@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.parametrize("axis", ["tp", "sp"])
def test_accelerate_over_an_axis_has_the_losses_of_one_process(axis: str, stage: int) -> None:
    need_client("accelerate", "transformers")
    plain = start([sys.executable], "program_accelerate_axes.py", "none", 0)
    line = [*OURS, "run", "--as-deepspeed", "--nproc", "2"]
    ours = told(start(line, "program_accelerate_axes.py", axis, stage))
    assert ours["losses"] == pytest.approx(told(plain)["losses"], rel=1e-5)
    assert ours["world"] == 2


@BY_HAND
def test_accelerate_with_one_counted_process_raises_an_error_with_advice_on_every_rank() -> None:
    need_client("accelerate")
    launch = [
        "exec",
        sys.executable,
        "-m",
        "accelerate.commands.launch",
        "--use_deepspeed",
        "--zero_stage",
        "3",
    ]
    launch += [
        "--num_processes",
        "2",
        "--num_machines",
        "1",
        "--mixed_precision",
        "no",
        "--dynamo_backend",
        "no",
    ]
    process = start([*OURS, *launch, "--main_process_port", "0"], "program_accelerate_alone.py")
    _, errors = process.communicate(timeout=200)
    assert process.returncode != 0
    assert "accelerate counted 1 process, and this world has 2" in errors
    assert 'InitProcessGroupKwargs(backend="gloo")' in errors
    assert "train_batch_size is not equal" not in errors


@BY_HAND
def test_an_unmodified_accelerate_program_counts_cpu_ranks_if_a_variable_is_set(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    need_client("accelerate")
    monkeypatch.setenv("DEEPSEEK_ZERO_CPU_RANKS", "1")
    launch = ["exec", "torchrun", "--standalone", "--nproc-per-node", "2"]
    process = start([*OURS, *launch], "program_accelerate_alone.py")
    out, errors = process.communicate(timeout=200)
    assert process.returncode == 0, errors[-4000:]
    assert sorted(line for line in out.split() if line.startswith("rank")) == [
        "rank=0/2",
        "rank=1/2",
    ]


SCRIPT = """
import argparse
import deepspeed
import torch

args = deepspeed.add_config_arguments(argparse.ArgumentParser()).parse_args()
deepspeed.init_distributed()
model = torch.nn.Linear(4, 4)
config = {"train_micro_batch_size_per_gpu": 2, "a_key_of_mine": 1,
          "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
          "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0}}
engine, *_ = deepspeed.initialize(args=args, model=model, config=config)
before = engine(torch.ones(2, 4)).square().mean()
engine.backward(before)
engine.step()
assert engine(torch.ones(2, 4)).square().mean() < before
assert type(engine) is deepspeed.DeepSpeedEngine and deepspeed.comm.get_world_size() == 2
"""


TWO_GPUS = ["run", "--as-deepspeed", "--num_gpus", "2"]
OTHER_LAUNCHERS = (
    ["exec", "torchrun", "--nproc-per-node", "2"],
    ["exec", "deepspeed", "--num_gpus", "2"],
)


@pytest.mark.parametrize(
    "line",
    [TWO_GPUS, *(pytest.param(line, marks=BY_HAND) for line in OTHER_LAUNCHERS)],
    ids=" ".join,
)
def test_a_script_of_deepspeeds_under_every_launcher(line: list[str], tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    process = start([*OURS, *line], str(script))
    _, errors = process.communicate(timeout=120)
    assert process.returncode == 0, errors[-4000:]
    assert (
        "a_key_of_mine: no such key, ignored" in errors
    )  # the drop-in only warns about unknown keys
    assert (
        torch.cuda.is_available() or "torchrun" in line or "running 2 CPU ranks instead" in errors
    )


@BY_HAND
@pytest.mark.parametrize(
    ("seed", "says"), [("seed_001", "epoch 5"), ("seed_002", "Finished Training")]
)
def test_the_articles_programs_import_deepspeed(seed: str, says: str, tmp_path: Path) -> None:
    examples = HERE.parents[1] / "examples"
    for path in examples.glob("*.*"):
        (tmp_path / path.name).write_text(path.read_text(encoding="utf-8"), encoding="utf-8")
    script = tmp_path / f"{seed}.py"
    source = script.read_text(encoding="utf-8")
    assert "import deepseek_zero as deepspeed" in source
    script.write_text(
        source.replace("import deepseek_zero as deepspeed", "import deepspeed"), encoding="utf-8"
    )
    small = {"SEED_SAMPLES": "256" if seed == "seed_001" else "64"}
    small |= {} if seed == "seed_001" else {"SEED_BATCH": "16", "SEED_LR": "3e-3"}
    with pytest.MonkeyPatch.context() as patch:
        for name, value in small.items():
            patch.setenv(name, value)
        process = start([*OURS, "run", "--as-deepspeed", "--num_gpus", "2"], str(script))
    out, errors = process.communicate(timeout=300)
    assert process.returncode == 0, errors[-4000:]
    assert says in out
    assert torch.cuda.is_available() or "running 2 CPU ranks instead" in errors
