"""DeepSpeed's monitors in its words; the writers are report/monitor.py's.  Reached through the drop-in."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..config import Config
from ..config.load import load
from ..engine.assemble import observer_settings_of
from ..report.monitor import MonitorSettings

SECTIONS = ("tensorboard", "csv_monitor", "wandb", "comet")


def get_monitor_config(param_dict: Mapping[str, Any]) -> MonitorSettings:
    """What a whole configuration says of monitors; `MonitorMaster` takes it."""
    stated = {name: param_dict[name] for name in SECTIONS if name in param_dict}
    return observer_settings_of(Config.model_validate(load(stated).values)).monitor
