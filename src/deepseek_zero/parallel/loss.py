"""Cross entropy of logits that are split over the vocabulary.

For each token, a rank sends three numbers about its columns: the maximum of the logits, the sum of
their exponentials, and the target's logit if it is among them. No rank has a whole row, and
backward sends nothing.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, is_dataclass, replace
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from ..base.device import has_no_values
from ..base.errors import UsageError
from ..base.nested import Args, Kwargs
from .families import asked
from .layers import Axis, LayerPart


def split_cross_entropy(
    logits: Tensor,
    targets: Tensor,
    axis: Axis,
    part: LayerPart,
    *,
    ignore_index: int = -100,
    reduction: Literal["mean", "sum"] = "mean",
) -> Tensor:
    """Compute the cross entropy of logits that are split over the vocabulary.

    As in torch, the mean over no token is NaN.

    Args:
        logits: This rank's columns, shape (..., local_vocab_size), of any floating-point dtype; all
            columns if `axis` is a `VirtualAxis`.
        targets: Indices into the whole vocabulary or `ignore_index`, shape (...).
        axis: The tensor-parallel axis of the output layer, which combines the ranks' values.
        part: How the output layer that computed the logits is split.
        ignore_index: The target of tokens that do not count.
        reduction: "mean" or "sum", over the tokens that count.

    Returns:
        The loss, a scalar in fp32, equal on every rank.

    Raises:
        UsageError: A target on a CPU is outside of the vocabulary. On a GPU such a target is not
            detected.

    Note:
        Collective and blocking: every rank must call it.
    """
    check_targets(targets, part.weight.shape[part.weight.dim], ignore_index)
    rows = axis.own_columns(logits.reshape(-1, logits.shape[-1]), part)
    starts = [start for start, _ in rows]
    flat = targets.reshape(-1)
    counts = flat != ignore_index
    found: Tensor = _SplitCrossEntropy.apply(  # type: ignore[no-untyped-call]
        axis, starts, flat, counts, reduction == "mean", *(each for _, each in rows)
    )
    return found


class _SplitCrossEntropy(torch.autograd.Function):
    """The autograd function.

    `logits` has one tensor of shape (tokens, words) for each rank that computes in this process.
    `starts` are the indices of their first words. `counts` are the tokens that count.
    """

    @staticmethod
    def forward(
        ctx: Any,
        axis: Axis,
        starts: list[int],
        targets: Tensor,
        counts: Tensor,
        is_mean: bool,
        *logits: Tensor,
    ) -> Tensor:
        own = [_tell(each, targets, start) for each, start in zip(logits, starts, strict=True)]
        lse, target = joined(axis.all_gather(own, "the loss"))
        weights = counts.float()
        divisor = weights.sum() if is_mean else torch.ones((), device=lse.device)
        ctx.save_for_backward(targets, lse, weights / divisor, *logits)
        ctx.starts = starts
        return (weights * (lse - target)).sum() / divisor

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        targets, lse, weights, *logits = ctx.saved_tensors
        # d loss / d logit = weight of the token * (softmax - [token is the target])
        per_row = weights * grad
        found = []
        for each, start in zip(logits, ctx.starts, strict=True):
            # No variable keeps the argument of exp, because it is as large as the logits
            if each.dtype != torch.float32:
                slope = torch.exp(each.float().sub_(lse[:, None]))
            else:
                slope = torch.exp(each - lse[:, None])
            slope.mul_(per_row[:, None])
            inside, place = places(targets, start, each.shape[1])
            slope.scatter_add_(1, place[:, None], (-per_row * inside)[:, None])
            found.append(slope.to(each.dtype))
        return None, None, None, None, None, *found


def check_targets(targets: Tensor, words: int, ignored: int) -> None:
    """Raise an error if a target is outside of the vocabulary.

    A GPU is not checked, because the host would wait for it.

    Args:
        targets: Indices into the whole vocabulary, or `ignored`.
        words: Size of the whole vocabulary.
        ignored: The target of tokens that do not count.

    Raises:
        UsageError: A target on a CPU is outside of the vocabulary.
    """
    is_skipped = has_no_values(targets) or torch.compiler.is_compiling()
    if targets.device.type != "cpu" or is_skipped:
        return
    wrong = targets[(targets != ignored) & ((targets < 0) | (targets >= words))]
    if len(wrong):
        raise UsageError(
            f"target {int(wrong[0])} is outside of the vocabulary of {words} words.",
            "The loss of a token is computed from the logit of its target.",
            f"pass labels from 0 to {words - 1}, or {ignored} for tokens that do not count.",
        )


def places(targets: Tensor, start: int, words: int) -> tuple[Tensor, Tensor]:
    """Find the targets that are among one rank's columns of the vocabulary.

    Args:
        targets: Indices into the whole vocabulary.
        start: The index of the rank's first column.
        words: The number of the rank's columns.

    Returns:
        A boolean tensor that is True for these targets, and their indices among the rank's columns
        (0 for other targets).
    """
    place = targets - start
    inside = (place >= 0) & (place < words)
    return inside, place.masked_fill(~inside, 0)


def _tell(logits: Tensor, targets: Tensor, start: int) -> Tensor:
    """Return a rank's values for each token, of shape (tokens, 3).

    They are the maximum, the sum of exponentials, and the target's logit.
    """
    values = logits.float()
    highest = values.amax(1)
    shift = highest.masked_fill(highest == -torch.inf, 0.0)
    total = torch.exp(values - shift[:, None]).sum(1)
    inside, place = places(targets, start, logits.shape[1])
    target = values.gather(1, place[:, None])[:, 0].masked_fill(~inside, 0.0)
    return torch.stack([highest, total, target], 1)


def joined(said: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Combine the values that each rank computed from its columns of the logits.

    Args:
        said: For each rank, a tensor of shape (tokens, 3): the maximum, the sum of exponentials and
            the target's logit.

    Returns:
        For each token, the logarithm of the sum of exponentials over the whole vocabulary, and the
        target's logit.
    """
    highest = torch.stack([each[:, 0] for each in said]).amax(0)
    shift = highest.masked_fill(highest == -torch.inf, 0.0)
    total = torch.zeros_like(highest)
    target = torch.zeros_like(highest)
    for each in said:
        total += each[:, 1] * torch.exp(each[:, 0] - shift)
        target += each[:, 2]
    return total.log() + shift, target


# -- a model that computes its loss through `loss_function`


@dataclass(eq=False)
class SplitLoss:
    """Replacement of a transformers model's loss function that reads split logits in training.

    Attributes:
        axis: The tensor-parallel axis of the output layer.
        part: How the output layer is split.
        whole: The model's own loss function, which is used in evaluation.
        is_causal: Whether to shift labels, so that each token's logits are compared with the next
            label.
        read: The logits of the current forward.
    """

    axis: Axis
    part: LayerPart
    whole: Callable[..., Tensor]
    is_causal: bool
    read: Tensor | None = None

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
        """Return the mean loss over tokens, or their sum divided by `num_items_in_batch`.

        The arguments are those of transformers' loss functions.

        Args:
            logits: This rank's columns of the logits, or all columns if the loss is not split.
            labels: The target of each token; they are shifted here for a causal model.
            vocab_size: The number of words, which only the model's own loss uses.
            num_items_in_batch: The divisor of the sum of losses; None computes the mean.
            ignore_index: The target of tokens that do not count.
            shift_labels: The targets after shifting, which take precedence over `labels`.
            **kwargs: Other arguments of the model's own loss.

        Note:
            Collective in training: every rank must call it.
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
        loss = split_cross_entropy(
            logits,
            targets.to(logits.device),
            self.axis,
            self.part,
            ignore_index=ignore_index,
            reduction="mean" if num_items_in_batch is None else "sum",
        )
        return loss if num_items_in_batch is None else loss / num_items_in_batch


CAUSAL = "ForCausalLMLoss"
MASKED = "ForMaskedLMLoss"


def split_loss(model: nn.Module, axis: Axis, head: nn.Module, part: LayerPart) -> None:
    """Make a transformers model compute its training loss from split logits.

    This is possible if its forward passes its logits to `self.loss_function`, and that is one of
    transformers' losses for language models. In training with labels its output then has no logits.
    Other models are not changed.

    Args:
        model: The model, whose loss function is replaced and which receives two hooks.
        axis: The tensor-parallel axis of the output layer.
        head: The output layer, which computes the logits.
        part: How the output layer is split.
    """
    owner = loss_owner(model, head)
    if owner is None:
        return
    whole = owner.loss_function
    loss = SplitLoss(axis, part, whole, is_causal=whole.__name__ == CAUSAL)  # type: ignore[arg-type, union-attr]
    owner.loss_function = loss  # type: ignore[assignment]
    labels_in = labels_of_calls(owner)

    def before(module: nn.Module, args: Args, kwargs: Kwargs) -> None:
        labels = labels_in(args, kwargs)
        # Ranks along sp receive only these
        labels = kwargs.get("shift_labels") if labels is None else labels
        axis.splits_loss = module.training and torch.is_grad_enabled() and labels is not None
        loss.read = None

    def after(module: nn.Module, args: Args, output: Any) -> Any:
        was_split = axis.splits_loss
        axis.splits_loss = False
        logits = loss.read
        loss.read = None
        # A pipeline stage that ends before the head
        if not was_split or output is None or isinstance(output, Tensor):
            return output
        if logits is None:
            raise UsageError(
                f"{type(module).__name__} did not pass the split logits of '{part.name}' to its "
                "loss function.",
                "No rank has whole ones.",
                'say tensor_parallel.loss: "gathered".',
            )
        return without_logits(output, logits)

    owner.register_forward_pre_hook(before, with_kwargs=True)
    owner.register_forward_hook(after, always_call=True)


def labels_of_calls(model: nn.Module) -> Callable[[Args, Kwargs], Any]:
    """Return a function that returns the argument `labels` of a call of the model's forward.

    It is called with the positional and the keyword arguments. It returns None without labels.
    """
    names = list(inspect.signature(model.forward).parameters)
    place = names.index("labels") if "labels" in names else len(names)
    return lambda args, kwargs: args[place] if len(args) > place else kwargs.get("labels")


def without_logits(output: Any, logits: Tensor) -> Any:
    """Return the output of a model without its logits.

    Args:
        output: A transformers output, or a tuple that begins with the loss.
        logits: The element of a tuple that is removed.
    """
    if isinstance(output, tuple):
        return *output[:1], *(each for each in output[1:] if each is not logits)
    if is_dataclass(output) and not isinstance(output, type):
        return replace(output, logits=None)
    return output


def loss_owner(model: nn.Module, head: nn.Module) -> nn.Module | None:
    """Return the module that passes the output layer's logits to a supported loss function.

    Args:
        model: The model that contains the module.
        head: The output layer, which computes the logits.

    Returns:
        The module, or None if there is none.
    """
    owner = next((each for each in model.modules() if _gives_logits(each, head)), None)
    return owner if owner is not None and loss_name(owner) in (CAUSAL, MASKED) else None


def loss_name(module: nn.Module) -> str:
    """Return the name of a transformers model's loss function.

    It is "" if the model's forward does not call `self.loss_function`.
    """
    if not hasattr(type(module), "loss_function"):
        return ""
    try:
        source = inspect.getsource(inspect.unwrap(type(module).forward))
    except (OSError, TypeError):
        return ""
    if "self.loss_function(" not in source:
        return ""
    return getattr(module.loss_function, "__name__", "")


def _gives_logits(module: nn.Module, head: nn.Module) -> bool:
    return hasattr(module, "loss_function") and asked(module, "get_output_embeddings") is head
