"""`deepspeed.utils.groups`, under DeepSpeed's path.  No logic: names and where they live."""

from __future__ import annotations

from deepseek_zero.compat.deepspeed.module_stub import stand_in

__getattr__, __dir__ = stand_in(
    __name__,
    {
        "deepseek_zero.compat.deepspeed.groups": (
            "_clone_world_group _get_data_parallel_group _get_data_parallel_group_ranks _get_data_parallel_rank "
            "_get_data_parallel_world_size _get_expert_model_parallel_world_size _get_model_parallel_world_size "
            "_get_sequence_data_parallel_group _get_sequence_data_parallel_rank "
            "_get_sequence_data_parallel_world_size _get_sequence_parallel_group _get_sequence_parallel_rank "
            "_get_sequence_parallel_world_size get_data_parallel_group get_data_parallel_rank "
            "get_data_parallel_world_size get_model_parallel_group get_model_parallel_rank "
            "get_model_parallel_world_size get_pipeline_model_parallel_group get_pipeline_model_parallel_rank "
            "get_pipeline_model_parallel_world_size get_tensor_model_parallel_group get_tensor_model_parallel_rank "
            "get_tensor_model_parallel_src_rank get_tensor_model_parallel_world_size initialize"
        ),
    },
)
