"""Every key of the configuration, with a configuration that moves it off its default."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, get_args

from deepseek_zero.config import Config
from deepseek_zero.config.not_built import NOT_BUILT, NotBuilt
from deepseek_zero.config.problems import put

ROWS = Config.field_table()


@dataclass(frozen=True)
class KeyNotBuilt:
    """A key that is known and not built.

    switch: the key that must be on for it to be read. goes_on: DeepSpeed's name accepts it with a
    warning.
    """

    path: str
    default: Any
    example: Any
    kind: Any
    switch: str
    goes_on: bool


def _keys(row: NotBuilt) -> Iterator[KeyNotBuilt]:
    goes_on = bool(row.alternative)
    if not row.switch:
        switch = row.only_above_one[0] if row.only_above_one else ""
        example = {row.keys.split()[0]: 1} if row.keys else _other_than(row.default, row.kind)
        yield KeyNotBuilt(
            row.path, row.default, example, row.kind or type(row.default), switch, goes_on
        )
    for name, default in row.defaults.items():
        path = f"{row.path}.{name}"
        switch = f"{row.path}.{row.switch}" if row.switch and name != row.switch else ""
        is_covered = goes_on and name not in row.strict
        yield KeyNotBuilt(
            path, default, _other_than(default, None), type(default), switch, is_covered
        )


def _other_than(default: Any, kind: Any) -> Any:
    """Return a valid value that is not the default."""
    if kind is not None:
        return next(option for option in get_args(kind) if option != default)
    if isinstance(default, bool):
        return not default
    if isinstance(default, float):
        return default + 1
    if isinstance(default, tuple):
        return ["other"]
    return {"enabled": True} if isinstance(default, dict) else "other"


NOT_BUILT_KEYS = [key for row in NOT_BUILT.values() for key in _keys(row)]


def off_default_config(path: str) -> dict[str, Any]:
    """Return a configuration that moves one key off its default and sets what the key needs."""
    config: dict[str, Any] = {}
    key = next((key for key in (*ROWS, *NOT_BUILT_KEYS) if key.path == path), None)
    if key is None:
        raise KeyError(path)
    if not isinstance(key, KeyNotBuilt):
        for other, value in key.needs.items():
            put(config, other, value)
    elif key.switch:
        put(config, key.switch, 2 if key.switch.endswith("size") else True)
    put(config, path, key.example)
    return config
