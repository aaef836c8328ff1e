"""Forward and backward times of each activation checkpoint, measured in one step.

The backward time of a checkpoint is from the gradient of its output to the gradient of its input,
including recomputation. If no input needs a gradient, it is until the end of the whole backward.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from ..base.device import queue_backward_callback
from ..base.log import log_once
from ..base.nested import tensors_in
from ..base.quantities import format_seconds


@dataclass
class CheckpointTimes:
    """The measured times of one activation checkpoint.

    Attributes:
        forward_seconds: Duration of the forward.
        began: Start of the backward (`time.perf_counter`); 0 before.
        backward_seconds: Duration of the backward, including recomputation; 0 before its end.
    """

    forward_seconds: float
    began: float = 0.0
    backward_seconds: float = 0.0

    def end(self, grad: Tensor | None = None) -> None:
        """Record the end of the backward. It can be registered as a tensor hook."""
        if self.began:
            self.backward_seconds = time.perf_counter() - self.began


class Profile:
    """Measures the activation checkpoints of the first step that has any, and logs the times."""

    def __init__(self) -> None:
        self.rows: list[CheckpointTimes] = []
        self.is_over = self._has_begun = False

    def timed(self, call: Callable[[], Any], inputs: Any) -> Any:
        """Call a function, and measure its forward and its backward.

        Args:
            call: Runs the checkpoint, without arguments.
            inputs: The inputs of the checkpoint, whose gradients end its backward.

        Returns:
            The result of the function.
        """
        if self.is_over:
            return call()
        began = time.perf_counter()
        output = call()
        row = CheckpointTimes(time.perf_counter() - began)
        self.rows.append(row)
        for tensor in tensors_in(output):
            tensor.register_hook(lambda grad: self._begin(row))
        for tensor in tensors_in(inputs):
            tensor.register_hook(row.end)
        return output

    def _begin(self, row: CheckpointTimes) -> None:
        if not self._has_begun:
            self._has_begun = True
            queue_backward_callback(self._end)
        row.began = row.began or time.perf_counter()

    def _end(self) -> None:
        self.is_over = True
        for row in self.rows:
            if not row.backward_seconds:
                row.end()
        log_once(
            "\n".join(
                ["checkpoints, forward and backward", *map(_line, range(len(self.rows)), self.rows)]
            )
        )


def _line(number: int, row: CheckpointTimes) -> str:
    return (
        f"  {number}: {format_seconds(row.forward_seconds)}, {format_seconds(row.backward_seconds)}"
    )
