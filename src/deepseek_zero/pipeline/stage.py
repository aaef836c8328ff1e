"""Divide a model into stages that run the model's own forward on the same inputs.

Placeholders replace the blocks of other stages. A placeholder before the first own block returns
its input; the last of them returns the received tensor. The placeholder after the last own block
leaves the forward with an exception that is caught at the model. Parameters of other stages are
zeros that use one element of memory, so the lookup in another stage's embedding costs nothing. The
head of another stage is never reached.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial, update_wrapper
from itertools import pairwise
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from ..base.errors import UsageError
from ..base.nested import Args
from ..parallel.layers import Vocabulary
from ..planner.split import set_copy
from .chain import Chain, hold_back_caches
from .partition import Bounds, LayerCost, partition
from .schedule import Numbers

Received = tuple[Tensor, ...]


class Stage(Protocol):
    """Interface of one stage of a model that a pipeline runs.

    Attributes:
        index: The number of the stage, along the model.
    """

    index: int

    def forward(self, micro: Any, received: Received) -> Any:
        """Run the stage on one micro-batch.

        Args:
            micro: The micro-batch: a `MicroBatch` or a `Labelled`.
            received: Tensors that the previous stage sent; empty in the first stage.

        Returns:
            The tensors for the next stage, or the model's output in the last stage.
        """
        ...

    def loss(self, output: Any, micro: Any) -> Tensor:
        """Return the loss of a micro-batch, a scalar tensor.

        Args:
            output: Output of the last stage's `forward`.
            micro: The micro-batch, which may contain the labels.
        """
        ...


class MicroBatch(NamedTuple):
    """The arguments of the whole model's forward for one micro-batch.

    Attributes:
        args: The positional arguments.
        kwargs: The keyword arguments.
    """

    args: Args = ()
    kwargs: Mapping[str, Any] = {}

    @classmethod
    def of(cls, batch: Any) -> MicroBatch:
        """Convert an item of a data loader to arguments of the model.

        A mapping is converted to keyword arguments, and a tuple or list to positional arguments.
        Any other value becomes a single positional argument. A `MicroBatch` is returned unchanged.

        Args:
            batch: The item of the data loader.

        Returns:
            A `MicroBatch` with these arguments.
        """
        if isinstance(batch, cls):
            return batch
        if isinstance(batch, Mapping):
            return cls((), dict(batch))
        return cls(tuple(batch) if isinstance(batch, (tuple, list)) else (batch,))


@dataclass(frozen=True)
class Cut:
    """The assignment of a model's blocks and parameters to pipeline stages.

    Attributes:
        chain: The blocks of the model.
        bounds: The number of each stage's first block, followed by the number of blocks. Stage g
            has the blocks [bounds[g], bounds[g + 1]).
        owners: For each parameter, the stages that use it, ascending; several for a tied one.
    """

    chain: Chain
    bounds: Bounds
    owners: Mapping[str, Numbers]

    @property
    def stages(self) -> int:
        """Return the number of stages."""
        return len(self.bounds) - 1

    @property
    def ties(self) -> dict[str, Numbers]:
        """Return the parameters that several stages use, with the numbers of these stages."""
        return {name: stages for name, stages in self.owners.items() if len(stages) > 1}

    def blocks_of(self, stage: int) -> list[str]:
        """Return the full names of the blocks that a stage has."""
        return [block.name for block in self.chain.blocks[slice(*self.bounds[stage : stage + 2])]]

    def params_of(self, stages: Sequence[int]) -> list[str]:
        """Return the names of the parameters that at least one of these stages uses."""
        return [name for name, owners in self.owners.items() if not set(owners).isdisjoint(stages)]


def cut_chain(
    model: nn.Module,
    chain: Chain,
    stages: int,
    method: str = "best",
    in_flight: Sequence[int] | None = None,
) -> Cut:
    """Assign the blocks of a model to stages.

    The first stage also gets the part before the blocks. The last stage gets the part after them
    and unused parameters. The model is not changed.

    Args:
        model: The whole model, whose parameter sizes are read.
        chain: The blocks, as `find_chain` returned them.
        stages: Number of stages.
        method: How blocks are assigned; see the function `partition`.
        in_flight: For each stage, the number of micro-batches with saved activations, which "best"
            takes into account. None means one for each.

    Returns:
        The blocks of each stage, and the stages that use each parameter.

    Raises:
        UsageError: There are fewer blocks than stages, or the method is unknown.
    """
    params = dict(model.named_parameters())
    first, *blocks, last = chain.parts
    joined = [[block] for block in blocks]
    joined[0].insert(0, first)
    joined[-1].append(last)
    layers = []
    used = []
    for block, parts in zip(blocks, joined, strict=True):
        names = {name for part in parts for name in part.params}
        used.append(names)
        trained = sum(params[name].numel() for name in names if params[name].requires_grad)
        frozen = sum(params[name].nbytes for name in names if not params[name].requires_grad)
        states = 16 * trained + frozen
        flops = sum(part.flops for part in parts)
        saved = sum(part.saved for part in parts)
        layers.append(LayerCost(block.kind, trained, flops, states, saved))
    bounds = partition(method, layers, stages, in_flight)
    owners: dict[str, Numbers] = dict.fromkeys(params, ())
    for stage, (start, end) in enumerate(pairwise(bounds)):
        for name in set[str]().union(*used[start:end]):
            owners[name] += (stage,)
    return Cut(chain, bounds, {name: found or (stages - 1,) for name, found in owners.items()})


# -- placeholders for the blocks of other stages


class _LeaveForward(Exception):
    """End a forward after the last block of a stage.

    torch runs its hooks as after any Exception.
    """

    def __init__(self, output: Tensor) -> None:
        super().__init__("a stage's forward ends here")
        self.output = output


class _AbsentError(UsageError, AttributeError):
    """An attribute of a block of another stage was accessed."""


class StandIn(nn.Module):
    """Placeholder for a block of another stage. Its forward returns its input.

    It has the block's attributes that are strings, numbers or flags, because the model's forward
    may read them.

    Args:
        block: The block that it replaces.
        length: Length of the tuple that the block returns; None if it returns a tensor.
    """

    def __init__(self, block: nn.Module, length: int | None) -> None:
        super().__init__()
        self._length = length
        for name, value in vars(block).items():
            if not name.startswith("_") and isinstance(
                value, str | int | float | bool | type(None)
            ):
                self.__dict__.setdefault(name, value)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            raise _AbsentError(
                f"a block of another pipeline stage has no attribute '{name}' on this rank.",
                "Each rank has its own blocks, and only plain attributes of the others: strings, "
                "numbers and flags.",
                "keep what the forward reads outside the blocks, or write the model as a "
                "PipelineModule.",
            ) from None

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return the first argument, in a tuple if the block returns a tuple."""
        return self._formed(_first(args, kwargs))

    def _formed(self, hidden: Tensor) -> Any:
        return hidden if self._length is None else (hidden, *[None] * (self._length - 1))


class _Entry(StandIn):
    """The placeholder before the first own block, which returns the received tensor."""

    received: Tensor | None = None

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        assert self.received is not None
        return self._formed(self.received)


class _Exit(StandIn):
    """The placeholder after the last own block, which leaves the forward."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        raise _LeaveForward(_first(args, kwargs))


def _first(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Tensor:
    found: Tensor = args[0] if args else next(iter(kwargs.values()))
    return found


class _Zeros:
    """Replacement of other stages' parameters: one zero, expanded to their shapes.

    Its dtype follows the received tensor, because a model may take the dtype of its masks from its
    embeddings.
    """

    def __init__(self) -> None:
        self.zero = torch.zeros((), device="cpu")
        self._places: list[tuple[nn.Module, str, torch.Size]] = []

    def stand_for(self, module: nn.Module, key: str, param: nn.Parameter) -> None:
        """Replace a module's parameter by zeros.

        Args:
            module: The module.
            key: The parameter's name in the module.
            param: The parameter.
        """
        delattr(module, key)
        self._places.append((module, key, param.shape))
        self.zero = (
            param.new_zeros(()) if type(param) is nn.Parameter else self.zero.to(param.dtype)
        )
        module.__dict__[key] = self.zero.expand(param.shape)

    def follow(self, received: Tensor) -> None:
        """Adopt the dtype and device of a received tensor."""
        if self.zero.dtype is received.dtype and self.zero.device == received.device:
            return
        self.zero = torch.zeros((), dtype=received.dtype, device=received.device)
        for module, key, shape in self._places:
            module.__dict__[key] = self.zero.expand(shape)


class _StageForward:
    """The forward of a divided model, which may be left before its end.

    `is_due` is true while a stage runs it.
    """

    is_due = False

    def __init__(self, forward: Callable[..., Any]) -> None:
        self._forward = forward
        update_wrapper(self, forward)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not self.is_due:
            raise UsageError(
                "the model was called directly, and this rank has only a stage of it.",
                "The schedule sends the outputs of a stage to another rank.",
                "call what initialize or DeepSeekZeRO3 returned; generate needs the whole model: "
                "export the weights.",
            )
        try:
            return self._forward(*args, **kwargs)
        except _LeaveForward as leave:
            return leave.output


# -- stages


class ModelStage:
    """One stage of a model that was divided between its blocks.

    The forward of the stage is the forward of the whole model, in which placeholders replace the
    blocks of other stages.

    Args:
        model: The model on this rank, which all stages of the rank share.
        cut: The assignment of the model's blocks to stages.
        index: The number of this stage, counted from 0 in the order of the forward.
        view: The modules that replace the blocks of other stages while this stage runs, by block
            name.
        entry: The placeholder that returns the tensor of the previous stage; None in the first
            stage.
        zeros: The tensors of zeros that replace the parameters of other stages.
    """

    def __init__(
        self,
        model: nn.Module,
        cut: Cut,
        index: int,
        view: dict[str, nn.Module],
        entry: _Entry | None,
        zeros: _Zeros,
    ) -> None:
        self.model = model
        self.cut = cut
        self.index = index
        self._box = model.get_submodule(cut.chain.container)
        self._view = view
        self._entry = entry
        self._zeros = zeros

    @property
    def is_last(self) -> bool:
        """Return whether this is the last stage, which returns the model's output."""
        return self.index == self.cut.stages - 1

    def forward(self, micro: MicroBatch, received: Received = ()) -> Any:
        """Run the model's forward on one micro-batch with this stage's blocks only.

        Args:
            micro: The arguments of the whole model's forward.
            received: The tensor that the previous stage sent; empty in the first stage.

        Returns:
            In the last stage, the model's output. In other stages, the model's forward ends after
            the last block of the stage, and the result is a tuple with the tensor for the next
            stage.

        Raises:
            UsageError: The model's forward reads an attribute of a block of another stage, and the
                attribute is not a string, number, flag or None.
        """
        rest = {key: getattr(self._box, key) for key in self._view}
        self._show(self._view)
        if self._entry is not None:
            (self._entry.received,) = received
            self._zeros.follow(received[0])
        forward: _StageForward = self.model.__dict__["forward"]
        forward.is_due = True
        try:
            output = self.model(*micro.args, **micro.kwargs)
        finally:
            forward.is_due = False
            self._show(rest)
            if self._entry is not None:
                self._entry.received = None
        return output if self.is_last else (output,)

    def _show(self, blocks: Mapping[str, nn.Module]) -> None:
        for key, block in blocks.items():
            setattr(self._box, key, block)

    def loss(self, output: Any, micro: MicroBatch) -> Tensor:
        """Return the loss that the model's forward has computed.

        Args:
            output: The model's output in the last stage.
            micro: The micro-batch, which is not used.

        Returns:
            A tensor of shape ().

        Raises:
            UsageError: The output contains no loss, or the loss is not a tensor with one element.
        """
        return loss_of(output)


def tied_stages(ties: Mapping[str, Numbers]) -> Numbers:
    """Return the stages that share a parameter with another stage, ascending.

    Args:
        ties: For each shared parameter, the stages that use it.
    """
    return tuple(sorted({stage for stages in ties.values() for stage in stages}))


def loss_in(output: Any) -> Tensor | None:
    """Return the loss in a model's output as a scalar, or None if there is none.

    The loss is the output itself if it is a tensor, or the attribute or key `loss` of the output,
    or the first element of the output if it is a tuple or list.

    Args:
        output: The output of the model's forward.
    """
    found = output
    if isinstance(output, Mapping):
        found = output.get("loss")
    elif not isinstance(output, Tensor):
        found = getattr(output, "loss", None)
        if found is None and isinstance(output, tuple | list) and output:
            found = output[0]
    return found.reshape(()) if isinstance(found, Tensor) and found.numel() == 1 else None


def loss_of(output: Any) -> Tensor:
    """Return the loss in a model's output as a scalar tensor.

    The loss is the output itself if it is a tensor, or the attribute or key `loss` of the output,
    or the first element of the output if it is a tuple or list.

    Args:
        output: The output of the model's forward.

    Raises:
        UsageError: None of these values is a tensor with one element.
    """
    if (found := loss_in(output)) is not None:
        return found
    raise UsageError(
        "the model returned no loss.",
        "The last stage of a pipeline begins the backward, with a scalar.",
        "pass labels with the batch, so that the model's forward returns its loss.",
    )


def take_stages(model: nn.Module, cut: Cut, own: Sequence[int]) -> list[ModelStage]:
    """Reduce a model to the stages of this rank.

    The blocks and parameters of other stages are freed. The remaining parameters keep their names
    in the whole model. Afterwards the model can only be called through its stages.

    Args:
        model: The whole model, which is changed in place.
        cut: The assignment of its blocks and parameters to stages.
        own: The numbers of this rank's stages.

    Returns:
        This rank's stages, in ascending order.
    """
    chain = cut.chain
    box = model.get_submodule(chain.container)
    mine = sorted(own)
    blocks = [getattr(box, key) for key in chain.keys]
    lengths = [block.length for block in chain.blocks]
    stand_ins = list(map(StandIn, blocks, lengths))
    kept = {number for stage in mine for number in range(*cut.bounds[stage : stage + 2])}
    found = []
    zeros = _Zeros()
    for stage in mine:
        first, end = cut.bounds[stage : stage + 2]
        others = kept - set(range(first, end))  # blocks of other stages of this rank
        view: dict[str, nn.Module] = {chain.keys[number]: stand_ins[number] for number in others}
        entry = None
        if first:
            entry = _Entry(blocks[first - 1], lengths[first - 1])
            view[chain.keys[first - 1]] = entry
        if end < len(blocks):
            view[chain.keys[end]] = _Exit(blocks[end], lengths[end])
        found.append(ModelStage(model, cut, stage, view, entry, zeros))
    for number, key in enumerate(chain.keys):
        if number not in kept:
            setattr(box, key, stand_ins[number])
    hold_back_caches(model)
    _drop_params(model, cut, mine, zeros)
    for name, param in model.named_parameters():
        if cut.owners[name][0] not in mine:
            set_copy(param)
    model.__dict__["forward"] = _StageForward(model.forward)
    return found


def _drop_params(model: nn.Module, cut: Cut, own: Sequence[int], zeros: _Zeros) -> None:
    """Replace the parameters of other stages by zeros, and skip embedding lookups."""
    names = set(cut.params_of(own))
    kept = {id(param) for name, param in model.named_parameters() if name in names}
    inside = set(model.get_submodule(cut.chain.container).modules())
    for module in list(model.modules()):
        for key, param in list(module.named_parameters(recurse=False, remove_duplicate=False)):
            if id(param) not in kept:
                zeros.stand_for(module, key, param)
        looks_up = isinstance(module, nn.Embedding) and 0 not in own and module not in inside
        if looks_up and type(module).forward in (nn.Embedding.forward, Vocabulary.forward):
            # Zeros of the output's shape; no row is looked up
            dim = int(module.embedding_dim)  # type: ignore[arg-type]
            module.__dict__["forward"] = partial(_zero_rows, zeros, dim)


def _zero_rows(zeros: _Zeros, dim: int, input: Tensor) -> Tensor:
    return zeros.zero.expand(*input.shape, dim)
