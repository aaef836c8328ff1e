"""The GPT that every system trains, and its text; independent of ranks.

The fixed seed gives every system the same fp32 weights. Real text makes the losses of a wrong
update differ within a few steps.
"""

from __future__ import annotations

from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .cells import CONTEXT, SEQUENCES_PER_RANK, VOCABULARY, Cell, Shape

# bytes that do not change between versions
TEXT = Path(__file__).resolve().parent.parent / "LICENSE"
Batch = tuple[Tensor, Tensor]  # tokens and targets, each (sequences, CONTEXT)


class Block(nn.Module):
    """Pre-norm transformer block."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.heads = shape.heads
        self.attention_norm = nn.LayerNorm(shape.width)
        self.query_key_value = nn.Linear(shape.width, 3 * shape.width)
        self.attention_out = nn.Linear(shape.width, shape.width)
        self.mlp_norm = nn.LayerNorm(shape.width)
        self.up = nn.Linear(shape.width, 4 * shape.width)
        self.down = nn.Linear(4 * shape.width, shape.width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention_out(self.mix(self.attention_norm(x)))
        return x + self.down(F.gelu(self.up(self.mlp_norm(x))))

    def mix(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        heads = self.query_key_value(x).view(batch, length, 3, self.heads, width // self.heads)
        query, key, value = heads.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return mixed.transpose(1, 2).reshape(batch, length, width)


class GPT(nn.Module):
    """Return the mean cross-entropy of tokens and targets.

    The model has learned positions, an untied head and torch's default initialization.
    """

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, shape.width)
        self.positions = nn.Embedding(CONTEXT, shape.width)
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.layers))
        self.norm = nn.LayerNorm(shape.width)
        self.head = nn.Linear(shape.width, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1]))
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1).float(), targets.flatten())


def build_model(shape: Shape) -> GPT:
    torch.manual_seed(0)
    return GPT(shape)


class Batches:
    """The micro-batches of each step, as one of `shares` equal parts of the global batch.

    Args:
        cell: The measured cell.
        ranks: Number of ranks, which determines the global batch.
        share: Index of the part.
        shares: Number of parts.
        context: Tokens per sequence.
    """

    def __init__(
        self, cell: Cell, ranks: int, share: int, shares: int, context: int = CONTEXT
    ) -> None:
        self.text = torch.frombuffer(bytearray(TEXT.read_bytes()), dtype=torch.uint8).long()
        self.sequences = ranks * SEQUENCES_PER_RANK
        self.accumulation, self.context = cell.accumulation, context
        self.share = slice(share * self.sequences // shares, (share + 1) * self.sequences // shares)

    def of_step(self, step: int) -> list[Batch]:
        """Return consecutive pieces of the text, which repeats from its start."""
        return [
            self._micro_batch(step * self.accumulation + number)
            for number in range(self.accumulation)
        ]

    def _micro_batch(self, number: int) -> Batch:
        numel = self.sequences * (self.context + 1)
        where = torch.arange(number * numel, (number + 1) * numel) % len(self.text)
        pieces = self.text[where].view(self.sequences, self.context + 1)[self.share]
        return pieces[:, :-1].contiguous(), pieces[:, 1:].contiguous()
