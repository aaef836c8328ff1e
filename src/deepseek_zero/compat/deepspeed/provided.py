"""Table of the names that the drop-in provides and of the modules that have them.

module_stub.py creates the drop-in's modules from it. Names that a module of DeepSpeed only imports
from another one are not repeated; inventory.json records the import.
"""

from __future__ import annotations

# module of DeepSpeed -> our module -> names that it provides, "*" for all of its names
PROVIDED: dict[str, dict[str, str]] = {
    "deepspeed": {
        "deepseek_zero": "add_config_arguments dist initialize",
        "deepseek_zero.compat.deepspeed.arguments": "add_tuning_arguments",
        "deepseek_zero.compat.deepspeed.before_initialize": "tp_model_init",
        "deepseek_zero.compat.deepspeed.constants": (
            "ADAGRAD_OPTIMIZER ADAM_OPTIMIZER ADAMW_OPTIMIZER HAS_TRITON LAMB_OPTIMIZER "
            "LION_OPTIMIZER ZeROOptimizer"
        ),
        "deepseek_zero.compat.deepspeed.git_version_info": "git_branch git_hash version",
        "deepseek_zero.compat.deepspeed.inference": "init_inference",
    },
    "deepspeed.accelerator.abstract_accelerator": {
        "deepseek_zero.compat.deepspeed.accelerator": "DeepSpeedAccelerator",
    },
    "deepspeed.accelerator.cpu_accelerator": {
        "deepseek_zero.compat.deepspeed.accelerator": "CPU_Accelerator",
    },
    "deepspeed.accelerator.real_accelerator": {
        "deepseek_zero.compat.deepspeed.accelerator": (
            "get_accelerator is_current_accelerator_supported set_accelerator"
        ),
    },
    "deepspeed.checkpoint.deepspeed_checkpoint": {
        "deepseek_zero.compat.deepspeed.checkpoint.folder": "DeepSpeedCheckpoint",
    },
    "deepspeed.checkpoint.ds_to_universal": {
        "deepseek_zero.compat.deepspeed.checkpoint.universal": "main parse_arguments",
    },
    "deepspeed.checkpoint.zero_checkpoint": {
        "deepseek_zero.compat.deepspeed.checkpoint.folder": "ZeROCheckpoint",
    },
    "deepspeed.checkpoint.reshape_3d_utils": {
        "deepseek_zero.compat.deepspeed.checkpoint.folder": "get_model_3d_descriptor",
        "deepseek_zero.compat.deepspeed.checkpoint_shapes": "model_3d_desc",
    },
    "deepspeed.checkpoint.reshape_meg_2d": {
        "deepseek_zero.compat.deepspeed.checkpoint_shapes": (
            "meg_2d_parallel_map reshape_meg_2d_parallel"
        ),
    },
    "deepspeed.checkpoint.reshape_utils": {
        "deepseek_zero.compat.deepspeed.checkpoint_shapes": "partition_data",
    },
    "deepspeed.checkpoint.utils": {
        "deepseek_zero.compat.deepspeed.utils": (
            "clone_tensors_for_torch_save get_layer_ckpt_name_for_rank "
            "get_model_ckpt_name_for_rank get_zero_ckpt_name_for_rank"
        ),
    },
    "deepspeed.checkpointing": {
        "deepseek_zero.checkpointing": (
            "checkpoint is_configured non_reentrant_checkpoint "
            "partition_activations_in_checkpoint reset get_cuda_rng_tracker "
            "model_parallel_cuda_manual_seed model_parallel_reconfigure_tp_seed"
        ),
        "deepseek_zero.compat.deepspeed.activation_checkpointing": (
            "configure PARTITION_ACTIVATIONS CONTIGUOUS_CHECKPOINTING CPU_CHECKPOINT PROFILE_TIME "
            "SYNCHRONIZE num_layers mpu deepspeed_checkpointing_enabled _cpu_offload_engine"
        ),
    },
    "deepspeed.comm": {
        "deepseek_zero.compat.deepspeed.comm": "*",
    },
    "deepspeed.comm.comm": {
        "deepseek_zero.comm": "init_distributed",
        "deepseek_zero.compat.deepspeed.comm": "*",
    },
    "deepspeed.comm.config": {
        "deepseek_zero.compat.deepspeed.config_classes": "CommsLoggerConfig DeepSpeedCommsConfig",
    },
    "deepspeed.comm.torch": {
        "deepseek_zero.compat.deepspeed.comm": "*",
    },
    "deepspeed.compile.config": {
        "deepseek_zero.compat.deepspeed.config_classes": "CompileConfig",
    },
    "deepspeed.constants": {
        "deepseek_zero.compat.deepspeed.constants": "TORCH_DISTRIBUTED_DEFAULT_PORT",
    },
    "deepspeed.elasticity": {
        "deepseek_zero.compat.deepspeed.elasticity": (
            "compute_elastic_config elasticity_enabled ElasticityConfigError ElasticityError "
            "ElasticityIncompatibleWorldSize"
        ),
    },
    "deepspeed.elasticity.config": {
        "deepseek_zero.compat.deepspeed.elasticity": (
            "ElasticityConfigError ElasticityError ElasticityIncompatibleWorldSize"
        ),
    },
    "deepspeed.elasticity.elasticity": {
        "deepseek_zero.compat.deepspeed.elasticity": "compute_elastic_config elasticity_enabled",
    },
    "deepspeed.git_version_info_installed": {
        "deepseek_zero.compat.deepspeed.git_version_info": (
            "accelerator_name git_branch git_hash installed_ops torch_info version"
        ),
    },
    "deepspeed.inference.engine": {
        "deepseek_zero.compat.deepspeed.inference": "InferenceEngine",
    },
    "deepspeed.launcher.constants": {
        "deepseek_zero.compat.deepspeed.multinode_runner": "PDSH_MAX_FAN_OUT",
    },
    "deepspeed.launcher.multinode_runner": {
        "deepseek_zero.compat.deepspeed.multinode_runner": (
            "IMPIRunner MPICHRunner MultiNodeRunner MVAPICHRunner OpenMPIRunner PDSHRunner "
            "SlurmRunner"
        ),
    },
    "deepspeed.launcher.runner": {
        "deepseek_zero.compat.deepspeed.constants": "DEEPSPEED_ENVIRONMENT_NAME",
        "deepseek_zero.compat.deepspeed.multinode_runner": (
            "_parse_hostfile encode_world_info fetch_hostfile main parse_args "
            "parse_inclusion_exclusion parse_resource_filter"
        ),
    },
    "deepspeed.module_inject.auto_tp": {
        "deepseek_zero.compat.deepspeed.tensor_injection": "AutoTP",
    },
    "deepspeed.module_inject.layers": {
        "deepseek_zero.compat.deepspeed.autotp": (
            "get_auto_tp_mode is_autotp_training_mode set_autotp_mode"
        ),
        "deepseek_zero.compat.deepspeed.tensor_layers": (
            "ColumnParallel DS_IS_REPLACED_MODULE DS_TENSOR_MODEL_PARALLEL GateUpPack_LinearLayer "
            "GatherFromTensorParallelRegion GatherReplacedLayerParams LinearAllreduce "
            "LinearAllreduceWithReplicatedInput LinearLayer LmHeadLinearAllreduce RowParallel "
            "ScatterToTensorParallelRegion SubParamLinearAllreduce SubParamLinearLayer "
            "TensorParallel_Layer VocabParallelLinear _subparam_shard_widths"
        ),
        "deepseek_zero.compat.deepspeed.tensor_checkpoint_info": (
            "_build_param_uc_restore_meta _get_param_uc_conversion_meta "
            "collect_autotp_universal_checkpoint_info"
        ),
    },
    "deepspeed.module_inject.tp_shard": {
        "deepseek_zero.compat.deepspeed.autotp": "AutoTPMeta get_shard_size get_shard_size_list",
    },
    "deepspeed.module_inject.autotp_config": {
        "deepseek_zero.compat.deepspeed.autotp": "AutoTPConfig PartitionType TPLayerSpec",
    },
    "deepspeed.module_inject.tp_plan_converter": {
        "deepseek_zero.compat.deepspeed.autotp": "TPPlanConverter",
    },
    "deepspeed.moe.experts": {
        "deepseek_zero.compat.deepspeed.moe_layers": "Experts",
    },
    "deepspeed.moe.layer": {
        "deepseek_zero.compat.deepspeed.moe_layers": "MoE",
    },
    "deepspeed.moe.sharded_moe": {
        "deepseek_zero.compat.deepspeed.moe_layers": (
            "MOELayer TopKGate dist gumbel_rsample multiplicative_jitter top1gating top2gating "
            "topkgating _AllToAll _capacity _route_slots _sparse_decode _sparse_encode"
        ),
    },
    "deepspeed.moe.utils": {
        "deepseek_zero.compat.deepspeed.moe": (
            "configure_moe_param_groups has_moe_layers is_moe_param is_moe_param_group "
            "split_params_grads_into_shared_and_expert_params "
            "split_params_into_different_moe_groups_for_optimizer "
            "split_params_into_shared_and_expert_params"
        ),
    },
    "deepspeed.monitor.comet": {
        "deepseek_zero.compat.deepspeed.monitors": "CometMonitor",
    },
    "deepspeed.monitor.config": {
        "deepseek_zero.compat.deepspeed.config_classes": (
            "CometConfig CSVConfig DeepSpeedMonitorConfig get_monitor_config TensorBoardConfig "
            "WandbConfig"
        ),
    },
    "deepspeed.monitor.csv_monitor": {
        "deepseek_zero.compat.deepspeed.monitors": "csvMonitor",
    },
    "deepspeed.monitor.monitor": {
        "deepseek_zero.compat.deepspeed.monitors": "Monitor MonitorMaster",
    },
    "deepspeed.monitor.tensorboard": {
        "deepseek_zero.compat.deepspeed.monitors": "TensorBoardMonitor",
    },
    "deepspeed.monitor.wandb": {
        "deepseek_zero.compat.deepspeed.monitors": "WandbMonitor",
    },
    "deepspeed.ops": {
        "deepseek_zero.compat.deepspeed.ops": "__compatible_ops__",
    },
    "deepspeed.ops.adagrad.cpu_adagrad": {
        "deepseek_zero.compat.deepspeed.ops": "DeepSpeedCPUAdagrad",
    },
    "deepspeed.ops.adam.cpu_adam": {
        "deepseek_zero.compat.deepspeed.ops": "DeepSpeedCPUAdam",
    },
    "deepspeed.ops.adam.fused_adam": {
        "deepseek_zero.compat.deepspeed.ops": "FusedAdam",
    },
    "deepspeed.ops.aio": {
        "deepseek_zero.compat.deepspeed.ops": "AsyncIOBuilder",
    },
    "deepspeed.ops.lamb.fused_lamb": {
        "deepseek_zero.compat.deepspeed.ops": "FusedLamb",
    },
    "deepspeed.ops.lion.cpu_lion": {
        "deepseek_zero.compat.deepspeed.ops": "DeepSpeedCPULion",
    },
    "deepspeed.ops.lion.fused_lion": {
        "deepseek_zero.compat.deepspeed.ops": "FusedLion",
    },
    "deepspeed.ops.op_builder": {
        "deepseek_zero.compat.deepspeed.ops": (
            "ALL_OPS AsyncIOBuilder CPUAdagradBuilder CPUAdamBuilder CPULionBuilder "
            "EvoformerAttnBuilder FPQuantizerBuilder FusedAdamBuilder FusedLambBuilder "
            "FusedLionBuilder GDSBuilder InferenceBuilder PinMemoryBuilder QuantizerBuilder "
            "RandomLTDBuilder SparseAttnBuilder SpatialInferenceBuilder "
            "StochasticTransformerBuilder TransformerBuilder UtilsBuilder"
        ),
    },
    "deepspeed.ops.op_builder.all_ops": {
        "deepseek_zero.compat.deepspeed.ops": "ALL_OPS",
    },
    "deepspeed.ops.op_builder.builder": {
        "deepseek_zero.compat.deepspeed.ops": "OpBuilder",
    },
    "deepspeed.ops.sparse_attention": {
        "deepseek_zero.compat.deepspeed.sparse_attention": (
            "BertSparseSelfAttention BigBirdSparsityConfig BSLongformerSparsityConfig "
            "DenseSparsityConfig FixedSparsityConfig LocalSlidingWindowSparsityConfig "
            "SparseAttentionUtils SparseSelfAttention SparsityConfig VariableSparsityConfig"
        ),
    },
    "deepspeed.ops.sparse_attention.bert_sparse_self_attention": {
        "deepseek_zero.compat.deepspeed.sparse_attention": "BertSparseSelfAttention",
    },
    "deepspeed.ops.sparse_attention.sparse_attention_utils": {
        "deepseek_zero.compat.deepspeed.sparse_attention": "SparseAttentionUtils",
    },
    "deepspeed.ops.sparse_attention.sparse_self_attention": {
        "deepseek_zero.compat.deepspeed.sparse_attention": "SparseSelfAttention",
    },
    "deepspeed.ops.sparse_attention.sparsity_config": {
        "deepseek_zero.compat.deepspeed.sparse_attention": (
            "BigBirdSparsityConfig BSLongformerSparsityConfig DenseSparsityConfig "
            "FixedSparsityConfig LocalSlidingWindowSparsityConfig SparsityConfig "
            "VariableSparsityConfig"
        ),
    },
    "deepspeed.profiling.config": {
        "deepseek_zero.compat.deepspeed.config_classes": "DeepSpeedFlopsProfilerConfig",
    },
    "deepspeed.profiling.flops_profiler.profiler": {
        "deepseek_zero.compat.deepspeed.profiling": (
            "duration_to_string flops_to_string FlopsProfiler get_model_profile macs_to_string "
            "params_to_string"
        ),
    },
    "deepspeed.runtime.activation_checkpointing.checkpointing": {
        "deepseek_zero.checkpointing": (
            "checkpoint is_configured non_reentrant_checkpoint "
            "partition_activations_in_checkpoint reset get_cuda_rng_tracker "
            "model_parallel_cuda_manual_seed model_parallel_reconfigure_tp_seed"
        ),
        "deepseek_zero.compat.deepspeed.activation_checkpointing": (
            "configure PARTITION_ACTIVATIONS CONTIGUOUS_CHECKPOINTING CPU_CHECKPOINT PROFILE_TIME "
            "SYNCHRONIZE num_layers mpu deepspeed_checkpointing_enabled _cpu_offload_engine"
        ),
    },
    "deepspeed.runtime.activation_checkpointing.config": {
        "deepseek_zero.compat.deepspeed.config_classes": "DeepSpeedActivationCheckpointingConfig",
    },
    "deepspeed.runtime.base_optimizer": {
        "deepseek_zero.compat.deepspeed.constants": "DeepSpeedOptimizer ZeROOptimizer",
    },
    "deepspeed.runtime.bf16_optimizer": {
        "deepseek_zero.compat.deepspeed.optimizer": "BF16_Optimizer",
    },
    "deepspeed.runtime.comm.coalesced_collectives": {
        "deepseek_zero.compat.deepspeed.runtime_utils": "reduce_scatter_coalesced",
    },
    "deepspeed.runtime.config": {
        "deepseek_zero": "DeepSpeedConfigError",
        "deepseek_zero.compat.deepspeed.config_classes": (
            "DeepSpeedConfig DtypeEnum get_checkpoint_params get_checkpoint_tag_validation_mode "
            "get_communication_data_type get_data_types_params get_dataloader_drop_last "
            "get_disable_allgather get_disable_python_gc get_dump_state "
            "get_expert_data_topo_config get_expert_parallel_config "
            "get_gradient_accumulation_steps get_gradient_allreduce_op get_gradient_clipping "
            "get_gradient_predivide_factor get_hybrid_engine_config get_log_level "
            "get_lower_precision_safe_modules get_managed_gradient_accumulation "
            "get_memory_breakdown get_optimizer_gradient_clipping get_optimizer_legacy_fusion "
            "get_optimizer_name get_optimizer_params get_pipeline_config get_prescale_gradients "
            "get_scheduler_name get_scheduler_params get_steps_per_print get_torch_autocast_dtype "
            "get_torch_autocast_enabled get_train_batch_size get_train_micro_batch_size_per_gpu "
            "get_wall_clock_breakdown get_zero_allow_untested_optimizer "
            "get_zero_force_ds_cpu_optimizer HybridEngineConfig"
        ),
        "deepseek_zero.compat.deepspeed.constants": (
            "ADAGRAD_OPTIMIZER ADAM_OPTIMIZER ADAMW_OPTIMIZER LAMB_OPTIMIZER LION_OPTIMIZER "
            "MUON_OPTIMIZER"
        ),
    },
    "deepspeed.runtime.config_utils": {
        "deepseek_zero.compat.deepspeed.config_classes": (
            "DeepSpeedConfigModel dict_raise_error_on_duplicate_keys get_config_default "
            "get_dict_param get_list_param get_scalar_param"
        ),
    },
    "deepspeed.runtime.constants": {
        "deepseek_zero.compat.deepspeed.config_classes": "ValidationMode",
    },
    "deepspeed.runtime.data_pipeline.config": {
        "deepseek_zero.compat.deepspeed.data_pipeline.config": (
            "get_curriculum_learning get_curriculum_learning_enabled "
            "get_curriculum_learning_params get_data_efficiency_config get_data_efficiency_enabled "
            "get_data_efficiency_seed get_data_routing get_data_routing_enabled get_data_sampling "
            "get_data_sampling_enabled get_data_sampling_num_epochs get_data_sampling_num_workers "
            "get_data_sampling_pin_memory get_dynamic_batching get_random_ltd "
            "get_random_ltd_enabled get_random_ltd_params"
        ),
    },
    "deepspeed.runtime.data_pipeline.curriculum_scheduler": {
        "deepseek_zero.compat.deepspeed.data_pipeline.curriculum_scheduler": "CurriculumScheduler",
    },
    "deepspeed.runtime.data_pipeline.data_sampling.data_sampler": {
        "deepseek_zero.compat.deepspeed.data_pipeline.data_sampler": "DeepSpeedDataSampler",
    },
    "deepspeed.runtime.data_pipeline.data_sampling.indexed_dataset": {
        "deepseek_zero.compat.deepspeed.data_pipeline.indexed_dataset": (
            "data_file_path index_file_path MMapIndexedDataset MMapIndexedDatasetBuilder"
        ),
    },
    "deepspeed.runtime.data_pipeline.data_sampling.utils": {
        "deepseek_zero.compat.deepspeed.data_pipeline.indexed_dataset": (
            "close_mmap_dataset_builder create_mmap_dataset_builder find_fit_int_dtype "
            "split_dataset split_index"
        ),
    },
    "deepspeed.runtime.dataloader": {
        "deepseek_zero.utils": "RepeatingLoader",
    },
    "deepspeed.runtime.engine": {
        "deepseek_zero.compat.deepspeed.engine": "DeepSpeedEngine",
    },
    "deepspeed.runtime.fp16.fused_optimizer": {
        "deepseek_zero.compat.deepspeed.optimizer": "FP16_Optimizer",
    },
    "deepspeed.runtime.fp16.unfused_optimizer": {
        "deepseek_zero.compat.deepspeed.optimizer": "FP16_UnfusedOptimizer",
    },
    "deepspeed.runtime.fp16.loss_scaler": {
        "deepseek_zero.compat.deepspeed.loss_scaler": (
            "CONSECUTIVE_HYSTERESIS CreateLossScaler DELAYED_SHIFT DynamicLossScaler "
            "INITIAL_LOSS_SCALE LossScaler LossScalerBase MIN_LOSS_SCALE SCALE_WINDOW"
        ),
    },
    "deepspeed.runtime.lr_schedules": {
        "deepseek_zero.compat.deepspeed.arguments": "add_tuning_arguments get_config_from_args",
        "deepseek_zero.optimizers.lr_schedules": (
            "LRRangeTest OneCycle VALID_LR_SCHEDULES WarmupCosineLR WarmupDecayLR WarmupLR"
        ),
    },
    "deepspeed.runtime.pipe.engine": {
        "deepseek_zero.compat.deepspeed.pipe_engine": "PipelineEngine",
    },
    "deepspeed.runtime.pipe.module": {
        "deepseek_zero.compat.deepspeed.pipe": (
            "LayerSpec PipelineError PipelineModule TiedLayerSpec"
        ),
    },
    "deepspeed.runtime.pipe.schedule": {
        "deepseek_zero.compat.deepspeed.pipe_schedule": (
            "BackwardPass BufferOpInstruction DataParallelSchedule ForwardPass InferenceSchedule "
            "LoadMicroBatch OptimizerStep PipeInstruction PipeSchedule RecvActivation RecvGrad "
            "ReduceGrads ReduceTiedGrads SendActivation SendGrad TrainSchedule"
        ),
    },
    "deepspeed.runtime.pipe.topology": {
        "deepseek_zero.compat.deepspeed.pipe_topology": (
            "_prime_factors PipeDataParallelTopology PipelineParallelGrid "
            "PipeModelDataParallelTopology ProcessTopology"
        ),
    },
    "deepspeed.runtime.precision_config": {
        "deepseek_zero.compat.deepspeed.config_classes": (
            "DeepSpeedBF16Config DeepSpeedFP16Config get_bfloat16_config get_float16_config"
        ),
    },
    "deepspeed.runtime.sequence_parallel.ulysses_sp": {
        "deepseek_zero.compat.deepspeed.sequence_tiles": (
            "sequence_tiled_compute SequenceTiledCompute TiledFusedLogitsLoss TiledMLP"
        ),
        "deepseek_zero.compat.deepspeed.sequence_ulysses": (
            "UlyssesSPAttentionHF UlyssesSPDataLoaderAdapter"
        ),
    },
    "deepspeed.runtime.tensor_parallel.config": {
        "deepseek_zero.compat.deepspeed.autotp": "AUTOTP_MODE _get_hf_tp_plan",
    },
    "deepspeed.runtime.torch_autocast": {
        "deepseek_zero.compat.deepspeed.torch_autocast": (
            "LOWER_PRECISION_SAFE_MODULES PARAM_COMM_DTYPE_ATTR_NAME autocast_if_enabled "
            "get_all_comm_dtypes get_autocast_dtype get_comm_dtype "
            "get_default_autocast_lower_precision_modules has_comm_dtype init_autocast_params "
            "is_autocast_initialized sort_dtypes"
        ),
    },
    "deepspeed.runtime.utils": {
        "deepseek_zero.compat.deepspeed.pipe": "partition_balanced partition_uniform",
        "deepseek_zero.compat.deepspeed.runtime_utils": (
            "align_dense_tensors call_to_str CheckOverflow clip_grad_norm_ "
            "clip_tensors_by_global_norm copy_to_device count_used_parameters_in_backward "
            "DummyOptim empty_cache filter_empty_parameters get_flattened_grad_norm "
            "get_global_norm get_global_norm_of_tensors get_grad_zeros get_inactive_params "
            "get_ma_status get_only_unique_item get_tensor_bytes get_weight_norm has_inf_or_nan "
            "is_invalid_grad_norm is_model_parallel_parameter mask_nan_or_inf_with_val_inplace "
            "memory_status noop_context PartitionedTensor prefix_sum_inc"
        ),
        "deepseek_zero.compat.deepspeed.utils": (
            "clone_tensors_for_torch_save ensure_directory_exists move_to_device noop_decorator "
            "set_random_seed"
        ),
        "deepseek_zero.utils": "see_memory_usage",
    },
    "deepspeed.runtime.zenflow.zenflow_config": {
        "deepseek_zero.compat.deepspeed.config_classes": "ZenFlowConfig",
    },
    "deepspeed.runtime.zero": {
        "deepseek_zero.compat.deepspeed.zero": "unregister_external_parameter",
    },
    "deepspeed.runtime.zero.config": {
        "deepseek_zero.compat.deepspeed.config_classes": "DeepSpeedZeroConfig get_zero_config",
        "deepseek_zero.compat.deepspeed.constants": "ZeroStageEnum",
    },
    "deepspeed.runtime.zero.leaf_module_config": {
        "deepseek_zero.compat.deepspeed.config_classes": "DeepSpeedZeroLeafModuleConfig",
    },
    "deepspeed.runtime.zero.linear": {
        "deepseek_zero.compat.deepspeed.linear": (
            "LinearFunctionForZeroStage3 LinearModuleForZeroStage3 zero3_linear_wrap"
        ),
    },
    "deepspeed.runtime.zero.muon.muon_optimizer": {
        "deepseek_zero.compat.deepspeed.muon": "MuonWithAuxAdam",
    },
    "deepspeed.runtime.zero.muon.original_muon": {
        "deepseek_zero.compat.deepspeed.muon": (
            "adam_update Muon muon_update MuonWithAuxAdam NS_METHODS SingleDeviceMuon "
            "SingleDeviceMuonWithAuxAdam zeropower_via_gram_newtonschulz "
            "zeropower_via_newtonschulz5"
        ),
    },
    "deepspeed.runtime.zero.offload_config": {
        "deepseek_zero.compat.deepspeed.config_classes": (
            "DeepSpeedZeroOffloadOptimizerConfig DeepSpeedZeroOffloadParamConfig "
            "OffloadStateTypeEnum"
        ),
        "deepseek_zero.compat.deepspeed.constants": "OffloadDeviceEnum",
    },
    "deepspeed.runtime.zero.parameter_offload": {
        "deepseek_zero.compat.deepspeed.parameters": "ZeROOrderedDict ensure_zero_ordered_dict",
    },
    "deepspeed.runtime.zero.partition_parameters": {
        "deepseek_zero.compat.deepspeed.parameters": (
            "_orig_torch_empty MultipleAllGatherHandles ZeroParamStatus ZeroParamType"
        ),
        "deepseek_zero.compat.deepspeed.zero": (
            "_contradicting_single_rank_pg_error register_external_parameter "
            "unregister_external_parameter"
        ),
        "deepseek_zero.compat.deepspeed.utils": "zero_wrapper_for_fp_tensor_constructor",
        "deepseek_zero.zero": "GatheredParameters Init",
    },
    "deepspeed.runtime.zero.stage3": {
        "deepseek_zero.compat.deepspeed.estimators": (
            "estimate_zero3_model_states_mem_needs estimate_zero3_model_states_mem_needs_all_cold "
            "estimate_zero3_model_states_mem_needs_all_live model_to_params"
        ),
        "deepseek_zero.compat.deepspeed.optimizer": "DeepSpeedZeroOptimizer_Stage3",
        "deepseek_zero.compat.deepspeed.utils": "unwrap_model_for_generation",
    },
    "deepspeed.runtime.zero.stage_1_and_2": {
        "deepseek_zero.compat.deepspeed.estimators": (
            "estimate_zero2_model_states_mem_needs estimate_zero2_model_states_mem_needs_all_cold "
            "estimate_zero2_model_states_mem_needs_all_live"
        ),
        "deepseek_zero.compat.deepspeed.optimizer": "DeepSpeedZeroOptimizer",
    },
    "deepspeed.runtime.zero.tiling": {
        "deepseek_zero.zero": "TiledLinear",
    },
    "deepspeed.runtime.zero.utils": {
        "deepseek_zero.compat.deepspeed.runtime_utils": "ZeRORuntimeException",
    },
    "deepspeed.sequence.layer": {
        "deepseek_zero.compat.deepspeed.sequence": "DistributedAttention",
    },
    "deepspeed.utils": {
        "deepseek_zero.utils": "see_memory_usage",
    },
    "deepspeed.utils.comms_logging": {
        "deepseek_zero.compat.deepspeed.comms_logging": (
            "calc_bw_log CommsLogger convert_size get_caller_func"
        ),
    },
    "deepspeed.utils.groups": {
        "deepseek_zero.compat.deepspeed.groups": (
            "dist _DATA_PARALLEL_GROUP _DEVICE_MESH_SPLIT_UNSUPPORTED _init_tp_mesh_device "
            "_MODEL_PARALLEL_GROUP _TENSOR_MODEL_PARALLEL_GROUP _clone_world_group "
            "_create_expert_and_data_parallel _get_data_parallel_group "
            "_get_data_parallel_group_ranks _get_data_parallel_rank _get_data_parallel_world_size "
            "_get_expert_model_parallel_world_size _get_model_parallel_world_size "
            "_get_sequence_data_parallel_group _get_sequence_data_parallel_rank "
            "_get_sequence_data_parallel_world_size _get_sequence_parallel_group "
            "_get_sequence_parallel_rank _get_sequence_parallel_world_size get_data_parallel_group "
            "get_data_parallel_rank get_data_parallel_world_size get_model_parallel_group "
            "get_model_parallel_rank get_model_parallel_world_size "
            "get_pipeline_model_parallel_group get_pipeline_model_parallel_rank "
            "get_pipeline_model_parallel_world_size get_tensor_model_parallel_group "
            "get_tensor_model_parallel_rank get_tensor_model_parallel_src_rank "
            "get_tensor_model_parallel_world_size initialize"
        ),
    },
    "deepspeed.utils.init_on_device": {
        "deepseek_zero.compat.deepspeed.utils": "OnDevice",
    },
    "deepspeed.utils.logging": {
        "deepseek_zero.compat.deepspeed.utils": (
            "get_current_level get_log_level_from_string log_dist_once should_log_le warning_once"
        ),
        "deepseek_zero.utils.logging": "log_dist logger set_log_level_from_string",
    },
    "deepspeed.utils.module_utils": {
        "deepseek_zero.compat.deepspeed.utils": "recursive_getattr recursive_setattr",
    },
    "deepspeed.utils.numa": {
        "deepseek_zero.compat.deepspeed.utils": "parse_range_list",
    },
    "deepspeed.utils.nvtx": {
        "deepseek_zero.compat.deepspeed.utils": "instrument_w_nvtx",
    },
    "deepspeed.utils.tensor_fragment": {
        "deepseek_zero.compat.deepspeed.constants": "fragment_address",
        "deepseek_zero.utils": (
            "safe_get_full_fp32_param safe_get_full_grad safe_get_full_optimizer_state "
            "safe_get_local_fp32_param safe_get_local_grad safe_get_local_optimizer_state "
            "safe_set_full_fp32_param safe_set_full_grad safe_set_full_optimizer_state "
            "safe_set_local_fp32_param safe_set_local_grad safe_set_local_optimizer_state "
            "safe_update_full_grad_vectorized"
        ),
    },
    "deepspeed.utils.timer": {
        "deepseek_zero.compat.deepspeed.comms_logging": "trim_mean",
        "deepseek_zero.compat.deepspeed.profiling": (
            "NoopTimer SynchronizedWallClockTimer ThroughputTimer"
        ),
    },
    "deepspeed.utils.torch": {
        "deepseek_zero.compat.deepspeed.utils": "required_torch_version",
    },
    "deepspeed.utils.z3_leaf_module": {
        "deepseek_zero.utils": (
            "get_z3_leaf_modules set_z3_leaf_module set_z3_leaf_modules "
            "set_z3_leaf_modules_by_name set_z3_leaf_modules_by_suffix unset_z3_leaf_modules "
            "z3_leaf_module z3_leaf_parameter"
        ),
    },
    "deepspeed.utils.zero_to_fp32": {
        "deepseek_zero.compat.deepspeed.zero_to_fp32": "to_torch_tensor",
        "deepseek_zero.utils.zero_to_fp32": (
            "convert_zero_checkpoint_to_fp32_state_dict get_fp32_state_dict_from_zero_checkpoint "
            "get_model_state_file get_optim_files load_state_dict_from_zero_checkpoint main"
        ),
    },
    "deepspeed.zero": {
        "deepseek_zero.compat.deepspeed.parameters": "ZeroParamStatus ZeroParamType",
        "deepseek_zero.compat.deepspeed.utils": "unwrap_model_for_generation",
        "deepseek_zero.compat.deepspeed.zero": (
            "register_external_parameter unregister_external_parameter"
        ),
        "deepseek_zero.zero": "GatheredParameters Init TiledLinear",
    },
}
