"""Hybrid sharding: shards within a group of ranks, replicated between the groups.

Gradients are reduced over the groups once per step. The reference adds in the same two levels: the
ranks of a group in ascending order, then the groups. Each sum is formed in fp32 and rounded once.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import deepseek_zero
from deepseek_zero.base.errors import ModelMismatchError, UsageError
from deepseek_zero.base.mesh import Mesh
from deepseek_zero.checkpoint.format import Manifest
from deepseek_zero.engine.parts import plan_of
from tests.models import Gpt, batch_of, seeded
from tests.pairwise import cases
from tests.reference import OPTIMIZERS, TwoLevels
from tests.training import ALL, DTYPES, Run, train_step

WORLD = 4
STAGES = (0, 1, 2, 3)


def start(run: Run, mesh: Any, model: Any = None) -> Any:
    model = seeded(Gpt) if model is None else model
    optimizer = OPTIMIZERS[run.optimizer](list(model.parameters()))
    return deepseek_zero.initialize(
        model=model, optimizer=optimizer, config=run.config(), mesh=mesh
    )[0]


def reference_of(run: Run, shard: int) -> TwoLevels:
    adds_first = run.stage < 2 or shard == 1
    return TwoLevels(
        seeded(Gpt),
        dist.get_world_size(),
        run.accumulation,
        adds_first,
        DTYPES[run.dtype],
        OPTIMIZERS[run.optimizer],
        run.clipping,
        shard=shard,
    )


def batches_of(run: Run, step: int) -> list[list[Any]]:
    return [
        [batch_of(step, micro, rank) for micro in range(run.accumulation)]
        for rank in range(dist.get_world_size())
    ]


def assert_trains_as_the_reference(run: Run, mesh: dict[str, int], steps: int = 3) -> Any:
    engine, shard = (
        start(run, mesh),
        mesh.get("dp_shard", dist.get_world_size() // mesh["dp_replicate"]),
    )
    reference, rank = reference_of(run, shard), dist.get_rank()
    for step in range(steps):
        losses = train_step(engine, run, step)
        norm = engine.get_global_grad_norm()
        expected, found = reference.step(batches_of(run, step), norm)
        assert norm == pytest.approx(found, rel=1e-5)
        assert all(map(torch.equal, losses, expected[rank])), f"loss of step {step}"
        weights = engine.module.state_dict()
        for name, weight in reference.model.state_dict().items():
            assert torch.equal(weights[name], weight), f"{name} after step {step}"
    return engine


WAYS: tuple[tuple[str, Any], ...] = (
    ("transport", "fastest"),
    ("transport", "gloo"),
    ("bucket", 4096),
)
WAYS += (("overlap", False), ("master", "fp32"))


@pytest.mark.ranks(WORLD)
@pytest.mark.parametrize(
    *cases(
        {"stage": STAGES, "dtype": ("fp32", "bf16"), "accumulation": (1, 4), "way": WAYS},
        fits=lambda case: case[1] == "bf16" or case[3][0] != "master",
    )
)
def test_two_groups_of_two_give_the_bits_of_two_level_sums_on_every_transport(
    stage: int, dtype: str, accumulation: int, way: tuple[str, Any]
) -> None:
    run = Run(stage, dtype, accumulation, optimizer="adamw", clipping=0.5, **dict([way]))
    assert_trains_as_the_reference(run, {"dp_replicate": 2, "dp_shard": 2})


@pytest.mark.ranks(WORLD)
@pytest.mark.parametrize(
    *cases(
        {
            "stage": (1, 2, 3),
            "tier": ("cpu", "nvme"),
            "speculates": (False, True),
            "accumulation": (1, 2),
        },
        fits=lambda case: case[0] == 3 or case[1:3] == ("cpu", False),
    )
)
def test_no_placement_of_states_changes_a_bit(
    stage: int, tier: str, speculates: bool, accumulation: int
) -> None:
    updates = (("super_offload", True),) if speculates else ()
    run = Run(
        stage, "bf16", accumulation, optimizer="adamw", clipping=0.5, tier=tier, updates=updates
    )
    assert_trains_as_the_reference(run, {"dp_replicate": 2, "dp_shard": 2})


@pytest.mark.ranks("ranks")
@pytest.mark.parametrize(*cases({"ranks": (2, 3), "stage": STAGES, "dtype": ("fp32", "bf16")}))
def test_replicas_without_sharding_are_summed_like_data_parallel_ranks(
    ranks: int, stage: int, dtype: str
) -> None:
    run = Run(stage, dtype, 2, optimizer="adamw", clipping=0.5)
    assert_trains_as_the_reference(run, {"dp_replicate": ranks, "dp_shard": 1})


@pytest.mark.ranks(2)
@pytest.mark.parametrize("stage", [0, 3])
def test_a_mesh_of_one_group_is_the_world_without_a_mesh(stage: int) -> None:
    run = Run(stage, "bf16", 2, optimizer="adamw")
    engine = assert_trains_as_the_reference(run, {"dp_replicate": 1, "dp_shard": 2})
    assert engine.runtime.comm_ctx.outer is None
    assert engine.runtime.comm is engine.runtime.comm_ctx.comm


@pytest.mark.ranks(WORLD)
@pytest.mark.parametrize(
    *cases({"stage": STAGES, "accumulation": (1, 4), "dtype": ("fp32", "bf16")})
)
def test_a_step_sends_what_sharding_sends_in_a_group_and_one_sum_over_the_groups(
    stage: int, accumulation: int, dtype: str
) -> None:
    run = Run(stage, dtype, accumulation, transport="gloo", optimizer="adamw")
    engine, group, replicas = start(run, {"dp_replicate": 2, "dp_shard": 2}), 2, 2
    padded = sum(group.layout.padded_numel for group in engine.runtime.groups)
    weight = DTYPES[run.dtype].itemsize
    kept = weight if accumulation == 1 else 4  # bytes per element of the accumulated gradient
    inside = {
        0: 2 * kept,
        1: kept + weight,
        2: accumulation * weight + weight,
        3: accumulation * 3 * weight,
    }[stage]
    expected = (group - 1) * padded // group * inside  # f x Psi x bytes, as ZeRO within the group
    # 2 (R-1)/R x Psi/D x bytes, once
    expected += 2 * (replicas - 1) * (padded // group) // replicas * kept
    rows = 8 * (5 + group * len(engine.runtime.trained_groups)) * (WORLD - 1)
    train_step(engine, run, 0)
    for step in (1, 2):
        meter = engine.runtime.comm.meter
        meter.reset()
        train_step(engine, run, step)
        assert meter.sent_bytes["rows"] == rows
        assert meter.total_bytes() - rows == expected
    volume = engine.runtime.plan.volume()
    assert (volume.state_bytes, volume.rows) == (expected, rows)


@pytest.mark.ranks(WORLD)
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_a_plan_without_a_process_group_has_the_bytes_of_four_ranks(stage: int, dtype: str) -> None:
    run = Run(stage, dtype, 2, optimizer="adamw")
    engine = start(run, {"dp_replicate": 2, "dp_shard": 2})
    for step in range(2):
        train_step(engine, run, step)
    engine.runtime.comm.meter.reset()
    train_step(engine, run, 2)
    sent = engine.runtime.comm.meter.total_bytes()
    config = run.config() | {
        "optimizer": {"type": "AdamW", "params": {"fused": False, "foreach": False}}
    }
    plan = deepseek_zero.plan(
        seeded(Gpt), config, ranks=WORLD, rank=dist.get_rank(), mesh={"dp_replicate": 2}
    )
    assert plan.mesh == engine.mesh
    assert plan.volume().state_bytes + plan.volume().rows == sent
    measured = {
        state: nbytes for state, nbytes in engine.memory_report().measured.items() if nbytes
    }
    assert {state: nbytes for state, nbytes in plan.bytes_by_state().items() if nbytes} == measured


@pytest.mark.ranks(WORLD)
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize(
    ("transport", "replicas", "bucket"), [("gloo", 2, 2048), ("gloo", 4, ALL), ("fastest", 4, ALL)]
)
def test_the_prediction_of_memory_is_correct(
    stage: int, transport: str, replicas: int, bucket: int
) -> None:
    run = Run(stage, "bf16", 2, optimizer="adamw", transport=transport, bucket=bucket)
    engine = start(run, {"dp_replicate": replicas})
    for step in range(3):
        train_step(engine, run, step)
    measured = {
        state: nbytes for state, nbytes in engine.memory_report().measured.items() if nbytes
    }
    predicted = plan_of(engine.runtime, engine.optimizer).bytes_by_state()
    assert {state: nbytes for state, nbytes in predicted.items() if nbytes} == measured


@pytest.mark.ranks(WORLD)
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_an_overflow_in_one_group_skips_the_step_in_all_and_changes_nothing(stage: int) -> None:
    from tests.ranks.test_precision import build, loss_of

    engine = build(
        stage,
        fp16={"enabled": True, "initial_scale_power": 8, "hysteresis": 1},
        mesh={"dp_replicate": 2},
    )
    engine.backward(loss_of(engine))
    engine.step()
    before = {name: value.clone() for name, value in engine.module.state_dict().items()}
    engine.backward(loss_of(engine, poison=float("inf") if dist.get_rank() == 3 else 1.0))
    engine.step()
    assert (engine.skipped_steps, engine.was_step_applied(), engine.parts.scaler.scale) == (
        1,
        False,
        2.0**7,
    )
    assert all(
        torch.equal(value, before[name]) for name, value in engine.module.state_dict().items()
    )
    engine.backward(loss_of(engine))
    engine.step()
    assert engine.was_step_applied()


@pytest.mark.ranks(WORLD)
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_backwards_without_announcement_accumulate(stage: int) -> None:
    """Two plain backwards in a step are reduced separately, and both sums are accumulated."""
    run = Run(stage, "fp32", 1)
    engine, model = start(run, {"dp_replicate": 2, "dp_shard": 2}), seeded(Gpt)
    for micro in range(2):
        for rank in range(WORLD):
            batch = batch_of(0, micro, rank)
            (model(batch.tokens, batch.targets) / WORLD).backward()
        batch = batch_of(0, micro, dist.get_rank())
        engine(batch.tokens, batch.targets).backward()
    for (name, mine), plain in zip(
        engine.module.named_parameters(), model.parameters(), strict=True
    ):
        found = deepseek_zero.utils.safe_get_full_grad(mine)
        torch.testing.assert_close(found, plain.grad, atol=1e-6, rtol=1e-5, msg=name)


@pytest.mark.ranks(WORLD)
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_gradient_that_the_program_makes_differently_in_two_groups_is_the_first_groups(
    stage: int,
) -> None:
    engine = start(Run(stage), {"dp_replicate": 2, "dp_shard": 2})
    batch = batch_of(0, 0, dist.get_rank())
    engine.backward(engine(batch.tokens, batch.targets))
    for param in engine.module.parameters():
        param.grad = torch.full(param.shape, 1.0 + dist.get_rank() // 2)
    engine.step()
    weights = engine.module.state_dict()
    total = sum(float(value.double().sum()) for value in weights.values())
    assert len(set(engine.runtime.comm.all_gather_text(str(total), "weights"))) == 1


@pytest.mark.ranks(WORLD)
def test_every_group_begins_with_rank_0s_values_and_takes_a_modifiers() -> None:
    torch.manual_seed(dist.get_rank())
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 4))
    expected = [param.detach().clone() for param in model.parameters()]
    for value in expected:
        dist.broadcast(value, 0)
    engine = start(Run(3), {"dp_replicate": 2, "dp_shard": 2}, model)
    params = list(engine.module.parameters())
    with deepseek_zero.zero.GatheredParameters(params, modifier_rank=3):
        assert all(map(torch.equal, params, expected))
        if dist.get_rank() == 3:
            params[0].data.fill_(7.0)
    with deepseek_zero.zero.GatheredParameters(params):
        assert bool((params[0] == 7.0).all())


def moments_of(engine: Any) -> dict[str, Tensor]:
    get = deepseek_zero.utils.safe_get_full_optimizer_state
    return {name: get(param, "exp_avg") for name, param in engine.module.named_parameters()}


@pytest.mark.ranks(WORLD, fresh=True, timeout=120)
@pytest.mark.parametrize("stage", [1, 3])
def test_a_checkpoint_is_loaded_on_other_meshes_bit_for_bit(tmp_path: Path, stage: int) -> None:
    rank, run = dist.get_rank(), Run(stage, "bf16", optimizer="adamw")
    walk: list[tuple[int, dict[str, int]]] = [
        (4, {"dp_replicate": 2, "dp_shard": 2}),
        (4, {"dp_replicate": 4}),
        (4, {"dp_shard": 4}),
        (2, {"dp_replicate": 2}),
        (4, {"dp_replicate": 2, "dp_shard": 2}),
        (2, {"dp_shard": 2}),
    ]
    for number, (ranks, mesh) in enumerate(walk):
        dist.barrier()
        dist.destroy_process_group()
        if rank < ranks:
            store = dist.FileStore(str(tmp_path / f"store{number}"), ranks)
            dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks)
            engine = start(run, mesh)
            if number:
                engine.load_checkpoint(tmp_path / str(number - 1))
            else:
                for step in range(2):
                    train_step(engine, run, step)
            found = {"weights": engine.module_state_dict(), "moments": moments_of(engine)}
            if not number and rank == 0:
                torch.save(found, tmp_path / "expected.pt")
            dist.barrier()
            expected = torch.load(tmp_path / "expected.pt", weights_only=True)
            for kind, values in expected.items():
                assert values.keys() == found[kind].keys()
                assert all(torch.equal(values[name], found[kind][name]) for name in values), (
                    number,
                    kind,
                )
            engine.save_checkpoint(tmp_path / str(number))
            (manifest,) = (tmp_path / str(number)).glob("*/manifest.json")
            saved_on = Manifest.read(manifest)
            assert (
                saved_on.mesh
                == {"pp": 1, "dp_replicate": 1, "dp_shard": 1, "sp": 1, "tp": 1} | mesh
            )
            assert saved_on.world_size == ranks
            dist.barrier()
            dist.destroy_process_group()
        store = dist.FileStore(str(tmp_path / f"all{number}"), WORLD)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=WORLD)


@pytest.mark.ranks(WORLD)
def test_a_checkpoint_resumes_exactly_and_is_written_by_one_group(
    tmp_path: Path,
) -> None:
    run, mesh = Run(3, "bf16", 2, optimizer="adamw"), {"dp_replicate": 2, "dp_shard": 2}
    first = start(run, mesh)
    for step in range(2):
        train_step(first, run, step)
    first.save_checkpoint(tmp_path, tag="two")
    losses = train_step(first, run, 2)
    second = start(run, mesh)
    second.load_checkpoint(tmp_path, tag="two")
    assert all(map(torch.equal, losses, train_step(second, run, 2)))
    after = second.module.state_dict()
    assert all(torch.equal(value, after[name]) for name, value in first.module.state_dict().items())
    chunks = json.loads((tmp_path / "two" / "manifest.json").read_text())["chunks"]
    writers = {chunk[0]: {each[5] for each in chunks if each[0] == chunk[0]} for chunk in chunks}
    assert (writers["weight"], writers["moment"], writers["rng"]) == ({0, 1}, {0, 1}, {0, 1, 2, 3})


@pytest.mark.ranks(WORLD)
@pytest.mark.parametrize(
    "mesh",
    [
        {"dp_replicate": 2, "dp_shard": 2},
        Mesh(dp_replicate=2),
        "DeviceMesh",
        "config",
        "mics_shard_size",
    ],
    ids=["dict", "Mesh", "DeviceMesh", "config", "MiCS"],
)
def test_every_spelling_gives_the_same_groups(mesh: Any) -> None:
    config: dict[str, Any] = Run(3, accumulation=2).config()
    if mesh == "DeviceMesh":
        mesh = torch.distributed.init_device_mesh(
            "cpu", (2, 2), mesh_dim_names=("dp_replicate", "dp_shard")
        )
    elif mesh == "config":
        mesh, config["mesh"] = None, {"dp_replicate": 2, "dp_shard": 2}
    elif mesh == "mics_shard_size":
        mesh = None
        config["zero_optimization"] |= {
            "mics_shard_size": 2,
            "mics_hierarchical_params_gather": True,
        }
    data = torch.utils.data.TensorDataset(torch.arange(16.0).view(16, 1))
    model = torch.nn.Linear(8, 8)
    config["optimizer"] = {"type": "AdamW"}
    engine, _, loader, _ = deepseek_zero.initialize(
        model=model, config=config, mesh=mesh, training_data=data
    )
    found, rank = engine.mesh, dist.get_rank()
    assert (found.data_size, found.shard_size, found.reduce_size) == (4, 2, 4)
    assert (
        found.ranks_along("dp_shard")
        == engine.runtime.comm_ctx.comm.ranks
        == (rank // 2 * 2, rank // 2 * 2 + 1)
    )
    assert engine.train_batch_size() == 2 * 2 * 4
    seen = torch.cat([batch[0] for batch in loader]).flatten().tolist()
    texts = engine.runtime.comm.all_gather_text(str(sorted(seen)), "samples")
    assert len(set(texts)) == 4, "every rank has a share of its own"


@pytest.mark.ranks(2)
@pytest.mark.parametrize("stage", [0, 3])
def test_seed_0s_api_accepts_a_mesh(stage: int) -> None:
    model, run = seeded(Gpt), Run(stage)
    zero = {"stage": stage, "stage3_param_persistence_threshold": 0}
    deepseek_zero.DeepSeekZeRO3(model, zero_optimization=zero, mesh={"dp_replicate": 2})
    options = {"momentum": 0.9, "weight_decay": 0.01, "foreach": False, "fused": False}
    optimizer = deepseek_zero.ZeroOptimizer(
        model.parameters(), lr=0.05, optimizer_type="sgd", **options
    )
    reference = reference_of(run, 1)
    for step in range(2):
        batch = batch_of(step, 0, dist.get_rank())
        model(batch.tokens, batch.targets).backward()
        optimizer.step()
        optimizer.zero_grad()
        reference.step(batches_of(run, step))
    weights = model.state_dict()
    assert all(
        torch.equal(weights[name], value) for name, value in reference.model.state_dict().items()
    )


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    ("mesh", "config", "words"),
    [
        ({"dp_replicate": 3}, {}, "does not fit a world of 2 ranks"),
        (
            {"dp_replicate": 2},
            {"mesh": {"dp_shard": 2}},
            "mesh= has .*, but the configuration's mesh has",
        ),
        ({"dp_shard": 2}, {"mics_shard_size": 1}, "mics_shard_size has dp_replicate=2"),
        (None, {"mics_shard_size": 3}, "mics_shard_size is 3, but there are 2 ranks"),
    ],
)
def test_a_mesh_that_does_not_fit_or_is_stated_twice_is_refused(
    mesh: Any, config: dict[str, Any], words: str
) -> None:
    zero = {"stage": 3, **{key: value for key, value in config.items() if key != "mesh"}}
    stated = {key: value for key, value in config.items() if key == "mesh"}
    with pytest.raises(UsageError, match=words):
        deepseek_zero.initialize(
            model=torch.nn.Linear(2, 2), config={"zero_optimization": zero, **stated}, mesh=mesh
        )


@pytest.mark.ranks(2)
def test_ranks_whose_meshes_differ_are_refused_at_the_start() -> None:
    mesh = {"dp_replicate": 2} if dist.get_rank() else {"dp_shard": 2}
    with pytest.raises(
        ModelMismatchError,
        match="ranks differ in the mesh: rank 0 has 'dp_shard=2', rank 1 has 'dp_rep",
    ):
        deepseek_zero.initialize(model=torch.nn.Linear(2, 2), config={}, mesh=mesh)
