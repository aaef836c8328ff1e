"""Small models and their batches for tests, with sizes that have few common divisors.

tests/reference.py trains them without sharding.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

VOCABULARY, WIDTH, HEADS, HIDDEN, LENGTH = 37, 15, 3, 41, 7


class Block(nn.Module):
    """A transformer block: attention and an MLP, each with a norm before it and a residual
    connection.
    """

    def __init__(self, width: int = WIDTH, heads: int = HEADS, hidden: int = HIDDEN) -> None:
        super().__init__()
        self.heads = heads
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, hidden), nn.Linear(hidden, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        heads = (
            self.qkv(self.norm_1(x))
            .view(batch, length, 3, self.heads, width // self.heads)
            .unbind(2)
        )
        q, k, v = (each.transpose(1, 2) for each in heads)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(mixed.transpose(1, 2).reshape(batch, length, width))
        return x + self.down(F.gelu(self.up(self.norm_2(x))))


class Gpt(nn.Module):
    """A small language model that returns the mean loss, or the logits if there are no targets."""

    def __init__(
        self,
        blocks: int = 3,
        width: int = WIDTH,
        heads: int = HEADS,
        hidden: int = HIDDEN,
        vocabulary: int = VOCABULARY,
    ) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(vocabulary, width), nn.Embedding(LENGTH, width)
        self.blocks = nn.ModuleList(Block(width, heads, hidden) for _ in range(blocks))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)

    def forward(self, tokens: Tensor, targets: Tensor | None = None) -> Tensor:
        x = self.tokens(tokens) + self.places.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        if targets is None:
            return logits
        return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())


class Odd(nn.Module):
    """Parameters with odd sizes, one with a single element and one with none; computes nothing."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        for name, shape in {
            "a": (701, 3),
            "b": (1999,),
            "c": (),
            "d": (0, 4),
            "e": (13, 7),
        }.items():
            self.register_parameter(name, nn.Parameter(torch.randn(shape, generator=generator)))


@dataclass(frozen=True)
class Batch:
    """The arguments of one forward."""

    tokens: Tensor
    targets: Tensor


def batch_of(step: int, micro: int, rank: int, size: int = 2) -> Batch:
    """Return the micro-batch of one rank, which depends only on the arguments."""
    generator = torch.Generator().manual_seed(10_000 * step + 100 * micro + rank)
    text = torch.randint(VOCABULARY, (size, LENGTH + 1), generator=generator)
    return Batch(text[:, :-1].contiguous(), text[:, 1:].contiguous())


def seeded(build: type[nn.Module] = Gpt, seed: int = 7, **sizes: int) -> nn.Module:
    """Return a model whose values depend only on the seed."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return build(**sizes)
