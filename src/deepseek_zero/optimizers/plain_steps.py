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
