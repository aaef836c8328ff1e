"""Tells other ranks that this one waits in a collective of torch.distributed's own, such as
barrier().

A thread looks once a second at what the thread that trains does. A call that it sees twice is
posted in the flight recorder; a steady state that makes short calls posts nothing.
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

from .flight_recorder import FlightRecorder

OUTSIDE = "outside"  # the topic: {"call": name, "ranks": of its group}
_MODULE = "torch.distributed.distributed_c10d"
_LOOK_SECONDS = 1.0


def watch_outside_calls(recorder: FlightRecorder) -> None:
    """Start the thread for the calling one; it ends with the recorder."""
    watched = threading.get_ident()
    reference = weakref.ref(recorder)
    arguments = (reference, watched)
    threading.Thread(
        target=_watch, args=arguments, daemon=True, name="deepseek-zero-outside"
    ).start()


def outside_call(recorder: FlightRecorder, rank: int) -> str:
    """Return the name of the call in which a rank waits for this one, outside every engine; ""
    without one.
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
        frame = _outermost_call(watched)
        # Only the number is kept: a frame that is held after its call keeps all tensors of its
        # callers alive.
        number = None if frame is None else id(frame)
        if frame is not None and number == seen and not is_posted:
            recorder.post(
                OUTSIDE, json.dumps({"call": frame.f_code.co_name, "ranks": _ranks_of(frame)})
            )
            is_posted = True
        elif number != seen and is_posted:
            recorder.withdraw(OUTSIDE)
            is_posted = False
        seen = number
        del recorder, frame


def _outermost_call(thread: int) -> FrameType | None:
    """Return the frame of the function of torch.distributed that a thread has called, if it is in
    one.
    """
    frame = sys._current_frames().get(thread)
    found = None
    while frame is not None:
        if frame.f_globals.get("__name__") == _MODULE:
            found = frame
        frame = frame.f_back
    return found


def _ranks_of(frame: FrameType) -> list[int]:
    """Return the ranks of the group that a call is given."""
    group = frame.f_locals.get("group")
    try:
        members = group if group is not None else dist.group.WORLD
        return list(dist.get_process_group_ranks(members))
    except (ValueError, RuntimeError, KeyError, AttributeError):
        return []
