"""DeepSpeed's flops profiler in its words; what is counted is report/flops.py's.  Reached through the drop-in."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..base.errors import UsageError
from ..base.quantities import format_count, format_seconds
from ..report.flops import FlopsSettings, ForwardCost, ModuleCost, flops_table


class FlopsProfiler:
    """Counts the forwards of a model between start_profile and stop_profile.

    recompute_fwd_factor: forwards that backward repeats (1 with activation checkpointing), for the printed step.
    """

    def __init__(self, model: nn.Module, ds_engine: Any = None, recompute_fwd_factor: float = 0.0) -> None:
        self.model, self.ds_engine, self.recompute_fwd_factor = model, ds_engine, recompute_fwd_factor
        self.started = False
        self._cost = ForwardCost(model)

    def start_profile(self, ignore_list: Sequence[type[nn.Module]] | None = None) -> None:
        """Watch the model from now on.  ignore_list: accepted; modules cost nothing where they compute nothing."""
        self.started = True
        self._cost.reset()
        self._cost.watch()

    def stop_profile(self) -> None:
        """Stop watching; the counts stay until end_profile."""
        self._cost.stop()

    def reset_profile(self) -> None:
        """Forget the counts."""
        self._cost.reset()

    def end_profile(self) -> None:
        """Stop, and forget everything."""
        self._cost.stop()
        self._cost, self.started = ForwardCost(self.model), False

    def get_total_flops(self, as_string: bool = False) -> Any:
        """Floating-point operations of the watched forwards on this rank."""
        return flops_to_string(self._total.flops) if as_string else self._total.flops

    def get_total_macs(self, as_string: bool = False) -> Any:
        """Multiplications with their additions: half the operations."""
        macs = self._total.flops // 2
        return macs_to_string(macs) if as_string else macs

    def get_total_duration(self, as_string: bool = False) -> Any:
        """Seconds of the watched forwards."""
        return duration_to_string(self._total.seconds) if as_string else self._total.seconds

    def get_total_params(self, as_string: bool = False) -> Any:
        """Parameters of the model, whole."""
        return params_to_string(self._total.params) if as_string else self._total.params

    @property
    def _total(self) -> ModuleCost:
        if "" not in self._cost.rows:
            raise UsageError("the flops profiler has not watched anything.", fix="call start_profile() first.")
        return self._cost.rows[""]

    def print_model_profile(
        self,
        profile_step: int = 1,
        module_depth: int = -1,
        top_modules: int = 1,
        detailed: bool = True,
        output_file: str | None = None,
    ) -> None:
        """Print the totals and, if `detailed`, each module down to `module_depth` (-1: all); or write them to a file.

        top_modules: accepted; every module is listed, in the model's order.
        """
        _ = self._total  # or the error that nothing was watched
        settings = FlopsSettings(profile_step, self.recompute_fwd_factor, module_depth, detailed)
        text = flops_table(self._cost, settings) + "\n"
        Path(output_file).write_text(text, encoding="utf-8") if output_file else sys.stdout.write(text)


def get_model_profile(
    model: nn.Module,
    input_shape: tuple[int, ...] | None = None,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    print_profile: bool = True,
    detailed: bool = True,
    module_depth: int = -1,
    top_modules: int = 1,
    warm_up: int = 1,
    as_string: bool = True,
    output_file: str | None = None,
    ignore_modules: Sequence[type[nn.Module]] | None = None,
    mode: str = "forward",
) -> tuple[Any, Any, Any]:
    """(flops, macs, parameters) of one forward (mode "generate": of model.generate) without gradients.

    input_shape: the model is given zeros of this shape, in its own dtype; else args and kwargs are passed.
    """
    if input_shape is not None:
        like = next(model.parameters(), torch.empty(()))
        args = [torch.zeros(input_shape, dtype=like.dtype, device=like.device)]
    if not args and not kwargs:
        raise UsageError(
            "args and/or kwargs must be specified if input_shape is None",
            fix="pass input_shape=(2, 3), or what the model is called with.",
        )
    profiler, was_training = FlopsProfiler(model), model.training
    call = model.generate if mode == "generate" else model
    model.eval()
    with torch.no_grad():
        for _ in range(warm_up):
            call(*args, **(kwargs or {}))  # type: ignore[operator]
        profiler.start_profile(ignore_modules)
        call(*args, **(kwargs or {}))  # type: ignore[operator]
        profiler.stop_profile()
    model.train(was_training)
    if print_profile:
        profiler.print_model_profile(warm_up, module_depth, top_modules, detailed, output_file)
    found = (
        profiler.get_total_flops(as_string),
        profiler.get_total_macs(as_string),
        profiler.get_total_params(as_string),
    )
    profiler.end_profile()
    return found


def flops_to_string(flops: float, units: str | None = None, precision: int = 2) -> str:
    """1.5e12 -> "1.50TFLOPS"."""
    return f"{format_count(flops)}FLOPS"


def macs_to_string(macs: float, units: str | None = None, precision: int = 2) -> str:
    """1.5e12 -> "1.50TMACs"."""
    return f"{format_count(macs)}MACs"


def params_to_string(params_num: float, units: str | None = None, precision: int = 2) -> str:
    """1.5e9 -> "1.50G"."""
    return format_count(params_num)


def duration_to_string(duration: float, units: str | None = None, precision: int = 2) -> str:
    """0.0123 -> "12.3 ms"."""
    return format_seconds(duration)
