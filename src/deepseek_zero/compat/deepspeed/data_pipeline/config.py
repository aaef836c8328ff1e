"""Read the section `data_efficiency` and fill in DeepSpeed's defaults.

Each function takes the dictionary that contains its section and does not change it.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from ....base.errors import UsageError

Given = Mapping[str, Any]
Section = dict[str, Any]  # with its defaults

# DeepSpeed's function -> the section, the key in it, the default, which also gives the type
SCALARS: dict[str, tuple[str, str, Any]] = {
    "get_data_efficiency_enabled": ("data_efficiency", "enabled", False),
    "get_data_efficiency_seed": ("data_efficiency", "seed", 1234),
    "get_data_sampling_enabled": ("data_sampling", "enabled", False),
    "get_data_sampling_num_epochs": ("data_sampling", "num_epochs", 1000),
    "get_data_sampling_num_workers": ("data_sampling", "num_workers", 0),
    "get_data_sampling_pin_memory": ("data_sampling", "pin_memory", False),
    "get_curriculum_learning_enabled": ("curriculum_learning", "enabled", False),
    "get_data_routing_enabled": ("data_routing", "enabled", False),
    "get_random_ltd_enabled": ("random_ltd", "enabled", False),
}


def _scalar(section: str, key: str, default: Any, param_dict: Given) -> Any:
    return type(default)(_part(param_dict, section).get(key, default))


def _params(section: str, param_dict: Given) -> Section:
    """Return a section without "enabled"."""
    return {key: value for key, value in _part(param_dict, section).items() if key != "enabled"}


_FUNCTIONS: dict[str, Any] = {name: partial(_scalar, *row) for name, row in SCALARS.items()} | {
    "get_curriculum_learning_params": partial(_params, "curriculum_learning"),
    "get_random_ltd_params": partial(_params, "random_ltd"),
}


def __getattr__(name: str) -> Any:
    if name in _FUNCTIONS:
        return _FUNCTIONS[name]
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def _scalars(section: str, param_dict: Given) -> Section:
    """Return the values of SCALARS in a section."""
    rows = [row for row in SCALARS.values() if row[0] == section]
    return {row[1]: _scalar(*row, param_dict) for row in rows}


def get_data_efficiency_config(param_dict: Given) -> Section:
    """Return the section `data_efficiency` of a configuration with all defaults."""
    given = _part(param_dict, "data_efficiency")
    return {
        **_scalars("data_efficiency", param_dict),
        "data_sampling": get_data_sampling(given),
        "data_routing": get_data_routing(given),
    }


def get_data_sampling(param_dict: Given) -> Section:
    """Return the section about data sampling with its defaults."""
    given = _part(param_dict, "data_sampling")
    return {
        **given,
        **_scalars("data_sampling", param_dict),
        "curriculum_learning": get_curriculum_learning(given),
        "dynamic_batching": get_dynamic_batching(given),
    }


def get_curriculum_learning(param_dict: Given) -> Section:
    """Return the section `curriculum_learning`.

    Raises:
        UsageError: It is enabled and has no metric.
    """
    if not _part(param_dict, "curriculum_learning").get("enabled", False):
        return {"enabled": False}
    found = _params("curriculum_learning", param_dict)
    if not isinstance(found.get("curriculum_metrics"), Mapping) or not found["curriculum_metrics"]:
        raise UsageError(
            "Curriculum learning is enabled, curriculum_metrics must be specified.",
            "A curriculum is a schedule of difficulties, each of a metric.",
            "name one in data_efficiency.data_sampling.curriculum_learning.curriculum_metrics.",
        )
    return {"enabled": True, **found}


def get_dynamic_batching(param_dict: Given) -> Section:
    """Return the section `dynamic_batching`.

    Raises:
        UsageError: It is enabled and `max_tokens` is missing.
    """
    found: Section = {
        "enabled": False,
        "lr_scaling_method": "linear",
        "min_batch_size": 1,
        "max_batch_size": None,
        "sequence_picking_order": "dataloader",
        "verbose": False,
        **_part(param_dict, "dynamic_batching"),
    }
    if found["enabled"] and "max_tokens" not in found:
        raise UsageError(
            "Dynamic batching is enabled, so max_tokens must be specified.", fix="state max_tokens."
        )
    return found


def get_data_routing(param_dict: Given) -> Section:
    """Return the section about data routing with its defaults."""
    given = _part(param_dict, "data_routing")
    return {**_scalars("data_routing", param_dict), "random_ltd": get_random_ltd(given)}


def get_random_ltd(param_dict: Given) -> Section:
    """Return the section about random layer token dropping with its defaults."""
    found: Section = {"enabled": False, "layer_token_lr_schedule": {"enabled": False}}
    if _part(param_dict, "random_ltd").get("enabled", False):
        found |= {"enabled": True, **_params("random_ltd", param_dict)}
    return found


def _part(given: Given, name: str) -> Given:
    part = given.get(name, {})
    if not isinstance(part, Mapping):
        raise UsageError(
            f"{name} is {part!r}, which is no section.", fix=f'write an object: "{name}": {{...}}.'
        )
    return part
