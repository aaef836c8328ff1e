"""The findings of `deepseek-zero doctor` as a table and as JSON."""

from __future__ import annotations

import gc
import json
import os
from pathlib import Path

import pytest

from deepseek_zero.base import host
from deepseek_zero.cli import doctor
from deepseek_zero.cli.nodes import NodeMachine
from tests import cudart, fake_host

EXPECTED = {
    "python",
    "torch",
    "CPU cores",
    "memory",
    "bf16",
    "fp16",
    "gloo",
    "nccl",
    "shared memory",
    "disk here",
    "open files",
    "memory of states",
    "memory of the cgroup",
    "NUMA nodes",
    "update threads",
    "pages of states",
    "page-locked memory",
}


def test_the_json_holds_every_finding_with_its_meaning(capsys: pytest.CaptureFixture[str]) -> None:
    doctor.show(as_json=True)
    found = {one["name"]: one for one in json.loads(capsys.readouterr().out)}
    assert found.keys() >= EXPECTED
    assert all(
        one["value"] and one["meaning"] and one["verdict"] in {"good", "note", "bad"}
        for one in found.values()
    )


def test_the_table_has_the_same_values(capsys: pytest.CaptureFixture[str]) -> None:
    doctor.show()
    shown = capsys.readouterr().out
    assert all(name in shown for name in EXPECTED)


def test_brackets_in_a_name_are_not_markup(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    found = doctor.Finding("states on '/data/[/x]'", "[y]", "[z]", doctor.Severity.BAD)
    monkeypatch.setattr(doctor, "findings", lambda: [found])
    doctor.show()
    shown = capsys.readouterr().out
    assert all(text in shown for text in (found.name, found.value, found.meaning))


def test_cores_outside_of_the_affinity_are_reported() -> None:
    present = os.cpu_count() or 1
    assert next(doctor._cpu(NodeMachine(present + 1))).meaning.startswith(f"of {present}")


def test_a_machine_without_gpus_needs_no_nccl() -> None:
    needs = {one.name: one.verdict for one in doctor._backends(NodeMachine(4))}
    assert needs == {"gloo": doctor.Severity.GOOD, "nccl": doctor.Severity.GOOD}


@pytest.mark.parametrize(
    ("on_gpu", "gpu_has_it", "flags", "value"),
    [
        (True, True, [], "yes"),
        (True, False, ["bf16"], "slow"),
        (False, False, ["bf16"], "yes"),
        (False, False, [], "slow"),
    ],
)
def test_a_number_format_is_chosen_by_the_training_device(
    on_gpu: bool, gpu_has_it: bool, flags: list[str], value: str
) -> None:
    assert doctor._format("bf16", on_gpu, gpu_has_it, flags).value == value


def test_doctor_reports_the_memories_for_states_and_their_speed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    found = {one.name: one for one in doctor.findings()}
    assert found[f"states on '{tmp_path}'"].value in (
        "past the page cache",
        "through the page cache",
    )
    assert list(tmp_path.iterdir()) == []


def test_a_low_limit_of_open_files_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("resource.getrlimit", lambda _: (64, 4096))
    found = doctor._open_files()
    assert (found.value, found.verdict) == ("64, up to 4096 with `ulimit -n`", doctor.Severity.NOTE)


def test_the_world_and_its_source_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def told() -> dict[str, doctor.Finding]:
        return {one.name: one for one in (doctor._world(), *doctor._default_launch(NodeMachine(4)))}

    assert (told()["world"].value, told()["world"].meaning) == (
        "one process",
        "source: no launcher",
    )
    for name, value in {
        "RANK": "1",
        "WORLD_SIZE": "2",
        "LOCAL_RANK": "1",
        "MASTER_ADDR": "h0",
    }.items():
        monkeypatch.setenv(name, value)
    assert (
        told()["world"].verdict is doctor.Severity.BAD
        and "MASTER_PORT is not set" in told()["world"].meaning
    )
    monkeypatch.setenv("MASTER_PORT", "29511")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    assert told()["world"].value == "rank 1 of 2"
    assert told()["world"].meaning == (
        "source: RANK and WORLD_SIZE; local rank 1 of 2; host 0 of 1; ranks meet at h0:29511"
    )
    assert "`run` joins" not in told()
    for name, value in {
        "DSTACK_NODES_NUM": "2",
        "DSTACK_NODE_RANK": "1",
        "DSTACK_MASTER_NODE_IP": "10.0.0.6",
    }.items():
        monkeypatch.setenv(name, value)
    joins = told()["`run` joins"]
    assert (joins.value, joins.meaning) == (
        "node 1 of 2",
        "source: dstack; rendezvous at 10.0.0.6; options override it",
    )
    monkeypatch.setenv("PET_NNODES", "1:4")
    assert told()["`run` joins"].verdict is doctor.Severity.BAD


def test_nodes_of_workers_and_of_pages_are_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regression test for torchtitan#3489: update threads migrated between NUMA nodes unnoticed."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(16)), raising=False)
    fake_host.install(monkeypatch, fake_host.two_nodes(tmp_path, ("0-7", "8-15")))
    pages = "0 default anon=2048 N0=512 N1=1536 kernelpagesize_kB=4"
    fake_host.files_of(tmp_path, {"proc/self/numa_maps": pages})
    found = {one.name: one for one in doctor._nodes(NodeMachine(16, ("0", "1")))}
    assert found["NUMA nodes"].value == "2"
    assert found["NUMA nodes"].meaning == "node 0: CPUs 0-7; node 1: CPUs 8-15"
    assert found["update threads"].value == "8 per rank on CPUs 8-15"
    assert found["update threads"].meaning == "bound to the CPUs near the GPU"
    assert found["pages of states"].value == "node 0: 2 MiB, node 1: 6 MiB"
    fake_host.install(monkeypatch, host.HostFiles(tmp_path), gpu=False)
    found = {one.name: one for one in doctor._nodes(NodeMachine(16))}
    assert found["update threads"].value == "2 per rank on CPUs 0-15"
    assert found["update threads"].meaning == "not bound: there is no GPU"


def test_the_time_of_page_locking_is_measured_next_to_a_gpu(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert doctor._page_locking().value == "none"
    runtime = cudart.install(monkeypatch)
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.synchronize", lambda: None)
    monkeypatch.setattr(doctor, "LOCK_TEST_BYTES", 8 << 20)
    found = doctor._page_locking()
    assert found.value.endswith(" s per GB") and "measured on 8 MiB" in found.meaning
    assert runtime.most == 8 << 20 and not runtime.ranges, "locked for the measurement only"
    runtime.limit = 0
    found = doctor._page_locking()
    assert found.verdict is doctor.Severity.BAD and "CUDA error 2, out of memory" in found.meaning
    gc.collect()
    assert not runtime.ranges


def test_the_memory_that_the_cgroup_leaves_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host, "THIS_HOST", host.HostFiles(tmp_path))
    assert doctor._cgroup_memory().value == "no limit"
    group = "sys/fs/cgroup/memory/memory"
    limits = {f"{group}.limit_in_bytes": str(3 << 29), f"{group}.usage_in_bytes": str(1 << 29)}
    fake_host.files_of(tmp_path, limits)
    found = doctor._cgroup_memory()
    assert found.value == "1.0 GiB free of 1.5" and found.meaning.startswith("version 1;")
    assert doctor._memory().value == "1.0 GiB free of 1.5", "states fit only into these"
