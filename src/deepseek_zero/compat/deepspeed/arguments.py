"""Command-line options that DeepSpeed adds to a script's parser."""

from __future__ import annotations

import argparse
import dataclasses
from typing import Any

from ...optimizers.lr_schedules import SCHEDULES


def add_config_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add the options --deepspeed and --deepspeed_config to a parser.

    Their deprecated spellings --deepscale and --deepscale_config are also added.

    Args:
        parser: The parser of the script, which is changed in place.

    Returns:
        The parser that was passed.

    Raises:
        argparse.ArgumentError: The parser already has one of these options.
    """
    group = parser.add_argument_group("DeepSpeed", "DeepSpeed configurations")
    group.add_argument(
        "--deepspeed", action="store_true", help="use the engine (a flag for the script to read)"
    )
    group.add_argument(
        "--deepspeed_config", type=str, default=None, help="path of the JSON configuration"
    )
    group.add_argument(
        "--deepscale", action="store_true", help="deprecated spelling of --deepspeed"
    )
    group.add_argument(
        "--deepscale_config",
        type=str,
        default=None,
        help="deprecated spelling of --deepspeed_config",
    )
    return parser


def _flag(text: str) -> bool:
    words = {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}
    if text.lower() not in words:
        raise argparse.ArgumentTypeError(f"{text!r} is neither true nor false")
    return words[text.lower()]


# DeepSpeed's flags: name, type, default, help. A negative count means "not given".
_FLAGS: tuple[tuple[str, Any, Any, str], ...] = (
    ("lr_schedule", str, None, "learning-rate schedule: " + ", ".join(SCHEDULES)),
    ("lr_range_test_min_lr", float, 0.001, "range test: first learning rate"),
    ("lr_range_test_step_rate", float, 1.0, "range test: growth per interval"),
    ("lr_range_test_step_size", int, 1000, "range test: iterations per interval"),
    ("lr_range_test_staircase", _flag, False, "range test: hold the rate within an interval"),
    ("cycle_first_step_size", int, 1000, "1Cycle: iterations of the rise"),
    ("cycle_first_stair_count", int, -1, "1Cycle: stairs of the rise"),
    (
        "cycle_second_step_size",
        int,
        -1,
        "1Cycle: iterations of the fall (default: those of the rise)",
    ),
    ("cycle_second_stair_count", int, -1, "1Cycle: stairs of the fall"),
    ("decay_step_size", int, 1000, "1Cycle: iterations per interval of the decay afterwards"),
    ("cycle_min_lr", float, 0.01, "1Cycle: lowest learning rate"),
    ("cycle_max_lr", float, 0.1, "1Cycle: highest learning rate"),
    ("decay_lr_rate", float, 0.0, "1Cycle: decay of the rate per interval"),
    ("cycle_momentum", None, False, "1Cycle: cycle momentum against the rate"),
    ("cycle_min_mom", float, 0.8, "1Cycle: lowest momentum"),
    ("cycle_max_mom", float, 0.9, "1Cycle: highest momentum"),
    ("decay_mom_rate", float, 0.0, "1Cycle: change of momentum per interval"),
    ("warmup_min_lr", float, 0.0, "warm-up: first learning rate"),
    ("warmup_max_lr", float, 0.001, "warm-up: learning rate reached"),
    ("warmup_num_steps", int, 1000, "warm-up: iterations"),
    ("warmup_type", str, "log", "warm-up: log or linear"),
    ("warmup_min_ratio", float, 0.01, "WarmupCosineLR: first ratio"),
    ("cos_min_ratio", float, 0.01, "WarmupCosineLR: last ratio"),
)


def add_tuning_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add DeepSpeed's options for learning-rate schedules to a parser; return it.

    WarmupDecayLR and WarmupCosineLR also need --total_num_steps from the script itself. DeepSpeed
    has no such option, and adding it here would conflict with a script that defines it.
    """
    group = parser.add_argument_group("Convergence Tuning", "Convergence tuning configurations")
    for name, kind, default, text in _FLAGS:
        if kind is None:
            group.add_argument(f"--{name}", action="store_true", default=default, help=text)
        else:
            group.add_argument(f"--{name}", type=kind, default=default, help=text)
    return parser


def get_config_from_args(args: argparse.Namespace) -> tuple[dict[str, Any] | None, str | None]:
    """Return the configuration's `scheduler` section that parsed options describe.

    Returns:
        The section and None, or None and the reason why there is no section.
    """
    name = getattr(args, "lr_schedule", None)
    if name is None:
        return None, "--lr_schedule not specified on command line"
    if name not in SCHEDULES:
        return None, f"{name} is not supported LR schedule"
    given = {
        field.name: getattr(args, field.name, None)
        for field in dataclasses.fields(SCHEDULES[name].Settings)
    }
    counts = {flag for flag, _, default, _ in _FLAGS if default == -1}
    params = {
        key: value
        for key, value in given.items()
        if value is not None and not (key in counts and value < 0)
    }
    return {"type": name, "params": params}, None
