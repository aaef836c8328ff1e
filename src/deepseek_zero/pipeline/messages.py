"""Send activations and their gradients between the stages of a pipeline.

Every pair of neighboring pipeline ranks has a separate communicator. A pair that is used in both
directions of the model has one for each direction, because stage P - 1 also sends to stage P on the
first rank. Activations use the lane "gather", gradients the lane "reduce". Tensors of any dtype are
sent as bytes. A send copies into a buffer that the other rank can access, and waits for the
previous message in that buffer. Receives are posted ahead. The shapes and dtypes of a message are
known from an earlier one with inputs of the same shapes, or they are sent before the message.
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
from .schedule import Numbers, PipelineSchedule, StageAction

# int64: the number of tensors, then for each tensor its dtype, whether it is differentiated, its
# number of dimensions, and its sizes
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
    torch.float8_e4m3fn,
    torch.float8_e4m3fnuz,
    torch.float8_e5m2,
    torch.float8_e5m2fnuz,
    torch.uint16,
    torch.uint32,
    torch.uint64,
)


class TensorForm(NamedTuple):
    """Shape and dtype of one tensor of a message between stages.

    Attributes:
        shape: The shape of the tensor.
        dtype: The dtype of the tensor.
        is_differentiated: Whether its gradient is sent back.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    is_differentiated: bool

    @property
    def nbytes(self) -> int:
        """Return the size of the tensor in bytes."""
        return math.prod(self.shape) * self.dtype.itemsize


MessageForm = tuple[TensorForm, ...]


def form_of(tensors: Sequence[Tensor]) -> MessageForm:
    """Return the shapes and dtypes of the tensors of a message."""
    return tuple(TensorForm(tuple(each.shape), each.dtype, each.requires_grad) for each in tensors)


class StageLinks:
    """The communicators of one pipeline rank with its neighbors.

    Args:
        world: The communicator of all ranks.
        mesh: The mesh, which defines the ranks of each pipeline.
        schedule: The schedule, whose neighboring stages define the pairs of ranks. It must be the
            same on every rank.

    Attributes:
        pairs: The communicator for each pair of pipeline ranks that run consecutive stages g and g
            + 1, by (rank of stage g, rank of stage g + 1).

    Note:
        Collective: every rank of `world` must construct it.
    """

    def __init__(self, world: Comm, mesh: Mesh, schedule: PipelineSchedule) -> None:
        """Create the communicators of this rank."""
        self.world = world
        self.rank = mesh.coordinates["pp"]
        self.pairs: dict[tuple[int, int], Comm] = {}
        for number, matching in enumerate(matchings(schedule.edges)):
            groups = [tuple(sorted(ranks)) for ranks in groups_along_pp(mesh, matching)]
            found = world.split(tuple(groups), f"pp {number}", is_new=True)
            if (own := next((edge for edge in matching if self.rank in edge), None)) is not None:
                self.pairs[own] = found


def groups_along_pp(mesh: Mesh, lots: Sequence[Sequence[int]]) -> tuple[Numbers, ...]:
    """Return groups of world ranks that differ only in the coordinate along "pp".

    Args:
        mesh: The mesh that maps world ranks to coordinates.
        lots: Disjoint lists of coordinates along "pp". Ranks that agree in all other coordinates
            form a group if their coordinates are in one list. All other ranks form groups of one.

    Returns:
        The world ranks of each group.
    """
    groups: dict[Numbers, None] = {}
    for rank in range(mesh.world_size):
        here = replace(mesh, rank=rank)
        at = here.coordinates["pp"]
        own = next((lot for lot in lots if at in lot), [at])
        groups[tuple(here.rank_at(pp=each) for each in own)] = None
    return tuple(groups)


def matchings(edges: Sequence[tuple[int, int]]) -> list[list[tuple[int, int]]]:
    """Divide pairs of ranks into lists in which no rank occurs twice.

    The communicators of the pairs in one list can be created at the same time.

    Args:
        edges: The pairs of ranks that exchange messages.

    Returns:
        Lists that together contain every pair once.
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


class _Posted(NamedTuple):
    """A receive in progress; `form` is None if it is in the header."""

    what: str
    form: MessageForm | None
    header: Tensor | None
    boxes: list[Tensor]
    pending: list[Pending]


class StageLane:
    """A one-way channel for messages between two neighboring pipeline ranks.

    A rank either sends or receives in it.

    Args:
        comm: The communicator of the two ranks.
        name: The communicator's queue of messages (lane) that is used: "gather" or "reduce".
        slots: Number of messages that may be in progress before a send waits.

    Attributes:
        to_post: The receives of this step that have not been started, last first.
    """

    def __init__(self, comm: Comm, name: str, slots: int) -> None:
        self.comm = comm
        self.name = name
        self.slots = slots
        self.to_post: list[StageAction] = []
        self._posted: deque[_Posted] = deque()
        self._buffers: list[list[Tensor]] = [[] for _ in range(slots)]
        self._under_way: list[list[Pending]] = [[] for _ in range(slots)]
        self._next = 0

    def send(self, tensors: Sequence[Tensor], what: str, header: MessageForm | None = None) -> None:
        """Start to send a message, after a copy of its tensors into a send buffer.

        The call blocks only if the message that last used the same buffer is still in progress.

        Args:
            tensors: The tensors of the message.
            what: Name of the message in error messages.
            header: Shapes and dtypes to send before the message; None if the receiver has received
                them before.
        """
        slot = self._next
        self._next = (self._next + 1) % self.slots
        self._free(slot)
        pending = self._under_way[slot]
        buffers = self._buffers[slot]
        if header is not None:
            packed = _packed(header, self.comm.device)
            pending.append(self.comm.pass_on(packed, None, self.name, f"form of {what}"))
        for number, tensor in enumerate(tensors):
            if not tensor.numel():
                continue
            # Later steps write the buffer too, maybe outside of `torch.inference_mode`
            with torch.inference_mode(False):
                while number >= len(buffers):
                    buffers.append(self.comm.empty(0, torch.uint8))
                if buffers[number].numel() != tensor.nbytes:
                    buffers[number] = self.comm.empty(tensor.nbytes, torch.uint8)
            buffers[number].view(tensor.dtype).view(tensor.shape).copy_(tensor.detach())
            pending.append(self.comm.pass_on(buffers[number], None, self.name, what))

    def buffers(self) -> list[Tensor]:
        """Return the buffers from which messages are sent."""
        return [buffer for slot in self._buffers for buffer in slot]

    def flush(self) -> None:
        """Block until the receiving rank has read every message."""
        for slot in range(self.slots):
            self._free(slot)

    def _free(self, slot: int) -> None:
        if self._under_way[slot]:
            _wait(self._under_way[slot])
            self._under_way[slot] = []
            for buffer in self._buffers[slot]:
                self.comm.wait_until_read(buffer)

    @property
    def posted(self) -> int:
        """Return the number of receives that have been started and not yet taken."""
        return len(self._posted)

    @property
    def knows_next(self) -> bool:
        """Return whether another receive may be started.

        It may not while the shapes of the previous message are still being received.
        """
        return not self._posted or self._posted[-1].form is not None

    def post(self, form: MessageForm | None, what: str) -> None:
        """Start to receive a message.

        Args:
            form: Shapes and dtypes of the message; None if they are sent before it.
            what: Name of the message in error messages.
        """
        if form is None:
            header = torch.zeros(HEADER_NUMEL, dtype=torch.int64, device=self.comm.device)
            pending = [self.comm.pass_on(None, header, self.name, f"form of {what}")]
            self._posted.append(_Posted(what, None, header, [], pending))
        else:
            self._posted.append(_Posted(what, form, None, *self._start(form, what)))

    def take(self) -> tuple[MessageForm, tuple[Tensor, ...]]:
        """Block until the oldest receive in progress is complete.

        Returns:
            The shapes and dtypes of the message, and its tensors. No later message overwrites them.
        """
        what, form, header, boxes, pending = self._posted.popleft()
        _wait(pending)
        if form is None:
            assert header is not None
            form = _unpacked(header)
            boxes, pending = self._start(form, what)
            _wait(pending)
        return form, tuple(
            box.view(each.dtype).view(each.shape) for box, each in zip(boxes, form, strict=True)
        )

    def _start(self, form: MessageForm, what: str) -> tuple[list[Tensor], list[Pending]]:
        boxes = [
            torch.empty(each.nbytes, dtype=torch.uint8, device=self.comm.device) for each in form
        ]
        return boxes, [
            self.comm.pass_on(None, box, self.name, what) for box in boxes if box.numel()
        ]

    def drop(self) -> None:
        """Discard the receives in progress after an error."""
        self._posted.clear()


class Forms:
    """The known shapes and dtypes of messages between stages.

    They are stored under a key that identifies the shapes of a micro-batch's inputs. The sending
    and the receiving rank use the same keys. The first step with a key sends the shapes before each
    message; later steps send only the messages.
    """

    def __init__(self) -> None:
        self._known: dict[tuple[int, Hashable], MessageForm] = {}
        self._seen: dict[tuple[int, Hashable], MessageForm] = {}
        # By stage: the form of its output in the last training step
        self.seen_in_training: dict[int, MessageForm] = {}

    def known(self, stage: int, key: Hashable) -> MessageForm | None:
        """Return the shapes and dtypes of a stage's output, or None if they are sent with it.

        Args:
            stage: The stage that sends the output.
            key: Identifies the shapes of the inputs; None if shapes are always sent.
        """
        return None if key is None else self._known.get((stage, key))

    def see(self, stage: int, key: Hashable, form: MessageForm) -> None:
        """Record the shapes and dtypes of a stage's output for later steps.

        Args:
            stage: The stage that sends the output.
            key: Identifies the shapes of the inputs; None if shapes are always sent.
            form: Shapes and dtypes of the output.
        """
        if torch.is_grad_enabled():
            self.seen_in_training[stage] = form
        if key is not None:
            self._seen[stage, key] = form

    def check(self, stage: int, key: Hashable, form: MessageForm) -> None:
        """Raise an error if a stage's output differs from the shapes that the receiver expects.

        Args:
            stage: The stage that sends the output.
            key: Identifies the shapes of the inputs.
            form: Shapes and dtypes of the output.

        Raises:
            UsageError: They differ from those of an earlier step with the same key.
        """
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
        """Use the shapes and dtypes that this step recorded from now on."""
        self._known.update(self._seen)
        self._seen.clear()

    def forget(self) -> None:
        """Discard all known shapes, so that the next step sends them again.

        Every rank of a pipeline must call it.
        """
        self._known.clear()
        self._seen.clear()


def _wait(pending: Sequence[Pending]) -> None:
    for each in pending:
        each.wait()


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
            f"Their description has at most {HEADER_NUMEL} numbers.",
            "pass fewer tensors between stages: pack them into one.",
        )
    header = torch.zeros(HEADER_NUMEL, dtype=torch.int64, device="cpu")
    header[: len(numbers)] = torch.tensor(numbers, device="cpu")
    return header.to(device)


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
