"""Divide a model that is a list of layers into stages.

Each layer takes the output of the previous one, which is a tensor or a tuple of tensors. A layer is
a module, a function, or a `LayerSpec`, which only the ranks of its stage build. The names of
parameters contain the layer's index in the whole list ("7.weight"), so they do not depend on the
division. A tied layer is built once for each stage, as "tied_modules.<key>".
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
from ..base.given import refuse, whole_number
from ..comm.collectives import Comm
from ..planner.split import set_copy
from .partition import LayerCost, partition
from .schedule import Numbers
from .stage import Received


class LayerSpec:
    """Stores the class and arguments of a layer that is built later.

    `LayerStages` keeps only the layers of its stage. To count parameters, it also builds each layer
    on the meta device if possible.

    Args:
        typename: Class of the module, a subclass of `torch.nn.Module`.
        *module_args: Positional arguments of the module's constructor.
        **module_kwargs: Keyword arguments of the module's constructor.

    Raises:
        UsageError: `typename` is not a subclass of `torch.nn.Module`.
    """

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
        """Construct the module from the stored class and arguments.

        Args:
            log: Not used. DeepSpeed's method has the same argument.

        Returns:
            A new instance of `typename`.
        """
        return self.typename(*self.module_args, **self.module_kwargs)


class TiedLayerSpec(LayerSpec):
    """Stores the class and arguments of a layer that shares weights with others.

    In one stage, all layers with the same key are one module, which is built from the first of
    their specs. Layers in different stages share only the weights that `tied_weight_attr` names.

    Args:
        key: A name that identifies the layers that share weights.
        typename: Class of the module, a subclass of `torch.nn.Module`.
        *module_args: Positional arguments of the module's constructor.
        forward_fn: A function that is called with (module, input) instead of the module's forward.
            None uses the module's forward.
        tied_weight_attr: Name or names of the shared weights in the module; dots select submodules.
        **module_kwargs: Keyword arguments of the module's constructor.

    Raises:
        UsageError: `typename` is not a subclass of `torch.nn.Module`, or `key` cannot be the name
            of a module.
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
        is_name = isinstance(key, str) and key and "." not in key
        if not is_name or hasattr(nn.ModuleDict(), key):
            raise refuse(
                "TiedLayerSpec",
                "key",
                key,
                "a name without dots that is no attribute of nn.ModuleDict",
                'pass a plain name, for example "embed".',
            )
        self.key = key
        self.forward_fn = forward_fn
        self.tied_weight_attr = (
            [tied_weight_attr] if isinstance(tied_weight_attr, str) else list(tied_weight_attr)
        )


RECEIVED = "what the stage before has sent"


class Labelled(NamedTuple):
    """One micro-batch for a model that is a list of layers: inputs and labels.

    Attributes:
        inputs: The inputs of the first layer.
        labels: The labels, which the loss function of the last stage receives.
    """

    inputs: Any
    labels: Any = None

    @classmethod
    def of(cls, batch: Any) -> Labelled:
        """Convert an item of a data loader to a `Labelled`.

        Args:
            batch: The item: a tuple or list of two elements (inputs, labels), or a `Labelled`.

        Returns:
            A `Labelled` with the inputs and labels of the item. A `Labelled` is returned unchanged.

        Raises:
            UsageError: The item is neither of these.
        """
        if isinstance(batch, cls):
            return batch
        if isinstance(batch, (tuple, list)) and len(batch) == 2:
            return cls(*batch)
        raise UsageError(
            "a micro-batch of a list of layers is a pair (inputs, labels).",
            "The first layer takes the inputs, the loss the labels.",
            "make the data iterator yield pairs.",
        )


class LayerStages(nn.Module):
    """A module with the layers of one stage of a model.

    The model is written as a list of layers, and the module's forward runs only those of its stage.
    The name of a parameter begins with the index of its layer in the list, or with
    "tied_modules.<key>" for a `TiedLayerSpec`.

    Args:
        layers: All layers of the model: modules, functions or `LayerSpec` objects.
        stages: Number of stages into which the list is divided.
        index: Number of this stage, counted from 0.
        method: How layers are assigned to stages: "uniform", "parameters", "type:REGEX" or "best";
            see `partition`.
        loss_fn: A function that is called with (output, labels) in the last stage and returns the
            loss; None if the last layer returns the loss.
        seed_layers: Whether to set torch's random seed before each layer is built and before each
            layer runs.
        seed_fn: A function that sets the seed; None uses `torch.manual_seed`.
        base_seed: The number from which the seed of each layer is computed.
        checkpoint_interval: Number of layers that are recomputed together in backward; 0 disables
            recomputation.
        checkpoint_func: The function that recomputes activations, called like
            `torch.utils.checkpoint.checkpoint`. None disables recomputation.
        checkpointable: Names of the layer classes that may be recomputed. None means all classes
            with parameters.

    Raises:
        UsageError: A layer of the stage cannot be called, there are fewer layers than stages, the
            method is unknown or matches no layer, a number is out of range, or layers in different
            stages share a trained parameter without a `TiedLayerSpec`.
        NotBuiltError: A layer of the stage is a `LayerStages`, or the method is "profile".
    """

    dynamic_shape = False  # whether the shapes of activations change between micro-batches

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
        self.index = whole_number("a list of layers", "index", index, 0, stages - 1)
        self.loss_fn = loss_fn
        self.seed_layers = seed_layers
        self.seed_fn = seed_fn
        self.base_seed = base_seed
        self.activation_checkpoint_interval = whole_number(
            "a list of layers", "activation_checkpoint_interval", checkpoint_interval, 0
        )
        self.activation_checkpoint_func = checkpoint_func
        self.checkpointable_layers = checkpointable
        self._layer_specs = list(layers)
        self.parts = list(partition(method, [_cost(layer) for layer in self._layer_specs], stages))
        self._refuse_shared()
        self.tied_modules = nn.ModuleDict()
        self.forward_funcs: list[Callable[..., Any]] = []
        self.micro_offset = 0
        self._make: Callable[[LayerSpec], nn.Module] = LayerSpec.build
        # From the previous stage; not an argument, because an engine processes arguments as user
        # inputs
        self.received: Any = None
        self._build()

    # -- structure

    @property
    def is_first(self) -> bool:
        """Return whether this module contains the first stage of the model."""
        return self.index == 0

    @property
    def is_last(self) -> bool:
        """Return whether this module contains the last stage of the model."""
        return self.index == self.num_stages - 1

    def stage_owner(self, layer_idx: int) -> int:
        """Return the number of the stage that contains a layer.

        Args:
            layer_idx: The index of the layer in the list of all layers.

        Raises:
            UsageError: The list contains no layer with this index.
        """
        if not 0 <= layer_idx < len(self._layer_specs):
            raise UsageError(
                f"layer {layer_idx} of {len(self._layer_specs)}.",
                "",
                "layers are numbered from 0 on.",
            )
        return next(stage for stage in range(self.num_stages) if layer_idx < self.parts[stage + 1])

    @property
    def ties(self) -> dict[str, Numbers]:
        """Return a dict from each shared weight to the numbers of its stages.

        The keys are the names of the weights in the model. The numbers are in ascending order.
        Weights that are tied only within one stage are omitted.
        """
        return self._in_several_stages(lambda layer: layer.tied_weight_attr)

    @property
    def same_names(self) -> tuple[str, ...]:
        """Return the names of parameters that several stages have but do not share.

        The values of such a parameter may differ between the stages. These parameters belong to a
        `TiedLayerSpec` whose `tied_weight_attr` does not name them.
        """
        found = self._in_several_stages(
            lambda layer: [name for name, _ in _built(layer).named_parameters()]
        )
        return tuple(name for name in found if name not in self.ties)

    def _in_several_stages(
        self, names: Callable[[TiedLayerSpec], Iterable[str]]
    ) -> dict[str, Numbers]:
        """Return parameters of tied layers that are in several stages, with their stages."""
        stages: dict[str, set[int]] = {}
        for number, layer in enumerate(self._layer_specs):
            if isinstance(layer, TiedLayerSpec):
                for name in names(layer):
                    full = f"tied_modules.{layer.key}.{name}"
                    stages.setdefault(full, set()).add(self.stage_owner(number))
        return {name: tuple(sorted(found)) for name, found in stages.items() if len(found) > 1}

    def stage(self, index: int) -> LayerStages:
        """Build another stage of the list for inspection, on the meta device if possible.

        This object is not changed. Layers that were passed as modules are not copied.

        Args:
            index: Number of the stage, counted from 0.

        Returns:
            A `LayerStages` with the layers of that stage.

        Raises:
            UsageError: A layer of that stage cannot be called, or there is no such stage.
            NotBuiltError: A layer of that stage is a `LayerStages`.
        """
        whole_number("stage", "index", index, 0, self.num_stages - 1)
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

    def _refuse_shared(self) -> None:
        """Raise an error if a trained parameter would be copied to several stages."""
        found: dict[int, int] = {}  # By id of a parameter: its first layer
        for number, layer in enumerate(self._layer_specs):
            for param in layer.parameters() if isinstance(layer, nn.Module) else ():
                first = found.setdefault(id(param), number)
                if param.requires_grad and self.stage_owner(first) != self.stage_owner(number):
                    raise UsageError(
                        f"layers {first} and {number} share a parameter, and they are in stages "
                        f"{self.stage_owner(first)} and {self.stage_owner(number)}.",
                        "Each stage would train a copy of it.",
                        "write both layers as a TiedLayerSpec with the same key, whose gradients "
                        "are summed, or give each layer its own parameters.",
                    )

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
        names = {name for name, _ in self.named_parameters(remove_duplicate=False)}
        for name, stages in self.ties.items():
            if self.index in stages and name not in names:
                raise UsageError(
                    f"'{name}' is shared by stages {', '.join(map(str, stages))}, and stage "
                    f"{self.index} has no such parameter.",
                    "The name follows from tied_weight_attr.",
                    "let tied_weight_attr name a parameter of the layer, for example 'weight'.",
                )
            if name in params and stages[0] != self.index:
                set_copy(params[name])

    def _seed(self, seed: int) -> None:
        (self.seed_fn or torch.manual_seed)(seed)

    # -- forward

    def forward(self, forward_input: Any) -> Any:
        """Run this stage's layers in order and return the output of the last one.

        Each call increments `micro_offset`, from which the seeds of the layers are computed if
        `seed_layers` is True. If recomputation is enabled, groups of layers are run by
        `checkpoint_func`.

        Args:
            forward_input: The input of this stage's first layer. If it is the constant RECEIVED,
                which the pipeline passes, the attribute `received` is used instead. It contains the
                tensors of the previous stage, and is then set to None.
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
            part = partial(self._run, start, end, self.micro_offset + 1)
            given = x if isinstance(x, tuple) else (x,)
            recomputed = self.recomputes(self.forward_funcs[start:end])
            x = self.activation_checkpoint_func(part, *given) if recomputed else part(*given)
        return x

    def _run(self, start: int, end: int, offset: int, *inputs: Any) -> Any:
        """Run layers; `offset` is that of the original forward if they are recomputed."""
        x = inputs[0] if len(inputs) == 1 else inputs
        layers = self.forward_funcs[start:end]
        for number, layer in enumerate(layers, self.parts[self.index] + start):
            if self.seed_layers:
                self._seed(self.base_seed * offset + number)
            x = layer(x)
        return x

    def recomputes(self, layers: Sequence[Callable[..., Any]]) -> bool:
        """Return whether activations of consecutive layers may be recomputed.

        If `checkpointable` was given, it must contain the class names of all these layers.
        Otherwise, at least one of the layers must be a module with parameters. A tied layer with a
        `forward_fn` counts as a function.

        Args:
            layers: The layers, which belong to this stage.
        """
        if self.checkpointable_layers is not None:
            return all(type(layer).__name__ in self.checkpointable_layers for layer in layers)
        return any(
            isinstance(layer, nn.Module) and any(True for _ in layer.parameters())
            for layer in layers
        )


class LayersStage:
    """Runs one stage of a model that is written as a list of layers.

    The pipeline calls its `forward` and, in the last stage, its `loss`.

    Args:
        layers: The module with the layers of this rank's stage.

    Attributes:
        index: The number of the stage, counted from 0.
    """

    def __init__(self, layers: LayerStages) -> None:
        self.layers = layers
        self.index = layers.index

    def forward(self, micro: Labelled, received: Received = ()) -> Any:
        """Run the stage's layers on one micro-batch.

        Args:
            micro: The micro-batch, of which only the first stage uses the inputs.
            received: Tensors that the previous stage sent; empty in the first stage.

        Returns:
            In the last stage, the output of the last layer. In other stages, a tuple of the tensors
            for the next stage.

        Raises:
            UsageError: This is not the last stage, and its last layer returns something other than
                a tensor or a tuple of tensors.
        """
        self.layers.received = received[0] if len(received) == 1 else received
        given = micro.inputs if self.layers.is_first else RECEIVED
        output = self.layers(given)
        if self.layers.is_last:
            return output
        outputs = output if isinstance(output, tuple) else (output,)
        others = [each for each in outputs if not isinstance(each, Tensor)]
        if others:
            raise UsageError(
                f"the last layer of stage {self.index} returns {article(others[0])}.",
                "Stages send each other a tensor, or a tuple of tensors.",
                "return only tensors.",
            )
        return outputs

    def loss(self, output: Any, micro: Labelled) -> Tensor:
        """Compute the loss of a micro-batch in the last stage.

        Args:
            output: The output of the last layer.
            micro: The micro-batch, whose labels the loss function receives.

        Returns:
            The result of `loss_fn`, or `output` if the model has no `loss_fn`. It is a tensor of
            shape ().

        Raises:
            UsageError: The loss is not a tensor with one element.
        """
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
    """Build a layer for inspection, on the meta device if possible."""
    try:
        with torch.device("meta"):
            return layer.build()
    except Exception:  # its constructor reads values
        with torch.random.fork_rng():
            return layer.build()


def _trainable(module: nn.Module) -> int:
    return sum(param.numel() for param in module.parameters() if param.requires_grad)


def names_of_stages(own: Mapping[str, str], stages: Comm) -> dict[str, str]:
    """Gather the names in the state dicts of all stages of a pipeline on every rank.

    The function is used for models in which each rank has built only the layers of its stage.

    Args:
        own: A dict that maps each name in this rank's state dict to the first name of the same
            tensor. The two names are equal unless the tensor is tied and has several names.
        stages: The communicator of the ranks along "pp".

    Returns:
        A dict of the same form as `own`, with the names in the state dicts of all stages.

    Raises:
        PeerError: Another rank failed or issued a different collective.

    Note:
        Collective: every rank along "pp" must call it.
    """
    found: dict[str, str] = {}
    for text in stages.all_gather_text(json.dumps(own), "names of all stages"):
        found.update(json.loads(text))
    return found
