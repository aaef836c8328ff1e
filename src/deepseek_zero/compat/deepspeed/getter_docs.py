"""Docstrings of the getters that `DeepSpeedEngine` takes from a table."""

from __future__ import annotations

GETTER_DOCS = {
    # Batch
    "get_batch_info": (
        "Return (train batch size, micro-batch size per rank, gradient accumulation steps)."
    ),
    "managed_gradient_accumulation": (
        "Return whether the engine counts the micro-batches of a step itself."
    ),
    "dataloader_drop_last": "Return whether the engine's loader drops an incomplete last batch.",
    # ZeRO
    "zero_optimization": "Return whether the ZeRO stage is 1 or higher.",
    "zero_optimization_stage": "Return the ZeRO stage, 0 to 3.",
    "zero_optimization_partition_gradients": "Return whether gradients are sharded (stage 2 or 3).",
    "zero_optimization_partition_weights": "Return whether weights are sharded (stage 3).",
    "zero_gather_16bit_weights_on_model_save": (
        "Return the key `zero_optimization.stage3_gather_16bit_weights_on_model_save`."
    ),
    "zero_overlap_comm": "Return the key `zero_optimization.overlap_comm`.",
    "zero_reduce_bucket_size": (
        "Return the key `zero_optimization.reduce_bucket_size`, in elements."
    ),
    "zero_sub_group_size": "Return the key `zero_optimization.sub_group_size`, in elements.",
    "zero_prefetch_bucket_size": (
        "Return the key `zero_optimization.stage3_prefetch_bucket_size`, in elements."
    ),
    "zero_param_persistence_threshold": (
        "Return the key `zero_optimization.stage3_param_persistence_threshold`, in elements."
    ),
    "zero_model_persistence_threshold": (
        "Return the key `zero_optimization.stage3_model_persistence_threshold`, in elements."
    ),
    "zero_max_live_parameters": (
        "Return the key `zero_optimization.stage3_max_live_parameters`, in elements."
    ),
    "zero_max_reuse_distance": (
        "Return the key `zero_optimization.stage3_max_reuse_distance`, in elements."
    ),
    "zero_hpz_partition_size": (
        "Return the number of ranks that share a secondary copy of the weights (ZeRO++ hpZ)."
    ),
    "mics_shard_size": "Return the key `zero_optimization.mics_shard_size`, in ranks.",
    "zero_ignore_unused_parameters": (
        "Return the key `zero_optimization.ignore_unused_parameters`."
    ),
    "zero_allow_untested_optimizer": "Return the key `zero_allow_untested_optimizer`.",
    "zero_offload_optimizer": (
        "Return the section `zero_optimization.offload_optimizer`, or None if it is off."
    ),
    "zero_offload_param": (
        "Return the section `zero_optimization.offload_param`, or None if it is off."
    ),
    "zero_cpu_offload": "Return whether optimizer states are offloaded to host memory.",
    # Precision
    "fp16_enabled": "Return whether the model computes in fp16.",
    "fp16_auto_cast": "Return whether inputs are cast to fp16.",
    "bfloat16_enabled": "Return whether the model computes in bf16.",
    "torch_autocast_enabled": "Return whether forward runs under `torch.autocast`.",
    "torch_autocast_dtype": "Return the dtype of `torch.autocast`, or None if it is off.",
    "get_data_types": "Return the dtypes (of computation, of gradient accumulation).",
    "dynamic_loss_scale": "Return whether the loss scale is dynamic.",
    "dynamic_loss_scale_args": (
        "Return the arguments of the dynamic loss scale, or None without one."
    ),
    "initial_dynamic_scale": "Return the initial value of the dynamic loss scale.",
    "loss_scale": "Return the constant loss scale, or 0 if it is dynamic.",
    # Axes
    "autotp_size": "Return the number of tensor-parallel ranks.",
    "get_sequence_parallel_group": "Return the process group of the sequence-parallel ranks.",
    # Optimizer and schedule
    "gradient_clipping": "Return the largest gradient norm, or 0 if gradients are not clipped.",
    "gradient_predivide_factor": "Return the key `gradient_predivide_factor`.",
    "prescale_gradients": "Return the key `prescale_gradients`.",
    "optimizer_name": "Return the configured name of the optimizer, or else its class name.",
    "optimizer_params": "Return the configured arguments of the optimizer.",
    "scheduler_name": "Return the configured name of the learning-rate schedule, or None.",
    "scheduler_params": "Return the configured arguments of the learning-rate schedule.",
    "get_mom": "Return the momentum or betas of each parameter group.",
    "get_type": "Return the entry `type` of each parameter group.",
    # Data efficiency
    "data_efficiency_enabled": "Return whether the section `data_efficiency` is enabled.",
    "data_efficiency_config": "Return the section `data_efficiency` with its defaults, as a dict.",
    "data_sampling_enabled": "Return whether `data_efficiency.data_sampling` is enabled.",
    "data_sampling_config": "Return the section `data_efficiency.data_sampling`, as a dict.",
    "curriculum_learning_enabled": "Return whether samples are drawn by a curriculum.",
    "curriculum_learning_config": "Return the section of the curriculum, as a dict.",
    "random_ltd_config": "Return the section of random layerwise token dropping, as a dict.",
    # Logging
    "steps_per_print": "Return the number of steps between two summary lines, or None for none.",
    "wall_clock_breakdown": "Return whether the log has the times of forward, backward and step.",
    "memory_breakdown": "Return whether the log has the memory in use.",
    "dump_state": "Return whether the engine logs its parts when it is created.",
    "log_level": "Return the configured log level in upper case, or None.",
    "tensorboard_enabled": "Return whether metrics are written for TensorBoard.",
    "wandb_enabled": "Return whether metrics are sent to Weights & Biases.",
    "csv_monitor_enabled": "Return whether metrics are written to CSV files.",
    "flops_profiler_enabled": "Return whether the flops profiler is enabled.",
    "flops_profiler_profile_step": "Return the step that the flops profiler measures.",
    "flops_profiler_module_depth": "Return the depth of modules in the flops profile.",
    "flops_profiler_top_modules": "Return the key `flops_profiler.top_modules`.",
    "flops_profiler_detailed": "Return whether the flops profile lists every module.",
    "flops_profiler_output_file": "Return the file of the flops profile, or None for the log.",
    "flops_profiler_recompute_fwd_factor": "Return the key `flops_profiler.recompute_fwd_factor`.",
    # Checkpoints
    "checkpoint_tag_validation_enabled": (
        "Return whether checkpoint tags are compared across ranks."
    ),
    "checkpoint_tag_validation_fail": "Return whether different checkpoint tags are an error.",
    "load_universal_checkpoint": "Return the key `checkpoint.load_universal`.",
    # Features that are not built
    "amp_enabled": "Return False: Apex AMP is not supported.",
    "use_node_local_storage": "Return False: checkpoints are on a shared file system.",
    "pld_enabled": "Return False: progressive layer drop is not supported.",
    "curriculum_enabled_legacy": "Return False: only `data_efficiency` configures a curriculum.",
    "random_ltd_enabled": "Return False: random layerwise token dropping is not supported.",
    "eigenvalue_enabled": "Return False: eigenvalues are not supported.",
    "autotuning_enabled": "Return False: the autotuner is not supported.",
    "elasticity_enabled": "Return False: the section `elasticity` is not supported.",
    "sparse_gradients_enabled": "Return False: sparse gradients are not supported.",
    "is_deepcompile_enabled": "Return False: DeepCompile is not supported.",
    "is_deepcompile_active": "Return False: DeepCompile is not supported.",
}
