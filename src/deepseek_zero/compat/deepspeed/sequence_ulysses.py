"""DeepSpeed's sequence parallelism (Ulysses) for transformers models.

The module is `deepspeed.runtime.sequence_parallel.ulysses_sp`. `register_with_transformers` checks
the model and returns an mpu, with which `initialize` sets up sequence parallelism
(parallel/sequence_model.py). Each rank has its own loss; programs weight it by the number of
tokens, as for DeepSpeed.
"""

from __future__ import annotations

import json
import math
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from ...base.errors import CheckpointError, UsageError
from ...base.mesh import Mesh
from ...checkpoint.format import decode, encode
from ...checkpoint.safetensors_file import dtype_name, dtype_named
from ...comm.bootstrap import all_gather_bytes
from ...engine.data import to_device
from ...parallel.sequence_model import IGNORED, SequenceSettings, heads_of, own_tokens
from . import comm, groups

Batch = dict[str, Any]


class SequenceMpu:
    """An mpu that requests sequence parallelism from `initialize`.

    Its methods, for example `get_sequence_parallel_group`, are those of `deepspeed.utils.groups`.

    Args:
        ranks: Number of ranks over which the tokens of a sequence are split.
        settings: Settings of sequence parallelism, which `initialize` reads.
    """

    def __init__(self, ranks: int, settings: SequenceSettings) -> None:
        self.mesh = Mesh(sp=ranks).on_world(comm.get_world_size(), comm.get_rank())
        self.sequence_settings = settings

    def __getattr__(self, name: str) -> Any:
        return groups.getter(name, lambda: self.mesh)


class UlyssesSPAttentionHF:
    """DeepSpeed's Ulysses attention for transformers models, split over the ranks of a sequence."""

    @classmethod
    def register_with_transformers(
        cls,
        model_name_or_path: Any,
        core_attn_implementation: str,
        sequence_parallel_size: int,
        micro_batch_size: int,
        seq_length: int | None = None,
        seq_length_is_variable: bool = True,
        disable_in_eval: bool = False,
        max_length: int | None = None,
    ) -> SequenceMpu | None:
        """Check that a model can use sequence parallelism and return an mpu.

        Args:
            model_name_or_path: The model, or the location of its configuration.
            core_attn_implementation: Name of transformers' attention function.
            sequence_parallel_size: Number of ranks over which a sequence is split.
            micro_batch_size: Ignored; batches may have any size.
            seq_length: Number of tokens; only checked.
            seq_length_is_variable: Whether to do not check the number of tokens.
            disable_in_eval: Whether to compute without sequence parallelism in evaluation.
            max_length: Used if `seq_length` is None.

        Returns:
            The mpu for `initialize`, or None for one rank.

        Raises:
            ValueError: The model does not support it. The texts are DeepSpeed's.
        """
        if sequence_parallel_size == 1:
            return None
        length = seq_length if seq_length is not None else max_length
        if not seq_length_is_variable and length is None:
            raise ValueError(
                "Either `seq_length_is_variable` needs to be `True` or `seq_length` needs to be "
                "set."
            )
        if not seq_length_is_variable and length is not None and length % sequence_parallel_size:
            raise ValueError(
                f"Sequence length {length} is not divisible by SP size {sequence_parallel_size}"
            )
        config = getattr(model_name_or_path, "config", None)
        if config is None:
            config = import_module("transformers").AutoConfig.from_pretrained(model_name_or_path)
        _refuse(config, core_attn_implementation, sequence_parallel_size)
        settings = SequenceSettings("ulysses", weighs_loss=False, spares_eval=disable_in_eval)
        return SequenceMpu(sequence_parallel_size, settings)


def _refuse(config: Any, core: str, ranks: int) -> None:
    """Raise ValueError if the model cannot share its sequences over these ranks."""
    named = getattr(config, "_attn_implementation", None)
    if named is not None and named != core:
        raise ValueError(
            f"core_attn_implementation='{core}' does not match model config "
            f"attn_implementation='{named}'."
        )
    if "eager" in core:
        raise ValueError(
            f"{core} attn_implementation isn't currently supported by Ulysses sequence parallelism "
            "because it requires a 4D attention_mask."
        )
    known = import_module("transformers.modeling_utils").ALL_ATTENTION_FUNCTIONS
    if core not in known:
        raise ValueError(
            f"{core} is not a valid attn_implementation. The choices are {known.valid_keys()}"
        )
    heads, held = heads_of(config.get_text_config())
    if heads % ranks:
        raise ValueError(f"Attention head count {heads} is not divisible by SP size {ranks}")
    if held % ranks and ranks % held:
        raise ValueError(
            f"KV attention head count {held} and SP size {ranks} must divide one another"
        )


@dataclass(eq=False)
class UlyssesSPDataLoaderAdapter:
    """Iterate over the batches of all ranks of a sequence-parallel group.

    Each batch has the tokens of this rank. If the loader of one rank ends earlier than the others,
    or raises an error, all ranks raise an error.

    Args:
        dl: This rank's loader of batches of shape ``(samples, tokens)`` with `input_ids` and
            `labels`. All loaders must have the same length.
        sp_rank: Index of this rank in the group.
        sp_group: The process group.
        sp_world_size: Size of the group.
        device: Device of the batches.
        pad_to_sp_multiple: Whether to pad batches to a multiple of the ranks. Otherwise such a
            batch raises ValueError.
        pad_token_id: Value of the padding of `input_ids`.
    """

    dl: Any
    sp_rank: int
    sp_group: Any
    sp_world_size: int
    device: Any
    pad_to_sp_multiple: bool = True
    pad_token_id: int = 0

    def __post_init__(self) -> None:
        self.iter = iter(self.dl)
        self.micro_batches: deque[Batch] = deque()

    def __len__(self) -> int:
        return len(self.dl) * self.sp_world_size

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        """Return this rank's tokens of the next batch.

        Note:
            Collective: every rank of the group must call it. Every `sp_world_size`-th call
                communicates.
        """
        if not self.micro_batches:
            self.refill()
        found: Batch = to_device(self.micro_batches.popleft(), torch.device(self.device))
        return found

    def refill(self) -> None:
        """Exchange the next batch of each rank's loader.

        Raises:
            StopIteration: The loaders of all ranks are exhausted.
            UsageError: The loader of another rank is exhausted or raised an error.
            ValueError: A batch has no 2-D tensor `input_ids` or `labels`.

        Note:
            Collective: every rank of the group must call it.
        """
        own = b""  # the other ranks must not wait if this rank has no batch
        error: Exception | None = None
        try:
            own = _as_bytes(_checked(next(self.iter)))
        except StopIteration as end:
            self.iter = iter(self.dl)
            error = end
        except Exception as failure:
            error = failure
        rows = all_gather_bytes(own, self.sp_world_size, self.sp_group)
        missing = [rank for rank, row in enumerate(rows) if not row]
        if error is not None and (
            len(missing) == len(rows) or not isinstance(error, StopIteration)
        ):
            raise error
        if missing:
            raise UsageError(
                f"ranks {missing} of the sequence-parallel group have no batch, the others have.",
                "Their loaders ended earlier or raised an error; all ranks share each batch.",
                "give every rank a loader of the same length.",
            )
        for row in rows:
            self.micro_batches.append(
                own_tokens(self._padded(_from_bytes(row)), self.sp_rank, self.sp_world_size)
            )

    def _padded(self, batch: Batch) -> Batch:
        """Pad a batch to a number of tokens that is a multiple of the ranks."""
        length = batch["input_ids"].shape[1]
        missing = math.ceil(length / self.sp_world_size) * self.sp_world_size - length
        if not missing:
            return batch
        if not self.pad_to_sp_multiple:
            raise ValueError(
                f"batch's seqlen={length} isn't divisible by sp-size={self.sp_world_size}"
            )
        fills = {"input_ids": self.pad_token_id, "labels": IGNORED, "shift_labels": IGNORED}
        found = dict(batch)
        for name, value in batch.items():
            if not isinstance(value, Tensor) or value.shape[:2] != batch["input_ids"].shape:
                continue
            if name == "position_ids":
                found[name] = torch.cat(
                    (value, value[:, -1:] + torch.arange(1, missing + 1, device="cpu")), 1
                )
            else:
                found[name] = pad(
                    value, (0, 0) * (value.dim() - 2) + (0, missing), value=fills.get(name, 0)
                )
        return found


def _checked(batch: Any) -> Batch:
    for name in ("input_ids", "labels"):
        if not isinstance(batch.get(name), Tensor) or batch[name].dim() != 2:
            raise ValueError(
                f"Ulysses SP dataloader batches must contain tensor {name} of [batch, sequence]."
            )
    return dict(batch)


def _as_bytes(batch: Batch) -> bytes:
    """Serialize a batch of tensors and plain values.

    The format is the length of a JSON header, the header, and the elements of the tensors.
    """
    tensors: dict[str, Tensor] = {}
    try:
        values = encode(batch, "batch", tensors)
    except CheckpointError as error:
        raise UsageError(
            "a batch cannot go to the ranks that share its sequences: "
            f"{str(error).splitlines()[0]}",
            "Batches travel between ranks as tensors and plain values, never as pickles.",
            "leave it out of the batch, or make it numbers, texts, lists, dicts or tensors.",
        ) from None
    shapes = {
        name: [dtype_name(tensor.dtype), list(tensor.shape)] for name, tensor in tensors.items()
    }
    header = json.dumps([values, shapes]).encode()
    elements = [
        tensor.reshape(-1).view(torch.uint8).numpy().tobytes() for tensor in tensors.values()
    ]
    return b"".join([len(header).to_bytes(8, "little"), header, *elements])


def _from_bytes(row: bytes) -> Batch:
    """Deserialize a batch that `_as_bytes` wrote."""
    place = 8 + int.from_bytes(row[:8], "little")
    values, shapes = json.loads(row[8:place])
    tensors: dict[str, Tensor] = {}
    for name, (dtype, shape) in shapes.items():
        empty = torch.empty(shape, dtype=dtype_named(dtype), device="cpu")
        if empty.numel():
            empty.view(-1).view(torch.uint8).copy_(
                torch.frombuffer(bytearray(row[place : place + empty.nbytes]), dtype=torch.uint8)
            )
        tensors[name], place = empty, place + empty.nbytes
    found: Batch = decode(values, tensors)
    return found
