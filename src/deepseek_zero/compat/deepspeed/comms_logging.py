"""DeepSpeed's CommsLogger, which logs the calls of `deepspeed.comm`.

It records the calls that a program makes itself. An engine's collectives are not calls of
torch.distributed. They are part of `engine.explain()` and of the records.
"""

from __future__ import annotations

import inspect
import math
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Any

import torch
import torch.distributed as dist

from ...api.utils import log_dist
from ...base.device import default_device, synchronize
from . import comm
from .runtime_utils import get_tensor_bytes

_GATHERS = ("all_gather", "all_gather_into_tensor")

# operation -> function of the number of ranks that returns (algorithm factor, bus factor): bytes
# that the algorithm moves, and bytes that a link carries, per byte of the message
FACTORS: dict[str, Callable[[int], tuple[float, float]]] = {
    # The message is the input: all of a reduce-scatter, one rank's part of an all-gather.
    **dict.fromkeys(
        ("all_to_all_single", "all_to_all", "reduce_scatter", "reduce_scatter_tensor"),
        lambda n: (1, (n - 1) / n),
    ),
    **dict.fromkeys(_GATHERS, lambda n: (n, n - 1)),
    **dict.fromkeys(
        ("all_reduce", "all_reduce_coalesced", "inference_all_reduce"),
        lambda n: (2, 2 * (n - 1) / n),
    ),
}


def trim_mean(data: Sequence[float], trim_percent: float) -> float:
    """Return the mean of the data without its smallest and largest values.

    Args:
        data: Values to average.
        trim_percent: Fraction of the values, from 0 to 1, to leave out at each end.

    Returns:
        The mean of the remaining values.
    """
    assert 0.0 <= trim_percent <= 1.0
    if not data:
        return 0.0
    cut = int(len(data) * trim_percent)
    kept = sorted(data)[cut : len(data) - cut] or sorted(data)
    return sum(kept) / len(kept)


def convert_size(size_bytes: float) -> str:
    """Return a number of bytes as text in the largest binary unit that fits, such as "1.5 KB"."""
    if size_bytes == 0:
        return "0B"
    power = int(math.log(size_bytes, 1024))
    unit = "B KB MB GB TB PB EB ZB YB".split()[power]
    return f"{round(size_bytes / 1024**power, 2)} {unit}"


def get_caller_func(frame: int = 3) -> str:
    """Return the name of the function `frame` calls up the stack."""
    return inspect.stack()[frame].function


def calc_bw_log(comm_op: str, size: float, duration: float) -> tuple[float, float]:
    """Return the algorithm and bus bandwidth of an operation in Gbit/s.

    Args:
        comm_op: Name of the operation.
        size: Message size in bytes.
        duration: Time in milliseconds.

    Returns:
        The algorithm bandwidth (message size divided by time) and the bus bandwidth, both in
        Gbit/s.
    """
    ranks = comm.get_world_size()
    moved, carried = FACTORS[comm_op](ranks) if comm_op in FACTORS else (1, 1)
    gbps = size * 8 / 1e6 / duration if duration else 0.0
    return gbps * moved, gbps * carried


Records = dict[str, dict[int, list[Any]]]  # by name and message size
Summary = dict[int, dict[str, Any]]  # by message size


class CommsLogger:
    """Record the calls of `deepspeed.comm` with their sizes and times.

    `comms_dict` maps name and message size in bytes to [count, latencies in ms, algorithm
    bandwidths in Gbit/s, bus bandwidths in Gbit/s].
    """

    def __init__(self) -> None:
        self.comms_dict: Records = {}
        self.enabled = False
        self.verbose = False
        self.debug = False
        self.prof_all = True
        self.prof_ops: list[str] = []

    def configure(self, comms_config: Any) -> None:
        """Apply the settings of a DeepSpeedCommsConfig."""
        self.enabled = comms_config.comms_logger_enabled
        for name in ("verbose", "debug", "prof_ops", "prof_all") if self.enabled else ():
            setattr(self, name, getattr(comms_config.comms_logger, name))

    def start_profiling_comms(self) -> None:
        """Log the calls of all operations, not only of those in `prof_ops`."""
        self.prof_all = True

    def stop_profiling_comms(self) -> None:
        """Log only the calls of operations in `prof_ops`."""
        self.prof_all = False

    def start_profiling_op(self, op_name_list: Sequence[str]) -> None:
        """Add operations to `prof_ops`."""
        self.prof_ops = sorted({*self.prof_ops, *op_name_list})

    def stop_profiling_op(self, op_name_list: Sequence[str]) -> None:
        """Remove operations from `prof_ops`."""
        self.prof_ops = [name for name in self.prof_ops if name not in op_name_list]

    def wants(self, name: str, asked: bool = False) -> bool:
        """Return whether a call should be logged.

        Args:
            name: Name of the operation.
            asked: Whether the caller requested the log of this call explicitly.
        """
        return self.enabled and (asked or self.prof_all or name in self.prof_ops)

    def timed(
        self, call: Callable[..., Any], raw_name: str, log_name: str, args: Any, kwargs: Any
    ) -> Any:
        """Call a function and log it.

        The device is synchronized before and after, so that the time is that of the call.

        Args:
            call: The function to call and time.
            raw_name: Name of the operation in FACTORS.
            log_name: Name in the log.
            args: Positional arguments of the call. The largest tensor, for an all-gather the
                smallest one, is the message.
            kwargs: Keyword arguments of the call.

        Returns:
            The return value of `call`.
        """
        synchronize(default_device())
        began = time.perf_counter()
        found = call(*args, **kwargs)
        synchronize(default_device())
        sizes = [size for each in (*args, *kwargs.values()) if (size := get_tensor_bytes(each))]
        size = min(sizes, default=0) if raw_name in _GATHERS else max(sizes, default=0)
        self.append(raw_name, log_name, (time.perf_counter() - began) * 1e3, size)
        return found

    def append(self, raw_name: str, record_name: str, latency: float, msg_size: int) -> None:
        """Add one call to the log.

        Args:
            raw_name: Name of the operation in FACTORS.
            record_name: Name in the log.
            latency: Time in milliseconds.
            msg_size: Message size in bytes.
        """
        rates = calc_bw_log(raw_name, msg_size, latency)
        entry = self.comms_dict.setdefault(record_name, {}).setdefault(msg_size, [0, [], [], []])
        entry[0] += 1
        for values, value in zip(entry[1:], (latency, *rates), strict=True):
            values.append(value)
        if self.verbose:
            size = convert_size(msg_size)
            log_dist(
                f"comm op: {record_name} | time (ms): {latency:.2f} | msg size: {size} | "
                f"{rates[0]:.2f} Gbps",
                [0],
            )

    def get_raw_data(self) -> Records:
        """Return a copy of the log: the records of each operation by message size."""
        return self.comms_dict.copy()

    def has_data(self) -> bool:
        """Return whether any call was logged."""
        return bool(self.comms_dict)

    def reset_data(self) -> None:
        """Delete the records of all logged calls."""
        self.comms_dict.clear()

    def get_operation_names(self) -> list[str]:
        """Return the names of the operations that were logged."""
        return list(self.comms_dict)

    def get_total_operations(self) -> int:
        """Return the number of logged calls."""
        return sum(entry[0] for sizes in self.comms_dict.values() for entry in sizes.values())

    def get_operation_summary(self, operation_name: str) -> Summary | None:
        """Return counts, times and bandwidths of one name by message size.

        Returns:
            A dictionary with times in milliseconds and bandwidths in Gbit/s; None if the name was
            not logged.
        """
        if operation_name not in self.comms_dict:
            return None
        return {
            size: {
                "count": count,
                "total_latency_ms": sum(latencies),
                "avg_latency_ms": trim_mean(latencies, 0.1),
                "tput_avg_gbps": trim_mean(algorithm, 0.1),
                "busbw_avg_gbps": trim_mean(links, 0.1),
                "msg_size_bytes": size,
                "msg_size_str": convert_size(size),
            }
            for size, (count, latencies, algorithm, links) in sorted(
                self.comms_dict[operation_name].items()
            )
        }

    def log_all(
        self, print_log: bool = True, show_straggler: bool = False, return_dict: bool = False
    ) -> dict[str, Any] | None:
        """Print the number, sizes, times and bandwidths of the logged calls.

        Args:
            print_log: Whether to print.
            show_straggler: Whether to include how long this rank was waiting for slower ranks. The
                call is then collective, and all ranks must have logged the same calls.
            return_dict: Whether to return the summary.

        Returns:
            The summary if `return_dict` is true, else None.
        """
        summary: dict[str, Any] = {
            name: self.get_operation_summary(name) for name in self.comms_dict
        }
        stragglers = None
        if show_straggler:
            stragglers = {name: self._stragglers(name) for name in self.comms_dict}
        if print_log:
            self._print("Comm. Op", summary)
            self._print("Straggler effect", stragglers or {})
        about = {
            "world_size": comm.get_world_size(),
            "rank": comm.get_rank(),
            "timestamp": datetime.now().isoformat(),
        }
        found = {"summary": summary, "straggler_analysis": stragglers, "metadata": about}
        return found if return_dict else None

    def _print(self, title: str, table: Mapping[str, Summary]) -> None:
        for name, sizes in table.items():
            for row in sizes.values():
                numbers = [
                    f"{key} {value:.2f}" for key, value in row.items() if isinstance(value, float)
                ]
                shown = "  ".join([row["msg_size_str"], f"count {row['count']}", *numbers])
                sys.stdout.write(f"{title}: {name}  {shown}\n")

    def _stragglers(self, name: str) -> Summary:
        found = {}
        for size, (count, latencies, *_) in sorted(self.comms_dict[name].items()):
            own = torch.tensor(latencies, dtype=torch.float32, device=default_device())
            least = own.clone()
            if dist.is_initialized():
                dist.all_reduce(least, op=dist.ReduceOp.MIN)
            waited = own - least
            found[size] = {
                "count": count,
                "total_comm_lat_ms": float(least.sum()),
                "total_straggler_ms": float(waited.sum()),
                "avg_comm_lat_ms": trim_mean(least.tolist(), 0.1),
                "avg_straggler_ms": trim_mean(waited.tolist(), 0.1),
                "msg_size_bytes": size,
                "msg_size_str": convert_size(size),
            }
        return found
