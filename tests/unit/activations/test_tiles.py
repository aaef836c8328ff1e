"""Tiles of sequences and MLPs: results equal those without tiles; memory is that of one tile."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from deepseek_zero.activations.tiles import each_tile, fp32_sums, in_tiles, tile_mlps
from deepseek_zero.base.errors import NotBuiltError, UsageError
from deepseek_zero.compat.deepspeed.sequence_tiles import (
    SequenceTiledCompute,
    TiledFusedLogitsLoss,
    TiledMLP,
    sequence_tiled_compute,
)
from tests.plain import seeded
from tests.ranks.test_init import Peak

WIDTH, HIDDEN, VOCABULARY = 16, 48, 31


class Mlp(nn.Module):
    def __init__(self, width: int = WIDTH, hidden: int = HIDDEN) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, hidden), nn.Linear(hidden, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x)))


def tokens(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def gradients(
    module: nn.Module, compute: Callable[[nn.Module, Tensor], Tensor], x: Tensor
) -> list[Tensor]:
    """Return the output of `compute` and the gradients of the input and the weights."""
    own, given = copy.deepcopy(module), x.clone().requires_grad_()
    found = compute(own, given)
    (found * tokens(*found.shape, seed=1)).sum().backward()
    return [
        found.detach(),
        *(each.grad for each in (given, *own.parameters()) if each.grad is not None),
    ]


@pytest.mark.parametrize("length", [8, 7, 2])
def test_tiles_have_the_bits_of_the_same_blocks_without_recomputation(length: int) -> None:
    module, x = seeded(Mlp), tokens(2, length, WIDTH)
    found = gradients(module, lambda own, given: in_tiles(own, 4, given), x)
    blocks = gradients(
        module, lambda own, given: torch.cat([own(each) for each in given.chunk(4, 1)], 1), x
    )
    whole = gradients(module, lambda own, given: own(given), x)
    assert len(found) == len(blocks) == 6
    for own, block, plain in zip(found, blocks, whole, strict=True):
        assert torch.equal(own, block)
        torch.testing.assert_close(own, plain, rtol=1e-6, atol=2e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_gradients_of_16_bits_are_added_up_in_fp32_and_rounded_once(dtype: torch.dtype) -> None:
    module, x = seeded(Mlp).to(dtype), tokens(1, 64, WIDTH).to(dtype)
    arriving, tiles = tokens(1, 64, WIDTH, seed=1).to(dtype), 32

    def in_fp32(own: nn.Module, given: Tensor) -> Tensor:
        with fp32_sums(own) as reading:
            return in_tiles(reading(own), tiles, given)

    def summed(compute: Callable[[nn.Module, Tensor], Tensor], times: int) -> list[Tensor]:
        own = copy.deepcopy(module)
        found = compute(own, x)
        for left in reversed(range(times)):
            found.backward(arriving, retain_graph=left > 0)
        assert type(own.up.weight) is nn.Parameter, "the module has its weights back"
        return [param.grad for param in own.parameters() if param.grad is not None]

    totals = [torch.zeros_like(param, dtype=torch.float32) for param in module.parameters()]
    for part, grad in reversed(list(zip(x.chunk(tiles, 1), arriving.chunk(tiles, 1), strict=True))):
        given = torch.autograd.grad(module(part), list(module.parameters()), grad)
        for total, each in zip(totals, given, strict=True):
            total += each
    expected = [total.to(dtype) for total in totals]
    assert all(map(torch.equal, summed(in_fp32, 1), expected))
    assert all(map(torch.equal, summed(in_fp32, 2), [each * 2 for each in expected])), (
        "once per backward"
    )
    in_16 = summed(lambda own, given: in_tiles(own, tiles, given), 1)
    assert not any(map(torch.equal, in_16, expected)), "autograd's own sum is another one"


def test_a_weights_gradient_arrives_once() -> None:
    module, arrived = seeded(Mlp), list[Tensor]()
    module.up.weight.register_post_accumulate_grad_hook(arrived.append)  # type: ignore[union-attr]
    in_tiles(module, 4, tokens(2, 8, WIDTH)).sum().backward()
    assert len(arrived) == 1


def test_one_tile_is_in_memory_at_a_time() -> None:
    module, peaks = Mlp(64, 1024), list[int]()
    x = tokens(1, 256, 64)
    for compute in (module, lambda given: in_tiles(module, 8, given)):
        with Peak() as peak:
            compute(x.clone().requires_grad_()).sum().backward()
        module.zero_grad()
        peaks.append(peak.peak)
    hidden = 256 * 1024 * 4
    # Without tiles, a linear layer and the activation keep their outputs for all tokens.
    assert peaks[0] - peaks[1] > 2 * hidden * 0.75, peaks


def test_tiles_of_unequal_tensors_are_refused() -> None:
    with pytest.raises(UsageError, match=r"2 tiles of tensors of \[4, 3\] tokens"):
        each_tile(torch.add, 2, tokens(1, 4), tokens(1, 3))
    with pytest.raises(UsageError, match="choose 1 tile or more"):
        in_tiles(torch.sin, 0, tokens(1, 4))


# -- DeepSpeed's names


def plain(module: Any, x: Tensor) -> Tensor:
    return Mlp.forward(module, x)


@pytest.mark.parametrize("batch", [1, 2])
def test_deepspeeds_names_compute_the_same(batch: int) -> None:
    module, x = seeded(Mlp), tokens(batch, 7, WIDTH)

    def by_places(own: nn.Module, given: Tensor) -> Tensor:
        return SequenceTiledCompute.apply(
            plain, 7, 4, ["x"], ["module"], "x", [], 1, None, given, own
        )

    def by_words(own: nn.Module, given: Tensor) -> Tensor:
        return sequence_tiled_compute(
            plain,
            7,
            4,
            {"x": given},
            {"module": own},
            "x",
            list(own.parameters()),
            output_reduction=None,
        )

    expected = gradients(module, lambda own, given: in_tiles(own, 4, given), x)
    for compute in (
        by_places,
        by_words,
        lambda own, given: TiledMLP.apply(plain, own, given, 4, []),
    ):
        for found, wanted in zip(gradients(module, compute, x), expected, strict=True):
            assert torch.equal(found, wanted)
    flat = gradients(module, lambda own, given: TiledMLP.apply(plain, own, given[0], 4), x)
    assert flat[0].shape == (7, WIDTH)


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_the_tiled_loss_is_the_loss(reduction: str) -> None:
    head, x = seeded(lambda: nn.Linear(WIDTH, VOCABULARY)), tokens(2, 8, WIDTH)
    labels = torch.arange(16).view(2, 8)
    kept = torch.ones(2, 8)

    def loss(module: Any, given: Tensor, wanted: Tensor, mask: Tensor | None = None) -> Tensor:
        losses = F.cross_entropy(module(given), wanted, reduction="none")
        return (losses if mask is None else losses * mask).sum() / (4 if reduction == "mean" else 1)

    def tiled(own: nn.Module, given: Tensor, *mask: Tensor) -> Tensor:
        return TiledFusedLogitsLoss.apply(
            loss, own, given, labels, *(mask or (None,)), 4, [], reduction
        )

    def whole(own: nn.Module, given: Tensor) -> Tensor:
        return F.cross_entropy(own(given).flatten(0, 1), labels.flatten(), reduction=reduction)

    def summed(own: nn.Module, given: Tensor) -> Tensor:
        return sequence_tiled_compute(
            lambda x, y: F.cross_entropy(own(x).flatten(0, 1), y.flatten(), reduction=reduction),
            8, 4, {"x": given, "y": labels}, {}, "x", [], 0, reduction,
        )  # fmt: skip

    expected = gradients(head, whole, x)
    for compute in (tiled, lambda own, given: tiled(own, given, kept), summed):
        for found, wanted in zip(gradients(head, compute, x), expected, strict=True):
            torch.testing.assert_close(found, wanted, rtol=1e-6, atol=1e-6)


class Counted(nn.Linear):
    """A linear layer that counts its forward calls."""

    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return super().forward(x)


def summed_loss(module: Any, given: Tensor, wanted: Tensor) -> Tensor:
    return F.cross_entropy(module(given).float(), wanted, reduction="sum")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("factor", [1.0, -0.25, 4096.0])
def test_weights_that_are_named_get_their_gradients_in_forward_times_any_factor(
    dtype: torch.dtype, factor: float
) -> None:
    head, x, labels = (
        seeded(lambda: Counted(WIDTH, VOCABULARY)).to(dtype),
        tokens(2, 9, WIDTH),
        torch.arange(18),
    )
    found = []
    for tiles in (5, 1):  # 18 tokens in 5 tiles: the last one has two
        own, given = copy.deepcopy(head), x.to(dtype, copy=True).requires_grad_()
        named = [own.weight, own.bias, own.weight] if tiles > 1 else None
        loss = TiledFusedLogitsLoss.apply(
            summed_loss, own, given, labels.view(2, 9), None, tiles, named, "mean"
        )
        (loss * factor).backward(retain_graph=True)
        (loss * factor).backward()
        assert (
            own.calls == tiles
            if tiles > 1 and dtype in (torch.float32, torch.bfloat16)
            else own.calls > tiles
        )
        found.append([loss * tiles, *(each.grad * tiles for each in (given, own.weight, own.bias))])  # type: ignore[operator]
    room = {torch.bfloat16: 2**-6, torch.float16: 2**-8}.get(dtype, 2e-6)
    for ours, whole in zip(*found, strict=True):
        assert ours.dtype == whole.dtype and (ours - whole).abs().max() <= room * whole.abs().max()


def test_other_tensors_that_a_tiled_loss_reads_get_gradients() -> None:
    """The backward recomputes the loss if it reads other tensors or if a weight has hooks."""
    x, labels = tokens(2, 8, WIDTH), torch.arange(16).view(2, 8)
    for reads in ("a weight that is not named", "a hook"):
        head, scale = seeded(lambda: Counted(WIDTH, VOCABULARY)), torch.ones((), requires_grad=True)
        expected = gradients(
            head, lambda own, given: summed_loss(own, given.flatten(0, 1), labels.flatten()), x
        )
        if reads == "a hook":
            head.weight.register_hook(torch.clone)
        factor = 1.0 if reads == "a hook" else scale

        def loss(module: Any, given: Tensor, wanted: Tensor, factor: Any = factor) -> Tensor:
            return summed_loss(module, given, wanted) * factor

        given = x.clone().requires_grad_()
        total = TiledFusedLogitsLoss.apply(
            loss, head, given, labels, None, 4, list(head.parameters()), "sum"
        )
        (total * tokens(seed=1)).backward()
        for found, wanted in zip(
            (total, given.grad, head.weight.grad, head.bias.grad), expected, strict=True
        ):
            torch.testing.assert_close(found, wanted, rtol=1e-6, atol=1e-6)
        assert (scale.grad is not None) == (reads != "a hook")
        assert head.calls == 8 + (reads != "a hook"), (
            "whether there are others, the first tile tells"
        )


@pytest.mark.parametrize("named", [False, True])
def test_the_tiled_loss_needs_no_logits_of_all_tokens(named: bool) -> None:
    head, x, labels = nn.Linear(8, 4096), tokens(1, 64, 8), torch.zeros(1, 64, dtype=torch.long)
    weights = list(head.parameters()) if named else []
    with Peak() as peak:
        TiledFusedLogitsLoss.apply(
            summed_loss, head, x.requires_grad_(), labels, None, 16, weights, "sum"
        ).backward()
    logits = 64 * 4096 * 4
    assert peak.peak < logits, (peak.peak, logits)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"output_reduction": "none"}, 'valid values are: "mean"/"sum"'),
        ({"x": torch.ones(4)}, "x must be at least 2D"),
        ({"y": torch.ones(4)}, "y must be at least 2D"),
        ({"y": torch.ones(2, 3)}, "x and y batch/seq dims must match"),
        ({"mask": torch.ones(2)}, "mask must be 2D"),
        ({"mask": torch.ones(2, 3)}, "mask shape must match x and y"),
    ],
)
def test_an_invalid_tiled_loss_raises_deepspeeds_error(change: dict[str, Any], words: str) -> None:
    given: dict[str, Any] = {
        "fn": plain,
        "self": None,
        "x": torch.ones(2, 4, 3),
        "y": torch.ones(2, 4),
        "mask": None,
        "shards": 2,
        "compute_params": [],
        "output_reduction": "sum",
    }
    with pytest.raises(ValueError, match=words):
        TiledFusedLogitsLoss.apply(**given | change)
    with pytest.raises(ValueError, match="unknown value max"):
        sequence_tiled_compute(plain, 4, 2, {}, {}, "x", [], 1, "max")


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
def test_layers_that_mix_tokens_are_refused_by_name(mlp: Any, options: Any, said: str) -> None:
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


def test_a_second_call_sets_the_number_of_tokens() -> None:
    net = Net(PlainMLP())
    expected = net.mlp(X)
    for rows in (3, 2):
        tile_mlps(net, rows)
        assert net.mlp.tile_rows == rows
        torch.testing.assert_close(net.mlp(X), expected)


def test_tiles_without_rows_are_refused() -> None:
    net = Net(PlainMLP())
    with pytest.raises(UsageError, match="tiles of 0 rows"):
        tile_mlps(net, 0)
    assert type(net.mlp) is PlainMLP
