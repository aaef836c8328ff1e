"""The plan of tensor parallelism: which layers of a model are split, and how.

The first rule that matches a layer decides: `partition_config`, the model's own plan, a preset, the
table of families (families.py), names. Then regions are formed: column layers, and the row layer
that reads their outputs. A layer outside of such a group is split by itself if a rule names it on
purpose (ALONE): its inputs and outputs are whole on every rank. It stays whole if only its name
matched, like layers without a rule.
"""

from __future__ import annotations

import fnmatch
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any, Literal, cast

from torch import Tensor, nn

from ..base.errors import NotBuiltError, UsageError, shown
from ..planner.split import RangesOfRanks, Split, came_cut, laid_out, refuse_other_cuts
from .families import ALIASES, FAMILIES, NAMES, REFUSED, Fused, Style, StyleRule, asked, common_path
from .layers import LayerPart
from .token_shards import ShardedBlocks, find_stretch

HEAD_DIM = ("head_dim", "attention_head_size", "head_size", "key_value_proj_dim", "d_kv")
HEADS = ("num_heads", "num_attention_heads", "n_heads", "n_head", "heads", "nhead")
KV_HEADS = ("num_key_value_heads", "num_kv_heads", "n_kv_heads")
ADAPTED = ".base_layer"  # PEFT's name for a layer inside its adapter
KV_GROUPS = ("num_key_value_groups", "n_rep")
WIDTHS = ("split_size", "embed_dim", "all_head_size", "inner_dim")

# Styles in the plans of transformers
STYLES: dict[str, Style] = {
    "colwise": "column",
    "rowwise": "row",
    "colwise_gather_output": "column_gather",
    "colwise_rep": "column_gather",
    "rowwise_split_input": "row_scatter",
    "rowwise_rep": "row",
    "replicated_with_grad_allreduce": "partial",
    "replicated": "equal",
    "embedding_rowwise": "vocabulary",
    "vocab_embedding": "vocabulary",
    "local_rowwise": "row",
    "local_colwise": "column",
    "local_packed_rowwise": "column",
}

# Styles of a layer if its counterpart is missing
ALONE: dict[Style, Style] = {"column": "column_gather", "row": "row_scatter"}
# Styles in a configuration
KINDS: dict[str, Style] = {
    "row": "row",
    "column": "column",
    "column_gather": "column_gather",
    "skip": "equal",
    "partial": "partial",
}

Shares = list[tuple[int, int]]  # [start, stop) for each rank


@dataclass(frozen=True)
class ParallelSettings:
    """Settings of tensor parallelism: which layers are split, and the loss.

    Attributes:
        loss: "split" computes the loss from split logits in training, and the output has no logits.
            If the model's loss function does not support this, the logits are all-gathered.
            "gathered" always all-gathers the logits. "tiled" is for a loss function that computes
            the output layer itself, in tiles (`activations/tiled_loss.py`).
        layers: Rules (pattern, style, parts, model types), which take precedence over all other
            rules. The pattern is matched by `re.match` to the name of a layer's weight. The style
            is "column", "row", "column_gather", "partial" or "skip". "skip" keeps the layer whole,
            and "partial" also sums its gradients over the ranks. Parts is the number of equal
            projections that are stored in the layer, or a tuple of their widths. With a tuple, the
            style "column" means "column_gather". Model types are the transformers model types to
            which the rule applies; an empty tuple means all.
        uses_other_rules: Whether the model's own plan, the rules of its family and general name
            patterns apply to layers that `layers` does not match.
        needs_a_split: Whether it is an error if no layer is split. Token embeddings and output
            layers do not count.
        is_strict: Whether it is an error if a layer that a rule matches stays whole.
        preset: The model family whose rules are used instead of the model's own plan. None selects
            the family by the model's type, and the model's own plan takes precedence.
        sequence: Whether activations between the split layers of a block are sharded over tokens in
            training (Megatron's sequence parallelism). "auto" enables it if the model supports it.
        grain: Feed-forward layers and vocabularies are split at multiples of this number, unless
            some rank would then get no elements.
    """

    loss: Literal["split", "gathered", "tiled"] = "split"
    layers: tuple[tuple[str, str, int | tuple[int, ...], tuple[str, ...]], ...] = ()
    uses_other_rules: bool = True
    needs_a_split: bool = True
    is_strict: bool = False
    preset: str | None = None
    sequence: bool | Literal["auto"] = False
    grain: int = 1


@dataclass
class Choice:
    """How one layer is split, and the rule that selected it.

    Attributes:
        name: The name of the layer in the model.
        module: The layer itself.
        style: How it is split, for example "column" or "row".
        source: The kind of the rule that matched it, for example the settings or the model's own
            plan.
        fused: How several projections are stored in it, if it is fused.
        part: How its weight is split over the ranks. `choose` sets it.
        region: A name that connects column layers with the row layer that reads their outputs.
        head_dim: The size of a head if it belongs to an attention.
    """

    name: str
    module: nn.Module
    style: Style
    source: str
    fused: Fused | None = None
    region: str = ""
    head_dim: int | None = None
    part: LayerPart = field(init=False, repr=False, compare=False)

    @property
    def is_wished(self) -> bool:
        """Return whether a rule was written for this layer, not only a general name pattern."""
        return self.source != "names"

    @property
    def widths(self) -> tuple[int, int]:
        """Return the number of the layer's outputs and that of its inputs."""
        first, second = weight_of(self.module).shape
        return (second, first) if is_transposed(self.module) else (first, second)

    @property
    def width(self) -> int:
        """Return the number of outputs of each projection that is stored in the layer."""
        return self.widths[0] // (self.fused.parts if self.fused else 1)


@dataclass
class ParallelPlan:
    """Describes how the layers of a model are split over the tensor-parallel ranks.

    Attributes:
        ranks: The number of tensor-parallel ranks.
        choices: The layers that are split, with the rule that selected each layer.
        partial: The layers that every rank holds whole and whose gradients are summed over the
            ranks.
        splits: A dict from the name of each parameter to how it is split.
        attributes: The new values of module attributes that store a number of heads or a width. A
            key is a tuple (module name, attribute name), and a value contains one number for each
            rank.
        attentions: A dict from the name of an attention module to the name of the module that
            contains its query, key and value projections. An attention is omitted if its output
            projection has a LoRA adapter, or if the module contains another row layer.
        left: The layers that stay whole although a rule matches them. The dict maps the name of
            each of these layers to the reason.
        stretch: The blocks between which activations are sharded over tokens. None if activations
            are not sharded over tokens.
        why_whole: The reason why `sequence="auto"` does not shard activations over tokens; "" if
            there is none.
        grain: Feed-forward layers and vocabularies are split at multiples of this number, unless
            some rank would then get no elements.
        unproven: Kinds of modules with split layers that `prove` could not run. The first forward
            checks one module of each kind.
    """

    ranks: int
    choices: list[Choice] = field(default_factory=list)
    partial: list[Choice] = field(default_factory=list)
    splits: dict[str, Split] = field(default_factory=dict)
    attributes: dict[tuple[str, str], tuple[int, ...]] = field(default_factory=dict)
    attentions: dict[str, str] = field(default_factory=dict)
    left: dict[str, str] = field(default_factory=dict)  # layers that stay whole, and why
    stretch: ShardedBlocks | None = None
    why_whole: str = ""
    grain: int = 1
    unproven: list[Any] = field(default_factory=list)

    def table(self) -> str:
        """Return a text table of the split layers, with a header line.

        One line stands for all layers that are split in the same way and whose names differ only in
        block numbers, which are replaced by `*`. It contains the style, the size of each rank's
        part in rows or columns of the weight, the rule that selected the layers, and their number.
        Layers that stay whole although a rule matches them have lines with the reason instead of
        the rule. Layers with the style "partial" have no line.
        """
        lines = Counter[tuple[str, ...]]()
        for choice in self.choices:
            parts = " + ".join(dict.fromkeys(map(str, choice.part.weight.widths)))
            share = f"{parts} of {sum(choice.part.weight.widths)}"
            lines[_wild(choice.name), choice.style, share, choice.source] += 1
        for name, why in self.left.items():
            lines[_wild(name), "equal", "whole", why] += 1
        rows = [("layer", "becomes", "each rank", "by")]
        rows += [(*row, f"{by}  x{count}") for (*row, by), count in lines.items()]  # type: ignore[misc]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        form = "  ".join(f"{{:{width}}}" for width in widths)
        return "\n".join(form.format(*row).rstrip() for row in rows)


def choose(model: nn.Module, ranks: int, settings: ParallelSettings | None = None) -> ParallelPlan:
    """Choose how the layers of a model are split over the tensor-parallel ranks.

    Only names, shapes and attributes of modules are read, so parameters may be on the meta device.
    The model is not changed.

    Args:
        model: The whole model, before anything is split.
        ranks: The number of tensor-parallel ranks.
        settings: Which rules apply, how the loss is computed, and whether activations are sharded
            over tokens; by default `ParallelSettings()`.

    Returns:
        A `ParallelPlan`, which `prove` checks and completes, and `parallelize` applies.

    Raises:
        NotBuiltError: Tensor parallelism does not support the model's family, a style in the
            model's own plan, or a fused projection with fewer key/value heads than ranks. The error
            is also raised if `sequence` is True and the model does not support it.
        UsageError: A layer that a rule matches cannot be split over this number of ranks, or tied
            layers would be split in different ways. The message names the layer. The error is also
            raised if `preset` or a style in `layers` is unknown, if parts do not add up to a
            layer's outputs, if a parameter was split before over another number of ranks, if no
            layer can be split (`needs_a_split`), or if a layer that a rule matches stays whole
            (`is_strict`).
    """
    cut = came_cut(model)
    refuse_other_cuts(cut, ranks)
    settings = settings or ParallelSettings()
    plan = ParallelPlan(ranks, grain=settings.grain)
    family = _family(model, settings)
    if family in REFUSED:
        raise NotBuiltError(
            f"tensor parallelism of the family '{family}' is not built.",
            f"{REFUSED[family][0].upper()}{REFUSED[family][1:]}.",
            "use dp_shard for this model.",
        )
    choices = _matched(model, settings, family)
    _make_regions(model, plan, choices)
    _split_adapters(model, plan)
    _split_vocabulary(model, plan, choices, settings)
    if settings.sequence:
        try:
            _shard_tokens(model, plan)
        except NotBuiltError as error:
            if settings.sequence != "auto":
                raise
            plan.why_whole = f"{error.what} {error.why}"
    _fill_splits(model, plan, cut)
    is_split = any(choice.style not in ("vocabulary", "head") for choice in plan.choices)
    if settings.needs_a_split and not is_split and not cut:
        why = "No rule knows its layers, and no names look like projections."
        if plan.left:
            name, reason = next(iter(plan.left.items()))
            why = f"Layer '{name}' stays whole: {reason}."
        raise UsageError(
            f"no layer of {type(model).__name__} is split over tp={ranks}.",
            why,
            "name them in tensor_parallel.partition_config.layer_specs, or leave tp out.",
        )
    if settings.is_strict and plan.left:
        name, why = next(iter(plan.left.items()))
        raise UsageError(
            f"strict_mode: layer '{name}' is not split: {why}.",
            fix="name it in layer_specs, or skip it.",
        )
    return plan


# -- which rule


def _matched(model: nn.Module, settings: ParallelSettings, family: str) -> dict[str, Choice]:
    """Return the layers that a rule matches, by name, in the order of the model."""
    own = _own_plan(model)
    model_type = _model_type(model)
    known = FAMILIES.get(family, ())
    source = f"family {family}"
    if settings.preset:
        own = {}
        source = f"preset {family}"
    if not own and not known:
        known = NAMES
        source = "names"
    found: dict[str, Choice] = {}
    for name, module in model.named_modules():
        choice = _by_config(name, module, settings, model_type)
        if choice is None and settings.uses_other_rules:
            plain = name.replace("base_model.model.", "").removesuffix(ADAPTED)
            choice = _by_own_plan(name, plain, module, own)
            rule = _rule_of(known, plain) if is_matrix(module) else None
            if rule is not None and choice is None:
                choice = Choice(name, module, rule.style, source, rule.fused)
            elif rule is not None and choice is not None and choice.style == "column":
                choice.fused = rule.fused
        if choice is not None and choice.style != "equal":
            found[name] = choice
    return found


def _rule_of(rules: Iterable[StyleRule], name: str) -> StyleRule | None:
    """Return the first rule that matches the name of a module, or None."""
    return next((rule for rule in rules if rule.matches(name)), None)


def _by_config(
    name: str, module: nn.Module, settings: ParallelSettings, model_type: str
) -> Choice | None:
    """Return the choice of the first row of `settings.layers` that matches a layer, or None."""
    for pattern, style, parts, model_types in settings.layers:
        if (not model_types or model_type in model_types) and re.match(pattern, f"{name}.weight"):
            if style not in KINDS:
                raise UsageError(
                    f"partition_type {shown(style)} of '{pattern}' is none.",
                    fix="use row, column or skip.",
                )
            is_cut = style not in ("skip", "partial")
            if is_cut and (not is_matrix(module) or isinstance(module, nn.Embedding)):
                return None
            if not any(True for _ in module.parameters(recurse=False)):
                return None
            sizes = parts if isinstance(parts, tuple) else ()
            fused = Fused("blocks", len(sizes) or cast(int, parts), sizes) if parts != 1 else None
            if sizes and sum(sizes) != weight_of(module).shape[1 if is_transposed(module) else 0]:
                shape = tuple(weight_of(module).shape)
                raise UsageError(
                    f"layer '{name}' with a weight of shape {shape} cannot be of parts "
                    f"{list(sizes)}.",
                    "partition_config.shape says so.",
                    "let the parts add up to the outputs.",
                )
            # The parts are not equal heads, as a column layer before a row layer needs them
            if sizes and style == "column":
                style = "column_gather"
            return Choice(name, module, KINDS[style], "partition_config", fused)
    return None


def _own_plan(model: nn.Module) -> dict[str, str]:
    """Return the plan of a transformers model, by pattern of names in `model`."""
    found: dict[str, str] = {}
    for name, module in model.named_modules():
        prefix = f"{name}." if name else ""
        base = getattr(module, "base_model_prefix", None)
        inner = f"{base}." if isinstance(base, str) and base and hasattr(module, base) else ""
        of_base = getattr(getattr(module, "config", None), "base_model_tp_plan", None)
        for start, plan in (
            (f"{prefix}{inner}", of_base),
            (prefix, getattr(module, "_tp_plan", None)),
        ):
            if isinstance(plan, Mapping):
                found.update({f"{start}{pattern}": style for pattern, style in plan.items()})
    return found


def _by_own_plan(name: str, plain: str, module: nn.Module, own: Mapping[str, str]) -> Choice | None:
    """Return the choice of the model's own plan for a layer, or None.

    `plain` is the name in the model without adapters.
    """
    names = (name.removesuffix(ADAPTED), plain)
    for pattern, word in own.items():
        if not any(fnmatch.fnmatchcase(each, pattern) for each in names):
            continue
        style = STYLES.get(word)
        if style is None:
            raise NotBuiltError(
                f"layer '{name}' is to be split as '{word}', which is not built.",
                "The model's own plan says so.",
                "use dp_shard for this model.",
            )
        if style == "column_gather" and pattern.rsplit(".", 1)[-1] in ("lm_head", "embed_out"):
            style = "head"
        if is_matrix(module) or style == "partial":
            return Choice(name, module, style, "the model's plan")
    return None


def _family(model: nn.Module, settings: ParallelSettings) -> str:
    """Return the family whose rules apply: the preset, or the model's type."""
    preset = settings.preset
    if preset is None:
        return _model_type(model)
    found = ALIASES.get(preset, preset)
    if found not in FAMILIES:
        raise UsageError(
            f"preset_model {shown(preset)} is not known.",
            fix=f"use one of {', '.join(sorted(FAMILIES))}.",
        )
    return found


def _model_type(model: nn.Module) -> str:
    """Return the `model_type` of a transformers model; "" for another model."""
    return str(getattr(getattr(model, "config", None), "model_type", ""))


# -- regions


def _make_regions(model: nn.Module, plan: ParallelPlan, choices: Mapping[str, Choice]) -> None:
    """Assign column layers to the row layer that reads their outputs, and split both."""
    rows = [each for each in choices.values() if each.style == "row"]
    all_columns = [each for each in choices.values() if each.style == "column"]
    order = {name: place for place, name in enumerate(choices)}
    regions: dict[str, list[Choice]] = {row.name: [] for row in rows}
    for column in all_columns:
        beside = [other for other in all_columns if parent_of(other) == parent_of(column)]
        row = _closing(column, beside, rows, order)
        if row is None:
            _take_apart(plan, [column], "no row layer closes it")
        else:
            regions[row.name].append(column)
    for row in rows:
        columns = regions[row.name]
        if not columns:
            _take_apart(plan, [row], "no column layer comes before it")
            continue
        if _cut_region(model, plan, columns, row, rows):
            parent = parent_of(columns[0])
            for each in choices.values():
                if each.style == "partial" and parent_of(each) == parent:
                    plan.partial.append(each)
    for choice in choices.values():
        if choice.style in ("column_gather", "row_scatter"):
            dim = 0 if choice.style == "column_gather" else 1
            choice.part = _part(choice, dim, _parts_of_single_layer(choice, dim, plan))
            choice.region = parent_of(choice)
            plan.choices.append(choice)


def _parts_of_single_layer(choice: Choice, dim: int, plan: ParallelPlan) -> RangesOfRanks:
    """Return each rank's part of a layer that is split by itself.

    It contains a share of each part of a fused projection.
    """
    width = choice.widths[dim]
    fused = choice.fused
    sizes: tuple[int, ...] = (width,)
    if dim == 0 and fused is not None and (fused.sizes or width % fused.parts == 0):
        sizes = fused.sizes or (width // fused.parts,) * fused.parts
    shares = [_shares(size, plan.ranks, choice.name, plan.grain) for size in sizes]
    return laid_out([high - low for low, high in each] for each in shares)


def _closing(
    column: Choice, beside: Sequence[Choice], rows: Sequence[Choice], order: Mapping[str, int]
) -> Choice | None:
    """Return the row layer that reads the outputs of a column layer, or None.

    It is the nearest one in the same block, preferably after the column layer. It reads the outputs
    of the column layer or of one in `beside`, because a key projection may be narrower than the
    query projection.
    """
    block = _block(column.name)

    def key(row: Choice) -> tuple[int, bool, int]:
        """Return the rank of a row layer, in an order in which the nearest is first."""
        shared = common_path([column.name, row.name])
        distance = order[row.name] - order[column.name]
        return -len(shared), distance < 0, abs(distance)

    given = {each.width for each in beside}
    near = [row for row in rows if _block(row.name) == block]
    fitting = [row for row in near if row.widths[1] in given]
    return min(fitting or (near if column.is_wished else []), key=key, default=None)


def _block(name: str) -> str:
    """Return the name up to its last number: the repeated block that contains a layer."""
    path = name.split(".")
    last = max((place for place, each in enumerate(path) if each.isdigit()), default=-1)
    return ".".join(path[: last + 1])


def _cut_region(
    model: nn.Module,
    plan: ParallelPlan,
    columns: list[Choice],
    row: Choice,
    rows: Sequence[Choice],
) -> bool:
    """Split column layers and the row layer that reads their outputs, by heads in an attention.

    Args:
        model: The whole model.
        plan: The plan to which the layers are added.
        columns: The column layers, which are in one module.
        row: The row layer that reads their outputs.
        rows: All row layers of the model.

    Returns:
        Whether the layers are split together. If not, each is split by itself or stays whole.
    """
    inputs = row.widths[1]
    region = [*columns, row]
    widths = {column.width for column in columns}
    if inputs not in widths:
        stated = ", ".join(f"{column.name} ({column.widths[0]})" for column in columns)
        _take_apart(plan, region, f"{row.name} reads {inputs} where {stated} give another width")
        return False
    parent_name = parent_of(columns[0])
    parent = model.get_submodule(parent_name)
    head_dim = _head_dim(parent, inputs)
    narrow = min(widths)
    if head_dim is not None and narrow % head_dim:
        why = f"a width of {narrow} is not a multiple of the head size {head_dim}"
        _take_apart(plan, region, why)
        return False
    if head_dim is not None:
        kv_heads = narrow // head_dim
        query, key = _head_shares(inputs // head_dim, kv_heads, plan.ranks, row.name)
        if len(set(key)) < len(key) and any(column.fused for column in columns):
            raise NotBuiltError(
                f"layer '{columns[0].name}' has {kv_heads} key/value heads for tp={plan.ranks}, in "
                "a fused projection.",
                "Heads are given to several ranks only where they are in a layer of their own.",
                f"choose a tp that divides {kv_heads}.",
            )
        _count_heads(plan, parent, parent_name, head_dim, query, key)
        holder = adapted_common(region)
        is_shared = any(other is not row and other.name.startswith(f"{holder}.") for other in rows)
        if not is_shared and not row.name.endswith(ADAPTED):
            plan.attentions[holder] = parent_name
    elif len(widths) > 1:
        _take_apart(plan, region, "its projections differ in width, and no head size is known")
        return False
    else:
        query = key = _shares(inputs, plan.ranks, row.name, plan.grain)
    size = head_dim or 1
    for column in columns:
        shares = query if column.width == inputs else key
        column.part = _part(column, 0, _in_blocks(column.fused, shares, size))
        column.region = row.name
    row.part = _part(row, 1, _ranges(query, size))
    for choice in region:
        choice.head_dim = head_dim
    plan.choices += region
    return True


def _ranges(shares: Shares, size: int) -> RangesOfRanks:
    """Return each rank's part of a dimension from its share of the heads of a size."""
    return tuple(((low * size, high * size),) for low, high in shares)


def adapted_common(choices: Sequence[Choice]) -> str:
    """Return the name of the smallest module that contains all of the given layers.

    A layer inside a LoRA adapter counts as the adapter.
    """
    return ".".join(common_path([parent_of(choice) for choice in choices]))


def _in_blocks(fused: Fused | None, shares: Shares, size: int) -> RangesOfRanks:
    """Return each rank's part of a projection, from its share of the heads of a size."""
    if fused is None:
        return _ranges(shares, size)
    if fused.kind == "interleaved":
        return _ranges(shares, size * fused.parts)
    return laid_out([[(high - low) * size for low, high in shares]] * fused.parts)


def _head_dim(parent: nn.Module, inputs: int) -> int | None:
    """Return the size of a head of an attention, or None if a module is none."""
    for name in (*HEAD_DIM, *HEADS):
        value = getattr(parent, name, None)
        if isinstance(value, int) and value > 0 and inputs % value == 0:
            return value if name in HEAD_DIM else inputs // value
    return None


def _shares(width: int, ranks: int, name: str, grain: int = 1) -> Shares:
    """Split a width evenly, at multiples of `grain` if every rank receives one.

    The first ranks receive more, and the last one the remainder of less than a grain. Raises
    UsageError if a rank would receive nothing.
    """
    if width < ranks:
        raise UsageError(
            f"layer '{name}' has {width} parts for tp={ranks}.",
            "Each rank holds at least one.",
            f"choose a tp of at most {width}.",
        )
    grain = grain if width // grain >= ranks else 1
    part, more = divmod(width // grain, ranks)
    starts = [(rank * part + min(rank, more)) * grain for rank in range(ranks)]
    return list(pairwise([*starts, width]))


def _head_shares(heads: int, kv_heads: int, ranks: int, name: str) -> tuple[Shares, Shares]:
    """Return the query heads and the key/value heads of each rank, in whole groups.

    If there are fewer key/value heads than ranks, all ranks that share the queries of a head hold
    it.
    """
    group = heads // kv_heads
    if kv_heads >= ranks:
        key = _shares(kv_heads, ranks, name)
        return [(low * group, high * group) for low, high in key], key
    if ranks % kv_heads or ranks > heads:
        raise UsageError(
            f"layer '{name}' has {heads} heads and {kv_heads} key/value heads, which do not go to "
            f"tp={ranks}.",
            "Each rank has a head at least, and each key/value head belongs to one rank or to "
            "equally many.",
            f"choose a tp that divides {kv_heads}, or a multiple of it up to {heads}.",
        )
    sharing = ranks // kv_heads
    inner = _shares(group, sharing, name)
    query = []
    key = []
    for kv in range(kv_heads):
        query += [(kv * group + low, kv * group + high) for low, high in inner]
        key += [(kv, kv + 1)] * sharing
    return query, key


def _count_heads(
    plan: ParallelPlan,
    parent: nn.Module,
    name: str,
    head_dim: int,
    query: Shares,
    key: Shares,
) -> None:
    """Record the attributes with which an attention counts its heads."""
    heads = query[-1][1]
    kv_heads = key[-1][1]
    queries = [high - low for low, high in query]
    keys = [high - low for low, high in key]
    values: list[tuple[Iterable[str], int, list[int]]] = [
        (KV_HEADS, kv_heads, keys),
        (HEADS, heads, queries),
        (KV_GROUPS, heads // kv_heads, [q // k for q, k in zip(queries, keys, strict=True)]),
        (WIDTHS, heads * head_dim, [each * head_dim for each in queries]),
    ]
    for names, whole, local in values:
        for attribute in names:
            value = vars(parent).get(attribute)
            if type(value) is int and value == whole:
                plan.attributes.setdefault((name, attribute), tuple(local))


def _take_apart(plan: ParallelPlan, choices: Sequence[Choice], why: str) -> None:
    """Split each of these layers by itself if a rule names it; otherwise leave it whole."""
    for choice in choices:
        if choice.is_wished:
            choice.style = ALONE[choice.style]
        else:
            plan.left[choice.name] = why


# -- adapters


def _split_adapters(model: nn.Module, plan: ParallelPlan) -> None:
    """Split the LoRA layers of split layers: B of a column layer, A of a row layer.

    The narrow product between A and B is whole on every rank.
    """
    for choice in list(plan.choices):
        wrapper = choice.name.removesuffix(ADAPTED)
        if wrapper == choice.name or choice.style not in ("column", "row"):
            continue
        inner, dim = ("lora_B", 0) if choice.style == "column" else ("lora_A", 1)
        for name, module in model.get_submodule(wrapper).named_modules():
            if name.startswith(f"{inner}.") and isinstance(module, nn.Linear):
                added = Choice(f"{wrapper}.{name}", module, choice.style, "LoRA")
                added.part = _part(added, dim, choice.part.weight.ranges)
                plan.choices.append(added)


# -- vocabulary


def _split_vocabulary(
    model: nn.Module, plan: ParallelPlan, choices: Mapping[str, Choice], settings: ParallelSettings
) -> None:
    """Split the token embedding and the output layer if the model identifies them."""
    names = {id(module): name for name, module in model.named_modules()}
    for choice in (*plan.choices, *plan.partial):
        names.pop(id(choice.module), None)
    found = [choice for choice in choices.values() if choice.style in ("vocabulary", "head")]
    getters: dict[str, Style] = {
        "get_output_embeddings": "head",
        "get_input_embeddings": "vocabulary",
    }
    for getter, style in getters.items():
        module = asked(model, getter)
        name = names.get(id(module))
        if module is None or name is None:
            continue
        if _by_config(name, module, settings, _model_type(model)) is None:
            found = [each for each in found if each.name != name]
            found.insert(0, Choice(name, module, style, "embeddings"))
    fitting = []
    for choice in found:
        module = choice.module
        is_table = isinstance(module, nn.Embedding)
        if not is_table and (choice.style == "vocabulary" or not is_matrix(module)):
            continue
        if is_table and (module.max_norm or module.scale_grad_by_freq or module.sparse):
            plan.left[choice.name] = "max_norm, scale_grad_by_freq and sparse need the whole table"
        elif choice.widths[0] < plan.ranks:
            plan.left[choice.name] = "fewer rows than ranks"
        else:
            shares = _shares(choice.widths[0], plan.ranks, choice.name, plan.grain)
            choice.part = _part(choice, 0, _ranges(shares, 1))
            fitting.append(choice)
    split = {id(choice.module) for choice in fitting}
    for name, module in model.named_modules():  # a table that another module reads too stays whole
        weight = dict(module.named_parameters(recurse=False)).get("weight")
        if weight is None or id(module) in split:
            continue
        for choice in [each for each in fitting if weight_of(each.module) is weight]:
            fitting.remove(choice)
            plan.left[choice.name] = f"{name} shares its table"
    plan.choices += fitting


# -- tokens


def _shard_tokens(model: nn.Module, plan: ParallelPlan) -> None:
    """Mark the layers of blocks whose inputs and outputs are sharded over tokens."""
    styles = {choice.name: choice.style for choice in (*plan.choices, *plan.partial)}
    attentions = tuple(plan.attentions.values())
    counted = {
        parent_of(each)
        for each in plan.choices
        if each.style == "column" and _head_dim(model.get_submodule(parent_of(each)), 0) is not None
    }
    plan.stretch = find_stretch(model, styles, attentions, counted - set(attentions))
    for choice in plan.choices:
        if choice.style in ("column", "row"):
            choice.part = replace(choice.part, shards_tokens=True)


# -- splits


def _part(choice: Choice, dim: int, ranges: RangesOfRanks) -> LayerPart:
    """Return the part of a layer. `dim` 0 splits the outputs, 1 the inputs."""
    transposed = is_transposed(choice.module)
    shape = tuple(weight_of(choice.module).shape)
    own_dim = 1 - dim if transposed else dim
    weight = Split("split", shape, own_dim, ranges)
    return LayerPart(
        choice.name,
        weight,
        transposed,
        gathers=choice.style == "column_gather",
        scatters=choice.style == "row_scatter",
        is_head=choice.style == "head",
    )


def _fill_splits(model: nn.Module, plan: ParallelPlan, cut: Mapping[str, Split]) -> None:
    """Set the split of every parameter; tied parameters are one parameter."""

    def whole(kind: Literal["equal", "partial"], parameter: Tensor) -> Split:
        return Split.whole(kind, tuple(parameter.shape), plan.ranks)

    found: dict[int, tuple[Split, str]] = {}
    for choice in (*plan.choices, *plan.partial):
        for name, parameter in choice.module.named_parameters(recurse=False):
            if choice.style == "partial":
                split = whole("partial", parameter)
            elif name == "weight":
                split = choice.part.weight
            elif name == "bias" and choice.style not in ("row", "row_scatter"):
                split = choice.part.side
            else:
                split = whole("equal", parameter)
            before, other = found.setdefault(id(parameter), (split, choice.name))
            if before != split:
                raise UsageError(
                    f"layers '{other}' and '{choice.name}' share their {name}, and would cut "
                    "it in two ways.",
                    fix="untie them, or name neither of them in partition_config.",
                )
    for norm in plan.stretch.norms if plan.stretch is not None else ():
        for parameter in model.get_submodule(norm).parameters():
            found[id(parameter)] = whole("partial", parameter), norm
    for name, parameter in model.named_parameters():
        default = whole("equal", parameter), ""
        plan.splits[name] = cut.get(name) or found.get(id(parameter), default)[0]


# -- modules


def is_transposed(module: nn.Module) -> bool:
    """Return whether a layer's weight is (in, out), as in transformers' Conv1D."""
    return any(
        each.__name__ == "Conv1D" and not issubclass(each, nn.Conv1d)
        for each in type(module).__mro__
    )


def is_matrix(module: nn.Module) -> bool:
    """Return whether a module is a linear layer or an embedding, which can be split."""
    return isinstance(module, nn.Linear | nn.Embedding) or is_transposed(module)


def weight_of(module: nn.Module) -> Tensor:
    """Return the weight of a layer for which `is_matrix` is true."""
    return cast(Tensor, module.weight)


def parent_of(choice: Choice) -> str:
    """Return the name of the module that contains a layer, or the LoRA adapter around it."""
    return choice.name.removesuffix(ADAPTED).rpartition(".")[0]


def _wild(name: str) -> str:
    """Return a name with its block numbers replaced by `*`."""
    return ".".join("*" if each.isdigit() else each for each in name.split("."))
