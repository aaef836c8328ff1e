"""Test `DeepSpeedCheckpoint`, which infers the stage and the numbers of ranks from a folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from deepseek_zero.base.errors import UsageError
from deepseek_zero.compat.deepspeed.checkpoint import folder


def written(path: Path, shapes: list[dict[str, int] | None]) -> str:
    for number, shape in enumerate(shapes):
        state = {"iteration": 7} | ({folder.DIMENSIONS: shape} if shape is not None else {})
        torch.save(state, path / f"mp_rank_{number:02d}_model_states.pt")
        for rank in range(2):
            torch.save({}, path / f"bf16_zero_pp_rank_{rank}_mp_rank_{number:02d}_optim_states.pt")
    return str(path)


def test_a_folder_has_the_shape_of_the_run_that_wrote_it(tmp_path: Path) -> None:
    stages = {"pp_degree": 2, "tp_degree": 1}
    found = folder.DeepSpeedCheckpoint(written(tmp_path, [stages, stages]), dp_degree=1)
    assert (found.pp_degree, found.tp_degree, found.dp_degree, found.original_world_size) == (
        2,
        1,
        1,
        4,
    )
    assert (
        found.get_iteration() == 7
        and found.is_change_dp_degree()
        and not found.is_change_tp_degree()
    )
    assert [Path(each).name for each in found.get_zero_files(1, 0, 0)] == [
        f"bf16_zero_pp_rank_{rank}_mp_rank_01_optim_states.pt" for rank in (0, 1)
    ]
    assert [Path(each).name for each in found.get_2d_parallel_files(0, 1)] == [
        "mp_rank_01_model_states.pt"
    ]


@pytest.mark.parametrize(
    ("shapes", "error"),
    [
        ([None, None], ""),
        ([{"pp_degree": 2, "tp_degree": 1}, None], "missing from model-state files"),
        ([{"pp_degree": 2, "tp_degree": 1}, {"pp_degree": 1, "tp_degree": 2}], "disagrees across"),
        ([{"pp_degree": 3, "tp_degree": 1}] * 2, "not 3 stages"),
    ],
)
def test_an_inconsistent_folder_is_refused(tmp_path: Path, shapes: Any, error: str) -> None:
    path = written(tmp_path, shapes)
    if error:
        with pytest.raises(RuntimeError, match=error):
            folder.get_model_3d_descriptor(path)
    else:
        assert folder.ZeROCheckpoint(path).get_src_tp_degree() == 2
        assert folder.get_model_3d_descriptor(path).dp_degree == 2


@pytest.mark.parametrize("degree", [0, 3])
def test_a_degree_that_the_files_cannot_be_merged_into_is_refused(
    tmp_path: Path, degree: int
) -> None:
    stages = {"pp_degree": 2, "tp_degree": 1}
    with pytest.raises(UsageError, match="1 to 2"):
        folder.DeepSpeedCheckpoint(written(tmp_path, [stages, stages]), pp_degree=degree)
