"""DeepSpeed's layers of tensor parallelism, for programs that put them into models by themselves.

    LinearLayer      y_i = x W_i^T + b_i      each rank its own outputs, or all with gather_output
    LinearAllreduce  y = sum_i x_i W_i^T + b  each rank its own inputs

A layer takes the parameters of the one it is made of, leaves its own part in each, and communicates
by torch's group. What it cut is a `Split` of the parameter (planner/split.py), so an engine knows
norms, checkpoints and whole state dicts of a model with such layers.  An engine's own split layers
(parallel/layers.py) count as these classes, too: `show_names` gives them DeepSpeed's attributes.
"""

from __future__ import annotations

from abc import ABCMeta
from collections.abc import Iterable, Sequence
from copy import deepcopy
from functools import partial
from math import prod
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from ...base.errors import NotBuiltError, UsageError
from ...engine.engine import Engine
from ...parallel.cuts import join, put_together, taken
from ...parallel.layers import Column, Layer, Row
from ...planner.split import Split, laid_out, set_own_cut, split_of
from . import groups
from .autotp import AutoTPMeta, get_shard_size_list
from .tensor_checkpoint_info import INFO, collect_autotp_universal_checkpoint_info, mark

DS_IS_REPLACED_MODULE = "ds_is_replaced_module"
DS_TENSOR_MODEL_PARALLEL = "tensor_model_parallel"
_KEPT = "_zero_own_part"  # of a parameter that is whole for a while: the memory of its part

# -- products and sums


def _summed(x: Tensor, group: Any) -> Tensor:
    total = x.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(total, group=group)
    return total


class ColumnParallel(torch.autograd.Function):
    """A tensor that every rank has, read by column layers: its gradient is the sum of theirs."""

    @staticmethod
    def forward(ctx: Any, group: Any, input: Tensor) -> Tensor:
        ctx.group = group
        return input.view_as(input)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[None, Tensor]:
        return None, grad if ctx.group is None else _summed(grad, ctx.group)


class RowParallel(torch.autograd.Function):
    """The sum of every rank's tensor; each gets the whole gradient.  Collective."""

    @staticmethod
    def forward(ctx: Any, group: Any, input: Tensor, is_inference_mode: bool = False) -> Tensor:
        return input.view_as(input) if group is None else _summed(input, group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[None, Tensor, None]:
        return None, grad, None


class GatherFromTensorParallelRegion(torch.autograd.Function):
    """Every rank's last dimension, side by side; the gradient must be equal on every rank.
    Collective.

    partition_sizes: of that dimension, by rank.
    """

    @staticmethod
    def forward(ctx: Any, group: Any, input: Tensor, partition_sizes: Sequence[int]) -> Tensor:
        ctx.own = None
        if group is None or len(partition_sizes) == 1:
            return input.view_as(input)
        index = dist.get_rank(group)
        ctx.own = sum(partition_sizes[:index]), partition_sizes[index]
        return _side_by_side(input, partition_sizes, group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[None, Tensor, None]:
        return None, grad if ctx.own is None else grad.narrow(-1, *ctx.own).contiguous(), None


class ScatterToTensorParallelRegion(torch.autograd.Function):
    """A rank's part of the last dimension of a tensor that every rank has.  Backward gathers:
    collective there.
    """

    @staticmethod
    def forward(
        ctx: Any, group: Any, input: Tensor, partition_sizes: Sequence[int], tp_index: int
    ) -> Tensor:
        ctx.group = group
        ctx.sizes = partition_sizes
        return input.narrow(
            -1, sum(partition_sizes[:tp_index]), partition_sizes[tp_index]
        ).contiguous()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[None, Tensor, None, None]:
        return None, _side_by_side(grad, ctx.sizes, ctx.group), None, None


def _side_by_side(own: Tensor, widths: Sequence[int], group: Any) -> Tensor:
    """Return every rank's last dimension, one behind the other.  widths: of it, by rank.
    Collective.
    """
    rows = own.reshape(-1, own.shape[-1])
    parts = _gathered(rows, [(rows.shape[0], width) for width in widths], group)
    return torch.cat(parts, 1).view(*own.shape[:-1], -1)


def _gathered(own: Tensor, shapes: Sequence[tuple[int, ...]], group: Any) -> list[Tensor]:
    """Return every rank's tensor, by rank.  Collective.  torch's groups gather equal sizes, so they
    are padded.
    """
    if group is None:
        return [own]
    sent = own.new_zeros(max(map(prod, shapes)))
    sent[: own.numel()] = own.reshape(-1)
    boxes = [torch.empty_like(sent) for _ in shapes]
    dist.all_gather(boxes, sent, group=group)
    return [box[: prod(shape)].view(shape) for box, shape in zip(boxes, shapes, strict=True)]


# -- parts of parameters


def gather_part(param: Tensor, split: Split, group: Any) -> None:
    """Make a parameter whole, in new memory, until `cut_part`.  Collective in the group."""
    own = param.data
    shapes = [split.local_shape(coordinate) for coordinate in range(len(split.ranges))]
    param.data = put_together(_gathered(own, shapes, group), split, split.dim)
    param.__dict__[_KEPT] = own


def cut_part(param: Tensor, split: Split, index: int) -> None:
    """Leave a rank's part in a whole parameter, in the memory where it was before `gather_part`.
    Local.
    """
    own = taken(param.data, split.dim, split.ranges[index])
    kept: Tensor | None = param.__dict__.pop(_KEPT, None)
    if kept is not None and kept.shape == own.shape:
        own = kept.copy_(own)
    param.data = own


def split_by(shape: Sequence[int], dim: int, parts: Sequence[Sequence[int]]) -> Split:
    """Return the split of a dimension in which parts lie one behind the other.  parts: the widths
    of each, by rank.
    """
    return Split("split", tuple(shape), dim, laid_out(parts))


# -- layers


class TensorParallel_Layer(nn.Module, metaclass=ABCMeta):
    """A layer of which each rank of a group has a part.

    module: with a weight (out, in) and a bias, or None; its parameters become this layer's.
    mp_group: torch's group; None for a layer that is whole.  skip_partition: the parameters are
    this rank's parts already.  tp_meta: how the heads of its model are counted.  Local.
    """

    keep_module_on_host: ClassVar[bool] = False  # layers are cut where they are
    tp_overlap_comm: ClassVar[bool] = False
    partition_dim: int = 0  # of the weight
    cuts_bias: ClassVar[bool] = True

    weight: nn.Parameter
    bias: nn.Parameter | None

    def __init__(
        self,
        module: nn.Module,
        mp_group: Any = None,
        *,
        name: str | None = None,
        skip_partition: bool = False,
        tp_meta: AutoTPMeta | None = None,
        **others: Any,
    ) -> None:
        super().__init__()
        self.mp_group = mp_group
        self.name = name
        self.tp_meta = tp_meta or AutoTPMeta()
        self.tp_world_size = self.world_size = (
            dist.get_world_size(mp_group) if mp_group is not None else 1
        )
        self.tp_index = self.rank = dist.get_rank(mp_group) if mp_group is not None else 0
        self.support_training = True
        weight = module.weight
        bias = getattr(module, "bias", None)
        assert isinstance(weight, nn.Parameter)
        self.weight = weight
        self.bias = bias
        self._orig_weight_shape = _whole_shape(weight)
        self._orig_bias_shape = _whole_shape(bias) if bias is not None else None
        self._freeze_partition_sizes(self._orig_weight_shape[self.partition_dim])
        if not skip_partition and weight.numel():
            self._tp_partition([self.weight, self.bias])
        self._name_parameters()
        self._mark_uc_metadata()

    def _freeze_partition_sizes(self, total_size: int) -> tuple[int, ...]:
        """Say, once for all, how much of the cut dimension each rank has."""
        sizes = get_shard_size_list(total_size, self.tp_world_size, self.tp_meta, self.name)
        self._partition_sizes = tuple(sizes)
        return self._partition_sizes

    @property
    def _parts(self) -> Sequence[Sequence[int]]:
        """The widths of each part that lies in the cut dimension, by rank."""
        return [self._partition_sizes]

    def _split_of(self, param: Tensor) -> Split | None:
        """How one of this layer's parameters lies over the ranks; None where each has all of it."""
        if param is self.bias or param.dim() == 1:
            shape = (sum(map(sum, self._parts)),)
            dim = 0
            return split_by(shape, dim, self._parts) if self.cuts_bias else None
        return split_by(self._orig_weight_shape, self.partition_dim, self._parts)

    def _name_parameters(self) -> None:
        for param in (self.weight, self.bias):
            split = self._split_of(param) if param is not None else None
            if param is None or split is None:
                continue
            _name(param, self.gather_params, self._tp_partition)
            if self.tp_world_size > 1 and tuple(param.shape) == split.local_shape(self.tp_index):
                set_own_cut(param, split)

    def _mark_uc_metadata(self) -> None:
        """Say on the parameters how they were cut, for DeepSpeed's converter of checkpoints."""
        kind = "row" if isinstance(self, LinearAllreduce) else "column"
        outputs = self._orig_weight_shape[0]
        for param, whole in (
            (self.weight, self._orig_weight_shape),
            (self.bias, self._orig_bias_shape),
        ):
            if param is not None and whole is not None:
                split = self._split_of(param)
                dim = split.dim if split is not None else None
                mark(param, kind, whole, outputs, dim, self._parts, self._spec_of(whole))

    def _spec_of(self, whole: tuple[int, ...]) -> tuple[Any, ...] | None:
        """The shape that names the parts of a fused parameter; None for one of a single part."""
        return None

    @torch.no_grad()
    def gather_params(self, params_list: Iterable[Tensor | None]) -> None:
        """Make these of the layer's parameters whole, until `_tp_partition`.  Collective in the
        group.
        """
        for param in params_list:
            split = self._split_of(param) if param is not None else None
            if param is not None and split is not None and self.mp_group is not None:
                gather_part(param, split, self.mp_group)

    @torch.no_grad()
    def _tp_partition(self, params_list: Iterable[Tensor | None]) -> None:
        """Leave this rank's part in these parameters.  Local."""
        for param in params_list:
            split = self._split_of(param) if param is not None else None
            if param is not None and split is not None:
                cut_part(param, split, self.tp_index)

    def __deepcopy__(self, memo: dict[int, Any]) -> TensorParallel_Layer:
        memo[id(self.mp_group)] = self.mp_group  # a copy is computed by the same ranks
        made = type(self).__new__(type(self))
        memo[id(self)] = made
        made.__dict__.update({name: deepcopy(value, memo) for name, value in self.__dict__.items()})
        made._name_parameters()
        made._mark_uc_metadata()
        return made

    def extra_repr(self) -> str:
        out, inputs = self.weight.shape
        return (
            f"in_features={inputs}, out_features={out}, bias={self.bias is not None}, "
            f"dtype={self.weight.dtype}"
        )


def _name(param: Any, gather_params: Any, tp_partition: Any) -> None:
    """Give a parameter of a split layer DeepSpeed's names."""
    param.tensor_model_parallel = param.ds_is_replaced_module = True
    param.gather_params = gather_params
    param._tp_partition = tp_partition


def _whole_shape(param: Tensor) -> tuple[int, ...]:
    """Return the shape of a parameter; of one that ZeRO-3 holds in parts, that of the whole."""
    return tuple(getattr(param, "ds_shape", param.shape))


class LinearLayer(TensorParallel_Layer):
    """A column layer: each rank has some of the outputs.  gather_output: each is given all of
    them.
    """

    def __init__(
        self,
        module: nn.Module,
        mp_group: Any = None,
        skip_partition: bool = False,
        gather_output: bool = False,
        **others: Any,
    ) -> None:
        super().__init__(module, mp_group, skip_partition=skip_partition, **others)
        self.gather_output = gather_output

    def forward(self, input: Tensor) -> Tensor:
        """Return this rank's outputs.  Backward sums the gradient of the input: collective
        there.
        """
        read: Tensor = ColumnParallel.apply(self.mp_group, input)  # type: ignore[no-untyped-call]
        found = nn.functional.linear(read, self.weight, self.bias)
        if not self.gather_output:
            return found
        return GatherFromTensorParallelRegion.apply(  # type: ignore[no-untyped-call, no-any-return]
            self.mp_group, found, self._partition_sizes
        )

    @classmethod
    def from_weights(
        cls,
        weight_shape: Sequence[int] | None = None,
        dtype: torch.dtype = torch.half,
        weight: Tensor | None = None,
        bias: Tensor | None = None,
        gather_output: bool = False,
    ) -> LinearLayer:
        """Return a layer with parameters that are this rank's parts, or with random ones of a shape
        (out, in).
        """
        if weight is None and weight_shape is None:
            raise UsageError(
                "from_weights was given no weight and no shape.", fix="pass one of the two."
            )
        out, inputs = weight.shape if weight is not None else weight_shape  # type: ignore[misc]
        linear = nn.Linear(
            inputs, out, bias=bias is not None, dtype=dtype if weight is None else weight.dtype
        )
        if weight is not None:
            linear.weight.data = weight
        if bias is not None:
            linear.bias.data = bias
        return cls(linear, skip_partition=True, gather_output=gather_output)


class VocabParallelLinear(LinearLayer):
    """A column layer whose outputs are the logits of this rank's words."""

    def __init__(self, module: nn.Module, mp_group: Any = None, **others: Any) -> None:
        super().__init__(module, mp_group, gather_output=False, **others)
        if min(self._partition_sizes) == 0:
            raise ValueError(
                "vocab_parallel_lm_head requires a vocabulary of at least "
                f"tp_size={self.tp_world_size} rows, but '{self.name}' has "
                f"{self._orig_weight_shape[0]}"
            )
        self.is_vocab_parallel_lm_head, self.vocab_size = True, self._orig_weight_shape[0]
        self.vocab_start_index = sum(self._partition_sizes[: self.tp_index])
        self.vocab_end_index = self.vocab_start_index + self._partition_sizes[self.tp_index]


class LinearAllreduce(TensorParallel_Layer):
    """A row layer: each rank has some of the inputs, and is given the sum of all products and the
    bias.
    """

    partition_dim = 1
    cuts_bias = False

    def forward(self, input: Tensor) -> Tensor:
        """Return the sum over the ranks.  Collective."""
        total: Tensor = RowParallel.apply(  # type: ignore[no-untyped-call]
            self.mp_group, nn.functional.linear(input, self.weight)
        )
        return total if self.bias is None else total + self.bias


class LinearAllreduceWithReplicatedInput(LinearAllreduce):
    """A row layer that is given all inputs on every rank."""

    def forward(self, input: Tensor) -> Tensor:
        """Return the sum over the ranks.  Collective."""
        if sum(self._partition_sizes) != input.shape[-1]:
            raise UsageError(
                f"layer '{self.name}' of {sum(self._partition_sizes)} input features was given "
                f"{input.shape[-1]}.",
                "It takes its own part of them.",
                "give it the whole input.",
            )
        return super().forward(
            ScatterToTensorParallelRegion.apply(  # type: ignore[no-untyped-call]
                self.mp_group, input, self._partition_sizes, self.tp_index
            )
        )


class LmHeadLinearAllreduce(LinearAllreduceWithReplicatedInput):
    """A row layer that makes logits.  Its parameters are its own, although a table of words may
    have had them.
    """

    def __init__(self, module: nn.Module, mp_group: Any, **others: Any) -> None:
        for name in ("weight", "bias"):
            param = getattr(module, name, None)
            if param is not None:
                setattr(module, name, nn.Parameter(param.detach().clone()))
        super().__init__(module, mp_group, **{"name": "lm_head", **others})


class _OfParts(TensorParallel_Layer):
    """A layer of a fused projection: each of the parts in the cut dimension is cut by itself.

    shape: of the whole weight: in the cut dimension how many equal parts there are, or the width of
    each; -1 elsewhere.
    """

    shape: tuple[Any, ...]
    _subparam_sizes: tuple[int, ...]
    counts_as: ClassVar[str | None] = (
        None  # the name by which widths are shared out, where it is not the layer's own
    )

    def __init__(
        self,
        module: nn.Module,
        mp_group: Any,
        shape: Sequence[Any],
        partition_dim: int = 0,
        **others: Any,
    ) -> None:
        weight = module.weight
        assert isinstance(weight, Tensor)
        self.__dict__["partition_dim"], self.__dict__["shape"] = partition_dim, tuple(shape)
        self.__dict__["_subparam_sizes"] = subparam_sizes(
            _whole_shape(weight), tuple(shape), partition_dim
        )
        super().__init__(module, mp_group, **others)

    def _freeze_partition_sizes(self, total_size: int) -> tuple[int, ...]:
        self._subparam_shard_widths = _subparam_shard_widths(
            self._subparam_sizes, self.tp_world_size, self.tp_meta, self.counts_as or self.name
        )
        self._partition_sizes = tuple(map(sum, zip(*self._subparam_shard_widths, strict=True)))
        return self._partition_sizes

    @property
    def _parts(self) -> Sequence[Sequence[int]]:
        return self._subparam_shard_widths

    def _spec_of(self, whole: tuple[int, ...]) -> tuple[Any, ...] | None:
        return self.shape if len(whole) > 1 else (self._subparam_sizes,)


def _subparam_shard_widths(
    subparam_sizes: Sequence[int],
    tp_world_size: int,
    tp_meta: AutoTPMeta | None = None,
    name: str | None = None,
) -> list[list[int]]:
    """Return how much of each part every rank has."""
    return [get_shard_size_list(size, tp_world_size, tp_meta, name) for size in subparam_sizes]


def subparam_sizes(whole: Sequence[int], shape: tuple[Any, ...], dim: int) -> tuple[int, ...]:
    """Return the widths of the parts of a dimension that a `shape` says; UsageError where they do
    not add up.
    """
    if len(shape) != len(whole):
        raise NotBuiltError(
            f"a fused weight of shape {tuple(whole)} is described by {shape}.",
            "Its parts lie in one of its own dimensions.",
            "write a number or a tuple for that dimension, and -1 for the others.",
        )
    stated = shape[dim]
    sizes = tuple(stated) if isinstance(stated, list | tuple) else (whole[dim] // stated,) * stated
    if sum(sizes) != whole[dim]:
        raise UsageError(
            f"parts {stated} of a fused weight do not make up its {whole[dim]} rows of dimension "
            f"{dim}.",
            fix="let them add up to the dimension.",
        )
    return sizes


class SubParamLinearLayer(_OfParts, LinearLayer):
    """A column layer of a fused projection."""

    def _split_of(self, param: Tensor) -> Split | None:
        if self.partition_dim != 0 and (param is self.bias or param.dim() == 1):
            return None
        return super()._split_of(param)

    def forward(self, input: Tensor) -> Tensor:
        """Return this rank's outputs of each part.  Backward sums the gradient of the input:
        collective there.
        """
        found = super().forward(input)
        if not self.gather_output or self.tp_world_size == 1:
            return found
        by_rank = found.split(self._partition_sizes, -1)
        return join(by_rank, split_by((found.shape[-1],), 0, self._subparam_shard_widths))


class SubParamLinearAllreduce(_OfParts, LinearAllreduce):
    """A row layer whose inputs lie in parts."""

    def __init__(
        self,
        module: nn.Module,
        mp_group: Any,
        shape: Sequence[Any],
        partition_dim: int = 1,
        **others: Any,
    ) -> None:
        super().__init__(module, mp_group, shape, partition_dim, **others)


class GateUpPack_LinearLayer(SubParamLinearLayer):
    """A column layer of two projections of one width, one behind the other."""

    counts_as = "mlp"

    def __init__(self, module: nn.Module, mp_group: Any = None, **others: Any) -> None:
        out, inputs = module.weight.shape  # type: ignore[misc]
        super().__init__(module, mp_group, ((out // 2, out // 2), inputs), 0, **others)


class GatherReplacedLayerParams:
    """Whole parameters of split layers inside the `with` block.  Collective at entry.

    params: a parameter, or parameters of one layer; what is not split is passed over.  enabled:
    False changes nothing.
    """

    def __init__(
        self,
        params: Iterable[Tensor] | Tensor,
        module: nn.Module | None = None,
        enabled: bool = True,
    ) -> None:
        given = [params] if isinstance(params, Tensor) else list(params)
        self.params: list[Any] = [
            each for each in given if getattr(each, DS_IS_REPLACED_MODULE, False)
        ]
        self.enabled = enabled and bool(self.params)
        self.module = module

    def __enter__(self) -> None:
        for param in self.params if self.enabled else ():
            param.gather_params([param])

    def __exit__(self, *error: object) -> None:
        for param in self.params if self.enabled else ():
            param._tp_partition([param])


# -- an engine's own split layers


def show_names(engine: Engine) -> None:
    """Give the layers that an engine has split DeepSpeed's attributes: they count as its classes.
    Local.
    """
    is_split = False
    for name, module in engine.module.named_modules():
        kind = (
            LinearLayer
            if isinstance(module, Column)
            else LinearAllreduce
            if isinstance(module, Row)
            else None
        )
        if kind is None or not isinstance(module, Layer):
            continue
        kind.register(type(module))
        is_split = True
        part = module.part
        shown: dict[str, Any] = {
            "name": name,
            "tp_world_size": engine.mesh.tp,
            "tp_index": engine.mesh.coordinates["tp"],
            "_partition_sizes": tuple(part.widths),
        }
        if kind is LinearLayer:
            shown["gather_output"] = part.gathers or part.is_head
        for attribute, value in shown.items():
            if attribute not in module.__dict__:
                module.__dict__[attribute] = value
        for param in module.parameters(recurse=False):
            split = split_of(param)
            whole = split.shape if split is not None else tuple(param.shape)
            dim = split.dim if split is not None and split.kind == "split" else None
            style = "row" if isinstance(module, Row) else "column"
            mark(param, style, whole, whole[0], dim, *_parts_of(split))
            if dim is not None:
                _name(param, partial(_each, _gather_along_tp), partial(_each, _cut_along_tp))
    if is_split:
        vars(engine.module)[INFO] = collect_autotp_universal_checkpoint_info(engine.module)


def _parts_of(split: Split | None) -> tuple[list[list[int]], tuple[Any, ...] | None]:
    """Return the widths of the parts of a cut dimension, by rank, and of several the shape that
    names them.
    """
    if split is None or not split.ranges:
        return [], None
    widths = [
        list(each)
        for each in zip(*([high - low for low, high in own] for own in split.ranges), strict=True)
    ]
    sizes: list[Any] = [-1] * len(split.shape)
    sizes[split.dim] = tuple(map(sum, widths))
    return widths, tuple(sizes) if len(widths) > 1 else None


@torch.no_grad()
def _each(change: Any, params: Iterable[Tensor | None]) -> None:
    for param in params:
        if param is not None and (split := split_of(param)) is not None and split.kind == "split":
            change(param, split)


def _gather_along_tp(param: Tensor, split: Split) -> None:
    gather_part(param, split, groups.get_tensor_model_parallel_group())


def _cut_along_tp(param: Tensor, split: Split) -> None:
    cut_part(param, split, groups.get_tensor_model_parallel_rank())
