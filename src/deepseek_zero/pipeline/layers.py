"""A model that was written as a list of layers: each takes what the one before returns, and a stage
has some of them.

One argument flows; a tuple of tensors is one.  A layer is a module, a function, or a `LayerSpec`,
which only the ranks of its stage build.  Parameters have the layer's place in the whole list in
their names ("7.weight"): no name depends on the cut; what several places share is built once for
each stage, as "tied_modules.<key>".
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import copy
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..base.errors import NotBuiltError, UsageError, article, shown
from ..comm.collectives import Comm
from ..planner.split import set_copy
from .partition import LayerCost, partition
from .stage import Received


class LayerSpec:
    """A layer that is still to be built: a class of modules, and its arguments."""

    def __init__(self, typename: type[nn.Module], *module_args: Any, **module_kwargs: Any) -> None:
        if not (isinstance(typename, type) and issubclass(typename, nn.Module)):
            raise UsageError(
                "LayerSpec only supports torch.nn.Module types.",
                f"It was given {shown(typename)}.",
                "pass functions as they are, without a LayerSpec.",
            )
        self.typename = typename
        self.module_args = module_args
        self.module_kwargs = module_kwargs

    def __repr__(self) -> str:
        arguments = [
            *map(repr, self.module_args),
            *(f"{name}={value!r}" for name, value in self.module_kwargs.items()),
        ]
        return f"{self.typename.__name__}({', '.join(arguments)})"

    def build(self, log: bool = False) -> nn.Module:
        """Build the layer.  log: as DeepSpeed's; builds are not logged."""
        return self.typename(*self.module_args, **self.module_kwargs)


class TiedLayerSpec(LayerSpec):
    """A layer that shares weights with the others of its key.

    forward_fn: called with (module, input) instead of the module's forward.  tied_weight_attr: the
    weights that are shared, by name, or one name; dots lead into submodules.
    """

    def __init__(
        self,
        key: str,
        typename: type[nn.Module],
        *module_args: Any,
        forward_fn: Callable[..., Any] | None = None,
        tied_weight_attr: str | Sequence[str] = ("weight",),
        **module_kwargs: Any,
    ) -> None:
        super().__init__(typename, *module_args, **module_kwargs)
        self.key = key
        self.forward_fn = forward_fn
        self.tied_weight_attr = (
            [tied_weight_attr] if isinstance(tied_weight_attr, str) else list(tied_weight_attr)
        )


RECEIVED = "what the stage before has sent"


class Labelled(NamedTuple):
    """One micro-batch of a list of layers.  inputs: what the first layer takes; labels: what the
    loss takes.
    """

    inputs: Any
    labels: Any = None

    @classmethod
    def of(cls, batch: Any) -> Labelled:
        """Read what a data loader yields: a pair (inputs, labels)."""
        if isinstance(batch, cls):
            return batch
        if isinstance(batch, (tuple, list)) and len(batch) == 2:
            return cls(*batch)
        raise UsageError(
            "a micro-batch of a list of layers is a pair (inputs, labels).",
            "The first layer takes the inputs, the loss the labels.",
            "let the data iterator yield pairs.",
        )


class LayerStages(nn.Module):
    """One stage's layers of a list.

    layers: modules, functions, `LayerSpec`s.  stages, index: how many stages there are, and which
    this one is.  method:
    of partition.py.  loss_fn: called with (output, labels) in the last stage; None: the last layer
    returns the loss.
    seed_layers: torch's seed is set before each layer is built, and before it runs.
    checkpoint_interval: so many layers at a time are recomputed in backward, by `checkpoint_func`;
    0: none.  checkpointable: names of the classes that may be; None: all that have parameters.
    """

    dynamic_shape = False  # activations change their shapes from one micro-batch to the next

    def __init__(
        self,
        layers: Iterable[Any],
        stages: int,
        index: int,
        *,
        method: str = "parameters",
        loss_fn: Callable[..., Any] | None = None,
        seed_layers: bool = False,
        seed_fn: Callable[[int], Any] | None = None,
        base_seed: int = 1234,
        checkpoint_interval: int = 0,
        checkpoint_func: Callable[..., Any] | None = None,
        checkpointable: Sequence[str] | None = None,
    ) -> None:
        super().__init__()
        self.num_stages = stages
        self.index = index
        self.loss_fn = loss_fn
        self.seed_layers = seed_layers
        self.seed_fn = seed_fn
        self.base_seed = base_seed
        self.activation_checkpoint_interval = checkpoint_interval
        self.activation_checkpoint_func = checkpoint_func
        self.checkpointable_layers = checkpointable
        self._layer_specs = list(layers)
        self.parts = list(partition(method, [_cost(layer) for layer in self._layer_specs], stages))
        self.tied_modules = nn.ModuleDict()
        self.forward_funcs: list[Callable[..., Any]] = []
        self.micro_offset = 0
        self._make: Callable[[LayerSpec], nn.Module] = LayerSpec.build
        self.received: Any = (
            None  # from the stage before; no argument, since an engine treats those as from outside
        )
        self._build()

    # -- what there is

    @property
    def is_first(self) -> bool:
        return self.index == 0

    @property
    def is_last(self) -> bool:
        return self.index == self.num_stages - 1

    def stage_owner(self, layer_idx: int) -> int:
        """Return the stage that has a layer."""
        if not 0 <= layer_idx < len(self._layer_specs):
            raise UsageError(
                f"layer {layer_idx} of {len(self._layer_specs)}.",
                "",
                "layers are numbered from 0 on.",
            )
        return next(stage for stage in range(self.num_stages) if layer_idx < self.parts[stage + 1])

    @property
    def ties(self) -> dict[str, tuple[int, ...]]:
        """The weights that several stages share, by name, and the stages, ascending."""
        stages: dict[str, dict[int, None]] = {}
        for number, layer in enumerate(self._layer_specs):
            if isinstance(layer, TiedLayerSpec):
                for attribute in layer.tied_weight_attr:
                    name = f"tied_modules.{layer.key}.{attribute}"
                    stages.setdefault(name, {})[self.stage_owner(number)] = None
        return {name: tuple(sorted(found)) for name, found in stages.items() if len(found) > 1}

    @property
    def same_names(self) -> tuple[str, ...]:
        """The parameters that several stages have under one name and do not share: what a tied
        layer does not tie.
        """
        stages: dict[str, set[int]] = {}
        for number, layer in enumerate(self._layer_specs):
            if isinstance(layer, TiedLayerSpec):
                for name, _ in _built(layer).named_parameters():
                    stages.setdefault(f"tied_modules.{layer.key}.{name}", set()).add(
                        self.stage_owner(number)
                    )
        return tuple(
            name for name, found in stages.items() if len(found) > 1 and name not in self.ties
        )

    def stage(self, index: int) -> LayerStages:
        """Return another stage of the list, without values where its layers can be built so: a look
        at it.  Pure.
        """
        found = copy(self)
        nn.Module.__init__(found)  # without layers and hooks
        found.index = index
        found.tied_modules = nn.ModuleDict()
        found.forward_funcs = []
        found.seed_layers = False
        found._make = _built
        found._build()
        found.seed_layers = self.seed_layers
        return found

    def _build(self) -> None:
        first = self.parts[self.index]
        end = self.parts[self.index + 1]
        for number, layer in enumerate(self._layer_specs[first:end], first):
            if self.seed_layers:
                self._seed(self.base_seed + number)
            if isinstance(layer, LayerStages):
                raise NotBuiltError(
                    "RECURSIVE BUILD NOT YET IMPLEMENTED", "", "write all layers in one list."
                )
            if isinstance(layer, TiedLayerSpec):
                if layer.key not in self.tied_modules:
                    self.tied_modules[layer.key] = self._make(layer)
                tied = self.tied_modules[layer.key]
                function = tied if layer.forward_fn is None else partial(layer.forward_fn, tied)
                self.forward_funcs.append(function)
            elif isinstance(layer, LayerSpec | nn.Module):
                module = self._make(layer) if isinstance(layer, LayerSpec) else layer
                self.add_module(str(number), module)
                self.forward_funcs.append(module)
            elif callable(layer):
                self.forward_funcs.append(layer)
            else:
                raise UsageError(
                    f"layer {number} is {article(layer)}.",
                    "A layer is a module, a function or a LayerSpec.",
                    "leave it out, or wrap what it does in a function.",
                )

        params = dict(self.named_parameters())
        for name, stages in self.ties.items():
            if name in params and stages[0] != self.index:
                set_copy(params[name])

    def _seed(self, seed: int) -> None:
        (self.seed_fn or torch.manual_seed)(seed)

    # -- forward

    def forward(self, forward_input: Any) -> Any:
        """Run this stage's layers, one after the other.  forward_input: RECEIVED stands for what
        `received` holds.
        """
        if forward_input is RECEIVED:
            forward_input = self.received
            self.received = None
        self.micro_offset += 1
        count = len(self.forward_funcs)
        interval = self.activation_checkpoint_interval
        if not interval or self.activation_checkpoint_func is None:
            return self._run(0, count, self.micro_offset + 1, forward_input)
        x = forward_input
        for start in range(0, count, interval):
            end = min(start + interval, count)
            part = partial(self._run_unpacked, start, end, self.micro_offset + 1)
            given = x if isinstance(x, tuple) else (x,)
            recomputed = self.recomputes(self.forward_funcs[start:end])
            x = self.activation_checkpoint_func(part, *given) if recomputed else part(*given)
        return x

    def _run_unpacked(self, start: int, end: int, offset: int, *inputs: Any) -> Any:
        given = inputs[0] if len(inputs) == 1 else inputs
        return self._run(start, end, offset, given)

    def _run(self, start: int, end: int, offset: int, x: Any) -> Any:
        """offset: of this forward, since one that is recomputed is to draw as it did."""
        for number, layer in enumerate(
            self.forward_funcs[start:end], self.parts[self.index] + start
        ):
            if self.seed_layers:
                self._seed(self.base_seed * offset + number)
            x = layer(x)
        return x

    def recomputes(self, layers: Sequence[Callable[..., Any]]) -> bool:
        """Return whether layers that run behind each other may be recomputed in backward."""
        if self.checkpointable_layers is not None:
            return all(type(layer).__name__ in self.checkpointable_layers for layer in layers)
        return any(
            isinstance(layer, nn.Module) and any(True for _ in layer.parameters())
            for layer in layers
        )


class LayersStage:
    """One stage of a list of layers, as the executor runs it.  model: what computes it; an engine
    may stand before.
    """

    def __init__(self, layers: LayerStages, model: Callable[[Any], Any] | None = None) -> None:
        self.layers = layers
        self.model = model or layers
        self.index = layers.index

    def forward(self, micro: Labelled, received: Received = ()) -> Any:
        """Run the layers on a micro-batch's inputs, or on what was received."""
        self.layers.received = received[0] if len(received) == 1 else received
        given = micro.inputs if self.layers.is_first else RECEIVED
        output = self.model(given)
        if self.layers.is_last:
            return output
        outputs = output if isinstance(output, tuple) else (output,)
        strangers = [each for each in outputs if not isinstance(each, Tensor)]
        if strangers:
            raise UsageError(
                f"the last layer of stage {self.index} returns {article(strangers[0])}.",
                "What flows from stage to stage is a tensor, or a tuple of tensors.",
                "return tensors alone.",
            )
        return outputs

    def loss(self, output: Any, micro: Labelled) -> Tensor:
        """Return the loss of a micro-batch."""
        found = output if self.layers.loss_fn is None else self.layers.loss_fn(output, micro.labels)
        if not isinstance(found, Tensor) or found.numel() != 1:
            raise UsageError(
                f"the loss is {article(found)}.",
                "The backward of a pipeline begins with a scalar tensor.",
                "let loss_fn(output, labels) return one, or the last layer if there is no loss_fn.",
            )
        return found.reshape(())


def _cost(layer: Any) -> LayerCost:
    if isinstance(layer, LayerSpec):
        return LayerCost(layer.typename.__name__, _trainable(_built(layer)))
    if isinstance(layer, nn.Module):
        return LayerCost(type(layer).__name__, _trainable(layer))
    return LayerCost(getattr(layer, "__name__", ""))


def _built(layer: LayerSpec) -> nn.Module:
    """Return a layer for a look at it, without memory where it can be built so."""
    try:
        with torch.device("meta"):
            return layer.build()
    except Exception:  # it looks at values while it is built
        with torch.random.fork_rng():
            return layer.build()


def _trainable(module: nn.Module) -> int:
    return sum(param.numel() for param in module.parameters() if param.requires_grad)


def names_of_stages(own: Mapping[str, str], stages: Comm) -> dict[str, str]:
    """Return the names in the state dicts of all stages, each rank of which has built its own
    alone.  Collective.

    own: this rank's, each with the first name of the same tensor.  stages: the ranks along "pp".
    """
    found: dict[str, str] = {}
    for text in stages.all_gather_text(json.dumps(own), "names of all stages"):
        found.update(json.loads(text))
    return found
