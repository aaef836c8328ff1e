"""Muon for matrices, AdamW for all other parameters.

Muon orthogonalizes the momentum by Newton-Schulz iterations. The source is K. Jordan et al., "Muon:
an optimizer for hidden layers in neural networks" (2024). The Gram form iterates on X X^T instead
of X. Muon must receive whole matrices (granularity "tensor"), but the groups of AdamW may be
slices. The key `use_muon` of a group selects one of the two, and `Muon.parameter_groups(model)`
creates the groups.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterable, Mapping
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.adamw import adamw

from deepseek_zero.base.errors import ConfigError

from .common import Closure, adam_state, evaluated

# The quintic p(s) = a s + b s^3 + c s^5 of the source is steepest at 0, so that 5 steps bring every
# relevant singular value into about [0.7, 1.2]. It is not meant to converge to 1.
_A = 3.4445
_B = -4.7750
_C = 2.0315
_NORM_EPS = 1e-7
_TOO_MANY = 100  # Steps; five are enough, and torch has the same limit
_MUON_LR = 2e-2
_ADAM_LR = 3e-4

# Half precision if the hardware multiplies it fast; a CPU without such units is slower with it
# than with fp32. The Gram form squares the spectrum, so it needs fp16's three extra bits more than
# bf16's range.
_WORK_DTYPE = {"standard": torch.bfloat16, "gram": torch.float16}
# X is rebuilt after two Gram iterations, because products of nearly cancelling polynomials lose the
# small singular values
_GRAM_RESTART = 2
# Multiplications for n x m, n <= m, 5 steps: standard 10 n^2 m + 5 n^3, Gram 4 n^2 m + 14 n^3. Gram
# needs 12 % less at m = 2 n; below, it is not worth the squared spectrum.
_GRAM_PAYS_FROM = 2

Group = dict[str, Any]  # a parameter group
_NOT_HIDDEN = frozenset({"lm_head", "head", "classifier", "score", "wte", "wpe"})


@dataclasses.dataclass(frozen=True)
class MuonSettings:
    """The arguments of `Muon`, with DeepSpeed's names.

    Attributes:
        lr: The learning rate of both kinds of groups; None for their defaults.
        momentum: The decay rate of Muon's momentum.
        weight_decay: The coefficient of the decoupled decay.
        muon_lr: The learning rate of Muon's groups; None for `lr`.
        adam_lr: The learning rate of AdamW's groups; None for `lr`.
        ns_method: "gram" or "standard".
        ns_steps: Number of Newton-Schulz iterations.
        nesterov: Whether to use Nesterov momentum.
        betas: The decay rates of AdamW's moments.
        eps: Added to the root of AdamW's second moment.

    Raises:
        ConfigError: A value is out of range.
    """

    lr: float | None = None
    momentum: float = 0.95
    weight_decay: float = 0.0
    muon_lr: float | None = None
    adam_lr: float | None = None
    ns_method: str = "gram"
    ns_steps: int = 5
    nesterov: bool = True
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-10

    def __post_init__(self) -> None:
        if self.ns_method not in _WORK_DTYPE:
            raise ConfigError(
                f"Muon does not know ns_method {self.ns_method!r}.",
                fix="give one of " + ", ".join(_WORK_DTYPE) + ".",
            )
        rates = [rate for rate in (self.lr, self.muon_lr, self.adam_lr) if rate is not None]
        # NaN fails every comparison
        sound = (
            all(rate >= 0 for rate in rates)
            and self.weight_decay >= 0
            and self.eps >= 0
            and 0 <= self.momentum < 1
            and len(self.betas) == 2
            and all(0 <= beta < 1 for beta in self.betas)
        )
        if not sound or not isinstance(self.ns_steps, int) or not 1 <= self.ns_steps < _TOO_MANY:
            raise ConfigError(
                f"Muon cannot use {self}.",
                fix=(
                    "give learning rates, weight_decay and eps >= 0, momentum and two betas in "
                    "[0, 1) and ns_steps from 1 to 99."
                ),
            )

    def lr_of(self, use_muon: bool) -> float:
        """Return the learning rate of a parameter group that specifies none."""
        own, fallback = (self.muon_lr, _MUON_LR) if use_muon else (self.adam_lr, _ADAM_LR)
        return next(rate for rate in (own, self.lr, fallback) if rate is not None)


class Muon(Optimizer):
    """Muon for the hidden matrices of a model, and AdamW for all other parameters.

    Muon orthogonalizes the momentum of a matrix. For a matrix p with gradient g, the momentum is
    ``m = momentum * m + (1 - momentum) * g``. The direction u is ``momentum * m + (1 - momentum) *
    g`` with `nesterov`, otherwise m. The update is ``p = p * (1 - lr * weight_decay) - lr *
    sqrt(max(1, rows / columns)) * NS(u)``, where NS orthogonalizes u by Newton-Schulz iterations.
    The state of a matrix is `momentum_buffer`. The state of a parameter with AdamW consists of
    `step`, `exp_avg` and `exp_avg_sq`.

    A tensor with three dimensions is treated as a stack of matrices (experts). A tensor with four
    or more dimensions, as in a convolution, is treated as a matrix whose rows are its first
    dimension. The key `use_muon` of a parameter group selects Muon or AdamW. In a group without the
    key, parameters with two or more dimensions use Muon, including embeddings and heads. Use
    `parameter_groups` to create groups with the key.

    Args:
        params: Parameters or parameter groups.
        lr: The learning rate of all groups that specify none. None means 0.02 for Muon and 0.0003
            for AdamW. The settings `muon_lr` and `adam_lr` take precedence.
        weight_decay: The coefficient of the decoupled decay.
        momentum: The decay rate of Muon's momentum.
        ns_method: "gram" or "standard".
        settings: The other fields of `MuonSettings`, as keyword arguments.

    Raises:
        ConfigError: A value is out of range, or a group with ``use_muon=True`` has a parameter with
            fewer than two dimensions.
        TypeError: `MuonSettings` has no field of the name of a keyword argument.
    """

    granularity: ClassVar[Literal["tensor"]] = "tensor"
    Settings: ClassVar[type[MuonSettings]] = MuonSettings

    def __init__(
        self,
        params: Any,
        lr: float | None = None,
        weight_decay: float = 0.0,
        momentum: float = 0.95,
        ns_method: str = "gram",
        **settings: Any,
    ) -> None:
        self._settings = MuonSettings(
            lr=lr, weight_decay=weight_decay, momentum=momentum, ns_method=ns_method, **settings
        )
        names = ("momentum", "weight_decay", "ns_method", "ns_steps", "nesterov", "betas", "eps")
        shared = {name: getattr(self._settings, name) for name in names}
        super().__init__(
            params,
            {**shared, "betas": tuple(self._settings.betas), "lr": self._settings.lr_of(True)},
        )

    @staticmethod
    def group_granularity(group: Mapping[str, Any]) -> Literal["element", "tensor"]:
        """Return where the state of a parameter group may be cut between ranks.

        Args:
            group: The parameter group. Its key `use_muon` is read.

        Returns:
            "element" (between any two elements) if `use_muon` is False, otherwise "tensor" (only
            between tensors).
        """
        return "element" if group.get("use_muon") is False else "tensor"

    @staticmethod
    def parameter_groups(model: nn.Module) -> list[Group]:
        """Return a model's trainable parameters as groups for Muon and AdamW.

        Args:
            model: The model. Muon updates its hidden matrices. AdamW updates embeddings, heads and
                vectors, as `divide_groups` recognizes them.

        Returns:
            Two parameter groups, Muon's first, each with the key `use_muon`. A group without
            parameters is omitted.
        """
        return Muon.divide_groups(
            model, [{"params": [p for p in model.parameters() if p.requires_grad]}]
        )

    @staticmethod
    def divide_groups(model: nn.Module, groups: Iterable[Mapping[str, Any]]) -> list[Group]:
        """Divide groups without the key `use_muon` into groups for Muon and AdamW.

        Both new groups have the settings of the divided group. AdamW gets vectors, embeddings and
        heads. Embeddings are recognized by their module or name, and heads by their name. If a
        matrix has an attribute `use_muon`, the attribute selects the group instead.

        Args:
            model: The model to which the parameters belong.
            groups: The parameter groups. Groups with the key `use_muon` are not divided. The
                `params` of other groups may be a tensor, or an iterable of tensors or of (name,
                tensor) pairs.

        Returns:
            The new parameter groups, each with the key `use_muon`. A divided group with parameters
            of one kind only becomes one new group. The given groups are not changed.
        """
        tables = {
            id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding | nn.EmbeddingBag)
        }
        outer = tables | {
            id(parameter) for name, parameter in model.named_parameters() if _is_outer(name)
        }
        divided: list[Group] = []
        for group in groups:
            if group.get("use_muon") is not None:
                divided.append(dict(group))
                continue
            members = _members(group)
            for kind in (True, False):
                chosen = [m for m in members if _is_hidden(_tensor(m), outer) is kind]
                if chosen:
                    divided.append({**group, "params": chosen, "use_muon": kind})
        return divided

    def add_param_group(self, param_group: Group) -> None:
        """Add a parameter group.

        A group without the key `use_muon` is divided into two. Muon updates its parameters with two
        or more dimensions, and AdamW updates the others. Embeddings and heads are not recognized.

        Args:
            param_group: The parameters and the options of the group. Options that it does not have
                get the values of the optimizer's settings.

        Raises:
            ConfigError: A group with ``use_muon=True`` has a parameter with fewer than two
                dimensions.
            ValueError: The optimizer already has one of the parameters.
        """
        members = _members(param_group)
        if param_group.get("use_muon") is None:
            kinds = {
                kind: [m for m in members if (_tensor(m).ndim >= 2) is kind]
                for kind in (True, False)
            }
            kinds = {kind: chosen for kind, chosen in kinds.items() if chosen} or {True: []}
        else:
            kinds = {bool(param_group["use_muon"]): members}
        for use_muon, chosen in kinds.items():
            vectors = [tuple(_tensor(m).shape) for m in chosen if use_muon and _tensor(m).ndim < 2]
            if vectors:
                raise ConfigError(
                    f"Muon orthogonalises matrices; this group holds shapes {vectors[:4]}.",
                    fix=(
                        "put them into a group with use_muon: False; Muon.parameter_groups(model) "
                        "makes the groups."
                    ),
                )
            lr = param_group.get("lr", self._settings.lr_of(use_muon))
            super().add_param_group(
                {**param_group, "params": chosen, "use_muon": use_muon, "lr": lr}
            )

    @torch.no_grad()
    def step(self, closure: Closure = None) -> float | None:  # type: ignore[override]
        """Update every parameter that has a gradient.

        The gradients are not changed.

        Args:
            closure: A function that computes the gradients and returns the loss. None uses the
                current gradients.

        Returns:
            The loss that `closure` returned; None if `closure` is None.
        """
        loss = evaluated(closure)
        for group in self.param_groups:
            used = [parameter for parameter in group["params"] if parameter.grad is not None]
            if not group["use_muon"]:
                self._adamw(used, group)
                continue
            for parameter in used:
                self._muon(parameter, group)
        return loss

    def _muon(self, parameter: Tensor, group: Group) -> None:
        state = self.state[parameter]
        grad = parameter.grad
        assert grad is not None
        if not state:
            state["momentum_buffer"] = torch.zeros_like(
                parameter, memory_format=torch.preserve_format
            )
        momentum = state["momentum_buffer"].lerp_(grad, 1 - group["momentum"])
        update = torch.lerp(grad, momentum, group["momentum"]) if group["nesterov"] else momentum
        matrices = as_matrices(update)
        direction = orthogonalize(matrices, group["ns_method"], group["ns_steps"])
        lr = float(group["lr"])
        parameter.mul_(1 - lr * group["weight_decay"])
        parameter.add_(direction.reshape(parameter.shape), alpha=-lr * factor_of(matrices))

    def _adamw(self, parameters: list[Tensor], group: Group) -> None:
        if not parameters:
            return
        states = [self.state[parameter] for parameter in parameters]
        for state, parameter in zip(states, parameters, strict=True):
            # The fused kernel requires `step` on the parameter's device
            adam_state(state, parameter, parameter.device)
        adamw(
            parameters,
            [parameter.grad for parameter in parameters if parameter.grad is not None],
            [state["exp_avg"] for state in states],
            [state["exp_avg_sq"] for state in states],
            [],
            [state["step"] for state in states],
            fused=parameters[0].device.type in ("cpu", "cuda"),
            amsgrad=False,
            beta1=group["betas"][0],
            beta2=group["betas"][1],
            lr=group["lr"],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            maximize=False,
        )


def orthogonalize(matrices: Tensor, method: str = "gram", steps: int = 5) -> Tensor:
    """Return matrices with the same singular vectors and with singular values near 1.

    A zero matrix stays zero.

    Args:
        matrices: Shape ``(..., rows, columns)``.
        method: "standard" iterates on the matrices X; "gram" iterates on the smaller X X^T if the
            matrices are far from square.
        steps: Number of Newton-Schulz iterations.

    Returns:
        A tensor of the same shape and dtype.
    """
    shape = matrices.shape
    wide = matrices.shape[-2] <= matrices.shape[-1]
    if matrices.numel() == 0:
        return torch.zeros_like(matrices)
    x = matrices.reshape(-1, *shape[-2:])
    x = x if wide else x.mT
    # The norm bounds the largest singular value, so the iteration starts inside its range, even in
    # half precision
    x = x / (torch.linalg.vector_norm(x, dim=(-2, -1), keepdim=True) + _NORM_EPS)
    gram = method == "gram" and x.shape[-1] >= _GRAM_PAYS_FROM * x.shape[-2]
    if x.device.type != "cpu":
        x = x.to(_WORK_DTYPE["gram" if gram else "standard"])
    x = _newton_schulz_gram(x, steps) if gram else _newton_schulz(x, steps)
    return (x if wide else x.mT).reshape(shape).to(matrices.dtype)


def _newton_schulz(x: Tensor, steps: int) -> Tensor:
    """Iterate X <- a X + (b A + c A A) X with A = X X^T.

    `x` has shape (batch, n, m) with n <= m. Buffers are reused in all steps.
    """
    x = x.contiguous()
    batch, n, _ = x.shape
    gram = x.new_empty(batch, n, n)
    poly = x.new_empty(batch, n, n)
    spare = torch.empty_like(x)
    for _ in range(steps):
        torch.bmm(x, x.mT, out=gram)
        torch.baddbmm(gram, gram, gram, beta=_B, alpha=_C, out=poly)
        torch.baddbmm(x, poly, x, beta=_A, out=spare)
        x, spare = spare, x
    return x


def _newton_schulz_gram(x: Tensor, steps: int) -> Tensor:
    """Evaluate the same polynomial with n x n matrices.

    X_k = Q_k X_0, and R_k = X_k X_k^T can be computed without X. Q and R are polynomials in X_0
    X_0^T, so they commute. With Z = a I + b R + c R R, R <- Z R Z and Q <- Z Q.
    """
    before = min(_GRAM_RESTART, steps)
    for count in filter(None, (before, steps - before)):
        gram = torch.bmm(x, x.mT)
        gathered: Tensor | None = None
        for remaining in range(count, 0, -1):
            factor = torch.baddbmm(gram, gram, gram, beta=_B, alpha=_C)
            factor.diagonal(dim1=-2, dim2=-1).add_(_A)
            gathered = factor if gathered is None else torch.bmm(factor, gathered)
            if remaining > 1:
                gram = torch.bmm(factor, torch.bmm(gram, factor))
        assert gathered is not None
        x = torch.bmm(gathered, x)
    return x


def as_matrices(update: Tensor) -> Tensor:
    """View a tensor of more than three dimensions as a matrix.

    Args:
        update: The tensor.

    Returns:
        A view of shape ``(first dimension, product of all others)``. Tensors with at most three
        dimensions are returned unchanged.
    """
    return update.flatten(1) if update.ndim > 3 else update


def factor_of(matrices: Tensor) -> float:
    """Return the factor ``sqrt(max(1, rows / columns))`` by which an update is multiplied."""
    rows, columns = matrices.shape[-2:]
    return float(max(1.0, rows / max(columns, 1)) ** 0.5)


def _is_hidden(tensor: Tensor, outer: Collection[int]) -> bool:
    """Return the tensor's attribute `use_muon`, or whether it is a hidden matrix.

    `outer` has the ids of embeddings and heads.
    """
    stated = getattr(tensor, "use_muon", None)
    return tensor.ndim >= 2 and (id(tensor) not in outer if stated is None else bool(stated))


def _is_outer(name: str) -> bool:
    """Return whether a name is that of an embedding or a head."""
    return any("embed" in part or part in _NOT_HIDDEN for part in name.lower().split("."))


def _members(group: Mapping[str, Any]) -> list[Any]:
    """Return the members of a group, whose `params` may be a tensor or an iterable."""
    given = group["params"]
    return [given] if isinstance(given, Tensor) else list(given)


def _tensor(member: Any) -> Tensor:
    """Return the tensor of a group's member, which may be a (name, tensor) pair."""
    tensor: Tensor = member[1] if isinstance(member, tuple) else member
    return tensor
