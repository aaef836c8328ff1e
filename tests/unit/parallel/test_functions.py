"""Products over tensor-parallel ranks: each sum is computed once and in one order."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from deepseek_zero.parallel.functions import column, enter, gather, leave, row, scatter
from deepseek_zero.parallel.group import LEAST_BUFFERS, TensorGroup
from deepseek_zero.planner.split import Split
from tests.in_process import Rank, run_ranks

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def whole(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def sums_of(rank: Rank) -> int:
    """Return the number of reductions that this rank has issued."""
    return sum(
        len(rank.issued(lane))
        for lane in {lane for lane, _ in rank.world.issued[rank.index]}
        if "reduce" in lane
    )


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("size", [2, 3])
def test_a_sum_has_the_order_of_the_ranks_and_is_rounded_once(
    dtype: torch.dtype, in_place: bool, size: int
) -> None:
    parts = [whole(5, 7, seed=seed, dtype=dtype) for seed in range(size)]

    def body(rank: Rank) -> Tensor:
        group = TensorGroup(rank.comm)
        return group.sum(group.take((5, 7), dtype).copy_(parts[rank.index]), "a sum").wait()

    expected = sum((part.float() for part in parts[1:]), parts[0].float()).to(dtype)
    for found in run_ranks(size, body, reads_in_place=in_place):
        assert torch.equal(found, expected)


def test_buffers_are_reused_but_not_while_others_read_them() -> None:
    def body(rank: Rank) -> tuple[int, list[float]]:
        group = TensorGroup(rank.comm)
        found = []
        for number in range(12):
            shape = (3, 5 + number % 2)
            part = group.take(shape, torch.float32).fill_(number + rank.index)
            found.append(group.sum(part, "a sum").wait()[0, 0].item())
        return group._made, found

    for seed in range(4):
        for made, found in run_ranks(2, body, reads_in_place=True, seed=seed):
            assert made <= LEAST_BUFFERS
            assert found == [2.0 * number + 1 for number in range(12)]


@pytest.mark.parametrize("shape", [(6, 8), (2, 3, 8)], ids=str)
@pytest.mark.parametrize("transposed", [False, True])
def test_column_and_row_are_a_whole_layer_each(shape: tuple[int, ...], transposed: bool) -> None:
    """Gradients are summed separately for each input, and a bias's over all leading dimensions."""
    x, up, down = whole(*shape), whole(10, 8, seed=1), whole(8, 10, seed=2)
    up_bias, down_bias = whole(10, seed=3), whole(8, seed=4)

    def leaf(tensor: Tensor) -> Tensor:
        return tensor.clone().requires_grad_()

    def body(rank: Rank) -> list[Tensor]:
        group, low, high = TensorGroup(rank.comm), 5 * rank.index, 5 * rank.index + 5
        turn = (lambda weight: weight.t().contiguous()) if transposed else (lambda weight: weight)
        own = [
            leaf(x),
            leaf(turn(up[low:high])),
            leaf(up_bias[low:high]),
            leaf(turn(down[:, low:high])),
            leaf(down_bias),
        ]
        read, entry = enter(own[0] * 1, group, "x")
        hidden = column(read, own[1], own[2], entry, transposed)
        row(hidden.tanh(), own[3], own[4], group, transposed, "down").square().sum().backward()
        grads = [each.grad for each in own]
        return [grads[0], turn(grads[1]), grads[2], turn(grads[3]), grads[4]]  # type: ignore[arg-type, list-item]

    plain = [leaf(each) for each in (x, up, up_bias, down, down_bias)]
    hidden = torch.nn.functional.linear(plain[0], plain[1], plain[2]).tanh()
    torch.nn.functional.linear(hidden, plain[3], plain[4]).square().sum().backward()
    found = run_ranks(2, body)
    for place, (dim, each) in enumerate(zip((None, 0, 0, 1, None), plain, strict=True)):
        got = found[0][place] if dim is None else torch.cat([found[0][place], found[1][place]], dim)
        torch.testing.assert_close(got, each.grad)
        if dim is None:
            assert torch.equal(found[0][place], found[1][place])


def test_the_gradient_of_an_input_is_summed_once_for_all_layers_that_read_it() -> None:
    def body(rank: Rank) -> tuple[Tensor, int]:
        group, low, high = TensorGroup(rank.comm), 4 * rank.index, 4 * rank.index + 4
        x = whole(3, 6).requires_grad_()
        before = sums_of(rank)
        read, entry = enter(x * 1, group, "x")
        found = [
            column(read, whole(8, 6, seed=seed)[low:high], None, entry, False) for seed in range(3)
        ]
        torch.stack(found).square().sum().backward()
        assert x.grad is not None
        return x.grad, sums_of(rank) - before

    plain = whole(3, 6).requires_grad_()
    torch.stack([plain @ whole(8, 6, seed=seed).t() for seed in range(3)]).square().sum().backward()
    for grad, sums in run_ranks(2, body):
        assert sums == 1
        torch.testing.assert_close(grad, plain.grad)


def test_a_reader_with_unused_output() -> None:
    """The sum starts without the unused output, and the next backward works."""

    def body(rank: Rank) -> list[Tensor]:
        group = TensorGroup(rank.comm)
        x = whole(3, 6).requires_grad_()
        read, entry = enter(x * 1, group, "x")
        used = column(read, whole(4, 6), None, entry, False)
        column(read, whole(4, 6, seed=1), None, entry, False)
        found = []
        for _ in range(2):
            x.grad = None
            used.sum().backward(retain_graph=True)
            assert x.grad is not None
            found.append(x.grad)
        return found

    expected = 2 * whole(4, 6).sum(0).expand(3, 6)
    for first, second in run_ranks(2, body):
        torch.testing.assert_close(first, expected)
        assert torch.equal(first, second)


def test_a_sum_of_a_tensor_that_is_not_contiguous() -> None:
    """The result must not be left in a contiguous copy."""

    def body(rank: Rank) -> tuple[Tensor, Tensor]:
        group = TensorGroup(rank.comm)
        x = whole(4, 6, seed=rank.index).t().requires_grad_()
        found = leave(x, group, "a sum")
        found.square().sum().backward()
        weight = whole(3, 4, seed=9)
        return found.detach(), row(x.detach(), weight, None, group, False, "a row")

    parts = [whole(4, 6, seed=seed).t() for seed in range(2)]
    for found, product in run_ranks(2, body):
        assert torch.equal(found, parts[0] + parts[1])
        torch.testing.assert_close(product, (parts[0] + parts[1]) @ whole(3, 4, seed=9).t())


def test_gather_and_scatter_are_each_others_gradients() -> None:
    widths = (3, 2)

    def body(rank: Rank) -> list[Tensor]:
        group = TensorGroup(rank.comm)
        start = sum(widths[: rank.index])
        own = whole(2, 4, 5)[..., start : start + widths[rank.index]].clone().requires_grad_()
        columns = Split("split", (5,), 0, (((0, 3),), ((3, 5),)))
        everything = gather(own, group, columns, "gather")
        (everything * whole(2, 4, 5, seed=1)).sum().backward()
        x = whole(2, 4, 5).requires_grad_()
        part = scatter(x, group, widths, "scatter")
        (part * part).sum().backward()
        return [everything.detach(), own.grad, part.detach(), x.grad]  # type: ignore[list-item]

    for index, (everything, grad, part, x_grad) in enumerate(run_ranks(2, body)):
        start = sum(widths[:index])
        assert torch.equal(everything, whole(2, 4, 5))
        assert torch.equal(grad, whole(2, 4, 5, seed=1)[..., start : start + widths[index]])
        assert torch.equal(part, whole(2, 4, 5)[..., start : start + widths[index]])
        assert torch.equal(x_grad, 2 * whole(2, 4, 5))


def test_bytes_are_counted() -> None:
    """A direct all-reduce sends this rank's tensor to every other rank."""

    def body(rank: Rank) -> Any:
        group = TensorGroup(rank.comm)
        before = rank.comm.meter.sent_bytes["tp"]
        group.sum(group.take((4, 8), torch.bfloat16), "a sum").wait()
        return rank.comm.meter.sent_bytes["tp"] - before

    assert run_ranks(3, body) == [2 * 4 * 8 * 2] * 3
