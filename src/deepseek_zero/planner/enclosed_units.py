"""Units whose modules stand inside the module of another unit."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence


def enclosing(names: Sequence[str]) -> dict[int, int]:
    """The unit that the module of another stands in, from their full names, by number; the root (0)
    is left out.
    """
    numbers = {name: number for number, name in enumerate(names) if number}
    found = {}
    for name, number in numbers.items():
        outer = name.rpartition(".")[0]
        while outer and outer not in numbers:
            outer = outer.rpartition(".")[0]
        if outer:
            found[number] = numbers[outer]
    return found


def outward(unit: int, around: Mapping[int, int]) -> Iterator[int]:
    """A unit and those around it, the root left out."""
    yield unit
    while unit in around:
        unit = around[unit]
        yield unit
