"""Runs over several hosts (tests/hosts.py), and reductions by host: start, results and bytes."""

from __future__ import annotations

import os
import socket
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import deepseek_zero
from deepseek_zero.base import launch
from deepseek_zero.base.errors import PeerError, UsageError
from deepseek_zero.checkpoint import load
from deepseek_zero.checkpoint.format import Manifest
from deepseek_zero.comm import context, measure
from deepseek_zero.comm.ids import CollectiveId, lane_number
from deepseek_zero.comm.measure import inter_node_rate
from deepseek_zero.engine import planning
from deepseek_zero.sharding.grad_sum import GradState
from deepseek_zero.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state
from tests.hosts import sent_from_here
from tests.models import Gpt, batch_of, seeded
from tests.reference import OPTIMIZERS, Reference
from tests.training import DTYPES, Run, train_step

pytestmark = pytest.mark.slow  # starts ranks in network namespaces, which takes minutes

RANKS = 4


def start(run: Run, **keys: Any) -> Any:
    model = seeded(Gpt)
    optimizer = OPTIMIZERS[run.optimizer](list(model.parameters()))
    return deepseek_zero.initialize(model=model, optimizer=optimizer, config=run.config() | keys)[0]


def assert_trains_as_one_process(engine: Any, run: Run, per_host: int) -> None:
    """Two steps give the bits of one process that adds in the order by host."""
    dtype, rank = DTYPES[run.dtype], dist.get_rank()
    optimizer = OPTIMIZERS[run.optimizer]
    reference = Reference(
        seeded(Gpt),
        RANKS,
        run.accumulation,
        run.stage < 2,
        dtype,
        optimizer,
        ranks_per_host=per_host,
    )
    for step in range(2):
        losses = train_step(engine, run, step)
        batches = [
            [batch_of(step, micro, each) for micro in range(run.accumulation)]
            for each in range(RANKS)
        ]
        expected, _ = reference.step(batches)
        assert all(map(torch.equal, losses, expected[rank])), f"loss of step {step}"
    weights = engine.module.state_dict()
    for name, weight in reference.model.state_dict().items():
        assert torch.equal(weights[name], weight), name


@pytest.mark.ranks(RANKS, hosts=2)
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_two_hosts_without_a_stated_number_of_ranks_start_and_sum_by_host(stage: int) -> None:
    assert "LOCAL_WORLD_SIZE" not in os.environ and "LOCAL_RANK" not in os.environ
    rank, run = dist.get_rank(), Run(stage, accumulation=2)
    assert socket.gethostname() == f"h{rank // 2}"
    engine = start(run)
    world = context.WorldContext.of_this_world()
    assert world.hosts.local_ranks == [rank // 2 * 2, rank // 2 * 2 + 1]
    assert (context.ranks_of_this_host(), context.local_rank()) == (2, rank % 2)
    assert "shared memory within a host, gloo between hosts" in str(
        engine.runtime.comm.capabilities()
    )
    assert engine.runtime.settings.ranks_per_host == 2
    assert any(
        "sums by host: over 2 ranks of each of 2 hosts" in line
        for line in engine.runtime.plan.explain()
    )
    assert_trains_as_one_process(engine, run, 2)


@pytest.mark.ranks(RANKS)
@pytest.mark.parametrize(
    ("stage", "transport", "tier"),
    [
        (0, "gloo", "none"),
        (2, "fastest", "none"),
        (3, "gloo", "nvme"),
        (3, "fastest", "cpu"),
        (3, "fastest", "none"),
    ],
)
def test_one_host_has_the_same_bits_with_a_stated_order(
    stage: int, transport: str, tier: str, tmp_path: Path
) -> None:
    run = Run(stage, accumulation=2, transport=transport, bucket=4096, tier=tier, ranks_per_host=2)
    engine = start(run)
    assert_trains_as_one_process(engine, run, 2)
    engine.save_checkpoint(tmp_path, "here")
    assert Manifest.read(tmp_path / "here" / "manifest.json").ranks_per_host == 2
    with pytest.MonkeyPatch.context() as patch:
        said = list[str]()
        patch.setattr(load, "log_first", said.append)
        engine.load_checkpoint(tmp_path)
        assert not said
        start(replace(run, ranks_per_host=1)).load_checkpoint(tmp_path)
        assert "sums over 2 neighbours first, and this run with 1" in said[0]


@pytest.mark.ranks(RANKS, hosts=2)
@pytest.mark.parametrize("per_host", [1, 2])
def test_bytes_between_hosts_are_counted_and_by_host_each_is_sent_once(per_host: int) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(512, 512) for _ in range(4)))
    run = Run(3, "bf16", ranks_per_host=per_host)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    engine = deepseek_zero.initialize(model=model, optimizer=optimizer, config=run.config())[0]

    def step() -> None:
        engine.backward(engine(torch.ones(1, 512, dtype=torch.bfloat16)).float().sum())
        engine.step()

    step()
    meter, steps = engine.runtime.comm.meter, 3
    # The minimum of three runs: acknowledgements and retransmissions add bytes on a busy machine
    sent = sys.maxsize
    for _ in range(3):
        meter.reset()
        dist.barrier()
        before = sent_from_here()
        dist.barrier()  # no rank of this host starts before all have read the counter
        for _ in range(steps):
            step()
        dist.barrier()
        sent = min(sent, sent_from_here() - before)
    mine = sum(meter.far_bytes.values())
    table = engine.runtime.comm.all_gather_rows(
        torch.tensor([mine, meter.far_bytes["rows"]]), "far bytes"
    )
    here = dist.get_rank() // 2 * 2
    between, rows = table[here : here + 2].sum(dim=0).tolist()
    volume, padded = (
        engine.runtime.plan.volume(),
        sum(group.layout.padded_numel for group in engine.runtime.groups),
    )
    gathers = volume.gathers // (padded // RANKS * (RANKS - 1) * 2)
    # L x F x P x e, and F x P x e
    per_host_bytes = {1: 2 * (2 * gathers + 2), 2: 2 * gathers + 4}[per_host]
    assert between - rows == steps * padded // 2 * per_host_bytes
    if per_host == 2:
        assert between - rows == 2 * steps * (volume.state_bytes - volume.inside_hosts)
    assert between <= sent <= 1.005 * between + (64 << 10)


@pytest.mark.ranks(RANKS)
def test_orders_that_cannot_be_are_refused_by_name() -> None:
    with pytest.raises(UsageError, match=r"ranks_per_host=3: .*hosts have 1 or 3"):
        start(Run(2, ranks_per_host=3))
    dist.barrier()


@pytest.mark.ranks(RANKS, hosts=2)
def test_codes_are_chosen_by_measurement_and_a_resume_repeats_the_choice(tmp_path: Path) -> None:
    run = Run(3, "bf16", optimizer="adamw")

    def start_choosing(seed: int, link: float) -> Any:
        """Start an engine whose measured link rate is replaced by `link` bytes per second."""
        measured = list[float]()

        def pinned(comm: Any, what: str) -> float:
            measured.append(inter_node_rate(comm, what))
            return link

        config = run.config()
        config["zero_optimization"]["compression"] = {
            "auto": True,
            "min_numel": 0,
            "gradients": {"inside_bits": 8},
        }
        model = seeded(Gpt, seed=seed)
        optimizer = OPTIMIZERS[run.optimizer](list(model.parameters()))
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(planning, "inter_node_rate", pinned)
            engine = deepseek_zero.initialize(model=model, optimizer=optimizer, config=config)[0]
        assert 1e6 < measured[0] < 1e11
        return engine

    one = start_choosing(7, 100e6 / 8)
    said = one.runtime.settings.compression
    assert (str(said.weights), str(said.gradients)) == ("int8/256", "int4/128"), said.why
    assert (
        said.why in one.explain() and "sent as int4/128, inside a host as int8/256" in one.explain()
    )
    train_step(one, run, 0)
    one.save_checkpoint(tmp_path, "one")
    expected = train_step(one, run, 1)
    assert Manifest.read(tmp_path / "one" / "manifest.json").codes == {
        "weights": (8, 256),
        "gradients": (4, 128),
    }

    other = start_choosing(8, 1e12)
    assert other.runtime.settings.compression.gradients is None, "this link was fast"
    train_step(other, run, 0)
    other.load_checkpoint(tmp_path)
    assert all(map(torch.equal, train_step(other, run, 1), expected))
    again = other.runtime.settings.compression
    assert (again.weights, again.gradients) == (said.weights, said.gradients)
    assert "as the run that was gone on with had chosen" in other.explain()
    meter = other.runtime.comm.meter
    meter.reset()
    train_step(other, run, 2)
    volume = other.runtime.plan.volume()
    assert meter.total_bytes() == volume.state_bytes + volume.rows
    report = other.memory_report()
    assert report.measured_total <= report.predicted_total


@pytest.mark.ranks(RANKS, hosts=2)
def test_transports_are_measured_at_the_start_and_both_figures_logged() -> None:
    run = Run(3, transport="measured")
    with pytest.MonkeyPatch.context() as patch:
        engine = start(run)
        told = [line for line in engine.explain().splitlines() if "measured between hosts" in line]
        assert len(told) == 1 and "by gloo" in told[0] and "by our own sockets" in told[0]
        rates = iter([1e8, 1.2e8])
        patch.setattr(measure, "inter_node_rate", lambda *arguments: next(rates))
        engine = start(run)
        assert "our own sockets between hosts" in str(engine.runtime.comm.capabilities())
        assert_trains_as_one_process(engine, run, 2)
        lines = engine.explain().splitlines()
        (between,) = [line for line in lines if line.startswith("between hosts: this rank sends")]
        assert "% of the 114 MiB/s that the link transferred at the start" in between

        def refused(world: context.WorldContext) -> None:
            raise PeerError("the ports between the hosts are closed")

        rates = iter([1e8])
        patch.setattr(context.WorldContext, "connect_inter_node", refused)
        engine = start(run)
        assert "gloo between hosts" in str(engine.runtime.comm.capabilities())
        (fallback,) = [
            line for line in engine.parts.capabilities.fallbacks if "measured between hosts" in line
        ]
        assert "chosen: gloo (our own sockets: the ports between the hosts are closed)" in fallback
    assert "gloo between hosts" in str(start(run).runtime.comm.capabilities())


@pytest.mark.ranks(2, hosts=2, fresh=True)
def test_the_configuration_sets_the_listening_address() -> None:
    engine = start(Run(3, transport="tcp"), network={"interface": "v0", "ports": "29710-29713"})
    world = context.WorldContext.of_this_world()
    assert world._listener is not None
    host, port = world._listener.address
    assert host.startswith("10.77.0.") and 29710 <= port <= 29713
    engine.backward(engine(batch_of(0, 0, 0).tokens, batch_of(0, 0, 0).targets))


def seen_after(engine: Any, way: str, folder: Path) -> list[Tensor]:
    """Read states between a step and the next forward with the API call `way`."""
    params = list(engine.module.parameters())
    match way:
        case "masters":
            return [
                value for param in params if (value := safe_get_full_fp32_param(param)) is not None
            ]
        case "moments":
            return [
                value
                for param in params
                if (value := safe_get_full_optimizer_state(param, "exp_avg")) is not None
            ]
        case "states":
            return [entry["exp_avg"].clone() for entry in engine.optimizer.state.values()]
        case "weights":
            return [value.clone() for value in engine.state_dict().values()]
        case "one weight":
            with deepseek_zero.zero.GatheredParameters(params[2:3]):
                return [params[2].detach().clone()]
        case "written":
            with deepseek_zero.zero.GatheredParameters(params[2:3], modifier_rank=0):
                params[2].data.mul_(0.5)
        case "evaluation":
            with torch.no_grad():
                batch = batch_of(9, 0, dist.get_rank())
                return [engine(batch.tokens, batch.targets).clone()]
        case "saved":
            engine.save_checkpoint(folder, "here")
            engine.load_checkpoint(folder, "here")
    return []


@pytest.mark.ranks(RANKS, hosts=2)
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize(
    "way",
    ["masters", "moments", "states", "weights", "one weight", "written", "evaluation", "saved"],
)
def test_between_hosts_an_update_is_deferred_to_the_next_forward_transparently(
    way: str, dtype: str, tmp_path: Path
) -> None:
    found, run = [], Run(3, dtype, accumulation=2, clipping=0.3, optimizer="adamw")
    for waits in (True, False):
        engine = start(replace(run, updates=(("pipeline", waits),)))
        seen = []
        for step in range(3):
            losses = train_step(engine, run, step)
            mine = any(
                group.gradient.sum.state is GradState.HELD
                for group in engine.runtime.trained_groups
            )
            assert (
                dist.get_rank() > 0 or mine is waits
            )  # the last rank's shard of this model is only padding
            seen += [*losses, *seen_after(engine, way, tmp_path / str(waits))]
        found.append(seen + [value.clone() for value in engine.state_dict().values()])
    assert len(found[0]) == len(found[1])
    assert all(map(torch.equal, *found))


@pytest.mark.ranks(2, hosts=2)
def test_an_unreachable_store_is_reported_with_its_address_on_every_rank(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Rank 0 listens on its loopback as configured.

    No rank waits for those that cannot reach it.
    """
    monkeypatch.setenv(launch.INTERFACE, "lo")
    monkeypatch.setenv(launch.GLOO_INTERFACE, "v0")  # lets ranks exchange the error
    monkeypatch.setattr(context.WorldContext, "_current", None)
    with pytest.raises(
        UsageError, match=r"rank 1 cannot reach rank 0 at 127\.0\.0\.1:\d+: .*refused"
    ):
        start(Run(3))


@pytest.mark.ranks(3)
def test_gloo_is_given_every_receive_of_an_exchange_before_any_send(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The other order halves the bidirectional throughput of a link (`benchmarks/link.py`)."""
    gloo, posted = context.WorldContext.of_this_world().gloo_over(range(3)), list[str]()

    def spy(verb: str) -> None:
        real = getattr(dist, verb)
        monkeypatch.setattr(
            dist, verb, lambda *given, **named: posted.append(verb) or real(*given, **named)
        )

    spy("irecv")
    spy("isend")
    full = torch.zeros(3)
    full[dist.get_rank()] = dist.get_rank() + 1.0
    gloo.all_gather(full, CollectiveId("world/rows", lane_number(0, "rows"), 1 << 20, 0, []))()
    assert full.tolist() == [1.0, 2.0, 3.0]
    assert posted == ["irecv", "irecv", "isend", "isend"]
