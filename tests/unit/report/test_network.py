"""The bytes that a step sends over each kind of link are reported from counters and the plan."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import nn

from deepseek_zero.base.mesh import Mesh
from deepseek_zero.base.meter import Meter
from deepseek_zero.comm import measure
from deepseek_zero.comm.bootstrap import Hosts
from deepseek_zero.comm.by_host import ByHost
from deepseek_zero.comm.collectives import Comm
from deepseek_zero.comm.measure import Line, line_of
from deepseek_zero.extensions import TwoHops
from deepseek_zero.planner.plan import Plan, plan_model
from deepseek_zero.planner.plan_settings import Compression, PlanSettings
from deepseek_zero.precision.codecs import Blocks
from deepseek_zero.report.network import BETWEEN_HOSTS, INSIDE_A_HOST, NetworkLink, network_links
from deepseek_zero.sharding.comm_context import Route
from tests.compositions import engines_of_threads
from tests.in_process import Rank, run_ranks


def planned(per_host: int) -> Plan:
    codes = Compression(weights=Blocks(8, 256), gradients=Blocks(4, 128))
    settings = PlanSettings(
        persistence_numel=0, window_numel=0, compression=codes, ranks_per_host=per_host
    )
    return plan_model(nn.Linear(512, 512, bias=False), settings, Mesh().on_world(4, 0))


def metered(plan: Plan, far: float, steps: int = 2) -> Meter:
    """Return the counters after a first step and `steps` more steps of one second each."""
    meter, volume = Meter(), plan.volume()
    meter.count("broadcast", 10**6, 10**6)  # before the first step
    assert meter.end_step()
    for _ in range(steps):
        meter.count("all_gather", volume.state_bytes, int(volume.state_bytes * far))
        meter.end_step()
    meter.clock.seconds = {"forward": float(steps)}
    return meter


def groups(per_host: int) -> Any:
    """Return the shard group of four ranks on two hosts."""
    near, across = (
        SimpleNamespace(size=2, inter_node=frozenset()),
        SimpleNamespace(size=2, inter_node=frozenset({1})),
    )
    route = Route()
    if per_host > 1:
        route = TwoHops(ByHost(cast("Any", near), cast("Any", across)))
    return SimpleNamespace(
        comm=SimpleNamespace(size=4, inter_node=frozenset(range(2))), route=route
    )


@pytest.mark.parametrize("per_host", [1, 2])
def test_bytes_are_those_of_a_step_with_and_without_codes(per_host: int) -> None:
    plan = planned(per_host)
    volume, exact = plan.volume(), plan.uncoded().volume()
    far = (
        2 / 3 if per_host == 1 else (volume.state_bytes - volume.inside_hosts) / volume.state_bytes
    )
    links = network_links(
        plan, metered(plan, far), Line(4 * volume.state_bytes * far, "eth0 has"), groups(per_host)
    )
    between, inside = links
    assert (between.name, inside.name) == (BETWEEN_HOSTS, INSIDE_A_HOST)
    assert between.sent_bytes + inside.sent_bytes == volume.state_bytes
    assert between.uncoded_bytes + inside.uncoded_bytes == pytest.approx(exact.state_bytes)
    padded = 512 * 512
    if per_host == 1:
        assert between.uncoded_bytes == pytest.approx(padded * (2 * 4 + 4) / 4 * 2, rel=1e-5)
    else:
        assert between.uncoded_bytes == pytest.approx(padded * (2 * 4 + 4) / 4, rel=1e-5)
        assert inside.uncoded_bytes - inside.sent_bytes == exact.inside_hosts - volume.inside_hosts
    assert between.rate == between.sent_bytes
    assert "25% of the" in between.explain() and "that eth0 has" in between.explain()
    assert "without quantization" in between.explain() and "x less" in between.explain()


@pytest.mark.parametrize(
    ("hosts", "mesh", "per_host", "secondary", "saves"),
    [
        (2, Mesh(), 1, 1, True),
        (2, Mesh(), 2, 1, True),
        (2, Mesh(), 1, 2, True),
        (2, Mesh(dp_replicate=2, dp_shard=2), 1, 1, False),
        (4, Mesh(dp_replicate=2, dp_shard=2), 1, 1, True),
    ],
    ids=[
        "flat",
        "by host",
        "second copies",
        "replicas on other hosts",
        "replicas and slices on other hosts",
    ],
)
def test_reported_savings_of_codes_between_hosts_equal_a_run_without_codes(
    hosts: int, mesh: Mesh, per_host: int, secondary: int, saves: bool
) -> None:
    def sent(rank: Rank, *, coded: bool) -> tuple[dict[str, NetworkLink], float]:
        """Return the links and the bytes per step that were sent to other hosts."""
        model = nn.Sequential(nn.Linear(512, 512, bias=False), nn.Linear(512, 512, bias=False))
        config = {
            "train_micro_batch_size_per_gpu": 1,
            "steps_per_print": None,
            "ranks_per_host": per_host,
            "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
            "zero_optimization": {
                "stage": 3,
                "stage3_param_persistence_threshold": 0,
                "stage3_max_live_parameters": 0,
                "zero_quantized_weights": coded,
                "zero_quantized_gradients": coded,
                "zero_hpz_partition_size": secondary,
                "compression": {"min_numel": 0},
            },
        }
        engine = here.start(rank, model, config, mesh=mesh)
        for _ in range(3):
            engine.backward(engine(torch.ones(1, 512)).square().mean())
            engine.step()
        meter, comm_ctx = engine.runtime.comm.meter, engine.runtime.comm_ctx
        links = {link.name: link for link in network_links(engine.plan(), meter, None, comm_ctx)}
        far = meter.counted_bytes[1] / meter.counted_steps
        engine.destroy()
        return links, far

    with engines_of_threads() as here:
        coded, plain = (
            run_ranks(4, lambda rank, coded=coded: sent(rank, coded=coded), hosts=hosts)
            for coded in (True, False)
        )
    for (links, far), (_, without) in zip(coded, plain, strict=True):
        between = links[BETWEEN_HOSTS]
        assert between.sent_bytes == far
        assert between.uncoded_bytes == pytest.approx(without, rel=1e-3)
        assert ("x less" in between.explain()) is saves


def test_figures_are_absent_before_two_steps_and_after_a_reset() -> None:
    plan = planned(1)
    assert network_links(plan, metered(plan, 1.0, steps=0), None, groups(1)) == []
    meter = metered(plan, 1.0)
    meter.reset()
    assert network_links(plan, meter, None, groups(1)) == []
    meter.count("all_gather", 50, 50)
    meter.end_step()
    (between,) = network_links(plan, meter, None, groups(1))
    assert between.sent_bytes == 50 and "% of" not in between.explain()


def test_a_link_speed_is_measured_or_read_from_the_interface_and_divided_by_ranks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    comm = Comm(torch.device("cpu"))
    assert line_of(comm) is None, "a world of one has no line"
    comm.hosts = Hosts(0, ("a", "a", "b", "b"))
    monkeypatch.setattr(measure, "INTERFACES", tmp_path)
    monkeypatch.setattr(measure, "listening_host", lambda hosts: "127.0.0.1")
    (tmp_path / "lo").mkdir()
    assert line_of(comm) is None
    for said, expected in (("1000\n", Line(62.5e6, "lo has for each of 2 ranks")), ("-1\n", None)):
        (tmp_path / "lo" / "speed").write_text(said)
        assert line_of(comm) == expected
    comm.meter.inter_node_rate = 7e6
    assert line_of(comm) == Line(7e6, "the link transferred at the start")
