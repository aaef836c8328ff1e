"""Messages between the stages of a pipeline: activations one way and their gradients the other,
point to point.

Every pair of neighbouring pipeline ranks has a communicator of its own, and for each direction of
the model another: stage P - 1 also sends to stage P of the first rank.  Activations travel in its
lane "gather", gradients in "reduce". Tensors of any dtype travel as bytes.  A send copies into a
slot in memory that the other rank reaches, and is waited for when the slot is used again; receives
are posted ahead.  What a message holds is known from an earlier one for inputs of the same form, or
travels before it.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Hashable, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from ..base.errors import UsageError
from ..base.mesh import Mesh
from ..comm.collectives import Comm
from ..comm.pending import Pending
from .schedule import PipelineSchedule

# Int64: how many tensors, then of each dtype, whether it is differentiated, dimensions and sizes
HEADER_NUMEL = 128
_DTYPES = (
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.float64,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint8,
    torch.bool,
    torch.complex64,
    torch.complex128,
)


class TensorForm(NamedTuple):
    """What a receiver must know of a tensor.  is_differentiated: its gradient travels back."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    is_differentiated: bool

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


MessageForm = tuple[TensorForm, ...]


def form_of(tensors: Sequence[Tensor]) -> MessageForm:
    """The form of a message."""
    return tuple(TensorForm(tuple(each.shape), each.dtype, each.requires_grad) for each in tensors)


class StageLinks:
    """The communicators of one pipeline rank with its neighbours, by (rank of stage g, rank of
    stage g + 1).
    """

    def __init__(self, world: Comm, mesh: Mesh, schedule: PipelineSchedule) -> None:
        """Make them.  Collective in the world; `world` is its communicator, and the schedules are
        alike.
        """
        self.world = world
        self.rank = mesh.coordinates["pp"]
        self.pairs: dict[tuple[int, int], Comm] = {}
        for number, matching in enumerate(matchings(schedule.edges)):
            groups: list[tuple[int, ...]] = []
            for rank in range(mesh.world_size):
                here = replace(mesh, rank=rank)
                at = here.coordinates["pp"]
                pair = next((edge for edge in matching if at in edge), (at,))
                ranks = tuple(sorted(here.rank_at(pp=each) for each in pair))
                if ranks not in groups:
                    groups.append(ranks)
            found = world.split(tuple(groups), f"pp {number}", is_new=True)
            if (own := next((edge for edge in matching if self.rank in edge), None)) is not None:
                self.pairs[own] = found


def matchings(edges: Sequence[tuple[int, int]]) -> list[list[tuple[int, int]]]:
    """The edges in few lots, in none of which a rank occurs twice: a lot's communicators are made
    together.
    """
    found: list[list[tuple[int, int]]] = []
    for edge in edges:
        for lot in found:
            if not any(set(edge) & set(other) for other in lot):
                lot.append(edge)
                break
        else:
            found.append([edge])
    return found


class Outbox:
    """The sends of one lane to one neighbour.  slots: messages that may be under way before a send
    waits.
    """

    def __init__(self, comm: Comm, lane: str, slots: int) -> None:
        self.comm = comm
        self.lane = lane
        self._slots: list[list[Tensor]] = [[] for _ in range(slots)]
        self._under_way: list[list[Pending]] = [[] for _ in range(slots)]
        self._next = 0

    def send(self, tensors: Sequence[Tensor], what: str, header: MessageForm | None = None) -> None:
        """Send tensors, behind a header if one is given.  Waits only for the message that used this
        slot before.
        """
        slot = self._next
        self._next = (self._next + 1) % len(self._slots)
        self._free(slot)
        pending = self._under_way[slot]
        buffers = self._slots[slot]
        if header is not None:
            pending.append(
                self.comm.pass_on(
                    _packed(header, self.comm.device), None, self.lane, f"form of {what}"
                )
            )
        for number, tensor in enumerate(tensors):
            if not tensor.numel():
                continue
            while number >= len(buffers):
                buffers.append(self.comm.empty(0, torch.uint8))
            nbytes = tensor.numel() * tensor.element_size()
            if buffers[number].numel() != nbytes:
                buffers[number] = self.comm.empty(nbytes, torch.uint8)
            buffers[number].view(tensor.dtype).view(tensor.shape).copy_(tensor.detach())
            pending.append(self.comm.pass_on(buffers[number], None, self.lane, what))

    def buffers(self) -> list[Tensor]:
        """Return the memory of the slots."""
        return [buffer for slot in self._slots for buffer in slot]

    def flush(self) -> None:
        """Wait until every message has been sent."""
        for slot in range(len(self._slots)):
            self._free(slot)

    def _free(self, slot: int) -> None:
        if self._under_way[slot]:
            for each in self._under_way[slot]:
                each.wait()
            self._under_way[slot] = []
            for buffer in self._slots[slot]:
                self.comm.wait_until_read(buffer)


class _Posted(NamedTuple):
    """A receive under way.  form: None: it is in the header."""

    what: str
    form: MessageForm | None
    header: Tensor | None
    boxes: list[Tensor]
    pending: list[Pending]


class Inbox:
    """The receives of one lane from one neighbour, in the order they are posted in."""

    def __init__(self, comm: Comm, lane: str) -> None:
        self.comm = comm
        self.lane = lane
        self._posted: deque[_Posted] = deque()

    def __len__(self) -> int:
        """The number of receives under way."""
        return len(self._posted)

    @property
    def knows_next(self) -> bool:
        """Whether another receive may be posted: not behind one of which only the header is on its
        way.
        """
        return not self._posted or self._posted[-1].form is not None

    def post(self, form: MessageForm | None, what: str) -> None:
        """Start to receive a message.  form: None: it travels before it."""
        if form is None:
            header = torch.zeros(HEADER_NUMEL, dtype=torch.int64, device=self.comm.device)
            pending = [self.comm.pass_on(None, header, self.lane, f"form of {what}")]
            self._posted.append(_Posted(what, None, header, [], pending))
        else:
            self._posted.append(_Posted(what, form, None, *self._start(form, what)))

    def take(self) -> tuple[MessageForm, tuple[Tensor, ...]]:
        """Wait for the oldest message that was posted, and return what it holds: memory that nobody
        else writes.
        """
        what, form, header, boxes, pending = self._posted.popleft()
        for each in pending:
            each.wait()
        if form is None:
            assert header is not None
            form = _unpacked(header)
            boxes, pending = self._start(form, what)
            for each in pending:
                each.wait()
        return form, tuple(
            box.view(each.dtype).view(each.shape) for box, each in zip(boxes, form, strict=True)
        )

    def _start(self, form: MessageForm, what: str) -> tuple[list[Tensor], list[Pending]]:
        boxes = [
            torch.empty(each.nbytes, dtype=torch.uint8, device=self.comm.device) for each in form
        ]
        return boxes, [
            self.comm.pass_on(None, box, self.lane, what) for box in boxes if box.numel()
        ]

    def drop(self) -> None:
        """Forget what is under way, after an error."""
        self._posted.clear()


class Forms:
    """The forms of the messages between two stages, by what the inputs of a micro-batch look like.

    Both ranks ask with the same keys in the same steps.  A form is agreed on by the headers of the
    first step whose inputs look so; from the next step on messages travel without.
    """

    def __init__(self) -> None:
        self._known: dict[tuple[int, Hashable], MessageForm] = {}
        self._seen: dict[tuple[int, Hashable], MessageForm] = {}
        self._last: dict[int, MessageForm] = {}

    def seen_in_training(self) -> dict[int, MessageForm]:
        """By stage, the form of what it sent on in the last step that trained."""
        return dict(self._last)

    def known(self, stage: int, key: Hashable) -> MessageForm | None:
        """The form of what a stage sends on; None: it travels with the message.  key: None: it
        always does.
        """
        return None if key is None else self._known.get((stage, key))

    def see(self, stage: int, key: Hashable, form: MessageForm) -> None:
        """Note what a header says, for the steps to come."""
        if torch.is_grad_enabled():
            self._last[stage] = form
        if key is not None:
            self._seen[stage, key] = form

    def check(self, stage: int, key: Hashable, form: MessageForm) -> None:
        """Raise UsageError if a stage's output is not what the next stage waits for."""
        expected = self.known(stage, key)
        if expected is not None and expected != form:
            raise UsageError(
                f"the output of pipeline stage {stage} is {_shown(form)}; stage {stage + 1} waits "
                f"for {_shown(expected)}.",
                "Inputs of the same shapes gave that before, so that messages travel without a "
                "description.",
                "let outputs have shapes that follow from the inputs' shapes, or set "
                "dynamic_shape.",
            )

    def end_step(self) -> None:
        """Know from now on what was seen in this step."""
        self._known.update(self._seen)
        self._seen.clear()

    def forget(self) -> None:
        """Know nothing: the next step's messages describe themselves.  Every rank of a pipeline
        does so, or none.
        """
        self._known.clear()
        self._seen.clear()


def _shown(form: MessageForm) -> str:
    return ", ".join(
        f"{tuple(each.shape)} {str(each.dtype).removeprefix('torch.')}" for each in form
    )


def _packed(form: MessageForm, device: torch.device) -> Tensor:
    numbers = [len(form)]
    for shape, dtype, is_differentiated in form:
        numbers += [_DTYPES.index(dtype), int(is_differentiated), len(shape), *shape]
    if len(numbers) > HEADER_NUMEL:
        raise UsageError(
            f"a stage passes on {len(form)} tensors.",
            f"Their description has room for {HEADER_NUMEL} numbers.",
            "pass fewer tensors between stages: pack them into one.",
        )
    return torch.tensor(
        [*numbers, *[0] * (HEADER_NUMEL - len(numbers))], dtype=torch.int64, device=device
    )


def _unpacked(header: Tensor) -> MessageForm:
    numbers = iter(header.tolist())
    found = []
    for _ in range(next(numbers)):
        dtype = _DTYPES[next(numbers)]
        is_differentiated = bool(next(numbers))
        dimensions = next(numbers)
        found.append(
            TensorForm(tuple(next(numbers) for _ in range(dimensions)), dtype, is_differentiated)
        )
    return tuple(found)
