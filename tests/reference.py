"""Training without sharding, which every stage must reproduce bit by bit.

One process runs the micro-batches of every rank and adds gradients in the contract's order: fp32
partial sums in ascending rank order, one division by the number of ranks, and one rounding to the
gradient's dtype. It uses plain tensors per parameter. From the library it uses only the cast from
main weights to weights and the clipping factor, which the contract names.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from deepseek_zero.optim.verdict import clip_factor
from deepseek_zero.precision.policy import cast_master
from tests.models import Batch

MakeOptimizer = Callable[[list[nn.Parameter]], Optimizer]

# torch's fused and foreach kernels process the last elements of a tensor with different
# instructions, which round differently. Which elements are affected depends on how tensors are
# sharded. The per-element kernels treat all elements alike.
OPTIMIZERS: dict[str, MakeOptimizer] = {
    "sgd": lambda params: torch.optim.SGD(
        params, lr=0.05, momentum=0.9, weight_decay=0.01, foreach=False, fused=False
    ),
    "adamw": lambda params: torch.optim.AdamW(
        params, lr=0.01, weight_decay=0.1, foreach=False, fused=False
    ),
}


@dataclass
class Reference:
    """A model with fp32 main weights and weights of `dtype`, trained on the micro-batches of all
    ranks.

    Attributes:
        adds_first: A rank adds its micro-batches before the sum over ranks (stages 0 and 1) and not
            after it (stages 2 and 3).
        ranks_per_host: Size of the partial sums by host; 1: sum in rank order.
    """

    model: nn.Module
    ranks: int
    accumulation: int
    adds_first: bool
    dtype: torch.dtype = torch.float32
    make_optimizer: MakeOptimizer = OPTIMIZERS["sgd"]
    max_norm: float = 0.0
    ranks_per_host: int = 1
    masters: list[nn.Parameter] = field(init=False)

    def __post_init__(self) -> None:
        self.weights = list(self.model.parameters())
        originals = [weight.detach().clone() for weight in self.weights]
        self.masters = self.weights
        if self.dtype != torch.float32:
            self.masters = [nn.Parameter(original) for original in originals]
            for weight in self.weights:
                weight.data = torch.empty_like(weight.data, dtype=self.dtype)
            self._cast()
        self.optimizer = self.make_optimizer(self.masters)

    @property
    def grad_dtype(self) -> torch.dtype:
        return self.dtype if self.accumulation == 1 else torch.float32

    def micro_batch(self, batch: Batch) -> tuple[Tensor, list[Tensor]]:
        """Return the loss of one micro-batch and the gradients of the loss divided by the
        accumulation.
        """
        for weight in self.weights:
            weight.grad = None
        loss = self.model(batch.tokens, batch.targets)
        (loss if self.accumulation == 1 else loss.float() * (1.0 / self.accumulation)).backward()
        found = [
            weight.grad if weight.grad is not None else torch.zeros_like(weight)
            for weight in self.weights
        ]
        return loss.detach(), found

    def gradients(
        self, batches: Sequence[Sequence[Batch]]
    ) -> tuple[list[list[Tensor]], list[Tensor]]:
        """Return losses by rank and micro-batch, and the gradients, of `batches[rank][micro]`."""
        runs = [[self.micro_batch(batch) for batch in of_rank] for of_rank in batches]
        losses = [[loss for loss, _ in of_rank] for of_rank in runs]
        reduced = []
        for number in range(len(self.weights)):
            partials = [[grads[number] for _, grads in of_rank] for of_rank in runs]
            reduced.append(
                self._micro_first(partials) if self.adds_first else self._ranks_first(partials)
            )
        return losses, reduced

    def _micro_first(self, partials: list[list[Tensor]]) -> Tensor:
        local = []
        for of_rank in partials:
            total = of_rank[0].to(self.grad_dtype, copy=True)
            for grad in of_rank[1:]:
                total.add_(grad)
            local.append(total)
        return self._mean(local).to(self.grad_dtype)

    def _ranks_first(self, partials: list[list[Tensor]]) -> Tensor:
        sums = [
            self._mean([of_rank[micro] for of_rank in partials])
            for micro in range(self.accumulation)
        ]
        total = sums[0].to(self.grad_dtype)
        for each in sums[1:]:
            total.add_(each)
        return total

    def _mean(self, of_ranks: list[Tensor]) -> Tensor:
        """Return the fp32 mean of ranks: sum `ranks_per_host` neighbors first, then these sums."""
        runs = [
            of_ranks[start : start + self.ranks_per_host]
            for start in range(0, len(of_ranks), self.ranks_per_host)
        ]
        total = self._sum([self._sum(run) for run in runs])
        return total.div_(float(self.ranks))

    def _sum(self, values: list[Tensor]) -> Tensor:
        total = values[0].float().clone()
        for value in values[1:]:
            total.add_(value)
        return total

    def step(
        self, batches: Sequence[Sequence[Batch]], norm: float | None = None
    ) -> tuple[list[list[Tensor]], float]:
        """Take one optimizer step; return the losses and the gradient norm.

        norm: the norm to clip by. A sum of squares depends on its blocking, so a bitwise comparison
        passes the engine's norm after checking it against the one computed here.
        """
        losses, reduced = self.gradients(batches)
        found = float(torch.stack([grad.double().square().sum() for grad in reduced]).sum().sqrt())
        factor = clip_factor(found if norm is None else norm, self.max_norm)
        for master, grad in zip(self.masters, reduced, strict=True):
            master.grad = grad.float().mul_(factor)
        self.optimizer.step()
        if self.masters is not self.weights:
            self._cast()
        return losses, found

    def _cast(self) -> None:
        for weight, master in zip(self.weights, self.masters, strict=True):
            cast_master(master.data.reshape(-1), weight.data.reshape(-1))

    def values(self) -> dict[str, Tensor]:
        """Return copies of the weights by name."""
        return {name: value.detach().clone() for name, value in self.model.named_parameters()}


@dataclass
class TwoLevels(Reference):
    """The reference over `ranks / shard` groups of `shard` ranks."""

    shard: int = 1

    def _groups(self, of_ranks: list[Any]) -> list[list[Any]]:
        return [of_ranks[first : first + self.shard] for first in range(0, self.ranks, self.shard)]

    def _over_replicas(self, sums: list[Tensor]) -> Tensor:
        total = sums[0].float().clone()
        for each in sums[1:]:
            total.add_(each)
        return total.to(self.grad_dtype)

    def _micro_first(self, partials: list[list[Tensor]]) -> Tensor:
        if self.shard == 1:  # nothing is summed within a group, so the only sum is the outer one
            return super()._micro_first(partials)
        return self._over_replicas(
            [Reference._micro_first(self, group) for group in self._groups(partials)]
        )

    def _ranks_first(self, partials: list[list[Tensor]]) -> Tensor:
        return self._over_replicas(
            [Reference._ranks_first(self, group) for group in self._groups(partials)]
        )


def whole_batch_run(
    model: nn.Module, make_optimizer: MakeOptimizer, steps: Sequence[Sequence[Batch]]
) -> tuple[list[float], dict[str, Tensor]]:
    """Train a plain loop with one batch per step; return losses and final weights."""
    optimizer, losses = make_optimizer(list(model.parameters())), []
    for batches in steps:
        optimizer.zero_grad()
        loss = model(
            torch.cat([each.tokens for each in batches]),
            torch.cat([each.targets for each in batches]),
        )
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, {name: value.detach().clone() for name, value in model.named_parameters()}
