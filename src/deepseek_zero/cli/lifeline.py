"""End the launcher after the process that started it is gone.

If an ssh connection without a terminal breaks, sshd sends no signal to the command and only closes
its pipes. The end of standard input is not sufficient evidence. `ssh -n`, cron, CI and a shell's
`&` start a command with an input that has already ended, and the input of `echo y | ...` ends soon.
The launcher is ended if

    with --end-with-input    the other end of standard input is closed
    otherwise                the other ends of standard input, output and error are closed

Nothing is read from standard input, which belongs to the first rank. A launcher that ignores SIGHUP
(nohup) is not ended. A launcher with a terminal gets SIGHUP from the system.
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
"""How long the launcher may take to end after its signal.

While it waits for other machines, it does not react to signals.
"""

INPUT = 0
OUTPUTS = (1, 2)
STREAMS = (INPUT, *OUTPUTS)
# For sockets; sshd may use a single socket for input and output
_NO_MORE_INPUT = getattr(select, "POLLRDHUP", 0)


def is_connected(stream: int) -> bool:
    """Return whether a file descriptor is a pipe or socket, whose other end may close."""
    try:
        mode = os.fstat(stream).st_mode
    except OSError:  # closed by the parent process
        return False
    return stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode)


def are_closed(streams: Sequence[int]) -> bool:
    """Return whether the other end of each pipe or socket is closed.

    For standard input, this means that no more data arrive. For outputs, it means that there is no
    reader.
    """
    watch = select.poll()
    for stream in streams:
        # POLLHUP and POLLERR are always reported
        events = _NO_MORE_INPUT if stream == INPUT else 0
        watch.register(stream, events)
    return len(watch.poll(0)) == len(streams)


@dataclass
class Lifeline:
    """Watch streams in a thread, and send this process SIGHUP when they are closed.

    Use it as a context manager.

    Attributes:
        streams: File descriptors to watch; if empty, nothing is watched.
    """

    streams: tuple[int, ...]
    _left: threading.Event = field(default_factory=threading.Event)

    @classmethod
    def of_this_process(cls, *, needs_input: bool) -> Lifeline:
        """Return a lifeline over the streams whose end means that the launcher is gone.

        Args:
            needs_input: Whether only standard input is watched (--end-with-input).

        Raises:
            UsageError: `needs_input` is set and standard input is neither a pipe nor a socket.
        """
        if needs_input:
            if not is_connected(INPUT):
                raise UsageError(
                    "--end-with-input: standard input is not a connection.",
                    "It is a file, a terminal or closed, so it does not end when the process that "
                    "started this command ends.",
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
        _discard_unread_output()
        logger.warning("standard input has ended: ending all ranks here")
        os.kill(os.getpid(), signal.SIGHUP)
        if not self._left.wait(DEAF_SECONDS):
            os._exit(128 + signal.SIGHUP)


def _discard_unread_output() -> None:
    """Redirect outputs without a reader to /dev/null, because writing would fail."""
    for stream in OUTPUTS:
        if is_connected(stream) and are_closed([stream]):
            with suppress(OSError, ValueError):
                (sys.stdout if stream == 1 else sys.stderr).flush()
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, stream)
            os.close(null)
