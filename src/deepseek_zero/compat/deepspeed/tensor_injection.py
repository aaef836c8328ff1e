"""DeepSpeed's `AutoTP`, which replaces layers by split ones according to rules.

It is for programs that call it themselves. `initialize` splits a model with the planner instead
(parallel/plans.py).
"""

from __future__ import annotations

import re
from typing import Any

from torch import nn

from ...base.errors import NotBuiltError
from .autotp import AutoTPConfig, AutoTPMeta, PartitionType, TPLayerSpec
from .tensor_layers import (
    LinearAllreduce,
    LinearLayer,
    SubParamLinearAllreduce,
    SubParamLinearLayer,
)


class AutoTP:
    """Replace the layers of a model by split ones.

    Args:
        module: Model whose layers are replaced.
        all_reduce_linears: Ignored.
        prefix: Ignored.
        state_dict: Ignored.
        linear_layer_setting: Ignored.
        orig_layer_impl: Ignored.
        keep_module_on_host: Ignored.
        partition_config: Rules that decide which layers are split, and how.

    Raises:
        NotBuiltError: There is no `partition_config`.
    """

    def __init__(
        self,
        module: nn.Module,
        all_reduce_linears: Any = (),
        prefix: str = "",
        state_dict: Any = None,
        linear_layer_setting: Any = None,
        orig_layer_impl: Any = None,
        keep_module_on_host: bool = False,
        partition_config: AutoTPConfig | None = None,
    ) -> None:
        if partition_config is None:
            raise NotBuiltError(
                "AutoTP without a partition_config is not built.",
                "Its own reading of a model is for init_inference.",
                "pass partition_config=AutoTPConfig(...), or let initialize split the model.",
            )
        self.module = module
        self.partition_config = partition_config
        self.mp_size = 1
        self.mp_group = None
        self.tp_meta = AutoTPMeta.from_model_config(getattr(module, "config", None))

    def set_tensor_parallel_config(self, mp_size: int, mp_group: Any) -> None:
        """Set the ranks over which layers are split.

        Args:
            mp_size: Number of ranks.
            mp_group: Process group of these ranks.
        """
        self.mp_size = mp_size
        self.mp_group = mp_group

    def update_linear_policies(self) -> None:
        """Do nothing: the rules are read when a layer is replaced."""

    def _replace_module(
        self, r_module: nn.Module, prev_name: str = "", prev_class_name: str = ""
    ) -> nn.Module:
        """Replace the layers that a rule matches by split ones, in place.

        Returns the model.
        """
        for name, child in r_module.named_children():
            full_name = f"{prev_class_name}.{name}" if prev_class_name else name
            weight = getattr(child, "weight", None)
            if (
                isinstance(weight, nn.Parameter)
                and weight.dim() == 2
                and not isinstance(child, nn.Embedding)
            ):
                found = self._replace_with_config(child, full_name)
                if found is not None:
                    setattr(r_module, name, found)
            else:
                self._replace_module(child, name, full_name)
        return r_module

    def _replace_with_config(self, child: nn.Module, full_name: str) -> nn.Module | None:
        """Return the replacement of a layer; None if it stays."""
        spec = self.partition_config.find_matching_spec(
            f"{full_name}.weight", self._get_model_type()
        )
        if spec is None or spec.partition_type is PartitionType.SKIP or self._is_tied(child):
            return None
        return self._layer(child, spec, full_name)

    def _layer(self, child: nn.Module, spec: TPLayerSpec, full_name: str) -> nn.Module:
        shared: dict[str, Any] = {"name": full_name, "tp_meta": self.tp_meta}
        is_column = spec.partition_type is PartitionType.COLUMN
        if is_column:
            shared["gather_output"] = spec.gather_output
        if spec.shape is None:
            return (LinearLayer if is_column else LinearAllreduce)(child, self.mp_group, **shared)
        kind = SubParamLinearLayer if is_column else SubParamLinearAllreduce
        return kind(child, self.mp_group, spec.shape, spec.get_partition_dim(), **shared)

    def _is_tied(self, child: nn.Module) -> bool:
        """Return whether another module has the layer's weight, too.

        Splitting such a weight, for example a word embedding, would also split the other module's.
        """
        return any(
            param is child.weight
            for module in self.module.modules()
            if module is not child
            for param in module.parameters(recurse=False)
        )

    def _get_model_type(self) -> str | None:
        """Return the configuration's model type, or the lower-case name of the class."""
        told = getattr(getattr(self.module, "config", None), "model_type", None)
        return (
            str(told).lower()
            if told
            else re.sub(r"(model|forcausallm)$", "", type(self.module).__name__.lower())
        )
