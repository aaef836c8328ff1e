"""A model that is given to `initialize` a second time: the engine it was in ends, and the new one takes its weights.

Clients do so: the Trainer evaluates before it trains, Lightning tests after it has fitted, each with a new engine and
never a word to the old one.  Behind DeepSpeed's name only; elsewhere it is an error (sharding/build.py).  Called by
deepspeed.py.
"""

from __future__ import annotations

import weakref

from torch import nn

from ..engine.engine import Engine
from ..sharding.group import ParamGroup
from ..sharding.handle import owner_of

# Model -> its engine, both weakly.
_engines: weakref.WeakKeyDictionary[nn.Module, weakref.ref[Engine]] = weakref.WeakKeyDictionary()


def remember(engine: Engine) -> None:
    _engines[engine.module] = weakref.ref(engine)


def end_engine_of(model: nn.Module) -> None:
    """Destroy the engine the model is in, if there is one; what its last step left to do is done first."""
    reference = _engines.pop(model, None)
    engine = reference() if reference is not None else None
    owners = {owner_of(param) for param in model.parameters()}
    for group in [owner for owner in owners if isinstance(owner, ParamGroup)]:
        optimizer = group.optimizer()
        if optimizer is not None:
            optimizer.finish()
        runtime = group.runtime()
        if engine is None and runtime is not None:  # the engine is gone already; its optimizer is still held
            runtime.remove_hooks()
    if engine is not None:
        engine.destroy()
