"""Codecs are compared with a reference written with whole-tensor operations."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from deepseek_zero.precision import codecs
from deepseek_zero.precision.codecs import LEAST_SCRATCH, SMALLEST_SCALE, Blocks, Cast, Signs
from deepseek_zero.precision.feedback import Feedback

CODECS = [Blocks(8, 256), Blocks(4, 128), Blocks(8, 32), Blocks(4, 512)]
LARGE = 1 << 14  # number of scratch elements
named = pytest.mark.parametrize("codec", CODECS, ids=str)


def coded(codec: Blocks | Cast, values: Tensor, scratch_numel: int = LARGE) -> Tensor:
    message = torch.empty(codec.length(values.numel()), dtype=codec.dtype)
    codec.encode(values, message, torch.empty(scratch_numel))
    return message


def decoded(
    codec: Blocks | Cast, message: Tensor, numel: int, dtype: torch.dtype = torch.float32
) -> Tensor:
    out = torch.full((numel,), 7.0, dtype=dtype)
    codec.decode(message, 0, numel, out, torch.empty(LARGE))
    return out


def values_of(codec: Blocks, blocks: int = 12) -> Tensor:
    """Return random values that vary a lot in magnitude within and between blocks."""
    shape = (blocks, codec.block)
    return (
        torch.randn(shape)
        * torch.exp(4 * torch.randn(shape))
        * torch.exp(9 * torch.randn(blocks, 1))
    ).view(-1)


def defined(codec: Blocks, values: Tensor) -> tuple[Tensor, Tensor]:
    """Return codes and scales by definition, with one row per block."""
    rows, largest = values.float().view(-1, codec.block), {8: 127, 4: 7}[codec.bits]
    scale = rows.abs().amax(1, keepdim=True) * torch.tensor(1 / largest)
    codes = (rows * (1 / scale)).round()
    is_zero = scale < SMALLEST_SCALE
    return codes.where(~is_zero, 0.0), scale.where(~is_zero, 0.0)


@named
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_codes_are_the_defined_ones_and_miss_a_value_by_half_a_scale_at_most(
    codec: Blocks, dtype: torch.dtype
) -> None:
    values = values_of(codec).clamp(-6e4, 6e4).to(dtype)
    codes, scale = defined(codec, values)
    message = coded(codec, values)
    count = values.numel() * codec.bits // 8
    assert torch.equal(message[count:].view(torch.float32), scale.view(-1))
    found, held = decoded(codec, message, values.numel()), message[:count].view(torch.int8)
    if codec.bits == 8:
        assert torch.equal(held.view_as(codes), codes.to(torch.int8))
    else:
        pairs = codes.to(torch.int8).view(-1, 2, codec.block)
        assert torch.equal(held.view(-1, codec.block), pairs[:, 0] + 16 * pairs[:, 1])
    assert torch.equal(found.view_as(codes), codes * scale)
    assert bool(((found - values.float()).abs().view_as(codes) <= scale * (0.5 + 2e-5)).all())
    assert bool((found[values == 0] == 0).all())
    assert torch.equal(decoded(codec, message, values.numel(), dtype), found.to(dtype))


def test_any_two_codes_of_four_bits_share_a_byte_and_no_zero_has_a_sign() -> None:
    codec, each = Blocks(4, 256), torch.arange(-7.0, 8.0)
    rows = torch.full((2, 256), 7.0)
    rows[:, : len(each) ** 2] = torch.cartesian_prod(each, each).T
    found = decoded(codec, coded(codec, rows.view(-1)), rows.numel()).view_as(rows)
    assert torch.equal(found, rows)
    assert not (found.signbit() & (found == 0)).any()


@named
def test_neither_the_size_of_a_tile_nor_the_part_that_is_decoded_changes_a_bit(
    codec: Blocks,
) -> None:
    values = values_of(codec, blocks=22)
    message = coded(codec, values)
    whole = decoded(codec, message, values.numel())
    smallest = LEAST_SCRATCH * codec.granule
    for scratch_numel in (smallest, 3 * smallest, smallest + 7):
        assert torch.equal(coded(codec, values, scratch_numel), message)
        start, stop, part = codec.granule, 4 * codec.granule, torch.empty(3 * codec.granule)
        codec.decode(message, start, stop, part, torch.empty(scratch_numel))
        assert torch.equal(part, whole[start:stop])
    half = 5 * codec.granule
    assert torch.equal(decoded(codec, coded(codec, values[:half]), half), whole[:half])


@named
@pytest.mark.parametrize("strange", [float("nan"), float("inf"), -float("inf")])
def test_a_nonfinite_value_makes_only_its_block_nan(codec: Blocks, strange: float) -> None:
    values = values_of(codec, blocks=4)
    expected = decoded(codec, coded(codec, values), values.numel()).view(4, -1)
    values[codec.block + 5] = strange
    found = decoded(codec, coded(codec, values), values.numel()).view(4, -1)
    assert bool(found[1].isnan().all())
    assert torch.equal(found[[0, 2, 3]], expected[[0, 2, 3]])


@named
def test_blocks_of_zeros_and_of_numbers_too_small_for_a_scale_are_exact_zeros(
    codec: Blocks,
) -> None:
    values = torch.zeros(4, codec.block)
    values[1] = 1e-40
    # The scale of this block is just below the smallest one.
    values[2] = SMALLEST_SCALE * {8: 126, 4: 6}[codec.bits]
    values[3, 0] = SMALLEST_SCALE * {8: 130, 4: 8}[codec.bits]
    found = decoded(codec, coded(codec, values.view(-1)), values.numel()).view_as(values)
    assert torch.equal(found[:3], torch.zeros(3, codec.block))
    assert torch.allclose(found[3, 0], values[3, 0], rtol=1e-3)


@named
def test_the_largest_numbers_stay_finite_and_keep_their_sign(codec: Blocks) -> None:
    values = torch.full((2, codec.block), torch.finfo(torch.float32).max)
    values[1, 1::2] *= -1
    found = decoded(codec, coded(codec, values.view(-1)), values.numel()).view_as(values)
    assert torch.allclose(found, values, rtol=1e-6) and bool(found.isfinite().all())


def test_a_message_has_the_length_of_the_table() -> None:
    assert Blocks(8, 256).nbytes(1 << 20) == 1.015625 * (1 << 20)
    assert Blocks(4, 128).nbytes(1 << 20) == 0.53125 * (1 << 20)
    assert Cast(torch.bfloat16).nbytes(1 << 20) == 2 << 20
    assert Blocks(4, 128).granule == Blocks(8, 256).granule == 256


def test_the_plain_codec_rounds_once() -> None:
    values, codec = torch.randn(1000), Cast(torch.bfloat16)
    message = coded(codec, values)
    assert torch.equal(message, values.bfloat16())
    assert torch.equal(decoded(codec, message, 1000), values.bfloat16().float())


@pytest.mark.parametrize("codec", [*CODECS, Cast(torch.bfloat16)], ids=str)
def test_a_message_may_be_written_in_parts_and_multiplied(codec: Blocks | Cast) -> None:
    values = torch.randn(8192)
    message = torch.empty(codec.length(8192), dtype=codec.dtype)
    for start in (5120, 0):
        stop = min(start + 5120, 8192)
        codec.encode(values[start:stop], message, torch.empty(LARGE), start)
    assert torch.equal(message, coded(codec, values))
    before = decoded(codec, message, 8192)
    codec.scale(message, 4.0)
    assert torch.equal(decoded(codec, message, 8192), 4 * before)


@pytest.mark.parametrize(
    "kept", [Cast(torch.float32), Cast(torch.bfloat16), Blocks(8, 256)], ids=str
)
def test_rounding_errors_are_sent_later_for_any_tile_and_nonfinite_ones_are_dropped(
    kept: Blocks | Cast,
) -> None:
    wire, numel = Blocks(4, 128), 4096
    values = torch.randn(20, numel).bfloat16()
    messages = []
    for scratch in (1 << 14, 1 << 15, 1 << 18):
        errors = Feedback(kept).zeros(2 * numel, torch.device("cpu"))
        total, message = torch.zeros(numel), torch.empty(wire.length(numel), dtype=torch.uint8)
        for each in values:
            errors.encode(wire, each, message, numel, torch.empty(scratch))
            total += decoded(wire, message, numel)
        messages.append((message.clone(), errors.memory))
        left = decoded(kept, errors.memory, 2 * numel)
        assert not left[:numel].any()
        missing = values.float().sum(0) - total
        torch.testing.assert_close(
            missing, left[numel:], atol=1e-4 if kept == Cast(torch.float32) else 0.2, rtol=0.0
        )
    assert all(
        torch.equal(mine, other)
        for pair in messages[1:]
        for mine, other in zip(pair, messages[0], strict=True)
    )
    strange = values[0].clone()
    strange[700] = float("inf")
    errors.encode(wire, strange, message, numel, torch.empty(LARGE))
    assert decoded(wire, message, numel)[640:768].isnan().all()
    left = decoded(kept, errors.memory, 2 * numel)[numel:]
    assert left.isfinite().all() and not left[640:768].any() and left[:640].any()


def test_signs_are_a_bit_each_and_one_scale_whatever_packs_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    codec, numel = Signs(), 1 << 17
    values = torch.randn(numel)
    values[numel - 100 :] = 0.0  # padding counts as positive
    values[:2] = torch.tensor([0.0, -0.0])
    scale = (values.double().square().sum() / (numel - 100)).sqrt().float()
    assert codec.length(numel) == numel // 8 + 4
    messages = []
    for packed_bits, bits_of in (
        (codecs._packed_bits, codecs._bits_of),
        (codecs._packed_there, codecs._bits_there),
    ):
        monkeypatch.setattr(codecs, "_packed_bits", packed_bits)
        monkeypatch.setattr(codecs, "_bits_of", bits_of)
        messages.append(torch.zeros(codec.length(numel), dtype=torch.uint8))
        codec.encode(values, messages[-1], numel - 100)
        out = torch.empty(numel)
        codec.decode(messages[-1], 0, numel, out)
        assert torch.equal(out, torch.where(values >= 0, scale, -scale))
        codec.decode(messages[-1], 32, 72, out[:40])
        assert torch.equal(out[:40], torch.where(values[32:72] >= 0, scale, -scale))
    assert torch.equal(*messages)
    for strange in (float("nan"), float("inf"), -float("inf")):
        values[5] = strange
        codec.encode(values, messages[0], numel)
        codec.decode(messages[0], 0, numel, out)
        assert not out.isfinite().any()
    codec.encode(torch.zeros(1024), messages[0][: codec.length(1024)], 0)
    codec.decode(messages[0][: codec.length(1024)], 0, 1024, out[:1024])
    assert not out[:1024].any()
