"""The tiled kernel against reference attention: values, gradients, memory and determinism."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from deepseek_zero.attention import rows
from deepseek_zero.attention.attend import attend
from deepseek_zero.attention.layer import SparseAttention
from deepseek_zero.attention.layouts import (
    BigBird,
    BlockLayout,
    BSLongformer,
    Dense,
    Fixed,
    Listed,
    LocalSlidingWindow,
    Variable,
)
from deepseek_zero.attention.plan import (
    AttentionShape,
    Pattern,
    best_plan,
    groups_of,
    whole_mask,
)
from deepseek_zero.attention.rows import attend_by_plan
from deepseek_zero.base.device import cpu_attention
from deepseek_zero.base.errors import UsageError
from deepseek_zero.report.memory_trace import MemoryTrace
from tests.unit.attention.dense import apart, dense, seen_of, tensors, with_gradients

BLOCK = 16
LENGTHS = [1, BLOCK - 1, BLOCK, 3 * BLOCK + 5]
UNI: dict[str, Any] = {"attention": "unidirectional"}
LAYOUTS: list[BlockLayout] = [
    Dense(),
    Dense(**UNI),
    Fixed(horizontal_global_attention=True),
    Fixed(num_local_blocks=2, **UNI),
    Fixed(different_layout_per_head=True, num_different_global_patterns=4, **UNI),
    Variable(num_random_blocks=1, local_window_blocks=(1, 2)),
    Variable(num_random_blocks=1, local_window_blocks=(1, 2), **UNI),
    BigBird(different_layout_per_head=True),
    BigBird(**UNI),
    BSLongformer(global_block_indices=(1,)),
    BSLongformer(**UNI),
    LocalSlidingWindow(attention="bidirectional"),
    LocalSlidingWindow(),
]


def by_tiles(
    given: list[Tensor], pattern: Pattern, biases: Any = (), tile: int = 32, *, kernel: bool = True
) -> Tensor:
    query, key, value, _ = given
    groups = groups_of(pattern, AttentionShape.of(query, key), tile)
    with pytest.MonkeyPatch.context() as patch:
        if not kernel:
            patch.setattr(rows, "_fits_kernel", lambda *tensors: False)
        return attend_by_plan(query, key, value, groups, query.shape[-1] ** -0.5, biases)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_each_layout_is_dense_attention_under_its_mask(layout: BlockLayout) -> None:
    pattern = Pattern.of(layout)
    for length in LENGTHS:
        for key_heads, samples, padded in (
            (4, 1, False),
            (2, 2, False),
            (4, 2, True),
            (1, 2, True),
        ):
            given = tensors(samples, 4, key_heads, length, length, 8)
            kept = torch.arange(length) < torch.tensor([[length], [max(length - 3, 0)]])
            biases = [kept[:samples, None, None]] if padded else []
            expected = with_gradients(dense(*given[:3], pattern, biases), given)
            for kernel in (True, False):
                found = with_gradients(by_tiles(given, pattern, biases, kernel=kernel), given)
                assert apart(found, expected) < 1e-12, (length, key_heads, samples, padded, kernel)


@pytest.mark.parametrize("layout", [LAYOUTS[4], LAYOUTS[5], LAYOUTS[8]])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_thousand_tokens_in_16_bits_are_as_accurate_as_dense_attention(
    layout: BlockLayout, dtype: torch.dtype
) -> None:
    pattern = Pattern.of(layout)
    given = tensors(1, 2, 1, 1000, 1000, 8, dtype)
    exact = with_gradients(dense(*(each.double() for each in given[:3]), pattern), exact_of(given))
    found = with_gradients(attend(*given[:3], pattern), given)
    assert [each.dtype for each in found] == [dtype] * 4
    if dtype == torch.float32:
        assert apart(found[:1], exact[:1]) < 2e-6 and apart(found, exact) < 1e-5
        return
    mask = seen_of(pattern, 2, 1000, 1000)[None]
    key, value = (each.repeat_interleave(2, 1) for each in given[1:3])
    torchs = with_gradients(
        torch.nn.functional.scaled_dot_product_attention(given[0], key, value, mask), given
    )
    for ours, theirs, right in zip(found, torchs, exact, strict=True):
        assert (ours - right).norm() <= 1.5 * (theirs - right).norm()


def exact_of(given: list[Tensor]) -> list[Tensor]:
    return [*given[:3], given[3].double()]


@pytest.mark.parametrize("window", [1, 7, 40, 500])
@pytest.mark.parametrize("key_heads", [4, 2])
def test_windows_go_as_batches_of_tiles(window: int, key_heads: int) -> None:
    given = tensors(2, 4, key_heads, 300, 300, 8)
    pattern = Pattern.of(None, is_causal=True, window=window)
    tiles = groups_of(pattern, AttentionShape(4, key_heads, 300, 300), 32)[0].tiles
    assert max(tile.count for tile in tiles) >= (7 if window < 100 else 1)
    expected = with_gradients(dense(*given[:3], pattern), given)
    assert apart(with_gradients(by_tiles(given, pattern), given), expected) < 1e-12
    both = Pattern.of(None, reach=window)
    expected = with_gradients(dense(*given[:3], both), given)
    assert apart(with_gradients(by_tiles(given, both, kernel=False), given), expected) < 1e-12


def test_queries_are_the_last_of_the_keys() -> None:
    for layout in (LAYOUTS[4], LAYOUTS[7]):
        pattern, given = Pattern.of(layout, window=50), tensors(2, 4, 4, 37, 101, 8)
        expected = with_gradients(dense(*given[:3], pattern), given)
        assert apart(with_gradients(by_tiles(given, pattern), given), expected) < 1e-12


def test_gradients_are_those_of_finite_differences() -> None:
    given = tensors(1, 2, 1, 11, 11, 2)
    bias = torch.randn(1, 2, 11, 11, dtype=torch.float64, requires_grad=True)
    pattern = Pattern.of(Fixed(block=2, num_local_blocks=2, attention="unidirectional"))
    assert torch.autograd.gradcheck(lambda *each: attend(*each, pattern), given[:3], eps=1e-6)
    assert torch.autograd.gradcheck(
        lambda *each: attend(*each[:3], pattern, biases=each[3:]), [*given[:3], bias], eps=1e-6
    )


def test_biases_of_scores_have_a_gradient() -> None:
    given, pattern = tensors(2, 4, 2, 53, 53, 8), Pattern.of(LAYOUTS[5])
    noise = torch.Generator().manual_seed(3)
    for shape in ((1, 4, 53, 53), (2, 1, 53, 53), (1, 4, 1, 53), (2, 4, 53, 1)):
        bias = torch.randn(shape, generator=noise, dtype=torch.float64, requires_grad=True)
        outs = by_tiles(given, pattern, [bias]), dense(*given[:3], pattern, [bias])
        found, expected = (torch.autograd.grad(each, [*given[:3], bias], given[3]) for each in outs)
        assert apart(found, expected) < 1e-12, shape
        frozen = with_gradients(by_tiles(given, pattern, [bias.detach()]), given)
        assert apart(frozen[1:], expected[:3]) < 1e-12, shape


def test_a_query_without_keys_gets_zeros_and_no_gradient() -> None:
    table = torch.ones(1, 4, 4, dtype=torch.bool)
    table[0, 1] = False
    for pattern, hidden in (
        (Pattern(Listed(seen=table)), slice(16, 32)),
        (Pattern(ahead=0), slice(0, 5)),
    ):
        given = tensors(1, 2, 2, 64, 64, 8, torch.float32)
        kept = (torch.arange(64) >= 5)[None, None, None]
        for kernel in (True, False):
            out, of_query, *others = with_gradients(
                by_tiles(given, pattern, [kept], kernel=kernel), given
            )
            assert (
                out[:, :, hidden].count_nonzero() == 0
                and of_query[:, :, hidden].count_nonzero() == 0
            )
            assert out[:, :, 40:].all() and all(each.isfinite().all() for each in others)


@pytest.mark.parametrize("dropout", [0.0, 0.5])
@pytest.mark.parametrize("keys", [0, 5])
def test_no_queries_give_an_empty_output(keys: int, dropout: float) -> None:
    query, key, value = (torch.ones(1, 2, length, 8) for length in (0, keys, keys))
    query.requires_grad_()
    found = SparseAttention(BigBird())(query, key, value, dropout=dropout)
    found.sum().backward()
    assert found.shape == query.shape
    assert query.grad is not None


def test_the_same_inputs_give_the_same_bits_and_other_layouts_other_numbers() -> None:
    given = tensors(1, 4, 2, 200, 200, 16, torch.float32)
    pattern = Pattern.of(BigBird(different_layout_per_head=True))
    first, again = (with_gradients(attend(*given[:3], pattern), given) for _ in range(2))
    assert all(torch.equal(one, other) for one, other in zip(first, again, strict=True))
    other = attend(*given[:3], Pattern.of(BigBird(different_layout_per_head=True, seed=1)))
    assert not torch.equal(first[0], other)


class Largest(TorchDispatchMode):
    """Record the largest number of elements in the output of an operation."""

    numel = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        for each in found if isinstance(found, tuple | list) else [found]:
            if isinstance(each, Tensor):
                self.numel = max(self.numel, each.untyped_storage().nbytes() // each.element_size())
        return found


@pytest.mark.parametrize(
    ("layout", "padded"),
    [(Dense(**UNI), True), (LAYOUTS[3], False), (LAYOUTS[8], True), (LAYOUTS[5], False)],
)
def test_no_buffer_has_the_size_of_queries_times_keys(layout: BlockLayout, padded: bool) -> None:
    length = 2048
    given = tensors(1, 1, 1, length, length, 4, torch.float32)
    biases = [(torch.arange(length) < 2000)[None, None, None]] if padded else []
    best_plan.cache_clear()
    with Largest() as watched:
        attend(*given[:3], Pattern.of(layout), biases=biases).backward(given[3])
    assert watched.numel <= length * length // 8


def test_65536_tokens_with_a_window_take_128_mib_beyond_the_inputs() -> None:
    query, key, value, grad = (torch.randn(1, 1, 65536, 64).requires_grad_() for _ in range(4))
    trace = MemoryTrace(dict, lambda: "step")
    with trace.recording():
        out = attend(query, key, value, Pattern.of(None, is_causal=True, window=512))
        torch.autograd.grad(out, (query, key, value), grad.detach())
    assert 64 << 20 < trace.peak_bytes <= 128 << 20  # The output and three gradients take 64 MiB.


def test_plans_are_shared_by_equal_layouts_and_by_no_others() -> None:
    shape = AttentionShape(4, 4, 256, 256)
    first = best_plan(Pattern.of(Variable(local_window_blocks=(2, 3))), shape, (64,))
    assert best_plan(Pattern.of(Variable(local_window_blocks=(2, 3))), shape, (64,)) is first
    assert best_plan(Pattern.of(Variable(local_window_blocks=(3, 2))), shape, (64,)) is not first
    assert whole_mask(Pattern.of(LAYOUTS[7]), shape).equal(
        seen_of(Pattern.of(LAYOUTS[7]), 4, 256, 256)
    )


def test_tiles_cover_every_query_once_and_read_its_visible_keys() -> None:
    for layout in LAYOUTS:
        pattern, shape = Pattern.of(layout, window=90), AttentionShape(4, 2, 100, 131)
        seen, tiled = seen_of(pattern, 4, 100, 131), torch.zeros(4, 100, 131, dtype=torch.bool)
        for group in groups_of(pattern, shape, 64):
            for tile in (each.at(place) for each in group.tiles for place in range(each.count)):
                keys = torch.cat([torch.arange(*span) for span in tile.spans])
                mask = (
                    torch.ones(tile.queries, tile.keys, dtype=torch.bool)
                    if tile.mask is None
                    else tile.mask.seen()
                )
                mask = mask.tril() if tile.is_square else mask
                for head in range(*group.heads.indices(4)):
                    assert not tiled[head, tile.start : tile.stop].any()
                    tiled[head, tile.start : tile.stop, keys] = mask
        assert torch.equal(tiled, seen), layout


def test_torchs_kernel_has_the_pinned_signature() -> None:
    kernel = cpu_attention()
    assert kernel is not None
    forward, backward = (each.default for each in kernel)
    assert str(forward._schema).partition("(")[2] == (
        "Tensor query, Tensor key, Tensor value, float dropout_p=0., bool is_causal=False, *, "
        "Tensor? attn_mask=None, float? scale=None) -> (Tensor output, Tensor logsumexp)"
    )
    assert str(backward._schema).partition("(")[2] == (
        "Tensor grad_out, Tensor query, Tensor key, Tensor value, Tensor out, Tensor logsumexp, "
        "float dropout_p, bool is_causal, *, Tensor? attn_mask=None, float? scale=None) -> (Tensor "
        "grad_query, Tensor grad_key, Tensor grad_value)"
    )


def test_values_of_another_width_and_gradients_of_one_number() -> None:
    query, key, _, _ = tensors(1, 2, 2, 40, 40, 8)
    value = torch.randn(1, 2, 40, 5, dtype=torch.float64, requires_grad=True)
    pattern = Pattern.of(LAYOUTS[3])
    outs = attend(query, key, value, pattern), dense(query, key, value, pattern)
    found, expected = (torch.autograd.grad(each.sum(), (query, key, value)) for each in outs)
    assert outs[0].shape == (1, 2, 40, 5) and apart(found, expected) < 1e-12
    summed = attend(query, key, key, pattern).sum()
    assert (
        apart(
            torch.autograd.grad(summed, query),
            torch.autograd.grad(dense(query, key, key, pattern).sum(), query),
        )
        < 1e-12
    )


def test_shapes_that_do_not_fit_are_refused() -> None:
    query, key, value, _ = tensors(1, 4, 2, 8, 8, 4)
    for given in (
        (query, key[:, :, :4], value[:, :, :4]),
        (query, key[..., :2], value),
        (query[:, :3], key, value),
    ):
        with pytest.raises(UsageError, match="attention of queries"):
            attend(*given, Pattern())
        with pytest.raises(UsageError, match="attention of queries"):
            SparseAttention(Dense())(*given, dropout=0.1)
    with pytest.raises(UsageError, match="a bias or mask of"):
        attend(query, key, value, Pattern(), biases=[torch.zeros(1, 1, 1, 7)])


@pytest.mark.parametrize("key_heads", [4, 2])
@pytest.mark.parametrize("has_bias", [False, True])
def test_a_batch_without_samples_has_an_empty_output_and_gradient(
    key_heads: int, has_bias: bool
) -> None:
    query = torch.zeros(0, 4, 8, 4, requires_grad=True)
    key = torch.zeros(0, key_heads, 8, 4)
    groups = groups_of(Pattern(ahead=0), AttentionShape(4, key_heads, 8, 8), 4)
    biases = (torch.zeros(0, 4, 8, 8),) if has_bias else ()
    out = attend_by_plan(query, key, key, groups, 0.5, biases)
    out.sum().backward()
    assert query.grad is not None and query.grad.shape == out.shape == query.shape
