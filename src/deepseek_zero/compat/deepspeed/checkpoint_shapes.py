"""DeepSpeed's functions for the shape of a checkpoint.

They compute which ranks' files a smaller grid of stages and tensor-parallel ranks merges. This
library loads every checkpoint at any shape; the functions are for programs that plan with them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


def partition_data(data_list: list[Any], num_partitions: int) -> list[list[Any]]:
    """Split a list into sublists of equal length.

    Args:
        data_list: The list, whose length must be divisible.
        num_partitions: Number of sublists.

    Returns:
        The sublists, `num_partitions` of them, in the order of the list.
    """
    assert len(data_list) % num_partitions == 0
    size = len(data_list) // num_partitions
    return [data_list[start : start + size] for start in range(0, len(data_list), size)]


@dataclass(eq=False)
class meg_2d_parallel_map:
    """A list of data for each pair (pipeline stage, tensor-parallel rank).

    Args:
        pp_degree: Number of pipeline stages.
        tp_degree: Number of tensor-parallel ranks.
    """

    pp_degree: int
    tp_degree: int
    map: dict[tuple[int, int], list[Any]] = field(default_factory=dict, init=False)

    def simple_init(self) -> None:
        """Assign each rank to its pair, stage by stage."""
        self.map = {
            divmod(rank, self.tp_degree): [rank] for rank in range(self.pp_degree * self.tp_degree)
        }

    def add_data(self, pp_index: int, tp_index: int, data: list[Any]) -> None:
        """Append data to the list of one pair.

        Args:
            pp_index: Index of the pipeline stage.
            tp_index: Index of the rank along the tensor-parallel axis.
            data: List to append.
        """
        assert pp_index < self.pp_degree and tp_index < self.tp_degree and isinstance(data, list)
        self.map.setdefault((pp_index, tp_index), []).extend(data)

    def get_data(self, pp_index: int | None = None, tp_index: int | None = None) -> list[Any]:
        """Return the data of one pair, or of all pairs along an axis.

        Args:
            pp_index: Pipeline stage; None for all.
            tp_index: Tensor-parallel rank; None for all.

        Returns:
            The elements of the selected lists as one list, ordered by stage, then by rank.
        """
        assert (pp_index or 0) < self.pp_degree and (tp_index or 0) < self.tp_degree
        stages = range(self.pp_degree) if pp_index is None else [pp_index]
        ranks = range(self.tp_degree) if tp_index is None else [tp_index]
        return [each for stage in stages for rank in ranks for each in self.map[stage, rank]]


def reshape_meg_2d_parallel(
    old_pp_degree: int,
    old_tp_degree: int,
    new_pp_degree: int,
    new_tp_degree: int,
    verbose: bool = False,
) -> meg_2d_parallel_map:
    """Return which old ranks each pair of a smaller grid merges.

    Tensor-parallel ranks are merged before pipeline stages.

    Args:
        old_pp_degree: Pipeline stages of the old grid.
        old_tp_degree: Tensor-parallel ranks of the old grid.
        new_pp_degree: Pipeline stages of the new grid, at most as many.
        new_tp_degree: Tensor-parallel ranks of the new grid, at most as many.
        verbose: Ignored.

    Returns:
        A map of the new grid. The list of each pair contains the indices of the old ranks that are
        merged.
    """
    assert new_pp_degree <= old_pp_degree and new_tp_degree <= old_tp_degree
    found = meg_2d_parallel_map(new_pp_degree, new_tp_degree)
    for new_stage, stages in enumerate(partition_data(list(range(old_pp_degree)), new_pp_degree)):
        for new_rank, ranks in enumerate(partition_data(list(range(old_tp_degree)), new_tp_degree)):
            old = [stage * old_tp_degree + rank for stage in stages for rank in ranks]
            found.add_data(new_stage, new_rank, old)
    return found


@dataclass(eq=False)
class model_3d_desc:
    """Shape of a checkpoint: its number of ranks along each axis of parallelism.

    Args:
        pp_degree: Number of pipeline stages.
        tp_degree: Number of tensor-parallel ranks.
        dp_degree: Number of data-parallel ranks.
    """

    pp_degree: int = 1
    tp_degree: int = 1
    dp_degree: int = 1

    def _axes(self) -> dict[str, int]:
        return {"PP": self.pp_degree, "TP": self.tp_degree, "DP": self.dp_degree}

    def reshape(
        self, target_3d_desc: model_3d_desc, verbose: bool = False
    ) -> list[meg_2d_parallel_map]:
        """Return which ranks' files each rank of a smaller shape merges.

        The list has one map for each data-parallel rank of the target.

        Args:
            target_3d_desc: Shape of the target, which must not be larger along any axis.
            verbose: Ignored.

        Returns:
            One map per data-parallel rank of the target. The list of each pair contains the indices
            of the ranks of this shape whose files are merged.
        """
        valid, errors = self.can_reshape(target_3d_desc)
        assert valid, ",".join(errors)
        sizes = self.pp_degree, self.tp_degree, target_3d_desc.pp_degree, target_3d_desc.tp_degree
        first = reshape_meg_2d_parallel(*sizes, verbose)
        ranks = self.pp_degree * self.tp_degree
        found = [
            meg_2d_parallel_map(first.pp_degree, first.tp_degree)
            for _ in range(target_3d_desc.dp_degree)
        ]
        for (stage, rank), joined in first.map.items():
            replicas = [
                each + replica * ranks for each in joined for replica in range(self.dp_degree)
            ]
            for target, part in zip(
                found, partition_data(replicas, target_3d_desc.dp_degree), strict=True
            ):
                target.add_data(stage, rank, part)
        return found

    def get_desc(self) -> str:
        """Return the number of ranks along each axis as text, for messages."""
        return f"PP,TP,DP = ({self.pp_degree}, {self.tp_degree}, {self.dp_degree})"

    def world_size(self) -> int:
        """Return the number of ranks of this shape: the product of the three degrees."""
        return self.pp_degree * self.tp_degree * self.dp_degree

    def is_valid(self, pp_index: int, tp_index: int, dp_index: int) -> tuple[bool, list[str]]:
        """Return whether the coordinates exist, and an error message for each invalid index.

        Args:
            pp_index: Index of the pipeline stage.
            tp_index: Index of the rank along the tensor-parallel axis.
            dp_index: Index of the rank along the data-parallel axis.

        Returns:
            Whether all coordinates exist, and a list of error messages, which is empty if they do.
        """
        places = zip(self._axes().items(), (pp_index, tp_index, dp_index), strict=True)
        errors = [
            f"{axis} indexing error: index {at} >= degree {size}"
            for (axis, size), at in places
            if at >= size
        ]
        return not errors, errors

    def can_reshape(self, target_3d_desc: model_3d_desc) -> tuple[bool, list[str]]:
        """Return whether the target is no larger, with an error for each axis that is larger."""
        pairs = zip(self._axes().items(), target_3d_desc._axes().values(), strict=True)
        errors = [
            f"Expansion reshape not supported - {axis}: {size} ---> {wanted}"
            for (axis, size), wanted in pairs
            if wanted > size
        ]
        return not errors, errors
