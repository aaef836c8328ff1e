"""What an engine's API lets a program do with a wrapped model."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ModelRules:
    """The rules of one wrapped model that no plan contains.

    Attributes:
        allows_unmanaged_params: Parameters that join the model after it was wrapped stay as they
            are, with a warning; otherwise they are an error.
        requires_scaled_loss: A loss of the engine's own forward must be scaled before its backward.
        gathers_state_dict: `state_dict()` of the model gathers what is sharded, which is a
            collective; otherwise it is local, and sharded parameters are empty tensors.
    """

    allows_unmanaged_params: bool = False
    requires_scaled_loss: bool = False
    gathers_state_dict: bool = True
