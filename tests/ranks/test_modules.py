"""Every kind of parameter, buffer, module and output trains as without sharding.

Each test compares an engine on two ranks with plain copies of the same model (tests/plain.py).
"""

from __future__ import annotations

import time
from collections import OrderedDict, namedtuple
from collections.abc import Callable
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from deepseek_zero.base.errors import PeerError
from tests.plain import (
    BACKWARD,
    Setting,
    assert_same_state,
    assert_trains_like_plain,
    draw,
    engine_for,
    here,
    on_stages_1_and_3,
    on_stages_1_to_3,
    seeded,
)
from tests.rank_pool import POLL_SECONDS

pytestmark = pytest.mark.ranks(2)
WIDTH = 8


class Block(nn.Module):
    """Two linears, which make the block a unit."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(x)))


class Stack(nn.Module):
    """Several blocks and a head."""

    def __init__(self, *blocks: nn.Module) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks or (Block(), Block(), Block()))
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor) -> Any:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def square(model: nn.Module, rank: int, step: int, backward: BACKWARD) -> Any:
    """Run the most common step: one forward, and one backward of the mean square."""
    output = model(draw(rank, step, 4, WIDTH))
    backward(output.square().mean())
    return output


# -- kinds of parameters
# -----------------------------------------------------------------------------------------------


@on_stages_1_to_3
def test_plain_blocks_train_like_one_process(setting: Setting) -> None:
    assert_trains_like_plain(Stack, square, setting)


class TiedHead(nn.Module):
    """Embedding and head share their weight; both belong to the root unit."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, WIDTH)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.head = nn.Linear(WIDTH, 11, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def tokens_of(rank: int, step: int, *shape: int) -> Tensor:
    return torch.randint(0, 11, shape, generator=torch.Generator().manual_seed(100 * step + rank))


def next_token(model: nn.Module, rank: int, step: int, backward: BACKWARD) -> Tensor:
    tokens = tokens_of(rank, step, 2, 6)
    loss = F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
    backward(loss)
    return loss


@on_stages_1_and_3
def test_tied_embedding_and_head_train_as_one_weight(setting: Setting) -> None:
    engine = assert_trains_like_plain(TiedHead, next_token, setting)
    assert engine.module.head.weight is engine.module.embed.weight


def tied_blocks() -> nn.Module:
    model = Stack()
    model.blocks[2].up.weight = model.blocks[0].up.weight
    return model


@on_stages_1_and_3
def test_weights_tied_between_two_units_train_as_one(setting: Setting) -> None:
    assert_trains_like_plain(tied_blocks, square, setting)


def frozen_some() -> nn.Module:
    """Freeze a weight inside a unit, a unit between trained ones, and a bias of the root."""
    model = Stack(Block(), Block(), Block(), Block())
    model.blocks[0].up.weight.requires_grad_(False)
    model.blocks[2].requires_grad_(False)
    model.head.bias.requires_grad_(False)
    return model


def frozen_but_last() -> nn.Module:
    """Freeze all but the last unit, so that backward never reaches the first two."""
    model = Stack()
    model.requires_grad_(False)
    model.blocks[2].requires_grad_(True)
    return model


def frozen_but_first() -> nn.Module:
    """Freeze all but the first unit, so that gradients pass through frozen units."""
    model = Stack()
    model.requires_grad_(False)
    model.blocks[0].requires_grad_(True)
    return model


@on_stages_1_to_3
@pytest.mark.parametrize("build", [frozen_some, frozen_but_last, frozen_but_first])
def test_frozen_parameters_do_not_change_while_others_train(
    build: Callable[[], nn.Module], setting: Setting
) -> None:
    assert_trains_like_plain(build, square, setting)


class Adapter(nn.Module):
    """A frozen linear with a small trained one, as in PEFT."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down = nn.Linear(base.in_features, 2, bias=False)
        self.up = nn.Linear(2, base.out_features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.up(self.down(x))


def with_adapters() -> nn.Module:
    model = Stack().requires_grad_(False)
    for block in model.blocks:
        block.up = Adapter(block.up)
    return model


@on_stages_1_and_3
def test_adapters_next_to_frozen_weights_are_trained(setting: Setting) -> None:
    assert_trains_like_plain(with_adapters, square, setting)


class Reused(Stack):
    """One block runs three times per forward, another twice, interleaved."""

    def forward(self, x: Tensor) -> Tensor:
        for number in (0, 1, 0, 2, 1, 0):
            x = self.blocks[number](x)
        return self.head(x)


@on_stages_1_to_3
def test_blocks_reused_within_a_forward_train(setting: Setting) -> None:
    assert_trains_like_plain(Reused, square, setting)


class SharedBlock(Stack):
    """The list contains the same module object twice."""

    def __init__(self) -> None:
        shared = Block()
        super().__init__(shared, Block(), shared)


@on_stages_1_and_3
def test_a_block_that_is_used_twice_in_the_model_trains(setting: Setting) -> None:
    assert_trains_like_plain(SharedBlock, square, setting)


class Unused(Stack):
    """Has a parameter in a unit, one in the root, and a whole unit that no forward uses."""

    def __init__(self) -> None:
        super().__init__(Block(), Block(), Block(), Block())
        self.blocks[0].spare = nn.Parameter(torch.randn(5))
        self.spare = nn.Parameter(torch.randn(3))

    def forward(self, x: Tensor) -> Tensor:
        for number in (0, 1, 3):
            x = self.blocks[number](x)
        return self.head(x)


@on_stages_1_to_3
def test_unused_parameters_keep_their_values(setting: Setting) -> None:
    assert_trains_like_plain(Unused, square, setting)


class Mixture(nn.Module):
    """Experts are chosen by the data: ranks and steps use different ones, some use none."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, 4)
        self.experts = nn.ModuleList(Block() for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        scores = self.router(x).softmax(dim=-1)
        chosen = scores.argmax(dim=-1)
        output = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            mine = (chosen == number).nonzero()[:, 0]
            if len(mine):
                output = output.index_add(0, mine, expert(x[mine]) * scores[mine, number, None])
        return x + output


def two_mixtures() -> nn.Module:
    return Stack(Mixture(), Mixture())


def few_tokens(model: nn.Module, rank: int, step: int, backward: BACKWARD) -> Any:
    output = model(draw(rank, step, 1 + rank, WIDTH))
    backward(output.square().mean())
    return output


LEAF = {"leaf_module": {"classes": ["Mixture"]}}
FUSED = {"stage3_module_granularity_threshold": 10_000}  # the whole mixture is one unit


@pytest.mark.parametrize(
    "setting",
    [Setting(1), Setting(2), Setting(3), Setting(3, 0)]
    + [Setting(3, window, more) for window in (None, 0) for more in (LEAF, FUSED)],
)
def test_experts_used_by_some_ranks_in_some_steps_train(setting: Setting) -> None:
    assert_trains_like_plain(two_mixtures, few_tokens, setting, steps=6)


class External(nn.Module):
    """Reads another unit's weight in F.linear, before and after that unit runs."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.used_only_from_outside = nn.ModuleList([Block(), Block()])

    def forward(self, x: Tensor) -> Tensor:
        x = x + F.linear(x, self.blocks[2].up.weight).sum(dim=-1, keepdim=True)
        for block in self.blocks:
            x = block(x)
        x = x + F.linear(torch.tanh(x), self.blocks[0].up.weight, self.blocks[0].up.bias)[:, :WIDTH]
        return F.linear(x, self.used_only_from_outside[1].up.weight)


@on_stages_1_to_3
def test_a_weight_read_from_outside_its_unit_trains(setting: Setting) -> None:
    assert_trains_like_plain(External, square, setting)


class Reader(Block):
    """A unit whose forward reads the weight of another unit, given at construction."""

    def __init__(self, other: Block) -> None:
        super().__init__()
        self.other = (other,)  # in a tuple, so that it is not a child

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + F.linear(x, self.other[0].up.weight)[:, :WIDTH]


def readers() -> nn.Module:
    first = Block()
    return Stack(first, Reader(first), Block(), Reader(first))


@on_stages_1_to_3
def test_a_unit_that_reads_another_units_weight_trains(setting: Setting) -> None:
    assert_trains_like_plain(readers, square, setting)


class OddSizes(nn.Module):
    """0-dim, empty and odd-sized parameters in root and units, and a unit of empty ones."""

    class Part(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.tensor(0.7))
            self.nothing = nn.Parameter(torch.empty(0))
            self.no_rows = nn.Parameter(torch.empty(0, 3))
            self.odd = nn.Parameter(torch.randn(3, 5, 7) / 5)
            self.one = nn.Parameter(torch.randn(1))
            self.mix = nn.Linear(WIDTH, 105, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            extra = (
                self.mix(x) @ self.odd.flatten() * self.scale
                + self.one
                + self.nothing.sum()
                + self.no_rows.sum()
            )
            return x + extra[:, None]

    class Hollow(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(0, 0, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            return x + self.inner(x[:, :0]).sum()

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([self.Part(), self.Part(), self.Part()])
        self.hollow = nn.ModuleList([self.Hollow(), self.Hollow()])
        self.temperature = nn.Parameter(torch.tensor(1.5))
        self.nothing = nn.Parameter(torch.empty(2, 0))

    def forward(self, x: Tensor) -> Tensor:
        for block in (*self.blocks, *self.hollow):
            x = block(x)
        return x * self.temperature + self.nothing.sum()


@on_stages_1_to_3
@pytest.mark.filterwarnings("ignore:Initializing zero-element tensors")
def test_scalar_empty_and_odd_parameters_train(setting: Setting) -> None:
    engine = assert_trains_like_plain(OddSizes, square, setting)
    assert engine.module.temperature.shape == ()
    assert engine.module.nothing.shape == (2, 0)


class MixedDtypes(nn.Module):
    """float32, float64 and bfloat16 weights and a frozen integer table in one unit."""

    class Part(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.in_32 = nn.Linear(WIDTH, WIDTH)
            self.in_64 = nn.Linear(WIDTH, WIDTH, dtype=torch.float64)
            self.in_16 = nn.Linear(WIDTH, WIDTH, dtype=torch.bfloat16)
            self.codes = nn.Parameter(torch.arange(-4, 4, dtype=torch.int8), requires_grad=False)
            self.flags = nn.Parameter(torch.arange(8) % 2 == 0, requires_grad=False)

        def forward(self, x: Tensor) -> Tensor:
            x = (
                torch.tanh(self.in_32(x))
                + self.in_64(x.double()).float()
                + self.in_16(x.bfloat16()).float()
            )
            # Without the division, training grows until a difference in the last bit of fp32
            # between versions of torch changes a bf16 value.
            return torch.where(self.flags, x, x * self.codes / 8)

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([self.Part(), self.Part()])

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


@on_stages_1_and_3
def test_mixed_dtypes_round_trip_and_the_first_forward_is_exact(setting: Setting) -> None:
    model, plain = seeded(MixedDtypes), seeded(MixedDtypes)
    engine = engine_for(model, setting)
    assert_same_state(model, plain)
    x = draw(here(), 0, 4, WIDTH)
    assert torch.equal(engine(x), plain(x))


class MixedWithoutHalf(MixedDtypes):
    """Without bfloat16 gradients, which are summed differently, training agrees up to rounding."""

    def __init__(self) -> None:
        super().__init__()
        for block in self.blocks:
            block.in_16.requires_grad_(False)


@on_stages_1_and_3
def test_mixed_dtypes_train(setting: Setting) -> None:
    assert_trains_like_plain(MixedWithoutHalf, square, setting)


# -- buffers
# --------------------------------------------------------------------------------------------------


class Buffers(nn.Module):
    """Batch norms in and outside units, and buffers of many kinds.

    The buffers are integer, boolean, scalar, empty, expanded, sparse and non-persistent.
    """

    class Part(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear, self.norm = nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH)
            self.register_buffer("mask", torch.arange(WIDTH) % 3 > 0)
            self.register_buffer("calls", torch.tensor(0))
            self.register_buffer("scratch", torch.ones(WIDTH), persistent=False)
            self.register_buffer("nothing", torch.empty(0))
            self.register_buffer("absent", None)
            self.register_buffer("rows", torch.arange(1.0, WIDTH + 1).expand(6, WIDTH))
            self.register_buffer("links", torch.eye(6).to_sparse(), persistent=False)

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            x = x + self.norm(self.linear(x)) * self.mask * self.scratch
            return torch.sparse.mm(self.links, x / self.rows)

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([self.Part(), self.Part()])
        self.norm = nn.BatchNorm1d(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.norm(x)


def cubes(model: nn.Module, rank: int, step: int, backward: BACKWARD) -> Any:
    output = model(draw(rank, step, 6, WIDTH))
    backward((output**3).mean())
    return output


@on_stages_1_to_3
def test_buffers_follow_each_ranks_own_data(setting: Setting) -> None:
    engine = assert_trains_like_plain(Buffers, cubes, setting)
    assert int(engine.module.blocks[0].calls) == 3
    assert int(engine.module.norm.num_batches_tracked) == 3


# -- modules that read their children's parameters
# ---------------------------------------------------------------------


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(WIDTH, 2, 16, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.encoder(x[None])[0]


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.LSTM(WIDTH, WIDTH, num_layers=2), nn.GRU(WIDTH, WIDTH)
        self.blocks = nn.ModuleList([Block(), Block()])

    def forward(self, x: Tensor) -> Tensor:
        x = self.second(self.first(x)[0])[0]
        for block in self.blocks:
            x = block(x)
        return x


class RecurrentUnits(nn.Module):
    class Part(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.LSTM(WIDTH, WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            return x + self.inner(x)[0]

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([self.Part(), self.Part()])

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


class Parametrized(Stack):
    def __init__(self) -> None:
        super().__init__()
        for block in self.blocks:
            nn.utils.parametrizations.weight_norm(block.up)


class WholeList(nn.Module):
    """Parameters in a ParameterList and a ParameterDict, stacked in forward."""

    class Part(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.parts = nn.ParameterList([torch.randn(WIDTH), torch.randn(WIDTH)])
            self.named = nn.ParameterDict({"a": torch.randn(WIDTH), "b": torch.randn(WIDTH)})

        def forward(self, x: Tensor) -> Tensor:
            return x * torch.stack(list(self.parts)).mean(dim=0) + self.named["a"] - self.named["b"]

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([self.Part(), self.Part()])

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


class OwnFunction(torch.autograd.Function):
    """Saves a parameter and reads it in backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x @ weight

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        return grad @ weight.t(), x.t() @ grad


class Custom(Stack):
    class Part(Block):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH) / WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(OwnFunction.apply(x, self.weight))

    def __init__(self) -> None:
        super().__init__(self.Part(), self.Part(), self.Part())


class InPlace(Stack):
    """Changes a unit's output and input in place."""

    class Part(Block):
        def forward(self, x: Tensor) -> Tensor:
            y = F.relu(self.up(x), inplace=True)
            return self.down(y).add_(x)

    def __init__(self) -> None:
        super().__init__(self.Part(), self.Part(), self.Part())

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
            x += 1.0
        return self.head(x).mul_(2.0)


@on_stages_1_and_3
@pytest.mark.parametrize(
    "build",
    [Attention, Recurrent, RecurrentUnits, Parametrized, WholeList, Custom, InPlace],
    ids=lambda b: b.__name__,
)
def test_modules_that_read_parameters_in_their_own_ways_train(
    build: Callable[[], nn.Module], setting: Setting
) -> None:
    assert_trains_like_plain(build, square, setting)


class SparseEmbedding(TiedHead):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, WIDTH, padding_idx=0, sparse=True)


@on_stages_1_and_3
def test_sparse_embedding_gradients_train(setting: Setting) -> None:
    assert_trains_like_plain(SparseEmbedding, next_token, setting)


# -- outputs
# --------------------------------------------------------------------------------------------------

Pair = namedtuple("Pair", "hidden extra")


@dataclass
class Result:
    hidden: Tensor
    extra: Any = None


@dataclass(frozen=True)
class FrozenResult:
    hidden: Tensor
    extra: Any = None


@dataclass(frozen=True, slots=True)
class SlottedResult:
    hidden: Tensor
    extra: Any = None


class PlainObject:
    def __init__(self, hidden: Tensor, extra: Any) -> None:
        self.hidden, self.extra = hidden, extra


class Cyclic(PlainObject):
    """Refers to itself and to the module that returned it."""

    def __init__(self, hidden: Tensor, extra: Any) -> None:
        super().__init__(hidden, extra)
        self.me = self
        self.module: nn.Module | None = None


class ModelOutput(OrderedDict):  # type: ignore[type-arg]
    """A mapping whose entries are also attributes, as in Hugging Face Transformers."""

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(name) from None


SHAPES: dict[str, tuple[Callable[[Tensor, Tensor], Any], Callable[[Any], Tensor]]] = {
    "tensor": (lambda x, y: x, lambda out: out),
    "tuple": (lambda x, y: (x, None, y, 3), lambda out: out[0]),
    "list": (lambda x, y: [y, [x]], lambda out: out[1][0]),
    "namedtuple": (lambda x, y: Pair(x, y), lambda out: out.hidden),
    "dict": (
        lambda x, y: {"hidden": x, "extra": {"deep": y, "none": None}},
        lambda out: out["hidden"],
    ),
    "read-only mapping": (
        lambda x, y: MappingProxyType({"hidden": x, "extra": y}),
        lambda out: out["hidden"],
    ),
    "model output": (lambda x, y: ModelOutput(hidden=x, extra=(y, y)), lambda out: out.hidden),
    "dataclass": (lambda x, y: Result(x, [y]), lambda out: out.hidden),
    "frozen dataclass": (lambda x, y: FrozenResult(x, y), lambda out: out.hidden),
    "slotted dataclass": (lambda x, y: SlottedResult(x, y), lambda out: out.hidden),
    "object": (lambda x, y: PlainObject(x, y), lambda out: out.hidden),
    "cyclic object": (lambda x, y: Cyclic(x, y), lambda out: out.hidden),
}


class Returning(nn.Module):
    """Units and root return the same kind of output; no loss uses the tensor `extra`."""

    class Part(Block):
        kind = "tensor"

        def forward(self, x: Tensor) -> Any:
            made = SHAPES[self.kind][0](super().forward(x), x.detach() * 2)
            if isinstance(made, Cyclic):
                made.module = self
            return made

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.blocks = nn.ModuleList([self.Part(), self.Part(), self.Part()])
        for block in self.blocks:
            block.kind = kind

    def forward(self, x: Tensor) -> Any:
        make, read = SHAPES[self.kind]
        for block in self.blocks:
            x = read(block(x))
        return make(x, x * 3)


@on_stages_1_and_3
@pytest.mark.parametrize("kind", list(SHAPES))
def test_every_kind_of_output_trains(kind: str, setting: Setting) -> None:
    read = SHAPES[kind][1]

    def body(model: nn.Module, rank: int, step: int, backward: BACKWARD) -> Any:
        output = model(draw(rank, step, 4, WIDTH))
        assert type(output) is type(SHAPES[kind][0](torch.zeros(1), torch.zeros(1)))
        backward(read(output).square().mean())
        return read(output)

    assert_trains_like_plain(lambda: Returning(kind), body, setting)


class ReturnsNone(nn.Module):
    """Units and root return None and store their result in the argument."""

    class Part(Block):
        def forward(self, held: dict[str, Tensor]) -> None:  # type: ignore[override]
            held["x"] = super().forward(held["x"])

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([self.Part(), self.Part(), self.Part()])
        self.scale = nn.Parameter(torch.ones(WIDTH))

    def forward(self, held: dict[str, Tensor]) -> None:
        for block in self.blocks:
            block(held)
        held["x"] = held["x"] * self.scale


@on_stages_1_to_3
def test_units_that_return_none_and_write_into_their_argument_train(setting: Setting) -> None:
    def body(model: nn.Module, rank: int, step: int, backward: BACKWARD) -> Any:
        held = {"x": draw(rank, step, 4, WIDTH)}
        assert model(held) is None
        backward(held["x"].square().mean())
        return held["x"]

    assert_trains_like_plain(ReturnsNone, body, setting)


class SeveralOutputs(Stack):
    def forward(self, x: Tensor) -> Any:
        hidden = [x]
        for block in self.blocks:
            hidden.append(block(hidden[-1]))
        return self.head(hidden[-1]), hidden


@on_stages_1_to_3
@pytest.mark.parametrize("used", [(0,), (1,), (0, 2), (3,)], ids=str)
def test_a_loss_of_some_outputs_only_trains(used: tuple[int, ...], setting: Setting) -> None:
    """Outputs 1.. are hidden states: units after the last one in the loss get no gradient."""

    def body(model: nn.Module, rank: int, step: int, backward: BACKWARD) -> Any:
        head, hidden = model(draw(rank, step, 4, WIDTH))
        outputs = [head, *hidden[1:]]
        backward(sum(outputs[number].square().mean() for number in used))
        return outputs

    assert_trains_like_plain(SeveralOutputs, body, setting)


@on_stages_1_and_3
def test_keyword_arguments_and_nested_inputs_reach_the_model(setting: Setting) -> None:
    class Fed(Stack):
        def forward(
            self, x: Tensor, *, more: dict[str, list[Tensor]], flag: bool = False
        ) -> Tensor:  # type: ignore[override]
            assert flag
            return super().forward(x + more["y"][0])

    def body(model: nn.Module, rank: int, step: int, backward: BACKWARD) -> Any:
        output = model(
            draw(rank, step, 4, WIDTH), more={"y": [draw(rank + 5, step, 4, WIDTH)]}, flag=True
        )
        backward(output.square().mean())
        return output

    assert_trains_like_plain(Fed, body, setting)


@on_stages_1_and_3
def test_the_gradient_of_the_input_is_the_plain_one(setting: Setting) -> None:
    def body(model: nn.Module, rank: int, step: int, backward: BACKWARD) -> Any:
        x = draw(rank, step, 4, WIDTH).requires_grad_()
        backward(model(x).square().mean())
        return x.grad

    assert_trains_like_plain(Stack, body, setting)


class Silent(nn.Module):
    """Stores its result in the argument and returns None."""

    def __init__(self) -> None:
        super().__init__()
        self.line = nn.Linear(WIDTH, WIDTH)

    def forward(self, state: dict[str, Any]) -> None:
        state["x"] = state["x"] + self.line(state["x"]).tanh()


class Stateful(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Silent() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        state = {"x": x}
        for block in self.blocks:
            block(state)
        return state["x"]


@on_stages_1_and_3
def test_a_unit_that_returns_nothing_while_an_exception_is_handled_has_not_failed(
    setting: Setting,
) -> None:
    def body(model: nn.Module, rank: int, step: int, backward: Any) -> Tensor:
        try:
            raise LookupError("this batch was not in the cache")
        except LookupError:
            out = model(draw(rank, step, 4, WIDTH))
            if rank == here() == 0 and hasattr(model, "module"):
                # The other rank waits and checks meanwhile whether this one has failed
                time.sleep(3 * POLL_SECONDS)
            backward(out.square().mean())
        return out

    assert_trains_like_plain(Stateful, body, setting, steps=2, units=["Silent"])


@on_stages_1_and_3
def test_a_unit_that_fails_during_exception_handling_is_reported(setting: Setting) -> None:
    engine = engine_for(seeded(Stateful), setting, units=["Silent"])
    error, told = (ValueError, "bad value") if here() == 0 else (PeerError, "rank 0")
    if here() == 0:
        engine.module.blocks[1].line.register_forward_pre_hook(refuse)
    try:
        raise LookupError("this batch was not in the cache")
    except LookupError:
        with pytest.raises(error, match=told):
            engine.backward(engine(draw(here(), 0, 4, WIDTH)).square().mean())
            engine.step()


def refuse(module: nn.Module, args: Any) -> None:
    raise ValueError("bad value")
