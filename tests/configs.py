"""Random configurations: real ones of DeepSpeed users, generated, damaged and invalid ones.

Everything follows from one seed. Paths stay relative, so a configuration writes files only below
the working directory.
"""

from __future__ import annotations

import base64
import dataclasses
import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import torch

from deepseek_zero.optimizers.lr_schedules import SCHEDULES as OURS
from deepseek_zero.optimizers.lr_schedules import VALID_LR_SCHEDULES
from deepseek_zero.optimizers.registry import REQUIRED, VALID_OPTIMIZERS, known_arguments
from tests import config_keys

ROWS = (*config_keys.ROWS, *config_keys.NOT_BUILT_KEYS)
ROOT = Path(__file__).resolve().parents[1]

# Configurations as published by Hugging Face (two), accelerate, Axolotl, ZeRO-Infinity and the
# DeepSpeed tutorials.
REAL: list[dict[str, Any]] = [
    {
        "fp16": {
            "enabled": "auto",
            "loss_scale": 0,
            "loss_scale_window": 1000,
            "initial_scale_power": 16,
            "hysteresis": 2,
            "min_loss_scale": 1,
        },
        "bf16": {"enabled": "auto"},
        "optimizer": {
            "type": "AdamW",
            "params": {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto"},
        },
        "scheduler": {
            "type": "WarmupLR",
            "params": {
                "warmup_min_lr": "auto",
                "warmup_max_lr": "auto",
                "warmup_num_steps": "auto",
            },
        },
        "zero_optimization": {
            "stage": 3,
            "offload_optimizer": {"device": "cpu", "pin_memory": True},
            "offload_param": {"device": "cpu", "pin_memory": True},
            "overlap_comm": True,
            "contiguous_gradients": True,
            "sub_group_size": 1e9,
            "reduce_bucket_size": "auto",
            "stage3_prefetch_bucket_size": "auto",
            "stage3_param_persistence_threshold": "auto",
            "stage3_max_live_parameters": 1e9,
            "stage3_max_reuse_distance": 1e9,
            "stage3_gather_16bit_weights_on_model_save": True,
        },
        "gradient_accumulation_steps": "auto",
        "gradient_clipping": "auto",
        "steps_per_print": 2000,
        "train_batch_size": "auto",
        "train_micro_batch_size_per_gpu": "auto",
        "wall_clock_breakdown": False,
    },
    {
        "zero_optimization": {
            "stage": 2,
            "allgather_partitions": True,
            "allgather_bucket_size": 2e8,
            "overlap_comm": True,
            "reduce_scatter": True,
            "reduce_bucket_size": 2e8,
            "contiguous_gradients": True,
        },
        "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": 2,
        "optimizer": {
            "type": "Adam",
            "params": {"lr": 1e-3, "betas": [0.8, 0.999], "eps": 1e-8, "weight_decay": 3e-7},
        },
    },
    {
        "train_batch_size": "auto",
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": 1,
        "zero_optimization": {
            "stage": 2,
            "offload_optimizer": {"device": "none", "nvme_path": None},
            "offload_param": {"device": "none", "nvme_path": None},
            "stage3_gather_16bit_weights_on_model_save": False,
        },
        "steps_per_print": float("inf"),
        "zero_allow_untested_optimizer": True,
        "fp16": {"enabled": False},
        "bf16": {"enabled": False},
    },
    {
        "$schema": "https://json.schemastore.org/deepspeed.json",
        "zero_force_ds_cpu_optimizer": False,
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {
            "stage": 3,
            "overlap_comm": True,
            "contiguous_gradients": True,
            "sub_group_size": 0,
            "reduce_bucket_size": "auto",
            "stage3_max_live_parameters": 0,
            "stage3_max_reuse_distance": 0,
            "stage3_gather_16bit_weights_on_model_save": True,
        },
        "bf16": {"enabled": True},
        "train_batch_size": 2,
    },
    {
        "train_batch_size": 1,
        "zero_optimization": {
            "stage": 3,
            "offload_param": {
                "device": "nvme",
                "nvme_path": "states",
                "buffer_count": 5,
                "buffer_size": 1e8,
            },
            "offload_optimizer": {"device": "nvme", "nvme_path": "states", "pipeline_read": True},
        },
        "aio": {"block_size": 1048576, "queue_depth": 8, "thread_count": 1, "single_submit": False},
        "activation_checkpointing": {"cpu_checkpointing": True, "profile": False},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
    },
    {
        "train_batch_size": 16,
        "steps_per_print": 100,
        "optimizer": {
            "type": "Lamb",
            "params": {"lr": 1e-2, "bias_correction": True, "max_coeff": 0.3},
        },
        "scheduler": {
            "type": "OneCycle",
            "params": {"cycle_min_lr": 1e-4, "cycle_max_lr": 1e-3, "cycle_first_step_size": 10},
        },
        "gradient_clipping": 1.0,
        "prescale_gradients": False,
        "fp16": {"enabled": True, "loss_scale": 0, "initial_scale_power": 8},
        "csv_monitor": {"enabled": True, "output_path": "csv", "job_name": "trial"},
        "wall_clock_breakdown": True,
        "flops_profiler": {"enabled": True, "profile_step": 0, "output_file": "flops.txt"},
    },
    json.loads((ROOT / "examples" / "seed_001_config.json").read_text()),
]


class _Named(dict):  # type: ignore[type-arg]
    """A subclass of dict, as configuration libraries use it."""


class _Unspeakable:
    def __repr__(self) -> str:
        raise ValueError("no words")


class _Incomparable:
    __hash__ = None  # type: ignore[assignment]

    def __eq__(self, other: object) -> bool:
        raise ValueError("no comparison")


def _circular() -> list[Any]:
    found, items = dict[str, Any](), list[Any]()
    found["zero_optimization"] = found
    items.append(items)
    return [found, items]


def _deep(levels: int) -> list[Any]:
    found, items = dict[str, Any](), list[Any]()
    for _ in range(levels):
        found, items = {"a": found}, [items]
    return [found, items]


NUMBERS = [
    0,
    1,
    -1,
    2,
    3,
    4,
    8,
    1e-3,
    0.5,
    0.9,
    5e8,
    -1.5,
    2**31,
    2**63 - 1,
    2**63,
    -(2**63),
    10**400,
    1e308,
]
NUMBERS += [float("inf"), -float("inf"), float("nan")]
TEXTS = [
    "",
    "auto",
    "AUTO",
    " auto ",
    "none",
    "null",
    "true",
    "False",
    "cpu",
    "nvme",
    "gpu",
    "5e8",
    "-3",
    "1e999",
]
TEXTS += [
    "inf",
    "nan",
    "é",
    "a\0b",
    "\ud800",
    "a/../b",
    "x" * 100_000,
    "9" * 5000,
    "fp16",
    "bf16",
    "AdamW",
    "WarmupLR",
]
TEXTS += [
    "SGD",
    "Lion",
    "Muon",
    "Adafactor",
    "Rprop",
    "LBFGS",
    "SparseAdam",
    "StepLR",
    "CosineAnnealingLR",
    "\n",
    "%s{}",
]
OBJECTS = [
    None,
    True,
    False,
    [],
    [1],
    [[]],
    ["a", "b"],
    [0.9, 0.99],
    (1, 2),
    {},
    {"a": 1},
    {1: 2},
    {None: 1},
]
OBJECTS += [
    {"enabled": True},
    {"enabled": "auto"},
    {"device": "cpu"},
    {"type": "AdamW"},
    {"a": {1: {}}},
    _Named(a=1),
]
OBJECTS += [
    {"type": "AdamW", "params": {"lr": 1e-3}},
    {"x" * 100_000: 1},
    {str(n): n for n in range(300)},
    b"bytes",
]
OBJECTS += [
    set(),
    object(),
    int,
    len,
    range(3),
    1j,
    Path("states"),
    torch.float16,
    torch.tensor(3),
    torch.ones(3),
]
OBJECTS += [
    np.int64(3),
    np.float32(0.5),
    np.ones(2),
    np.bool_(True),
    _Unspeakable(),
    _Incomparable(),
]
OBJECTS += [dataclasses.make_dataclass("Given", ["a"])(1), *_circular(), *_deep(3000)]
JUNK: list[Any] = [*NUMBERS, *TEXTS, *OBJECTS]
PARAMS = [
    "lr",
    "betas",
    "eps",
    "weight_decay",
    "momentum",
    "amsgrad",
    "nesterov",
    "foreach",
    "fused",
    "capturable",
]
PARAMS += [
    "warmup_num_steps",
    "total_num_steps",
    "warmup_type",
    "step_size",
    "gamma",
    "cycle_min_lr",
    "maximize",
    "T_max",
]


def _put(config: dict[Any, Any], path: list[str], value: Any) -> None:
    for name in path[:-1]:
        inner = config.get(name)
        config[name] = config = dict(inner) if isinstance(inner, dict) else {}
    config[path[-1]] = value


def _typo(rng: random.Random, name: str) -> str:
    at = rng.randrange(len(name))
    return rng.choice(
        [
            name[:at] + name[at + 1 :],
            name + "s",
            name.upper(),
            name[:at] + "_" + name[at:],
            f"{name}.x",
        ]
    )


def _value(rng: random.Random, row: Any, meant: float) -> Any:
    if rng.random() < meant:
        return rng.choice([row.example, row.example, row.default, "auto", None])
    return rng.choice(rng.choice([NUMBERS, TEXTS, OBJECTS]))


def _spoil(rng: random.Random, config: dict[Any, Any], meant: float) -> None:
    row = rng.choice(ROWS)
    path: list[Any] = row.path.split(".")
    kind = rng.random()
    if kind < 0.06:
        place = rng.randrange(len(path))
        path[place] = _typo(rng, path[place])
    elif kind < 0.1:
        path = path[: rng.randrange(1, len(path) + 1)]
    elif kind < 0.2:
        path = [rng.choice(["optimizer", "scheduler"]), "params", rng.choice(PARAMS)]
    _put(config, path, _value(rng, row, meant))
    if rng.random() < 0.02:
        config[rng.choice([1, None, 2.5, (1,), "x" * 100_000, b"b", "", "\ud800", "."])] = (
            rng.choice(JUNK)
        )


def made(rng: random.Random, meant: float = 0.6) -> Any:
    """Return a random configuration, usually a dict. meant: the share of values that are valid."""
    if rng.random() < 0.01:
        return rng.choice(JUNK)
    config = dict(rng.choice(REAL)) if rng.random() < 0.5 else {}
    for _ in range(rng.choice([0, 1, 1, 2, 3, 5, 8])):
        _spoil(rng, config, meant)
    if config and rng.random() < 0.1:
        del config[rng.choice(list(config))]
    return config


def written(rng: random.Random, config: Any) -> Any:
    """Return the configuration itself, as text, as the path of a file or as base64, sometimes
    damaged.
    """
    try:
        text = json.dumps(config, ensure_ascii=rng.random() < 0.5)
    except (TypeError, ValueError, RecursionError):
        return config
    for _ in range(rng.choice([0, 0, 1, 3])):
        at = rng.randrange(len(text)) if text else 0
        text = (
            text[:at]
            + rng.choice(["", ",", '"', "{", "}", "[", "//", "/*", "#", "NaN", "\n", "\0"])
            + text[at + 1 :]
        )
    if rng.random() < 0.1:
        return base64.urlsafe_b64encode(text.encode("utf-8", "replace")).decode()
    return text


def keywords(rng: random.Random, meant: float = 0.6) -> dict[str, Any]:
    """Return random keyword arguments for the Python API. meant: the share of values that are
    valid.
    """
    found = made(rng, meant)
    config = (
        {str(name): value for name, value in found.items()}
        if isinstance(found, dict)
        else {"stage": found}
    )
    config.pop("$schema", None)
    for name, choices in (
        ("stage", [0, 1, 2, 3]),
        ("lr", [1e-3]),
        ("optimizer", ["adam", "sgd", "lion"]),
    ):
        if rng.random() < 0.3:
            config[name] = rng.choice(choices) if rng.random() < 0.8 else rng.choice(JUNK)
    if isinstance(config.get("optimizer"), dict) and rng.random() < 0.8:
        del config["optimizer"]
    return config


SETTINGS: list[Any] = [
    0,
    1,
    -1,
    2,
    10,
    0.5,
    0.9,
    True,
    False,
    None,
    "x",
    "linear",
    [0.9],
    [0.9, 0.99],
    [0.5] * 3,
    {"a": 1},
]
SETTINGS += [
    [],
    [1, 2],
    [[1]],
    [None, 1e-3],
    ["a", "b"],
    float("nan"),
    float("inf"),
    1e308,
    2**63,
    2**62,
]
SCHEDULES = {
    name: cls
    for name, cls in {**vars(torch.optim.lr_scheduler), **OURS}.items()
    if isinstance(cls, type)
}


def trained(rng: random.Random) -> dict[str, Any]:
    """Return an existing optimizer and usually a scheduler, with random arguments."""
    name = rng.choice(VALID_OPTIMIZERS)
    cls = next(
        (value for key, value in vars(torch.optim).items() if key.lower() == name),
        torch.optim.AdamW,
    )
    config: dict[str, Any] = {
        "optimizer": {"type": name, "params": _arguments(rng, [*known_arguments(cls), "lr"])}
    }
    if rng.random() < 0.6:
        kind = rng.choice([*VALID_LR_SCHEDULES, *SCHEDULES])
        known = known_arguments(SCHEDULES[kind])
        needed = [
            argument
            for argument, default in known.items()
            if default is REQUIRED and rng.random() < 0.8
        ]
        params = {
            **{argument: rng.choice(SETTINGS) for argument in needed},
            **_arguments(rng, [*known, "last_epoch"]),
        }
        config["scheduler"] = {"type": kind, "params": params}
    return config


def _arguments(rng: random.Random, names: list[str]) -> dict[str, Any]:
    return {rng.choice(names): rng.choice(SETTINGS) for _ in range(rng.choice([0, 1, 1, 2]))}
