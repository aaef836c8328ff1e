"""Each launcher's environment variables describe a world; invalid combinations are refused."""

from __future__ import annotations

import json
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from deepseek_zero.base import mesh, world
from deepseek_zero.base.device import default_device
from deepseek_zero.base.errors import UsageError
from deepseek_zero.base.mesh import default_backend, shares_gpu
from deepseek_zero.base.world import (
    Nodes,
    World,
    discover,
    hosts_of,
    meeting_place,
    nodes_of,
    refuse_lone_process,
    suspect_lone_process,
)
from deepseek_zero.compat.deepspeed.comm import init_distributed

PLACE = {"MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29511"}


PLACE_OF_NODES = ("10.0.0.1", 29511)


TORCHRUN = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", **PLACE}


SRUN = {
    "SLURM_JOB_ID": "40007",
    "SLURM_STEP_ID": "2",
    "SLURM_STEP_NUM_TASKS": "7",
    "SLURM_PROCID": "6",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "3",
    "SLURM_STEP_TASKS_PER_NODE": "2(x3),1",
    "SLURM_STEP_NODELIST": "gpu[03-05,9]",
    "SLURM_NTASKS": "7",
}


OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_SIZE": "2",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
}


MPICH = {"PMI_RANK": "1", "PMI_SIZE": "4", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}


MVAPICH = {f"MV2_COMM_WORLD_{name}": "1" for name in ("RANK", "LOCAL_RANK")} | {
    f"MV2_COMM_WORLD_{name}": "2" for name in ("SIZE", "LOCAL_SIZE")
}


ROWS = {
    "nothing": ({}, (0, 1, None, 1, None, None)),
    "torchrun": (TORCHRUN, (3, 4, 1, 2, "10.0.0.1", 29511)),
    "a pod of PyTorchJob": (
        {"RANK": "1", "WORLD_SIZE": "2", **PLACE},
        (1, 2, None, None, "10.0.0.1", 29511),
    ),
    "a worker of Ray Train": (
        {**TORCHRUN, "NODE_RANK": "1", "RAY_JOB_ID": "01000000"},
        (3, 4, 1, 2, "10.0.0.1", 29511),
    ),
    "accelerate": (
        {
            **TORCHRUN,
            "ACCELERATE_MIXED_PRECISION": "no",
            "GROUP_RANK": "1",
            "GROUP_WORLD_SIZE": "2",
        },
        (3, 4, 1, 2, "10.0.0.1", 29511),
    ),
    "a rank on SkyPilot's second node": (
        {**TORCHRUN, "SKYPILOT_NUM_NODES": "2", "SKYPILOT_NODE_RANK": "1"},
        (3, 4, 1, 2, "10.0.0.1", 29511),
    ),
    "SkyPilot with one node": (
        {"SKYPILOT_NUM_NODES": "1", "SKYPILOT_NODE_RANK": "0", "PET_NNODES": "1"},
        (0, 1, None, 1, None, None),
    ),
    "one process of torchrun": (
        {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"},
        (0, 1, 0, 1, None, None),
    ),
    "a device for a lone process": ({"LOCAL_RANK": "3"}, (0, 1, 3, 1, None, None)),
    "srun": (SRUN, (6, 7, 0, 1, "gpu03", 20000 + 40007 % 20000 + 2)),
    "srun with a meeting place": ({**SRUN, **PLACE}, (6, 7, 0, 1, "10.0.0.1", 29511)),
    "srun under a pmi2 plugin": (
        {**SRUN, "PMI_RANK": "6", "PMI_SIZE": "7"},
        (6, 7, 0, 1, "gpu03", 20000 + 40007 % 20000 + 2),
    ),
    "srun, WORLD_SIZE by hand": (
        {**SRUN, "WORLD_SIZE": "7", **PLACE},
        (6, 7, 0, 1, "10.0.0.1", 29511),
    ),
    "srun torchrun": ({**SRUN, **TORCHRUN}, (3, 4, 1, 2, "10.0.0.1", 29511)),
    "srun of one task": (
        {**SRUN, "SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0"},
        (0, 1, 0, 1, None, None),
    ),
    "a batch script without srun": (
        {"SLURM_JOB_ID": "1", "SLURM_NTASKS": "8", "SLURM_PROCID": "0", "SLURM_LOCALID": "0"},
        (0, 1, None, 1, None, None),
    ),
    "mpirun on one host": (OPEN_MPI, (1, 2, 1, 2, "127.0.0.1", 29500)),
    "mpirun on two hosts": (
        {**OPEN_MPI, "OMPI_COMM_WORLD_SIZE": "4", **PLACE},
        (1, 4, 1, 2, "10.0.0.1", 29511),
    ),
    "mpirun of two hosts that says where it listens": (
        {
            **OPEN_MPI,
            "OMPI_COMM_WORLD_SIZE": "4",
            "OMPI_MCA_orte_hnp_uri": "2842361856.0;tcp://127.0.0.1,10.0.0.7,172.17.0.1:41157",
        },
        (1, 4, 1, 2, "10.0.0.7", 29500),
    ),
    "mpirun of Open MPI 5, over two hosts": (
        {**OPEN_MPI, "OMPI_COMM_WORLD_SIZE": "4", "PMIX_NAMESPACE": "prterun-gpu-03-16414@1"},
        (1, 4, 1, 2, "gpu-03", 29500),
    ),
    "mpirun whose daemons srun started": (
        {
            **SRUN,
            "SLURM_STEP_NUM_TASKS": "2",
            "SLURM_PROCID": "1",
            **OPEN_MPI,
            "OMPI_COMM_WORLD_SIZE": "4",
            **PLACE,
        },
        (1, 4, 1, 2, "10.0.0.1", 29511),
    ),
    "mpirun whose daemons srun started, as many ranks as daemons": (
        {**SRUN, "SLURM_STEP_NUM_TASKS": "2", "SLURM_PROCID": "0", **OPEN_MPI},
        (1, 2, 1, 2, "127.0.0.1", 29500),
    ),
    "Kubeflow's deepspeed-distributed, a pod of Open MPI": (
        {
            **OPEN_MPI,
            "OMPI_COMM_WORLD_SIZE": "4",
            "PET_NNODES": "2",
            "PET_NPROC_PER_NODE": "2",
            **PLACE,
        },
        (1, 4, 1, 2, "10.0.0.1", 29511),
    ),
    "two MPIs, one inside the other": (
        {**MPICH, **MVAPICH, **OPEN_MPI},
        (1, 2, 1, 2, "127.0.0.1", 29500),
    ),
    "PMI before MVAPICH": ({**MVAPICH, **MPICH, **PLACE}, (1, 4, 1, 2, "10.0.0.1", 29511)),
    "a late step of srun": (
        {**SRUN, "SLURM_STEP_ID": "18"},
        (6, 7, 0, 1, "gpu03", 20000 + 40007 % 20000 + 2),
    ),
    "an interactive step": (
        {**SRUN, "SLURM_STEP_ID": "4294967290"},
        (6, 7, 0, 1, "gpu03", 20000 + 40007 % 20000 + 10),
    ),
    "one rank of a launcher inside a step of srun": (
        {**SRUN, "RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"},
        (0, 1, 0, 1, None, None),
    ),
    "mpiexec of MPICH": ({**MPICH, **PLACE}, (1, 4, 1, 2, "10.0.0.1", 29511)),
    "mpirun_rsh": (MVAPICH, (1, 2, 1, 2, "127.0.0.1", 29500)),
    "mpirun, alone on purpose": (
        {**OPEN_MPI, "DEEPSEEK_ZERO_ALONE": "1"},
        (0, 1, 0, 1, None, None),
    ),
    "mpirun, not alone": (
        {**OPEN_MPI, "DEEPSEEK_ZERO_ALONE": "0"},
        (1, 2, 1, 2, "127.0.0.1", 29500),
    ),
}


@pytest.mark.parametrize("name", ROWS)
def test_each_launchers_variables_describe_its_world(name: str) -> None:
    environ, expected = ROWS[name]
    found = discover(environ)
    assert (
        found.rank,
        found.size,
        found.local_rank,
        found.local_size,
        found.address,
        found.port,
    ) == expected
    assert meeting_place(environ, found) is found


REFUSED = {
    "an empty rank": ({**TORCHRUN, "RANK": ""}, r"RANK='' is not a number"),
    "a rank in words": ({**TORCHRUN, "RANK": "one"}, r"RANK='one' is not a number"),
    "a negative rank": ({**TORCHRUN, "RANK": "-1"}, r"RANK='-1' is not a number of at least 0"),
    "a rank outside": ({**TORCHRUN, "RANK": "4"}, r"RANK=4, but WORLD_SIZE=4"),
    "a rank without a world": ({"RANK": "1"}, r"RANK=1, but WORLD_SIZE is not set"),
    "a rank outside a world of one": (
        {"RANK": "1", "WORLD_SIZE": "1"},
        r"RANK=1, but WORLD_SIZE=1",
    ),
    "an empty size": ({**TORCHRUN, "WORLD_SIZE": ""}, r"WORLD_SIZE='' is not a number"),
    "a size in words": ({"WORLD_SIZE": "2 "}, r"WORLD_SIZE='2 ' is not a number"),
    "no ranks at all": (
        {**TORCHRUN, "WORLD_SIZE": "0"},
        r"WORLD_SIZE='0' is not a number of at least 1",
    ),
    "a size without a rank": ({"WORLD_SIZE": "2", **PLACE}, r"WORLD_SIZE=2 but RANK is not set"),
    "a long value": ({"RANK": "9" * 100_000}, r"RANK='9{80}' is not a number"),
    "a local rank in words": ({**TORCHRUN, "LOCAL_RANK": "x"}, r"LOCAL_RANK='x' is not a number"),
    "a lone local rank in words": ({"LOCAL_RANK": ""}, r"LOCAL_RANK='' is not a number"),
    "a local rank outside": (
        {**TORCHRUN, "LOCAL_RANK": "2"},
        r"LOCAL_RANK=2, but .*LOCAL_WORLD_SIZE=2",
    ),
    "more ranks here than there are": (
        {**TORCHRUN, "LOCAL_WORLD_SIZE": "5"},
        r"LOCAL_WORLD_SIZE=5, but WORLD_SIZE=4",
    ),
    "no ranks here": ({**TORCHRUN, "LOCAL_WORLD_SIZE": "0"}, r"LOCAL_WORLD_SIZE='0' is not"),
    "a port in words": (
        {**TORCHRUN, "MASTER_PORT": "http"},
        r"MASTER_PORT='http' is not a number from 1 to 65535",
    ),
    "a port too high": ({**TORCHRUN, "MASTER_PORT": "65536"}, r"MASTER_PORT='65536' is not"),
    "a task in words": ({**SRUN, "SLURM_PROCID": "x"}, r"SLURM_PROCID='x' is not a number"),
    "a task outside": (
        {**SRUN, "SLURM_PROCID": "7"},
        r"SLURM_PROCID=7, but SLURM_STEP_NUM_TASKS=7",
    ),
    "a step without a task": (
        {"SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "2"},
        r"SLURM_PROCID is not set",
    ),
    "two sizes": ({**SRUN, "WORLD_SIZE": "8", **PLACE}, r"WORLD_SIZE=8, but Slurm has 7"),
    "a host outside": (
        {**TORCHRUN, "GROUP_RANK": "2", "GROUP_WORLD_SIZE": "2"},
        r"this host is number 2 \(GROUP_RANK or NODE_RANK\), but GROUP_WORLD_SIZE=2",
    ),
    "a rank of Open MPI's without a size": (
        {"OMPI_COMM_WORLD_RANK": "3"},
        r"OMPI_COMM_WORLD_SIZE is not set",
    ),
    "a rank of PMI's without a size": ({"PMI_RANK": "3"}, r"PMI_RANK=3, but PMI_SIZE is not set"),
    "one process by hand, four by mpirun": (
        {**MPICH, "RANK": "0", "WORLD_SIZE": "1"},
        r"WORLD_SIZE=1, but MPICH or Intel MPI has 4",
    ),
    "one process by hand, seven by srun": (
        {**SRUN, "RANK": "0", "WORLD_SIZE": "1"},
        r"WORLD_SIZE=1, but Slurm has 7",
    ),
    "two ranks": ({**OPEN_MPI, "RANK": "0"}, r"RANK=0, but Open MPI has 1"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_nonsense_is_refused_by_variable_and_value(name: str) -> None:
    environ, said = REFUSED[name]
    with pytest.raises(UsageError, match=said) as caught:
        discover(environ)
    assert caught.value.why and caught.value.fix
    assert len(str(caught.value)) < 1000


HOMELESS = {
    "torchrun's words by hand": (
        {"RANK": "0", "WORLD_SIZE": "2"},
        r"WORLD_SIZE=2 but MASTER_ADDR, MASTER_PORT are not set",
        "deepseek-zero run",
    ),
    "srun": (
        {name: value for name, value in SRUN.items() if name != "SLURM_STEP_NODELIST"},
        r"Slurm started 7 processes, and MASTER_ADDR is not set",
        "scontrol show hostnames",
    ),
    "mpirun": (
        {**OPEN_MPI, "OMPI_COMM_WORLD_SIZE": "4"},
        r"Open MPI started 4 processes, and MASTER_ADDR is not set",
        "-x MASTER_ADDR",
    ),
    "an empty address": (
        {**MPICH, "MASTER_ADDR": ""},
        r"MPICH or Intel MPI started 4 processes",
        "-genv MASTER_ADDR",
    ),
}


@pytest.mark.parametrize("name", HOMELESS)
def test_a_world_without_a_rendezvous_address_gets_an_error_with_the_variables(name: str) -> None:
    environ, said, fix = HOMELESS[name]
    with pytest.raises(UsageError, match=said) as caught:
        meeting_place(environ, discover(environ))
    assert fix in caught.value.fix
    assert "DEEPSEEK_ZERO_ALONE=1" in caught.value.fix


def test_a_joined_world_sets_the_variables_of_torchrun() -> None:
    assert discover(TORCHRUN).variables() == TORCHRUN
    assert World(1, 2, None, None, "h", 5).variables() == {
        "RANK": "1",
        "WORLD_SIZE": "2",
        "MASTER_ADDR": "h",
        "MASTER_PORT": "5",
    }


@pytest.mark.parametrize(
    "text, hosts",
    [
        ("h1", "h1"),
        ("h[0-1,7],g3", "h0 h1 h7 g3"),
        ("g3,h[0-1]", "g3 h0 h1"),
        ("r[01-02]n[3,5]", "r01n3 r01n5 r02n3 r02n5"),
        ("a-b[9-10]-ib", "a-b9-ib a-b10-ib"),
        ("h[08-11]", "h08 h09 h10 h11"),
    ],
)
def test_slurms_list_of_hosts_is_expanded(text: str, hosts: str) -> None:
    assert list(hosts_of(text)) == hosts.split()


@pytest.mark.parametrize(
    "text", ["h[0-1", "h0]", "h[1-]", "h[x]", "h[3-1]", "a,,b", "h[0-999999]", "a b", "h[]"]
)
def test_invalid_lists_of_hosts_are_refused(text: str) -> None:
    with pytest.raises(UsageError, match="is not a list of hosts"):
        list(hosts_of(text))


@pytest.mark.parametrize(
    ("environ", "place"),
    [
        ({**TORCHRUN, "GROUP_RANK": "1", "GROUP_WORLD_SIZE": "2"}, (1, 2)),
        ({**TORCHRUN, "NODE_RANK": "1"}, (1, None)),
        ({**SRUN, "SLURM_STEP_NUM_NODES": "4"}, (3, 4)),
        (OPEN_MPI, (0, 1)),
        ({**OPEN_MPI, "OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_NODE_RANK": "1"}, (None, None)),
        ({}, (0, 1)),
    ],
)
def test_hosts_are_numbered_as_by_the_launcher(
    environ: dict[str, str], place: tuple[int | None, ...]
) -> None:
    found = discover(environ)
    assert (found.node, found.nodes) == place


SKYPILOT = {
    "SKYPILOT_NODE_RANK": "1",
    "SKYPILOT_NUM_NODES": "2",
    "SKYPILOT_NUM_GPUS_PER_NODE": "8",
    "SKYPILOT_NODE_IPS": "10.0.0.4\n10.0.0.5",
}


DSTACK = {
    "DSTACK_NODE_RANK": "1",
    "DSTACK_NODES_NUM": "2",
    "DSTACK_GPUS_PER_NODE": "0",
    "DSTACK_MASTER_NODE_IP": "10.0.0.6",
}


KUBEFLOW = {
    "PET_NNODES": "2",
    "PET_NODE_RANK": "1",
    "PET_NPROC_PER_NODE": "auto",
    "PET_MASTER_ADDR": "job-node-0-0.job",
    "PET_MASTER_PORT": "29400",
}


LWS = {"LWS_GROUP_SIZE": "2", "LWS_WORKER_INDEX": "1", "LWS_LEADER_ADDRESS": "job-0.job.default"}


LAUNCHERS_OF_SRUN = SRUN | {
    "SLURM_STEP_NUM_TASKS": "2",
    "SLURM_STEP_NUM_NODES": "2",
    "SLURM_STEP_TASKS_PER_NODE": "1(x2)",
    "SLURM_STEP_NODELIST": "gpu[03,05]",
    "SLURM_PROCID": "1",
    "SLURM_NODEID": "1",
}


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({}, None),
        (KUBEFLOW, Nodes("PET_*", 2, 1, "auto", None, "job-node-0-0.job", 29400)),
        ({"PET_NPROC_PER_NODE": "4"}, Nodes("PET_*", 1, None, "4")),
        (
            {**KUBEFLOW, "PET_NNODES": "2:2"},
            Nodes("PET_*", 2, 1, "auto", None, "job-node-0-0.job", 29400),
        ),
        (SKYPILOT, Nodes("SkyPilot", 2, 1, None, 8, "10.0.0.4")),
        (DSTACK, Nodes("dstack", 2, 1, None, None, "10.0.0.6")),
        (LWS, Nodes("LeaderWorkerSet", 2, 1, None, None, "job-0.job.default")),
        ({**SKYPILOT, "PET_NPROC_PER_NODE": "4"}, Nodes("SkyPilot", 2, 1, "4", 8, "10.0.0.4")),
        (
            {**LAUNCHERS_OF_SRUN, "PET_NPROC_PER_NODE": "4"},
            Nodes("Slurm", 2, 1, "4", None, "gpu03", 20000 + 40007 % 20000 + 2),
        ),
        ({**KUBEFLOW, **SKYPILOT}, Nodes("PET_*", 2, 1, "auto", None, "job-node-0-0.job", 29400)),
        (LAUNCHERS_OF_SRUN, Nodes("Slurm", 2, 1, None, None, "gpu03", 20000 + 40007 % 20000 + 2)),
        ({**LAUNCHERS_OF_SRUN, **PLACE}, Nodes("Slurm", 2, 1, None, None, *PLACE_OF_NODES)),
        ({**SRUN, "SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0"}, None),
        (
            {
                "SLURM_JOB_ID": "1",
                "SLURM_NTASKS": "8",
                "SLURM_PROCID": "0",
                "SLURM_JOB_NUM_NODES": "2",
            },
            None,
        ),
        ({**KUBEFLOW, "DEEPSEEK_ZERO_ALONE": "1"}, None),
        (
            {"RANK": "1", "WORLD_SIZE": "2", **PLACE},
            Nodes("RANK and WORLD_SIZE", 2, 1, None, None, *PLACE_OF_NODES),
        ),
        (TORCHRUN, None),
    ],
)
def test_each_engines_variables_describe_the_machines_of_a_launcher(
    environ: dict[str, str], expected: Nodes | None
) -> None:
    assert nodes_of(environ) == expected


@pytest.mark.parametrize(
    ("environ", "said"),
    [
        ({**KUBEFLOW, "PET_NNODES": "1:4"}, "PET_NNODES=1:4 requests 1 to 4 machines"),
        ({**KUBEFLOW, "PET_NNODES": "two"}, "PET_NNODES='two' is not a number"),
        (SRUN, r"Slurm started 7 copies of this launcher \(SLURM_STEP_NUM_TASKS=7\)"),
        (OPEN_MPI, "Open MPI started 2 copies of this launcher"),
        ({**OPEN_MPI, "PET_NPROC_PER_NODE": "2"}, "Open MPI started 2 copies of this launcher"),
        ({**LAUNCHERS_OF_SRUN, "PET_NNODES": "1"}, "PET_NNODES=1, but Slurm has 2 machines"),
        ({**SKYPILOT, "SKYPILOT_NODE_RANK": ""}, "SKYPILOT_NODE_RANK='' is not a number"),
    ],
)
def test_several_launchers_that_would_each_train_are_refused(
    environ: dict[str, str], said: str
) -> None:
    with pytest.raises(UsageError, match=said) as caught:
        nodes_of(environ)
    assert caught.value.why and caught.value.fix


@pytest.mark.parametrize(
    "environ",
    [
        KUBEFLOW,
        SKYPILOT,
        DSTACK,
        LWS,
        {"PET_NNODES": "1:2"},
        {**DSTACK, "WORLD_SIZE": "1", "RANK": "0"},
    ],
)
def test_a_command_that_runs_on_several_machines_and_is_no_rank_is_refused(
    environ: dict[str, str],
) -> None:
    with pytest.raises(
        UsageError, match=r"=(1:)?2, but this process is not one of several ranks"
    ) as caught:
        discover(environ)
    assert "deepseek-zero run" in caught.value.fix and "DEEPSEEK_ZERO_ALONE=1" in caught.value.fix
    assert discover({**environ, "DEEPSEEK_ZERO_ALONE": "1"}).size == 1
    assert discover({**environ, **TORCHRUN}).size == 4


def test_rank_0_must_have_an_unstated_address() -> None:
    guessed = World(
        0,
        2,
        address="192.0.2.1",
        port=29500,
        source="Open MPI",
        fix="write -x MASTER_ADDR=<address>",
    )
    with pytest.raises(
        UsageError,
        match=r"rendezvous address is 192.0.2.1, which is not an address of this machine",
    ) as caught:
        meeting_place({}, guessed)
    assert "-x MASTER_ADDR" in caught.value.fix
    meeting_place({"MASTER_ADDR": "192.0.2.1"}, guessed)
    meeting_place({}, World(1, 2, address="192.0.2.1", port=5))
    meeting_place({}, World(0, 2, address="127.0.0.1", port=5))


def test_invalid_environment_variables_are_logged_and_raise_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("RANK", "many")
    assert world.is_rank_zero()
    assert (world.rank(), world.size(), world.local_rank()) == (0, 1, 0)


def test_rank_and_world_size_come_from_the_launcher_before_a_group_exists(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, value in SRUN.items():
        monkeypatch.setenv(name, value)
    assert (world.rank(), world.size(), world.local_rank(), world.local_size()) == (6, 7, 0, 1)
    assert not world.is_rank_zero()


def test_gpus_are_shared_if_a_host_has_more_ranks_than_gpus(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert [shares_gpu(count) for count in (1, 2, 3, None)] == [False, False, True, False]
    for name, value in {"RANK": "3", "WORLD_SIZE": "4", **PLACE}.items():
        monkeypatch.setenv(name, value)
    gpu = torch.device("cuda")
    assert default_backend(gpu) == "cpu:gloo,cuda:nccl", (
        "two hosts of two GPUs, whose launcher counts no host's ranks"
    )
    assert default_device() == torch.device("cuda", 1)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert default_backend(gpu) == "gloo"


@pytest.mark.parametrize(
    ("backend", "device_id"), [("cpu:gloo,cuda:nccl", "cuda:1"), ("nccl", "cuda:1"), ("gloo", None)]
)
def test_torch_gets_the_gpu_of_an_nccl_group(
    backend: str, device_id: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a device, torch warns at each barrier that it guesses one."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    for name, value in {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2", **PLACE}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(mesh, "_met", lambda *given: None)
    told: list[Any] = []
    monkeypatch.setattr(
        mesh.dist, "init_process_group", lambda *_, **given: told.append(given["device_id"])
    )
    mesh.init_distributed(backend, store_of=lambda: None)
    init_distributed(backend)  # DeepSpeed's function
    init_distributed(backend, init_method="file:///tmp/none", rank=1, world_size=2)
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", *PLACE):
        monkeypatch.delenv(name)
    monkeypatch.setenv("DEEPSEEK_ZERO_DEVICE", "cuda")
    init_distributed(backend)  # a group of one rank
    expected = None if device_id is None else torch.device(device_id)
    assert told[:2] == [expected, expected]
    assert [each is None for each in told] == [device_id is None] * len(told) and len(told) >= 4


class EveryoneOfMpi:
    """Imitate mpi4py's COMM_WORLD on one of two ranks."""

    def __init__(self, rank: int, size: int = 2) -> None:
        self.rank, self.size = rank, size

    def Get_rank(self) -> int:  # name in mpi4py
        return self.rank

    def Get_size(self) -> int:
        return self.size

    def Bcast(self, row: bytearray, root: int) -> None:
        assert root == 0
        if self.rank == 0:
            assert row.rstrip(b"\0")
        else:
            row[:8] = b"10.0.0.8"


def test_mpi4py_is_used_only_without_another_rendezvous_address(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    unknown = discover(MPICH)
    assert unknown.address is None
    monkeypatch.setattr(world, "find_spec", lambda name: None)
    assert world.ask_mpi(MPICH, unknown) is unknown
    monkeypatch.setattr(world, "find_spec", lambda name: name)
    monkeypatch.setattr(
        world, "import_module", lambda name: SimpleNamespace(COMM_WORLD=EveryoneOfMpi(1, 4))
    )
    assert world.ask_mpi(MPICH, unknown).address == "10.0.0.8"
    guessed = replace(unknown, address="10.0.0.3")
    assert world.ask_mpi(MPICH, guessed).address == "10.0.0.8", "mpirun's host need not be rank 0's"
    assert world.ask_mpi({**MPICH, **PLACE}, guessed) is guessed, "what a user stated"
    assert world.ask_mpi(MPICH, replace(guessed, local_size=4)).address == "10.0.0.3", "one host"
    assert world.ask_mpi({}, World()) == World()
    monkeypatch.setattr(
        world, "import_module", lambda name: SimpleNamespace(COMM_WORLD=EveryoneOfMpi(0, 1))
    )
    assert world.ask_mpi(MPICH, unknown) is unknown, "mpi4py of another MPI sees a world of one"
    monkeypatch.setattr(
        world, "import_module", lambda name: SimpleNamespace(COMM_WORLD=EveryoneOfMpi(0, 4))
    )
    found = world.ask_mpi(MPICH, replace(unknown, rank=0))
    monkeypatch.setattr(world, "import_module", import_module)
    assert world.ask_mpi(MPICH, unknown) is unknown, "mpi4py cannot be imported"
    assert found.address and meeting_place({}, found) is found


POD = {"JOB_COMPLETION_INDEX": "0"}


BATCH = {"SLURM_JOB_ID": "7", "SLURM_PROCID": "0", "SLURM_JOB_NUM_NODES": "2", "SLURM_NNODES": "2"}


@pytest.mark.parametrize(
    ("environ", "said"),
    [
        (POD, "JOB_COMPLETION_INDEX=0"),
        ({"JOB_COMPLETION_INDEX": "3"}, "JOB_COMPLETION_INDEX=3"),
        (BATCH, "SLURM_JOB_NUM_NODES=2"),
        ({"SLURM_NNODES": "2"}, "SLURM_NNODES=2"),
        ({"SLURM_JOB_NUM_NODES": "1", "SLURM_NTASKS": "4"}, "SLURM_NTASKS=4"),
        ({"SLURM_JOB_NUM_NODES": "1", "SLURM_NTASKS": "1"}, None),
        ({"JOB_COMPLETION_INDEX": ""}, None),
        ({}, None),
        ({**POD, "DEEPSEEK_ZERO_ALONE": "1"}, None),
        ({**POD, "RANK": "0", "WORLD_SIZE": "1"}, None),
        ({**POD, **TORCHRUN}, None),
        ({**BATCH, "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "1"}, None),
    ],
)
def test_a_process_that_probably_belongs_to_a_larger_job_is_warned(
    environ: dict[str, str], said: str | None
) -> None:
    warning = world.suspect_lone_process(environ)
    world.refuse_lone_process(environ)
    assert (warning is None) == (said is None)
    if warning is not None:
        assert said is not None and said in str(warning)
        assert "DEEPSEEK_ZERO_ALONE=1" in warning.fix


@pytest.mark.parametrize(
    ("environ", "said"),
    [
        ({**BATCH, "SLURM_NTASKS": "2"}, "SLURM_JOB_NUM_NODES=2 and SLURM_NTASKS=2"),
        ({**POD, "NNODES": "2"}, "JOB_COMPLETION_INDEX=0 and NNODES=2"),
    ],
)
def test_a_lone_process_is_refused_if_another_variable_counts_more(
    environ: dict[str, str], said: str
) -> None:
    with pytest.raises(UsageError, match=said):
        world.refuse_lone_process(environ)
    world.refuse_lone_process({**environ, "DEEPSEEK_ZERO_ALONE": "1"})


def test_a_pod_with_a_world_but_no_rank_is_refused() -> None:
    with pytest.raises(UsageError, match="WORLD_SIZE=2 but RANK is not set"):
        discover({**POD, "WORLD_SIZE": "2"})


RECORDED: dict[str, Any] = json.loads(Path(__file__).with_name("launchers.json").read_text())


# Rank 0's host, and the host on which some commands were run
FIRST, LOGIN = "10.77.0.1", "10.77.0.3"


# Launcher and rendezvous address of each case; the address is None if MASTER_ADDR must be set.
# Rank 0 detects that this is not its own address.
WORLDS: dict[str, tuple[str, str | None]] = {
    "torchrun": ("RANK and WORLD_SIZE", "h0"),
    "Open MPI on one host": ("Open MPI", "127.0.0.1"),
    "Open MPI on two hosts": ("Open MPI", FIRST),
    "Open MPI on two hosts, from a third": (
        "Open MPI",
        LOGIN,
    ),
    "MPICH on one host": ("MPICH or Intel MPI", "127.0.0.1"),
    "MPICH on two hosts": ("MPICH or Intel MPI", None),
    "MPICH with a meeting place": ("MPICH or Intel MPI", FIRST),
    "srun on two hosts": ("Slurm", "h0"),
    "srun, uneven": ("Slurm", "h0"),
    "srun from a third host": ("Slurm", "h0"),
    "srun with PMI2": ("Slurm", "h0"),
    "a heterogeneous job": ("Slurm", "h0"),
    "Open MPI in an allocation": ("Open MPI", FIRST),
    "Open MPI in an allocation, one on each host": ("Open MPI", FIRST),
    "MPICH in an allocation": ("MPICH or Intel MPI", None),
    "MPICH in an allocation, as many ranks as hosts, all on one": (
        "MPICH or Intel MPI",
        "127.0.0.1",
    ),
}


LONE = {
    "Open MPI, one process": "Open MPI",
    "srun of one task": "Slurm",
    "an allocation without srun": "no launcher",
    "a batch script without srun": "no launcher",
}


def test_every_recorded_case_is_tested() -> None:
    assert set(RECORDED) == {*WORLDS, *LONE}


@pytest.mark.parametrize("case", WORLDS)
def test_processes_that_a_launcher_started_are_one_world(case: str) -> None:
    source, address = WORLDS[case]
    rows = RECORDED[case]["ranks"]
    found = [(row["host"], discover(row["environ"])) for row in rows]
    assert {each.source for _, each in found} == {source}
    assert {each.size for _, each in found} == {len(rows)}
    assert sorted(each.rank for _, each in found) == list(range(len(rows)))
    assert {each.address for _, each in found} == {address}
    assert len({each.port for _, each in found}) == 1
    assert {host for host, each in found if each.rank == 0} == {FIRST}
    for host in {host for host, _ in found}:
        here = [each for place, each in found if place == host]
        assert sorted(each.local_rank for each in here) == list(range(len(here))), host
        assert {each.local_size for each in here} == {len(here)}, host
    numbers = {host: {each.node for place, each in found if place == host} for host, _ in found}
    assert all(len(here) == 1 for here in numbers.values())
    assert None in numbers[FIRST] or len(set.union(*numbers.values())) == len(numbers), (
        "a number for each host"
    )


@pytest.mark.parametrize("case", LONE)
def test_a_single_process_is_a_world_of_one(case: str) -> None:
    (row,) = RECORDED[case]["ranks"]
    found = discover(row["environ"])
    assert (found.rank, found.size, found.source) == (0, 1, LONE[case])
    assert meeting_place(row["environ"], found) is found
    assert nodes_of(row["environ"]) is None
    warning = suspect_lone_process(row["environ"])
    assert (warning is not None) == (LONE[case] == "no launcher")
    if warning is not None:
        assert "SLURM_JOB_NUM_NODES=2" in str(warning) and "srun python train.py" in warning.fix
        with pytest.raises(UsageError, match=r"SLURM_JOB_NUM_NODES=2 and SLURM_NTASKS=4"):
            refuse_lone_process(row["environ"])


@pytest.mark.parametrize(
    "case", [case for case, (_, address) in WORLDS.items() if address in (None, LOGIN)]
)
def test_without_a_rendezvous_address_rank_0_gets_an_error_with_the_variables(case: str) -> None:
    for row in RECORDED[case]["ranks"]:
        found = discover(row["environ"])
        if found.rank == 0:
            with pytest.raises(UsageError) as caught:
                meeting_place(row["environ"], found)
            assert "MASTER_ADDR" in caught.value.fix


@pytest.mark.parametrize("case", [case for case in WORLDS if case != "torchrun"])
def test_launchers_in_place_of_ranks_are_nodes_of_a_slurm_step_or_refused(case: str) -> None:
    found = []
    for row in RECORDED[case]["ranks"]:
        try:
            found.append((row["host"], nodes_of(row["environ"])))
        except UsageError as error:
            assert "copies of this launcher" in str(error)
    if case != "srun from a third host":
        assert not found, "several on a host, or an MPI"
        return
    assert {host: said.node_rank for host, said in found if said is not None} == {
        FIRST: 0,
        "10.77.0.2": 1,
    }
    assert {said and said.num_nodes for _, said in found} == {2}
    assert all(isinstance(said, Nodes) and said.address == "h0" for _, said in found)
