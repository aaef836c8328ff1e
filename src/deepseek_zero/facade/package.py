"""DeepSpeed's top-level names that are not here, and why.  Read by the package's `__getattr__` when all else failed."""

from __future__ import annotations

from ..base.errors import UnknownNameError

PIPELINE = "pipeline parallelism is a later part"
CLIENTS = "it is there in the package `deepspeed` that install_as_deepspeed() puts on the path (docs/how-to/clients.md)"
INFERENCE = "inference engines are not planned; a stage 3 engine's eval() and generate() serve"
KERNELS = "compiled kernels are not planned: nothing here needs a compiler"
LATER: dict[str, str] = {
    "PipelineModule": PIPELINE,
    "PipelineEngine": PIPELINE,
    "pipe": PIPELINE,
    "runtime": CLIENTS,
    "accelerator": CLIENTS,
    "get_accelerator": CLIENTS,
    "git_version_info": "__version__ says what is installed",
    "DeepSpeedConfig": "initialize reads the configuration, and engine.config is what became of it",
    "DeepSpeedOptimizer": CLIENTS,
    "DeepSpeedDataLoader": "engine.deepspeed_io makes loaders",
    "OnDevice": "zero.Init builds a model in slices, torch.device('meta') without values",
    "add_tuning_arguments": CLIENTS,
    "is_compile_supported": "it always is: engine.compile()",
    "ops": CLIENTS
    + "; optimizers are chosen by name (`optimizer.type`) or passed in; sparse attention is a later part",
    "ADAM_OPTIMIZER": "optimizers are chosen by name (`optimizer.type`)",
    "LAMB_OPTIMIZER": "optimizers are chosen by name (`optimizer.type`)",
    "MUON_OPTIMIZER": "optimizers are chosen by name (`optimizer.type`)",
    "moe": "DeepSpeed's own expert layers are not planned; a model's own experts train sharded",
    "monitor": "monitors are switched on by the configuration (`tensorboard`, `csv_monitor`, `wandb`, `comet`)",
    "profiling": "the flops profiler is a later part",
    "elasticity": "elastic batch sizes are a later part",
    "tp_model_init": "tensor parallelism is a later part",
    "set_autotp_mode": "tensor parallelism is a later part",
    "init_inference": INFERENCE,
    "default_inference_config": INFERENCE,
    "InferenceEngine": INFERENCE,
    "inference": INFERENCE,
    "DeepSpeedHybridEngine": INFERENCE,
    "module_inject": INFERENCE,
    "replace_transformer_layer": INFERENCE,
    "revert_transformer_layer": INFERENCE,
    "DeepSpeedTransformerLayer": KERNELS,
    "DeepSpeedTransformerConfig": KERNELS,
    "HAS_TRITON": KERNELS,
    "domino": "Domino is not planned",
    "compression": "compression training is not planned",
    "autotuning": "autotuning is not planned",
    "nebula": "Nebula is not planned",
}


def package_name_missing(name: str) -> UnknownNameError | None:
    """The error for a name of LATER, None for any other."""
    reason = LATER.get(name)
    if reason is None:
        return None
    return UnknownNameError(
        f"deepseek_zero.{name} is DeepSpeed's and is not built: {reason}.",
        fix="what is there: dir(deepseek_zero), and the rooms zero, utils, comm, checkpointing.",
    )
