"""The arguments that a program passes to an API, checked."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader, IterableDataset

from .. import parallel
from ..base.errors import UsageError, shown
from ..base.given import refuse
from ..base.world import size
from .mesh_statements import MeshStatement


@dataclass
class Request:
    """The arguments that a user passed to an API, checked; None for each that was not passed.

    Attributes:
        model: The model to train.
        optimizer: An optimizer, or a callable that makes one from parameters.
        parameters: The parameters or parameter groups to train.
        lr_scheduler: A schedule, or a callable that makes one from an optimizer.
        training_data: A dataset, for which the engine builds a loader.
        collate_fn: Combines a list of samples to a batch.
        mesh: A value from which `mesh_of` makes the device mesh.
        mesh_statements: Requirements on the mesh that follow from other arguments.
        counts_model_ranks: `train_batch_size` may count ranks that receive the same batch.
        leaf_modules: The full names of modules that are not divided into units.
        drops_idle_schedule: Whether to drop a schedule without an optimizer with a warning, instead
            of raising.
        call: The name of the API function that was called, for error messages.
        sequence: The settings of sequence parallelism.
        shuffles: Whether to shuffle `training_data` in each epoch.
        mpu: An object that has the sizes of the groups of ranks, as in Megatron-LM.
    """

    model: nn.Module
    optimizer: Optimizer | Callable[[list[Any]], Optimizer] | None = None
    parameters: Sequence[Any] | None = None
    lr_scheduler: Any = None
    training_data: Any = None
    collate_fn: Callable[[list[Any]], Any] | None = None
    mesh: Any = None  # a value that `mesh_of` can read
    mesh_statements: tuple[MeshStatement, ...] = ()  # statements of other arguments about the mesh
    # The caller's train_batch_size may count ranks that see the same batch
    counts_model_ranks: bool = False
    leaf_modules: tuple[str, ...] = ()  # full names of modules that are not divided into units
    # A schedule without an optimizer is dropped with a warning, not an error
    drops_idle_schedule: bool = False
    call: str = "initialize"  # the name of the function that was called
    sequence: parallel.SequenceSettings | None = None  # the caller's settings of ranks along "sp"
    shuffles: bool = True  # shuffle training_data in each epoch
    mpu: Any = None  # an object with the sizes of groups

    def __post_init__(self) -> None:
        """Raise an error if no engine can be built from the arguments."""
        if not isinstance(self.model, nn.Module):
            raise UsageError(
                f"a model of type {type(self.model).__name__} cannot be wrapped.",
                "",
                "pass a torch.nn.Module.",
            )
        if isinstance(self.model, nn.parallel.DistributedDataParallel) and size() > 1:
            raise UsageError(
                "a model in DistributedDataParallel cannot be wrapped.",
                "Both would reduce the same gradients.",
                "pass the model itself: ddp.module.",
            )
        data = self.training_data
        checks = [
            (
                "optimizer",
                isinstance(self.optimizer, Optimizer) or callable(self.optimizer),
                "a torch.optim.Optimizer, or a callable that returns one",
                'set a name in the configuration: "optimizer": {"type": "AdamW", '
                '"params": {"lr": 0.001}}.',
            ),
            (
                "lr_scheduler",
                callable(self.lr_scheduler) or hasattr(self.lr_scheduler, "step"),
                "a schedule with step(), or a callable that returns one for an optimizer",
                "pass one of torch.optim.lr_scheduler, or remove it.",
            ),
            (
                "training_data",
                not isinstance(data, DataLoader),
                "a dataset, for which the engine creates a loader of this rank's share",
                "pass its dataset, or use the loader and remove this argument.",
            ),
            (
                "training_data",
                isinstance(data, IterableDataset)
                or (hasattr(data, "__getitem__") and hasattr(data, "__len__")),
                "a dataset, with __getitem__ and __len__, or an IterableDataset",
                "pass a torch.utils.data.Dataset.",
            ),
            (
                "collate_fn",
                callable(self.collate_fn),
                "a function of a list of samples",
                "remove it.",
            ),
        ]
        for name, fits, wanted, fix in checks:
            value = getattr(self, name)
            if value is not None and not fits:
                raise refuse(self.call, name, value, wanted, fix)


def parameters_of(call: str, name: str, given: Any) -> list[Any]:
    """Return parameters, (name, parameter) pairs or groups of them as a checked list.

    Args:
        call: The name of the call that received the argument, for errors.
        name: The name of the argument, for errors.
        given: The value of the argument.

    Returns:
        The elements of the argument as a list.

    Raises:
        UsageError: The argument is not an iterable of parameters, pairs or groups, or it has both
            groups and others.
    """
    wanted = "an iterable of parameters, or of groups of them"
    if isinstance(given, Mapping):
        raise refuse(call, name, given, wanted, "pass a list: [{...}].")
    if isinstance(given, Tensor | str | bytes) or not isinstance(given, Iterable):
        raise refuse(call, name, given, wanted, "pass model.parameters().")
    found = list[Any]()
    for entry in given:
        if not isinstance(entry, Mapping):
            members = [entry]
        elif "params" in entry:
            members = entry["params"]
            members = (
                list(members)
                if isinstance(members, Iterable) and not isinstance(members, Tensor)
                else [members]
            )
            entry = {**entry, "params": members}
        else:
            raise refuse(
                call,
                name,
                entry,
                wanted,
                "a group is a dict with 'params' and options: add 'params'.",
            )
        for member in members:
            is_pair = isinstance(member, tuple) and len(member) == 2
            param = member[1] if is_pair else member
            if not isinstance(param, Tensor):
                raise refuse(
                    call,
                    name,
                    given,
                    f"{wanted}, and {shown(member)} is not a parameter",
                    "pass parameters.",
                )
        found.append(entry)
    groups = [entry for entry in found if isinstance(entry, Mapping)]
    if groups and len(groups) < len(found):
        raise UsageError(
            f"{call}({name}=...) got groups and parameters in one list.",
            "A parameter outside a group has no options of its own.",
            "put it into a group: {'params': [...]}.",
        )
    return found
