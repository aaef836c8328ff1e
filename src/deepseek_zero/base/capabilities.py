"""Record which methods a run uses on this machine, and where a slower one is used.

A component with two methods reports its choice (`Capability`). The engine collects the reports of
all ranks (`Capabilities`), logs the slower methods once, and shows all of them in `explain()`.
`deepseek-zero doctor` reports the same for a machine.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import astuple, dataclass, field
from typing import Self


@dataclass(frozen=True)
class Capability:
    """The method that a run uses for one task, and the requirements of a faster method.

    Attributes:
        name: Name of the task.
        way: Method that performs it.
        lacks: What a faster method would need; "" if there is no faster one.
    """

    name: str
    way: str
    lacks: str = ""

    def __str__(self) -> str:
        return f"{self.name}: {self.way}" + (f" ({self.lacks})" if self.lacks else "")


@dataclass(frozen=True)
class Capabilities:
    """The methods that all ranks use, each with the ranks that use it in ascending order."""

    size: int = 1
    ranks_of: dict[Capability, list[int]] = field(default_factory=dict)

    @classmethod
    def of_ranks(cls, texts: Sequence[str]) -> Self:
        """Return the combination of one `as_text` result per rank."""
        found: dict[Capability, list[int]] = {}
        for rank, text in enumerate(texts):
            for row in json.loads(text):
                found.setdefault(Capability(*row), []).append(rank)
        return cls(len(texts), found)

    @property
    def fallbacks(self) -> list[str]:
        """Return one line for each choice of a slower method."""
        return [self._line(each) for each in self.ranks_of if each.lacks]

    def explain(self) -> list[str]:
        """Return one line of text for each task, with the method that ranks use for it."""
        return [self._line(each) for each in self.ranks_of]

    def _line(self, each: Capability) -> str:
        ranks = self.ranks_of[each]
        whose = "" if len(ranks) == self.size else f" [rank {', '.join(map(str, ranks))}]"
        return f"{each}{whose}"


def as_text(capabilities: Sequence[Capability]) -> str:
    """Return the methods that one rank uses as text, for `Capabilities.of_ranks`."""
    return json.dumps([astuple(each) for each in capabilities])
