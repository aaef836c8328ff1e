"""Sequence parallelism for transformers models.

Each rank runs the model's own forward on its part of every sequence, and the loss is weighted by
tokens. Only attention needs other tokens. It is registered with transformers under a separate name
(`shared_sdpa`), and either exchanges tokens for heads (sequence.py) or gathers keys and values
(sequence_gather.py). `position_ids` are required, because they contain the positions of a rank's
tokens. `own_tokens` splits a batch and creates them; `own_part` calls it with the settings of a
model.
"""

from __future__ import annotations

import inspect
import math
import weakref
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from typing import Any, Literal

import torch
from torch import Tensor, nn

from ..base.errors import NotBuiltError, UsageError
from ..base.log import log_once
from ..base.nested import Args, Kwargs
from ..comm.collectives import Comm
from .apply import has_dropout
from .autograd import with_backward
from .sequence import SequenceAttention, SequenceGroup, exchange, spread
from .sequence_gather import attend_gathered, zigzag

AttentionMethod = Literal["ulysses", "all_gather"]
IGNORED = -100  # the label of a token that does not count in the loss
# Suffixes of classes with one prediction per token and a mean loss
_PER_TOKEN = (
    "ForCausalLM",
    "LMHeadModel",
    "ForMaskedLM",
    "ForTokenClassification",
    "BertGenerationDecoder",
)
# Loss types of transformers; None is causal
_PER_TOKEN_LOSSES = (None, "ForCausalLM", "ForMaskedLM", "ForTokenClassification")
# Arguments of a forward that computes a loss
_LABELS = ("labels", "start_positions", "next_sentence_label", "return_loss")
# Attributes of transformers' embeddings that mix tokens
_MIXING = {"token_dropout": "the share of masked tokens", "trigram_input": "the tokens next to it"}
_States = tuple[Tensor, Tensor, Tensor]  # queries, keys and values
_NAMED = "shared_"  # prefix of transformers' name of the attention


@dataclass(frozen=True)
class SequenceSettings:
    """Settings of sequence parallelism, which splits sequences over ranks.

    Attributes:
        attention: How attention accesses the tokens of other ranks. With "ulysses", an all-to-all
            gives each rank all tokens of some heads. "all_gather" gathers keys and values. "auto"
            uses "ulysses" if the model supports it and "all_gather" otherwise.
        weighs_loss: Whether the model returns the mean loss over the tokens of all ranks, without
            tokens with the label -100. If False, the model returns the mean over this rank's
            tokens, and the caller splits the batches and averages the losses.
        spares_eval: Whether, in evaluation, each rank runs whole sequences without communication.
    """

    attention: Literal["auto"] | AttentionMethod = "auto"
    weighs_loss: bool = True
    spares_eval: bool = False


def places_of(attention: AttentionMethod, coordinate: int, ranks: int) -> tuple[int, ...]:
    """Return the chunks of a sequence that a rank has, in ascending order.

    The sequence is split into equal chunks, as many per rank as the returned tuple has.

    Args:
        attention: How attention accesses the tokens of other ranks. "all_gather" gives each rank an
            early and a late chunk, to balance the work of causal attention.
        coordinate: The rank's index on the sequence-parallel axis.
        ranks: The number of sequence-parallel ranks.
    """
    return (coordinate,) if attention == "ulysses" else zigzag(coordinate, ranks)


def own_tokens(
    batch: Mapping[str, Any],
    coordinate: int,
    ranks: int,
    attention: AttentionMethod = "ulysses",
    *,
    shifts: bool = True,
) -> dict[str, Any]:
    """Split a batch of whole sequences, and return one rank's part of it.

    Args:
        batch: Tensors of shape (samples, tokens, ...) by name, equal on all sequence-parallel
            ranks. Other values are returned unchanged. `position_ids` are added if missing.
        coordinate: The rank's index on the sequence-parallel axis.
        ranks: The number of sequence-parallel ranks.
        attention: How attention accesses the tokens of other ranks, which determines the tokens of
            each rank.
        shifts: Whether to replace `labels` by `shift_labels`, which contain for each token the
            label of the next one. Causal losses need this, because the next token may be on another
            rank.

    Returns:
        A new batch with tensors of shape (samples, tokens / ranks, ...).

    Raises:
        UsageError: The number of tokens is not divisible, or the batch contains neither `input_ids`
            nor `inputs_embeds`.
    """
    found = dict(batch)
    places = places_of(attention, coordinate, ranks)
    tokens = _first_given(found, "input_ids", "inputs_embeds")
    if tokens is None:
        raise UsageError(
            f"a batch with {sorted(map(str, found))} has neither input_ids nor inputs_embeds.",
            "Their second dimension is the number of tokens, which is cut over the ranks.",
            "pass one of them in the batch.",
        )
    samples, length = tokens.shape[:2]
    chunks = ranks * len(places)
    if length % chunks:
        raise UsageError(
            f"a sequence of {length} tokens cannot be cut over {ranks} sequence-parallel ranks"
            + (f", which have {len(places)} chunks of it each." if len(places) > 1 else "."),
            "Each rank takes as many tokens as every other.",
            f"pad it to {math.ceil(length / chunks) * chunks} tokens, labels with {IGNORED}.",
        )
    if found.get("position_ids") is None:
        found["position_ids"] = torch.arange(length, device=tokens.device).expand(samples, length)
    labels = found.pop("labels", None) if shifts else None
    if labels is not None and found.get("shift_labels") is None:
        found["shift_labels"] = nn.functional.pad(labels, (0, 1), value=IGNORED)[:, 1:]
    share = length // chunks
    for name, value in found.items():
        if isinstance(value, Tensor) and value.dim() > 1 and value.shape[1] == length:
            found[name] = torch.cat([value.narrow(1, place * share, share) for place in places], 1)
    return found


def own_part(model: nn.Module, batch: Any) -> Any:
    """Return this rank's tokens of a batch of whole sequences.

    A batch that is already split is returned unchanged. A batch counts as split if it contains
    `position_ids` and, for a model with a causal loss, no `labels`.

    Args:
        model: A model that was passed to `share_sequences`, or a module of it.
        batch: A mapping of the arguments of the model's forward, by name: `input_ids` or
            `inputs_embeds`, `labels` and so on. Its sequences are whole, and equal on all
            sequence-parallel ranks.

    Returns:
        A new batch in which each tensor of shape (samples, tokens, ...) has only this rank's
        tokens. `position_ids` are added if missing. For a model with a causal loss, `labels` are
        replaced by `shift_labels`, the label of the next token. `batch` itself is returned if it is
        already split or is not a mapping, if the model does not use sequence parallelism, or if
        `SequenceSettings.weighs_loss` is false.

    Raises:
        UsageError: The number of tokens is not divisible by the number of ranks, or by twice
            that number if attention uses "all_gather". The error is also raised if the batch
            contains neither `input_ids` nor `inputs_embeds`.
    """
    shared = _SHARED.get(model)
    return shared.own_part(batch) if shared is not None and isinstance(batch, Mapping) else batch


def share_sequences(
    model: nn.Module, comm: Comm, settings: SequenceSettings | None = None, *, tp: int = 1
) -> None:
    """Prepare a transformers model for sequences that are split over ranks, in place.

    The attention function is replaced by a function that communicates with the other ranks, and
    that is registered with transformers. Hooks check the inputs and average the loss over the
    ranks. The forward then requires this rank's tokens with their `position_ids`, which `own_part`
    returns. A model with `SequenceAttention` modules is not changed, because these modules
    communicate themselves.

    Args:
        model: The model, whose configuration is changed and on which hooks are registered.
        comm: The communicator of the sequence-parallel ranks ("sp").
        settings: How attention accesses the tokens of other ranks, and whether the loss is averaged
            over the ranks; by default `SequenceSettings()`.
        tp: The number of tensor-parallel ranks ("tp") over which the model's layers were split.

    Raises:
        NotBuiltError: Sequence parallelism does not support the model. The message contains the
            reason.
        UsageError: The function was already called for the model or for a module of it.

    Note:
        The model's forward and backward are collective afterwards: every rank must run them. With
        `SequenceSettings.spares_eval`, this does not apply to evaluation.
    """
    if any(isinstance(module, SequenceAttention) for module in model.modules()):
        return
    if any(module in _SHARED for module in model.modules()):
        raise UsageError(
            f"{type(model).__name__} already shares its sequences.",
            "A second call would register its hooks twice.",
            "create the model again for another engine or other settings.",
        )
    settings = settings or SequenceSettings()
    shared = _Shared(model, comm, settings, choose_attention(model, comm.size, tp, settings))
    config: Any = model.config
    if not config._attn_implementation.startswith(_NAMED):
        config._attn_implementation = _registered(config._attn_implementation)
    for module in model.modules():
        _SHARED[module] = shared
    model.register_forward_pre_hook(shared.before_forward, with_kwargs=True)
    model.register_forward_hook(shared.after_forward, with_kwargs=True)


def choose_attention(
    model: nn.Module, ranks: int, tp: int, settings: SequenceSettings
) -> AttentionMethod:
    """Choose how attention of a model accesses the tokens of other ranks.

    Args:
        model: The model, of which the configuration and the modules' classes are read.
        ranks: The number of sequence-parallel ranks ("sp").
        tp: The number of tensor-parallel ranks ("tp"), over which the attention heads are split.
        settings: Its `attention` is the method to use, or "auto".

    Returns:
        "ulysses" (exchange tokens for heads) or "all_gather" (gather keys and values).

    Raises:
        NotBuiltError: The model does not support the method. The message contains the reason.
    """
    config: Any = getattr(model, "config", None)
    core = getattr(config, "_attn_implementation", None)
    if core is None:
        raise NotBuiltError(
            f"mesh axis sp={ranks}: the attention of {type(model).__name__} exchanges nothing.",
            "Attention needs every token. It is exchanged in models of transformers, and in "
            "DistributedAttention.",
            "call it through deepspeed.sequence.layer.DistributedAttention, or leave sp out.",
        )
    core = core.removeprefix(_NAMED)
    found = {
        "ulysses": _against_exchanges(config, core, ranks, tp),
        "all_gather": _against_gathers(config, core),
    }
    always = _against_sharing(model, config, core)
    ways: tuple[AttentionMethod, ...] = (
        ("ulysses", "all_gather") if settings.attention == "auto" else (settings.attention,)
    )
    for way in ways:
        if not always and not found[way]:
            if way != ways[0]:
                log_once(f"attention gathers keys and values over sp={ranks}: {found[ways[0]][0]}.")
            return way
    reasons = always or found[ways[-1]]
    raise NotBuiltError(
        f"mesh axis sp={ranks}: {type(model).__name__} is not built for sequence-parallel ranks: "
        f"{reasons[0]}.",
        "Each rank computes whole attention, causal or of all tokens, of its share of the heads "
        "(ulysses) or of its tokens (all_gather).",
        "change the model's configuration, sequence_parallel.attention, the number of ranks, or "
        "leave sp out.",
    )


def _against_sharing(model: nn.Module, config: Any, core: str) -> list[str]:
    """Return the reasons why ranks cannot share this model's sequences at all."""
    text = config.get_text_config()
    reasons = {
        "its layers drop something in training, and ranks would draw alike": has_dropout(model),
        "encoder and decoder have sequences of their own": getattr(
            config, "is_encoder_decoder", False
        ),
        "attention scores are capped": getattr(text, "attn_logit_softcapping", None)
        and core.endswith("sdpa"),
        "its forward takes no position_ids": not _takes_positions(model),
        "its configuration has no num_attention_heads": getattr(text, "num_attention_heads", None)
        is None,
        f"{_ROUTER_LOSS} (output_router_logits)": getattr(text, "output_router_logits", False),
    }
    return _that_hold(reasons) + [
        reason for name, each in model.named_modules() for reason in _against_module(name, each)
    ]


def _that_hold(reasons: Mapping[str, Any]) -> list[str]:
    return [reason for reason, holds in reasons.items() if holds]


_ROUTER_LOSS = "its loss has a part over the routers of all tokens"


def _against_module(name: str, module: nn.Module) -> list[str]:
    """Return the reasons why a module cannot process a part of a sequence."""
    kind = type(module).__name__
    called = f"'{name}' ({kind})" if name else kind
    reasons = {
        f"the output of {called} is one for a whole sequence": kind.endswith("Pooler"),
        f"{called} computes a token from those before it": isinstance(module, nn.RNNBase),
        f"{called} computes a token from its neighbours": isinstance(module, nn.Conv1d)
        and module.kernel_size != (1,),
        # a position table with a row for padding, as in RoBERTa
        f"positions of {called} begin after that of the padding": isinstance(module, nn.Embedding)
        and "position" in name
        and module.padding_idx is not None,
    }
    if not inspect.signature(module.forward).parameters.keys().isdisjoint(_LABELS):
        head = _class_of_forward(module).__name__
        is_known = head.endswith(_PER_TOKEN) and not head.endswith("WithLMHeadModel")
        is_known = is_known and getattr(module, "loss_type", None) in _PER_TOKEN_LOSSES
        reasons[f"the loss of {called} is not known to be a mean over tokens"] = not is_known
    for noise in ("jitter_noise", "router_jitter_noise", "input_jitter_noise"):
        reasons[f"{called} draws noise ({noise}), and ranks would draw alike"] = bool(
            getattr(module, noise, 0)
        )
    for attribute, others in _MIXING.items():
        reasons[f"{called} embeds a token by {others} ({attribute})"] = (
            getattr(module, attribute, None) is True
        )
    return _that_hold(reasons)


def _class_of_forward(module: nn.Module) -> type:
    """Return the class that defines the forward of a module."""
    return next(each for each in type(module).__mro__ if "forward" in vars(each))


def heads_of(text: Any) -> tuple[int, int]:
    """Return the numbers of attention heads and of key/value heads in a configuration."""
    heads = text.num_attention_heads
    return heads, getattr(text, "num_key_value_heads", None) or heads


def _against_exchanges(config: Any, core: str, ranks: int, tp: int) -> list[str]:
    """Return the reasons why ranks cannot exchange tokens for heads.

    Each rank along "tp" has its part of the heads.
    """
    text = config.get_text_config()
    if getattr(text, "num_attention_heads", None) is None:
        return []  # `_against_sharing` reports it
    heads, held = heads_of(text)
    each = [max(number // tp, 1) for number in (heads, held)]
    many, few = each
    beside = [f", {number} on each of {tp} ranks along tp," if tp > 1 else "" for number in each]
    kinds = {*(getattr(text, "layer_types", None) or ())} - {"full_attention"}
    reasons = {
        f"{heads} attention heads{beside[0]} cannot be cut over them": heads % tp or many % ranks,
        f"{held} key and value heads{beside[1]} cannot be cut over them": few % ranks
        and ranks % few,
        f"attention of the kinds {sorted(kinds)} needs masks": kinds,
        f"attention '{core}' needs masks; 'sdpa' does not": core == "eager",
    }
    return _that_hold(reasons)


def _against_gathers(config: Any, core: str) -> list[str]:
    """Return the reasons why ranks cannot gather keys and values."""
    kinds = {*(getattr(config.get_text_config(), "layer_types", None) or ())} - {
        "full_attention",
        "sliding_attention",
    }
    reasons = {
        f"attention of the kinds {sorted(kinds)} needs other masks": kinds,
        f"attention '{core}' takes masks of another form than 'sdpa'": core != "sdpa",
    }
    return _that_hold(reasons)


def _takes_positions(model: nn.Module) -> bool:
    parameters = inspect.signature(model.forward).parameters
    return "position_ids" in parameters or any(
        each.kind is each.VAR_KEYWORD for each in parameters.values()
    )


def _first_given(given: Mapping[str, Any], *names: str) -> Any:
    """Return the first of some arguments that is not None, or None."""
    return next((given[name] for name in names if given.get(name) is not None), None)


def _masked(what: str, fix: str) -> NotBuiltError:
    return NotBuiltError(
        f"an attention_mask that {what}.",
        "Each rank computes whole attention, without a mask of the caller's.",
        fix,
    )


class _Shared:
    """The state that the forwards and the attention of one model use."""

    def __init__(
        self, model: nn.Module, comm: Comm, settings: SequenceSettings, attention: AttentionMethod
    ) -> None:
        self.group = SequenceGroup(comm)
        self.settings = settings
        self.attention = attention
        self.places = places_of(attention, comm.rank, comm.size)
        parameters = inspect.signature(model.forward).parameters.values()
        self._names = [each.name for each in parameters if each.kind is each.POSITIONAL_OR_KEYWORD]
        # transformers uses the causal loss if the model's name implies no type, as for
        # GPT2LMHeadModel.
        self._is_causal_loss = getattr(model, "loss_type", None) in (None, "ForCausalLM")
        self._is_causal = all(getattr(module, "is_causal", True) for module in model.modules())
        self._attended = False  # in the current forward

    def rests(self, module: nn.Module) -> bool:
        """Return whether ranks currently compute independently."""
        return self.settings.spares_eval and not module.training

    def own_part(self, batch: Mapping[str, Any]) -> Any:
        """Return this rank's part of a batch, unless it is split or the caller splits."""
        has_labels = self._is_causal_loss and batch.get("labels") is not None
        is_cut = batch.get("position_ids") is not None and not has_labels
        if is_cut or not self.settings.weighs_loss:
            return batch
        return own_tokens(
            batch, self.group.index, self.group.size, self.attention, shifts=self._is_causal_loss
        )

    # -- a forward

    def before_forward(self, module: nn.Module, args: Args, kwargs: Kwargs) -> Any:
        """Check the inputs of a forward, which must be this rank's tokens.

        Args:
            module: The model.
            args: Positional arguments.
            kwargs: Keyword arguments.

        Note:
            Collective: every rank must call it.
        """
        if self.rests(module):
            return None
        if len(args) > len(self._names):
            raise UsageError(
                "the model was given inputs without names.",
                "",
                "pass them by name: model(**batch).",
            )
        given = dict(zip(self._names, args, strict=False)) | kwargs
        tokens = _first_given(given, "input_ids", "inputs_embeds")
        if tokens is None:
            raise UsageError("the model was given no input_ids.", "", "pass this rank's tokens.")
        self._look_at_positions(given.get("position_ids"), tokens.shape[1])
        if given.get("attention_mask") is not None:
            self._look_at_mask(given["attention_mask"])
            given["attention_mask"] = None
        labels = given.get("labels")
        shifted = given.get("shift_labels")
        if given.get("output_router_logits"):
            raise NotBuiltError(
                f"output_router_logits is not built for sequence-parallel ranks: {_ROUTER_LOSS}.",
                "Each rank has the routers' outputs of its own tokens.",
                "leave it out.",
            )
        self._attended = False
        if self.settings.weighs_loss:
            if labels is not None and shifted is None and self._is_causal_loss:
                raise UsageError(
                    "the model was given labels, and no shift_labels.",
                    "The label of a rank's last token is the next rank's first.",
                    "pass shift_labels: own_tokens(batch, coordinate, ranks) makes them.",
                )
            if given.get("num_items_in_batch") is not None:
                raise NotBuiltError(
                    "num_items_in_batch is not built for sequence-parallel ranks.",
                    "The loss is the mean over the tokens of all ranks that share a sequence.",
                    "leave it out.",
                )
        if labels is None and shifted is not None:
            given["labels"] = shifted
        return (), given

    def _look_at_positions(self, positions: Tensor | None, tokens: int) -> None:
        fix = (
            f'pass position_ids: own_tokens(batch, coordinate, ranks, "{self.attention}") cuts a '
            "batch and makes them."
        )
        if positions is None:
            raise UsageError(
                "the model was given no position_ids.",
                "They say where this rank's tokens are in the sequence.",
                fix,
            )
        share = tokens // len(self.places)
        chunks = [range(place * share, (place + 1) * share) for place in self.places]
        device = positions.device
        own = torch.cat([torch.arange(each.start, each.stop, device=device) for each in chunks])
        if len(own) != tokens or not bool((positions == own).all()):
            said = " and ".join(f"{chunk[0]} to {chunk[-1]}" for chunk in chunks if chunk)
            raise NotBuiltError(
                f"position_ids are not {said}, where this rank's tokens are.",
                "Several documents in one sequence need masks, which are not built for "
                "sequence-parallel ranks.",
                fix,
            )

    def _look_at_mask(self, mask: Any) -> None:
        """Raise an error unless a mask only marks padding at the end of sequences."""
        if not isinstance(mask, Tensor) or mask.dim() != 2:
            raise _masked(
                "is not (samples, tokens) is not built for sequence-parallel ranks", "leave it out."
            )
        chunks = (mask != 0).unflatten(1, (len(self.places), -1))
        share = chunks.shape[2]
        counts = chunks.sum(2).cpu()
        is_ordered = bool((chunks[:, :, 1:] <= chunks[:, :, :-1]).all())
        row = torch.cat((counts.T.flatten(), torch.tensor([int(is_ordered)], device="cpu")))
        table = self.group.comm.all_gather_rows(row, f"the ends of {len(counts)} sequences")
        order: list[int] = []
        for rank in range(self.group.size):
            order += places_of(self.attention, rank, self.group.size)
        kept = table[:, :-1].reshape(len(order), -1)[torch.tensor(order, device="cpu").argsort()]
        follows = (kept[1:] == 0) | (kept[:-1] == share)
        if not bool(table[:, -1].all()) or not bool(follows.all()):
            raise _masked(
                "leaves out tokens before others is not built for sequence-parallel ranks",
                "pad sequences on the right.",
            )
        if not self._is_causal and not bool((kept == share).all()):
            raise _masked(
                "leaves out tokens is not built for sequence-parallel ranks of a model whose "
                "tokens see those behind them",
                "take sequences of one length without padding.",
            )

    def after_forward(self, module: nn.Module, args: Any, kwargs: Kwargs, output: Any) -> Any:
        """Replace this rank's loss by that of all ranks' tokens.

        Args:
            module: The model.
            args: Ignored.
            kwargs: Keyword arguments of the forward.
            output: The output of the forward.

        Note:
            Collective if there are labels.
        """
        if self.rests(module):
            return None
        if not self._attended:
            raise NotBuiltError(
                f"{type(module).__name__} is not built for sequence-parallel ranks: its forward "
                "has called no attention that is registered with transformers.",
                "Attention needs every token, and the model's own sees those of one rank.",
                "leave sp out.",
            )
        labels = _first_given(kwargs, "shift_labels", "labels")
        if not self.settings.weighs_loss or labels is None:
            return None
        if isinstance(output, tuple):
            return self._weighed(output[0], labels), *output[1:]
        if getattr(output, "loss", None) is None:
            return None
        output["loss"] = self._weighed(output.loss, labels)
        return output

    def _weighed(self, loss: Tensor, labels: Tensor) -> Tensor:
        """Return the mean loss over all ranks' tokens; its gradient is this rank's share.

        Gradients are averaged over the ranks later, so the share is that of this rank's tokens
        times the number of ranks. A rank without valid tokens, whose own mean is NaN, adds nothing.
        """
        own = [float((labels != IGNORED).sum()), float(loss.detach())]
        row = torch.tensor(own, dtype=torch.float64, device="cpu")
        table = self.group.comm.all_gather_rows(row, "losses and their tokens")
        counts = table[:, 0]
        tokens = max(float(counts.sum()), 1.0)
        total = float(torch.where(counts > 0, table[:, 1] * counts, 0.0).sum()) / tokens
        weight = self.group.size * own[0] / tokens
        return with_backward(
            lambda loss: torch.full_like(loss, total), lambda grad: (grad * weight,), loss
        )

    # -- attention

    def look_at_scores(self, module: Any, mask: Any, options: Mapping[str, Any]) -> None:
        """Raise an error if a layer's mask hides more than the attention that ranks compute.

        Args:
            module: The attention layer.
            mask: The mask of this rank's tokens: True, or 0 to be added, if a token is seen. It may
                hide later tokens, the other chunk of this rank, and tokens outside of the window.
            options: Other arguments of the attention.
        """
        said = ""
        if options.get("position_bias") is not None:
            said = "adds a bias to its scores"
        elif isinstance(mask, Tensor):
            said = self._unlike(mask, _is_causal(module, options), options.get("sliding_window"))
        if said:
            raise NotBuiltError(
                f"attention of {type(module).__name__} is not built for sequence-parallel ranks: "
                f"it {said}.",
                "Each rank computes whole attention, causal or of all tokens, without the mask of "
                "its own tokens.",
                "leave sp out, or change the model's configuration.",
            )

    def _unlike(self, mask: Tensor, is_causal: bool, window: int | None) -> str:
        """Return how a mask differs from the attention that ranks compute, or ""."""
        seen = mask if mask.dtype == torch.bool else mask == 0
        if mask.dtype != torch.bool and bool(
            (~seen & (mask > torch.finfo(mask.dtype).min / 2)).any()
        ):
            return "adds a bias to its scores"
        queries, keys = (torch.arange(length, device=mask.device) for length in mask.shape[-2:])
        behind = queries[:, None] - keys
        share = len(keys) // len(self.places)
        in_one_chunk = queries[:, None] // share == keys // share
        due = in_one_chunk
        if window is not None:
            due = due & (behind.abs() < window)
        if is_causal:
            if len(queries) > 1 and bool((seen & (behind < 0)).any()):
                return "sees later tokens, and has no is_causal that says so"
            due = due & (behind >= 0)
        elif window is not None and bool((seen & in_one_chunk & ~due).any()):
            return "sees tokens outside of its window"
        return "hides tokens that it is given" if bool((due & ~seen).any()) else ""

    def attend(
        self, core: Any, module: Any, states: _States, args: Args, kwargs: Kwargs
    ) -> tuple[Tensor, Any]:
        """Return the attention of this rank's tokens, and None for its weights.

        Args:
            core: The attention function of transformers.
            module: The attention layer.
            states: Queries, keys and values, of shape (samples, heads, tokens, width).
            args: Other arguments of `core`.
            kwargs: Other arguments of `core`.

        Returns:
            A tensor of shape (samples, tokens, heads, width), and None.

        Note:
            Collective: every rank must call it.
        """
        self._attended = True
        # They are only those of this rank's tokens, so they cannot separate documents
        kwargs.pop("position_ids", None)
        if self.attention == "ulysses":
            return self._exchanged(core, module, states, args, kwargs)
        return self._gathered(core, module, states, args, kwargs), None

    def _exchanged(
        self, core: Any, module: Any, states: _States, args: Args, kwargs: Kwargs
    ) -> tuple[Tensor, Any]:
        query, key, value = states
        window = kwargs.get("sliding_window")
        length = query.shape[2] * self.group.size
        if window is not None and window < length:
            raise NotBuiltError(
                f"a window of {window} tokens over sequences of {length} is not built for ranks "
                "that exchange heads.",
                "It needs a mask.",
                'set sequence_parallel.attention to "all_gather", or sliding_window to None in '
                "the model's configuration, or take shorter sequences.",
            )
        key = spread(key, self.group.size, 1)
        value = spread(value, self.group.size, 1)
        whole = exchange(self.group, 1, 2, "query, key and value", query, key, value)
        before = getattr(module, "num_key_value_groups", None)
        if before is not None:
            module.num_key_value_groups = whole[0].shape[1] // whole[1].shape[1]
        try:
            found, weights = core(module, *whole, None, *args, **kwargs)
        finally:
            if before is not None:
                module.num_key_value_groups = before
        return exchange(self.group, 1, 2, "the output of attention", found)[0], weights

    def _gathered(
        self, core: Any, module: Any, states: _States, args: Args, kwargs: Kwargs
    ) -> Tensor:
        is_causal = _is_causal(module, kwargs)
        kwargs.pop("is_causal", None)

        def kernel(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
            seen = mask if mask is None else mask[None, None]
            found: Tensor
            found, _ = core(module, query, key, value, seen, *args, is_causal=False, **kwargs)
            return found

        window = kwargs.get("sliding_window")
        return attend_gathered(self.group, kernel, *states, is_causal=is_causal, window=window)


def _is_causal(module: Any, options: Mapping[str, Any]) -> bool:
    """Return whether a call of attention is causal: as its options say, or as its layer does."""
    is_causal = options.get("is_causal")
    return bool(getattr(module, "is_causal", True) if is_causal is None else is_causal)


# Modules of models that share sequences. transformers calls attention with one of them.
_SHARED: weakref.WeakKeyDictionary[nn.Module, _Shared] = weakref.WeakKeyDictionary()


def _registered(core: str) -> str:
    """Register the attention over ranks with transformers and return its name.

    Its masks are those of the attention `core`.
    """
    name = f"{_NAMED}{core}"
    masks = import_module("transformers.masking_utils").ALL_MASK_ATTENTION_FUNCTIONS
    _functions().register(name, partial(_attend, core))
    if core in masks:
        masks.register(name, masks[core])
    return name


def _functions() -> Any:
    """Return transformers' attention functions by name.

    transformers is imported already if a model is one of its.
    """
    return import_module("transformers.modeling_utils").ALL_ATTENTION_FUNCTIONS


def _attend(
    core: str,
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any = None,  # some models pass it by name
    *args: Any,
    **kwargs: Any,
) -> tuple[Tensor, Any]:
    function = _functions()[core]
    shared = _SHARED.get(module)
    if shared is None or shared.rests(module):
        found: tuple[Tensor, Any] = function(
            module, query, key, value, attention_mask, *args, **kwargs
        )
        return found
    shared.look_at_scores(module, attention_mask, kwargs)
    return shared.attend(function, module, (query, key, value), args, kwargs)
