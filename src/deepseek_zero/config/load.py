"""`load`: a dict, JSON file, JSON text or base64 -> `RawConfig`, or one error that lists every
problem.

Each key is normalised, the model checks its bounds, and `check` finds what cannot be right although
every key is: keys that are not built, contradictions, missing packages.  Nothing is resolved here:
"auto" stays open until the model and the ranks are known (`auto.resolve`).
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Set
from functools import cache
from importlib.util import find_spec
from typing import Any, Literal

from pydantic import ValidationError

from ..base.errors import ConfigError, shown
from ..base.given import URL_FIX, URL_REASON, is_url
from ..base.log import log_first, log_once, speak
from ..base.other_optimizers import OTHER_OPTIMIZERS
from .fields import Status, advice, rows
from .layer_specs import check_layer_specs
from .normalise import Normaliser
from .not_built import refuse
from .raw_config import Problem, Problems, RawConfig, lookup
from .schema import Config
from .text import Source, read

BOTH_GIVEN = (
    "two configurations were given: one to initialize, and one by the flag --deepspeed_config"
)
BOTH_ARGUMENTS = "two configurations were given: by --deepscale_config and by --deepspeed_config"
NONE_GIVEN = "no configuration was given"


def load(
    source: Source, *, origin: str | None = None, unknown: Literal["error", "warn"] = "error"
) -> RawConfig:
    """Read and check a configuration; return it with "auto" left open.

    origin: its name in messages.  unknown: whether unknown keys raise or warn, and those that are
    known, not built and not needed for a right result.  Raises one ConfigError (NotBuiltError where
    nothing else is wrong) that lists every problem.
    """
    speak()  # every door but `init_distributed` begins by reading a configuration
    document = read(source, origin, lenient=unknown == "warn")
    problems = Problems(document.source, goes_on=unknown == "warn")
    if document.duplicates:
        names = list(document.duplicates)
        problems.add(
            "", f"Duplicate keys in the configuration: {shown(names)}", "keep one of each", names
        )
    normaliser = Normaliser(problems, unknown_is_error=unknown == "error")
    values = normaliser.walk(document.values)
    validate(values, problems)
    check(values, normaliser.autos, problems)
    refuse(normaliser.not_built, values, problems)
    problems.raise_if_any()
    for note in problems.notes:
        _warn(note)
    if problems.ignored:
        log_first(f"config {document.source}: without effect here: {'; '.join(problems.ignored)}")
    return RawConfig(
        values=values,
        autos=frozenset(normaliser.autos),
        source=document.source,
        given=source,
        notes=tuple(problems.notes),
        not_built=normaliser.not_built,
    )


def choose_source(config: Source, config_params: Source, args: object) -> tuple[Source, str | None]:
    """Return the one configuration among the arguments of `initialize`, and its name for messages,
    as DeepSpeed chooses.
    """
    flag = getattr(args, "deepspeed_config", None)
    old_flag = getattr(args, "deepscale_config", None)
    given = config if config is not None else config_params
    if old_flag is not None:
        _warn("--deepscale_config is deprecated, please use --deepspeed_config")
        if flag is not None:
            raise ConfigError(BOTH_ARGUMENTS, fix="pass --deepspeed_config alone")
        flag = old_flag
    if flag is not None and given is not None:
        raise ConfigError(
            BOTH_GIVEN, fix="pass the configuration in one place: the config argument or the flag"
        )
    if flag is None and given is None:
        raise ConfigError(
            NONE_GIVEN,
            fix="pass config= (a dict or a path) to initialize, or the flag to the script",
        )
    is_flag_dict = isinstance(flag, Mapping)
    return (flag, "args" if is_flag_dict else None) if flag is not None else (given, None)


def validate(values: Mapping[str, Any], problems: Problems) -> Config | None:
    """Return the model of `values`, or None: what the model refuses becomes problems."""
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
    """Log a warning once per process: zero.Init and initialize often read the same file."""
    log_once(note, logging.WARNING)


MAX_GRAD_NORM = (
    "'max_grad_norm' is not supported as an optimizer parameter, please switch to using the "
    "deepspeed parameter 'gradient_clipping'"
)
# section -> (module to import, how to install it)
PACKAGES = {
    "tensorboard": ("tensorboard", 'pip install "deepseek-zero[tensorboard]"'),
    "wandb": ("wandb", "pip install wandb"),
    "comet": ("comet_ml", "pip install comet-ml"),
}
_PRECISION_SECTIONS = {"fp16": "fp16.enabled", "bf16": "bf16.enabled"}


def check(values: Mapping[str, Any], autos: Set[str], problems: Problems) -> None:
    """Make every check that needs only what was stated, and which keys said "auto"."""
    _precision(values, problems)
    _loss_scale(values, problems)
    _optimizer(values, problems)
    _types(values, autos, problems)
    _tiers(values, problems)
    _vertical(values, problems)
    _schedules(values, problems)
    _parking(values, problems)
    _paths(values, problems)
    _pipeline(values, problems)
    check_layer_specs(lookup(values, "tensor_parallel.partition_config") or {}, problems)
    _packages(values, problems)
    _feedback(values, problems)


def _paths(values: Mapping[str, Any], problems: Problems) -> None:
    for row in rows(Config):
        value = lookup(values, row.path)
        is_path = (
            row.path.endswith(("path", "output_file", "_dir")) and row.status is Status.EFFECTIVE
        )
        if is_path and isinstance(value, str) and is_url(value):
            problems.add(row.path, f"{shown(value)} is a URL: {URL_REASON}", URL_FIX, value)


def _precision(values: Mapping[str, Any], problems: Problems) -> None:
    on = [name for name, key in _PRECISION_SECTIONS.items() if lookup(values, key)]
    if len(on) == 2:
        problems.add(
            "fp16.enabled",
            "bfloat16 and fp16 modes cannot be simultaneously enabled",
            "switch one of them off",
            True,
        )
    if on and lookup(values, "torch_autocast.enabled") and not problems.goes_on:
        problems.add(
            "torch_autocast.enabled",
            f"{on[0]}.enabled casts the model itself; autocast wants it in fp32",
            f"switch {on[0]} or torch_autocast off",
            True,
        )
    if values.get("precision") == "auto" and (
        lookup(values, "bf16.master") == "none"
        or lookup(values, "bf16.bf16_master_weights_and_grads")
    ):
        fix = 'keep a master ("split" or "fp32"), or name the precision'
        problems.add(
            "bf16.master", "leaves nothing to lift a unit from where precision is auto", fix, "none"
        )
    wanted = values.get("precision")
    for name in on:
        if wanted not in (None, "auto", name):
            problems.add(
                "precision",
                f"contradicts {name}.enabled = true",
                f"remove precision, or set it to {name!r}",
                wanted,
            )


def _loss_scale(values: Mapping[str, Any], problems: Problems) -> None:
    if lookup(values, "fp16.loss_scale", 0):
        return
    for key in ("fp16.loss_scale_window", "fp16.min_loss_scale"):
        value = lookup(values, key, 1)
        if value <= 0:
            problems.add(
                key,
                "must be greater than 0 while the loss scale is dynamic",
                "remove it or set it to 1",
                value,
            )


def _optimizer(values: Mapping[str, Any], problems: Problems) -> None:
    params = lookup(values, "optimizer.params", {})
    if "max_grad_norm" in params:
        norm = params["max_grad_norm"]
        problems.add(
            "optimizer.params.max_grad_norm",
            MAX_GRAD_NORM,
            f'remove it and write "gradient_clipping": {norm} at the top',
            norm,
        )
    name = str(lookup(values, "optimizer.type", "")).lower()
    if name in OTHER_OPTIMIZERS:
        other = OTHER_OPTIMIZERS[name]
        problems.found.append(
            Problem("optimizer.type", f"is not built: {other.why}", other.use, name, not_built=True)
        )


def _tiers(values: Mapping[str, Any], problems: Problems) -> None:
    """Check that there is something sharded to offload, and a directory for a disk."""
    stage = lookup(values, "zero_optimization.stage", 0) or 0
    paths = {}
    for name, least in (("offload_optimizer", 1), ("offload_param", 3)):
        key = f"zero_optimization.{name}"
        device = lookup(values, f"{key}.device")
        if device in (None, "none"):
            continue
        if device == "auto":
            if path := lookup(values, f"{key}.nvme_path"):
                paths[name] = path
            continue
        if stage < least and problems.goes_on:
            problems.warn(
                f"{key}.device",
                f"{device} is left out, as DeepSpeed does: it needs stage {least} or more",
            )
            values["zero_optimization"][name]["device"] = "none"
            continue
        if stage < least:
            problems.add(
                f"{key}.device",
                f"needs stage {least} or more: at stage {stage} every rank holds all of it",
                f'write "stage": {least}, or "device": "none"',
                device,
            )
        if device == "nvme":
            paths[name] = lookup(values, f"{key}.nvme_path")
            if not paths[name]:
                problems.add(
                    f"{key}.nvme_path",
                    "is missing",
                    "name a directory on a fast local disk",
                    paths[name],
                )
    _open_places(values, problems)
    if len(set(paths.values())) > 1:
        problems.add(
            "zero_optimization.offload_param.nvme_path",
            "differs from that of offload_optimizer: a rank keeps its states in one file",
            "name one directory for both",
            paths["offload_param"],
        )


def _open_places(values: Mapping[str, Any], problems: Problems) -> None:
    """Check keys that only matter where a place is open, or only where it is not."""
    states = lookup(values, "zero_optimization.offload_optimizer.device")
    is_open = "auto" in (states, lookup(values, "zero_optimization.offload_param.device"))
    paths = [
        lookup(values, f"zero_optimization.{name}.nvme_path")
        for name in ("offload_optimizer", "offload_param")
    ]
    if is_open and not any(paths) and (value := lookup(values, "memory_budget.disk")) is not None:
        problems.add(
            "memory_budget.disk",
            "names no disk",
            "name a directory on it as nvme_path, or remove it",
            value,
        )
    for name in ("host", "disk"):
        if not is_open and (value := lookup(values, f"memory_budget.{name}")) is not None:
            fix = 'write "device": "auto" in offload_optimizer or offload_param, or remove it'
            problems.add(
                f"memory_budget.{name}", "has nothing to decide: every place is stated", fix, value
            )
    ratio = lookup(values, "zero_optimization.offload_optimizer.ratio", 1.0)
    if ratio != 1.0 and states not in ("cpu", "nvme"):
        fix = 'write "device": "cpu" or "nvme" beside it, or remove it'
        problems.add(
            "zero_optimization.offload_optimizer.ratio", "is a share of nothing", fix, ratio
        )


def _vertical(values: Mapping[str, Any], problems: Problems) -> None:
    """Check that micro-batches in turn share loads of weights, and are parts of one batch."""
    key = "zero_optimization.vertical_micro_batches"
    count = lookup(values, key, 1)
    stage = lookup(values, "zero_optimization.stage", 0) or 0
    if count > 1 and stage < 3:
        what = (
            f"needs stage 3: at stage {stage} weights are whole on every rank, so there is no load "
            "to share"
        )
        problems.add(key, what, 'write "stage": 3, or gradient_accumulation_steps instead', count)
    samples = lookup(values, "train_micro_batch_size_per_gpu")
    if isinstance(samples, int) and count > 0 and samples % count:
        what = f"does not divide train_micro_batch_size_per_gpu = {samples}, the batch that it cuts"
        problems.add(key, what, f"make that a multiple of {count}", count)


def _schedules(values: Mapping[str, Any], problems: Problems) -> None:
    """Check that updates ahead of their step, or a step late, have states that rest elsewhere and
    plans that stay.
    """
    zero = "zero_optimization"
    section = "zero_optimization.offload_optimizer"
    places = {
        name: lookup(values, f"{zero}.{name}.device") or "none"
        for name in ("offload_optimizer", "offload_param")
    }
    needs = {
        "super_offload": ("offload_optimizer", "offload_param"),
        "delayed_update_after": ("offload_optimizer",),
    }
    for name, needed in needs.items():
        key = f"{section}.{name}"
        value = lookup(values, f"{section}.{name}")
        if value is None or value is False:
            continue
        if any(places[place] == "none" for place in needed):
            fix = f'write "device": "cpu" or "nvme" in {" and ".join(needed)}, or remove it'
            problems.add(key, "is for states that rest in another memory", fix, value)
        if values.get("precision") == "auto":
            fix = "name the precision, or remove it"
            problems.add(
                key,
                "contradicts precision auto, which may change a unit's plan at a step's end",
                fix,
                value,
            )
        if name == "super_offload" and lookup(values, f"{section}.pipeline") is False:
            problems.add(
                key,
                "contradicts pipeline = false, which updates in the step",
                "remove one of the two",
                value,
            )


def _parking(values: Mapping[str, Any], problems: Problems) -> None:
    """Check that inputs of checkpoints are parked in one place, and that a disk has a directory."""
    section = lookup(values, "activation_checkpointing", {})
    if section.get("device") != "nvme":
        return
    if not section.get("nvme_path"):
        key = "activation_checkpointing.nvme_path"
        problems.add(
            key, "is missing", "name a directory on a fast local disk", section.get("nvme_path")
        )
    if section.get("cpu_checkpointing"):
        key = "activation_checkpointing.cpu_checkpointing"
        problems.add(
            key, "contradicts device 'nvme': it means device 'cpu'", "keep one of the two", True
        )


def _pipeline(values: Mapping[str, Any], problems: Problems) -> None:
    """Check that a pipeline's schedule has what its other keys speak of."""
    section = lookup(values, "pipeline", {})
    schedule = section.get("schedule", "1f1b")
    if section.get("virtual", 1) > 1 and schedule == "1f1b":
        fix = 'write "schedule": "interleaved" or "breadth_first", or remove it'
        problems.add(
            "pipeline.virtual",
            "is more than schedule 1f1b has: one stage on a rank",
            fix,
            section["virtual"],
        )
    if section.get("group") is not None and schedule != "breadth_first":
        fix = 'write "schedule": "breadth_first", or remove it'
        problems.add(
            "pipeline.group", f"is no matter of schedule {schedule}", fix, section["group"]
        )


def _types(values: Mapping[str, Any], autos: Set[str], problems: Problems) -> None:
    """Check that no arguments stand there without the thing they belong to."""
    for name, example in (("optimizer", "AdamW"), ("scheduler", "WarmupLR")):
        params = lookup(values, f"{name}.params")
        if params and not lookup(values, f"{name}.type") and f"{name}.type" not in autos:
            fix = f'add "type": "{example}" or another'
            problems.add(f"{name}.params", f"has no {name}.type beside it", fix, params)


def _packages(values: Mapping[str, Any], problems: Problems) -> None:
    for name, (module, install) in PACKAGES.items():
        if lookup(values, f"{name}.enabled") and find_spec(module) is None:
            fix = f"{install}, or switch it off"
            problems.add(f"{name}.enabled", f"the package {module} is not installed", fix, True)


def _feedback(values: Mapping[str, Any], problems: Problems) -> None:
    """Say that errors are kept of nothing where gradients are not coded."""
    zero = lookup(values, "zero_optimization", {})
    if zero.get("zero_quantized_gradients") or lookup(zero, "compression.gradients.bits"):
        return
    stated = {
        "compression.gradients.error_feedback": lookup(
            zero, "compression.gradients.error_feedback", "off"
        ),
        "zeropp_loco_param": zero.get("zeropp_loco_param"),
    }
    for key, value in stated.items():
        if value not in (None, "off"):
            why = "gradients are sent as they are: zero_quantized_gradients codes them"
            problems.without_effect(f"zero_optimization.{key}", value, why)
