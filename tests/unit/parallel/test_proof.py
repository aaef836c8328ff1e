"""Operations between split layers are examined before the first step.

Each rank computes its part, or the model is refused.
"""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from deepseek_zero.base.errors import NotBuiltError
from deepseek_zero.parallel.apply import parallelize
from deepseek_zero.parallel.cuts import cut
from deepseek_zero.parallel.plans import ParallelSettings, choose
from deepseek_zero.parallel.proof import prove
from tests.in_process import Rank, World, run_ranks
from tests.unit.parallel.tiny import (
    Step,
    batch,
    differences,
    ranks_step,
    step,
    summed,
    tiny,
    virtual_step,
)

WIDE, NARROW, HEADS = 32, 16, 4
TARGETS = ["q_proj", "v_proj", "o_proj", "up_proj", "down_proj"]


class Mlp(nn.Module):
    """A feed-forward layer with another operation between its two products."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.up_proj, self.down_proj = nn.Linear(NARROW, WIDE), nn.Linear(WIDE, NARROW)
        self.own = nn.Parameter(torch.tensor(1.3))
        self.vector = nn.Parameter(torch.randn(WIDE))
        self.scale = nn.Parameter(torch.randn(NARROW))
        self.prelu = nn.PReLU()
        self.shared = nn.Linear(NARROW, NARROW)

    def forward(self, x: Tensor) -> Tensor:
        h: Tensor = self.up_proj(x)
        match self.kind:
            case "relu in place":
                h = F.relu_(h)
            case "prelu":
                h = self.prelu(h)
            case "scalar":
                h = h * torch.sigmoid(self.own * h)
            case "vector":
                h = F.relu(h + self.vector)
            case "norm":
                h = F.layer_norm(h, h.shape[-1:])
            case "group norm":
                h = F.group_norm(h.flatten(0, 1), 4).view_as(h)
            case "mean":
                h = h - h.mean(-1, keepdim=True)
            case "softmax":
                h = h.softmax(-1)
            case "top-k":
                h = h * (h >= h.topk(5, -1).values[..., -1:])
            case "order":
                h = h.flip(-1)
            case "tokens":
                h = h - h.mean(1, keepdim=True)
            case "weight":
                h = h * self.up_proj.weight.square().mean()
            case "residual scale":
                return self.scale * self.down_proj(F.gelu(h)) + self.shared(x)
        return self.down_proj(h)


RIGHT = {
    "relu in place": {},
    "prelu": {"prelu.weight": "partial"},
    "scalar": {"own": "partial"},
    "tokens": {},
    "residual scale": {"scale": "equal", "shared.weight": "equal"},
}
REFUSED = ["vector", "norm", "group norm", "mean", "softmax", "top-k", "order", "weight"]


class Attention(nn.Module):
    """An attention with extra parameters: per head, per feature, or for all heads."""

    def __init__(self, kind: str = "") -> None:
        super().__init__()
        self.kind, self.num_heads, self.head_dim = kind, HEADS, NARROW // HEADS
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (
            nn.Linear(NARROW, NARROW) for _ in range(4)
        )
        self.sinks = nn.Parameter(torch.randn(HEADS))
        self.q_norm = nn.Parameter(torch.rand(HEADS, self.head_dim) + 0.5)
        self.k_norm = nn.LayerNorm(self.head_dim)
        self.norms = nn.ModuleList(nn.LayerNorm(self.head_dim) for _ in range(HEADS))
        self.q_whole = nn.LayerNorm(NARROW)

    def forward(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        q = self.q_whole(self.q_proj(x)) if self.kind == "whole norm" else self.q_proj(x)
        q, k, v = (
            each.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
            for each in (q, self.k_proj(x), self.v_proj(x))
        )
        if self.kind == "norm by head":
            q = torch.stack(
                [norm(each) for norm, each in zip(self.norms, q.unbind(1), strict=False)], 1
            )
        q, k = q * self.q_norm.unsqueeze(1), self.k_norm(k)
        scores = q @ k.transpose(-1, -2)
        if bias is not None:
            scores = scores + bias
        sinks = self.sinks.view(1, -1, 1, 1).expand(len(q), -1, q.shape[2], 1)
        weights = torch.cat([scores, sinks], -1).softmax(-1)[..., :-1]
        return self.o_proj((weights @ v).transpose(1, 2).flatten(2))


class Net(nn.Module):
    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            y = layer(x)
            y += x
            x = y
        return x


def net(*layers: Any) -> Net:
    with torch.random.fork_rng():
        torch.manual_seed(2)
        return Net(*(make() for make in layers))


def taken(model: nn.Module, x: Tensor | None = None) -> Step:
    x = torch.randn(3, 5, NARROW, generator=torch.Generator().manual_seed(1)) if x is None else x
    loss = model(x).square().mean()
    loss.backward()
    return Step(loss.detach(), {name: each.grad for name, each in model.named_parameters()})


def agrees(model: nn.Module, tp: int, settings: ParallelSettings | None = None) -> dict[str, str]:
    """Compare the loss and all gradients with those of the whole model.

    Returns the kinds of splits by name.
    """
    whole = taken(copy.deepcopy(model))

    def body(rank: Rank) -> Step:
        own = copy.deepcopy(model)
        splits = parallelize(own, rank.comm, settings)
        found = taken(own)
        found.splits = splits
        return found

    steps = run_ranks(tp, body)
    for rank, each in enumerate(steps):
        assert torch.allclose(each.loss, whole.loss, rtol=1e-5)
        for name, grad in whole.grads.items():
            own = summed(steps, name, rank)
            if grad is not None:
                assert own is not None
                torch.testing.assert_close(
                    own, cut(grad, each.splits[name], rank), rtol=1e-4, atol=1e-6, msg=name
                )
    return {name: split.kind for name, split in steps[0].splits.items()}


@pytest.mark.parametrize("kind", RIGHT)
def test_parameters_between_split_layers_get_the_gradient_of_the_whole_model(kind: str) -> None:
    kinds = agrees(net(lambda: Mlp(kind), lambda: Mlp(kind)), 2)
    for layer in range(2):
        assert {name: kinds[f"layers.{layer}.{name}"] for name in RIGHT[kind]} == RIGHT[kind]


@pytest.mark.parametrize("kind", REFUSED)
def test_modules_that_read_all_features_are_refused_by_name(kind: str) -> None:
    model = net(lambda: Mlp("tokens"), lambda: Mlp(kind))
    before = {name: param.clone() for name, param in model.named_parameters()}
    plan = choose(model, 2)
    with pytest.raises(NotBuiltError, match=r"cannot split 'layers\.1' \(Mlp\) over tp=2") as error:
        prove(model, plan)
    assert "up_proj" in str(error.value) and "partition_config" in str(error.value)
    if kind == "vector":
        assert "vector" in str(error.value)
    assert all(torch.equal(param, before[name]) for name, param in model.named_parameters())


@pytest.mark.parametrize("tp", [2, 3, 4])
def test_parameters_of_each_head_are_split_with_the_heads(tp: int) -> None:
    kinds = agrees(net(Attention, Attention), tp)
    assert kinds["layers.0.sinks"] == kinds["layers.1.q_norm"] == "split"
    assert kinds["layers.0.k_norm.weight"] == "partial"


@pytest.mark.parametrize("kind", ["whole norm", "norm by head"])
def test_norms_that_span_heads_or_are_listed_by_head_are_refused(kind: str) -> None:
    model = net(Attention, lambda: Attention(kind))
    with pytest.raises(NotBuiltError, match=r"'layers\.1' \(Attention\)"):
        prove(model, choose(model, 2))


class Biased(nn.Module):
    """An attention with a bias, trained or not, per head or shared."""

    def __init__(self, *shape: int, learns: bool) -> None:
        super().__init__()
        self.attention = Attention()
        self.bias = nn.Parameter(torch.randn(*shape), requires_grad=learns)

    def forward(self, x: Tensor) -> Tensor:
        return self.attention(x, bias=self.bias[..., : x.shape[1], : x.shape[1]])


def forwards(
    model: nn.Module, settings: ParallelSettings | None = None, x: Tensor | None = None
) -> list[Any]:
    def body(rank: Rank) -> None:
        own = copy.deepcopy(model)
        parallelize(own, rank.comm, settings)
        taken(own, x)

    return World[None](2).outcomes(body)


@pytest.mark.parametrize("rows", [3, 40])
def test_the_first_forward_examines_what_could_not_be_run_before(rows: int) -> None:
    """The bias of all heads is computed outside of the attention.

    A trained bias gets a gradient from the heads of each rank.
    """

    class Needs(Attention):
        def forward(self, x: Tensor, bias: Tensor) -> Tensor:  # type: ignore[override]
            return super().forward(x, bias)

    def made(*shape: int, learns: bool) -> nn.Module:
        model = Biased(*shape, learns=learns)
        model.attention.__class__ = Needs
        return model

    x = torch.randn(rows, rows, NARROW, generator=torch.Generator().manual_seed(1))
    plan = choose(made(1, 1, rows, rows, learns=False), 2)
    model = made(1, 1, rows, rows, learns=False)
    prove(model, plan)
    assert [each.names for each in plan.unproven] == [["attention"]]
    for error in forwards(made(1, HEADS, rows, rows, learns=False), x=x):
        assert isinstance(error, NotBuiltError) and "cannot split 'attention'" in str(error), error
    for error in forwards(made(1, 1, rows, rows, learns=True), x=x):
        assert isinstance(error, NotBuiltError) and "what it is given" in str(error), error


def test_an_examination_in_the_first_forward_changes_nothing() -> None:
    """The examination runs inside a checkpoint and draws random numbers."""

    class Two(Mlp):
        def forward(self, x: Tensor, y: Tensor) -> Tensor:  # type: ignore[override]
            return super().forward(x + y)

    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.mlp = Two("tokens")

        def forward(self, x: Tensor) -> Tensor:
            return checkpoint(self.mlp, x, x, use_reentrant=False)

    model = net(Outer)
    plan = choose(model, 2)
    prove(model, plan)
    assert [each.names for each in plan.unproven] == [["layers.0.mlp"]]
    state = torch.get_rng_state()
    agrees(model, 2)
    assert torch.equal(torch.get_rng_state(), state)


class Closed(nn.Module):
    """Layers that are called by a closure, which a copy of the module does not copy."""

    def __init__(self) -> None:
        super().__init__()
        self.up_proj, self.down_proj = nn.Linear(NARROW, WIDE), nn.Linear(WIDE, NARROW)
        self.run = lambda x: self.down_proj(F.relu(self.up_proj(x)))

    def forward(self, x: Tensor) -> Tensor:
        return self.run(x)


def test_modules_that_cannot_be_examined_are_refused_unless_their_layers_are_named() -> None:
    model = net(Closed)
    for error in forwards(model):
        assert isinstance(error, NotBuiltError), error
        assert "does not call layer 'up_proj'" in str(error) and "partition_config" in str(error)
    layers = ((r".*up_proj\.", "column", 1, ()), (r".*down_proj\.", "row", 1, ()))
    agrees(model, 2, ParallelSettings(layers=layers))


def test_modules_of_one_class_that_differ_in_an_attribute_are_examined_each() -> None:
    model = net(lambda: Mlp("tokens"), lambda: Mlp("prelu"), lambda: Mlp("scalar"))
    plan = choose(model, 2)
    prove(model, plan)
    assert (
        plan.splits["layers.1.prelu.weight"].kind == plan.splits["layers.2.own"].kind == "partial"
    )
    assert plan.splits["layers.0.prelu.weight"].kind == plan.splits["layers.1.own"].kind == "equal"


def test_a_model_without_values_is_examined_too() -> None:
    with torch.device("meta"):
        model = Net(Attention(), Mlp("scalar"))
    plan = choose(model, 2)
    prove(model, plan)
    assert (
        plan.splits["layers.0.sinks"].kind == "split"
        and plan.splits["layers.1.own"].kind == "partial"
    )
    assert not plan.unproven


class Block(nn.Module):
    """A module with a feed-forward layer and two attentions, of which it calls one."""

    def __init__(self) -> None:
        super().__init__()
        self.attention, self.other = Attention(), Attention()
        self.up_proj, self.down_proj = nn.Linear(NARROW, WIDE), nn.Linear(WIDE, NARROW)
        self.scale = nn.Parameter(torch.randn(NARROW))

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.gelu(self.up_proj(x + self.attention(x)))) * self.scale


def test_a_module_around_another_holder_is_examined_by_itself() -> None:
    kinds = agrees(net(Block, Block), 2)
    assert kinds["layers.0.attention.sinks"] == "split" and kinds["layers.0.scale"] == "equal"
    assert kinds["layers.1.attention.k_norm.weight"] == "partial"


class Sparse(Mlp):
    """A feed-forward layer that stores a loss of its hidden features in an attribute."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.up_proj(x)
        self.penalty = h.abs().mean()
        return self.down_proj(h)


def test_a_loss_of_features_that_is_kept_in_an_attribute_is_refused() -> None:
    model = net(lambda: Sparse(""))
    with pytest.raises(NotBuiltError, match="attribute 'penalty', which a loss may use"):
        prove(model, choose(model, 2))


def test_a_parameter_with_different_strides_in_another_module_is_refused() -> None:
    model = net(lambda: Mlp("prelu"), lambda: Mlp("tokens"))
    model.other = nn.PReLU()
    model.other.weight = model.layers[0].prelu.weight  # type: ignore[union-attr]
    with pytest.raises(NotBuiltError, match="is shared with another module"):
        prove(model, choose(model, 2))
    shared = net(lambda: Mlp("prelu"), lambda: Mlp("prelu"))
    shared.layers[1].prelu = shared.layers[0].prelu  # type: ignore[union-attr]
    plan = choose(shared, 2)
    prove(shared, plan)
    assert plan.splits["layers.0.prelu.weight"].kind == "partial"


# -- unmodified models


def of_transformers(name: str, **options: Any) -> nn.Module:
    transformers = pytest.importorskip("transformers")
    sizes: dict[str, Any] = {
        "vocab_size": 67,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "max_position_embeddings": 32,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    config = getattr(transformers, f"{name}Config")(**{**sizes, **options})
    with torch.random.fork_rng():
        torch.manual_seed(11)
        model: nn.Module = getattr(transformers, f"{name}ForCausalLM")(config)
        for parameter in model.parameters():
            parameter.data.add_(torch.randn_like(parameter) * 0.05)
    return model.train()


@pytest.mark.parametrize(
    ("name", "options", "kind"),
    [
        ("Cohere", {"use_qk_norm": True, "num_key_value_heads": 2}, "split"),
        ("Phi", {"qk_layernorm": True, "resid_pdrop": 0.0, "embd_pdrop": 0.0}, "partial"),
    ],
)
def test_norms_of_queries_and_keys_in_unmodified_models(
    name: str, options: dict[str, Any], kind: str
) -> None:
    model = of_transformers(name, **options)
    whole, steps = step(copy.deepcopy(model), batch()), ranks_step(model, 2)
    norms = [key for key in steps[0].splits if "q_norm" in key or "q_layernorm" in key]
    assert norms and all(steps[0].splits[key].kind == kind for key in norms)
    for rank, each in enumerate(steps):
        for key, grad in whole.grads.items():
            own = summed(steps, key, rank)
            assert grad is not None and own is not None
            torch.testing.assert_close(
                own, cut(grad, each.splits[key], rank), rtol=1e-3, atol=1e-6, msg=key
            )
    if kind == "partial":
        assert differences(steps, virtual_step(model, 2)) == []
    else:
        with pytest.raises(NotBuiltError, match=r"a virtual axis of .*q_norm\.weight"):
            virtual_step(model, 2)


def test_a_norm_for_each_head_in_a_list_is_refused() -> None:
    model = of_transformers("StableLm", qk_layernorm=True)
    with pytest.raises(
        NotBuiltError, match=r"(?s)self_attn' \(StableLmAttention\).*q_layernorm\.norms\.0\.weight"
    ) as error:
        prove(model, choose(model, 2))
    assert "\n" in str(error.value)


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`")
def test_the_magnitudes_of_dora_are_refused_and_rslora_is_right() -> None:
    """DoRA needs the norms of a whole layer's rows."""
    peft = pytest.importorskip("peft")
    options: dict[str, Any] = {"r": 4, "target_modules": TARGETS, "init_lora_weights": False}
    with torch.random.fork_rng():
        torch.manual_seed(1)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            dora = peft.get_peft_model(tiny("llama"), peft.LoraConfig(use_dora=True, **options))
        rslora = peft.get_peft_model(tiny("llama"), peft.LoraConfig(use_rslora=True, **options))
    with pytest.raises(
        NotBuiltError, match=r"(?s)self_attn' .LlamaAttention.*itself, which is split"
    ):
        prove(dora, choose(dora, 2))
    assert differences(ranks_step(rslora, 2), virtual_step(rslora, 2)) == []
