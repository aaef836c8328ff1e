"""Compile functions over flat CPU memory with LLVM, through llvmlite.

The caller emits the instructions of a function. They are compiled for the processor of this machine
without an optimizer, which they do not need: loops read and compute vectors. A compiled function
runs without the GIL. Importing this module imports llvmlite.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any

import llvmlite.binding as llvm
from llvmlite import ir

I8 = ir.IntType(8)
I16 = ir.IntType(16)
I32 = ir.IntType(32)
I64 = ir.IntType(64)
F16 = ir.HalfType()
F32 = ir.FloatType()
F64 = ir.DoubleType()

_ARGUMENTS: dict[Any, Any] = {I64: ctypes.c_int64, F32: ctypes.c_float}
_engines: list[Any] = []  # they own the machine code


@cache
def _machine() -> Any:
    """Return LLVM's description of this machine's processor."""
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    return llvm.Target.from_triple(llvm.get_process_triple()).create_target_machine(
        cpu=llvm.get_host_cpu_name(),
        features=llvm.get_host_cpu_features().flatten(),
        opt=3,
        jit=True,
    )


def compile_function(
    arguments: Sequence[Any], emit: Callable[[Any, Sequence[Any]], None]
) -> Callable[..., None]:
    """Compile a function without a result.

    Args:
        arguments: The type of each argument, `I64` or `F32`. Addresses are `I64`.
        emit: Called with LLVM's builder and the arguments, to emit the body.

    Returns:
        The function, which takes Python numbers.
    """
    module = ir.Module("kernel")
    function = ir.Function(module, ir.FunctionType(ir.VoidType(), arguments), "kernel")
    builder = ir.IRBuilder(function.append_basic_block("entry"))
    emit(builder, function.args)
    builder.ret_void()
    engine = llvm.create_mcjit_compiler(llvm.parse_assembly(str(module)), _machine())
    engine.finalize_object()
    _engines.append(engine)
    prototype: Any = ctypes.CFUNCTYPE(None, *[_ARGUMENTS[each] for each in arguments])
    found: Callable[..., None] = prototype(engine.get_function_address("kernel"))
    return found


@contextmanager
def counting(builder: Any, start: Any, stop: Any, step: int) -> Iterator[Any]:
    """Emit a loop; the block emits its body.

    Args:
        builder: LLVM's builder.
        start: The first value of the counter, int64.
        stop: The loop ends before this value, int64.
        step: What is added to the counter.

    Yields:
        The counter.
    """
    before = builder.block
    head = builder.append_basic_block("head")
    body = builder.append_basic_block("body")
    after = builder.append_basic_block("after")
    builder.branch(head)
    builder.position_at_end(head)
    counter = builder.phi(I64)
    counter.add_incoming(start, before)
    builder.cbranch(builder.icmp_signed("<", counter, stop), body, after)
    builder.position_at_end(body)
    yield counter
    counter.add_incoming(builder.add(counter, I64(step)), builder.block)
    builder.branch(head)
    builder.position_at_end(after)


def address_of(builder: Any, start: Any, index: Any, nbytes: int) -> Any:
    """Emit the address of an element of an array.

    Args:
        builder: LLVM's builder.
        start: The address of the array.
        index: The index of the element.
        nbytes: The bytes of an element.
    """
    return builder.add(start, builder.mul(index, I64(nbytes)))


@cache
def converts_fp16() -> bool:
    """Return whether this processor converts fp16 numbers.

    For other processors, LLVM emits calls of functions that do not exist here, and the process
    aborts.
    """
    module = llvm.parse_assembly(
        "define half @there_and_back(half %number) {\n"
        "  %wide = fpext half %number to float\n"
        "  %sum = fadd float %wide, %wide\n"
        "  %found = fptrunc float %sum to half\n"
        "  ret half %found\n"
        "}\n"
    )
    text = _machine().emit_assembly(module)
    return not any(function in text for function in ("hfsf2", "sfhf2", "_ieee"))
