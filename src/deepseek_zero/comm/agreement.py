"""Ranks compare what they are about to do before they do it.

Differences found here are named; found later they would be wrong gradients or ranks that wait for each other.
Called by sharding/build.py, optim/sharded.py and engine/assemble.py.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence

from ..base.errors import ModelMismatchError
from .collectives import Comm


def agree(comm: Comm, lines: Sequence[str], what: str, why: str, fix: str) -> None:
    """Raise on every rank, with the first line that differs, unless all ranks bring the same lines.  Collective.

    what: the subject of the collective's name ("the model").  why, fix: the error's second and third sentence.
    """
    if comm.size == 1:
        return
    digests = comm.texts(hashlib.sha256("\n".join(lines).encode()).hexdigest(), what)
    if len(set(digests)) == 1:
        return
    everyone = [json.loads(text) for text in comm.texts(json.dumps(list(lines)), f"{what} in full")]
    different = next(rank for rank, found in enumerate(digests) if found != digests[0])
    first, other = everyone[0], everyone[different]
    at = next((k for k, (a, b) in enumerate(zip(first, other, strict=False)) if a != b), min(len(first), len(other)))
    a, b = (found[at] if at < len(found) else "nothing" for found in (first, other))
    raise ModelMismatchError(f"ranks differ in {what}: rank 0 has '{a}', rank {different} has '{b}'.", why, fix)
