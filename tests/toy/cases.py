"""Test programs for a GPU, on a device that differs from one only in hardware and speed.

Stages and tiers have the bits of a run without tiers. test_other_device.py starts each program in a
new process, because the device cannot be unloaded.
"""

from __future__ import annotations

import gc
import itertools
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import deepseek_zero
from deepseek_zero import checkpointing, zero
from deepseek_zero.activations.offload import ActivationOffload
from deepseek_zero.base.errors import OutOfMemoryError
from deepseek_zero.comm.collectives import scatter
from deepseek_zero.comm.pending import DONE
from deepseek_zero.extensions import SpeculativeUpdate
from deepseek_zero.pipeline import find_chain
from deepseek_zero.planner.spec import S
from deepseek_zero.report.measure import live_storages
from deepseek_zero.tiers.host import HostMemory
from deepseek_zero.tiers.tier import Tier
from deepseek_zero.utils import (
    safe_get_full_fp32_param,
    safe_get_full_grad,
    safe_get_full_optimizer_state,
    safe_set_full_fp32_param,
)
from tests import cudart, toy
from tests.kernels import EmulatedKernel, emulated_on
from tests.models import Gpt, seeded
from tests.toy import schedule

STEPS = 3
Zero = dict[str, Any]


@contextmanager
def training_on(kind: str) -> Iterator[None]:
    before = os.environ.get("DEEPSEEK_ZERO_DEVICE")
    os.environ["DEEPSEEK_ZERO_DEVICE"] = kind
    try:
        yield
    finally:
        os.environ.pop("DEEPSEEK_ZERO_DEVICE") if before is None else os.environ.update(
            DEEPSEEK_ZERO_DEVICE=before
        )


def states_on(path: Path) -> dict[str, Zero]:
    """Return configurations by the places to which states are offloaded."""
    host, disk = {"device": "cpu"}, {"device": "nvme", "nvme_path": str(path)}
    return {
        "device": {},
        "states on the host": {"offload_optimizer": host},
        "states on the disk": {"offload_optimizer": disk},
        "all on the host": {"offload_optimizer": host, "offload_param": host},
        "all on the disk": {"offload_optimizer": disk, "offload_param": disk},
        "weights on the host": {"offload_param": host},
        "half of the states on the host": {"offload_optimizer": {**host, "ratio": 0.5}},
    }


def engine_of(stage: int, zero: Zero, model: nn.Module | None = None, **top: Any) -> Any:
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_clipping": 0.3,
        "steps_per_print": None,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01}},
        "zero_optimization": {
            "stage": stage,
            "reduce_bucket_size": 2048,
            "sub_group_size": 4096,
            "stage3_max_live_parameters": 0,
            "stage3_param_persistence_threshold": 0,
            **zero,
        },
        **top,
    }
    return deepseek_zero.initialize(model=model or seeded(Gpt), config=config)[0]


def loss_of(engine: Any, number: int) -> Tensor:
    rank = dist.get_rank() if dist.is_initialized() else 0
    tokens = torch.randint(
        0, 11, (2, 8), generator=torch.Generator().manual_seed(7 * number + rank)
    )
    tokens = tokens.to(engine.device)
    return F.cross_entropy(engine(tokens[:, :-1]).float().flatten(0, 1), tokens[:, 1:].flatten())


def train(engine: Any, steps: int = STEPS, first: int = 0) -> list[Tensor]:
    losses = []
    for number in range(steps * engine.gradient_accumulation_steps()):
        loss = loss_of(engine, first + number)
        engine.backward(loss)
        engine.step()
        losses.append(loss.detach().cpu())
    return losses


def states_of(engine: Any) -> list[Tensor]:
    """Return full weights, main weights and moments."""
    found = [value.cpu() for value in engine.state_dict().values()]
    for param in engine.module.parameters():
        wanted = [safe_get_full_fp32_param(param)]
        wanted += [safe_get_full_optimizer_state(param, key) for key in ("exp_avg", "exp_avg_sq")]
        found += [value.cpu() for value in wanted if value is not None]
    return found


def assert_same(found: list[Tensor], expected: list[Tensor], case: object) -> None:
    assert len(found) == len(expected), case
    for number, (ours, theirs) in enumerate(zip(found, expected, strict=True)):
        assert torch.equal(ours, theirs), (case, number)


def outside(engine: Any) -> int:
    """Return the bytes of states that are not on the training device."""
    return sum(
        memory.reserved_bytes for memory in engine.parts.runtime.comm_ctx.tiers.memories.values()
    )


def every_stage_and_tier(path: Path) -> None:
    kinds: dict[str, tuple[Zero, tuple[int, ...]]] = {
        "fp32": ({}, (1, 3)),
        "bf16": ({"bf16": {"enabled": True}}, (1, 3)),
        "bf16, whole masters": ({"bf16": {"enabled": True, "master": "fp32"}}, (3,)),
        "fp16": ({"fp16": {"enabled": True, "initial_scale_power": 8}}, (1,)),
    }
    if not os.environ.get("DEEPSEEK_ZERO_FULL"):
        kinds = {"bf16": (kinds["bf16"][0], (3,))}
    for kind, accumulation in [
        (kind, number) for kind, (_, numbers) in kinds.items() for number in numbers
    ]:
        top = kinds[kind][0]
        top = {**top, "gradient_accumulation_steps": accumulation}
        expected: dict[int, list[Tensor]] = {}
        for stage, (name, place) in itertools.product((0, 1, 2, 3), states_on(path).items()):
            if stage < (3 if "offload_param" in place else 1 if place else 0):
                continue
            engine = engine_of(stage, place, **top)
            found = train(engine) + states_of(engine)
            # Stages 2 and 3 sum each micro-batch over ranks; stages 0 and 1 sum once per step. The
            # sums have different orders.
            assert_same(
                found,
                expected.setdefault(stage // 2 if accumulation > 1 else 0, found),
                (kind, name, stage),
            )
            assert bool(outside(engine)) == bool(place), name
            assert not place or toy.register(os.environ[toy.LIBRARY_VARIABLE]).late_copies() > 0
            engine.destroy()


def stages_and_tiers(path: Path) -> None:
    """All tiers have the same bits.

    One rank also compares with the CPU within a tolerance, because attention uses other kernels
    there.
    """
    every_stage_and_tier(path)
    if not dist.is_initialized():
        there = engine_of(3, {})
        assert {param.device.type for param in there.module.parameters()} == {toy.NAME}
        found = train(there) + states_of(there)
        with training_on("cpu"):
            here = engine_of(3, {})
            for ours, theirs in zip(found, train(here) + states_of(here), strict=True):
                torch.testing.assert_close(ours, theirs, atol=1e-3, rtol=1e-3)


def trained(stage: int, place: Zero, **top: Any) -> list[Tensor]:
    engine = engine_of(stage, place, **top)
    found = train(engine) + states_of(engine)
    engine.destroy()
    return found


def optimizers_and_fewer_bits(path: Path) -> None:
    """Optimizers with less state, and updates at other times, have the same bits on all tiers."""
    places = states_on(path)
    adam: dict[str, Any] = {"type": "AdamW", "params": {"lr": 0.01}}
    tops: list[Zero] = [
        {"optimizer": {"type": name, "params": {"lr": 0.01}}} for name in ("SGD", "Lion", "Lamb")
    ]
    tops += [
        {"optimizer": adam | {"moments": kept}, "bf16": {"enabled": True}}
        for kept in ("bf16", "8bit")
    ]
    tops += [{"bf16": {"enabled": True, "master": "none"}}]
    for top in tops:
        expected = trained(3, {}, **top)
        for name in ("states on the host", "all on the disk"):
            assert_same(trained(3, places[name], **top), expected, (top, name))
    # These updates of PyTorch differ on the host: Muon computes in fp32 there, and Adagrad is
    # fused.
    for kind in ("Muon", "Adagrad"):
        top = {"optimizer": {"type": kind, "params": {"lr": 0.01}}}
        host, disk = (
            trained(3, places[name], **top) for name in ("all on the host", "states on the disk")
        )
        assert_same(disk, host, kind)
    for key in ({"super_offload": True}, {"delayed_update_after": 1}):
        found = {}
        for name in ("states on the host", "all on the host", "all on the disk"):
            where = {
                **places[name],
                "offload_optimizer": {**places[name]["offload_optimizer"], **key},
            }
            found[name] = trained(3, where)
            assert_same(found[name], found["states on the host"], (key, name))


def kernels_on_the_device(path: Path) -> None:
    """An emulated CUDA kernel updates on the device with the same bits as PyTorch and as the
    host.
    """
    host = states_on(path)["states on the host"]
    kinds: list[Zero] = [
        {},
        {"bf16": {"enabled": True}},
        {"bf16": {"enabled": True, "master": "fp32"}},
        {"bf16": {"enabled": True, "master": "none"}},
        {"fp16": {"enabled": True, "initial_scale_power": 8}},
    ]
    adamw: Zero = {"type": "AdamW", "params": {"lr": 0.01}}
    optimizers: list[Zero] = [
        {"type": "SGD", "params": {"lr": 0.1, "momentum": 0.9, "nesterov": True}},
        {"type": "Adam", "params": {"lr": 0.01, "weight_decay": 0.1, "adam_w_mode": False}},
        {"type": "Adagrad", "params": {"lr": 0.01}},
        {"type": "Lion", "params": {"lr": 0.01}},
        adamw | {"moments": "bf16"},
    ]
    cases = [(kinds[1], adamw, 3), (kinds[0], optimizers[0], 0)]
    if os.environ.get("DEEPSEEK_ZERO_FULL"):
        cases = [(kind, adamw, stage) for kind in kinds for stage in (0, 3)]
        cases += [(kinds[1], optimizer, 3) for optimizer in optimizers]
    for top, optimizer, stage in cases:
        expected = trained(stage, {}, optimizer=optimizer | {"kernels": "torch"}, **top)
        before = EmulatedKernel.launches
        with emulated_on(toy.NAME):
            found = trained(stage, {}, optimizer=optimizer, **top)
        assert EmulatedKernel.launches > before, (top, optimizer, stage)
        if optimizer["type"] != "Adagrad":  # PyTorch has a fused Adagrad on a CPU only
            assert_same(found, expected, (top, optimizer, stage))
        # without clipping, because the order of the norm's sum depends on where gradients are
        if stage > 0:
            free = top | {"gradient_clipping": 0.0}
            with emulated_on(toy.NAME):
                found = trained(stage, {}, optimizer=optimizer, **free)
            kernels = "compiled" if find_spec("llvmlite") is not None else "torch"
            on_host = trained(stage, host, optimizer=optimizer | {"kernels": kernels}, **free)
            assert_same(found, on_host, (top, optimizer, stage, "on the host"))


def checkpoints_and_access(path: Path) -> None:
    """A checkpoint of one tier loads on another; states are read and changed through the API."""
    places, shared = states_on(path), path / "checkpoints"
    low: Zero = {"bf16": {"enabled": True}}
    routes = [
        ("device", "all on the disk"),
        ("all on the host", "states on the host"),
        ("states on the disk", "device"),
    ]
    for number, (before, after) in enumerate(routes):
        first = engine_of(3, places[before], **low)
        train(first)
        first.save_checkpoint(str(shared / str(number)), tag="a", wait=bool(number))
        expected = states_of(first)
        losses = train(first, 1, first=9)
        first.finish_saving()
        second = engine_of(
            2 if "weights" not in after and "all" not in after else 3,
            places[after],
            bf16={"enabled": True},
        )
        second.load_checkpoint(str(shared / str(number)), tag="a")
        assert_same(states_of(second), expected, (before, after))
        assert_same(train(second, 1, first=9), losses, (before, after))
    for name in ("device", "all on the host", "states on the host", "all on the disk"):
        for top in ({}, {"bf16": {"enabled": True}}):
            changed(engine_of(3, places[name], **top))


def changed(engine: Any) -> None:
    weight = engine.module.head.weight
    safe_set_full_fp32_param(weight, torch.full(weight.shape, 0.25))
    value = safe_get_full_fp32_param(weight)
    assert value is not None and bool((value == 0.25).all())
    with zero.GatheredParameters(weight, modifier_rank=0), torch.no_grad():
        assert weight.device.type == toy.NAME and bool((weight == 0.25).all())
        weight[0].fill_(0.5)
    value = safe_get_full_fp32_param(weight)
    assert value is not None and bool((value[0] == 0.5).all() and (value[1:] == 0.25).all())
    full = {name: torch.ones_like(each, device="cpu") for name, each in engine.state_dict().items()}
    engine.load_state_dict(full) if hasattr(
        engine, "load_state_dict"
    ) else engine.module.load_state_dict(full)
    value = safe_get_full_fp32_param(weight)
    assert value is not None and bool((value == 1).all())
    train(engine, 1)


class Recomputed(nn.Module):
    """Blocks with activation checkpointing, whose inputs are offloaded."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Gpt(width=96, hidden=64)
        for block in self.inner.blocks:
            block.forward = lambda x, run=block.forward: checkpointing.checkpoint(run, x)  # type: ignore[method-assign]

    def forward(self, tokens: Tensor) -> Tensor:
        return self.inner(tokens)


def activations_and_memory(path: Path) -> None:
    """Offloaded activations keep the bits, a memory budget is respected, and predictions are
    exact.
    """
    _unused_activations_are_freed_after_their_copies()
    places = states_on(path)
    expected = trained(3, {}, model=seeded(Recomputed))
    for section in ({"device": "cpu"}, {"device": "nvme", "nvme_path": str(path)}):
        engine = engine_of(
            3, places["all on the host"], seeded(Recomputed), activation_checkpointing=section
        )
        assert_same(train(engine) + states_of(engine), expected, section)
        parked = engine.parts.recompute.parking
        assert parked is not None and parked.peak_bytes > 0
        engine.destroy()
    assert_same(
        trained(3, {**places["all on the host"], "vertical_micro_batches": 1}),
        trained(3, {}),
        "vertical",
    )
    for name, place in places.items():
        engine = engine_of(3, place, bf16={"enabled": True})
        train(engine)
        report = engine.memory_report()
        assert {key: report.measured[key] for key in report.predicted} == dict(report.predicted), (
            name,
            report,
        )
        engine.destroy()
    open_places = {"offload_optimizer": {"device": "auto"}, "offload_param": {"device": "auto"}}
    expected = trained(3, {})
    for budget in (10**9, 67_280_000, 67_230_000):
        assert_same(trained(3, open_places, memory_budget={"device": budget}), expected, budget)
    try:
        trained(3, {}, memory_budget={"device": 1000})
    except OutOfMemoryError:
        gc.collect()
    else:
        raise AssertionError("a budget of the device was passed over")


def _unused_activations_are_freed_after_their_copies() -> None:
    offload = ActivationOffload(HostMemory, 3)
    handles = [offload.offload([torch.ones(4096, device=toy.NAME)]) for _ in range(3)]
    handles[2].restore()  # starts to copy the inputs before these
    handles.clear()
    offload.sweep()
    other = torch.zeros(4096, device=toy.NAME).add_(1)
    torch.accelerator.synchronize()
    assert bool((other == 1).all())


class Chained(nn.Module):
    """A model that creates tensors in its forward, on the device of its inputs or on the CPU."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(11, 64), nn.Embedding(8, 64)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(64, 96), nn.GELU(), nn.Linear(96, 64)) for _ in range(4)
        )
        self.register_buffer("gain", torch.ones(64))
        self.offset = torch.zeros(64)
        self.head = nn.Linear(64, 11)
        self.dummy_inputs = {
            "tokens": torch.zeros(2, 8, dtype=torch.long),
            "targets": torch.zeros(2, 8).long(),
        }

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.places(torch.arange(tokens.shape[1], device=tokens.device))
        x = x * self.gain + self.offset.to(x.device)
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(x).float().flatten(0, 1), targets.flatten())


def planned_on_shapes(path: Path) -> None:
    """The plan of a pipeline does not depend on the devices of model and sample.

    On two ranks its stages train.
    """
    chains, places = [], ("cpu", toy.NAME, "meta")
    for model_at, sample_at in itertools.product(places, places):
        model = Chained().to(model_at)
        sample = {name: value.to(sample_at) for name, value in model.dummy_inputs.items()}
        chains.append(find_chain(model, (), sample))
        found = deepseek_zero.plan(
            model,
            {"train_micro_batch_size_per_gpu": 2},
            ranks=2,
            mesh={"pp": 2},
            example=sample,
            device=toy.NAME,
        )
        assert found.pipeline is not None
    assert all(chain == chains[0] for chain in chains) and len(chains[0].blocks) == 4
    if not dist.is_initialized():
        return
    losses = {}
    for mesh, place in (({}, toy.NAME), ({"pp": 2}, toy.NAME), ({"pp": 2}, "cpu")):
        model = seeded(Chained).to(place)
        config = {
            "train_micro_batch_size_per_gpu": 4,
            "steps_per_print": None,
            "optimizer": {"type": "AdamW", "params": {"lr": 0.01}},
            "zero_optimization": {"stage": 1},
        }
        engine = deepseek_zero.initialize(model=model, config=config, mesh=mesh)[0]
        assert {param.device.type for param in engine.module.parameters()} == {toy.NAME}
        losses[place, bool(mesh)] = [chained_loss(engine, number) for number in range(STEPS)]
        engine.destroy()
    whole = losses.pop((toy.NAME, False))
    for found_losses in losses.values():
        torch.testing.assert_close(
            torch.tensor(found_losses), torch.tensor(whole), atol=1e-5, rtol=1e-5
        )


def chained_loss(engine: Any, number: int) -> float:
    tokens = torch.randint(0, 11, (4, 9), generator=torch.Generator().manual_seed(number)).to(
        engine.device
    )
    loss = engine(tokens[:, :-1], tokens[:, 1:])
    engine.backward(loss)
    engine.step()
    return float(loss.detach())


def offloaded_states(path: Path) -> None:
    """Offloading states between two phases frees their bytes on the device and keeps their bits."""
    runs = (
        (1, False, "device"),
        (2, True, "states on the host"),
        (3, True, "device"),
        (3, False, "all on the host"),
    )
    for stage, bf16, place in runs:
        top = {"bf16": {"enabled": True}} if bf16 else {}
        engine = engine_of(stage, states_on(path)[place], **top)
        train(engine)
        before = states_of(engine)
        engine.offload_states()
        engine.reload_states()
        report = engine.memory_report()
        kinds = ("weight", "master", "moments")
        held = sum(report.measured[kind] for kind in kinds)
        for where in ("cpu", "nvme"):
            full = sum(live_storages(toy.NAME).values())
            engine.offload_states(device=where, pin_memory=False)
            low = sum(live_storages(toy.NAME).values())
            assert full - low >= 0.98 * held - (1 << 10), (
                stage,
                bf16,
                place,
                where,
                full,
                low,
                held,
            )
            engine.reload_states()
            assert sum(live_storages(toy.NAME).values()) - low >= 0.98 * held - (1 << 10)
            assert_same(states_of(engine), before, (stage, place, where))
        train(engine, first=STEPS)
        engine.destroy()


def copies_of_a_step(path: Path) -> None:
    """With the optimizer on the host, a step copies each state once.

    Copies have the dtype of the state and use page-locked memory. If main weights are split, the
    host also reads their upper halves, the bf16 weights. It reads the norms that the device
    computed in backward.
    """
    if dist.is_initialized():
        return  # ranks that share a device communicate through the host
    library = toy.register(os.environ[toy.LIBRARY_VARIABLE])
    places, bf16 = states_on(path), {"bf16": {"enabled": True}}
    whole = {"bf16": {"enabled": True, "master": "fp32"}}
    cases = [(stage, "states on the host", top) for stage in (1, 2, 3) for top in (bf16, whole)]
    cases += [(3, "states on the host", {}), (3, "all on the host", bf16)]
    with pytest.MonkeyPatch.context() as patch:
        runtime = cudart.install(patch)
        for stage, place, top in cases:
            engine = engine_of(stage, places[place], **top)
            locked = dict(runtime.ranges)
            train(engine, 2)
            library.record_copies()
            loss = loss_of(engine, 2)
            engine.backward(loss)
            del loss
            norms = 8 * sum(
                len(group.gradient.sum.known_squares)
                for group in engine.parts.runtime.trained_groups
            )
            held = library.held_bytes()
            library.forget_most()
            engine.step()
            copies, reads = library.recorded_copies()
            case = stage, place, top
            taken = library.most_bytes() - held
            assert taken <= norms, (case, "the update takes no other memory of the device", taken)
            assert runtime.ranges == locked, (case, "a step locks nothing")
            assert not reads, (case, "the host reads no value")
            moved = {True: 0, False: 0}
            read_norms = []
            for to_host, is_async, source, target, nbytes, address in copies:
                if source == "Long":  # the batch
                    continue
                if source == "Double":
                    read_norms.append((to_host, nbytes))
                    continue
                assert is_async and source == target, (case, source, target)
                assert runtime.is_locked(address, nbytes), (case, "pageable", to_host, nbytes)
                moved[to_host] += nbytes
            assert read_norms == [(True, norms)], case
            down, up = bytes_to_copy(engine)
            assert moved[True] == down, case
            assert moved[False] == up if place == "states on the host" else moved[False] <= up, case
            engine.destroy()
            del engine
            gc.collect()
            assert not runtime.ranges, case


def bytes_to_copy(engine: Any) -> tuple[int, int]:
    """Return the bytes that a step with an optimizer on the host must copy to and from the host.

    Offloaded weights are copied to the device for forward and again for backward, unless they stay
    in between.
    """
    down = up = 0
    for group in engine.parts.runtime.trained_groups:
        plan, numel = group.plan, group.layout.numel
        # A sharded gradient is copied with its padding during backward.
        sent = group.layout.slice_numel if plan.grad.placement is S else numel
        down += sent * plan.grad.dtype.itemsize
        if plan.weight.tier is Tier.DEVICE:
            up += numel * plan.weight.dtype.itemsize
            down += (
                numel * plan.weight.dtype.itemsize
                if plan.master_is_split or plan.master_is_weight
                else 0
            )
        else:
            up += 2 * group.layout.slice_numel * plan.weight.dtype.itemsize
    return down, up


def random_schedules(path: Path) -> None:
    """A run has the bits of a run without offload for every order of copies.

    Every step draws another schedule: some copies happen before anything waits for them, the others
    when something waits.
    """
    library = toy.register(os.environ[toy.LIBRARY_VARIABLE])
    is_full = bool(os.environ.get("DEEPSEEK_ZERO_FULL"))
    steps = 100 if is_full else 5
    low: Zero = {"bf16": {"enabled": True}}
    kinds: list[tuple[Zero, int]] = [
        (low | {"gradient_clipping": clip}, accumulation)
        for clip, accumulation in itertools.product((0.3, 0.0), (1, 3))
    ]
    if not is_full:
        kinds = [kinds[0], kinds[3]]
    for number, (top, accumulation) in enumerate(kinds):
        top = top | {"gradient_accumulation_steps": accumulation}
        expected: dict[int, list[Tensor]] = {}
        early = {"offload_optimizer": {"device": "cpu", "super_offload": True}}
        places = states_on(path) | {"updates in backward": early}
        for stage, (name, place) in itertools.product((1, 2, 3), places.items()):
            if stage < 3 and ("offload_param" in place or place is early):
                continue
            engine = engine_of(stage, place, **top)
            found: list[Tensor] = []
            for step in range(steps):
                library.draw_schedule(1 + 1000 * number + step if place else 0)
                found += train(engine, 1, first=step * accumulation)
            found += states_of(engine)
            library.draw_schedule(0)
            if place is early:
                policy = engine.optimizer.policy(SpeculativeUpdate)
                assert policy.updated > 0, "no update in backward"
                assert bool(policy.undone) == bool(top["gradient_clipping"])
            key = stage // 2 if accumulation > 1 else 0
            assert_same(found, expected.setdefault(key, found), (top, name, stage))
            engine.destroy()


def faults_of_other_systems(path: Path) -> None:
    """Faults of other systems with an optimizer on the host next to a GPU do not occur here.

    The comments name the reports.
    """
    if dist.is_initialized():
        return
    places = states_on(path)
    host = places["states on the host"]
    _gradients_are_read_before_their_copies(host)  # pytorch#180666
    _lent_memory_is_reused_while_copies_run(engine_of(3, host))  # pytorch#180665
    _slices_have_the_bits_of_whole_states(host)  # DeepSpeed#7819
    _micro_batches_count_in_the_norm(host)  # DeepSpeed#7967
    _loaded_weights_reach_main_weights(host)  # Megatron-Bridge#4082
    _pinned_weights_follow_updates(host)
    _skipped_steps_keep_weights(host)
    _programs_change_gradients_on_the_host(host)
    _delayed_updates_leave_out_absent_gradients(places)
    _values_on_the_host_are_sent_from_the_device()


def _gradients_are_read_before_their_copies(host: Zero) -> None:
    found = []
    for place in ({}, host):
        engine = engine_of(3, place, bf16={"enabled": True})
        train(engine, 1)
        engine.backward(loss_of(engine, 5))
        gradients = [safe_get_full_grad(param) for param in engine.module.parameters()]
        found.append([value.cpu().clone() for value in gradients if value is not None])
        engine.destroy()
    assert_same(found[1], found[0], "gradients")


def _lent_memory_is_reused_while_copies_run(engine: Any) -> None:
    comm_ctx = engine.parts.runtime.comm_ctx
    storage = HostMemory().reserve(256, torch.float32, 256, "test")
    for number in range(50):
        landing = storage.landing(0, 256, 256, comm_ctx.pool, comm_ctx.copy_engine, add=False)
        landing.values().fill_(number)
        landing.send()
        del landing
        lent = comm_ctx.pool.take(256, torch.float32).fill_(-1)
        comm_ctx.pool.give(lent)
        assert bool((storage.read(0, 256) == number).all()), number
    engine.destroy()


def _slices_have_the_bits_of_whole_states(host: Zero) -> None:
    runs = [
        trained(3, {**host, "sub_group_size": numel}, bf16={"enabled": True})
        for numel in (512, 1 << 20)
    ]
    assert_same(runs[0], runs[1], "sub_group_size")


def _micro_batches_count_in_the_norm(host: Zero) -> None:
    norms = []
    for accumulation in (1, 4):
        engine = engine_of(3, host, gradient_accumulation_steps=accumulation)
        for _ in range(accumulation):
            engine.backward(loss_of(engine, 3))
            engine.step()
        norms.append(engine.get_global_grad_norm())
        engine.destroy()
    assert norms[0] == pytest.approx(norms[1], rel=1e-5)


def _loaded_weights_reach_main_weights(host: Zero) -> None:
    sleeping = {"type": "AdamW", "params": {"lr": 0.0, "weight_decay": 0.0}}
    engine = engine_of(3, host, bf16={"enabled": True}, optimizer=sleeping)
    full = {
        name: torch.full_like(value, 0.375, device="cpu")
        for name, value in engine.state_dict().items()
    }
    engine.load_state_dict(full)
    train(engine, 1)
    assert all(bool((value == 0.375).all()) for value in engine.state_dict().values())
    engine.destroy()


def _pinned_weights_follow_updates(host: Zero) -> None:
    """Weights that a block keeps gathered follow the last update."""
    found = []
    for place in ({}, host):
        engine = engine_of(3, place, bf16={"enabled": True})
        with zero.GatheredParameters(list(engine.module.parameters()), modifier_rank=None):
            values = train(engine)
            values += [param.detach().cpu() for param in engine.module.parameters()]
        found.append(values + train(engine, 1, first=STEPS) + states_of(engine))
        engine.destroy()
    assert_same(found[1], found[0], "pinned")


def _skipped_steps_keep_weights(host: Zero) -> None:
    """Updates in backward are undone if the gradient of a later unit overflows."""
    early = {"offload_optimizer": {**host["offload_optimizer"], "super_offload": True}}
    whole = {"bf16": {"enabled": True, "master": "fp32"}}
    fp16 = {"fp16": {"enabled": True, "initial_scale_power": 4}}
    for top in (whole, fp16):
        engine = engine_of(3, early, gradient_clipping=0.0, **top)
        train(engine)
        expected = states_of(engine)
        handle = engine.module.tokens.weight.register_hook(lambda grad: grad * torch.inf)
        train(engine, 1, first=STEPS)
        handle.remove()
        assert engine.optimizer.policy(SpeculativeUpdate).undone > 0, "no update in backward"
        assert_same(states_of(engine), expected, top)
        engine.destroy()


def _programs_change_gradients_on_the_host(host: Zero) -> None:
    """A program need not know where gradients are: they are shown on the device of the weights."""
    found = []
    for place in ({}, host):
        engine = engine_of(3, place, bf16={"enabled": True}, gradient_clipping=0.0)
        weight = engine.module.head.weight
        engine.backward(loss_of(engine, 3))
        norm = nn.utils.clip_grad_norm_(engine.module.parameters(), 0.1)
        weight.grad = (weight.grad.float() * 0.5).bfloat16()
        weight.grad.add_(weight, alpha=0.01)
        assert norm.device == weight.grad.device == weight.device
        engine.step()
        found.append([norm.cpu(), *states_of(engine)])
        engine.destroy()
    assert_same(found[1], found[0], "changed gradients")


def _delayed_updates_leave_out_absent_gradients(places: dict[str, Zero]) -> None:
    found = []
    for name in ("states on the host", "all on the host"):
        place = {**places[name], "offload_optimizer": {"device": "cpu", "delayed_update_after": 1}}
        engine = engine_of(3, place)
        train(engine, 2)
        engine.backward(loss_of(engine, 2))
        for param in engine.module.blocks[1].parameters():
            param.grad = None
        engine.step()
        found.append(train(engine, 2, first=3) + states_of(engine))
        engine.destroy()
    assert_same(found[1], found[0], "absent")


def _values_on_the_host_are_sent_from_the_device() -> None:
    """NCCL sends nothing from the host, where a model or a gradient may be."""
    device = torch.device(toy.NAME, 0)

    def exchange(pieces: list[Tensor], boxes: list[Tensor], lane: str, what: str) -> Any:
        assert {each.device for each in (*pieces, *boxes)} == {device}
        for each in boxes:
            each.fill_(1)
        return DONE

    for rank in range(2):
        comm: Any = SimpleNamespace(rank=rank, size=2, device=device, exchange=exchange)
        values = torch.zeros(3)
        scatter(comm, [values] * 2, values, "test")
        assert bool((values == rank).all())


def a_step_of_one_rank(path: Path) -> None:
    """With all states on the device, the host reads only the norm.

    No gradient is kept for the next forward.
    """
    if dist.is_initialized():
        return
    library = toy.register(os.environ[toy.LIBRARY_VARIABLE])
    for stage, accumulation in ((0, 1), (1, 1), (2, 2), (3, 1)):
        engine = engine_of(
            stage, {}, bf16={"enabled": True}, gradient_accumulation_steps=accumulation
        )
        train(engine, 2)
        gradients = [group.gradient for group in engine.parts.runtime.trained_groups]
        assert all(gradient.sum.buffer is not None for gradient in gradients)
        held = library.held_bytes()
        library.record_copies()
        for number in range(accumulation):
            loss = loss_of(engine, number)
            if number == 0:
                assert all(gradient.sum.buffer is None for gradient in gradients)
            engine.backward(loss)
            engine.step()
        copies, reads = library.recorded_copies()
        numbers = [nbytes for to_host, _, source, _, nbytes, _ in copies if to_host]
        assert not reads and numbers == [len(gradients) * 8], (stage, reads, copies)
        del loss
        assert library.held_bytes() == held, "a step leaves no memory behind"
        engine.destroy()


def schedule_of_a_step(path: Path) -> None:
    """With the optimizer on the host, copies and updates overlap with computation on the device.

    Gradients are copied during backward. The host updates a unit while the device computes the
    forward of the unit before it.
    """
    if dist.is_initialized():
        return
    units = 6
    log, numel = schedule.record(2, units)
    # Seconds per unit: forward 1, backward 2, update 2 and each copy 0.1.
    speeds = schedule.Speeds(forward=1 / numel, copy=0.05 / numel, update=2 / numel)
    spans = schedule.from_first_backward(schedule.replay(log, numel, speeds))

    def work(what: str, unit: int, row: str) -> tuple[float, float]:
        """Return the start and the end of the first such span."""
        found = [span for span in spans if (span.what, span.unit, span.row) == (what, unit, row)]
        size = {"gradient": 0.1, "weight": 0.1, "update": 2.0, "forward": 1.0, "backward": 2.0}[
            what
        ]
        seconds = 0.0
        for span in found:
            seconds += span.stop - span.start
            if seconds > size - 1e-6:
                return found[0].start, span.stop
        raise AssertionError((what, unit, row, seconds))

    for unit in range(2, units + 1):
        left, _ = work("gradient", unit, schedule.DOWN)
        _, computed = work("backward", unit - 1, schedule.COMPUTING)
        assert left < computed, (unit, "its gradient leaves during backward")
        began, updated = work("update", unit, schedule.UPDATES)
        _, arrived = work("weight", unit, schedule.UP)
        start, _ = work("forward", unit, schedule.COMPUTING)
        _, stop = work("forward", unit - 1, schedule.COMPUTING)
        assert updated < arrived <= start, (unit, "its forward uses the update")
        assert began < stop < updated, (unit, "its update overlaps with the forward before it")
    share = schedule.overlapped_share(spans, schedule.UPDATES)
    assert share > 0.4, "five of twelve seconds"


CASES = (
    a_step_of_one_rank,
    schedule_of_a_step,
    copies_of_a_step,
    random_schedules,
    faults_of_other_systems,
    stages_and_tiers,
    offloaded_states,
    optimizers_and_fewer_bits,
    kernels_on_the_device,
    checkpoints_and_access,
    activations_and_memory,
    planned_on_shapes,
)

if __name__ == "__main__":
    with training_on(toy.NAME):
        next(case for case in CASES if case.__name__ == sys.argv[1])(Path(sys.argv[2]))
