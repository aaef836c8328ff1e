"""accelerate over pipeline stages: equal to one process if all ranks share the rows, refused
otherwise.
"""

from __future__ import annotations

import pytest

from tests.clients.running import BY_HAND, OURS, TWO, need_client, start, told

ONE = ["run", "--as-deepspeed", "--nproc", "1"]


@BY_HAND
def test_accelerate_over_two_stages_is_one_process() -> None:
    need_client("transformers", "accelerate")
    ours = told(start([*OURS, *TWO], "program_pipeline.py", 2, "shared"))
    alone = told(start([*OURS, *ONE], "program_pipeline.py", 1, "shared"))
    assert len(ours["losses"]) == 6 and len(ours["norms"]) == 3
    for key in ("losses", "norms"):
        assert ours[key] == pytest.approx(alone[key], rel=1e-5), key


@BY_HAND
def test_rows_of_each_rank_are_refused_before_the_first_step() -> None:
    need_client("transformers", "accelerate")
    process = start([*OURS, *TWO], "program_pipeline.py", 2, "prepared")
    out, errors = process.communicate(timeout=200)
    assert process.returncode != 0 and "TOLD" not in out
    assert "ranks of a pipeline received different batches" in errors
