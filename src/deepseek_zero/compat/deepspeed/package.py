"""Names of DeepSpeed that the package `deepseek_zero` does not have, with reasons."""

from __future__ import annotations

from typing import Any

from .missing import package_name_missing


def __getattr__(name: str) -> Any:
    error = None if name.startswith("_") else package_name_missing(name)
    raise error or AttributeError(f"module {__name__!r} has no attribute {name!r}")
