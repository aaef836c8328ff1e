"""The row of a group in words, for reports and checkpoints."""

from __future__ import annotations

from .spec import ShardPlan


def words_of(plan: ShardPlan) -> dict[str, str]:
    """Return each state in words, by its name; "-" for none."""
    found = {
        "weight": plan.weight,
        "grad": plan.grad,
        "master": plan.master,
        "moments": plan.moments,
    }
    words = {state: str(spec) if spec is not None else "-" for state, spec in found.items()}
    if plan.master_is_split:
        words["master"] = words["master"].replace("int16", "weight+int16")
    for extra in plan.extras:
        words[extra.state] += extra.words(plan)
    if plan.moments_format != "fp32":
        words["moments"] = words["moments"].replace("float32", plan.moments_format)
    return words
