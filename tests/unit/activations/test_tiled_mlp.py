"""Feed-forward layers of transformers in tiles of their tokens: unmodified families, and what is
refused by name.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from deepseek_zero.activations.tiles import tile_mlps
from deepseek_zero.base.errors import NotBuiltError

FAMILIES = {
    "GPT2": {
        "n_embd": 32,
        "n_head": 4,
        "n_layer": 2,
        "n_positions": 32,
        "attn_pdrop": 0,
        "embd_pdrop": 0,
    },
    "Bloom": {"hidden_size": 32, "n_head": 4, "n_layer": 2},
    "Llama": {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
    },
    "GPTBigCode": {"n_embd": 32, "n_head": 4, "n_layer": 2, "attn_pdrop": 0, "embd_pdrop": 0},
}


def model_of(family: str) -> nn.Module:
    transformers = pytest.importorskip("transformers")
    more = {"resid_pdrop": 0} if family.startswith("GPT") else {}
    config = getattr(transformers, f"{family}Config")(vocab_size=67, **FAMILIES[family], **more)
    torch.manual_seed(0)
    found: nn.Module = transformers.AutoModelForCausalLM.from_config(config).train()
    return found


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("samples", [1, 3])
def test_unmodified_models_compute_the_same_in_tiles(family: str, samples: int) -> None:
    whole = model_of(family)
    tiled = copy.deepcopy(whole)
    tile_mlps(tiled, 3)
    ids = torch.randint(67, (samples, 8), generator=torch.Generator().manual_seed(1))
    losses = []
    for model in (whole, tiled):
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        losses.append(loss.item())
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)
    for (name, own), other in zip(tiled.named_parameters(), whole.parameters(), strict=True):
        assert (own.grad is None) == (other.grad is None), name
        if own.grad is not None and other.grad is not None:
            torch.testing.assert_close(own.grad, other.grad, rtol=1e-4, atol=1e-6)


class PlainMLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(4, 4)

    def forward(self, x: Tensor, residual: Any = None, *, scale: Any = 1) -> Any:
        return self.up(x) * scale + (0 if residual is None else residual)


class PairMLP(PlainMLP):
    def forward(self, x: Tensor, residual: Any = None, *, scale: Any = 1) -> Any:
        return self.up(x), x.mean()


class PooledMLP(PlainMLP):
    def forward(self, x: Tensor, residual: Any = None, *, scale: Any = 1) -> Any:
        return self.up(x).mean(-2)


class ConvolvedMLP(PlainMLP):
    def __init__(self) -> None:
        super().__init__()
        self.near = nn.Conv1d(4, 4, 3, padding=1)


class PointwiseMLP(PlainMLP):
    def __init__(self) -> None:
        super().__init__()
        self.point = nn.Conv1d(4, 4, 1)


class Net(nn.Module):
    def __init__(self, mlp: nn.Module) -> None:
        super().__init__()
        self.mlp = mlp


X = torch.randn(2, 7, 4, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize(
    ("mlp", "options", "said"),
    [
        (PairMLP, {}, "'mlp' cannot be cut into tiles of tokens: it returns tuple"),
        (PooledMLP, {}, r"'mlp' .* it returns \(2, 4\) for \(2, 3, 4\)"),
        (
            PlainMLP,
            {"residual": torch.ones(4)},
            r"'mlp' .* it is given tensors of the shapes \[\(2, 7, 4\), \(4,\)\]",
        ),
        (PlainMLP, {"scale": torch.ones(2, 1, 4)}, r"'mlp' .* which do not have the same tokens"),
        (ConvolvedMLP, {}, r"'mlp.near' \(Conv1d\) computes a token from others"),
    ],
)
def test_what_is_not_computed_token_by_token_is_refused_by_name(
    mlp: Any, options: Any, said: str
) -> None:
    with pytest.raises(NotBuiltError, match=said):
        net = Net(mlp())
        tile_mlps(net, 3)
        net.mlp(X, **options)


@pytest.mark.parametrize("kind", [PlainMLP, PointwiseMLP])
def test_tensors_next_to_the_input_are_cut_with_it(kind: type[nn.Module]) -> None:
    net = Net(kind())
    expected = net.mlp(X, X + 1, scale=X[..., :1])
    tile_mlps(net, 3)
    torch.testing.assert_close(net.mlp(X, X + 1, scale=X[..., :1]), expected)
    torch.testing.assert_close(net.mlp(X, X + 1, scale=2), net.mlp.eval()(X, X + 1, scale=2))
