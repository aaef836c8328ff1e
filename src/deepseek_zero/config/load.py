"""`load`: a dict, JSON file, JSON text or base64 -> `RawConfig`, or one error that lists every problem.

Nothing is resolved here: "auto" stays open until the model and the ranks are known (`auto.resolve`).  Called by the
doors.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from functools import cache
from typing import Any, Literal

from pydantic import ValidationError

from deepseek_zero.base.errors import ConfigError, shown
from deepseek_zero.base.log import log_first, log_once, speak
from deepseek_zero.config.checks import check
from deepseek_zero.config.normalise import Normaliser
from deepseek_zero.config.problems import Problems
from deepseek_zero.config.raw import RawConfig, lookup
from deepseek_zero.config.schema import Config
from deepseek_zero.config.table import advice
from deepseek_zero.config.text import Source, read

BOTH_GIVEN = (
    "Not sure how to proceed, we were given deepspeed configs in the deepspeed arguments and deepspeed.initialize() "
    "function call"
)
BOTH_ARGUMENTS = "Not sure how to proceed, we were given both a deepscale_config and deepspeed_config"
NONE_GIVEN = "DeepSpeed requires --deepspeed_config to specify configuration file"


def load(source: Source, *, origin: str | None = None, unknown: Literal["error", "warn"] = "error") -> RawConfig:
    """Read and check a configuration; `origin` names it in messages, unknown keys raise or warn."""
    speak()  # every door but `init_distributed` begins by reading a configuration
    document = read(source, origin)
    problems = Problems(document.source)
    if document.duplicates:
        names = list(document.duplicates)
        problems.add("", f"Duplicate keys in DeepSpeed config: {shown(names)}", "keep one of each", names)
    normaliser = Normaliser(problems, unknown_is_error=unknown == "error")
    values = normaliser.walk(document.values)
    validate(values, problems)
    check(values, normaliser.autos, problems)
    problems.raise_if_any()
    for note in problems.notes:
        _warn(note)
    if problems.ignored:
        log_first(f"config {document.source}: without effect here: {'; '.join(problems.ignored)}")
    return RawConfig(values, frozenset(normaliser.autos), document.source, source, tuple(problems.notes))


def choose_source(config: Source, config_params: Source, args: object) -> tuple[Source, str | None]:
    """The one configuration among the arguments of `initialize`, and its name for messages, as DeepSpeed chooses."""
    flag = getattr(args, "deepspeed_config", None)
    old_flag = getattr(args, "deepscale_config", None)
    given = config if config is not None else config_params
    if old_flag is not None:
        _warn("--deepscale_config is deprecated, please use --deepspeed_config")
        if flag is not None:
            raise ConfigError(BOTH_ARGUMENTS, fix="pass --deepspeed_config alone")
        flag = old_flag
    if flag is not None and given is not None:
        raise ConfigError(BOTH_GIVEN, fix="pass the configuration in one place: the config argument or the flag")
    if flag is None and given is None:
        raise ConfigError(NONE_GIVEN, fix="pass config= (a dict or a path) to initialize, or the flag to the script")
    is_flag_dict = isinstance(flag, Mapping)
    return (flag, "args" if is_flag_dict else None) if flag is not None else (given, None)


def validate(values: Mapping[str, Any], problems: Problems) -> Config | None:
    """The model of `values`; what the model refuses becomes problems."""
    try:
        return Config.model_validate(values)
    except ValidationError as error:
        for item in error.errors(include_url=False, include_context=False):
            key = ".".join(str(step) for step in item["loc"])
            message = item["msg"].replace("Input should be", "must be", 1)
            problems.add(key, message, advice(Config, key), lookup(values, key))
        return None


@cache
def _warn(note: str) -> None:
    """Once per process and note: zero.Init and initialize often read the same file."""
    log_once(note, logging.WARNING)
