"""`zero.Init`: build a model shard by shard, with the values of a plain build.

When a parent registers a submodule, the submodule is complete, and its parameters are sharded: each
rank keeps an equal slice of rank 0's values. A later initialization (`model.apply(init_weights)`)
gathers each sharded parameter for one operation, and shards it again. Only torch's own registration
hook is used. `wrap.py` turns the slices into units.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_module_registration_hook

from ..base.device import default_device, storage_users, version_of, without_torch_function
from ..base.errors import AtRestError, UsageError
from ..base.given import refuse
from ..base.mesh import current_mesh
from ..base.quantities import ceil_div
from ..comm.collectives import Comm, propagate_errors, scatter
from ..comm.net.store import launchers_store
from ..planner.auto_wrap_policy import DECLARED_FP32, full_precision_names
from ..planner.plan import Plan
from ..precision.policy import cast_master
from ..sharding.sharded_parameter import (
    NEEDS_ELEMENTS,
    ModelBuilder,
    ShardedParameter,
    dtype_of_conversion,
    owner_of,
    set_owner,
)
from .ties import tie_shared

NUMBERS = itertools.count()


@dataclass(eq=False)
class InitShard(ModelBuilder):
    """The sharded values of one parameter of a model under `zero.Init`.

    Attributes:
        param: The parameter that this object owns.
        param_class: The class of the parameter before it was sharded.
        shape: The shape of the whole parameter.
        slice: This rank's slice of its elements, flat.
        session: The `Init` context in which the parameter was sharded.
        number: The index of the parameter in the order of construction, the same on every rank.
        unsharded: The whole elements, while an initialization uses them.
        is_in_block: Whether the parameter is whole inside GatheredParameters.
        mark: A fingerprint of the values at the start of GatheredParameters, to detect changes.
        modifier: The rank that last gave it values inside GatheredParameters.
    """

    param: weakref.ref[nn.Parameter]
    param_class: type[nn.Parameter]
    shape: torch.Size
    slice: Tensor
    session: Init
    number: int
    unsharded: Tensor | None = None
    is_in_block: bool = False
    mark: tuple[int, int] = (0, 0)
    modifier: int | None = None

    def whole(self) -> Tensor:
        """Gather all elements into a new flat tensor.

        Note:
            Collective: every rank must call it.
        """
        comm = self.session.open_comm()
        padded = comm.empty(self.slice.numel() * comm.size, self.slice.dtype)
        padded.chunk(comm.size)[comm.rank].copy_(self.slice) if padded.numel() else None
        if comm.size > 1 and padded.numel():
            comm.all_gather(padded, "gather", "a parameter under construction").wait()
        # Not a view: the storage must have no second user
        return padded.resize_(self.shape.numel())

    # -- GatheredParameters before there is an engine

    def pin_unsharded(self, param: nn.Parameter, watch: bool) -> None:
        """Gather the parameter and keep it whole until `reshard`.

        Args:
            param: The parameter that this object owns.
            watch: Whether to record the values for `is_changed`.

        Note:
            Collective: every rank must call it.
        """
        self.session.reshard_pinned()
        if self.unsharded is None:
            self._show(param)
        self.is_in_block = True
        self.mark = _mark_of(param) if watch else (0, 0)

    def is_changed(self, param: nn.Parameter) -> bool:
        """Return whether the parameter has changed since `pin_unsharded`."""
        return _mark_of(param) != self.mark or self.is_replaced(param)

    def is_replaced(self, param: nn.Parameter) -> bool:
        """Return whether the parameter's whole memory was replaced (`.data = `, `set_`)."""
        whole = self.unsharded
        return (
            whole is not None
            and param.untyped_storage().data_ptr() != whole.untyped_storage().data_ptr()
        )

    def lend_scratch(self, param: nn.Parameter) -> bool:
        """Give a sharded parameter temporary memory for an initialization that must not change it.

        This concerns a parameter that rank r has initialized inside
        GatheredParameters(modifier_rank=r). Another initialization must have no effect on the other
        ranks: transformers marks initialized parameters on rank r only, and initializes them again
        elsewhere. On rank r, and for parameters that no rank has initialized like this, an
        initialization is refused.

        Returns:
            Whether temporary memory was provided; if not, the operation must be refused.
        """
        if self.modifier is None or self.modifier == self.session.open_comm().rank:
            return False
        self.session.end_scratch()
        self.session.scratch = weakref.ref(param)
        scratch = torch.full(
            self.shape, float("nan"), dtype=self.slice.dtype, device=self.slice.device
        )
        param.__class__ = self.param_class
        param.data = scratch
        return True

    def convert(self, param: nn.Parameter, dtype: torch.dtype) -> None:
        """Change the dtype of this rank's slice.

        Args:
            param: The parameter; it must be sharded.
            dtype: The dtype to which this rank's slice is cast.
        """
        self.slice = self.slice.to(dtype)
        with without_torch_function():
            self.hide(param)

    def hide(self, param: nn.Parameter) -> None:
        """Replace the parameter's memory by an empty tensor, as while it is sharded."""
        param.data = _nothing(self.slice.dtype, self.slice.device).expand(self.shape)
        param.__class__ = ShardedParameter

    def reshard(self, param: nn.Parameter, source: int | None) -> None:
        """Shard the parameter again, with the values of one rank or the old ones.

        Args:
            param: The parameter that this object owns.
            source: The rank whose values are kept; with None, the old values are kept.

        Note:
            Collective: every rank must call it.
        """
        comm = self.session.open_comm()
        if source is not None:
            with propagate_errors(comm):
                if comm.rank == source:
                    refuse_other_form(self.name_of(param), param.data, self.shape, self.slice.dtype)
            values = param.data if comm.rank == source else self.slice.new_empty(self.shape)
            self.slice.copy_(_scatter_slices(comm, values, source, self.slice.dtype))
            self.modifier = source
        self.unsharded = None
        self.is_in_block = False
        self.session.unsharded = [shard for shard in self.session.unsharded if shard is not self]
        self.hide(param)

    # -- the protocol `Owner` (sharded_parameter.py)

    def fetch_for(self, param: nn.Parameter) -> bool:
        """Gather the parameter for one operation of a later initialization.

        Returns:
            Whether the model is still under construction.

        Note:
            Collective: every rank builds the same model.
        """
        if not self.session.is_open:
            return False
        self.session.reshard_pinned()
        with torch.no_grad():
            self._show(param)
        self.session.unsharded.append(self)
        return True

    def _show(self, param: nn.Parameter) -> None:
        """Gather the values into the parameter. Every rank must call it."""
        self.unsharded = self.whole()
        param.__class__ = self.param_class
        param.data = self.unsharded.view(self.shape)

    def write_param(self, param: nn.Parameter, value: Tensor) -> None:
        """Write this rank's slice of a whole value.

        Args:
            param: The parameter that this object owns.
            value: The whole value; it is expanded to the parameter's shape.
        """
        comm = self.session.open_comm()
        flat = value.detach().expand(self.shape).reshape(-1)
        start = comm.rank * self.slice.numel()
        part = flat[start : start + self.slice.numel()]
        self.slice[: part.numel()].copy_(part)

    def give_up(self, param: nn.Parameter) -> tuple[Tensor, type[nn.Parameter]]:
        """Return a parameter's values, flat, and its original class, to an engine that owns it now.

        Note:
            Collective if the values are sharded: every rank must call it.
        """
        self.session.end_scratch()
        values = param.data.reshape(-1) if self.unsharded is not None else self.whole()
        with without_torch_function():
            param.__dict__.pop("_zero_init", None)
        return values, self.param_class

    def name_of(self, param: nn.Parameter) -> str:
        return f"a parameter of shape {tuple(self.shape)} under zero.Init"

    def answer(self, param: nn.Parameter, name: str, args: Any, kwargs: Mapping[str, Any]) -> Any:
        """Handle an operation that a program calls on a sharded parameter after construction.

        Args:
            param: The sharded parameter on which the program called the operation.
            name: The name of the operation.
            args: The positional arguments of the operation.
            kwargs: The keyword arguments of the operation.

        Returns:
            The result of an operation that needs no values, such as a conversion; `NEEDS_ELEMENTS`
            if an initialization has to run on temporary memory.

        Raises:
            AtRestError: The operation reads elements and is not an initialization.
        """
        found = _converted(self, param, name, args, kwargs)
        if found is NEEDS_ELEMENTS:
            # An initialization changes its tensor, or a view that it takes of it
            may_initialize = name == "__getitem__" or (
                name.endswith("_") and not name.endswith("__")
            )
            if not may_initialize or not self.lend_scratch(param):
                raise self.at_rest(param, name)
        return found

    def copied(self, param: nn.Parameter) -> nn.Parameter:
        with without_torch_function():
            mine = self.slice.to(param.dtype, copy=True)
            nothing = _nothing(mine.dtype, mine.device).expand(self.shape)
            copy = nn.Parameter(nothing, requires_grad=param.requires_grad)
            shard = self.session.own(copy, self.param_class, mine)
        shard.modifier = self.modifier
        if any(each() is param for each in self.session._uncast):
            self.session._uncast.append(weakref.ref(copy))
        return copy

    def at_rest(self, param: nn.Parameter, operation: str) -> AtRestError:
        return AtRestError(
            f"{self.name_of(param)} is sharded, and no engine holds it yet; '{operation}' cannot "
            "use it.",
            "Each rank holds only its slice.  transformers builds models so, also after training, "
            "while a ZeRO-3 configuration lives (HfDeepSpeedConfig, or the Trainer's arguments).",
            "pass the model to initialize; read or change a parameter inside `with "
            "deepseek_zero.zero.GatheredParameters(param, modifier_rank=0):` on all ranks; or, for "
            "a whole model, drop that configuration first: "
            "transformers.integrations.deepspeed.unset_hf_deepspeed_config().",
        )

    def is_in_engine(self) -> bool:
        return False


class Init:
    """Context manager that shards the parameters of new modules over all ranks.

    After a module is built, each rank keeps an equal slice of each of its parameters, with the
    values of rank 0. Without a launcher there is one rank, whose slices are whole parameters.

    Args:
        module: A module that was built before, whose parameters are sharded immediately; None for
            no such module.
        dtype: The dtype to which floating-point values are cast when they are sharded. If a module
            declares parameters that stay fp32 (`full_precision_names`), all others are cast when
            the context ends, because their names are known only then.
        enabled: If false, the context does nothing.

    Raises:
        UsageError: An argument has another type, or the object is entered inside its own block.

    Note:
        Collective: every rank must build the same model.
    """

    def __init__(
        self,
        module: nn.Module | None = None,
        *,
        dtype: torch.dtype | None = None,
        enabled: bool = True,
    ) -> None:
        self.enabled = enabled
        self.dtype = dtype
        self.is_open = False
        self.unsharded: list[InitShard] = []
        # A weak reference to the parameter of `InitShard.lend_scratch`
        self.scratch: Callable[[], Any] = lambda: None
        self._handle: Any = None
        self._module_init: Any = None
        # Modules that declare fp32 parameters, and parameters that are not cast yet
        self._declaring: list[weakref.ref[nn.Module]] = []
        self._uncast: list[weakref.ref[nn.Parameter]] = []
        self._comm: Comm | None = None
        self._device = default_device()
        if not isinstance(module, nn.Module | None):
            raise refuse(
                "zero.Init",
                "module",
                module,
                "a torch.nn.Module that exists already",
                "leave it out.",
            )
        if not isinstance(dtype, torch.dtype | None):
            raise refuse(
                "zero.Init",
                "dtype",
                dtype,
                "a torch.dtype",
                "pass one, for example torch.bfloat16.",
            )
        if module is not None and enabled:
            self.shard(module)

    def open_comm(self) -> Comm:
        """Return the communicator of the building ranks; create it on first use.

        Note:
            Collective at the first call.
        """
        if self._comm is None:
            self._comm = Comm(
                current_mesh(self._device, store_of=launchers_store).device, trains=False
            )
        return self._comm

    def __enter__(self) -> Init:
        if self._handle is not None:
            raise UsageError(
                "a zero.Init object was entered inside its own block.",
                "It would go on to shard all modules that are built after the outer block.",
                "create another zero.Init for the inner block, or leave the inner block out.",
            )
        if self.enabled:
            self.is_open = True
            self._handle = register_module_module_registration_hook(self._on_registration)
            if self.dtype is not None:
                self._watch_constructors()
        return self

    def _watch_constructors(self) -> None:
        """Record each module that declares fp32 parameters, before its children are built."""
        plain = nn.Module.__init__

        def noting(module: nn.Module, *args: Any, **kwargs: Any) -> None:
            if any(getattr(module, name, None) for name in DECLARED_FP32):
                self._declaring.append(weakref.ref(module))
            plain(module, *args, **kwargs)

        self._module_init = plain
        nn.Module.__init__ = noting  # type: ignore[method-assign, assignment]

    def __exit__(self, kind: object, *_: object) -> None:
        if self._handle is None:
            return
        self._handle.remove()
        self._handle = None
        if self._module_init is not None:
            nn.Module.__init__ = self._module_init  # type: ignore[method-assign]
            self._module_init = None
        if kind is None:
            self._complete()
            self._cast_rest()
        self.is_open = False

    def _complete(self) -> None:
        """End the construction of all modules.

        Note:
            Collective: every rank must call it.
        """
        self.reshard_pinned()

    def dtype_of(self, param: nn.Parameter) -> torch.dtype:
        """Return the dtype in which a parameter is sharded."""
        if self._declaring or self.dtype is None or not param.is_floating_point():
            return param.dtype
        return self.dtype

    def _cast_rest(self) -> None:
        """Cast the remaining parameters, except those that a module keeps in fp32."""
        declaring = [module for each in self._declaring if (module := each()) is not None]
        kept = {
            id(module.get_parameter(name))
            for module in declaring
            for name in full_precision_names(module)
        }
        for each in self._uncast:
            param = each()
            shard = owner_of(param) if param is not None else None
            if param is not None and isinstance(shard, InitShard) and id(param) not in kept:
                assert self.dtype is not None
                shard.convert(param, self.dtype)
        self._uncast = []

    def _on_registration(self, parent: nn.Module, name: str, child: nn.Module | None) -> None:
        if child is not None:
            self.shard(child)

    def shard(self, module: nn.Module) -> None:
        """Shard all parameters of a module that are not sharded yet.

        Args:
            module: The module, whose construction is complete.

        Note:
            Collective: every rank must call it.
        """
        self.reshard_pinned()
        tie_shared(
            module, [param for shard in self.unsharded if (param := shard.param()) is not None]
        )
        with torch.no_grad():
            for param in module.parameters():
                if owner_of(param) is None and not param.is_meta:
                    self.cut(param)

    def cut(self, param: nn.Parameter) -> None:
        """Shard one parameter over the building ranks.

        Args:
            param: A parameter with all values.

        Note:
            Collective: every rank must call it.
        """
        dtype = self.dtype_of(param)
        if self.dtype not in (None, dtype) and dtype.is_floating_point:
            self._uncast.append(weakref.ref(param))
        mine = _scatter_slices(self.open_comm(), param.data, 0, dtype).clone()
        self.own(param, type(param), mine)

    def own(self, param: nn.Parameter, kind: type[nn.Parameter], mine: Tensor) -> InitShard:
        """Shard a parameter: keep this rank's slice, and free the memory of the whole parameter.

        After the model is wrapped, the parameter's group owns the slice.

        Args:
            param: The parameter that this object owns.
            kind: The class that the parameter had before it was sharded.
            mine: This rank's slice, flat.

        Returns:
            The owner of the slice, through which the parameter is gathered.
        """
        shard = InitShard(weakref.ref(param), kind, param.shape, mine, self, next(NUMBERS))
        set_owner(param, shard)
        param.__dict__["_zero_init"] = shard
        shard.hide(param)
        return shard

    def end_scratch(self) -> None:
        """Free the temporary memory on which initializations of sharded parameters have run."""
        param = self.scratch()
        self.scratch = lambda: None
        shard = owner_of(param) if param is not None else None
        if param is not None and isinstance(shard, InitShard):
            shard.hide(param)

    def reshard_pinned(self) -> None:
        """Reshard the parameters that an initialization has gathered.

        A parameter stays whole as long as a view of it exists.
        """
        self.end_scratch()
        busy = []
        for shard in self.unsharded:
            param = shard.param()
            full = shard.unsharded
            if param is None or full is None:
                continue
            if shard.is_in_block:
                busy.append(shard)
                continue
            # The tensor and the parameter are two users; a third is a view of the caller
            is_replaced = shard.is_replaced(param)
            if not is_replaced and storage_users(full) > 2:
                busy.append(shard)
                continue
            with torch.no_grad():
                comm = self.open_comm()
                if is_replaced:  # all ranks run the same program, so they agree on it
                    dtype = self.dtype_of(param)
                    shard.shape = param.shape
                    shard.slice = _scatter_slices(comm, param.data, 0, dtype).clone()
                else:
                    shard.slice.copy_(_scatter_slices(comm, full, 0, shard.slice.dtype))
                shard.unsharded = None
                shard.hide(param)
        self.unsharded = busy


def _converted(
    owner: InitShard, param: nn.Parameter, name: str, args: Any, kwargs: Mapping[str, Any]
) -> Any:
    """Return the result of a call that needs no elements, or NEEDS_ELEMENTS.

    `detach` and `.data` return the parameter itself, which still refuses other operations. A
    conversion returns a handle. If the handle is assigned to `.data`, as `module.to(dtype)` does,
    the slice is converted.
    """
    if not args or args[0] is not param:
        return NEEDS_ELEMENTS
    if name == "detach" or (name == "data" and len(args) == 1):
        return param
    if name == "pad":
        widths = args[1] if len(args) > 1 else kwargs["pad"]
        return param if not any(widths) else NEEDS_ELEMENTS
    if name == "data" and type(args[1]) is ShardedParameter and owner_of(args[1]) is owner:
        with without_torch_function():
            dtype = args[1].dtype
        owner.convert(param, dtype)
        return None
    wanted = dtype_of_conversion(name, args, kwargs)
    if wanted is None:
        return NEEDS_ELEMENTS
    with without_torch_function():
        nothing = _nothing(wanted, param.device).expand(param.shape)
        handle = nn.Parameter(nothing, requires_grad=False)
        set_owner(handle, owner)
        handle.__class__ = ShardedParameter
        return handle


def refuse_other_form(name: str, value: Tensor, shape: torch.Size, dtype: torch.dtype) -> None:
    """Check that a replacement of a parameter's memory has its shape and dtype.

    Args:
        name: The name of the parameter.
        value: The tensor with which the program replaced the parameter's memory.
        shape: The shape of the parameter.
        dtype: The dtype of its slices.

    Raises:
        UsageError: The shape or the dtype differs.
    """
    if value.shape != shape or value.dtype != dtype:
        raise UsageError(
            f"inside GatheredParameters the memory of '{name}' was replaced by a tensor of shape "
            f"{tuple(value.shape)} and {value.dtype}; the parameter has shape {tuple(shape)} and "
            f"{dtype}.",
            "Every rank holds a slice of that shape and dtype.",
            "assign a tensor of the same shape and dtype, or change the values in place (`copy_`).",
        )


def _scatter_slices(comm: Comm, value: Tensor, source: int, dtype: torch.dtype) -> Tensor:
    """Return this rank's slice of the value on the rank `source`.

    Note:
        Collective: every rank must call it.
    """
    per_rank = ceil_div(value.numel(), comm.size)
    padded = comm.empty(per_rank * comm.size, dtype).zero_()
    padded[: value.numel()].copy_(value.reshape(-1))
    mine = padded.chunk(comm.size)[comm.rank] if padded.numel() else padded
    if comm.size > 1 and per_rank:
        scatter(comm, padded.chunk(comm.size), mine, "a parameter under construction", source)
    return mine


def _nothing(dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return the placeholder value of all elements of a sharded parameter: NaN or 0."""
    value = float("nan") if dtype.is_floating_point else 0
    return torch.full((), value, dtype=dtype, device=device)


def _mark_of(param: nn.Parameter) -> tuple[int, int]:
    """Return a value that changes with the parameter.

    In-place operations increase the version, and operations on `.data` change the sum of the bytes.
    """
    return version_of(param), int(param.data.reshape(-1).view(torch.uint8).sum(dtype=torch.int64))


def materialise(model: nn.Module, comm: Comm, device: torch.device) -> Iterator[nn.Module]:
    """Initialize a model on the meta device, module by module, into shards.

    Each rank keeps only its slices. The module's own `reset_parameters` draws the values, in the
    order in which modules were registered. They equal those of a plain construction with the same
    seed if construction draws nothing else. A tied parameter gets the values that the first of its
    modules draws, and parameters that have values keep them.

    Args:
        model: The model, whose parameters may be on the meta device.
        comm: The communicator of the ranks over which each parameter is sharded.
        device: The device on which the values are initialized.

    Yields:
        Each module after its own parameters have values, so that not all need to be held at once.

    Raises:
        UsageError: A module has no `reset_parameters`.

    Note:
        Collective over `comm`.
    """
    session = Init()
    session._comm = comm
    session._device = device
    for name, module in model.named_modules():
        own = {key: value for key, value in module.named_parameters(recurse=False) if value.is_meta}
        stray = [key for key, value in module.named_buffers(recurse=False) if value.is_meta]
        if not own and not stray:
            continue
        reset = getattr(module, "reset_parameters", None)
        if reset is None:
            raise UsageError(
                f"'{name or type(model).__name__}' ({type(module).__name__}) is on the meta device "
                "and has no reset_parameters(), so its values cannot be drawn.",
                "A model on the meta device has shapes and no values.",
                "give the class a reset_parameters(), or build the model under `with "
                "deepseek_zero.zero.Init():`.",
            )
        for param in own.values():
            real = nn.Parameter(
                torch.empty_like(param, device=device), requires_grad=param.requires_grad
            )
            # Keep the object, so that optimizers built earlier stay valid
            torch.utils.swap_tensors(param, real)
        for key in stray:
            setattr(module, key, torch.empty_like(getattr(module, key), device=device))
        # Parameters that have values, for example tied ones, keep them
        params = dict(module.named_parameters(recurse=False, remove_duplicate=False))
        ready = {key: param for key, param in params.items() if key not in own}
        for key, param in ready.items():
            empty = torch.empty(param.shape, dtype=param.dtype, device=device)
            setattr(module, key, nn.Parameter(empty, requires_grad=False))
        reset()
        for key, param in ready.items():
            setattr(module, key, param)
        with torch.no_grad():
            for param in own.values():
                if owner_of(param) is None:
                    session.cut(param)
        yield module


def ready_units(model: nn.Module, plan: Plan, comm: Comm) -> Iterator[int]:
    """Yield the number of each unit as soon as all its parameters have values.

    Parameters on the meta device get their values from `materialise`.

    Args:
        model: The model, whose parameters may be on the meta device.
        plan: The plan of the model.
        comm: The communicator of all ranks.

    Note:
        Collective if a parameter is on the meta device.
    """
    params = dict(model.named_parameters())
    lacking = {
        number: {
            id(params[name])
            for group in unit.groups
            for name in group.names
            if params[name].is_meta
        }
        for number, unit in enumerate(plan.units)
    }
    yield from (number for number, missing in lacking.items() if not missing)
    if not any(lacking.values()):
        return
    for module in materialise(model, comm, plan.mesh.device):
        here = {id(param) for param in module.parameters(recurse=False)}
        for number, missing in lacking.items():
            if missing & here:
                missing -= here
                if not missing:
                    yield number


# (start, stop) -> flat parts of a value, each with its first element
Reading = Callable[[int, int], Iterable[tuple[int, Tensor]]]


def take_slice(param: nn.Parameter, session: Init, read: Reading) -> None:
    """Store this rank's slice of a value in a parameter under construction.

    Args:
        param: A parameter on the meta device, or one that is sharded already.
        session: The `zero.Init` context that shards a parameter on the meta device.
        read: Called with the first element and the end of a range. It yields pairs of an element
            number and the values from there on.
    """
    shard = owner_of(param)
    if isinstance(shard, InitShard):
        shard.session.reshard_pinned()
    else:
        shard = _empty_shard(param, session)
    start = shard.session.open_comm().rank * shard.slice.numel()
    for low, part in read(start, min(start + shard.slice.numel(), shard.shape.numel())):
        cast_master(
            part.to(shard.slice.device), shard.slice[low - start : low - start + part.numel()]
        )


def _empty_shard(param: nn.Parameter, session: Init) -> InitShard:
    """Shard a parameter on the meta device, with zeros as values."""
    kind = type(param)
    per_rank = ceil_div(param.numel(), session.open_comm().size)
    values = torch.zeros(per_rank, dtype=session.dtype_of(param), device=session._device)
    nothing = _nothing(values.dtype, values.device)
    real = nn.Parameter(nothing.expand(param.shape), requires_grad=param.requires_grad)
    torch.utils.swap_tensors(param, real)  # Keeps the object, so earlier optimizers stay valid
    return session.own(param, kind, values)
