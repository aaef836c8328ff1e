"""The existing state of a client's optimizer, for whole parameters.

A class may create state in `__init__` (`torch.optim.Adagrad`). `ClientStates` keeps it until the
shards of a parameter are built. For parameters that are frozen at the start, that is later.
"""

from __future__ import annotations

import zlib
from collections.abc import Hashable, Mapping, Sequence
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
        # Names of the states that are scalars although their parameter is not a scalar
        self._counters = set[str]()
        for state in self._by_param.values():
            for key, value in state.values.items():
                if state.param.dim() > 0 and isinstance(value, Tensor) and value.dim() == 0:
                    self._counters.add(key)

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
        counted = [0.0]
        for state in self._by_param.values():
            steps = state.values.get(STEP)
            if isinstance(steps, int | float) or (isinstance(steps, Tensor) and steps.numel() == 1):
                counted.append(float(steps))
        return max(counted)

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
            elif _is_elementwise(value, overlap):
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
        parts = list[_ShardPart]()
        for overlap in overlaps_of(shard):
            state = self._state_of(overlap)
            if state is not None:
                parts.append((overlap, state))
        if not parts:
            return {}
        return {key: self._value(shard, parts, key) for key in parts[0][1].values}

    def _value(self, shard: MasterShard, parts: Sequence[_ShardPart], key: str) -> Any:
        """Return one state of a shard: a number, a concatenated tensor, or a whole state."""
        overlap, state = parts[0]
        value = state.values[key]
        is_number = self._number(state, key, value) is not _NO_NUMBER
        if not is_number and all(_is_elementwise(each.values[key], own) for own, each in parts):
            return self._joined(shard, parts, key)
        if is_number or (len(parts) == 1 and self._is_whole(overlap)):
            return value.clone() if type(value) in (Tensor, nn.Parameter) else value
        shape = f" has shape {tuple(value.shape)}" if isinstance(value, Tensor) else ""
        raise UsageError(
            f"state '{key}' ({type(value).__name__}){shape} that {self._optimizer} has for "
            f"'{overlap.slot.name}', of shape {overlap.slot.shape}, cannot be split into "
            "shards.",
            "Only state with the parameter's own shape, and numbers, can be split.",
            'give the optimizer\'s class the attribute granularity = "tensor", so that it receives '
            "whole parameters, or let it create that state in its first step.",
        )

    def _is_whole(self, overlap: ParamOverlap) -> bool:
        """Return whether a shard has all elements of the parameter that the client created."""
        param = _param_of(overlap)
        is_of_ranks = rows_of(param) is not None or self._part(param) is not None
        return overlap.stop - overlap.start == overlap.slot.numel and not is_of_ranks

    def _joined(self, shard: MasterShard, parts: Sequence[_ShardPart], key: str) -> Tensor:
        """Return an element-wise state of a shard, concatenated from its parameters."""
        state = parts[0][1]
        dtype = state.values[key].dtype
        if dtype == state.dtype:
            dtype = shard.param.dtype
        found = torch.zeros(shard.numel, dtype=dtype, device=shard.master.update_device)
        for overlap, each in parts:
            flat = self._flat_of(overlap, each.values[key])
            overlap.of(found).copy_(flat[overlap.start : overlap.stop])
        return found.view(shard.param.shape)

    def _flat_of(self, overlap: ParamOverlap, value: Tensor) -> Tensor:
        """Return this rank's part of a state as a flat tensor.

        The state may have the shape of the whole parameter or of this rank's part.
        """
        flat = value.detach().reshape(-1)
        if value.shape == overlap.slot.shape:
            return flat
        param = _param_of(overlap)
        if (rows := rows_of(param)) is not None:
            return flat[rows.start : rows.start + overlap.slot.numel]
        part = self._part(param)
        assert part is not None
        pieces = assemble(part, 0, part.numel, [(ParamPart.whole(part.shape), 0, flat)])
        return torch.cat([values for _, values in pieces])

    def _part(self, param: nn.Parameter) -> ParamPart | None:
        """Return this rank's part of a parameter that is split along "tp", or None."""
        return ParamPart.of(split_of(param), self._coordinate)

    def _state_of(self, overlap: ParamOverlap) -> WholeState | None:
        """Return the state of the parameter that an overlap belongs to, if there is one."""
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
_ShardPart = tuple[ParamOverlap, WholeState]  # a parameter of a shard, and the state of that one


def _param_of(overlap: ParamOverlap) -> nn.Parameter:
    """Return the parameter that an overlap belongs to."""
    return overlap.shard.group.members[overlap.number].param


def _is_elementwise(value: Any, overlap: ParamOverlap) -> bool:
    """Return whether a state is a tensor of the shape of its parameter or of a part of it."""
    if type(value) not in (Tensor, nn.Parameter):
        return False
    param = _param_of(overlap)
    forms = [overlap.slot, rows_of(param), split_of(param)]
    return any(form is not None and value.shape == tuple(form.shape) for form in forms)


def _described(value: Any) -> str:
    """Return a text for a value. Two ranks with equal values get equal texts."""
    if not isinstance(value, Tensor):
        return repr(value) if isinstance(value, PLAIN) else type(value).__name__
    if type(value) not in (Tensor, nn.Parameter) or value.is_meta:
        return f"{type(value).__name__} {tuple(value.shape)}"
    content = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
    return f"{value.dtype} {tuple(value.shape)} with checksum {zlib.crc32(content.data):08x}"
