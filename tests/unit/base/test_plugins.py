"""Packages above the core add modules and names to it; unknown names raise an error."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from deepseek_zero import comm
from deepseek_zero.base import plugins

PACKAGE = Path(plugins.__file__).resolve().parents[1]


def test_a_contributed_module_is_imported_on_first_use(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(plugins, "_modules", {})
    plugins.contribute("a topic", "json")
    assert plugins.contributions("a topic") == [json]
    assert plugins.contributions("another topic") == []


def test_contributed_names_come_from_the_module_that_has_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(plugins, "_homes", {})
    plugins.contribute_names("a.package", {"dumps": "json"})
    assert plugins.contributed_name("a.package", "dumps") is json.dumps
    assert plugins.contributed_names("a.package") == ["dumps"]
    with pytest.raises(AttributeError, match=r"module 'a\.package' has no attribute 'loads'"):
        plugins.contributed_name("a.package", "loads")
    plugins.contribute_names("a.package", {plugins.EVERY_OTHER: "json"})
    assert plugins.contributed_name("a.package", "loads") is json.loads


def test_a_public_module_has_names_that_a_package_above_contributes() -> None:
    assert comm.get_world_size() == 1
    with pytest.raises(AttributeError, match="no_such_name"):
        comm.no_such_name  # noqa: B018


def test_a_package_without_plugins_contributes_nothing(tmp_path: Path) -> None:
    (tmp_path / "deepseek_zero").mkdir()
    (tmp_path / "deepseek_zero" / "__init__.py").touch()
    shutil.copytree(PACKAGE / "base", tmp_path / "deepseek_zero" / "base")
    code = (
        "from deepseek_zero.base.plugins import contributed_names, contributions; "
        "print(contributions('checkpoint layouts'), contributed_names('deepseek_zero.comm'))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    assert done.stdout == "[] []\n"
