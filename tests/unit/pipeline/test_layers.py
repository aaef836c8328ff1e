"""Lists of layers are partitioned into stages, named by index, and equal one process bitwise."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import deepseek_zero
from deepseek_zero.base.errors import NotBuiltError, UsageError
from deepseek_zero.base.mesh import Mesh
from deepseek_zero.checkpoint.piece import refuse_same_names, remember_same_names
from deepseek_zero.pipeline.executor import PipelineExecutor, States
from deepseek_zero.pipeline.layers import (
    Labelled,
    LayerSpec,
    LayersStage,
    LayerStages,
    TiedLayerSpec,
)
from deepseek_zero.pipeline.messages import StageLinks
from deepseek_zero.pipeline.schedule import forward_only, make_schedule
from deepseek_zero.pipeline.ties import Ties
from tests.in_process import Rank, run_ranks
from tests.models import Block
from tests.unit.pipeline.held import assert_held

MANY = 4


class Pair(nn.Module):
    """A layer that maps a tuple to a tuple: hidden states, and a mask without a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.block = Block()

    def forward(self, given: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        hidden, mask = given
        return self.block(hidden) * mask.unsqueeze(-1), mask


def with_mask(x: Tensor) -> tuple[Tensor, Tensor]:
    return x, torch.arange(x.shape[1]).expand(x.shape[:2]) < x.shape[1] - 1


def without_mask(given: tuple[Tensor, Tensor]) -> Tensor:
    return given[0]


def head(module: nn.Embedding, x: Tensor) -> Tensor:
    return x @ module.weight.t()


def layers() -> list[Any]:
    tied = {"num_embeddings": 37, "embedding_dim": 15}
    return [
        TiedLayerSpec("tokens", nn.Embedding, **tied),
        with_mask,
        *[LayerSpec(Pair) for _ in range(4)],
        without_mask,
        LayerSpec(nn.LayerNorm, 15),
        TiedLayerSpec("tokens", nn.Embedding, forward_fn=head, **tied),
    ]


def loss_fn(output: Tensor, labels: Tensor) -> Tensor:
    return nn.functional.cross_entropy(output.flatten(0, 1), labels.flatten())


def batch(micro: int) -> Labelled:
    text = torch.randint(37, (2, 8), generator=torch.Generator().manual_seed(micro))
    return Labelled(text[:, :-1].contiguous(), text[:, 1:].contiguous())


def built(stages: int, index: int, **options: Any) -> LayerStages:
    return LayerStages(layers(), stages, index, loss_fn=loss_fn, seed_layers=True, **options)


@pytest.mark.parametrize("interval", [0, 2])
@pytest.mark.parametrize("stages", [2, 3])
def test_a_list_of_layers_has_the_bits_of_one_process(stages: int, interval: int) -> None:
    def recompute(function: Any, *args: Any) -> Any:
        return torch.utils.checkpoint.checkpoint(function, *args, use_reentrant=False)

    options = {"checkpoint_interval": interval, "checkpoint_func": recompute}
    whole = built(1, 0)
    tied = whole.tied_modules["tokens"].weight
    losses = []
    for micro in range(MANY):
        found = loss_fn(whole(batch(micro).inputs), batch(micro).labels)
        (found / MANY).backward()
        losses.append(found.detach())
    expected = {name: param.grad for name, param in whole.named_parameters()}

    def body(rank: Rank) -> tuple[list[Tensor] | None, dict[str, Tensor]]:
        own = built(stages, rank.index, **options)
        own.seed_layers = False
        schedule = make_schedule("1f1b", stages, 1, MANY, tied=(0, stages - 1))
        mesh = Mesh(pp=stages).on_world(rank.size, rank.index)
        ties = Ties(rank.comm, mesh, schedule.placement, own.ties)
        values = {name: param.data for name, param in own.named_parameters() if name in own.ties}
        ties.spread(values)
        assert all(torch.equal(value, tied) for value in values.values())

        class Summing(States):
            def tie(self, stage: int) -> None:
                ties.add_up(
                    {name: p.grad for name, p in own.named_parameters() if p.grad is not None}
                )

        executor = PipelineExecutor(
            StageLinks(rank.comm, mesh, schedule), [LayersStage(own)], Summing()
        )
        outcome = executor.run(schedule, [batch(micro) for micro in range(MANY)])
        return outcome.losses, {
            name: param.grad for name, param in own.named_parameters() if param.grad is not None
        }

    found = run_ranks(stages, body, reads_in_place=True)
    assert found[-1][0] is not None
    assert all(torch.equal(*pair) for pair in zip(found[-1][0], losses, strict=True))
    gradients = [grads for _, grads in found]
    assert_held(
        gradients,
        expected,
        lambda name: 2 if name.startswith("tied_modules") else 1,
        are_summed=True,
    )


def test_a_step_may_follow_an_evaluation_in_inference_mode() -> None:
    """The step writes the buffers from which the evaluation has sent."""

    def body(rank: Rank) -> int:
        mesh = Mesh(pp=2).on_world(rank.size, rank.index)
        schedule = make_schedule("1f1b", 2, 1, MANY)
        links = StageLinks(rank.comm, mesh, schedule)
        executor = PipelineExecutor(links, [LayersStage(built(2, rank.index))])
        batches = [batch(micro) for micro in range(MANY)]
        with torch.inference_mode():
            executor.run(forward_only(2, 1, MANY), batches)
        return len(executor.run(schedule, batches).losses or ())

    assert run_ranks(2, body, reads_in_place=True) == [0, MANY]


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.uint16, torch.bool], ids=str)
def test_stages_send_each_other_tensors_of_any_dtype(dtype: torch.dtype) -> None:
    received: list[Tensor] = []

    def first(x: Tensor) -> tuple[Tensor, Tensor]:
        return x, torch.ones(3).to(dtype)

    def last(both: tuple[Tensor, Tensor]) -> Tensor:
        received.append(both[1])
        return both[0].sum()

    def body(rank: Rank) -> None:
        mesh = Mesh(pp=2).on_world(rank.size, rank.index)
        schedule = make_schedule("1f1b", 2, 1, 1)
        stage = LayersStage(LayerStages([first, last], 2, rank.index, method="uniform"))
        executor = PipelineExecutor(StageLinks(rank.comm, mesh, schedule), [stage])
        executor.run(schedule, [Labelled(torch.ones(2, requires_grad=True))])

    run_ranks(2, body)
    assert received[0].dtype == dtype and received[0].float().tolist() == [1.0] * 3


def test_names_and_builds_are_those_of_the_whole_list() -> None:
    whole, last = built(1, 0), built(3, 2)
    assert {name for name, _ in last.named_parameters()} <= {
        name for name, _ in whole.named_parameters()
    }
    assert "tied_modules.tokens.weight" in dict(last.named_parameters())
    assert last.parts[0] == 0
    assert last.parts[-1] == len(layers())
    assert last.stage_owner(0) == 0
    assert last.stage_owner(8) == 2
    assert last.ties == {"tied_modules.tokens.weight": (0, 2)}
    assert whole.ties == {}
    # Seeds depend on the index of a layer, so a layer has the same values on every rank.
    own = dict(last.named_parameters())
    assert all(
        torch.equal(param, own[name])
        for name, param in whole.named_parameters()
        if name in own and "." in name[:2]
    )


def test_objects_that_are_no_layer_are_refused() -> None:
    with pytest.raises(UsageError, match=r"LayerSpec only supports torch.nn.Module types\."):
        LayerSpec(len)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="layer 1 is an int"):
        LayerStages([nn.Linear(2, 2), 3], 1, 0)
    with pytest.raises(NotImplementedError, match="RECURSIVE BUILD"):
        LayerStages([LayerStages([nn.Linear(2, 2)], 1, 0)], 1, 0)
    stage = LayersStage(LayerStages([lambda x: (x, None), nn.Linear(2, 2)], 2, 0, method="uniform"))
    with pytest.raises(UsageError, match="the last layer of stage 0 returns a NoneType"):
        stage.forward(Labelled(torch.ones(2, 2)))
    last = LayersStage(LayerStages([nn.Linear(2, 2)], 1, 0))
    with pytest.raises(UsageError, match="the loss is a Tensor"):
        last.loss(torch.ones(2), Labelled(None))


def test_a_parameter_in_several_stages_must_be_tied() -> None:
    """Each stage would train its own copy."""
    layer = nn.Linear(2, 2)
    for shared in ([layer, nn.ReLU(), layer], [layer, nn.ReLU(), nn.Sequential(layer)]):
        assert LayerStages(shared, 1, 0)(torch.ones(1, 2)).shape == (1, 2)
        for index in range(2):
            with pytest.raises(UsageError, match="layers 0 and 2 share a parameter"):
                LayerStages(shared, 2, index)
    layer.requires_grad_(False)
    LayerStages([layer, nn.ReLU(), layer], 2, 0, method="uniform")


def test_a_tied_weight_that_does_not_exist_is_refused() -> None:
    misspelled = TiedLayerSpec("tokens", nn.Linear, 2, 2, tied_weight_attr="weights")
    LayerStages([misspelled, misspelled], 1, 0)
    for index in range(2):
        with pytest.raises(UsageError, match=r"'tied_modules.tokens.weights' is shared by stages"):
            LayerStages([misspelled, misspelled], 2, index)


def test_numbers_out_of_range_are_refused() -> None:
    """A negative interval ran no layer, and a negative index built no layer."""
    layers = [nn.Linear(2, 2), nn.Linear(2, 2)]
    with pytest.raises(UsageError, match="activation_checkpoint_interval"):
        LayerStages(layers, 1, 0, checkpoint_interval=-1)
    for index in (-1, 2):
        with pytest.raises(UsageError, match="index"):
            LayerStages(layers, 2, index)
        with pytest.raises(UsageError, match="index"):
            LayerStages(layers, 2, 0).stage(index)


def test_seeds_and_recomputation_are_by_layer() -> None:
    seeds: list[int] = []
    own = LayerStages(
        [nn.Linear(2, 2), nn.Dropout()], 1, 0, seed_layers=True, seed_fn=seeds.append, base_seed=10
    )
    assert seeds == [10, 11]
    own(torch.ones(1, 2))
    assert seeds[2:] == [20, 21]
    names = ["Linear"]
    own = LayerStages(
        [nn.Linear(2, 2), nn.Dropout()], 1, 0, checkpoint_interval=1, checkpointable=names
    )
    assert [own.recomputes([layer]) for layer in own.forward_funcs] == [True, False]
    assert repr(LayerSpec(nn.Linear, 2, 3, bias=False)) == "Linear(2, 3, bias=False)"


def test_untied_parameters_of_a_tied_layer_exist_on_every_stage_and_are_not_saved() -> None:
    """Each stage has a bias with the same name; a checkpoint would save only the first."""
    specs = [
        TiedLayerSpec("ends", nn.Linear, 4, 4),
        nn.Tanh(),
        TiedLayerSpec("ends", nn.Linear, 4, 4),
    ]
    for stage in range(2):
        own = LayerStages(specs, 2, stage, method="uniform")
        assert own.same_names == ("tied_modules.ends.bias",)
        remember_same_names(own, own.same_names)
        with pytest.raises(
            NotBuiltError, match=r"'tied_modules\.ends\.bias' is a parameter of several stages"
        ):
            refuse_same_names(own)
    one = LayerStages(specs, 1, 0)
    both = [
        TiedLayerSpec("ends", nn.Linear, 4, 4, tied_weight_attr=["weight", "bias"])
        for _ in range(2)
    ]
    for fine in (one, LayerStages([both[0], nn.Tanh(), both[1]], 2, 0, method="uniform")):
        assert fine.same_names == ()
        remember_same_names(fine, fine.same_names)
        refuse_same_names(fine)


def a_list() -> list[Any]:
    return [
        TiedLayerSpec("embed", nn.Embedding, 9, 4),
        nn.Linear(4, 4),
        LayerSpec(nn.Linear, 4, 8),
        nn.Linear(8, 9),
    ]


@pytest.mark.parametrize("rank", [0, 1])
def test_the_plan_of_any_rank_is_that_of_the_stage_it_would_build(rank: int) -> None:
    adamw = {"type": "AdamW", "params": {"lr": 1e-3}}
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "zero_optimization": {"stage": 1},
        "optimizer": adamw,
    }
    built = [LayerStages(a_list(), 2, index, method="uniform") for index in range(2)]
    before = [(name, id(param)) for name, param in built[1 - rank].named_parameters()]
    other, own = (
        deepseek_zero.plan(built[each], config, ranks=2, rank=rank, mesh={"pp": 2})
        for each in (1 - rank, rank)
    )
    assert str(other) == str(own) and other.bytes_by_state() == own.bytes_by_state()
    assert own.numel == sum(param.numel() for param in built[rank].parameters())
    assert before == [(name, id(param)) for name, param in built[1 - rank].named_parameters()]
    client = torch.optim.AdamW(built[1 - rank].parameters())
    with pytest.raises(NotBuiltError, match="with a passed optimizer"):
        del config["optimizer"]
        deepseek_zero.plan(
            built[1 - rank], config, ranks=2, rank=rank, mesh={"pp": 2}, optimizer=client
        )


@pytest.mark.parametrize("key", ["a.b", "", None, "keys", "training"])
def test_a_key_that_cannot_be_the_name_of_a_module_is_refused(key: Any) -> None:
    with pytest.raises(UsageError, match="TiedLayerSpec\\(key="):
        TiedLayerSpec(key, nn.Linear, 2, 2)
