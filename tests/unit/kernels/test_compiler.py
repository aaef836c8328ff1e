"""How many threads an update may use."""

from __future__ import annotations

import os

import pytest

from deepseek_zero.kernels.compiler import threads_for


@pytest.mark.parametrize("ranks", [1, 2, 1000])
def test_update_threads_do_not_follow_omp_num_threads(
    ranks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torchrun sets OMP_NUM_THREADS to 1 on hosts whose cores are free (Megatron-LM#188)."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(16)), raising=False)
    expected = max(1, 16 // ranks)
    assert threads_for(ranks) == expected
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    assert threads_for(ranks) == expected
