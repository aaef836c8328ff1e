"""The `doctor` command reads and measures a GPU."""

from __future__ import annotations

import re

import pytest
import torch

from deepseek_zero.base.device import pci_address
from deepseek_zero.cli import doctor
from deepseek_zero.cli.doctor import Severity
from deepseek_zero.cli.nodes import NodeMachine

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def test_the_address_of_a_gpu_has_the_form_that_sys_uses() -> None:
    assert re.fullmatch(r"[0-9a-f]{4}:[0-9a-f]{2}:[0-9a-f]{2}\.0", pci_address(0))


def test_page_locking_is_measured_and_threads_are_reported() -> None:
    found = doctor._page_locking()
    assert found.verdict is not Severity.BAD and found.value.endswith(" s per GB"), found
    names = [each.name for each in doctor._nodes(NodeMachine(2, ("0",)))]
    assert names == ["NUMA nodes", "update threads", "pages of states"]
