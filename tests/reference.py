"""Training without sharding: what every stage must reproduce bit by bit.

One process runs every rank's micro-batches and adds gradients in the contract's order: ranks
ascending with fp32 partial sums, one division by the ranks, one rounding to the gradient's dtype.
Written from that sentence, with plain tensors per parameter; of the library only the
master-to-weight cast and the clipping factor are used, which the contract names.
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

# torch's fused and foreach kernels treat the last elements of a tensor by other instructions, which
# round otherwise; where they stand depends on how tensors are cut.  The per-element kernels have no
# such places.
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
    """A model of fp32 masters and weights of `dtype`, trained on the micro-batches of `ranks`
    ranks.

    adds_first: a rank adds its micro-batches before the ranks are summed (stages 0 and 1);
    otherwise after (2 and 3).
    ranks_per_host: of sums by host; 1: in the order of ranks.
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
        """The loss of one micro-batch and the gradients of that loss divided by the
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
        """Losses by rank and micro-batch, and the reduced gradients.  batches[rank][micro]."""
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
        """Add up in fp32, `ranks_per_host` neighbours first and then these sums, and divide by all
        ranks.
        """
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
        """One optimizer step; the losses and the gradient's norm.

        norm: the norm to clip by.  Sums of squares depend on how they are blocked, so a run that is
        compared bitwise is given the engine's own, after it has been compared with the one computed
        here.
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
        """Weights by name."""
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
        if self.shard == 1:  # nothing is summed within a group, so the one sum is the outer one
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
    """The plain loop everybody writes: all samples of a step in one batch.  Losses and final
    weights.
    """
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
