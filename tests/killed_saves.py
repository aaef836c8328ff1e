"""Kill ranks at random moments while they save, repeatedly, and print the results as JSON.

    python tests/killed_saves.py FOLDER KILLS SEED

In each round two ranks start from the checkpoint that the last round left. The ranks are forked
from a process that has imported everything, so a round takes a fraction of a second.
tests/ranks/test_crash.py runs this program.
"""

from __future__ import annotations

import itertools
import json
import os
import random
import select
import signal
import sys
import time
import traceback
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

from deepseek_zero.comm.transports import base
from tests.crash import names_in
from tests.hosts import free_port
from tests.ranks.test_crash import engine_of, newest, step

RANKS = 2
PATIENCE_SECONDS, END_SECONDS = 60.0, 10.0


def live(rank: int, port: int, folder: Path, told: int) -> None:
    """Run one rank: load the newest checkpoint, then save after every step.

    Saves alternate between synchronous and asynchronous. told: a pipe that gets one byte when the
    rank is ready and one after every call of save_checkpoint.
    """
    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(RANKS),
        "LOCAL_WORLD_SIZE": str(RANKS),
    }
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    base.POLL_SECONDS = 0.1
    engine = engine_of()
    engine.load_checkpoint(folder)
    os.write(told, b"x")
    for number in itertools.count(engine.global_steps):
        step(engine)
        engine.save_checkpoint(folder, tag=f"tag{number % 3}", wait=number % 2 == 0)
        os.write(told, b"x")


def start(rank: int, port: int, folder: Path, told: int) -> int:
    child = os.fork()
    if child:
        return child
    try:
        live(rank, port, folder, told)
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(1)


def end_of(children: list[int]) -> int:
    """Wait for the processes and return how many had to be killed."""
    deadline, left = time.monotonic() + END_SECONDS, list(children)
    while left and time.monotonic() < deadline:
        left = [child for child in left if os.waitpid(child, os.WNOHANG)[0] == 0]
        time.sleep(0.01)
    for child in left:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    return len(left)


def hear(reading: int) -> None:
    if not select.select([reading], [], [], PATIENCE_SECONDS)[0] or not os.read(reading, 1):
        raise SystemExit("a rank did not come so far; see above")


def one_life(folder: Path, chance: random.Random) -> int:
    """Run one round and return how many ranks did not end on their own after a kill."""
    port = free_port()
    reading, writing = os.pipe()
    children = [start(rank, port, folder, writing) for rank in range(RANKS)]
    os.close(writing)
    for _ in range(RANKS):
        hear(reading)
    began = time.monotonic()
    for _ in range(RANKS):  # approximately the first save of every rank
        hear(reading)
    took = time.monotonic() - began
    for _ in range(chance.randrange(3)):
        hear(reading)
    time.sleep(chance.uniform(0.0, took))
    for victim in chance.choice([children[:1], children[1:], children]):
        os.kill(victim, signal.SIGKILL)
    os.close(reading)
    return end_of(children)


def main() -> None:
    folder, kills, chance = Path(sys.argv[1]), int(sys.argv[2]), random.Random(int(sys.argv[3]))
    found: list[str | None] = []
    hung = leftovers = 0
    for _ in range(kills):
        hung += one_life(folder, chance)
        found.append(newest(folder))  # raises if a byte is wrong
        leftovers += any(name.startswith(".") for name in names_in(folder))
    sys.stdout.write(
        json.dumps(
            {"kills": kills, "different": len(set(found)), "hung": hung, "leftovers": leftovers}
        )
    )


if __name__ == "__main__":
    main()
