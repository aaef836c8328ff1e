"""DeepSpeed's engine for a `PipelineModule`, which trains on whole batches only."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import islice, repeat
from typing import Any, NoReturn

import torch
from torch import Tensor

from ...base.errors import DeepSeekZeroError, NotBuiltError, UsageError
from ...comm.collectives import propagate_errors
from ...engine.whole_steps import endless, evaluate, own_batches, train_batch
from . import activation_checkpointing
from .engine import DeepSpeedEngine
from .pipe_topology import PipelineParallelGrid

__all__ = ["PipelineEngine", "PipelineError"]


class PipelineError(DeepSeekZeroError):
    """Raised by methods that a `PipelineEngine` does not support, such as `forward`."""


class PipelineEngine(DeepSpeedEngine):
    """The engine of a `PipelineModule`, which trains and evaluates whole batches.

    `initialize` creates the engine. A program trains and evaluates with `train_batch` and
    `eval_batch`, which run whole batches over all stages. `forward`, `backward` and `step` raise
    `PipelineError`.
    """

    pipeline_parallelism = True
    is_pipe_partitioned = is_grad_partitioned = False  # activations are sent whole

    _batch_fn: Callable[[Any], Any] | None = None
    _data: Iterator[Any] | None = None

    def _refuse(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Raise `PipelineError`, because the engine runs only whole batches, as in DeepSpeed.

        Call `train_batch` or `eval_batch` instead.

        Raises:
            PipelineError: Always.
        """
        raise PipelineError(
            "Only train_batch() is accessible in pipeline mode.",
            "The micro-batches of a step run through the stages in a pipeline.",
            "call engine.train_batch(data_iter) for each step, engine.eval_batch(data_iter) to "
            "evaluate.",
        )

    forward = backward = step = _refuse

    # -- batches

    def train_batch(self, data_iter: Iterator[Any] | None = None) -> Tensor:
        """Run a whole training step: all micro-batches, then one update.

        Each micro-batch runs forward and backward through all stages. After the update, the
        learning-rate schedule advances by one step.

        Args:
            data_iter: Iterator over (inputs, labels), one pair per micro-batch. None uses the data
                that `set_dataiterator` or `set_dataloader` has set, or else the engine's data
                loader. As in DeepSpeed, only the first and the last stage need data.

        Returns:
            The mean loss over micro-batches and data-parallel ranks: a scalar, the same on every
            rank.

        Raises:
            UsageError: There is no data to read, a micro-batch is not a pair, the loss is not a
                scalar, the engine has no optimizer, or `pipeline.rows` is "own" and there are
                several stages.
            StopIteration: The iterator yields fewer micro-batches than a step needs. With more than
                two stages, it is raised on every rank of the pipeline.
            SystemExit: With code 85, after a checkpoint was saved since a rank received a signal
                (checkpoint.save_on_signal).
            PeerError: Another rank failed or issued a different collective.

        Note:
            Collective: every rank must call it.
        """
        data = self._read(data_iter, self.config.gradient_accumulation_steps, uses_loader=True)
        return train_batch(self, data)

    def eval_batch(  # type: ignore[override]
        self,
        data_iter: Iterator[Any] | None,
        return_logits: bool = False,
        compute_loss: bool = True,
        reduce_output: str | None = "avg",
        bcast_loss: bool = True,
        num_micro_batches: int | None = None,
    ) -> Any:
        """Run a batch through all stages without gradients, and compute the mean loss.

        The model runs in evaluation mode. At the end, the engine and all submodules get the mode
        that the engine had before.

        Args:
            data_iter: Iterator over (inputs, labels), one pair per micro-batch. It may be None on
                ranks with neither the first nor the last stage.
            return_logits: Whether to also return the output of the last micro-batch.
            compute_loss: Whether to compute the loss from the outputs of the last stage.
            reduce_output: None to return the outputs of the model if `compute_loss` is false.
                Otherwise ignored; every rank gets the mean loss.
            bcast_loss: Ignored; every rank gets the loss.
            num_micro_batches: Number of micro-batches; None for the number of a training step.

        Returns:
            The mean loss over micro-batches and data-parallel ranks. If `compute_loss` is false, it
            is None, or the list of outputs, one for each micro-batch of this rank, if
            `reduce_output` is None. If `return_logits` is true, a pair of this value and the output
            of the last micro-batch. As in DeepSpeed, only ranks of the last stage have outputs; on
            other ranks they are None.

        Raises:
            UsageError: There is no data to read, `num_micro_batches` is not a positive integer, a
                micro-batch is not a pair, the loss is not a scalar, or `pipeline.rows` is "own" and
                there are several stages.
            StopIteration: The iterator yields fewer micro-batches than needed. With more than two
                stages, it is raised on every rank of the pipeline.
            PeerError: Another rank failed or issued a different collective.

        Note:
            Collective: every rank must call it.
        """
        many = num_micro_batches or self.config.gradient_accumulation_steps
        found: Any = self._read(data_iter, many, uses_loader=self._batch_fn is not None)
        returns_outputs = not compute_loss and reduce_output is None
        keeps_outputs = return_logits or returns_outputs
        loss, outputs = evaluate(
            self, found, num_micro_batches, keeps_outputs=keeps_outputs, has_loss=compute_loss
        )
        result = outputs if returns_outputs else loss
        if not return_logits:
            return result
        return result, None if outputs is None else outputs[-1]

    def _read(
        self, given: Iterator[Any] | None, many: int, *, uses_loader: bool
    ) -> Iterator[Any] | None:
        """Return the iterator over the `many` micro-batches of a call; None if there are no data.

        If `uses_loader`, the engine's data loader is read if there are no other data.
        """
        data = given if given is not None else self._data
        reads = self.is_first_stage() or self.is_last_stage()
        is_idle = data is None and not reads and self.training_dataloader is None
        if is_idle:
            data = repeat((None, None))
        elif data is None and self.training_dataloader is None and self._batch_fn is not None:
            data = repeat(None)  # as in DeepSpeed, the function makes or receives the batch
        elif data is None and uses_loader:
            with propagate_errors(self.runtime.comm):
                data = own_batches(self)
        # `map` would read a list from its beginning in every step.
        if data is None or not hasattr(data, "__next__"):
            return data
        if self._batch_fn is not None and not is_idle:
            data = map(self._batch_fn, data)
        return data if self.mesh.pp <= 2 else self._of_all_ranks(data, many)

    def _of_all_ranks(self, data: Iterator[Any], many: int) -> Iterator[Any]:
        """Yield the micro-batches of a call if no rank of the pipeline has too few of them.

        Otherwise yield nothing, because a stage without data would wait for the other stages.
        """
        with propagate_errors(self.runtime.comm):
            found = list(islice(data, many))
        pipeline = self.parts.pipeline
        assert pipeline is not None
        counts = pipeline.gather_rows(
            torch.tensor([len(found)], device="cpu"), "micro-batches of a call"
        )
        if int(counts.min()) == many:
            yield from found

    def set_dataiterator(self, iterator: Iterator[Any]) -> None:
        """Set the iterator that `train_batch` reads if it is called without an iterator.

        The iterator replaces that of an earlier `set_dataiterator` or `set_dataloader`.
        """
        self._data = iterator

    def set_dataloader(self, loader: Iterable[Any]) -> None:
        """Set the loader that `train_batch` reads if it is called without an iterator.

        The loader replaces that of an earlier `set_dataiterator` or `set_dataloader`. When it ends,
        `train_batch` starts to read it from the beginning, and raises `UsageError` if it yields
        nothing.
        """
        refusal = UsageError(
            "the loader of the pipeline yields no batch.",
            "It is empty, or it is an iterator that has ended.",
            "pass a DataLoader, which can be read again, with at least one batch.",
        )
        self._data = endless(loader, refusal)

    def set_batch_fn(self, fn: Callable[[Any], Any]) -> None:
        """Set a function that converts each item of the data to (inputs, labels).

        `train_batch` and `eval_batch` call it with each item that they read, or with None on a
        rank of the first or last stage that has no data.
        """
        self._batch_fn = fn

    def _reentrant_activation_checkpointing(self) -> bool:
        """Return whether layers are recomputed with DeepSpeed's reentrant function.

        In this library no function is reentrant.
        """
        layers = self._layers
        is_named = (
            layers.activation_checkpoint_func
            is not activation_checkpointing.non_reentrant_checkpoint
        )
        return layers.activation_checkpoint_interval > 0 and is_named

    def set_has_attention_mask(self, value: bool) -> None:
        """Do nothing.

        Stages can send each other tensors of any dtype, including masks.
        """

    def reset_activation_shape(self) -> None:
        """Discard the known shapes of the activations that are sent between stages.

        Call this method before a batch whose activations have other shapes.

        Note:
            Every rank must call it, although it does not communicate.
        """
        if self.parts.pipeline is not None:
            self.parts.pipeline.reset_shapes()

    def get_additional_losses(self) -> None:
        """Return None, DeepSpeed's value for a model without additional losses.

        Raises:
            NotBuiltError: The model's own `get_additional_losses` returns losses.
        """
        if self._layers.get_additional_losses() is not None:
            raise NotBuiltError(
                f"get_additional_losses of {type(self.module).__name__} returns losses.",
                "A pipeline of this library reports only the loss of `loss_fn`.",
                "log the other losses in loss_fn, and return None.",
            )

    # -- ranks

    @property
    def _layers(self) -> Any:
        return self.module  # a PipelineModule; pipe.py imports this module

    @property
    def grid(self) -> PipelineParallelGrid:
        """Return the grid of ranks, which has this rank's coordinates and process groups."""
        grid: PipelineParallelGrid = self._layers.mpu()
        return grid

    @property
    def micro_batch_size(self) -> int:
        """Return the number of samples in a micro-batch of one rank."""
        return self.train_micro_batch_size_per_gpu()

    @property
    def prev_stage(self) -> int:
        """Return `stage_id` - 1."""
        return self.stage_id - 1

    @property
    def next_stage(self) -> int:
        """Return `stage_id` + 1."""
        return self.stage_id + 1

    @property
    def stage_id(self) -> int:
        """Return the index, counted from 0, of the pipeline stage that this rank computes."""
        return int(self._layers.stage_id)

    @property
    def num_stages(self) -> int:
        """Return the number of pipeline stages."""
        return int(self._layers.num_stages)

    @property
    def micro_batches(self) -> int:
        """Return the number of micro-batches per training step of one data-parallel rank."""
        return self.config.gradient_accumulation_steps

    def is_first_stage(self) -> bool:
        """Return whether this rank computes the first pipeline stage."""
        return self.stage_id == 0

    def is_last_stage(self) -> bool:
        """Return whether this rank computes the last pipeline stage."""
        return self.stage_id == self.num_stages - 1

    @property
    def is_data_parallel(self) -> bool:
        """Return whether there is more than one data-parallel rank."""
        return bool(self.grid.data_parallel_size > 1)

    @property
    def is_model_parallel(self) -> bool:
        """Return whether there is more than one tensor-parallel rank."""
        return bool(self.grid.slice_parallel_size > 1)

    def is_pipe_parallel(self) -> bool:
        """Return True, because the engine always has a pipeline of one or more stages."""
        return True
