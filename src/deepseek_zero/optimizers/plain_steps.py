"""PyTorch's optimizers without the decorators that import PyTorch's compiler.

The import would take a second, and 70 MB per rank.
"""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch.optim import Optimizer

# A second thread would save the undecorated methods as PyTorch's, and restore those
_ONE_AT_A_TIME = threading.RLock()


@contextmanager
def undecorated() -> Iterator[None]:
    """Remove the decorators of torch's optimizers in a block.

    The block constructs an optimizer or loads a state. Optimizers of other threads run without the
    decorators meanwhile, which does not change their behavior.
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
    """Return an optimizer's update without decorators.

    It must be called inside `torch.no_grad()`. For optimizers that are not of torch or this
    library, the result is `step`. Hooks belong to the outer step, so that they run once per step
    and not once per tile.
    """
    cls = type(optimizer)
    is_known = cls.__module__.partition(".")[0] in (
        "torch",
        "deepseek_zero",
    ) and "step" not in vars(optimizer)
    return inspect.unwrap(cls.step).__get__(optimizer) if is_known else optimizer.step
