"""The gradient norm of a model of which several ranks hold different pieces.

The pieces are the stages of a pipeline and the parts of tensor parallelism.
"""

from __future__ import annotations

from dataclasses import replace

from ..sharding.runtime import Runtime
from .step_message import StepMessage
from .verdict import StepFlags, Verdict, agree_on_norm, root_of


def agree_over_pieces(runtime: Runtime, extra: StepMessage) -> Verdict:
    """Compute the gradient norm of all model pieces, and exchange the other facts about the step.

    Args:
        runtime: The runtime of this rank's piece.
        extra: Fields that are sent with the norm; the same fields on every rank.

    Returns:
        The norm and the facts, equal on every rank of the world.

    Note:
        Collective over the world.
    """
    comm = runtime.comm
    verdict = agree_on_norm(runtime, extra)
    counted = zip(runtime.trained_groups, verdict.by_group, strict=True)
    message = StepMessage()
    message.add("flags", verdict.flags)
    message.add("square", [sum(square for group, square in counted if group.planned.is_counted)])
    message.add_all(extra)
    fields = message.exchange(comm.whole, "gradient norm of all pieces")
    # `pieces` has the first rank of each model piece.
    total = sum(fields["square"][first][0] for first in comm.pieces)
    flags = StepFlags.of_ranks(fields["flags"])
    return replace(verdict, norm=root_of(total), flags=flags, fields=fields)
