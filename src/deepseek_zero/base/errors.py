"""The one error family.

Every message says what happened, why, and what to do.  Nothing else in the house raises a bare RuntimeError at users.
"""

from __future__ import annotations


class DeepSeekZeroError(RuntimeError):
    """Base of every error this library raises on purpose.

    what: the fact, with names and numbers.  why: the reason, if it is not plain.  fix: what the reader can do now.
    """

    def __init__(self, what: str, why: str = "", fix: str = "") -> None:
        self.what, self.why, self.fix = what, why, fix
        parts = [what.rstrip()]
        if why:
            parts.append(f"Why: {why}")
        if fix:
            parts.append(f"What to do: {fix}")
        super().__init__("\n  ".join(parts))

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (self.what, self.why, self.fix)


class ConfigError(DeepSeekZeroError, ValueError):
    """The configuration cannot be used; lists every problem found, not only the first."""


DeepSpeedConfigError = ConfigError  # DeepSpeed's word for it


class NotBuiltError(DeepSeekZeroError, NotImplementedError):
    """A feature that is known and left out on purpose, or planned; never ignored silently."""


class UnknownNameError(NotBuiltError, AttributeError):
    """An attribute that exists in DeepSpeed and not here: an AttributeError too, so that hasattr() answers False."""


class AtRestError(DeepSeekZeroError):
    """A sharded parameter (or gradient) was used while this rank holds only its slice."""


class PeerError(DeepSeekZeroError):
    """Another rank died, raised, or called a different collective; raised on every living rank, by name."""


class ModelMismatchError(DeepSeekZeroError):
    """Ranks disagree about names, shapes, dtypes, order or settings; found before any data moves."""


class UsageError(DeepSeekZeroError):
    """A call out of order or with arguments that cannot be right."""


class StorageError(DeepSeekZeroError, OSError):
    """A disk that holds states refused, is full, or gave back other bytes than it was given; nobody computes with
    them.
    """


class OutOfMemoryError(DeepSeekZeroError, MemoryError):
    """Memory that a buffer needs cannot be had; raised before anything is written into it."""


class CheckpointError(DeepSeekZeroError):
    """A checkpoint is missing, incomplete or does not fit the model."""
