"""Codecs encode and decode with the same bits on a GPU as on a CPU; skipped without a GPU.

The bits of a NaN scale depend on the device; only the fact that it is NaN is compared.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from deepseek_zero.precision.codecs import SMALLEST_SCALE, Blocks, Cast, Signs, codec_scratch

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
CPU, DEVICE = torch.device("cpu"), torch.device("cuda")
CODECS = [
    Blocks(8, 256),
    Blocks(4, 128),
    Blocks(8, 32),
    Blocks(4, 512),
    Cast(torch.bfloat16),
    Cast(torch.float16),
]
BLOCK, BLOCKS = 512, 64  # The values are whole blocks of every codec.


def values_of(dtype: torch.dtype) -> Tensor:
    """Return blocks with very different magnitudes, zeros, tiny scales and non-finite values."""
    shape = (BLOCKS, BLOCK)
    wide = (
        torch.randn(shape)
        * torch.exp(4 * torch.randn(shape))
        * torch.exp(9 * torch.randn(BLOCKS, 1))
    )
    found = wide.clamp(-6e4, 6e4).to(dtype)
    found[1] = 0.0
    found[2, ::2] = -0.0
    found[3] = torch.finfo(dtype).smallest_normal / 8
    # its scale is too small for 8 bits and just large enough for 4 bits
    found[4] = SMALLEST_SCALE * 6.5
    found[5], found[5, 7] = 0.0, torch.finfo(dtype).max
    found[6, 3], found[7, 300], found[8, 511] = float("nan"), float("inf"), -float("inf")
    return found.view(-1)


def same(left: Tensor, right: Tensor) -> bool:
    """Return whether two tensors have the same bits, and NaN in the same places."""
    left, right = left.cpu(), right.cpu()
    if not left.dtype.is_floating_point:
        return torch.equal(left, right)
    bits = {2: torch.int16, 4: torch.int32}[left.element_size()]
    left_nan, right_nan = left.isnan(), right.isnan()
    kept, others = left.masked_fill(left_nan, 0.0), right.masked_fill(right_nan, 0.0)
    return torch.equal(left_nan, right_nan) and torch.equal(kept.view(bits), others.view(bits))


def parts_of(codec: Blocks | Cast, message: Tensor) -> tuple[Tensor, ...]:
    """Return the codes and the scales of a message, or its values."""
    return (message,) if isinstance(codec, Cast) else codec._parts(message)


def room(codec: Blocks | Cast, numel: int, device: torch.device) -> Tensor:
    return (
        codec_scratch(codec, numel, device)
        if isinstance(codec, Blocks)
        else torch.empty(0, device=device)
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("codec", CODECS, ids=str)
def test_messages_and_what_is_read_out_of_them_are_those_of_a_cpu(
    codec: Blocks | Cast, dtype: torch.dtype
) -> None:
    values, messages = values_of(dtype), dict[torch.device, Tensor]()
    numel = values.numel()
    for device in (CPU, DEVICE):
        messages[device] = torch.empty(codec.length(numel), dtype=codec.dtype, device=device)
        codec.encode(values.to(device), messages[device], room(codec, numel, device))
    for mine, other in zip(
        *(parts_of(codec, message) for message in messages.values()), strict=True
    ):
        assert same(mine, other)
    for into in (torch.float32, dtype):
        found = []
        for device, message in messages.items():
            out = torch.full((numel,), 7.0, dtype=into, device=device)
            codec.decode(message, 0, numel, out, room(codec, numel, device))
            found.append(out)
        assert same(*found)
        if isinstance(codec, Blocks):
            is_lost = found[1].view(-1, BLOCK).isnan()
            assert (
                is_lost[6:9].any(1).all() and not is_lost[1:6].any() and not found[1].isinf().any()
            )


def test_signs_and_their_scale_are_those_of_a_cpu() -> None:
    codec, values = Signs(), torch.randn(BLOCKS * BLOCK)
    values[:3], values[-100:] = torch.tensor([0.0, -0.0, 1e-40]), 0.0
    for strange in (None, float("nan")):
        if strange is not None:
            values[9] = strange
        messages, found = [], []
        for device in (CPU, DEVICE):
            messages.append(
                torch.zeros(codec.length(values.numel()), dtype=torch.uint8, device=device)
            )
            codec.encode(values.to(device), messages[-1], values.numel() - 100)
            found.append(torch.empty(values.numel(), device=device))
            codec.decode(messages[-1], 0, values.numel(), found[-1])
        assert same(messages[0][:-4], messages[1][:-4]) and same(*found)
