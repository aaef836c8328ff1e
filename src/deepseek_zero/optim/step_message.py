"""The numbers that every rank sends to all others at a step, as named fields.

They travel in the all-gather of the gradient norm, so a step needs no further message.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

# Maps the name of a field to the values of each rank, in rank order.
Fields = Mapping[str, Sequence[Sequence[float]]]
MOST_BITS = 53  # a float64 holds integers of up to 53 bits exactly


class StepMessage:
    """One rank's row of numbers.

    Every rank must add the same fields, with the same widths, in the same order. All integer
    fields, such as flags, are packed into the first number of the row.
    """

    def __init__(self) -> None:
        self._integers: dict[str, tuple[int, int]] = {}  # by name: value and number of bits
        self._values: dict[str, tuple[float, ...]] = {}

    @property
    def names(self) -> tuple[str, ...]:
        """Return the names of the fields, in the order of the row."""
        return (*self._integers, *self._values)

    def add(self, name: str, values: Iterable[float]) -> None:
        """Add a field of floating-point numbers.

        Args:
            name: The name of the field.
            values: This rank's values. Their number must be the same on every rank.

        Raises:
            ValueError: The message already has a field of that name.
        """
        self._refuse_second(name)
        self._values[name] = tuple(map(float, values))

    def add_integer(self, name: str, value: int, bits: int = 1) -> None:
        """Add a field that holds one non-negative integer.

        Args:
            name: The name of the field.
            value: This rank's value.
            bits: The width of the field in bits.

        Raises:
            ValueError: The message already has a field of that name, the value needs more bits, or
                all integer fields together need more than `MOST_BITS`.
        """
        self._refuse_second(name)
        used = sum(width for _, width in self._integers.values())
        if not 0 <= value < 1 << bits or used + bits > MOST_BITS:
            raise ValueError(f"{value} does not fit {bits} bits of the step message's {MOST_BITS}")
        self._integers[name] = (int(value), bits)

    def add_all(self, other: StepMessage) -> None:
        """Add every field of another message."""
        for name, (value, bits) in other._integers.items():
            self.add_integer(name, value, bits)
        for name, values in other._values.items():
            self.add(name, values)

    def pack(self) -> list[float]:
        """Return the message as one row of numbers."""
        row = []
        if self._integers:
            joined = 0
            for value, bits in self._integers.values():
                joined = joined << bits | value
            row.append(float(joined))
        for values in self._values.values():
            row.extend(values)
        return row

    def unpack(self, rows: Sequence[Sequence[float]]) -> dict[str, list[tuple[float, ...]]]:
        """Return the values of each field on each rank.

        Args:
            rows: The result of `pack` on each rank, in rank order.
        """
        found: dict[str, list[tuple[float, ...]]] = {}
        start = 0
        if self._integers:
            joined = [int(row[0]) for row in rows]
            for name, (_, bits) in reversed(self._integers.items()):
                found[name] = [(each & ((1 << bits) - 1),) for each in joined]
                joined = [each >> bits for each in joined]
            start = 1
        for name, values in self._values.items():
            stop = start + len(values)
            found[name] = [tuple(row[start:stop]) for row in rows]
            start = stop
        return found

    def _refuse_second(self, name: str) -> None:
        if name in self._integers or name in self._values:
            raise ValueError(f"the step message already has a field '{name}'")


def any_set(flags: Sequence[Sequence[float]]) -> bool:
    """Return whether a flag is set on any rank.

    Args:
        flags: The unpacked field, one entry per rank.
    """
    return any(value for (value,) in flags)


def all_set(flags: Sequence[Sequence[float]]) -> bool:
    """Return whether a flag is set on every rank.

    Args:
        flags: The unpacked field, one entry per rank.
    """
    return all(value for (value,) in flags)
