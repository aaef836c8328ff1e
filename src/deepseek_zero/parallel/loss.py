"""Cross entropy of logits that are split over the vocabulary: each rank keeps its own columns.

Of each token's logits a rank tells the others three numbers: their maximum, the sum of their
exponentials, and the target's logit where it has it; a fourth with label smoothing. No rank sees a
whole row, and backward sends nothing.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from ..base.errors import UsageError
from .layers import Axis, LayerPart

Reduction = Literal["mean", "sum", "none"]


@dataclass(frozen=True)
class Terms:
    """What is added up beside the target's likelihood; the words are
    `torch.nn.functional.cross_entropy`'s.

    weight: of each word of the vocabulary, whole on every rank. z_loss: times the squared logarithm
    of each token's sum of exponentials.
    """

    weight: Tensor | None = None
    ignore_index: int = -100
    reduction: Reduction = "mean"
    label_smoothing: float = 0.0
    z_loss: float = 0.0


def split_cross_entropy(
    logits: Tensor, targets: Tensor, axis: Axis, part: LayerPart, terms: Terms | None = None
) -> Tensor:
    """Return the cross entropy of split logits, in fp32: equal on every rank. Collective; waits.

    logits: (..., words), this rank's words of the vocabulary, of any float dtype; of the virtual
    axis all of them.
    targets: (...), words of the whole vocabulary, or `ignore_index`. part: of the layer that gave
    the logits. As in torch, a mean over no token is NaN.
    """
    terms = terms or Terms()
    rows = axis.own_columns(logits.reshape(-1, logits.shape[-1]), part)
    starts = [start for start, _ in rows]
    found: Tensor = _SplitCrossEntropy.apply(  # type: ignore[no-untyped-call]
        axis, starts, part.outputs.shape[0], targets.reshape(-1), terms, *(each for _, each in rows)
    )
    return found.view(targets.shape) if terms.reduction == "none" else found


class _SplitCrossEntropy(torch.autograd.Function):
    """logits: (tokens, words) of each rank that computes here, whose first word is number
    `starts[...]`.
    """

    @staticmethod
    def forward(
        ctx: Any,
        axis: Axis,
        starts: list[int],
        words: int,
        targets: Tensor,
        terms: Terms,
        *logits: Tensor,
    ) -> Tensor:
        own = [
            _tell(each, targets, start, terms) for each, start in zip(logits, starts, strict=True)
        ]
        lse, target, weighted = joined(axis.all_gather(own, "the loss"))
        counts = targets != terms.ignore_index
        weights = counts.float()
        if terms.weight is not None:
            weights = weights * terms.weight.float()[targets.masked_fill(~counts, 0)]
        smoothing = terms.label_smoothing
        all_weights = float(words) if terms.weight is None else float(terms.weight.float().sum())
        loss = (1.0 - smoothing) * weights * (lse - target)
        if smoothing:
            loss = loss + smoothing / words * counts * (all_weights * lse - weighted)
        divisor = torch.ones((), device=lse.device)
        z_scale = torch.full((), terms.z_loss, device=lse.device)
        if terms.reduction == "mean":
            divisor = weights.sum()
            z_scale = z_scale * divisor / counts.sum()
        if terms.z_loss:
            loss = loss + z_scale * counts * lse.square()
        # d loss / d logit = per_row * softmax - own * [word is the target] - even * weight of the
        # word
        per_row = (
            (1.0 - smoothing) * weights
            + smoothing / words * all_weights * counts
            + 2 * z_scale * counts * lse
        )
        ctx.save_for_backward(
            targets, lse, per_row / divisor, (1.0 - smoothing) * weights / divisor, *logits
        )
        ctx.starts = starts
        ctx.terms = terms
        ctx.even = smoothing / words * counts / divisor if smoothing else None
        if terms.reduction == "none":
            return loss
        return loss.sum() / divisor if terms.reduction == "mean" else loss.sum()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        targets, lse, per_row, own, *logits = ctx.saved_tensors
        found = []
        for each, start in zip(logits, ctx.starts, strict=True):
            # No name keeps the argument of exp: it is as large as the logits
            if each.dtype != torch.float32:
                slope = torch.exp(each.float().sub_(lse[:, None]))
            else:
                slope = torch.exp(each - lse[:, None])
            slope.mul_((per_row * grad)[:, None])
            inside, place = places(targets, start, each.shape[1])
            slope.scatter_add_(1, place[:, None], (-own * grad * inside)[:, None])
            if ctx.even is not None:
                even = ctx.even[:, None] * (grad[:, None] if grad.dim() else grad)
                weight = ctx.terms.weight
                if weight is None:
                    slope.sub_(even)
                else:
                    slope.sub_(even * weight.float()[start : start + each.shape[1]])
            found.append(slope.to(each.dtype))
        return None, None, None, None, None, *found


def places(targets: Tensor, start: int, words: int) -> tuple[Tensor, Tensor]:
    """Return where targets are among these words, and their places there (0 elsewhere)."""
    place = targets - start
    inside = (place >= 0) & (place < words)
    return inside, place.masked_fill(~inside, 0)


def _tell(logits: Tensor, targets: Tensor, start: int, terms: Terms) -> Tensor:
    """Return what a rank says of its words, (tokens, 3 or 4): maximum, sum of exponentials,
    target's logit, sum.
    """
    values = logits.float()
    highest = values.amax(1)
    shift = highest.masked_fill(highest == -torch.inf, 0.0)
    total = torch.exp(values - shift[:, None]).sum(1)
    inside, place = places(targets, start, logits.shape[1])
    target = values.gather(1, place[:, None])[:, 0].masked_fill(~inside, 0.0)
    said = [highest, total, target]
    if terms.label_smoothing:
        weight = terms.weight
        own = values if weight is None else values * weight.float()[start : start + logits.shape[1]]
        said.append(own.sum(1))
    return torch.stack(said, 1)


def joined(said: Sequence[Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    """Return by token the logarithm of all words' exponentials, the target's logit and the weighted
    sum of logits.
    """
    highest = torch.stack([each[:, 0] for each in said]).amax(0)
    shift = highest.masked_fill(highest == -torch.inf, 0.0)
    total = torch.zeros_like(highest)
    target = torch.zeros_like(highest)
    weighted = torch.zeros_like(highest)
    for each in said:
        total += each[:, 1] * torch.exp(each[:, 0] - shift)
        target += each[:, 2]
        if each.shape[1] == 4:
            weighted += each[:, 3]
    return total.log() + shift, target, weighted


# -- a model that computes its loss through `loss_function`


class SplitLoss:
    """Takes the place of a transformers model's loss function: reads split logits in training,
    others as before.

    is_causal: labels are shifted, so that each token's logits meet the next label.
    """

    def __init__(
        self, axis: Axis, part: LayerPart, whole: Callable[..., Tensor], *, is_causal: bool
    ) -> None:
        self.axis = axis
        self.part = part
        self.whole = whole
        self.is_causal = is_causal
        self.read: Tensor | None = None  # the logits of the forward under way

    def __call__(
        self,
        logits: Tensor,
        labels: Tensor,
        vocab_size: int | None = None,
        num_items_in_batch: Any = None,
        ignore_index: int = -100,
        shift_labels: Tensor | None = None,
        **kwargs: Any,
    ) -> Tensor:
        """Return the mean over tokens, or their sum over `num_items_in_batch`, as transformers
        does.
        """
        if not self.axis.splits_loss:
            if shift_labels is not None:
                kwargs["shift_labels"] = shift_labels
            return self.whole(
                logits, labels, vocab_size, num_items_in_batch, ignore_index, **kwargs
            )
        self.read = logits
        targets = labels if shift_labels is None else shift_labels
        if self.is_causal and shift_labels is None:
            targets = F.pad(labels, (0, 1), value=ignore_index)[..., 1:]
        reduction: Reduction = "mean" if num_items_in_batch is None else "sum"
        terms = Terms(ignore_index=ignore_index, reduction=reduction)
        loss = split_cross_entropy(logits, targets.to(logits.device), self.axis, self.part, terms)
        return loss if num_items_in_batch is None else loss / num_items_in_batch


CAUSAL = "ForCausalLMLoss"
MASKED = "ForMaskedLMLoss"


def split_loss(model: nn.Module, axis: Axis, head: nn.Module, part: LayerPart) -> bool:
    """Make a transformers model compute its training loss from split logits; return whether it is
    one that can.

    It can if its forward passes its logits to `self.loss_function`, which is one of transformers'
    for language models. In training with labels its output then has no logits.
    """
    owner = loss_owner(model, head)
    if owner is None:
        return False
    whole = owner.loss_function
    loss = SplitLoss(axis, part, whole, is_causal=whole.__name__ == CAUSAL)  # type: ignore[arg-type, union-attr]
    owner.loss_function = loss  # type: ignore[assignment]
    names = list(inspect.signature(owner.forward).parameters)
    place = names.index("labels") if "labels" in names else len(names)

    def before(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        by_place = args[place] if len(args) > place else None
        labels = kwargs.get("labels", by_place)
        # Ranks along sp are given those alone
        labels = kwargs.get("shift_labels") if labels is None else labels
        axis.splits_loss = module.training and torch.is_grad_enabled() and labels is not None
        loss.read = None

    def after(module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        was_split = axis.splits_loss
        axis.splits_loss = False
        logits = loss.read
        loss.read = None
        # A stage of a pipeline, left before its head
        if not was_split or output is None or isinstance(output, Tensor):
            return output
        if logits is None:
            raise UsageError(
                f"{type(module).__name__} did not pass the split logits of '{part.name}' to its "
                "loss function.",
                "No rank has whole ones.",
                'say tensor_parallel.loss: "gathered".',
            )
        if isinstance(output, tuple):
            return tuple(each for each in output if each is not logits)
        if dataclasses.is_dataclass(output) and not isinstance(output, type):
            return dataclasses.replace(output, logits=None)
        return output

    owner.register_forward_pre_hook(before, with_kwargs=True)
    owner.register_forward_hook(after, always_call=True)
    return True


def loss_owner(model: nn.Module, head: nn.Module) -> nn.Module | None:
    """Return the module whose forward passes the head's logits to a loss function that can read
    split ones, if any.
    """
    owner = next((each for each in model.modules() if _gives_logits(each, head)), None)
    return owner if owner is not None and loss_name(owner) in (CAUSAL, MASKED) else None


def loss_name(module: nn.Module) -> str:
    """Return the name of the loss function that a model of transformers passes its logits to; ""
    where it does not.
    """
    if not hasattr(type(module), "loss_function") or "self.loss_function(" not in _source(
        type(module)
    ):
        return ""
    return getattr(module.loss_function, "__name__", "")


def _gives_logits(module: nn.Module, head: nn.Module) -> bool:
    if not hasattr(module, "loss_function"):
        return False
    try:
        return module.get_output_embeddings() is head  # type: ignore[operator]
    except (AttributeError, NotImplementedError):
        return False


def _source(kind: type[nn.Module]) -> str:
    """Return the source of a model's forward; "" where there is none."""
    try:
        return inspect.getsource(inspect.unwrap(kind.forward))
    except (OSError, TypeError):
        return ""
