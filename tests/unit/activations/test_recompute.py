"""Recomputation with offloaded inputs: gradients equal those of a run without it, and memory is
freed.
"""

from __future__ import annotations

import gc
import subprocess
import sys
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from deepseek_zero.activations import recompute
from deepseek_zero.activations.offload import ActivationOffload
from deepseek_zero.activations.recompute import RecomputeSettings, checkpoint
from deepseek_zero.tiers.tier import Tier

WIDTH, ROWS = 64, 48  # one activation has 12 KiB


@pytest.fixture(params=["device", "host", "nvme"])
def parking(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[ActivationOffload]:
    found = recompute.configure(RecomputeSettings(Tier(request.param), tmp_path))
    assert found.parking is not None
    yield found.parking
    recompute.release(found)
    assert recompute.current() is None


@pytest.fixture
def on_disk(tmp_path: Path) -> Iterator[ActivationOffload]:
    found = recompute.configure(RecomputeSettings(Tier.NVME, tmp_path))
    assert found.parking is not None
    yield found.parking
    recompute.release(found)


class Pair(NamedTuple):
    left: Tensor
    right: Tensor | None


class Net(nn.Module):
    """Blocks with dropout and arguments of many types, each called through `run`."""

    def __init__(self, blocks: int = 4) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(blocks))

    def forward(self, x: Tensor, run: Callable[..., Any]) -> Tensor:
        rows = torch.arange(len(x)).flip(0)
        mask = torch.rand(len(x), WIDTH) > 0.1
        x = self.first(x)
        for number, block in enumerate(self.blocks):

            def part(
                x: Tensor,
                nested: Any,
                rows: Tensor,
                scale: float,
                pair: Pair,
                nothing: None,
                *,
                mask: Tensor,
                more: Any,
                block: nn.Module = block,
            ) -> tuple[Tensor, dict[str, Tensor]]:
                assert nothing is None and pair.right is None
                half, (other,) = nested["half"], nested["rest"]
                y = F.dropout(torch.tanh(block(x[rows])), 0.2) * scale + half.mean() * pair.left
                y = y.masked_fill(mask, 0) + other.t()[: len(x), :1] + more[0].mean()
                return y, {"scaled": y * 0.5}

            nested = {"half": x * 0.5, "rest": [(x * 2).t()]}
            y, more = run(
                part,
                x,
                nested,
                rows,
                0.5 + number,
                Pair(x.cos(), None),
                None,
                mask=mask,
                more=[x.sin()],
            )
            x = x + y + more["scaled"]
        return x.square().mean()


def gradients(
    run: Callable[..., Any], dtype: torch.dtype = torch.float32, backwards: int = 1
) -> list[Tensor]:
    torch.manual_seed(3)
    net = Net().to(dtype)
    x = torch.randn(ROWS, WIDTH, dtype=dtype, requires_grad=True)
    found = []
    for _ in range(2):
        loss = net(x, run)
        for left in reversed(range(backwards)):
            loss.backward(retain_graph=left > 0)
        found.append(loss.detach())
    return [*found, *(param.grad for param in net.parameters() if param.grad is not None), x.grad]  # type: ignore[list-item]


def straight(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return function(*args, **kwargs)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("backwards", [1, 3])
def test_gradients_have_the_bits_of_a_run_without(
    dtype: torch.dtype, backwards: int, parking: ActivationOffload
) -> None:
    expected = gradients(straight, dtype, backwards)
    assert all(map(torch.equal, gradients(checkpoint, dtype, backwards), expected))
    assert parking._arrived == 8 and parking.used_bytes == 0 and len(parking.slabs) == 1
    assert len(expected) == 2 + 10 + 1 and not any(bool(value.isnan().any()) for value in expected)


def test_only_activations_are_offloaded(parking: ActivationOffload) -> None:
    x = torch.randn(ROWS, WIDTH, requires_grad=True)
    weight, mask = nn.Parameter(torch.ones(WIDTH, WIDTH)), torch.ones(ROWS, WIDTH)
    hidden, small = x * 2, x[0, :4] * 1
    out = checkpoint(
        lambda *given: given[0] @ given[1] * given[2] + given[3].sum() + given[4],
        hidden,
        weight,
        mask,
        small,
        x,
    )
    assert [form.size for stay in parking._offloaded.values() for form in stay.forms] == [
        hidden.shape
    ]
    out.sum().backward()
    parking.sweep()
    assert parking.used_bytes == 0


def test_storages_are_freed_between_forward_and_backward_and_slots_after_it(
    parking: ActivationOffload,
) -> None:
    blocks = [nn.Linear(WIDTH, WIDTH) for _ in range(6)]
    storages: list[weakref.ref[Any]] = []

    def forward(run: Callable[..., Any]) -> Tensor:
        x = blocks[0](torch.randn(ROWS, WIDTH))
        for block in blocks:
            storages.append(weakref.ref(x.untyped_storage()))
            x = run(lambda x, block=block: torch.relu(block(x)), x)
        return x.sum()

    loss = forward(checkpoint)
    assert [storage() is None for storage in storages] == [True] * 6
    assert parking.used_bytes == 6 * ROWS * WIDTH * 4
    loss.backward()
    assert parking.used_bytes == 0  # freed at the end of backward
    storages.clear()
    loss = forward(lambda function, x: torch_checkpoint(function, x, use_reentrant=False))
    # Torch's checkpoint keeps its inputs alive.
    assert not any(storage() is None for storage in storages)


def test_an_exception_in_forward_and_a_forgotten_loss_leak_nothing(
    parking: ActivationOffload,
) -> None:
    block, x = nn.Linear(WIDTH, WIDTH), torch.randn(ROWS, WIDTH, requires_grad=True)

    def fail(x: Tensor) -> Tensor:
        raise ValueError("no")

    for _ in range(3):
        with pytest.raises(ValueError, match="no"):
            checkpoint(fail, checkpoint(block, x * 2))
        loss = checkpoint(block, checkpoint(block, x * 2)).sum()
    parking.sweep()
    assert parking.used_bytes == 2 * x.nbytes
    del loss
    gc.collect()
    parking.sweep()
    assert parking.used_bytes == 0


def test_an_exception_in_a_recomputation_leaves_nothing_behind(parking: ActivationOffload) -> None:
    x, calls = torch.randn(ROWS, WIDTH, requires_grad=True), []

    def second_time(x: Tensor) -> Tensor:
        calls.append(1)
        if len(calls) == 2:
            raise ValueError("not again")
        return x.exp()

    loss = checkpoint(second_time, x * 2).sum()
    with pytest.raises(ValueError, match="not again"):
        loss.backward()
    del loss
    gc.collect()
    parking.sweep()
    assert parking.used_bytes == 0


def test_without_gradients_nothing_is_offloaded(parking: ActivationOffload) -> None:
    block, x = nn.Linear(WIDTH, WIDTH), torch.randn(ROWS, WIDTH, requires_grad=True)
    with torch.no_grad():
        checkpoint(block, x * 2)
    with torch.inference_mode():
        checkpoint(block, x * 2)
    checkpoint(block, (x * 2).detach())
    assert parking._arrived == 0


def test_an_inner_checkpoint_leaves_its_inputs_to_the_outer_one(parking: ActivationOffload) -> None:
    blocks = [nn.Linear(WIDTH, WIDTH) for _ in range(3)]

    def gradient(run: Callable[..., Any]) -> list[Tensor]:
        def outer(x: Tensor) -> Tensor:
            for block in blocks:
                x = run(lambda x, block=block: torch.tanh(block(x)), x)
            return x

        torch.manual_seed(5)
        x = torch.randn(ROWS, WIDTH, requires_grad=True)
        params = [x, *(param for block in blocks for param in block.parameters())]
        return list(torch.autograd.grad(run(outer, run(outer, x * 2)).sum(), params))

    expected = gradient(straight)
    assert all(map(torch.equal, gradient(checkpoint), expected))
    assert parking._arrived == 2


def test_inputs_belong_to_hooks_that_are_in_force(parking: ActivationOffload) -> None:
    x = torch.randn(ROWS, WIDTH, requires_grad=True)
    with torch.autograd.graph.save_on_cpu():
        checkpoint(torch.exp, x * 2).sum().backward()
    assert parking._arrived == 0


def test_a_part_of_the_graph_can_be_differentiated_and_then_the_rest(
    parking: ActivationOffload,
) -> None:
    def found(run: Callable[..., Any]) -> list[Tensor]:
        torch.manual_seed(5)
        x = torch.randn(ROWS, WIDTH, requires_grad=True)
        a = run(torch.exp, x * 2)
        b = run(torch.sin, a)
        c = run(torch.cos, b)
        (part,) = torch.autograd.grad(c.sum(), b, retain_graph=True)
        other = run(torch.sin, b).sum()  # a second forward before the first graph is freed
        return [
            part,
            *torch.autograd.grad(other, x, retain_graph=True),
            *torch.autograd.grad(c.sum(), x),
        ]

    expected = found(straight)
    assert all(map(torch.equal, found(checkpoint), expected))


def test_a_second_backward_through_a_freed_graph_is_torchs_error(
    parking: ActivationOffload,
) -> None:
    loss = checkpoint(torch.exp, torch.randn(ROWS, WIDTH, requires_grad=True) * 2).sum()
    loss.backward()
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        loss.backward()


def test_an_input_changed_in_place_later_is_recomputed_with_its_old_values(
    parking: ActivationOffload,
) -> None:
    x = torch.randn(ROWS, WIDTH, requires_grad=True)
    hidden = x * 2
    loss = checkpoint(torch.sin, hidden).sum()
    hidden.detach().zero_()
    loss.backward()
    assert x.grad is not None and torch.equal(x.grad, (x.detach() * 2).cos() * 2)


def test_a_list_that_the_function_fills_is_the_callers(parking: ActivationOffload) -> None:
    x, seen = torch.randn(ROWS, WIDTH, requires_grad=True), []

    def part(x: Tensor, seen: list[float]) -> Tensor:
        seen.append(1.0)
        return x.exp()

    checkpoint(part, x * 2, seen).sum().backward()
    assert len(seen) == 2


def test_a_list_and_a_dict_with_activations_are_the_callers(parking: ActivationOffload) -> None:
    x = torch.randn(ROWS, WIDTH, requires_grad=True)
    seen, last = [x * 2], {"of all": x * 3}

    def part(x: Tensor, seen: list[Tensor], *, last: dict[str, Tensor]) -> Tensor:
        seen.append(x.exp() + seen[0])
        last["of all"] = last["of all"] * seen[-1]
        return x * last["of all"]

    found = checkpoint(part, x * 4, seen, last=last, preserve_rng_state=False)
    assert len(seen) == 2
    (last["of all"] + found).sum().backward()
    grad, x.grad = x.grad, None
    product = 3 * x * ((4 * x).exp() + 2 * x)
    (product + 4 * x * product).sum().backward()
    assert grad is not None and x.grad is not None
    assert torch.allclose(grad, x.grad, rtol=1e-4)


def test_torchs_own_keywords_pass_through(parking: ActivationOffload) -> None:
    x = torch.randn(ROWS, WIDTH, requires_grad=True)
    out = checkpoint(
        torch.exp, x * 2, use_reentrant=True, preserve_rng_state=False, determinism_check="none"
    )
    out.sum().backward()
    assert parking._arrived == 1


def test_a_reset_frees_memory_except_that_of_live_graphs(
    parking: ActivationOffload,
) -> None:
    current, x = recompute.current(), torch.randn(ROWS, WIDTH, requires_grad=True)
    assert current is not None
    old = checkpoint(torch.sin, x * 2).sum()
    current.reset()
    assert (
        current.parking is not None
        and current.parking is not parking
        and current.parking.reserved_bytes == 0
    )
    checkpoint(torch.sin, x * 3).sum()
    old.backward()
    assert x.grad is not None and torch.equal(x.grad, (x.detach() * 2).cos() * 2)


@pytest.mark.parametrize("blocks", [4, 24])
def test_with_a_disk_live_bytes_do_not_grow_with_the_blocks(
    blocks: int, on_disk: ActivationOffload
) -> None:
    """Count the bytes of live storages with weak references.

    test_offload.py counts the pages of the slab.
    """
    alive, most, now = set[int](), [0], [0]

    def watch(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if id(storage) not in alive:
            alive.add(id(storage))
            now[0] += storage.nbytes()
            most[0] = max(most[0], now[0])
            weakref.finalize(storage, forget, id(storage), storage.nbytes())
        return tensor

    def forget(key: int, nbytes: int) -> None:
        alive.discard(key)
        now[0] -= nbytes

    parts = [nn.Linear(WIDTH, WIDTH) for _ in range(blocks)]
    for _ in range(2):
        most[0] = 0
        x = watch(parts[0](torch.randn(ROWS, WIDTH)))
        for part in parts:
            x = checkpoint(lambda x, part=part: watch(torch.tanh(watch(part(watch(x))))), x)
        x.sum().backward()
        del x
    # A block needs its input, product and output, and the gradients of the last one.
    assert most[0] <= 6 * ROWS * WIDTH * 4


# -- one configuration per process


def test_the_last_configuration_holds_and_an_older_one_cannot_undo_it(tmp_path: Path) -> None:
    first = recompute.configure(RecomputeSettings(Tier.HOST))
    second = recompute.configure(RecomputeSettings(Tier.NVME, tmp_path))
    recompute.release(first)
    assert recompute.current() is second
    recompute.release(second)
    assert recompute.current() is None
    recompute.release(None)


def test_a_profile_is_logged_once(capsys: pytest.CaptureFixture[str]) -> None:
    found = recompute.configure(RecomputeSettings(profile=True))
    try:
        x = torch.randn(ROWS, WIDTH)
        block = nn.Linear(WIDTH, WIDTH)
        for _ in range(3):
            checkpoint(block, checkpoint(block, x)).sum().backward()
    finally:
        recompute.release(found)
    said = capsys.readouterr().err
    assert said.count("checkpoints, forward and backward") == 1
    assert [line.split(":")[0] for line in said.splitlines()[1:]] == ["  0", "  1"]
    assert found.profile is not None and all(row.backward_seconds > 0 for row in found.profile.rows)


def test_a_tensor_given_to_several_checkpoints_is_parked_once(parking: ActivationOffload) -> None:
    """For example, each decoder layer receives the output of the encoder."""

    def run(how: Callable[..., Any]) -> tuple[list[Tensor], int]:
        torch.manual_seed(1)
        first = torch.randn(ROWS, WIDTH, requires_grad=True)
        encoded, x = first * 2, first * 3
        for _ in range(3):
            x = how(lambda x, seen, again: torch.tanh(x @ seen.t() @ again), x, encoded, encoded)
        used = parking.used_bytes
        x.sum().backward()
        assert first.grad is not None
        return [x.detach(), first.grad], used

    expected, _ = run(straight)
    found, used = run(checkpoint)
    assert all(map(torch.equal, found, expected))
    assert used == 4 * ROWS * WIDTH * 4  # three inputs and one shared tensor
    assert parking.used_bytes == 0


def test_a_tensor_that_was_changed_between_two_checkpoints_is_parked_for_each(
    parking: ActivationOffload,
) -> None:
    first = torch.randn(ROWS, WIDTH, requires_grad=True)
    x = first * 2
    one = checkpoint(torch.tanh, x)
    x += 1
    two = checkpoint(torch.tanh, x)
    assert parking.used_bytes == 2 * ROWS * WIDTH * 4
    (one.sum() + two.sum()).backward()
    wanted = first.detach().clone().requires_grad_()
    (torch.tanh(wanted * 2).sum() + torch.tanh(wanted * 2 + 1).sum()).backward()
    torch.testing.assert_close(first.grad, wanted.grad)


STEPS = """
import sys, torch
from pathlib import Path
from deepseek_zero.activations import recompute
from deepseek_zero.activations.recompute import RecomputeSettings, checkpoint
from deepseek_zero.base.memory import keep_freed_memory
from deepseek_zero.tiers.tier import Tier
from tests.unit.base.test_memory import resident_bytes

keep_freed_memory()
if sys.argv[1] != "none":
    recompute.configure(RecomputeSettings(Tier(sys.argv[1]), Path(sys.argv[2])))
scale, most = torch.ones((), requires_grad=True), 0

def block(x):
    global most
    most = max(most, resident_bytes())
    return torch.tanh(x * scale)

checkpoint(block, torch.ones(8) * scale).backward(torch.ones(8))  # what torch imports for it
start, most = resident_bytes(), 0
for _ in range(2):
    x = torch.ones(2 << 20) * scale  # 8 MiB, which the C library serves from its heap
    for _ in range(48):
        x = checkpoint(block, x)
    x.mean().backward()
    del x
print(most - start >> 20)
"""


@pytest.mark.slow  # takes half a minute
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc and asks glibc")
def test_a_deep_net_with_offload_to_a_disk_needs_little_resident_memory(tmp_path: Path) -> None:
    def most(tier: str) -> int:
        command = [sys.executable, "-c", STEPS, tier, str(tmp_path)]
        root = Path(__file__).resolve().parents[3]
        return int(subprocess.check_output(command, cwd=root, text=True))

    plain, parked = most("none"), most("nvme")
    assert parked < 0.7 * plain, f"{parked} of {plain} MiB"
