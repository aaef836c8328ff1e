"""DeepSpeed's memory estimators for mixed precision with Adam.

DeepSpeed multiplies by estimates (18 bytes per parameter, a factor of 1.5 for buffers). Here,
planner/memory.py counts the bytes of a plan. The printed tables have one row for each placement of
parameters and optimizer states.
"""

from __future__ import annotations

import sys
from itertools import product

import torch
from torch import nn

from ...planner.memory import total_bytes
from ...planner.plan_settings import PlanSettings
from ...planner.row_of_group import plan_for
from ...planner.units import GroupPlan
from ...precision.policy import Policy
from ...tiers.tier import Tier

GIB = 2**30


def estimate_zero3_model_states_mem_needs(
    total_params: int,
    largest_layer_params: int,
    num_gpus_per_node: int = 1,
    num_nodes: int = 1,
    cpu_offload: bool = True,
    cpu_offload_params: bool = True,
    zero_init: bool = True,
    additional_buffer_factor: float = 1.0,
) -> tuple[int, int, int]:
    """Estimate the memory of stage 3.

    Args:
        total_params: Elements of all parameters.
        largest_layer_params: Elements of the largest layer.
        num_gpus_per_node: Ranks per host.
        num_nodes: Number of hosts.
        cpu_offload: Whether optimizer states are offloaded to the host.
        cpu_offload_params: Whether weights are offloaded, too.
        zero_init: Whether the model is built shard by shard. Otherwise each rank first builds the
            whole model in fp32 on the host.
        additional_buffer_factor: Factor by which the bytes of a host are multiplied, for other uses
            of memory.

    Returns:
        Bytes of a host, bytes of a GPU, and bytes of the largest gathered layer.
    """
    ranks = num_gpus_per_node * num_nodes
    found = _states(3, total_params, ranks, cpu_offload, cpu_offload and cpu_offload_params)
    # Two 16-bit copies: its weight, and either the prefetched weight of the next layer or its
    # gradient
    largest = 2 * 2 * largest_layer_params
    building = 4 * (largest_layer_params if zero_init else total_params)
    host = max(found[Tier.HOST], building) * num_gpus_per_node * additional_buffer_factor
    return int(host), found[Tier.DEVICE] + largest, largest


def estimate_zero2_model_states_mem_needs(
    total_params: int,
    num_gpus_per_node: int = 1,
    num_nodes: int = 1,
    cpu_offload: bool = True,
    additional_buffer_factor: float = 1.0,
) -> tuple[int, int]:
    """Estimate the memory of stages 1 and 2.

    Every rank builds the whole model in fp32 on the host.

    Args:
        total_params: Elements of all parameters.
        num_gpus_per_node: Ranks per host.
        num_nodes: Number of hosts.
        cpu_offload: Whether optimizer states are offloaded to the host.
        additional_buffer_factor: Factor by which the bytes of a host are multiplied, for other uses
            of memory.

    Returns:
        Bytes of a host, and bytes of a GPU.
    """
    found = _states(2, total_params, num_gpus_per_node * num_nodes, cpu_offload, False)
    host = max(found[Tier.HOST], 4 * total_params) * num_gpus_per_node * additional_buffer_factor
    return int(host), found[Tier.DEVICE]


def estimate_zero3_model_states_mem_needs_all_live(
    model: nn.Module,
    num_gpus_per_node: int = 1,
    num_nodes: int = 1,
    additional_buffer_factor: float = 1.0,
) -> None:
    """Print the table of stage 3 for a model.

    Args:
        model: The model, which may be on the meta device.
        num_gpus_per_node: Ranks per host.
        num_nodes: Number of hosts.
        additional_buffer_factor: Factor by which the bytes of a host are multiplied, for other uses
            of memory.
    """
    estimate_zero3_model_states_mem_needs_all_cold(
        *model_to_params(model), num_gpus_per_node, num_nodes, additional_buffer_factor
    )


def estimate_zero3_model_states_mem_needs_all_cold(
    total_params: int,
    largest_layer_params: int,
    num_gpus_per_node: int = 1,
    num_nodes: int = 1,
    additional_buffer_factor: float = 1.0,
) -> None:
    """Print the table of stage 3 for a number of parameters.

    Args:
        total_params: Elements of all parameters.
        largest_layer_params: Elements of the largest layer.
        num_gpus_per_node: Ranks per host.
        num_nodes: Number of hosts.
        additional_buffer_factor: Factor by which the bytes of a host are multiplied, for other uses
            of memory.
    """
    rows = []
    # Weights are never offloaded without the optimizer.
    placements = ((True, True), (True, False), (False, False))
    for (optimizer, weights), init in product(placements, (True, False)):
        host, device, _ = estimate_zero3_model_states_mem_needs(
            total_params,
            largest_layer_params,
            num_gpus_per_node,
            num_nodes,
            optimizer,
            weights,
            init,
            additional_buffer_factor,
        )
        places = f"offload_param={_place(weights)}, offload_optimizer={_place(optimizer)}"
        rows.append((host, device, f"{places}, zero_init={int(init)}"))
    layer = f", {largest_layer_params // 10**6}M largest layer params"
    _print(rows, total_params, layer, num_gpus_per_node, num_nodes)


def estimate_zero2_model_states_mem_needs_all_live(
    model: nn.Module,
    num_gpus_per_node: int = 1,
    num_nodes: int = 1,
    additional_buffer_factor: float = 1.0,
) -> None:
    """Print the table of stage 2 for a model.

    Args:
        model: The model, which may be on the meta device.
        num_gpus_per_node: Ranks per host.
        num_nodes: Number of hosts.
        additional_buffer_factor: Factor by which the bytes of a host are multiplied, for other uses
            of memory.
    """
    estimate_zero2_model_states_mem_needs_all_cold(
        model_to_params(model)[0], num_gpus_per_node, num_nodes, additional_buffer_factor
    )


def estimate_zero2_model_states_mem_needs_all_cold(
    total_params: int,
    num_gpus_per_node: int = 1,
    num_nodes: int = 1,
    additional_buffer_factor: float = 1.0,
) -> None:
    """Print the table of stage 2 for a number of parameters.

    Args:
        total_params: Elements of all parameters.
        num_gpus_per_node: Ranks per host.
        num_nodes: Number of hosts.
        additional_buffer_factor: Factor by which the bytes of a host are multiplied, for other uses
            of memory.
    """
    rows = [
        (
            *estimate_zero2_model_states_mem_needs(
                total_params, num_gpus_per_node, num_nodes, offloaded, additional_buffer_factor
            ),
            f"offload_optimizer={_place(offloaded)}",
        )
        for offloaded in (True, False)
    ]
    _print(rows, total_params, "", num_gpus_per_node, num_nodes)


def model_to_params(model: nn.Module) -> tuple[int, int]:
    """Return the number of elements of all parameters and of the largest layer."""
    layers = (
        sum(param.numel() for param in module.parameters(recurse=False))
        for module in model.modules()
    )
    return sum(param.numel() for param in model.parameters()), max(layers, default=0)


def _states(
    stage: int, params: int, ranks: int, offload_states: bool, offload_weights: bool
) -> dict[Tier, int]:
    """Return the bytes of one rank on the device and on the host, for bf16 with Adam."""
    tiers = (Tier.DEVICE, Tier.HOST)
    settings = PlanSettings(
        stage=stage,
        policy=Policy(compute=torch.bfloat16),
        state_tier=tiers[offload_states],
        weight_tier=tiers[offload_weights],
    )
    padded = -(-params // ranks) * ranks
    plan = plan_for(settings, torch.float32, trainable=True, persistent=False, ranks=ranks)
    found = total_bytes([GroupPlan.of_size(plan, padded, ranks)])
    host = found.pop(Tier.HOST.value, 0)
    return {Tier.HOST: host, Tier.DEVICE: sum(found.values())}


def _place(offloaded: bool) -> str:
    return "cpu " if offloaded else "none"


def _print(
    rows: list[tuple[int, int, str]], params: int, layer: str, per_node: int, nodes: int
) -> None:
    """Print DeepSpeed's table to standard output."""
    lines = [
        "Estimated memory needed for params, optim states and gradients for a:",
        f"HW: Setup with {nodes} node{'s' * (nodes > 1)}, {per_node} GPU{'s' * (per_node > 1)} per "
        "node.",
        f"SW: Model with {params // 10**6}M total params{layer}.",
        "  per CPU  |  per GPU |   Options",
        *(
            f" {host / GIB:7.2f}GB | {device / GIB:6.2f}GB | {options}"
            for host, device, options in rows
        ),
    ]
    sys.stdout.write("\n".join(lines) + "\n")
