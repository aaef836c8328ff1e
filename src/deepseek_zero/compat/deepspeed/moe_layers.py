"""DeepSpeed's mixture-of-experts layers: gates that send each token to k experts.

Every rank has all experts, regardless of `ep_size`, and no token is sent to another rank. The
states of experts are sharded like those of other layers, so distributing experts would save no
memory. As in DeepSpeed, a gate only uses the tokens of its own rank, so outputs and gradients are
the same.

Each expert has a capacity, the number of tokens that it takes. A token's position in an expert is a
slot, and a route is (expert, slot, weight). Tokens beyond the capacity are dropped, and the expert
of such a route is -1.
"""

from __future__ import annotations

import logging
from copy import deepcopy
from math import ceil
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...base.errors import ConfigError
from ...base.log import log_once
from . import comm as dist

Gated = tuple[Any, ...]


def _capacity(
    gates: Tensor, counts: Tensor, factor: float, least: int, drop_tokens: bool, ep_group: Any
) -> int:
    """Return the number of tokens that an expert takes.

    Without `drop_tokens` it is the smallest number that drops no token on any rank, and every rank
    of the group must call this. Shape of gates: ``(tokens, experts)``.
    """
    if drop_tokens:
        tokens, experts = gates.shape
        return max(ceil(tokens / experts * factor), int(least))
    most = counts.max().reshape(1)
    if ep_group is not None and dist.get_world_size(group=ep_group) > 1:
        dist.all_reduce(most, op=dist.ReduceOp.MAX, group=ep_group)
    return int(most)


def _unevenness(gates: Tensor, mask: Tensor) -> Tensor:
    """Return the load-balancing loss.

    It is 1 if tokens and gate weights are spread evenly over the experts.
    """
    return (gates.mean(0) * mask.float().mean(0)).sum() * gates.shape[1]


def _queued(mask: Tensor) -> Tensor:
    """Return each token's position among those that chose the same expert.

    The result is an integer tensor of shape ``(tokens, experts)``.
    """
    return mask.cumsum(0) - 1


def _best(mask: Tensor, scores: Tensor, capacity: int) -> Tensor:
    """Keep the tokens of each expert with the largest scores, at most `capacity` of them."""
    best = (mask * scores).topk(min(capacity, len(mask)), dim=0).indices
    return mask * torch.zeros_like(mask).scatter_(0, best, 1)


def _of_chosen(table: Tensor, chosen: Tensor) -> Tensor:
    """Return the entries of the chosen experts.

    Shapes: ``(tokens, experts)`` and ``(k, tokens)``, which is that of the result.
    """
    return table.gather(1, chosen.mT).mT


def _gated(
    l_aux: Tensor,
    capacity: int,
    chosen: Tensor,
    slots: Tensor,
    weights: Tensor,
    kept: Tensor,
    counts: Tensor,
    sparse_routes: bool,
) -> Gated:
    """Return the routes of the tokens of one batch in one of DeepSpeed's two forms.

    Routes that are not kept are dropped: expert -1, slot 0 and weight 0.

    Args:
        l_aux: Load-balancing loss.
        capacity: Slots per expert.
        chosen: Experts, shape ``(k, tokens)``.
        slots: Slots, in the same form.
        weights: Weights, in the same form.
        kept: Whether a route is kept, in the same form.
        counts: Number of tokens that chose each expert, shape ``(experts,)``.
        sparse_routes: Whether to return the routes in sparse form.

    Returns:
        In sparse form: the loss, the capacity, the number of experts, and experts, slots and
        weights of shape ``(k, tokens)``. In dense form: the loss, weights of shape
        ``(tokens, experts, slots)``, and the mask of nonzero weights. The counts are the last
        element of both.
    """
    counts = counts.detach()
    slots = slots.where(kept, 0)
    weights = weights * kept
    if sparse_routes:
        return l_aux, capacity, len(counts), chosen.where(kept, -1), slots, weights, counts
    _, tokens = kept.nonzero(as_tuple=True)
    whole = weights.new_zeros(kept.shape[1], len(counts), capacity)
    index = tokens, chosen[kept], slots[kept]
    whole = whole.index_put(index, weights[kept], accumulate=True)
    return l_aux, whole, whole.bool(), counts


def _shared_out(weights: Tensor, kept: Tensor) -> Tensor:
    """Normalize the weights so that the sum over the kept choices of a token is 1."""
    held = weights * kept
    return held / held.sum(0).clamp(min=torch.finfo(held.dtype).eps)


def multiplicative_jitter(x: Tensor, device: Any = None, epsilon: float = 1e-2) -> Tensor:
    """Multiply a tensor by uniform random factors in [1 - epsilon, 1 + epsilon].

    Args:
        x: Tensor to multiply; it is not changed.
        device: Ignored.
        epsilon: Half the width of the interval.

    Returns:
        The product, in the shape and dtype of `x`.
    """
    return x if epsilon == 0 else x * torch.empty_like(x).uniform_(1 - epsilon, 1 + epsilon)


def gumbel_rsample(shape: tuple[int, ...], device: Any) -> Tensor:
    """Sample from the standard Gumbel distribution.

    The argmax of logits plus this noise is a sample from their softmax.

    Args:
        shape: Shape of the result.
        device: Device of the result.

    Returns:
        A random tensor of shape `shape`.
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
    """Route each token to the expert with the largest logit.

    Args:
        logits: Shape ``(tokens, experts)``.
        capacity_factor: Capacity relative to an even distribution.
        min_capacity: Smallest number of tokens for which an expert has slots.
        used_token: Shape ``(tokens,)``; 0 for tokens that are not routed.
        noisy_gate_policy: "RSample" to sample the expert from the softmax.
        drop_tokens: Whether to limit the capacity. Otherwise it is that of the fullest expert on
            any rank of `ep_group`.
        use_rts: Whether to choose at random which tokens to drop. Otherwise the last ones are
            dropped.
        ep_group: Process group for `drop_tokens=False`.
        sparse_routes: Whether to return the routes in sparse form.

    Returns:
        In dense form: the load-balancing loss, weights of shape ``(tokens, experts, slots)``, the
        mask of nonzero weights, and the number of tokens that chose each expert. In sparse form:
        the loss, the capacity, the number of experts, the experts, slots and weights, each of shape
        ``(k, tokens)``, and the counts.

    Note:
        Collective if `drop_tokens` is false: every rank of `ep_group` must call it.
    """
    gates = F.softmax(logits, dim=1)
    noisy = (
        logits + gumbel_rsample(tuple(logits.shape), logits.device)
        if noisy_gate_policy == "RSample"
        else gates
    )
    chosen = noisy.argmax(1)[None]
    mask = F.one_hot(chosen[0], logits.shape[1])
    if used_token is not None:
        mask = mask * used_token.reshape(-1, 1).to(mask.dtype)
    counts = mask.sum(0)
    l_aux = _unevenness(gates, mask)
    capacity = _capacity(gates, counts, capacity_factor, min_capacity, drop_tokens, ep_group)
    if drop_tokens and use_rts:
        mask = _best(mask, torch.rand(mask.shape, device=mask.device).clamp(min=1e-6), capacity)
    slots = _of_chosen(_queued(mask), chosen)
    kept = _of_chosen(mask, chosen).bool() & (slots < capacity)
    weights = _of_chosen(gates, chosen)
    return _gated(l_aux, capacity, chosen, slots, weights, kept, counts, sparse_routes)


def top2gating(
    logits: Tensor,
    capacity_factor: float,
    min_capacity: int,
    drop_tokens: bool = True,
    ep_group: Any = None,
    top2_2nd_expert_sampling: bool = True,
    sparse_routes: bool = False,
) -> Gated:
    """Route each token to the experts with the two largest logits.

    First choices have the first slots.

    Args:
        logits: Shape ``(tokens, experts)``.
        capacity_factor: Capacity relative to an even distribution.
        min_capacity: Smallest number of tokens for which an expert has slots.
        drop_tokens: Whether to limit the capacity. Otherwise it is that of the fullest expert on
            any rank of `ep_group`.
        ep_group: Process group over which the fullest expert is found if `drop_tokens` is false.
        top2_2nd_expert_sampling: Whether to sample the second expert from the softmax.
        sparse_routes: Whether to return the routes in sparse form.

    Returns:
        In dense form: the load-balancing loss, weights of shape ``(tokens, experts, slots)``, the
        mask of nonzero weights, and the number of tokens that chose each expert. In sparse form:
        the loss, the capacity, the number of experts, the experts, slots and weights, each of shape
        ``(k, tokens)``, and the counts.

    Note:
        Collective if `drop_tokens` is false: every rank of `ep_group` must call it.
    """
    gates = F.softmax(logits, dim=1)
    experts = logits.shape[1]
    first = gates.argmax(1)
    noise = gumbel_rsample(tuple(logits.shape), logits.device) if top2_2nd_expert_sampling else 0.0
    mask = F.one_hot(first, experts)
    second = (logits + noise).masked_fill(mask.bool(), -torch.inf).argmax(1)
    other = F.one_hot(second, experts)
    counts = (mask + other).sum(0)
    capacity = _capacity(gates, counts, capacity_factor * 2, min_capacity, drop_tokens, ep_group)
    chosen = torch.stack((first, second))
    queued = _queued(torch.cat((mask, other)))  # first choices first
    slots = _of_chosen(queued, chosen.reshape(1, -1)).reshape(2, -1)
    kept = slots < capacity
    weights = _shared_out(_of_chosen(gates, chosen), kept)
    l_aux = _unevenness(gates, mask)
    return _gated(l_aux, capacity, chosen, slots, weights, kept, counts, sparse_routes)


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
    """Route each token to the experts with the k largest logits.

    Args:
        logits: Shape ``(tokens, experts)``.
        k: Number of experts per token.
        capacity_factor: Capacity relative to an even distribution.
        min_capacity: Smallest number of tokens for which an expert has slots.
        drop_tokens: Whether to limit the capacity. Otherwise it is that of the fullest expert on
            any rank of `ep_group`.
        ep_group: Process group over which the fullest expert is found if `drop_tokens` is false.
        drop_policy: Which tokens an expert keeps: "probs" for those with the largest gates,
            "position" for the first.
        sparse_routes: Whether to return the routes in sparse form.

    Returns:
        In dense form: the load-balancing loss, weights of shape ``(tokens, experts, slots)``, the
        mask of nonzero weights, and the number of tokens that chose each expert. In sparse form:
        the loss, the capacity, the number of experts, the experts, slots and weights, each of shape
        ``(k, tokens)``, and the counts.

    Raises:
        ValueError: `drop_policy` is unknown.

    Note:
        Collective if `drop_tokens` is false: every rank of `ep_group` must call it.
    """
    gates = F.softmax(logits, dim=1)
    places = logits.topk(k, dim=1).indices
    mask = torch.zeros(logits.shape, dtype=torch.long, device=logits.device).scatter_(1, places, 1)
    counts = mask.sum(0)
    l_aux = _unevenness(gates, mask) / k
    capacity = _capacity(gates, counts, capacity_factor * k, min_capacity, drop_tokens, ep_group)
    if drop_tokens and drop_policy == "probs":
        mask = _best(mask, gates, capacity)
    elif drop_tokens and drop_policy != "position":
        raise ValueError(f"Invalid drop_policy: {drop_policy}")
    chosen = places.mT
    slots = _of_chosen(_queued(mask), chosen)
    kept = _of_chosen(mask, chosen).bool() & (slots < capacity)
    weights = _shared_out(_of_chosen(gates, chosen), kept)
    return _gated(l_aux, capacity, chosen, slots, weights, kept, counts, sparse_routes)


def _route_slots(experts: Tensor, slots: Tensor, num_experts: int, capacity: int) -> Tensor:
    """Return each route's row among the slots of all experts, shape ``(k, tokens)``.

    Dropped routes have the row after the last slot.
    """
    return (experts * capacity + slots).where(experts >= 0, num_experts * capacity)


def _sparse_encode(hidden: Tensor, slots: Tensor, num_experts: int, capacity: int) -> Tensor:
    """Copy each token into the slots of its routes.

    `hidden` has shape ``(tokens, width)``, and the result ``(experts, slots, width)`` with zeros in
    unused slots.
    """
    width = hidden.shape[-1]
    rows = hidden.new_zeros(num_experts * capacity + 1, width)
    rows = rows.index_copy(0, slots.reshape(-1), hidden.repeat(len(slots), 1))
    return rows[:-1].reshape(num_experts, capacity, width)


def _sparse_decode(rows: Tensor, slots: Tensor, weights: Tensor, num_tokens: int) -> Tensor:
    """Return the weighted sum of each token's rows, shape ``(tokens, width)``.

    `rows` has shape ``(experts * slots, width)``. `num_tokens` is ignored.
    """
    rows = torch.cat([rows, rows.new_zeros(1, rows.shape[-1])])
    return (rows[slots] * weights.unsqueeze(-1).to(rows.dtype)).sum(0)


def _exchanged(values: Tensor, group: Any) -> Tensor:
    output = torch.empty_like(values)
    dist.all_to_all_single(output, values.contiguous(), group=group)
    return output


class _AllToAll(torch.autograd.Function):
    """Differentiable all-to-all of equal parts of a tensor's first dimension.

    It is for MoE layers of programs.
    """

    @staticmethod
    def forward(ctx: Any, group: Any, input: Tensor) -> Tensor:
        """Exchange the parts of a tensor.

        Args:
            ctx: Context of the autograd function.
            group: The process group.
            input: Tensor whose first dimension is divisible by the size of the group.

        Note:
            Every rank of the group must call this.
        """
        ctx.group = group
        return _exchanged(input, group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, Tensor]:
        """Exchange the gradients in the same way. Every rank must call this."""
        return None, _exchanged(grads[0], ctx.group)


class TopKGate(nn.Module):
    """Choose the experts of each token with a linear layer in fp32.

    Args:
        model_dim: Width of a token.
        num_experts: Number of experts.
        k: Number of experts per token.
        capacity_factor: Capacity in training, relative to an even distribution.
        eval_capacity_factor: The same in evaluation.
        min_capacity: Smallest number of tokens for which an expert has slots.
        noisy_gate_policy: "Jitter", "RSample" or None.
        drop_tokens: Whether tokens beyond the capacity of an expert are dropped.
        use_rts: Whether to choose at random which tokens to drop. Otherwise the last ones are
            dropped.
        ep_group: Process group over which the fullest expert is found if `drop_tokens` is false.
        top2_2nd_expert_sampling: Whether to for k = 2, sample the second expert from the softmax.
    """

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
        """Route tokens with the gating function for k.

        Args:
            input: Tokens, shape ``(tokens, model_dim)``.
            used_token: Shape ``(tokens,)``; 0 for tokens that are not routed. Only for k = 1.
            sparse_routes: Whether to return the routes in sparse form.

        Returns:
            The result of `top1gating`, `top2gating` or `topkgating`.
        """
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
    """Copies of one module, one for each expert.

    Args:
        expert: The module to copy.
        num_local_experts: Number of copies.
        expert_group_name: Value of `group_name` of the parameters.
        ep_size: Number of ranks over which DeepSpeed would distribute the experts.
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
        """Load the experts, but report an error for one rank's experts of DeepSpeed.

        They would otherwise be loaded as the first ones on every rank.
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
        """Apply each expert to its slots.

        Args:
            inputs: Shape ``(experts, slots, width)``. If an expert returns a tuple, its first
                element is used.

        Returns:
            The outputs of all experts, shape ``(experts, slots, width)``.
        """
        outputs = []
        for expert, each in zip(self.deepspeed_experts, inputs, strict=True):
            output = expert(each)
            if isinstance(output, tuple):
                output = output[0]
            outputs.append(output)
        return torch.stack(outputs)


class MOELayer(nn.Module):
    """Send tokens to experts with a gate and combine the outputs of the experts.

    Args:
        gate: Module that chooses the experts of each token, for example a TopKGate.
        experts: Module that applies each expert to its tokens, for example `Experts`.
        ep_group_name: Stored as an attribute.
        ep_size: Stored as an attribute.
        num_local_experts: Stored as an attribute.
        use_tutel: Ignored.
    """

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
        self.l_aux = torch.zeros((), device="cpu")
        self.exp_counts = torch.zeros(0, device="cpu")

    def forward(self, hidden: Tensor, used_token: Tensor | None = None) -> Tensor:
        """Route tokens to experts and combine the results.

        The attributes `l_aux` and `exp_counts` are updated.

        Args:
            hidden: Shape ``(..., width)``.
            used_token: Shape ``(tokens,)``; 0 for tokens that are not routed.

        Returns:
            The combined outputs, in the shape of `hidden`.
        """
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
    """A mixture-of-experts layer: each token is processed by `k` of `num_experts` modules.

    Args:
        hidden_size: Width of a token.
        expert: The module of which experts are copies.
        num_experts: Number of experts, a multiple of `ep_size`.
        ep_size: Number of ranks over which DeepSpeed would distribute the experts.
        k: Number of experts per token.
        capacity_factor: Capacity in training, relative to an even distribution.
        eval_capacity_factor: The same in evaluation.
        min_capacity: Smallest number of tokens for which an expert has slots.
        use_residual: Whether to add the output of a shared module, with learned coefficients for
            both.
        noisy_gate_policy: "Jitter", "RSample" or None.
        drop_tokens: Whether tokens beyond the capacity of an expert are dropped.
        use_rts: Whether to choose at random which tokens to drop. Otherwise the last ones are
            dropped.
        use_tutel: Ignored.
        enable_expert_tensor_parallelism: Ignored.
        top2_2nd_expert_sampling: Whether to for k = 2, sample the second expert from the softmax.

    Raises:
        ConfigError: `num_experts` is not a multiple of `ep_size`, or `noisy_gate_policy` is
            unknown.
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
        """Do nothing: no process group is needed."""

    def forward(
        self, hidden_states: Tensor, used_token: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Apply the layer to hidden states.

        Args:
            hidden_states: Shape ``(..., width)``.
            used_token: Shape ``(tokens,)``; 0 for tokens that are not routed.

        Returns:
            The output, the load-balancing loss, and the number of tokens that chose each expert.
        """
        output = self.deepspeed_moe(hidden_states, used_token)
        if self.use_residual:
            shared = self.mlp(hidden_states)
            shared = shared[0] if isinstance(shared, tuple) else shared
            shares = F.softmax(self.coefficient(hidden_states), dim=-1)
            output = output * shares[..., :1] + shared * shares[..., 1:]
        return output, self.deepspeed_moe.l_aux, self.deepspeed_moe.exp_counts
