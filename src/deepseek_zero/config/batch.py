"""The batch sizes of a run: train batch = micro-batch x accumulation x ranks.

Missing values are computed. The rules and messages are DeepSpeed's, with the batch size of the data
loader and the case without any value added.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from .problems import Problem

BATCH_KEYS = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
_LABELS = ("Train batch size", "Micro batch size per gpu", "Gradient accumulation steps")


@dataclass(frozen=True)
class Batch:
    """The batch sizes of a run, after missing values have been computed.

    Attributes:
        train: Train batch size: samples of all ranks per step.
        micro: Micro-batch size per rank, in samples.
        accumulation: Micro-batches per step.
        data_size: Number of ranks that receive different samples.
        why: A text for the user that states how the missing values have been computed; empty in
            `Config.batch`.
    """

    train: int
    micro: int
    accumulation: int
    data_size: int
    why: str = ""


@dataclass(frozen=True)
class BatchRequest:
    """The batch sizes that a configuration sets; None if a key is missing or "auto".

    Attributes:
        data_size: Number of ranks that receive different samples.
        train: Train batch size, in samples.
        micro: Micro-batch size per rank, in samples.
        accumulation: Micro-batches per step.
        loader: The batch size of the program's own data loader, in samples; None without a loader.
            If `train` and `micro` are None, it is the micro-batch size.
        micro_auto: Whether the micro-batch key is "auto". In this case `loader` is used as the
            micro-batch size if `train` is a multiple of `loader` times `data_size`, and
            `accumulation` is None.
    """

    data_size: int
    train: int | None = None
    micro: int | None = None
    accumulation: int | None = None
    loader: int | None = None
    micro_auto: bool = False


def solve(request: BatchRequest) -> Batch | Problem:
    """Compute the three batch sizes from the known ones.

    Returns:
        The train batch size, micro-batch size and accumulation steps. If the known values
        contradict each other, the first problem, with DeepSpeed's message.
    """
    stated = (request.train, request.micro, request.accumulation)
    for value, key, label in zip(stated, BATCH_KEYS, _LABELS, strict=True):
        if value is not None and value <= 0:
            return Problem(
                key, f"{label}: {value} has to be greater than 0", f"set {key} to 1 or more", value
            )
    return _check(_fill(_with_loader(request)))


def _with_loader(request: BatchRequest) -> BatchRequest:
    """Use the batch size of the loader if the known sizes do not determine the others."""
    if request.loader is None or request.micro is not None:
        return request
    if request.train is None:
        return replace(request, micro=request.loader)
    free = request.micro_auto and request.accumulation is None
    fits = request.train % (request.loader * request.data_size) == 0
    return replace(request, micro=request.loader) if free and fits else request


def _fill(request: BatchRequest) -> Batch:
    """Compute missing values.

    These are DeepSpeed's seven cases (`DeepSpeedConfig._set_batch_related_parameters`), and an
    eighth without any value.
    """
    train = request.train
    micro = request.micro
    steps = request.accumulation
    ranks = request.data_size
    if train is None:
        micro = micro or 1
        steps = steps or 1
        return Batch(micro * steps * ranks, micro, steps, ranks, _why_micro(request))
    if micro is None:
        why = f"micro-batch = train batch / ranks{' / accumulation' if steps else ''}"
        return Batch(train, train // ranks // (steps or 1), steps or 1, ranks, why)
    if steps is None:
        return Batch(
            train,
            micro,
            train // micro // ranks,
            ranks,
            "accumulation = train batch / micro-batch / ranks",
        )
    return Batch(train, micro, steps, ranks, "as stated")


def _why_micro(request: BatchRequest) -> str:
    if request.micro is None:
        return "no data loader was passed: micro-batch 1"
    if request.loader == request.micro:
        return "micro-batch from the data loader; train batch = micro-batch x accumulation x ranks"
    return "train batch = micro-batch x accumulation x ranks"


def _check(batch: Batch) -> Batch | Problem:
    solved = (batch.train, batch.micro, batch.accumulation)
    least = batch.data_size * max(1, batch.accumulation)
    for value, key, label in zip(solved, BATCH_KEYS, _LABELS, strict=True):
        if value <= 0:
            fix = (
                f"with {batch.data_size} data-parallel ranks, {BATCH_KEYS[0]} must be a "
                f"multiple of {least}"
            )
            return Problem(key, f"{label}: {value} has to be greater than 0", fix, value)
    product = batch.micro * batch.accumulation * batch.data_size
    if batch.train == product:
        return batch
    return Problem(
        BATCH_KEYS[0],
        "Check batch related parameters. train_batch_size is not equal to micro_batch_per_gpu * "
        f"gradient_acc_step * world_size {batch.train} != {batch.micro} * {batch.accumulation} * "
        f"{batch.data_size}",
        f'set {BATCH_KEYS[0]} to {product}, or write "auto" for one of the three keys',
        batch.train,
    )
