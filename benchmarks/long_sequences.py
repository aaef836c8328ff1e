"""Find the longest sequence that a small Llama trains on in 3 GiB, enabling one option after
another.

    python -m benchmarks.long_sequences                 # half an hour; root, a memory control group
    python -m benchmarks.long_sequences --limit-gib 1 --longest 4096 --out /tmp/long.md
    python -m benchmarks.long_sequences --window null   # without the last row

Each trial is a separate process in a memory control group. It builds the model at stage 3 and
trains one step on a short sequence (to create the moments) and one on the tested length. A sequence
is too long if the kernel kills the process. Each configuration first trains at the longest length
of `plain`, to compare all at one length, and then at a longer one. These two give the memory per
token and so an estimate of the longest length. From there lengths change by an eighth. The time of
dense attention grows with the square of the length, so its rows end at `--longest`; the table also
has the estimate. The last row uses the section `sparse_attention` given by `--window`. `--at 8192`
instead prints the memory of each configuration at that length, without a limit. Writes a table, a
picture and a journal of the trials, from which another run continues.
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
WINDOW = {
    "mode": "localslidingwindow",
    "block": 128,
    "num_sliding_window_blocks": 9,
    "attention": "unidirectional",
}
TILE = 512  # tokens
SHORT = 64
FIRST = 2048
GRAIN = 128
FINEST = 8  # the search ends if lengths differ by less than 1/8


def ways(folder: str, window: dict[str, Any] | None) -> dict[str, dict[str, Any]]:
    """Return the configuration sections by name; each one extends the previous one."""
    found: dict[str, dict[str, Any]] = {"plain": {}}
    section: dict[str, Any] = {"policy": "attention"}
    found["ours: + selective recomputation"] = {"activation_checkpointing": dict(section)}
    section |= {"tiled_loss": TILE, "tiled_mlp": TILE}
    found["ours: + tiled loss and MLP"] = {"activation_checkpointing": dict(section)}
    section |= {"device": "nvme", "nvme_path": folder}
    found["ours: + parking on a disk"] = {"activation_checkpointing": dict(section)}
    if window is not None:
        found["ours: + sparse window"] = {
            "activation_checkpointing": dict(section),
            "sparse_attention": window,
        }
    return found


def train(length: int, section: dict[str, Any]) -> None:
    """Train one step on `length` tokens after a short one; print memory and time."""
    from transformers import LlamaConfig, LlamaForCausalLM  # noqa: PLC0415  only in the child

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
    """A sequence that trained.

    Attributes:
        resident: Peak bytes of the process.
        seconds: CPU time of its step.
    """

    tokens: int = 0
    resident: int = 0
    seconds: float = 0.0


class Trials:
    """The trials of one configuration, including those in the journal (null: too long)."""

    def __init__(self, way: str, section: dict[str, Any], limit: int, journal: Path | None) -> None:
        self.way, self.section, self.limit, self.journal = way, section, limit, journal
        self.known: dict[str, Any] = (
            json.loads(journal.read_text()) if journal is not None and journal.exists() else {}
        )
        self.trained: dict[int, Trial] = {}

    def of(self, tokens: int) -> Trial | None:
        """Return the trial of a sequence, or None if it is too long."""
        key = f"{self.way}, {tokens} tokens in {self.limit / GIB:g} GiB"
        if key not in self.known:
            self.known[key] = self._run(tokens)
            if self.journal is not None:
                self.journal.write_text(json.dumps(self.known, indent=2) + "\n", encoding="utf-8")
        print(f"  {tokens}: {self.known[key] or 'too long'}", flush=True)
        if self.known[key] is None:
            return None
        return self.trained.setdefault(tokens, Trial(tokens, **self.known[key]))

    def room(self) -> int:
        """Estimate the tokens that fill the limit from the two longest sequences that trained.

        With a single one, returns its length.
        """
        lengths = sorted(self.trained)
        if len(lengths) == 1:
            return lengths[0]
        shorter, longer = (self.trained[each] for each in lengths[-2:])
        slope = (longer.resident - shorter.resident) / (longer.tokens - shorter.tokens)
        return rounded(longer.tokens + (self.limit - longer.resident) / max(slope, 1.0))

    def _run(self, tokens: int) -> dict[str, float] | None:
        memory = Memory(self.limit)
        command = [
            sys.executable,
            "-m",
            "benchmarks.long_sequences",
            "--trial",
            str(tokens),
            json.dumps(self.section),
        ]
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
            raise SystemExit(
                f"a trial of {tokens} tokens ended with {child.returncode}:\n{child.stderr[-4000:]}"
            )
        told = [json.loads(line) for line in child.stdout.splitlines() if line.startswith("{")]
        return (
            {name: told[-1][name] for name in ("resident", "seconds")}
            if child.returncode == 0
            else None
        )


def longest(trials: Trials, start: int, then: int, most: int) -> Trial:
    """Return the longest sequence that trains, to an eighth, or `most`.

    start, then: lengths of the first two trials.
    """
    first = trials.of(min(start, most))
    if first is None:
        return longest(trials, rounded(start / 2), start, most)
    best, high = first, most + 1
    length = min(max(then, rounded(start * 3 / 2)), most)
    while best.tokens < most and high - best.tokens > best.tokens // FINEST + GRAIN:
        found = trials.of(length)
        if found is None:
            high = length
        else:
            best = found
        if high > most:  # no length has been too long yet
            length = min(max(trials.room(), best.tokens + best.tokens // FINEST + GRAIN), most)
        # The estimate from memory is accurate: go down by at most an eighth, else bisect.
        else:
            length = rounded(max((best.tokens + high) / 2, high * FINEST / (FINEST + 1)))
    return best


def rounded(tokens: float) -> int:
    return int(tokens) // GRAIN * GRAIN


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--limit-gib", type=float, default=3.0, help="of the control group")
    parser.add_argument(
        "--longest",
        type=int,
        default=20480,
        help="no longer sequence is tried with dense attention",
    )
    parser.add_argument("--longest-window", type=int, default=98304, help="nor with the window")
    parser.add_argument(
        "--at", type=int, help="tokens of the only sequence that is tried, without a limit"
    )
    parser.add_argument(
        "--window",
        type=json.loads,
        default=WINDOW,
        help="the section sparse_attention of the last row, as JSON",
    )
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
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as folder:
        for name, section in ways(folder, asked.window).items():
            print(name, flush=True)
            most = asked.longest_window if "sparse_attention" in section else asked.longest
            trials = Trials(
                name, section, int(asked.limit_gib * GIB), asked.out.with_suffix(".json")
            )
            start, then = (rows[0].best.tokens, rows[-1].best.tokens) if rows else (FIRST, 0)
            best = longest(trials, start, then, most)
            rows.append(
                Row(
                    name,
                    best,
                    trials.trained[min(trials.trained)] if rows else best,
                    trials.room(),
                    most,
                )
            )
    first = rows[0].best
    lines = [
        "# The longest sequence in a fixed memory",
        "",
        f"`python -m benchmarks.long_sequences`, {date.today()}, {described(machine())}, one "
        f"thread, load {os.getloadavg()[0]:.0f} at the end.",
        f"A Llama of {MODEL}, fp32, one sequence, AdamW, stage 3 on one rank, in a control group "
        f"of {asked.limit_gib:g} GiB. Attention is dense, except in the row of a window: "
        f"{json.dumps(asked.window)}.",
        f"Sequences above {asked.longest} tokens were not tried with dense attention, because its "
        f"time grows with the square of the length, nor above {asked.longest_window} with the "
        'window. "By memory" is the length at which the memory per token would fill the group.',
        "",
        f"| each row adds a key | MiB at {first.tokens} tokens | tokens | over plain | by "
        "memory | MiB at most | processor seconds of the step |",
        "|---|---|---|---|---|---|---|",
        *(
            f"| {each.name} | {each.short.resident >> 20} | {each.tokens} | "
            f"{each.best.tokens / first.tokens:.1f} | {each.room} | {each.best.resident >> 20} | "
            f"{each.best.seconds:.0f} |"
            for each in rows
        ),
    ]
    asked.out.write_text("\n".join(lines) + "\n", encoding="utf-8")
    print("\n".join(lines))
    bars = [(each.label, each.best.tokens / first.tokens) for each in rows]
    panels = [Panel("each bar adds a key", bars, 4.0, "longest sequence; 1.0: without keys")]
    most = max(value for _, value in bars)
    title = f"In {asked.limit_gib:g} GiB, sequences become {most:.0f} times as long"
    draw_panels(title, panels, asked.out.with_suffix(".png"))


@dataclass(frozen=True)
class Row:
    """The results of one configuration.

    Attributes:
        best: The longest sequence.
        short: The trial at the longest length of `plain`.
        room: Estimated tokens that fit.
        most: The largest length that was tried.
    """

    name: str
    best: Trial
    short: Trial
    room: int
    most: int

    @property
    def tokens(self) -> str:
        more = ", no longer one was tried" if self.best.tokens == self.most else ""
        return f"{self.best.tokens}{more}"

    @property
    def label(self) -> str:
        return f"{self.name}{', at least' if self.best.tokens == self.most else ''}"


if __name__ == "__main__":
    main()
