"""Sharded parameters: they have their full shape, but hold a single element.

A parameter is the same `nn.Parameter` object from before wrapping to after the last step; only its
class and its `.data` change. Unsharded, it is a plain parameter that views a gathered buffer.
Sharded, its class is `ShardedParameter`, its data is a NaN scalar with stride 0, and operations
that read its elements raise an error that names the alternative. Its `.grad` is a `ShardedGradient`
(sharded_gradient.py).
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from ..base.device import without_torch_function
from ..base.errors import AtRestError


class Owner(Protocol):
    """Interface of the object that holds the values of a sharded parameter.

    `ParamGroup` implements it, and under `zero.Init` the slice of the parameter.
    """

    def fetch_for(self, param: nn.Parameter) -> bool:
        """Gather the parameter if a forward or backward is running.

        Args:
            param: The sharded parameter, whose elements an operation needs.

        Returns:
            True if the parameter was gathered; False outside of forward and backward.
        """
        ...

    def write_param(self, param: nn.Parameter, value: Tensor) -> None:
        """Store this rank's part of a full value, as a checkpoint loader assigns it with `copy_`.

        Args:
            param: The sharded parameter.
            value: The full value, in the parameter's shape.
        """
        ...

    def name_of(self, param: nn.Parameter) -> str: ...

    def is_in_engine(self) -> bool:
        """Return whether an existing engine holds the parameter."""
        ...


class ModelBuilder:
    """Interface between a sharded parameter and `zero.Init` while the model is built."""

    def give_up(self, param: nn.Parameter) -> tuple[Tensor, type[nn.Parameter]]:
        """Release the parameter, so that a parameter group can hold its values.

        Returns:
            The values, flat, and the class of the parameter while unsharded.

        Note:
            Collective: every rank must call it.
        """
        raise NotImplementedError

    def fetch_for(self, param: nn.Parameter) -> bool:
        """Gather the parameter for one operation of a later initialization.

        Args:
            param: The sharded parameter.

        Returns:
            True if the model is still under construction; otherwise nothing is gathered.

        Note:
            Collective: every rank must call it.
        """
        raise NotImplementedError

    def answer(self, param: nn.Parameter, name: str, args: Any, kwargs: Mapping[str, Any]) -> Any:
        """Run an operation on a sharded parameter while the model is built.

        Args:
            param: The sharded parameter.
            name: The name of the operation.
            args: The positional arguments of the call.
            kwargs: The keyword arguments of the call.

        Returns:
            The result of an operation that reads no elements. `NEEDS_ELEMENTS` if the caller has to
            run the operation on the gathered elements.

        Raises:
            AtRestError: The operation needs elements that this rank does not have.
        """
        raise NotImplementedError

    def copied(self, param: nn.Parameter) -> nn.Parameter:
        """Return a copy of the parameter that is sharded as well, without communication.

        Args:
            param: The sharded parameter.
        """
        raise NotImplementedError

    def at_rest(self, param: nn.Parameter, operation: str) -> AtRestError:
        """Create the error for an operation that needs elements.

        Args:
            param: The sharded parameter.
            operation: The name of the operation.
        """
        raise NotImplementedError


# Attributes and methods that do not read a parameter's elements.
SAFE = frozenset(
    """
    shape dtype device requires_grad grad is_leaf ndim layout is_sparse is_cuda is_cpu is_meta
    is_quantized is_nested grad_fn names _backward_hooks _post_accumulate_grad_hooks _version
    itemsize output_nr retains_grad is_mps is_xpu _grad _grad_fn _base nbytes numel size dim
    ndimension nelement element_size is_floating_point is_complex is_signed requires_grad_
    get_device register_hook register_post_accumulate_grad_hook __hash__ stride is_contiguous
    is_same_size is_inference is_neg is_conj is_shared _is_view has_names is_pinned storage_offset
    __len__ type _has_compatible_shallow_copy_type new_empty new_zeros new_ones new_full new_tensor
    empty_like zeros_like ones_like full_like rand_like randn_like
    """.split()
)


def is_safe(name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Return whether a call on a tensor reads only its shape or other metadata.

    `type` returns the dtype without an argument, and converts with one.

    Args:
        name: The name of the function.
        args: The positional arguments of the call.
        kwargs: The keyword arguments of the call.
    """
    return name in SAFE and (name != "type" or len(args) + len(kwargs) == 1)


# The conversions that model.to(), .float(), .cpu() apply to every parameter, with the dtype or
# device that the name implies.
CONVERSIONS: dict[str, torch.dtype | str | None] = {
    "to": None,
    "float": torch.float32,
    "double": torch.float64,
    "half": torch.float16,
    "bfloat16": torch.bfloat16,
    "cpu": "cpu",
}


NEEDS_ELEMENTS: Any = object()


def answer_without_elements(
    function: Callable[..., Any], name: str, args: Any, kwargs: Mapping[str, Any]
) -> Any:
    """Return the result of a call that reads no elements, or `NEEDS_ELEMENTS`.

    A conversion to the dtype and device that the tensor already has reads none. Every
    `__torch_function__` of a tensor without elements calls this function first.

    Args:
        function: The function that was called on the tensor.
        name: The name of the function (`function_name`).
        args: The positional arguments of the call.
        kwargs: The keyword arguments of the call.
    """
    if is_safe(name, args, kwargs):
        with without_torch_function():
            return function(*args, **kwargs)
    if name in CONVERSIONS and changes_nothing(args, kwargs, CONVERSIONS[name]):
        return args[0]
    return NEEDS_ELEMENTS


def function_name(function: Callable[..., Any]) -> str:
    """Return the name of a function, or of the attribute for a property access."""
    name = getattr(function, "__name__", str(function))
    if name in ("__get__", "__set__", "__delete__"):
        return str(getattr(getattr(function, "__self__", None), "__name__", name))
    return str(name)


class OwnerReference:
    """A weak reference from a parameter to the parameter group that holds its values.

    Pickling drops the reference.
    """

    def __init__(self, owner: Owner | None = None) -> None:
        self.get: Callable[[], Any] = weakref.ref(owner) if owner is not None else _no_owner

    def __reduce__(self) -> Any:
        return OwnerReference, ()


def _no_owner() -> None:
    return None


def owner_of(param: Tensor) -> Owner | None:
    """Return the parameter group that holds a parameter's values; None for a plain parameter."""
    reference: OwnerReference | None = param.__dict__.get("_zero_owner")
    return reference.get() if reference is not None else None


def set_owner(param: Tensor, owner: Owner) -> None:
    """Record, weakly, the group that a parameter belongs to.

    Args:
        param: The sharded parameter.
        owner: The parameter group, or the `zero.Init` slice, that holds the values.
    """
    param.__dict__["_zero_owner"] = OwnerReference(owner)


def take_values(param: nn.Parameter) -> tuple[Tensor, type[nn.Parameter]]:
    """Return a parameter's flat values and its class, for a parameter group that will hold them.

    Args:
        param: A plain parameter, or one that is sharded under `zero.Init`.

    Note:
        Collective if the parameter is sharded under `zero.Init`: every rank must call it.
    """
    owner = owner_of(param)
    if isinstance(owner, ModelBuilder):
        return owner.give_up(param)
    return param.data.reshape(-1), type(param)


def clear_owner(param: Tensor) -> None:
    """Remove the reference from a parameter to the parameter group that holds its values."""
    param.__dict__.pop("_zero_owner", None)


class ShardedParameter(nn.Parameter):
    """The class of a parameter while it is sharded.

    The parameter has its full shape but holds no values. Operations that read its elements raise an
    error that names the alternative.
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
        if _differentiates(function, args):
            return function(*_with_edges(args), **_with_edges(kwargs))
        name = function_name(function)
        if (found := answer_without_elements(function, name, args, kwargs)) is not NEEDS_ELEMENTS:
            return found
        resting = [
            value
            for value in tensors_among((*args, *kwargs.values()))
            if type(value) is ShardedParameter
        ]
        if name == "copy_" and resting and resting[0] is args[0] and len(resting) == 1:
            value = args[1] if len(args) > 1 else kwargs["src"]
            return _write(args[0], value)
        if name == "data" and len(args) == 2 and (_is_placeholder(args[1]) or args[1] is args[0]):
            with without_torch_function():
                return function(*args, **kwargs)
        for param in resting:
            owner = owner_of(param)
            if owner is None or not owner.fetch_for(param):
                if not isinstance(owner, ModelBuilder):
                    raise _at_rest(param, name, args, kwargs)
                found = owner.answer(param, name, args, kwargs)
                if found is not NEEDS_ELEMENTS:
                    return found
        return function(*args, **kwargs)

    def set_(self, *args: Any, **kwargs: Any) -> Any:
        """Call torch's `set_` while the model is under construction; otherwise raise an error.

        Torch does not call `__torch_function__` for this method.
        """
        owner = owner_of(self)
        if not isinstance(owner, ModelBuilder) or not owner.fetch_for(self):
            raise _at_rest(self, "set_")
        return self.set_(*args, **kwargs)  # `fetch_for` has changed the class

    def __repr__(self, *, tensor_contents: object = None) -> str:  # type: ignore[override]
        with without_torch_function():
            return (
                f"AtRest(name={name_of(self)!r}, shape={tuple(self.shape)}, dtype={self.dtype}, "
                f"device={self.device})"
            )

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        owner = owner_of(self)
        if isinstance(owner, ModelBuilder):
            return owner.copied(self)
        raise _at_rest(self, "deepcopy")

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise _at_rest(self, "pickle")


def _differentiates(function: Callable[..., Any], args: Sequence[Any]) -> bool:
    """Return whether a call is a backward or `torch.autograd.grad` of other tensors."""
    if getattr(function, "__name__", "") not in ("backward", "grad") or not args:
        return False
    return not any(isinstance(each, ShardedParameter) for each in tensors_among(args[:1]))


def _with_edges(arguments: Any) -> Any:
    """Return the arguments of a differentiation with edges of the graph in place of parameters.

    Autograd reads no element of its inputs.

    Args:
        arguments: The positional or the keyword arguments.
    """
    if isinstance(arguments, Mapping):
        return {name: _with_edges(value) for name, value in arguments.items()}
    if isinstance(arguments, (list, tuple)) and not isinstance(arguments, GradientEdge):
        return type(arguments)(map(_with_edges, arguments))
    if not isinstance(arguments, ShardedParameter):
        return arguments
    with without_torch_function(), torch.enable_grad():
        return get_gradient_edge(arguments)


def dtype_of_conversion(name: str, args: Any, kwargs: Mapping[str, Any]) -> torch.dtype | None:
    """Return the target dtype of a call that changes only the dtype, or None.

    Args:
        name: The name of the function.
        args: Its positional arguments, the tensor first.
        kwargs: The keyword arguments of the call.
    """
    implied = CONVERSIONS.get(name)
    if name not in CONVERSIONS and name != "type":
        return None
    given = [*args[1:], kwargs.get("dtype"), kwargs.get("device"), kwargs.get("other"), implied]
    with without_torch_function():
        like = [value.dtype for value in given if isinstance(value, Tensor)]
        devices = [torch.device(value) for value in given if isinstance(value, (str, torch.device))]
        if any(device.type != args[0].device.type for device in devices):
            return None
    dtypes = [value for value in given if isinstance(value, torch.dtype)] + like
    return dtypes[0] if len(dtypes) == 1 else None


def _write(param: nn.Parameter, value: Tensor) -> nn.Parameter:
    owner = owner_of(param)
    if owner is None:
        raise _at_rest(param, "copy_")
    owner.write_param(param, value)
    return param


def tensors_among(values: Any) -> list[Tensor]:
    """Return all tensors in nested values."""
    found: list[Tensor] = []
    for value in values:
        if isinstance(value, Tensor):
            found.append(value)
        elif isinstance(value, (list, tuple)):
            found.extend(tensors_among(value))
    return found


def _is_placeholder(value: Any) -> bool:
    if not isinstance(value, Tensor) or type(value) is ShardedParameter:
        return False
    return value.numel() != 1 and not any(value.stride())


def changes_nothing(
    args: Any, kwargs: Mapping[str, Any], implied: torch.dtype | str | None
) -> bool:
    """Return whether a conversion would leave the tensor as it is.

    Args:
        args: The positional arguments of the conversion, the tensor first.
        kwargs: The keyword arguments of the call.
        implied: The dtype or device that the name of the conversion implies.
    """
    param = args[0]
    wanted = [
        value
        for value in (*args[1:], *kwargs.values())
        if isinstance(value, (str, int, torch.device, torch.dtype))
    ]
    wanted = [value for value in wanted if not isinstance(value, bool)]
    wanted += [implied] if implied is not None else []
    with without_torch_function():
        for value in wanted:
            if isinstance(value, torch.dtype):
                changes = value != param.dtype
            else:
                changes = torch.device(value) != param.device
            if changes:
                return False
    return True


def name_of(param: Tensor) -> str:
    """Return the name of a sharded parameter, or "?" if it is unknown."""
    owner = owner_of(param)
    return owner.name_of(param) if owner is not None and isinstance(param, nn.Parameter) else "?"


def _at_rest(
    param: nn.Parameter,
    operation: str,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
) -> AtRestError:
    owner = owner_of(param)
    if isinstance(owner, ModelBuilder):
        return owner.at_rest(param, operation)
    if owner is None or not owner.is_in_engine():
        engine = getattr(owner, "runtime", _no_owner)
        end = "deleted" if engine() is None else "destroyed"
        return AtRestError(
            f"parameter '{name_of(param)}' is sharded and its engine was {end}; '{operation}' "
            "cannot use it.",
            "Each rank holds only its slice, and only the engine can gather them.",
            "keep the engine as long as the model is used; take state_dict() before its end.",
        )
    return AtRestError(
        f"parameter '{name_of(param)}' is sharded; '{operation}' cannot use it here.",
        "Between its uses in forward and backward each rank holds only its slice.",
        _advice_at_rest(operation, args, kwargs or {}),
    )


MOVES_DEVICE = frozenset("to cuda cpu xpu npu hpu ipu mps".split())
COPIES = frozenset("deepcopy pickle clone".split())
GATHERED = "`with deepseek_zero.zero.GatheredParameters(param{}):` on all ranks"


def _advice_at_rest(operation: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> str:
    """Return what to do instead of an operation on a sharded parameter."""
    if (advice := advice_for_optimizers()) is not None:
        return advice
    if args and dtype_of_conversion(operation, args, kwargs) is not None:
        return (
            "cast the model before initialize() or DeepSeekZeRO3, or state the dtype in the "
            'configuration: "bf16" or "fp16": {"enabled": true}; export(path, dtype=...) '
            "writes weights in another dtype; for a copy of one parameter in another dtype convert "
            f"it inside {GATHERED.format('')}."
        )
    if operation in MOVES_DEVICE:
        return (
            "leave the move out: initialize() and DeepSeekZeRO3 place the model on the device of "
            "this rank; state_dict() gathers a whole copy on all ranks, which may be moved."
        )
    if operation in COPIES:
        return (
            "build a second model and give it state_dict(), which gathers full tensors on all "
            f"ranks; for a copy of one parameter clone it inside {GATHERED.format('')}."
        )
    if operation.endswith("_") and not operation.endswith("__"):
        return (
            f"change it inside {GATHERED.format(', modifier_rank=0')}; load_state_dict() takes "
            "whole tensors."
        )
    if operation == "data":
        return (
            f"read it inside {GATHERED.format('')}, or assign to it inside "
            f"{GATHERED.format(', modifier_rank=0')}; in a hook of forward or backward no block is "
            "needed."
        )
    return (
        f"read it inside {GATHERED.format('')}, change it with modifier_rank=0; for a copy of the "
        "model use state_dict(), which gathers full tensors on all ranks."
    )


def advice_for_optimizers() -> str | None:
    """Return what to do instead of a step of torch's optimizer if one is running, else None."""
    frame = sys._getframe()
    while frame.f_back is not None:
        frame = frame.f_back
        owner = frame.f_locals.get("self")
        if isinstance(owner, torch.optim.Optimizer):
            return (
                f"do not step torch's {type(owner).__name__} on these parameters; pass it to "
                "initialize(model=..., optimizer=...) and call engine.step(), or use "
                "deepseek_zero.ZeroOptimizer with DeepSeekZeRO3."
            )
    return None
