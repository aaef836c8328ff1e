"""The one error family.

Every message says what happened, why, and what to do.  Nothing else in the house raises a bare
RuntimeError at users.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

MOST_LISTED = 8  # ranks of a host that a message names one by one


class DeepSeekZeroError(RuntimeError):
    """Base of every error this library raises on purpose.

    what: the fact, with names and numbers.  why: the reason, if it is not plain.  fix: what the
    reader can do now.
    """

    def __init__(self, what: str, why: str = "", fix: str = "") -> None:
        self.what = what
        self.why = why
        self.fix = fix
        parts = [what.rstrip()]
        if why:
            parts.append(f"Why: {why}")
        if fix:
            parts.append(f"What to do: {fix}")
        super().__init__("\n  ".join(parts))

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (self.what, self.why, self.fix)


def brief(error: BaseException) -> str:
    """Return another package's error on one short line: some quote whole files."""
    text = " ".join(f"{type(error).__name__}: {error}".split())
    return text if len(text) <= 200 else f"{text[:200]}..."


class ConfigError(DeepSeekZeroError, ValueError, AssertionError):
    """The configuration cannot be used; lists every problem found, not only the first.

    A ValueError or an AssertionError in DeepSpeed, whichever check finds it.
    """


DeepSpeedConfigError = ConfigError  # DeepSpeed's word for it


class NotBuiltError(DeepSeekZeroError, NotImplementedError):
    """A feature that is known and left out on purpose, or planned; never ignored silently."""


class UnknownNameError(NotBuiltError, AttributeError):
    """An attribute that exists in DeepSpeed and not here: an AttributeError too, so that hasattr()
    answers False.
    """


class AtRestError(DeepSeekZeroError):
    """A sharded parameter (or gradient) was used while this rank holds only its slice."""


class PeerError(DeepSeekZeroError):
    """Another rank died, raised, or called a different collective; raised on every living rank, by
    name.
    """


class HostLost(PeerError):
    """A host has been silent for longer than a lost host may be; raised on every rank of the others
    that waits.

    hosts: name and ranks of each. seconds: of silence, as allowed (`deepseek-zero run
    --dead-after`).
    """

    def __init__(self, hosts: Sequence[tuple[str, Sequence[int]]], seconds: float) -> None:
        self.hosts = [(name, list(ranks)) for name, ranks in hosts]
        self.seconds = seconds
        super().__init__(
            f"{' and '.join(host_and_ranks(*each) for each in hosts)} silent for {seconds:g} s",
            "It lost its power or its network, or this host did.",
            "look at that host and at the link; start the job again from its last checkpoint.",
        )

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (self.hosts, self.seconds)


def host_and_ranks(name: str, ranks: Sequence[int]) -> str:
    """Return a host as messages name it: "h1 (ranks 2, 3)"."""
    return f"{name} ({listed_ranks(ranks)})"


def listed_ranks(ranks: Sequence[int]) -> str:
    """Return ranks as messages name them: "rank 2", "ranks 2, 3"."""
    listed = (
        ", ".join(map(str, ranks)) if len(ranks) <= MOST_LISTED else f"{ranks[0]} to {ranks[-1]}"
    )
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {listed}"


class IntegrityError(DeepSeekZeroError):
    """Bits changed where nothing wrote, or differ between ranks that hold the same (`integrity`);
    on every rank.
    """


class ModelMismatchError(DeepSeekZeroError):
    """Ranks disagree about names, shapes, dtypes, order or settings; found before any data
    moves.
    """


class UsageError(DeepSeekZeroError, AssertionError):
    """A call out of order or with arguments that cannot be right; an AssertionError in
    DeepSpeed.
    """


class BatchMismatchError(UsageError):
    """Ranks that compute one layer together were given different batches."""


class StorageError(DeepSeekZeroError, OSError):
    """A disk that holds states refused, is full, or returned other bytes than it was given; they
    are never computed with.
    """


class OutOfMemoryError(DeepSeekZeroError, MemoryError):
    """Memory that a buffer needs cannot be had; raised before anything is written into it."""


class CheckpointError(DeepSeekZeroError):
    """A checkpoint is missing, incomplete or does not fit the model."""


LONGEST_SHOWN = 80
_DEEPEST_SHOWN = 4


def article(value: Any) -> str:
    """The type of a value behind its article: "an int", "a Tensor"."""
    name = type(value).__name__
    return f"{'an' if name[:1].lower() in 'aeiou' else 'a'} {name}"


def shown(value: Any, limit: int = LONGEST_SHOWN) -> str:
    """A value as a message shows it: like repr, at most `limit` characters, whatever the value is
    or does.
    """
    try:
        text = "".join(_pieces(value, limit, _DEEPEST_SHOWN))
    except Exception:  # a foreign mapping or sequence that does not tell what it holds
        text = f"<{type(value).__name__}>"
    return text if len(text) <= limit else text[: limit - 3] + "..."


def _pieces(value: Any, room: int, depth: int) -> Iterator[str]:
    """repr in pieces, of which no more are made than there is room for."""
    if isinstance(value, str | bytes):
        yield repr(value[: room + 1])
    elif isinstance(value, Mapping) and depth:
        entries = ((key, ": ", inner) for key, inner in value.items())
        yield from _enclosed("{", entries, "}", room, depth)
    elif isinstance(value, list | tuple) and depth:
        opening, closing = (
            ("[", "]") if isinstance(value, list) else ("(", ",)" if len(value) == 1 else ")")
        )
        yield from _enclosed(opening, ((inner,) for inner in value), closing, room, depth)
    elif isinstance(value, Mapping | list | tuple):
        yield "..."
    else:
        try:
            yield repr(value)[: room + 1]
        except Exception:  # a foreign repr, or a number of too many digits
            yield f"<{type(value).__name__}>"


def _enclosed(
    opening: str, entries: Iterable[tuple[Any, ...]], closing: str, room: int, depth: int
) -> Iterator[str]:
    separator = opening
    used = 0
    for entry in entries:
        yield separator
        separator, used = ", ", used + len(separator)
        for number, part in enumerate(entry):
            for piece in [part] if number % 2 else _pieces(part, room, depth - 1):
                used += len(piece)
                yield piece
        if used > room:
            return
    yield closing if separator != opening else opening + closing
