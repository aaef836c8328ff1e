"""Track which parts of a model computed each tensor in a run on fake tensors.

A stage has the inputs of the model, its own blocks, and one tensor of the previous stage. `Origins`
records the sources of every tensor, so that the use of any other value is detected before the model
is divided.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..base.device import dispatch_mode, written_by
from ..base.nested import Args, Kwargs, all_tensors

# Operators that use only the shape, dtype and device of a tensor.
_SHAPE_ONLY = {
    *("aten.empty_like", "aten.full_like", "aten.ones_like", "aten.zeros_like"),
    *(
        "aten.new_empty",
        "aten.new_empty_strided",
        "aten.new_full",
        "aten.new_ones",
        "aten.new_zeros",
    ),
}
BETWEEN = -1  # not a part: for tensors that are computed between two blocks


class ValueSource(NamedTuple):
    """The part of a model that computed a value.

    Attributes:
        part: Number of the part: a block, or the part before or after the blocks.
        is_handed: Whether the value is the tensor that a block passes to the next block.
    """

    part: int
    is_handed: bool = False


Sources = frozenset[ValueSource]
NONE: Sources = frozenset()


class Origins:
    """Records which parts of a model computed each tensor.

    A tensor that no part computed depends only on the inputs of the model. Tensors that share
    memory have the sources of all of them.

    Args:
        own: A function that returns the part of the model that is running, as the source of new
            tensors.
        used: Called with the sources of each operator's inputs before its results get a source.
    """

    def __init__(self, own: Callable[[], ValueSource], used: Callable[[Sources], None]) -> None:
        self._own = own
        self._used = used
        self._sources: dict[int, Sources] = {}  # by id of the storage
        # Keeps the storages alive, so that no other object gets the same id
        self._kept: dict[int, Any] = {}
        self._params: set[int] = set()
        self._given: set[int] = set()
        self._buffers: dict[int, str] = {}
        self._readers: dict[str, set[int]] = {}
        self._writers: dict[str, set[int]] = {}

    def has_param(self, param: Tensor) -> None:
        """Register a parameter, which has no source.

        Args:
            param: The parameter. A tensor that is computed from it has the computing part as its
                source.
        """
        self._params.add(self._key(param))

    def has_input(self, tensor: Tensor, buffer: str | None = None) -> None:
        """Register an input or a buffer of the model, which has no source.

        Args:
            tensor: The input or buffer.
            buffer: Name of the buffer; None for an input.
        """
        key = self._key(tensor)
        self._given.add(key)
        if buffer is not None:
            self._buffers[key] = buffer

    def of(self, tensors: Iterable[Tensor]) -> Sources:
        """Return the sources of all given tensors."""
        return NONE.union(*(self._sources.get(self._key(each), NONE) for each in tensors))

    def put(self, tensor: Tensor, source: ValueSource) -> None:
        """Set the only source of a new tensor.

        Args:
            tensor: The tensor, which shares no memory with others.
            source: The part that computed it.
        """
        self._sources[self._key(tensor)] = frozenset((source,))

    def shared_buffers(self) -> dict[str, tuple[int, int]]:
        """Return buffers that one part writes and another part uses.

        Returns:
            For each buffer's name, a part that writes it and another part that uses it.
        """
        found = {}
        for name, writers in self._writers.items():
            users = writers | self._readers.get(name, set())
            if len(users) > 1:
                writer = max(writers)
                found[name] = (writer, min(users - {writer}))
        return found

    def recording(self) -> Any:
        """Return a context manager in which all operators are recorded."""
        return dispatch_mode(self._call)

    def _call(self, operator: Any, args: Args, kwargs: Kwargs) -> Any:
        output = operator(*args, **kwargs)
        if str(getattr(operator, "overloadpacket", operator)) not in _SHAPE_ONLY:
            given = all_tensors((args, kwargs), visits_objects=False)
            written = all_tensors(written_by(operator, args, kwargs), visits_objects=False)
            is_random = torch.Tag.nondeterministic_seeded in getattr(operator, "tags", ())
            results = all_tensors(output, visits_objects=False)
            self._follow(given, results, written, is_random=is_random)
        return output

    def _follow(
        self, given: list[Tensor], results: list[Tensor], written: list[Tensor], *, is_random: bool
    ) -> None:
        """Set the sources of results and of tensors that were written in place."""
        read = {self._key(each) for each in given}
        made = {self._key(each) for each in results} - read
        changed = {self._key(each) for each in written}
        if not made and not changed:  # the results are views
            return
        own = self._own()
        for name in (self._buffers[key] for key in read if key in self._buffers):
            self._readers.setdefault(name, set()).add(own.part)
        sources = NONE.union(*(self._sources.get(key, NONE) for key in read))
        self._used(sources)
        if is_random or read & self._params or (sources and own.part != BETWEEN):
            sources = sources | {own} if own.part == BETWEEN else frozenset({own})
        for key in made:
            self._sources[key] = sources
        for key in changed:
            self._write(key, sources, own)

    def _write(self, key: int, sources: Sources, own: ValueSource) -> None:
        if key in self._given and own.part != 0:  # stages without this part do not write it
            sources |= {own}
        self._sources[key] = self._sources.get(key, NONE) | sources
        if sources and key in self._buffers:
            self._writers.setdefault(self._buffers[key], set()).add(own.part)

    def _key(self, tensor: Tensor) -> int:
        storage = tensor.untyped_storage()
        self._kept[id(storage)] = storage
        return id(storage)
