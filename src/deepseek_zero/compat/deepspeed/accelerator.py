"""DeepSpeed's `get_accelerator()`, which describes the device of this rank.

`SHARED` holds the functions for all devices, `CUDA` and `CPU` those of one kind, and `TENSORS` the
constructors of tensors. Any other name raises an error that lists the available names. The drop-in
provides this module as `deepspeed.accelerator`.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import nullcontext
from functools import cache, partial
from importlib import import_module
from typing import Any

import psutil
import torch

from ...base.device import allocated_bytes, default_device, has_fast_bf16
from ...base.errors import NotBuiltError, UnknownNameError
from ...base.mesh import default_backend
from ...comm.context import ranks_of_this_host


def _nothing(*args: Any, **kwargs: Any) -> None:
    """Do nothing. The CPU has no streams, no markers and no cache to clear."""


def _device_of(kind: str, index: int | None = None) -> str:
    return kind if index is None or kind == "cpu" else f"{kind}:{index}"


def _is_cpu() -> bool:
    return default_device().type == "cpu"


def _allocated(device_index: int | None = None) -> int:
    return allocated_bytes(default_device())


def _pin(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    return tensor if _is_cpu() else tensor.pin_memory()


Functions = dict[str, Callable[..., Any]]


def _builder(class_name: str) -> Any:
    return import_module(".ops", __package__).BUILDERS[class_name]()


# Functions for both kinds of device
SHARED: Functions = {
    "device_name": lambda device_index=None: _device_of(default_device().type, device_index),
    "device": lambda device_index=None: torch.device(
        _device_of(default_device().type, device_index)
    ),
    "is_available": lambda: True,
    "communication_backend_name": lambda: default_backend(default_device()),
    "memory_allocated": _allocated,
    "manual_seed": torch.manual_seed,
    "manual_seed_all": torch.manual_seed,  # seeds the CPU and all GPUs
    "initial_seed": torch.initial_seed,
    "random": lambda: torch.random,
    "is_bf16_supported": lambda: _is_cpu() or has_fast_bf16(default_device()),
    "is_fp16_supported": lambda: True,
    "is_fp64_supported": lambda: True,
    "supported_dtypes": lambda: [torch.float32, torch.float16, torch.bfloat16],
    "amp": lambda: torch.cpu.amp if _is_cpu() else torch.cuda.amp,
    "create_op_builder": _builder,
    "get_op_builder": lambda class_name: type(_builder(class_name)),
    "is_triton_supported": lambda: False,  # this library has no triton kernels
    "pin_memory": _pin,
    "is_pinned": lambda tensor: tensor.is_pinned(),
    "on_accelerator": lambda tensor: tensor.device.type == default_device().type,
    "op_builder_dir": lambda: "deepspeed.ops.op_builder",
    "visible_devices_envs": lambda: ["CUDA_VISIBLE_DEVICES"],
    "export_envs": lambda: ["NCCL", "LD_LIBRARY", "PATH"],
    "use_host_timers": _is_cpu,
    "is_synchronized_device": _is_cpu,
    "resolves_data_dependency": _is_cpu,
    "handles_memory_backpressure": _is_cpu,
    "get_compile_backend": lambda: "inductor",
    "range_push": _nothing,
    "range_pop": _nothing,
    "lazy_call": lambda callback: callback(),
}
CPU: Functions = {
    "current_device": lambda: "cpu",
    "current_device_name": lambda: "cpu",
    "device_count": lambda: int(os.environ.get("LOCAL_SIZE", 0)) or ranks_of_this_host(),
    "set_device": _nothing,
    "synchronize": _nothing,
    "empty_cache": _nothing,
    "Stream": lambda *args, **kwargs: None,
    "stream": lambda stream: nullcontext(),
    "current_stream": _nothing,
    "default_stream": _nothing,
    "Event": lambda *args, **kwargs: None,
    "get_rng_state": lambda device_index=None: torch.get_rng_state(),
    "set_rng_state": lambda new_state, device_index=None: torch.set_rng_state(new_state),
    "default_generator": lambda device_index=None: torch.default_generator,
    "max_memory_allocated": _allocated,
    "memory_reserved": _allocated,
    "memory_cached": _allocated,
    "max_memory_reserved": _allocated,
    "max_memory_cached": _allocated,
    "memory_stats": lambda device_index=None: {},
    "reset_peak_memory_stats": _nothing,
    "reset_max_memory_allocated": _nothing,
    "reset_max_memory_cached": _nothing,
    "total_memory": lambda device_index=None: psutil.virtual_memory().total,
    "available_memory": lambda device_index=None: psutil.virtual_memory().available,
    "is_current_stream_capturing": lambda: False,
}


# Constructors of tensors on the device, and their dtypes
TENSORS = {
    "BFloat16Tensor": torch.bfloat16,
    "ByteTensor": torch.uint8,
    "DoubleTensor": torch.float64,
    "FloatTensor": torch.float32,
    "HalfTensor": torch.float16,
    "IntTensor": torch.int32,
    "LongTensor": torch.int64,
}


def _of_cuda(name: str, *args: Any, **kwargs: Any) -> Any:
    return getattr(torch.cuda, name)(*args, **kwargs)


CUDA: Functions = {name: partial(_of_cuda, name) for name in CPU} | {
    "current_device_name": lambda: f"cuda:{torch.cuda.current_device()}",
    "default_generator": lambda device_index: torch.cuda.default_generators[device_index],
    "total_memory": lambda device_index=None: torch.cuda.mem_get_info(device_index)[1],
    "available_memory": lambda device_index=None: torch.cuda.mem_get_info(device_index)[0],
    "reset_max_memory_allocated": torch.cuda.reset_peak_memory_stats,
    "reset_max_memory_cached": torch.cuda.reset_peak_memory_stats,
    "memory_cached": torch.cuda.memory_reserved,
    "max_memory_cached": torch.cuda.max_memory_reserved,
}


class Accelerator:
    """DeepSpeed's accelerator interface for the device of this rank, a GPU or the CPU."""

    def __getattr__(self, name: str) -> Callable[..., Any]:
        own = CPU if _is_cpu() else CUDA
        if name in SHARED:
            return SHARED[name]
        if name in TENSORS:
            return partial(torch.tensor, dtype=TENSORS[name], device=default_device())
        if name in own:
            return own[name]
        if name.startswith("_"):
            raise AttributeError(name)
        raise UnknownNameError(
            f"get_accelerator().{name} does not exist.",
            fix=f"use one of: {', '.join(sorted({*SHARED, *TENSORS, *own}))}.",
        )

    def __dir__(self) -> list[str]:
        return sorted({*SHARED, *TENSORS, *CPU})


DeepSpeedAccelerator = CPU_Accelerator = Accelerator


@cache
def get_accelerator() -> Accelerator:
    """Return the `Accelerator` of this process, which is created on first use."""
    return Accelerator()


def set_accelerator(accel_obj: Any) -> None:
    """Raise an error unless `accel_obj` is the object that `get_accelerator` returns.

    Raises:
        NotBuiltError: Another accelerator was passed. Ranks use a GPU if there is one, else the
            CPU.
    """
    if accel_obj is not get_accelerator():
        raise NotBuiltError(
            "set_accelerator() with an accelerator of your own is not built.",
            "Ranks train on CUDA GPUs or on the CPU.",
            "hide the GPUs by CUDA_VISIBLE_DEVICES= to train on the CPU.",
        )


def is_current_accelerator_supported() -> bool:
    """Return True: this library trains on every device that a rank can have."""
    return True
