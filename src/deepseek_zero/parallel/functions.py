"""Autograd functions of layers that several ranks compute together.

    column   y_i = x W_i^T + b_i          each rank its own outputs; x is whole on every rank
    row      y = sum_i x_i W_i^T + b      each rank its own inputs; y is whole on every rank
    enter    y = x                        gradients: the sum over the ranks; of x, not of a layer
    gather   y = (y_1, ..., y_T)          gradients: the own columns

Where activations are sharded over tokens between the layers, `enter` gathers the tokens and its sum
is of the own ones; a row product's sum is of the own tokens, and its backward gathers them. `shard`
and `unshard` are at the ends.

The first column layer that reads a tensor enters it (layers.py); the layers beside it read the same
entered tensor. In backward they add their gradients for it into one buffer, product by product, and
the last one starts the sum before it computes the gradient of its weight.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ..base.errors import NotBuiltError
from ..planner.split import Split
from .cuts import put_together, taken
from .group import Sum, TensorGroup

# -- products: (rows, in) x weight, which is (out, in), or (in, out) where `transposed`


def product(
    rows: Tensor, weight: Tensor, bias: Tensor | None, transposed: bool, out: Tensor | None = None
) -> Tensor:
    """Return rows times the weight, (rows, out)."""
    right = weight if transposed else weight.t()
    return (
        torch.mm(rows, right, out=out) if bias is None else torch.addmm(bias, rows, right, out=out)
    )


def weight_gradient(grad: Tensor, rows: Tensor, transposed: bool) -> Tensor:
    """Return the gradient of a weight, in its own orientation. grad: (rows, out)."""
    return torch.mm(rows.t(), grad) if transposed else torch.mm(grad.t(), rows)


def flat(x: Tensor) -> Tensor:
    """Return (..., n) as a contiguous (rows, n)."""
    return x.reshape(-1, x.shape[-1]).contiguous()


# -- entering


class Partials(Protocol):
    """Where the gradients for one entered tensor are added up on one rank."""

    def buffer(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Return a buffer for the first of them."""
        ...

    def complete(self, partial: Tensor) -> None:
        """Take over what the layers' gradients add up to."""
        ...


class Entry:
    """One tensor that column layers read, and their gradients for it, which add up in one buffer.

    readers: layers that have read it in forward. When as many have added their gradient, `partials`
    takes the buffer.
    """

    def __init__(self, partials: Partials) -> None:
        self.readers = self._heard = 0
        self._partials = partials
        self._buffer = None

    _buffer: Tensor | None

    def add(self, grad: Tensor, weight: Tensor, transposed: bool) -> None:
        """Add one layer's gradient for the input. grad: (rows, out)."""
        left = weight.t() if transposed else weight
        if self._buffer is None:
            self._buffer = self._partials.buffer((grad.shape[0], left.shape[1]), grad.dtype)
            torch.mm(grad, left, out=self._buffer)
        else:
            self._buffer.addmm_(grad, left)
        self._heard += 1
        if self._heard == self.readers:
            self.close()

    def close(self) -> None:
        """Hand on what has come, if something has: every layer that will be heard has been."""
        if self._buffer is not None:
            buffer = self._buffer
            self._buffer = None
            self._heard = 0
            self._partials.complete(buffer)


class GroupPartials:
    """Sums over the ranks of a group; of the own tokens alone, where `tokens` is their (batch,
    tokens, width).
    """

    def __init__(self, group: TensorGroup, what: str, tokens: Sequence[int] | None = None) -> None:
        self._group = group
        self._what = what
        self._tokens = tokens
        self._sum: Sum | None = None

    def buffer(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        return self._group.take(shape, dtype)

    def complete(self, partial: Tensor) -> None:
        if self._tokens is None:
            self._sum = self._group.sum(partial, self._what)
        else:
            self._sum = self._group.sum_own_tokens(partial.view(*self._tokens), self._what)

    def wait(self) -> Tensor | None:
        found = self._sum
        self._sum = None
        return None if found is None else found.wait()


class _Enter(torch.autograd.Function):
    """Layers return no gradient for the entered tensor (`Entry.add`): this node runs when all of
    them have run.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, entry: Entry, partials: GroupPartials) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.entry = entry
        ctx.partials = partials
        ctx.shape = x.shape
        return x.view_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor | None) -> tuple[Tensor | None, None, None]:
        assert grad is None, "only column layers read an entered tensor"
        ctx.entry.close()
        total = ctx.partials.wait()
        return None if total is None else total.view(ctx.shape), None, None


def enter(x: Tensor, group: TensorGroup, what: str) -> tuple[Tensor, Entry | None]:
    """Return a tensor for column layers to read, and its entry; x itself and None where x needs no
    gradient.
    """
    if not (torch.is_grad_enabled() and x.requires_grad):
        return x, None
    partials = GroupPartials(group, f"the gradient into {what}")
    entry = Entry(partials)
    return _Enter.apply(x, entry, partials), entry  # type: ignore[no-untyped-call]


class _EnterTokens(torch.autograd.Function):
    """As `_Enter`, of a tensor that is sharded over tokens."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, whole: Tensor, entry: Entry, partials: GroupPartials
    ) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.entry = entry
        ctx.partials = partials
        ctx.shape = x.shape
        return whole.view_as(whole)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor | None) -> tuple[Tensor | None, None, None, None]:
        assert grad is None, "only column layers read an entered tensor"
        ctx.entry.close()
        total = ctx.partials.wait()
        return None if total is None else total.view(ctx.shape), None, None, None


def enter_tokens(x: Tensor, group: TensorGroup, what: str) -> tuple[Tensor, Entry | None]:
    """Return all tokens of a sharded tensor for column layers to read, and its entry as `enter`
    does.

    x: (batch, tokens / ranks, n). Collective; waits.
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
    partials = GroupPartials(group, f"the gradient into {what}", whole.shape)
    entry = Entry(partials)
    return _EnterTokens.apply(x, whole, entry, partials), entry  # type: ignore[no-untyped-call]


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
        needs = ctx.needs_input_grad
        rows = flat(grad)
        if ctx.entry is not None:
            ctx.entry.add(rows, weight, ctx.transposed)
        weight_grad = weight_gradient(rows, flat(x), ctx.transposed) if needs[1] else None
        return None, weight_grad, rows.sum(0) if needs[2] else None, None, None


def column(
    x: Tensor, weight: Tensor, bias: Tensor | None, entry: Entry | None, transposed: bool
) -> Tensor:
    """Return this rank's outputs. x: (..., in), entered; `entry` from `enter`. Local."""
    found: Tensor = _Column.apply(x, weight, bias, entry, transposed)  # type: ignore[no-untyped-call]
    return found


class _Row(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        group: TensorGroup,
        transposed: bool,
        what: str,
        shards_tokens: bool,
    ) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.transposed = transposed
        ctx.tokens = (group, what) if shards_tokens else None
        outputs = weight.shape[1 if transposed else 0]
        part = group.take((*x.shape[:-1], outputs), x.dtype)
        own_bias = bias if group.index == 0 else None
        product(flat(x), weight, own_bias, transposed, part.view(-1, outputs))
        if not shards_tokens:
            return group.sum(part, what).wait()
        return group.sum_own_tokens(part, what).wait()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        if ctx.tokens is not None:
            group, what = ctx.tokens
            grad = group.gather_tokens(grad, f"the gradient of {what}")
        return *row_gradients(ctx, grad), None, None, None, None


def row_gradients(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Return the gradients of a row product's input, weight and bias: no rank needs another for
    them.
    """
    x, weight = ctx.saved_tensors
    needs = ctx.needs_input_grad
    rows = flat(grad)
    x_grad = None
    if needs[0]:
        right = weight.t() if ctx.transposed else weight
        x_grad = torch.mm(rows, right).view(x.shape)
    weight_grad = weight_gradient(rows, flat(x), ctx.transposed) if needs[1] else None
    return x_grad, weight_grad, rows.sum(0) if needs[2] else None


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
    """Return the sum of every rank's product, and the bias once (in the first rank's part).
    Collective; waits.

    x: (..., in), this rank's inputs. shards_tokens: of x (batch, tokens, in) the sum is of the own
    tokens alone, (batch, tokens / ranks, out); backward gathers them, and is collective too.
    """
    found: Tensor = _Row.apply(  # type: ignore[no-untyped-call]
        x, weight, bias, group, transposed, what, shards_tokens
    )
    return found


class _Exit(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: TensorGroup, what: str) -> Tensor:
        return group.sum(group.take(x.shape, x.dtype).copy_(x), what).wait()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return grad, None, None


def leave(x: Tensor, group: TensorGroup, what: str) -> Tensor:
    """Return the sum of every rank's tensor; each gets the whole gradient. Collective; waits."""
    found: Tensor = _Exit.apply(x, group, what)  # type: ignore[no-untyped-call]
    return found


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: TensorGroup, columns: Split, what: str) -> Tensor:
        ctx.own = columns.ranges[group.index]
        widths = [sum(stop - start for start, stop in ranges) for ranges in columns.ranges]
        parts = group.all_gather(flat(x), widths, what)
        in_order = all(len(ranges) == 1 for ranges in columns.ranges)
        whole = torch.cat(parts, 1) if in_order else put_together(parts, columns, 1)
        return whole.view(*x.shape[:-1], -1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        return taken(grad, -1, ctx.own), None, None, None


def gather(x: Tensor, group: TensorGroup, columns: Split, what: str) -> Tensor:
    """Return every rank's columns, in the order of the whole. x: (..., own columns); the gradient
    must be equal on every rank. columns: how they lie over the ranks. Collective; waits.
    """
    found: Tensor = _Gather.apply(x, group, columns, what)  # type: ignore[no-untyped-call]
    return found


class _Scatter(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, group: TensorGroup, widths: Sequence[int], what: str
    ) -> Tensor:
        ctx.group = group
        ctx.widths = widths
        ctx.what = what
        return x.narrow(-1, sum(widths[: group.index]), widths[group.index]).contiguous()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        parts = ctx.group.all_gather(flat(grad), ctx.widths, ctx.what)
        return torch.cat(parts, 1).view(*grad.shape[:-1], -1), None, None, None


def scatter(x: Tensor, group: TensorGroup, widths: Sequence[int], what: str) -> Tensor:
    """Return this rank's columns of a tensor that is whole on every rank. Backward gathers:
    collective there; waits.
    """
    found: Tensor = _Scatter.apply(x, group, widths, what)  # type: ignore[no-untyped-call]
    return found


class _Shard(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: TensorGroup, what: str) -> Tensor:
        ctx.group = group
        ctx.what = what
        return own_tokens(x, group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return ctx.group.gather_tokens(grad, f"the gradient into {ctx.what}"), None, None


def own_tokens(x: Tensor, group: TensorGroup) -> Tensor:
    """Return a copy of this rank's tokens of (batch, tokens, n)."""
    own = x.shape[1] // group.size
    return x.narrow(1, group.index * own, own).clone(memory_format=torch.contiguous_format)


def shard(x: Tensor, group: TensorGroup, what: str) -> Tensor:
    """Return this rank's tokens of a tensor that is whole on every rank. Backward gathers:
    collective there; waits.

    x: (batch, tokens, n); the ranks divide the tokens.
    """
    found: Tensor = _Shard.apply(x, group, what)  # type: ignore[no-untyped-call]
    return found


class _Unshard(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: TensorGroup, what: str) -> Tensor:
        ctx.group = group
        return group.gather_tokens(x, f"tokens of {what}")

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return own_tokens(grad, ctx.group), None, None


def unshard(x: Tensor, group: TensorGroup, what: str) -> Tensor:
    """Return all tokens of a tensor that is sharded over them; the gradient must be equal on every
    rank.

    x: (batch, tokens / ranks, n). Collective; waits.
    """
    found: Tensor = _Unshard.apply(x, group, what)  # type: ignore[no-untyped-call]
    return found
