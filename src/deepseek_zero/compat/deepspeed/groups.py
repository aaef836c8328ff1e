"""DeepSpeed's `deepspeed.utils.groups`: which ranks share what, where data parallelism is the only kind.

Every rank is data-parallel with all others, and alone in every other sense (tensor, sequence).
"""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from ...base.errors import NotBuiltError
from .comm import get_world_group


def initialize(ep_size: int = 1, mpu: Any = None) -> None:
    """Nothing to do for data parallelism."""
    if ep_size != 1 or mpu is not None:
        raise NotBuiltError(
            f"groups.initialize(ep_size={ep_size}, mpu={mpu!r}) is not built.",
            "Expert and tensor parallelism are not; all ranks are data-parallel.",
            "leave the call out.",
        )


def get_data_parallel_group() -> Any:
    """Return the group of all ranks; None in a world of one without a group."""
    return get_world_group()


def get_data_parallel_world_size() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def get_data_parallel_rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def _get_data_parallel_group_ranks() -> list[int]:
    return list(range(get_data_parallel_world_size()))


def get_model_parallel_world_size() -> int:
    """Return 1: a rank is alone in it, as rank 0, and there is no group."""
    return 1


def get_model_parallel_rank() -> int:
    return 0


def get_model_parallel_group() -> None:
    return None


def get_tensor_model_parallel_src_rank() -> int:
    """Return the rank that a model's input would come from: this one."""
    return get_data_parallel_rank()


_clone_world_group = _get_data_parallel_group = _get_sequence_data_parallel_group = get_data_parallel_group
_get_data_parallel_world_size = _get_sequence_data_parallel_world_size = get_data_parallel_world_size
_get_data_parallel_rank = _get_sequence_data_parallel_rank = get_data_parallel_rank
get_tensor_model_parallel_world_size = _get_model_parallel_world_size = get_model_parallel_world_size
_get_sequence_parallel_world_size = _get_expert_model_parallel_world_size = get_model_parallel_world_size
get_tensor_model_parallel_rank = _get_sequence_parallel_rank = get_model_parallel_rank
get_tensor_model_parallel_group = _get_sequence_parallel_group = get_model_parallel_group
