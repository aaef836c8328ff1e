"""Optimizers by name, with DeepSpeed's parameters, and their granularity.

The module has the table of names, DeepSpeed's parameters and defaults, and the granularity of each
class. It converts a JSON `params` dictionary to keyword arguments, and reports all problems at
once.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from numbers import Real
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from deepseek_zero import optimizers
from deepseek_zero.base.device import default_device
from deepseek_zero.base.errors import ConfigError, DeepSeekZeroError, NotBuiltError, shown
from deepseek_zero.base.given import did_you_mean
from deepseek_zero.base.log import log_once
from deepseek_zero.base.other_optimizers import OTHER_OPTIMIZERS

from . import cpu_adam
from .plain_steps import raw_step, undecorated

Granularity = Literal["element", "row", "tensor"]
Options = Mapping[str, Any]  # of an optimizer, or of a parameter group


@dataclass(frozen=True)
class OptimizerSpec:
    """An optimizer class with its arguments, before it is built.

    Attributes:
        cls: The class of the optimizer.
        defaults: The keyword arguments of its constructor.
        granularity: Where its state may be cut between ranks: "element" (anywhere) or "tensor"
            (only between tensors).
    """

    cls: type[Optimizer]
    defaults: dict[str, Any]
    granularity: Granularity

    def build(self, params: Iterable[Any]) -> Optimizer:
        """Build the optimizer.

        Args:
            params: The parameters, or parameter groups, that it updates.

        Raises:
            ConfigError: The class rejects its arguments.
        """
        try:
            return self.cls(params, **self.defaults)
        except DeepSeekZeroError:
            raise
        # torch's classes raise different errors: from asserts, indices, comparisons
        except Exception as refusal:
            raise self._refusal(refusal) from refusal

    def try_out(self) -> None:
        """Run one step on a small tensor to check the arguments.

        Raises:
            ConfigError: The class rejects its arguments, or cannot compute with them.
        """
        matrix, vector = (
            nn.Parameter(torch.ones(shape, device=default_device())) for shape in ((2, 2), (2,))
        )
        matrix.grad = torch.ones_like(matrix)
        vector.grad = torch.ones_like(vector)
        optimizer = self.build([matrix, vector])
        try:
            with torch.no_grad():
                raw_step(optimizer)()
        except Exception as refusal:
            raise self._refusal(refusal) from refusal

    def _refusal(self, refusal: Exception) -> ConfigError:
        return ConfigError(
            f"optimizer {self.cls.__name__} refuses its parameters {shown(self.defaults, 300)}: "
            f"{str(refusal)[:300]}",
            fix="see the documentation of the class for what it takes.",
        )

    def parameter_groups(
        self, model: nn.Module, groups: Iterable[Options] | None = None
    ) -> list[dict[str, Any]]:
        """Return the parameter groups, divided further if the class requires it (Muon).

        It must be called before the parameters are sharded, because Muon divides groups by the
        shapes of whole parameters. `build` keeps the returned groups and their order.

        Args:
            model: The model whose parameters are grouped, before it is sharded.
            groups: The user's groups; None for one group of all trainable parameters.
        """
        if groups is None:
            groups = [{"params": [param for param in model.parameters() if param.requires_grad]}]
        given = [dict(group) for group in groups]
        divide = getattr(self.cls, "divide_groups", None)
        divided: list[dict[str, Any]] = given if divide is None else divide(model, given)
        return divided


@dataclass(frozen=True)
class _Named:
    """One of DeepSpeed's names: its class, and how DeepSpeed's parameters differ.

    Attributes:
        cls: A function that returns the class; the first call may import it.
        defaults: DeepSpeed's defaults that differ from the class.
        only: Parameters that are accepted with one value only, the implemented one.
        switches: Parameters that are evaluated here and not passed to the class.
    """

    cls: Callable[[], type[Optimizer]]
    defaults: Options = field(default_factory=dict)
    only: Mapping[str, object] = field(default_factory=dict)
    switches: frozenset[str] = frozenset()


# DeepSpeed's Adam and AdamW default to no decay, torch's AdamW to 0.01. "torch_adam" selects
# torch's own defaults.
_FUSED_ADAM = {"weight_decay": 0.0}
# Either value has the same effect: moments have their main weight's dtype, and gradients are freed
# with the step
_EITHER = frozenset({"fp32_optimizer_states", "set_grad_none"})
_ADAM_SWITCHES = frozenset({"torch_adam", "adam_w_mode", "adamw_mode", "bias_correction", *_EITHER})
_NAMED: dict[str, _Named] = {
    "adam": _Named(lambda: torch.optim.Adam, _FUSED_ADAM, {}, _ADAM_SWITCHES),
    "adamw": _Named(lambda: torch.optim.AdamW, _FUSED_ADAM, {}, _ADAM_SWITCHES),
    "adagrad": _Named(lambda: torch.optim.Adagrad, {}, {"amsgrad": False}, _EITHER),
    "lion": _Named(lambda: optimizers.Lion, {}, {}, _EITHER),
    "lamb": _Named(
        lambda: optimizers.Lamb, {}, {"amsgrad": False, "eps_inside_sqrt": False}, _EITHER
    ),
    "muon": _Named(
        lambda: optimizers.Muon,
        {},
        {"adam_w_mode": True, "per_head_muon": False},
        frozenset({"torch_adam"}),
    ),
    "onebitadam": _Named(
        lambda: optimizers.OneBitAdam,
        {},
        {"amsgrad": False, "bias_correction": True, "eps_inside_sqrt": False},
        frozenset({"cuda_aware", "comm_backend_name"}),  # For a backend that does not exist here
    ),
}
_TORCH: dict[str, type[Optimizer]] = {
    name.lower(): value
    for name, value in vars(torch.optim).items()
    if isinstance(value, type) and issubclass(value, Optimizer) and value is not Optimizer
}

# Optimizers of torch whose update is element-wise
_ELEMENT_WISE = frozenset(
    "Adam AdamW SGD Adagrad RMSprop Adadelta Adamax NAdam RAdam Rprop ASGD".split()
)
_REFUSED: dict[type, str] = {
    torch.optim.LBFGS: "it evaluates the model several times per step and works on all parameters "
    "as one vector",
    torch.optim.SparseAdam: "it takes sparse gradients only, and sharded gradients are dense",
}

# PyTorch has one kernel for a whole step of these, on CPU and CUDA (for Adagrad on a CPU only:
# `prefer_fused` in optim/param_groups.py). foreach and differentiable exclude it.
_WITH_FUSED_KERNEL = (torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD)
_EXCLUDE_FUSED = frozenset({"fused", "foreach", "differentiable"})

VALID_OPTIMIZERS: tuple[str, ...] = tuple(
    sorted({*_NAMED, *_TORCH} - {cls.__name__.lower() for cls in _REFUSED})
)


def resolve_optimizer(name: str, params: Options) -> OptimizerSpec:
    """Return the optimizer that a configuration names, with checked parameters.

    Adam has decoupled weight decay unless `adam_w_mode` is false,
    as in DeepSpeed.

    Args:
        name: The name of the optimizer, for example "AdamW"; upper and lower case are equal.
        params: The hyper-parameters, with DeepSpeed's names.

    Returns:
        The class and its checked arguments, which `build` turns into an optimizer.

    Raises:
        ConfigError: The name is unknown or parameters are invalid; lists every problem.
        NotBuiltError: The optimizer or the value of a parameter is not implemented.
    """
    key = str(name).lower()
    if key in OTHER_OPTIMIZERS:
        other = OTHER_OPTIMIZERS[key]
        raise NotBuiltError(
            f"optimizer {shown(name)} is not built: {other.why}.", fix=f"{other.use}."
        )
    if key not in _NAMED and key not in _TORCH:
        raise ConfigError(
            f"optimizer {shown(name)} is not "
            f"known{did_you_mean(key[:100], [*VALID_OPTIMIZERS, *OTHER_OPTIMIZERS])}.",
            fix=f"name one of {', '.join(VALID_OPTIMIZERS)}, or pass an optimizer instance.",
        )
    _refuse_max_grad_norm(params)
    named = _NAMED.get(key) or _Named(lambda: _TORCH[key])
    cls = _adam_class(key, params) if named.switches is _ADAM_SWITCHES else named.cls()
    granularity = granularity_of(cls)
    owner = f"optimizer {shown(name)}"
    _refuse_odd_switches(owner, named, params)
    own = _without_deepspeed_names(owner, named, params)
    given = checked_arguments(owner, cls, own, {*named.only, *named.switches})
    is_deepspeeds = params.get("torch_adam") in (False, None, "auto")
    defaults = dict(named.defaults) if is_deepspeeds else {}
    if cls in _WITH_FUSED_KERNEL and not _EXCLUDE_FUSED & given.keys():
        defaults["fused"] = True
    spec = OptimizerSpec(cls, defaults | given, granularity)
    if given:
        with undecorated():
            spec.try_out()
    return spec


def granularity_of(
    optimizer: Optimizer | type[Optimizer], group: Options | None = None
) -> Granularity:
    """Return where the state of an optimizer may be cut between ranks.

    Args:
        optimizer: The optimizer or its class. Its class attribute `granularity` decides if there is
            one.
        group: A parameter group, for classes that distinguish groups: the AdamW groups of Muon may
            be cut.

    Returns:
        "element" if the state may be cut anywhere, "tensor" if only between tensors. For unknown
        classes it is "tensor", which is always correct.

    Raises:
        NotBuiltError: The optimizer cannot be sharded.
        ConfigError: The class attribute has an invalid value.
    """
    cls = optimizer if isinstance(optimizer, type) else type(optimizer)
    for refused, reason in _REFUSED.items():
        if issubclass(cls, refused):
            raise NotBuiltError(
                f"optimizer {cls.__name__} cannot be sharded: {reason}.",
                fix="use another, AdamW for instance.",
            )
    by_group = getattr(cls, "group_granularity", None)
    if group is not None and by_group is not None:
        return _valid_granularity(cls, by_group(group))
    declared = getattr(optimizer, "granularity", None)
    if declared is not None:
        return _valid_granularity(cls, declared)
    if _TORCH.get(cls.__name__.lower()) is cls:
        return "element" if cls.__name__ in _ELEMENT_WISE else "tensor"
    _note_unknown(f"{cls.__module__}.{cls.__qualname__}")
    return "tensor"


def _valid_granularity(cls: type, value: object) -> Granularity:
    match value:
        case "element" | "row" | "tensor":
            return value
    raise ConfigError(
        f"{cls.__name__}.granularity is {value!r}.",
        fix='set it to "element", "row" or "tensor", whichever is true.',
    )


@functools.cache
def _note_unknown(name: str) -> None:
    log_once(
        f"optimizer {name} is not known here: it is given whole tensors, which is always right and "
        "balances less well. If its update is element-wise, say so with the class attribute "
        'granularity = "element".'
    )


def _refuse_max_grad_norm(params: Options) -> None:
    if "max_grad_norm" in params:
        raise ConfigError(
            "'max_grad_norm' is not supported as an optimizer parameter, please switch to using "
            "the deepspeed parameter 'gradient_clipping'.",
            why="the norm runs over all shards of all groups, so it belongs to the engine.",
            fix='remove it and set "gradient_clipping": '
            f"{shown(params['max_grad_norm'])} at the top level.",
        )


# A backend by name; all other switches are booleans
_NAMES = frozenset({"comm_backend_name"})


def _refuse_odd_switches(owner: str, named: _Named, params: Options) -> None:
    """Raise ConfigError if a switch is not a boolean, because a string would select the class."""
    for name in sorted(named.switches - _NAMES):
        value = params.get(name)
        if value not in (True, False, None) and not _is_auto(value):
            raise ConfigError(
                f"{owner}: {name!r} must be true or false, not {shown(value)}.",
                fix="write true or false without quotes.",
            )


def _adam_class(key: str, params: Options) -> type[Optimizer]:
    """Return AdamW for the name AdamW or if the mode, which is on by default, is set."""
    decoupled = params.get("adam_w_mode", params.get("adamw_mode", True))
    is_decoupled = key == "adamw" or decoupled in (True, "auto")
    if params.get("bias_correction") in (False,):  # also 0
        if params.get("amsgrad") not in (False, None, "auto"):
            raise NotBuiltError(
                f"optimizer {shown(key)}: amsgrad without bias correction is not built.",
                fix="leave amsgrad or bias_correction out.",
            )
        return cpu_adam.UncorrectedAdamW if is_decoupled else cpu_adam.UncorrectedAdam
    return torch.optim.AdamW if is_decoupled else torch.optim.Adam


def _without_deepspeed_names(owner: str, named: _Named, params: Options) -> dict[str, Any]:
    """Return the parameters that are passed to the class.

    Raise NotBuiltError if a parameter in `named.only` has another value.
    """
    for name, built in named.only.items():
        if params.get(name, built) not in (built, "auto"):
            raise NotBuiltError(
                f"{owner}: {name}={shown(params[name])} is not built.",
                fix=f"leave it out, or set it to {built}.",
            )
    return {
        name: value
        for name, value in params.items()
        if name not in named.only and name not in named.switches
    }


REQUIRED: Any = inspect.Parameter.empty
_LONGEST_NAME = 100  # Longer names are not compared with known ones
_NOT_SETTINGS = frozenset({"self", "params", "optimizer"})


def known_arguments(cls: type) -> dict[str, Any]:
    """Return the arguments that a class takes from a configuration, with their defaults.

    Args:
        cls: The class of an optimizer or a schedule. If it has a dataclass `Settings`, the
            arguments are the fields of that dataclass, otherwise those of the constructor.

    Returns:
        The default of each argument by its name; `REQUIRED` for arguments without a default.
    """
    settings = getattr(cls, "Settings", None)
    signature = inspect.signature(cls.__init__ if settings is None else settings)  # type: ignore[misc]
    by_keyword = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return {
        name: parameter.default
        for name, parameter in signature.parameters.items()
        if parameter.kind in by_keyword and name not in _NOT_SETTINGS
    }


def checked_arguments(
    owner: str, cls: type, params: Options, also_valid: Collection[str] = ()
) -> dict[str, Any]:
    """Check the parameters of a configuration for the constructor of a class.

    A value "auto" that was not resolved leaves the default of the class.

    Args:
        owner: The subject of the error, for example "optimizer 'Adam'".
        cls: The class of the optimizer, or of the schedule, that gets the arguments.
        params: The parameters from the configuration.
        also_valid: Further names that are not errors, because the caller handles them.

    Returns:
        The keyword arguments with which the class can be built.

    Raises:
        ConfigError: A parameter is unknown, missing or of a wrong type; lists every problem.
    """
    known = known_arguments(cls)
    given = {name: value for name, value in params.items() if not _is_auto(value)}
    problems = [_unknown(name, [*known, *also_valid]) for name in given if name not in known]
    missing = [name for name, default in known.items() if default is REQUIRED and name not in given]
    problems += [f"{name!r} is missing and has no default" for name in missing]
    fitted = {name: _fit(value, known[name]) for name, value in given.items() if name in known}
    wrong = {name: _mismatch(value, known[name]) for name, value in fitted.items()}
    problems += [
        f"{name!r} must be {wish}, not {shown(fitted[name])}"
        for name, wish in wrong.items()
        if wish
    ]
    if problems:
        raise ConfigError(
            f"{owner}: " + "; ".join(problems) + ".",
            fix=f"valid parameters are {', '.join(sorted({*known, *also_valid}))}.",
        )
    return fitted


def _unknown(name: str, valid: Collection[str]) -> str:
    return f"{shown(name)} is not a parameter{did_you_mean(name[:_LONGEST_NAME], valid)}"


def _is_auto(value: object) -> bool:
    return isinstance(value, str) and value == "auto"


def _is_number(default: object) -> bool:
    return isinstance(default, Real) and not isinstance(default, bool)


def _mismatch(value: Any, default: Any) -> str:
    """Return the required type of an argument with this default, or "" if it may fit.

    In the latter case, the class decides.
    """
    if isinstance(default, bool):
        return "" if isinstance(value, bool) else "true or false"
    if _is_number(default):
        return "a number" if isinstance(value, bool | str | bytes | Mapping | set) else ""
    if isinstance(default, tuple) and any(map(_is_number, default)):
        fits = (
            isinstance(value, tuple)
            and len(value) == len(default)
            and all(map(_is_number_or_none, value))
        )
        return "" if fits else f"{len(default)} numbers"
    return ""


def _is_number_or_none(value: object) -> bool:
    return value is None or isinstance(value, Tensor) or _is_number(value)


def _fit(value: Any, default: Any) -> Any:
    """Convert lists to tuples and whole floats to ints.

    JSON has no tuples, and users write 1e3 for a count.
    """
    if isinstance(default, tuple) and isinstance(value, list):
        return tuple(value)
    if (
        isinstance(default, int)
        and not isinstance(default, bool)
        and isinstance(value, float)
        and value.is_integer()
    ):
        return int(value)
    return value
