"""Run the ordinary training loop with pipeline stages: engine(batch), backward, step.

In training, a call runs the whole schedule, forwards and backwards. It returns the loss with an
autograd node on every rank of the pipeline. The node's backward receives the factor by which the
caller multiplied the loss. The call assumed a factor in advance: loss scale / accumulation steps,
or the factor that the caller used before. The gradients of a step are accumulated unreduced, so
they can be multiplied by the ratio of the two factors. The backward that ends the step sums tied
gradients and reduces all of them. `_open` contains the calls that wait for their backward, and
`_added` counts the calls in the sums.

The ranks of a pipeline have the same rows or their own rows. Clients that treat every rank as
data-parallel (accelerate, the Trainer) use own rows. Own rows are sent to all ranks. The pipeline
computes the rows of one rank after those of another, and each rank gets the results of its rows.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from ..base.device import call_instead, call_plainly
from ..base.errors import UsageError
from ..base.log import log_once
from ..base.nested import tensors_in
from ..comm.collectives import Comm, propagate_errors
from ..extensions.loss_factor import loss_factor_of
from ..parallel.autograd import with_backward
from ..sharding.hooks import weak_hook
from .handed import hand_out, hand_to_all
from .pipeline import Pipeline
from .rows import cut_rows, join_rows, rows_of
from .stage import MicroBatch, loss_in

TOTAL = "num_items_in_batch"  # transformers models divide a sum of losses by it
NEAR = 1e-6  # relative tolerance for the rounding of equal factors
# A model's output: an object with a loss, only the loss, or no loss
_OBJECT, _BARE, _NOTHING = range(3)


class StageOutput(dict[str, Any]):
    """The output of a model that is divided into pipeline stages, with the loss on every rank.

    The loss is available as `.loss`, `["loss"]` and `[0]`. Other values are only on the last stage;
    accessing them raises KeyError, AttributeError or IndexError with an explanation.
    """

    def __getitem__(self, key: Any) -> Any:
        if isinstance(key, int) and not -len(self) <= key < len(self):
            raise IndexError(_elsewhere(str(key)))
        if isinstance(key, int | slice):
            return tuple(self.values())[key]
        return super().__getitem__(key)

    def __missing__(self, key: str) -> Any:
        raise KeyError(_elsewhere(key))

    def __getattr__(self, name: str) -> Any:
        if name in self:
            return self[name]
        raise AttributeError(_elsewhere(name))


def _elsewhere(name: str) -> str:
    return (
        f"'{name}' stays on the last stage of the pipeline; other ranks have only the loss. In "
        "training every rank has only the loss; engine.eval() with engine(batch) returns all "
        "outputs on the ranks of the last stage (engine.mesh)."
    )


class _Call:
    """One call in training.

    `factor` is the factor of its losses without the loss scale, and `scale` is the loss scale.
    """

    def __init__(self, loop: PlainLoop, factor: float, scale: float) -> None:
        self._loop = weakref.ref(loop)
        self.factor = factor
        self.scale = scale

    def take(self, grad: Tensor) -> tuple[None]:
        """Receive the gradient of the loss; return that of the anchor, which is None."""
        loop = self._loop()
        if loop is None:
            raise UsageError(
                "a loss is differentiated after its engine was deleted.",
                "",
                "keep the engine while its losses are used.",
            )
        loop.take(self, float(grad))
        return (None,)


class _DirectCall:
    """Handle a direct call of a model that is divided into stages.

    In evaluation it runs the loop, because clients call their own model and rely on hooks.
    Otherwise the model raises an error.
    """

    def __init__(self, loop: PlainLoop) -> None:
        self._loop = weakref.ref(loop)
        self._model = loop.runtime.model

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        loop = self._loop()
        is_of_a_stage = getattr(self._model.__dict__.get("forward"), "is_due", True)
        if loop is None or is_of_a_stage or self._model.training or torch.is_grad_enabled():
            return call_plainly(self._model, *args, **kwargs)
        return loop(args, kwargs)


class _Given:
    """One batch of a call, divided into parts.

    `divisor` divides the sum of their losses; it is 1 if the model divides by a total itself.
    """

    def __init__(self, micro: MicroBatch, parts: int) -> None:
        self.parts = cut_rows(micro, parts)
        self.adds_up = micro.kwargs.get(TOTAL) is not None
        self.divisor = 1 if self.adds_up else len(self.parts)


class PlainLoop:
    """Runs the calls of an ordinary training loop on pipeline stages.

    A call of the model in training runs the schedule's forwards and backwards, and accumulates the
    gradients. The backward of the returned loss therefore computes no gradients. It multiplies the
    accumulated gradients by a factor if the caller has scaled the loss. If it is the last backward
    of a step, it also reduces the gradients.

    The constructor registers the loop with the runtime of the pipeline. The runtime calls
    `before_step` before each optimizer step, and `forget` when it discards gradients.

    Args:
        pipeline: The pipeline that runs the stages.
        parts: Number of micro-batches into which a batch is divided by rows. None means that the
            user has not configured the number; a batch is then one micro-batch. In evaluation, a
            batch whose number of rows is not divisible is also one micro-batch.
        check: A function that compares the first batch between the ranks that must receive equal
            batches. Every rank of the pipeline calls it. None skips the comparison.
        own_rows: The communicator of the ranks of the pipeline, if each of them receives its own
            batch (as with accelerate). Direct calls of the model in evaluation then also run the
            pipeline. None if all ranks of the pipeline receive the same batch.
    """

    def __init__(
        self,
        pipeline: Pipeline,
        parts: int | None,
        check: Callable[[Any], None] | None = None,
        own_rows: Comm | None = None,
    ) -> None:
        self.pipeline = pipeline
        self.runtime = pipeline.runtime
        self._loss_factor = loss_factor_of(self.runtime)
        self.parts = parts
        self._check = check
        self._own_rows = own_rows
        if own_rows is not None:
            # Set where torch looks before any hook, because hooks of a rank's stages are meant for
            # calls of its stages.
            call_instead(self.runtime.model, _DirectCall(self))
        self._open: list[_Call] = []
        self._added = 0
        # Factor that callers apply to a loss, without the loss scale
        self._learned: float | None = None
        self._has_logged_idling = False
        backward = self.runtime.backward
        before_step = weak_hook(self, PlainLoop.before_step, raises_if_gone=False)
        backward.before_steps.append(before_step)
        backward.after_drops.append(weak_hook(self, PlainLoop.forget, raises_if_gone=False))

    # -- calls

    def __call__(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Run the model on a batch and return its output.

        In training with gradients enabled, forwards and backwards run. Otherwise only forwards run.

        Args:
            args: Positional arguments of the model.
            kwargs: Keyword arguments of the model.

        Returns:
            In training, the loss or a `StageOutput` with the loss. In evaluation, the whole output
            on the ranks of the last stage, and only its loss, if any, on other ranks. If ranks have
            their own rows, each receives the output for its rows.

        Raises:
            UsageError: The model is a list of layers, or an argument requires a gradient.

        Note:
            Collective: every rank of the pipeline must call it.
        """
        micro = MicroBatch(tuple(args), dict(kwargs))
        if not self.pipeline.staged.has_all_inputs:
            raise UsageError(
                "engine(batch) on a list of layers that is cut into stages.",
                "Its first stage takes the inputs, its last one the labels.",
                "call engine.train_batch(data_iter) for each step, engine.eval_batch(data_iter) to "
                "evaluate.",
            )
        with propagate_errors(self.runtime.comm.whole):
            if self._check is not None:
                self._check((micro.args, micro.kwargs))
                self._check = None
            if torch.is_grad_enabled() and self.runtime.model.training:
                return self._train(micro)
            return self._evaluate(micro)

    def _train(self, micro: MicroBatch) -> Any:
        if tensors_in((micro.args, dict(micro.kwargs))):
            raise UsageError(
                "an argument of engine(batch) requires a gradient, and the model is cut into "
                "stages.",
                "The call runs the backward too, so no gradient leaves it through its arguments.",
                "detach the argument, or give the model what computes it.",
            )
        given = [_Given(each, self.parts or 1) for each in self._batches(micro)]
        if self.parts is None and self._own_rows is None:
            self._log_idling()
        scale = self._loss_factor.scale
        factor = self._learned
        if factor is None:
            factor = 1.0 / self._loss_factor.accumulation
        # The mean over ranks with their own rows, like over data-parallel ranks.
        each = [
            scale * factor / (len(given) * batch.divisor) for batch in given for _ in batch.parts
        ]
        with self._unreduced(), self._loss_factor.carried():
            outcome = self.pipeline.run(
                [part for batch in given for part in batch.parts], scale=each
            )
        loss, kind = self._losses_of_last_stage(outcome.losses, given, is_bare=outcome.is_bare)
        call = _Call(self, factor, scale)
        self._open.append(call)
        self._added += 1
        # A leaf that makes the loss require a gradient, which has been computed already
        anchor = torch.zeros((), device=loss.device, requires_grad=True)
        node = with_backward(lambda anchor: loss.clone(), call.take, anchor)
        return node if kind == _BARE else StageOutput(loss=node)

    def _batches(self, micro: MicroBatch) -> list[MicroBatch]:
        """Return the shared batch of a call, or the batches of all ranks."""
        if self._own_rows is None:
            return [micro]
        value = {"args": list(micro.args), "kwargs": dict(micro.kwargs)}
        found = hand_to_all(value, self._own_rows, "rows of each rank")
        return [MicroBatch(tuple(each["args"]), each["kwargs"]) for each in found]

    def _evaluate(self, micro: MicroBatch) -> Any:
        many = self.parts or 1
        given = []
        for batch in self._batches(micro):
            rows = rows_of(batch)
            count = many if rows is not None and rows % many == 0 else 1
            given.append(_Given(batch, count))
        parts = [part for batch in given for part in batch.parts]
        with torch.no_grad():
            outputs = self.pipeline.run(parts, trains=False).outputs
            losses = None
            found = None
            is_bare = False
            if outputs is not None:
                is_bare = isinstance(outputs[0], Tensor)
                # A tensor of rows is no loss, although it may have one row and one column
                has_rows = is_bare and any(each.dim() > 1 or each.numel() > 1 for each in outputs)
                found_losses = [] if has_rows else map(loss_in, outputs)
                losses = [loss for loss in found_losses if loss is not None]
                rest = iter(outputs)
                found = [join_rows([next(rest) for _ in batch.parts]) for batch in given]
            loss, kind = self._losses_of_last_stage(losses, given, is_bare=is_bare)
            if kind == _BARE:
                return loss
            output: Any
            if self._own_rows is not None:
                last = self._own_rows.size - 1
                output = hand_out(found, self._own_rows, "outputs for each rank", last)
            elif found is None:
                return StageOutput() if kind == _NOTHING else StageOutput(loss=loss)
            else:
                (output,) = found
            own = given[self._place]
            if not isinstance(output, dict):
                return output
            if own.adds_up and len(own.parts) > 1:
                output["loss"] = loss
            return output if self._own_rows is None else StageOutput(output)

    @property
    def _place(self) -> int:
        """Return the index of this rank's batch in a call."""
        return 0 if self._own_rows is None else self._own_rows.rank

    def _losses_of_last_stage(
        self, losses: Sequence[Tensor] | None, given: Sequence[_Given], *, is_bare: bool
    ) -> tuple[Tensor, int]:
        """Send the losses and the kind of output from the last stage to every rank.

        Returns the loss of this rank's batch and the kind.
        """
        row = torch.zeros(1 + len(given), dtype=torch.float64, device="cpu")
        if not losses:
            row[-1] = _NOTHING
        else:
            row[-1] = _BARE if is_bare else _OBJECT
            rest = iter(losses)
            for place, batch in enumerate(given):
                total = torch.stack([next(rest).double().cpu() for _ in batch.parts]).sum()
                row[place] = total / batch.divisor
        told = self.pipeline.broadcast_from_last(row, "loss of the last stage")
        return told[self._place].float().reshape(()).to(self.pipeline.mesh.device), int(told[-1])

    @contextmanager
    def _unreduced(self) -> Iterator[None]:
        """Run backwards whose gradients are reduced later by `take`."""
        states = self.pipeline.states
        boundary = self.runtime.step.is_boundary
        states.reduces = False
        try:
            yield
        finally:
            states.reduces = True
            self.runtime.step.is_boundary = boundary

    def _log_idling(self) -> None:
        if self._has_logged_idling:
            return
        self._has_logged_idling = True
        ranks = self.pipeline.mesh.pp
        idle = (ranks - 1) / (ranks - 1 + self.pipeline.staged.virtual)
        log_once(
            f"engine(batch) sends a batch through {ranks} pipeline ranks as one micro-batch: "
            f'each idles {idle:.0%} of the time. "pipeline": '
            '{"micro_batches": k} splits each batch by rows into k micro-batches; train_batch '
            "runs all micro-batches of a step in the pipeline."
        )

    # -- backward and step

    def reached(self) -> int:
        """Return a number that changes with each backward of a loss that the loop has returned."""
        return len(self._open)

    @contextmanager
    def expected(self, loss: Any, step: int) -> Iterator[bool]:
        """Return a context that requires a backward of a loss in its block, and yields True.

        Args:
            loss: A loss that the loop has returned, or a tensor computed from it.
            step: Not used. `LossChecks.expected` has the same arguments.

        Raises:
            UsageError: The block ended without an error, and no backward of a loss of this loop ran
                in it. If `loss` is not a tensor that requires a gradient, the error is raised on
                entry.
        """
        many = len(self._open)
        if isinstance(loss, Tensor) and loss.requires_grad:
            yield True
        if len(self._open) >= many:
            what = "a tensor" if isinstance(loss, Tensor) else f"a {type(loss).__name__}"
            raise UsageError(
                f"engine.backward got {what} that was not made from a loss = engine(batch) whose "
                "backward is due.",
                "With pipeline stages, the loss of a call identifies its backward.",
                "pass that loss, or a tensor computed from it with gradients on; from an output "
                "that is not a tensor, pass `.loss`.",
            )

    @torch.no_grad()
    def take(self, call: _Call, grad: float) -> None:
        """Complete the backward of a loss that the loop has returned.

        The gradients of the loss were computed during the forward call, for an assumed factor of
        the loss. If the caller multiplied the loss by another factor, the accumulated gradients are
        multiplied by the ratio of the two factors, and later calls assume the caller's factor. If
        this backward is the last one of a step, the gradients are reduced.

        Args:
            call: The forward call that returned the loss.
            grad: The gradient of the loss, which is the product of all factors by which the loss
                was multiplied.

        Raises:
            UsageError: Backward was called twice for the loss, or its gradients were discarded. The
                error is also raised if the ranks of the pipeline applied different factors, if only
                some of them end a step, or if the factor has to be corrected but the gradients of
                several calls have already been added up.
            PeerError: Another rank failed or issued a different collective.

        Note:
            Collective: every rank of the pipeline must call it. If the backward ends a step, every
            data-parallel rank must call it too.
        """
        runtime = self.runtime
        with propagate_errors(runtime.comm.whole):
            if call not in self._open:
                raise UsageError(
                    "a second backward through one loss, or one whose gradients were dropped.",
                    "The backward of a model in stages has run with its forward; its gradients "
                    "count once, until zero_grad or the step.",
                    "call engine.backward(loss) once for each loss = engine(batch), before the "
                    "step.",
                )
            applied = grad * self._loss_factor.at_output() / call.scale
            self._compare(applied, runtime.step.is_boundary)
            if not math.isclose(applied, call.factor, rel_tol=NEAR):
                self._rescale(call, applied)
            self._open.remove(call)
            if runtime.step.is_boundary and not self._open:
                self._reduce()

    def _compare(self, applied: float, is_boundary: bool) -> None:
        """Raise UsageError on every rank if the ranks' backwards differ."""
        row = torch.tensor([applied, float(is_boundary)], dtype=torch.float64, device="cpu")
        table = self.pipeline.gather_rows(row, "a backward")
        if not all(torch.equal(row, table[0]) for row in table) and not table.isnan().any():
            raise UsageError(
                "the ranks of a pipeline differ in their backward: factor of the loss and whether "
                f"it ends a step are {table.tolist()}, by pipeline rank.",
                "They hold parts of one model, and one loss.",
                "do the same with the loss on every rank.",
            )

    def _rescale(self, call: _Call, applied: float) -> None:
        if self._added > 1:
            raise UsageError(
                f"a loss was multiplied by {applied:g}, and {call.factor:g} was assumed (without "
                "the loss scale).",
                "The gradients of other calls of this step are in the same sums already.",
                "multiply all losses of a step by the same factor; it is assumed from the first "
                "step on.",
            )
        for group in self.runtime.trained_groups:
            summand = group.gradient.summand
            for number in summand.arrived:
                summand.values(number).mul_(applied / call.factor)
        if math.isfinite(applied) and applied:
            self._learned = applied

    def _reduce(self) -> None:
        self._added = 0
        self.pipeline.states.end_step()

    def before_step(self) -> None:
        """Check that no backward is missing, and reduce accumulated gradients.

        Gradients that the last backward of the step has already reduced are left unchanged.

        Raises:
            UsageError: The backward of a loss is missing. The step's gradients are discarded.
            PeerError: Another rank failed or issued a different collective.

        Note:
            Collective: every rank of the pipeline and every data-parallel rank must call it.
        """
        self.refuse_open()
        if self._added:
            self._reduce()

    def refuse_open(self) -> None:
        """Check that `backward` has run for every loss of the current step.

        Raises:
            UsageError: A call in training returned a loss whose `backward` has not run. The
                gradients of the step are discarded first.
        """
        if self._open:
            self.runtime.backward.discard_step()
            raise UsageError(
                "a step before the backward of a loss = engine(batch).",
                "In training the call has computed gradients, and their factor is known only after "
                "backward.",
                "call engine.backward(loss) first, or use torch.no_grad() for calls without "
                "backward.",
            )

    def refuse_own_rows(self, what: str) -> None:
        """Raise an error if each rank of a pipeline receives its own batch.

        Args:
            what: The name of the called function, which needs the same batch on all ranks.

        Raises:
            UsageError: Each rank receives its own batch.
        """
        if self._own_rows is not None:
            raise UsageError(
                f"{what} with pipeline.rows = own.",
                "It takes the same rows on all ranks of a pipeline.",
                "call loss = engine(batch) with each rank's rows, or leave pipeline.rows out.",
            )

    def refuse_begun(self) -> None:
        """Raise an error if `train_batch` cannot run, because a step has begun.

        Raises:
            UsageError: Gradients are accumulated already, or each rank receives its own batch. The
                error is also raised if the backward of a loss is missing. In this case, the step's
                gradients are discarded.
        """
        self.refuse_own_rows("train_batch")
        self.refuse_open()
        if self._added:
            raise UsageError(
                "train_batch in a step that calls of engine(batch) have begun.",
                "It takes a whole step, and its gradients would be added to theirs.",
                "end the step with engine.step(), or drop its gradients with engine.zero_grad().",
            )

    def forget(self) -> None:
        """Discard the record of all forward calls of the step.

        The method is called after the gradients of these calls were discarded. A later backward of
        their losses raises UsageError.
        """
        self._open.clear()
        self._added = 0
