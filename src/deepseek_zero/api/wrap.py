"""`DeepSeekZeRO3` and `ZeroOptimizer`: the API without an engine.

The model is wrapped in place and used as before, either itself or through the returned object:
`model(...)`, `loss.backward()`, `optimizer.step()`.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, Unpack

import torch
from torch import nn
from torch.optim import Optimizer

from ..base.device import ScalesItself, default_device, share_hooks
from ..base.errors import UsageError, shown
from ..base.given import refuse
from ..base.log import log_once
from ..base.mesh import current_mesh
from ..base.world import ALONE, size
from ..comm.net.store import launchers_store
from ..config import resolve
from ..config.keywords import ZeroKeywords
from ..config.load import load
from ..engine.assemble import assemble
from ..engine.exporting import Exports
from ..engine.mesh_statements import choose_mesh, statements_of
from ..engine.module_wrapper import StandsForModule
from ..engine.optimizer import adopting, client_states, forget_others
from ..engine.parts import Parts
from ..engine.request import Request, parameters_of
from ..engine.start import example_of, facts_of, prepare_process
from ..extensions.policies import policies_of
from ..optim.shard_set import ShardSet
from ..optim.sharded import ShardedOptimizer
from ..optimizers.registry import granularity_of, resolve_optimizer
from ..sharding.param_group import ParamGroup
from ..sharding.runtime import Runtime
from ..sharding.sharded_parameter import owner_of
from .leaves import leaf_module_names

# Keys that only an engine of `initialize` reads. They are reported in the log, not ignored
# silently.
ENGINE_ONLY = (
    *(
        "scheduler",
        "steps_per_print",
        "wall_clock_breakdown",
        "memory_breakdown",
        "dump_state",
        "log_level",
        "records",
    ),
    *(
        "tensorboard",
        "csv_monitor",
        "wandb",
        "comet",
        "flops_profiler",
        "checkpoint",
        "dataloader_drop_last",
    ),
    "zero_optimization.stage3_gather_16bit_weights_on_model_save",
)
_ZERO = "zero_optimization"


def configuration_of(keywords: Mapping[str, Any]) -> dict[str, Any]:
    """Return the configuration for the keyword arguments of `DeepSeekZeRO3`.

    The keywords are the top-level keys of the configuration, `stage` (3 by default), and the name
    and learning rate of the optimizer.

    Raises:
        UsageError: A keyword cannot be used, or two of them contradict each other.
    """
    config = dict(keywords)
    section = config.get(_ZERO, {})
    if not isinstance(section, Mapping):
        if type(section) is not int or section not in range(4):
            return config  # `load` raises the error
        fix = f'write {{"stage": {section}}}, or stage={section} without it.'
        raise UsageError(
            f"DeepSeekZeRO3: {_ZERO} = {shown(section)}", f"{_ZERO} is a section of keys.", fix
        )
    stage = config.pop("stage", None)
    if stage is not None and stage != section.get("stage", stage):
        raise UsageError(
            f"DeepSeekZeRO3 was given stage={shown(stage)} and {_ZERO}={{'stage': "
            f"{shown(section['stage'])}}}.",
            "They name one thing, and differ.",
            "keep one of the two.",
        )
    config[_ZERO] = {"stage": 3 if stage is None else stage, **section}
    optimizer = config.get("optimizer")
    rate = config.pop("lr", None)
    if isinstance(optimizer, str):
        arguments = {} if rate is None else {"lr": rate}
        resolve_optimizer(config.pop("optimizer"), arguments)
    elif optimizer is not None and (
        not isinstance(optimizer, Mapping) or {"type", "params"} & optimizer.keys()
    ):
        wanted = "the name of the optimizer that ZeroOptimizer will be"
        raise refuse(
            _CALL, "optimizer", optimizer, wanted, "give type and arguments to ZeroOptimizer."
        )
    if rate is not None and (
        isinstance(rate, bool) or not isinstance(rate, int | float | torch.Tensor)
    ):
        raise refuse(
            _CALL, "lr", rate, "the learning rate that ZeroOptimizer will have", "pass a number."
        )
    return config


def _asks(stated: Any) -> bool:
    """Return whether a key is set, or any key of a section; False and empty do not count."""
    return any(map(_asks, stated.values())) if isinstance(stated, Mapping) else bool(stated)


_CALL = "DeepSeekZeRO3"


class DeepSeekZeRO3(Exports, StandsForModule):
    """Shard a model in place over the ranks with ZeRO.

    The ZeRO stage may be 0, 1, 2 or 3, and is 3 by default. A call of this object returns the
    output of the model. With pipeline stages, a call in training mode also runs the backward.
    Parameters, buffers and submodules have the names that they have in the model, without a prefix.
    After construction, a program may also call the model itself, and does not have to keep a
    reference to this object.

    Args:
        model: The module to shard.
        **zero_config: Top-level keys of the configuration. `stage` is a short form of
            ``zero_optimization={"stage": ...}``. Rank 0 logs a warning for keys that have no effect
            without an engine. `optimizer` and `lr` do not create an optimizer, but rank 0 logs a
            warning if they differ from those of the program's `ZeroOptimizer`.

    Raises:
        ConfigError: A key is unknown or has a value that cannot be used.
        NotBuiltError: A key requires a feature that is not implemented.
        PeerError: Another rank failed or did not connect.
        UsageError: An argument cannot be used.

    Note:
        Collective: every rank must call it with the same model and arguments.

    Example:
        >>> model = DeepSeekZeRO3(model, stage=3)
        >>> optimizer = ZeroOptimizer(model.parameters(), lr=1e-3, optimizer_type="adamw")
        >>> model(batch).backward()
        >>> optimizer.step()
        >>> optimizer.zero_grad()
    """

    def __init__(self, model: nn.Module, **zero_config: Unpack[ZeroKeywords]) -> None:
        super().__init__()
        request = Request(model, call=_CALL)
        keywords: dict[str, Any] = dict(zero_config)
        # A `Mesh` or `DeviceMesh` object is not part of the configuration.
        given = keywords.pop("mesh") if not isinstance(keywords.get("mesh", {}), Mapping) else None
        raw = load(configuration_of(keywords))
        prepare_process(raw)
        mesh = choose_mesh(
            statements_of(raw, given), current_mesh(default_device(), store_of=launchers_store)
        )
        if idle := [key for key in ENGINE_ONLY if _asks(raw.get(key))]:
            told = f"{', '.join(idle)} {'changes' if len(idle) == 1 else 'change'} nothing"
            log_once(
                f"DeepSeekZeRO3 makes no engine, and {told} without one: initialize() does.",
                logging.WARNING,
            )
        self.config = resolve(raw, facts_of(request, mesh))
        example = partial(example_of, request)
        parts = assemble(
            self.config, model, mesh, None, None, leaf_module_names(model), example, None
        )
        parts.told = {name: keywords[name] for name in ("optimizer", "lr") if name in keywords}
        if isinstance(parts.told.get("optimizer"), Mapping):
            del parts.told["optimizer"]  # a section without the optimizer's name
        self.module = model
        self.runtime = parts.runtime
        self._loop = parts.loop
        # The hook does nothing. The model keeps it and the parts in it alive, so the model still
        # trains after the caller drops this object.
        model.register_forward_pre_hook(partial(_keep, parts))
        _parts[parts.runtime] = weakref.ref(parts)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model's forward on this rank's micro-batch, and return its output.

        With pipeline stages, a forward in training mode also runs the backward.
        """
        return self.module(*args, **kwargs) if self._loop is None else self._loop(args, kwargs)

    def explain(self) -> str:
        """Return a text with the order in which units are gathered, used, released and reduced."""
        return str(self.runtime.schedule)

    # -- without this override nn.Module would add a "module." prefix

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        """Iterate over the parameters under the model's names, without a prefix."""
        return self.module.named_parameters(*args, **kwargs)

    def named_buffers(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, torch.Tensor]]:
        """Iterate over the buffers under the model's names, without a prefix."""
        return self.module.named_buffers(*args, **kwargs)

    def named_modules(self, *args: Any, **kwargs: Any) -> Any:
        """Iterate over the modules under the model's names, without a prefix."""
        return self.module.named_modules(*args, **kwargs)

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Return the full state dict under the model's names, on every rank.

        Note:
            Collective: every rank must call it.
        """
        return self.module.state_dict(*args, **kwargs)

    def load_state_dict(self, state_dict: Mapping[str, Any], *args: Any, **kwargs: Any) -> Any:
        """Load a full state dict under the model's names; each rank keeps only its shards.

        Args:
            state_dict: Full tensors by name, the same on every rank.
            *args: Other arguments of `nn.Module.load_state_dict`.
            **kwargs: Other arguments of `nn.Module.load_state_dict`.

        Returns:
            The missing and unexpected names, as from `nn.Module.load_state_dict`.

        Note:
            Collective: every rank must call it.
        """
        return self.module.load_state_dict(state_dict, *args, **kwargs)


# The parts of each wrapped model, for optimizers that are created later. Both are weak references,
# because the model keeps the parts alive.
_parts: weakref.WeakKeyDictionary[Runtime, weakref.ref[Parts]] = weakref.WeakKeyDictionary()


def _keep(parts: Parts, module: nn.Module, args: Any) -> None:
    pass


class ZeroOptimizer(ScalesItself, Optimizer):
    """An optimizer for the parameters of a model that `DeepSeekZeRO3` shards.

    The optimizer may be created before or after the model is wrapped. Each rank updates its own
    shards. Gradients are kept until `zero_grad` is called, as with the optimizers of torch. The
    methods `step`, `add_param_group`, `zero_grad`, `state_dict` and `load_state_dict` raise
    UsageError if `initialize` has wrapped the model, because its engine has an optimizer. The first
    call of one of them after the model was wrapped is collective: every rank must make it.

    Args:
        params: Parameters or parameter groups to update.
        lr: Learning rate.
        optimizer_type: Name of an optimizer, such as "adam", "adamw", "lion" or "muon". As in
            DeepSpeed, the weight decay of "adam" is decoupled as in AdamW; with
            ``adam_w_mode=False`` it is that of `torch.optim.Adam`.
        **options: Further arguments of that optimizer, such as `betas`.

    Raises:
        ConfigError: The optimizer is unknown or an argument is invalid.
        NotBuiltError: The optimizer or the value of an argument is not implemented.
        UsageError: `params` contains something other than parameters or parameter groups.
    """

    def __init__(
        self, params: Iterable[Any], lr: float = 1e-3, optimizer_type: str = "adam", **options: Any
    ) -> None:
        groups = parameters_of("ZeroOptimizer", "params", params)
        self.client = resolve_optimizer(optimizer_type, {"lr": lr, **options}).build(groups)
        share_hooks(self, self.client)
        self.asked = {"optimizer": str(optimizer_type), "lr": lr}
        self.sharded: ShardedOptimizer | None = None

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        """Return the parameter groups.

        If a model has been wrapped, the first call of a method such as `step` replaces the
        parameters in the groups by this rank's shards.
        """
        return self.client.param_groups

    @property
    def state(self) -> Any:  # type: ignore[override]
        """Return the optimizer state of each tensor in `param_groups`.

        If a model has been wrapped, moments that are stored in other memory or in fewer bits are
        first fetched and decoded, so the call may wait for transfers.
        """
        return self.client.state if self.sharded is None else self.sharded.state

    @property
    def defaults(self) -> dict[str, Any]:  # type: ignore[override]
        """Return the default options of parameter groups."""
        return self.client.defaults

    def _attach(self) -> ShardedOptimizer | Optimizer:
        """Return the sharded optimizer, or the plain one while the model is not wrapped."""
        if self.sharded is None:
            owners = (
                owner_of(each) for group in self.client.param_groups for each in group["params"]
            )
            owner = next((each for each in owners if isinstance(each, ParamGroup)), None)
            runtime = owner.runtime() if owner is not None else None
            if runtime is None:
                return self.client
            reference = _parts.get(runtime)
            parts = reference() if reference is not None else None
            if parts is None:
                raise UsageError(
                    "the model belongs to an engine made by initialize(), which has its own "
                    "optimizer.",
                    "Two optimizers would update the same slices.",
                    "use engine.step(), or wrap the model with DeepSeekZeRO3.",
                )
            # the optimizer may cover the whole model, not only this stage
            if parts.loop is not None:
                forget_others(runtime.model, self.client, None)
            for name, told in parts.told.items():
                if str(told).lower() != str(self.asked[name]).lower():
                    own = f"the optimizer has {name}={self.asked[name]}"
                    log_once(
                        f"DeepSeekZeRO3 was told {name}={told}, {own}, which holds.",
                        logging.WARNING,
                    )
            groups = list(self.client.param_groups)
            settings = replace(
                parts.step_settings,
                keep_grads=True,
                can_defer=False,
                granularity=tuple(granularity_of(self.client, group) for group in groups),
            )
            states = client_states(self.client, runtime.plan.mesh.coordinates["tp"])
            shards = ShardSet(
                runtime,
                groups,
                adopting(self.client),
                settings,
                parts.scaler,
                initial_states=states,
                policies=policies_of(parts.policies, settings, runtime, type(self.client)),
            )
            self.sharded = ShardedOptimizer(shards)
        return self.sharded

    def step(  # type: ignore[override]
        self, closure: Callable[[], float] | None = None
    ) -> float | None:
        """Update the weights from the accumulated gradients.

        If a model has been wrapped and a gradient of some rank is not finite, the step changes no
        weight and no state, unless `check_grad_overflow` is false.

        Args:
            closure: A function that computes the loss before the update, as in torch. It must be
                None if a model has been wrapped.

        Returns:
            The loss that `closure` returned; None if `closure` is None.

        Raises:
            UsageError: There are several ranks and no wrapped model has these parameters, a closure
                was passed although a model has been wrapped, or `initialize` has wrapped the model.
            PeerError: Another rank failed.

        Note:
            Collective if a model has been wrapped: every rank must call it.
        """
        optimizer = self._attach()
        if optimizer is self.client and size() > 1:
            params = [param for group in self.param_groups for param in group["params"]]
            if trained := [param for param in params if param.requires_grad]:
                raise UsageError(
                    f"ZeroOptimizer.step() on one of {size()} ranks has {len(trained)} parameters "
                    f"that no wrapped model holds, the first of shape {tuple(trained[0].shape)}.",
                    "Each rank would train a model of its own: nothing reduces the gradients or "
                    "keeps the weights equal.",
                    "call DeepSeekZeRO3(model) before the first step; to train one model per "
                    f"process on purpose set {ALONE}=1, or use an optimizer of torch.",
                )
        loss: float | None = optimizer.step(closure)
        return loss

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a parameter group to the optimizer.

        Args:
            param_group: The parameters and the options of the group. If a model has been wrapped,
                the parameters must be those of that model.

        Raises:
            UsageError: A model has been wrapped, and a parameter is already in a group or not in
                the model, or a feature of the configuration does not allow new groups. It is also
                raised if `initialize` has wrapped the model.
            ValueError: No model has been wrapped, and a parameter is already in a group.

        Note:
            Collective if a model has been wrapped: every rank must call it.
        """
        self._attach().add_param_group(param_group)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Discard the gradients of all parameters.

        Args:
            set_to_none: Whether `grad` becomes None instead of a tensor of zeros. The argument has
                no effect if a model has been wrapped.

        Raises:
            UsageError: `initialize` has wrapped the model.
        """
        self._attach().zero_grad(set_to_none)

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the optimizer.

        If a model has been wrapped, the result contains the state of this rank's shards, and can
        be loaded only with the same rank, world size and stage.

        Raises:
            UsageError: `initialize` has wrapped the model.
        """
        return self._attach().state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the optimizer state that `state_dict` returned.

        Args:
            state_dict: The result of `state_dict`.

        Raises:
            UsageError: A model has been wrapped, and the state belongs to another optimizer, model,
                rank, world size or stage. It is also raised if `initialize` has wrapped the model,
                and if the state is that of a wrapped model and no model has been wrapped.
            ValueError: No model has been wrapped, and the state has other parameter groups.
        """
        optimizer = self._attach()
        if optimizer is self.client and "stretches" in state_dict:
            raise UsageError(
                "ZeroOptimizer.load_state_dict() got the state of a wrapped model, but this "
                "model is not wrapped.",
                "The state contains the slices of one rank, not the states of whole parameters.",
                "call DeepSeekZeRO3(model) before load_state_dict().",
            )
        optimizer.load_state_dict(state_dict)

    def __repr__(self) -> str:
        return f"ZeroOptimizer({self.client!r})"
