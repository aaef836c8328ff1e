"""A small byte-level GPT in plain torch, independent of sharding.

This module has the model, its two sizes and `generate`. `text.py` provides text, and
`pretrain_text.py` trains the model.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

VOCABULARY = 256  # one token per byte, so no tokenizer is required
RECENT = 4  # bytes in the window of the convolution before attention, including the current one


@dataclass(frozen=True)
class GPTConfig:
    """Sizes of the model. `context` is the number of bytes."""

    num_layers: int
    width: int
    num_heads: int
    context: int
    tied_head: bool = False


SIZES = {
    "tiny": GPTConfig(num_layers=2, width=64, num_heads=2, context=64),
    # Small, because in the three minutes that two cores have, steps matter more than parameters.
    # With about the same number of operations 0.9M parameters reach 1.75 nats per byte (1,100
    # steps), 1.9M 2.02 (420) and 4.9M 2.12 (270).
    "main": GPTConfig(num_layers=4, width=128, num_heads=4, context=256),
}


class Attention(nn.Module):
    """Causal self-attention over (batch, length, width), after a short causal convolution."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.num_heads = config.num_heads
        # Each channel also sees its own last bytes (Primer, arXiv 2109.08668). In a run of minutes
        # this lets the model learn more than bigrams: 2.04 against 2.40 nats per byte after 450
        # steps of 1,024 bytes.
        self.recent = nn.Conv1d(config.width, config.width, RECENT, groups=config.width)
        self.query_key_value = nn.Linear(config.width, 3 * config.width, bias=False)
        self.out = nn.Linear(config.width, config.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        x = x + self.recent(F.pad(x.transpose(1, 2), (RECENT - 1, 0))).transpose(1, 2)
        heads = self.query_key_value(x).view(
            batch, length, 3, self.num_heads, width // self.num_heads
        )
        query, key, value = heads.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.out(mixed.transpose(1, 2).reshape(batch, length, width))


class Block(nn.Module):
    """Pre-norm transformer block: the unit that ZeRO-3 gathers and reshards."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(config.width)
        self.attention = Attention(config)
        self.mlp_norm = nn.LayerNorm(config.width)
        self.up = nn.Linear(config.width, 4 * config.width)
        self.down = nn.Linear(4 * config.width, config.width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x))
        return x + self.down(F.gelu(self.up(self.mlp_norm(x)), approximate="tanh"))


class GPT(nn.Module):
    """A GPT that returns logits, or the mean cross-entropy in nats per byte if targets are
    given.
    """

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.config = config
        self.bytes = nn.Embedding(VOCABULARY, config.width)
        self.positions = nn.Embedding(config.context, config.width)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.num_layers))
        self.norm = nn.LayerNorm(config.width)
        self.head = nn.Linear(config.width, VOCABULARY, bias=False)
        self.apply(_initialize)
        for (
            block
        ) in self.blocks:  # the residual stream starts with the same variance at every depth
            for last in (block.attention.out, block.down):
                nn.init.normal_(last.weight, std=0.02 / (2 * config.num_layers) ** 0.5)
        if config.tied_head:
            self.head.weight = self.bytes.weight

    def forward(self, tokens: Tensor, targets: Tensor | None = None) -> Tensor:
        """Compute logits or the loss.

        tokens, targets: (batch, length) integers in 0..255, length <= context.
        """
        where = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.bytes(tokens) + self.positions(where)
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        if targets is None:
            return logits
        return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


def _initialize(module: nn.Module) -> None:
    if isinstance(module, nn.Linear | nn.Embedding):
        nn.init.normal_(module.weight, std=0.02)
    if isinstance(module, nn.Linear) and module.bias is not None:
        nn.init.zeros_(module.bias)


@torch.no_grad()
def generate(
    model: nn.Module, prompt: bytes, length: int, *, context: int, temperature: float, seed: int = 0
) -> bytes:
    """Continue `prompt` by `length` bytes; temperature 0 takes the most likely byte.

    Under ZeRO-3 each forward is collective, so every rank must call this. The shared seed gives all
    ranks the same bytes.
    """
    device = next(model.parameters()).device
    tokens = torch.tensor([list(prompt)], device=device)
    dice = torch.Generator().manual_seed(seed)
    was_training = model.training
    model.eval()
    for _ in range(length):
        logits = model(tokens[:, -context:])[0, -1].float().cpu()
        chosen = _choose(logits, temperature, dice).to(device)
        tokens = torch.cat([tokens, chosen.view(1, 1)], dim=1)
    model.train(was_training)
    return bytes(tokens[0].tolist())


def _choose(logits: Tensor, temperature: float, dice: torch.Generator) -> Tensor:
    if temperature == 0:
        return logits.argmax()
    return torch.multinomial(torch.softmax(logits / temperature, dim=-1), 1, generator=dice)
