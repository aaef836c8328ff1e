"""Rank-aware logging. Nothing else in the library prints.

`logger.info` and the other methods log on every rank, `log_once` on rank 0 only. The logger is the
standard one named "deepseek_zero". Importing the package sets neither a handler nor a level. The
first call of the API does (`speak`), unless the program has configured logging.
"""

from __future__ import annotations

import logging
import os
import sys
from functools import cache

from . import world
from .errors import UsageError
from .world import is_rank_zero

logger = logging.getLogger("deepseek_zero")


LEVELS = {
    name: getattr(logging, name.upper())
    for name in ("debug", "info", "warning", "error", "critical")
}
LEVEL = "DEEPSEEK_ZERO_LOG_LEVEL"  # the level if the program has not configured logging


class _RankFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        where = f" rank {world.rank()}" if world.size() > 1 else ""
        return f"[deepseek_zero{where}] {record.levelname}: {record.getMessage()}"


class _StderrHandler(logging.StreamHandler):  # type: ignore[type-arg]
    """A handler that reads `sys.stderr` for each record, because programs and tests replace it."""

    def emit(self, record: logging.LogRecord) -> None:
        self.stream = sys.stderr
        super().emit(record)


def speak() -> None:
    """Log to stderr from now on, unless the program has configured logging.

    A second call has no effect.

    Raises:
        UsageError: The environment names a level that does not exist.
    """
    if not logger.hasHandlers():
        install()


def install() -> None:
    """Write the library's log to stderr, whatever else the program logs.

    Raises:
        UsageError: The environment names a level that does not exist.
    """
    handler = _StderrHandler()
    handler.setFormatter(_RankFormatter())
    set_first_level("INFO")
    logger.addHandler(handler)
    logger.propagate = False


def set_first_level(level: str) -> None:
    """Set the logger's level unless the program or the environment has set one.

    Raises:
        UsageError: The environment names a level that does not exist.
    """
    if logger.level != logging.NOTSET:
        return
    stated = os.environ.get(LEVEL) or level
    try:
        logger.setLevel(stated.upper())
    except ValueError:
        raise UsageError(
            f"{LEVEL}={stated[:80]!r} is not a level of the log.",
            "It sets the least important messages that are logged.",
            f"set it to one of {', '.join(LEVELS)}, or unset it.",
        ) from None


@cache
def log_first(message: str, level: int = logging.INFO) -> None:
    """Log a message on rank 0, once per process.

    Args:
        message: Text to log.
        level: Level of the standard `logging` module.
    """
    log_once(message, level)


def log_once(message: str, level: int = logging.INFO) -> None:
    """Log a message on rank 0 only.

    Args:
        message: Text to log.
        level: Level of the standard `logging` module.
    """
    if is_rank_zero():
        logger.log(level, message)
