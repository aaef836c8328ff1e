"""The worlds of real launchers, by what they said to their processes (`tests/record_launchers.py`
wrote it down).
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from deepseek_zero.base.errors import UsageError
from deepseek_zero.base.world import (
    Nodes,
    discover,
    meeting_place,
    nodes_of,
    refuse_lone_process,
    suspect_lone_process,
)

RECORDED: dict[str, Any] = json.loads(Path(__file__).with_name("launchers.json").read_text())
FIRST, LOGIN = "10.77.0.1", "10.77.0.3"  # rank 0's host; the one that some commands were given on
# The source of a world and where its ranks meet; None: they are told to set MASTER_ADDR.
WORLDS: dict[str, tuple[str, str | None]] = {
    "torchrun": ("RANK and WORLD_SIZE", "h0"),
    "Open MPI on one host": ("Open MPI", "127.0.0.1"),
    "Open MPI on two hosts": ("Open MPI", FIRST),
    "Open MPI on two hosts, from a third": (
        "Open MPI",
        LOGIN,
    ),  # rank 0 finds that it is not its own
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


def test_every_recorded_case_is_looked_at() -> None:
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
def test_a_process_of_its_own_is_a_world_of_one(case: str) -> None:
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
def test_where_nothing_says_how_they_meet_rank_0_is_told_what_to_set(case: str) -> None:
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
