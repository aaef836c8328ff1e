"""Save when the job is asked to end: a signal on one rank makes all ranks save.

    signal on any rank -> a field of its next step message (optim/step_message.py) -> the same
    decision on every rank, after the same step -> save_checkpoint -> SystemExit(85) from
    engine.step()

It needs no collective of its own. A rank that has ended sends no message, so the remaining ranks
never save. If our launcher ends them, it marks that first (base/launch.py), and the signal keeps
its original meaning.
"""

from __future__ import annotations

import mmap
import os
import signal
import time
from contextlib import suppress
from types import FrameType
from typing import TYPE_CHECKING, Any

from ..base.errors import UsageError
from ..base.launch import SAVED_EXIT_CODE, is_ending, report_saving_signals
from ..base.log import log_once
from ..checkpoint.contents import SaveSettings
from ..optim.step_message import StepMessage
from .saving import Trainer, save_checkpoint

if TYPE_CHECKING:  # as in engine.py
    from ..config.schema import SaveOnSignal

FORKED_PATIENCE_SECONDS = 0.5
"""How long after a forked worker its rank may get the same signal."""
FIELD = "preemption signal"  # name of the field of the step message


class Preemption:
    """Saves a checkpoint and ends the run after a rank has received a signal.

    Both happen at the end of a step, on every rank.

    Args:
        settings: The section `checkpoint.save_on_signal` of the configuration. It contains the
            names of the signals and the path of the checkpoint.
    """

    def __init__(self, settings: SaveOnSignal) -> None:
        self.settings = settings
        self._signal_number = 0  # the signal that was received, or 0
        self._process = 0  # the process that watches; a forked data-loader worker does not
        self._is_signalled = mmap.mmap(-1, 1)  # shared with forked processes
        self._before: dict[int, Any] = {}

    def add_to(self, message: StepMessage) -> None:
        """Add the first signal that this rank has received to its step message.

        Args:
            message: The step message, to which the number of the signal is added. It is 0 if this
                rank has received no signal.
        """
        message.add(FIELD, [self._signal_number])

    def watch(self) -> None:
        """Install a handler for each signal in the settings.

        The handler records the signal for `add_to`, except in a forked process and while this
        library's launcher ends the ranks. It also calls the handler that it replaces, if that is a
        Python function. The method reports to the launcher, if there is one, that this rank saves
        after these signals.

        Raises:
            UsageError: A signal has a handler that was not set from Python, or the method was not
                called in the main thread.
        """
        numbers = [signal.Signals[name] for name in self.settings.signals]
        self._before = {int(number): signal.getsignal(number) for number in numbers}
        foreign = [
            signal.Signals(number).name for number, before in self._before.items() if before is None
        ]
        if foreign:
            raise UsageError(
                f"{foreign[0]} has a handler that was not set from Python.",
                "checkpoint.save_on_signal calls the previous handler, and this one cannot be "
                "called.",
                "remove the signal from checkpoint.save_on_signal.signals, or set the handler "
                "with signal.signal.",
            )
        try:
            for number in numbers:
                signal.signal(number, self._on_signal)
        except ValueError:
            raise UsageError(
                "checkpoint.save_on_signal needs the main thread.",
                "Python allows no other thread to handle signals.",
                "initialize the engine in the main thread, or remove checkpoint.save_on_signal.",
            ) from None
        self._process = os.getpid()
        report_saving_signals(self.settings.signals)

    def release(self) -> None:
        """Restore the signal handlers that `watch` replaced.

        If a program has installed another handler for a signal since then, the handler of that
        signal is not restored, because the newer handler may call the handler of this object.
        Outside the main thread no handler is restored, but the handlers stop requesting a save.
        """
        self._process = 0
        with suppress(ValueError):  # raised outside the main thread; finalizers run in any thread
            for number in self._ours():
                signal.signal(number, self._before[number])

    def act(self, engine: Trainer) -> None:
        """Save a checkpoint and raise `SystemExit` if a rank received a signal.

        If no step message of this step contains a signal, nothing is done. Otherwise, the
        checkpoint, with the engine's `client_state`, is saved to the directory
        `checkpoint.save_on_signal.path`. Rank 0 logs the path of the checkpoint. Afterwards, this
        process ignores the signals that still have the handler of `watch`.

        Args:
            engine: The engine whose state is saved. It must have an optimizer, and its step has
                just ended.

        Raises:
            SystemExit: A checkpoint has been saved; the exit code is 85.
            CheckpointError: A rank could not write the checkpoint. Every rank raises the error.
            PeerError: Another rank failed or issued a different collective.

        Note:
            Collective: every rank must call it after each step.
        """
        assert engine.optimizer is not None and engine.optimizer.last is not None
        number = int(max(asked for (asked,) in engine.optimizer.last.verdict.fields[FIELD]))
        if not number:
            return
        client = dict(engine.client_state()) if engine.client_state is not None else {}
        assert self.settings.path is not None
        settings = SaveSettings(tag_validation=engine.config.checkpoint.tag_validation)
        path = save_checkpoint(engine, self.settings.path, None, client, settings)
        log_once(
            f"{signal.Signals(number).name}: saved {path}; ending with exit code {SAVED_EXIT_CODE}."
        )
        # The same request may come twice. It must not change the exit code now.
        for each in self._ours():
            signal.signal(each, signal.SIG_IGN)
        raise SystemExit(SAVED_EXIT_CODE)

    def _ours(self) -> list[int]:
        return [number for number in self._before if signal.getsignal(number) == self._on_signal]

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        before = self._before[number]
        forked = self._process not in (0, os.getpid())
        if forked:
            # Slurm signals every process of the job. If the rank got the signal too, the worker
            # stays, because a rank that loses its data workers would not reach its next step.
            time.sleep(FORKED_PATIENCE_SECONDS)
            if self._is_signalled[0]:
                return
        watches = bool(self._process) and not forked and not is_ending()
        if watches:
            self._signal_number = self._signal_number or number
            self._is_signalled[0] = 1
        if callable(before):
            before(number, frame)
        elif not watches and before == signal.SIG_DFL:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
