"""Test the memory report of a rank: totals and the printed table."""

from __future__ import annotations

import pytest
import torch

from deepseek_zero.report.measure import MemoryReport, live_storages

MIB = 1024**2


def test_the_report_prints_a_row_per_state_with_bytes_and_the_totals() -> None:
    predicted = {"weight": 2 * MIB, "grad": 0, "moments": 8}
    measured = {"weight": 3 * MIB, "grad": 0, "moments": 8, "nvme": 0, "other": 1536}
    lines = str(MemoryReport(predicted, measured)).splitlines()
    assert [line.split() for line in lines[1:]] == [
        ["state", "predicted", "measured"],
        ["weight", "2.00", "MiB", "3.00", "MiB"],
        ["moments", "8", "B", "8", "B"],
        ["total", "2.00", "MiB", "3.00", "MiB"],
        ["other", "tensors", "-", "1.50", "KiB"],
    ]
    assert len({len(line) for line in lines[1:]}) == 1, "the columns are aligned"


def test_a_state_that_was_not_predicted_has_a_row() -> None:
    lines = str(MemoryReport({"weight": MIB}, {"weight": MIB, "errors": MIB})).splitlines()
    assert lines[3].split() == ["errors", "0", "B", "1.00", "MiB"]


def test_the_total_leaves_out_other_tensors() -> None:
    report = MemoryReport({"weight": 4}, {"weight": 4, "other": 8})
    assert (report.predicted_total, report.measured_total) == (4, 4)
    assert str(MemoryReport({"weight": 4}, {"weight": 4})).splitlines()[-1].split()[0] == "total"


@pytest.mark.filterwarnings("ignore:Sparse CSR")
def test_tensors_without_a_storage_are_not_counted() -> None:
    dense = torch.ones(7, 7)
    rows = [torch.ones(2), torch.ones(3)]
    kept = [
        dense.to_sparse(),
        dense.to_sparse_csr(),
        torch.nested.nested_tensor(rows, layout=torch.jagged),
    ]
    found = live_storages()
    assert found[dense.data_ptr()] == dense.nbytes
    assert len(kept) == 3
