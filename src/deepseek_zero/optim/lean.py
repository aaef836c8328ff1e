"""torch's optimizers without torch's compiler, which they import at their first use: a second, and 70 MB per rank.

Their `add_param_group`, `load_state_dict` and `step` carry marks for torch.compile.  A sharded optimizer is not
compiled, so it calls what is under the marks.  Called by sharded.py.
"""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch.optim import Optimizer

_ONE_AT_A_TIME = threading.RLock()  # a second thread would take the bare methods for torch's, and put those back


@contextmanager
def undecorated() -> Iterator[None]:
    """While torch's optimizers are built, or load a state.

    Other threads' optimizers do without the marks for as long, which changes nothing that they do.
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
    """The bare update of one of torch's own optimizers or ours; any other's `step`.  Runs inside `torch.no_grad()`.

    Hooks are the outer step's: they run once a step and not once a tile.
    """
    cls = type(optimizer)
    is_known = cls.__module__.partition(".")[0] in ("torch", "deepseek_zero") and "step" not in vars(optimizer)
    return inspect.unwrap(cls.step).__get__(optimizer) if is_known else optimizer.step
