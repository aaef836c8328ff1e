"""The line of `engine.explain` that names the implementation of updates."""

from __future__ import annotations

from ..base.device import CPU
from ..kernels import cuda
from ..kernels.choice import available
from ..kernels.rules import known_rule
from ..optim.sharded import ShardedOptimizer


def explain_updates(optimizer: ShardedOptimizer) -> list[str]:
    """Return a line that tells whether a kernel of this library or PyTorch updates the shards.

    If PyTorch updates some of them, the line contains the reason.
    """
    shards = optimizer.shards()
    name = type(optimizer.inner).__name__
    rules = [known_rule(optimizer.inner, group) for group in optimizer.param_groups]
    count = sum(
        shard.has_kernel and rule is not None
        for of_group, rule in zip(optimizer.shard_set.shards_by_group, rules, strict=True)
        for shard in of_group
    )
    if optimizer.updater.kernels and (refused := optimizer.shard_set.one_pass.refused):
        return [
            f"updates: {name} by PyTorch: no exact kernel of {refused} can be compiled on this "
            "machine"
        ]
    if shards and count == len(shards):
        return [f"updates: {name} by compiled kernels, in one pass over memory"]
    plan = optimizer.shard_set.plan
    if not any(rules):
        why = f"there is no kernel for {name} with these options"
    elif plan.device != CPU and plan.settings.gpu_kernels and cuda.why_not(plan.device) is not None:
        why = f"no kernel can be compiled for {plan.device}, because {cuda.why_not(plan.device)}"
    elif plan.settings.kernels == "torch" and available(optimizer.settings.kernels) == "torch":
        why = "llvmlite is not installed, or kernels are disabled"
    elif plan.settings.kernels == "torch":
        why = "PyTorch's fused update and the kernels differ in rounding on this CPU"
    elif plan.kernels == "torch":
        why = "this rank updates so few elements that compiling kernels is not worth it"
    else:
        why = "there is no kernel for the format or the device of the other shards"
    return [f"updates: {name} by PyTorch for {len(shards) - count} of {len(shards)} shards: {why}"]
