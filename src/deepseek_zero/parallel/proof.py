"""Check that each rank computes its part of the modules that contain split layers.

A plan (plans.py) selects layers by names and widths. Between its column layers and its row layer a
module may still use all features (a norm, a softmax, top-k), count heads in another way, or have
other parameters. Therefore one module of each kind is run on small random inputs, once whole and
once as each rank would run it:

    args -> x    column layers    h -> z    row layer    y -> output

The products themselves are correct by construction (functions.py). Their outputs h and y are
replaced by random tensors, of which a rank receives its part. The gradients of x, z and the output
are random tensors too. No weight of a split layer is needed, so the proof takes milliseconds for a
layer of any size. It holds if for each rank

    x, the output, and the gradients of y and of the arguments are equal to the whole ones
    z and the gradient of h are this rank's part of the whole ones

The gradients of the module's other parameters show how these are split along the axis: `equal` on
every rank, a summand (`partial`), or a part, if an attention has one per head or feature. The own
parameters of a feed-forward layer are not split; one per feature is an error.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from copy import deepcopy
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..base.device import CPU, has_no_values
from ..base.errors import NotBuiltError, brief
from ..base.log import log_once
from ..base.nested import Args, Kwargs, all_tensors, map_inputs, once
from ..planner.split import Ranges, Split
from .cuts import cut, taken
from .holders import (
    ModuleCall,
    RegionHolder,
    calls_in,
    holders_of,
    is_inside,
    joined,
    simple_call,
    small_copy,
    widths_of,
    without_caches,
)
from .plans import Choice, ParallelPlan

Splits = Mapping[str, Split]  # by name
MOST_WAYS = 16  # ways of splitting a module's own parameters
SMALL = 1e-2  # gradients below this times the tolerance count as zero
TOLERANCES = {torch.float32: 1e-3, torch.float64: 1e-6}
HALF_TOLERANCE = 3e-2


class Unproven(Exception):
    """Raised if a module cannot be run on sample inputs, so its split cannot be checked."""


class _Differs(Exception):
    """A result on a rank that differs from that of the whole module."""


class _Fails(_Differs):
    """The module raises on a rank."""


def prove(model: nn.Module, plan: ParallelPlan) -> None:
    """Check that a model with split layers computes the results of the whole model.

    The checked modules contain column layers and the row layers that read their outputs. For each
    kind of such a module, a copy is run on small random inputs: once as a whole, and then for each
    rank with only the rank's part of the split layers. The module may also contain parameters
    outside split layers. The results show whether these parameters must be split, or their
    gradients summed over the ranks, and `plan.splits` is updated accordingly. A module that cannot
    be run on such inputs is added to `plan.unproven`. After `parallelize`, the first forward of the
    model checks it. The model and torch's random generators are not changed.

    Args:
        model: The whole model, before anything is split.
        plan: The result of `choose` for this model, whose `splits` and `unproven` are updated.

    Raises:
        NotBuiltError: A rank would compute another result than the whole model, a module cannot be
            copied, or modules that share a parameter would have to split it in different ways. The
            message names the module.
    """
    holders = holders_of(model, plan)
    calls = calls_in(model, [holder.names[0] for holder in holders])
    examined: list[tuple[RegionHolder, Splits]] = []
    for holder in holders:
        call = calls.get(holder.names[0]) or simple_call(holder)
        if call is None:
            plan.unproven.append(holder)
            continue
        try:
            found = examine(holder, call, plan.splits)
        except Unproven:
            plan.unproven.append(holder)
            continue
        examined.append((holder, found))
    _refuse_shared_parameters(model, examined)
    for holder, found in examined:
        _take_splits(plan, holder, found)


def watch(model: nn.Module, plan: ParallelPlan) -> None:
    """Make the first forward check the modules that `prove` could not run.

    The check uses the arguments of that forward. The forward raises NotBuiltError if a rank would
    compute another result, or if a module cannot be checked.

    Args:
        model: The model, after its layers were split; hooks are registered on these modules.
        plan: The plan, whose `unproven` lists the modules.
    """
    for holder in plan.unproven:
        _watch(model.get_submodule(holder.names[0]), holder, dict(plan.splits))


def _watch(module: nn.Module, holder: RegionHolder, splits: Splits) -> None:
    """Examine a module with the arguments of its first forward, first with a part of them."""

    def look(module: nn.Module, args: Args, kwargs: Kwargs) -> None:
        hook.remove()
        for call in (small_copy(args, kwargs), ModuleCall(args, kwargs)):
            try:
                found = examine(holder, call, splits)
                break
            except Unproven as error:
                failure = error
        else:
            _refuse_unproven(holder, failure)
            return
        for inner, split in found.items():
            name = joined(holder.names[0], inner)
            if splits[name] != split:
                raise _refused(
                    holder,
                    f"Its parameter '{name}' would have to be {_WORDS[split.kind]}, which is seen "
                    "in the first forward only, too late for the layout of its gradients",
                )

    hook = module.register_forward_pre_hook(look, with_kwargs=True)


_WORDS = {
    "split": "split over the ranks",
    "equal": "held whole, with a gradient that is not summed",
    "partial": "held whole, with a gradient that is summed over the ranks",
}


# -- runs


class _Key(NamedTuple):
    """What a result of a run is.

    Attributes:
        kind: "read" (input of a split layer), "output", "attribute" (a tensor in an attribute,
            which a loss may use), or the gradient of what a split layer has "given", of an
            "argument" or of an "own" parameter.
        name: The layer, attribute or parameter.
        number: The number of the call of the layer, or of the argument.
    """

    kind: str
    name: str = ""
    number: int = 0


_Results = dict[_Key, Tensor]

# What differs, by kind of the result
_DIFFERENCES = {
    "read": "layer '{}' reads another tensor",
    "output": "its output is another one",
    "attribute": "attribute '{}', which a loss may use, is another one",
    "given": "the gradient of what layer '{}' gives is another one",
    "argument": "the gradient of what it is given is another one",
}
# The style of the layers of which a rank has a part of the result
_CUT_BY = {"read": "row", "given": "column"}


def _is_finite(results: _Results) -> bool:
    """Return whether all results except attributes are finite."""
    return all(
        bool(each.isfinite().all()) for key, each in results.items() if key.kind != "attribute"
    )


class _Bench:
    """Runs one module with random values, whole and as each rank would."""

    def __init__(
        self, holder: RegionHolder, call: ModuleCall, device: torch.device, dtype: torch.dtype
    ) -> None:
        self.holder = holder
        self.device = device
        self.dtype = dtype
        self.tolerance = TOLERANCES.get(dtype, HALF_TOLERANCE)
        # By split layer and number of its call: random values of its output and of the gradient of
        # its input, both whole
        self.boundaries: dict[tuple[str, int], tuple[Tensor, Tensor]] = {}
        self.cotangent: Tensor | None = None
        self._generator = torch.Generator().manual_seed(1)
        self._own = {
            name: self._value(name, param) for name, param in holder.own_parameters().items()
        }
        self._has_hidden = False
        self._inputs = {
            widths_of(each)[1] for each in holder.members.values() if each.style == "column"
        }
        made = map_inputs((call.args, call.kwargs), once(self._made))
        self._call = ModuleCall(*without_caches(made))

    def random(self, shape: Sequence[int]) -> Tensor:
        """Return normal random numbers in the device and dtype of the runs."""
        made: Tensor = torch.randn(tuple(shape), generator=self._generator, device="cpu")
        return made.to(self.device, self.dtype)

    def _value(self, name: str, param: Tensor) -> Tensor:
        """Return a value for a parameter so that the parts of all ranks differ."""
        if not param.is_floating_point():
            return torch.zeros(param.shape, dtype=param.dtype, device=self.device)
        if param.dim() >= 2:
            return self.random(param.shape) / math.sqrt(param.shape[-1])
        near = self.holder.vectors.get(name)
        mean = torch.ones(param.shape, device="cpu") if near is None else near.float().cpu()
        spread = 1 + 0.3 * torch.rand(param.shape, generator=self._generator, device="cpu")
        return (mean * spread).to(self.device, self.dtype) + 0.1 * self.random(param.shape)

    def _made(self, tensor: Tensor) -> Tensor:
        """Return a copy of an argument, or random values if it has none."""
        is_floating = tensor.is_floating_point()
        made: Tensor
        if not has_no_values(tensor):
            dtype = self.dtype if is_floating else tensor.dtype
            made = tensor.detach().to(self.device, dtype).clone()
        elif is_floating:
            made = self.random(tensor.shape)
        else:
            made = torch.ones(tensor.shape, dtype=tensor.dtype, device=self.device)
        # The input of column layers has a gradient in every layer except the first
        is_hidden = is_floating and tensor.dim() in (2, 3) and tensor.shape[-1] in self._inputs
        needs_grad = tensor.requires_grad or (is_hidden and not self._has_hidden)
        self._has_hidden |= is_hidden
        return made.requires_grad_(needs_grad)

    def run(self, rank: int | None, cuts: Splits, poisoned: Sequence[str]) -> _Results:
        """Run the module forward and backward.

        Args:
            rank: The rank to run as. None runs the whole module, which creates the random tensors.
            cuts: How its own parameters are split, by name.
            poisoned: Split layers whose parameters are NaN; those of the others are zero.
        """
        module, own = self._module(rank, cuts, poisoned)
        results: _Results = {}
        losses = list[Tensor]()
        leaves: dict[_Key, Tensor] = {}
        for name in (*self.holder.members, *self.holder.given):
            layer = module.get_submodule(name)
            layer.forward = self._forward_of(name, rank, results, losses, leaves)
        arguments: dict[_Key, Tensor] = {}

        def given(tensor: Tensor) -> Tensor:
            """Return a copy of an argument, and record it if it needs a gradient."""
            leaf = tensor.detach().clone()
            if tensor.requires_grad:
                arguments[_Key("argument", number=len(arguments))] = leaf.requires_grad_()
            return leaf.clone()

        call_args, call_kwargs = map_inputs((self._call.args, self._call.kwargs), once(given))
        with self._same_draws():
            found = module(*call_args, **call_kwargs)
        output = next((each for each in all_tensors(found) if each.is_floating_point()), None)
        if output is not None:
            results[_Key("output")] = output.detach().clone()
            if rank is None:
                self.cotangent = self.random(output.shape)
            if self.cotangent is None or self.cotangent.shape != output.shape:
                raise _Differs("it returns a tensor of another shape")
            losses.append((output * self.cotangent).sum())
        results |= _kept_in(module)
        inputs = leaves | arguments | {_Key("own", name): param for name, param in own.items()}
        total = sum(loss.float() for loss in losses if loss.requires_grad)
        grads: Sequence[Tensor | None] = [None] * len(inputs)
        if isinstance(total, Tensor):
            grads = torch.autograd.grad(total, list(inputs.values()), allow_unused=True)
        for (key, leaf), grad in zip(inputs.items(), grads, strict=True):
            results[key] = torch.zeros_like(leaf) if grad is None else grad
        return results

    @contextmanager
    def _same_draws(self) -> Iterator[None]:
        """Make each run draw the same random numbers, without changing torch's generators."""
        on_cuda = self.device.type == "cuda"
        devices = [self.device] if on_cuda else []
        with torch.random.fork_rng(devices=devices):
            torch.default_generator.manual_seed(1)
            if on_cuda:
                with torch.cuda.device(self.device):
                    torch.cuda.manual_seed(1)
            yield

    def _module(
        self, rank: int | None, cuts: Splits, poisoned: Sequence[str]
    ) -> tuple[nn.Module, dict[str, nn.Parameter]]:
        """Return a copy of the module for one rank, and its own trained parameters."""
        holder = self.holder
        memo: dict[int, Any] = {}
        own: dict[str, nn.Parameter] = {}
        for name, param in holder.template.named_parameters():
            layer, _, _ = name.rpartition(".")
            choice = holder.layer_of(name)
            if choice is None:
                value = self._own[name]
                if rank is not None and name in cuts:
                    value = cut(value, cuts[name], rank)
                made = nn.Parameter(value.clone(), requires_grad=value.is_floating_point())
                if made.requires_grad and not any(
                    is_inside(name, other) for other in holder.inside
                ):
                    own[name] = made
            else:
                local = rank if layer in holder.members else None
                made = self._placeholder(param, choice, local, is_poisoned=layer in poisoned)
            memo[id(param)] = made
        for buffer in holder.template.buffers():
            dtype = self.dtype if buffer.is_floating_point() else buffer.dtype
            memo[id(buffer)] = buffer.to(self.device, dtype).clone()
        module = deepcopy(holder.template, memo)
        for (name, attribute), counts in holder.attributes.items():
            if rank is not None:
                setattr(module.get_submodule(name), attribute, counts[rank])
        return module, own

    def _placeholder(
        self, param: Tensor, choice: Choice, rank: int | None, *, is_poisoned: bool
    ) -> nn.Parameter:
        """Return a parameter of a split layer without memory; its values may be NaN."""
        shape = tuple(param.shape)
        if rank is not None:
            split = choice.part.weight if param.dim() > 1 else choice.part.side
            shape = split.local_shape(rank)
        value = torch.zeros((), dtype=param.dtype, device="cpu")
        if param.is_floating_point():
            value = torch.full(
                (), float("nan") if is_poisoned else 0.0, dtype=self.dtype, device="cpu"
            )
        return nn.Parameter(value.to(self.device).expand(shape), requires_grad=False)

    def _forward_of(
        self,
        name: str,
        rank: int | None,
        results: _Results,
        losses: list[Tensor],
        leaves: dict[_Key, Tensor],
    ) -> Callable[..., Tensor]:
        """Return the replacement of a split layer's forward."""
        holder = self.holder
        outputs, _ = widths_of(holder.members.get(name) or holder.given[name])
        outgoing = holder.ranges_of(name, "column", rank)
        incoming = holder.ranges_of(name, "row", rank)

        def forward(x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
            number = sum(1 for key in leaves if key.name == name)
            if rank is None:
                output = self.random((*x.shape[:-1], outputs))
                self.boundaries[name, number] = output, self.random(x.shape)
            if (name, number) not in self.boundaries:
                raise _Differs(f"it calls layer '{name}' more often")
            output, gradient = self.boundaries[name, number]
            output = _part_of(output, outgoing)
            gradient = _part_of(gradient, incoming)
            if gradient.shape != x.shape:
                raise _Differs(
                    f"layer '{name}' reads {_features(x)} where its part has {_features(gradient)}"
                )
            results[_Key("read", name, number)] = x.detach().clone()
            losses.append((x * gradient).sum())
            leaf = leaves[_Key("given", name, number)] = output.clone().requires_grad_()
            return leaf.clone()

        return forward


def _part_of(whole: Tensor, ranges: Ranges | None) -> Tensor:
    """Return ranges of the last dimension, or all of it."""
    return whole if ranges is None else taken(whole, -1, ranges)


def _features(x: Tensor) -> str:
    return f"a tensor of shape {tuple(x.shape)}"


def _kept_in(module: nn.Module) -> _Results:
    """Return tensors with a gradient function in a module's attributes."""
    found: _Results = {}
    for name, each in module.named_modules():
        for key, value in vars(each).items():
            if isinstance(value, Tensor) and value.grad_fn is not None:
                found[_Key("attribute", joined(name, key))] = value.detach().clone()
    return found


# -- the proof


def examine(holder: RegionHolder, call: ModuleCall, splits: Splits) -> Splits:
    """Check that each rank computes its part of one module that contains split layers.

    Args:
        holder: A copy of the module and its split layers.
        call: Arguments with which the module can be called.
        splits: How the plan splits the model's parameters, by name in the model.

    Returns:
        How the parameters that belong to no split layer are split over the ranks, by name in the
        module.

    Raises:
        NotBuiltError: A rank computes another result than the whole module.
        Unproven: The module could not be run.
    """
    tried: list[str] = []
    attempts = dict.fromkeys(
        [(CPU, torch.float32), (holder.device, torch.float32), (holder.device, holder.dtype)]
    )
    for device, dtype in attempts:
        try:
            # A new thread has none of the caller's autograd modes and hooks
            with ThreadPoolExecutor(1) as pool:
                return pool.submit(_examine_on, holder, call, splits, device, dtype).result()
        except Unproven as error:
            tried.append(str(error))
    raise Unproven(tried[0])


def _examine_on(
    holder: RegionHolder,
    call: ModuleCall,
    splits: Splits,
    device: torch.device,
    dtype: torch.dtype,
) -> Splits:
    """Run the module whole and as each rank, until a way of splitting its parameters holds."""
    bench = _Bench(holder, call, device, dtype)
    whole = _run_whole(bench)
    first_failure: _Differs | None = None
    for cuts in _ways(holder):
        try:
            seen = [_run_rank(bench, rank, cuts) for rank in range(holder.ranks)]
            for rank in range(holder.ranks):
                _compare(bench, whole, seen, rank)
            return {
                key.name: _kind(bench, key.name, grad, [each[key] for each in seen], cuts, splits)
                for key, grad in whole.items()
                if key.kind == "own"
            }
        except _Differs as failure:
            if first_failure is None or isinstance(first_failure, _Fails):
                first_failure = failure
    raise _refused(
        holder,
        f"On a rank, {first_failure}. Between split layers, each feature and each head must be "
        "computed by itself; a norm, softmax or top-k over features is not",
    )


def _run_whole(bench: _Bench) -> _Results:
    """Run the whole module with NaN as the weights of its split layers, which must not be read."""
    members = list(bench.holder.members)
    try:
        whole = bench.run(None, {}, members)
    except Exception as error:
        raise Unproven(brief(error)) from error
    called = {key.name for key in whole if key.kind == "read"}
    missing = [
        name
        for name, each in bench.holder.members.items()
        if name not in called and each.source != "LoRA"
    ]
    if missing:
        raise Unproven(f"its forward does not call layer '{missing[0]}'")
    if _is_finite(whole):
        return whole
    for name in members:
        bench.boundaries.clear()
        without = bench.run(None, {}, [])
        if _is_finite(without) and not _is_finite(bench.run(None, {}, [name])):
            raise _refused(
                bench.holder,
                f"It computes with the weight of layer '{name}' itself, which is split",
            )
    raise Unproven("what it computes from random inputs is not finite")


def _run_rank(bench: _Bench, rank: int, cuts: Splits) -> _Results:
    """Run the module as one rank; an error of the module is a difference."""
    try:
        return bench.run(rank, cuts, list(bench.holder.members))
    except _Differs:
        raise
    except Exception as error:
        raise _Fails(f"its forward fails with {brief(error)}") from error


def _ways(holder: RegionHolder) -> Iterator[Splits]:
    """Yield splits of the module's own parameters: none, all, then some.

    They are split by head or by column.
    """
    able: dict[str, Split] = {}
    for name, param in holder.own_parameters().items():
        dim = next((dim for dim, size in enumerate(param.shape) if size in holder.widths), None)
        if dim is not None:
            able[name] = Split("split", tuple(param.shape), dim, holder.widths[param.shape[dim]])
    yield {}
    if able:
        yield able
    some = (
        chosen for count in range(1, len(able)) for chosen in itertools.combinations(able, count)
    )
    for chosen in itertools.islice(some, MOST_WAYS):
        yield {name: able[name] for name in chosen}


def _compare(bench: _Bench, whole: _Results, seen: Sequence[_Results], rank: int) -> None:
    """Compare one rank's run with the whole one."""
    own = seen[rank]
    for key in whole.keys() ^ own.keys():
        if key.kind == "read":
            raise _Differs(f"it calls layer '{key.name}' another number of times")
    for key, expected in whole.items():
        if key.kind == "own" or key not in own:
            continue
        found = own[key]
        what = _DIFFERENCES[key.kind].format(key.name)
        ranges = bench.holder.ranges_of(key.name, _CUT_BY.get(key.kind), rank)
        if ranges is not None:
            expected = taken(expected, -1, ranges)
            if key.kind == "read":
                what = f"layer '{key.name}' does not read its part of what the whole layer reads"
            else:
                split = bench.holder.members[key.name].part.weight
                found = _sum([seen[other][key] for other in split.sharers(rank)])
        _same(bench, found, expected, what)


def _sum(tensors: Sequence[Tensor]) -> Tensor:
    return torch.stack(list(tensors)).sum(0)


def _same(bench: _Bench, found: Tensor, expected: Tensor, what: str) -> None:
    """Raise `_Differs` with a description if two tensors differ by more than the tolerance."""
    if not _is_near(bench, found, expected):
        raise _Differs(what)


def _is_near(bench: _Bench, found: Tensor, expected: Tensor) -> bool:
    """Return whether two tensors differ by less than the tolerance times the largest number."""
    if found.shape != expected.shape or not bool(found.isfinite().all()):
        return False
    if not found.numel():
        return True
    scale = max(float(expected.abs().max()), SMALL)
    return float((found - expected).abs().max()) <= bench.tolerance * scale


def _kind(
    bench: _Bench,
    name: str,
    whole: Tensor,
    parts: Sequence[Tensor],
    cuts: Splits,
    splits: Splits,
) -> Split:
    """Return how one of the module's own parameters is split, from its gradients."""
    holder = bench.holder
    if name in cuts:
        split = cuts[name]
        what = f"the gradient of '{name}' is not its part of the whole one"
        for rank in range(holder.ranks):
            found = _sum([parts[other] for other in split.sharers(rank)])
            _same(bench, found, cut(whole, split, rank), what)
        return split
    planned = splits[joined(holder.names[0], name)]
    if all(_is_near(bench, each, torch.zeros_like(whole)) for each in (whole, *parts)):
        return planned
    shape = tuple(whole.shape)
    if all(_is_near(bench, each, whole) for each in parts):
        return Split.whole("equal", shape, holder.ranks)
    what = f"the gradient of parameter '{name}' is neither the whole one nor a summand of it"
    _same(bench, _sum(parts), whole, what)
    return Split.whole("partial", shape, holder.ranks)


def _refuse_shared_parameters(
    model: nn.Module, examined: Sequence[tuple[RegionHolder, Splits]]
) -> None:
    """Raise NotBuiltError if modules share a parameter but split it differently."""
    found: dict[tuple[int, str], tuple[RegionHolder, Split]] = {}  # by module and name in it
    for holder, splits in examined:
        for of in holder.names:
            holding = model.get_submodule(of)
            for inner, split in splits.items():
                place, _, leaf = inner.rpartition(".")
                found[id(holding.get_submodule(place)), leaf] = holder, split
    seen: dict[int, Split | None] = {}
    for name, module in model.named_modules():
        for leaf, param in module.named_parameters(recurse=False):
            holder_of, split_here = found.get((id(module), leaf), (None, None))
            if split_here is not None and split_here.kind == "equal":
                split_here = None
            if seen.setdefault(id(param), split_here) != split_here:
                holder_of = holder_of or next(each for each, splits in examined if splits)
                raise _refused(
                    holder_of,
                    f"Parameter '{joined(name, leaf)}' is shared with another module, where its "
                    "gradient is to be summed over the ranks in another way",
                )


def _take_splits(plan: ParallelPlan, holder: RegionHolder, found: Splits) -> None:
    """Record the splits of the own parameters of all modules of this kind in the plan."""
    sharded = plan.stretch.norms if plan.stretch is not None else ()
    for of in holder.names:
        for inner, split in found.items():
            name = joined(of, inner)
            is_of_tokens = any(name.startswith(f"{norm}.") for norm in sharded)
            if name in plan.splits and not is_of_tokens and plan.splits[name].kind != "split":
                plan.splits[name] = split


def _described(holder: RegionHolder) -> str:
    """Return the name and the class of a module."""
    kind = type(holder.template).__name__
    return f"'{holder.names[0] or kind}' ({kind})"


def _refused(holder: RegionHolder, why: str) -> NotBuiltError:
    """Create the error for a module that a rank would compute differently."""
    own = [
        name for name in holder.own_parameters() if name.rpartition(".")[0] not in holder.members
    ]
    has = f" It has parameters of its own: {', '.join(own[:4])}." if own else ""
    layers = ", ".join(holder.members)
    return NotBuiltError(
        f"tensor parallelism cannot split {_described(holder)} over tp={holder.ranks}.",
        f"{why}. Split layers: {layers}.{has}",
        'leave these layers whole (tensor_parallel.partition_config, "skip"), or use dp_shard '
        "instead of tp.",
    )


def _refuse_unproven(holder: RegionHolder, error: Unproven) -> None:
    """Raise NotBuiltError for a module that could not be examined.

    If the configuration names its layers, this is only a warning.
    """
    what = f"whether a rank computes its part of {_described(holder)} could not be examined"
    if holder.is_named:
        log_once(
            f"tensor parallelism: {what}: {error}. Its layers are split as partition_config says."
        )
        return
    raise NotBuiltError(
        f"tensor parallelism: {what}.",
        f"A run of a copy of it on the forward's own arguments failed: {error}.",
        "name its layers in tensor_parallel.partition_config if you know that they can be split, "
        'or leave them whole ("skip"), or use dp_shard instead of tp.',
    )
