"""The longest sequence that a small Llama trains on in 3 GiB, one switch of the configuration after another.

    python -m benchmarks.long_sequences                            # half an hour; root, a memory control group
    python -m benchmarks.long_sequences --limit-gib 1 --longest 4096 --out /tmp/long.md
    python -m benchmarks.long_sequences --window '{"mode": "localslidingwindow", "num_sliding_window_blocks": 33}'

Each trial is a process of its own in a memory control group: the model at stage 3, a step on a short sequence (so that
the optimizer has its moments) and one on the sequence in question.  A sequence is too long where the kernel ends the
process.  Lengths grow by half until one is, then the gap is halved until it is an eighth.  `--window` adds a last row:
the section `sparse_attention`.  Leaves a table and a picture.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
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
FIRST = 1024
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
        began = time.perf_counter()
        loss = engine(input_ids=ids, labels=ids).loss
        engine.backward(loss)
        engine.step()
        print(json.dumps({"loss": float(loss.detach()), "seconds": time.perf_counter() - began}), flush=True)


def fits(length: int, section: dict[str, Any], limit: int) -> tuple[bool, int, float]:
    """Return whether a trial came to its end, the bytes its group held at most, and the seconds of its long step."""
    memory = Memory(limit)
    command = [sys.executable, "-m", "benchmarks.long_sequences", "--trial", str(length), json.dumps(section)]
    child = subprocess.run(
        command,
        preexec_fn=memory.enter,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    largest = memory.end()
    lines = child.stdout.splitlines()
    if child.returncode not in (0, -9) and "DefaultCPUAllocator" not in child.stderr:
        raise SystemExit(f"a trial of {length} tokens ended with {child.returncode}:\n{child.stderr[-4000:]}")
    return child.returncode == 0, largest, json.loads(lines[1])["seconds"] if child.returncode == 0 else 0.0


def longest(section: dict[str, Any], limit: int, start: int, most: int) -> tuple[int, float]:
    """Return the longest sequence that trains, and the seconds of its step."""
    low, high, taken, length = 0, 0, 0.0, start
    while not high and length <= most:
        ok, largest, seconds = fits(length, section, limit)
        print(f"  {length}: {'yes' if ok else 'no'}, {largest / GIB:.2f} GiB, {seconds:.1f} s", flush=True)
        if ok:
            low, taken, length = length, seconds, -(-length * 3 // 2 // 128) * 128
        else:
            high = length
    if not low and start > 128:
        return longest(section, limit, start // 2, most)
    while high and high - low > max(low // FINEST, 128):
        middle = (low + high) // 2 // 128 * 128
        ok, largest, seconds = fits(middle, section, limit)
        print(f"  {middle}: {'yes' if ok else 'no'}, {largest / GIB:.2f} GiB, {seconds:.1f} s", flush=True)
        low, high, taken = (middle, high, seconds) if ok else (low, middle, taken)
    return low, taken


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--limit-gib", type=float, default=3.0, help="of the control group")
    parser.add_argument("--longest", type=int, default=1 << 16, help="no longer sequence is tried")
    parser.add_argument("--window", type=json.loads, help="the section sparse_attention of a last row, as JSON")
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--trial", nargs=2, metavar=("TOKENS", "SECTION"), help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.trial is not None:
        train(int(asked.trial[0]), json.loads(asked.trial[1]))
        return
    limit, start = int(asked.limit_gib * GIB), FIRST
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for name, section in ways(folder, asked.window).items():
            print(name, flush=True)
            tokens, seconds = longest(section, limit, start, asked.longest)
            rows.append((name, tokens, seconds))
            start = max(tokens, 128)
    first = rows[0][1]
    lines = [
        "# The longest sequence in a fixed memory",
        "",
        f"`python -m benchmarks.long_sequences`, {date.today()}, {described(machine())}, one thread.",
        f"A Llama of {MODEL}, fp32, one sequence, AdamW, stage 3 on one rank, in a control group of "
        f"{asked.limit_gib:g} GiB. Dense attention but where a row says otherwise; no sequence above {asked.longest} "
        "was tried. The seconds of a step are those of this machine while others worked on it.",
        "",
        "| each with what is above it | tokens | over plain | seconds of that step |",
        "|---|---|---|---|",
        *(f"| {name} | {tokens} | {tokens / first:.1f} | {seconds:.0f} |" for name, tokens, seconds in rows),
    ]
    asked.out.write_text("\n".join(lines) + "\n", encoding="utf-8")
    print("\n".join(lines))
    panel = Panel("longest sequence over plain's", [(name, tokens / first) for name, tokens, _ in rows], 4.0)
    draw_panels(f"A small Llama in {asked.limit_gib:g} GiB", [panel], asked.out.with_suffix(".png"))


if __name__ == "__main__":
    main()
