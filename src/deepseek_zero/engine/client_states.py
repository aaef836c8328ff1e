"""The existing state of a client's optimizer, for whole parameters.

A class may create state in `__init__` (`torch.optim.Adagrad`). `ClientStates` keeps it until the
shards of a parameter are built. For parameters that are frozen at the start, that is later.
"""

from __future__ import annotations

import zlib
from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ..base.errors import UsageError
from ..checkpoint.boxes import ParamPart, assemble
from ..optim.master_shard import MasterShard
from ..optim.param_groups import CUT_INTO, TIED_TO
from ..optim.param_overlap import ParamOverlap, overlaps_of
from ..planner.rows import rows_of
from ..planner.split import split_of

STEP = "step"  # torch's key for the number of updates
PLAIN = (bool, int, float, str, type(None))


@dataclass(frozen=True)
class WholeState:
    """The optimizer state of one unsharded parameter.

    Attributes:
        param: The parameter before it is sharded.
        values: The entries of the optimizer's `state` for it.
        dtype: The dtype of the parameter when the state was recorded.
    """

    param: nn.Parameter
    values: Mapping[str, Any]
    dtype: torch.dtype


class ClientStates:
    """The state of a client's optimizer at the time when it was passed in.

    Args:
        client: The optimizer, over whole parameters. Its state is referenced here and not changed.
        coordinate: This rank's coordinate along "tp".
    """

    def __init__(self, client: Optimizer, coordinate: int = 0) -> None:
        self._optimizer = type(client).__name__
        self._coordinate = coordinate
        self._by_param: dict[int, WholeState] = {}
        for param, values in client.state.items():
            if isinstance(param, Tensor) and values:  # schedulefree's `train` leaves empty entries
                state = WholeState(param, dict(values), param.dtype)  # type: ignore[arg-type]
                first = param.__dict__.get(TIED_TO, param)
                for each in first.__dict__.get(CUT_INTO, (first,)):
                    self._by_param.setdefault(id(each), state)
        self._counters = {
            key
            for state in self._by_param.values()
            for key, value in state.values.items()
            if state.param.dim() > 0 and isinstance(value, Tensor) and value.dim() == 0
        }

    def release_trained(self) -> None:
        """Free the states of trainable parameters, after they were cut into shards."""
        self._by_param = {
            key: state for key, state in self._by_param.items() if not state.param.requires_grad
        }

    @property
    def are_empty(self) -> bool:
        """Return whether the optimizer has no state for any parameter."""
        return not self._by_param

    @property
    def most_steps(self) -> float:
        """Return the largest number of steps that the state of a parameter counts."""
        steps = [state.values.get(STEP) for state in self._by_param.values()]
        counted = [
            float(each)
            for each in steps
            if isinstance(each, (int, float)) or (isinstance(each, Tensor) and each.numel() == 1)
        ]
        return max(counted, default=0.0)

    def describe(self) -> list[str]:
        """Return one line per state, for comparing the states of all ranks."""
        found = []
        for number, state in enumerate(self._by_param.values()):
            for key, value in state.values.items():
                found.append(f"state '{key}' of parameter {number}: {_described(value)}")
        return found

    def counters(self, overlap: ParamOverlap) -> Hashable:
        """Return the state names and scalars that must be equal for all parameters of one shard."""
        state = self._state_of(overlap)
        if state is None:
            return None
        found = list[Hashable]()
        for key, value in state.values.items():
            number = self._number(state, key, value)
            if isinstance(number, PLAIN):
                found.append((key, type(value), number))
            elif type(value) in (Tensor, nn.Parameter) and _is_elementwise(state, key, overlap):
                found.append((key, value.dtype))
            else:
                found.append((key, id(value)))
        return tuple(found)

    def cut_for(self, shard: MasterShard) -> dict[str, Any]:
        """Return the optimizer state of a shard, cut from the states of whole parameters.

        All parameters of the shard must have the same `counters`.

        Raises:
            UsageError: The shard is a part of a parameter, and a state of that parameter is neither
                a number nor of the parameter's shape.
        """
        overlaps = list(overlaps_of(shard))
        states = [state for overlap in overlaps if (state := self._state_of(overlap)) is not None]
        if not states:
            return {}
        return {key: self._value(shard, overlaps, states, key) for key in states[0].values}

    def _value(
        self, shard: MasterShard, overlaps: list[ParamOverlap], states: list[WholeState], key: str
    ) -> Any:
        first = states[0].values[key]
        if self._number(states[0], key, first) is not _NO_NUMBER:
            return first.clone() if isinstance(first, Tensor) else first
        is_whole = (
            len(overlaps) == 1 and overlaps[0].stop - overlaps[0].start == overlaps[0].slot.numel
        )
        is_plain = type(first) in (Tensor, nn.Parameter)
        if is_plain and all(
            _is_elementwise(state, key, each) for state, each in zip(states, overlaps, strict=True)
        ):
            return self._joined(shard, overlaps, states, key)
        member = _param_of(overlaps[0])
        if is_whole and self._part(member) is None and rows_of(member) is None:
            return first.clone() if is_plain else first
        shape = f" has shape {tuple(first.shape)}" if isinstance(first, Tensor) else ""
        raise UsageError(
            f"state '{key}' ({type(first).__name__}){shape} that {self._optimizer} has for "
            f"'{overlaps[0].slot.name}', of shape {overlaps[0].slot.shape}, cannot be split into "
            "shards.",
            "Only state with the parameter's own shape, and numbers, can be split.",
            'give the optimizer\'s class the attribute granularity = "tensor", so that it receives '
            "whole parameters, or let it create that state in its first step.",
        )

    def _joined(
        self, shard: MasterShard, overlaps: list[ParamOverlap], states: list[WholeState], key: str
    ) -> Tensor:
        """Return an element-wise state of a shard, concatenated from its parameters."""
        first = states[0].values[key]
        dtype = shard.param.dtype if first.dtype == states[0].dtype else first.dtype
        found = torch.zeros(shard.numel, dtype=dtype, device=shard.master.update_device)
        for overlap, state in zip(overlaps, states, strict=True):
            flat = self._flat_of(overlap, state.values[key])
            found[overlap.offset : overlap.offset + overlap.stop - overlap.start].copy_(
                flat[overlap.start : overlap.stop]
            )
        return found.view(shard.param.shape)

    def _flat_of(self, overlap: ParamOverlap, value: Tensor) -> Tensor:
        """Return this rank's part of a state as a flat tensor.

        The state may have the shape of the whole parameter or of this rank's part.
        """
        param = _param_of(overlap)
        flat = value.detach().reshape(-1)
        rows = rows_of(param)
        part = self._part(param)
        if value.shape == overlap.slot.shape:
            return flat
        if rows is not None:
            return flat[rows.start : rows.start + overlap.slot.numel]
        assert part is not None
        pieces = assemble(part, 0, part.numel, [(ParamPart.whole(part.shape), 0, flat)])
        return torch.cat([values for _, values in pieces])

    def _part(self, param: nn.Parameter) -> ParamPart | None:
        return ParamPart.of(split_of(param), self._coordinate)

    def _state_of(self, overlap: ParamOverlap) -> WholeState | None:
        return self._by_param.get(id(_param_of(overlap)))

    def _number(self, state: WholeState, key: str, value: Any) -> Any:
        """Return a scalar state as a number; `_NO_NUMBER` for any other state."""
        if isinstance(value, PLAIN):
            return value
        if not isinstance(value, Tensor) or value.dim() > 0:
            return _NO_NUMBER
        is_counter = state.param.dim() > 0 or key in self._counters or key == STEP
        return value.item() if is_counter else _NO_NUMBER


_NO_NUMBER = object()


def _param_of(overlap: ParamOverlap) -> nn.Parameter:
    return overlap.shard.group.members[overlap.number].param


def _is_elementwise(state: WholeState, key: str, overlap: ParamOverlap) -> bool:
    """Return whether a state has the shape of the parameter or of its part here."""
    param = _param_of(overlap)
    shape = tuple(state.values[key].shape)
    forms = [overlap.slot, rows_of(param), split_of(param)]
    return any(form is not None and shape == tuple(form.shape) for form in forms)


def _described(value: Any) -> str:
    if not isinstance(value, Tensor):
        return repr(value) if isinstance(value, PLAIN) else type(value).__name__
    if type(value) not in (Tensor, nn.Parameter) or value.is_meta:
        return f"{type(value).__name__} {tuple(value.shape)}"
    content = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
    return f"{value.dtype} {tuple(value.shape)} with checksum {zlib.crc32(content.data):08x}"
