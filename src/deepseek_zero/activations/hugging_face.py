"""Activation checkpointing for models of transformers.

The layers of such a model call a function that `gradient_checkpointing_enable` sets, before or
after the model is wrapped. Every training forward therefore replaces torch's checkpoint by this
library's, which offloads inputs and applies the policy. Any other function is left unchanged.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from ..base.errors import NotBuiltError
from .recompute import checkpoint

_FUNCTION = "_gradient_checkpointing_func"


def route_checkpoints(model: nn.Module) -> None:
    """Make a transformers model use this library's checkpoint function instead of torch's.

    A forward pre-hook of `model` replaces torch's function at the start of every forward in
    training mode with gradients enabled. Gradient checkpointing may therefore be enabled before or
    after this call. Any other checkpoint function is not replaced. A model that contains no
    transformers model is not changed.

    Args:
        model: A transformers model, or a module that contains one.
    """
    if any(hasattr(type(module), "gradient_checkpointing_enable") for module in model.modules()):
        model.register_forward_pre_hook(_route)


def recompute_layers(model: nn.Module) -> None:
    """Enable gradient checkpointing for the layers of a transformers model.

    The call has no effect if the model contains no transformers model, or if gradient checkpointing
    is already enabled.

    Args:
        model: A transformers model, or a module that contains one. If it contains several, only the
            first one in the order of `model.modules()` is used.

    Raises:
        NotBuiltError: The transformers model does not support gradient checkpointing.
    """
    own = [
        module
        for module in model.modules()
        if hasattr(type(module), "gradient_checkpointing_enable")
    ]
    if not own:
        return
    if not getattr(own[0], "supports_gradient_checkpointing", False):
        raise NotBuiltError(
            f"activation_checkpointing.policy: the layers of {type(own[0]).__name__} do not "
            "recompute themselves.",
            "The model says so (supports_gradient_checkpointing).",
            "call deepseek_zero.checkpointing.checkpoint in its forward, or leave the policy out.",
        )
    whole: Any = own[0]
    if not any(
        getattr(module, "gradient_checkpointing", False) is True for module in whole.modules()
    ):
        enable = (
            getattr(whole, "activation_checkpointing_enable", None)
            or whole.gradient_checkpointing_enable
        )
        enable()


def _route(module: nn.Module, args: Any) -> None:
    if not (module.training and torch.is_grad_enabled()):
        return
    for each in module.modules():
        given = each.__dict__.get(_FUNCTION)
        if given is torch_checkpoint:
            each.__dict__[_FUNCTION] = checkpoint
        elif isinstance(given, partial) and given.func is torch_checkpoint:
            each.__dict__[_FUNCTION] = partial(checkpoint, *given.args, **given.keywords)
