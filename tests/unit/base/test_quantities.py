"""Numbers are printed with three digits and the unit that suits them."""

from __future__ import annotations

import pytest

from deepseek_zero.base.quantities import format_bytes, format_count, format_seconds


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.00 KiB"),
        (1024**2 - 1, "1.00 MiB"),
        (15.5 * 1024**2, "15.5 MiB"),
        (120e9, "112 GiB"),
        (3 * 1024**6, "3072 PiB"),
    ],
)
def test_bytes_are_printed_in_binary_units(size: float, text: str) -> None:
    assert format_bytes(size) == text


@pytest.mark.parametrize(
    ("count", "text"),
    [(7, "7"), (999.4, "999"), (999.9, "1.00k"), (12_345, "12.3k"), (1e8, "100M")],
)
def test_counts_are_printed_in_decimal_units(count: float, text: str) -> None:
    assert format_count(count) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.01234, "12.3 ms"), (1.5, "1.50 s"), (75, "1:15"), (3599.6, "1:00:00"), (3700, "1:01:40")],
)
def test_durations_read_as_milliseconds_seconds_or_a_clock(seconds: float, text: str) -> None:
    assert format_seconds(seconds) == text
