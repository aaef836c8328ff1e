"""Base class of objects that wrap a model and offer its attributes as their own."""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import nn

from ..base.given import NoSuchNameError


class StandsForModule(nn.Module):
    """Base class of wrappers that forward missing attributes to the wrapped model.

    Attributes:
        module: The wrapped model.
    """

    module: nn.Module

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            own = getattr(type(self), name, None)
            if isinstance(own, property) and own.fget is not None:
                # The property itself raised AttributeError: raise that error again, not ours.
                return own.fget(self)
            if name == "module":  # read before __init__ has set it
                raise
            try:
                return getattr(self.module, name)
            except AttributeError as error:
                if error.name != name or error.obj is not self.module:
                    raise  # from a property inside the model
                owner = f"'{type(self).__name__}' around a '{type(self.module).__name__}' object"
                raise NoSuchNameError(owner, name, partial(_names_of, self)) from None


def _names_of(engine: StandsForModule) -> list[str]:
    return [*dir(engine), *dir(engine.module)]
