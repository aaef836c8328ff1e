"""DeepSpeed's constants, enums and class names that have no other home here.

Programs import them by path.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum, StrEnum

from ...optim.sharded import ShardedOptimizer

# One class implements every stage. Programs test isinstance() with both of DeepSpeed's base
# classes.
DeepSpeedOptimizer = ZeROOptimizer = ShardedOptimizer

DEEPSPEED_ENVIRONMENT_NAME = (
    # accelerate writes variables for other hosts to this file. `run` does not read it.
    ".deepspeed_env"
)


class ZeroStageEnum(IntEnum):
    """The ZeRO stages as an enum: which states are sharded, with DeepSpeed's names."""

    disabled = 0
    optimizer_states = 1
    gradients = 2
    weights = 3
    max_stage = 3


class OffloadDeviceEnum(StrEnum):
    """The memories to which states can be offloaded as an enum, with DeepSpeed's names."""

    none = "none"
    cpu = "cpu"
    nvme = "nvme"


@dataclass
class FragmentAddress:
    """Position of a part of a parameter in DeepSpeed's flat buffers.

    Pickles of DeepSpeed's checkpoints refer to this class.

    Attributes:
        numel: Number of elements.
        start: Offset in elements.
    """

    numel: int
    start: int


fragment_address = FragmentAddress
ADAGRAD_OPTIMIZER = "adagrad"
ADAM_OPTIMIZER = "adam"
ADAMW_OPTIMIZER = "adamw"
LAMB_OPTIMIZER = "lamb"
LION_OPTIMIZER = "lion"
MUON_OPTIMIZER = "muon"
TORCH_DISTRIBUTED_DEFAULT_PORT = 29500
HAS_TRITON = False  # whether DeepSpeed's triton kernels can be used
