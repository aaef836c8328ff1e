"""Find the chain of blocks in a model by one forward on fake tensors.

The run needs no memory or arithmetic, no change of the model, and no tracer. A model can be divided
between two blocks if the first argument of block k + 1 *is* the output of block k. If the output is
a tuple, its first element counts. In addition, no part may use any other value of another part: an
argument, an attribute, or an output that the model keeps (origins.py). Each stage then runs the
model's own forward on the same inputs, with placeholders for the blocks of other stages (stage.py).
`find_chain` checks this. It also determines the parameters and costs of the blocks and of the parts
before and after them.
"""

from __future__ import annotations

import inspect
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.overrides import TorchFunctionMode
from torch.utils.flop_counter import FlopCounterMode
from torch.utils.hooks import RemovableHandle

from ..base.device import default_device, fake_tensors, version_of
from ..base.errors import UsageError, brief
from ..base.nested import Args, Kwargs, all_tensors, map_inputs, map_tensors
from .messages import TensorForm
from .origins import BETWEEN, Origins, Sources, ValueSource


class ChainError(UsageError):
    """Raised if a model's forward is not a chain of blocks that a pipeline can divide."""


@dataclass
class ChainPart:
    """Parameters and costs of one block of a model, or of the part before or after all blocks.

    Attributes:
        name: Full name of the block, or a description of the part before or after the blocks.
        kind: Name of the block's class.
        params: Number of elements of each parameter, by its full name in `named_parameters`.
        flops: Floating-point operations of one forward.
        saved: Bytes that autograd saves for backward, without parameters.
        length: Length of the tuple that the block returns; None for a tensor.
        output: Shape and dtype of the block's output for one micro-batch with the sizes that
            `find_chain` received.
    """

    name: str
    kind: str = ""
    params: dict[str, int] = field(default_factory=dict)
    flops: int = 0
    saved: int = 0
    length: int | None = None
    output: TensorForm | None = None


@dataclass(frozen=True)
class Chain:
    """Describes a model whose forward calls a list of blocks one after the other.

    `find_chain` returns this description. A pipeline can divide the model between any two blocks.

    Attributes:
        container: Full name of the module whose children are the blocks.
        keys: Names of the blocks in the container.
        parts: The part of the forward before the blocks, each block, and the part after them.
    """

    container: str
    keys: tuple[str, ...]
    parts: tuple[ChainPart, ...]

    @property
    def blocks(self) -> tuple[ChainPart, ...]:
        """Return the parameters and costs of the blocks, in the order of the forward."""
        return self.parts[1:-1]


REMEDY = (
    "write the model as a PipelineModule: a list of layers, in which each takes the output of the "
    "previous one."
)


def find_chain(
    model: nn.Module,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    blocks: str | None = None,
) -> Chain:
    """Find the blocks between which a pipeline can divide a model.

    The model's forward runs once on fake tensors, so it needs no memory for activations. The model
    is not changed.

    Args:
        model: The whole model.
        args: Positional arguments of one micro-batch; only shapes and dtypes are used.
        kwargs: Keyword arguments of one micro-batch.
        blocks: Full name of the module whose children are the blocks. None chooses the list of
            modules with the most parameters in children of one class.

    Returns:
        A `Chain` with the parameters and costs of the blocks, and of the parts before and after
        the blocks. `cut_model` uses it to divide the model.

    Raises:
        ChainError: The model has no list of blocks, its forward cannot run on fake tensors, or the
            blocks are not a chain. In a chain, the forward calls each block once and in order, and
            passes to it only the output of the previous block and values that follow from the
            model's inputs. No buffer is written in one block and used in another. The error is
            also raised if the model has no module `blocks`, or if this module has no children.
    """
    container = container_of_blocks(model) if blocks is None else blocks
    if container is None:
        raise ChainError(
            f"{type(model).__name__} has no list of blocks.",
            "A pipeline cuts a model between the children of one ModuleList, ModuleDict or "
            "Sequential.",
            REMEDY,
        )
    _check_blocks(model, container)
    run = _FakeRun(model, container)
    run.watch(args, dict(kwargs or {}))
    return run.chain()


def _check_blocks(model: nn.Module, name: str) -> None:
    """Raise ChainError unless the model has a module of this name with children."""
    why = "The children of the module `blocks` are the blocks between which a pipeline cuts."
    fix = "pass the full name of the module that contains the blocks, or leave `blocks` out."
    try:
        module = model.get_submodule(name)
    except AttributeError:
        raise ChainError(
            f"{type(model).__name__} has no module named '{name}'.", why, fix
        ) from None
    if not list(module.children()):
        raise ChainError(f"'{name}' ({type(module).__name__}) has no children.", why, fix)


def container_of_blocks(model: nn.Module) -> str | None:
    """Return the name of the list of modules that probably are the blocks, or None.

    It has the most parameters in children of a single class. If several have equally many, the one
    with the most children is returned.
    """
    best = None
    best_score = (0, math.inf)
    for name, module in model.named_modules():
        children = list(module.children())
        is_list = isinstance(module, nn.ModuleList | nn.ModuleDict | nn.Sequential)
        if not is_list or len(children) < 2:
            continue
        held = Counter[type]()
        for child in children:
            held[type(child)] += sum(each.numel() for each in child.parameters())
        score = (max(held.values()), len(children))
        if score > best_score:
            best = name
            best_score = score
    return best


class _FakeRun(TorchFunctionMode):
    """One forward on fake tensors.

    Part 0 is before the blocks, and the last part is after them.
    """

    def __init__(self, model: nn.Module, container: str) -> None:
        super().__init__()
        self.model = model
        self.container = container
        self.box = model.get_submodule(container)
        self.keys, self.blocks = zip(*self.box.named_children(), strict=True)
        prefix = f"{container}." if container else ""
        inside = [
            ChainPart(f"{prefix}{key}", type(block).__name__)
            for key, block in zip(self.keys, self.blocks, strict=True)
        ]
        self.parts = [ChainPart("before"), *inside, ChainPart("behind")]
        self.now = 0  # the current part
        self.is_inside = False
        self.last_output: Tensor | None = None
        self.last_version = 0  # detects later writes in place
        self.names: dict[int, str] = {}
        self.fakes: dict[str, Tensor] = {}
        self.failure: ChainError | None = None
        self.flops = FlopCounterMode(display=False)
        self.counted = 0  # operations of the earlier parts
        self.memory: dict[int, Any] = {}  # storages that are counted or must not be
        self.origins = Origins(self._source, self._used)

    # -- the forward

    def watch(self, args: Sequence[Any], kwargs: Kwargs) -> None:
        """Run the model's forward once, and raise ChainError if it is not a chain."""
        device = default_device()  # the device to which the model and the sample will be moved
        with fake_tensors() as mode, torch.random.fork_rng(devices=[]):

            def faked(tensor: Tensor) -> Tensor:
                with mode:
                    return torch.empty_strided(
                        tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device
                    )

            for name, param in self.model.named_parameters():
                floats = param.is_floating_point() or param.is_complex()
                self.fakes[name] = nn.Parameter(faked(param), requires_grad=floats)
                self.names[id(self.fakes[name])] = name
                self._is_new(self.fakes[name])
                self.origins.has_param(self.fakes[name])
            buffers = {name: faked(buffer) for name, buffer in self.model.named_buffers()}
            for name, buffer in buffers.items():
                self.origins.has_input(buffer, name)

            def given_fake(tensor: Tensor) -> Tensor:
                fake = faked(tensor)
                self.origins.has_input(fake)
                return fake

            attributes = {module: dict(vars(module)) for module in self.model.modules()}
            handles = [*hold_back_caches(self.model), *self._hooks()]
            try:
                given = map_inputs((tuple(args), kwargs), given_fake)
                state: dict[str, Any] = {**self.fakes, **buffers}
                hooks = saved_tensors_hooks(self._saved, _unpacked)
                with self.origins.recording(), self.flops, hooks, self, torch.enable_grad():
                    output = torch.func.functional_call(
                        self.model, state, given[0], given[1], tie_weights=True
                    )
                    self._end_part()
            except ChainError:
                raise
            except Exception as error:
                if self.failure is not None:
                    raise self.failure from None
                raise ChainError(
                    f"{type(self.model).__name__} cannot run on fake tensors: {brief(error)}.",
                    "What it does depends on values, or the sample is no batch of this model.",
                    f"pass a sample that its forward takes, or {REMEDY}",
                ) from error
            finally:
                for handle in handles:
                    handle.remove()
                # attributes set by the run are fake tensors
                for module, before in attributes.items():
                    vars(module).clear()
                    vars(module).update(before)
        if self.failure is not None:
            raise self.failure
        if self.now != len(self.parts) - 1 or self.is_inside:
            raise self._refused(
                f"{self._called(self.now)} is not followed by {self._called(self.now + 1)} in the "
                "model's forward.",
                "The blocks of a chain are called one after the other, each once.",
            )
        self._used(self._sources_in(output))
        for name, (writer, user) in self.origins.shared_buffers().items():
            raise self._refused(
                f"buffer '{name}' is written in {self._called(writer)} and used in "
                f"{self._called(user)}.",
                "Each stage has a copy of it, and writes in its own blocks only.",
            )

    def _hooks(self) -> Iterator[Any]:
        for number, block in enumerate(self.blocks, 1):
            yield block.register_forward_pre_hook(
                partial(self._enter, number), with_kwargs=True, prepend=True
            )
            yield block.register_forward_hook(partial(self._leave, number))

    def _enter(self, number: int, module: nn.Module, args: Any, kwargs: Any) -> Any:
        if self.is_inside or self.now != number - 1:
            raise self._refused(
                f"{self._called(number)} is called after {self._called(self.now)}.",
                "The blocks of a chain are called in order, each once.",
            )
        first, *others = [*args, *kwargs.values()] or [None]
        if not isinstance(first, Tensor):
            raise self._refused(
                f"the first argument of {self._called(number)} is no tensor.",
                "The output of one block travels to the next as one tensor.",
            )
        if self.last_output is not None and (
            first is not self.last_output or version_of(first) != self.last_version
        ):
            raise self._refused(
                f"the first argument of {self._called(number)} is not the output of "
                f"{self._called(number - 1)}.",
                "What is computed between two blocks would be computed by no stage.",
            )
        if self._sources_in(others) - {ValueSource(number - 1, is_handed=True)}:
            raise self._refused(
                f"{self._called(number)} is given more than the output of "
                f"{self._called(number - 1)} and what follows from the model's inputs.",
                "A stage has the inputs of the model, and of the stages before it one tensor.",
            )
        self._end_part()
        if number == 1 and self.origins.of([first]):
            first = self._put(first, is_handed=True, is_differentiated=first.requires_grad)
        self.now = number
        self.is_inside = True
        if args:
            return (first, *args[1:]), kwargs
        return args, {**kwargs, next(iter(kwargs)): first}

    def _leave(self, number: int, module: nn.Module, args: Any, output: Any) -> Any:
        first, *others = output if isinstance(output, tuple) and output else (output,)
        if not isinstance(first, Tensor):
            raise self._refused(
                f"{self._called(number)} returns no tensor, and no tuple that begins with one.",
                "The output of one block travels to the next as one tensor.",
            )
        self.is_inside = False
        part = self.parts[number]
        part.length = len(output) if isinstance(output, tuple) else None
        part.output = TensorForm(tuple(first.shape), first.dtype, True)
        self.last_output = self._put(first, is_handed=True)
        self.last_version = version_of(self.last_output)
        if number == len(self.blocks):
            self._end_part()
            for fake in self.fakes.values():
                fake.requires_grad_(False)
            self.now += 1
        if part.length is None:
            return self.last_output
        return (self.last_output, *map_tensors(tuple(others), self._put))

    # -- sources of values

    def _put(
        self, tensor: Tensor, *, is_handed: bool = False, is_differentiated: bool = False
    ) -> Tensor:
        """Return a tensor without aliases for the next part in place of this part's output."""
        found = torch.empty_strided(
            tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device
        )
        if is_differentiated:
            found = found.requires_grad_().clone()  # a leaf cannot be written in place
        self.origins.put(found, ValueSource(self.now, is_handed))
        if id(tensor.untyped_storage()) in self.memory:  # counted
            self._is_new(found)
        return found

    def _source(self) -> ValueSource:
        """Return the source of tensors that are computed now."""
        return ValueSource(BETWEEN if self._is_between() else self.now)

    def _is_between(self) -> bool:
        return not self.is_inside and 0 < self.now <= len(self.blocks)

    def _sources_in(self, value: Any) -> Sources:
        return self.origins.of(all_tensors(value))

    def _used(self, sources: Sources) -> None:
        """Raise ChainError if the current part uses a value of another part."""
        own = self._source().part
        if own in (0, BETWEEN):  # allowed if no later part uses the result
            return
        foreign = sources - {ValueSource(own), ValueSource(own - 1, is_handed=True)}
        if not foreign:
            return
        part, is_handed = min(foreign)
        found = f"what {self._called(part)} computes"
        if part == 0:
            found = f"what precedes {self._called(1)}"
        elif is_handed:
            found = f"the output of {self._called(part)}"
        user = self._called(own)
        if own > len(self.blocks):
            user = f"what follows {self._called(len(self.blocks))}"
        raise self._refused(
            f"{user} uses {found}.",
            "A stage has the inputs of the model, and of the stages before it one tensor.",
        )

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        # Reading a shape or dtype does not count as a use
        if func is Tensor.requires_grad_ or not all_tensors(output, visits_objects=False):
            return output
        for tensor in all_tensors((args, kwargs), visits_objects=False):
            if (name := self.names.get(id(tensor))) is not None:
                self.parts[self.now].params[name] = tensor.numel()
                if self._is_between():
                    self._refused(
                        f"parameter '{name}' is used between {self._called(self.now)} and "
                        f"{self._called(self.now + 1)}.",
                        "What is computed between two blocks would be computed by no stage.",
                    )
        return output

    def _end_part(self) -> None:
        """Add the operations since the last call to the current part."""
        total = self.flops.get_total_flops()
        self.parts[self.now].flops += total - self.counted
        self.counted = total

    def _saved(self, tensor: Tensor) -> None:
        """Count a saved tensor without keeping it.

        An output that is kept by its own node would never be freed, and neither would the model.
        """
        if self._is_new(tensor):
            self.parts[self.now].saved += tensor.nbytes

    def _is_new(self, tensor: Tensor) -> bool:
        """Return whether this memory has not been seen before."""
        storage = tensor.untyped_storage()
        is_new = id(storage) not in self.memory
        self.memory[id(storage)] = storage
        return is_new

    # -- the result

    def chain(self) -> Chain:
        """Return the chain."""
        used = {name for part in self.parts for name in part.params}
        for part, block in zip(self.parts[1:], self.blocks, strict=False):
            own = {id(param) for param in block.parameters()}
            for name, param in self.model.named_parameters():
                # parameters of the block that this run did not use
                if id(param) in own and name not in used:
                    part.params[name] = param.numel()
                    used.add(name)
        return Chain(self.container, self.keys, tuple(self.parts))

    def _called(self, number: int) -> str:
        if number == 0:
            return "what precedes the blocks"
        if number > len(self.blocks):
            return "what follows the blocks"
        return f"'{self.parts[number].name}'"

    def _refused(self, what: str, why: str) -> ChainError:
        error = ChainError(f"{type(self.model).__name__} cannot be cut: {what}", why, REMEDY)
        self.failure = self.failure or error
        return error


def hold_back_caches(model: nn.Module) -> list[RemovableHandle]:
    """Disable the key-value cache of every module unless the caller requests it.

    Blocks pass the cache to each other, and training does not need it. A wrapper's forward may lack
    the argument of the inner model, so a hook is registered on each module with the argument.

    Returns:
        The handles of the hooks.
    """
    handles = []
    for module in model.modules():
        names = list(inspect.signature(module.forward).parameters)
        if "use_cache" in names:
            hook = partial(_without_cache, names.index("use_cache"))
            handles.append(module.register_forward_pre_hook(hook, with_kwargs=True))
    return handles


def _without_cache(place: int, module: nn.Module, args: Args, kwargs: Kwargs) -> Any:
    if len(args) > place or kwargs.get("use_cache") is not None:
        return None
    return args, {**kwargs, "use_cache": False}


def _unpacked(nothing: None) -> Tensor:
    raise AssertionError("no backward follows the run on fake tensors")
