"""Format bytes, counts and durations in a few characters, and divide with rounding up."""

from __future__ import annotations

_BINARY = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")
_DECIMAL = ("", "k", "M", "G", "T")


def ceil_div(number: int, divisor: int) -> int:
    """Return the quotient of two integers, rounded up."""
    return -(-number // divisor)


def rounded_up(number: int, unit: int) -> int:
    """Return the smallest multiple of `unit` that is not below `number`."""
    return ceil_div(number, unit) * unit


def format_bytes(num_bytes: float) -> str:
    """Return a size as text in binary units: 1536 -> "1.5 KiB"."""
    value, unit = _scale(num_bytes, 1024, _BINARY)
    return f"{value:.0f} B" if unit == "B" else f"{_three_digits(value)} {unit}"


def unit_of(largest: float) -> tuple[float, str]:
    """Return the unit, in bytes, and its name for sizes up to `largest`.

    A table uses one unit for all its numbers.
    """
    for exponent, name in ((3, "GiB"), (2, "MiB"), (1, "KiB")):
        if largest >= 1024**exponent:
            return 1024.0**exponent, name
    return 1.0, "bytes"


def format_count(count: float) -> str:
    """Return a count as text in decimal units: 12345 -> "12.3k"."""
    value, unit = _scale(count, 1000, _DECIMAL)
    return f"{value:.0f}" if not unit else f"{_three_digits(value)}{unit}"


def format_seconds(seconds: float) -> str:
    """Return a duration as text: 0.0123 -> "12.3 ms", 75 -> "1:15", 3700 -> "1:01:40"."""
    if seconds < 1:
        return f"{_three_digits(seconds * 1000)} ms"
    if seconds < 60:
        return f"{_three_digits(seconds)} s"
    hours, rest = divmod(round(seconds), 3600)
    minutes, left = divmod(rest, 60)
    return f"{hours}:{minutes:02}:{left:02}" if hours else f"{minutes}:{left:02}"


def _scale(value: float, base: int, units: tuple[str, ...]) -> tuple[float, str]:
    index = 0
    # 999.5 would print as "1000": such a value already belongs to the next unit.
    while abs(value) >= base - 0.5 and index < len(units) - 1:
        value = value / base
        index = index + 1
    return value, units[index]


def _three_digits(value: float) -> str:
    if abs(value) >= 99.95:
        return f"{value:.0f}"
    return f"{value:.1f}" if abs(value) >= 9.995 else f"{value:.2f}"
