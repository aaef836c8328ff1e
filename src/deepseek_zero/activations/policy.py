"""Selective recomputation: keep the results of named operators.

A checkpoint computes its function again in backward. If a policy names operators, backward uses
their results from forward instead. A result that is expensive to compute and small to keep, such as
attention's output, is then computed once. The results are stored like the inputs of checkpoints
(`offload.py`), or in place.

A result is identified by its operator and the number of the call, because a recomputation calls
operators in the order of forward and may end early. It may also run more than once, for a second
backward through the same graph.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import create_selective_checkpoint_contexts

from ..base.device import argument_of, detached_below_autograd, dispatch_mode, version_of
from ..base.errors import UsageError
from ..base.nested import Args, Kwargs
from .offload import SMALLEST_BYTES, ActivationOffload, OffloadHandle

ATTENTION = (
    "_scaled_dot_product_flash_attention_for_cpu",
    "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_cudnn_attention",
)
PRODUCTS = ("mm", "addmm", "bmm", "baddbmm")
NAMED: dict[str, tuple[str, ...]] = {
    "full": (),
    "attention": ATTENTION,
    "matmul": (*ATTENTION, *PRODUCTS),
}


def operators_of(policy: Sequence[str]) -> frozenset[Any]:
    """Return the operators whose results a policy keeps for backward.

    Args:
        policy: Each item is "full" (keep nothing), "attention" (keep the results of attention
            kernels), "matmul" (also keep those of matrix products), or the name of an operator,
            such as "mm" or "library::name".

    Raises:
        UsageError: torch has no such operator.
    """
    names = [name for word in policy for name in NAMED.get(word, (word,))]
    return frozenset(overload for name in names for overload in _overloads(name))


def _overloads(name: str) -> list[Any]:
    library, _, short = name.removeprefix("torch.ops.").replace("::", ".").rpartition(".")
    packet = getattr(getattr(torch.ops, library or "aten"), short, None)
    if packet is None:
        if short in ATTENTION:
            return []  # An operator of another device that this torch does not have
        raise UsageError(
            f"activation_checkpointing.policy names '{name}', and torch has no such operator.",
            f"It is {', '.join(NAMED)}, or names of operators whose results are kept: 'mm', "
            "'library::name'.",
            "look the operator up in a profile of the forward.",
        )
    return [getattr(packet, overload) for overload in packet.overloads()]


def compiled_contexts(operators: frozenset[Any]) -> Callable[[], Any]:
    """Return a `context_fn` for torch's checkpoint that keeps the results of these operators.

    It creates torch's own contexts, which its compiler supports.
    """
    return partial(create_selective_checkpoint_contexts, list(operators))


def contexts(operators: frozenset[Any], parking: ActivationOffload | None) -> tuple[Any, Any]:
    """Create the contexts of one checkpoint that keep the results of operators.

    Args:
        operators: The operators whose results are kept, as `operators_of` returned them.
        parking: Offloads the results until backward; None keeps them on their device.

    Returns:
        The context manager for the forward, and the one for its recomputation.
    """
    kept = _Results(parking)

    def keep(operator: Any, args: Args, kwargs: Kwargs) -> Any:
        found = operator(*args, **kwargs)
        if operator in operators and not _draws(operator, args, kwargs):
            kept.add(operator, found)
        return found

    def use(operator: Any, args: Args, kwargs: Kwargs) -> Any:
        if operator in operators and not _draws(operator, args, kwargs):
            return kept.next(operator)
        return operator(*args, **kwargs)

    return dispatch_mode(keep), dispatch_mode(use, kept.rewind)


def _draws(operator: Any, args: Args, kwargs: Kwargs) -> bool:
    """Return whether a call draws random numbers.

    Skipping such a call would change the numbers that later calls draw.
    """
    is_random = torch.Tag.nondeterministic_seeded in operator.tags
    return is_random and argument_of(operator, "dropout_p", args, kwargs) != 0.0


class _Results:
    """The results of one forward of one checkpoint."""

    def __init__(self, parking: ActivationOffload | None) -> None:
        self._parking = parking
        self._kept: dict[Any, list[_Result]] = defaultdict(list)
        self._used: dict[Any, int] = {}

    def add(self, operator: Any, found: Any) -> None:
        self._kept[operator].append(_Result(found, self._parking))

    def rewind(self) -> None:
        self._used = {}

    def next(self, operator: Any) -> Any:
        number = self._used.get(operator, 0)
        self._used[operator] = number + 1
        if number == len(self._kept[operator]):
            raise UsageError(
                f"a recomputation called {operator} more often than its forward.",
                "Results of forward are used in the order they came.",
                "make the function call the same operators each time, or leave this one out of the "
                "policy.",
            )
        return self._kept[operator][number].read(operator)


class _Result:
    """The values that one call returned, tensors and others."""

    def __init__(self, found: Any, parking: ActivationOffload | None) -> None:
        self._is_one = isinstance(found, Tensor)
        values = [found] if self._is_one else list(found)
        self._values = [
            detached_below_autograd(each) if isinstance(each, Tensor) else each for each in values
        ]
        self._versions = [
            version_of(each) if isinstance(each, Tensor) else 0 for each in self._values
        ]
        self._places = [
            number
            for number, each in enumerate(self._values)
            if parking is not None and _is_large(each)
        ]
        self._handle: OffloadHandle | None = None
        if parking is not None and self._places:
            self._handle = parking.offload([self._values[number] for number in self._places])
            for number in self._places:
                self._values[number] = None

    def read(self, operator: Any) -> Any:
        values = list(self._values)
        if self._handle is not None:
            for number, each in zip(self._places, self._handle.restore(), strict=True):
                values[number] = each
        for number, each in enumerate(self._values):
            if isinstance(each, Tensor) and version_of(each) != self._versions[number]:
                raise UsageError(
                    f"the result of {operator} was changed in place after forward.",
                    "Backward needs it as it was, and activation_checkpointing.policy keeps it "
                    "instead of computing it again.",
                    "use the out-of-place form, or leave this operator out of the policy.",
                )
        fresh = tuple(each.detach() if isinstance(each, Tensor) else each for each in values)
        return fresh[0] if self._is_one else fresh


def _is_large(value: Any) -> bool:
    return (
        isinstance(value, Tensor)
        and value.layout is torch.strided
        and value.nbytes >= SMALLEST_BYTES
    )
