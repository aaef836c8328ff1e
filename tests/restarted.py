"""Train a small GPT under torchrun, kill it at chosen moments, and resume from the last checkpoint
after each restart.

    torchrun --standalone --nproc-per-node=2 --max-restarts=N tests/restarted.py FOLDER STEPS WAY
    ENDS

WAY: the call that joins the process group first: "engine", "torch" or "deepspeed". ENDS: a JSON
list with one entry [rank, moment, seconds] for each start that is to fail. A signal that runs no
code of the process ends that rank `seconds` after the moment. Moments are "start" (before torch is
imported), "joining" (the process group), "built" (the engine) and "step N".

Rank 0 appends "STEP LOSS" for each step to FOLDER/restarted. After the last start it trains once
more from the beginning without an interruption and appends those losses to FOLDER/undisturbed.
FOLDER/reached has the first step of each of these runs.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path

FOLDER, STEPS, WAY, ENDS = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3], json.loads(sys.argv[4])
RANK, ATTEMPT = int(os.environ["RANK"]), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
END = dict(enumerate(ENDS)).get(ATTEMPT)
SAVE_EVERY = 3


def at(moment: str) -> None:
    """Start the timer if this rank is to end after this moment."""
    if END is not None and END[:2] == [RANK, moment]:
        # The default action of its signal ends the process.
        signal.setitimer(signal.ITIMER_REAL, END[2])


def note(name: str, line: str) -> None:
    if RANK == 0:
        with open(FOLDER / name, "a") as file:
            file.write(line + "\n")


def train(losses: str, saved: Path | None) -> None:
    """Train to the last step, from the last checkpoint if there is one; write each loss."""
    import deepseek_zero
    from tests.models import batch_of, seeded

    config = {
        "train_micro_batch_size_per_gpu": 2,
        "steps_per_print": None,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
        "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
    }
    engine = deepseek_zero.initialize(model=seeded(width=60, heads=4, hidden=128), config=config)[0]
    if saved is not None and saved.exists():
        engine.load_checkpoint(saved)
    note("reached", f"{losses} {engine.global_steps}")
    at("built")
    for step in range(engine.global_steps, STEPS):
        at(f"step {step}")
        batch = batch_of(step, 0, RANK)
        loss = engine(batch.tokens, batch.targets)
        engine.backward(loss)
        engine.step()
        note(losses, f"{step} {loss.item().hex()}")
        if saved is not None and step % SAVE_EVERY == 0:
            engine.save_checkpoint(saved)


def main() -> None:
    at("start")
    import torch.distributed as dist

    import deepseek_zero

    at("joining")
    if WAY == "torch":
        dist.init_process_group("gloo")
    elif WAY == "deepspeed":
        deepseek_zero.init_distributed()
    train("restarted", FOLDER / "saved")
    while END is not None:  # training finished before the timer ended the process
        signal.pause()
    train("undisturbed", None)


main()
