"""Single-process systems train correctly, and every registered system has its file."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from benchmarks.cells import ADAMW, Cell
from benchmarks.model import GPT, Batches, build_model
from benchmarks.systems import ROOT, SYSTEMS
from benchmarks.systems.common import Job, MasterAdamW, backward_all
from benchmarks.systems.single import build

CELL = Cell("1x64", "fp32", 2)


def make() -> GPT:
    return build_model(CELL.shape)


def test_the_one_process_does_what_a_plain_loop_does() -> None:
    batches, model = Batches(CELL, 2, 0, 1), make()
    optimizer = torch.optim.AdamW(model.parameters(), **ADAMW)
    system = build(make, Job(CELL, 0, 2))
    for step in range(3):
        losses = torch.stack([model(*batch) for batch in batches.of_step(step)])
        losses.mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        torch.testing.assert_close(torch.stack(system.step(batches.of_step(step))), losses.detach())


@pytest.mark.parametrize("bf16", [False, True])
def test_parts_of_the_elements_updated_apart_are_the_whole_update(bf16: bool) -> None:
    batches = Batches(CELL, 2, 0, 1).of_step(0)
    whole, left, right = make(), make(), make()
    optimizers = [MasterAdamW(whole, bf16=bf16)]
    for model, part in ((left, 0), (right, 1)):
        optimizers.append(
            MasterAdamW(
                model, bf16=bf16, part=lambda tensor, part=part: tensor.view(-1).chunk(2)[part]
            )
        )
    for model, optimizer in zip((whole, left, right), optimizers, strict=True):
        backward_all(model, batches)
        optimizer.step()
    for expected, first, second in zip(
        whole.parameters(), left.parameters(), right.parameters(), strict=True
    ):
        both = torch.cat(
            [first.detach().view(-1).chunk(2)[0], second.detach().view(-1).chunk(2)[1]]
        )
        assert torch.equal(both, expected.detach().view(-1))


def test_masters_are_cut_from_the_originals_and_not_from_rounded_weights() -> None:
    original, model = make(), make()
    optimizer = MasterAdamW(model, bf16=True)
    for master, weight, param in zip(
        optimizer.masters, model.parameters(), original.parameters(), strict=True
    ):
        assert weight.dtype == torch.bfloat16
        assert torch.equal(master.detach(), param.detach().view(-1))


@pytest.mark.parametrize("name", SYSTEMS)
def test_every_system_has_its_file(name: str) -> None:
    assert Path(ROOT, "benchmarks", "systems", f"{SYSTEMS[name].module}.py").exists()
