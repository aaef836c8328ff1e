"""A job that loses a rank and is preempted, and resumes both times with bitwise equal losses.

    deepseek-zero run --nproc 2 --max-restarts 1 examples/preempted.py --die-at 4 --preempt-at 8
    deepseek-zero run --nproc 2 --max-restarts 1 examples/preempted.py --die-at 4 --preempt-at 8

In the first run the last rank is killed in step 4. The launcher restarts all ranks, and they resume
after step 3. In step 8 rank 0 gets SIGTERM, as a scheduler sends it: all ranks save at the end of
that step and exit, and the launcher ends with exit code 85. The same command again, as after
requeueing by a scheduler, resumes from there and finishes. Then all steps run once more without an
interruption, and the program ends with an error unless every loss is the same.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

import deepseek_zero as dz

CONFIG: dict[str, Any] = {
    "train_micro_batch_size_per_gpu": 8,
    "gradient_clipping": 1.0,
    "steps_per_print": None,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
    "scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": 1e-3, "warmup_num_steps": 5}},
    "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
}


@dataclass(frozen=True)
class Plan:
    """The events of the job. out: the folder of a save in every third step; None: no saves."""

    steps: int
    die_at: int | None = None
    preempt_at: int | None = None
    out: Path | None = None


def start(**checkpoint: Any) -> dz.DeepSpeedEngine:
    torch.manual_seed(0)
    model = nn.Sequential(
        *(nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(4)), nn.Linear(64, 1)
    )
    return dz.initialize(model=model, config={**CONFIG, "checkpoint": checkpoint})[0]


def train(engine: dz.DeepSpeedEngine, losses: list[float], plan: Plan) -> None:
    """Train from the engine's current step. The data depend only on the step and the rank."""
    while (step := engine.global_steps) < plan.steps:
        meet_misfortune(engine, plan)
        dice = torch.Generator().manual_seed(1000 * step + engine.global_rank)
        x = torch.randn(8, 64, generator=dice)
        loss = (engine(x) - x.sin().sum(1, keepdim=True)).square().mean()
        engine.backward(loss)
        losses.append(loss.item())  # before the step, in which a signal may end the program
        engine.step()
        if plan.out is not None and engine.global_steps % 3 == 0:
            engine.save_checkpoint(plan.out, client_state={"losses": losses})


def meet_misfortune(engine: dz.DeepSpeedEngine, plan: Plan) -> None:
    """Kill or preempt this rank if the plan says so."""
    first_start = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0"
    if (
        engine.global_steps == plan.die_at
        and first_start
        and engine.global_rank == engine.world_size - 1
    ):
        os.kill(os.getpid(), signal.SIGKILL)
    if engine.global_steps == plan.preempt_at and engine.global_rank == 0:
        os.kill(os.getpid(), signal.SIGTERM)


def parse() -> Plan:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument(
        "--die-at", type=int, help="the step in which the last rank is killed, once"
    )
    parser.add_argument("--preempt-at", type=int, help="the step in which rank 0 gets SIGTERM")
    parser.add_argument(
        "--out", type=Path, default=Path("runs/preempted"), help="directory of the checkpoints"
    )
    options = parser.parse_args()
    if options.steps < 1:
        parser.error("--steps must be at least 1")
    return Plan(**vars(options))


def main() -> None:
    plan = parse()
    engine = start(keep_last=2, save_on_signal={"path": str(plan.out)})
    losses: list[float] = []
    engine.client_state = lambda: {"losses": losses}  # included in the save on a signal
    _, state = engine.load_checkpoint(str(plan.out), tag="newest")  # None at the first start
    losses += state["losses"] if state else []
    say(engine, f"begins behind step {engine.global_steps}")
    train(engine, losses, plan)
    engine.destroy()

    undisturbed: list[float] = []
    train(start(), undisturbed, Plan(plan.steps))
    if engine.global_rank == 0 and losses != undisturbed:
        sys.exit(f"FAILED: the losses are\n{losses}\nand would have been\n{undisturbed}")
    say(
        engine,
        f"the losses of {len(losses)} steps are those of a run without interruption, bit for bit",
    )


def say(engine: dz.DeepSpeedEngine, text: str) -> None:
    if engine.global_rank == 0:
        print(text, flush=True)


if __name__ == "__main__":
    main()
