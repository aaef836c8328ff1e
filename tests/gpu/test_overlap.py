"""On separate GPUs, ranks gather and reduce while they compute, measured by CUDA events.

Three events describe each transfer: issued (the compute stream has reached it), arrived (its data
is complete) and asked (the compute stream starts to wait for it). The compute stream computes
between issued and asked, so a transfer that arrives before asked is hidden. The test needs two
GPUs; the arithmetic is tested without one.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import deepseek_zero as dz

needs_two_gpus = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
# A block computes longer than the transfer of its 100 MB takes.
WIDTH, DEPTH, TOKENS = 2048, 6, 16384
WARM = 3  # The first steps record the order, allocate buffers and connect NCCL.


class Transfer(NamedTuple):
    """Milliseconds on the device, relative to a common time."""

    issued: float
    asked: float
    arrived: float

    @property
    def hidden(self) -> float:
        """Return the part of the transfer time during which the compute stream was busy."""
        return max(0.0, min(self.asked, self.arrived) - self.issued)


def hidden_share(transfers: Iterable[Transfer]) -> float:
    """Return the hidden share of the total transfer time."""
    seen = list(transfers)
    return sum(each.hidden for each in seen) / sum(each.arrived - each.issued for each in seen)


def test_a_transfer_overlaps_until_its_result_is_needed() -> None:
    assert hidden_share([Transfer(0.0, 5.0, 2.0)]) == 1.0  # arrives before it is needed
    assert hidden_share([Transfer(0.0, 0.0, 2.0)]) == 0.0  # waited for immediately
    assert hidden_share([Transfer(0.0, 1.0, 2.0), Transfer(3.0, 9.0, 5.0)]) == 0.75


@needs_two_gpus
def test_gathers_and_reductions_overlap_with_computation(tmp_path: Path) -> None:
    beside, after = (run(tmp_path / str(overlap), overlap) for overlap in (True, False))
    assert set(beside) == {"all_gather_into_tensor", "all_to_all"}
    for kind, share in beside.items():
        assert share > 0.7, f"{kind}: {share:.0%} of its time hidden behind computing"
        assert after[kind] < 0.3, (
            f"{kind}: without overlap_comm nothing is computed meanwhile, yet {after[kind]:.0%}"
        )


def run(folder: Path, overlap: bool) -> dict[str, float]:
    """Return the hidden share of each kind of collective in one step of two ranks."""
    folder.mkdir()
    environment = {**os.environ, "OVERLAP": str(int(overlap)), "OUT": str(folder)}
    command = [
        sys.executable,
        "-m",
        "deepseek_zero.cli",
        "run",
        "--nproc",
        "2",
        str(Path(__file__)),
    ]
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    shares: dict[str, float] = json.loads((folder / "shares.json").read_text())
    return shares


# -- code of each rank


class Watch:
    """Record events around NCCL collectives."""

    def __init__(self) -> None:
        self.seen: dict[
            str, list[tuple[torch.cuda.Event, list[torch.cuda.Event], torch.cuda.Event]]
        ] = {}
        self.stream = torch.cuda.Stream()  # waits for transfers in place of the compute stream
        for name in ("all_gather_into_tensor", "all_to_all"):
            setattr(dist, name, self._watched(name, getattr(dist, name)))

    def _watched(self, name: str, collective: Callable[..., Any]) -> Callable[..., Any]:
        def watched(*args: Any, **kwargs: Any) -> Any:
            issued, arrived = _event(), _event()
            issued.record()
            work = collective(*args, **kwargs)
            with torch.cuda.stream(self.stream):
                work.wait()
                arrived.record()
            asked: list[torch.cuda.Event] = []
            self.seen.setdefault(name, []).append((issued, asked, arrived))
            return Watched(work, asked)

        return watched

    def shares(self) -> dict[str, float]:
        """Return the hidden shares of the collectives since `seen` was last cleared."""
        torch.cuda.synchronize()
        found = {}
        for name, events in self.seen.items():
            first = events[0][0]
            times = [
                [first.elapsed_time(event) for event in (issued, asked[0], arrived)]
                for issued, asked, arrived in events
            ]
            found[name] = hidden_share(Transfer(*each) for each in times)
        return found


class Watched:
    """A collective in progress that records when the compute stream first waits for it."""

    def __init__(self, work: Any, asked: list[torch.cuda.Event]) -> None:
        self.work, self.asked = work, asked

    def wait(self) -> None:
        if not self.asked:
            event = _event()
            event.record()
            self.asked.append(event)
        self.work.wait()


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 6 * WIDTH), nn.Linear(6 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


class Tower(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(DEPTH))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x.float().square().mean()


def main() -> None:
    unit = 12 * WIDTH**2
    zero = {
        "stage": 3,
        "overlap_comm": os.environ["OVERLAP"] == "1",
        "stage3_param_persistence_threshold": 0,
        "stage3_max_live_parameters": 4 * unit,
        "stage3_prefetch_bucket_size": unit,
        "stage3_max_reuse_distance": 0,
        "reduce_bucket_size": 4 * unit,
    }
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "steps_per_print": None,
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
        "zero_optimization": zero,
    }
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    torch.manual_seed(0)
    engine, *_ = dz.initialize(model=Tower().cuda(), config=config)
    x = torch.randn(TOKENS, WIDTH, device="cuda", dtype=torch.bfloat16)
    watch = Watch()
    for _ in range(WARM + 1):
        watch.seen.clear()
        engine.backward(engine(x))
        engine.step()
    if dist.get_rank() == 0:
        (Path(os.environ["OUT"]) / "shares.json").write_text(json.dumps(watch.shares()))


if __name__ == "__main__":
    main()
