"""Tensor parallelism over shared memory and gloo gives the bits of the virtual axis."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist

from deepseek_zero.comm.collectives import Comm
from deepseek_zero.parallel.apply import parallelize, virtual
from deepseek_zero.parallel.cuts import cut
from deepseek_zero.parallel.group import LEAST_BUFFERS, TensorGroup
from deepseek_zero.parallel.plans import ParallelSettings
from tests.unit.parallel.tiny import batch, step, tiny, virtual_step

pytest.importorskip("transformers")
CPU = torch.device("cpu")


def six_steps(model: torch.nn.Module) -> list[torch.Tensor]:
    """Run six steps of plain SGD and return their losses."""
    losses = []
    for number in range(6):
        for each in model.parameters():
            each.grad = None
        torch.manual_seed(number)
        loss = model(**batch(number), use_cache=False).loss
        loss.backward()
        losses.append(loss.detach())
        with torch.no_grad():
            for each in model.parameters():
                if each.grad is not None:
                    each.sub_(each.grad, alpha=0.05)
    return losses


@pytest.mark.ranks(2)
@pytest.mark.parametrize("transport", ["fastest", "gloo"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_six_steps_have_the_bits_of_the_virtual_axis(transport: str, dtype: torch.dtype) -> None:
    model = tiny("llama", dtype)
    own, whole = copy.deepcopy(model), virtual(copy.deepcopy(model), 2)
    splits = parallelize(own, Comm(CPU, transport=transport))
    expected = six_steps(whole)
    assert all(torch.equal(a, b) for a, b in zip(six_steps(own), expected, strict=True))
    parts = dict(own.named_parameters())
    for name, each in whole.named_parameters():
        assert torch.equal(parts[name], cut(each.data, splits[name], dist.get_rank())), name


@pytest.mark.ranks(2)
@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("llama", {"attention_dropout": 0.2}),
        ("gpt2", {"attn_pdrop": 0.2, "resid_pdrop": 0.1, "embd_pdrop": 0.1}),
        ("bert", {"attention_probs_dropout_prob": 0.2, "hidden_dropout_prob": 0.1}),
    ],
    ids=str,
)
@pytest.mark.filterwarnings("ignore:`gradient_checkpointing_enable`")
def test_dropout_differs_between_heads_and_is_equal_outside(
    name: str, options: dict[str, Any], recompute: bool
) -> None:
    """Pitfall: equal masks on all ranks inside regions, or different ones outside.

    Recomputation must draw the same masks.
    """
    model = tiny(name, **options)
    whole = virtual_step(model, 2)
    own = copy.deepcopy(model)
    splits = parallelize(own, Comm(CPU))
    if recompute:
        own.gradient_checkpointing_enable({"use_reentrant": False})  # type: ignore[operator]
    found = step(own, batch())
    assert torch.equal(found.loss, whole.loss)
    for each, grad in whole.grads.items():
        if grad is not None:
            assert torch.equal(found.grads[each], cut(grad, splits[each], dist.get_rank())), each  # type: ignore[arg-type]
    still = tiny(name)
    assert not torch.equal(found.loss, virtual_step(still, 2).loss)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("sequence", [False, True])
def test_ranks_that_were_seeded_differently_train_alike(sequence: bool) -> None:
    """Data-parallel programs call torch.manual_seed(seed + rank), also between steps."""
    own = tiny("gpt2", attn_pdrop=0.2, resid_pdrop=0.3, embd_pdrop=0.3)
    splits = parallelize(own, Comm(CPU), ParallelSettings(sequence=sequence))
    losses = []
    for number in range(2):
        torch.manual_seed(7 * number + dist.get_rank())
        loss = own(**batch(number), use_cache=False).loss
        loss.backward()
        losses.append(loss.item())
    whole = [each.grad for name, each in own.named_parameters() if splits[name].kind == "equal"]
    others: list[Any] = [None, None]
    dist.all_gather_object(others, (losses, whole))
    assert others[0][0] == others[1][0]
    assert len(whole) > 2 and all(map(torch.equal, others[0][1], others[1][1]))


def masks_of(
    model: torch.nn.Module, probability: float
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Record the masks of dropouts with this probability: of the first one, and of the others."""
    outside: list[torch.Tensor] = []
    inside: list[torch.Tensor] = []
    found = [
        each
        for each in model.modules()
        if isinstance(each, torch.nn.Dropout) and each.p == probability
    ]
    for number, each in enumerate(found):
        seen = inside if number else outside
        each.register_forward_hook(lambda module, args, output, seen=seen: seen.append(output == 0))
    return outside, inside


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("gpt2", {"attn_pdrop": 0.2, "resid_pdrop": 0.3, "embd_pdrop": 0.3}),
        ("bert", {"attention_probs_dropout_prob": 0.2, "hidden_dropout_prob": 0.3}),
    ],
    ids=str,
)
@pytest.mark.filterwarnings("ignore:`gradient_checkpointing_enable`")
def test_dropout_of_sharded_tokens_differs_between_ranks(
    name: str, options: dict[str, Any]
) -> None:
    """Each rank draws separate masks for its tokens; the common random stream stays in sync.

    Recomputation draws the same masks.
    """
    # Without a key-value cache, which transformers disables for recomputation: on some processors,
    # attention without a cache has other bits even in plain torch.
    model = tiny(name, use_cache=False, **options)
    gradients = []
    for recomputes in (False, True):
        own = copy.deepcopy(model)
        parallelize(own, Comm(CPU), ParallelSettings(sequence=True))
        if recomputes:
            own.gradient_checkpointing_enable({"use_reentrant": False})  # type: ignore[operator]
        outside, inside = masks_of(own, 0.3)
        torch.manual_seed(5)
        losses = []
        for number in range(2):
            loss = own(**batch(number)).loss
            loss.backward()
            losses.append(loss.item())
        gradients.append([each.grad for each in own.parameters() if each.grad is not None])
        others: list[Any] = [None, None]
        dist.all_gather_object(others, (losses, torch.get_rng_state(), outside, inside))
        first, second = others
        assert first[0] == second[0] and torch.equal(first[1], second[1])
        assert all(map(torch.equal, first[2], second[2]))
        assert len(inside) >= 8 and not any(map(torch.equal, first[3], second[3]))
    assert all(map(torch.equal, *gradients))


@pytest.mark.ranks(2)
def test_values_are_the_first_ranks() -> None:
    model = tiny("llama")
    if dist.get_rank() == 1:
        for each in model.parameters():
            each.data.zero_()
    splits = parallelize(model, Comm(CPU))
    for name, each in tiny("llama").named_parameters():
        assert torch.equal(
            dict(model.named_parameters())[name].data, cut(each.data, splits[name], dist.get_rank())
        )


@pytest.mark.ranks(2)
def test_buffers_are_reused() -> None:
    """In the steady state no memory is allocated, even if one rank is ahead of the other."""
    group = TensorGroup(Comm(CPU))
    for number in range(200):
        part = group.take((64, 1 + 300 * (number % 3)), torch.float32).fill_(
            number + dist.get_rank()
        )
        found = group.sum(part, "a sum").wait()
        assert found[0, 0] == 2 * number + 1 and found[-1, -1] == 2 * number + 1
        if number == 20:
            addresses = {each.data_ptr() for each in group._free}
    assert {each.data_ptr() for each in group._free} == addresses and len(
        addresses
    ) <= LEAST_BUFFERS
