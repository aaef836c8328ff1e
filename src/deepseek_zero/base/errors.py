"""The exceptions of the library.

Every message says what happened, why, and what to do. Nothing else in the library raises a bare
RuntimeError.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

MOST_LISTED = 8  # maximum ranks of a host that a message lists one by one


class DeepSeekZeroError(RuntimeError):
    """Base class of the library's errors, which builds the message from three parts.

    The parts are also attributes of the error.

    Args:
        what: What happened, with names and numbers.
        why: The reason, if it is not obvious.
        fix: What the user can do.
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
    """Return the text of another package's error on one line of at most about 200 characters.

    The text is shortened because some packages quote whole files in their errors.
    """
    text = " ".join(f"{type(error).__name__}: {error}".split())
    return text if len(text) <= 200 else f"{text[:200]}..."


class ConfigError(DeepSeekZeroError, ValueError, AssertionError):
    """Raised if the configuration, or a part of it, cannot be used.

    A check of the whole configuration reports all problems that it finds in one message.
    The class is also a ValueError and an AssertionError, because DeepSpeed raises one or the other
    for an invalid configuration.
    """


DeepSpeedConfigError = ConfigError  # DeepSpeed's name


class NotBuiltError(DeepSeekZeroError, NotImplementedError):
    """Raised for a known feature that is not implemented.

    Such a request is never ignored silently.
    """


class UnknownNameError(NotBuiltError, AttributeError):
    """Raised for an attribute that exists in DeepSpeed but not in this library.

    Also an AttributeError, so that `hasattr` returns False.
    """


class AtRestError(DeepSeekZeroError):
    """Raised if a sharded parameter or gradient is used while this rank holds only its shard."""


class PeerError(DeepSeekZeroError):
    """Raised if another rank died, raised, or called a different collective.

    It is raised on every remaining rank, and its message names the rank.
    """


class HostLost(PeerError):
    """Raised if a host was silent for longer than the limit.

    It is raised on every waiting rank of the other hosts.

    Args:
        hosts: Name and ranks of each lost host.
        seconds: The limit (`deepseek-zero run --dead-after`).
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
    """Return a host with its ranks for a message: "h1 (ranks 2, 3)".

    Args:
        name: The name of the host.
        ranks: Ranks that run on the host.

    Returns:
        The name of the host, with its ranks in parentheses.
    """
    return f"{name} ({listed_ranks(ranks)})"


def listed_ranks(ranks: Sequence[int]) -> str:
    """Return ranks for a message: "rank 2" or "ranks 2, 3"."""
    listed = (
        ", ".join(map(str, ranks)) if len(ranks) <= MOST_LISTED else f"{ranks[0]} to {ranks[-1]}"
    )
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {listed}"


class IntegrityError(DeepSeekZeroError):
    """Raised if memory changed without a write, or differs between ranks that hold a copy.

    It is raised on every rank if the section `integrity` is enabled.
    """


class ModelMismatchError(DeepSeekZeroError):
    """Raised if ranks have different names, shapes, dtypes, orders, settings or learning rates.

    The difference is detected before any state changes.
    """


class UsageError(DeepSeekZeroError, AssertionError):
    """Raised by a call out of order or with arguments that cannot be used.

    Also an AssertionError, as in DeepSpeed.
    """


class BatchMismatchError(UsageError):
    """Raised if ranks that compute one layer together received different batches."""


class StorageError(DeepSeekZeroError, OSError):
    """Raised if a disk with states fails, is full, or returns other bytes than were written.

    Such bytes are never used.
    """


class OutOfMemoryError(DeepSeekZeroError, MemoryError):
    """Raised if memory for a buffer cannot be allocated.

    It is raised before anything is written into the buffer.
    """


class CheckpointError(DeepSeekZeroError):
    """Raised if a checkpoint is missing, incomplete or does not fit the model."""


LONGEST_SHOWN = 80
_DEEPEST_SHOWN = 4


def article(value: Any) -> str:
    """Return the type of a value with its article: "an int", "a Tensor"."""
    name = type(value).__name__
    return f"{'an' if name[:1].lower() in 'aeiou' else 'a'} {name}"


def shown(value: Any, limit: int = LONGEST_SHOWN) -> str:
    """Return a value for a message, like `repr` but limited in length.

    It never raises, whatever the value's own `repr` does.

    Args:
        value: Any object.
        limit: The largest number of characters.

    Returns:
        Text of at most `limit` characters.
    """
    try:
        text = "".join(_pieces(value, limit, _DEEPEST_SHOWN))
    except Exception:  # a foreign mapping or sequence that cannot be iterated
        text = f"<{type(value).__name__}>"
    return text if len(text) <= limit else text[: limit - 3] + "..."


def _pieces(value: Any, limit: int, depth: int) -> Iterator[str]:
    """Yield `repr` in pieces, and stop when `limit` characters are exceeded."""
    if isinstance(value, str | bytes):
        yield repr(value[: limit + 1])
    elif isinstance(value, Mapping) and depth:
        entries = ((key, ": ", inner) for key, inner in value.items())
        yield from _enclosed("{", entries, "}", limit, depth)
    elif isinstance(value, list | tuple) and depth:
        opening = "("
        closing = ",)" if len(value) == 1 else ")"
        if isinstance(value, list):
            opening = "["
            closing = "]"
        yield from _enclosed(opening, ((inner,) for inner in value), closing, limit, depth)
    elif isinstance(value, Mapping | list | tuple):
        yield "..."
    else:
        try:
            yield repr(value)[: limit + 1]
        except Exception:  # a foreign repr, or a number of too many digits
            yield f"<{type(value).__name__}>"


def _enclosed(
    opening: str, entries: Iterable[tuple[Any, ...]], closing: str, limit: int, depth: int
) -> Iterator[str]:
    separator = opening
    used = 0
    for entry in entries:
        yield separator
        used += len(separator)
        separator = ", "
        for number, part in enumerate(entry):
            for piece in [part] if number % 2 else _pieces(part, limit, depth - 1):
                used += len(piece)
                yield piece
        if used > limit:
            return
    yield closing if separator != opening else opening + closing
