"""Cross entropy of an output layer's logits in tiles of tokens, without all logits.

The gradients are computed in forward, while the logits of a tile exist. Backward multiplies them by
the incoming gradient, which includes any factor of the loss, and passes the weight's gradient to
autograd once. A weight's gradient is therefore reduced once, and backward reads neither the weight
nor logits. The loop over tiles::

    for each tile:   z = x W^T + b     in the dtype of x
                     p = softmax(z)    in place, in fp32
                     loss += -log p[target],   d = p - [word is the target]
                     gx = d W,   gW += d^T x,   gb += sum of d     gW and gb in fp32

The kept gradients are those of the loss's sum over tokens, which do not shrink with the number of
tokens; a mean divides the sum afterwards. Along the axis "tp", each rank computes the logits of its
part of the vocabulary. For each tile the ranks exchange the values defined in `parallel/loss.py`,
and gx is summed over the ranks once.

`sum_at_once` does the same for any function that returns a loss, with autograd instead of formulas.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from ..base.device import has_gradient_hooks, keeps_graph
from ..base.errors import NotBuiltError, UsageError
from ..base.nested import Args, Kwargs
from ..base.quantities import ceil_div
from ..parallel.layers import Layer, TensorAxis, become, cast_for_autocast
from ..parallel.loss import (
    CAUSAL,
    check_targets,
    joined,
    labels_of_calls,
    loss_name,
    places,
    without_logits,
)
from ..sharding.hooks import Hook
from ..sharding.param_group import ParamGroup
from ..sharding.runtime import Runtime
from ..sharding.saved_tensor_hooks import others_see
from ..sharding.sharded_parameter import ShardedParameter, owner_of
from ..sharding.step_state import Phase
from .tiles import check_rows, each_tile

# Factor of gradients that are kept in fp16: a word's probability is often too small for fp16
HALF_FACTOR = 256.0
# Parts in which a tile is added to the weight's gradient, if that needs a temporary product
WORD_BLOCKS = 8


@dataclass(frozen=True)
class LossSettings:
    """Settings of a loss that is computed in tiles of tokens.

    Attributes:
        rows: Number of tokens whose logits exist at the same time.
        ignored: The target of a token that does not count.
    """

    rows: int
    ignored: int = -100


def tiled_cross_entropy(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    settings: LossSettings,
    layer: Layer | None = None,
) -> Tensor:
    """Compute the cross entropy of the logits x W^T + b without holding all logits.

    The gradients are computed in forward, one tile of tokens at a time, for those of x, weight and
    bias that need one.

    Args:
        x: Inputs of the output layer, shape ``(..., width)``.
        weight: Shape ``(vocabulary, width)``.
        bias: Shape ``(vocabulary,)``, or None.
        targets: Shape ``(...)``, vocabulary indices or ``settings.ignored``.
        settings: Number of tokens per tile, and the target of tokens that do not count.
        layer: The tensor-parallel layer of which `weight` is this rank's shard; None if the weight
            is whole.

    Returns:
        The sum of the loss over tokens, a scalar in fp32.

    Raises:
        UsageError: The number of targets differs from that of tokens, a target on a CPU is outside
            of the vocabulary, or `settings.rows` is less than 1. On a GPU such a target is not
            detected.

    Note:
        With `layer`, collective: every rank of its axis must call it. The result is equal on all of
        them.
    """
    check_rows(settings.rows, "tiled_loss")
    split = None if layer is None else layer.part.weight
    words = len(weight) if split is None else split.shape[split.dim]
    check_targets(targets, words, settings.ignored)
    rows = cast_for_autocast(x.reshape(-1, x.shape[-1]))
    weight = weight.to(rows.dtype)
    bias = bias.to(rows.dtype) if bias is not None else None
    flat = targets.reshape(-1)
    if len(flat) != len(rows):
        raise UsageError(
            f"{len(flat)} targets for {len(rows)} tokens.",
            "Each token has one target, and its logits exist only while its tile is computed.",
            "pass labels of every token, and leave logits_to_keep out in training.",
        )
    with torch.no_grad(), torch.autocast(x.device.type, enabled=False):
        loop = _Loop(rows, weight, bias, flat, settings, _Ranks(layer))
        total = loop.run()
    found: Tensor = _Known.apply(total, (loop.gx, loop.gw, loop.gb), rows, weight, bias)  # type: ignore[no-untyped-call]
    return found


class _Known(torch.autograd.Function):
    """A number with known gradients, one for each tensor, or None for no gradient.

    A gradient in fp16 is multiplied by `HALF_FACTOR`.
    """

    @staticmethod
    def forward(
        ctx: Any, found: Tensor, kept: tuple[Tensor | None, ...], *tensors: Tensor | None
    ) -> Tensor:
        ctx.dtypes = [None if each is None else each.dtype for each in tensors]
        ctx.save_for_backward(*kept)
        return found

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        in_place = not keeps_graph()
        scale = grad.float()
        found = [
            None if kept is None else _times(kept, scale, dtype, in_place=in_place)
            for kept, dtype in zip(ctx.saved_tensors, ctx.dtypes, strict=True)
        ]
        return None, None, *found


def _times(kept: Tensor, scale: Tensor, dtype: torch.dtype, *, in_place: bool) -> Tensor:
    """Multiply a kept gradient by the incoming one, in fp32, block by block.

    `in_place` means that the kept gradient is not needed again.
    """
    found = kept if in_place and kept.dtype == dtype else torch.empty_like(kept, dtype=dtype)
    if kept.dtype == torch.float16:
        scale = scale / HALF_FACTOR
    for source, into in zip(
        kept.tensor_split(WORD_BLOCKS), found.tensor_split(WORD_BLOCKS), strict=True
    ):
        into.copy_(source.float() * scale)
    return found


class _Ranks:
    """Communication with the ranks that hold the other words; none on a single rank."""

    def __init__(self, layer: Layer | None) -> None:
        self.first = 0
        self._axis: TensorAxis | None = None
        if layer is not None:
            assert isinstance(layer.axis, TensorAxis)
            self._axis = layer.axis
            self.first = sum(layer.part.weight.widths[: self._axis.group.index])

    def gathered(self, own: Tensor) -> list[Tensor]:
        return [own] if self._axis is None else self._axis.all_gather([own], "the loss of a tile")

    def summed(self, partial: Tensor) -> Tensor:
        if self._axis is None:
            return partial
        group = self._axis.group
        page = group.take(partial.shape, partial.dtype).copy_(partial)
        return group.sum(page, "the gradient into the head").wait()


class _Loop:
    """One pass over the tokens.

    Attributes:
        gx: The gradient of x for the summed loss, times `factor`; None if it is not needed.
        gw: The gradient of the weight; None if it is not needed.
        gb: The gradient of the bias; None if it is not needed.
    """

    def __init__(
        self,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        settings: LossSettings,
        ranks: _Ranks,
    ) -> None:
        self.x = x
        self.weight = weight
        self.bias = bias
        self.targets = targets
        self.ranks = ranks
        self.settings = settings
        self.factor = HALF_FACTOR if x.dtype == torch.float16 else 1.0
        self.gx = torch.empty_like(x) if x.requires_grad else None
        self.gw = torch.zeros_like(weight, dtype=torch.float32) if weight.requires_grad else None
        self.gb: Tensor | None = None
        if bias is not None and bias.requires_grad:
            self.gb = torch.zeros_like(bias, dtype=torch.float32)
        rows = min(settings.rows, len(x))
        self._logits = x.new_empty(rows, len(weight))
        self._values = self._logits
        if x.dtype != torch.float32:
            self._values = torch.empty_like(self._logits, dtype=torch.float32)

    def run(self) -> Tensor:
        """Return the sum of all tokens' losses, in fp32."""
        total = torch.zeros((), dtype=torch.float32, device=self.x.device)
        for start in range(0, len(self.x), self.settings.rows):
            total += self._tile(start, min(start + self.settings.rows, len(self.x)))
        if self.gx is not None:
            self.gx = self.ranks.summed(self.gx)
        return total

    def _tile(self, start: int, stop: int) -> Tensor:
        x = self.x[start:stop]
        targets = self.targets[start:stop]
        logits = self._logits[: stop - start]
        values = self._values[: stop - start]
        torch.mm(x, self.weight.t(), out=logits)
        if self.bias is not None:
            logits += self.bias
        if values is not logits:
            values.copy_(logits)
        counts = targets != self.settings.ignored
        highest = values.amax(1)
        inside, place = places(targets, self.ranks.first, values.shape[1])
        target = values.gather(1, place[:, None])[:, 0].masked_fill_(~inside, 0.0)
        values.sub_(highest[:, None]).exp_()
        lse, target = joined(self.ranks.gathered(torch.stack([highest, values.sum(1), target], 1)))
        if self.gx is not None or self.gw is not None or self.gb is not None:
            values.mul_((torch.exp(highest - lse) * counts * self.factor)[:, None])
            values.scatter_add_(
                1, place[:, None], (inside & counts).float().mul_(-self.factor)[:, None]
            )
            self._add_gradients(x, logits, values, slice(start, stop))
        return torch.where(counts, lse - target, 0.0).sum()

    def _add_gradients(self, x: Tensor, logits: Tensor, values: Tensor, tokens: slice) -> None:
        if self.gb is not None:
            self.gb += values.sum(0).div_(self.factor)
        if values is not logits:
            logits.copy_(values)
        if self.gx is not None:
            torch.mm(logits, self.weight, out=self.gx[tokens])
        if self.gw is None:
            return
        if values is logits:
            self.gw.addmm_(values.t(), x)
            return
        for into, words in zip(
            self.gw.tensor_split(WORD_BLOCKS), logits.tensor_split(WORD_BLOCKS, 1), strict=True
        ):
            into.add_(torch.mm(words.t(), x), alpha=1.0 / self.factor)


# -- any function that returns a loss


def sum_at_once(
    function: Callable[..., Tensor],
    tiles: int,
    weights: Sequence[Tensor],
    x: Tensor,
    *others: Tensor,
) -> Tensor | None:
    """Sum a function's results for parts of tensors, and compute the gradients in forward.

    The gradients of `x` and of the weights are kept, the latter in fp32, and backward multiplies
    them by the incoming gradient.

    The gradients cannot be computed before backward in these cases:

    - The function reads other tensors that need a gradient.
    - An engine's hooks would mistake the computation for the backward.
    - A checkpoint is being computed.
    - A tensor is in fp16, because the loss scale would be applied too late.

    Args:
        function: A function that returns one number for a part of each tensor.
        tiles: Number of parts. The last parts may be shorter, and there are fewer for fewer rows.
        weights: The weights that the function reads.
        x: The tensor with a gradient, divided along its first dimension.
        *others: Tensors of the same length without gradient, divided in the same way.

    Returns:
        The sum, or None if the gradients cannot be computed before backward. The function may have
        been called once in this case.
    """
    weights = list({id(each): each for each in weights}.values())
    leaves = (x, *weights)
    if (
        not weights
        or any(each.requires_grad for each in others)
        or not all(map(_is_kept_whole, leaves))
    ):
        return None
    if not torch.is_grad_enabled() or torch.compiler.is_compiling() or others_see():
        return None
    if not all(map(_is_out_of_the_way, weights)):
        return None
    kept: list[Tensor | None] = [None] * len(weights)
    slices = list[Tensor]()
    found = list[Tensor]()
    for part, *own in zip(*(each.detach().chunk(tiles) for each in (x, *others)), strict=True):
        leaf = part.requires_grad_()
        loss = function(leaf, *own)
        if not found and (loss.numel() != 1 or not _comes_from(loss, [leaf, *weights])):
            return None
        gx, *grads = torch.autograd.grad(loss, [leaf, *weights], allow_unused=True)
        if gx is None:
            gx = torch.zeros_like(part)
        slices.append(gx)
        for number, grad in enumerate(grads):
            if grad is not None:
                kept[number] = _added(kept[number], grad, weights[number])
        found.append(loss.detach())
        del loss, gx, grads  # Free them before those of the next tile are computed
    total: Tensor = _Known.apply(torch.stack(found).sum(), (torch.cat(slices), *kept), *leaves)  # type: ignore[no-untyped-call]
    return total


def _added(total: Tensor | None, grad: Tensor, weight: Tensor) -> Tensor:
    return (
        torch.empty_like(weight, dtype=torch.float32).copy_(grad)
        if total is None
        else total.add_(grad)
    )


def _is_kept_whole(tensor: Tensor) -> bool:
    """Return whether fp32 can hold the tensor's gradient before the loss is scaled."""
    return tensor.dtype in (torch.float32, torch.bfloat16) and tensor.dim() > 0


def _is_out_of_the_way(weight: Tensor) -> bool:
    """Return whether no hook would mistake a gradient in forward for the backward's.

    In a wrapped model this holds for weights of the root during its forward, because an engine's
    hooks are on the outputs of units.
    """
    if (
        not weight.is_leaf
        or not weight.requires_grad
        or has_gradient_hooks(weight, besides=(Hook,))
    ):
        return False
    owner = owner_of(weight)
    if owner is None:
        return True
    runtime: Runtime | None = owner.runtime() if isinstance(owner, ParamGroup) else None
    if (
        runtime is None
        or isinstance(weight, ShardedParameter)
        or {"tp", "pp"} & runtime.comm.along.keys()
    ):
        return False
    is_forward = runtime.step.phase is Phase.FORWARD and bool(runtime.step.active)
    # A unit is in the autograd graph only if it has trainable weights
    shows = all(any(group.trainable for group in unit.groups) for unit in runtime.units)
    return is_forward and shows and owner in runtime.root.groups


def _comes_from(loss: Tensor, leaves: Sequence[Tensor]) -> bool:
    """Return whether the gradient of a number ends in these tensors and nowhere else."""
    known = {id(each) for each in leaves}
    seen = set[Any]()
    left = [loss.grad_fn]
    while left:
        node = left.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        leaf = getattr(node, "variable", None)
        if leaf is not None and id(leaf) not in known:
            return False
        left += [before for before, _ in node.next_functions]
    return loss.grad_fn is not None


# -- models of transformers


class TiledHead(nn.Module):
    """An output layer that returns the loss instead of logits in training.

    The class is not instantiated: the output layer's class is replaced by a subclass of this one
    and its own.

    Attributes:
        tiles: Computes the loss.
    """

    tiles: TiledLoss

    def forward(self, x: Tensor) -> Tensor:
        """Return the loss of the current forward, or the logits if it needs no loss."""
        plain = super().forward
        return plain(x) if self.tiles.wanted is None else self.tiles.compute(self, plain, x)


@dataclass(frozen=True)
class _Wanted:
    """The arguments that the loss function of the current forward will receive."""

    labels: Tensor
    shift_labels: Tensor | None
    items: Any


@dataclass(eq=False)
class TiledLoss:
    """Replacement of a causal model's loss function; the output layer computes the loss.

    The output layer is called once, at its usual place in the forward, so its weights are gathered
    as usual.

    Attributes:
        settings: Number of tokens per tile, and the target of tokens that do not count.
        whole: The model's original loss function, which is used in evaluation.
        wanted: The labels of the current forward until the output layer was called; None if the
            forward needs no loss.
    """

    settings: LossSettings
    whole: Callable[..., Tensor]
    wanted: _Wanted | None = None
    _found: tuple[_Wanted, Tensor] | None = None

    def before(
        self,
        labels_in: Callable[[Args, Kwargs], Any],
        module: nn.Module,
        args: Args,
        kwargs: Kwargs,
    ) -> None:
        """Record the labels if this forward needs a loss with gradients.

        It is registered as a forward pre-hook of the model, with the first argument bound.

        Args:
            labels_in: Returns the labels among the arguments of the forward.
            module: The model whose forward begins.
            args: Positional arguments of the forward.
            kwargs: Keyword arguments of the forward.
        """
        self.wanted = self._found = None
        labels = labels_in(args, kwargs)
        if labels is not None and module.training and torch.is_grad_enabled():
            self.wanted = _Wanted(
                labels, kwargs.get("shift_labels"), kwargs.get("num_items_in_batch")
            )

    def compute(self, head: nn.Module, plain: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        """Compute the loss that transformers defines for causal models, in tiles of tokens.

        Args:
            head: The output layer, whose weight is read.
            plain: The original forward of the output layer.
            x: The input of the output layer, shape ``(samples, tokens, width)``.

        Returns:
            The mean loss over tokens, or their sum over `num_items_in_batch`, a scalar.
        """
        wanted = self.wanted
        self.wanted = None
        assert wanted is not None
        targets = wanted.shift_labels
        if targets is None:
            targets = F.pad(wanted.labels, (0, 1), value=self.settings.ignored)[..., 1:]
        targets = targets.to(x.device)
        total = self._sum(head, plain, x, targets)
        items = (targets != self.settings.ignored).sum() if wanted.items is None else wanted.items
        loss = total / (items.to(total.device) if isinstance(items, Tensor) else items)
        self._found = (wanted, loss)
        return loss

    def _sum(
        self, head: Any, plain: Callable[[Tensor], Tensor], x: Tensor, targets: Tensor
    ) -> Tensor:
        if isinstance(head, Layer):
            if isinstance(head.axis, TensorAxis):
                head.axis.leave()
            return tiled_cross_entropy(x, head.weight, head.bias, targets, self.settings, head)
        # A subclass of `nn.Linear` may have its own forward
        if getattr(plain, "__func__", None) is nn.Linear.forward:
            return tiled_cross_entropy(x, head.weight, head.bias, targets, self.settings)

        def one(part: Tensor, own: Tensor) -> Tensor:
            return F.cross_entropy(
                plain(part).float(), own, ignore_index=self.settings.ignored, reduction="sum"
            )

        rows = x.reshape(-1, x.shape[-1])
        tiles = ceil_div(len(rows), self.settings.rows)
        return torch.stack(each_tile(one, max(tiles, 1), rows, targets.reshape(-1), dim=0)).sum()

    def __call__(self, logits: Tensor, labels: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Return the loss that the output layer has computed.

        In evaluation, the original loss function is called.

        Args:
            logits: What the output layer returned: the loss in training, logits otherwise.
            labels: The labels, which must be those of the forward.
            *args: Other arguments of the original loss function.
            **kwargs: Other arguments of the original loss function.

        Raises:
            UsageError: The model has changed its logits or its labels before the loss.
        """
        if self._found is None:
            return self.whole(logits, labels, *args, **kwargs)
        wanted, loss = self._found
        given = (labels, kwargs.get("shift_labels"), kwargs.get("num_items_in_batch"))
        meant = (wanted.labels, wanted.shift_labels, wanted.items)
        if logits is not loss or any(
            mine is not theirs for mine, theirs in zip(meant, given, strict=True)
        ):
            raise UsageError(
                "the model changes its logits or its labels before the loss.",
                "activation_checkpointing.tiled_loss computes the loss where the head is, of what "
                "the head is given.",
                "leave tiled_loss out for this model.",
            )
        return loss

    def after(self, module: nn.Module, args: Args, output: Any) -> Any:
        """Return the model's output without logits, because they were not computed.

        It is registered as a forward hook of the model.

        Args:
            module: The model whose forward ends.
            args: Positional arguments of the forward.
            output: The output of the forward, in which the loss is in place of the logits.

        Returns:
            The output, without logits if the loss was computed in tiles.
        """
        found = self._found
        self.wanted = None
        self._found = None
        return output if found is None else without_logits(output, found[1])


def tile_loss(model: nn.Module, rows: int) -> None:
    """Make a causal language model of transformers compute its training loss in tiles.

    A tile is a range of tokens. In training with labels, the output layer computes the loss of one
    tile at a time, so the logits of all tokens never exist at the same time. The output of the
    model then contains no logits. Such a forward raises `UsageError` if the model changes its
    logits or its labels before the loss. Evaluation is not changed. Call this function after layers
    are split along "tp" and sequences along "sp", and before the model is wrapped. A second call
    for the same model sets the number of tokens.

    Args:
        model: The model, which is changed in place. The function replaces its loss function and the
            class of its output layer, and registers two forward hooks.
        rows: Number of tokens per tile, at least 1.

    Raises:
        NotBuiltError: The model is not a causal language model of transformers, or its output layer
            cannot be computed in tiles.
        UsageError: `rows` is less than 1.
    """
    check_rows(rows, "tiled_loss")
    for each in model.modules():
        if isinstance(each, TiledHead):  # from an earlier call
            each.tiles.settings = LossSettings(rows)
            return
    owner = next((each for each in model.modules() if loss_name(each) == CAUSAL), None)
    head: Any = owner.get_output_embeddings() if owner is not None else None  # type: ignore[operator]
    if owner is None or head is None:
        raise NotBuiltError(
            f"activation_checkpointing.tiled_loss: {type(model).__name__} has no loss that is "
            "computed where its head is.",
            "Models of transformers that pass their logits to the loss for causal models do.",
            "leave it out, and call deepseek_zero.activations.tiled_loss.tiled_cross_entropy where "
            "the model's forward computes its loss.",
        )
    if isinstance(head, Layer) and (not isinstance(head.axis, TensorAxis) or head.part.transposed):
        raise NotBuiltError(
            f"activation_checkpointing.tiled_loss for the head '{head.part.name}' as it is split.",
            "Tiles are computed by layers whose weight is (words, width), on ranks of their own.",
            "leave it out.",
        )
    loss = TiledLoss(LossSettings(rows), owner.loss_function)  # type: ignore[arg-type]
    owner.loss_function = loss  # type: ignore[assignment]
    become(head, TiledHead, tiles=loss)
    owner.register_forward_pre_hook(partial(loss.before, labels_of_calls(owner)), with_kwargs=True)
    owner.register_forward_hook(loss.after, always_call=True)
