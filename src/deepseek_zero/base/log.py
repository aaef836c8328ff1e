"""Rank-aware logging; nothing else in the house prints.

`log` speaks on every rank; `log_once` speaks on rank 0 only.  The logger is the standard one named "deepseek_zero",
so a program that configures logging keeps its own format.  Called by every layer.
"""

from __future__ import annotations

import logging
import os
import sys
from functools import cache

logger = logging.getLogger("deepseek_zero")


class _RankFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        rank, world = os.environ.get("RANK", "0"), os.environ.get("WORLD_SIZE", "1")
        where = f" rank {rank}" if world != "1" else ""
        return f"[deepseek_zero{where}] {record.levelname}: {record.getMessage()}"


class _StderrHandler(logging.StreamHandler):  # type: ignore[type-arg]
    """Looks sys.stderr up at each record, so that a program (or a test) that replaces it is followed."""

    def emit(self, record: logging.LogRecord) -> None:
        self.stream = sys.stderr
        super().emit(record)


def _install() -> None:
    handler = _StderrHandler()
    handler.setFormatter(_RankFormatter())
    logger.addHandler(handler)
    logger.setLevel(os.environ.get("DEEPSEEK_ZERO_LOG_LEVEL", "INFO").upper())
    logger.propagate = False


_install()


def is_rank_zero() -> bool:
    """True on the rank that speaks for all; needs no process group (reads RANK, which every launcher sets)."""
    return os.environ.get("RANK", "0") == "0"


@cache
def log_first(message: str) -> None:
    """Log on rank 0, the first time this is said in this process."""
    log_once(message)


def log_once(message: str, level: int = logging.INFO) -> None:
    """Log on rank 0 only."""
    if is_rank_zero():
        logger.log(level, message)
