"""Tracks which parts of a model computed each tensor of one run on fake tensors.

A stage of a pipeline has the inputs of the model, its own blocks, and one tensor of the stage
before. `Origins` says of every tensor what it was computed from, so that a use of anything else is
found before the model is cut.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..base.device import dispatch_mode, written_by

# Operators that take the shape, dtype and device of a tensor and none of its values.
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
BETWEEN = -1  # not a part: tensors that are computed between two blocks


class ValueSource(NamedTuple):
    """What a value was computed from: values inside part number `part`, or the tensor that it
    handed to the next.
    """

    part: int
    is_handed: bool = False


Sources = frozenset[ValueSource]
NONE: Sources = frozenset()


class Origins:
    """Records the sources of each tensor. A tensor without a source follows from the inputs of the
    model.

    Tensors that share memory have the sources of all of them.

    Args:
        own: Returns the source of the tensors that are computed now.
        used: Called with the sources of each operator's tensors before their results get theirs.
    """

    def __init__(self, own: Callable[[], ValueSource], used: Callable[[Sources], None]) -> None:
        self._own = own
        self._used = used
        self._sources: dict[int, Sources] = {}  # by the id of a storage
        self._kept: dict[
            int, Any
        ] = {}  # storages of which an id is known: alive, so that no other gets the id
        self._params: set[int] = set()
        self._given: set[int] = set()
        self._buffers: dict[int, str] = {}
        self._readers: dict[str, set[int]] = {}
        self._writers: dict[str, set[int]] = {}

    def has_param(self, param: Tensor) -> None:
        """Treat a tensor as a parameter: tensors that are computed from it have a source."""
        self._params.add(self._key(param))

    def has_input(self, tensor: Tensor, buffer: str | None = None) -> None:
        """Take a tensor for an input of the model, or for the buffer of this name."""
        key = self._key(tensor)
        self._given.add(key)
        if buffer is not None:
            self._buffers[key] = buffer

    def of(self, tensors: Iterable[Tensor]) -> Sources:
        """Return the sources of these tensors."""
        return NONE.union(*(self._sources.get(self._key(each), NONE) for each in tensors))

    def put(self, tensor: Tensor, source: ValueSource) -> None:
        """Say that a new tensor has this source and no other."""
        self._sources[self._key(tensor)] = frozenset((source,))

    def shared_buffers(self) -> dict[str, tuple[int, int]]:
        """Return the buffers that one part writes and another part uses, by name, and two such
        parts.
        """
        found = {}
        for name, writers in self._writers.items():
            users = writers | self._readers.get(name, set())
            if len(users) > 1:
                writer = max(writers)
                found[name] = (writer, min(users - {writer}))
        return found

    def recording(self) -> Any:
        """Return a context in which operators are recorded."""
        return dispatch_mode(self._call)

    def _call(self, operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        output = operator(*args, **kwargs)
        if str(getattr(operator, "overloadpacket", operator)) not in _SHAPE_ONLY:
            given = list(all_tensors(*args, *kwargs.values()))
            written = list(all_tensors(*written_by(operator, args, kwargs)))
            is_random = torch.Tag.nondeterministic_seeded in getattr(operator, "tags", ())
            self._follow(given, list(all_tensors(output)), written, is_random=is_random)
        return output

    def _follow(
        self, given: list[Tensor], results: list[Tensor], written: list[Tensor], *, is_random: bool
    ) -> None:
        """Give results, and what was written in place, the sources of what they were computed
        from.
        """
        read = {self._key(each) for each in given}
        made = {self._key(each) for each in results} - read
        changed = {self._key(each) for each in written}
        if not made and not changed:  # a view
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


def all_tensors(*values: Any) -> Iterator[Tensor]:
    """Yield the tensors that an operator takes or returns."""
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from all_tensors(*value)
