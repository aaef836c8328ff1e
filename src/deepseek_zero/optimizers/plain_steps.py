"""PyTorch's optimizers without the decorators that import PyTorch's compiler.

That import takes a second, and 70 MB per rank.
"""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch.optim import Optimizer

# A second thread would take the bare methods for PyTorch's, and put those back
_ONE_AT_A_TIME = threading.RLock()


@contextmanager
def undecorated() -> Iterator[None]:
    """Remove the decorators of torch's optimizers while one is built, or loads a state.

    Optimizers of other threads do without them for as long, which changes nothing that they do.
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
    """Return the bare update of one of torch's own optimizers or ours, else its `step`. It runs
    inside `torch.no_grad()`.

    Hooks belong to the outer step: they run once a step and not once a tile.
    """
    cls = type(optimizer)
    is_known = cls.__module__.partition(".")[0] in (
        "torch",
        "deepseek_zero",
    ) and "step" not in vars(optimizer)
    return inspect.unwrap(cls.step).__get__(optimizer) if is_known else optimizer.step
