"""Tensor-parallel plans of transformers are converted to tensor-parallel specifications."""

from __future__ import annotations

import re

import pytest

from deepseek_zero.compat.deepspeed import (
    autotp,
)


def test_transformers_plans_become_specifications() -> None:
    specs = (
        autotp.TPPlanConverter.convert({"layers.*.q_proj": "colwise", "lm_head": "colwise_rep"})
        or []
    )
    assert re.match(specs[0].patterns[0], "model.layers.1.q_proj.weight") and specs[1].gather_output
    with pytest.raises(ValueError, match="local_colwise"):
        autotp.TPPlanConverter.convert({"q": "local_colwise"})
