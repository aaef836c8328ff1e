"""The configuration page states the effect of each key correctly.

An effective key that is changed from its default is used: the assembled model, schedule or
optimizer differs, or acting code reads the value, or a test next to it checks the effect. No code
reads an accepted key.
"""

from __future__ import annotations

import dataclasses
import json
import os
import signal
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import deepseek_zero as dz
from deepseek_zero.base import launch
from deepseek_zero.base.errors import ConfigError, NotBuiltError, UsageError
from deepseek_zero.base.mesh import Mesh
from deepseek_zero.comm.collectives import Comm
from deepseek_zero.config import Config, Facts, Status, resolve
from deepseek_zero.config.fields import rows
from deepseek_zero.config.load import PACKAGES, load
from deepseek_zero.config.schema import SparseAttentionSection
from deepseek_zero.engine import assemble, connecting
from deepseek_zero.engine.memories import open_tiers
from deepseek_zero.engine.mesh_statements import AXIS_KEYS
from deepseek_zero.engine.settings import (
    pipeline_settings_of,
    plan_settings_of,
    recompute_settings_of,
    sequence_settings_of,
    sparse_attention_of,
    tensor_settings_of,
    tile_settings_of,
)
from deepseek_zero.extensions import policies
from deepseek_zero.planner.plan import plan_model
from deepseek_zero.precision.loss_scale import LossScaleError
from deepseek_zero.tiers.tier import Tier
from tests.config_keys import off_default_config
from tests.contract.key_proofs import Reads, carriers, home_of, recording


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.second(self.first(x))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks, self.head = nn.Sequential(Block(), Block()), nn.Linear(8, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(dz.checkpointing.checkpoint(self.blocks, x.to(self.head.weight.dtype)))


def merged(base: dict[str, Any], change: dict[str, Any]) -> dict[str, Any]:
    """Return `base` with `change` merged into it, section by section."""
    result = dict(base)
    for key, value in change.items():
        old = result.get(key)
        result[key] = (
            merged(old, value) if isinstance(old, dict) and isinstance(value, dict) else value
        )
    return result


def without(config: dict[str, Any], path: str) -> dict[str, Any]:
    """Return the configuration without one key; the keys that it requires stay."""
    head, _, rest = path.partition(".")
    result = dict(config)
    if rest and isinstance(result.get(head), dict):
        result[head] = without(result[head], rest)
    else:
        result.pop(head, None)
    return result


BASE: dict[str, Any] = {
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
    "zero_optimization": {"stage": 3},
    "steps_per_print": 2,
}
# Explicit reference configurations for keys that cannot be left out, or whose default depends on
# the hardware.
STATED: dict[str, dict[str, Any]] = {
    "torch_autocast.dtype": {"torch_autocast": {"enabled": True, "dtype": "bf16"}},
    "zero_optimization.offload_param.nvme_path": {
        "zero_optimization": {"offload_param": {"nvme_path": "other"}}
    },
    "zero_optimization.offload_optimizer.nvme_path": {
        "zero_optimization": {"offload_optimizer": {"nvme_path": "other"}}
    },
    "activation_checkpointing.nvme_path": {"activation_checkpointing": {"nvme_path": "other"}},
}
ROWS = [row for row in rows(Config) if row.status is Status.EFFECTIVE]
ACCEPTED = [row for row in rows(Config) if row.status is Status.ACCEPTED]


@dataclasses.dataclass
class Seen:
    """The recorded reads and the assembled structure of one training."""

    reads: Reads
    structure: list[str]


def train(config: dict[str, Any]) -> Seen:
    """Train three steps with overflows, save, load and export.

    Settings are not part of the structure.
    """
    with recording() as reads:
        engine, *_ = dz.initialize(
            model=Net(), config=config, training_data=TensorDataset(torch.ones(32, 8))
        )
        inner, scheduler = (
            engine.optimizer.inner if engine.optimizer is not None else None,
            engine.lr_scheduler,
        )
        structure = [
            *(
                f"{unit.name}: {[group.plan for group in unit.groups]}"
                for unit in engine.runtime.units
            ),
            str(engine.runtime.schedule),
            f"{type(inner).__name__} {inner.defaults if inner is not None else None}",
            f"{type(scheduler).__name__} {getattr(scheduler, 'settings', None)}",
            "vertical "
            f"{engine.parts.vertical.micro_batches if engine.parts.vertical is not None else None}",
            f"scale {engine.parts.scaler.scale if engine.parts.scaler is not None else None}",
            f"micro-batches of {engine.training_dataloader.batch_size}",
            f"checks {type(engine.parts.integrity).__name__}",
        ]
        rows = 2 * engine.train_micro_batch_size_per_gpu()
        overflows = (
            any(config.get(name, {}).get("enabled") for name in ("fp16", "bf16"))
            or "check_grad_overflow" in config
        )
        with suppress(LossScaleError):
            for step in range(5):
                for _ in range(engine.gradient_accumulation_steps()):
                    loss = engine(torch.ones(rows, 8)).float().mean()
                    engine.backward(loss * float("inf") if overflows and step < 3 else loss)
                    if engine.optimizer is not None:
                        engine.step()
        engine.save_checkpoint("saved", tag=f"{id(engine)}")
        engine.load_checkpoint("saved", tag=f"{id(engine)}")
        engine.save_16bit_model("whole")
        engine.explain()
        engine.destroy()
    return Seen(reads, structure)


def compared(path: str, change: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return a configuration with the key changed, and the same one without the key."""
    moved = merged(BASE, change)
    if path.startswith("optimizer."):
        moved["optimizer"] = change["optimizer"]
    still = without(moved, path)
    if path == "optimizer.type":
        still = {"zero_optimization": {"stage": 3}}
    return moved, merged(still, STATED.get(path, {}))


KNOWN: dict[str, Seen] = {}


def train_once(config: dict[str, Any]) -> Seen:
    """Return the cached result of `train`, because many keys share a reference configuration."""
    text = json.dumps(config, sort_keys=True)
    if text not in KNOWN:
        KNOWN[text] = train(config)
    return KNOWN[text]


def proof(
    path: str, change: dict[str, Any], without_it: Callable[[dict[str, Any]], Seen] = train_once
) -> str:
    """Return why a key is effective, or "" if it is not.

    without_it: trains the reference configuration.
    """
    with_key, without_key = compared(path, change)
    moved = train(with_key)
    if home_of(path) in moved.reads.used:
        return "the key is read where something is done"
    still = without_it(without_key)
    if moved.structure != still.structure:
        return "what is assembled differs"
    for kind, name in sorted(carriers(moved.reads, still.reads) & moved.reads.used, key=str):
        return f"{kind.__name__}.{name} carries it and is read"
    return ""


# Keys whose effect the recorded reads cannot show here: a separate test for each effect.
# -----------------------------------


def engine_with(**change: Any) -> Any:
    return dz.initialize(model=Net(), config=merged(BASE, change))[0]


def makes_torch_deterministic() -> None:
    before = torch.are_deterministic_algorithms_enabled(), torch.backends.cudnn.benchmark
    torch.backends.cudnn.benchmark = True
    try:
        engine = engine_with(deterministic=True)
        assert torch.are_deterministic_algorithms_enabled()
        assert not torch.is_deterministic_algorithms_warn_only_enabled()
        assert not torch.backends.cudnn.benchmark
        engine.destroy()
        assert torch.are_deterministic_algorithms_enabled() == before[0]
        assert torch.backends.cudnn.benchmark
    finally:
        torch.backends.cudnn.benchmark = before[1]


def verifies_the_ranks() -> None:
    for key in ("dp_degree", "data_parallel_size"):
        with pytest.raises(ConfigError, match=key):
            resolve(load({key: 2}), Facts(world_size=1, launched=True))


def verifies_the_mesh() -> None:
    """A mesh that does not fit one rank is refused; tests/ranks/test_hybrid.py trains on
    several.
    """
    for mesh in ({"dp_replicate": 2}, {"dp_shard": 2}):
        with pytest.raises(UsageError, match="does not fit a world of 1"):
            engine_with(mesh=mesh)
    with pytest.raises(UsageError, match="mics_shard_size is 2, but there are 1 ranks"):
        engine_with(zero_optimization={"stage": 3, "mics_shard_size": 2})


def states_an_axis() -> None:
    """Each key that sets an axis appears in the mesh that is refused on a single rank."""
    for key in STATE_AN_AXIS:
        change: Any = 2
        for name in reversed(key.split(".")):
            change = {name: change}
        with pytest.raises((UsageError, NotBuiltError), match=r"(pp|sp|tp)=2"):
            engine_with(**change)


def settings_differ(path: str, of: Callable[[Config], object]) -> Callable[[], None]:
    """Settings that matter only on several ranks get the key's value.

    tests/unit/parallel and tests/unit/pipeline check the effects.
    """

    def compare() -> None:
        moved = off_default_config(path)
        found = [of(resolve(load(config), Facts())) for config in (moved, without(moved, path))]
        assert found[0] != found[1]

    return compare


def saves_when_asked_to_end() -> None:
    for name, path in (("SIGUSR1", "one"), ("SIGUSR2", "two")):
        engine = engine_with(checkpoint={"save_on_signal": {"path": path, "signals": [name]}})
        os.kill(os.getpid(), getattr(signal, name))
        engine.backward(engine(torch.ones(2, 8)).mean())
        with pytest.raises(SystemExit):
            engine.step()
        engine.destroy()
        assert list(Path(path).iterdir())


def locks_pages_beside_a_gpu() -> None:
    """Only the sections that offload decide about page-locking."""

    def pinned(**sections: Any) -> bool:
        config = resolve(load({"zero_optimization": {"stage": 3, **sections}}), Facts())
        cuda = Mesh(dp_shard=1, device=torch.device("cuda", 0))
        planned = plan_model(torch.nn.Linear(2, 2), plan_settings_of(config), cuda)
        tiers = open_tiers(planned, config, Comm(torch.device("cpu")), 4096)
        return tiers.memories[Tier.HOST].pinned

    for section in ("offload_optimizer", "offload_param"):
        assert pinned(**{section: {"device": "cpu"}})
        assert not pinned(**{section: {"device": "cpu", "pin_memory": False}})
    both = {
        "offload_optimizer": {"device": "cpu", "pin_memory": False},
        "offload_param": {"device": "cpu"},
    }
    assert pinned(**both)


def names_the_transport() -> None:
    """`Comm` gets the transport; tests/ranks/test_same_host.py checks the traffic."""
    seen = list[str]()

    class Told(Comm):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            seen.append(kwargs["transport"])

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(connecting, "Comm", Told)
        engine_with(transport="gloo").destroy()
    assert seen == ["gloo"]


def tells_where_to_listen() -> None:
    """Ranks that join later get interface and ports; tests/ranks/test_hosts.py checks the
    sockets.
    """
    with pytest.MonkeyPatch.context() as patch:
        for name in (launch.INTERFACE, launch.PORTS, launch.GLOO_INTERFACE):
            patch.setenv(name, "")
            patch.delenv(name)
        engine_with(network={"interface": "lo", "ports": "29600-29700"}).destroy()
        assert (
            os.environ[launch.INTERFACE] == "127.0.0.1"
            and os.environ[launch.GLOO_INTERFACE] == "lo"
        )
        assert os.environ[launch.PORTS] == "29600-29700"
        engine_with(network={"ports": "4-5"}).destroy()
        assert os.environ[launch.PORTS] == "29600-29700", "what was said first stands"
    for wrong in ({"interface": "far0"}, {"ports": "far"}):
        with pytest.raises(
            UsageError, match=r"cannot listen at the interface 'far0'|'far' is not a range of ports"
        ):
            engine_with(network=wrong)


def chooses_what_updates() -> None:
    pytest.importorskip("llvmlite")
    chosen = []
    for kernels in ("compiled", "torch"):
        engine = engine_with(optimizer={"type": "AdamW", "params": {}, "kernels": kernels})
        chosen.append({shard.has_kernel for shard in engine.optimizer.shards()})
        engine.destroy()
    assert chosen == [{True}, {False}]


STATE_AN_AXIS = (*AXIS_KEYS, "mesh.pp", "mesh.sp", "mesh.tp")
BEHAVIOURS: dict[str, Callable[[], None]] = {
    **dict.fromkeys(STATE_AN_AXIS, states_an_axis),
    "optimizer.kernels": chooses_what_updates,
    **{
        f"tensor_parallel.{name}": settings_differ(f"tensor_parallel.{name}", tensor_settings_of)
        for name in (
            "injection_policy_tuple",
            "partition_config",
            "preset_model",
            "sequence",
            "loss",
            "tp.tp_grain_size",
            "tensor_parallel.tp_grain_size",
        )
    },
    **{
        f"pipeline.{name}": settings_differ(f"pipeline.{name}", pipeline_settings_of)
        for name in (
            "partition",
            "schedule",
            "virtual",
            "group",
            "micro_batches",
            "rows",
            "activation_checkpoint_interval",
        )
    },
    # tests/unit/activations/test_tiled_loss.py and tests/ranks/test_partitioned_activations.py
    # check the effects.
    **{
        f"activation_checkpointing.{name}": settings_differ(f"activation_checkpointing.{name}", of)
        for name, of in (
            ("tiled_loss", tile_settings_of),
            ("tiled_mlp", tile_settings_of),
            ("partition_activations", recompute_settings_of),
        )
    },
    "sequence_parallel.attention": settings_differ(
        "sequence_parallel.attention", sequence_settings_of
    ),
    **{  # one rank sends nothing; tests/ranks/test_codecs.py checks several
        f"zero_optimization.{name}": settings_differ(f"zero_optimization.{name}", plan_settings_of)
        for name in (
            "zero_quantized_weights",
            "zero_quantized_gradients",
            "zero_quantized_nontrainable_weights",
            "compression.weights.bits",
            "compression.weights.block",
            "compression.gradients.bits",
            "compression.gradients.block",
            "compression.gradients.error_feedback",
            "zeropp_loco_param",
            "zeropp_loco_param.err_beta",
            "zeropp_loco_param.reset_T",
            "compression.gradients.inside_bits",
            "compression.auto",
            "compression.min_numel",
        )
    },
    **{  # tests/unit/attention/test_hugging_face.py checks the effect on a model
        name: settings_differ(name, partial(sparse_attention_of, mesh=Mesh()))
        for name in (
            "sparse_attention",
            *(f"sparse_attention.{each}" for each in SparseAttentionSection.model_fields),
        )
    },
    "data_parallel_size": verifies_the_ranks,
    "deterministic": makes_torch_deterministic,
    "dp_degree": verifies_the_ranks,
    "mesh.dp_replicate": verifies_the_mesh,
    "mesh.dp_shard": verifies_the_mesh,
    "zero_optimization.mics_shard_size": verifies_the_mesh,
    "checkpoint.save_on_signal.path": saves_when_asked_to_end,
    "checkpoint.save_on_signal.signals": saves_when_asked_to_end,
    "zero_optimization.offload_optimizer.pin_memory": locks_pages_beside_a_gpu,
    "zero_optimization.offload_param.pin_memory": locks_pages_beside_a_gpu,
    "transport": names_the_transport,
    "network.interface": tells_where_to_listen,
    "network.ports": tells_where_to_listen,
}


@pytest.mark.parametrize("row", ROWS, ids=[row.path for row in ROWS])
def test_an_effective_key_is_used(
    row: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    needed, install = PACKAGES.get(row.path.partition(".")[0], ("", ""))
    if needed and find_spec(needed) is None:
        pytest.skip(f"needs {needed}: {install}")
    if row.path in BEHAVIOURS:
        BEHAVIOURS[row.path]()
    else:
        assert proof(row.path, off_default_config(row.path)), f"{row.path} is a dead key"


def other_than(value: Any) -> Any:
    """Return another value of the same type."""
    return {bool: lambda: not value, int: lambda: value * 2, float: lambda: value / 2}.get(
        type(value), lambda: None
    )()


def test_an_accepted_key_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    config = dict(BASE)
    for row in ACCEPTED:
        change: Any = other_than(row.default)
        for name in reversed(row.path.split(".")):
            change = {name: change}
        config = merged(config, change)
    seen, plain = train(config), train(BASE)
    read = [row.path for row in ACCEPTED if home_of(row.path) in seen.reads.touched]
    assert not read, f"the page says of these that nobody reads them: {read}"
    assert seen.structure == plain.structure


# The check itself detects failures: two keys without effect that are declared effective.
# ------------------------------------

DEAD = "zero_optimization.legacy_stage1"
MOVED = {"zero_optimization": {"stage": 3, "legacy_stage1": True}}


def test_a_key_that_is_never_read_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert proof(DEAD, MOVED) == ""


def test_a_key_that_is_only_stored_and_printed_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A key that is stored, sent to ranks and logged, but not used, is reported."""
    monkeypatch.chdir(tmp_path)
    plain, kept = assemble.policy_settings_of, list[Any]()

    @dataclasses.dataclass(frozen=True)
    class PolicySettings(policies.PolicySettings):
        is_legacy: bool = False

    def storing(config: Config) -> Any:
        found = plain(config)
        given = dataclasses.asdict(found)
        kept.append(PolicySettings(**given, is_legacy=config.zero_optimization.legacy_stage1))
        return kept[-1]

    # The function passes the value on, as the assembly does.
    storing.__code__ = storing.__code__.replace(co_filename=assemble.__file__)
    monkeypatch.setattr(assemble, "policy_settings_of", storing)
    assert proof(DEAD, MOVED, train) == ""
    assert [one.is_legacy for one in kept] == [True, False]
    assert "is_legacy=True" in str(kept[0])
