"""Folders that replace /sys and /proc, so that tests choose the NUMA nodes and limits of a host."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest
import torch

from deepseek_zero.base import host
from deepseek_zero.base.host import HostFiles
from deepseek_zero.kernels import threads

GPU = "0000:3b:00.0"  # the first GPU, on node 1 of `two_nodes`
NODES = "sys/devices/system/node"


def files_of(root: Path, texts: Mapping[str, str]) -> HostFiles:
    """Write files below `root`.

    Args:
        root: Folder of the files.
        texts: Contents by path.
    """
    for name, text in texts.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{text}\n")
    return HostFiles(root)


def two_nodes(root: Path, cpus: tuple[str, str]) -> HostFiles:
    """Return a host with two NUMA nodes and a GPU at the second one.

    Args:
        root: Folder that replaces /sys and /proc.
        cpus: CPUs of each node.
    """
    return files_of(
        root,
        {
            f"{NODES}/online": "0-1",
            f"{NODES}/node0/cpulist": cpus[0],
            f"{NODES}/node0/distance": "10 20",
            f"{NODES}/node1/cpulist": cpus[1],
            f"{NODES}/node1/distance": "20 10",
            f"sys/bus/pci/devices/{GPU}/numa_node": "1",
        },
    )


def install(monkeypatch: pytest.MonkeyPatch, files: HostFiles, *, gpu: bool = True) -> None:
    """Make the library read these files and train on the first GPU.

    Args:
        monkeypatch: Restores the library after the test.
        files: The files from `two_nodes`.
        gpu: Train on the GPU, not on the CPU.
    """
    device = torch.device("cuda", 0) if gpu else torch.device("cpu")
    monkeypatch.setattr(host, "THIS_HOST", files)
    monkeypatch.setattr(threads, "default_device", lambda: device)
    monkeypatch.setattr(threads, "pci_address", lambda gpu: GPU)
