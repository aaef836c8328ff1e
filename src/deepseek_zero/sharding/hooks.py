"""Hooks of a wrapped model, which refer weakly to its engine and are not copied."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from ..base.errors import UsageError


class Hook(partial[Any]):
    """A hook of a wrapped model, whose modules cannot be copied.

    Raises:
        UsageError: An instance is copied or pickled.
    """

    __torch_unserializable__ = True  # torch.save omits hooks of tensors without a warning

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        raise _not_copied("deepcopy")

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise _not_copied("pickle")


def _not_copied(operation: str) -> UsageError:
    return UsageError(
        f"{operation} of a wrapped model is not possible.",
        "Its modules carry the hooks of one engine, whose communication cannot be copied.",
        "build a second model and give it `model.state_dict()`, which gathers full tensors on all "
        "ranks; or copy the model before it is wrapped.",
    )


def weak_hook(
    owner: object, function: Callable[..., Any], *first: Any, raises_if_gone: bool = True
) -> Hook:
    """Return a hook that calls ``function(owner, *first, ...)``.

    It refers weakly to the owner, so that deleting an engine frees its memory at once. If the owner
    is gone, the hook raises `UsageError`, or does nothing unless `raises_if_gone`.
    """
    return Hook(_call, weakref.ref(owner), function, first, raises_if_gone)


def _call(
    reference: weakref.ref[object],
    function: Callable[..., Any],
    first: tuple[Any, ...],
    raises_if_gone: bool,
    *args: Any,
    **kwargs: Any,
) -> Any:
    owner = reference()
    if owner is None:
        if not raises_if_gone:
            return None
        raise UsageError(
            "the model is used after its engine was deleted.",
            "Its weights are slices that only the engine can gather.",
            "keep the engine as long as the model is used; take state_dict() before deleting it.",
        )
    if torch.compiler.is_compiling():
        # A compiled block runs these hooks without tracing them. The compiler is used only here,
        # because importing it takes a second.
        return torch.compiler.disable(function, recursive=True)(owner, *first, *args, **kwargs)
    return function(owner, *first, *args, **kwargs)
