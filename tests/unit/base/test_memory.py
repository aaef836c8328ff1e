"""Memory of our own: pages that come and go, and what the C library keeps."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

from deepseek_zero.base.memory import Pages

FAULTS = """
import resource, sys, torch
from deepseek_zero.base.memory import keep_freed_memory
changed = keep_freed_memory()
def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(10):
        several = [torch.ones(2_000_000) for _ in range(4)]
        del several
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
faults()
print(changed, faults())
"""


def resident_bytes() -> int:
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def test_pages_that_are_given_back_are_the_systems_until_they_are_written_again() -> None:
    pages = Pages(16 << 20, torch.float32)
    empty = resident_bytes()
    for value in (1.0, 2.0):
        pages.tensor.fill_(value)
        assert resident_bytes() - empty > 60 << 20
        pages.give_back()
        assert resident_bytes() - empty < 8 << 20
        assert pages.tensor[123] == 0


@pytest.mark.parametrize("variables", [{}, {"MALLOC_TRIM_THRESHOLD_": "65536", "MALLOC_MMAP_THRESHOLD_": "65536"}])
def test_what_is_freed_is_kept_unless_the_user_said_otherwise(variables: dict[str, str]) -> None:
    plain = {name: value for name, value in os.environ.items() if not name.startswith(("MALLOC_", "GLIBC_", "LD_"))}
    out = subprocess.run(
        [sys.executable, "-c", FAULTS], env=plain | variables, capture_output=True, text=True, check=True
    ).stdout.split()
    changed, faults = out[0] == "True", int(out[1])
    assert changed is not bool(variables)
    assert faults < 500 if changed else faults > 50_000, "pages taken anew: 2,000 each for 40 tensors"
