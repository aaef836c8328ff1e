"""Updates and layouts with which every kernel is tested, and CUDA kernels that run on NumPy."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from struct import calcsize
from typing import Any
from unittest import mock

import numpy as np
import torch
from numpy.typing import NDArray

from deepseek_zero.kernels import cuda
from deepseek_zero.kernels.rules import Layout, Variant
from tests.ptx import Launch, ProcessMemory, Program

_ADAM = ("exp_avg", "exp_avg_sq")
_SGD = ("momentum_buffer",)
VARIANTS = {
    "adamw": Variant("adam", _ADAM, decoupled=True),
    "adamw near": Variant("adam", _ADAM, decoupled=True, near=True),
    "adam": Variant("adam", _ADAM),
    "adam with L2, maximize": Variant("adam", _ADAM, maximizes=True, decays=True),
    "sgd": Variant("sgd", ()),
    "sgd with L2": Variant("sgd", (), decays=True),
    "sgd with momentum": Variant("sgd", _SGD),
    "sgd with momentum, first": Variant("sgd", _SGD, decays=True, first=True),
    "sgd nesterov": Variant("sgd", _SGD, decays=True, nesterov=True),
    "sgd nesterov, first, maximize": Variant(
        "sgd", _SGD, maximizes=True, first=True, nesterov=True
    ),
    "adagrad": Variant("adagrad", ("sum",)),
    "adagrad with L2, maximize": Variant("adagrad", ("sum",), maximizes=True, decays=True),
    "lion": Variant("lion", ("exp_avg",)),
    "lion, maximize": Variant("lion", ("exp_avg",), maximizes=True),
}
LAYOUTS = {
    "fp32": Layout(torch.float32),
    "fp32, bf16 gradient": Layout(torch.bfloat16),
    "split": Layout(torch.bfloat16, is_split=True),
    "split, fp32 gradient": Layout(torch.float32, is_split=True),
    "fp32 and bf16": Layout(torch.bfloat16, published=torch.bfloat16),
    "fp32 and fp16": Layout(torch.float16, published=torch.float16),
    "split, bf16 states": Layout(torch.bfloat16, is_split=True, states_rounded=True),
    "rounded": Layout(torch.bfloat16, is_rounded=True),
    "rounded, bf16 states": Layout(torch.bfloat16, is_rounded=True, states_rounded=True),
}


@cache
def ptx(variant: Variant, layout: Layout, scalar_count: int, capability: int = 80) -> str:
    return (
        cuda.compiled_for(variant, layout, scalar_count, capability, to_ptx=True)
        .decode()
        .rstrip("\0")
    )


def split_parameters(parameters: bytes) -> list[NDArray[Any]]:
    """Return each parameter of a launch: a number, or the numbers of a struct."""
    kinds = [*["P"] * 5, "q", "i", "8f", "6Q", "f", *["P"] * 3]
    found = []
    for end in range(1, len(kinds) + 1):
        stop = calcsize("@" + "".join(kinds[:end]))
        found.append(
            np.frombuffer(parameters[stop - calcsize("@" + kinds[end - 1]) : stop], np.uint8)
        )
    assert stop == len(parameters)
    return found


class EmulatedKernel:
    """Replaces `nvidia.Kernel` for a device that uses the memory of this process.

    Attributes:
        launches: The number of launches of all kernels.
    """

    launches = 0

    def __init__(
        self, variant: Variant, layout: Layout, scalar_count: int, device: torch.device
    ) -> None:
        self.program = Program.from_text(ptx(variant, layout, scalar_count))
        self.device = device

    def launch(self, grid: int, block: int, parameters: bytes) -> None:
        torch.zeros(1, device=self.device).add_(1)  # waits for copies that the stream depends on
        arguments = split_parameters(parameters)
        Launch(self.program, ProcessMemory(), grid, block, arguments).run()
        EmulatedKernel.launches += 1


@contextmanager
def emulated_on(kind: str) -> Iterator[None]:
    """Update by emulated CUDA kernels on this kind of device."""

    @cache
    def kernel(variant: Variant, layout: Layout, scalar_count: int, index: int) -> EmulatedKernel:
        return EmulatedKernel(variant, layout, scalar_count, torch.device(kind, index))

    def why_not(device: torch.device) -> str | None:
        return None if device.type == kind else "it is another device"

    cuda.is_exact.cache_clear()
    with mock.patch.object(cuda, "_kernel", kernel), mock.patch.object(cuda, "why_not", why_not):
        yield
    cuda.is_exact.cache_clear()


def on_processor(name: str) -> str:
    """Return program lines that make LLVM compile for a processor without extensions."""
    return (
        "import llvmlite.binding as llvm\n"
        f"llvm.get_host_cpu_name = lambda: {name!r}\n"
        "llvm.get_host_cpu_features = llvm.FeatureMap\n"
    )
