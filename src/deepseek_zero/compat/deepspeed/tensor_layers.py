"""DeepSpeed's tensor-parallel layers, for programs that insert them into models.

    LinearLayer      y_i = x W_i^T + b_i      each rank has some outputs, or all with gather_output
    LinearAllreduce  y = sum_i x_i W_i^T + b  each rank has some inputs

A layer takes over the parameters of another layer, keeps this rank's shard of each, and
communicates with torch's process group. The shard is described by a `Split` of the parameter
(planner/split.py), so an engine computes norms, checkpoints and whole state dicts of such a model
correctly. The engine's own split layers (parallel/layers.py) also count as instances of these
classes, and `show_names` gives them DeepSpeed's attributes.
"""

from __future__ import annotations

from abc import ABCMeta
from collections.abc import Iterable, Iterator, Sequence
from copy import deepcopy
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
from ...planner.layout import Shape
from ...planner.split import Split, laid_out, set_own_cut, split_of
from . import groups
from .autotp import AutoTPMeta, get_shard_size_list
from .tensor_checkpoint_info import INFO, collect_autotp_universal_checkpoint_info, mark

Params = Iterable[Tensor | None]
Parts = Sequence[Sequence[int]]  # for each part of a dimension, its width on each rank
Spec = tuple[Any, ...]  # shape of a fused parameter, in which a dimension may be a tuple of sizes

DS_IS_REPLACED_MODULE = "ds_is_replaced_module"
DS_TENSOR_MODEL_PARALLEL = "tensor_model_parallel"
# attribute of a gathered parameter: the memory of its shard
_KEPT = "_zero_own_part"

# -- matrix products and reductions


def _summed(x: Tensor, group: Any) -> Tensor:
    total = x.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(total, group=group)
    return total


class ColumnParallel(torch.autograd.Function):
    """Pass a replicated tensor to column layers. Backward all-reduces its gradient."""

    @staticmethod
    def forward(ctx: Any, group: Any, input: Tensor) -> Tensor:
        """Return the input unchanged; only backward communicates.

        Args:
            ctx: Context of the autograd function.
            group: The process group; None for one rank.
            input: Tensor that is equal on all ranks of the group.
        """
        ctx.group = group
        return input.view_as(input)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[None, Tensor]:
        """All-reduce the gradient.

        Args:
            ctx: Context of the autograd function.
            grad: Gradient of the output.

        Returns:
            None for the group, and the sum of the gradients of all ranks.

        Note:
            Collective: every rank of the group must call it.
        """
        return None, grad if ctx.group is None else _summed(grad, ctx.group)


class RowParallel(torch.autograd.Function):
    """All-reduce the input. Backward passes the gradient through."""

    @staticmethod
    def forward(ctx: Any, group: Any, input: Tensor, is_inference_mode: bool = False) -> Tensor:
        """All-reduce the input.

        Args:
            ctx: Context of the autograd function.
            group: The process group; None for one rank.
            input: Partial result of this rank.
            is_inference_mode: Ignored.

        Returns:
            The sum of the partial results of all ranks.

        Note:
            Collective: every rank of the group must call it.
        """
        return input.view_as(input) if group is None else _summed(input, group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[None, Tensor, None]:
        """Return the gradient unchanged.

        Args:
            ctx: Context of the autograd function.
            grad: Gradient of the output.
        """
        return None, grad, None


class GatherFromTensorParallelRegion(torch.autograd.Function):
    """All-gather the last dimension. Backward keeps this rank's part of the gradient.

    The gradient must be equal on every rank.
    """

    @staticmethod
    def forward(ctx: Any, group: Any, input: Tensor, partition_sizes: Sequence[int]) -> Tensor:
        """Concatenate the tensors of all ranks along the last dimension.

        Args:
            ctx: Context of the autograd function.
            group: The process group; None for one rank.
            input: Part of this rank.
            partition_sizes: Size of the last dimension on each rank.

        Returns:
            The parts of all ranks, concatenated along the last dimension.

        Note:
            Collective: every rank of the group must call it.
        """
        ctx.own = None
        if group is None or len(partition_sizes) == 1:
            return input.view_as(input)
        index = dist.get_rank(group)
        ctx.own = sum(partition_sizes[:index]), partition_sizes[index]
        return _side_by_side(input, partition_sizes, group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[None, Tensor, None]:
        """Return this rank's part of the gradient.

        Args:
            ctx: Context of the autograd function.
            grad: Gradient of the output.
        """
        return None, grad if ctx.own is None else grad.narrow(-1, *ctx.own).contiguous(), None


class ScatterToTensorParallelRegion(torch.autograd.Function):
    """Select this rank's part of a replicated tensor.

    Backward all-gathers the gradient.
    """

    @staticmethod
    def forward(
        ctx: Any, group: Any, input: Tensor, partition_sizes: Sequence[int], tp_index: int
    ) -> Tensor:
        """Return this rank's part of the last dimension.

        Args:
            ctx: Context of the autograd function.
            group: Process group of the ranks that each keep a part.
            input: Tensor that is equal on all ranks of the group.
            partition_sizes: Size of the last dimension on each rank.
            tp_index: Index of this rank.
        """
        ctx.group = group
        ctx.sizes = partition_sizes
        return input.narrow(
            -1, sum(partition_sizes[:tp_index]), partition_sizes[tp_index]
        ).contiguous()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[None, Tensor, None, None]:
        """All-gather the gradient.

        Args:
            ctx: Context of the autograd function.
            grad: Gradient of this rank's part.

        Returns:
            The whole gradient, and None for each other argument of `forward`.

        Note:
            Collective: every rank of the group must call it.
        """
        return None, _side_by_side(grad, ctx.sizes, ctx.group), None, None


def _side_by_side(own: Tensor, widths: Sequence[int], group: Any) -> Tensor:
    """All-gather along the last dimension, whose size on each rank is `widths`.

    Every rank must call this.
    """
    rows = own.reshape(-1, own.shape[-1])
    parts = _gathered(rows, [(rows.shape[0], width) for width in widths], group)
    return torch.cat(parts, 1).view(*own.shape[:-1], -1)


def _gathered(own: Tensor, shapes: Sequence[Shape], group: Any) -> list[Tensor]:
    """Return the tensors of all ranks. Every rank must call this.

    They are padded, because torch's all-gather requires equal sizes.
    """
    if group is None:
        return [own]
    sent = own.new_zeros(max(map(prod, shapes)))
    sent[: own.numel()] = own.reshape(-1)
    boxes = [torch.empty_like(sent) for _ in shapes]
    dist.all_gather(boxes, sent, group=group)
    return [box[: prod(shape)].view(shape) for box, shape in zip(boxes, shapes, strict=True)]


# -- shards of parameters


def gather_part(param: Tensor, split: Split, group: Any) -> None:
    """All-gather a parameter into new memory; `cut_part` restores the shard.

    Args:
        param: Parameter whose `data` is replaced by the whole tensor.
        split: How the parameter is split.
        group: Process group over which the parameter is split.

    Note:
        Collective: every rank of the group must call it.
    """
    own = param.data
    shapes = [split.local_shape(coordinate) for coordinate in range(len(split.ranges))]
    param.data = put_together(_gathered(own, shapes, group), split, split.dim)
    param.__dict__[_KEPT] = own


def cut_part(param: Tensor, split: Split, index: int) -> None:
    """Replace a gathered parameter by this rank's shard.

    The shard is stored in its memory from before `gather_part`.

    Args:
        param: Parameter that `gather_part` gathered.
        split: How the parameter is split.
        index: Index of this rank.
    """
    own = taken(param.data, split.dim, split.ranges[index])
    kept: Tensor | None = param.__dict__.pop(_KEPT, None)
    if kept is not None and kept.shape == own.shape:
        own = kept.copy_(own)
    param.data = own


def split_by(shape: Sequence[int], dim: int, parts: Parts) -> Split:
    """Return the split of a dimension that consists of several parts.

    Args:
        shape: Shape of the whole parameter.
        dim: Dimension along which the parameter is split.
        parts: For each part, its width on each rank.

    Returns:
        The description of the split, from which shards are cut and merged.
    """
    return Split("split", tuple(shape), dim, laid_out(parts))


# -- layers


class TensorParallel_Layer(nn.Module, metaclass=ABCMeta):
    """Base class of layers that are split over the ranks of a group.

    The constructor performs no communication.

    Args:
        module: Layer with a weight of shape ``(out, in)`` and a bias or None. Its parameters become
            this layer's.
        mp_group: The process group; None for a layer that is not split.
        name: Name of the layer.
        skip_partition: Whether the parameters are already this rank's shards.
        tp_meta: Number of heads of the model, which determines the split.
        **others: Ignored.
    """

    keep_module_on_host: ClassVar[bool] = False  # layers are split on their device
    tp_overlap_comm: ClassVar[bool] = False
    partition_dim: int = 0  # dimension of the weight
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
        assert isinstance(module.weight, nn.Parameter)
        self.weight = module.weight
        self.bias = getattr(module, "bias", None)
        self._orig_weight_shape = _whole_shape(self.weight)
        self._orig_bias_shape = _whole_shape(self.bias) if self.bias is not None else None
        self._freeze_partition_sizes(self._orig_weight_shape[self.partition_dim])
        if not skip_partition and self.weight.numel():
            self._tp_partition([self.weight, self.bias])
        self._name_parameters()
        self._mark_uc_metadata()

    def _freeze_partition_sizes(self, total_size: int) -> tuple[int, ...]:
        """Compute how much of the split dimension each rank has. Called once."""
        sizes = get_shard_size_list(total_size, self.tp_world_size, self.tp_meta, self.name)
        self._partition_sizes = tuple(sizes)
        return self._partition_sizes

    @property
    def _parts(self) -> Parts:
        """For each part of the split dimension, its width on each rank."""
        return [self._partition_sizes]

    def _split_of(self, param: Tensor) -> Split | None:
        """Return the split of one of the layer's parameters; None if it is replicated."""
        if param is self.bias or param.dim() == 1:
            outputs = sum(map(sum, self._parts))
            return split_by((outputs,), 0, self._parts) if self.cuts_bias else None
        return split_by(self._orig_weight_shape, self.partition_dim, self._parts)

    def _cut_params(self, params: Params) -> Iterator[tuple[Tensor, Split]]:
        """Yield those of the layer's parameters that are split, with their splits."""
        for param in params:
            if param is not None and (split := self._split_of(param)) is not None:
                yield param, split

    def _name_parameters(self) -> None:
        for param, split in self._cut_params((self.weight, self.bias)):
            _name(param, self.gather_params, self._tp_partition)
            if self.tp_world_size > 1 and tuple(param.shape) == split.local_shape(self.tp_index):
                set_own_cut(param, split)

    def _mark_uc_metadata(self) -> None:
        """Store how parameters are split, for DeepSpeed's checkpoint converter."""
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

    def _spec_of(self, whole: Shape) -> Spec | None:
        """Return the shape that describes a fused parameter; None for a single part."""
        return None

    @torch.no_grad()
    def gather_params(self, params_list: Params) -> None:
        """All-gather parameters of the layer; `_tp_partition` restores the shards.

        Note:
            Collective: every rank of the group must call it.
        """
        for param, split in self._cut_params(params_list) if self.mp_group is not None else ():
            gather_part(param, split, self.mp_group)

    @torch.no_grad()
    def _tp_partition(self, params_list: Params) -> None:
        """Replace parameters by this rank's shards."""
        for param, split in self._cut_params(params_list):
            cut_part(param, split, self.tp_index)

    def __deepcopy__(self, memo: dict[int, Any]) -> TensorParallel_Layer:
        memo[id(self.mp_group)] = self.mp_group  # a copy uses the same process group
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
    """Set DeepSpeed's attributes on a parameter of a split layer."""
    param.tensor_model_parallel = param.ds_is_replaced_module = True
    param.gather_params = gather_params
    param._tp_partition = tp_partition


def _whole_shape(param: Tensor) -> Shape:
    """Return a parameter's shape, or that of the whole if ZeRO-3 has sharded it."""
    return tuple(getattr(param, "ds_shape", param.shape))


class LinearLayer(TensorParallel_Layer):
    """A linear layer whose outputs are divided among the ranks (column parallel).

    Args:
        module: Layer to split, with a weight of shape ``(out, in)`` and a bias or None.
        mp_group: The process group; None for a layer that is not split.
        skip_partition: Whether the parameters are already this rank's shards.
        gather_output: Whether to all-gather the outputs.
        **others: Other arguments of `TensorParallel_Layer`.
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
        """Return this rank's outputs, or all with `gather_output`.

        Backward all-reduces the gradient of the input.

        Note:
            Collective if backward runs or `gather_output` is true: every rank must call it.
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
        """Create a layer from this rank's shards of the parameters, or a random one.

        Args:
            weight_shape: Shape ``(out, in)`` of random weights.
            dtype: Dtype of random weights.
            weight: This rank's shard of the weight.
            bias: This rank's shard of the bias.
            gather_output: Whether to all-gather the outputs.

        Returns:
            The layer, which takes the tensors as this rank's shards.

        Raises:
            UsageError: Neither `weight` nor `weight_shape` is given.
        """
        if weight is None:
            if weight_shape is None:
                raise UsageError(
                    "from_weights was given no weight and no shape.", fix="pass one of the two."
                )
            out, inputs = weight_shape
            weight = nn.Linear(inputs, out, bias=False, dtype=dtype).weight
        holder = nn.Module()
        holder.weight = nn.Parameter(weight.detach())
        holder.register_parameter("bias", None if bias is None else nn.Parameter(bias.detach()))
        return cls(holder, skip_partition=True, gather_output=gather_output)


class VocabParallelLinear(LinearLayer):
    """A column-parallel layer that computes the logits of this rank's part of the vocabulary.

    Args:
        module: Layer to split, with a weight of shape ``(out, in)`` and a bias or None.
        mp_group: The process group; None for a layer that is not split.
        **others: Other arguments of `TensorParallel_Layer`.

    Raises:
        ValueError: A rank would have no part of the vocabulary.
    """

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
    """A linear layer whose inputs are divided among the ranks (row parallel).

    The result is the sum over all ranks plus the bias.
    """

    partition_dim = 1
    cuts_bias = False

    def forward(self, input: Tensor) -> Tensor:
        """Return the sum of the results of all ranks plus the bias.

        Note:
            Collective: every rank of the group must call it.
        """
        total: Tensor = RowParallel.apply(  # type: ignore[no-untyped-call]
            self.mp_group, nn.functional.linear(input, self.weight)
        )
        return total if self.bias is None else total + self.bias


class LinearAllreduceWithReplicatedInput(LinearAllreduce):
    """A row-parallel layer that receives all inputs on every rank."""

    def forward(self, input: Tensor) -> Tensor:
        """Return the sum of the results of all ranks plus the bias.

        Raises:
            UsageError: The input does not have the layer's number of features.

        Note:
            Collective: every rank of the group must call it.
        """
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
    """A row-parallel layer that computes logits, with its own copy of the parameters.

    The layer may have been tied to the input embedding.

    Args:
        module: Layer to split, with a weight of shape ``(out, in)`` and a bias or None.
        mp_group: The process group; None for a layer that is not split.
        **others: Other arguments of `TensorParallel_Layer`.
    """

    def __init__(self, module: nn.Module, mp_group: Any, **others: Any) -> None:
        for name in ("weight", "bias"):
            param = getattr(module, name, None)
            if param is not None:
                setattr(module, name, nn.Parameter(param.detach().clone()))
        super().__init__(module, mp_group, **{"name": "lm_head", **others})


class _OfParts(TensorParallel_Layer):
    """Base class of layers with fused projections, whose parts are split separately.

    `shape` describes the whole weight. The entry of the split dimension is the number of equal
    parts, or the width of each part. Other entries are -1.
    """

    shape: Spec
    _subparam_sizes: tuple[int, ...]
    # Name that determines the split, instead of the layer's own
    counts_as: ClassVar[str | None] = None
    default_dim: ClassVar[int] = 0

    def __init__(
        self,
        module: nn.Module,
        mp_group: Any,
        shape: Sequence[Any],
        partition_dim: int | None = None,
        **others: Any,
    ) -> None:
        weight = module.weight
        assert isinstance(weight, Tensor)
        dim = self.default_dim if partition_dim is None else partition_dim
        self.partition_dim = dim
        self.shape = tuple(shape)
        self._subparam_sizes = subparam_sizes(_whole_shape(weight), self.shape, dim)
        super().__init__(module, mp_group, **others)

    def _freeze_partition_sizes(self, total_size: int) -> tuple[int, ...]:
        self._subparam_shard_widths = _subparam_shard_widths(
            self._subparam_sizes, self.tp_world_size, self.tp_meta, self.counts_as or self.name
        )
        self._partition_sizes = tuple(map(sum, zip(*self._subparam_shard_widths, strict=True)))
        return self._partition_sizes

    @property
    def _parts(self) -> Parts:
        return self._subparam_shard_widths

    def _spec_of(self, whole: Shape) -> Spec | None:
        return self.shape if len(whole) > 1 else (self._subparam_sizes,)


def _subparam_shard_widths(
    subparam_sizes: Sequence[int],
    tp_world_size: int,
    tp_meta: AutoTPMeta | None = None,
    name: str | None = None,
) -> list[list[int]]:
    """Return the width of each part on each rank."""
    return [get_shard_size_list(size, tp_world_size, tp_meta, name) for size in subparam_sizes]


def subparam_sizes(whole: Sequence[int], shape: Spec, dim: int) -> tuple[int, ...]:
    """Return the widths of the parts of a dimension.

    Args:
        whole: Shape of the whole weight.
        shape: Description of the parts; see `_OfParts`.
        dim: Dimension along which the weight is split.

    Returns:
        One width per part. The widths add up to the size of the dimension.

    Raises:
        NotBuiltError: `shape` has another number of dimensions.
        UsageError: The widths do not add up to the dimension.
    """
    if len(shape) != len(whole):
        raise NotBuiltError(
            f"a fused weight of shape {tuple(whole)} is described by {shape}.",
            "It is split along one of its dimensions.",
            "write a number or a tuple for that dimension, and -1 for the others.",
        )
    stated = shape[dim]
    sizes = tuple(stated) if isinstance(stated, list | tuple) else (whole[dim] // stated,) * stated
    if sum(sizes) != whole[dim]:
        raise UsageError(
            f"parts {stated} of a fused weight do not make up its {whole[dim]} rows of dimension "
            f"{dim}.",
            fix="pass widths that add up to the dimension.",
        )
    return sizes


class SubParamLinearLayer(_OfParts, LinearLayer):
    """A column-parallel layer of a fused projection."""

    def _split_of(self, param: Tensor) -> Split | None:
        if self.partition_dim != 0 and (param is self.bias or param.dim() == 1):
            return None
        return super()._split_of(param)

    def forward(self, input: Tensor) -> Tensor:
        """Return this rank's outputs of each part, or all with `gather_output`.

        Backward all-reduces the gradient of the input.

        Note:
            Collective if backward runs or `gather_output` is true: every rank must call it.
        """
        found = super().forward(input)
        if not self.gather_output or self.tp_world_size == 1:
            return found
        by_rank = found.split(self._partition_sizes, -1)
        return join(by_rank, split_by((found.shape[-1],), 0, self._subparam_shard_widths))


class SubParamLinearAllreduce(_OfParts, LinearAllreduce):
    """A row-parallel layer whose inputs consist of several parts.

    Args:
        module: Layer to split, with a weight of shape ``(out, in)`` and a bias or None.
        mp_group: The process group; None for a layer that is not split.
        shape: Description of the parts; see `subparam_sizes`.
        partition_dim: The split dimension.
        **others: Other arguments of `TensorParallel_Layer`.
    """

    default_dim = 1


class GateUpPack_LinearLayer(SubParamLinearLayer):
    """A column-parallel layer of two fused projections of equal width.

    Args:
        module: Layer to split, with a weight of shape ``(out, in)`` and a bias or None.
        mp_group: The process group; None for a layer that is not split.
        **others: Other arguments of `TensorParallel_Layer`.
    """

    counts_as = "mlp"

    def __init__(self, module: nn.Module, mp_group: Any = None, **others: Any) -> None:
        out, inputs = module.weight.shape  # type: ignore[misc]
        super().__init__(module, mp_group, ((out // 2, out // 2), inputs), 0, **others)


class GatherReplacedLayerParams:
    """Gather parameters of split layers inside a `with` block.

    Args:
        params: One parameter, or parameters of one layer. Parameters of layers that are not
            split are ignored.
        module: Stored as an attribute.
        enabled: If False, the block does nothing.

    Note:
        Entering the block is collective over the group.
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


# -- the engine's own split layers


def show_names(engine: Engine) -> None:
    """Add DeepSpeed's attributes and classes to the split layers of an engine."""
    is_split = False
    for name, module in engine.module.named_modules():
        if not isinstance(module, Layer) or not isinstance(module, Column | Row):
            continue
        is_split = True
        is_column = isinstance(module, Column)
        (LinearLayer if is_column else LinearAllreduce).register(type(module))
        part = module.part
        shown: dict[str, Any] = {
            "name": name,
            "tp_world_size": engine.mesh.tp,
            "tp_index": engine.mesh.coordinates["tp"],
            "_partition_sizes": tuple(part.weight.widths),
        }
        if is_column:
            shown["gather_output"] = part.gathers or part.is_head
        vars(module).update(shown | vars(module))
        for param in module.parameters(recurse=False):
            split = split_of(param)
            whole = split.shape if split is not None else tuple(param.shape)
            dim = split.dim if split is not None and split.kind == "split" else None
            style = "column" if is_column else "row"
            mark(param, style, whole, whole[0], dim, *_parts_of(split))
            if dim is not None:
                _name(param, _gather_along_tp, _cut_along_tp)
    if is_split:
        vars(engine.module)[INFO] = collect_autotp_universal_checkpoint_info(engine.module)


def _parts_of(split: Split | None) -> tuple[list[list[int]], Spec | None]:
    """Return the widths of the parts of a split dimension on each rank.

    If there are several parts, the shape that describes them is returned, too.
    """
    if split is None or not split.ranges:
        return [], None
    by_rank = [[high - low for low, high in own] for own in split.ranges]
    widths = [list(part) for part in zip(*by_rank, strict=True)]
    sizes: list[Any] = [-1] * len(split.shape)
    sizes[split.dim] = tuple(map(sum, widths))
    return widths, tuple(sizes) if len(widths) > 1 else None


def _cut_params(params: Params) -> Iterator[tuple[Tensor, Split]]:
    for param in params:
        split = split_of(param) if param is not None else None
        if param is not None and split is not None and split.kind == "split":
            yield param, split


@torch.no_grad()
def _gather_along_tp(params: Params) -> None:
    for param, split in _cut_params(params):
        gather_part(param, split, groups.get_tensor_model_parallel_group())


@torch.no_grad()
def _cut_along_tp(params: Params) -> None:
    for param, split in _cut_params(params):
        cut_part(param, split, groups.get_tensor_model_parallel_rank())
