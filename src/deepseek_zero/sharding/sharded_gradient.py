"""The `.grad` of a sharded gradient: a tensor whose operations act on slices.

A `ShardedGradient` has the parameter's shape. Element-wise operations act on every rank's part
without communication. In place (`mul_`, `+=`, `clamp_`, `torch._foreach_add_`) they change the
gradient that the step uses; out of place they return another such tensor, which may be assigned to
`.grad`. Norms are computed over all ranks. Other operations read the elements if every rank has all
of them (stage 0). Otherwise they raise an error that names the alternative.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from ..base.device import CPU, is_traced, without_torch_function
from ..base.errors import AtRestError
from .sharded_parameter import (
    CONVERSIONS,
    NEEDS_ELEMENTS,
    ShardedParameter,
    advice_for_optimizers,
    answer_without_elements,
    function_name,
    name_of,
    owner_of,
    tensors_among,
)


@dataclass(frozen=True)
class Part:
    """This rank's elements of one parameter's gradient.

    Attributes:
        values: The elements, flat.
        start: The index of the first element in the parameter.
        is_whole: Whether this rank has all elements, so that it can read them without the others.
    """

    values: Tensor
    start: int
    is_whole: bool


class ShownGradients(Protocol):
    """Interface through which `.grad` (a `ShardedGradient`) reads and changes gradients.

    `GradEdits` implements it for a parameter group.
    """

    def shown_part(self, param: nn.Parameter) -> Part:
        """Return this rank's current part of a gradient.

        Raises:
            AtRestError: The gradient was discarded.
        """

    def weight_part(self, param: nn.Parameter, part: Part) -> Tensor:
        """Return the elements of the weight that match this rank's part of the gradient.

        Args:
            param: The parameter whose gradient is meant.
            part: This rank's part of the gradient.
        """

    def edited(self, param: nn.Parameter, *, alike: bool) -> None:
        """Record that this rank's part of a gradient was changed in place.

        Args:
            param: The parameter whose gradient is meant.
            alike: Whether the change is the same on all ranks.
        """

    def norm(self, param: nn.Parameter, part: Part, order: float) -> Tensor:
        """Return the norm of a gradient, an fp32 scalar.

        Args:
            param: The parameter whose gradient is meant.
            part: This rank's part of the gradient.
            order: The order of the norm.

        Note:
            Collective unless every rank has all elements (`Part.is_whole`). It is also collective
            for a parameter that is split along "tp".
        """

    def whole(self, param: nn.Parameter, part: Part) -> Tensor:
        """Return all elements of a gradient in the parameter's shape.

        Args:
            param: The parameter whose gradient is meant.
            part: This rank's part of the gradient.

        Note:
            Collective unless every rank has all elements (`Part.is_whole`).
        """


# Functions whose result at an element depends only on that element; with a trailing "_", in place.
ELEMENT_WISE = frozenset(
    """
    abs absolute add addcdiv addcmul bitwise_and bitwise_not bitwise_or bitwise_xor clamp clamp_max
    clamp_min clip clone copy copysign div divide eq erf exp fill float_power fmax fmin ge gt
    isfinite isinf isnan le lerp log log1p logical_and logical_not logical_or logical_xor lt
    masked_fill maximum minimum mul multiply nan_to_num ne neg negative positive pow reciprocal relu
    rsqrt rsub sigmoid sign sqrt square sub subtract tanh true_divide where xlogy zero
    """.split()
)
# Operators that torch passes to `__torch_function__` under their own names.
OPERATORS = frozenset(
    "__rsub__ __rdiv__ __rtruediv__ __pow__ __rpow__ __ipow__ __and__ __or__ __xor__".split()
)
# What torch.compile reads of the `.grad` of each parameter that a traced function uses.
DESCRIPTIONS = frozenset("is_mkldnn untyped_storage".split())
# Functions that return new tensors or numbers. Writing to these never changes the gradient.
COPIES = frozenset(
    """
    all amax amin any aminmax argmax argmin argsort bincount cat concatenate count_nonzero cummax
    cummin cumprod cumsum dot histc inner isclose item kthvalue logsumexp matmul max mean median min
    mm mv nonzero prod quantile sort stack std std_mean sum tolist topk unique var var_mean
    __bool__ __contains__ __float__ __int__ __len__ allclose cosine_similarity equal dist kurtosis
    """.split()
)
NORMS = frozenset("norm linalg_norm linalg_vector_norm vector_norm".split())
NUMBER = (bool, int, float)


class ShardedGradient(Tensor):
    """The `.grad` of a sharded parameter, of which each rank holds only a part.

    It has the shape of the parameter.

    Element-wise operations act on this rank's part, and norms are computed over all ranks.

    `full_tensor()` gathers all elements. Other operations on elements raise an error, except at
    stage 0, where every rank has all elements.
    """

    @classmethod
    def __torch_function__(
        cls,
        function: Callable[..., Any],
        types: Sequence[type],
        args: Any = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        name = function_name(function)
        if name in ("data", "detach") and len(args) == 1:
            return args[0]
        if name in ("detach_", "requires_grad_", "contiguous"):
            return args[0]
        if (found := answer_without_elements(function, name, args, kwargs)) is not NEEDS_ELEMENTS:
            return found
        if name in DESCRIPTIONS and is_traced():
            with without_torch_function():
                return function(*args, **kwargs)
        # The result has the whole shape, so that a seed gives the same numbers for any number of
        # ranks.
        if name.endswith("_like"):
            with without_torch_function():
                return function(args[0].as_subclass(Tensor), *args[1:], **kwargs)
        if name.startswith("_foreach_"):
            return _foreach(name, args, kwargs)
        if name in NORMS:
            return _norm(function, args, kwargs)
        if name == "data":
            args[0].copy_(args[1])
            return None
        is_known = name in OPERATORS or name.removesuffix("_") in ELEMENT_WISE
        if (is_known or name in CONVERSIONS) and kwargs.get("out") is None:
            return _element_wise(function, name, args, kwargs)
        return _of_whole(function, name, args, kwargs)

    def full_tensor(self) -> Tensor:
        """Return all elements as a new plain tensor on every rank.

        Note:
            Collective: every rank must call it.
        """
        param, gradients, part = _known(self, "full_tensor")
        return gradients.whole(param, part)

    def __repr__(self, *, tensor_contents: object = None) -> str:  # type: ignore[override]
        with without_torch_function():
            return f"GradAtRest(shape={tuple(self.shape)}, dtype={self.dtype})"

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return self.clone()

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise _unreadable(self, "pickle")


def own_part_of(grad: Tensor) -> tuple[Any, Part | None]:
    """Return the parameter of a `ShardedGradient`, and its own elements.

    The elements are None if each operation reads the parameter's current gradient, as for `.grad`.
    """
    return grad.__dict__["param"](), grad.__dict__.get("own")


def _known(grad: Tensor, name: str) -> tuple[nn.Parameter, ShownGradients, Part]:
    param, own = own_part_of(grad)
    owner: Any = owner_of(param) if param is not None else None
    if owner is None:
        raise AtRestError(
            f"'{name}' was asked of a gradient whose engine was deleted.",
            "Each rank held only its slice of it.",
            "take `grad.full_tensor()` while the engine is there.",
        )
    gradients: ShownGradients = owner.grad_view.edits
    return param, gradients, gradients.shown_part(param) if own is None else own


def _first(args: Any, kwargs: Mapping[str, Any]) -> ShardedGradient:
    return next(
        value
        for value in tensors_among((*args, *kwargs.values()))
        if isinstance(value, ShardedGradient)
    )


def _element_wise(
    function: Callable[..., Any], name: str, args: Any, kwargs: Mapping[str, Any]
) -> Any:
    """Call the function with this rank's part of every tensor in the arguments."""
    first = _first(args, kwargs)
    param, gradients, part = _known(first, name)
    in_place = name.endswith("_") and (not name.startswith("__") or name == "__ipow__")
    if in_place and args[0] is not first:
        raise _unreadable(first, name)
    with without_torch_function():
        shape = tuple(first.shape)

    def here(value: Any) -> Any:
        if isinstance(value, (list, tuple)):
            return type(value)(map(here, value))
        if not isinstance(value, Tensor):
            return value
        if isinstance(value, ShardedGradient):
            theirs, own = own_part_of(value)
            if theirs is not param:
                raise _mixed(param, theirs, name)
            return own.values if own is not None else gradients.shown_part(param).values
        if isinstance(value, ShardedParameter):
            if value is not param:
                raise _mixed(param, value, name)
            return gradients.weight_part(param, part).to(part.values.device)
        if value.dim() == 0:
            return value.cpu() if part.values.device == CPU else value
        flat = value.detach().expand(shape).reshape(-1)
        return flat[part.start : part.start + part.values.numel()].to(part.values.device)

    with torch.no_grad():
        result = function(*map(here, args), **{key: here(value) for key, value in kwargs.items()})
    if in_place:
        others = (*args[1:], *kwargs.values())
        gradients.edited(
            param,
            alike=all(
                value is None or isinstance(value, NUMBER) or _is_number(value) for value in others
            ),
        )
        return args[0]
    with without_torch_function():
        # Offloaded elements are on the host, and the gradient is shown on the parameter's device
        blank = torch.zeros((), dtype=result.dtype, device=first.device)
        if name in CONVERSIONS:
            blank = function(blank, *args[1:], **kwargs)
        found = blank.expand(shape).as_subclass(ShardedGradient)
    found.__dict__["param"] = weakref.ref(param)
    found.__dict__["own"] = Part(result, part.start, part.is_whole)
    return found


def _of_whole(function: Callable[..., Any], name: str, args: Any, kwargs: Mapping[str, Any]) -> Any:
    """Call a function that reads gradients of which this rank has all elements."""

    def values(value: Any) -> Any:
        if isinstance(value, (list, tuple)):
            return type(value)(map(values, value))
        if not isinstance(value, ShardedGradient):
            return value
        part = _known(value, name)[2]
        is_current = own_part_of(value)[1] is None
        if not part.is_whole or (is_current and name not in COPIES):
            raise _unreadable(value, name)
        with without_torch_function():
            return part.values.view(value.shape)

    given = values(tuple(args)), {key: values(value) for key, value in kwargs.items()}
    return function(*given[0], **given[1])


def _is_number(value: Any) -> bool:
    return isinstance(value, Tensor) and value.dim() == 0


def _foreach(name: str, args: Any, kwargs: Mapping[str, Any]) -> Any:
    """Apply torch's operation over lists to one tensor after another."""
    single = getattr(torch.Tensor, name.removeprefix("_foreach_"), None)
    lists = [value for value in (*args, *kwargs.values()) if isinstance(value, (list, tuple))]
    if single is None or not lists:
        raise _unreadable(_first(args, kwargs), name)

    def of(number: int, value: Any) -> Any:
        return value[number] if isinstance(value, (list, tuple)) else value

    found = []
    for number in range(len(lists[0])):
        given = [of(number, value) for value in args]
        if name.removesuffix("_") in ("_foreach_addcdiv", "_foreach_addcmul") and len(given) == 4:
            found.append(single(*given[:3], value=given[3]))
        else:
            found.append(
                single(*given, **{key: of(number, value) for key, value in kwargs.items()})
            )
    return None if name.endswith("_") else found


def _norm(function: Callable[..., Any], args: Any, kwargs: Mapping[str, Any]) -> Tensor:
    grad = _first(args, kwargs)
    name = function_name(function)
    given = dict(zip(("order", "dim", "keepdim"), args[1:], strict=False))
    given |= {"order" if key in ("p", "ord") else key: value for key, value in kwargs.items()}
    order = given.get("order")
    dtype = given.get("dtype")
    if (
        given.get("dim") is not None
        or given.get("keepdim")
        or given.get("out") is not None
        or order == "nuc"
    ):
        raise _unreadable(grad, f"{name} along a dimension")
    if name == "linalg_norm" and order not in (None, "fro") and grad.dim() > 1:
        raise _unreadable(grad, f"{name} of a matrix with ord={order}")
    param, gradients, part = _known(grad, name)
    power = 2.0 if order in (None, "fro") else float(order)
    return gradients.norm(param, part, power).to(device=grad.device, dtype=dtype)


def _mixed(param: nn.Parameter, other: Tensor, name: str) -> AtRestError:
    return AtRestError(
        f"'{name}' was given the sharded gradients of '{name_of(param)}' and '{name_of(other)}' "
        "together.",
        "Ranks hold different elements of the two.",
        "gather one of them: `grad.full_tensor()`, on all ranks.",
    )


def _unreadable(grad: ShardedGradient, name: str) -> AtRestError:
    param, _ = own_part_of(grad)
    named = name_of(param) if param is not None else "?"
    if name.startswith("_amp_"):
        return AtRestError(
            f"a torch.amp.GradScaler reads the gradient of '{named}', which is sharded.",
            "Each rank holds only its slice of the reduced gradient.",
            'leave the scaler out: "fp16": {"enabled": true} scales losses and skips steps by '
            "itself.",
        )
    advice = advice_for_optimizers() or (
        "take the whole one on all ranks, `param.grad.full_tensor()` (or "
        "deepseek_zero.utils.safe_get_full_grad), and assign what is made of it to `param.grad`."
    )
    return AtRestError(
        f"the gradient of '{named}' is sharded; '{name}' cannot use it.",
        "Each rank holds only its slice of the reduced gradient.  What works element by element "
        "(mul_, add, clamp_, where, ...) acts on the slices, and norm() on all of them; views "
        "would be lost.",
        advice,
    )
