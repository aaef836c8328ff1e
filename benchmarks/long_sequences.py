"""The longest sequence that a small Llama trains on in 3 GiB, one switch of the configuration after another.

    python -m benchmarks.long_sequences                            # half an hour; root, a memory control group
    python -m benchmarks.long_sequences --limit-gib 1 --longest 4096 --out /tmp/long.md
    python -m benchmarks.long_sequences --window '{"mode": "localslidingwindow", "num_sliding_window_blocks": 33}'

Each trial is a process of its own in a memory control group: the model at stage 3, a step on a short sequence (so that
the optimizer has its moments) and one on the sequence in question.  A sequence is too long where the kernel ends the
process.  Two short trials say what a token costs, and so how long a sequence should be; from there lengths change by an
eighth.  `--at 8192` tells instead what each way holds at that length, without a
limit.  `--window` adds a last row: the section `sparse_attention`.  Leaves a table, a picture
and a journal of its trials; run again, it goes on where it stopped.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any

import torch

import deepseek_zero
from benchmarks.huge import GIB, Memory
from benchmarks.plot import Panel, draw_panels
from benchmarks.probes import machine
from benchmarks.tiers import described

RESULTS = Path(__file__).parent / "results" / "long_sequences.md"
ROOT = Path(__file__).resolve().parent.parent
MODEL = {"vocab_size": 32768, "hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 4}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 1 << 20}
TILE = 512  # tokens
SHORT = 64
FIRST = 2048
GRAIN = 128
FINEST = 8  # of a length: the gap that is not halved any more


def ways(folder: str, window: dict[str, Any] | None) -> dict[str, dict[str, Any]]:
    """Return by name what each way says in its configuration; each has what the one before it has."""
    found: dict[str, dict[str, Any]] = {"plain": {}}
    section: dict[str, Any] = {"policy": "attention"}
    found["ours: + selective recomputation"] = {"activation_checkpointing": dict(section)}
    section |= {"tiled_loss": TILE, "tiled_mlp": TILE}
    found["ours: + tiled loss and MLP"] = {"activation_checkpointing": dict(section)}
    section |= {"device": "nvme", "nvme_path": folder}
    found["ours: + parking on a disk"] = {"activation_checkpointing": dict(section)}
    if window is not None:
        found["ours: + sparse window"] = {"activation_checkpointing": dict(section), "sparse_attention": window}
    return found


def train(length: int, section: dict[str, Any]) -> None:
    """Train one step on a sequence of so many tokens, after one on a short one; prints what it held and took."""
    from transformers import LlamaConfig, LlamaForCausalLM  # noqa: PLC0415  in the child alone

    torch.set_num_threads(1)
    torch.manual_seed(0)
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "steps_per_print": None,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
        "zero_optimization": {"stage": 3},
        **section,
    }
    model = LlamaForCausalLM(LlamaConfig(**MODEL, **HEADS, use_cache=False))
    engine, *_ = deepseek_zero.initialize(model=model, config=config)
    for tokens in (SHORT, length):
        ids = torch.randint(MODEL["vocab_size"], (1, tokens))
        began = time.process_time()
        loss = engine(input_ids=ids, labels=ids).loss
        engine.backward(loss)
        engine.step()
        found = {"loss": float(loss.detach()), "seconds": time.process_time() - began}
        found["resident"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10
        print(json.dumps(found), flush=True)


@dataclass(frozen=True)
class Trial:
    """A sequence that trained.  resident: the most bytes its process held; seconds: of processor time in its step."""

    tokens: int = 0
    resident: int = 0
    seconds: float = 0.0


class Trials:
    """The trials of one way, and those of a run before: a journal says of each what it took; null: too long."""

    def __init__(self, way: str, section: dict[str, Any], limit: int, journal: Path | None) -> None:
        self.way, self.section, self.limit, self.journal = way, section, limit, journal

    def of(self, tokens: int) -> Trial | None:
        """Return what a sequence took; None where it is too long."""
        known = json.loads(self.journal.read_text()) if self.journal is not None and self.journal.exists() else {}
        key = f"{self.way}, {tokens} tokens"
        if key not in known:
            known[key] = self._run(tokens)
            if self.journal is not None:
                self.journal.write_text(json.dumps(known, indent=2) + "\n", encoding="utf-8")
        print(f"  {tokens}: {known[key] or 'too long'}", flush=True)
        return None if known[key] is None else Trial(tokens, **known[key])

    def _run(self, tokens: int) -> dict[str, float] | None:
        memory = Memory(self.limit)
        command = [sys.executable, "-m", "benchmarks.long_sequences", "--trial", str(tokens), json.dumps(self.section)]
        child = subprocess.run(
            command,
            preexec_fn=memory.enter,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=False,
        )
        memory.end()
        if child.returncode not in (0, -9):
            raise SystemExit(f"a trial of {tokens} tokens ended with {child.returncode}:\n{child.stderr[-4000:]}")
        told = [json.loads(line) for line in child.stdout.splitlines() if line.startswith("{")]
        return {name: told[-1][name] for name in ("resident", "seconds")} if child.returncode == 0 else None


def longest(trials: Trials, start: int, most: int) -> Trial:
    """Return the longest sequence that trains, to an eighth, or `most`.  start: tokens of the first trial."""
    first = trials.of(min(start, most))
    if first is None:
        return longest(trials, start // 2, most)
    if first.tokens == most:
        return first
    best, high = first, most + 1
    length = min(rounded(start * 3 / 2), most)
    second = trials.of(length)
    if second is None:
        high = length
    elif length < most:
        best, slope = second, (second.resident - first.resident) / (second.tokens - first.tokens)
        length = min(rounded(length + (trials.limit - second.resident) / max(slope, 1.0)), most)
    while best.tokens < most and high - best.tokens > max(best.tokens // FINEST, GRAIN):
        if length >= high or length <= best.tokens:
            length = rounded((best.tokens + high) / 2)
        found = trials.of(length)
        best, high = (best, length) if found is None else (found, high)
        length = min(rounded(length * (1 + 1 / FINEST)), most)
    return best


def rounded(tokens: float) -> int:
    return int(tokens) // GRAIN * GRAIN


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--limit-gib", type=float, default=3.0, help="of the control group")
    parser.add_argument("--longest", type=int, default=20480, help="no longer sequence is tried")
    parser.add_argument("--at", type=int, help="tokens of the only sequence that is tried, without a limit")
    parser.add_argument("--window", type=json.loads, help="the section sparse_attention of a last row, as JSON")
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--trial", nargs=2, metavar=("TOKENS", "SECTION"), help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.trial is not None:
        train(int(asked.trial[0]), json.loads(asked.trial[1]))
        return
    if asked.at is not None:
        with tempfile.TemporaryDirectory() as folder:
            for name, section in ways(folder, asked.window).items():
                print(name, flush=True)
                Trials(name, section, 0, None).of(asked.at)
        return
    limit, start = int(asked.limit_gib * GIB), FIRST
    rows: list[tuple[str, Trial]] = []
    with tempfile.TemporaryDirectory() as folder:
        for name, section in ways(folder, asked.window).items():
            print(name, flush=True)
            trials = Trials(name, section, limit, asked.out.with_suffix(".json"))
            rows.append((name, longest(trials, start, asked.longest)))
            start = max(rows[-1][1].tokens, GRAIN)
    first = rows[0][1].tokens
    lines = [
        "# The longest sequence in a fixed memory",
        "",
        f"`python -m benchmarks.long_sequences`, {date.today()}, {described(machine())}, one thread.",
        f"A Llama of {MODEL}, fp32, one sequence, AdamW, stage 3 on one rank, in a control group of "
        f"{asked.limit_gib:g} GiB. Dense attention but where a row says otherwise; no sequence above {asked.longest} "
        "was tried.",
        "",
        "| each with what is above it | tokens | over plain | most resident MiB | processor seconds of the step |",
        "|---|---|---|---|---|",
        *(
            f"| {name} | {each.tokens} | {each.tokens / first:.1f} | {each.resident >> 20} | {each.seconds:.0f} |"
            for name, each in rows
        ),
    ]
    asked.out.write_text("\n".join(lines) + "\n", encoding="utf-8")
    print("\n".join(lines))
    panel = Panel("longest sequence over plain's", [(name, each.tokens / first) for name, each in rows], 4.0)
    draw_panels(f"A small Llama in {asked.limit_gib:g} GiB", [panel], asked.out.with_suffix(".png"))


if __name__ == "__main__":
    main()
