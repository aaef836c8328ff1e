"""All private names of torch, and the differences between devices.

It covers the end-of-backward callback, the saved-tensor hook stack, the end of a recomputation,
torch.func transforms, use counts of storages, tensor versions, module contents and memory counters.
Each private name has a test in tests/unit/base/test_device.py that fails if torch changes it.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import lru_cache, wraps
from importlib import import_module
from types import FrameType
from typing import Any

import torch
import torch._functorch.pyfunctorch
import torch.utils.checkpoint
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from .errors import UsageError
from .host import THIS_HOST
from .world import local_rank

CPU = torch.device("cpu")
WeakStorage = StorageWeakRef  # a weak reference to a storage
# The second is DeepSpeed's variable
DEVICE_VARIABLES = ("DEEPSEEK_ZERO_DEVICE", "DS_ACCELERATOR")

Dispatched = Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]
Pack = Callable[[Tensor], Any]
Unpack = Callable[[Any], Tensor]


def queue_backward_callback(callback: Callable[[], None]) -> None:
    """Run `callback` when the current backward pass has computed all gradients.

    May only be called inside a backward.
    """
    torch.autograd.Variable._execution_engine.queue_callback(callback)


def backward_id() -> int:
    """Return the id of the backward that runs on this thread, or -1 outside of one.

    The inner backward of a reentrant checkpoint has another id.
    """
    return int(torch._C._current_graph_task_id())


def number_of_node(node: Any) -> int:
    """Return the sequence number of an autograd node.

    Numbers ascend in the order of recording on each thread.
    """
    return int(node._sequence_nr())


def next_node_number() -> int:
    """Return the sequence number of the next node that this thread records."""
    with torch.inference_mode(False), torch.enable_grad():
        node = torch.empty(0, requires_grad=True, device="cpu").view(0).grad_fn
    return number_of_node(node) + 1


# Called with the tensors that a backward differentiates. Returns the tensors to differentiate
# instead, and a function to call after a successful backward, or None.
BackwardHook = Callable[[list[Tensor]], tuple[list[Tensor], Callable[[], None] | None]]
_of_every_backward: list[BackwardHook] = []


def hook_every_backward(hook: BackwardHook) -> None:
    """Call a hook at every backward of this process; registering is idempotent.

    torch has no hook for the start of a backward. This wraps `torch.autograd.backward`, which
    `Tensor.backward` calls, and `torch.autograd.grad`, once for the life of the process. A backward
    inside a backward (reentrant checkpoint) calls no hook.
    """
    if hook in _of_every_backward:
        return
    if not _of_every_backward:
        torch.autograd.backward = _with_hooks(torch.autograd.backward)
        torch.autograd.grad = _with_hooks(torch.autograd.grad)
    _of_every_backward.append(hook)


def _with_hooks(differentiate: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(differentiate)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        if backward_id() != -1:
            return differentiate(*args, **kwargs)
        name = "outputs" if "outputs" in kwargs else "tensors"
        given = args[0] if args else kwargs.get(name)
        roots = [given] if isinstance(given, Tensor) else given
        if not isinstance(roots, list | tuple) or not roots:
            return differentiate(*args, **kwargs)
        if not all(isinstance(root, Tensor) for root in roots):
            return differentiate(*args, **kwargs)
        roots = list(roots)
        afterwards = []
        for hook in _of_every_backward:
            roots, after = hook(roots)
            if after is not None:
                afterwards.append(after)
        if args:
            args = (roots, *args[1:])
        else:
            kwargs[name] = roots
        result = differentiate(*args, **kwargs)
        for after in afterwards:
            after()
        return result

    return wrapped


def count_reached(tensors: Iterable[Tensor]) -> int:
    """Return for how many of these tensors the current backward computes a gradient.

    Tensors that do not require a gradient are not counted. May only be called inside a backward.
    """
    with torch.enable_grad():  # without it a leaf has no node that receives its gradient
        nodes = {
            torch.autograd.graph._get_grad_fn_or_grad_acc(each)
            for each in tensors
            if each.requires_grad
        }
    return sum(torch._C._will_engine_execute_node(node) for node in nodes)


def keeps_graph() -> bool:
    """Return whether the current backward keeps its graph (retain_graph).

    False outside of a backward.
    """
    return backward_id() != -1 and bool(torch._C._autograd._get_current_graph_task_keep_graph())


def outer_saved_tensor_hooks() -> tuple[Pack, Unpack] | None:
    """Return the innermost active saved-tensor hooks, or None.

    They belong for example to a non-reentrant checkpoint or to save_on_cpu; our hooks call them.
    """
    found = torch._C._autograd._top_saved_tensors_default_hooks(False)
    return (found[0], found[1]) if found else None


def clear_hooks(module: nn.Module) -> None:
    """Remove all forward and backward hooks from a module, but not from its children."""
    for hooks in (
        module._forward_hooks,
        module._forward_pre_hooks,
        module._backward_hooks,
        module._backward_pre_hooks,
    ):
        hooks.clear()


def has_gradient_hooks(tensor: Tensor, *, besides: tuple[type, ...] = ()) -> bool:
    """Return whether a tensor has a hook on its gradient.

    Args:
        tensor: Tensor to inspect.
        besides: Classes of hooks that do not count.

    Returns:
        True if a backward would call at least one hook of another class.
    """
    return any(not isinstance(hook, besides) for hook in (tensor._backward_hooks or {}).values())


def run_last(param: nn.Parameter, kind: type) -> None:
    """Call hooks of one class after all others, when a gradient was accumulated.

    Args:
        param: Parameter with hooks of `register_post_accumulate_grad_hook`.
        kind: Class of the hooks that are called last.
    """
    hooks = param._post_accumulate_grad_hooks
    if hooks is not None and len(hooks) > 1:
        for key in [key for key, hook in hooks.items() if isinstance(hook, kind)]:
            hooks[key] = hooks.pop(key)  # torch does not follow `move_to_end`


def calls_under_way(module: nn.Module) -> int:
    """Return how many calls of a module are running on this thread."""
    code = nn.Module.__call__.__code__
    frame: FrameType | None = sys._getframe()
    found = 0
    while frame is not None:
        if frame.f_code is code and frame.f_locals.get("self") is module:
            found += 1
        frame = frame.f_back
    return found


def ends_recomputation(error: BaseException) -> bool:
    """Return whether an exception is how checkpoint ends a complete recomputation.

    It is not an error.
    """
    return isinstance(error, torch.utils.checkpoint._StopRecomputationError)


def in_torch_func() -> bool:
    """Return whether a torch.func transform (grad, vjp, jvp, jacrev) is active."""
    if torch._C._functorch.peek_interpreter_stack() is None:
        return False
    derives = (torch._C._functorch.TransformType.Grad, torch._C._functorch.TransformType.Jvp)
    return any(
        level.key() in derives for level in torch._C._functorch.get_interpreter_stack() or ()
    )


def outside_torch_func() -> AbstractContextManager[Any]:
    """Return a context whose operators torch.func transforms do not differentiate.

    Results of operators in the context are plain tensors.
    """
    return torch._functorch.pyfunctorch.temporarily_clear_interpreter_stack()


def storage_users(tensor: Tensor) -> int:
    """Return how many tensors use this tensor's storage, including itself."""
    storage = tensor.untyped_storage()
    # The Python storage object counts itself
    return int(torch._C._storage_Use_Count(storage._cdata)) - 1


def version_of(tensor: Tensor) -> int:
    """Return a tensor's version: how many in-place operations autograd has counted."""
    return tensor._version


def is_traced() -> bool:
    """Return whether torch.compile is tracing a function in this thread."""
    return torch._guards.TracingContext.try_get() is not None


def parameters_dict(module: Any) -> Any:
    """Return the dict of a module's own parameters, or None if it has none."""
    return getattr(module, "_parameters", None)


def keep_parameters_in(module: Any, params: dict[str, Any]) -> None:
    """Replace the dict of a module's own parameters.

    Args:
        module: Module to change.
        params: Parameters by name, which the module uses from now on.
    """
    module._parameters = params


def fake_tensors() -> Any:
    """Return a context in which operators compute only shapes and dtypes (fake tensors).

    Its method `from_tensor` returns the fake tensor for a real one.
    """
    return torch._subclasses.FakeTensorMode(allow_non_fake_inputs=True)


def has_no_values(tensor: Tensor) -> bool:
    """Return whether a tensor has only a shape and a dtype.

    True on the meta device and for results of `fake_tensors`.
    """
    return tensor.is_meta or isinstance(tensor, torch._subclasses.FakeTensor)


FUSED_UPDATES: dict[
    str, Callable[..., None]
] = {  # operators over lists of tensors, by the names of torch's optimizers
    "Adam": torch._fused_adam_,
    "AdamW": torch._fused_adamw_,
    "SGD": torch._fused_sgd_,
    "Adagrad": torch._fused_adagrad_,
}


def double_norms(tensors: list[Tensor]) -> list[Tensor]:
    """Return the norm of each tensor, summed in float64.

    On a GPU this is one pass over memory.
    """
    return list(torch._foreach_norm(tensors, 2, dtype=torch.float64))


def cpu_attention() -> tuple[Any, Any] | None:
    """Return the operators of torch's CPU attention, forward and backward.

    None if this torch does not have them.
    """
    aten = torch.ops.aten
    name = "_scaled_dot_product_flash_attention_for_cpu"
    found = getattr(aten, name, None), getattr(aten, f"{name}_backward", None)
    return None if None in found else found


def argument_of(operator: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return an argument of an operator call by its name in the schema.

    Args:
        operator: An operator of torch.
        name: The name of the argument.
        args: Positional arguments of the call.
        kwargs: Keyword arguments of the call.

    Returns:
        The argument or its default; None if the operator has no such argument.
    """
    if name in kwargs:
        return kwargs[name]
    for place, argument in enumerate(operator._schema.arguments):
        if argument.name == name:
            return args[place] if place < len(args) else argument.default_value
    return None


def written_by(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
    """Return the arguments that an operator call writes in place.

    Args:
        operator: An operator of torch.
        args: Positional arguments of the call.
        kwargs: Keyword arguments of the call.

    Returns:
        The tensors among the arguments that the operator changes.
    """
    schema = getattr(operator, "_schema", None)  # higher-order operators have none
    if schema is None or not schema.is_mutable:
        return []
    names = [
        each.name
        for each in schema.arguments
        if each.alias_info is not None and each.alias_info.is_write
    ]
    return [argument_of(operator, name, args, kwargs) for name in names]


class _Dispatch(TorchDispatchMode):
    supports_higher_order_operators = True

    def __init__(self, call: Dispatched, begin: Callable[[], None]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.call = call
        self.begin = begin

    def __enter__(self) -> Any:
        self.begin()
        return super().__enter__()  # type: ignore[no-untyped-call]

    def __torch_dispatch__(
        self, operator: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        return self.call(operator, args, kwargs or {})


def detached_below_autograd(tensor: Tensor) -> Tensor:
    """Return an alias of a tensor that has the same version counter.

    For use in a dispatch mode, where `detach` returns an alias with its own counter.
    """
    with torch._C._SetExcludeDispatchKeyGuard(torch._C.DispatchKey.ADInplaceOrView, False):
        return tensor.detach()


def dispatch_mode(call: Dispatched, begin: Callable[[], None] = lambda: None) -> Any:
    """Return a context that replaces every operator below autograd.

    Args:
        call: Called with (operator, args, kwargs); its result is the result of the operator.
        begin: Called whenever the context is entered.

    Returns:
        A context manager. It affects the operators that run inside its block.
    """
    return _Dispatch(call, begin)


def held_by(module: nn.Module) -> list[nn.Parameter | nn.Module | None]:
    """Return a module's own parameters and submodules, without names.

    It takes a tenth of the time of `named_parameters`.
    """
    return [*module._parameters.values(), *module._modules.values()]


def is_persistent_buffer(module: nn.Module, name: str) -> bool:
    """Return whether a state dict contains a module's own buffer.

    Args:
        module: Module that has the buffer.
        name: Name of the buffer in the module.

    Returns:
        False for parameters and for buffers that were registered with `persistent=False`.
    """
    return name not in module._non_persistent_buffers_set


def state_names(model: nn.Module) -> dict[str, str]:
    """Return, for each name in a model's state dict, the first name of the same tensor.

    A name maps to itself unless the tensor is tied. The order is that of the state dict.
    """
    first: dict[int, str] = {}
    found: dict[str, str] = {}
    for prefix, module in model.named_modules(remove_duplicate=False):
        dot = f"{prefix}." if prefix else ""
        for name, param in module.named_parameters(recurse=False, remove_duplicate=False):
            found[dot + name] = first.setdefault(id(param), dot + name)
        for name, buffer in module.named_buffers(recurse=False, remove_duplicate=False):
            if is_persistent_buffer(module, name):
                found[dot + name] = first.setdefault(id(buffer), dot + name)
    return found


def call_instead(module: nn.Module, call: Callable[..., Any]) -> None:
    """Make calls of a module run another function, before any hook.

    Args:
        module: Module whose calls are replaced. `call_plainly` still calls it with its hooks.
        call: Function that receives the arguments of the call.
    """
    module._compiled_call_impl = call


def call_plainly(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """Call a module with its hooks, ignoring `call_instead`.

    Args:
        module: Module to call.
        *args: Positional arguments of its forward.
        **kwargs: Keyword arguments of its forward.

    Returns:
        The output of the module.
    """
    return module._call_impl(*args, **kwargs)


# The attributes in which torch keeps the hooks of one optimizer.
_OPTIMIZER_HOOKS = (
    "_optimizer_step_pre_hooks",
    "_optimizer_step_post_hooks",
    "_optimizer_state_dict_pre_hooks",
    "_optimizer_state_dict_post_hooks",
    "_optimizer_load_state_dict_pre_hooks",
    "_optimizer_load_state_dict_post_hooks",
)


def share_hooks(outer: torch.optim.Optimizer, inner: torch.optim.Optimizer) -> None:
    """Make the hooks that are registered on either of two optimizers those of both.

    Args:
        outer: The optimizer that a program calls.
        inner: The optimizer that computes.
    """
    for name in _OPTIMIZER_HOOKS:
        setattr(outer, name, getattr(inner, name))


def adopt_step_hooks(outer: torch.optim.Optimizer, inner: torch.optim.Optimizer) -> None:
    """Run torch's step hooks around the step of the outer optimizer.

    These are the hooks of the inner optimizer and those of all optimizers.

    Args:
        outer: The optimizer that a program calls.
        inner: The optimizer that computes.
    """
    share_hooks(outer, inner)
    torch.optim.Optimizer._patch_step_function(outer)


def mark_stepped(inner: torch.optim.Optimizer) -> None:
    """Record that an optimizer has stepped, for torch's learning-rate schedules.

    Schedules check the optimizer that they were created with. Its own `step` runs tile by tile,
    later, or never on a rank without a shard.
    """
    inner._opt_called = True  # type: ignore[attr-defined]


class ScalesItself:
    """An optimizer that rejects torch.amp.GradScaler, copies and pickles.

    The scaler reads `_step_supports_amp_scaling` first, and that raises.
    """

    def __reduce_ex__(self, protocol: Any) -> Any:  # torch's would return a part of the object
        raise UsageError(
            f"{type(self).__name__} cannot be copied or pickled.",
            "Its states belong to one model on this rank, and a copy would have no model.",
            "save state_dict(), and load it into an optimizer that was created in the same way.",
        )

    @property
    def _step_supports_amp_scaling(self) -> bool:
        raise UsageError(
            "a torch.amp.GradScaler steps an optimizer of deepseek_zero.",
            "It checks whole gradients for infinities, but each rank holds slices; losses would "
            "be scaled twice.",
            'remove it: "fp16": {"enabled": true} scales losses, skips steps and adjusts the '
            "scale. A scaler with enabled=False is allowed.",
        )


def replace_rendezvous(scheme: str, wrap: Callable[[Any], Any]) -> None:
    """Replace torch's rendezvous handler for a URL scheme.

    Args:
        scheme: The scheme, such as "env".
        wrap: A function that returns the new handler from the old one. It is applied once.
    """
    handlers = import_module("torch.distributed.rendezvous")._rendezvous_handlers
    if getattr(handlers[scheme], "wrapped_by", None) is not wrap:
        wrapped = wrap(handlers[scheme])
        wrapped.wrapped_by = wrap
        handlers[scheme] = wrapped


def without_torch_function() -> Any:
    """Return a context in which `__torch_function__` of subclasses is not called.

    `sharding/sharded_parameter.py` inspects its own tensors in it.
    """
    return torch._C.DisableTorchFunctionSubclass()


@dataclass(frozen=True)
class PerDevice:
    """A size that differs between CPU and accelerator.

    On a CPU it should fit a cache; on an accelerator it should be large, because each call is
    expensive.
    """

    cpu: int
    accelerator: int

    def on(self, device: torch.device) -> int:
        """Return the size to use on a device: that for a CPU or that for an accelerator."""
        return self.cpu if device.type == "cpu" else self.accelerator


def default_device() -> torch.device:
    """Return the device that this rank trains on.

    It is the device in DEEPSEEK_ZERO_DEVICE, else this rank's GPU if there is one, else the CPU.

    Raises:
        UsageError: The variable names a device that torch does not have.
    """
    variable = next((name for name in DEVICE_VARIABLES if os.environ.get(name)), None)
    if variable is not None:
        return _named_device(variable, os.environ[variable])
    if torch.cuda.is_available() and torch.cuda.device_count() > 0:
        return torch.device("cuda", local_rank() % torch.cuda.device_count())
    return CPU


def _named_device(variable: str, kind: str) -> torch.device:
    if kind == "cpu":
        return CPU
    module: Any = getattr(torch, kind, None)
    if not (
        hasattr(module, "is_available")
        and hasattr(module, "device_count")
        and module.is_available()
    ):
        raise UsageError(
            f"{variable}={kind}, but torch has no such device on this machine.",
            "It names the device that runs forward and backward.",
            f"unset {variable}, or set it to cpu or cuda.",
        )
    return torch.device(kind, local_rank() % module.device_count())


def has_fast_bf16(device: torch.device) -> bool:
    """Return whether a device has native bf16 arithmetic.

    GPUs have it from compute capability 8.0, CPUs with AVX512-BF16 or AMX.
    """
    if device.type == "cuda":
        return bool(torch.cuda.is_bf16_supported(including_emulation=False))
    return not {"avx512_bf16", "amx_bf16"}.isdisjoint(THIS_HOST.cpu_flags())


def synchronize(device: torch.device) -> None:
    """Wait until a device has finished all queued work.

    On a CPU the function returns immediately.
    """
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def pci_address(gpu: int) -> str:
    """Return the address of a CUDA device on the PCI bus, as /sys writes it.

    Args:
        gpu: Index of the device.
    """
    found: Any = torch.cuda.get_device_properties(gpu)
    return f"{found.pci_domain_id:04x}:{found.pci_bus_id:02x}:{found.pci_device_id:02x}.0"


def free_device_bytes(device: torch.device) -> int | None:
    """Return the free bytes of a GPU's memory, or None on a CPU."""
    return int(torch.cuda.mem_get_info(device)[0]) if device.type == "cuda" else None


def allocated_bytes(device: torch.device) -> int:
    """Return the bytes that torch has allocated on a CUDA device.

    On the CPU it is the resident set of this process.
    """
    if device.type == "cuda":
        return torch.cuda.memory_allocated(device)
    return int(os.pread(_statm(os.getpid()), 256, 0).split()[1]) * os.sysconf("SC_PAGE_SIZE")


@lru_cache(maxsize=1)
def _statm(process: int) -> int:
    """Return an open descriptor, because opening takes ten times as long as reading.

    `process` is the cache key: a child process needs another descriptor.
    """
    return os.open("/proc/self/statm", os.O_RDONLY | os.O_CLOEXEC)
