"""Ranks of one host communicate over shared memory, with the same bits as over gloo.

Edits of one process are invisible to others, and no segments are left. Tests replace a process's
host key, so that two ranks are on one host and two are on different hosts.
"""

from __future__ import annotations

import gc
import io
import logging
import mmap
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from deepseek_zero import utils
from deepseek_zero.base.errors import ModelMismatchError, PeerError
from deepseek_zero.base.launch import dead_after
from deepseek_zero.base.log import logger
from deepseek_zero.base.memory import Segment
from deepseek_zero.comm import context
from deepseek_zero.comm.collectives import Comm, scatter
from deepseek_zero.comm.transports import shared_memory
from deepseek_zero.comm.transports.composed import Hierarchical
from deepseek_zero.comm.transports.gloo import Gloo
from deepseek_zero.comm.transports.shared_memory import INLINE_BYTES, SharedMemory
from deepseek_zero.comm.transports.tcp import Tcp
from deepseek_zero.extensions.shared_weight import SharedWeight
from tests.models import Gpt, seeded
from tests.training import Run, start_engine, train_step

CPU = torch.device("cpu")
LARGE = 50_000  # elements: more than fit inline into a message


def mapped(numel: int) -> Tensor:
    """Return private anonymous pages at an address chosen by the system."""
    return torch.frombuffer(
        mmap.mmap(-1, numel * 4, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS), dtype=torch.float32
    )


@contextmanager
def hosts(key_of: Callable[[int], str]) -> Iterator[None]:
    """Create new connections, with each rank on the host given by `key_of`."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shared_memory, "host_key", lambda: key_of(dist.get_rank()))
        patch.setattr(context.WorldContext, "_current", None)
        yield


def trained(run: Run) -> tuple[list[Tensor], dict[str, Tensor], float]:
    """Return losses and weights after three steps, and the bytes sent.

    Rows from startup, in which ranks exchange their transports among others, do not count.
    """
    engine = start_engine(run, seeded(Gpt))
    del engine.runtime.comm.meter.sent_bytes["rows"]
    losses = [loss for step in range(3) for loss in train_step(engine, run, step)]
    return losses, dict(engine.module.state_dict()), engine.runtime.comm.meter.total_bytes()


def assert_same(found: tuple[list[Tensor], dict[str, Tensor], float], expected: object) -> None:
    losses, weights, sent = found
    other_losses, other_weights, other_sent = expected  # type: ignore[misc]
    assert all(map(torch.equal, losses, other_losses))
    assert weights.keys() == other_weights.keys()
    assert all(torch.equal(weights[name], other_weights[name]) for name in weights)
    assert sent == other_sent, "the volume is the movement's, however it travels"


@pytest.mark.ranks(2)
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("accumulation", [1, 2])
def test_shared_memory_gives_the_bits_of_gloo(stage: int, dtype: str, accumulation: int) -> None:
    expected = trained(Run(stage, dtype, accumulation, optimizer="adamw", transport="gloo"))
    assert_same(trained(Run(stage, dtype, accumulation, optimizer="adamw")), expected)


@pytest.mark.ranks(4)
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_two_hosts_of_two_ranks_give_the_bits_of_gloo(stage: int, dtype: str) -> None:
    run = Run(stage, dtype, optimizer="adamw", ranks_per_host=2)
    expected = trained(replace(run, transport="gloo"))
    with hosts(lambda rank: f"host {rank // 2}"):
        comm = Comm(CPU)
        assert isinstance(comm.lanes.transport, Hierarchical)
        assert list(comm.lanes.transport.neighbours) == [dist.get_rank() ^ 1]
        assert_same(trained(run), expected)


@pytest.mark.ranks(4)
@pytest.mark.parametrize(
    ("stage", "dtype"), [(0, "bf16"), (1, "fp32"), (2, "bf16"), (3, "fp32"), (3, "bf16")]
)
def test_two_hosts_with_our_own_sockets_between_give_the_bits_of_gloo(
    stage: int, dtype: str
) -> None:
    run = Run(stage, dtype, 2, optimizer="adamw", transport="gloo", ranks_per_host=2)
    expected = trained(run)
    with hosts(lambda rank: f"host {rank // 2}"):
        comm = Comm(CPU, transport="tcp")
        assert isinstance(comm.lanes.transport, Hierarchical)
        assert isinstance(comm.lanes.transport.inter_node, Tcp)
        assert_same(trained(replace(run, transport="tcp")), expected)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("stage", [1, 3])
def test_our_own_sockets_give_the_bits_of_gloo(stage: int) -> None:
    run = Run(stage, "bf16", optimizer="adamw", transport="gloo", clipping=0.1)
    expected = trained(run)
    with hosts(str):
        assert isinstance(Comm(CPU, transport="tcp").lanes.transport, Tcp)
        assert_same(trained(replace(run, transport="tcp")), expected)


@pytest.mark.ranks(2, dies=[1])
def test_with_our_own_sockets_a_dead_rank_is_named_immediately() -> None:
    with hosts(str):
        comm = Comm(CPU, transport="tcp")
        comm.barrier("all are here")
        if dist.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        full, began = torch.zeros(2 * LARGE), time.monotonic()
        with pytest.raises(
            PeerError, match=r"lost its connection to rank 1 .*its process has ended"
        ):
            comm.all_gather(full, "gather", "nobody's").wait()
        assert time.monotonic() - began < dead_after() / 2, "not by its silence"


@pytest.mark.ranks(2)
def test_ranks_that_share_no_host_use_gloo() -> None:
    with hosts(str):
        assert isinstance(Comm(CPU).lanes.transport, Gloo)


@pytest.mark.ranks(2)
def test_a_system_that_forbids_it_is_no_error() -> None:
    def forbidden() -> str:
        raise PermissionError

    with hosts(lambda rank: forbidden()):
        assert isinstance(Comm(CPU).lanes.transport, Gloo)


@pytest.mark.ranks(2)
def test_different_transports_on_ranks_are_reported() -> None:
    with pytest.raises(ModelMismatchError, match="transport"):
        Comm(CPU, transport="gloo" if dist.get_rank() else "fastest")


@pytest.mark.ranks(3)
@pytest.mark.parametrize("numel", [1, 5, LARGE])
def test_pieces_arrive_from_private_and_from_shared_memory(numel: int) -> None:
    comm, rank = Comm(CPU), dist.get_rank()
    assert isinstance(comm.lanes.transport, SharedMemory)
    for allocate in (comm.empty, lambda count, dtype: torch.empty(count, dtype=dtype)):
        full = allocate(3 * numel, torch.float32)
        full.chunk(3)[rank].fill_(rank + 1)
        comm.all_gather(full, "gather", "numbers").wait()
        assert torch.equal(full, torch.arange(1.0, 4.0).repeat_interleave(numel))
        pieces = [allocate(numel, torch.bfloat16).fill_(10 * rank + peer) for peer in range(3)]
        found: list[list[float]] = []
        comm.exchange(
            pieces,
            [None] * 3,
            "reduce",
            "numbers",
            lambda received, found=found: found.append([float(each[-1]) for each in received]),  # type: ignore[misc]
        ).wait()
        assert found == [[float(10 * peer + rank) for peer in range(3)]]
        for piece in pieces:
            comm.wait_until_read(piece)


@pytest.mark.ranks(2)
def test_a_buffer_is_reusable_only_after_it_was_read() -> None:
    comm, rank = Comm(CPU), dist.get_rank()
    piece, found = comm.empty(LARGE, torch.float32), []
    for turn in range(20):
        comm.wait_until_read(piece)
        piece.fill_(turn + rank)
        if rank == turn % 2:
            time.sleep(0.01)
        pending = comm.exchange(
            [piece, piece],
            [None, None],
            "reduce",
            "turn",
            lambda got: found.append(got[1 - rank].clone()),
        )
        pending.wait()
    assert [bool((values == turn + 1 - rank).all()) for turn, values in enumerate(found)] == [
        True
    ] * 20


@pytest.mark.ranks(2)
@pytest.mark.parametrize("are_shared", [True, False])
def test_reused_pages_are_not_mistaken_for_earlier_ones(
    are_shared: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    comm, rank = Comm(CPU), dist.get_rank()

    def exchanged(piece: Tensor) -> float:
        found: list[Tensor] = []
        got = comm.exchange(
            [piece] * 2,
            [None] * 2,
            "reduce",
            "pages",
            lambda it: found.append(it[1 - rank].clone()),
        )
        got.wait()
        comm.wait_until_read(piece)
        return float(found[0].unique())

    earlier = [comm.empty(LARGE, torch.float32).fill_(-1.0)]
    address, create = earlier[0].data_ptr(), Segment.create
    assert exchanged(earlier[0]) == -1.0, "and everybody has mapped it"
    if are_shared:  # free the old pages while new ones are created, as a garbage collection might
        monkeypatch.setattr(Segment, "create", lambda nbytes: (earlier.clear(), create(nbytes))[1])
        piece = comm.empty(LARGE, torch.float32)
        monkeypatch.undo()
    else:
        earlier.clear()
        piece = mapped(LARGE)
    assert piece.data_ptr() == address, "or this test shows nothing"
    assert exchanged(piece.fill_(rank)) == 1.0 - rank
    del piece
    assert exchanged(comm.empty(LARGE, torch.float32).fill_(rank)) == 1.0 - rank


@pytest.mark.ranks(2)
def test_an_in_place_edit_stays_on_its_rank_and_ends_with_its_use() -> None:
    run = Run(3, optimizer="sgd")
    engine, plain = start_engine(run, seeded(Gpt)), start_engine(run, seeded(Gpt))
    edited = engine.module.blocks[1].up

    def edit(module: torch.nn.Module, args: object) -> None:
        module.weight.data.mul_(2.0 if dist.get_rank() == 0 else 1.0)

    handle = edited.register_forward_pre_hook(edit)
    for each in (engine, plain):
        with torch.no_grad():
            each(torch.zeros(1, 3, dtype=torch.int64))
    handle.remove()
    weights = [dict(each.module.state_dict()) for each in (engine, plain)]
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])
    losses = [train_step(each, run, 0)[0] for each in (engine, plain)]
    assert torch.equal(*losses)


@pytest.mark.ranks(2)
def test_sharded_weights_are_in_memory_once_for_all_ranks() -> None:
    engine = start_engine(Run(3), seeded(Gpt, width=60, hidden=2400))
    group = max(engine.runtime.groups, key=lambda each: each.layout.numel)
    assert isinstance(group.weight_gather, SharedWeight)
    slices = group.weight_gather.memory.whole.chunk(2)
    mine, other = slices[dist.get_rank()], slices[1 - dist.get_rank()]
    dist.barrier()
    group.weight.memory.fill_(7.0 + dist.get_rank())
    dist.barrier()
    assert (mine == 7.0 + dist.get_rank()).all()
    assert (other == 8.0 - dist.get_rank()).all()


@pytest.mark.ranks(2)
@pytest.mark.parametrize("kind", ["full", "local"])
def test_a_program_changes_a_weight_only_after_other_ranks_have_read_it(kind: str) -> None:
    engine = start_engine(Run(3), seeded(Gpt))
    head = engine.module.head
    tokens = torch.arange(6).view(2, 3)

    def wait(module: torch.nn.Module, args: object) -> None:
        if dist.get_rank() == 1:
            time.sleep(0.5)

    with torch.no_grad():
        expected = engine(tokens)
        handle = head.register_forward_pre_hook(wait)
        found = engine(tokens)
        if kind == "full":
            utils.safe_set_full_fp32_param(head.weight, torch.zeros(head.weight.shape))
        else:
            held = utils.safe_get_local_fp32_param(head.weight)
            utils.safe_set_local_fp32_param(head.weight, torch.zeros_like(held))
        handle.remove()
        assert torch.equal(found, expected)
        assert not engine(tokens).any()


@pytest.mark.ranks(2)
def test_no_descriptor_and_no_mapping_remains_after_an_engine() -> None:
    def train() -> None:
        engine = start_engine(Run(1, optimizer="adamw"), seeded(Gpt, hidden=900))
        for step in range(2):
            train_step(engine, Run(1), step)
        del engine
        gc.collect()

    def held() -> tuple[int, int]:
        me = psutil.Process()
        return me.num_fds(), sum(
            "memfd:deepseek_zero" in each.path for each in me.memory_maps(grouped=False)
        )

    counts = []
    for _ in range(4):
        train()
        Comm(CPU).barrier("the others have let go, too")
        Comm(CPU).barrier("and have said so")
        counts.append(held())
    assert counts[-1] == counts[1], "(descriptors, mappings) after each engine"


@pytest.mark.ranks(2)
def test_a_full_queue_does_not_block_forever() -> None:
    comm, rank = Comm(CPU), dist.get_rank()
    boxes = [[torch.empty(1) for _ in range(2)] for _ in range(2000)]
    pending = [
        comm.exchange([torch.tensor([float(turn + rank)])] * 2, box, "reduce", f"number {turn}")
        for turn, box in enumerate(boxes)
    ]
    for each in pending:
        each.wait()
    assert [float(box[1 - rank]) for box in boxes] == [
        float(turn + 1 - rank) for turn in range(2000)
    ]


@pytest.mark.ranks(2)
def test_a_rank_that_ends_has_sent_all_its_messages() -> None:
    comm, rank, pieces = Comm(CPU), dist.get_rank(), torch.ones(40, INLINE_BYTES // 4)
    if rank == 1:
        time.sleep(0.3)  # the queue to this rank is full long before it receives
    for number, piece in enumerate(pieces):
        scatter(comm, [piece] * 2, piece, f"piece {number}")
    # Rank 0 joins no further collective


@pytest.mark.ranks(2, dies=[1])
def test_the_death_of_a_rank_is_reported_immediately() -> None:
    comm = Comm(CPU)
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    began = time.monotonic()
    with pytest.raises(PeerError, match="rank 1"):
        comm.barrier("nobody comes")
    assert time.monotonic() - began < 20.0


def test_a_segment_shows_remote_writes_and_keeps_local_ones_private() -> None:
    segment = Segment.create(3 * 4096 + 10)
    shared, look = segment.map(0, segment.nbytes, torch.uint8), segment.view()
    part = segment.map(5000, 100, torch.uint8)
    segment.close()
    part.fill_(3)
    assert shared[5000:5100].eq(3).all()
    assert look.tensor[5000:5100].eq(3).all()
    assert not look.was_written()
    look.tensor[1] = 9
    assert look.was_written()
    assert shared[1] == 0
    look.clear_written()
    assert look.tensor[1] == 0
    assert not look.was_written()


ENDLESS = """
    import os, signal, sys, torch
    import deepseek_zero
    from deepseek_zero.comm.transports.shared_memory import SharedMemory
    folder, victim, rank = sys.argv[1], sys.argv[2], os.environ["RANK"]

    def here():
        open(os.path.join(folder, f"{rank}.pid"), "w").write(str(os.getpid()))

    def stop(self, mark):
        here()
        signal.pause()

    layer = torch.nn.TransformerEncoderLayer(
        256, 4, dim_feedforward=1024, dropout=0.0, batch_first=True)
    model = torch.nn.TransformerEncoder(layer, 4, enable_nested_tensor=False)
    zero = {"stage": 3, "stage3_param_persistence_threshold": 0, "stage3_max_live_parameters": 0}
    config = {"train_micro_batch_size_per_gpu": 1, "steps_per_print": None,
              "zero_optimization": zero, "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}}}
    engine, *_ = deepseek_zero.initialize(model=model, config=config)
    for step in range(10**9):
        loss = engine(torch.randn(1, 8, 256)).square().mean()
        engine.backward(loss)
        engine.step()
        if step == 3 and victim == "rank in a gather" and rank == "1":
            # the others have begun the gather that this rank does not come to
            SharedMemory.barrier = stop
        elif step == 3:
            here()
"""


@pytest.mark.parametrize(
    "victim",
    [
        "rank",
        pytest.param("rank in a gather", marks=pytest.mark.slow),
        pytest.param("launcher", marks=pytest.mark.slow),
    ],
)
def test_kill_9_ends_the_job_in_seconds_and_leaves_nothing_in_shared_memory(
    victim: str, tmp_path: Path
) -> None:
    script = tmp_path / "endless.py"
    script.write_text(textwrap.dedent(ENDLESS))
    before = segments()
    command = [
        sys.executable,
        "-m",
        "deepseek_zero.cli",
        "run",
        "--nproc",
        "2",
        str(script),
        str(tmp_path),
        victim,
    ]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as launcher:
        deadline = time.monotonic() + 60
        while len(list(tmp_path.glob("*.pid"))) < 2 and time.monotonic() < deadline:
            time.sleep(0.05)
        time.sleep(0.3)
        ranks = [int(path.read_text()) for path in sorted(tmp_path.glob("*.pid"))]
        assert len(ranks) == 2
        os.kill(launcher.pid if victim == "launcher" else ranks[1], signal.SIGKILL)
        began = time.monotonic()
        while any(map(psutil.pid_exists, ranks)) and time.monotonic() - began < 30:
            time.sleep(0.02)
        seconds = time.monotonic() - began
        out = launcher.communicate(timeout=60)[0]
    assert seconds < 5.0, out
    deadline = time.monotonic() + 20
    while (left := segments() - before) and time.monotonic() < deadline:
        time.sleep(0.05)  # other programs on this machine may have segments for a short time
    assert not left
    if victim != "launcher":
        assert "rank 1" in out
        assert "PeerError" in out or "SIGKILL" in out, out


def segments() -> set[str]:
    """Return the names in shared memory without semaphores, which this library never creates."""
    return {name for name in os.listdir("/dev/shm") if not name.startswith("sem.")}


def said_by(call: Callable[[], object]) -> str:
    """Return the log output of a call."""
    written = io.StringIO()
    handler = logging.StreamHandler(written)
    logger.addHandler(handler)
    try:
        call()
    finally:
        logger.removeHandler(handler)
    return written.getvalue()


@pytest.mark.ranks(2)
@pytest.mark.parametrize("transport", ["fastest", "gloo"])
def test_a_timeline_has_every_collective_of_a_step(transport: str) -> None:
    run = Run(3, transport=transport)
    engine = start_engine(run, seeded(Gpt))
    engine.config = engine.config.model_copy(update={"steps_per_print": 1000})
    engine.observer.config = engine.config
    train_step(engine, run, 0)
    engine.runtime.comm.meter.reset()
    with engine.timeline() as seen:
        with engine.timeline() as empty:
            pass
        train_step(engine, run, 1)
    assert not empty.collectives, "a nested block"
    calls = engine.runtime.comm.meter.calls
    assert Counter(event.lane for event in seen.collectives) == {
        "gather": 2
        if transport == "fastest"
        else calls["all_gather"],  # ranks on one host map all shards after the first exchange
        "reduce": calls["reduce_scatter"],
        "rows": calls["rows"],
    }
    assert all(
        event.issued <= event.arrived and event.issued <= event.waited[1]
        for event in seen.collectives
    )
    with engine.timeline() as outer, engine.timeline() as inner:
        train_step(engine, run, 2)
    assert inner.collectives and outer.collectives == inner.collectives
    assert engine.runtime.comm.meter.events is None
    train_step(engine, run, 2)
    assert "computing" in engine.explain().splitlines()[-1] or "waiting" in engine.explain()
    assert ("where the run went" in said_by(engine.destroy)) is (dist.get_rank() == 0)
    assert not said_by(engine.destroy), "once"
