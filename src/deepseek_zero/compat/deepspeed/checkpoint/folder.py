"""DeepSpeed's classes for the files, shape and metadata of a checkpoint.

reader.py reads the tensors. These classes list files and read each model file once for its
metadata.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ....base.errors import CheckpointError
from ....base.given import whole_number
from ..checkpoint_shapes import meg_2d_parallel_map, model_3d_desc, reshape_meg_2d_parallel
from .reader import open_file

# A folder's optimizer files have one of these prefixes.
PREFIXES = ("zero_", "fp16_zero_", "bf16_zero_")
LAYER = re.compile(r"layer_(\d+)-model_.*")
DIMENSIONS = "checkpoint_parallel_dimensions"
PP = "pp_degree"
TP = "tp_degree"


class ZeROCheckpoint:
    """The optimizer files of a checkpoint, and which ranks of a target shape merge them.

    Args:
        dir: Folder of the checkpoint.
        source_3d: Shape of the checkpoint; None to read it from the folder.

    Raises:
        CheckpointError: The folder has no optimizer files.
    """

    def __init__(self, dir: str, source_3d: model_3d_desc | None = None) -> None:
        self.dir = dir
        self.file_list = _optimizer_files(dir)
        self.num_files = len(self.file_list)
        if not self.num_files:
            raise CheckpointError(
                f"No ZeRO files found in {dir}", fix="name the folder of one checkpoint."
            )
        self.src_3d = source_3d or get_model_3d_descriptor(dir)
        self.reshape(self.src_3d)

    def get_src_world_size(self) -> int:
        """Return the number of ranks that wrote the checkpoint."""
        return self.src_3d.world_size()

    def get_src_tp_degree(self) -> int:
        """Return the number of tensor-parallel ranks that wrote the checkpoint."""
        return self.src_3d.tp_degree

    def get_src_pp_degree(self) -> int:
        """Return the number of pipeline stages that wrote the checkpoint."""
        return self.src_3d.pp_degree

    def get_src_dp_degree(self) -> int:
        """Return the number of data-parallel ranks that wrote the checkpoint."""
        return self.src_3d.dp_degree

    def reshape(self, target_3d_desc: model_3d_desc) -> None:
        """Set the target shape, which must not be larger than the source along any axis."""
        self.target_3d, self._maps = target_3d_desc, self.src_3d.reshape(target_3d_desc)

    def get_file_indices_for_rank(self, pp_index: int, tp_index: int, dp_index: int) -> list[int]:
        """Return the indices in `file_list` of the files that a target rank merges.

        Args:
            pp_index: Index of the pipeline stage.
            tp_index: Index of the rank along the tensor-parallel axis.
            dp_index: Index of the rank along the data-parallel axis.

        Returns:
            Indices into `file_list`, in the order in which the files are merged.
        """
        return self._maps[dp_index].get_data(pp_index, tp_index)

    def get_files_for_rank(self, pp_index: int, tp_index: int, dp_index: int) -> list[str]:
        """Return the paths of the files that a rank of the target shape merges.

        Args:
            pp_index: Index of the pipeline stage.
            tp_index: Index of the rank along the tensor-parallel axis.
            dp_index: Index of the rank along the data-parallel axis.

        Returns:
            The paths, in the order in which the files are merged.
        """
        return [
            self.file_list[number]
            for number in self.get_file_indices_for_rank(pp_index, tp_index, dp_index)
        ]


class DeepSpeedCheckpoint:
    """The files of a checkpoint, for tools that convert it to another number of ranks.

    Tensors are not read.

    Args:
        dir: Folder of the checkpoint.
        tp_degree: Tensor-parallel ranks of the target; None for those of the checkpoint.
        pp_degree: Pipeline stages of the target; None for those of the checkpoint.
        dp_degree: Data-parallel ranks of the target; None for those of the checkpoint.

    Raises:
        CheckpointError: The folder is no checkpoint in DeepSpeed's layout.
        UsageError: A degree is not an integer from 1 to that of the checkpoint.
    """

    def __init__(
        self,
        dir: str,
        tp_degree: int | None = None,
        pp_degree: int | None = None,
        dp_degree: int | None = None,
    ) -> None:
        self.dir = dir
        self.file_list = _files(dir)
        self.layer_files = sorted(
            path for path in self.file_list if LAYER.fullmatch(Path(path).name)
        )
        self.layer_keys = sorted({Path(path).name.split("-model_")[0] for path in self.layer_files})
        self.layer_count = len(self.layer_keys)
        self.mp_rank_files = _named(self.file_list, "mp_rank_")
        states = [open_file(Path(path)) for path in self.mp_rank_files]
        self.model_state_metadata = [
            (path, {DIMENSIONS: state.get(DIMENSIONS), "ds_config": state.get("ds_config", {})})
            for path, state in zip(self.mp_rank_files, states, strict=True)
        ]
        plain = {
            name: value for name, value in (states[0] if states else {}).items() if name != "module"
        }
        self.global_state = {"iteration": 0, **plain}
        self.zero_checkpoint = ZeROCheckpoint(
            dir, _shape(self.file_list, dir, self.model_state_metadata)
        )
        source = self.zero_checkpoint.src_3d
        self.tp_degree = _degree("tp_degree", tp_degree, source.tp_degree)
        self.pp_degree = _degree("pp_degree", pp_degree, source.pp_degree)
        self.dp_degree = _degree("dp_degree", dp_degree, source.dp_degree)
        self.original_world_size = source.world_size()
        self.world_size = self.tp_degree * self.pp_degree * self.dp_degree
        self.old_2d_map = meg_2d_parallel_map(source.pp_degree, source.tp_degree)
        self.old_2d_map.simple_init()
        degrees = source.pp_degree, source.tp_degree, self.pp_degree, self.tp_degree
        self.new_2d_map = reshape_meg_2d_parallel(*degrees)
        self.zero_checkpoint.reshape(model_3d_desc(self.pp_degree, self.tp_degree, self.dp_degree))

    def is_change_tp_degree(self) -> bool:
        """Return whether the target has a different number of tensor-parallel ranks."""
        return self.tp_degree != self.zero_checkpoint.src_3d.tp_degree

    def is_change_pp_degree(self) -> bool:
        """Return whether the target has a different number of pipeline stages."""
        return self.pp_degree != self.zero_checkpoint.src_3d.pp_degree

    def is_change_dp_degree(self) -> bool:
        """Return whether the target has a different number of data-parallel ranks."""
        return self.dp_degree != self.zero_checkpoint.src_3d.dp_degree

    def get_zero_files(self, pp_index: int, tp_index: int, dp_index: int) -> list[str]:
        """Return the optimizer files that a rank of the target shape merges.

        Args:
            pp_index: Index of the pipeline stage.
            tp_index: Index of the rank along the tensor-parallel axis.
            dp_index: Index of the rank along the data-parallel axis.

        Returns:
            The paths, in the order in which the files are merged.
        """
        return self.zero_checkpoint.get_files_for_rank(pp_index, tp_index, dp_index)

    def get_2d_parallel_files(self, tp_index: int, pp_index: int) -> list[str]:
        """Return the model files that one pipeline stage and tensor-parallel rank merges.

        Args:
            tp_index: Index of the rank along the tensor-parallel axis.
            pp_index: Index of the pipeline stage.

        Returns:
            The paths, in the order in which the files are merged.
        """
        return [
            self.mp_rank_files[number] for number in self.new_2d_map.get_data(pp_index, tp_index)
        ]

    def get_iteration(self) -> Any:
        """Return the step count that the program saved, or 0."""
        return self.global_state["iteration"]

    def get_args(self) -> Any:
        """Return the arguments that the program saved, or None."""
        return self.global_state.get("args")

    def get_checkpoint_info(self, info_key: str = "checkpoint_info") -> Any:
        """Return the value that the program saved under a key, or None."""
        return self.global_state.get(info_key)


def get_model_3d_descriptor(dir: str) -> model_3d_desc:
    """Return the shape of a checkpoint: pipeline, tensor- and data-parallel degree."""
    files = _files(dir)
    found = [
        (path, {DIMENSIONS: open_file(Path(path)).get(DIMENSIONS)})
        for path in _named(files, "mp_rank_")
    ]
    return _shape(files, dir, found)


def _degree(name: str, asked: int | None, most: int) -> int:
    """Return the degree of the target, which is at most that of the checkpoint."""
    return most if asked is None else whole_number("DeepSpeedCheckpoint", name, asked, 1, most)


def _shape(
    files: Sequence[str], dir: str, models: Sequence[tuple[str, dict[str, Any]]]
) -> model_3d_desc:
    """Read the shape from the model files, or infer it from the number of files."""
    optimizers = len(_optimizer_files(dir))
    said: dict[str, Any] = {path: facts.get(DIMENSIONS) for path, facts in models}
    if not any(said.values()):
        tp = len(_named(files, "layer_01")) or max(1, len(models))
        pp = max(1, len(models) // tp)
        return model_3d_desc(pp, tp, max(1, optimizers // (pp * tp)))
    silent = [path for path, dimensions in said.items() if dimensions is None]
    if silent:
        raise CheckpointError(
            f"Checkpoint {DIMENSIONS} is missing from model-state files: {silent}"
        )
    shapes = {
        tuple(whole_number(path, name, shape.get(name), 1) for name in (PP, TP))
        for path, shape in said.items()
    }
    if len(shapes) > 1:
        raise CheckpointError(
            f"Checkpoint {DIMENSIONS} disagrees across model-state files: {sorted(shapes)}"
        )
    pp, tp = next(iter(shapes))
    if len(models) != pp * tp or optimizers % (pp * tp):
        raise CheckpointError(
            f"{dir} has {len(models)} model files and {optimizers} ZeRO files, which is not {pp} "
            f"stages of {tp} ranks.",
            fix="copy the whole folder.",
        )
    return model_3d_desc(pp, tp, max(1, optimizers // (pp * tp)))


def _files(dir: str) -> list[str]:
    if not Path(dir).is_dir():
        raise CheckpointError(f"{dir} is not a folder.", fix="name the folder of one checkpoint.")
    return [str(path) for path in sorted(Path(dir).rglob("*")) if path.is_file()]


def _named(files: Sequence[str], prefix: str) -> list[str]:
    return sorted(path for path in files if Path(path).name.startswith(prefix))


def _optimizer_files(dir: str) -> list[str]:
    """Return the optimizer files, sorted by data-parallel, then model-parallel rank."""
    files = next((found for prefix in PREFIXES if (found := _named(_files(dir), prefix))), [])
    return sorted(
        files,
        key=lambda path: [int(number) for number in re.findall(r"_rank_(\d+)", Path(path).name)],
    )
