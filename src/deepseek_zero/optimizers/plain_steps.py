"""PyTorch's optimizers without the decorators that import PyTorch's compiler.

The import would take a second, and 70 MB per rank.
"""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol, TypeVar

from torch import nn
from torch.optim import Optimizer


class HasParam(Protocol):
    """Interface of an object that an optimizer updates as one parameter."""

    param: nn.Parameter


Item = TypeVar("Item", bound=HasParam)

# A second thread would save the undecorated methods as PyTorch's, and restore those
_ONE_AT_A_TIME = threading.RLock()


@contextmanager
def undecorated() -> Iterator[None]:
    """Return a context in which the methods of torch's optimizers have no decorators.

    The decorators would import PyTorch's compiler. In the context, the caller constructs an
    optimizer or loads its state. Optimizers of other threads then also run without decorators,
    which does not change their results.
    """
    with _ONE_AT_A_TIME:
        marked = {name: getattr(Optimizer, name) for name in ("add_param_group", "load_state_dict")}
        for name, method in marked.items():
            setattr(Optimizer, name, inspect.unwrap(method))
        try:
            yield
        finally:
            for name, method in marked.items():
                setattr(Optimizer, name, method)


def raw_step(optimizer: Optimizer) -> Callable[[], Any]:
    """Return the `step` of an optimizer without decorators.

    It must be called inside `torch.no_grad()`. Step hooks do not run in it; the caller runs them
    once per step. If the optimizer's class is neither of PyTorch nor of this library, `step` itself
    is returned.

    Args:
        optimizer: The optimizer whose update is called.
    """
    cls = type(optimizer)
    is_known = cls.__module__.partition(".")[0] in (
        "torch",
        "deepseek_zero",
    ) and "step" not in vars(optimizer)
    return inspect.unwrap(cls.step).__get__(optimizer) if is_known else optimizer.step


def split_by_state(
    optimizer: Optimizer, tile: Sequence[tuple[int, Item]]
) -> list[list[tuple[int, Item]]]:
    """Split items into those whose parameter has a state in an optimizer, and the others.

    Parameters that were unfrozen later have no state yet. PyTorch's fused SGD does not accept both
    in one call.

    Args:
        optimizer: The optimizer, which updates the parameters that have a gradient.
        tile: The items, each with the number of its parameter group.
    """
    updated = [item.param for _, item in tile if item.param.grad is not None]
    new = {id(param) for param in updated if not optimizer.state.get(param)}
    if not new or len(new) == len(updated):
        return [list(tile)]
    return [
        [item for item in tile if (id(item[1].param) in new) is is_new] for is_new in (False, True)
    ]
