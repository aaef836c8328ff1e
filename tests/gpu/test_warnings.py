"""A warning during a GPU test is an error or ignored, depending on its module; needs no GPU."""

from __future__ import annotations

import warnings

import pytest


def test_a_warning_of_another_package_fails_no_test() -> None:
    for module in (
        "torch._inductor.compile_fx",
        "torch.distributed",
        "triton.runtime",
        "pytest_benchmark.logger",
    ):
        warnings.warn_explicit(
            "TensorFloat32 tensor cores are available", UserWarning, "elsewhere.py", 1, module
        )


@pytest.mark.parametrize("module", ["deepseek_zero.engine.engine", "tests.gpu.test_warnings"])
def test_a_warning_of_our_own_is_an_error(module: str) -> None:
    with pytest.raises(UserWarning, match="ours"):
        warnings.warn_explicit("ours", UserWarning, "here.py", 1, module)
