"""Describe one pipeline rank for the plan: its stages, its schedule and its message sizes.

The functions need no process group.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

import torch

from ..base.mesh import Mesh
from ..planner.pieces import PipelinePlan
from .pipeline import StagedModel
from .schedule import Numbers, PipelineSchedule, Program, StageActionKind, make_schedule
from .stage import Cut, ModelStage, tied_stages


def planned_pipeline(
    staged: StagedModel,
    mesh: Mesh,
    trained: Mapping[str, bool],
    *,
    schedule: str,
    group: int | None,
    micro_batches: int,
    compute: torch.dtype | None = None,
    sample: str = "",
) -> PipelinePlan:
    """Describe the stages, schedule and messages of one pipeline rank for its plan.

    Args:
        staged: The divided model, as `cut_model` returned it on this rank.
        mesh: The mesh, whose coordinates select the rank.
        trained: A dict from the name of each parameter of the whole model to whether it is trained.
        schedule: Name of the schedule, for example "1f1b".
        group: For the schedule "breadth_first": the number of micro-batches that a rank runs in one
            stage before its next stage. None means all micro-batches of a step.
        micro_batches: Number of micro-batches of a step.
        compute: Dtype of activations; None means the dtype that `find_chain` recorded.
        sample: Description of the inputs with which `find_chain` was called, for reports.

    Returns:
        A `PipelinePlan` with the stages, the schedule, how often weights are gathered, and the
        bytes of the messages between stages for one micro-batch. For a model that is a list of
        layers, it contains no blocks and no message sizes.

    Raises:
        UsageError: The schedule is unknown or does not support these numbers of ranks, stages and
            micro-batches.
    """
    rank = mesh.coordinates["pp"]
    table = make_schedule(
        schedule, mesh.pp, staged.virtual, micro_batches, group=group, tied=staged.tied
    )
    first = staged.stages[0]
    cut = first.cut if isinstance(first, ModelStage) else None
    outputs, grads = _messages(cut, trained, compute, mesh.sp) if cut is not None else ((), ())
    gathers, of_all = _gathers(table.programs[rank], is_tied=bool(table.tied))
    ties = {
        name: stages
        for name, stages in sorted(staged.ties.items())
        if len({staged.placement[stage] for stage in stages}) > 1
    }
    return PipelinePlan(
        schedule,
        staged.virtual,
        group,
        micro_batches,
        rank,
        tuple(staged.placement),
        tuple(
            tuple(cut.blocks_of(stage)) if cut is not None else () for stage in range(table.stages)
        ),
        table.in_flight,
        gathers,
        of_all,
        outputs,
        grads,
        sample,
        ties,
    )


def schedule_of(plan: PipelinePlan) -> PipelineSchedule:
    """Build the schedule that a plan names.

    Args:
        plan: The plan of a pipeline, with the name and the sizes of the schedule.

    Returns:
        A `PipelineSchedule` with the order of the actions of every pipeline rank in training.

    Raises:
        UsageError: The schedule is unknown or does not support the numbers in the plan.
    """
    return make_schedule(
        plan.schedule,
        plan.ranks,
        plan.virtual,
        plan.micro_batches,
        group=plan.group,
        tied=tied_stages(plan.ties),
    )


def _messages(
    cut: Cut, trained: Mapping[str, bool], compute: torch.dtype | None, sharers: int
) -> tuple[Numbers, Numbers]:
    """Return the bytes of the output and of its gradient at each boundary.

    A gradient is 0 if no parameter before the boundary is trained. `sharers` ranks share the tokens
    of a sequence; the chain was found with whole sequences.
    """
    outputs = []
    grads = []
    for stage, end in enumerate(cut.bounds[1:-1]):
        output = cut.chain.blocks[end - 1].output
        assert output is not None
        if compute is not None and output.dtype.is_floating_point:
            output = output._replace(dtype=compute)
        nbytes = output.nbytes // sharers
        learns = any(trained[name] for name in cut.params_of(range(stage + 1)))
        outputs.append(nbytes)
        grads.append(nbytes if learns else 0)
    return tuple(outputs), tuple(grads)


def _gathers(program: Program, *, is_tied: bool) -> tuple[dict[int, int], int]:
    """Return how often the weights of each stage, and of all stages, are gathered."""
    found = Counter[int]()
    gathered: set[int] = set()
    of_all = 0
    for action in program:
        if action.kind is StageActionKind.GATHER:
            found[action.stage] += 1
            of_all += not gathered
            gathered.add(action.stage)
        elif action.kind is StageActionKind.RELEASE:
            gathered.discard(action.stage)
    return dict(found), 1 if is_tied else of_all
