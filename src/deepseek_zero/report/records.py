"""Record every optimizer step of a run in metrics.jsonl and metrics.csv.

Rank 0 writes one line per step.
"""

from __future__ import annotations

import csv
import io
import json
import math
import mmap
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import IO, Any

from ..base.errors import UsageError, shown

JSONL_NAME = "metrics.jsonl"
CSV_NAME = "metrics.csv"


@dataclass(frozen=True)
class StepRecord:
    """Metrics of one optimizer step.

    Attributes:
        step: Number of the step.
        loss: Mean of this rank's losses; None if no backward of a scalar was observed.
        lr: Learning rate.
        grad_norm: Norm of the gradient.
        tokens_per_second: Throughput of all ranks.
        memory_bytes: Memory of this rank in bytes.
        comm_bytes: Bytes that this rank sent.
        step_seconds: Duration in seconds.
        loss_scale: Loss scale.
        skipped: Whether the update was skipped.
        held_out_loss: Loss on held-out data, if measured.
        promoted: Number of units that compute in fp32.
    """

    step: int
    loss: float | None
    lr: float
    grad_norm: float
    tokens_per_second: float
    memory_bytes: int
    comm_bytes: int
    step_seconds: float
    loss_scale: float = 1.0
    skipped: bool = False
    held_out_loss: float | None = None
    promoted: int = 0


class RecordWriter:
    """Append records to both files of a folder; only rank 0 creates one.

    Each record is flushed, so a killed run loses at most the line that it was writing. The
    incomplete line is removed when the files are opened again. A step that a restarted run repeats
    is written twice.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.folder.mkdir(parents=True, exist_ok=True)
        header = csv_line([field.name for field in fields(StepRecord)])
        # opened first, because it may be refused
        self._table = open_for_append(folder / CSV_NAME, header)
        self._lines = open_for_append(folder / JSONL_NAME)

    def write(self, record: StepRecord) -> None:
        """Append one record to both files."""
        values = asdict(record)
        self._lines.write(_json_line(values))
        self._table.write(csv_line(list(values.values())))
        self._lines.flush()
        self._table.flush()

    def close(self) -> None:
        """Close both files; a second call has no effect."""
        try:
            self._lines.close()
        finally:
            self._table.close()


def open_for_append(path: Path, header: str = "") -> IO[str]:
    """Open a file of lines for appending.

    An incomplete last line is removed, and the header is written if the file is empty.

    Args:
        path: File to open, which is created if it is missing.
        header: The first line of the file; empty for none.

    Returns:
        The open file, positioned at its end.

    Raises:
        UsageError: The existing file has another header, so its columns would be wrong.
    """
    if header and path.exists():
        _refuse_other_header(path, header)
    _drop_incomplete_line(path)
    file = path.open("a", encoding="utf-8", newline="")
    if path.stat().st_size == 0:
        file.write(header)
        file.flush()
    return file


def _refuse_other_header(path: Path, header: str) -> None:
    """Raise `UsageError` if a file has another header, before the file is changed."""
    with path.open(encoding="utf-8", errors="replace", newline="") as existing:
        found = existing.readline()
    # A killed run may have written a part of the header
    if found.splitlines() != header.splitlines() and not header.startswith(found):
        raise UsageError(
            f"{path} has the columns {shown(found.strip(), 300)}, not {header.strip()!r}.",
            "It was written by another version or another program.",
            "move the file away or choose another folder.",
        )


def csv_line(values: list[Any]) -> str:
    """Return one line of CSV with a newline; floats keep all digits."""
    line = io.StringIO()
    csv.writer(line, lineterminator="\n").writerow(values)
    return line.getvalue()


def _json_line(values: Mapping[str, Any]) -> str:
    # JSON has no NaN or infinity, and readers in other languages would refuse the file.
    odd = {
        name: None
        for name, value in values.items()
        if isinstance(value, float) and not math.isfinite(value)
    }
    return json.dumps({**values, **odd}) + "\n"


def _drop_incomplete_line(path: Path) -> None:
    if not path.exists() or not path.stat().st_size:
        return
    # Mapped, because the file of a long run is large, and only its end is read
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as text:
        end = text.rfind(b"\n") + 1
    os.truncate(path, end)
