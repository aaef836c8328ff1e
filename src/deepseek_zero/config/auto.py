"""Resolve a `RawConfig` with the facts of a run to a `Config`.

Every "auto" is replaced and the reason recorded. The rules are those of Hugging Face if it has one
(bucket sizes from the hidden size), else the defaults of DeepSpeed and torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ..base.log import log_once
from .batch import BATCH_KEYS, Batch, BatchRequest, solve
from .fields import rows
from .problems import AutoDecision, Problem, Problems, Values, put
from .raw_config import RawConfig
from .schema import Config

_ZERO = "zero_optimization."
# Defaults of torch (for Lion and LAMB, of their papers). "" is every other optimizer.
OPTIMIZER_DEFAULTS: dict[str, Values] = {
    "": {"lr": 1e-3, "eps": 1e-8, "weight_decay": 0.0, "betas": [0.9, 0.999], "momentum": 0.0},
    "adamw": {"weight_decay": 1e-2},
    "adagrad": {"lr": 1e-2, "eps": 1e-10},
    "lion": {"lr": 1e-4, "betas": [0.9, 0.99]},
    "lamb": {"eps": 1e-6},
    "muon": {"momentum": 0.95, "weight_decay": 0.1},
}
SCHEDULER_DEFAULTS = {"warmup_min_lr": 0.0, "warmup_num_steps": 1000}


@dataclass(frozen=True)
class Facts:
    """The properties of a run from which `resolve` computes the values of "auto" keys.

    Attributes:
        world_size: Number of ranks.
        data_size: Number of ranks that read different batches; None means all ranks.
        stages: Number of pipeline stages of the mesh.
        tensor_size: Number of tensor-parallel ranks of the mesh.
        counts_model_ranks: Whether `train_batch_size` may have been computed as if all ranks of one
            model replica were data-parallel ranks.
        device_type: Type of the ranks' device.
        has_bf16: Whether the device has native bf16.
        launched: Whether a launcher started the ranks. If a configured number of data-parallel
            ranks differs from the actual number, `resolve` raises an error. If `launched` is false
            and `world_size` is 1, it uses the actual number instead.
        hidden_size: The model's hidden size, or None if unknown.
        loader_micro_batch: The batch size of the program's data loader in samples; None without a
            loader.
        client_optimizer: Default options of the optimizer that the program passes (lr, betas, ...);
            empty if it passes none.
    """

    world_size: int = 1
    data_size: int | None = None
    stages: int = 1
    tensor_size: int = 1
    counts_model_ranks: bool = False
    device_type: str = "cpu"
    has_bf16: bool = True
    launched: bool = True
    hidden_size: int | None = None
    loader_micro_batch: int | None = None
    client_optimizer: Mapping[str, Any] = field(default_factory=dict)


def resolve(raw: RawConfig, facts: Facts) -> Config:
    """Return the configuration of this run, with "auto" replaced by values.

    `Config.decisions` records each chosen value with its reason. Rank 0 logs a line if none of the
    three batch keys is set. In a process without a launcher, it also logs a line if a configured
    number of data-parallel ranks is replaced. The function does not communicate.

    Args:
        raw: The configuration that `load` returned, in which keys may be "auto".
        facts: The properties of the run, such as the number of ranks and the type of the device.

    Returns:
        The configuration, which is equal on all ranks that pass equal arguments.

    Raises:
        ConfigError: The configuration does not fit the run; the message lists every problem.
    """
    resolver = _Resolver(raw, facts)
    for rule in _RULES:
        rule(resolver)
    config = resolver.finish()
    for line in resolver.news:
        log_once(line)
    return config


class _Resolver:
    """The configuration so far, the keys that are still "auto", and the record."""

    def __init__(self, raw: RawConfig, facts: Facts) -> None:
        self.facts = facts
        self.problems = Problems(raw.source)
        self.config = raw.config
        self.asked = raw.autos
        self.open = set(raw.autos)
        self.decisions: list[AutoDecision] = []
        self.news: list[str] = []

    def get(self, key: str) -> Any:
        """Return the value of a dotted key that the user set or `auto` chose, or None."""
        return self.config.stated(key)

    def decide(self, key: str, value: Any, why: str) -> None:
        """Set a key and record the reason.

        Args:
            key: The dotted key.
            value: The value.
            why: The reason.
        """
        values: Values = {}
        put(values, key, value)
        self.config = self.config.changed(values)
        self.open.discard(key)
        self.decisions.append(AutoDecision(key, value, why, key in self.asked))

    def silent(self, key: str) -> bool:
        """Return whether a key is not set, or is "auto"."""
        return self.config.stated(key, _UNSTATED) is _UNSTATED

    def finish(self) -> Config:
        """Record the defaults of the remaining "auto" keys, and return the configuration."""
        table = {row.path: row.default for row in rows(Config)}
        for key in sorted(self.open):
            is_ours = key in table
            why = "the default of the key" if is_ours else "not set: its owner's default is used"
            self.decisions.append(AutoDecision(key, table.get(key), why, True))
        self.problems.raise_if_any()
        return self.config.with_decisions(tuple(self.decisions))


_UNSTATED = object()


def _precision(run: _Resolver) -> None:
    """Decide precision, fp16.enabled, bf16.enabled, and the keys that depend on them."""
    has_bf16 = run.facts.has_bf16
    hardware = f"the {run.facts.device_type} {'has' if has_bf16 else 'lacks'} bf16"
    native = "bf16" if has_bf16 else "fp16"
    wanted = run.config.precision
    if wanted == "auto":
        if not (run.config.bf16.enabled or run.config.fp16.enabled):
            run.decide(f"{native}.enabled", True, f'precision is "auto": {hardware}')
    elif wanted in ("bf16", "fp16"):
        run.decide(f"{wanted}.enabled", True, f"precision is {wanted}")
    _auto_sections(run, hardware)
    if run.silent("torch_autocast.dtype"):
        run.decide("torch_autocast.dtype", native, hardware)
    if run.silent("fp16.auto_cast"):
        run.decide("fp16.auto_cast", run.config.auto_cast, "follows auto_cast")


def _auto_sections(run: _Resolver, hardware: str) -> None:
    taken = next((key for key in _SWITCHES if run.get(key)), None)
    is_free = taken is None and run.config.precision != "fp32"
    if "bf16.enabled" in run.open:
        reason = hardware if taken is None else f"{taken} is on"
        run.decide("bf16.enabled", is_free and run.facts.has_bf16, reason)
    if "fp16.enabled" in run.open:
        on = is_free and run.facts.device_type == "cuda" and not run.facts.has_bf16
        why = "bf16.enabled is on" if run.config.bf16.enabled else hardware
        run.decide("fp16.enabled", on, why)


_SWITCHES = ("bf16.enabled", "fp16.enabled", "torch_autocast.enabled")


def _ranks(run: _Resolver) -> None:
    """Decide the degrees of parallelism.

    If the number of data-parallel ranks is set, it must be the actual one. A process without a
    launcher logs a warning instead.
    """
    facts = run.facts
    data_size = _data_size(facts)
    world = facts.world_size
    for key in ("dp_degree", "data_parallel_size"):
        stated = run.get(key)
        if stated is None or stated == data_size:
            continue
        ranks = stated * world // data_size
        if facts.launched or world > 1:
            run.problems.add(
                key,
                f"the run has {data_size} data-parallel {'rank' if data_size == 1 else 'ranks'}",
                f"start {ranks} ranks (deepseek-zero run --nproc {ranks} ...), or remove {key}",
                stated,
            )
            continue
        run.news.append(
            f"{key} is {stated} and this is one process without a launcher: running as one rank; "
            f"for {stated} use `deepseek-zero run --nproc {ranks} script.py`"
        )
        run.decide(key, data_size, "one process without a launcher")
    if run.silent("dp_degree"):
        why = (
            "every rank of the run"
            if data_size == world
            else "the world size divided by the other axes"
        )
        run.decide("dp_degree", data_size, why)
    for key, size in (("pp_degree", facts.stages), ("mp_degree", facts.tensor_size)):
        if size > 1 and run.silent(key):
            run.decide(key, size, "the mesh of the run")


def _data_size(facts: Facts) -> int:
    return facts.world_size if facts.data_size is None else facts.data_size


def _sample_ranks(run: _Resolver) -> int:
    """Return the number of ranks that receive different samples."""
    return _data_size(run.facts) * (run.facts.stages if run.config.pipeline.rows == "own" else 1)


def _batch(run: _Resolver) -> None:
    """Determine the batch sizes; log one line if the configuration has no batch key."""
    train_key, micro_key, steps_key = BATCH_KEYS
    if run.facts.counts_model_ranks:
        _recount(run)
    request = BatchRequest(
        _sample_ranks(run),
        train=run.get(train_key),
        micro=run.get(micro_key),
        accumulation=run.get(steps_key),
        loader=run.facts.loader_micro_batch,
        micro_auto=micro_key in run.asked,
    )
    answer = solve(request)
    if isinstance(answer, Problem):
        run.problems.found.append(answer)
        return
    if all(run.silent(key) for key in BATCH_KEYS):
        run.news.append(_batch_line(answer))
    for key, value in zip(
        BATCH_KEYS, (answer.train, answer.micro, answer.accumulation), strict=True
    ):
        if run.silent(key):
            run.decide(key, value, answer.why)


def _recount(run: _Resolver) -> None:
    """Correct a train batch size that counts every rank of a copy of the model.

    accelerate and the Trainer count this way.
    """
    stated = [run.get(key) for key in BATCH_KEYS]
    if all(isinstance(size, int) and size > 0 for size in stated):
        train, micro, steps = stated
        ranks = _sample_ranks(run)
        right = micro * steps * ranks
        copy = _data_size(run.facts) * run.facts.stages * run.facts.tensor_size // ranks
        if train != right and train == right * copy:
            run.decide(
                BATCH_KEYS[0], right, f"{train} counts the {copy} ranks of each copy of the model"
            )


def _batch_line(batch: Batch) -> str:
    return (
        f"no batch size is stated: micro-batch {batch.micro} x accumulation {batch.accumulation} x "
        f"{batch.data_size} {'rank' if batch.data_size == 1 else 'ranks'} = train batch "
        f"{batch.train} ({batch.why})"
    )


def _sizes(run: _Resolver) -> None:
    """Decide bucket sizes that are "auto" from the hidden size, if it is known."""
    hidden = run.facts.hidden_size
    if hidden is not None:
        for name, size, why in (
            ("reduce_bucket_size", hidden * hidden, "hidden size squared"),
            (
                "stage3_prefetch_bucket_size",
                int(0.9 * hidden * hidden),
                "0.9 x hidden size squared",
            ),
            ("stage3_param_persistence_threshold", 10 * hidden, "10 x hidden size"),
        ):
            if _ZERO + name in run.open:
                run.decide(_ZERO + name, size, f"{why} ({hidden})")


def _optimizer(run: _Resolver) -> None:
    """Decide optimizer keys that are "auto".

    The values are those of the program's optimizer, else of AdamW and the usual ones.
    """
    if "optimizer.type" in run.open and not run.facts.client_optimizer:
        run.decide("optimizer.type", "AdamW", "the program passes no optimizer")
    kind = (run.config.optimizer.type or "").lower()
    usual = {**OPTIMIZER_DEFAULTS[""], **OPTIMIZER_DEFAULTS.get(kind, {})}
    for key in sorted(run.open):
        prefix, _, name = key.rpartition(".")
        if prefix != "optimizer.params":
            continue
        if name in run.facts.client_optimizer:
            run.decide(key, run.facts.client_optimizer[name], "the program's own optimizer")
        elif name in usual:
            run.decide(key, usual[name], f"the usual value of {kind or 'an optimizer'}")


def _scheduler(run: _Resolver) -> None:
    """Decide scheduler.params that are "auto"."""
    lr = run.config.optimizer.params.get("lr", run.facts.client_optimizer.get("lr"))
    for key in sorted(run.open):
        prefix, _, name = key.rpartition(".")
        if prefix != "scheduler.params":
            continue
        if name in SCHEDULER_DEFAULTS:
            run.decide(key, SCHEDULER_DEFAULTS[name], "DeepSpeed's default")
        elif name == "warmup_max_lr" and lr is not None:
            run.decide(key, lr, "the optimizer's lr")
        elif name == "total_num_steps":
            run.problems.add(
                key,
                "the number of steps is not known here",
                "write the planned number of optimizer steps",
                "auto",
            )


_RULES = (_precision, _ranks, _batch, _sizes, _optimizer, _scheduler)
