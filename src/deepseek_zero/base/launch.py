"""What a launcher and its ranks tell each other beside signals: one exit code, a few empty files,
and a mesh.

    85                                     exit code of ranks that were asked to end, saved together
                                           and left
    $DEEPSEEK_ZERO_ATTEMPT.saves.SIGTERM   a rank: asked to end by this signal, I save first; give
                                           me time
    $DEEPSEEK_ZERO_ATTEMPT.ending          the launcher: what I send now is the end, not a request
    $DEEPSEEK_ZERO_MESH                    the launcher: the axes my command line named, as
                                           pp=2,tp=2
    $DEEPSEEK_ZERO_SECRET_FILE             the launcher, or the user: 32 bytes that the ranks of
                                           this job alone know
    $DEEPSEEK_ZERO_INTERFACE               the launcher, or the user: the interface or address at
                                           which ranks listen
    $DEEPSEEK_ZERO_PORTS                   the launcher, or the user: the ports they choose from,
                                           as 29600-29700
    $DEEPSEEK_ZERO_TLS                     the launcher, or the user: 1 encrypts what leaves a host
    $DEEPSEEK_ZERO_STORE                   the launcher: where its store listens, and the
                                           MASTER_PORT of its ranks, as 10.0.0.1:29500/29501
    $DEEPSEEK_ZERO_DEAD_AFTER              the launcher: seconds of silence after which another
                                           host is lost

The first variable holds a path of the launcher's, another one for each start of the ranks.  Under
another launcher it is not set: then nothing is written, and every signal is a request.  Standard
library only.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

from .errors import UsageError

# Linux's number for ERESTART, and what HTCondor's manual takes for the same; no signal plus 128
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
TELL_AFTER = 5.0  # seconds until a line names a host that is silent, or a rank that is stopped
GLOO_INTERFACE = "GLOO_SOCKET_IFNAME"  # torch's own
MESH_OPTIONS = "the launcher's command line"  # in messages, where the mesh comes from that variable


def dead_after() -> float:
    """Return the seconds of silence after which another host is lost; inf: never.

    Raises `UsageError` where DEEPSEEK_ZERO_DEAD_AFTER is no such number.
    """
    text = os.environ.get(DEAD_AFTER, "")
    try:
        seconds = float(text) if text else DEFAULT_DEAD_AFTER
        return checked_dead_after(seconds, DEAD_AFTER)
    except ValueError:
        raise UsageError(
            f"{DEAD_AFTER}={text} is no number.", fix="give seconds, or inf for never."
        ) from None


def checked_dead_after(seconds: float, name: str) -> float:
    """Return the seconds; raise `UsageError` if they are too few. name: of what said so."""
    if not seconds >= LEAST_DEAD_AFTER:  # not a number, too
        raise UsageError(
            f"{name} is {seconds:g}.",
            "Hosts hear of each other every second.",
            f"give {LEAST_DEAD_AFTER:g} s or more, or inf for never.",
        )
    return seconds


def place_of_store() -> str | None:
    """Return where the store of our launcher listens, which watches the hosts of this job; None
    under another one, also where a rank of ours has started that one: it says another MASTER_PORT.
    """
    place, _, master_port = os.environ.get(STORE, "").partition("/")
    return place if place and os.environ.get("MASTER_PORT") == master_port else None


def uses_tls() -> bool:
    """Return whether this job's own connections are encrypted."""
    return os.environ.get(TLS, "") not in ("", "0")


def mark(attempt: str, word: str) -> None:
    """Leave a word for the other side."""
    Path(attempt + word).touch()


def is_marked(attempt: str, word: str) -> bool:
    return os.path.exists(attempt + word)


def say_that_we_save(signals: Iterable[str]) -> None:
    """Tell our launcher, if there is one, that this rank saves when it gets one of these
    signals.
    """
    if attempt := os.environ.get(ATTEMPT):
        for name in signals:
            mark(attempt, SAVES + name)


def is_ending() -> bool:
    """Return whether our launcher ends the ranks, as it does when one of them is gone; safe within
    signal handlers.
    """
    attempt = os.environ.get(ATTEMPT)
    return bool(attempt) and is_marked(str(attempt), ENDING)
