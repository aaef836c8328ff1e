"""Print predicted and measured memory of each stage as a table."""

from __future__ import annotations

from collections.abc import Sequence

from rich import box
from rich.table import Table
from rich.text import Text

from .measure import MemoryRow, common_unit, states_of

_MAX_DIFFERENCE = 0.01  # a larger difference means that the plan and the allocation disagree


def memory_table(rows: Sequence[MemoryRow], title: str = "Memory per rank") -> Table:
    """Return a table with one row per stage.

    Columns are the predicted bytes by state, the predicted and measured totals, and the difference
    in percent.

    Args:
        rows: The stages.
        title: Title of the table.
    """
    states = states_of(rows)
    unit_bytes, unit = common_unit(rows)
    table = Table(
        title=f"{title} ({unit})", box=box.SIMPLE_HEAD, collapse_padding=True, pad_edge=False
    )
    table.title_style = "bold"
    table.title_justify = "left"
    table.add_column("stage", justify="center", no_wrap=True)
    for state in states:
        table.add_column(state, justify="right", style="dim", no_wrap=True)
    for column in ("predicted", "measured", "diff %"):
        table.add_column(column, justify="right", no_wrap=True)
    for row in rows:
        sizes = [_cell(row.predicted.get(state, 0), unit_bytes) for state in states]
        totals = [_cell(row.predicted_total, unit_bytes), _cell(row.measured_total, unit_bytes)]
        table.add_row(str(row.stage), *sizes, *totals, _difference(row))
    return table


def _cell(size: int, unit_bytes: float) -> str:
    if not size:
        return "-"
    return f"{size / unit_bytes:.0f}" if unit_bytes == 1 else f"{size / unit_bytes:.2f}"


def _difference(row: MemoryRow) -> Text:
    style = "green" if abs(row.difference) < _MAX_DIFFERENCE else "red"
    return Text(f"{row.difference * 100:+.2f}", style=style)
