"""The PTX of the CUDA update kernel is emulated in NumPy and compared with the reference."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from deepseek_zero.kernels import check, cuda, nvidia
from deepseek_zero.kernels.rules import Layout, Variant
from tests import kernels
from tests.kernels import LAYOUTS, VARIANTS
from tests.needs import need
from tests.ptx import Launch, Memory, Program

CASES = [
    *((variant, "split") for variant in VARIANTS),
    *(("adamw", layout) for layout in LAYOUTS if layout != "split"),
]
NO_CHANCE = check.Chance()
SCALAR_COUNTS = {"adam": 7, "sgd": 4, "adagrad": 3, "lion": 6}
EXACT = tuple(f"{name}.rn.f32" for name in ("mul", "add", "sub", "fma", "div", "sqrt"))
# Per element: multiplications (one of them by the factor), additions, subtractions, fma, divisions,
# square roots.
OPERATIONS = {
    "adamw": (5, 1, 2, 2, 2, 1),
    "adamw near": (5, 1, 2, 2, 2, 1),
    "adam": (4, 1, 2, 2, 2, 1),
    "adam with L2, maximize": (4, 1, 2, 3, 2, 1),
    "sgd": (1, 0, 0, 1, 0, 0),
    "sgd with L2": (1, 0, 0, 2, 0, 0),
    "sgd with momentum": (2, 0, 0, 2, 0, 0),
    "sgd with momentum, first": (1, 0, 0, 2, 0, 0),
    "sgd nesterov": (2, 0, 0, 4, 0, 0),
    "sgd nesterov, first, maximize": (1, 0, 0, 2, 0, 0),
    "adagrad": (2, 1, 1, 1, 1, 1),
    "adagrad with L2, maximize": (2, 1, 1, 2, 1, 1),
    "lion": (7, 2, 1, 0, 0, 0),
    "lion, maximize": (7, 2, 1, 0, 0, 0),
}
# Bytes per element: read gradient and main weight, write main weight and weight. The bytes of the
# optimizer states are added.
BYTES = {
    "fp32": 4 + 4 + 4,
    "fp32, bf16 gradient": 2 + 4 + 4,
    "split": 2 + 4 + 4,
    "split, fp32 gradient": 4 + 4 + 4,
    "fp32 and bf16": 2 + 4 + 4 + 2,
    "fp32 and fp16": 2 + 4 + 4 + 2,
    "split, bf16 states": 2 + 4 + 4,
    "rounded": 2 + 2 + 2,
    "rounded, bf16 states": 2 + 2 + 2,
}


@pytest.fixture(autouse=True)
def nvrtc() -> None:
    try:
        nvidia.nvrtc()
    except nvidia.CudaError as error:
        need(False, f"NVRTC (the package nvidia-cuda-nvrtc-cu12): {error}")


def ptx(variant: Variant, layout: Layout, capability: int = 80) -> str:
    return kernels.ptx(variant, layout, SCALAR_COUNTS[variant.rule], capability)


@dataclass
class Column:
    """An array in the emulated memory, with the tensor attributes that `cuda.launch_of` reads."""

    address: int
    values: NDArray[Any]

    def data_ptr(self) -> int:
        return self.address if len(self.values) else 0

    def numel(self) -> int:
        return len(self.values)

    def element_size(self) -> int:
        return self.values.itemsize


@dataclass
class Emulator:
    """Updates arrays by the PTX of the kernel, with the arguments that a GPU would get.

    Attributes:
        offsets: Elements between a 64-byte block and the first element of each array.
        is_factor_on_device: The factor is read from memory.
        skip: The number that the skip flag holds; None: there is no flag.
        counts: A counter with the value 7 is passed.
        count: The counter's value after the last launch.
        program: PTX to run instead of the compiled one.
        launch: What was executed last.
    """

    offsets: Sequence[int] = (0, 0, 0, 0, 0)
    is_factor_on_device: bool = False
    skip: float | None = None
    counts: bool = False
    count: float = 0.0
    program: str | None = None
    launch: Launch | None = None

    def run(
        self,
        variant: Variant,
        layout: Layout,
        arrays: check.Arrays,
        scalars: Sequence[np.float32],
        factor: float,
        chance: check.Chance = NO_CHANCE,
    ) -> None:
        memory = Memory(4096 + sum(column.nbytes + 512 for column in arrays.columns()))
        columns: list[Any] = [
            Column(memory.put(column, offset * column.itemsize), column)
            for column, offset in zip(arrays.columns(), self.offsets, strict=True)
        ]
        blocks, parameters = cuda.launch_of(columns, tuple(scalars), factor, chance)
        arguments = kernels.split_parameters(parameters)
        if self.is_factor_on_device:
            arguments[-4] = np.array([np.nan], np.float32)  # not used
            arguments[-3] = np.array([memory.put(np.array([factor], np.float32))])
        if self.skip is not None:
            arguments[-2] = np.array([memory.put(np.array([self.skip], np.float32))])
        count = np.array([7.0], np.float32)
        count_address = memory.put(count)
        if self.counts:
            arguments[-1] = np.array([count_address])
        program = Program.from_text(self.program or ptx(variant, layout))
        self.launch = Launch(program, memory, blocks, cuda.THREADS, arguments).run()
        for column in columns:
            np.copyto(column.values, memory.get(column.address, column.values))
        self.count = float(memory.get(count_address, count)[0])


def same(left: check.Arrays, right: check.Arrays) -> bool:
    return all(
        mine.tobytes() == its.tobytes()
        for mine, its in zip(left.columns(), right.columns(), strict=True)
    )


def differing(variant: str, layout: str, emulator: Emulator, numel: int = check.NUMEL) -> int:
    return check.differing_elements(VARIANTS[variant], LAYOUTS[layout], emulator.run, numel)


@pytest.mark.parametrize("capability", [80, 90, 100, 120])
@pytest.mark.parametrize("name", VARIANTS)
def test_the_ptx_has_only_operations_that_round_to_the_nearest_number(
    name: str, capability: int
) -> None:
    if capability not in nvidia.architectures():
        pytest.skip(f"NVRTC {nvidia.nvrtc_version()} does not compile for {capability}")
    text = ptx(VARIANTS[name], LAYOUTS["split"], capability)
    opcodes = set(re.findall(r"^\s+(?:@!?%p\d+\s+)?([a-z][a-z0-9_.]+)", text, re.MULTILINE))
    on_floats = {opcode for opcode in opcodes if re.search(r"\.b?f(16|32|64)", opcode)}
    moves = {
        opcode
        for opcode in on_floats
        if opcode.split(".")[0] in ("ld", "st", "mov", "selp", "setp", "neg")
    }
    assert on_floats - moves <= set(EXACT)
    assert not [opcode for opcode in opcodes if re.search(r"\.(ftz|approx|full|sat)\b", opcode)]


@pytest.mark.parametrize("capability", [80, 90])
def test_machine_code_is_compiled_without_a_gpu(capability: int) -> None:
    code = cuda.compiled_for(VARIANTS["adamw"], LAYOUTS["split"], 7, capability, to_ptx=False)
    assert code.startswith(b"\x7fELF")


@pytest.mark.parametrize(("variant", "layout"), CASES)
def test_the_ptx_has_the_bits_of_the_definition(variant: str, layout: str) -> None:
    assert differing(variant, layout, Emulator()) == 0


def test_many_random_elements_have_the_bits_of_the_definition() -> None:
    assert differing("adamw", "split", Emulator(), numel=(1 << 17) + 3) == 0


@pytest.mark.parametrize(
    "offsets", [(8, 16, 0, 4, 8), (3, 3, 3, 3, 3), (1, 0, 0, 0, 0), (0, 2, 2, 3, 1)], ids=str
)
@pytest.mark.parametrize("numel", [1, 7, 8, 13, 2048 * 2 + 13])
def test_arrays_may_begin_anywhere_and_have_any_length(
    offsets: tuple[int, ...], numel: int
) -> None:
    assert differing("adamw", "split", Emulator(offsets), numel) == 0
    assert differing("adagrad", "fp32", Emulator(offsets), numel) == 0


@pytest.mark.parametrize("start", [8, 16, 13, (1 << 36) + 24])
def test_random_bits_belong_to_places_in_a_parameter(start: int) -> None:
    chance = check.Chance(element=start, step=9, seed=2, keys=(11, 12, 13))
    variant, layout = VARIANTS["adamw"], LAYOUTS["rounded, bf16 states"]
    scalars = tuple(np.float32(scalar) for scalar in (0.999, 0.1, 0.999, 0.001, 1e-3, 0.03, 1e-8))
    arrays = check.sample(variant, layout, "normal", 301)
    wanted = check.expected(variant, layout, arrays, scalars, 0.5, chance)
    Emulator().run(variant, layout, arrays, scalars, 0.5, chance)
    assert same(arrays, wanted)


def test_the_factor_may_be_in_the_memory_of_the_device() -> None:
    assert differing("adamw", "split", Emulator(is_factor_on_device=True)) == 0


def test_a_flag_in_the_memory_of_the_device_skips_the_update() -> None:
    variant, layout = VARIANTS["adamw"], LAYOUTS["split"]
    arrays = check.sample(variant, layout, "bits", 4099)
    after = arrays.copy()
    emulator = Emulator(skip=1.0)
    emulator.run(variant, layout, after, (np.float32(0.5),) * 7, 1.0)
    assert same(after, arrays)
    assert emulator.launch is not None
    assert emulator.launch.stored == 0
    assert differing("adamw", "split", Emulator(skip=0.0)) == 0


@pytest.mark.parametrize(("skip", "count"), [(None, 8.0), (0.0, 8.0), (1.0, 7.0)])
def test_a_counter_in_the_memory_of_the_device_is_raised_once(
    skip: float | None, count: float
) -> None:
    variant, layout = VARIANTS["adamw"], LAYOUTS["split"]
    emulator = Emulator(skip=skip, counts=True)
    arrays = check.sample(variant, layout, "normal", 2048 * 2 + 13)
    emulator.run(variant, layout, arrays, (np.float32(0.5),) * 7, 1.0)
    assert emulator.count == count


@pytest.mark.parametrize("variant", VARIANTS)
def test_an_element_takes_the_operations_of_its_formula(variant: str) -> None:
    emulator, numel = Emulator(), 4096
    differing(variant, "fp32", emulator, numel)
    assert emulator.launch is not None
    executed = tuple(emulator.launch.executed[opcode] / numel for opcode in EXACT)
    assert executed == OPERATIONS[variant]


@pytest.mark.parametrize(("variant", "layout"), CASES)
def test_each_array_is_read_once_and_written_once(variant: str, layout: str) -> None:
    emulator, numel = Emulator(), 4096
    differing(variant, layout, emulator, numel)
    assert emulator.launch is not None
    per_state = (2 if LAYOUTS[layout].states_rounded else 4) * (1 if VARIANTS[variant].first else 2)
    moved = (emulator.launch.loaded + emulator.launch.stored) / numel
    assert moved == BYTES[layout] + per_state * len(VARIANTS[variant].states)


@pytest.mark.parametrize(
    ("what", "instead"),
    [
        (r"div\.rn\.f32\s+(%f\d+), (%f\d+), (%f\d+)", r"mul.rn.f32 \1, \2, \3"),
        (
            r"fma\.rn\.f32\s+(%f\d+), (%f\d+), (%f\d+), (%f\d+)",
            r"mul.rn.f32 \1, \2, \3;\n\tadd.rn.f32 \1, \1, \4",
        ),
        (r", 2143289344,", ", 2147483647,"),
    ],
    ids=["a division", "a fused operation", "the canonical NaN"],
)
def test_the_comparison_detects_another_operation(what: str, instead: str) -> None:
    changed = re.sub(what, instead, ptx(VARIANTS["adamw"], LAYOUTS["split"]))
    assert differing("adamw", "split", Emulator(program=changed)) > 0
