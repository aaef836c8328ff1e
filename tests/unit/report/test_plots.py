"""Plots require matplotlib; if it is missing, the error shows the install command."""

from __future__ import annotations

from pathlib import Path

import pytest

from deepseek_zero.base.errors import NotBuiltError
from deepseek_zero.report import plots

PNG = b"\x89PNG\r\n\x1a\n"


def is_png_of(path: Path, least_width: int) -> bool:
    content = path.read_bytes()
    return content.startswith(PNG) and int.from_bytes(content[16:20], "big") >= least_width


def test_a_missing_matplotlib_is_named_with_a_command_that_installs_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(plots, "find_spec", lambda name: None)
    with pytest.raises(NotBuiltError, match="pip install matplotlib"):
        plots.new_figure(8.4, 4.8)
