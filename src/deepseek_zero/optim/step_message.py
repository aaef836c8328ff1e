"""The numbers that every rank sends to all others with the gradient norm, as named fields."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import islice

import torch

from ..comm.collectives import Comm

# Maps the name of a field to the values of each rank, in rank order.
Fields = Mapping[str, Sequence[Sequence[float]]]


class StepMessage:
    """Named lists of numbers that each rank sends to all others in a step.

    Every rank must add the same fields, with the same number of values, in the same order.
    """

    def __init__(self) -> None:
        self._values: dict[str, tuple[float, ...]] = {}

    def add(self, name: str, values: Iterable[float]) -> None:
        """Add a named list of numbers, as many on every rank; integers of 53 bits are exact.

        Raises:
            ValueError: The message already has a field of that name.
        """
        if name in self._values:
            raise ValueError(f"the step message already has a field '{name}'")
        self._values[name] = tuple(map(float, values))

    def add_all(self, other: StepMessage) -> None:
        """Append all fields of another message."""
        for name, values in other._values.items():
            self.add(name, values)

    def pack(self) -> list[float]:
        """Return the values of all fields as one flat list."""
        return [value for values in self._values.values() for value in values]

    def unpack(self, rows: Sequence[Sequence[float]]) -> dict[str, list[tuple[float, ...]]]:
        """Return for each field one tuple of values per rank, from the `pack` of each rank."""
        found: dict[str, list[tuple[float, ...]]] = {}
        readers = [iter(row) for row in rows]
        for name, values in self._values.items():
            found[name] = [tuple(islice(reader, len(values))) for reader in readers]
        return found

    def exchange(self, comm: Comm, what: str) -> dict[str, list[tuple[float, ...]]]:
        """Send the message to all ranks, and return the fields of all ranks as `unpack`.

        Note:
            Collective if the communicator has several ranks.
        """
        row = self.pack()
        if comm.size == 1:
            return self.unpack([row])
        rows = comm.all_gather_rows(torch.tensor(row, dtype=torch.float64, device="cpu"), what)
        return self.unpack(rows.tolist())
