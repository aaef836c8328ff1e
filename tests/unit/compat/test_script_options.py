"""Options that DeepSpeed adds to a script's parser."""

from __future__ import annotations

import argparse
from types import SimpleNamespace

from deepseek_zero.compat.deepspeed.arguments import add_tuning_arguments, get_config_from_args
from deepseek_zero.optimizers.lr_schedules import resolve_schedule


def parsed(*words: str) -> argparse.Namespace:
    return add_tuning_arguments(argparse.ArgumentParser()).parse_args(words)


def test_the_flags_become_a_scheduler_block() -> None:
    args = parsed(
        "--lr_schedule", "OneCycle", "--cycle_max_lr", "0.5", "--lr_range_test_staircase", "false"
    )
    block, problem = get_config_from_args(args)
    assert problem is None and block is not None and args.lr_range_test_staircase is False
    assert block["type"] == "OneCycle" and block["params"]["cycle_max_lr"] == 0.5
    assert "cycle_second_step_size" not in block["params"]  # -1 says that nothing was given
    schedule = resolve_schedule(
        block["type"], block["params"], SimpleNamespace(param_groups=[{"lr": 9.0}])
    )
    assert schedule.get_last_lr() == [0.01]


def test_a_total_of_the_scripts_own_reaches_the_schedule() -> None:
    args = parsed("--lr_schedule", "WarmupDecayLR")
    args.total_num_steps = 50
    block, _ = get_config_from_args(args)
    assert block is not None and block["params"]["total_num_steps"] == 50


def test_flags_without_a_known_schedule_say_why() -> None:
    assert get_config_from_args(parsed()) == (None, "--lr_schedule not specified on command line")
    assert get_config_from_args(parsed("--lr_schedule", "Up")) == (
        None,
        "Up is not supported LR schedule",
    )
