"""Unmodified models are partitioned into stages, or refused with the name of the cause."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from deepseek_zero.base.errors import UsageError
from deepseek_zero.pipeline.chain import ChainError, container_of_blocks, find_chain
from deepseek_zero.pipeline.stage import (
    MicroBatch,
    StandIn,
    cut_chain,
    loss_of,
    take_stages,
    tied_stages,
)
from tests.models import Block, Gpt, batch_of

X = torch.randn(2, 5, 15, generator=torch.Generator().manual_seed(1))


class Tower(nn.Module):
    """Blocks between a first and a last layer."""

    def __init__(self, blocks: int = 4) -> None:
        super().__init__()
        self.first, self.blocks, self.last = (
            nn.Linear(15, 15),
            nn.ModuleList(map(self.block, range(blocks))),
            Mean(),
        )

    def block(self, number: int) -> nn.Module:
        return Block()

    def forward(self, x: Tensor) -> Any:
        x = self.first(x)
        for number, block in enumerate(self.blocks):
            x = self.between(number, block, x)
        return self.last(x)

    def between(self, number: int, block: nn.Module, x: Tensor) -> Any:
        return block(x)


class Mean(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(15, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(x).mean()


class Tuples(Tower):
    class Inner(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.block, self.kind = Block(), "own"

        def forward(self, hidden: Tensor, mask: Any = None) -> tuple[Tensor, None]:
            return self.block(hidden), None

    def block(self, number: int) -> nn.Module:
        return self.Inner()

    def between(self, number: int, block: Any, x: Tensor) -> Any:
        assert block.kind == "own"
        return block(hidden=x, mask=number)[0]


class Scaled(Tower):
    def between(self, number: int, block: nn.Module, x: Tensor) -> Any:
        return block(x) * 0.5


class InPlace(Tower):
    def between(self, number: int, block: nn.Module, x: Tensor) -> Any:
        return block(x).mul_(0.5)


class Gated(Tower):
    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Parameter(torch.ones(15))

    def between(self, number: int, block: nn.Module, x: Tensor) -> Any:
        found = block(x)
        if number == 1:
            self.seen = self.gate.sum()
        return found


class Twice(Tower):
    def between(self, number: int, block: nn.Module, x: Tensor) -> Any:
        return block(block(x))


class Backwards(Tower):
    def forward(self, x: Tensor) -> Any:
        x = self.first(x)
        for block in reversed(list(self.blocks)):
            x = block(x)
        return self.last(x)


class Skipping(Tower):
    def forward(self, x: Tensor) -> Any:
        early = x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.last(x + early)


class Given(Tower):
    class Inner(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.block = Block()

        def forward(self, x: Tensor, bias: Tensor) -> Tensor:
            return self.block(x) + bias

    def block(self, number: int) -> nn.Module:
        return self.Inner()

    def forward(self, x: Tensor) -> Any:
        x = early = self.first(x)
        for block in self.blocks:
            x = block(x, early)
        return self.last(x)


class Collecting(Tower):
    """The mean output of all blocks is added before the head; `detaches` removes its gradient."""

    detaches = False

    def forward(self, x: Tensor) -> Any:
        x, kept = self.first(x), []
        for block in self.blocks:
            x = block(x)
            kept.append(x.detach() if self.detaches else x)
        return self.last(x + torch.stack(kept).mean(0))


class CollectingDetached(Collecting):
    detaches = True


class Returning(Tower):
    def forward(self, x: Tensor) -> Any:
        x, kept = self.first(x), []
        for block in self.blocks:
            x = block(x)
            kept.append(x)
        return self.last(x), kept


class Statistic(Tower):
    """Each block stores a statistic without a gradient; the loss is multiplied by their sum."""

    class Inner(Block):
        def forward(self, x: Tensor) -> Tensor:
            self.statistic = x.detach().square().mean()
            return super().forward(x)

    def block(self, number: int) -> nn.Module:
        return self.Inner()

    def forward(self, x: Tensor) -> Any:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.last(x) * sum(block.statistic for block in self.blocks)


class Auxiliary(Statistic):
    class Inner(Block):
        def forward(self, x: Tensor) -> Tensor:
            found = super().forward(x)
            self.statistic = found.square().mean()
            return found


class Earlier(Tower):
    """Each block also gets the mean of the previous block's input."""

    class Inner(Block):
        def forward(self, x: Tensor, scale: Tensor) -> Tensor:
            return super().forward(x) * scale

    def block(self, number: int) -> nn.Module:
        return self.Inner()

    def forward(self, x: Tensor) -> Any:
        x = early = self.first(x)
        for block in self.blocks:
            x, early = block(x, early.detach().mean()), x
        return self.last(x)


class Secret(Tower):
    """Blocks that share a list, from which later ones read the outputs of earlier ones."""

    class Inner(Block):
        def __init__(self, left: list[Tensor]) -> None:
            super().__init__()
            self.left = left

        def forward(self, x: Tensor) -> Tensor:
            found = super().forward(x)
            if len(self.left) > 1:
                found = found + self.left[0]
            self.left.append(found.detach())
            return found

    def block(self, number: int) -> nn.Module:
        self.__dict__.setdefault("left", [])
        return self.Inner(self.__dict__["left"])


class Counted(Tower):
    """The last block writes a buffer that scales the input of the next forward."""

    class Inner(Block):
        def forward(self, x: Tensor) -> Tensor:
            self.seen += 1
            return super().forward(x)

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(()))
        self.blocks[3].register_buffer("seen", self.seen)

    def block(self, number: int) -> nn.Module:
        return self.Inner() if number == 3 else Block()

    def forward(self, x: Tensor) -> Any:
        return super().forward(x * (1 + self.seen))


class Drawing(Tower):
    """Each block gets noise that is drawn before the blocks."""

    def forward(self, x: Tensor) -> Any:
        x, noise = self.first(x), torch.rand(15)
        for block in self.blocks:
            x = block(x, noise)
        return self.last(x)

    class Inner(Block):
        def forward(self, x: Tensor, noise: Tensor) -> Tensor:
            return super().forward(x) * noise

    def block(self, number: int) -> nn.Module:
        return self.Inner()


class Some(Tower):
    def between(self, number: int, block: nn.Module, x: Tensor) -> Any:
        return x if number == 2 else block(x)


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = Tower(2), nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        if bool(x.sum() > 0):
            return self.outer(self.inner(x))
        return self.inner(x)


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (Scaled, "the first argument of 'blocks.1' is not the output of 'blocks.0'"),
        (InPlace, "the first argument of 'blocks.1' is not the output of 'blocks.0'"),
        (Gated, "parameter 'gate' is used between 'blocks.1' and 'blocks.2'"),
        (Twice, "'blocks.0' is called after 'blocks.0'"),
        (Backwards, "'blocks.3' is called after what precedes the blocks"),
        (Skipping, "what follows 'blocks.3' uses what precedes 'blocks.0'"),
        (Given, "'blocks.0' is given more than"),
        (Some, "'blocks.3' is called after 'blocks.1'"),
        (Collecting, "what follows 'blocks.3' uses the output of 'blocks.0'"),
        (CollectingDetached, "what follows 'blocks.3' uses the output of 'blocks.0'"),
        (Returning, "what follows 'blocks.3' uses the output of 'blocks.0'"),
        (Statistic, "what follows 'blocks.3' uses what 'blocks.0' computes"),
        (Auxiliary, "what follows 'blocks.3' uses what 'blocks.0' computes"),
        (Earlier, "'blocks.0' is given more than"),
        (Secret, "'blocks.2' uses what 'blocks.0' computes"),
        (Counted, "buffer 'seen' is written in 'blocks.3' and used in what precedes the blocks"),
        (Drawing, "'blocks.0' is given more than"),
        (Two, "cannot run on fake tensors"),
        (lambda: nn.Linear(15, 3), "has no list of blocks"),
    ],
)
def test_models_that_are_no_chain_are_refused_by_name(
    make: Callable[[], nn.Module], said: str
) -> None:
    with pytest.raises(ChainError, match=said) as caught:
        find_chain(make(), (X,))
    assert "PipelineModule" in str(caught.value)


def run_stages(model: nn.Module, stages: int, *args: Any) -> tuple[Tensor, dict[str, Tensor]]:
    """Run the stages one after another and return the loss and the gradients."""
    cut = cut_chain(model, find_chain(model, args), stages)
    own = [take_stages(copy.deepcopy(model), cut, [stage])[0] for stage in range(stages)]
    ends: list[tuple[tuple[Tensor, ...], Any]] = []
    received: tuple[Tensor, ...] = ()
    for stage in own:
        received = tuple(each.detach().requires_grad_() for each in received)
        output = stage.forward(MicroBatch(args), received)
        ends.append((received, output))
        received = output
    loss = own[-1].loss(ends[-1][1], MicroBatch(args))
    loss.backward()
    for (later, _), (_, output) in zip(reversed(ends), list(reversed(ends))[1:], strict=False):
        torch.autograd.backward(output, tuple(each.grad for each in later))
    grads: dict[str, Tensor] = {}
    for stage in own:
        for name, param in stage.model.named_parameters():
            if param.grad is not None:
                grads[name] = grads[name] + param.grad if name in grads else param.grad
    return loss.detach(), grads


class Tied(Gpt):
    def __init__(self) -> None:
        super().__init__(blocks=4)
        self.head.weight = self.tokens.weight


class Own(Tower):
    """Blocks with private attributes, and arguments that are computed only from the inputs."""

    class Inner(Block):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("load", torch.ones(15))

        def forward(self, x: Tensor, mask: Tensor, scale: Tensor, zero: Tensor) -> Tensor:
            self.largest = x.detach().abs().amax((0, 1))
            with torch.no_grad():
                self.load.mul_(0.5).add_(self.largest)
            return super().forward(x * mask) * scale + zero + self.load

    def block(self, number: int) -> nn.Module:
        return self.Inner()

    def forward(self, x: Tensor) -> Any:
        mask, x = x > 0, self.first(x)
        for number, block in enumerate(self.blocks):
            x = block(x, mask, x.mean() if number else torch.ones(()), torch.zeros_like(x))
        return self.last(x) + mask.sum()


@pytest.mark.parametrize(
    "make", [Tower, Tuples, Own, lambda: Gpt(4), Tied, lambda: whole_sequential()]
)
@pytest.mark.parametrize("stages", [1, 2, 3])
def test_stages_one_after_the_other_are_the_model(
    make: Callable[[], nn.Module], stages: int
) -> None:
    torch.manual_seed(3)
    model = make()
    batch = batch_of(0, 0, 0)
    args = (batch.tokens, batch.targets) if isinstance(model, Gpt) else (X,)
    whole = copy.deepcopy(model)
    loss = whole(*args)
    loss.backward()
    expected = {
        name: param.grad for name, param in whole.named_parameters() if param.grad is not None
    }
    found, grads = run_stages(model, stages, *args)
    assert torch.equal(found, loss)
    assert grads.keys() == expected.keys()
    for name, grad in expected.items():
        assert torch.equal(grads[name], grad), name


def whole_sequential() -> nn.Module:
    return nn.Sequential(nn.Linear(15, 15), nn.Sequential(*[Block() for _ in range(4)]), Mean())


def test_the_blocks_are_the_longest_list_with_the_most_parameters() -> None:
    assert container_of_blocks(whole_sequential()) == "1"
    assert find_chain(Tower(), (X,)).container == "blocks"
    nested = nn.Sequential(*[nn.Sequential(nn.Linear(15, 30), nn.Linear(30, 15)) for _ in range(3)])
    assert container_of_blocks(nested) == ""


def test_a_stage_holds_its_own_parameters_under_their_names() -> None:
    model = Gpt(4)
    batch = batch_of(0, 0, 0)
    cut = cut_chain(model, find_chain(model, (batch.tokens, batch.targets)), 2, "uniform")
    names = [name for name, _ in model.named_parameters()]
    ranks = []
    for stage in range(2):
        own = copy.deepcopy(model)
        take_stages(own, cut, [stage])
        ranks.append([name for name, _ in own.named_parameters()])
        assert set(ranks[-1]) == set(cut.params_of([stage]))
    assert sorted([*ranks[0], *ranks[1]]) == sorted(names)
    assert "tokens.weight" in ranks[0]
    assert {"norm.weight", "head.weight"} <= set(ranks[1])


def test_two_stages_of_one_rank_share_one_model() -> None:
    model = Gpt(4)
    batch = batch_of(0, 0, 0)
    cut = cut_chain(model, find_chain(model, (batch.tokens, batch.targets)), 4)
    first, third = take_stages(model, cut, [2, 0])
    assert (first.index, third.index) == (0, 2)
    assert [isinstance(block, StandIn) for block in model.blocks] == [False, True, False, True]
    (output,) = first.forward(MicroBatch((batch.tokens, batch.targets)))
    (again,) = third.forward(MicroBatch((batch.tokens, batch.targets)), (output,))
    assert again.shape == output.shape
    assert [isinstance(block, StandIn) for block in model.blocks] == [False, True, False, True]


def test_embeddings_of_other_stages_cost_one_element() -> None:
    model = Gpt(2)
    batch = batch_of(0, 0, 0)
    cut = cut_chain(model, find_chain(model, (batch.tokens, batch.targets)), 2)
    (stage,) = take_stages(model, cut, [1])
    seen = []
    model.tokens.register_forward_hook(lambda module, args, output: seen.append(output))
    stage.forward(MicroBatch((batch.tokens, batch.targets)), (torch.randn(2, 7, 15),))
    assert seen[0].shape == (2, 7, 15)
    assert seen[0].untyped_storage().nbytes() == 4
    # Placeholders have the dtype of the received activations.
    model.to(torch.bfloat16)
    stage.forward(MicroBatch((batch.tokens, batch.targets)), (torch.randn(2, 7, 15).bfloat16(),))
    assert seen[1].dtype is torch.bfloat16


def test_a_tied_parameter_has_two_stages_and_an_unused_one_has_the_last() -> None:
    model = Tied()
    model.spare = nn.Parameter(torch.zeros(3))
    batch = batch_of(0, 0, 0)
    cut = cut_chain(model, find_chain(model, (batch.tokens, batch.targets)), 3)
    assert cut.ties == {"tokens.weight": (0, 2)}
    assert tied_stages(cut.ties) == (0, 2)
    assert cut.owners["spare"] == (2,)


def test_the_sample_changes_nothing() -> None:
    class Counting(Tower):
        def block(self, number: int) -> nn.Module:
            return nn.Sequential(nn.Linear(15, 15), nn.BatchNorm1d(5), nn.Dropout(0.5))

    model = Counting()
    model.blocks[0].register_forward_hook(
        lambda module, args, output: setattr(module, "seen", output)
    )
    before, state = torch.random.get_rng_state(), copy.deepcopy(model.state_dict())
    find_chain(model, (X,))
    assert torch.equal(torch.random.get_rng_state(), before)
    assert all(torch.equal(state[name], value) for name, value in model.state_dict().items())
    assert all(param.grad is None for param in model.parameters())
    assert not hasattr(model.blocks[0], "seen")


def test_an_attribute_of_another_stages_block_is_refused_by_name() -> None:
    model = Tuples(4)
    take_stages(model, cut_chain(model, find_chain(model, (X,)), 2), [1])
    block: Any = model.blocks[0]
    assert block.kind == "own"
    assert not hasattr(block, "aux")
    with pytest.raises(
        UsageError, match="a block of another pipeline stage has no attribute 'aux'"
    ):
        block.aux  # noqa: B018


def test_the_loss_is_found_or_an_error_is_raised() -> None:
    loss = torch.tensor(2.0)
    assert loss_of(loss) is not None
    assert loss_of({"loss": loss, "logits": X}) == 2.0
    assert loss_of((loss, X)) == 2.0
    for output in (X, {"logits": X}, None):
        with pytest.raises(UsageError, match="returned no loss"):
            loss_of(output)


def test_more_stages_than_blocks_are_refused() -> None:
    model = Tower(2)
    with pytest.raises(UsageError, match="2 layers are cut into 3 stages"):
        cut_chain(model, find_chain(model, (X,)), 3)


@pytest.mark.parametrize(
    ("blocks", "said"),
    [("layers", "no module named 'layers'"), ("first", "'first' .* has no children")],
)
def test_a_name_that_is_no_list_of_blocks_is_refused(blocks: str, said: str) -> None:
    with pytest.raises(ChainError, match=said):
        find_chain(Tower(2), (X,), blocks=blocks)
