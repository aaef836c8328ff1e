"""Communication between a launcher and its ranks, except for signals.

It consists of one exit code, a few empty files, and environment variables:

    85                                     exit code of ranks that saved on request and ended
    $DEEPSEEK_ZERO_ATTEMPT.saves.SIGTERM   written by a rank: it saves first on this signal
    $DEEPSEEK_ZERO_ATTEMPT.ending          written by the launcher: signals now end the ranks
    $DEEPSEEK_ZERO_MESH                    axes from the launcher's command line: pp=2,tp=2
    $DEEPSEEK_ZERO_SECRET_FILE             file with the 32 secret bytes of the job
    $DEEPSEEK_ZERO_INTERFACE               interface or address at which ranks listen
    $DEEPSEEK_ZERO_PORTS                   range of ports for listeners: 29600-29700
    $DEEPSEEK_ZERO_TLS                     1 encrypts connections between hosts
    $DEEPSEEK_ZERO_STORE                   address of the launcher's key-value store, and the
                                           MASTER_PORT of its ranks: 10.0.0.1:29500/29501
    $DEEPSEEK_ZERO_DEAD_AFTER              seconds of silence after which another host is lost

The launcher sets all of these variables; users may set those of the secret file, the interface, the
ports and TLS. The first variable contains a path that is different for each start of the ranks.
Other launchers do not set it: then no file is written, and every signal is a request. Standard
library only.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

from .errors import UsageError

# The number of ERESTART on Linux, with the same meaning in HTCondor's manual; it is not 128 plus a
# signal
SAVED_EXIT_CODE = 85

ATTEMPT = "DEEPSEEK_ZERO_ATTEMPT"
SAVES = ".saves."
ENDING = ".ending"
MESH = "DEEPSEEK_ZERO_MESH"
SECRET_FILE = "DEEPSEEK_ZERO_SECRET_FILE"
SECRET_BYTES = 32
INTERFACE = "DEEPSEEK_ZERO_INTERFACE"
PORTS = "DEEPSEEK_ZERO_PORTS"
STORE = "DEEPSEEK_ZERO_STORE"
TLS = "DEEPSEEK_ZERO_TLS"
DEAD_AFTER = "DEEPSEEK_ZERO_DEAD_AFTER"
DEFAULT_DEAD_AFTER = 10.0
LEAST_DEAD_AFTER = 2.0
TELL_AFTER = 5.0  # seconds until the log names a silent host or a stopped rank
GLOO_INTERFACE = "GLOO_SOCKET_IFNAME"  # read by gloo in torch
MESH_OPTIONS = "the launcher's command line"  # for messages, if the mesh is that of `MESH`


def dead_after() -> float:
    """Return the seconds of silence after which another host is lost; inf means never.

    Raises:
        UsageError: DEEPSEEK_ZERO_DEAD_AFTER is not a number, or too small.
    """
    text = os.environ.get(DEAD_AFTER, "")
    try:
        seconds = float(text) if text else DEFAULT_DEAD_AFTER
        return checked_dead_after(seconds, DEAD_AFTER)
    except ValueError:
        raise UsageError(
            f"{DEAD_AFTER}={text} is not a number.", fix="set it to seconds, or inf for never."
        ) from None


def checked_dead_after(seconds: float, name: str) -> float:
    """Return `seconds` if the limit is long enough.

    Args:
        seconds: The limit in seconds.
        name: The variable or option that contained it, for the message.

    Returns:
        The limit in seconds.

    Raises:
        UsageError: The limit is too short.
    """
    if not seconds >= LEAST_DEAD_AFTER:  # also true for NaN
        raise UsageError(
            f"{name} is {seconds:g}.",
            "Hosts send each other a heartbeat every second.",
            f"set it to {LEAST_DEAD_AFTER:g} s or more, or inf for never.",
        )
    return seconds


def place_of_store() -> str | None:
    """Return the address of our launcher's key-value store, which detects lost hosts.

    None under another launcher, including one that a rank of ours started: it has another
    MASTER_PORT.
    """
    place, _, master_port = os.environ.get(STORE, "").partition("/")
    return place if place and os.environ.get("MASTER_PORT") == master_port else None


def uses_tls() -> bool:
    """Return whether connections between hosts are encrypted."""
    return os.environ.get(TLS, "") not in ("", "0")


def mark(attempt: str, word: str) -> None:
    """Create the file `attempt + word`, which the launcher or the ranks check for.

    Args:
        attempt: Path in the environment variable `ATTEMPT`, the prefix of the file's path.
        word: End of the file's path: `ENDING`, or `SAVES` with the name of a signal.
    """
    Path(attempt + word).touch()


def is_marked(attempt: str, word: str) -> bool:
    """Return whether the file `attempt + word` exists.

    Args:
        attempt: Path in the environment variable `ATTEMPT`, the prefix of the file's path.
        word: End of the file's path: `ENDING`, or `SAVES` with the name of a signal.

    Returns:
        True after any process has called `mark` with these arguments.
    """
    return os.path.exists(attempt + word)


def report_saving_signals(signals: Iterable[str]) -> None:
    """Report to the launcher, if it is ours, that this rank saves on these signals."""
    if attempt := os.environ.get(ATTEMPT):
        for name in signals:
            mark(attempt, SAVES + name)


def is_ending() -> bool:
    """Return whether our launcher is ending the ranks, for example after one died.

    Safe in signal handlers.
    """
    attempt = os.environ.get(ATTEMPT)
    return bool(attempt) and is_marked(str(attempt), ENDING)
