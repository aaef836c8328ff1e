"""The numbers that every rank sends to all other ranks at a step, as named fields.

The optimizer's step exchanges one row of float64 per rank, for the gradient norm. Other users add
fields to the same row, so a step sends no further message.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

# By name of the field, the values of each rank, in the order of ranks.
Fields = Mapping[str, Sequence[Sequence[float]]]
MOST_BITS = 53  # of an integer that a float64 holds exactly


class StepMessage:
    """One rank's row. Every rank must add the same fields, of the same widths, in the same order.

    Small integers, such as flags, share the first number of the row.
    """

    def __init__(self) -> None:
        self._integers: dict[str, tuple[int, int]] = {}  # by name: the value and its bits
        self._values: dict[str, tuple[float, ...]] = {}

    @property
    def names(self) -> tuple[str, ...]:
        """Return the names of the fields, in the order of the row."""
        return (*self._integers, *self._values)

    def add(self, name: str, values: Iterable[float]) -> None:
        """Add a field of numbers: this rank's values. Their number is the width of the field.

        Raises:
            ValueError: A field of that name exists.
        """
        self._refuse_second(name)
        self._values[name] = tuple(map(float, values))

    def add_integer(self, name: str, value: int, bits: int = 1) -> None:
        """Add a field of one integer that is not negative and has at most so many bits.

        Raises:
            ValueError: A field of that name exists, the value needs more bits, or all integers of
                the message need more than `MOST_BITS`.
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
        """Return the row."""
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
        """Return each field of each rank. rows: what `pack` returned on each rank, by rank."""
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
    """Return whether a flag is set on any rank. flags: the field of each rank."""
    return any(value for (value,) in flags)


def all_set(flags: Sequence[Sequence[float]]) -> bool:
    """Return whether a flag is set on every rank. flags: the field of each rank."""
    return all(value for (value,) in flags)
