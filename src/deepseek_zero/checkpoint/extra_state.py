"""The states of modules that are neither parameters nor buffers.

A module that defines `get_extra_state` and `set_extra_state` has one. Torch puts it into state
dicts under the name `_extra_state`.
"""

from __future__ import annotations

import base64
import io
import json
import logging
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ..base.errors import CheckpointError
from ..base.log import log_once
from ..sharding.runtime import Runtime
from .format import decode, encode
from .lockstep import run_and_gather


def extra_states(model: nn.Module) -> dict[str, dict[str, Any]]:
    """Return the extra state of every module that has one, by the name of the module.

    A state that a checkpoint cannot hold is left out, with a warning.

    Args:
        model: The model of this rank.
    """
    found = {}
    for name, module in model.named_modules():
        if type(module).get_extra_state is nn.Module.get_extra_state:
            continue
        state = _storable(module.get_extra_state())
        try:
            encode(state, f"the extra state of '{name}'", {})
        except CheckpointError as error:
            log_once(
                f"the checkpoint does not contain the extra state of '{name}', and a resumed run "
                f"starts with a new one: {error}",
                logging.WARNING,
            )
        else:
            found[name] = state
    return found


def extra_states_of_all(runtime: Runtime) -> dict[str, dict[str, Any]]:
    """Return the extra states of the modules of all pipeline stages.

    The first rank of each stage provides those of its modules.

    Args:
        runtime: The runtime of this rank's model.

    Note:
        Collective if there are several stages: every rank of the world must call it.
    """
    if "pp" not in runtime.comm.along:
        return extra_states(runtime.model)
    is_first = not any((runtime.plan.mesh.coordinates | {"pp": 0}).values())

    def pack() -> list[str]:
        states = extra_states(runtime.model) if is_first else {}
        tensors: dict[str, Tensor] = {}
        plain = json.dumps(encode(states, "", tensors))
        stream = io.BytesIO()
        torch.save(tensors, stream)
        return [plain, base64.b64encode(stream.getvalue()).decode()]

    found: dict[str, dict[str, Any]] = {}
    for plain, packed in run_and_gather(runtime.comm.whole, "saving: the extra states", pack):
        tensors = torch.load(io.BytesIO(base64.b64decode(packed)), weights_only=True)
        found = {**decode(json.loads(plain), tensors), **found}
    return found


def restore_extra_states(model: nn.Module, saved: Mapping[str, Mapping[str, Any]]) -> None:
    """Set the extra states of the modules that a checkpoint has.

    Args:
        model: The model of this rank.
        saved: The result of `extra_states` when the checkpoint was saved.
    """
    for name, module in model.named_modules():
        has_setter = type(module).set_extra_state is not nn.Module.set_extra_state
        if has_setter and name in saved:
            module.set_extra_state(_original(saved[name]))


def _storable(state: Any) -> dict[str, Any]:
    """Return an extra state as plain values and tensors, with its kind."""
    if isinstance(state, io.BytesIO):
        return {"stream": _tensor_of(state.getvalue())}
    if isinstance(state, (bytes, bytearray)):
        return {"bytes": _tensor_of(bytes(state))}
    return {"value": state}


def _original(stored: Mapping[str, Any]) -> Any:
    """Return the extra state from which `_storable` made a value."""
    if "stream" in stored:
        return io.BytesIO(_bytes_of(stored["stream"]))
    if "bytes" in stored:
        return _bytes_of(stored["bytes"])
    return stored["value"]


def _tensor_of(data: bytes) -> Tensor:
    return torch.from_numpy(np.frombuffer(data, np.uint8).copy())


def _bytes_of(tensor: Tensor) -> bytes:
    return tensor.numpy().tobytes()
