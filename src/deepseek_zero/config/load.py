"""Load a configuration (dict, JSON file, JSON text or base64) as a `RawConfig`.

All problems are raised as one error. Keys are normalized, the model checks their bounds, and
`check` finds contradictions between keys, keys that are not implemented and missing packages.
"auto" stays unresolved until the model and the ranks are known (`auto.resolve`). After `validate`
the configuration is typed; no other function of the package reads it by dotted keys.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence, Set
from functools import cache
from importlib.util import find_spec
from typing import Literal

from pydantic import ValidationError

from ..base.errors import ConfigError, shown
from ..base.given import URL_FIX, URL_REASON, is_url
from ..base.log import log_first, log_once, speak
from ..base.other_optimizers import OTHER_OPTIMIZERS
from .fields import Section, Status, advice, rows
from .layer_specs import check_layer_specs
from .normalise import Normaliser
from .not_built import refuse
from .problems import Problem, Problems, Values, lookup
from .raw_config import RawConfig
from .schema import Config, OffloadOptimizer, OffloadParam
from .text import Source, read

BOTH_GIVEN = (
    "two configurations were given: the argument of initialize and the flag --deepspeed_config"
)
BOTH_ARGUMENTS = "two configurations were given: --deepscale_config and --deepspeed_config"
NONE_GIVEN = "no configuration was given"


def load(
    source: Source, *, origin: str | None = None, unknown: Literal["error", "warn"] = "error"
) -> RawConfig:
    """Read and check a configuration, without resolving "auto".

    Args:
        source: A dict, a path, JSON text or base64.
        origin: The name of the configuration in messages.
        unknown: Whether unknown keys are errors or warnings. With "warn", known keys that are not
            built are warnings too if the result is right without them.

    Returns:
        The checked configuration, from which `auto.resolve` makes a `Config`.

    Raises:
        ConfigError: The configuration has problems; the message lists all of them.
        NotBuiltError: The only problems are keys that are not implemented.
    """
    speak()  # every API except `init_distributed` reads a configuration first
    document = read(source, origin, lenient=unknown == "warn")
    problems = Problems(document.source, goes_on=unknown == "warn")
    if document.duplicates:
        names = list(document.duplicates)
        problems.add(
            "", f"Duplicate keys in the configuration: {shown(names)}", "keep one of each", names
        )
    normaliser = Normaliser(problems, unknown_is_error=unknown == "error")
    config = check(validate(normaliser.walk(document.values), problems), normaliser.autos, problems)
    refuse(normaliser.not_built, config, problems)
    problems.raise_if_any()
    for note in problems.notes:
        _warn(note)
    if problems.ignored:
        log_first(f"config {document.source}: without effect here: {'; '.join(problems.ignored)}")
    return RawConfig(
        config=config,
        autos=frozenset(normaliser.autos),
        source=document.source,
        notes=tuple(problems.notes),
        not_built=normaliser.not_built,
    )


def choose_source(config: Source, config_params: Source, args: object) -> tuple[Source, str | None]:
    """Return the configuration from the arguments of `initialize`.

    As in DeepSpeed, `config` takes precedence over `config_params`, and a configuration in `args`
    cannot be combined with either of them. `deepscale_config` in `args` logs a deprecation warning,
    once per process.

    Args:
        config: Value of the argument `config` of `initialize`.
        config_params: Value of the argument `config_params` of `initialize`.
        args: Value of the argument `args` of `initialize`, usually parsed command-line flags. Its
            attributes `deepspeed_config` and `deepscale_config` are read, if it has them.

    Returns:
        A tuple of the configuration and the name of its source for error messages. The name is
        "args" if the configuration is a mapping in `args`, otherwise None.

    Raises:
        ConfigError: No argument contains a configuration, `args` contains two, or `args` and
            another argument contain one.
    """
    flag = getattr(args, "deepspeed_config", None)
    old_flag = getattr(args, "deepscale_config", None)
    given = config if config is not None else config_params
    if old_flag is not None:
        _warn("--deepscale_config is deprecated, please use --deepspeed_config")
        if flag is not None:
            raise ConfigError(BOTH_ARGUMENTS, fix="pass only --deepspeed_config")
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
    if flag is None:
        return given, None
    return flag, "args" if isinstance(flag, Mapping) else None


def validate(values: Values, problems: Problems) -> Config:
    """Return the typed configuration for nested dicts.

    Keys that the model rejects are recorded as problems and have their defaults in the result, so
    that `check` can find more problems.

    Args:
        values: Nested dicts with the right types.
        problems: The object to which found problems are added.

    Returns:
        The configuration, in which rejected keys have their defaults.
    """
    try:
        return Config.model_validate(values)
    except ValidationError as error:
        for item in error.errors(include_url=False, include_context=False):
            path = [str(step) for step in item["loc"]]
            key = ".".join(path)
            message = item["msg"].replace("Input should be", "must be", 1)
            problems.add(key, message, advice(Config, key), lookup(values, key))
            _drop(values, path)
    return Config.model_validate(values)


def _drop(values: Values, path: Sequence[str]) -> None:
    """Remove a key from nested dicts. If its container is not a dict, remove that."""
    name, *rest = path
    inner = values.get(name)
    if rest and isinstance(inner, dict) and rest[0] in inner:
        _drop(inner, rest)
    else:
        values.pop(name, None)


@cache
def _warn(note: str) -> None:
    """Log a warning once per process, because zero.Init and initialize may read one file."""
    log_once(note, logging.WARNING)


MAX_GRAD_NORM = (
    "'max_grad_norm' is not supported as an optimizer parameter, please switch to using the "
    "deepspeed parameter 'gradient_clipping'"
)
# section -> (module to import, how to install it)
PACKAGES = {
    "tensorboard": ("tensorboard", "pip install tensorboard"),
    "wandb": ("wandb", "pip install wandb"),
    "comet": ("comet_ml", "pip install comet-ml"),
}


def check(config: Config, autos: Set[str], problems: Problems) -> Config:
    """Run every check that needs only the set values and the "auto" keys.

    Args:
        config: Configuration with valid types and bounds.
        autos: The keys that are "auto".
        problems: The object to which found problems are added.

    Returns:
        The configuration, without tiers that DeepSpeed ignores at its stage.
    """
    _precision(config, problems)
    _loss_scale(config, problems)
    _optimizer(config, problems)
    _types(config, autos, problems)
    config = _tiers(config, problems)
    _vertical(config, problems)
    _schedules(config, problems)
    _parking(config, problems)
    _paths(config, problems)
    _pipeline(config, problems)
    check_layer_specs(config.tensor_parallel.partition_config or {}, problems)
    _packages(config, problems)
    _feedback(config, problems)
    return config


def _paths(config: Config, problems: Problems) -> None:
    for row in rows(Config):
        is_path = row.path.endswith(("path", "output_file", "_dir"))
        if not is_path or row.status is not Status.EFFECTIVE:
            continue
        value = config.stated(row.path)
        if isinstance(value, str) and is_url(value):
            problems.add(row.path, f"{shown(value)} is a URL: {URL_REASON}", URL_FIX, value)


def _precision(config: Config, problems: Problems) -> None:
    on = [name for name in ("fp16", "bf16") if getattr(config, name).enabled]
    if len(on) == 2:
        problems.add(
            "fp16.enabled",
            "bfloat16 and fp16 modes cannot be simultaneously enabled",
            "disable one of them",
            True,
        )
    if on and config.torch_autocast.enabled and not problems.goes_on:
        problems.add(
            "torch_autocast.enabled",
            f"{on[0]}.enabled casts the model; autocast needs it in fp32",
            f"disable {on[0]} or torch_autocast",
            True,
        )
    wanted = config.precision
    has_no_master = config.bf16.master == "none" or config.bf16.bf16_master_weights_and_grads
    if wanted == "auto" and has_no_master:
        problems.add(
            "bf16.master",
            "keeps no fp32 values, which precision auto needs",
            'use "split" or "fp32", or set precision to a dtype',
            "none",
        )
    for name in on:
        if wanted not in (None, "auto", name):
            problems.add(
                "precision",
                f"contradicts {name}.enabled = true",
                f"remove precision, or set it to {name!r}",
                wanted,
            )


def _loss_scale(config: Config, problems: Problems) -> None:
    if config.fp16.loss_scale:
        return
    stated = {
        "fp16.loss_scale_window": config.fp16.loss_scale_window,
        "fp16.min_loss_scale": config.fp16.min_loss_scale,
    }
    for key, value in stated.items():
        if value <= 0:
            problems.add(
                key,
                "must be greater than 0 if the loss scale is dynamic",
                "remove it or set it to 1",
                value,
            )


def _optimizer(config: Config, problems: Problems) -> None:
    params = config.optimizer.params
    # DeepSpeed refuses it only if the optimizer is built from this section (`resolve_optimizer`)
    if "max_grad_norm" in params and not problems.goes_on:
        norm = params["max_grad_norm"]
        problems.add(
            "optimizer.params.max_grad_norm",
            MAX_GRAD_NORM,
            f'remove it and write "gradient_clipping": {norm} at the top',
            norm,
        )
    name = (config.optimizer.type or "").lower()
    if name in OTHER_OPTIMIZERS:
        other = OTHER_OPTIMIZERS[name]
        problems.found.append(
            Problem("optimizer.type", f"is not built: {other.why}", other.use, name, not_built=True)
        )


# The sections of ZeRO that place states in a memory, and the least stage that each needs
_OFFLOADS = {"offload_optimizer": 1, "offload_param": 3}


def _tiers(config: Config, problems: Problems) -> Config:
    """Check that there is a sharded state to offload, and a directory for a disk.

    Returns the configuration, without tiers that DeepSpeed ignores at its stage.
    """
    stage = config.zero_optimization.stage
    paths = {}
    for name, least in _OFFLOADS.items():
        key = f"zero_optimization.{name}"
        offload: OffloadOptimizer | OffloadParam = getattr(config.zero_optimization, name)
        if offload.device == "none":
            continue
        if offload.device == "auto":
            if offload.nvme_path:
                paths[name] = offload.nvme_path
            continue
        if stage < least and problems.goes_on:
            problems.warn(
                f"{key}.device",
                f"{offload.device} is ignored, as DeepSpeed does: it needs stage {least} or more",
            )
            config = config.changed({"zero_optimization": {name: {"device": "none"}}})
            continue
        if stage < least:
            problems.add(
                f"{key}.device",
                f"needs stage {least} or more: at stage {stage} every rank holds the whole state",
                f'set "stage": {least}, or "device": "none"',
                offload.device,
            )
        if offload.device == "nvme":
            paths[name] = offload.nvme_path or ""
            if not offload.nvme_path:
                problems.add(
                    f"{key}.nvme_path",
                    "is missing",
                    "name a directory on a fast local disk",
                    offload.nvme_path,
                )
    _open_places(config, problems)
    config = _without_idle_offload(config, problems)
    if len(set(paths.values())) > 1:
        key = "zero_optimization.offload_param.nvme_path"
        what = "differs from that of offload_optimizer, but a rank stores its states in one file"
        if problems.goes_on:
            problems.warn(key, f"{what}: ignored")
            shared = {"nvme_path": paths["offload_optimizer"]}
            return config.changed({"zero_optimization": {"offload_param": shared}})
        problems.add(
            key,
            what,
            "use one directory for both",
            paths["offload_param"],
        )
    return config


def _open_places(config: Config, problems: Problems) -> None:
    """Check keys that depend on whether the placement of a state is "auto"."""
    budget = config.memory_budget
    states = config.zero_optimization.offload_optimizer
    offloads = (states, config.zero_optimization.offload_param)
    is_open = any(offload.device == "auto" for offload in offloads)
    has_path = any(offload.nvme_path for offload in offloads)
    if is_open and not has_path and budget.disk is not None:
        problems.add(
            "memory_budget.disk",
            "has no directory",
            "set nvme_path to a directory on that disk, or remove it",
            budget.disk,
        )
    for name, value in (("host", budget.host), ("disk", budget.disk)):
        if not is_open and value is not None:
            problems.add(
                f"memory_budget.{name}",
                "has no effect: no device is auto",
                'set "device": "auto" in offload_optimizer or offload_param, or remove it',
                value,
            )
    refused = ("auto",) if problems.goes_on else ("auto", "none")
    if states.ratio != 1.0 and states.device in refused:
        problems.add(
            "zero_optimization.offload_optimizer.ratio",
            "has no effect: nothing is offloaded",
            'set "device": "cpu" or "nvme" in offload_optimizer, or remove it',
            states.ratio,
        )


def _without_idle_offload(config: Config, problems: Problems) -> Config:
    """Drop keys of offloaded states that DeepSpeed ignores, with a warning."""
    section = config.zero_optimization
    states = section.offload_optimizer
    is_idle = states.device == "none"
    changes = dict[str, float | bool]()
    if is_idle and states.ratio != 1.0:
        changes["ratio"] = 1.0
    if states.super_offload and (is_idle or section.stage != 3):
        changes["super_offload"] = False
    if not (problems.goes_on and changes):
        return config
    for key in changes:
        path = f"zero_optimization.offload_optimizer.{key}"
        problems.warn(path, "ignored: it needs a device, and super_offload stage 3")
    return config.changed({"zero_optimization": {"offload_optimizer": changes}})


def _vertical(config: Config, problems: Problems) -> None:
    """Check that vertical micro-batches can share loads of weights and divide the batch."""
    key = "zero_optimization.vertical_micro_batches"
    count = config.zero_optimization.vertical_micro_batches
    stage = config.zero_optimization.stage
    if count > 1 and stage < 3:
        what = (
            f"needs stage 3: at stage {stage} every rank holds all weights, so there is no load "
            "to share"
        )
        problems.add(key, what, 'set "stage": 3, or use gradient_accumulation_steps', count)
    samples = config.stated("train_micro_batch_size_per_gpu")
    if isinstance(samples, int) and samples % count:
        what = f"does not divide train_micro_batch_size_per_gpu = {samples}, which it splits"
        problems.add(key, what, f"set that to a multiple of {count}", count)


def _schedules(config: Config, problems: Problems) -> None:
    """Check that early and delayed updates have offloaded states and constant plans."""
    offload = config.zero_optimization.offload_optimizer
    for name in ("super_offload", "delayed_update_after"):
        key = f"zero_optimization.offload_optimizer.{name}"
        value = getattr(offload, name)
        if value is None or value is False:
            continue
        if offload.device == "none":
            problems.add(
                key,
                "applies only to offloaded states",
                'set "device": "cpu" or "nvme" in offload_optimizer, or remove it',
                value,
            )
        stage = config.zero_optimization.stage
        if name == "super_offload" and stage != 3:
            what = f"needs stage 3: at stage {stage} programs can read weights before the step ends"
            problems.add(key, what, 'set "stage": 3, or remove it', value)
        if config.precision == "auto":
            problems.add(
                key,
                "contradicts precision auto, which may change the dtype of a unit after a step",
                "set precision to a dtype, or remove it",
                value,
            )
        if name == "super_offload" and not offload.pipeline:
            problems.add(
                key,
                "contradicts pipeline = false, which updates in the step",
                "remove one of the two",
                value,
            )


def _parking(config: Config, problems: Problems) -> None:
    """Check that inputs of checkpoints have one tier, and that a disk has a directory."""
    section = config.activation_checkpointing
    if section.device != "nvme":
        return
    if not section.nvme_path:
        key = "activation_checkpointing.nvme_path"
        problems.add(key, "is missing", "name a directory on a fast local disk", section.nvme_path)
    if section.cpu_checkpointing:
        key = "activation_checkpointing.cpu_checkpointing"
        problems.add(
            key, "contradicts device 'nvme': it means device 'cpu'", "keep one of the two", True
        )


def _pipeline(config: Config, problems: Problems) -> None:
    """Check that the pipeline keys fit its schedule."""
    section = config.pipeline
    if section.virtual > 1 and section.schedule == "1f1b":
        problems.add(
            "pipeline.virtual",
            "must be 1 with schedule 1f1b, which has one stage on each rank",
            'set "schedule": "interleaved" or "breadth_first", or remove it',
            section.virtual,
        )
    if section.group is not None and section.schedule != "breadth_first":
        problems.add(
            "pipeline.group",
            f"does not apply to schedule {section.schedule}",
            'set "schedule": "breadth_first", or remove it',
            section.group,
        )


def _types(config: Config, autos: Set[str], problems: Problems) -> None:
    """Check that there are no arguments without an optimizer or scheduler type."""
    for name, section, example in (
        ("optimizer", config.optimizer, "AdamW"),
        ("scheduler", config.scheduler, "WarmupLR"),
    ):
        if section.params and not section.type and f"{name}.type" not in autos:
            if problems.goes_on:
                problems.warn(f"{name}.params", f"ignored, as DeepSpeed does: it needs {name}.type")
                continue
            problems.add(
                f"{name}.params",
                f"needs {name}.type",
                f'add "type": "{example}" or another',
                section.params,
            )


def _packages(config: Config, problems: Problems) -> None:
    for name, (module, install) in PACKAGES.items():
        if getattr(config, name).enabled and find_spec(module) is None:
            problems.add(
                f"{name}.enabled",
                f"the package {module} is not installed",
                f"{install}, or disable it",
                True,
            )


def _feedback(config: Config, problems: Problems) -> None:
    """Report error feedback that has no effect, because gradients are not quantized."""
    zero = config.zero_optimization
    gradients = zero.compression.gradients
    if zero.zero_quantized_gradients or gradients.bits:
        return
    stated = {
        "compression.gradients.error_feedback": gradients.error_feedback,
        "zeropp_loco_param": zero.stated("zeropp_loco_param"),
    }
    for key, value in stated.items():
        if value not in (None, "off"):
            if isinstance(value, Section):
                value = value.stated_values()
            why = "gradients are not quantized: set zero_quantized_gradients"
            problems.without_effect(f"zero_optimization.{key}", value, why)
