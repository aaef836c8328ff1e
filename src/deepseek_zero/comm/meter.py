"""Bytes and time per kind of collective; counted where the bytes leave, read by report and by the truth contract."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field


@dataclass
class Meter:
    """Counts since the last reset.  `sent_bytes[kind]`: what this rank put on the wire; `calls[kind]`: collectives."""

    sent_bytes: Counter[str] = field(default_factory=Counter)
    calls: Counter[str] = field(default_factory=Counter)
    wait_seconds: dict[str, float] = field(default_factory=dict)

    def count(self, kind: str, sent_bytes: int) -> None:
        self.sent_bytes[kind] += sent_bytes
        self.calls[kind] += 1

    def waited(self, lane: str, seconds: float) -> None:
        self.wait_seconds[lane] = self.wait_seconds.get(lane, 0.0) + seconds

    def total_bytes(self) -> int:
        """Bytes this rank sent, all kinds."""
        return sum(self.sent_bytes.values())

    def reset(self) -> None:
        self.sent_bytes.clear()
        self.calls.clear()
        self.wait_seconds.clear()
