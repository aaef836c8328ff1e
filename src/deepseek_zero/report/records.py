"""Record every optimizer step of a run in metrics.jsonl and metrics.csv.

Rank 0 writes one line per step. Plots and progress messages are in plots.py and progress.py.
"""

from __future__ import annotations

import csv
import io
import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from types import TracebackType
from typing import IO, Any

from ..base.errors import UsageError
from ..base.given import refuse_url
from ..base.world import is_rank_zero

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
    """Append records to both files of a folder; does nothing on ranks other than 0.

    Each record is flushed, so a killed run loses at most the line that it was writing. The
    incomplete line is removed when the files are opened again. A step that a restarted run repeats
    is written twice, and `read_records` keeps the later record.
    """

    def __init__(self, folder: Path | str) -> None:
        self.folder = Path(folder)
        self._files: tuple[IO[str], IO[str]] | None = None
        if is_rank_zero():
            self.folder.mkdir(parents=True, exist_ok=True)
            header = csv_line([field.name for field in fields(StepRecord)])
            # opened first, because it may be refused
            table = open_for_append(self.folder / CSV_NAME, header)
            self._files = (open_for_append(self.folder / JSONL_NAME), table)

    def __enter__(self) -> RecordWriter:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        self.close()

    def write(self, record: StepRecord) -> None:
        """Append one record to both files."""
        if self._files is None:
            return
        values = asdict(record)
        for file, line in zip(
            self._files, (_json_line(values), csv_line(list(values.values()))), strict=True
        ):
            file.write(line)
            file.flush()

    def close(self) -> None:
        """Close both files; a second call has no effect."""
        for file in self._files or ():
            file.close()
        self._files = None


def read_records(folder: Path | str) -> list[StepRecord]:
    """Read the records of a folder's metrics.jsonl, ordered by step.

    An incomplete last line is skipped.

    Raises:
        UsageError: A line is not a step record.
    """
    refuse_url(f"'{folder}'", folder)
    path = Path(folder) / JSONL_NAME
    by_step: dict[int, StepRecord] = {}
    for number, line in enumerate(_complete_lines(path.read_bytes()), start=1):
        try:
            record = _from_json(json.loads(line))
        except (ValueError, TypeError, AttributeError) as error:
            raise UsageError(
                f"{path}, line {number} is not a step record: {error}", fix="delete the line."
            ) from error
        by_step[record.step] = record
    return [by_step[step] for step in sorted(by_step)]


def open_for_append(path: Path, header: str = "") -> IO[str]:
    """Open a file of lines for appending.

    An incomplete last line is removed, and the header is written if the file is empty.

    Args:
        path: The file.
        header: The first line of the file; empty for none.

    Raises:
        UsageError: The existing file has another header, so its columns would be wrong.
    """
    _drop_incomplete_line(path)
    file = path.open("a", encoding="utf-8", newline="")
    if not header:
        return file
    if path.stat().st_size == 0:
        file.write(header)
        file.flush()
        return file
    with path.open(encoding="utf-8", newline="") as existing:
        found = existing.readline()
    if found.splitlines() != header.splitlines():
        file.close()
        raise UsageError(
            f"{path} has the columns {found.strip()!r}, not {header.strip()!r}.",
            "It was written by another version or another program.",
            "move the file away or choose another folder.",
        )
    return file


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


def _from_json(values: dict[str, Any]) -> StepRecord:
    known = {field.name for field in fields(StepRecord)}
    missing = {
        name: math.nan
        for name, value in values.items()
        if value is None and name != "held_out_loss"
    }
    return StepRecord(
        **{name: value for name, value in {**values, **missing}.items() if name in known}
    )


def _complete_lines(content: bytes) -> list[bytes]:
    return content[: content.rfind(b"\n") + 1].splitlines()


def _drop_incomplete_line(path: Path) -> None:
    if not path.exists():
        return
    with path.open("r+b") as file:
        end = file.seek(0, io.SEEK_END)
        keep = end
        while keep > 0:  # read backward in blocks, because the file of a long run is large
            start = max(0, keep - 65536)
            file.seek(start)
            found = file.read(keep - start).rfind(b"\n")
            keep = start + found + 1 if found >= 0 else start
            if found >= 0:
                break
        if keep < end:
            file.truncate(keep)
