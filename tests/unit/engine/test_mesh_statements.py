"""The mesh is built from all settings that describe it; contradictions are errors."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from deepseek_zero.base.errors import UsageError
from deepseek_zero.base.launch import MESH
from deepseek_zero.base.mesh import Mesh
from deepseek_zero.config.load import load
from deepseek_zero.engine.mesh_statements import MeshStatement, choose_mesh, statements_of


@pytest.fixture(autouse=True)
def _nothing_is_launched(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(MESH, raising=False)


def chosen(config: dict[str, Any], given: Any = None, ranks: int = 8, others: Any = ()) -> Mesh:
    return choose_mesh(
        statements_of(load(config), given, others), Mesh().on_world(ranks, ranks - 1)
    )


def parallelism(**sizes: int) -> Any:
    """Return a stand-in for accelerate's ParallelismConfig."""
    named = {"dp_replicate": 1, "dp_shard": 1, "sp": 1, "tp": 1, "cp": 1} | sizes
    return SimpleNamespace(**{f"{axis}_size": size for axis, size in named.items()})


@pytest.mark.parametrize(
    ("config", "given", "sizes"),
    [
        ({}, None, (1, 1, 8, 1, 1)),
        ({}, {"pp": 2, "tp": 2}, (2, 1, 2, 1, 2)),
        ({"mesh": {"pp": 2, "tp": 2}}, None, (2, 1, 2, 1, 2)),
        ({}, Mesh(pp=2, dp_replicate=2, tp=2), (2, 2, 1, 1, 2)),
        ({"dp_degree": 2, "pp_degree": 2, "mp_degree": 2}, None, (2, 1, 2, 1, 2)),
        ({"tensor_parallel": {"autotp_size": 4}}, None, (1, 1, 2, 1, 4)),
        ({"tensor_parallel": {"tp": {"tp_size": 4}}}, None, (1, 1, 2, 1, 4)),
        ({"tensor_parallel": {"tensor_parallel": {"tp_size": 4}}}, None, (1, 1, 2, 1, 4)),
        ({"tensor_parallel": {"autotp_size": 0}, "mp_degree": 2}, None, (1, 1, 4, 1, 2)),
        ({"pipeline": {"stages": 2}, "tensor_parallel": {"autotp_size": 2}}, None, (2, 1, 2, 1, 2)),
        ({"pipeline": {"stages": "auto"}}, {"pp": 4}, (4, 1, 2, 1, 1)),
        ({"sequence_parallel_size": 2, "data_parallel_size": 4}, None, (1, 1, 4, 2, 1)),
        ({"zero_optimization": {"mics_shard_size": 2}, "mp_degree": 2}, None, (1, 2, 2, 1, 2)),
        (
            {"zero_optimization": {"mics_shard_size": 4}, "sequence_parallel_size": 2},
            None,
            (1, 2, 2, 2, 1),
        ),
        ({"mesh": {"tp": 2}}, {"pp": 2}, (2, 1, 2, 1, 2)),
        (
            {"tensor_parallel": {"autotp_size": 2}},
            parallelism(dp_replicate=2, dp_shard=2),
            (1, 2, 2, 1, 2),
        ),
        ({}, parallelism(tp=2), (1, 1, 4, 1, 2)),
    ],
)
def test_consistent_statements_make_one_mesh(
    config: dict[str, Any], given: Any, sizes: tuple[int, ...]
) -> None:
    mesh = chosen(config, given)
    assert (mesh.sizes, mesh.rank) == (sizes, 7)


@pytest.mark.parametrize(
    ("config", "given", "words"),
    [
        ({"mp_degree": 2}, {"tp": 4}, "mesh= has tp=4, but mp_degree has tp=2"),
        (
            {"mp_degree": 2, "tensor_parallel": {"autotp_size": 4}},
            None,
            "mp_degree has tp=2, but .*autotp_size has tp=4",
        ),
        (
            {"pipeline": {"stages": 2}, "pp_degree": 4},
            None,
            "pp_degree has pp=4, but pipeline.stages has pp=2",
        ),
        ({"mp_degree": 1}, {"tp": 2}, "mesh= has tp=2, but mp_degree has tp=1"),
        ({"mp_degree": 2}, Mesh(), "mesh= has tp=1, but mp_degree has tp=2"),
        (
            {"mesh": {"dp_replicate": 2}},
            {"dp_replicate": 4},
            "mesh= has .*, but the configuration's mesh has",
        ),
        (
            {"pp_degree": 3},
            None,
            r"the mesh \(pp=3\) does not fit a world of 8 ranks.*\n.*--nproc 3",
        ),
        ({"pp_degree": 16}, None, "does not fit a world of 8 ranks"),
        (
            {"zero_optimization": {"mics_shard_size": 3}},
            None,
            "mics_shard_size is 3, but there are 8 ranks",
        ),
        (
            {"zero_optimization": {"mics_shard_size": 2}, "sequence_parallel_size": 4},
            None,
            "mics_shard_size is 2, but there are 8 ranks, 4 along sp",
        ),
        ({}, {"tp": 0}, "mesh axis tp is 0"),
    ],
)
def test_contradicting_statements_are_both_named(
    config: dict[str, Any], given: Any, words: str
) -> None:
    with pytest.raises(UsageError, match="(?s)" + words):
        chosen(config, given)


def test_a_single_process_gets_an_error_with_the_launch_command() -> None:
    with pytest.raises(UsageError, match="run --nproc 4") as error:
        chosen({"pp_degree": 2, "mp_degree": 2}, ranks=1)
    assert "pp_degree has pp=2, mp_degree has tp=2: 4 ranks hold one copy" in str(error.value)


def test_an_argument_that_states_the_data_ranks_is_compared() -> None:
    others = [MeshStatement("mesh_param=", {"sp": 2}, data_size=4)]
    assert chosen({}, others=others).sizes == (1, 1, 4, 2, 1)
    with pytest.raises(
        UsageError, match=r"mesh_param= has 4 data-parallel ranks, but the mesh .* has 2"
    ):
        chosen({"mp_degree": 2}, others=others)


def test_the_launchers_command_line_is_one_more_place(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(MESH, "pp=2, tp=2")
    assert chosen({}).sizes == (2, 1, 2, 1, 2)
    assert chosen({"mp_degree": 2}).sizes == (2, 1, 2, 1, 2)
    with pytest.raises(
        UsageError, match="mp_degree has tp=4, but the launcher's command line has tp=2"
    ):
        chosen({"mp_degree": 4})
    assert choose_mesh(statements_of(load({}), launched=False), Mesh().on_world(8)).sizes == (
        1,
        1,
        8,
        1,
        1,
    )
    for text in ("tp", "tp=two", "rows=2"):
        monkeypatch.setenv(MESH, text)
        with pytest.raises(UsageError):
            chosen({})
