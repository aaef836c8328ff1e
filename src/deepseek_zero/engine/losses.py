"""Find the losses of a step in all calls with which a program differentiates them.

`engine.backward` receives its loss as an argument. A hook runs at every other backward of the
process. If the backward reaches the model of an engine, the differentiated tensor is a loss of that
engine.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from ..base.device import hook_every_backward


class Losses:
    """Records the losses that a program differentiates through one engine's model.

    Args:
        reached: A function that returns a value that changes with each backward through the
            engine's model.
        found: Called with each loss, a scalar without a gradient.
    """

    def __init__(self, reached: Callable[[], object], found: Callable[[Tensor], None]) -> None:
        self.reached = reached
        self._found = found
        self.is_paused = False
        _HERE.losses.add(self)
        hook_every_backward(_find_losses)

    def scaled(self, scaled: Tensor, loss: Tensor) -> None:
        """Record the loss from which a scaled tensor was computed.

        The record is dropped when the tensor is freed.

        Args:
            scaled: The scaled loss, which the program differentiates.
            loss: The loss before scaling, which is recorded if `scaled` is differentiated.
        """
        scaled.unscaled_loss = loss.detach()  # type: ignore[attr-defined]

    def differentiated(self, loss: Any) -> None:
        """Record the loss of a backward; tensors that are not scalars are ignored."""
        if isinstance(loss, (list, tuple)) and len(loss) == 1:
            loss = loss[0]
        if isinstance(loss, Tensor) and loss.numel() == 1:
            self._found(getattr(loss, "unscaled_loss", loss).detach())

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Return a context in which the hook ignores backwards, because the engine runs them."""
        before = self.is_paused
        self.is_paused = True
        try:
            yield
        finally:
            self.is_paused = before


class _Here(threading.local):
    """The engines of this thread."""

    def __init__(self) -> None:
        self.losses: weakref.WeakSet[Losses] = weakref.WeakSet()


_HERE = _Here()


def _find_losses(roots: list[Tensor]) -> tuple[list[Tensor], Callable[[], None]]:
    """Return the roots of a backward, and a function to call after it.

    The function records the roots that are losses of an engine.
    """
    watching = [(each, each.reached()) for each in _HERE.losses if not each.is_paused]

    def after() -> None:
        for losses, before in watching:
            if losses.reached() != before:
                losses.differentiated(roots)

    return roots, after
