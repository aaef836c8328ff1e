"""The memory table shows every state that takes room, and marks a plan that does not tell the
truth.
"""

from __future__ import annotations

import io

from rich.console import Console
from rich.table import Table

from deepseek_zero.report.measure import MemoryRow, common_unit, states_of
from deepseek_zero.report.memory_table import memory_table

MIB = 1024**2
ROWS = [
    MemoryRow(
        0, {"weight": 8 * MIB, "grad": 8 * MIB, "moments": 16 * MIB, "master": 0}, {}, 32 * MIB
    ),
    MemoryRow(
        3, {"weight": 4 * MIB, "grad": 4 * MIB, "moments": 8 * MIB, "window": 1}, {}, 17 * MIB
    ),
]


def printed(table: Table) -> list[str]:
    out = io.StringIO()
    Console(file=out, width=80).print(table)
    return out.getvalue().splitlines()


def test_the_table_has_a_row_per_stage_with_predicted_and_measured_totals() -> None:
    lines = printed(memory_table(ROWS))
    assert lines[0].strip() == "Memory per rank (MiB)"
    assert "0      8.00  8.00    16.00       -      32.00     32.00   +0.00" in " ".join(lines)
    assert any(
        line.split() == ["3", "4.00", "4.00", "8.00", "0.00", "16.00", "17.00", "+6.25"]
        for line in lines
    )


def test_the_table_of_all_states_fits_eighty_columns() -> None:
    states = dict.fromkeys(("weight", "grad", "master", "moments", "buffers"), 12 * MIB)
    lines = printed(memory_table([MemoryRow(0, states, states, 60 * MIB)]))
    header = next(line for line in lines if "stage" in line)
    assert header.split() == ["stage", *states, "predicted", "measured", "diff", "%"]


def test_states_without_bytes_are_left_out_and_unusual_ones_come_last() -> None:
    assert states_of(ROWS) == ["weight", "grad", "moments", "window"]


def test_all_rows_share_the_unit_of_the_largest() -> None:
    assert common_unit(ROWS) == (MIB, "MiB")
    assert common_unit([]) == (1.0, "bytes")
