"""Logging on selected ranks, memory usage, and a loader that restarts."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import psutil
import torch

from ..base import world
from ..base.device import allocated_bytes, default_device
from ..base.errors import UsageError
from ..base.log import LEVELS, logger, speak


def log_dist(message: str, ranks: Sequence[int] | None = None, level: int = logging.INFO) -> None:
    """Log a message with the library's logger on selected ranks.

    Args:
        message: Text to log.
        ranks: World ranks that log it. None, an empty list, or a list that contains -1 means every
            rank.
        level: Level of the standard `logging` module.
    """
    speak()
    if not ranks or -1 in ranks or world.rank() in ranks:
        logger.log(level, message)


def set_log_level_from_string(level: str) -> None:
    """Set the level of the library's logger from a name such as "info".

    Args:
        level: "debug", "info", "warning", "error" or "critical", in upper or lower case.

    Raises:
        UnknownLevelError: `level` is none of these names.
    """
    logger.setLevel(get_log_level_from_string(level))


class UnknownLevelError(UsageError, ValueError):
    """Raised if a string names no log level.

    Also a ValueError, as in DeepSpeed.
    """


def get_log_level_from_string(log_level_str: str) -> int:
    """Return the numeric level for "debug", "info", "warning", "error" or "critical".

    Raises:
        UnknownLevelError: The string names no level.
    """
    if log_level_str.lower() not in LEVELS:
        raise UnknownLevelError(
            f"{log_level_str!r} is no level of the log.", fix=f"name one of {', '.join(LEVELS)}."
        )
    return int(LEVELS[log_level_str.lower()])


def see_memory_usage(message: str, force: bool = False) -> None:
    """Log the memory that this process and its host use, in GiB, on every calling rank.

    On a GPU, the line has the memory that torch has allocated and reserved, and the peak of the
    allocated memory. On a CPU, it has the resident memory of this process instead.

    Args:
        message: Text at the start of the logged line.
        force: If false, the call has no effect, as in DeepSpeed.
    """
    if not force:
        return
    speak()
    device = default_device()
    host = psutil.virtual_memory()
    parts = [f"allocated {allocated_bytes(device) / 2**30:.2f} GiB"]
    if device.type == "cuda":
        parts.append(f"peak {torch.cuda.max_memory_allocated(device) / 2**30:.2f} GiB")
        parts.append(f"reserved {torch.cuda.memory_reserved(device) / 2**30:.2f} GiB")
    parts.append(f"host in use {host.used / 2**30:.2f} GiB ({host.percent:.0f} %)")
    logger.info("%s: %s", message, ", ".join(parts))


class RepeatingLoader:
    """An iterator over a loader that starts a new pass whenever the loader ends.

    `next()` raises StopIteration only if the loader is empty.

    Args:
        loader: Any iterable that can be iterated several times.
    """

    def __init__(self, loader: Iterable[Any]) -> None:
        self.loader = loader
        self.data_iter: Iterator[Any] = iter(loader)

    def __iter__(self) -> RepeatingLoader:
        return self

    def __next__(self) -> Any:
        try:
            return next(self.data_iter)
        except StopIteration:
            self.data_iter = iter(self.loader)
            return next(self.data_iter)
