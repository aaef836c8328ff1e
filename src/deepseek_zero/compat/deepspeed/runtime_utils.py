"""DeepSpeed's `deepspeed.runtime.utils`: functions for gradients and partitions.

They are for scripts. Engines do not use them: the optimizer computes norms, clipping and overflow
of sharded gradients (optim/sharded.py).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from contextlib import nullcontext
from itertools import accumulate, chain, pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import pad

from ...api.utils import see_memory_usage
from ...base.device import allocated_bytes, backward_id, count_reached, default_device
from ...base.errors import CheckpointError
from ...base.nested import map_inputs
from . import groups
from .moe import is_moe_param
from .pipe import partition_uniform

# DeepSpeed's error for a checkpoint that does not fit the ranks
ZeRORuntimeException = CheckpointError


class DummyOptim:
    """Stand-in for the optimizer of an engine without one; it only holds the parameters."""

    def __init__(self, params: Iterable[nn.Parameter]) -> None:
        self.param_groups = [{"params": params}]


class noop_context(nullcontext[None]):
    """A context manager that does nothing."""


def count_used_parameters_in_backward(parameters: Iterable[Tensor]) -> int:
    """Return how many of these parameters the current backward pass reaches.

    The function queries autograd. Engines do not use it, because units count their gradients.

    Raises:
        RuntimeError: It is called outside of a backward pass.
    """
    if backward_id() == -1:
        raise RuntimeError(
            "count_used_parameters_in_backward must be called during backward execution"
        )
    return count_reached(parameters)


def prefix_sum_inc(weights: Sequence[float]) -> list[float]:
    """Return inclusive prefix sums, for example [1, 3, 6] for [1, 2, 3]."""
    return list(accumulate(weights))


def call_to_str(base: str, *args: Any, **kwargs: Any) -> str:
    """Return a call as text, for example `call_to_str("f", 1, a=2)` as "f(1, a=2)"."""
    named = [f"{name}={value!r}" for name, value in kwargs.items()]
    return f"{base}({', '.join([*map(repr, args), *named])})"


def get_only_unique_item(items: Iterable[Any]) -> Any:
    """Return the value that all items have.

    Raises:
        RuntimeError: The items differ, or there is none.
    """
    found = set(items)
    if len(found) != 1:
        raise RuntimeError(f"expected there to be only one unique element in {items}")
    return found.pop()


def filter_empty_parameters(params: Any) -> Any:
    """Return a list of parameters or groups without the parameters that have no elements."""
    if isinstance(params, Tensor) or not isinstance(params, Iterable):
        return params
    return [
        {**each, "params": [param for param in each["params"] if param.numel()]}
        if isinstance(each, dict)
        else each
        for each in params
        if isinstance(each, dict) or not isinstance(each, Tensor) or each.numel()
    ]


def get_inactive_params(param_list: Iterable[nn.Parameter]) -> list[nn.Parameter]:
    """Return the parameters that are sharded at stage 3 and not gathered now."""
    return [
        param
        for param in param_list
        if getattr(getattr(param, "ds_status", None), "name", "") == "NOT_AVAILABLE"
    ]


def is_model_parallel_parameter(p: Any) -> bool:
    """Return whether a parameter is a shard of a tensor-parallel layer.

    The parameter then has a true attribute `model_parallel` or `tensor_model_parallel`.
    """
    return bool(getattr(p, "model_parallel", False) or getattr(p, "tensor_model_parallel", False))


def copy_to_device(item: Any, device: Any, criterion_func: Any) -> Any:
    """Copy the tensors that meet a criterion in nested lists, tuples and dicts.

    Args:
        item: Tensor, or nested lists, tuples and dicts of tensors.
        device: Device of the copies.
        criterion_func: Function that returns whether an item is copied.

    Returns:
        The same structure; items that do not meet the criterion are the originals.
    """
    return map_inputs(
        item,
        lambda tensor: tensor.detach().to(device, copy=True) if criterion_func(tensor) else tensor,
    )


def get_tensor_bytes(item: Any) -> int:
    """Return the number of bytes of the tensors in nested lists, tuples and dicts."""
    if isinstance(item, Tensor):
        return item.nbytes
    inside = item.values() if isinstance(item, dict) else item
    return sum(map(get_tensor_bytes, inside)) if isinstance(item, dict | list | tuple) else 0


# -- norms


def has_inf_or_nan(x: Tensor) -> Tensor:
    """Return a boolean tensor: whether any element is not finite."""
    return torch.logical_not(torch.isfinite(x.float()).all())


def is_invalid_grad_norm(norm: Any) -> bool:
    """Return whether a norm is invalid: -1 (DeepSpeed's marker), infinite or NaN."""
    return float(norm) == -1 or not math.isfinite(float(norm))


def mask_nan_or_inf_with_val_inplace(input: Tensor, device: Any = None, val: float = -1.0) -> None:
    """Replace the values that are not finite in a tensor of norms.

    Args:
        input: Tensor of norms, which is changed in place.
        device: Ignored.
        val: Value to write instead.
    """
    input.masked_fill_(torch.logical_not(torch.isfinite(input)), val)


def get_global_norm(norm_list: Iterable[Any]) -> float:
    """Return the 2-norm of a vector from the norms of its parts; infinity if one is invalid."""
    norms = [float(norm) for norm in norm_list]
    return math.inf if any(map(is_invalid_grad_norm, norms)) else math.hypot(*norms)


def _sum_over(value: Tensor, group: Any, largest: bool = False) -> Tensor:
    if group is not None and dist.is_initialized():
        op = dist.ReduceOp.MAX if largest else dist.ReduceOp.SUM
        dist.all_reduce(value, op=op, group=group)
    return value


def _norm_of(tensors: Sequence[Tensor], norm_type: float, mpu: Any = None) -> Tensor:
    """Return the common norm of tensors over the model-parallel ranks of an mpu."""
    group = mpu.get_model_parallel_group() if mpu is not None else None
    device = tensors[0].device if tensors else default_device()
    norms = [tensor.detach().float().norm(norm_type) for tensor in tensors]
    parts = torch.stack([torch.zeros((), device=device), *norms])
    if norm_type == math.inf:
        return _sum_over(parts.max(), group, True)
    return _sum_over(parts.pow(norm_type).sum(), group).pow(1.0 / norm_type)


def _own(tensors: Iterable[Any], mpu: Any) -> list[Any]:
    """Leave out replicated tensors except on the first model-parallel rank."""
    first = mpu is None or mpu.get_model_parallel_rank() == 0
    return [
        tensor
        for tensor in tensors
        if not getattr(tensor, "ds_pipe_replicated", False)
        and (first or is_model_parallel_parameter(tensor))
    ]


def _each(parameters: Any) -> list[Any]:
    return [parameters] if isinstance(parameters, Tensor) else list(parameters)


def _valid(norm: Tensor) -> float:
    return float(norm) if math.isfinite(float(norm)) else -1.0


def get_weight_norm(parameters: Any, norm_type: float = 2, mpu: Any = None) -> float:
    """Return the norm of tensors, or -1 if it is not finite.

    Args:
        parameters: One or more tensors.
        norm_type: Order of the norm.
        mpu: Model-parallel unit over whose ranks the norm is computed.

    Returns:
        The norm over all tensors, or -1.

    Note:
        Collective: every model-parallel rank of `mpu` must call it.
    """
    return _valid(_norm_of(_own(_each(parameters), mpu), float(norm_type), mpu))


def get_flattened_grad_norm(
    parameters: Any, norm_type: float = 2, mpu: Any = None, grad_norm_mask: Any = None
) -> float:
    """Return the norm of the gradients of parameters, or -1 if it is not finite.

    Args:
        parameters: One or more parameters.
        norm_type: Order of the norm.
        mpu: Model-parallel unit over whose ranks the norm is computed.
        grad_norm_mask: For each parameter with a gradient, a tensor of ranges [start, stop) of
            elements to leave out.

    Returns:
        The norm over all gradients, or -1.

    Note:
        Collective: every model-parallel rank of `mpu` must call it.
    """
    grads = []
    for place, param in enumerate(param for param in _each(parameters) if param.grad is not None):
        grad = param.grad.detach()
        if grad_norm_mask is not None and len(grad_norm_mask[place]):
            grad = grad.clone()
            for start, stop in grad_norm_mask[place].tolist():
                grad[start:stop] = 0
        grads.append(grad)
    return _valid(_norm_of(grads, float(norm_type), mpu))


def get_grad_zeros(parameters: Any, mpu: Any = None) -> float:
    """Return the number of zeros in the gradients of parameters.

    Args:
        parameters: One or more parameters.
        mpu: Model-parallel unit over whose ranks the zeros are counted.

    Returns:
        The number of zeros, over all model-parallel ranks.

    Note:
        Collective: every model-parallel rank of `mpu` must call it.
    """
    grads = [param.grad for param in _own(_each(parameters), mpu) if param.grad is not None]
    count = float(sum(grad.numel() - int(torch.count_nonzero(grad)) for grad in grads))
    zeros = torch.tensor(count, dtype=torch.float64, device="cpu")
    group = mpu.get_model_parallel_group() if mpu is not None else None
    return float(_sum_over(zeros, group))


def get_global_norm_of_tensors(
    input_tensors: Iterable[Tensor], norm_type: float = 2, mpu: Any = None, moe_ep_group: Any = None
) -> Tensor:
    """Return the norm of tensors, or -1 if it is not finite.

    Args:
        input_tensors: Tensors whose common norm is computed.
        norm_type: Order of the norm.
        mpu: Model-parallel unit over whose ranks the norm is computed.
        moe_ep_group: Process group of expert-parallel ranks, over which the norm is computed, too.

    Returns:
        The norm over all tensors or -1, as a scalar tensor.

    Note:
        Collective: every rank of `mpu` and `moe_ep_group` must call it.
    """
    norm_type = float(norm_type)
    norm = _norm_of(list(input_tensors), norm_type, mpu)
    if moe_ep_group is not None and norm_type == math.inf:
        norm = _sum_over(norm, moe_ep_group, True)
    elif moe_ep_group is not None:
        norm = _sum_over(norm.pow(norm_type), moe_ep_group).pow(1.0 / norm_type)
    mask_nan_or_inf_with_val_inplace(norm)
    return norm


def clip_tensors_by_global_norm(
    input_tensors: Iterable[Tensor],
    max_norm: float = 1.0,
    global_norm: Any = None,
    mpu: Any = None,
    eps: float = 1e-6,
) -> Any:
    """Scale tensors in place so that their common norm is at most `max_norm`.

    Args:
        input_tensors: Tensors to scale in place.
        max_norm: Largest norm.
        global_norm: Norm of the tensors, if the caller has computed it.
        mpu: Model-parallel unit over whose ranks the norm is computed.
        eps: Added to the norm.

    Returns:
        The norm before scaling.
    """
    tensors = list(input_tensors)
    norm = get_global_norm_of_tensors(tensors, mpu=mpu) if global_norm is None else global_norm
    factor = float(max_norm) / (float(norm) + eps)
    if factor < 1:
        for tensor in tensors:
            tensor.detach().mul_(factor)
    return norm


def clip_grad_norm_(
    parameters: Any, max_norm: float, norm_type: float = 2, mpu: Any = None
) -> Tensor:
    """Clip unsharded gradients in place.

    Sharded gradients are clipped by the configuration key `gradient_clipping`.

    Args:
        parameters: One or more parameters.
        max_norm: Largest norm.
        norm_type: Order of the norm.
        mpu: Model-parallel unit over whose ranks the norm is computed.

    Returns:
        The norm, averaged over the data-parallel ranks.

    Note:
        Collective: every data-parallel rank must call it.
    """
    given = [param for param in _each(parameters) if param.grad is not None]
    grads = [param.grad for param in (given if mpu is None else _own(given, mpu))]
    norm = _norm_of(grads, float(norm_type), mpu)
    norm = _sum_over(
        norm / max(1, groups.get_data_parallel_world_size()), groups.get_data_parallel_group()
    )
    factor = torch.clamp(float(max_norm) / (norm + 1e-6), max=1.0)
    for param in given:
        param.grad.detach().mul_(factor.to(param.grad.device))
    return norm


class CheckOverflow:
    """Check whether gradients overflowed on any model-parallel rank.

    Args:
        param_groups: Lists of parameters.
        mpu: Model-parallel unit whose ranks are checked together.
        zero_reduce_scatter: Whether gradients are sharded; all ranks are then checked.
        deepspeed: Stored as an attribute.
    """

    def __init__(
        self,
        param_groups: Iterable[Iterable[nn.Parameter]] | None = None,
        mpu: Any = None,
        zero_reduce_scatter: bool = False,
        deepspeed: Any = None,
    ) -> None:
        self.mpu = mpu
        self.zero_reduce_scatter = zero_reduce_scatter
        self.deepspeed = deepspeed
        self.params = list(chain.from_iterable(param_groups or ()))
        self.has_moe_params = any(map(is_moe_param, self.params))

    def check(self, param_groups: Iterable[Iterable[nn.Parameter]] | None = None) -> bool:
        """Return whether a gradient is not finite.

        Args:
            param_groups: Lists of parameters; None for those of the constructor.
        """
        return self.has_overflow(
            self.params if param_groups is None else chain.from_iterable(param_groups)
        )

    def has_overflow_serial(self, params: Iterable[nn.Parameter]) -> bool:
        """Return whether a gradient on this rank is not finite."""
        return any(param.grad is not None and bool(has_inf_or_nan(param.grad)) for param in params)

    def has_overflow(
        self, params: Iterable[nn.Parameter], has_moe_params: bool | None = None
    ) -> bool:
        """Return whether a gradient on any model-parallel rank is not finite.

        Args:
            params: Parameters whose gradients are checked.
            has_moe_params: Whether there are parameters of experts; all ranks are then checked.

        Returns:
            True if any gradient contains NaN or infinity.
        """
        params = list(params)
        experts = any(map(is_moe_param, params)) if has_moe_params is None else has_moe_params
        return self._agreed(self.has_overflow_serial(params), experts or self.zero_reduce_scatter)

    def check_using_norm(self, norm_group: Iterable[Any], reduce_overflow: bool = True) -> bool:
        """Return whether a norm is invalid on any of the checked ranks.

        Args:
            norm_group: Norms of the gradients on this rank. -1, infinity and NaN mean an overflow.
            reduce_overflow: Whether to check all ranks.

        Returns:
            True if any norm is -1, infinite or NaN.
        """
        return self._agreed(
            any(map(is_invalid_grad_norm, norm_group)), reduce_overflow or self.has_moe_params
        )

    def _agreed(self, found: bool, everywhere: bool) -> bool:
        flag = torch.tensor([float(found)], device=default_device())
        if everywhere and dist.is_initialized():
            dist.all_reduce(flag, op=dist.ReduceOp.MAX)
        elif self.mpu is not None:
            dist.all_reduce(flag, op=dist.ReduceOp.MAX, group=self.mpu.get_model_parallel_group())
        return bool(flag.item())


# -- tensors split over ranks


class PartitionedTensor:
    """A tensor that is split over the ranks of a group.

    All ranks pass the same values.

    Args:
        tensor: Whole tensor, the same on every rank.
        group: Process group of the ranks that each keep a part.
        partition_meta: Ignored.
    """

    def __init__(self, tensor: Tensor, group: Any, partition_meta: Any = None) -> None:
        self.group = group
        self.num_parts = dist.get_world_size(group)
        self.rank = dist.get_rank(group)
        self.orig_size = list(tensor.size())
        self.orig_device = tensor.device
        self.partition = partition_uniform(tensor.numel(), self.num_parts)
        start, stop = self.partition[self.rank : self.rank + 2]
        self.local_data = tensor.detach().reshape(-1)[start:stop].clone()

    @classmethod
    def from_meta(
        cls, meta: Tensor, local_part: Tensor, group: Any, device: Any = None
    ) -> PartitionedTensor:
        """Return a partitioned tensor for the result of `to_meta` and this rank's part.

        Args:
            meta: Result of `to_meta`.
            local_part: Elements of this rank, flat.
            group: Process group of the ranks that each keep a part.
            device: Device of the whole tensor; None for that of `local_part`.
        """
        assert meta.dtype == torch.long
        found = cls.__new__(cls)
        numbers = meta.tolist()
        dims = numbers[0]
        found.group = group
        found.orig_size = numbers[1 : 1 + dims]
        found.num_parts, found.rank, *found.partition = numbers[1 + dims :]
        assert (found.num_parts, found.rank) == (dist.get_world_size(group), dist.get_rank(group))
        found.orig_device = torch.device(device) if device is not None else local_part.device
        found.local_data = local_part.detach()
        return found

    def to_meta(self) -> Tensor:
        """Return sizes and boundaries as a tensor: [dims, *size, parts, rank, *boundaries]."""
        numbers = [len(self.orig_size), *self.orig_size, self.num_parts, self.rank, *self.partition]
        return torch.tensor(numbers, dtype=torch.long, device=self.orig_device)

    def full(self, device: Any = None) -> Tensor:
        """Return the whole tensor on every rank.

        Note:
            Collective: every rank of the group must call it.
        """
        sizes = [stop - start for start, stop in pairwise(self.partition)]
        own = self.local_data.new_zeros(max(sizes))
        own[: self.local_data.numel()] = self.local_data
        parts = [torch.empty_like(own) for _ in sizes]
        dist.all_gather(parts, own, group=self.group)
        kept = [part[:size] for part, size in zip(parts, sizes, strict=True)]
        return torch.cat(kept).view(self.orig_size).to(device or self.orig_device)

    def data(self) -> Tensor:
        """Return this rank's part of the tensor as a 1-D tensor."""
        return self.local_data

    def local_size(self) -> torch.Size:
        """Return the shape of this rank's elements."""
        return self.local_data.size()

    def full_size(self) -> list[int]:
        """Return the shape of the whole tensor."""
        return self.orig_size


def reduce_scatter_coalesced(tensors: Sequence[Tensor], group: Any = None) -> list[Tensor]:
    """Return this rank's flat shard of the mean of each tensor over the ranks.

    The shards of the last ranks may be shorter. One message contains all tensors.

    Args:
        tensors: Tensors to average, with the same shapes on every rank.
        group: Process group; None for the group of all ranks.

    Returns:
        One 1-D tensor per input, in the same order.

    Note:
        Collective: every rank of the group must call it.
    """
    ranks = dist.get_world_size(group)
    rank = dist.get_rank(group)
    flats = [tensor.detach().reshape(-1) for tensor in tensors]
    padded = [pad(flat, (0, -flat.numel() % ranks)).view(ranks, -1) for flat in flats]
    boxes = torch.cat(padded, 1).div_(ranks)
    dist.all_reduce(boxes, group=group)
    parts = boxes[rank].split([each.shape[1] for each in padded])
    starts = [rank * part.numel() for part in parts]
    rows = zip(parts, starts, flats, strict=True)
    return [part[: max(0, flat.numel() - start)] for part, start, flat in rows]


def align_dense_tensors(tensor_list: Sequence[Tensor], alignment: int) -> list[Tensor]:
    """Append a tensor of zeros so that the total number of elements is a multiple of `alignment`.

    Args:
        tensor_list: At least one tensor.
        alignment: The divisor, in elements.

    Returns:
        The same tensors, and a flat tensor of zeros if the total is not a multiple yet.
    """
    missing = -sum(tensor.numel() for tensor in tensor_list) % alignment
    return [*tensor_list, *([tensor_list[0].new_zeros(missing)] if missing else [])]


# -- memory


def memory_status(msg: str, print_rank: int = -1, reset_max: bool = False) -> None:
    """Log this process's memory.

    Args:
        msg: Text of the log.
        print_rank: Rank that logs; -1 for all.
        reset_max: Ignored.
    """
    if print_rank in (-1, dist.get_rank() if dist.is_initialized() else 0):
        see_memory_usage(msg, force=True)


def get_ma_status() -> int:
    """Return the number of allocated bytes on the device."""
    return allocated_bytes(default_device())


def empty_cache() -> None:
    """Release the GPU memory that torch has cached but does not use."""
    if default_device().type == "cuda":
        torch.cuda.empty_cache()
