"""Autograd functions of layers that several ranks compute together.

    column   y_i = x W_i^T + b_i          each rank has its own outputs; x is whole on every rank
    row      y = sum_i x_i W_i^T + b      each rank has its own inputs; y is whole on every rank
    enter    y = x                        gradient: the sum over the ranks, once per x
    gather   y = (y_1, ..., y_T)          gradient: this rank's columns

If activations are sharded over tokens between the layers, `enter` gathers the tokens and its sum is
for this rank's tokens. The sum of a row product is for this rank's tokens too, and its backward
gathers them. `shard` and `unshard` are used at the ends.

The first column layer that reads a tensor calls `enter` for it (layers.py), and the other column
layers read the same result. In backward they add their gradients for it into one buffer, product by
product. The last one starts the sum before it computes the gradient of its weight.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ..base.errors import NotBuiltError
from ..planner.split import Split
from .autograd import with_backward
from .cuts import put_together, taken
from .group import TensorGroup

# Returns an uninitialized buffer of a shape and a dtype
NewBuffer = Callable[[Sequence[int], torch.dtype], Tensor]

# -- products: (rows, in) x weight, which is (out, in), or (in, out) if `transposed`


def product(
    rows: Tensor, weight: Tensor, bias: Tensor | None, transposed: bool, out: Tensor
) -> Tensor:
    """Compute the matrix product of a linear layer into a given tensor.

    Args:
        rows: The inputs, shape (rows, in).
        weight: The weight, shape (out, in), or (in, out) if transposed.
        bias: The bias, shape (out,), or None.
        transposed: Whether the weight is (in, out).
        out: The tensor that receives the result, shape (rows, out).

    Returns:
        `out`.
    """
    right = weight if transposed else weight.t()
    if bias is None:
        return torch.mm(rows, right, out=out)
    return torch.addmm(bias, rows, right, out=out)


def _parameter_gradients(ctx: Any, rows: Tensor, x: Tensor) -> tuple[Tensor | None, Tensor | None]:
    """Return the gradients of a product's weight, in its own orientation, and of its bias.

    `rows` is the gradient of the product.
    """
    _, needs_weight, needs_bias, *_ = ctx.needs_input_grad
    weight = None
    if needs_weight:
        own = flat(x)
        weight = torch.mm(own.t(), rows) if ctx.transposed else torch.mm(rows.t(), own)
    return weight, rows.sum(0) if needs_bias else None


def flat(x: Tensor) -> Tensor:
    """Reshape a tensor (..., n) to a contiguous (rows, n)."""
    return x.reshape(-1, x.shape[-1]).contiguous()


# -- inputs of column layers


class Entry:
    """Accumulates the gradients of several column layers that read the same input.

    The gradients for the input are added into one buffer. When all layers that read it in forward
    have added theirs, `start` is called with the buffer.

    Args:
        new: A function that returns an uninitialized buffer of a shape and a dtype.
        start: Called with the accumulated gradient, for example to start its all-reduce.
    """

    def __init__(self, new: NewBuffer, start: Callable[[Tensor], Any]) -> None:
        self.readers = 0
        self._new = new
        self._start = start
        self._added = 0
        self._buffer: Tensor | None = None
        self._started: Any = None

    def add(self, grad: Tensor, weight: Tensor, transposed: bool) -> None:
        """Add one column layer's gradient for the shared input.

        Args:
            grad: The gradient of the layer's outputs, shape (rows, out).
            weight: The layer's weight on this rank, which `grad` is multiplied with.
            transposed: Whether the weight is (in, out).
        """
        left = weight.t() if transposed else weight
        if self._buffer is None:
            self._buffer = self._new((grad.shape[0], left.shape[1]), grad.dtype)
            torch.mm(grad, left, out=self._buffer)
        else:
            self._buffer.addmm_(grad, left)
        self._added += 1
        if self._added == self.readers:
            self._close()

    def finish(self) -> Any:
        """Return the result of `start`, or None if no layer has added a gradient.

        It calls `start` if some of the layers did not take part in this backward. No layer may add
        a gradient afterwards.
        """
        self._close()
        found = self._started
        self._started = None
        return found

    def _close(self) -> None:
        if self._buffer is not None:
            self._started = self._start(self._buffer)
            self._buffer = None
            self._added = 0


class _Enter(torch.autograd.Function):
    """The autograd node of `enter`. Column layers return no gradient to it (`Entry.add`).

    This node runs after all of them. `whole` is `x`, or all tokens of a sharded `x`.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, whole: Tensor, entry: Entry) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.entry = entry
        ctx.shape = x.shape
        return whole.view_as(whole)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor | None) -> tuple[Tensor | None, None, None]:
        assert grad is None, "only column layers read an entered tensor"
        total = ctx.entry.finish()
        return None if total is None else total.wait().view(ctx.shape), None, None


def enter(x: Tensor, group: TensorGroup, what: str) -> tuple[Tensor, Entry | None]:
    """Prepare a tensor that column layers read, so that its gradient is summed over the ranks.

    Args:
        x: The input, whole on every rank.
        group: The tensor-parallel ranks over which the gradient is summed.
        what: The name of the first layer that reads it, for messages.

    Returns:
        The tensor that the layers must read instead of `x`, and the `Entry` that accumulates their
        gradients for it. If `x` needs no gradient, `x` itself and None.
    """
    if not (torch.is_grad_enabled() and x.requires_grad):
        return x, None
    name = f"the gradient into {what}"
    entry = Entry(group.take, lambda partial: group.sum(partial, name))
    return _Enter.apply(x, x, entry), entry  # type: ignore[no-untyped-call]


def enter_tokens(x: Tensor, group: TensorGroup, what: str) -> tuple[Tensor, Entry | None]:
    """All-gather the tokens of a tensor that column layers read.

    Backward sums the gradient over the ranks and returns the part for this rank's tokens.

    Args:
        x: This rank's tokens, shape (batch, tokens / ranks, n).
        group: The tensor-parallel ranks that hold the other tokens.
        what: The name of the first layer that reads them, for messages.

    Returns:
        All tokens, shape (batch, tokens, n), and the `Entry` that accumulates the layers' gradients
        for them, or None if `x` needs no gradient.

    Raises:
        NotBuiltError: `x` does not have three dimensions.

    Note:
        Collective and blocking: every rank must call it.
    """
    if x.dim() != 3:
        raise NotBuiltError(
            f"layer '{what}' reads activations of shape {tuple(x.shape)}, sharded over tokens.",
            "Their tokens are the second of three dimensions.",
            'say "tensor_parallel": {"sequence": false}.',
        )
    whole = group.gather_tokens(x.detach(), f"tokens of {what}")
    if not (torch.is_grad_enabled() and x.requires_grad):
        return whole, None
    name = f"the gradient into {what}"
    shape = whole.shape
    entry = Entry(group.take, lambda partial: group.sum_own_tokens(partial.view(shape), name))
    return _Enter.apply(x, whole, entry), entry  # type: ignore[no-untyped-call]


# -- layers


class _Column(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        entry: Entry | None,
        transposed: bool,
    ) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.entry = entry
        ctx.transposed = transposed
        if entry is not None:
            entry.readers += 1
        outputs = weight.shape[1 if transposed else 0]
        found = x.new_empty((*x.shape[:-1], outputs))  # no view: the model may change it in place
        product(flat(x), weight, bias, transposed, found.view(-1, outputs))
        return found

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        x, weight = ctx.saved_tensors
        rows = flat(grad)
        if ctx.entry is not None:
            ctx.entry.add(rows, weight, ctx.transposed)
        return None, *_parameter_gradients(ctx, rows, x), None, None


def column(
    x: Tensor, weight: Tensor, bias: Tensor | None, entry: Entry | None, transposed: bool
) -> Tensor:
    """Return this rank's outputs of a column layer.

    Args:
        x: The input that `enter` or `enter_tokens` returned, shape (..., in).
        weight: This rank's rows of the weight, shape (own outputs, in), or its transpose.
        bias: This rank's elements of the bias, or None.
        entry: The `Entry` that accumulates the gradient for `x`, or None if `x` needs none.
        transposed: Whether the weight is (in, out).

    Returns:
        A tensor of shape (..., own outputs).
    """
    found: Tensor = _Column.apply(x, weight, bias, entry, transposed)  # type: ignore[no-untyped-call]
    return found


class _Row(torch.autograd.Function):
    """The product of a row layer on one rank.

    `new` allocates the product, and `finish` returns the output for it, for example the sum over
    the ranks. `restore` returns the gradient of the product for that of the output.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        transposed: bool,
        adds_bias: bool,
        new: NewBuffer,
        finish: Callable[[Tensor], Tensor],
        restore: Callable[[Tensor], Tensor],
    ) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.transposed = transposed
        ctx.restore = restore
        outputs = weight.shape[1 if transposed else 0]
        part = new((*x.shape[:-1], outputs), x.dtype)
        own_bias = bias if adds_bias else None
        product(flat(x), weight, own_bias, transposed, part.view(-1, outputs))
        return finish(part)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        x, weight = ctx.saved_tensors
        rows = flat(ctx.restore(grad))
        x_grad = None
        if ctx.needs_input_grad[0]:
            right = weight.t() if ctx.transposed else weight
            x_grad = torch.mm(rows, right).view(x.shape)
        return x_grad, *_parameter_gradients(ctx, rows, x), None, None, None, None, None


def row_part(x: Tensor, weight: Tensor, bias: Tensor | None, transposed: bool) -> Tensor:
    """Return one rank's product of a row layer, before the sum over the ranks.

    Args:
        x: The rank's inputs, shape (..., own inputs).
        weight: The rank's columns of the weight, shape (out, own inputs), or its transpose.
        bias: The bias to add, or None. Only one rank may add it.
        transposed: Whether the weight is (in, out).

    Returns:
        A tensor of shape (..., out).
    """

    def new(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        return x.new_empty(shape, dtype=dtype)

    found: Tensor = _Row.apply(x, weight, bias, transposed, True, new, _same, _same)  # type: ignore[no-untyped-call]
    return found


def _same(x: Tensor) -> Tensor:
    return x


def row(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    group: TensorGroup,
    transposed: bool,
    what: str,
    *,
    shards_tokens: bool = False,
) -> Tensor:
    """Return the outputs of a row layer: the sum of every rank's product, plus the bias.

    The first rank adds the bias to its product.

    Args:
        x: This rank's inputs, shape (..., own inputs).
        weight: This rank's columns of the weight, shape (out, own inputs), or its transpose.
        bias: The bias, whole on every rank, or None.
        group: The tensor-parallel ranks over which products are summed.
        transposed: Whether the weight is (in, out).
        what: The name of the layer, for messages.
        shards_tokens: Whether to return only this rank's tokens (reduce-scatter): (batch, tokens,
            in) becomes (batch, tokens / ranks, out). Backward all-gathers them, so it is collective
            too.

    Returns:
        A tensor of shape (..., out), equal on every rank unless `shards_tokens`.

    Note:
        Collective and blocking: every rank must call it.
    """

    def finish(part: Tensor) -> Tensor:
        total = group.sum_own_tokens(part, what) if shards_tokens else group.sum(part, what)
        return total.wait()

    def restore(grad: Tensor) -> Tensor:
        return group.gather_tokens(grad, f"the gradient of {what}") if shards_tokens else grad

    found: Tensor = _Row.apply(  # type: ignore[no-untyped-call]
        x, weight, bias, transposed, group.index == 0, group.take, finish, restore
    )
    return found


def leave(x: Tensor, group: TensorGroup, what: str) -> Tensor:
    """Return the sum of every rank's tensor. Backward passes the gradient on unchanged.

    Args:
        x: This rank's part of the sum, with the same shape and dtype on every rank.
        group: The tensor-parallel ranks over which the tensors are summed.
        what: The name of the sum, for messages.

    Returns:
        A new tensor with the shape and dtype of `x`, equal on every rank.

    Note:
        Collective and blocking: every rank must call it.
    """
    return with_backward(
        lambda x: group.sum(group.take(x.shape, x.dtype).copy_(x), what).wait(), _unchanged, x
    )


def _unchanged(grad: Tensor) -> tuple[Tensor]:
    return (grad,)


def gather(x: Tensor, group: TensorGroup, columns: Split, what: str) -> Tensor:
    """All-gather the columns of every rank.

    Backward returns this rank's columns of the gradient, which must be equal on every rank.

    Args:
        x: This rank's columns, shape (..., own columns).
        group: The tensor-parallel ranks that hold the other columns.
        columns: How the columns are split over the ranks.
        what: The name of the collective, for messages.

    Returns:
        A tensor of shape (..., all columns), in the order of the whole model.

    Note:
        Collective and blocking: every rank must call it.
    """
    own = columns.ranges[group.index]
    widths = columns.widths
    in_order = all(len(ranges) == 1 for ranges in columns.ranges)

    def forward(x: Tensor) -> Tensor:
        parts = group.all_gather(flat(x), widths, what)
        whole = torch.cat(parts, 1) if in_order else put_together(parts, columns, 1)
        return whole.view(*x.shape[:-1], -1)

    return with_backward(forward, lambda grad: (taken(grad, -1, own),), x)


def scatter(x: Tensor, group: TensorGroup, widths: Sequence[int], what: str) -> Tensor:
    """Return this rank's columns of a tensor that is whole on every rank.

    Forward sends nothing. Backward all-gathers the gradient.

    Args:
        x: The whole tensor, shape (..., all columns).
        group: The tensor-parallel ranks over which the columns are split.
        widths: The number of columns of each rank.
        what: The name of the collective in backward, for messages.

    Returns:
        A contiguous tensor of shape (..., own columns).

    Note:
        Backward is collective and blocking: every rank must run it.
    """

    def forward(x: Tensor) -> Tensor:
        return x.narrow(-1, sum(widths[: group.index]), widths[group.index]).contiguous()

    def backward(grad: Tensor) -> tuple[Tensor]:
        parts = group.all_gather(flat(grad), widths, what)
        return (torch.cat(parts, 1).view(*grad.shape[:-1], -1),)

    return with_backward(forward, backward, x)


def own_tokens(x: Tensor, group: TensorGroup) -> Tensor:
    """Return a contiguous copy of this rank's tokens. It is not differentiable.

    Args:
        x: All tokens, shape (batch, tokens, n).
        group: The tensor-parallel ranks over which the tokens are split.

    Returns:
        A tensor of shape (batch, tokens / ranks, n).
    """
    own = x.shape[1] // group.size
    return x.narrow(1, group.index * own, own).clone(memory_format=torch.contiguous_format)


def shard(x: Tensor, group: TensorGroup, what: str) -> Tensor:
    """Return this rank's tokens of a tensor that is whole on every rank.

    Forward sends nothing. Backward all-gathers the gradient.

    Args:
        x: All tokens, shape (batch, tokens, n); the number of ranks divides `tokens`.
        group: The tensor-parallel ranks over which the tokens are split.
        what: The name of the module that reads `x`, for messages.

    Returns:
        A tensor of shape (batch, tokens / ranks, n).

    Note:
        Backward is collective and blocking: every rank must run it.
    """
    name = f"the gradient into {what}"
    return with_backward(
        lambda x: own_tokens(x, group), lambda grad: (group.gather_tokens(grad, name),), x
    )


def unshard(x: Tensor, group: TensorGroup, what: str) -> Tensor:
    """All-gather a tensor that is sharded over tokens.

    Backward returns this rank's tokens of the gradient, which must be equal on every rank.

    Args:
        x: This rank's tokens, shape (batch, tokens / ranks, n).
        group: The tensor-parallel ranks that hold the other tokens.
        what: The name of the module that returned `x`, for messages.

    Returns:
        A tensor of shape (batch, tokens, n).

    Note:
        Collective and blocking: every rank must call it.
    """
    return with_backward(
        lambda x: group.gather_tokens(x, f"tokens of {what}"),
        lambda grad: (own_tokens(grad, group),),
        x,
    )
