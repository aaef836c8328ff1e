"""The parts of an engine, and its current plan."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from .. import activations, attention
from ..activations.recompute import Recompute
from ..activations.recompute import release as release_recompute
from ..base.capabilities import Capabilities
from ..extensions.policies import PolicySettings
from ..extensions.state_dicts import StateDicts
from ..optim.sharded import ShardedOptimizer
from ..optim.step_settings import StepSettings
from ..planner.plan import Plan
from ..planner.plan_settings import PlanSettings
from ..precision.loss_scale import LossScaler
from ..sharding.runtime import Runtime
from .determinism import Determinism
from .memory_advice import MemoryAdvice
from .micro_batches import LossChecks
from .saving import Saver, Trainer
from .step_fields import StepFields

# Importing pydantic takes time: only modules that read a configuration import it at run time.
if TYPE_CHECKING:
    from ..pipeline import Pipeline, PlainLoop
    from .integrity import Integrity
    from .preemption import Preemption


@dataclass
class Parts:
    """The parts of one engine, as `assemble` builds them.

    Attributes:
        runtime: The wrapped model: its units, schedule, hooks and communicators.
        optimizer: The sharded optimizer; None if the engine has none.
        scaler: The loss scaler of fp16; None if losses are not scaled.
        plan_settings: The settings by which the model was sharded.
        step_settings: The settings of an optimizer step.
        policies: The settings of delayed and early updates and of adaptive precision.
        advice: Explains failed allocations.
        state_dicts: Makes `state_dict()` of the model work with whole tensors.
        schedule: The name and the arguments of the configured learning-rate schedule.
        recompute: Activation checkpointing; None if it is not configured.
        vertical: Runs all micro-batches of a step unit by unit; None if it is not configured.
        saver: Publishes checkpoints and removes older ones.
        preemption: Saves a checkpoint after a signal; None if it is not configured.
        integrity: Detects memory corruption; None if it is not configured.
        capabilities: Which fast paths of the machine are used, and why others are not.
        determinism: Deterministic algorithms of PyTorch; None if they are not configured.
        pipeline: The pipeline of this rank's stages; None without stages.
        loop: Runs the schedule of the pipeline; None without stages.
        loss_checks: Checks the losses of `engine.backward`; with stages, this is `loop`.
        step_fields: Adds fields of features to the message of a step.
        sparse_attention: The configured sparse attention, or None.
        after_steps: Functions that features run after each step of the engine.
        told: Optimizer arguments of DeepSpeed's API that are checked later.
    """

    runtime: Runtime
    optimizer: ShardedOptimizer | None
    scaler: LossScaler | None
    plan_settings: PlanSettings
    step_settings: StepSettings
    policies: PolicySettings
    advice: MemoryAdvice
    state_dicts: StateDicts
    schedule: tuple[str, Any] | None = None
    recompute: Recompute | None = None
    vertical: activations.LayerwiseAccumulation | None = None
    saver: Saver = field(default_factory=Saver)
    preemption: Preemption | None = None
    integrity: Integrity | None = None
    capabilities: Capabilities = field(default_factory=Capabilities)
    determinism: Determinism | None = None
    pipeline: Pipeline | None = None
    loop: PlainLoop | None = None
    loss_checks: LossChecks | PlainLoop = field(init=False)
    step_fields: StepFields = field(default_factory=StepFields)
    sparse_attention: attention.SparseAttention | None = None
    after_steps: list[Callable[[Trainer], None]] = field(default_factory=list)
    # Keyword arguments of DeepSeekZeRO3 about its optimizer, compared with ZeroOptimizer's later
    told: dict[str, Any] = field(default_factory=dict)

    def release(self) -> None:
        """Undo what the optional features have changed in the process."""
        release_recompute(self.recompute)
        if self.vertical is not None:
            self.vertical.remove()
        if self.preemption is not None:
            self.preemption.release()
        if self.determinism is not None:
            self.determinism.release()


def plan_of(
    runtime: Runtime,
    optimizer: ShardedOptimizer | None,
    pipeline: Pipeline | None = None,
    tokens: int | None = None,
) -> Plan:
    """Return the current plan of an engine: its units, schedule and expected bytes.

    Args:
        runtime: The runtime of the wrapped model, with its units and parameter groups.
        optimizer: The engine's sharded optimizer; None if the engine has none.
        pipeline: The pipeline, if there is one; it has the message sizes of the last step.
        tokens: The number of tokens of a micro-batch in the last step; None if it is unknown.

    Returns:
        The plan; printing it shows a table.
    """
    update = optimizer.shard_set.plan if optimizer is not None else None
    found = replace(runtime.plan, update=update)
    seen = pipeline.seen_bytes() if pipeline is not None else None
    if found.pipeline is not None and seen is not None:
        found = replace(found, pipeline=found.pipeline.seen(*seen))
    if found.tensor is not None and tokens is not None:
        found = replace(found, tensor=replace(found.tensor, tokens=tokens))
    if found.sequence is not None and tokens is not None:
        found = replace(found, sequence=replace(found.sequence, tokens=tokens))
    return found
