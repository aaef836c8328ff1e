"""Finds the losses of a step, whichever way its program differentiates them.

`engine.backward` is given its loss. A plain `loss.backward()` calls `torch.autograd.backward`, which is wrapped when
the first engine starts: what it is given is a loss of the engine whose model the backward has reached.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any

import torch
from torch import Tensor


class Losses:
    """Finds the losses of one engine.

    Args:
        reached: Returns something that differs after a backward through the engine's model.
        found: Called with each loss, a scalar without a gradient.
    """

    def __init__(self, reached: Callable[[], object], found: Callable[[Tensor], None]) -> None:
        self.reached, self._found = reached, found
        self.is_paused = False
        self._scaled: Callable[[], Tensor | None] = lambda: None
        self._unscaled: Tensor | None = None
        _watch(self)

    def scaled(self, scaled: Tensor, loss: Tensor) -> None:
        """Remember which loss a tensor was scaled from."""
        self._scaled, self._unscaled = weakref.ref(scaled), loss.detach()

    def differentiated(self, loss: Any) -> None:
        """Take the loss of a backward; what is no scalar is none."""
        if isinstance(loss, (list, tuple)) and len(loss) == 1:
            loss = loss[0]
        if isinstance(loss, Tensor) and loss.numel() == 1:
            is_scaled = loss is self._scaled()
            self._found(self._unscaled if is_scaled and self._unscaled is not None else loss.detach())

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Open a block whose backwards are the engine's own, and none of the program's."""
        before = self.is_paused
        self.is_paused = True
        try:
            yield
        finally:
            self.is_paused = before


class _Here(threading.local):
    """The engines of this thread, and whether a backward is under way in it."""

    def __init__(self) -> None:
        self.losses: weakref.WeakSet[Losses] = weakref.WeakSet()
        self.is_inside = False


_HERE = _Here()
_LOCK = threading.Lock()
_wrapped: list[Any] = []  # what the wrapper is of


def _watch(losses: Losses) -> None:
    _HERE.losses.add(losses)
    with _LOCK:
        if not _wrapped:
            _wrapped.append(torch.autograd.backward)
            torch.autograd.backward = _observed(torch.autograd.backward)


def _observed(plain: Callable[..., None]) -> Callable[..., None]:
    @wraps(plain)
    def backward(tensors: Any, *args: Any, **kwargs: Any) -> None:
        watching = [] if _HERE.is_inside else [each for each in _HERE.losses if not each.is_paused]
        if not watching:  # also a reentrant checkpoint's, inside another
            plain(tensors, *args, **kwargs)
            return
        before = [each.reached() for each in watching]
        _HERE.is_inside = True
        try:
            plain(tensors, *args, **kwargs)
        finally:
            _HERE.is_inside = False
        for each, seen in zip(watching, before, strict=True):
            if each.reached() != seen:
                each.differentiated(tensors)

    return backward
