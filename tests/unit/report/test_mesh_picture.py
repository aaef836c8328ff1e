"""Pictures of a mesh and of a pipeline show rank positions, computation times and idle time."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from deepseek_zero.base.mesh import Mesh
from deepseek_zero.pipeline.schedule import StageActionKind, make_schedule
from deepseek_zero.planner.make_schedule import plan_schedule
from deepseek_zero.planner.pieces import PipelinePlan
from deepseek_zero.planner.plan_settings import PlanSettings
from deepseek_zero.report.mesh_picture import bars_of, places_on
from deepseek_zero.report.picture import UnitPlace, draw_plan
from deepseek_zero.tiers.tier import Tier
from tests.unit.report.test_plots import is_png_of


def pipeline(name: str, ranks: int, virtual: int, many: int) -> PipelinePlan:
    table = make_schedule(name, ranks, virtual, many)
    nothing: tuple[tuple[str, ...], ...] = ((),) * table.stages
    return PipelinePlan(name, virtual, None, many, 0, table.placement, nothing, table.in_flight, {})


def test_neighbours_in_the_picture_are_neighbours_on_the_fastest_axis() -> None:
    places = {place.rank: place for place in places_on(Mesh(pp=2, dp_shard=2, tp=2))}
    assert sorted(places) == list(range(8))
    assert [places[rank].row for rank in range(8)] == [0, 0, 0, 0, 1, 1, 1, 1]
    columns = [places[rank].column for rank in range(4)]
    assert columns[1] - columns[0] == columns[3] - columns[2] == 1 < columns[2] - columns[1]


def test_of_many_ranks_the_first_and_the_last_are_shown() -> None:
    mesh = Mesh(pp=8, dp_shard=128, tp=16)
    ranks = [place.rank for place in places_on(mesh)]
    assert len(ranks) == 27 and ranks[0] == 0 and ranks[-1] == mesh.world_size - 1


@pytest.mark.parametrize(
    ("name", "virtual"), [("1f1b", 1), ("interleaved", 2), ("breadth_first", 2)]
)
@pytest.mark.parametrize(("ranks", "many"), [(2, 2), (4, 8), (8, 16)])
def test_bars_are_the_schedules_and_what_is_left_is_idle(
    name: str, virtual: int, ranks: int, many: int
) -> None:
    bars, length, idle = bars_of(pipeline(name, ranks, virtual, many))
    assert len(bars) == 2 * ranks * virtual * many
    for rank in range(ranks):
        own = sorted((bar for bar in bars if bar.rank == rank), key=lambda bar: bar.start)
        pairs = itertools.pairwise(own)
        assert all(before.start + before.length <= after.start + 1e-9 for before, after in pairs)
        assert {bar.micro for bar in own if bar.kind is StageActionKind.BACKWARD} == set(
            range(many)
        )
    assert idle == pytest.approx(1 - 3 * many / length)
    if name == "1f1b":
        assert length == 3 * (many + ranks - 1)


@pytest.mark.parametrize(
    ("mesh", "plan"),
    [
        (Mesh(pp=2, dp_shard=2, tp=2, rank=5), pipeline("1f1b", 2, 1, 4)),
        (Mesh(pp=8, dp_shard=16, tp=2), pipeline("interleaved", 8, 2, 16)),
        (Mesh(dp_replicate=2, dp_shard=2), None),
    ],
)
def test_a_plan_with_axes_is_drawn_below_its_units(
    tmp_path: Path, mesh: Mesh, plan: PipelinePlan | None
) -> None:
    pytest.importorskip("matplotlib")
    places = [UnitPlace("root", {("weight", Tier.DEVICE): 4096}, True)]
    schedule = plan_schedule([10], [0], PlanSettings())
    draw_plan(places, schedule, tmp_path / "plain.png")
    draw_plan(places, schedule, tmp_path / "axes.png", "stage 3", mesh, plan)
    assert is_png_of(tmp_path / "plain.png", 1000) and is_png_of(tmp_path / "axes.png", 1000)
