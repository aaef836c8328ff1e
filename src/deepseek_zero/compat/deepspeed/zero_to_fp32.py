"""DeepSpeed's `zero_to_fp32`: extract whole fp32 weights from a checkpoint folder.

The folder may be in this library's layout or DeepSpeed's. The functions run in one process without
a process group or GPU. `deepseek_zero.utils.zero_to_fp32` re-exports them.
"""

from __future__ import annotations

import argparse
import atexit
import re
import shutil
import tempfile
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from ...base.errors import CheckpointError
from ...checkpoint.convert import convert_to_safetensors
from ...checkpoint.export import save_torch
from ...checkpoint.format import MANIFEST
from ...checkpoint.hf_folder import MAX_SHARD_BYTES, plan_shards, write_index
from ...checkpoint.read import LazyTensor, open_checkpoint, tensors_of
from ...checkpoint.safetensors_file import dtype_of
from ...checkpoint.staging import in_turn, staged_output
from .checkpoint.nested_tags import nested_latest, split_tag
from .checkpoint.reader import MODEL, MODEL_OF_RANK

M = TypeVar("M", bound=nn.Module)
AnyPath = str | Path
BIN_INDEX = "pytorch_model.bin.index.json"


def get_fp32_state_dict_from_zero_checkpoint(
    checkpoint_dir: AnyPath,
    tag: str | None = None,
    exclude_frozen_parameters: bool = False,
    lazy_mode: bool = False,
) -> dict[str, Any]:
    """Return the full state dict of a checkpoint in fp32.

    The tensors are on the CPU. Tensors that are not floating-point, such as counters in buffers,
    keep their dtype. The dict has a tied weight under all its names, which share one tensor.

    Args:
        checkpoint_dir: The checkpoint, or the directory of checkpoints.
        tag: Name of the checkpoint in the directory; None for the latest.
        exclude_frozen_parameters: Whether to leave out parameters that were not trained.
        lazy_mode: Whether to return objects that have `.shape` and `.dtype` instead of tensors.
            Their method `.contiguous()` reads the tensor from the checkpoint, whose files stay open
            as long as these objects exist.

    Returns:
        The full tensors by name, or these objects by name if `lazy_mode` is true.

    Raises:
        CheckpointError: The checkpoint is missing or damaged.
        NotBuiltError: `checkpoint_dir` is a URL.
    """
    lazy = _lazy_state(checkpoint_dir, tag, torch.float32, exclude_frozen_parameters)
    if lazy_mode:
        return dict(lazy)
    whole = {each.name: each.contiguous() for each in lazy.values()}
    return {name: whole[each.name] for name, each in lazy.items()}


def to_torch_tensor(
    state_dict: Mapping[str, Any],
    return_empty_tensor: bool = False,
    dtype: torch.dtype | None = None,
) -> dict[str, Tensor]:
    """Return the tensors of a state dict that was read with `lazy_mode`.

    Names of a tied weight share one tensor.

    Args:
        state_dict: Result of `get_fp32_state_dict_from_zero_checkpoint` with `lazy_mode`.
        return_empty_tensor: Whether to return tensors of the same shapes without reading values.
        dtype: Dtype of floating-point tensors; None keeps theirs.
    """
    made: dict[str, Tensor] = {}
    for lazy in state_dict.values():
        if lazy.name in made:
            continue
        target = dtype if dtype is not None and lazy.dtype.is_floating_point else lazy.dtype
        if return_empty_tensor:
            made[lazy.name] = torch.empty(lazy.shape, dtype=target, device="cpu")
        else:
            made[lazy.name] = lazy.contiguous().to(target)
    return {name: made[lazy.name] for name, lazy in state_dict.items()}


def load_state_dict_from_zero_checkpoint(
    model: M, checkpoint_dir: AnyPath, tag: str | None = None
) -> M:
    """Move a model to the CPU and load a checkpoint's weights and buffers into it.

    The values are converted to the dtypes of the model. A name that only the model or only the
    checkpoint has is ignored.

    Args:
        model: A model that has not been wrapped by an engine.
        checkpoint_dir: The checkpoint, or the directory of checkpoints.
        tag: Name of the checkpoint in the directory; None for the latest.

    Returns:
        `model` itself, on the CPU.

    Raises:
        CheckpointError: The checkpoint is missing or damaged.
        NotBuiltError: `checkpoint_dir` is a URL.
        RuntimeError: A tensor has different shapes in the model and in the checkpoint.
    """
    model = model.cpu()
    model.load_state_dict(
        get_fp32_state_dict_from_zero_checkpoint(checkpoint_dir, tag), strict=False
    )
    return model


def convert_zero_checkpoint_to_fp32_state_dict(
    checkpoint_dir: AnyPath,
    output_dir: AnyPath,
    max_shard_size: str | int | None = "5GB",
    safe_serialization: bool = False,
    tag: str | None = None,
    exclude_frozen_parameters: bool = False,
) -> None:
    """Write the weights and buffers of a checkpoint in fp32.

    Tensors that are not floating-point keep their dtype. Torch files contain a tied weight under
    all its names, and safetensors files only under the first one. Files of an earlier conversion to
    the same format in `output_dir` are replaced.

    Args:
        checkpoint_dir: The checkpoint, or the directory of checkpoints.
        output_dir: Folder to write, which is created if it is missing.
        max_shard_size: Largest size of a file, in bytes or as a text such as "5GB"; None for one
            file. A larger tensor gets a file of its own.
        safe_serialization: Whether to write safetensors files instead of torch files.
        tag: Name of the checkpoint in the directory; None for the latest.
        exclude_frozen_parameters: Whether to leave out parameters that were not trained.

    Raises:
        CheckpointError: The checkpoint is missing or damaged, `max_shard_size` is invalid, or the
            files cannot be written.
        NotBuiltError: A path is a URL.
    """
    convert_zero_checkpoint_to_state_dict(
        checkpoint_dir,
        output_dir,
        max_shard_size=max_shard_size,
        safe_serialization=safe_serialization,
        tag=tag,
        exclude_frozen_parameters=exclude_frozen_parameters,
    )


def convert_zero_checkpoint_to_state_dict(
    checkpoint_dir: AnyPath,
    output_dir: AnyPath,
    dtype: torch.dtype | str = torch.float32,
    *,
    max_shard_size: str | int | None = "5GB",
    safe_serialization: bool = False,
    tag: str | None = None,
    exclude_frozen_parameters: bool = False,
) -> None:
    """Write the weights and buffers of a checkpoint in a given dtype.

    Torch files contain a tied weight under all its names, and safetensors files only under the
    first one. Files of an earlier conversion to the same format in `output_dir` are replaced.

    Args:
        checkpoint_dir: The checkpoint, or the directory of checkpoints.
        output_dir: Folder to write, which is created if it is missing.
        dtype: Dtype of the floating-point tensors, or its name, such as "bf16". Other tensors keep
            their dtype.
        max_shard_size: Largest size of a file, in bytes or as a text such as "5GB"; None for one
            file. A larger tensor gets a file of its own.
        safe_serialization: Whether to write safetensors files instead of torch files.
        tag: Name of the checkpoint in the directory; None for the latest.
        exclude_frozen_parameters: Whether to leave out parameters that were not trained.

    Raises:
        CheckpointError: The checkpoint is missing or damaged, `dtype` or `max_shard_size` is
            invalid, or the files cannot be written.
        NotBuiltError: A path is a URL.
    """
    most = _bytes_of(max_shard_size)
    source, tag = _place_of(checkpoint_dir, tag)
    out = Path(output_dir)
    skip = exclude_frozen_parameters
    # As in DeepSpeed, all ranks of a program may convert into the same folder.
    with in_turn(out):
        if safe_serialization:
            convert_to_safetensors(
                source, out, dtype, tag=tag, max_shard_bytes=most, exclude_frozen=skip
            )
        else:
            _write_torch_shards(_lazy_state(source, tag, dtype, skip), out, most)


def get_model_state_file(checkpoint_dir: AnyPath, zero_stage: int) -> str:
    """Return the path of the file with rank 0's model states in a checkpoint.

    If the checkpoint has the layout of this library, each call writes such a file, in which
    "module" is empty, to a new temporary folder. The folder is removed when the process ends.

    Args:
        checkpoint_dir: Folder of the checkpoint.
        zero_stage: ZeRO stage of the run that saved the checkpoint. The name of the file depends on
            it.

    Returns:
        The path of the file.

    Raises:
        CheckpointError: The checkpoint has the layout of this library and is damaged.
        FileNotFoundError: The checkpoint has no file with rank 0's model states of this stage.
    """
    name = (MODEL if zero_stage <= 2 else MODEL_OF_RANK).format(0)
    path = _in_deepspeeds_layout(Path(checkpoint_dir)) / name
    if not path.exists():
        raise FileNotFoundError(f"can't find model states file at '{path}'")
    return str(path)


def get_optim_files(checkpoint_dir: AnyPath) -> list[str]:
    """Return the paths of a checkpoint's files with optimizer states.

    The paths are in the order of ranks. If the checkpoint has the layout of this library, each call
    writes one such file, which contains only the ZeRO stage, to a new temporary folder. The folder
    is removed when the process ends.

    Args:
        checkpoint_dir: Folder of the checkpoint.

    Raises:
        CheckpointError: The checkpoint has the layout of this library and is damaged.
        FileNotFoundError: The checkpoint has no files with optimizer states.
    """
    found = [
        str(path) for path in _in_deepspeeds_layout(Path(checkpoint_dir)).glob("*_optim_states.pt")
    ]
    if not found:
        raise FileNotFoundError(
            f"can't find *_optim_states.pt files in directory '{checkpoint_dir}'"
        )
    return sorted(found, key=_by_number)


def _by_number(name: str) -> list[int | str]:
    """Return a sort key that compares the numbers in a name by value."""
    return [int(part) if part.isdigit() else part for part in re.split(r"(\d+)", name)]


def _in_deepspeeds_layout(folder: Path) -> Path:
    """Return a folder with DeepSpeed's two files for a checkpoint in any layout.

    For our layout it is a temporary folder whose files have no tensors.

    Lightning's conversion reads the stage and its own state from them. The temporary folder is
    removed when the process ends.
    """
    if not (folder / MANIFEST).exists():
        return folder
    with ExitStack() as stack:
        source = open_checkpoint(folder, None, stack)
    out = Path(tempfile.mkdtemp(prefix="deepseek_zero_"))
    atexit.register(shutil.rmtree, out, ignore_errors=True)
    name = (MODEL_OF_RANK if source.manifest.stage == 3 else MODEL).format(0)
    save_torch({**(source.plain["client"] or {}), "module": {}}, out / name)
    stage = {"zero_stage": source.manifest.stage}
    save_torch({"optimizer_state_dict": stage}, out / "zero_pp_rank_0_mp_rank_00_optim_states.pt")
    return out


def _place_of(path: AnyPath, tag: str | None) -> tuple[Path, str | None]:
    """Return the directory and the name of a checkpoint whose tag may contain "/"."""
    return split_tag(Path(path), nested_latest(Path(path)) if tag is None else tag)


def _lazy_state(
    path: AnyPath, tag: str | None, dtype: torch.dtype | str, exclude_frozen: bool
) -> dict[str, LazyTensor]:
    # The files stay open as long as a returned tensor may be read.
    source = open_checkpoint(*_place_of(path, tag), ExitStack())
    found = tensors_of(source, dtype_of(dtype), exclude_frozen=exclude_frozen)
    return found | {name: found[first] for name, first in source.tied.items() if first in found}


def _write_torch_shards(lazy: dict[str, LazyTensor], out: Path, most: int) -> None:
    """Write torch files, with one file in memory at a time.

    Tied names are in the file of their tensor.
    """
    stored = {name: each.name for name, each in lazy.items()}
    entries = [each.entry for name, each in lazy.items() if name == each.name]
    shards = plan_shards(entries, most, "pytorch_model", "bin")
    with staged_output(out) as draft:
        for file, infos in shards.items():
            whole = {info.name: lazy[info.name].contiguous() for info in infos}
            state = {name: whole[own] for name, own in stored.items() if own in whole}
            save_torch(state, draft.path / file)
        write_index(draft.path / BIN_INDEX, shards, stored)
        draft.publish_folder(
            ("pytorch_model.bin", "pytorch_model-*-of-*.bin", BIN_INDEX), BIN_INDEX
        )


def _bytes_of(size: str | int | None) -> int:
    """Parse a size in bytes, such as "5GB", "1GiB" or a number; None means no limit."""
    if size is None:
        return 1 << 62
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]?)(I?)B", str(size).strip().upper())
    if found is not None:
        base = 1024 if found[3] else 1000
        return int(float(found[1]) * base ** " KMGT".index(found[2] or " "))
    if isinstance(size, str):
        raise CheckpointError(f"{size!r} is no size.", fix='write "5GB", "500MB" or "1GiB".')
    return size


def main(arguments: list[str] | None = None) -> None:
    """Run DeepSpeed's script `zero_to_fp32.py CHECKPOINT_DIR OUTPUT_DIR`."""
    parser = argparse.ArgumentParser(description="Write the whole fp32 weights of a checkpoint.")
    parser.add_argument(
        "checkpoint_dir", help="the folder that save_checkpoint was given, or one checkpoint in it"
    )
    parser.add_argument("output_dir", help="where to write the weights")
    parser.add_argument(
        "--max_shard_size",
        default="5GB",
        help=f"of one file (default 5GB, {MAX_SHARD_BYTES} bytes)",
    )
    parser.add_argument(
        "--safe_serialization", action="store_true", help="write safetensors, not torch files"
    )
    parser.add_argument(
        "-t", "--tag", default=None, help="the checkpoint (default: that of the file `latest`)"
    )
    parser.add_argument(
        "--exclude_frozen_parameters", action="store_true", help="leave out what was not trained"
    )
    parser.add_argument(
        "-d", "--debug", action="store_true", help="accepted; errors say what is wrong without it"
    )
    given = vars(parser.parse_args(arguments))
    del given["debug"]
    convert_zero_checkpoint_to_fp32_state_dict(**given)
