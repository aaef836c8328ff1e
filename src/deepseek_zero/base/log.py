"""Rank-aware logging; nothing else in the house prints.

`logger.info` and its kin speak on every rank, `log_once` on rank 0 only.  The logger is the
standard one named "deepseek_zero".  Importing gives it no handler and no level.  The first use of a
door does (`speak`), and only where
the program has not configured logging: a program that has keeps its own handlers, format and level.
"""

from __future__ import annotations

import logging
import os
import sys
from functools import cache

from . import world
from .world import is_rank_zero

logger = logging.getLogger("deepseek_zero")


LEVELS = {
    name: getattr(logging, name.upper())
    for name in ("debug", "info", "warning", "error", "critical")
}
LEVEL = "DEEPSEEK_ZERO_LOG_LEVEL"  # what to say where the program has not configured logging


class _RankFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        where = f" rank {world.rank()}" if world.size() > 1 else ""
        return f"[deepseek_zero{where}] {record.levelname}: {record.getMessage()}"


class _StderrHandler(logging.StreamHandler):  # type: ignore[type-arg]
    """Looks sys.stderr up at each record, so that a program (or a test) that replaces it is
    followed.
    """

    def emit(self, record: logging.LogRecord) -> None:
        self.stream = sys.stderr
        super().emit(record)


def speak() -> None:
    """Let the library's lines be seen on stderr, unless the program has configured logging; twice
    is harmless.
    """
    if not logger.hasHandlers():
        install()


def install() -> None:
    """Write the library's lines to stderr, whatever else the program logs."""
    handler = _StderrHandler()
    handler.setFormatter(_RankFormatter())
    logger.addHandler(handler)
    set_first_level("INFO")
    logger.propagate = False


def set_first_level(level: str) -> None:
    """Set the level of the library's logger if neither the program nor the environment has set
    one.
    """
    if logger.level == logging.NOTSET:
        logger.setLevel(os.environ.get(LEVEL, level).upper())


@cache
def log_first(message: str, level: int = logging.INFO) -> None:
    """Log on rank 0, the first time this is said in this process."""
    log_once(message, level)


def log_once(message: str, level: int = logging.INFO) -> None:
    """Log on rank 0 only."""
    if is_rank_zero():
        logger.log(level, message)
