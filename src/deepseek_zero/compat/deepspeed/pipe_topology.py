"""DeepSpeed's topology classes: named axes over ranks, and their process groups.

The order of ranks is that of our `Mesh`: pipe is the slowest axis, then data, then model (tensor).
"""

from __future__ import annotations

import re
from collections import namedtuple
from collections.abc import Iterable, Sequence
from itertools import product
from typing import Any

import torch.distributed as dist

from . import comm

RankLists = list[list[int]]


class ProcessTopology:
    """Map coordinates on named axes to ranks.

    The ranks along the last axis are consecutive.

    Args:
        axes: Names of the axes.
        dims: Sizes of the axes.
    """

    def __init__(self, axes: Sequence[str], dims: Sequence[int]) -> None:
        self.axes = list(axes)
        self.dims = list(dims)
        coord: Any = namedtuple("ProcessCoord", self.axes)  # type: ignore[misc]
        self.ProcessCoord = coord
        places = product(*(range(size) for size in self.dims))
        self.mapping = {self.ProcessCoord(*place): rank for rank, place in enumerate(places)}
        self._coords = list(self.mapping)

    def get_rank(self, **coord_kwargs: int) -> int:
        """Return the rank at the given coordinates, one for each axis.

        Raises:
            ValueError: A coordinate is missing.
        """
        if len(coord_kwargs) != len(self.axes):
            raise ValueError("get_rank() does not support slices. Use filter_match())")
        key = self.ProcessCoord(**coord_kwargs)
        assert key in self.mapping, f"key {coord_kwargs} invalid"
        return int(self.mapping[key])

    def get_axis_names(self) -> list[str]:
        """Return the names of the axes, slowest first."""
        return self.axes

    def get_rank_repr(
        self,
        rank: int,
        omit_axes: Iterable[str] = ("data", "pipe"),
        inner_sep: str = "_",
        outer_sep: str = "-",
    ) -> str:
        """Return a rank's coordinates as a name such as "model_01".

        Args:
            rank: Rank whose coordinates are formatted.
            omit_axes: Axes to leave out.
            inner_sep: Separator of axis and coordinate.
            outer_sep: Separator of axes.

        Returns:
            The name and index of each axis that is not omitted, joined by the separators.
        """
        omitted = set(omit_axes)
        coord = self.get_coord(rank)
        shown = [axis for axis in self.axes if axis not in omitted]
        return outer_sep.join(f"{axis}{inner_sep}{getattr(coord, axis):02d}" for axis in shown)

    def get_dim(self, axis: str) -> int:
        """Return the size of an axis, or 0 if it does not exist."""
        return self.dims[self.axes.index(axis)] if axis in self.axes else 0

    def get_coord(self, rank: int) -> Any:
        """Return the coordinates of a rank as a namedtuple.

        Raises:
            ValueError: There is no such rank.
        """
        if not 0 <= rank < len(self._coords):
            raise ValueError(f"rank {rank} not found in topology.")
        return self._coords[rank]

    def get_axis_comm_lists(self, axis: str) -> RankLists:
        """Return the groups of ranks that differ only on one axis."""
        if axis not in self.axes:
            return []
        found: dict[tuple[int, ...], list[int]] = {}
        place = self.axes.index(axis)
        for rank, coord in enumerate(self._coords):
            found.setdefault((*coord[:place], *coord[place + 1 :]), []).append(rank)
        return list(found.values())

    def filter_match(self, **filter_kwargs: int) -> list[int]:
        """Return the ranks whose coordinates equal the given ones on the named axes.

        Args:
            **filter_kwargs: The coordinate of each axis to compare; other axes may differ.

        Returns:
            The world ranks, in ascending order.
        """
        wanted = filter_kwargs.items()
        return [
            rank
            for rank, coord in enumerate(self._coords)
            if all(getattr(coord, axis) == place for axis, place in wanted)
        ]

    def get_axis_list(self, axis: str, idx: int) -> list[int]:
        """Return the ranks at one index of an axis.

        Args:
            axis: Name of the axis.
            idx: Index along the axis.

        Returns:
            The world ranks, in ascending order.
        """
        return self.filter_match(**{axis: idx})

    def world_size(self) -> int:
        """Return the number of ranks."""
        return len(self.mapping)

    def __str__(self) -> str:
        return str(self.mapping)


class PipeDataParallelTopology(ProcessTopology):
    """Map pipeline stages and data-parallel ranks to ranks; those of a stage are consecutive.

    Args:
        num_pp: Number of stages.
        num_dp: Number of data-parallel ranks.
    """

    def __init__(self, num_pp: int, num_dp: int) -> None:
        super().__init__(["pipe", "data"], [num_pp, num_dp])


class PipeModelDataParallelTopology(ProcessTopology):
    """Map pipeline stages, data-parallel and tensor-parallel ranks to ranks.

    Args:
        num_pp: Number of stages.
        num_mp: Number of tensor-parallel ranks.
        num_dp: Number of data-parallel ranks.
    """

    def __init__(self, num_pp: int, num_mp: int, num_dp: int) -> None:
        super().__init__(["pipe", "data", "model"], [num_pp, num_dp, num_mp])


def _prime_factors(N: int) -> list[int]:
    """Return the prime factors of a positive number in ascending order."""
    if N <= 0:
        raise ValueError("Values must be strictly positive.")
    found = []
    factor = 2
    while N > 1:
        if N % factor:
            factor += 1
        else:
            found.append(factor)
            N //= factor
    return found


class PipelineParallelGrid:
    """This rank's coordinates in a topology and its process groups, usable as `mpu`.

    "Model parallel" means pipe and tensor parallel together, "slice parallel" means tensor parallel
    only. A process group is created on first use, which is collective over all ranks.

    For each kind of parallelism (pipe, data, model, slice) there are methods such as
    `get_pipe_parallel_group`, `get_pipe_parallel_world_size` and `get_pipe_parallel_rank`.

    Args:
        topology: The axes; None for data parallelism only.
        process_group: Ignored.
    """

    def __init__(self, topology: ProcessTopology | None = None, process_group: Any = None) -> None:
        self.global_rank: int = comm.get_rank()
        self.world_size: int = comm.get_world_size()
        self._topo = topology or PipeDataParallelTopology(1, self.world_size)
        self.data_parallel_size = max(self._topo.get_dim("data"), 1)
        self.pipe_parallel_size = max(self._topo.get_dim("pipe"), 1)
        self.model_parallel_size = max(self._topo.get_dim("model"), 1)
        self.slice_parallel_size = self.model_parallel_size
        assert self._topo.world_size() == self.world_size, "Invalid Grid"
        self.stage_id = self.get_stage_id()
        self.data_parallel_id = self.get_data_parallel_id()
        self.is_first_stage = self.stage_id == 0
        self.is_last_stage = self.stage_id == self.pipe_parallel_size - 1
        self.dp_groups = self._lists("data")
        self.pipe_groups = self._lists("pipe")
        self.model_groups = self._lists("model")
        self.ds_model_groups = [
            self._topo.get_axis_list("data", place) for place in range(self.data_parallel_size)
        ]
        self.dp_group = self._own(self.dp_groups)
        self.pp_group = self._own(self.pipe_groups)
        self.slice_group = self._own(self.model_groups)
        self.ds_model_group = self._own(self.ds_model_groups)
        self._made: dict[str, Any] = {}

    def _lists(self, axis: str) -> RankLists:
        return self._topo.get_axis_comm_lists(axis) or [[rank] for rank in range(self.world_size)]

    def _own(self, groups: RankLists) -> list[int]:
        return next(ranks for ranks in groups if self.global_rank in ranks)

    def _group(self, name: str, groups: RankLists) -> Any:
        if name not in self._made:
            if not dist.is_initialized():
                return None
            self._made[name], _ = dist.new_subgroups_by_enumeration(groups)
        return self._made[name]

    def _is_grid_valid(self) -> bool:
        return self._topo.world_size() == self.world_size

    def get_stage_id(self) -> int:
        """Return the index of this rank's pipeline stage."""
        return int(self._topo.get_coord(self.global_rank).pipe) if self._topo.get_dim("pipe") else 0

    def get_data_parallel_id(self) -> int:
        """Return this rank's index along the data axis."""
        return int(self._topo.get_coord(self.global_rank).data) if self._topo.get_dim("data") else 0

    def stage_to_global(self, stage_id: int, **kwargs: int) -> int:
        """Return the rank of another stage with this rank's other coordinates.

        Args:
            stage_id: Index of the other stage.
            **kwargs: Coordinates that differ from this rank's.
        """
        here = self._topo.get_coord(self.global_rank)
        return self._topo.get_rank(**here._replace(pipe=stage_id, **kwargs)._asdict())

    def topology(self) -> ProcessTopology:
        """Return the topology from which the grid was created."""
        return self._topo

    def get_global_rank(self) -> int:
        """Return the world rank of this process."""
        return self.global_rank

    def __getattr__(self, name: str) -> Any:
        found = re.fullmatch("get_(pipe|data|model|slice)_parallel_(group|world_size|rank)", name)
        if found is None:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        kind = found[1]
        lists = {
            "pipe": "pipe_groups",
            "data": "dp_groups",
            "model": "ds_model_groups",
            "slice": "model_groups",
        }
        groups: RankLists = vars(self)[lists[kind]]
        return {
            "group": lambda: self._group(kind, groups),
            "world_size": lambda: len(self._own(groups)),
            "rank": lambda: self._own(groups).index(self.global_rank),
        }[found[2]]
