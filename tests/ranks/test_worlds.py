"""Processes become ranks by the variables of any launcher or by an existing process group.

Otherwise an error is raised. Each test starts new processes, because their environment is what is
tested.
"""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from pathlib import Path

import pytest
import torch

import deepseek_zero
from deepseek_zero.base import mesh
from deepseek_zero.base.errors import PeerError, UsageError
from deepseek_zero.cli.run import SHORT_ERRORS
from tests.hosts import NETWORK, free_port, hosts

pytestmark = pytest.mark.slow  # starts ranks in network namespaces, which takes minutes

LAUNCH_WORDS = (
    "RANK",
    "WORLD_SIZE",
    "LOCAL_RANK",
    "LOCAL_WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
)


def environment(**more: str) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if name not in LAUNCH_WORDS}
    return kept | {"PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1", **more}


def outputs(
    script: Path, environs: list[Mapping[str, str]], codes: Sequence[int] = (0, 0)
) -> list[str]:
    """Start a script once per environment, check the exit codes and return the outputs."""
    started = [
        subprocess.Popen(
            [sys.executable, str(script)],
            env=environment(**environ),
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        for environ in environs
    ]
    try:
        said = [process.communicate(timeout=90)[0] for process in started]
    finally:
        for process in started:
            process.kill()
    assert [process.returncode for process in started] == [*codes], "\n".join(said)
    return said


TRAIN = """
import os, sys, torch, deepseek_zero
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
config = {
    "train_micro_batch_size_per_gpu": 1,
    "steps_per_print": 1,
    "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
    "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
    "records": {"path": sys.argv[1] if len(sys.argv) > 1 else None},
}
def train():
    engine = deepseek_zero.initialize(model=model, config=config)[0]
    engine.backward(engine(torch.ones(1, 4)).sum())
    engine.step()
    return engine
"""


def test_mpirun_without_options_makes_one_world_on_one_host(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        TRAIN + "print('world', train().world_size, os.environ['RANK'], os.environ['LOCAL_RANK'])"
    )
    port = str(free_port())
    names = ("RANK", "LOCAL_RANK")
    said = outputs(
        script,
        [
            {f"OMPI_COMM_WORLD_{name}": str(rank) for name in names}
            | {"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_LOCAL_SIZE": "2", "MASTER_PORT": port}
            for rank in range(2)
        ],
    )
    assert "world 2 0 0" in said[0]
    assert "world 2 1 1" in said[1]


SRUN = {
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NUM_TASKS": "2",
    "SLURM_STEP_NUM_NODES": "1",
    "SLURM_STEP_TASKS_PER_NODE": "2",
    "SLURM_STEP_NODELIST": "localhost",
    "SLURM_NODEID": "0",
}
BOTH_DOORS = (
    TRAIN
    + """
print("world", train().world_size,
      deepseek_zero.DeepSeekZeRO3(torch.nn.Linear(4, 4)).runtime.comm.whole.size)
"""
)


def test_srun_makes_one_world_in_both_apis(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(BOTH_DOORS)
    job = str(free_port() - 20000)  # Slurm's port is 20000 plus the job id
    said = outputs(
        script,
        [
            SRUN | {"SLURM_JOB_ID": job, "SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank)}
            for rank in range(2)
        ],
    )
    assert all("world 2 2" in each for each in said), said


def srun_of_two_hosts(rank: int) -> dict[str, str]:
    step = {"SLURM_JOB_ID": "7", "SLURM_STEP_NODELIST": "h[0-1]", "SLURM_STEP_NUM_NODES": "2"}
    step |= {"SLURM_STEP_TASKS_PER_NODE": "1(x2)", "SLURM_NODEID": str(rank)}
    return SRUN | step | {"SLURM_PROCID": str(rank), "SLURM_LOCALID": "0"}


def mpirun_of_two_hosts(rank: int) -> dict[str, str]:
    """Return Open MPI's variables; mpirun runs on the first host and passes its address."""
    counts = {"RANK": str(rank), "SIZE": "2", "LOCAL_RANK": "0", "LOCAL_SIZE": "1"}
    listens = {"OMPI_MCA_orte_hnp_uri": f"2842361856.0;tcp://{FIRST_HOST}:41157"}
    return {f"OMPI_COMM_WORLD_{name}": value for name, value in counts.items()} | listens


def pod(rank: int) -> dict[str, str]:
    """Return PyTorchJob's variables, which have no number of processes per host."""
    return {"RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "h0", "MASTER_PORT": "29511"}


@pytest.mark.parametrize("variables", [srun_of_two_hosts, mpirun_of_two_hosts, pod])
def test_ranks_of_two_hosts_use_their_launchers_rendezvous_address(
    variables: Callable[[int], dict[str, str]], tmp_path: Path
) -> None:
    script = tmp_path / "train.py"
    script.write_text(TRAIN + "engine = train()\nfrom deepseek_zero.comm import context\n" + TELL)
    with hosts(2) as machines:
        started = [
            machine.run([sys.executable, str(script)], environment(**variables(rank)))
            for rank, machine in enumerate(machines)
        ]
        said = [process.communicate(timeout=60)[0] for process in started]
    assert [process.returncode for process in started] == [0, 0], "\n".join(said)
    assert [
        f"rank {rank} of 2, 1 here, local rank 0" in each for rank, each in enumerate(said)
    ] == [True, True], said


TELL = """
here, local = context.ranks_of_this_host(), context.local_rank()
print(f"rank {engine.global_rank} of {engine.world_size}, {here} here, local rank {local}")
"""
FIRST_HOST = str(NETWORK[1])


def plain_rank(rank: int) -> tuple[list[str], dict[str, str]]:
    return [sys.executable], pod(rank)


def launched_rank(rank: int) -> tuple[list[str], dict[str, str]]:
    options = [
        "--num_nodes=2",
        "--master_addr=h0",
        "--master_port=29511",
        "--nproc=1",
        f"--node_rank={rank}",
    ]
    return [sys.executable, "-m", "deepseek_zero.cli", "run", *options], {}


OWN_GROUP = "import torch.distributed as dist\ndist.init_process_group('gloo')\n"


@pytest.mark.parametrize(
    ("start", "before"), [(plain_rank, ""), (launched_rank, ""), (launched_rank, OWN_GROUP)]
)
def test_hosts_whose_names_resolve_to_loopback_use_the_first_hosts_name(
    start: Callable[[int], tuple[list[str], dict[str, str]]], before: str, tmp_path: Path
) -> None:
    """Debian's /etc/hosts maps the host's name to 127.0.1.1.

    These hosts have no route to other networks.
    """
    script = tmp_path / "train.py"
    script.write_text(
        before + TRAIN + "engine = train()\nfrom deepseek_zero.comm import context\n" + TELL
    )
    with hosts(2, own="127.0.1.1") as machines:
        started = []
        for rank, machine in enumerate(machines):
            command, variables = start(rank)
            started.append(machine.run([*command, str(script)], environment(**variables)))
        said = [process.communicate(timeout=60)[0] for process in started]
    assert [process.returncode for process in started] == [0, 0], "\n".join(said)
    assert [
        f"rank {rank} of 2, 1 here, local rank 0" in each for rank, each in enumerate(said)
    ] == [True, True], said


DOORS: dict[str, Callable[[torch.nn.Module], object]] = {
    "initialize": lambda model: deepseek_zero.initialize(
        model=model, config={"train_batch_size": 1}
    ),
    "DeepSeekZeRO3": deepseek_zero.DeepSeekZeRO3,
    "init_distributed": lambda model: deepseek_zero.init_distributed(),
    "zero.Init": deepseek_zero.zero.Init,
}


@pytest.mark.parametrize("door", DOORS)
def test_every_api_refuses_single_process_training_under_a_launcher_with_several(
    door: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "4")
    monkeypatch.setenv("OMPI_COMM_WORLD_RANK", "1")
    model = torch.nn.Linear(2, 2)
    with pytest.raises(
        UsageError, match=r"Open MPI started 4 processes, and MASTER_ADDR is not set"
    ) as caught:
        DOORS[door](model)
    assert "DEEPSEEK_ZERO_ALONE=1" in caught.value.fix
    monkeypatch.setenv("RANK", "")
    with pytest.raises(UsageError, match=r"RANK='' is not a number"):
        DOORS[door](model)


def test_the_variable_alone_makes_a_world_of_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "4")
    monkeypatch.setenv("OMPI_COMM_WORLD_RANK", "1")
    monkeypatch.setenv("DEEPSEEK_ZERO_ALONE", "1")
    engine = deepseek_zero.initialize(model=torch.nn.Linear(2, 2), config={"train_batch_size": 1})[
        0
    ]
    assert engine.world_size == 1


def test_a_port_in_use_is_reported_in_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        said = {
            "RANK": "0",
            "WORLD_SIZE": "2",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(taken.getsockname()[1]),
        }
        for name, value in said.items():
            monkeypatch.setenv(name, value)
        with pytest.raises(
            PeerError, match=r"rank 0 of 2 could not join the other ranks at 127.0.0.1:\d+"
        ) as caught:
            deepseek_zero.init_distributed()
    assert len(str(caught.value).splitlines()) == 3
    assert "#0" not in "".join(traceback.format_exception(caught.value)), "no frames of C++"


@pytest.mark.parametrize(("rank", "whom"), [(0, "1 more rank"), (1, "rank 0, which listens there")])
def test_a_rank_without_peers_logs_the_missing_ranks_and_ends(
    rank: int, whom: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(mesh, "MEETING", timedelta(seconds=2))
    monkeypatch.setattr(mesh, "TELL_SECONDS", 0.3)
    said = {
        "RANK": str(rank),
        "WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
    }
    for name, value in said.items():
        monkeypatch.setenv(name, value)
    with (
        caplog.at_level("WARNING"),
        pytest.raises(PeerError, match=rf"rank {rank} of 2 could not join the other ranks at"),
    ):
        deepseek_zero.init_distributed()
    assert (
        f"rank {rank} has waited 0 s at 127.0.0.1:{said['MASTER_PORT']} for {whom}" in caplog.text
    )


DIE = (
    TRAIN
    + """
import signal
engine = train()
if engine.global_rank == 0:
    os.kill(os.getpid(), signal.SIGKILL)
for _ in range(3):
    engine.backward(engine(torch.ones(1, 4)).sum())
    engine.step()
"""
)


@pytest.mark.parametrize("log_level", ["WARNING", "ERROR"])
def test_long_tracebacks_do_not_hide_the_death_of_rank_0(tmp_path: Path, log_level: str) -> None:
    """`deepseek-zero run` limits torch to error logs.

    Otherwise torch may log one page for the lost store.
    """
    assert SHORT_ERRORS["TORCH_CPP_LOG_LEVEL"] == "ERROR"
    script = tmp_path / "die.py"
    script.write_text(DIE)
    said = {
        "WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "TORCH_CPP_LOG_LEVEL": log_level,
    }
    killed, told = outputs(script, [said | {"RANK": str(rank)} for rank in range(2)], codes=[-9, 1])
    assert told.count("frame #0") <= (1 if log_level == "WARNING" else 0), told
    # Rank 1 detects the end of the store or of the shared memory, whichever it polls first.
    assert re.search(
        r"PeerError: rank 0, .*has ended while"
        r"|PeerError: .* to rank 0 .* process of rank 0 has ended",
        told,
    ), told
    assert "different numbers of batches" not in told
    assert "Error" not in killed


SPAWN = (
    TRAIN
    + """
def live(rank, port):
    import torch.distributed as dist
    from deepseek_zero.base import world
    from deepseek_zero.comm import context
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    config["records"]["path"] = f"{sys.argv[1]}/records{rank}"
    config["csv_monitor"] = {"enabled": True, "output_path": f"{sys.argv[1]}/csv{rank}"}
    engine = train()
    assert engine.global_rank == engine.local_rank == world.local_rank() == rank
    assert context.ranks_of_this_host() == 2
    deepseek_zero.log_dist(f"speaks {rank}", ranks=[1])
    engine.destroy()
    dist.destroy_process_group()

if __name__ == "__main__":
    assert not {"RANK", "WORLD_SIZE", "LOCAL_RANK"} & set(os.environ)
    torch.multiprocessing.spawn(live, (sys.argv[2],), nprocs=2)
"""
)


def test_ranks_of_mp_spawn_have_their_rank_and_world_size(tmp_path: Path) -> None:
    """One rank logs and writes records, plan and monitor files, without variables of a launcher."""
    script = tmp_path / "spawn.py"
    script.write_text(SPAWN)
    done = subprocess.run(
        [sys.executable, str(script), str(tmp_path), str(free_port())],
        env=environment(),
        text=True,
        capture_output=True,
        timeout=90,
    )
    said = done.stdout + done.stderr
    assert done.returncode == 0, said
    assert sorted(path.name for path in tmp_path.iterdir() if path.is_dir()) == ["csv0", "records0"]
    assert said.count("step 1: loss") == 1, said
    assert "[deepseek_zero rank 0] INFO: step 1: loss" in said
    assert said.count("speaks") == said.count("[deepseek_zero rank 1] INFO: speaks 1") == 1
