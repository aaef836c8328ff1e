"""A text corpus that every Python installation has: the source code of its standard library.

This module has the corpus, its split into training and held-out files, and the sampler. It needs no
download and no tokenizer. A batch is a pure function of (seed, step, rank), so a restarted run
reads the same batches.
"""

from __future__ import annotations

import hashlib
import sysconfig
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

# Tests and demos are repetitive, code pages and generated tables are numbers, and site-packages has
# third-party packages.
SKIPPED_FOLDERS = frozenset(
    "test tests idlelib turtledemo lib2to3 site-packages dist-packages encodings pydoc_data "
    "__pycache__".split()
)
SKIPPED_PREFIXES = ("_sysconfigdata", "config-")
HELD_OUT_EVERY = 20  # one of 20 files is held out from training


@dataclass(frozen=True)
class Corpus:
    """Training and held-out bytes, each a 1-D uint8 tensor."""

    train: Tensor
    held_out: Tensor
    num_files: int


def load_corpus(root: Path | None = None, limit_bytes: int = 20_000_000) -> Corpus:
    """Read the library's `*.py` files in path order. Each file belongs to one side of the split.

    root: another folder of Python files (default: the running interpreter's library).
    """
    root = root or Path(sysconfig.get_path("stdlib"))
    parts: dict[bool, list[bytes]] = {True: [], False: []}
    size = num_files = 0
    for path in sorted(root.rglob("*.py")):
        text = _read(path, root)
        if not text or size + len(text) > limit_bytes:
            continue
        size, num_files = size + len(text), num_files + 1
        parts[_is_held_out(path.relative_to(root))].append(text)
    if not parts[True] or not parts[False]:
        raise SystemExit(
            f"{root} holds too few Python files to train on ({num_files} found); pass another "
            "folder."
        )
    return Corpus(_as_tensor(parts[False]), _as_tensor(parts[True]), num_files)


def _read(path: Path, root: Path) -> bytes:
    inside = path.relative_to(root)
    if SKIPPED_FOLDERS & set(inside.parts) or inside.name.startswith(SKIPPED_PREFIXES):
        return b""
    text = path.read_bytes()
    try:
        text.decode("utf-8")
    except UnicodeDecodeError:  # a few files declare another encoding on purpose
        return b""
    return text


def _is_held_out(path: Path) -> bool:
    # By a hash of the name, so that an added file does not move other files across the split.
    return hashlib.sha256(path.as_posix().encode()).digest()[0] % HELD_OUT_EVERY == 0


def _as_tensor(texts: list[bytes]) -> Tensor:
    return torch.frombuffer(bytearray(b"".join(texts)), dtype=torch.uint8)


@dataclass(frozen=True)
class Sampler:
    """Random windows of `length` bytes, and the same windows shifted by one byte as targets."""

    text: Tensor
    batch: int
    length: int
    seed: int = 0

    def draw(self, step: int, rank: int = 0) -> tuple[Tensor, Tensor]:
        """Return the (inputs, targets) of one rank at one step, both (batch, length) int64."""
        key = hashlib.sha256(f"{self.seed}/{step}/{rank}".encode()).digest()
        dice = torch.Generator().manual_seed(int.from_bytes(key[:7], "little"))
        starts = torch.randint(len(self.text) - self.length, (self.batch,), generator=dice)
        windows = self.text[starts[:, None] + torch.arange(self.length + 1)].long()
        return windows[:, :-1], windows[:, 1:]
