"""What surrounds the kernels of an update."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from deepseek_zero.optim.one_pass import OnePass


def test_a_counter_of_updates_is_read_only_if_something_else_changed_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    param = torch.nn.Parameter(torch.zeros(3))
    inner = torch.optim.AdamW([param])
    one_pass, group = OnePass(inner), inner.param_groups[0]
    reads: list[float] = []
    read = torch.Tensor.__float__

    def counted(tensor: Any) -> float:
        reads.append(read(tensor))
        return reads[-1]

    monkeypatch.setattr(torch.Tensor, "__float__", counted)
    assert [one_pass.count(param, group) for _ in range(3)] == [1.0, 2.0, 3.0]
    assert reads == [0.0]
    inner.state[param]["step"] += 4
    assert [one_pass.count(param, group) for _ in range(2)] == [8.0, 9.0]
    assert reads == [0.0, 7.0]
    inner.state[param]["step"] = torch.tensor(20.0)
    assert [one_pass.count(param, group) for _ in range(2)] == [21.0, 22.0]
    assert reads == [0.0, 7.0, 20.0]
    assert inner.state[param]["step"].item() == 22.0
