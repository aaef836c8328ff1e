"""Count the floating-point operations of a model's forward by module.

The operators that run are counted by torch's flop counter, which covers matrix products,
convolutions and attention, but no elementwise operators. The count of a module includes its
submodules.
"""

from __future__ import annotations

import time
from collections import defaultdict
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from ..base.quantities import format_count, format_seconds


@dataclass
class ModuleCost:
    """Counts of one module: operations and seconds of its forwards, and parameters."""

    name: str
    kind: str
    params: int
    flops: int = 0
    seconds: float = 0.0

    @property
    def depth(self) -> int:
        """Return the depth in the module tree; 0 for the model itself."""
        return self.name.count(".") + 1 if self.name else 0


@dataclass
class ForwardCost:
    """Count the forwards of a model between `start` and `stop`.

    Several forwards are summed. Backward is not counted.

    Attributes:
        model: The model.
        rows: Counts by module name in the order of named_modules(); "" is the model itself.
    """

    model: nn.Module
    rows: dict[str, ModuleCost] = field(default_factory=dict)
    _hooks: list[Any] = field(default_factory=list)
    # Operations and time at the start of each running forward, outermost first
    _open: defaultdict[str, list[tuple[int, float]]] = field(
        default_factory=lambda: defaultdict(list)
    )
    _counter: FlopCounterMode | None = None

    def start(self) -> None:
        """Install hooks on the modules and start counting; a second call has no effect."""
        if self._hooks:
            return
        for name, module in self.model.named_modules():
            params = sum(param.numel() for param in module.parameters())
            self.rows.setdefault(name, ModuleCost(name, type(module).__name__, params))
            self._hooks.append(
                module.register_forward_pre_hook(partial(self._on_forward_start, name))
            )
            self._hooks.append(
                module.register_forward_hook(partial(self._on_forward_end, name), always_call=True)
            )

    def stop(self) -> None:
        """Remove the hooks; the counts are kept. A forward that Ctrl-C ended is not counted."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        self._open.clear()
        if self._counter is not None:
            self._counter.__exit__(None, None, None)
            self._counter = None

    def reset(self) -> None:
        """Set all counts to zero."""
        for row in self.rows.values():
            row.flops = 0
            row.seconds = 0.0

    def _on_forward_start(self, name: str, module: nn.Module, inputs: Any) -> None:
        if not name and self._counter is None:
            self._counter = FlopCounterMode(display=False)
            self._counter.__enter__()
        # A module that is called outside the model's forward is not counted
        if self._counter is not None:
            self._open[name].append((self._counter.get_total_flops(), time.perf_counter()))

    def _on_forward_end(self, name: str, module: nn.Module, inputs: Any, output: Any) -> None:
        if self._counter is None or not self._open[name]:
            return
        flops, began = self._open[name].pop()
        if self._open[name]:  # The module has called itself
            return
        self.rows[name].seconds += time.perf_counter() - began
        self.rows[name].flops += self._counter.get_total_flops() - flops
        if not name:
            self._counter.__exit__(None, None, None)
            self._counter = None


def flops_table(
    cost: ForwardCost, step: int, recompute: float = 0.0, depth: int = -1, detailed: bool = True
) -> str:
    """Return the counts as text: the model, and its modules if `detailed`.

    Args:
        cost: Counts of the model's forwards.
        step: The step after which they were counted.
        recompute: Fraction of the forward that backward repeats.
        depth: Maximum depth of the printed modules; -1 for all.
        detailed: Whether to print each module.
    """
    total = cost.rows[""]
    # backward: once for the gradient of the inputs, once for that of the weights
    whole = total.flops * (3 + recompute)
    lines = [
        f"Flops profile after step {step}: matrix products, convolutions and attention, "
        "as executed",
        f"  parameters {format_count(total.params)}, forward {format_count(total.flops)}FLOPS in "
        f"{format_seconds(total.seconds)}, forward and backward about {format_count(whole)}FLOPS",
    ]
    for row in cost.rows.values() if detailed else ():
        if depth < 0 or row.depth <= depth:
            lines.append(_line(row, total))
    return "\n".join(lines)


def _line(row: ModuleCost, total: ModuleCost) -> str:
    share = f"{row.flops / total.flops:.1%}" if total.flops else "-"
    return (
        f"  {'  ' * row.depth}{row.name or '(model)'}: {row.kind}, {format_count(row.params)} "
        f"parameters, {format_count(row.flops)}FLOPS ({share}), {format_seconds(row.seconds)}"
    )
