"""Read the section `data_efficiency` and fill in DeepSpeed's defaults."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ....base.errors import UsageError

Section = dict[str, Any]

# Defaults, which also give the types of the values
SECTION = {"enabled": False, "seed": 1234}
SAMPLING = {"enabled": False, "num_epochs": 1000, "num_workers": 0, "pin_memory": False}
ROUTING = {"enabled": False}
BATCHING: Section = {
    "enabled": False,
    "lr_scaling_method": "linear",
    "min_batch_size": 1,
    "max_batch_size": None,
    "sequence_picking_order": "dataloader",
    "verbose": False,
}


def get_data_efficiency_config(param_dict: Mapping[str, Any]) -> Section:
    """Return the section `data_efficiency` of a configuration with all defaults.

    Args:
        param_dict: The configuration, which is not changed.

    Returns:
        The section, whose sections `data_sampling` and `data_routing` are complete, too.

    Raises:
        UsageError: A section is not a dictionary, or lacks a required key.
    """
    found = _section(param_dict, "data_efficiency", SECTION)
    sampling = _section(found, "data_sampling", SAMPLING)
    sampling["curriculum_learning"] = _curriculum(_section(sampling, "curriculum_learning", {}))
    sampling["dynamic_batching"] = _batching(_section(sampling, "dynamic_batching", {}))
    routing = _section(found, "data_routing", ROUTING)
    routing["random_ltd"] = _random_ltd(_section(routing, "random_ltd", {}))
    return {**found, "data_sampling": sampling, "data_routing": routing}


def _section(given: Mapping[str, Any], name: str, defaults: Mapping[str, Any]) -> Section:
    part = given.get(name, {})
    if not isinstance(part, Mapping):
        raise UsageError(
            f"{name} is {part!r}, which is no section.", fix=f'write an object: "{name}": {{...}}.'
        )
    return {**part} | {key: type(own)(part.get(key, own)) for key, own in defaults.items()}


def _curriculum(given: Section) -> Section:
    if not given.get("enabled", False):
        return {"enabled": False}
    if not isinstance(given.get("curriculum_metrics"), Mapping) or not given["curriculum_metrics"]:
        raise UsageError(
            "Curriculum learning is enabled, curriculum_metrics must be specified.",
            "A curriculum is a schedule of difficulties, each of a metric.",
            "name one in data_efficiency.data_sampling.curriculum_learning.curriculum_metrics.",
        )
    return {**given, "enabled": True}


def _batching(given: Section) -> Section:
    if given.get("enabled", False) and "max_tokens" not in given:
        raise UsageError(
            "Dynamic batching is enabled, so max_tokens must be specified.", fix="state max_tokens."
        )
    return {**BATCHING, **given}


def _random_ltd(given: Section) -> Section:
    found: Section = {"enabled": False, "layer_token_lr_schedule": {"enabled": False}}
    return found | given | {"enabled": True} if given.get("enabled", False) else found
