"""Scales gradients that enter an engine's autograd graph past its outputs.

Gradients inside an engine carry its loss scale / accumulation steps. Aliases of its outputs apply
this factor. A tensor that leaves the forward in another way (an attribute, a list, a hook) and a
parameter that the loss reads directly have no alias. Before a backward begins, `scale_entries`
walks the graph outside of all engines and finds the edges into an engine. A hook on the outside
node multiplies the gradient of such an edge.

A node belongs to the forward during which autograd numbered it. The numbers increase per thread.
"""

from __future__ import annotations

import threading
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..base.device import number_of_node

_KEPT = 4096  # the number of remembered forwards
_MARK = "deepseek_zero.entries"

# The factor of gradients that enter an engine; None if the engine is gone.
Factor = Callable[[], float | None]


@dataclass(frozen=True)
class _Recorded:
    """The numbers of the autograd nodes of one outermost forward.

    The forward itself has the nodes [begin, end), and the aliases of its outputs [end, stop).
    """

    begin: int
    end: int
    stop: int
    factor: Factor


class _Forwards(threading.local):
    """The last forwards of a thread, in the order in which they ended."""

    def __init__(self) -> None:
        self.recorded: list[_Recorded] = []
        self.stops: list[int] = []

    def add(self, recorded: _Recorded) -> None:
        if len(self.recorded) >= 2 * _KEPT:
            self.recorded = self.recorded[-_KEPT:]
            self.stops = self.stops[-_KEPT:]
        self.recorded.append(recorded)
        self.stops.append(recorded.stop)

    def around(self, number: int) -> _Recorded | None:
        """Return the innermost forward that made the node with this number, or None."""
        for recorded in self.recorded[bisect_right(self.stops, number) :]:
            if recorded.begin <= number:
                return recorded
        return None


_FORWARDS = _Forwards()


def record_forward(begin: int, end: int, stop: int, factor: Factor) -> None:
    """Record the autograd nodes that a forward of the model has created, for `scale_entries`.

    Args:
        begin: Autograd's sequence number of the forward's first node.
        end: The number after its last node.
        stop: The number after the aliases of its outputs.
        factor: A function that returns the factor of gradients that enter the forward.
    """
    _FORWARDS.add(_Recorded(begin, end, stop, factor))


def scale_entries(
    roots: Sequence[Tensor], factor_of_leaf: Callable[[Tensor], Factor | None]
) -> list[Tensor]:
    """Scale gradients that enter a model's autograd graph other than through its outputs.

    Inside an engine, gradients are multiplied by the factor loss scale / accumulation steps. Hooks
    at the outputs apply it. This function adds hooks for gradients that bypass the outputs, for
    example through a hidden state.

    Args:
        roots: The tensors that are differentiated.
        factor_of_leaf: A function that returns the function that computes the factor for a
            parameter of an engine; None for other leaves.

    Returns:
        The tensors to differentiate instead. A root inside an engine is replaced by an alias with a
        hook.
    """
    found: list[Tensor] = []
    pending: list[Any] = []
    for root in roots:
        if not root.requires_grad:
            found.append(root)
            continue
        node = root.grad_fn
        if node is None:
            factor = factor_of_leaf(root)
            is_end = True
        else:
            factor, is_end = _factor_of(node, factor_of_leaf)
        if factor is not None:
            with torch.enable_grad():
                root = root.view_as(root)
        if factor is not None or not is_end:
            pending.append(root.grad_fn)
        found.append(root)
    seen = set(pending)
    while pending:
        node = pending.pop()
        entries: dict[int, Factor] = {}
        for place, (after, _) in enumerate(node.next_functions):
            if after is None:
                continue
            factor, is_end = _factor_of(after, factor_of_leaf)
            if factor is not None:
                entries[place] = factor
            elif not is_end and after not in seen:
                seen.add(after)
                pending.append(after)
        if entries and _MARK not in node.metadata:
            node.metadata[_MARK] = True
            node.register_hook(_ScaleEdges(entries))
    return found


def _factor_of(
    node: Any, factor_of_leaf: Callable[[Tensor], Factor | None]
) -> tuple[Factor | None, bool]:
    """Return the factor of a node's engine, and whether the outside ends at the node."""
    if (leaf := getattr(node, "variable", None)) is not None:
        return factor_of_leaf(leaf), True
    number = number_of_node(node)
    recorded = _FORWARDS.around(number)
    if recorded is None:
        return None, False
    return (recorded.factor if number < recorded.end else None), True


class _ScaleEdges:
    """The hook of a node outside of all engines, with a factor by edge index."""

    def __init__(self, entries: dict[int, Factor]) -> None:
        self.entries = entries

    def __call__(
        self, after: Sequence[Tensor | None], before: Sequence[Tensor | None]
    ) -> tuple[Tensor | None, ...]:
        grads = list(after)
        for place, factor_now in self.entries.items():
            grad = grads[place]
            factor = factor_now()
            if grad is not None and factor is not None and factor != 1.0:
                grads[place] = grad * factor
        return tuple(grads)
