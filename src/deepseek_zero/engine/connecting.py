"""Connect the ranks of a run, and compare what they can do."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import nn

from ..base import memory
from ..base.capabilities import Capabilities, Capability, as_text
from ..base.log import log_first
from ..base.mesh import Mesh
from ..comm.agreement import agree, agree_on, values_in
from ..comm.collectives import Comm
from ..comm.measure import TriedTransport, try_transports
from ..planner.plan import Plan
from ..precision.policy import Policy
from .parts import Parts
from .planning import number_formats
from .settings import shared_values

if TYPE_CHECKING:  # as in parts.py
    from ..config import Config


def connect(config: Config, mesh: Mesh) -> tuple[Comm, TriedTransport]:
    """Connect all ranks, and compare the mesh and the configuration.

    Args:
        config: The run's configuration.
        mesh: The device mesh: the size of each axis and this rank's coordinates.

    Returns:
        The communicator of all ranks, and the transport that was chosen.

    Note:
        Collective: every rank must call it.
    """
    transport = TriedTransport(config.transport)
    if config.transport == "measured":
        transport = try_transports(mesh.device)
    world = Comm(mesh.device, transport=transport.name)
    world.meter.inter_node_rate = transport.rate
    agree(
        world,
        [f"{mesh}"],
        "the mesh",
        "It determines which ranks communicate with each other.",
        "pass the same mesh on every rank.",
    )
    agree_on(
        world,
        shared_values(config),
        "the configuration",
        "All ranks run the same steps over shards of the same tensors, and save together.",
        "pass the same configuration on every rank.",
    )
    return world, transport


def compare_ranks(model: nn.Module, plan: Plan, comm: Comm) -> None:
    """Raise an error on every rank if ranks differ in their model or settings.

    The comparison covers parameters (names, shapes, dtypes, order), buffers, units and settings.

    Args:
        model: The model before it is sharded.
        plan: The plan of the model, whose units and settings are compared.
        comm: The communicator of all ranks of the job.

    Raises:
        ModelMismatchError: Ranks differ.

    Note:
        Collective: every rank must call it.
    """
    why = (
        "Each rank holds a slice of the same flat buffers, so names, shapes, dtypes, order and "
        "settings must agree."
    )
    fix = "build the model and the configuration from the same arguments on every rank."
    agree_on(comm, values_in(plan.settings, "plan"), "what they are about to shard", why, fix)
    lines = [f"unit {unit.name}" for unit in plan.units]
    for name, param in model.named_parameters():
        lines.append(
            f"parameter {name} {tuple(param.shape)} {param.dtype} "
            f"requires_grad={param.requires_grad}"
        )
    lines += [
        f"buffer {name} {tuple(buffer.shape)} {buffer.dtype}"
        for name, buffer in model.named_buffers()
    ]
    agree(comm, lines, "what they are about to shard", why, fix)


def prepare_machine(comm: Comm, transport: TriedTransport, policy: Policy) -> list[Capability]:
    """Let the C library keep freed memory, and return the capabilities of this rank's machine.

    Args:
        comm: The communicator of all ranks.
        transport: The transport that was chosen.
        policy: The number formats of the run.
    """
    device = comm.device
    found = comm.capabilities() + transport.capabilities() + number_formats(policy, device)
    if device.type == "cpu":
        found += memory.capabilities(keeps_freed=memory.keep_freed_memory())
    return found


def compare_capabilities(parts: Parts, found: list[Capability], comm: Comm) -> Capabilities:
    """Return the capabilities of all ranks, and log the slow methods among them.

    Args:
        parts: The parts of the engine.
        found: The capabilities of this rank's machine and memories.
        comm: The communicator of all ranks.

    Note:
        Collective: every rank must call it.
    """
    if parts.recompute is not None:
        found = found + parts.recompute.capabilities()
    what = "the capabilities of each rank's machine"
    capabilities = Capabilities.of_ranks(comm.all_gather_text(as_text(found), what))
    if capabilities.fallbacks:
        log_first("\n  ".join(["this run uses slower methods:", *capabilities.fallbacks]))
    return capabilities
