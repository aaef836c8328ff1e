"""`deepspeed.init_inference` runs a whole model, and refuses what needs kernels or more ranks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from deepseek_zero.base.errors import ConfigError, NotBuiltError


class Model(nn.Module):
    """A linear layer with a method and an attribute of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.config = {"size": 3}
        self.layer = nn.Linear(3, 3)
        self.drop = nn.Dropout(0.5)
        self.register_buffer("shift", torch.ones(3))

    def forward(self, x: Tensor) -> Any:
        return self.drop(self.layer(x)) + self.shift

    def generate(self, x: Tensor, *, times: int) -> Any:
        return torch.stack([self(x)] * times)


@pytest.mark.parametrize(
    ("dtype", "options"),
    [
        (torch.float16, {}),
        (torch.float32, {"dtype": torch.float, "mp_size": 1, "replace_method": "auto"}),
        (torch.bfloat16, {"dtype": "bf16", "tensor_parallel": {"tp_size": 1}}),
        (torch.float32, {"config": {"dtype": "torch.float32"}, "max_out_tokens": 64}),
        (torch.bfloat16, {"dtype": torch.bfloat16, "replace_with_kernel_inject": True}),
    ],
)
def test_an_inference_engine_runs_the_model_in_a_dtype(
    dtype: torch.dtype, options: dict[str, Any], as_deepspeed: None
) -> None:
    import deepspeed

    model = Model()
    engine = deepspeed.init_inference(model, **options)
    assert isinstance(engine, deepspeed.InferenceEngine) and engine.module is model
    assert not model.training and {each.dtype for each in (*model.parameters(), model.shift)} == {
        dtype
    }
    x = torch.ones(3, dtype=dtype)
    assert torch.equal(engine(x), model(x))
    assert torch.equal(engine.generate(x, times=2)[1], model(x)) and engine.config == {"size": 3}
    with pytest.raises(AttributeError, match="nothing"):
        _ = engine.nothing


def test_options_are_read_from_a_file(as_deepspeed: None, tmp_path: Path) -> None:
    import deepspeed

    path = tmp_path / "inference.json"
    path.write_text(json.dumps({"dtype": "fp32"}))
    assert deepspeed.init_inference(Model(), str(path)).shift.dtype == torch.float32
    with pytest.raises(ConfigError, match="two values of dtype"):
        deepspeed.init_inference(Model(), str(path), dtype="bf16")
    with pytest.raises(ConfigError, match="no option dtpye"):
        deepspeed.init_inference(Model(), dtpye="bf16")


@pytest.mark.parametrize(
    "options",
    [
        {"dtype": torch.int8},
        {"checkpoint": "weights.json"},
        {"quant": {"enabled": True}},
    ],
    ids=lambda options: next(iter(options)),
)
def test_options_that_would_change_the_result_are_refused(
    options: dict[str, Any], as_deepspeed: None
) -> None:
    import deepspeed

    with pytest.raises(NotBuiltError, match=rf"init_inference\({next(iter(options))}="):
        deepspeed.init_inference(Model(), **options)


@pytest.mark.parametrize(
    "options",
    [{"mp_size": 2}, {"tensor_parallel": {"tp_size": 2}}, {"ep_size": 2}],
    ids=lambda options: next(iter(options)),
)
def test_a_number_of_ranks_that_share_a_model_causes_a_warning(
    options: dict[str, Any], as_deepspeed: None, caplog: pytest.LogCaptureFixture
) -> None:
    """Each rank runs the whole model, which has the same outputs."""
    import deepspeed

    engine = deepspeed.init_inference(Model(), dtype=torch.float32, **options)
    assert engine.shift.dtype == torch.float32
    assert f"does not split the model ({next(iter(options))})" in caplog.text
