"""Read the step records that `RecordWriter` wrote."""

from __future__ import annotations

import json
from pathlib import Path

from deepseek_zero.report.records import JSONL_NAME, StepRecord


def read_records(folder: Path) -> list[StepRecord]:
    """Return the records in file order. An incomplete line is an error."""
    text = (folder / JSONL_NAME).read_text()
    return [StepRecord(**json.loads(line)) for line in text.splitlines()]
