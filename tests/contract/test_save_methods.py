"""Programs for DeepSpeed save a model with any of its calls, at every stage, through the drop-in.

Each case is a function that every rank calls, as a real program does. Afterwards the folder has the
whole model, and the ranks are still in step.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import deepseek_zero
from deepseek_zero.compat.deepspeed import dialect
from deepseek_zero.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

transformers = pytest.importorskip("transformers")
Loaded = dict[str, Tensor]
HIDDEN = 64


def llama(layers: int = 1) -> Any:
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=64,
            hidden_size=HIDDEN,
            intermediate_size=2 * HIDDEN,
            num_hidden_layers=layers,
            num_attention_heads=4,
        )
    )


def start(stage: int, layers: int = 1, **axes: Any) -> Any:
    zero = {
        "stage": stage,
        "stage3_param_persistence_threshold": 0,
        "stage3_gather_16bit_weights_on_model_save": True,
    }
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": zero,
        "optimizer": {"type": "Adam", "params": {"lr": 1e-2}},
        "steps_per_print": None,
        **axes,
    }
    return deepseek_zero.initialize(model=llama(layers), config=config)[0]


def train(engine: Any) -> None:
    tokens = torch.arange(8).view(1, 8) + dist.get_rank()
    engine.backward(engine(input_ids=tokens, labels=tokens).loss)
    engine.step()


def is_first() -> bool:
    return dist.get_rank() == 0


def load_safetensors(path: Path) -> Loaded:
    from safetensors.torch import load_file

    return load_file(path)


def whole_checkpoint(engine: Any, folder: Path) -> Loaded:
    """accelerate's save_state and the Trainer: one folder for all ranks."""
    engine.save_checkpoint(folder)
    return get_fp32_state_dict_from_zero_checkpoint(folder)


def own_folders(engine: Any, folder: Path) -> Loaded:
    """Ray Train: each rank saves into a separate folder, and the folders are merged."""
    own = folder / f"own {dist.get_rank()}"
    engine.save_checkpoint(own)
    dist.barrier()
    together = folder / "together"
    if is_first():
        for rank in range(dist.get_world_size()):
            shutil.copytree(folder / f"own {rank}", together, dirs_exist_ok=True)
    dist.barrier()
    return get_fp32_state_dict_from_zero_checkpoint(together)


def model_file(engine: Any, folder: Path) -> Loaded:
    """The Trainer's save_model without accelerate."""
    assert engine.save_16bit_model(folder, "model.bin")
    return torch.load(folder / "model.bin", weights_only=True)


def consolidated_on_first(engine: Any, folder: Path) -> Loaded:
    """accelerate's get_state_dict, followed by a save on rank 0."""
    whole = engine._zero3_consolidated_16bit_state_dict()
    if is_first():
        engine.module.save_pretrained(folder, state_dict=whole)
    else:
        assert whole is None
    dist.barrier()
    return load_safetensors(folder / "model.safetensors")


def save_pretrained_on_all(engine: Any, folder: Path) -> Loaded:
    """accelerate's example: `save_pretrained` on all ranks, with a state dict only on rank 0."""
    whole = engine._zero3_consolidated_16bit_state_dict()
    engine.module.save_pretrained(folder, is_main_process=is_first(), state_dict=whole)
    dist.barrier()
    return load_safetensors(folder / "model.safetensors")


def names_on_first(engine: Any, folder: Path) -> Loaded:
    """OpenRLHF: gather each parameter and compare with the keys of rank 0's state dict."""
    whole = {}
    for name, param in engine.module.named_parameters():
        with deepseek_zero.zero.GatheredParameters([param]):
            if is_first():
                whole[name] = param.data.clone()
    if is_first():
        assert set(engine.module.state_dict()) == set(whole)
        torch.save(whole, folder / "whole.pt")
    dist.barrier()
    return torch.load(folder / "whole.pt", weights_only=True)


def local_file_first(engine: Any, folder: Path) -> Loaded:
    """DeepSpeed-Chat: rank 0 writes its local state dict and, at stage 3, replaces it with the
    whole one.
    """
    if is_first():
        torch.save(engine.module.state_dict(), folder / "model.pt")
    if engine.zero_optimization_partition_weights():
        whole = {}
        for name, param in engine.module.named_parameters():
            with deepseek_zero.zero.GatheredParameters([param]):
                whole[name] = param.data.cpu().clone()
        if is_first():
            torch.save(whole, folder / "model.pt")
    dist.barrier()
    return torch.load(folder / "model.pt", weights_only=True)


def gathered_module(engine: Any, folder: Path) -> Loaded:
    """TRL's unwrapped model: gather all parameters on all ranks and take a state dict on rank 0."""
    with deepseek_zero.zero.GatheredParameters(list(engine.module.parameters())):
        if is_first():
            torch.save(engine.module.state_dict(), folder / "model.pt")
    dist.barrier()
    return torch.load(folder / "model.pt", weights_only=True)


def engine_state_dict(engine: Any, folder: Path) -> Loaded:
    """`engine.state_dict()` on all ranks, which has the engine's prefix."""
    return {name.removeprefix("module."): value for name, value in engine.state_dict().items()}


def on_last_rank(engine: Any, folder: Path) -> Loaded:
    """A state dict only on the last rank, for its buffers, then the whole one on all ranks."""
    if dist.get_rank() == dist.get_world_size() - 1:
        assert list(engine.module.state_dict()) == list(engine.module_state_dict_names)
    return engine.module_state_dict()


WAYS: list[Callable[[Any, Path], Loaded]] = [
    whole_checkpoint,
    own_folders,
    model_file,
    consolidated_on_first,
    save_pretrained_on_all,
    names_on_first,
    local_file_first,
    gathered_module,
    engine_state_dict,
    on_last_rank,
]


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
@pytest.mark.ranks(2)
def test_a_save_writes_the_whole_model_and_ranks_stay_synchronized(
    way: Callable[[Any, Path], Loaded], stage: int, tmp_path: Path
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dialect, "is_dropin_imported", lambda: True)
        engine = start(stage)
        train(engine)
        expected = engine.module_state_dict()
        engine.module_state_dict_names = list(expected)
        saved = way(engine, tmp_path)
        assert set(saved) == set(expected)
        assert all(torch.equal(saved[name].float(), expected[name].float()) for name in expected)
        train(engine)
        engine.destroy()


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.ranks(2)
def test_the_state_dict_of_a_pipeline_that_the_configuration_makes_is_whole(stage: int) -> None:
    """accelerate calls it on all ranks and saves the result of rank 0."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dialect, "is_dropin_imported", lambda: True)
        engine = start(stage, 2, pipeline={"stages": 2})
        whole = llama(2).state_dict()
        found = engine.module.state_dict()
        assert list(found) == list(whole)
        assert all(torch.equal(found[name], value) for name, value in whole.items())
        engine.destroy()
