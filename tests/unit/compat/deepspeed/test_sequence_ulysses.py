"""Test the loader adapter of sequence parallelism if ranks have different batches."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from deepseek_zero.base.errors import UsageError
from deepseek_zero.compat.deepspeed import sequence_ulysses

BATCH = {"input_ids": torch.zeros(1, 4), "labels": torch.zeros(1, 4)}
ROW = sequence_ulysses._as_bytes(BATCH)


@pytest.mark.parametrize(
    ("loader", "other", "raised"),
    [
        ([], ROW, UsageError),
        ([BATCH], b"", UsageError),
        ([], b"", StopIteration),
        ([{"input_ids": torch.zeros(4)}], ROW, ValueError),
    ],
)
def test_a_rank_without_a_batch_is_an_error_on_every_rank(
    monkeypatch: pytest.MonkeyPatch, loader: list[Any], other: bytes, raised: type[Exception]
) -> None:
    sent = []

    def gather(own: bytes, size: int, group: Any) -> list[bytes]:
        sent.append(own)
        return [own, other]

    monkeypatch.setattr(sequence_ulysses, "all_gather_bytes", gather)
    adapter = sequence_ulysses.UlyssesSPDataLoaderAdapter(loader, 0, None, 2, "cpu")
    with pytest.raises(raised):
        adapter.refill()
    assert len(sent) == 1  # the other rank does not wait
