"""Updates in one pass over memory on an NVIDIA GPU.

NVRTC compiles `update.cu` while the optimizer is built, so that no step waits for it.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import cache, partial
from struct import Struct

import numpy as np
import torch
from torch import Tensor

from ..base.log import log_once
from ..base.quantities import ceil_div
from .check import Arrays, Chance, is_definition
from .cuda_source import THREADS, frame, header
from .nvidia import CudaError, Kernel, binary_for, compiled, driver, nvrtc
from .rules import VECTOR, Layout, Scalars, Variant

# The parameters of the kernel, with C's alignment: five arrays, `numel`, `is_aligned`, scalars,
# `Chance`, the factor, and the addresses of the factor, `skip` and the counter
PARAMETERS = Struct("@5Pqi8f6Qf3P")
_SCALARS = 8
_ALIGNMENT = 16  # Bytes that one instruction reads or writes


@cache
def why_not(device: torch.device) -> str | None:
    """Return why updates cannot be compiled for a device, for a log line.

    Returns:
        The reason; None if NVRTC and the driver are available.
    """
    if device.type != "cuda" or torch.version.cuda is None:
        return f"{device} is not an NVIDIA GPU"
    try:
        nvrtc()
        driver()
    except CudaError as error:
        return error.what.rstrip(".")
    return None


@cache
def compiled_for(
    variant: Variant, layout: Layout, scalar_count: int, capability: int, *, to_ptx: bool
) -> bytes:
    """Return the compiled kernel, as machine code or PTX.

    Args:
        variant: Optimizer rule and options, which select the formula.
        layout: Dtypes and form in which the shard is stored.
        scalar_count: Number of scalars of the formula.
        capability: The compute capability, as 90 for 9.0.
        to_ptx: Whether to return PTX.
    """
    headers = {"variant.h": header(variant, layout, scalar_count)}
    return compiled(frame(), headers, capability, to_ptx=to_ptx)


@cache
def _kernel(variant: Variant, layout: Layout, scalar_count: int, device: int) -> Kernel:
    major, minor = torch.cuda.get_device_capability(device)
    capability, to_ptx = binary_for(10 * major + minor)
    return Kernel(
        compiled_for(variant, layout, scalar_count, capability, to_ptx=to_ptx), "update", device
    )


def launch_of(
    columns: Sequence[Tensor],
    scalars: Scalars,
    factor: float | Tensor,
    chance: Chance,
    skip: Tensor | None = None,
    counter: Tensor | None = None,
) -> tuple[int, bytes]:
    """Return the number of blocks and the packed parameters of a launch.

    The arguments are those of `run`; `PARAMETERS` has the layout of the parameters.

    Args:
        columns: Gradient, main weight, other and two states.
        scalars: The result of `Rule.scalars`.
        factor: Number or device tensor by which the gradient is multiplied.
        chance: Random bits of stochastic rounding.
        skip: Device tensor that is not zero if the update must be skipped; None never skips.
        counter: Device tensor that counts updates, or None.
    """
    numel = columns[0].numel()
    pointers = [column.data_ptr() for column in columns]  # 0 for empty columns
    joined = 0
    for pointer in pointers:
        joined |= pointer
    is_aligned = joined % _ALIGNMENT == 0 and chance.element % VECTOR == 0
    number = 1.0
    address = 0
    if isinstance(factor, Tensor):
        address = factor.data_ptr()
    else:
        number = float(np.float32(factor))
    parameters = PARAMETERS.pack(
        *pointers,
        numel,
        is_aligned,
        *scalars,
        *[0.0] * (_SCALARS - len(scalars)),
        chance.element,
        chance.step,
        chance.seed,
        *chance.keys,
        number,
        address,
        0 if skip is None else skip.data_ptr(),
        0 if counter is None else counter.data_ptr(),
    )
    return ceil_div(numel, VECTOR * THREADS), parameters


def run(
    variant: Variant,
    layout: Layout,
    columns: Sequence[Tensor],
    scalars: Scalars,
    factor: float | Tensor,
    chance: Chance,
    skip: Tensor | None = None,
    counter: Tensor | None = None,
) -> None:
    """Queue the update of a shard on the current stream of its device.

    The host does not wait for the device. The last n % 8 of the n elements use the formula of a
    parameter's tail.

    Args:
        variant: Optimizer rule and options, which select the formula.
        layout: Dtypes and form in which the shard is stored.
        columns: Gradient, main weight, other and two states, as in `Arrays.columns`, contiguous.
            Columns that the layout or the variant lacks are empty.
        scalars: The result of `Rule.scalars`.
        factor: The factor by which the gradient is multiplied: a number, or an fp32 tensor of one
            element on the device.
        chance: The random bits, if the layout needs any. The shard then belongs to one parameter.
        skip: An fp32 tensor of one element on the device. If it is not zero, nothing is changed.
        counter: An fp32 tensor of one element on the device, which is incremented.

    Raises:
        CudaError: The kernel cannot be compiled, loaded or launched.
    """
    if columns[0].numel() == 0:
        return
    blocks, parameters = launch_of(columns, scalars, factor, chance, skip, counter)
    kernel = _kernel(variant, layout, len(scalars), columns[0].device.index)
    kernel.launch(blocks, THREADS, parameters)


def run_arrays(
    device: torch.device,
    variant: Variant,
    layout: Layout,
    arrays: Arrays,
    scalars: Scalars,
    factor: float,
    chance: Chance,
) -> None:
    """Update arrays in host memory on a device, for `check.is_definition`.

    Args:
        device: CUDA device on which the kernel runs.
        variant: Optimizer rule and options, which select the formula.
        layout: Dtypes and form in which the shard is stored.
        arrays: The arrays, which are changed in place.
        scalars: The result of `Rule.scalars`.
        factor: The factor by which the gradient is multiplied.
        chance: The random bits, if the layout needs any.
    """
    columns = [torch.from_numpy(column).to(device) for column in arrays.columns()]
    run(variant, layout, columns, scalars, factor, chance)
    for column, result in zip(arrays.columns(), columns, strict=True):
        np.copyto(column, result.cpu().numpy())


@cache
def is_exact(variant: Variant, layout: Layout, device: torch.device) -> bool:
    """Return whether the compiled kernel equals the definition bit for bit on a device.

    The call waits for the device.

    Args:
        variant: Optimizer rule and options, which select the formula.
        layout: Dtypes and form in which the shard is stored.
        device: CUDA device on which the kernel runs.
    """
    try:
        return is_definition(variant, layout, partial(run_arrays, device), "NVRTC", f"{device}")
    except CudaError as error:
        log_once(
            f"PyTorch computes the update of {variant.rule} on {device}, more slowly: {error}",
            logging.WARNING,
        )
        return False
