"""Report a rank that waits in a torch.distributed call outside every engine.

An example is `barrier()`. A thread inspects the stack of the training thread once a second. A call
that it sees twice in a row is posted in the flight recorder, so a steady state with short calls
posts nothing.
"""

from __future__ import annotations

import json
import sys
import threading
import time
import weakref
from types import FrameType
from typing import Any

import torch.distributed as dist

from ..base.lazy import no_collection
from .flight_recorder import FlightRecorder

OUTSIDE = "outside"  # Topic of the flight recorder: {"call": name, "ranks": ranks of its group}
_MODULE = "torch.distributed.distributed_c10d"
_LOOK_SECONDS = 1.0


def watch_outside_calls(recorder: FlightRecorder) -> None:
    """Start a thread that watches the calling thread, until the recorder is freed."""
    threading.Thread(
        target=_watch,
        args=(weakref.ref(recorder), threading.get_ident()),
        daemon=True,
        name="deepseek-zero-outside",
    ).start()


def outside_call(recorder: FlightRecorder, rank: int) -> str:
    """Return the call outside every engine in which a rank waits for this one.

    Args:
        recorder: The flight recorder of this rank.
        rank: World rank that waits.

    Returns:
        The name of the function, or "" if there is none.
    """
    line = recorder.read(OUTSIDE, rank)
    if not line:
        return ""
    told: dict[str, Any] = json.loads(line)
    return str(told["call"]) if recorder.rank in told["ranks"] else ""


def _watch(reference: weakref.ref[FlightRecorder], watched: int) -> None:
    seen: int | None = None
    is_posted = False
    while True:
        time.sleep(_LOOK_SECONDS)
        recorder = reference()
        if recorder is None:
            return
        # Reading `f_back` allocates a frame object. In Python 3.11 an allocation may run a
        # collection, and a finalizer may let the other thread return from the frame that is being
        # read. The interpreter then reads freed memory.
        with no_collection():
            frame = _outermost_call(watched)
            # Keep only the id: a frame that is held after its call keeps all tensors of its
            # callers alive
            number = None if frame is None else id(frame)
            ranks = [] if frame is None or number != seen else _ranks_of(frame)
        if frame is not None and number == seen and not is_posted:
            recorder.post(OUTSIDE, json.dumps({"call": frame.f_code.co_name, "ranks": ranks}))
            is_posted = True
        elif number != seen and is_posted:
            recorder.withdraw(OUTSIDE)
            is_posted = False
        seen = number
        del recorder, frame


def _outermost_call(thread: int) -> FrameType | None:
    """Return the outermost frame of torch.distributed on a thread's stack."""
    frame = sys._current_frames().get(thread)
    found = None
    while frame is not None:
        if frame.f_globals.get("__name__") == _MODULE:
            found = frame
        frame = frame.f_back
    return found


def _ranks_of(frame: FrameType) -> list[int]:
    group = frame.f_locals.get("group")
    try:
        members = group if group is not None else dist.group.WORLD
        return list(dist.get_process_group_ranks(members))
    except (ValueError, RuntimeError, KeyError, AttributeError):
        return []
