"""Trace memory by kind over a step.

The trace follows every storage from the operator that creates it until it is freed. A storage that
the engine holds under a name (states, gathered weights, parked activations) has that kind while it
is held. Any other storage is named after the phase that created it; storages of "forward" are
activations.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..base.device import WeakStorage, dispatch_mode, without_torch_function
from ..base.errors import UsageError
from ..base.memory import segment_views
from ..base.quantities import format_bytes, unit_of
from .plots import (
    GREY,
    INK,
    OTHER_COLOUR,
    STATE_COLOURS,
    add_titles,
    new_figure,
    require_matplotlib,
    save_figure,
    style_axes,
)

Held = Callable[[], Mapping[str, Iterable[Tensor]]]
ACTIVATIONS = "activations"
COLOURS = {
    **STATE_COLOURS,
    "gathered": "#74b3de",
    "parked": "#3f8f8f",
    ACTIVATIONS: "#d9a0a0",
    "backward": "#efc9a4",
}
SMALLEST_BYTES = 1024  # minimum size of a traced storage


@dataclass
class MemoryTrace:
    """A trace of the memory in use, in bytes by kind, over the operators of a step.

    Memory that `held` does not return is counted under the phase that created it. The phase
    "forward" is counted under "activations".

    Attributes:
        held: A function that returns a dict from each kind to the tensors of this kind that the
            engine currently holds.
        phase: A function that returns the name of the current phase, for example "forward".
        samples: The bytes in use by kind, for each time at which `sample` was called.
        marks: For each change of the phase, a tuple of the index of the first sample in the new
            phase and its name.
    """

    held: Held
    phase: Callable[[], str]
    samples: list[dict[str, int]] = field(default_factory=list)
    # (sample, name of the phase that starts there)
    marks: list[tuple[int, str]] = field(default_factory=list)
    # Address, bytes, phase
    _made: dict[WeakStorage, tuple[int, int, str]] = field(default_factory=dict)

    @property
    def peak(self) -> dict[str, int]:
        """Return the bytes by kind of the largest sample; {} without samples."""
        return max(self.samples, key=lambda sample: sum(sample.values()), default={})

    @property
    def peak_bytes(self) -> int:
        """Return the total number of bytes of the sample `peak`; 0 without samples."""
        return sum(self.peak.values())

    @contextmanager
    def recording(self, *, is_drawn: bool = False) -> Iterator[None]:
        """Return a context manager that appends to `samples` and `marks` in its block.

        It samples the memory after the first operator, after each operator that allocates or frees
        memory, and at the end of a block that raises no error. Storages of less than 1 KiB are
        counted only if `held` returns their tensors.

        Args:
            is_drawn: Whether the trace is drawn afterwards.

        Raises:
            NotBuiltError: The trace is drawn, and matplotlib is not installed.
        """
        if is_drawn:
            require_matplotlib()  # before the block, not after it
        with dispatch_mode(self._run):
            yield
        self._forget_gone()
        self.sample()

    def _forget_gone(self) -> bool:
        gone = [weak for weak in self._made if weak.expired()]
        for weak in gone:
            del self._made[weak]
        return bool(gone)

    def _run(self, operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        result = operator(*args, **kwargs)
        phase = self.phase()
        if not self.marks or self.marks[-1][1] != phase:
            self.marks.append((len(self.samples), phase))
        has_changed = self._forget_gone() or not self.samples
        before = len(self._made)
        given = {
            tensor.untyped_storage().data_ptr()
            for tensor in _plain_tensors((*args, *kwargs.values()))
        }
        for tensor in _plain_tensors(result):
            self._follow(tensor, phase, given)
        if has_changed or len(self._made) != before:
            self.sample()
        return result

    def _follow(self, tensor: Tensor, phase: str, given: set[int]) -> None:
        storage = tensor.untyped_storage()
        if storage.nbytes() >= SMALLEST_BYTES and storage.data_ptr() not in given:
            self._made.setdefault(
                WeakStorage(storage), (storage.data_ptr(), storage.nbytes(), phase)
            )

    def sample(self) -> None:
        """Append the bytes that are currently in use, by kind, to `samples`.

        Tensors that `held` does not return are counted if they were created in a block of
        `recording` and not freed before its last operator.
        """
        found: dict[str, int] = {}
        seen = set[int]()
        with without_torch_function():
            for kind, tensors in self.held().items():
                for tensor in tensors:
                    storage = tensor.untyped_storage()
                    if storage.data_ptr() and storage.data_ptr() not in seen:
                        seen.add(storage.data_ptr())
                        found[kind] = found.get(kind, 0) + storage.nbytes()
        views = segment_views()
        for address, nbytes, phase in self._made.values():
            if address not in seen and not any(address in addresses for addresses in views):
                kind = ACTIVATIONS if phase == "forward" else phase
                found[kind] = found.get(kind, 0) + nbytes
        self.samples.append(found)

    def draw(self, path: Path | str, title: str = "Memory over a step") -> None:
        """Draw the recorded bytes over the operators as a PNG.

        The picture contains one stacked area per kind.

        Args:
            path: Path of the PNG file to write. Its folder is created if it is missing, and an
                existing file is replaced.
            title: Title of the picture.

        Raises:
            NotBuiltError: matplotlib is not installed, or `path` is a URL.
            UsageError: No sample contains memory.
            OSError: The file cannot be written.
        """
        order = [
            *COLOURS,
            *sorted({kind for sample in self.samples for kind in sample} - {*COLOURS}),
        ]
        kinds = [kind for kind in order if any(sample.get(kind) for sample in self.samples)]
        if not kinds:
            raise UsageError(
                f"a memory trace of {len(self.samples)} samples has no memory to draw.",
                "Memory is sampled in the block of `recording`.",
                "run operators that allocate at least 1 KiB in that block before you draw.",
            )
        unit_bytes, unit = unit_of(self.peak_bytes)
        figure = new_figure(8.4, 4.8)
        axes = figure.add_subplot()
        style_axes(axes)
        rows = [[sample.get(kind, 0) / unit_bytes for sample in self.samples] for kind in kinds]
        colours = [COLOURS.get(kind, OTHER_COLOUR) for kind in kinds]
        axes.stackplot(
            range(len(self.samples)), *rows, colors=colours, labels=kinds, step="post", linewidth=0
        )
        for place, phase in self.marks:
            axes.axvline(place, color=GREY, linewidth=0.8, linestyle=(0, (2, 3)))
            where = axes.get_xaxis_transform()
            axes.text(place, 1.0, f" {phase}", transform=where, va="top", color=GREY, fontsize=8.5)
        axes.set_xlim(0, max(len(self.samples) - 1, 1))
        axes.set_ylabel(f"memory ({unit})")
        axes.set_xlabel("operators that allocate or free memory")
        axes.legend(
            loc="upper left",
            bbox_to_anchor=(1.0, 1.0),
            frameon=False,
            labelcolor=INK,
            fontsize=9,
            reverse=True,
        )
        largest = ", ".join(
            f"{kind} {format_bytes(count)}"
            for kind, count in sorted(self.peak.items(), key=lambda each: -each[1])[:3]
        )
        add_titles(axes, title, f"peak {format_bytes(self.peak_bytes)}: {largest}")
        save_figure(figure, path)


def _plain_tensors(value: Any) -> Iterator[Tensor]:
    """Yield the tensors among an operator's arguments or results that own memory."""
    if isinstance(value, Tensor):
        if value.layout is torch.strided and not value.is_meta:
            yield value
    elif isinstance(value, (list, tuple)):
        for each in value:
            yield from _plain_tensors(each)
