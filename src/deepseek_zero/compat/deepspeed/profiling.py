"""DeepSpeed's flops profiler and timers, based on report/flops.py and timers.py."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ...api.utils import log_dist
from ...base.device import allocated_bytes, default_device, synchronize
from ...base.errors import UsageError
from ...base.quantities import format_bytes, format_count, format_seconds
from ...report.flops import ForwardCost, ModuleCost, flops_table
from ...report.timers import Timer as Watch
from ...report.timers import Timers


class FlopsProfiler:
    """Count the operations of a model's forward passes.

    Args:
        model: Model whose forward passes are counted.
        ds_engine: Engine whose ranks are printed.
        recompute_fwd_factor: Number of forward passes that backward repeats (1 with activation
            checkpointing), for the printed step.
        counted: Result of earlier forward passes.
    """

    def __init__(
        self,
        model: nn.Module,
        ds_engine: Any = None,
        recompute_fwd_factor: float = 0.0,
        counted: ForwardCost | None = None,
    ) -> None:
        self.model = model
        self.ds_engine = ds_engine
        self.recompute_fwd_factor = recompute_fwd_factor
        self.started = False
        self._cost = counted or ForwardCost(model)

    def start_profile(self, ignore_list: Sequence[type[nn.Module]] | None = None) -> None:
        """Start counting.

        Args:
            ignore_list: Ignored; modules without computation cost nothing.
        """
        self.started = True
        self._cost.reset()
        self._cost.start()

    def stop_profile(self) -> None:
        """Stop counting. The counts are kept until `end_profile`."""
        self._cost.stop()

    def reset_profile(self) -> None:
        """Set the counts of operations and the measured time to zero."""
        self._cost.reset()

    def end_profile(self) -> None:
        """Stop counting, and set the counts and the measured time to zero."""
        self._cost.stop()
        self._cost = ForwardCost(self.model)
        self.started = False

    def get_total_flops(self, as_string: bool = False) -> Any:
        """Return this rank's floating-point operations."""
        flops = self._total.flops
        return flops_to_string(flops) if as_string else flops

    def get_total_macs(self, as_string: bool = False) -> Any:
        """Return the number of multiply-accumulate operations, half of the flops."""
        macs = self._total.flops // 2
        return macs_to_string(macs) if as_string else macs

    def get_total_duration(self, as_string: bool = False) -> Any:
        """Return the time of the forward passes in seconds."""
        return duration_to_string(self._total.seconds) if as_string else self._total.seconds

    def get_total_params(self, as_string: bool = False) -> Any:
        """Return the number of elements of the whole model."""
        return params_to_string(self._total.params) if as_string else self._total.params

    @property
    def flops(self) -> int:
        """Return the floating-point operations; 0 before the first forward pass."""
        return self._cost.rows[""].flops if "" in self._cost.rows else 0

    @property
    def macs(self) -> int:
        """Return the multiply-accumulate operations."""
        return self.flops // 2

    @property
    def params(self) -> int:
        """Return the number of parameter elements of the whole model."""
        return sum(param.numel() for param in self.model.parameters())

    @property
    def _total(self) -> ModuleCost:
        if "" not in self._cost.rows:
            raise UsageError(
                "the flops profiler has not watched anything.", fix="call start_profile() first."
            )
        return self._cost.rows[""]

    def print_model_profile(
        self,
        profile_step: int = 1,
        module_depth: int = -1,
        top_modules: int = 1,
        detailed: bool = True,
        output_file: str | None = None,
    ) -> None:
        """Print the profile or write it to a file.

        Args:
            profile_step: Number of the step to print.
            module_depth: Deepest level of modules; -1 for all.
            top_modules: Ignored; all modules are listed in the model's order.
            detailed: Whether to print every module in addition to the totals.
            output_file: Path to write to; None for standard output.

        Raises:
            UsageError: Nothing was counted.
        """
        _ = self._total  # raises if nothing was counted
        shown = profile_step, self.recompute_fwd_factor, module_depth, detailed
        text = _ranks_of(self.ds_engine) + flops_table(self._cost, *shown) + "\n"
        if output_file:
            Path(output_file).write_text(text, encoding="utf-8")
        else:
            sys.stdout.write(text)


def _ranks_of(engine: Any) -> str:
    """Return lines about an engine's ranks, in DeepSpeed's form; "" without an engine."""
    if engine is None:
        return ""
    data = engine.dp_world_size if engine.dp_world_size is not None else engine.seq_dp_world_size
    sizes = {
        "world size": engine.world_size,
        "data parallel size": data,
        "model parallel size": engine.mp_world_size,
        "batch size per GPU": engine.train_micro_batch_size_per_gpu(),
    }
    return "".join(f"{name + ':':<60}  {size}\n" for name, size in sizes.items())


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
    """Profile one forward pass without gradients, in evaluation mode.

    At the end, each module gets the mode that it had before.

    Args:
        model: Model to profile.
        input_shape: Shape of an input of zeros, in the model's dtype.
        args: Positional arguments of the call, if there is no `input_shape`.
        kwargs: Keyword arguments of the call.
        print_profile: Whether to print the profile.
        detailed: Whether to print every module in addition to the totals.
        module_depth: Deepest level of modules to print; -1 for all.
        top_modules: Ignored.
        warm_up: Number of calls before the profiled one.
        as_string: Whether to return formatted values.
        output_file: Path to write the profile to; None for standard output.
        ignore_modules: Ignored.
        mode: "forward", or "generate" to call `model.generate`.

    Returns:
        Flops, multiply-accumulate operations, and parameters.

    Raises:
        UsageError: The model would be called without arguments.
    """
    if input_shape is not None:
        like = next(model.parameters(), torch.empty((), device="cpu"))
        args = [torch.zeros(input_shape, dtype=like.dtype, device=like.device)]
    if not args and not kwargs:
        raise UsageError(
            "args and/or kwargs must be specified if input_shape is None",
            fix="pass input_shape=(2, 3), or what the model is called with.",
        )
    profiler = FlopsProfiler(model)
    modes = [(module, module.training) for module in model.modules()]
    function: Any = model.generate if mode == "generate" else model
    call = partial(function, *args, **(kwargs or {}))
    model.eval()
    try:
        with torch.no_grad():
            for _ in range(warm_up):
                call()
            profiler.start_profile(ignore_modules)
            call()
    finally:
        profiler.stop_profile()
        for module, was_training in modes:
            module.training = was_training
    if print_profile:
        profiler.print_model_profile(warm_up, module_depth, top_modules, detailed, output_file)
    found = (
        profiler.get_total_flops(as_string),
        profiler.get_total_macs(as_string),
        profiler.get_total_params(as_string),
    )
    profiler.end_profile()
    return found


_MAGNITUDES = {"T": 1e12, "G": 1e9, "M": 1e6, "K": 1e3, "": 1.0, "m": 1e-3, "u": 1e-6}


def _in_units(number: float, units: str, precision: int, suffix: str) -> str:
    """Return a number in given units, for example "1.5 TFLOPS".

    As in DeepSpeed, the number is not divided if the unit is not known.
    """
    prefix = units.removesuffix(suffix)
    return f"{round(number / _MAGNITUDES.get(prefix, 1), precision):g} {prefix}{suffix}".strip()


def flops_to_string(flops: float, units: str | None = None, precision: int = 2) -> str:
    """Return a number of operations as text, for example 1.5e12 as "1.50TFLOPS".

    Args:
        flops: Number of floating-point operations.
        units: Unit of the result, such as "G"; None for the one that fits.
        precision: Number of decimals if `units` is given.

    Returns:
        The number with its unit.
    """
    if units is not None:
        return _in_units(flops, units, precision, "FLOPS")
    return f"{format_count(flops)}FLOPS"


def macs_to_string(macs: float, units: str | None = None, precision: int = 2) -> str:
    """Return a number of operations as text, for example 1.5e12 as "1.50TMACs".

    Args:
        macs: Number of multiply-accumulate operations.
        units: Unit of the result, such as "G"; None for the one that fits.
        precision: Number of decimals if `units` is given.

    Returns:
        The number with its unit.
    """
    if units is not None:
        return _in_units(macs, units, precision, "MACs")
    return f"{format_count(macs)}MACs"


def params_to_string(params_num: float, units: str | None = None, precision: int = 2) -> str:
    """Return a number of parameters as text, for example 1.5e9 as "1.50G".

    Args:
        params_num: Number of parameters.
        units: Unit of the result, such as "G"; None for the one that fits.
        precision: Number of decimals if `units` is given.

    Returns:
        The number with its unit.
    """
    if units is not None:
        return _in_units(params_num, units.replace("B", "G"), precision, "").replace("G", "B")
    return format_count(params_num)


def duration_to_string(duration: float, units: str | None = None, precision: int = 2) -> str:
    """Return a time in seconds as text, for example 0.0123 as "12.3 ms".

    Args:
        duration: Time in seconds.
        units: Unit of the result, such as "G"; None for the one that fits.
        precision: Number of decimals if `units` is given.

    Returns:
        The time with its unit.
    """
    if units is not None:
        return _in_units(duration, units, precision, "s")
    return format_seconds(duration)


class Timer:
    """One named timer of SynchronizedWallClockTimer.

    Args:
        name: Name of the timer.
        watch: The underlying timer.
    """

    def __init__(self, name: str, watch: Watch) -> None:
        self.name_ = name
        self._watch = watch
        self.started_ = False

    def start(self) -> None:
        """Start an interval, which `stop` ends."""
        self._watch.start()
        self.started_ = True

    def stop(self, reset: bool = False, record: bool = False) -> None:
        """Stop the timer.

        Args:
            reset: Whether to discard the time of earlier intervals.
            record: Ignored.
        """
        elapsed = self._watch.stop()
        if reset:
            self._watch.seconds = elapsed
            self._watch.calls = 1
        self.started_ = False

    def reset(self) -> None:
        """Discard the time of all intervals."""
        self._watch.reset()
        self.started_ = False

    def elapsed(self, reset: bool = True) -> float:
        """Return the time of all intervals since the last reset in milliseconds."""
        found = self._watch.seconds * 1000
        if reset:
            self._watch.reset()
        return found

    def mean(self) -> float:
        """Return the mean time of an interval in milliseconds."""
        return self._watch.mean * 1000


class SynchronizedWallClockTimer:
    """Create and log timers by name.

    On a GPU, a timer waits for the kernels that were queued before it.
    """

    def __init__(self) -> None:
        self.timers: dict[str, Timer] = {}
        self._wait = partial(synchronize, default_device())

    def __call__(self, name: str) -> Timer:
        return self.timers.setdefault(name, Timer(name, Watch(name, self._wait)))

    def get_timers(self) -> dict[str, Timer]:
        """Return the timers by name."""
        return self.timers

    def has_timer(self, name: str) -> bool:
        """Return whether a timer of this name was created."""
        return name in self.timers

    @staticmethod
    def memory_usage() -> str:
        """Return text that states the memory that this process has allocated."""
        return f"allocated {format_bytes(allocated_bytes(default_device()))}"

    def log(
        self,
        names: Sequence[str],
        normalizer: float = 1.0,
        reset: bool = True,
        memory_breakdown: bool = False,
        ranks: Sequence[int] | None = None,
    ) -> None:
        """Log the measured times of timers in milliseconds.

        Args:
            names: Names of the timers to log.
            normalizer: Number by which the times are divided, for example the number of steps.
            reset: Whether to set the timers to zero afterwards.
            memory_breakdown: Whether to also log the allocated memory.
            ranks: Ranks that log; None for rank 0.
        """
        spans = [
            f"{name}: {self.timers[name].elapsed(reset) / normalizer:.2f}"
            for name in names
            if name in self.timers
        ]
        memory = f" | {self.memory_usage()}" if memory_breakdown else ""
        log_dist(f"time (ms) | {' | '.join(spans)}{memory}", ranks=list(ranks or [0]))

    def get_mean(
        self, names: Sequence[str], normalizer: float = 1.0, reset: bool = True
    ) -> dict[str, float]:
        """Return the mean time of each timer in milliseconds.

        Args:
            names: Names of the timers.
            normalizer: Divisor of the times.
            reset: Whether to reset the timers.

        Returns:
            The mean time in milliseconds of each timer, by name.
        """
        found = {
            name: self.timers[name].mean() / normalizer for name in names if name in self.timers
        }
        for name in found if reset else ():
            self.timers[name].reset()
        return found


# DeepSpeed's names of an engine's timers -> this library's
_ENGINE_TIMERS = {
    "fwd": "forward",
    "bwd": "backward",
    "bwd_inner": "backward",
    "bwd_allreduce": "reduce",
    "step": "step",
}
_ENGINE_TIMERS |= {f"{name}_microstep": own for name, own in _ENGINE_TIMERS.items()}


class MeasuredTimers(SynchronizedWallClockTimer):
    """The timers of an engine, under DeepSpeed's names. A program may add its own.

    Args:
        measured: Timers of the engine; None if it measures nothing (`wall_clock_breakdown`).
    """

    def __init__(self, measured: Timers | None) -> None:
        super().__init__()
        if measured is not None:
            for name, own in _ENGINE_TIMERS.items():
                self.timers[name] = Timer(name, measured[own])


class NoopTimer:
    """A timer with the interface of SynchronizedWallClockTimer that measures nothing."""

    def __call__(self, name: str) -> NoopTimer:
        return self

    def start(self) -> None: ...

    def stop(self, reset: bool = False, record: bool = False) -> None: ...

    def reset(self) -> None: ...

    def elapsed(self, reset: bool = True) -> float:
        return 0.0

    def mean(self) -> float:
        return 0.0

    def has_timer(self, name: str) -> bool:
        return True

    def log(self, *args: Any, **kwargs: Any) -> None: ...


class ThroughputTimer:
    """Measure samples per second over global steps.

    Args:
        config: Configuration with an optional field `enabled`.
        batch_size: Samples per step.
        start_step: First step to measure.
        steps_per_output: Number of steps between logs; None for no logs.
        monitor_memory: Ignored.
        logging_fn: Function that logs a text.
    """

    def __init__(
        self,
        config: Any,
        batch_size: int | None,
        start_step: int = 2,
        steps_per_output: int | None = None,
        monitor_memory: bool = False,
        logging_fn: Callable[[str], None] | None = None,
    ) -> None:
        self.enabled = bool(getattr(config, "enabled", True))
        self.batch_size = max(1, batch_size or 1)
        self.start_step = start_step
        self.steps_per_output = steps_per_output
        self.logging = logging_fn or (lambda text: log_dist(text, ranks=[0]))
        self.epoch_count = self.micro_step_count = self.global_step_count = 0
        self.total_elapsed_time = self.step_elapsed_time = self.start_time = self.end_time = 0.0
        self.initialized = self.started = False
        self._wait = partial(synchronize, default_device())

    def update_epoch_count(self) -> None:
        """Count an epoch, and start counting its micro-steps from 0."""
        self.epoch_count += 1
        self.micro_step_count = 0

    def start(self) -> None:
        """Start a micro-step. Steps before `start_step` are not timed."""
        if self.enabled:
            self.initialized = self.started = True
            if self.global_step_count >= self.start_step:
                self._wait()
                self.start_time = time.perf_counter()

    def stop(self, global_step: bool = False, report_speed: bool = True) -> None:
        """End a micro-step.

        Args:
            global_step: Whether it ends a step.
            report_speed: Whether to log the throughput if it is due.
        """
        if not self.enabled or not self.started:
            return
        self.started = False
        self.micro_step_count += 1
        self.global_step_count += int(global_step)
        if not self.start_time:
            return
        self._wait()
        self.end_time = time.perf_counter()
        elapsed = self.end_time - self.start_time
        self.total_elapsed_time += elapsed
        self.step_elapsed_time += elapsed
        if not global_step:
            return
        every = self.steps_per_output
        if report_speed and every and self.global_step_count % every == 0:
            self.logging(
                f"step {self.global_step_count}: {self.avg_samples_per_sec():.3g} samples/s"
            )
        self.step_elapsed_time = 0.0

    def avg_samples_per_sec(self) -> float:
        """Return samples per second; -inf before the first measured step, as in DeepSpeed."""
        steps = self.global_step_count - self.start_step
        if steps > 0 and self.total_elapsed_time:
            return self.batch_size * steps / self.total_elapsed_time
        return float("-inf")
