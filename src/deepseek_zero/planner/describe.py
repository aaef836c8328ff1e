"""Texts that describe the rows of the table, for reports and checkpoints."""

from __future__ import annotations

from ..precision.codecs import Blocks
from .spec import ShardPlan, Spec


def describe_spec(spec: Spec) -> str:
    """Return the placement, dtype, memory and codecs of a state, such as "S bfloat16 device"."""
    coded = f" stored as {spec.stored_as}" if spec.stored_as is not None else ""
    coded += f" sent as {spec.wire}" if isinstance(spec.wire, Blocks) else ""
    coded += f", inside a host as {spec.wire_inside}" if spec.wire_inside is not None else ""
    dtype = str(spec.dtype).removeprefix("torch.")
    return f"{spec.placement.value} {dtype} {spec.tier.value}{coded}"


def describe_states(plan: ShardPlan) -> dict[str, str]:
    """Return a description of each state, by its name; "-" if there is no such state."""
    found = {
        "weight": plan.weight,
        "grad": plan.grad,
        "master": plan.master,
        "moments": plan.moments,
    }
    words = {
        state: describe_spec(spec) if spec is not None else "-" for state, spec in found.items()
    }
    if plan.master_is_split:
        words["master"] = words["master"].replace("int16", "weight+int16")
    for extra in plan.extras:
        words[extra.state] += extra.words(plan)
    if plan.moments_format != "fp32":
        words["moments"] = words["moments"].replace("float32", plan.moments_format)
    return words
