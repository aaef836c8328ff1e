"""Read the section `data_efficiency` and fill in DeepSpeed's defaults.

Each function takes the dictionary that contains its section and does not change it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ....base.errors import UsageError

Given = Mapping[str, Any]


def get_data_efficiency_config(param_dict: Given) -> dict[str, Any]:
    """Return the section `data_efficiency` of a configuration with all defaults."""
    given = _part(param_dict, "data_efficiency")
    return {
        "enabled": get_data_efficiency_enabled(param_dict),
        "seed": get_data_efficiency_seed(param_dict),
        "data_sampling": get_data_sampling(given),
        "data_routing": get_data_routing(given),
    }


def get_data_efficiency_enabled(param_dict: Given) -> bool:
    """Return whether data efficiency is enabled; False by default."""
    return bool(_part(param_dict, "data_efficiency").get("enabled", False))


def get_data_efficiency_seed(param_dict: Given) -> int:
    """Return the random seed of data efficiency; 1234 by default."""
    return int(_part(param_dict, "data_efficiency").get("seed", 1234))


def get_data_sampling(param_dict: Given) -> dict[str, Any]:
    """Return the section about data sampling with its defaults."""
    given = _part(param_dict, "data_sampling")
    return {
        **given,
        "enabled": get_data_sampling_enabled(param_dict),
        "num_epochs": get_data_sampling_num_epochs(param_dict),
        "num_workers": get_data_sampling_num_workers(param_dict),
        "pin_memory": get_data_sampling_pin_memory(param_dict),
        "curriculum_learning": get_curriculum_learning(given),
        "dynamic_batching": get_dynamic_batching(given),
    }


def get_data_sampling_enabled(param_dict: Given) -> bool:
    """Return whether data sampling is enabled; False by default."""
    return bool(_part(param_dict, "data_sampling").get("enabled", False))


def get_data_sampling_num_epochs(param_dict: Given) -> int:
    """Return the number of epochs; 1000 by default."""
    return int(_part(param_dict, "data_sampling").get("num_epochs", 1000))


def get_data_sampling_num_workers(param_dict: Given) -> int:
    """Return the number of workers of the data loader; 0 by default."""
    return int(_part(param_dict, "data_sampling").get("num_workers", 0))


def get_data_sampling_pin_memory(param_dict: Given) -> bool:
    """Return whether the data loader pins memory; False by default."""
    return bool(_part(param_dict, "data_sampling").get("pin_memory", False))


def get_curriculum_learning(param_dict: Given) -> dict[str, Any]:
    """Return the section `curriculum_learning`.

    Raises:
        UsageError: It is enabled and has no metric.
    """
    if not get_curriculum_learning_enabled(param_dict):
        return {"enabled": False}
    found = get_curriculum_learning_params(param_dict)
    if not isinstance(found.get("curriculum_metrics"), Mapping) or not found["curriculum_metrics"]:
        raise UsageError(
            "Curriculum learning is enabled, curriculum_metrics must be specified.",
            "A curriculum is a schedule of difficulties, each of a metric.",
            "name one in data_efficiency.data_sampling.curriculum_learning.curriculum_metrics.",
        )
    return {"enabled": True, **found}


def get_curriculum_learning_enabled(param_dict: Given) -> bool:
    """Return whether curriculum learning is enabled; False by default."""
    return bool(_part(param_dict, "curriculum_learning").get("enabled", False))


def get_curriculum_learning_params(param_dict: Given) -> dict[str, Any]:
    """Return the section about curriculum learning without "enabled"."""
    return {
        name: value
        for name, value in _part(param_dict, "curriculum_learning").items()
        if name != "enabled"
    }


def get_dynamic_batching(param_dict: Given) -> dict[str, Any]:
    """Return the section `dynamic_batching`.

    Raises:
        UsageError: It is enabled and `max_tokens` is missing.
    """
    given = _part(param_dict, "dynamic_batching")
    most = given.get("max_batch_size")
    found = {
        **given,
        "enabled": bool(given.get("enabled", False)),
        "lr_scaling_method": str(given.get("lr_scaling_method", "linear")),
        "min_batch_size": int(given.get("min_batch_size", 1)),
        "max_batch_size": int(most) if most is not None else None,
        "sequence_picking_order": str(given.get("sequence_picking_order", "dataloader")),
        "verbose": bool(given.get("verbose", False)),
    }
    if found["enabled"] and "max_tokens" not in found:
        raise UsageError(
            "Dynamic batching is enabled, so max_tokens must be specified.", fix="state max_tokens."
        )
    return found


def get_data_routing(param_dict: Given) -> dict[str, Any]:
    """Return the section about data routing with its defaults."""
    given = _part(param_dict, "data_routing")
    return {"enabled": get_data_routing_enabled(param_dict), "random_ltd": get_random_ltd(given)}


def get_data_routing_enabled(param_dict: Given) -> bool:
    """Return whether data routing is enabled; False by default."""
    return bool(_part(param_dict, "data_routing").get("enabled", False))


def get_random_ltd(param_dict: Given) -> dict[str, Any]:
    """Return the section about random layer token dropping with its defaults."""
    found: dict[str, Any] = {"enabled": False, "layer_token_lr_schedule": {"enabled": False}}
    if get_random_ltd_enabled(param_dict):
        found |= {"enabled": True, **get_random_ltd_params(param_dict)}
    return found


def get_random_ltd_enabled(param_dict: Given) -> bool:
    """Return whether random layer token dropping is enabled; False by default."""
    return bool(_part(param_dict, "random_ltd").get("enabled", False))


def get_random_ltd_params(param_dict: Given) -> dict[str, Any]:
    """Return the section about random layer token dropping without "enabled"."""
    return {
        name: value for name, value in _part(param_dict, "random_ltd").items() if name != "enabled"
    }


def _part(given: Given, name: str) -> Given:
    part = given.get(name, {})
    if not isinstance(part, Mapping):
        raise UsageError(
            f"{name} is {part!r}, which is no section.", fix=f'write an object: "{name}": {{...}}.'
        )
    return part
