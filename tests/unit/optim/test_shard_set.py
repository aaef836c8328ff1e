"""Optimizers that need whole tensors are refused on a mesh that splits tensors along "tp"."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from deepseek_zero.api.engine import ZeroEngine
from deepseek_zero.base.errors import NotBuiltError
from deepseek_zero.base.mesh import Mesh
from deepseek_zero.config.load import load
from deepseek_zero.engine import start as start_file
from deepseek_zero.engine.dialect import EngineDialect
from deepseek_zero.optim.shard_set import relayout_whole
from deepseek_zero.optimizers.muon import Muon
from tests.compositions import config_of, engines_of_threads, llama
from tests.in_process import Rank, World, run_ranks, sharded

transformers = pytest.importorskip("transformers")


class Unknown(torch.optim.SGD):
    """A client's optimizer class without a declared granularity."""


class ElementWise(Unknown):
    """A client's optimizer class that declares its granularity."""

    granularity = "element"


class Matrix(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = torch.nn.Linear(64, 64, bias=False)

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.inner(values)
        return output


def matrices(model: torch.nn.Module) -> list[torch.nn.Parameter]:
    return [
        param for name, param in model.named_parameters() if param.ndim == 2 and "layers" in name
    ]


BY_CLIENTS: dict[str, Callable[[Any], Any]] = {
    "Muon": lambda model: torch.optim.Muon(matrices(model)),
    "Adafactor": lambda model: torch.optim.Adafactor(model.parameters()),
    "Adafactor of transformers": lambda model: transformers.Adafactor(model.parameters()),
    "Unknown": lambda model: Unknown(model.parameters(), lr=0.1),
}


def start(rank: Rank, here: Any, mesh: Mesh, *, name: str | None = None, client: Any = None) -> Any:
    here.rank = rank
    model = llama(2)
    config = config_of(1, "fp32")
    if name is not None:
        config["optimizer"] = {"type": name, "params": {"lr": 0.01}}
    optimizer = None if client is None else client(model)
    return start_file.start(
        load(config), start_file.Request(model, optimizer, mesh=mesh), EngineDialect(ZeroEngine)
    )


def outcomes(mesh: Mesh, **options: Any) -> list[Any]:
    with engines_of_threads() as here:
        return World[None](2).outcomes(lambda rank: start(rank, here, mesh, **options).destroy())


@pytest.mark.parametrize("name", ["Lamb", "Muon", "Adafactor"])
def test_an_optimizer_of_whole_tensors_is_refused_with_a_split_parameter(name: str) -> None:
    for error in outcomes(Mesh(tp=2), name=name):
        assert isinstance(error, NotBuiltError), error
        assert f"{name} with tensor parallelism" in str(error) and ".weight' is split over" in str(
            error
        )


@pytest.mark.parametrize("name", BY_CLIENTS)
def test_a_clients_optimizer_of_whole_tensors_is_refused_too(name: str) -> None:
    for error in outcomes(Mesh(tp=2), client=BY_CLIENTS[name]):
        assert isinstance(error, NotBuiltError), error
        assert "with tensor parallelism (tp): parameter '" in str(error)


@pytest.mark.parametrize("mesh", [Mesh(pp=2), Mesh(sp=2), Mesh(dp_shard=2)], ids=str)
def test_axes_that_split_no_tensor_allow_it(mesh: Mesh) -> None:
    assert outcomes(mesh, name="Lamb") == [None, None]


def test_element_wise_groups_and_classes_are_taken() -> None:
    def adamw_alone(model: Any) -> Any:
        return Muon([{"params": list(model.parameters()), "use_muon": False}])

    assert outcomes(Mesh(tp=2), client=adamw_alone) == [None, None]
    assert outcomes(Mesh(tp=2), client=lambda model: ElementWise(model.parameters(), lr=0.1)) == [
        None,
        None,
    ]


def test_a_group_that_is_added_later_is_refused_too() -> None:
    with engines_of_threads() as here:

        def body(rank: Rank) -> bool:
            def vectors(model: Any) -> Any:
                return Unknown([param for param in model.parameters() if param.ndim < 2], lr=0.1)

            engine = start(rank, here, Mesh(tp=2), client=vectors)
            with pytest.raises(NotBuiltError, match="Unknown with tensor parallelism"):
                engine.optimizer.add_param_group({"params": matrices(engine.module)})
            engine.destroy()
            return True

        assert run_ranks(2, body) == [True, True]


def test_a_layout_without_cut_tensors_gets_a_schedule_by_its_larger_messages() -> None:
    def schedules(rank: Rank) -> tuple[str, str]:
        # Three units fit if each is cut between two ranks, and one if a rank has a whole tensor.
        blocks = [Matrix() for _ in range(4)]
        runtime = sharded(rank, torch.nn.Sequential(*blocks), stage=3, window_numel=3 * 64 * 64)
        relayout_whole(runtime, [{"params": list(runtime.model.parameters())}])
        made = str(runtime.schedule)
        runtime.replan()
        return made, str(runtime.schedule)

    for made, expected in run_ranks(2, schedules):
        assert made == expected
