"""DeepSpeed's expert layers: a gate that sends each token to k of several experts, and what stands
around it.

Every rank has all experts, whatever `ep_size` says: their states are sharded as those of any other
layer, so nothing is to be gained by leaving experts to some ranks, and no token travels.  A gate
looks at the tokens of its own rank alone, as in DeepSpeed, where ranks exchange what gates have
chosen; so outputs and gradients are the same.

Each expert takes a fixed number of tokens, its capacity.  A token's place in an expert is a slot; a
route is (expert, slot, weight).  Tokens beyond the capacity are dropped: that route's expert is -1.
"""

from __future__ import annotations

import logging
from copy import deepcopy
from dataclasses import dataclass
from math import ceil
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...base.errors import ConfigError
from ...base.log import log_once
from . import comm as dist

Gated = tuple[Any, ...]


@dataclass(frozen=True)
class Routes:
    """Where the tokens of one batch go.

    l_aux: the loss of uneven loads.  Of each of the k choices, one tensor [tokens]: experts (-1:
    dropped), slots and weights (0 where dropped).  counts: tokens that chose each expert.
    """

    l_aux: Tensor
    capacity: int
    experts: list[Tensor]
    slots: list[Tensor]
    weights: list[Tensor]
    counts: Tensor

    def sparse(self) -> Gated:
        """Return them as DeepSpeed's gates do with `sparse_routes`."""
        return (
            self.l_aux,
            self.capacity,
            len(self.counts),
            self.experts,
            self.slots,
            self.weights,
            self.counts,
        )

    def dense(self) -> Gated:
        """Return (l_aux, weights [tokens, experts, slots], where they are not zero, counts)."""
        shape = (len(self.experts[0]), len(self.counts), self.capacity)
        whole = torch.zeros(shape, dtype=self.weights[0].dtype, device=self.weights[0].device)
        for experts, slots, weights in zip(self.experts, self.slots, self.weights, strict=True):
            kept = torch.nonzero(experts >= 0).squeeze(1)
            whole = whole.index_put(
                (kept, experts[kept], slots[kept]), weights[kept], accumulate=True
            )
        return self.l_aux, whole, whole.bool(), self.counts


def _capacity(gates: Tensor, capacity_factor: float, min_capacity: int) -> int:
    """Return how many tokens an expert takes.  gates: [tokens, experts]."""
    tokens, experts = gates.shape
    return max(ceil(tokens / experts * capacity_factor), int(min_capacity))


def _largest(counts: Tensor, ep_group: Any) -> int:
    """Return the capacity that drops no token: of the fullest expert, on any rank of the group.
    Collective there.
    """
    most = counts.max().reshape(1)
    if ep_group is not None and dist.get_world_size(group=ep_group) > 1:
        dist.all_reduce(most, op=dist.ReduceOp.MAX, group=ep_group)
    return int(most)


def _unevenness(gates: Tensor, mask: Tensor) -> Tensor:
    """Return the loss that is 1 where tokens, and the gates' weights, are spread evenly over the
    experts.
    """
    return (gates.mean(0) * mask.float().mean(0)).sum() * gates.shape[1]


def _queued(mask: Tensor) -> Tensor:
    """Return each token's place among those that chose the same expert, in order.  [tokens,
    experts], ints.
    """
    return mask.cumsum(0) - 1


def _of_chosen(table: Tensor, chosen: Tensor) -> Tensor:
    return table.gather(1, chosen.unsqueeze(1)).squeeze(1)


def _routes(
    l_aux: Tensor,
    capacity: int,
    chosen: list[Tensor],
    slots: list[Tensor],
    weights: list[Tensor],
    kept: list[Tensor],
    counts: Tensor,
) -> Routes:
    """Put routes together, without those that are not kept."""
    return Routes(
        l_aux,
        capacity,
        [each.where(keep, -1) for each, keep in zip(chosen, kept, strict=True)],
        [each.where(keep, 0) for each, keep in zip(slots, kept, strict=True)],
        [each * keep for each, keep in zip(weights, kept, strict=True)],
        counts.detach(),
    )


def _shared_out(weights: list[Tensor], kept: list[Tensor]) -> list[Tensor]:
    """Return weights whose sum over the kept choices of a token is 1."""
    held = [each * keep for each, keep in zip(weights, kept, strict=True)]
    total = torch.stack(held).sum(0)
    total = total.clamp(min=torch.finfo(total.dtype).eps)
    return [each / total for each in held]


def multiplicative_jitter(x: Tensor, device: Any = None, epsilon: float = 1e-2) -> Tensor:
    """Return a tensor times random factors within 1 +- epsilon."""
    return x if epsilon == 0 else x * torch.empty_like(x).uniform_(1 - epsilon, 1 + epsilon)


def gumbel_rsample(shape: tuple[int, ...], device: Any) -> Tensor:
    """Return noise of the standard Gumbel distribution: the largest of logits with it added is
    drawn by softmax.
    """
    return -torch.empty(shape, device=device).exponential_().log()


def top1gating(
    logits: Tensor,
    capacity_factor: float,
    min_capacity: int,
    used_token: Tensor | None = None,
    noisy_gate_policy: str | None = None,
    drop_tokens: bool = True,
    use_rts: bool = True,
    ep_group: Any = None,
    sparse_routes: bool = False,
) -> Gated:
    """Send each token to the expert of its largest logit.  logits: [tokens, experts].

    used_token: [tokens], 0 for those that go nowhere.  noisy_gate_policy: "RSample": drawn by
    softmax.  drop_tokens: else every expert takes as many as chose the fullest one on any rank of
    `ep_group`.  use_rts: which of too many tokens stay is drawn; else the first ones stay.
    """
    gates = F.softmax(logits, dim=1)
    noisy = (
        logits + gumbel_rsample(tuple(logits.shape), logits.device)
        if noisy_gate_policy == "RSample"
        else gates
    )
    chosen = noisy.argmax(1)
    mask = F.one_hot(chosen, logits.shape[1])
    if used_token is not None:
        mask = mask * used_token.reshape(-1, 1).to(mask.dtype)
    counts = mask.sum(0)
    l_aux = _unevenness(gates, mask)
    capacity = (
        _capacity(gates, capacity_factor, min_capacity)
        if drop_tokens
        else _largest(counts, ep_group)
    )
    if drop_tokens and use_rts:
        drawn = mask * torch.rand(mask.shape, device=mask.device).clamp(min=1e-6)
        first = drawn.topk(min(capacity, len(mask)), dim=0).indices
        mask = mask * torch.zeros_like(mask).scatter_(0, first, 1)
    slots = _of_chosen(_queued(mask), chosen)
    kept = _of_chosen(mask, chosen).bool() & (slots < capacity)
    found = _routes(l_aux, capacity, [chosen], [slots], [_of_chosen(gates, chosen)], [kept], counts)
    return found.sparse() if sparse_routes else found.dense()


def top2gating(
    logits: Tensor,
    capacity_factor: float,
    min_capacity: int,
    drop_tokens: bool = True,
    ep_group: Any = None,
    top2_2nd_expert_sampling: bool = True,
    sparse_routes: bool = False,
) -> Gated:
    """Send each token to the experts of its two largest logits.  Arguments as for `top1gating`.

    First choices have the first slots.  top2_2nd_expert_sampling: the second expert is drawn by
    softmax.
    """
    gates = F.softmax(logits, dim=1)
    experts = logits.shape[1]
    first = gates.argmax(1)
    noise = gumbel_rsample(tuple(logits.shape), logits.device) if top2_2nd_expert_sampling else 0.0
    mask = F.one_hot(first, experts)
    second = (logits + noise).masked_fill(mask.bool(), -torch.inf).argmax(1)
    other = F.one_hot(second, experts)
    counts = (mask + other).sum(0)
    capacity = (
        _capacity(gates, capacity_factor * 2, min_capacity)
        if drop_tokens
        else _largest(counts, ep_group)
    )
    slots = [_of_chosen(_queued(mask), first), _of_chosen(_queued(other) + mask.sum(0), second)]
    kept = [each < capacity for each in slots]
    weights = _shared_out([_of_chosen(gates, first), _of_chosen(gates, second)], kept)
    found = _routes(
        _unevenness(gates, mask), capacity, [first, second], slots, weights, kept, counts
    )
    return found.sparse() if sparse_routes else found.dense()


def topkgating(
    logits: Tensor,
    k: int,
    capacity_factor: float,
    min_capacity: int,
    drop_tokens: bool = True,
    ep_group: Any = None,
    drop_policy: str = "probs",
    sparse_routes: bool = False,
) -> Gated:
    """Send each token to the experts of its k largest logits.  Arguments as for `top1gating`.

    drop_policy: which of too many tokens stay in an expert: "probs": those of the largest gates;
    "position": the first.
    """
    gates = F.softmax(logits, dim=1)
    places = logits.topk(k, dim=1).indices
    mask = torch.zeros(logits.shape, dtype=torch.long, device=logits.device).scatter_(1, places, 1)
    counts = mask.sum(0)
    l_aux = _unevenness(gates, mask) / k
    if not drop_tokens:
        capacity = _largest(counts, ep_group)
    else:
        capacity = _capacity(gates, capacity_factor * k, min_capacity)
        if drop_policy == "probs":
            best = (gates * mask).topk(min(capacity, len(mask)), dim=0).indices
            mask = mask * torch.zeros_like(mask).scatter_(0, best, 1)
        elif drop_policy != "position":
            raise ValueError(f"Invalid drop_policy: {drop_policy}")
    queued = _queued(mask)
    chosen = list(places.unbind(1))
    slots = [_of_chosen(queued, each) for each in chosen]
    kept = [
        _of_chosen(mask, each).bool() & (slot < capacity)
        for each, slot in zip(chosen, slots, strict=True)
    ]
    weights = _shared_out([_of_chosen(gates, each) for each in chosen], kept)
    found = _routes(l_aux, capacity, chosen, slots, weights, kept, counts)
    return found.sparse() if sparse_routes else found.dense()


def _route_slots(
    experts: list[Tensor], slots: list[Tensor], num_experts: int, capacity: int
) -> Tensor:
    """Return [k, tokens]: each route's row among the slots of all experts; one row past them where
    it was dropped.
    """
    rows = [each * capacity + slot for each, slot in zip(experts, slots, strict=True)]
    dropped = num_experts * capacity
    return torch.stack(
        [row.where(each >= 0, dropped) for row, each in zip(rows, experts, strict=True)]
    )


def _sparse_encode(hidden: Tensor, slots: Tensor, num_experts: int, capacity: int) -> Tensor:
    """Return [experts, slots, width]: each token, [tokens, width], in the slots of its routes;
    zeros elsewhere.
    """
    width = hidden.shape[-1]
    rows = hidden.new_zeros(num_experts * capacity + 1, width)
    rows = rows.index_copy(0, slots.reshape(-1), hidden.repeat(len(slots), 1))
    return rows[:-1].reshape(num_experts, capacity, width)


def _sparse_decode(rows: Tensor, slots: Tensor, weights: list[Tensor], num_tokens: int) -> Tensor:
    """Return [tokens, width]: of each token the weighted sum of its rows, of [experts x slots,
    width].
    """
    rows = torch.cat([rows, rows.new_zeros(1, rows.shape[-1])])
    taken = rows[slots.reshape(-1)].reshape(len(slots), num_tokens, -1)
    return (taken * torch.stack(weights).unsqueeze(-1).to(taken.dtype)).sum(0)


class _AllToAll(torch.autograd.Function):
    """Exchange equal parts of a tensor's first dimension between ranks: for expert layers of a
    program's own.
    """

    @staticmethod
    def forward(ctx: Any, group: Any, input: Tensor) -> Tensor:
        """Return the parts that the ranks of the group had for this one.  Collective."""
        ctx.group = group
        output = torch.empty_like(input)
        dist.all_to_all_single(output, input.contiguous(), group=group)
        return output

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, Tensor]:
        """Send the gradients back.  Collective."""
        output = torch.empty_like(grads[0])
        dist.all_to_all_single(output, grads[0].contiguous(), group=ctx.group)
        return None, output


class TopKGate(nn.Module):
    """A linear layer in fp32 that chooses experts."""

    def __init__(
        self,
        model_dim: int,
        num_experts: int,
        k: int = 1,
        capacity_factor: float = 1.0,
        eval_capacity_factor: float = 1.0,
        min_capacity: int = 8,
        noisy_gate_policy: str | None = None,
        drop_tokens: bool = True,
        use_rts: bool = True,
        ep_group: Any = None,
        top2_2nd_expert_sampling: bool = True,
    ) -> None:
        super().__init__()
        self.wg = nn.Linear(model_dim, num_experts, bias=False)
        self.k = k
        self.ep_group = ep_group
        self.min_capacity = min_capacity
        self.capacity_factor = capacity_factor
        self.eval_capacity_factor = eval_capacity_factor
        self.noisy_gate_policy = noisy_gate_policy
        self.drop_tokens = drop_tokens
        self.use_rts = use_rts
        self.top2_2nd_expert_sampling = top2_2nd_expert_sampling

    def forward(
        self, input: Tensor, used_token: Tensor | None = None, sparse_routes: bool = False
    ) -> Gated:
        """Return what the gating function of k does for tokens [tokens, width]."""
        given = input.float()
        if self.noisy_gate_policy == "Jitter" and self.training:
            given = multiplicative_jitter(given)
        with torch.autocast(given.device.type, enabled=False):
            logits = F.linear(given, self.wg.weight.float())
        factor = self.capacity_factor if self.training else self.eval_capacity_factor
        common: dict[str, Any] = {
            "drop_tokens": self.drop_tokens,
            "ep_group": self.ep_group,
            "sparse_routes": sparse_routes,
        }
        if self.k == 1:
            policy = self.noisy_gate_policy if self.training else None
            return top1gating(
                logits,
                factor,
                self.min_capacity,
                used_token,
                policy,
                use_rts=self.use_rts,
                **common,
            )
        if self.k == 2:
            common["top2_2nd_expert_sampling"] = self.top2_2nd_expert_sampling
            return top2gating(logits, factor, self.min_capacity, **common)
        return topkgating(logits, self.k, factor, self.min_capacity, **common)


class Experts(nn.Module):
    """Copies of one module; each takes the slots of its own.

    ep_size: the number of ranks over which DeepSpeed would spread these experts.
    """

    def __init__(
        self,
        expert: nn.Module,
        num_local_experts: int = 1,
        expert_group_name: str | None = None,
        *,
        ep_size: int = 1,
    ) -> None:
        super().__init__()
        self.ep_size = ep_size
        self.deepspeed_experts = nn.ModuleList(deepcopy(expert) for _ in range(num_local_experts))
        self.num_local_experts = num_local_experts
        for param in self.deepspeed_experts.parameters():
            marked: Any = param
            marked.allreduce = False
            marked.group_name = expert_group_name

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *rest: Any) -> None:
        """Refuse one rank's experts of a DeepSpeed model: they would be taken for the first ones on
        every rank.
        """
        super()._load_from_state_dict(state_dict, prefix, *rest)
        errors: list[str] = rest[-1]
        start = f"{prefix}deepspeed_experts."
        given = {key[len(start) :].partition(".")[0] for key in state_dict if key.startswith(start)}
        number = self.num_local_experts
        if self.ep_size > 1 and given == {str(place) for place in range(number // self.ep_size)}:
            errors.append(
                f"{start}* has {len(given)} of {number} experts, as one rank of DeepSpeed has with "
                f"ep_size={self.ep_size}; here every rank has all of them. Join the state dicts of "
                f"the ranks: expert i of rank r gets the number r * {len(given)} + i."
            )

    def forward(self, inputs: Tensor) -> Tensor:
        """Return what the experts make of [experts, slots, width]; of several outputs the first
        counts.
        """
        made = [expert(each) for expert, each in zip(self.deepspeed_experts, inputs, strict=True)]
        return torch.stack([each[0] if isinstance(each, tuple) else each for each in made])


class MOELayer(nn.Module):
    """A gate and its experts."""

    def __init__(
        self,
        gate: nn.Module,
        experts: nn.Module,
        ep_group_name: str | None = None,
        ep_size: int = 1,
        num_local_experts: int = 1,
        use_tutel: bool = False,
    ) -> None:
        super().__init__()
        self.gate = gate
        self.experts = experts
        self.ep_group_name = ep_group_name
        self.ep_size = ep_size
        self.num_local_experts = num_local_experts
        self.l_aux = torch.zeros(())
        self.exp_counts = torch.zeros(0)

    def forward(self, hidden: Tensor, used_token: Tensor | None = None) -> Tensor:
        """Return [..., width] of [..., width], and keep `l_aux` and `exp_counts`."""
        tokens = hidden.reshape(-1, hidden.shape[-1])
        self.l_aux, capacity, count, experts, slots, weights, self.exp_counts = self.gate(
            tokens, used_token, True
        )
        rows = _route_slots(experts, slots, count, capacity)
        made = self.experts(_sparse_encode(tokens, rows, count, capacity))
        return _sparse_decode(
            made.reshape(count * capacity, -1), rows, weights, len(tokens)
        ).reshape(hidden.shape)


class MoE(nn.Module):
    """A mixture of experts, which `forward` makes (output, loss of uneven loads, tokens of each
    expert) of.

    expert: the module that experts are copies of.  use_residual: each token also passes through a
    module that all share, and a learned coefficient says how much of both it gets.
    """

    def __init__(
        self,
        hidden_size: int,
        expert: nn.Module,
        num_experts: int = 1,
        ep_size: int = 1,
        k: int = 1,
        capacity_factor: float = 1.0,
        eval_capacity_factor: float = 1.0,
        min_capacity: int = 4,
        use_residual: bool = False,
        noisy_gate_policy: str | None = None,
        drop_tokens: bool = True,
        use_rts: bool = True,
        use_tutel: bool = False,
        enable_expert_tensor_parallelism: bool = False,
        top2_2nd_expert_sampling: bool = True,
    ) -> None:
        super().__init__()
        if num_experts % ep_size:
            raise ConfigError(
                f"Number of experts ({num_experts}) should be divisible by expert parallel size "
                f"({ep_size})"
            )
        if noisy_gate_policy not in (None, "None", "Jitter", "RSample"):
            raise ConfigError(f"Unsupported noisy_gate_policy: {noisy_gate_policy}")
        if ep_size > 1:
            log_once(
                f"MoE(ep_size={ep_size}): every rank keeps all {num_experts} experts, and their "
                "states are sharded as those of other layers are.  Training is the same; "
                "checkpoints name all experts.",
                logging.WARNING,
            )
        self.use_residual = use_residual
        self.num_experts = num_experts
        self.ep_size = ep_size
        self.num_local_experts = num_experts
        self.expert_group_name = f"ep_size_{ep_size}"
        gate = TopKGate(
            hidden_size,
            num_experts,
            k,
            capacity_factor,
            eval_capacity_factor,
            min_capacity,
            noisy_gate_policy,
            drop_tokens,
            use_rts,
            None,
            top2_2nd_expert_sampling,
        )
        experts = Experts(expert, num_experts, self.expert_group_name, ep_size=ep_size)
        self.deepspeed_moe = MOELayer(gate, experts, self.expert_group_name, ep_size, num_experts)
        if use_residual:
            self.mlp = expert
            self.coefficient = nn.Linear(hidden_size, 2)

    def set_deepspeed_parallelism(self, use_data_before_expert_parallel_: bool = False) -> None:
        """Do nothing: no group of ranks is needed."""

    def forward(
        self, hidden_states: Tensor, used_token: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return (output, loss of uneven loads, tokens that chose each expert) for [..., width]."""
        output = self.deepspeed_moe(hidden_states, used_token)
        if self.use_residual:
            shared = self.mlp(hidden_states)
            shared = shared[0] if isinstance(shared, tuple) else shared
            shares = F.softmax(self.coefficient(hidden_states), dim=-1)
            output = output * shares[..., :1] + shared * shares[..., 1:]
        return output, self.deepspeed_moe.l_aux, self.deepspeed_moe.exp_counts
