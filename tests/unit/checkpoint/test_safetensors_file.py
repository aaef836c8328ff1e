"""A rank's file is private, is readable by safetensors and is written in bounded memory."""

from __future__ import annotations

import errno
import os
import stat
import zlib
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from deepseek_zero.base.errors import CheckpointError
from deepseek_zero.checkpoint import files
from deepseek_zero.checkpoint.readahead import BLOCK_BYTES
from deepseek_zero.checkpoint.safetensors_file import (
    DTYPE_NAMES,
    TensorInfo,
    dtype_of,
    encode_header,
)
from deepseek_zero.checkpoint.writebehind import StreamingWriter

RUN = {"run": "a1", "rank": "0"}


def write(path: Path, tensors: dict[str, Tensor]) -> dict[str, int]:
    """Write tensors and return their checksums by name."""
    infos = [TensorInfo(name, tuple(each.shape), each.dtype) for name, each in tensors.items()]
    header = encode_header(infos, RUN)
    writer = StreamingWriter(path, len(header) + sum(info.nbytes for info in infos))
    writer.append(torch.frombuffer(bytearray(header), dtype=torch.uint8))
    crcs = {}
    for name, each in tensors.items():
        crcs[name] = 0
        for part in each.reshape(-1).split(1000):
            crcs[name] = writer.append(part, crcs[name])
    writer.finish()
    return crcs


def test_safetensors_reads_every_dtype_and_shape_of_it(tmp_path: Path) -> None:
    kinds = sorted(DTYPE_NAMES, key=lambda dtype: -dtype.itemsize)
    tensors = {str(kind): torch.randn(5, 13).mul(20).to(kind) for kind in kinds}
    tensors |= {
        "nothing": torch.zeros(0, dtype=torch.uint8),
        "number": torch.tensor(3, dtype=torch.uint8),
    }
    crcs = write(tmp_path / "file", tensors)
    found = load_file(tmp_path / "file")
    assert found.keys() == tensors.keys()
    for name, expected in tensors.items():
        assert found[name].dtype == expected.dtype and found[name].shape == expected.shape
        assert torch.equal(
            found[name].reshape(-1).view(torch.uint8), expected.reshape(-1).view(torch.uint8)
        )
        assert crcs[name] == zlib.crc32(expected.reshape(-1).view(torch.uint8).numpy())
    assert stat.S_IMODE((tmp_path / "file").stat().st_mode) == 0o600


def test_a_file_of_many_blocks_is_whole_with_and_without_the_page_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    large = {"large": torch.arange(3 * BLOCK_BYTES // 4 + 77, dtype=torch.int32)}
    write(tmp_path / "past", large)
    monkeypatch.delattr(os, "O_DIRECT")
    write(tmp_path / "through", large)
    assert (tmp_path / "past").read_bytes() == (tmp_path / "through").read_bytes()
    assert torch.equal(load_file(tmp_path / "past")["large"], large["large"])


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO, errno.EROFS])
@pytest.mark.parametrize("call", ["write", "sync"])
def test_a_disk_without_write_access_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str, number: int
) -> None:
    def refuse(*given: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(files, call, refuse)
    with pytest.raises(CheckpointError, match=os.strerror(number)) as caught:
        write(tmp_path / "file", {"one": torch.zeros(2 * BLOCK_BYTES, dtype=torch.uint8)})
    assert str(tmp_path / "file") in str(caught.value)


def test_a_dtype_without_a_name_there_is_refused() -> None:
    with pytest.raises(CheckpointError, match="complex128"):
        encode_header([TensorInfo("odd", (1,), torch.complex128)], RUN)


@pytest.mark.parametrize("asked", [5, float, b"fp32", "fp8", "int8", torch.int64, torch.complex64])
def test_only_floating_point_dtypes_can_be_asked_for(asked: Any) -> None:
    with pytest.raises(CheckpointError, match="dtype"):
        dtype_of(asked)
