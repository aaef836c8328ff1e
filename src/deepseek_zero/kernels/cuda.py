"""Updates in one pass over memory on an NVIDIA GPU: `update.cu`, compiled by NVRTC at the first
update.
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
from .check import Arrays, Chance, is_definition
from .cuda_source import THREADS, frame, header
from .nvidia import CudaError, Kernel, binary_for, compiled, driver, nvrtc
from .rules import VECTOR, Layout, Scalars, Variant

# The kernel's parameters, with C's alignment: five arrays, `numel`, `is_aligned`, scalars, chance,
# the factor, and the addresses of the factor, the flag and the counter
PARAMETERS = Struct("@5Pqi8f6Qf3P")
_SCALARS = 8
_ALIGNMENT = 16  # bytes that one instruction reads or writes


@cache
def why_not(device: torch.device) -> str | None:
    """Return why nothing can be compiled for a device, for a log line; None if NVRTC and the driver
    are there.
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
    """Return the kernel for devices of a compute capability, as machine code or as PTX."""
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
    """Return the number of blocks and the parameters of the kernel `update`, as `PARAMETERS` has
    them.
    """
    numel = columns[0].numel()
    pointers = [column.data_ptr() for column in columns]  # 0 of an empty one
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
    return -(-numel // (VECTOR * THREADS)), parameters


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
    """Queue the update of a shard on the current stream of its device. Nothing waits for the
    device.

    The last n % 8 of its n elements get the formula of a parameter's tail.

    Args:
        variant: Which formula.
        layout: How the shard is stored.
        columns: Gradient, main weight, other and two states, as `check.Arrays.columns` has them,
            contiguous. Those that the layout or the variant lacks are empty.
        scalars: Those of `Rule.scalars`.
        factor: The gradient is multiplied by it. A tensor is fp32, of one element, on the device.
        chance: Where random bits begin, if the layout needs any. Then the shard is of one
            parameter.
        skip: fp32, of one element, on the device. If it is not zero, nothing is changed.
        counter: fp32, of one element, on the device. It is raised by one.

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
    """Update arrays in the memory of the host, on a device: what `check.is_definition`
    calls.
    """
    columns = [torch.from_numpy(column).to(device) for column in arrays.columns()]
    run(variant, layout, columns, scalars, factor, chance)
    for column, result in zip(arrays.columns(), columns, strict=True):
        np.copyto(column, result.cpu().numpy())


@cache
def is_exact(variant: Variant, layout: Layout, device: torch.device) -> bool:
    """Return whether the compiled kernel has the bits of the definition on a device. Compiles it,
    and waits for it.
    """
    try:
        return is_definition(variant, layout, partial(run_arrays, device), "NVRTC", f"{device}")
    except CudaError as error:
        log_once(
            f"PyTorch computes the update of {variant.rule} on {device}, more slowly: {error}",
            logging.WARNING,
        )
        return False
