"""A checkpoint of any mesh is loaded on any other, and exports are identical on all meshes."""

from __future__ import annotations

from contextlib import ExitStack
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from deepseek_zero.base.mesh import AXES, Mesh
from deepseek_zero.checkpoint.contents import Contents, LoadSettings, SaveSettings
from deepseek_zero.checkpoint.convert import convert_to_safetensors
from deepseek_zero.checkpoint.export import ExportSettings, consolidated, export_safetensors
from deepseek_zero.checkpoint.format import MOMENT, WEIGHT, Manifest, StateRange
from deepseek_zero.checkpoint.load import load_slices
from deepseek_zero.checkpoint.piece import ModelPiece, predecessor
from deepseek_zero.checkpoint.read import open_checkpoint
from deepseek_zero.checkpoint.save import save
from deepseek_zero.checkpoint.state import Chunks
from deepseek_zero.checkpoint.verify import verify
from deepseek_zero.checkpoint.weights import load_weights_into
from deepseek_zero.optim.sharded import ShardedOptimizer
from deepseek_zero.precision.policy import Policy
from deepseek_zero.sharding.runtime import Runtime
from tests.in_process import Rank, optimizer_over, run_ranks, sharded
from tests.reference import OPTIMIZERS
from tests.split_model import MadePiece, piece_of

MESHES = {
    "one": Mesh(dp_shard=1),
    "dp2": Mesh(dp_shard=2),
    "tp2": Mesh(dp_shard=1, tp=2),
    "tp3": Mesh(dp_shard=1, tp=3),
    "tp4": Mesh(dp_shard=1, tp=4),
    "pp2": Mesh(dp_shard=1, pp=2),
    "dp2 tp2": Mesh(dp_shard=2, tp=2),
    "pp2 tp2": Mesh(pp=2, dp_shard=1, tp=2),
    "pp2 dp2 tp2": Mesh(pp=2, dp_shard=2, tp=2),
    "replicas tp2": Mesh(dp_replicate=2, dp_shard=2, tp=2),
    "pp4 replicas": Mesh(pp=4, dp_replicate=2, dp_shard=1),
}
POLICIES = {"fp32": Policy(), "bf16": Policy(torch.bfloat16, auto_cast=True)}


class Engine:
    """One rank's sharded part of the model and its optimizer."""

    def __init__(
        self, rank: Rank, mesh: Mesh, stage: int, dtype: str, seed: int = 5, *, pads: bool = True
    ) -> None:
        here = mesh.on_world(rank.size, rank.index)
        self.piece: MadePiece = piece_of(here, seed, pads=pads)
        self.runtime: Runtime = sharded(
            rank, self.piece.model, mesh, stage=stage, policy=POLICIES[dtype]
        )
        self.optimizer: ShardedOptimizer = optimizer_over(self.runtime, OPTIMIZERS["adamw"])

    @property
    def contents(self) -> Contents:
        trainer = {"global_steps": 2}
        return Contents(self.runtime, self.optimizer, trainer, {"note": torch.arange(3)})

    def train(self, first: int, last: int) -> None:
        for step in range(first, last):
            self.piece.model(self.piece.gradients(step)).backward()
            self.optimizer.step()


def on_all(mesh: Mesh, body: Any, **options: Any) -> list[Any]:
    return run_ranks(_size(mesh), body, **options)


def _size(mesh: Mesh) -> int:
    return mesh.pp * mesh.dp_replicate * mesh.dp_shard * mesh.sp * mesh.tp


def states_in(folder: Path) -> dict[str, Tensor]:
    """Return every weight and moment of a checkpoint as a whole tensor by kind, name and key."""
    found: dict[str, Tensor] = {}
    with ExitStack() as stack:
        source = open_checkpoint(folder, None, stack)
        for name, facts in source.manifest.parameters.items():
            numel = torch.Size(facts["shape"]).numel()
            states = [(WEIGHT, ""), *((MOMENT, key) for key in source.values.keys(MOMENT, name))]
            for kind, key in states:
                wanted = StateRange(kind, name, key, 0, numel)
                parts = [values.clone() for _, values in source.values.read(wanted)]
                found[f"{kind} {name} {key}"] = torch.cat(parts).view(facts["shape"])
        found |= {
            f"buffer {name}": source.values.of_rank(name, 0).clone()
            for name in source.manifest.buffers
        }
        found |= {
            f"{name} {key}": torch.tensor(each["value"])
            for name, of in source.manifest.scalars.items()
            for key, each in of.items()
        }
    return found


def different(left: dict[str, Tensor], right: dict[str, Tensor]) -> list[str]:
    lonely = sorted(left.keys() ^ right.keys())
    return lonely + [
        name for name in left if name in right and not torch.equal(left[name], right[name])
    ]


@cache
def _folder(root: Path, name: str, stage: int, dtype: str) -> Path:
    """Return a checkpoint after two steps on a mesh; each test session creates it only once."""

    def body(rank: Rank) -> None:
        engine = Engine(rank, MESHES[name], stage, dtype)
        engine.train(0, 2)
        save(root / name, f"{stage}-{dtype}", engine.contents, SaveSettings())

    on_all(MESHES[name], body)
    return root / name / f"{stage}-{dtype}"


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("meshes")


SEVERAL = [name for name in MESHES if name != "one"]
# Each mesh is loaded on three others and "one" on all; every stage and dtype occurs.
PAIRS = [
    (saved, loaded)
    for k, saved in enumerate(MESHES)
    for j, loaded in enumerate(MESHES)
    if (j - k) % len(MESHES) in (1, 4, 7)
]
PAIRS += [("one", name) for name in SEVERAL if ("one", name) not in PAIRS]


@pytest.mark.parametrize(
    ("stage", "dtype"), [(0, "fp32"), (1, "bf16"), (2, "bf16"), (3, "fp32"), (3, "bf16")]
)
@pytest.mark.parametrize("name", SEVERAL)
def test_every_mesh_saves_the_same_whole_model(
    root: Path, name: str, stage: int, dtype: str
) -> None:
    one, folder = _folder(root, "one", 3, dtype), _folder(root, name, stage, dtype)
    assert not verify(folder)
    assert not different(states_in(one), states_in(folder))


@pytest.mark.parametrize(
    ("number", "pair"),
    list(enumerate(PAIRS)),
    ids=[f"{saved} to {loaded}" for saved, loaded in PAIRS],
)
def test_any_mesh_resumes_from_any_other(
    root: Path, tmp_path: Path, number: int, pair: tuple[str, str]
) -> None:
    (saved, loaded), stage, dtype = pair, number % 4, ("fp32", "bf16")[number // 4 % 2]
    folder = _folder(root, saved, 3, dtype)
    plain = _folder(root, "one", 3, dtype)

    def body(rank: Rank) -> Any:
        engine = Engine(rank, MESHES[loaded], stage, dtype, seed=8)
        engine.train(5, 6)  # loading must overwrite all of this
        found = load_slices(folder.parent, folder.name, engine.contents, LoadSettings())
        save(tmp_path, "again", engine.contents, SaveSettings())
        engine.train(2, 3)
        save(tmp_path, "further", engine.contents, SaveSettings())
        return found.trainer, found.client["note"].tolist()

    assert on_all(MESHES[loaded], body) == [({"global_steps": 2}, [0, 1, 2])] * _size(
        MESHES[loaded]
    )
    assert not different(states_in(plain), states_in(tmp_path / "again"))
    assert not different(states_in(_further(root, dtype)), states_in(tmp_path / "further"))


@cache
def _further(root: Path, dtype: str) -> Path:
    def body(rank: Rank) -> None:
        engine = Engine(rank, MESHES["one"], 3, dtype)
        engine.train(0, 3)
        save(root / "one", f"further-{dtype}", engine.contents, SaveSettings())

    run_ranks(1, body)
    return root / "one" / f"further-{dtype}"


@pytest.mark.parametrize("name", SEVERAL)
def test_exports_are_the_same_bytes_on_every_mesh_and_are_read_by_all(
    tmp_path: Path, name: str
) -> None:
    settings = ExportSettings(torch.float32 if "dp2" in name else None, max_shard_bytes=1500)

    def body(rank: Rank) -> Any:
        engine = Engine(rank, MESHES[rank_mesh], stage=rank.size % 4, dtype="bf16")
        engine.train(0, 1)
        export_safetensors(engine.runtime, out, settings)
        state = consolidated(engine.runtime, settings)
        other = Engine(rank, MESHES[rank_mesh], stage=3, dtype="bf16", seed=9)
        load_weights_into(other.runtime, out)
        export_safetensors(other.runtime, again, settings)
        return state

    files: dict[str, dict[str, bytes]] = {}
    states: dict[str, Any] = {}
    for rank_mesh in ("one", name):
        out, again = tmp_path / f"{rank_mesh} out", tmp_path / f"{rank_mesh} again"
        shares = "tp4" in name or "pp" in name
        states[rank_mesh] = on_all(MESHES[rank_mesh], body, reads_in_place=shares, seed=3)[0]
        files[rank_mesh] = {path.name: path.read_bytes() for path in out.iterdir()}
        assert {path.name: path.read_bytes() for path in again.iterdir()} == files[rank_mesh]
    assert len(files["one"]) > 3 and files[name] == files["one"]
    assert list(states[name]) == list(states["one"]) and not different(states[name], states["one"])


@pytest.mark.parametrize("name", ["tp4", "pp2 dp2 tp2"])
def test_conversions_of_any_mesh_are_the_same_bytes(tmp_path: Path, root: Path, name: str) -> None:
    for each in ("one", name):
        convert_to_safetensors(
            _folder(root, each, 3, "bf16"), tmp_path / each, max_shard_bytes=2000
        )
    found = [
        {path.name: path.read_bytes() for path in (tmp_path / each).iterdir()}
        for each in ("one", name)
    ]
    assert found[0] == found[1]


@pytest.mark.parametrize(
    ("saved", "mesh", "expected"),
    [
        (Mesh(dp_shard=4), Mesh(dp_replicate=2, dp_shard=2), [0, 1, 2, 3]),
        (Mesh(dp_shard=2, tp=2), Mesh(dp_shard=2), [0, 2]),
        (Mesh(dp_shard=2), Mesh(dp_shard=2, tp=2), [0, 0, 1, 1]),
        (Mesh(pp=2, dp_shard=1, tp=2), Mesh(pp=2, dp_shard=1), [0, 2]),
        (Mesh(pp=2, dp_shard=2), Mesh(dp_shard=2), [None, None]),
        (Mesh(dp_shard=2), Mesh(dp_shard=4), [None] * 4),
        (Mesh(dp_shard=1, sp=2), Mesh(dp_shard=2), [None] * 2),
    ],
    ids=str,
)
def test_random_numbers_continue_on_ranks_with_the_same_data(
    saved: Mesh, mesh: Mesh, expected: list[int | None]
) -> None:
    sizes = dict(zip(AXES, saved.sizes, strict=True))
    manifest = Manifest(_size(saved), 3, {}, {}, {}, [], None, {}, [], extra={"mesh": sizes})
    assert [
        predecessor(manifest, mesh.on_world(_size(mesh), rank)) for rank in range(_size(mesh))
    ] == expected


def test_each_rank_has_its_part_and_the_rank_that_writes_it() -> None:
    def body(rank: Rank) -> Any:
        engine = Engine(rank, MESHES["tp4"], 3, "fp32")
        piece = ModelPiece.of(engine.runtime)
        chunks = Chunks(piece, rank.index, frozenset({"embed.scale"}))
        return {
            member.name: (
                piece.part(member),
                chunks.are_written(group, member),
                piece.shape(member),
            )
            for group in engine.runtime.groups
            for member in group.members
        }

    found = on_all(MESHES["tp4"], body)
    assert [each["blocks.0.kv"][1] for each in found] == [True, False, True, False]
    assert [each["norm.bias"][:2] for each in found] == [
        (None, True),
        (None, False),
        (None, False),
        (None, False),
    ]
    # Another pipeline stage writes this weight.
    assert [each["embed.scale"][1] for each in found] == [False] * 4
    assert {each["embed.weight"][2] for each in found} == {(11, 8)}
    assert found[0]["blocks.0.kv"][0] == found[1]["blocks.0.kv"][0] != found[2]["blocks.0.kv"][0]


@pytest.mark.parametrize("stage", [0, 2, 3])
@pytest.mark.parametrize("name", ["tp2", "tp3", "dp2 tp2", "replicas tp2"])
def test_a_state_dict_has_whole_tensors_and_is_loaded_from_them(name: str, stage: int) -> None:
    def body(rank: Rank) -> Any:
        engine = Engine(rank, mesh, stage, "bf16", pads=False)
        engine.train(0, 1)
        state = {name: value.clone() for name, value in engine.runtime.model.state_dict().items()}
        other = Engine(rank, mesh, stage, "bf16", seed=9, pads=False)
        other.runtime.model.load_state_dict(state)
        return state, other.runtime.model.state_dict()

    mesh = MESHES["one"]
    ((expected, _),) = on_all(mesh, body)
    mesh = MESHES[name]
    for state, again in on_all(mesh, body):
        assert list(state) == list(expected)
        assert not different(expected, state) and not different(expected, again)
