"""NVIDIA's compiler NVRTC and the CUDA driver, called through ctypes.

NVRTC comes with PyTorch's CUDA wheels, as `nvidia/*/lib/libnvrtc.so.*`. It needs no C compiler, no
headers and no GPU. The driver, `libcuda.so.1`, is installed with the GPU.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from ctypes import addressof, byref, c_char_p, c_int, c_size_t, c_uint, c_void_p, cast
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from ..base.errors import DeepSeekZeroError

# Each operation is rounded separately, subnormal numbers are kept, and division and square root
# are correctly rounded.
OPTIONS = ("--std=c++17", "--fmad=false", "-ftz=false", "-prec-div=true", "-prec-sqrt=true")

# Errors in a thread that has not used the device yet: it has no context, or that of another device
_WRONG_CONTEXT = (201, 400)

# Options of cuLaunchKernel: the next value is the address of all parameters, or of their size in
# bytes.
_PARAMETERS_AT = 1
_PARAMETERS_SIZE = 2


class CudaError(DeepSeekZeroError):
    """Raised if a call of NVRTC or of the driver fails."""


# -- NVRTC


def _installed() -> Iterator[Path]:
    """Yield the NVRTC libraries of Python packages, PyTorch's own CUDA version first."""
    spec = find_spec("nvidia")
    folders = list(spec.submodule_search_locations or ()) if spec is not None else []
    found = [path for folder in folders for path in Path(folder).glob("*/lib/libnvrtc.so.*")]
    own = f".so.{str(torch.version.cuda).partition('.')[0]}"
    yield from sorted(found, key=lambda path: (own not in path.name, path.name))


@cache
def nvrtc() -> ctypes.CDLL:
    """Return the library NVRTC.

    Raises:
        CudaError: It is not installed, or cannot be loaded.
    """
    names = [*map(str, _installed()), *(f"libnvrtc.so.{major}" for major in (13, 12))]
    failures = []
    for name in names:
        try:
            return ctypes.CDLL(name)
        except OSError as error:
            failures.append(str(error))
    raise CudaError(
        "NVRTC, NVIDIA's compiler, was not found.",
        f"Tried: {'; '.join(failures)}.",
        "install PyTorch's CUDA build, or the package nvidia-cuda-nvrtc.",
    )


def _checked(result: int, call: str, log: str = "") -> None:
    if result != 0:
        nvrtc().nvrtcGetErrorString.restype = c_char_p
        raise CudaError(f"{call} failed: {nvrtc().nvrtcGetErrorString(result).decode()}.", log)


@cache
def nvrtc_version() -> tuple[int, int]:
    """Return the version of NVRTC."""
    major = c_int()
    minor = c_int()
    _checked(nvrtc().nvrtcVersion(byref(major), byref(minor)), "nvrtcVersion")
    return major.value, minor.value


@cache
def architectures() -> tuple[int, ...]:
    """Return the compute capabilities that NVRTC compiles for, as 90 for 9.0."""
    count = c_int()
    _checked(nvrtc().nvrtcGetNumSupportedArchs(byref(count)), "nvrtcGetNumSupportedArchs")
    numbers = (c_int * count.value)()
    _checked(nvrtc().nvrtcGetSupportedArchs(numbers), "nvrtcGetSupportedArchs")
    return tuple(numbers)


def _text(program: c_void_p, what: str) -> bytes:
    """Return an output of NVRTC for a program: its "PTX", "CUBIN" or "ProgramLog"."""
    size = c_size_t()
    _checked(getattr(nvrtc(), f"nvrtcGet{what}Size")(program, byref(size)), f"nvrtcGet{what}Size")
    text = ctypes.create_string_buffer(size.value)
    _checked(getattr(nvrtc(), f"nvrtcGet{what}")(program, text), f"nvrtcGet{what}")
    return text.raw


def compiled(
    source: str, headers: Mapping[str, str], capability: int, *, to_ptx: bool = False
) -> bytes:
    """Compile a CUDA C program with NVRTC.

    Args:
        source: Text of the program.
        headers: The headers that it includes, by name.
        capability: The compute capability of the device, as 90 for 9.0.
        to_ptx: Whether to return PTX instead of machine code.

    Returns:
        The machine code, or PTX if `to_ptx`.

    Raises:
        CudaError: NVRTC is missing or rejects the source.
    """
    program = c_void_p()
    names = (c_char_p * len(headers))(*(name.encode() for name in headers))
    texts = (c_char_p * len(headers))(*(text.encode() for text in headers.values()))
    created = nvrtc().nvrtcCreateProgram(
        byref(program), source.encode(), b"update.cu", len(headers), texts, names
    )
    _checked(created, "nvrtcCreateProgram")
    try:
        kind = "compute" if to_ptx else "sm"
        options = [
            option.encode() for option in (*OPTIONS, f"--gpu-architecture={kind}_{capability}")
        ]
        result = nvrtc().nvrtcCompileProgram(
            program, len(options), (c_char_p * len(options))(*options)
        )
        log = "" if result == 0 else _text(program, "ProgramLog").decode().rstrip("\0")
        _checked(result, "nvrtcCompileProgram", log)
        form = "PTX" if to_ptx else "CUBIN"
        return _text(program, form)
    finally:
        nvrtc().nvrtcDestroyProgram(byref(program))


# -- the driver


@cache
def driver() -> ctypes.CDLL:
    """Return the library of the driver.

    Raises:
        CudaError: It is not installed.
    """
    try:
        library = ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise CudaError(
            "NVIDIA's driver was not found.", str(error), "install the driver of the GPU."
        ) from None
    library.cuLaunchKernel.argtypes = [c_void_p, *[c_uint] * 7, c_void_p, c_void_p, c_void_p]
    return library


def _call(name: str, *arguments: Any) -> None:
    _check(name, getattr(driver(), name)(*arguments))


def _check(name: str, result: int) -> None:
    if result != 0:
        text = c_char_p()
        driver().cuGetErrorString(result, byref(text))
        raise CudaError(f"{name} failed: {(text.value or b'unknown error').decode()} ({result}).")


@cache
def _context(device: int) -> c_void_p:
    """Return the context that PyTorch uses on a device; it stays retained."""
    number = c_int()
    context = c_void_p()
    _call("cuInit", 0)
    _call("cuDeviceGet", byref(number), device)
    _call("cuDevicePrimaryCtxRetain", byref(context), number)
    return context


@contextmanager
def _current(device: int) -> Iterator[None]:
    """Make the context of a device current.

    A thread that has not used the device yet has no current context.
    """
    _call("cuCtxPushCurrent_v2", _context(device))
    try:
        yield
    finally:
        _call("cuCtxPopCurrent_v2", byref(c_void_p()))


class Kernel:
    """A kernel that is loaded on a device."""

    def __init__(self, binary: bytes, name: str, device: int) -> None:
        """Load the kernel.

        Args:
            binary: Machine code or PTX.
            name: The name of the kernel.
            device: The index of the device.

        Raises:
            CudaError: The driver is missing or rejects the binary.
        """
        self.device = device
        self._module = c_void_p()
        self._function = c_void_p()
        with _current(device):
            _call("cuModuleLoadData", byref(self._module), binary)
            _call("cuModuleGetFunction", byref(self._function), self._module, name.encode())
        self._launch = driver().cuLaunchKernel

    def launch(self, grid: int, block: int, parameters: bytes) -> None:
        """Queue the kernel on PyTorch's current stream.

        Args:
            grid: Number of blocks.
            block: Number of threads per block.
            parameters: The packed parameters of the kernel, with C's alignment.

        Raises:
            CudaError: The launch failed.
        """
        stream = torch.cuda.current_stream(self.device).cuda_stream
        size = c_size_t(len(parameters))
        # A list of options and values, terminated by 0
        packed = (c_void_p * 5)(
            _PARAMETERS_AT,
            cast(c_char_p(parameters), c_void_p),
            _PARAMETERS_SIZE,
            addressof(size),
            0,
        )
        sizes = grid, 1, 1, block, 1, 1, 0
        result = self._launch(self._function, *sizes, stream, None, packed)
        if result in _WRONG_CONTEXT:
            with _current(self.device):
                result = self._launch(self._function, *sizes, stream, None, packed)
        _check("cuLaunchKernel", result)


def binary_for(capability: int) -> tuple[int, bool]:
    """Return the capability to compile for, and whether to compile to PTX.

    PTX is used for devices newer than NVRTC; the driver compiles it.

    Raises:
        CudaError: NVRTC does not compile for such old devices.
    """
    known = [number for number in architectures() if number <= capability]
    if not known:
        raise CudaError(
            f"NVRTC {nvrtc_version()} does not compile for devices of capability {capability}."
        )
    return max(known), max(known) != capability
