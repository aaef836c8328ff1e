"""DeepSpeed's constants, enums and class names that programs ask for by path and that mean nothing
else here.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum, StrEnum

from ...optim.sharded import ShardedOptimizer

# One optimizer serves every stage; clients ask isinstance() of DeepSpeed's two base classes.
DeepSpeedOptimizer = ZeROOptimizer = ShardedOptimizer

DEEPSPEED_ENVIRONMENT_NAME = (
    ".deepspeed_env"  # where accelerate leaves variables for other hosts; `run` reads none
)


class ZeroStageEnum(IntEnum):
    """The stages by DeepSpeed's names."""

    disabled = 0
    optimizer_states = 1
    gradients = 2
    weights = 3
    max_stage = 3


class OffloadDeviceEnum(StrEnum):
    """Where states may rest; DeepSpeed's words in a configuration."""

    none = "none"
    cpu = "cpu"
    nvme = "nvme"


@dataclass
class FragmentAddress:
    """Where a piece of a parameter lies in DeepSpeed's flat buffers; pickles of its checkpoints
    name this class.
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
HAS_TRITON = False  # DeepSpeed's switch for kernels that are not here
