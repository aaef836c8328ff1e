"""The socket transport between two hosts: listeners, authentication, cut links and deaths."""

from __future__ import annotations

import json
import os
import pickle
import secrets
import signal
import socket
import sys
import textwrap
import time
from contextlib import suppress
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from deepseek_zero.base.errors import PeerError, UsageError
from deepseek_zero.base.launch import DEAD_AFTER, INTERFACE, SECRET_FILE, TLS
from deepseek_zero.comm.collectives import Comm
from deepseek_zero.comm.net import links as sockets
from deepseek_zero.comm.transports.tcp import Tcp
from tests.hosts import Host, Process, hosts
from tests.models import Gpt, batch_of, seeded
from tests.reference import OPTIMIZERS, Reference
from tests.training import DTYPES, Run, start_engine, train_step

pytestmark = pytest.mark.slow  # starts ranks in network namespaces, which takes minutes

CPU = torch.device("cpu")
PORTS = range(29600, 29610)
MASTER_PORT = 29555
TRAINS = """
    import os, pathlib, sys, time
    import torch
    import deepseek_zero
    folder, rank = pathlib.Path(sys.argv[1]), os.environ["RANK"]

    def losses(transport, pause):
        torch.manual_seed(1)
        model = torch.nn.Sequential(*[torch.nn.Linear(300, 300) for _ in range(4)])
        config = {"train_micro_batch_size_per_gpu": 4, "steps_per_print": None,
                  "zero_optimization": {"stage": 3}, "transport": transport,
                  "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}}}
        engine, *_ = deepseek_zero.initialize(model=model, config=config)
        torch.manual_seed(2 + int(rank))
        found = []
        for step in range(12):
            if pause and step == 3:
                (folder / f"{rank}.ready").write_text(str(os.getpid()))
                while not (folder / "go").exists():
                    time.sleep(0.01)
            loss = engine(torch.randn(4, 300)).square().mean()
            engine.backward(loss)
            engine.step()
            found.append(loss.item().hex())
            if pause and step > 3:
                time.sleep(0.1)
        return found

    ours = losses("tcp", True)
    print("the bits are", "the same" if ours == losses("gloo", False) else "others", flush=True)
"""
STRANGER = """
    import json, socket, sys
    for host, port in json.loads(sys.argv[1]):
        for said in (b"", b"\\x01" + b"raised/1" * 20, b"GET / HTTP/1.1\\r\\n\\r\\n" * 9,
                     b"\\x00\\x00\\x00\\x40" * 60):
            with socket.create_connection((host, port), timeout=30) as line:
                line.sendall(said)
"""


def secret_in(folder: Path) -> str:
    path = folder / "secret"
    path.touch(mode=0o600)
    path.write_bytes(secrets.token_bytes(32))
    return str(path)


def started(pair: tuple[Host, ...], folder: Path) -> list[Process]:
    """Start one rank per host with the launcher."""
    script = folder / "trains.py"
    script.write_text(textwrap.dedent(TRAINS))
    options = [
        "--num_nodes=2",
        f"--master_addr={pair[0].address}",
        f"--master_port={MASTER_PORT}",
        "--nproc=1",
    ]
    options += ["--interface=v0", f"--ports={PORTS[0]}-{PORTS[-1]}"]
    command = [sys.executable, "-m", "deepseek_zero.cli", "run", *options]
    environment = {SECRET_FILE: secret_in(folder)}
    return [
        host.run([*command, f"--node_rank={host.number}", str(script), str(folder)], environment)
        for host in pair
    ]


def wait_for(paths: list[Path], processes: list[Process]) -> None:
    deadline = time.monotonic() + 60
    while not all(path.exists() for path in paths):
        assert time.monotonic() < deadline and all(each.poll() is None for each in processes), [
            each.communicate(timeout=10)[0] for each in processes if each.poll() is not None
        ]
        time.sleep(0.05)


def test_a_run_listens_at_one_address_and_survives_unauthenticated_peers_and_a_cut(
    tmp_path: Path,
) -> None:
    with hosts(2) as pair:
        launchers = started(pair, tmp_path)
        wait_for([tmp_path / f"{rank}.ready" for rank in (0, 1)], launchers)
        for host in pair:
            ports = host.ports()
            assert {address for address, _ in ports} == {host.address}, (
                "one address, and that one named"
            )
            assert len([port for _, port in ports if port in PORTS]) == 1, "one port of ours"
            assert ((host.address, MASTER_PORT) in ports) == (host is pair[0])
        secret = (tmp_path / "secret").read_bytes()
        for pid in [pid for host in pair for pid in host.pids()]:
            for what in ("cmdline", "environ"):
                said = Path(f"/proc/{pid}/{what}").read_bytes()
                assert secret not in said and secret.hex().encode() not in said, (
                    f"the secret is in {what}"
                )
        ours = [place for host in pair for place in host.ports() if place[1] in PORTS]
        stranger = pair[1].run([sys.executable, "-c", textwrap.dedent(STRANGER), json.dumps(ours)])
        assert stranger.wait(60) == 0, stranger.communicate()[0]
        (tmp_path / "go").touch()
        pair[1].cut()
        time.sleep(4.0)
        pair[1].heal()
        outputs = [launcher.communicate(timeout=120)[0] for launcher in launchers]
    for output, launcher in zip(outputs, launchers, strict=True):
        assert launcher.returncode == 0 and "the bits are the same" in output, output
        assert "have no secret" not in output
    assert any("closed a connection from" in output for output in outputs)
    assert not any(secret.hex() in output for output in outputs)


def test_the_launchers_store_listens_at_the_named_interface_or_the_reachable_address(
    tmp_path: Path,
) -> None:
    """The store never listens on all addresses.

    This includes a master address of another machine that is routed to this host.
    """
    script = tmp_path / "waits.py"
    script.write_text("import time\ntime.sleep(60)\n")
    command = [
        sys.executable,
        "-m",
        "deepseek_zero.cli",
        "run",
        "--nproc=1",
        f"--master_port={MASTER_PORT}",
    ]
    with hosts(2) as (alone, first):
        place = ["--num_nodes=2", "--node_rank=0", "--master_addr=10.77.0.200"]
        launchers = [
            alone.run([*command, str(script)], {INTERFACE: "v0"}),
            first.run([*command, *place, str(script)]),
        ]
        deadline = time.monotonic() + 60
        while not (alone.ports() and first.ports()):
            assert time.monotonic() < deadline and all(each.poll() is None for each in launchers)
            time.sleep(0.05)
        assert alone.ports() == {(alone.address, MASTER_PORT)}
        assert first.ports() == {(first.address, MASTER_PORT)}


@pytest.mark.ranks(4, hosts=2)
def test_two_hosts_of_two_ranks_train_to_the_bits_of_gloo() -> None:
    found = []
    for transport in ("gloo", "tcp"):
        run = Run(3, "bf16", 2, optimizer="adamw", transport=transport)
        engine = start_engine(run, seeded(Gpt))
        losses = [loss for step in range(3) for loss in train_step(engine, run, step)]
        found.append((losses, engine.module.state_dict()))
    (losses, weights), (other_losses, other_weights) = found
    assert all(map(torch.equal, losses, other_losses))
    assert all(torch.equal(weights[name], other_weights[name]) for name in weights)
    assert "shared memory within a host, our own sockets between hosts" in str(
        engine.runtime.comm.capabilities()
    )


@pytest.mark.ranks(2, hosts=2, fresh=True)
def test_nothing_is_unpickled_while_two_hosts_meet_and_train(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def forbidden(*_: object, **__: object) -> None:
        raise AssertionError("something is unpickled")

    # Created before unpickling is forbidden
    run = Run(3, "bf16", 1, optimizer="adamw", transport="tcp")
    for name in ("load", "loads", "Unpickler", "_Unpickler"):
        monkeypatch.setattr(pickle, name, forbidden)
    monkeypatch.setattr("torch.distributed.distributed_c10d._unpickler", forbidden)
    engine = start_engine(run, seeded(Gpt))
    train_step(engine, run, 0)


@pytest.mark.ranks(2, hosts=2, fresh=True)
def test_two_hosts_with_tls_train_to_the_bits_of_one_process_encrypted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rank = dist.get_rank()
    path = tmp_path / f"secret{rank}"
    path.touch(mode=0o600)
    path.write_bytes(b"the secret that both hosts hold.")
    monkeypatch.setenv(TLS, "1")
    monkeypatch.setenv(SECRET_FILE, str(path))
    run = Run(3, optimizer="adamw")
    with socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(3)) as wire:
        wire.setblocking(False)
        wire.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 16 << 20)
        engine = start_engine(run, seeded(Gpt))
        losses = train_step(engine, run, 0)
        heard = bytearray()
        with suppress(BlockingIOError):
            while True:
                heard += wire.recv(1 << 17)
    weights = engine.module.state_dict()
    reference = Reference(
        seeded(Gpt), 2, run.accumulation, False, DTYPES[run.dtype], OPTIMIZERS[run.optimizer]
    )
    expected, _ = reference.step(
        [[batch_of(0, micro, each) for micro in range(run.accumulation)] for each in (0, 1)]
    )
    assert all(map(torch.equal, losses, expected[rank]))
    assert all(
        torch.equal(weights[name], weight) for name, weight in reference.model.state_dict().items()
    )
    assert "our own sockets" in str(engine.runtime.comm.capabilities())
    begins = [weight.flatten()[:8] for weight in seeded(Gpt).state_dict().values()]
    marks = [
        bytes(begin.view(torch.uint8).tolist()) for begin in begins if len(set(begin.tolist())) > 4
    ]
    assert len(heard) > 100_000 and marks and not any(mark in heard for mark in marks)
    with pytest.raises(UsageError, match="gloo encrypts nothing"):
        start_engine(Run(3, transport="gloo"), seeded(Gpt))


@pytest.mark.ranks(2, hosts=2, dies=[1])
def test_a_rank_of_another_host_that_is_killed_is_named_at_once() -> None:
    comm = Comm(CPU, transport="tcp")
    assert isinstance(comm.lanes.transport, Tcp)
    comm.barrier("all are here")
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    began = time.monotonic()
    with pytest.raises(PeerError, match=r"lost its connection to rank 1 .*its process has ended"):
        comm.all_gather(torch.zeros(1 << 20), "gather", "nobody's").wait()
    assert time.monotonic() - began < sockets.dead_after() / 2, "not by its silence"


@pytest.mark.ranks(2, hosts=2, fresh=True)
def test_without_connections_every_engine_uses_gloo(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def unreachable(recovery: object, seconds: float) -> None:
        raise TimeoutError("a firewall drops it")

    monkeypatch.setenv(DEAD_AFTER, "2")
    monkeypatch.setattr(sockets, "CONNECT_SECONDS", 3.0)  # for the rank that listens
    monkeypatch.setattr(sockets._Recovery, "_reach", unreachable)
    run = Run(3, transport="measured")
    for _ in range(2):  # the second engine does not try to connect again
        engine = start_engine(run, seeded(Gpt))
        (fallback,) = [
            line for line in engine.parts.capabilities.fallbacks if "measured between hosts" in line
        ]
        assert (
            "chosen: gloo (our own sockets: rank" in fallback
            and "has no connection to rank" in fallback
        )
        train_step(engine, run, 0)
    with pytest.raises(PeerError, match="has no connection to rank"):
        Comm(CPU, transport="tcp")


@pytest.mark.ranks(2, hosts=2)
def test_a_rank_that_is_stopped_for_long_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(DEAD_AFTER, "2")
    for name, value in {"SILENT_SECONDS": 0.5, "TELL_AFTER": 0.8, "BEAT_SECONDS": 0.2}.items():
        monkeypatch.setattr(sockets, name, value)
    comm, rank = Comm(CPU, transport="tcp"), dist.get_rank()
    full = torch.zeros(2 << 20)
    full.chunk(2)[rank].fill_(rank + 1.0)
    began = time.monotonic()
    comm.barrier("all are here")  # the other rank stops only after this barrier
    if rank == 1:
        me = os.getpid()
        if os.fork() == 0:
            time.sleep(4.0)
            os.kill(me, signal.SIGCONT)
            os._exit(0)
        os.kill(me, signal.SIGSTOP)
    comm.all_gather(full, "gather", "a tensor").wait()
    assert [float(part.mean()) for part in full.chunk(2)] == [1.0, 2.0]
    assert rank == 1 or time.monotonic() - began > 3.0
    if rank == 1:
        os.wait()
    comm.barrier("the end")
