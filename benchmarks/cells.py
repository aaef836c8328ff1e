"""The measured combinations (cells) of model size, dtype and gradient accumulation.

This module does not import torch, because the parent that plans runs reads it as well as the ranks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

VOCABULARY = 256  # one token per byte
CONTEXT = 256  # tokens per sequence
SEQUENCES_PER_RANK = 2  # per micro-batch
DTYPES = ("fp32", "bf16")
ADAMW: dict[str, Any] = {"lr": 3e-4, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.01}

SIZES = {"tiny": (2, 64), "30m": (10, 512), "125m": (18, 768), "350m": (28, 1024)}  # layers, width

# Largest difference of a loss from the single process's that counts as equal training, by dtype.
# fp32 differs only by the order of sums. bf16 also differs by the rounding of values sent between
# ranks.
LOSS_BOUNDS = {"fp32": 2e-6, "bf16": 5e-3}


@dataclass(frozen=True)
class Shape:
    """Layers and width of the GPT. Attention heads are 64 wide."""

    layers: int
    width: int

    @property
    def heads(self) -> int:
        return max(1, self.width // 64)

    @property
    def numel(self) -> int:
        """The number of parameters."""
        # four projections of attention, two of the MLP, two norms
        per_layer = 12 * self.width**2 + 13 * self.width
        ends = (2 * VOCABULARY + CONTEXT) * self.width + 2 * self.width
        return self.layers * per_layer + ends


@dataclass(frozen=True)
class Cell:
    """One column of the comparison. size: a key of SIZES, or LAYERSxWIDTH."""

    size: str
    dtype: str
    accumulation: int = 1

    @property
    def name(self) -> str:
        return f"{self.size}-{self.dtype}" + (
            f"-acc{self.accumulation}" if self.accumulation > 1 else ""
        )

    @property
    def shape(self) -> Shape:
        layers, width = SIZES.get(self.size) or map(int, self.size.split("x"))
        return Shape(layers, width)

    @classmethod
    def parse(cls, name: str) -> Cell:
        """Return the cell with a name like "125m-bf16-acc4"; raise ValueError if it is invalid."""
        size, dtype, *rest = name.split("-")
        cell = cls(size, dtype, int(rest[0].removeprefix("acc")) if rest else 1)
        if cell.name != name or dtype not in DTYPES or cell.shape.layers < 1:
            raise ValueError(f"no cell is called {name}")
        return cell


TINY = [Cell("tiny", dtype) for dtype in DTYPES]
CELLS = {
    "bench": [*TINY, *(Cell("125m", dtype) for dtype in DTYPES)],
    "full": [
        *TINY,
        *(Cell("125m", dtype) for dtype in DTYPES),
        *(Cell("30m", dtype, accumulation) for accumulation in (1, 4) for dtype in DTYPES),
        *(Cell("125m", dtype, 4) for dtype in DTYPES),
        *(Cell("350m", dtype, accumulation) for accumulation in (1, 4) for dtype in DTYPES),
    ],
    "dry": [Cell("2x64", "fp32"), Cell("2x64", "bf16", 4)],  # tiny, but with memory runs
}
