"""DeepSpeed's (Megatron's) indexed dataset: memory-mapped rows of integers.

`NAME.bin` has the concatenated rows. `NAME.idx` has, in little-endian order: 9 bytes of magic, the
version (uint64), the dtype's code (uint8), the number of rows and of document bounds (uint64 each),
the sizes of the rows in elements (int32), their offsets in bytes (int64), and the document bounds
(int64).
"""

from __future__ import annotations

import os
import struct
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from ....base.errors import UsageError
from ....base.given import refuse_url

Array = np.ndarray[Any, Any]
FilePath = str | os.PathLike[str]

MAGIC = b"MMIDIDX\x00\x00"
_HEAD = struct.Struct("<9sQBQQ")
_DTYPES = (np.uint8, np.int8, np.int16, np.int32, np.int64, np.uint16, np.uint32, np.uint64)
CODES: dict[int, Any] = dict(enumerate(_DTYPES, 1))


def data_file_path(prefix_path: str) -> str:
    """Return the path of a dataset's data file, which contains the rows."""
    return f"{prefix_path}.bin"


def index_file_path(prefix_path: str) -> str:
    """Return the path of a dataset's index file, which contains the position of each row."""
    return f"{prefix_path}.idx"


class MMapIndexedDataset:
    """Read-only rows of integers.

    `dataset[i]` is a 1-D array that views the mapped file.

    Args:
        path: Path without .idx and .bin.
        skip_warmup: Ignored; pages are read on demand.

    Raises:
        UsageError: A file is missing, has the wrong format or is truncated.
    """

    def __init__(self, path: FilePath, skip_warmup: bool = False) -> None:
        self._path = os.fspath(path)
        if not self.exists(self._path):
            raise UsageError(
                f"{self._path}.idx and {self._path}.bin are not both there.",
                "They hold which samples have which metric.",
                "write them (MMapIndexedDatasetBuilder), or correct the path, which has no ending.",
            )
        whole = Path(index_file_path(self._path)).read_bytes()
        if len(whole) < _HEAD.size or not whole.startswith(MAGIC):
            raise self._damaged(index_file_path(self._path))
        _, version, code, rows, bounds = _HEAD.unpack_from(whole)
        if version != 1 or code not in CODES or len(whole) < _HEAD.size + 12 * rows + 8 * bounds:
            raise self._damaged(index_file_path(self._path))
        self.dtype = np.dtype(CODES[code])
        self.sizes: Array = np.frombuffer(whole, np.int32, rows, _HEAD.size)
        self._offsets: Array = np.frombuffer(whole, np.int64, rows, _HEAD.size + 4 * rows)
        self.doc_idx: Array = np.frombuffer(whole, np.int64, bounds, _HEAD.size + 12 * rows)
        data = data_file_path(self._path)
        many = int(self.sizes.sum(dtype=np.int64))
        if os.path.getsize(data) < many * self.dtype.itemsize:
            raise self._damaged(data)
        # An empty file cannot be mapped.
        self._data: Array = (
            np.memmap(data, self.dtype, "r", shape=(many,)) if many else np.empty(0, self.dtype)
        )

    @staticmethod
    def exists(path: FilePath) -> bool:
        """Return whether both files of a dataset exist."""
        name = os.fspath(path)
        return os.path.exists(index_file_path(name)) and os.path.exists(data_file_path(name))

    def __len__(self) -> int:
        return len(self.sizes)

    def __getitem__(self, index: int | slice) -> Any:
        if isinstance(index, slice):
            return [self[row] for row in range(*index.indices(len(self)))]
        return self.get(index)

    def get(self, idx: int, offset: int = 0, length: int | None = None) -> Array:
        """Return elements [offset, offset + length) of one row.

        Args:
            idx: Index of the row.
            offset: First element.
            length: Number of elements; None for the rest of the row.

        Returns:
            A 1-D array that is a view of the mapped file.
        """
        row = range(len(self))[int(idx)]
        size = int(self.sizes[row])
        first = int(self._offsets[row]) // self.dtype.itemsize
        return self._data[first + offset : first + (size if length is None else offset + length)]

    def size(self, index: int) -> int:
        """Return the number of elements of a row."""
        return int(self.sizes[index])

    def get_doc_idx(self) -> Array:
        """Return the row numbers at which documents begin, and the number of rows."""
        return self.doc_idx

    @property
    def supports_prefetch(self) -> bool:
        """Return False: rows are read from the mapped file on demand."""
        return False

    def _damaged(self, file: str) -> UsageError:
        return UsageError(
            f"{file} is not a memory-mapped dataset, or not all of one.",
            fix="write it again (MMapIndexedDatasetBuilder).",
        )


class MMapIndexedDatasetBuilder:
    """Write an indexed dataset: rows with `add_item`, then the index with `finalize`.

    Args:
        out_file: Path of the .bin file.
        dtype: Integer type of numpy.

    Raises:
        UsageError: The dtype is not supported.
    """

    def __init__(self, out_file: FilePath, dtype: Any = np.int64) -> None:
        self._dtype = np.dtype(dtype)
        if self._dtype not in _DTYPES:
            names = ", ".join(np.dtype(each).name for each in _DTYPES)
            raise UsageError(f"{self._dtype} not supported.", fix=f"choose one of {names}.")
        refuse_url(f"'{os.fspath(out_file)}'", out_file)
        self._data_file = open(out_file, "wb")  # noqa: SIM115  # finalize closes it
        self._sizes: list[int] = []
        self._doc_idx = [0]

    def add_item(self, tensor: Any) -> None:
        """Append a tensor as one row."""
        self.add_item_numpy(tensor.numpy())

    def add_items(self, arr_list: Sequence[Any]) -> None:
        """Append each array as one row."""
        for array in arr_list:
            self.add_item_numpy(array)

    def add_item_numpy(self, np_array: Any) -> None:
        """Append an array as one row."""
        self._data_file.write(np.asarray(np_array).astype(self._dtype).tobytes())
        self._sizes.append(np_array.size)

    def end_document(self) -> None:
        """End the current document after the rows that were added so far."""
        self._doc_idx.append(len(self._sizes))

    def merge_file_(self, another_file: FilePath) -> None:
        """Append the rows of another dataset.

        Raises:
            UsageError: Its dtype is different.
        """
        other = MMapIndexedDataset(another_file)
        before = len(self._sizes)
        if other.dtype != self._dtype:
            raise UsageError(
                f"{another_file} holds {other.dtype}, this one {self._dtype}.", fix="use one dtype."
            )
        self.add_items(other[:])
        self._doc_idx += [before + int(bound) for bound in other.doc_idx[1:]]

    def finalize(self, index_file: FilePath) -> None:
        """Write the index file, and close it and the data file."""
        self._data_file.close()
        sizes = np.array(self._sizes, np.int64)
        offsets = (sizes.cumsum() - sizes) * self._dtype.itemsize
        code = next(code for code, each in CODES.items() if self._dtype == each)
        head = _HEAD.pack(MAGIC, 1, code, len(sizes), len(self._doc_idx))
        bounds = np.array(self._doc_idx, np.int64)
        Path(index_file).write_bytes(
            head + sizes.astype(np.int32).tobytes() + offsets.tobytes() + bounds.tobytes()
        )


def find_fit_int_dtype(min_value: int, max_value: int) -> Any:
    """Return numpy's smallest integer type that can hold both values.

    Args:
        min_value: Smallest value.
        max_value: Largest value.

    Returns:
        The integer type, for example `numpy.uint8`.
    """
    kinds = (np.uint8, np.uint16, np.uint32) if min_value >= 0 else (np.int8, np.int16, np.int32)
    for kind in kinds:
        if np.iinfo(kind).min <= min_value and max_value <= np.iinfo(kind).max:
            return kind
    return np.uint64 if min_value >= 0 else np.int64


def create_mmap_dataset_builder(fname: FilePath, dtype: Any) -> MMapIndexedDatasetBuilder:
    """Return a builder for the dataset `fname`.

    Args:
        fname: Path without .idx and .bin.
        dtype: Integer type of numpy.

    Returns:
        A builder that has opened the data file for writing.
    """
    return MMapIndexedDatasetBuilder(data_file_path(os.fspath(fname)), dtype)


def close_mmap_dataset_builder(builder: MMapIndexedDatasetBuilder, fname: FilePath) -> None:
    """End the document and write the index of the dataset `fname`.

    Args:
        builder: Builder of the dataset to complete.
        fname: Path without .idx and .bin.
    """
    builder.end_document()
    builder.finalize(index_file_path(os.fspath(fname)))


def split_index(start_idx: int, end_idx: int, num_partitions: int) -> list[list[int]]:
    """Return [start_idx, end_idx) as equal ranges [start, end]; the last ones may be shorter.

    Args:
        start_idx: First index.
        end_idx: End of the range.
        num_partitions: Number of ranges.

    Returns:
        One list `[start, end]` per range, both ends inclusive.
    """
    size = -(-(end_idx - start_idx) // num_partitions)
    bounds = [start_idx + part * size for part in range(num_partitions + 1)]
    return [[first, min(end_idx, last)] for first, last in pairwise(bounds)]


def split_dataset(
    dataset: Any, num_workers: int, worker_id: int, num_threads: int
) -> tuple[list[list[int]], list[list[int]]]:
    """Split a dataset between workers, and one worker's rows between its threads.

    Args:
        dataset: Dataset to split, of which only the length is used.
        num_workers: Number of workers.
        worker_id: Worker whose range is split further.
        num_threads: Number of threads of the worker.

    Returns:
        The ranges of all workers, and those of the worker's threads.
    """
    workers = split_index(0, len(dataset), num_workers)
    return workers, split_index(workers[worker_id][0], workers[worker_id][1], num_threads)
