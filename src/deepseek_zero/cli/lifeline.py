"""Ends the launcher when whoever started it is gone without a signal: an ssh connection that broke
or was killed.

sshd tells a command without a terminal nothing; it closes the pipes.  The end of standard input
alone says little: `ssh -n`, cron, CI and a shell's `&` give an input that has ended before the
command begins, and `echo y | ...` one that ends soon.  So what counts is

    asked for (--end-with-input)   standard input's other end is closed
    else                           the same, and nobody reads standard output and error

The second is a launcher that nobody can hear.  Nothing is read from standard input, which belongs
to the first rank. A launcher that was told to survive a hang-up (nohup) does, and one with a
terminal gets SIGHUP from the system.
"""

from __future__ import annotations

import os
import select
import signal
import stat
import sys
import threading
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from deepseek_zero.base.errors import UsageError
from deepseek_zero.base.log import logger

POLL_SECONDS = 0.5
DEAF_SECONDS = 10.0
"""How long the launcher may take to end after its signal; it may be waiting for other machines,
deaf to signals.
"""

INPUT = 0
OUTPUTS = (1, 2)
STREAMS = (INPUT, *OUTPUTS)
# Of a socket; an sshd may use one for input and output
_NO_MORE_INPUT = getattr(select, "POLLRDHUP", 0)


def is_connected(stream: int) -> bool:
    """Return whether a file descriptor is an end of a pipe or a socket, of which the other end may
    be closed.
    """
    try:
        mode = os.fstat(stream).st_mode
    except OSError:  # closed by whoever started us
        return False
    return stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode)


def are_closed(streams: Sequence[int]) -> bool:
    """Return whether nothing comes in from, or nobody reads at, the other end of each of these
    pipes and sockets.
    """
    watch = select.poll()
    for stream in streams:
        # A hang-up is told unasked
        events = _NO_MORE_INPUT if stream == INPUT else 0
        watch.register(stream, events)
    return len(watch.poll(0)) == len(streams)


@dataclass
class Lifeline:
    """Watches the streams in a thread; sends this process SIGHUP once they are closed.  Use as a
    context manager.

    streams: none, and nothing is watched.
    """

    streams: tuple[int, ...]
    _left: threading.Event = field(default_factory=threading.Event)

    @classmethod
    def of_this_process(cls, *, needs_input: bool) -> Lifeline:
        """Return what this process hangs on; UsageError where it needs an input, and has none that
        can end.
        """
        if needs_input:
            if not is_connected(INPUT):
                raise UsageError(
                    "--end-with-input: standard input is no connection.",
                    "It is a file, a terminal or closed, and will not end with whoever started "
                    "this command.",
                    "start it with a pipe, as `ssh host deepseek-zero run ...` does, or leave the "
                    "option out.",
                )
            return cls((INPUT,))
        survives = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
        streams = () if survives or not all(map(is_connected, STREAMS)) else STREAMS
        return cls(streams)

    def __enter__(self) -> Lifeline:
        if self.streams:
            threading.Thread(target=self._watch, name="lifeline", daemon=True).start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._left.set()

    def _watch(self) -> None:
        while not self._left.wait(POLL_SECONDS):
            if are_closed(self.streams):
                break
        else:
            return
        _speak_to_nobody()
        logger.warning("standard input has ended: ending all ranks here")
        os.kill(os.getpid(), signal.SIGHUP)
        if not self._left.wait(DEAF_SECONDS):
            os._exit(128 + signal.SIGHUP)


def _speak_to_nobody() -> None:
    """Give standard output and error another place where nobody reads them: a write to them would
    be an error.
    """
    for stream in OUTPUTS:
        if is_connected(stream) and are_closed([stream]):
            with suppress(OSError, ValueError):
                (sys.stdout if stream == 1 else sys.stderr).flush()
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, stream)
            os.close(null)
