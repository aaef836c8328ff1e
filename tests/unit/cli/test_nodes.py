"""Options, GPUs and CPU cores determine which processes a launch starts on this machine."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest

from deepseek_zero.base import host
from deepseek_zero.base.errors import UsageError
from deepseek_zero.base.host import allowed_cores
from deepseek_zero.base.world import Nodes
from deepseek_zero.cli.nodes import (
    DEFAULT_PORT,
    NodeMachine,
    NodePlan,
    NodeShare,
    RankOptions,
    plan_node,
    visible_gpus,
)
from tests.fake_host import files_of

CPU = NodeMachine(cores=4)


GPUS = NodeMachine(cores=32, gpus=("0", "1", "2", "3"))


SOME_GPUS = NodeMachine(cores=32, gpus=("2", "5", "7"))


def share_of(asked: RankOptions, machine: NodeMachine) -> NodeShare:
    return plan_node(asked, machine, ()).share


@pytest.fixture
def hostfile(tmp_path: Path) -> Path:
    path = tmp_path / "hostfile"
    path.write_text("first slots=2\nsecond slots=3\n")
    return path


@pytest.mark.parametrize(
    ("asked", "machine", "nproc", "devices"),
    [
        (RankOptions(), CPU, 2, None),
        (RankOptions(), GPUS, 4, None),
        (RankOptions(nproc=3), CPU, 3, None),
        (RankOptions(num_gpus=2), GPUS, 2, ("0", "1")),
        (RankOptions(num_gpus=2), SOME_GPUS, 2, ("2", "5")),
        (RankOptions(num_gpus=8), GPUS, 4, None),
        (RankOptions(include="localhost:1,3"), GPUS, 2, ("1", "3")),
        (RankOptions(include="localhost:7"), SOME_GPUS, 1, ("7",)),
        (RankOptions(exclude="localhost:5"), SOME_GPUS, 2, ("2", "7")),
        (RankOptions(include="localhost:1"), NodeMachine(8, ("GPU-aa", "GPU-bb")), 1, ("GPU-bb",)),
    ],
)
def test_one_machine_runs_the_requested_ranks(
    asked: RankOptions, machine: NodeMachine, nproc: int, devices: tuple[str, ...] | None
) -> None:
    share = share_of(asked, machine)
    assert (share.nproc, share.devices) == (nproc, devices)


def test_a_single_machine_uses_any_free_port() -> None:
    plan = plan_node(RankOptions(), CPU, ())
    assert (plan.num_nodes, plan.node_rank, plan.master_addr, plan.master_port) == (
        1,
        0,
        "127.0.0.1",
        0,
    )


@pytest.mark.parametrize(
    "asked", [RankOptions(num_gpus=8), RankOptions(include="localhost:0,1,2,3,4,5,6,7")]
)
@pytest.mark.parametrize(("cores", "nproc"), [(1, 2), (2, 2), (6, 6), (64, 8)])
def test_requested_gpus_on_a_machine_without_any_become_cpu_ranks_up_to_one_per_core(
    asked: RankOptions, cores: int, nproc: int
) -> None:
    share = share_of(asked, NodeMachine(cores))
    assert (share.nproc, share.devices) == (nproc, None)
    assert "8 GPUs" in share.note and f"running {nproc} CPU ranks instead" in share.note


def test_two_requested_gpus_become_two_cpu_ranks_on_any_machine() -> None:
    assert share_of(RankOptions(num_gpus=2), NodeMachine(cores=1)).nproc == 2


def test_a_request_for_too_many_gpus_reports_the_number_that_runs() -> None:
    assert "4 GPUs" in share_of(RankOptions(num_gpus=8), GPUS).note


def test_more_processes_than_gpus_run_with_a_note() -> None:
    assert "more than this machine's 4 GPUs" in share_of(RankOptions(nproc=6), GPUS).note
    assert share_of(RankOptions(nproc=4), GPUS).note == ""


def test_a_slot_that_this_machine_lacks_is_refused() -> None:
    with pytest.raises(UsageError, match="No slot '3'"):
        plan_node(RankOptions(include="localhost:3"), SOME_GPUS, ())


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        (RankOptions(nproc=0), "--nproc is 0"),
        (RankOptions(master_port=-1), "--master_port is -1"),
        (RankOptions(nproc=2, master_port=99_999), "--master_port is 99999"),
        (RankOptions(nproc=2, num_gpus=2), "mutually exclusive"),
        (RankOptions(nproc=100_000), "more than the 1024 processes"),
        (RankOptions(include="localhost:0", num_gpus=1), "mutually exclusive with --num_gpus"),
        (RankOptions(exclude="localhost:0", num_nodes=1), "mutually exclusive with --num_nodes"),
        (RankOptions(num_nodes=2), "need --node_rank and --master_addr"),
        (RankOptions(num_nodes=2, node_rank=0), "need --node_rank and --master_addr"),
        (
            RankOptions(num_nodes=2, node_rank=2, master_addr="first"),
            "--node_rank 2 is not one of the 2 nodes",
        ),
        (RankOptions(node_rank=1), "--node_rank 1 is not one of the 1 nodes"),
    ],
)
def test_options_that_cannot_be_meant_are_refused(asked: RankOptions, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        plan_node(asked, GPUS, ())


def test_several_nodes_without_a_hostfile_need_only_a_number_and_an_address() -> None:
    plan = plan_node(RankOptions(nproc=2, num_nodes=3, node_rank=2, master_addr="first"), CPU, ())
    assert plan == NodePlan(NodeShare(2), 3, 2, "first", DEFAULT_PORT)


def test_a_machine_is_found_in_the_hostfile_by_its_names(hostfile: Path) -> None:
    plan = plan_node(RankOptions(hostfile=hostfile), CPU, {"second", "10.0.0.2"})
    assert plan == NodePlan(NodeShare(3), 2, 1, "first", DEFAULT_PORT)


def test_node_rank_selects_the_host(hostfile: Path) -> None:
    plan = plan_node(
        RankOptions(hostfile=hostfile, node_rank=0, master_addr="10.0.0.1", master_port=1234),
        CPU,
        (),
    )
    assert plan == NodePlan(NodeShare(2), 2, 0, "10.0.0.1", 1234)


def test_slots_of_the_hostfile_are_places_among_the_visible_gpus(hostfile: Path) -> None:
    asked = RankOptions(hostfile=hostfile, include="first@second:0,2")
    assert plan_node(asked, SOME_GPUS, {"second"}).share == NodeShare(2, ("2", "7"))


def test_numbers_limit_the_hosts_and_their_slots(hostfile: Path) -> None:
    plan = plan_node(RankOptions(hostfile=hostfile, num_nodes=1, num_gpus=1), CPU, {"first"})
    assert (plan.num_nodes, plan.share.nproc, plan.master_port) == (1, 1, 0)
    assert plan.share.note == ""
    more = plan_node(RankOptions(hostfile=hostfile, num_nodes=4), CPU, {"first"})
    assert more.num_nodes == 2 and "the hostfile has 2 hosts" in more.share.note


def test_a_machine_missing_in_the_hostfile_gets_an_error_with_advice(hostfile: Path) -> None:
    with pytest.raises(UsageError, match="--node_rank") as caught:
        plan_node(RankOptions(hostfile=hostfile), CPU, {"third"})
    assert "first, second" in str(caught.value)
    assert "ssh" in str(caught.value)


def test_more_slots_in_the_hostfile_than_gpus_is_refused(hostfile: Path) -> None:
    with pytest.raises(UsageError, match=r"slot 2, but it shows 2 GPUs"):
        plan_node(RankOptions(hostfile=hostfile), NodeMachine(8, ("0", "1")), {"second"})


SKYPILOT = Nodes("SkyPilot", 2, 1, num_gpus=2, address="10.0.0.4")


KUBEFLOW = Nodes("PET_*", 2, 1, nproc="3", address="10.0.0.9", port=29400)


@pytest.mark.parametrize(
    ("asked", "said", "machine", "expected"),
    [
        (
            RankOptions(),
            SKYPILOT,
            GPUS,
            NodePlan(NodeShare(2, ("0", "1")), 2, 1, "10.0.0.4", DEFAULT_PORT),
        ),
        (RankOptions(), KUBEFLOW, CPU, NodePlan(NodeShare(3), 2, 1, "10.0.0.9", 29400)),
        (
            RankOptions(nproc=1, num_nodes=3, node_rank=2, master_addr="h", master_port=4),
            KUBEFLOW,
            CPU,
            NodePlan(NodeShare(1), 3, 2, "h", 4),
        ),
        (RankOptions(num_nodes=1), KUBEFLOW, CPU, NodePlan(NodeShare(3))),
        (
            RankOptions(include="localhost:3"),
            SKYPILOT,
            GPUS,
            NodePlan(NodeShare(1, ("3",)), 2, 1, "10.0.0.4", DEFAULT_PORT),
        ),
        (RankOptions(), Nodes("PET_*", 1, nproc="auto"), CPU, NodePlan(NodeShare(2))),
        (
            RankOptions(),
            Nodes("PET_*", 1, nproc="cpu", address="h", port=5),
            CPU,
            NodePlan(NodeShare(4)),
        ),
        (RankOptions(), Nodes("PET_*", 1, nproc="gpu"), GPUS, NodePlan(NodeShare(4))),
    ],
)
def test_variables_of_a_cluster_engine_replace_missing_options(
    asked: RankOptions, said: Nodes, machine: NodeMachine, expected: NodePlan
) -> None:
    plan = plan_node(asked, machine, (), said)
    assert replace(plan, share=replace(plan.share, note="")) == expected


def test_a_hostfile_overrides_environment_variables(hostfile: Path) -> None:
    asked = RankOptions(hostfile=hostfile)
    assert plan_node(asked, CPU, ("second",), SKYPILOT) == plan_node(asked, CPU, ("second",))


@pytest.mark.parametrize("word", ["gpu", "0", "many", ""])
def test_a_number_of_processes_that_is_none_is_refused(word: str) -> None:
    with pytest.raises(UsageError, match=f"PET_NPROC_PER_NODE='{word}' gives no process"):
        plan_node(RankOptions(), CPU, (), Nodes("PET_*", 1, nproc=word))


def test_a_number_of_processes_that_no_machine_can_run_is_refused() -> None:
    with pytest.raises(UsageError, match="PET_NPROC_PER_NODE='5000' is more than the 1024"):
        plan_node(RankOptions(), CPU, (), Nodes("PET_*", 1, nproc="5000"))


def test_a_cluster_engine_without_a_rendezvous_address_raises_an_error() -> None:
    with pytest.raises(UsageError, match="2 nodes need --node_rank and --master_addr"):
        plan_node(RankOptions(), CPU, (), Nodes("SkyPilot", 2, 1))


@pytest.mark.parametrize(("cores", "nproc"), [(1, 1), (2, 1), (3, 1), (4, 2), (64, 32)])
def test_without_gpus_the_default_is_a_process_per_pair_of_cores(cores: int, nproc: int) -> None:
    assert NodeMachine(cores).default_nproc == nproc


def test_with_gpus_the_default_is_a_process_per_gpu() -> None:
    assert NodeMachine(64, ("0", "1", "2")).default_nproc == 3


@pytest.mark.parametrize(("cores", "nproc", "threads"), [(8, 2, "4"), (8, 3, "2"), (2, 4, "1")])
def test_ranks_share_the_cores(cores: int, nproc: int, threads: str) -> None:
    assert NodeMachine(cores).thread_environment(nproc, {}) == {
        "OMP_NUM_THREADS": threads,
        "MKL_NUM_THREADS": threads,
    }


def test_threads_set_by_the_user_stay() -> None:
    assert NodeMachine(8).thread_environment(2, {"OMP_NUM_THREADS": "7"}) == {
        "MKL_NUM_THREADS": "4"
    }


def test_a_containers_quota_limits_the_cores(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    quota = "sys/fs/cgroup/cpu.max"
    monkeypatch.setattr(host, "THIS_HOST", files_of(tmp_path, {quota: "50000 100000"}))
    assert allowed_cores() == 1
    files_of(tmp_path, {quota: "max 100000"})
    assert allowed_cores() == len(os.sched_getaffinity(0))
    (tmp_path / quota).unlink()
    assert allowed_cores() == len(os.sched_getaffinity(0))


def test_visible_gpus_are_the_entries_of_the_environment_variable() -> None:
    assert visible_gpus(4, {}) == ("0", "1", "2", "3")
    assert visible_gpus(2, {"CUDA_VISIBLE_DEVICES": "3, 5"}) == ("3", "5")
    assert visible_gpus(1, {"CUDA_VISIBLE_DEVICES": "GPU-aa"}) == ("GPU-aa",)
    assert visible_gpus(0, {"CUDA_VISIBLE_DEVICES": "0,1"}) == ()
