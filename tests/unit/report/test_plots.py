"""Plots require matplotlib; if it is missing, the error shows the install command."""

from __future__ import annotations

from pathlib import Path

import pytest

from deepseek_zero.base.errors import NotBuiltError, UsageError
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


def test_a_picture_is_not_written_to_a_directory(tmp_path: Path) -> None:
    for path in (tmp_path, Path()):
        with pytest.raises(UsageError, match="is a directory"):
            plots.save_figure(None, path)
    assert not list(tmp_path.iterdir())
