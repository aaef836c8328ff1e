"""Updates of shards in one pass over memory by the kernels in `kernels/`.

A kernel updates a shard if there is a rule for its optimizer and the storage formats of its states
fit the kernel (`UpdatePlan.has_kernel`). Otherwise the optimizer's own step runs PyTorch
operations. Both give the same bits.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from importlib import import_module
from typing import Any
from zlib import crc32

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.optim import Optimizer

from ..base.device import CPU, version_of
from ..comm.context import ranks_of_this_host
from ..kernels import cuda
from ..kernels.check import Arrays, Chance
from ..kernels.rules import Layout, Rule, Scalars, Variant, known_rule
from ..kernels.sums import compile_squares
from ..kernels.threads import threads_for
from ..planner.spec import ShardPlan
from ..precision.compact import StochasticRounding
from ..precision.policy import LOW_PRECISION
from ..sharding.main_weight import MasterWeight
from .inner_step import Decision
from .master_shard import MasterShard, Tile
from .moments import Moments
from .param_overlap import overlaps_of

_NOTHING: NDArray[Any] = np.zeros(0, np.int16)
_ABSENT = torch.empty(0, device="cpu")
_STEP = "step"
_COLUMNS = 5  # number of arrays that a kernel uses


@dataclass(frozen=True)
class Piece:
    """The part of a shard that belongs to one parameter.

    Attributes:
        name: Name of the parameter.
        start: First element of the range in the shard.
        stop: End of the range in the shard.
        element: First element of the range in the parameter.
    """

    name: str
    start: int
    stop: int
    element: int


@dataclass(frozen=True)
class Memory:
    """Flat tensors for the update of a shard, on the device of the update.

    Attributes:
        gradient: The gradient of the shard, flat.
        main: First tensor that `written_tensors` returns.
        other: Second tensor that `written_tensors` returns, or None.
        states: Optimizer states in the order of the kernel variant.
    """

    gradient: Tensor
    main: Tensor
    other: Tensor | None
    states: tuple[Tensor, ...]

    def part(self, low: int, high: int) -> Memory:
        """Return views of a range of elements.

        Args:
            low: The first element of the range.
            high: The end of the range, exclusive.
        """
        other = None if self.other is None else self.other.view(-1)[low:high]
        states = tuple(state.view(-1)[low:high] for state in self.states)
        return Memory(self.gradient.view(-1)[low:high], self.main.view(-1)[low:high], other, states)

    def columns(self) -> list[Tensor]:
        """Return gradient, main weight, `other` and two states. Missing ones are empty."""
        other = _ABSENT if self.other is None else self.other
        return [self.gradient, self.main, other, *self.states, _ABSENT, _ABSENT][:_COLUMNS]

    def arrays(self) -> Arrays:
        """Return the tensors as arrays for a kernel on the CPU."""
        other = _NOTHING if self.other is None else _array(self.other)
        return Arrays(
            _array(self.gradient), _array(self.main), other, tuple(map(_array, self.states))
        )


def written_tensors(master: MasterWeight, start: int, stop: int) -> tuple[Tensor, Tensor | None]:
    """Return the one or two flat tensors that a kernel writes, on the device of the update.

    Args:
        master: The main weight.
        start: The first element of the range in this rank's main weight.
        stop: The end of the range.

    Returns:
        The values, and the weight; None if `copy_to_weight` has to write the weight. Of a split
        main weight they are the bf16 weight and the remainders.
    """
    master.buffer.guard.before_write()
    own = master.buffer.at_update_device(start, stop)
    if master.weight is None:
        return own, None
    weight = master.weight.at_update_device(start, stop)
    if master.is_split:
        return weight, own
    is_published = weight.device == own.device and weight.dtype in LOW_PRECISION
    return own, weight if is_published else None


def layout_of(gradient: Tensor, main: Tensor, other: Tensor | None, moments: str) -> Layout:
    """Return the dtypes and storage formats of a shard's tensors.

    Args:
        gradient: The gradient of the shard, flat.
        main: The first tensor that `written_tensors` returns.
        other: The second tensor that `written_tensors` returns, or None.
        moments: The planned format of the moments, "fp32" or "bf16".
    """
    is_split = other is not None and other.dtype == torch.int16
    published = other.dtype if other is not None and not is_split else None
    return Layout(
        gradient.dtype,
        is_split,
        published=published,
        is_rounded=main.dtype == torch.bfloat16 and not is_split,
        states_rounded=moments == "bf16",
    )


def planned_layout(plan: ShardPlan) -> Layout:
    """Return the dtypes and storage formats with which a kernel will update a parameter group.

    Args:
        plan: The placement, dtype and memory of each state of the group.
    """
    assert plan.grad is not None
    has_both = plan.master is not None and not plan.master_is_weight and not plan.master_is_split
    is_published = has_both and plan.weight.dtype in LOW_PRECISION
    published = plan.weight.dtype if is_published else None
    return Layout(
        plan.grad.dtype,
        plan.master_is_split,
        published=published,
        is_rounded=plan.master_is_rounded,
        states_rounded=plan.moments_format == "bf16",
    )


class OnePass:
    """Updates the shards of one optimizer with kernels that read and write memory once.

    Attributes:
        refused: The name of the update formula whose kernel cannot be compiled here, or does not
            give the same bits as PyTorch; empty if there is none.
    """

    def __init__(self, inner: Optimizer) -> None:
        self._inner = inner
        self.refused = ""
        self._counters: dict[int, Counter] = {}  # by id of the shard
        self._decision: Callable[[], Decision | None] = lambda: None  # a weak reference
        self._groups: dict[int, GroupUpdate | None] = {}  # of that decision, by number

    @cached_property
    def _cpu(self) -> Any:
        # Imported at the first update, because it imports llvmlite
        return import_module("deepseek_zero.kernels.cpu")

    @cached_property
    def _threads(self) -> int:
        return threads_for(ranks_of_this_host())

    def group(self, hypers: Mapping[str, Any]) -> GroupUpdate | None:
        """Return how kernels update a parameter group's shards, or None if PyTorch updates them."""
        rule = known_rule(self._inner, hypers)
        return GroupUpdate(rule, hypers) if rule is not None else None

    def variant(self, param: Tensor, group: GroupUpdate) -> Variant | None:
        """Return the variant that updates a shard; None if PyTorch has to do it.

        Args:
            param: The shard that the optimizer holds as a parameter. Its values are not read.
            group: The update of the parameter group to which the shard belongs.
        """
        state = self._inner.state.get(param, {})
        held = [name for name in group.later.states if state.get(name) is not None]
        if len(held) == len(group.later.states):
            return group.later
        return None if held else group.first

    def is_exact(self, variant: Variant, layout: Layout, device: torch.device) -> bool:
        """Return whether a kernel gives the same bits as PyTorch on a device.

        This compiles the kernel.

        Args:
            variant: The variant of the kernel, for example with or without states.
            layout: The dtypes and storage formats of the shard's tensors.
            device: The device that runs the kernel.
        """
        is_exact = (
            self._cpu.is_exact(variant, layout)
            if device == CPU
            else cuda.is_exact(variant, layout, device)
        )
        if not is_exact:
            self.refused = variant.rule
        return bool(is_exact)

    def compile_for(self, hypers: Mapping[str, Any], shards: Iterable[MasterShard]) -> None:
        """Compile the kernels of some shards, so that no step waits for it.

        Args:
            hypers: The hyper-parameters of the shards.
            shards: Shards of one parameter group of the optimizer.
        """
        kinds = {
            (planned_layout(shard.group.plan), shard.master.update_device): shard.group.plan
            for shard in shards
            if shard.has_kernel
        }
        for (_, device), plan in kinds.items():
            self.compile(plan, hypers, device)

    def compile(self, plan: ShardPlan, hypers: Mapping[str, Any], device: torch.device) -> None:
        """Compile the kernels of a planned group.

        Args:
            plan: The plan of a group that kernels update.
            hypers: The hyper-parameters of its parameters.
            device: The device that updates the group.
        """
        group = self.group(hypers)
        if group is None:
            return
        layout = planned_layout(plan)
        for variant in {group.first, group.later}:
            self.is_exact(variant, layout, device)
        if device == CPU:
            compile_squares(layout.gradient)

    def counter(self, param: Tensor, group: GroupUpdate) -> Counter | None:
        """Return the optimizer's own update counter of a shard, or None if it has none.

        The counter may be on a GPU. It is read once, and again only if other code changed it, so
        that no step waits for it.

        Args:
            param: The shard that the optimizer holds as a parameter.
            group: The update of the parameter group to which the shard belongs.
        """
        if not group.rule.counts:
            return None
        state = self._inner.state[param]
        if _STEP not in state:
            state[_STEP] = torch.zeros((), dtype=torch.float32, device=param.device)
        tensor = state[_STEP]
        counter = self._counters.get(id(param))
        if counter is None or counter.tensor is not tensor or counter.version != version_of(tensor):
            counter = Counter(tensor, version_of(tensor), float(tensor))
            self._counters[id(param)] = counter
        return counter

    def _group_of(self, number: int, decision: Decision) -> GroupUpdate | None:
        """Return how kernels update a parameter group in a step, or None if PyTorch does it."""
        if self._decision() is not decision:
            self._decision = weakref.ref(decision)
            self._groups = {}
        if number not in self._groups:
            hypers = self._inner.param_groups if decision.hypers is None else decision.hypers
            self._groups[number] = self.group(hypers[number])
        return self._groups[number]

    def update_tile(self, tile: Tile, decision: Decision, moments: Moments) -> Tile:
        """Update the shards of a tile for which there is a kernel.

        Args:
            tile: The shards and the numbers of their parameter groups.
            decision: The factor and the hyper-parameters of the update.
            moments: The moments of the optimizer.

        Returns:
            The other shards, which PyTorch has to update.
        """
        chance = StochasticRounding(decision.number)
        rest = Tile()
        for number, shard in tile:
            grad = shard.grad(decision.source)
            group = self._group_of(number, decision)
            if not self.update_shard(shard, grad, group, moments, decision.factor, chance):
                rest.append((number, shard))
        return rest

    def update_shard(
        self,
        shard: MasterShard,
        grad: Tensor | None,
        group: GroupUpdate | None,
        moments: Moments,
        factor: float,
        chance: StochasticRounding,
    ) -> bool:
        """Update a shard with a kernel.

        Args:
            shard: The shard whose main weight and moments are updated.
            grad: The gradient, in the shape of the shard's `param`; None if there is none.
            group: The update of the shard's parameter group; None if no kernel computes it.
            moments: The moments of the optimizer.
            factor: The factor by which the gradient is multiplied first.
            chance: The source of random bits for stochastic rounding.

        Returns:
            False if PyTorch has to update the shard. Nothing has changed then.
        """
        if grad is None or group is None or not shard.has_kernel:
            return False
        variant = self.variant(shard.param, group)
        if variant is None:
            return False
        main, other = written_tensors(shard.master, shard.start, shard.stop)
        layout = layout_of(grad, main, other, shard.group.plan.moments_format)
        if not self.is_exact(variant, layout, main.device):
            return False
        shard.group.guard.before_write()
        counter = self.counter(shard.param, group)
        memory = Memory(grad, main, other, moments.in_place(shard, variant.states))
        pieces = pieces_of(shard) if layout.is_random else ()
        self.update(variant, layout, memory, group, counter, factor, chance, pieces)
        if other is None:
            shard.master.copy_to_weight(shard.start, shard.stop)
        return True

    def update(
        self,
        variant: Variant,
        layout: Layout,
        memory: Memory,
        group: GroupUpdate,
        counter: Counter | None,
        factor: float,
        chance: StochasticRounding,
        pieces: Sequence[Piece],
    ) -> None:
        """Update one shard in place, and raise its counter by one.

        Args:
            variant: The kernel to run, as `variant` returns it.
            layout: The dtypes and storage formats of the shard's tensors.
            memory: The shard's gradient, main weight and states.
            group: The update of the parameter group to which the shard belongs.
            counter: The optimizer's update counter of the shard, as `counter` returns it.
            factor: The factor by which the gradient is multiplied first.
            chance: The source of random bits for stochastic rounding.
            pieces: The ranges of the parameters that the shard covers; they are needed for random
                bits only.
        """
        number = 0 if counter is None else counter.value + 1
        scalars = group.scalars(number)
        parts = [(memory, Chance())]
        if layout.is_random:
            parts = [_part(variant, memory, chance, piece) for piece in pieces]
        is_on_cpu = memory.main.device == CPU
        for place, (part, begin) in enumerate(parts):
            if is_on_cpu:
                arrays = part.arrays()
                self._cpu.run(variant, layout, arrays, scalars, factor, begin, self._threads)
                continue
            raised = None
            if counter is not None and counter.is_on(memory.main.device) and place == 0:
                raised = counter.tensor
            cuda.run(variant, layout, part.columns(), scalars, factor, begin, counter=raised)
        if counter is not None:
            if is_on_cpu or not counter.is_on(memory.main.device):
                counter.tensor += 1
            counter.value += 1
            counter.version = version_of(counter.tensor)


@dataclass
class GroupUpdate:
    """How the shards of one parameter group are updated in one step.

    Attributes:
        rule: The formula of the optimizer, which a kernel implements.
        hypers: The hyper-parameters of the group, which stay as they are during the step.
        first: The variant for a shard without states.
        later: The variant for a shard with states.
    """

    rule: Rule
    hypers: Mapping[str, Any]
    _scalars: dict[float, Scalars] = field(default_factory=dict)  # by number of the update

    def __post_init__(self) -> None:
        self.first = self.rule.variant(self.hypers, False)
        self.later = self.rule.variant(self.hypers, True)

    def scalars(self, number: float) -> Scalars:
        """Return the scalar arguments of the kernel, such as bias corrections.

        Args:
            number: The number of the update, from 1 on; 0 if the formula does not depend on it.
        """
        if number not in self._scalars:
            self._scalars[number] = self.rule.scalars(self.hypers, number)
        return self._scalars[number]


@dataclass
class Counter:
    """A cached copy of the optimizer's update counter, with the tensor version at the time.

    The counter of an optimizer that updates on a GPU may be on the host (PyTorch's Adagrad).

    Attributes:
        tensor: The optimizer's counter, a scalar tensor.
        version: The autograd version of `tensor` when `value` was read. Another version means that
            other code has changed the counter.
        value: The number of updates.
    """

    tensor: Tensor
    version: int
    value: float

    def is_on(self, device: torch.device) -> bool:
        """Return whether a kernel on a device can increment the counter."""
        return self.tensor.device == device and self.tensor.dtype == torch.float32


def pieces_of(shard: MasterShard) -> list[Piece]:
    """Return the ranges of the parameters that a shard covers."""
    return [
        Piece(cover.slot.name, cover.offset, cover.offset + cover.stop - cover.start, cover.start)
        for cover in overlaps_of(shard)
    ]


def _part(
    variant: Variant, memory: Memory, chance: StochasticRounding, piece: Piece
) -> tuple[Memory, Chance]:
    """Return the memory of a piece of a shard, and the start of its random bits."""
    kinds = ("weight", *variant.states, "")[:3]
    first, second, third = (crc32(f"{kind} of {piece.name}".encode()) for kind in kinds)
    begin = Chance(piece.element, chance.step, chance.seed, (first, second, third))
    return memory.part(piece.start, piece.stop), begin


def _array(tensor: Tensor) -> NDArray[Any]:
    """Return the memory of a tensor, flat; 16-bit numbers as int16."""
    flat = tensor.detach().view(-1)
    is_narrow = flat.dtype in (torch.bfloat16, torch.float16)
    found: NDArray[Any] = (flat.view(torch.int16) if is_narrow else flat).numpy()
    return found
