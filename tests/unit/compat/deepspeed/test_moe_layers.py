"""DeepSpeed's expert layers: the routing of the gates and the outputs of the layers."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from deepseek_zero.base.errors import ConfigError
from deepseek_zero.compat.deepspeed.moe import (
    has_moe_layers,
    split_params_into_shared_and_expert_params,
)
from deepseek_zero.compat.deepspeed.moe_layers import (
    MoE,
    _route_slots,
    _sparse_decode,
    _sparse_encode,
    top1gating,
    top2gating,
    topkgating,
)

TOKENS, EXPERTS, WIDTH = 12, 4, 6


def gated(k: int, logits: Tensor, factor: float, **more: Any) -> Any:
    if k == 1:
        return top1gating(logits, factor, 0, use_rts=False, **more)
    if k == 2:
        return top2gating(logits, factor, 0, top2_2nd_expert_sampling=False, **more)
    return topkgating(logits, k, factor, 0, drop_policy="position", **more)


def routes_by_hand(k: int, logits: Tensor, capacity: int) -> tuple[Tensor, Tensor]:
    """Route one token at a time, for ``k == 2`` all first choices first.

    Returns weights of shape [tokens, experts, slots] and the number of kept tokens per expert.
    """
    gates, best = logits.softmax(1), logits.topk(k, dim=1).indices
    pairs = [
        (token, int(best[token, choice])) for token in range(len(logits)) for choice in range(k)
    ]
    if k == 2:
        pairs = [
            (token, int(best[token, choice])) for choice in range(k) for token in range(len(logits))
        ]
    taken, found = [0] * logits.shape[1], torch.zeros(*logits.shape, capacity)
    for token, expert in pairs:
        if taken[expert] < capacity:
            found[token, expert, taken[expert]] = gates[token, expert]
        taken[expert] += 1
    if k > 1:  # the weights of the kept experts of a token add up to 1
        found /= found.sum((1, 2), keepdim=True).clamp(min=torch.finfo(found.dtype).eps)
    return found, torch.tensor(taken)


@pytest.mark.parametrize("k", [1, 2, 3])
@pytest.mark.parametrize("factor", [0.4, 1.0, 8.0])
def test_gates_route_tokens_like_a_loop(k: int, factor: float) -> None:
    logits = torch.randn(TOKENS, EXPERTS, generator=torch.Generator().manual_seed(k))
    _, weights, mask, counts = gated(k, logits, factor)
    wanted, taken = routes_by_hand(k, logits, weights.shape[-1])
    torch.testing.assert_close(weights, wanted)
    assert torch.equal(mask, wanted > 0) and torch.equal(counts, taken)


def test_the_largest_gates_are_kept_and_capacity_can_follow_the_fullest_expert() -> None:
    logits = torch.tensor([[1.0, 0.0], [3.0, 0.0], [2.0, 0.0]])
    # The capacity of an expert is 2, and the first token has the smallest gate value.
    kept = topkgating(logits, 1, 1.0, 0)[2]
    assert kept.any(2)[:, 0].tolist() == [False, True, True]
    drawn = top1gating(logits, 1.0, 0)[2]
    assert drawn.shape[-1] == 2 and drawn.any(2)[:, 0].sum() == 2
    assert top1gating(logits, 1.0, 0, drop_tokens=False)[1].shape[-1] == 3
    assert top1gating(logits, 1.0, 0, used_token=torch.tensor([1, 0, 1]))[3].tolist() == [2, 0]


def test_spread_evenly_the_loss_of_uneven_loads_is_1() -> None:
    even = 50 * torch.eye(EXPERTS).repeat(3, 1)
    assert float(top1gating(even, 1.0, 0)[0]) == pytest.approx(1.0)
    assert float(top1gating(even[:1].repeat(4, 1), 1.0, 0)[0]) == pytest.approx(EXPERTS)


@pytest.mark.parametrize("k", [1, 2, 3])
def test_rows_by_slot_are_the_products_with_the_dense_weights(k: int) -> None:
    made = torch.Generator().manual_seed(k)
    logits, hidden = (
        torch.randn(TOKENS, EXPERTS, generator=made),
        torch.randn(TOKENS, WIDTH, generator=made),
    )
    _, weights, mask, _ = gated(k, logits, 0.5)
    _, capacity, _, experts, slots, shares, _ = gated(k, logits, 0.5, sparse_routes=True)
    rows = _route_slots(experts, slots, EXPERTS, capacity)
    sent = _sparse_encode(hidden, rows, EXPERTS, capacity)
    torch.testing.assert_close(sent, torch.einsum("sec,sm->ecm", mask.float(), hidden))
    made_of = torch.randn(sent.shape, generator=made)
    back = _sparse_decode(made_of.view(-1, WIDTH), rows, shares, TOKENS)
    torch.testing.assert_close(back, torch.einsum("sec,ecm->sm", weights, made_of))


@pytest.mark.parametrize("residual", [False, True])
def test_a_layer_gives_each_token_its_experts_times_their_gates(residual: bool) -> None:
    torch.manual_seed(2)
    layer = MoE(
        WIDTH, nn.Linear(WIDTH, WIDTH), EXPERTS, k=2, drop_tokens=False, use_residual=residual
    )
    layer.deepspeed_moe.gate.top2_2nd_expert_sampling = False
    for expert in layer.deepspeed_moe.experts.deepspeed_experts:
        nn.init.normal_(expert.weight)
    hidden = torch.randn(3, TOKENS // 3, WIDTH)
    output, l_aux, counts = layer(hidden)
    gates = layer.deepspeed_moe.gate.wg(hidden).softmax(-1)
    values, best = gates.topk(2, -1)
    every = torch.stack(
        [expert(hidden) for expert in layer.deepspeed_moe.experts.deepspeed_experts], -2
    )
    wanted = every.gather(-2, best.unsqueeze(-1).expand(*best.shape, WIDTH))
    wanted = (wanted * (values / values.sum(-1, keepdim=True)).unsqueeze(-1)).sum(-2)
    if residual:
        share = layer.coefficient(hidden).softmax(-1)
        wanted = wanted * share[..., :1] + layer.mlp(hidden) * share[..., 1:]
    torch.testing.assert_close(output, wanted)
    (output.sum() + l_aux).backward()
    assert int(counts.sum()) == 2 * TOKENS and all(
        param.grad is not None for param in layer.parameters()
    )


def test_models_report_experts_and_their_parameters(
    caplog: pytest.LogCaptureFixture,
) -> None:
    layer = MoE(WIDTH, nn.Linear(WIDTH, WIDTH), EXPERTS, ep_size=2)
    assert has_moe_layers(nn.Sequential(layer)) == (True, EXPERTS) and has_moe_layers(
        nn.Linear(1, 1)
    ) == (False, 0)
    assert len(layer.deepspeed_moe.experts.deepspeed_experts) == EXPERTS
    shared, experts = split_params_into_shared_and_expert_params(layer.parameters())
    assert (len(shared), len(experts)) == (1, 2 * EXPERTS)
    with pytest.raises(ConfigError, match="should be divisible by expert parallel size"):
        MoE(WIDTH, nn.Linear(WIDTH, WIDTH), 3, ep_size=2)


@pytest.mark.parametrize("is_strict", [True, False])
def test_one_ranks_experts_of_deepspeed_are_not_taken_for_the_first_ones(is_strict: bool) -> None:
    layer = MoE(WIDTH, nn.Linear(WIDTH, WIDTH), EXPERTS, ep_size=2)
    whole = layer.state_dict()
    own = {
        key: value
        for key, value in whole.items()
        if not re.search(r"deepspeed_experts\.[23]\.", key)
    }
    assert len(own) == len(whole) - 4
    with pytest.raises(
        RuntimeError, match=r"has 2 of 4 experts.*expert i of rank r gets the number r \* 2 \+ i"
    ):
        layer.load_state_dict(own, strict=is_strict)
    layer.load_state_dict(whole)
    alone = MoE(WIDTH, nn.Linear(WIDTH, WIDTH), EXPERTS)
    alone.load_state_dict(own, strict=False)  # a partial state dict is loaded intentionally


def test_expert_layers_train_under_deepspeeds_name(as_deepspeed: None) -> None:
    import deepspeed
    import torch.distributed as dist
    from deepspeed.moe.layer import MoE as Named

    torch.manual_seed(3)
    model = Named(WIDTH, nn.Linear(WIDTH, WIDTH), EXPERTS, drop_tokens=False)
    plain = MoE(WIDTH, nn.Linear(WIDTH, WIDTH), EXPERTS, drop_tokens=False)
    plain.load_state_dict(model.state_dict())
    zero = {"stage": 3, "stage3_param_persistence_threshold": 0}
    optimizer = {"type": "Adam", "params": {"lr": 0.1}}
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": zero,
        "optimizer": optimizer,
    }
    engine = deepspeed.initialize(model=model, config={**config, "gradient_clipping": 0.0})[0]
    other = torch.optim.AdamW(plain.parameters(), lr=0.1, weight_decay=0.0)
    for number in range(2):
        x = torch.randn(TOKENS, WIDTH, generator=torch.Generator().manual_seed(number))
        output, l_aux, _ = engine(x)
        engine.backward(output.square().mean() + l_aux)
        engine.step()
        output, l_aux, _ = plain(x)
        (output.square().mean() + l_aux).backward()
        other.step()
        other.zero_grad()
    for name, value in engine.module_state_dict().items():
        torch.testing.assert_close(value, plain.state_dict()[name])
    engine.destroy()
    dist.destroy_process_group()
