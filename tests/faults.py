"""Inject faults into training on hosts made of namespaces, and check messages and deadlines.

    python -m tests.faults                          every row once
    python -m tests.faults --rows cut-lost --repeat 20 --load 1.5

Each row of the table is one fault. A run starts the launcher on every host, waits until the ranks
train, and injects the fault. It then measures how long each promised reaction takes, and looks for
leftover processes, listening sockets, shared memory and folders. The exit code is 1 if a promise
was broken. `--load` multiplies every bound, for a machine under other load.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import secrets
import shutil
import signal
import statistics
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

from tests.hosts import Host, Process, hosts
from tests.needs import need

CLOCK = Path(__file__).with_name("clock.c")
PORT, PORTS = 29555, range(29600, 29700)
START_SECONDS, END_SECONDS = 120.0, 60.0
LOOK_SECONDS = 0.01
PAUSE_SECONDS = 0.02  # extra time per step, as a stand-in for computation
STEPS = 30  # steps until a straggler is reported
STRANGERS = 1000
CALM_STEPS = 1000
# Steps before the first fault. The interval exceeds the steps until a straggler is reported.
SAVED_AFTER, SAVED_EVERY = (3, 25)
# Every Python program on the hosts imports this at start: launchers and ranks.
NO_PICKLES = """
import pickle

def refuse(*args, **words):
    raise AssertionError("unpickled")

pickle.load = pickle.loads = refuse
for name in ("Unpickler", "_Unpickler"):
    setattr(pickle, name, type(name, (getattr(pickle, name),), {"load": refuse}))
"""
LINK = "steps wait for the link between h0 and h1"
FALSE_ALARMS = "silent|HostLost|is stopped|is slow|wait for the link|has ended"
SAID = (b"", b"\x01" + b"raised/1" * 20, b"GET / HTTP/1.1\r\n\r\n" * 9, b"\x00\x00\x00\x40" * 60)


@dataclass
class Job:
    """A training run on several hosts with one launcher on each, and its output.

    Attributes:
        lines: Host, time and text of each line from the launchers. Times are `time.monotonic()`,
            which hosts of one machine share.
        own_clocks: The run will call `set_clock`.
        config: Additional configuration keys.
    """

    machines: Sequence[Host]
    folder: Path
    each: int
    own_clocks: bool = False
    config: Mapping[str, Any] = field(default_factory=dict)
    launchers: list[Process] = field(default_factory=list)
    lines: list[tuple[Host, float, str]] = field(default_factory=list)

    @property
    def ranks(self) -> range:
        return range(self.each * len(self.machines))

    def start(self, options: argparse.Namespace) -> None:
        """Start the launchers and wait until every rank has made some steps."""
        secret = self.folder / "secret"
        secret.touch(mode=0o600)
        secret.write_bytes(secrets.token_bytes(32))
        (self.folder / "sitecustomize.py").write_text(NO_PICKLES)
        environment = {
            "DEEPSEEK_ZERO_SECRET_FILE": str(secret),
            "OMP_NUM_THREADS": "1",
            "COLUMNS": "400",
        }
        environment["PYTHONPATH"] = os.pathsep.join(
            filter(None, (str(self.folder), os.environ.get("PYTHONPATH")))
        )
        if self.own_clocks:
            need(shutil.which("cc") is not None, "a C compiler, to make a clock that jumps")
            subprocess.run(
                ["cc", "-shared", "-fPIC", "-O1", "-o", self.folder / "clock.so", CLOCK], check=True
            )
            environment["LD_PRELOAD"] = str(self.folder / "clock.so")
        for host in self.machines:
            (self.folder / host.name).mkdir()
            environment["TMPDIR"] = str(self.folder / host.name)  # lost together with its host
            if self.own_clocks:
                self.set_clock(host, 0)
                environment["CLOCK_AHEAD"] = str(self._clock_of(host))
            words = [
                f"--num_nodes={len(self.machines)}",
                f"--node_rank={host.number}",
                f"--nproc={self.each}",
            ]
            words += [
                f"--master_addr={self.machines[0].address}",
                f"--master_port={PORT}",
                "--interface=v0",
            ]
            words += [f"--ports={PORTS[0]}-{PORTS[-1]}"]
            words += [f"--dead-after={options.dead_after:g}", "--module", "tests.faults"]
            words += ["--as-rank", str(self.folder), "--transport", options.transport]
            words += ["--config", json.dumps(self.config)]
            self.launchers.append(
                host.run([sys.executable, "-m", "deepseek_zero.cli", "run", *words], environment)
            )
            threading.Thread(
                target=self._listen, args=(host, self.launchers[-1]), daemon=True
            ).start()
        self.until(
            lambda: all(len(self.steps(rank)) > 3 for rank in self.ranks),
            START_SECONDS,
            "the ranks train",
        )

    def _clock_of(self, host: Host) -> Path:
        return self.folder / f"{host.name}.clock"

    def set_clock(self, host: Host, ahead: int) -> None:
        """Set the wall clock of the programs of a host `ahead` seconds ahead of the machine's."""
        with open(self._clock_of(host), "r+b" if self._clock_of(host).exists() else "wb") as clock:
            clock.write(struct.pack("=q", ahead))

    def wall_clock(self, rank: int) -> float:
        """Return how many seconds a rank's wall clock was ahead when its last step ended."""
        row = (self.folder / f"{rank}.steps").read_text().splitlines()[-2].split()
        return float(row[2]) - float(row[0]) - (time.time() - time.monotonic())

    def _listen(self, host: Host, launcher: Process) -> None:
        assert launcher.stdout is not None
        with suppress(ValueError):  # the pipe is closed
            for line in launcher.stdout:
                self.lines.append((host, time.monotonic(), line.rstrip()))

    def until(self, true: Callable[[], Any], seconds: float, what: str) -> float:
        """Wait until a condition holds and return the time.

        Raises AssertionError with all output if the condition does not hold within `seconds`.
        """
        deadline = time.monotonic() + seconds
        while not true():
            assert time.monotonic() < deadline, "\n".join(
                [
                    f"not after {seconds:g} s: {what}",
                    *(f"{host.name}| {text}" for host, _, text in self.lines),
                ]
            )
            time.sleep(LOOK_SECONDS)
        return time.monotonic()

    def steps(self, rank: int) -> list[tuple[float, str]]:
        """Return the end time and the exact loss of each step of a rank."""
        with suppress(OSError):
            rows = (self.folder / f"{rank}.steps").read_text().splitlines(keepends=True)
            return [(float(row.split()[0]), row.split()[1]) for row in rows if row.endswith("\n")]
        return []

    def error(self, rank: int) -> tuple[float, str] | None:
        """Return the time and text of a rank's error."""
        with suppress(OSError):
            when, what = json.loads((self.folder / f"{rank}.error").read_text())
            return float(when), str(what)
        return None

    def when_raised(self, ranks: Sequence[int], pattern: str) -> float:
        """Wait until each of these ranks has raised a matching error; return the last time."""
        self.until(
            lambda: all(self.error(rank) for rank in ranks),
            END_SECONDS,
            f"ranks {list(ranks)} raise {pattern}",
        )
        found = [error for rank in ranks if (error := self.error(rank)) is not None]
        for _, text in found:
            assert re.search(pattern, text), f"{pattern} is not in {text}"
        return max(when for when, _ in found)

    def when_said(self, machines: Sequence[Host], pattern: str) -> float:
        """Wait until the launcher of each host has printed a match; return the last time."""

        def first(host: Host) -> float | None:
            said = (
                when
                for where, when, text in list(self.lines)
                if where is host and re.search(pattern, text)
            )
            return next(said, None)

        names = ", ".join(host.name for host in machines)
        self.until(
            lambda: all(first(host) for host in machines), END_SECONDS, f"{names} says {pattern}"
        )
        return max(first(host) or 0.0 for host in machines)

    def when_gone(self, machines: Sequence[Host]) -> float:
        """Wait until no process is left on these hosts."""
        return self.until(
            lambda: not any(host.pids() for host in machines), END_SECONDS, "all processes are gone"
        )

    def finish(self) -> None:
        """Make the ranks end regularly after a few more steps."""
        last = max(len(self.steps(rank)) for rank in self.ranks) + 5
        part = self.folder / "last.part"
        part.write_text(str(last))
        part.rename(self.folder / "last")
        codes = [launcher.wait(END_SECONDS) for launcher in self.launchers]
        assert codes == [0] * len(codes), "\n".join(text for *_, text in self.lines)

    def assert_same_bits(self, reference: dict[int, list[str]]) -> None:
        """Compare losses with those of an undisturbed run for the steps that both have."""
        for rank in self.ranks:
            found = [loss for _, loss in self.steps(rank)]
            expected = reference.setdefault(rank, found)
            common = min(len(found), len(expected))
            assert common > 3 and found[:common] == expected[:common], f"rank {rank}: other losses"
            reference[rank] = max(found, expected, key=len)

    def assert_last_checkpoint_is_good(self) -> None:
        """Load the checkpoint that `latest` names, verify checksums and compare the next loss."""
        command = [sys.executable, "-m", "tests.faults", "--as-loader", str(self.folder)]
        alone = {"OMP_NUM_THREADS": "1", "DEEPSEEK_ZERO_LOG_LEVEL": "error"}
        done = subprocess.run(command, env={**os.environ, **alone}, capture_output=True, text=True)
        assert not done.returncode, done.stderr
        saved, loss = json.loads(done.stdout)
        assert saved % SAVED_EVERY == SAVED_AFTER and saved <= min(
            len(self.steps(rank)) for rank in self.ranks
        )
        assert [loss] * len(self.steps(0)[saved : saved + 1]) == [
            each for _, each in self.steps(0)[saved : saved + 1]
        ]

    def leftovers(self, machines: Sequence[Host]) -> list[str]:
        """Return leftover processes, sockets, shared memory and folders of running hosts."""
        found = []
        for host in machines:
            found += [f"{host.name}: process {pid}" for pid in host.pids()]
            found += [f"{host.name}: listens at {place}" for place in host.ports()]
            shm = Path("/proc", str(host.pid), "root", "dev", "shm")
            found += [
                f"{host.name}: /dev/shm/{path.name}"
                for path in shm.iterdir()
                if path.name != "hosts"
            ]
            found += [
                f"{host.name}: folder {path.name}" for path in (self.folder / host.name).iterdir()
            ]
        return found


@dataclass(frozen=True)
class Measure:
    """The bound of one promise in seconds (or steps), and the measured value."""

    what: str
    took: float
    bound: float


Play = Callable[[Job, argparse.Namespace], Iterator[Measure]]
UNDISTURBED: dict[int, list[str]] = {}  # by rank, the losses of the longest run so far


def cut_healed(
    job: Job,
    options: argparse.Namespace,
    cut: Callable[[Host], None] = Host.cut,
    heal: Callable[[Host], None] = Host.heal,
) -> Iterator[Measure]:
    h0, h1 = job.machines
    began = time.monotonic()
    cut(h1)
    yield Measure("said silent, both", job.when_said([h0], r"h1 .*silent for 5 s") - began, 6.5)
    job.when_said([h1], r"silent for 5 s")
    time.sleep(max(0.0, began + 7.0 - time.monotonic()))
    healed = time.monotonic()
    heal(h1)
    went_on = job.until(
        lambda: all(job.steps(rank)[-1][0] > healed + 0.1 for rank in job.ranks), 60, "steps go on"
    )
    yield Measure("goes on", went_on - healed, 2.0)
    job.when_said([h0, h1], r"answers again")
    job.finish()
    job.assert_same_bits(UNDISTURBED)


def cut_lost(
    job: Job, options: argparse.Namespace, cut: Callable[[Host], None] = Host.cut
) -> Iterator[Measure]:
    h0, h1 = job.machines
    near, far = job.ranks[: job.each], job.ranks[job.each :]
    began = time.monotonic()
    cut(h1)
    bound = options.dead_after + 1.0
    yield Measure(
        "HostLost, far side", job.when_raised(far, lost(h0, near, options)) - began, bound
    )
    yield Measure(
        "HostLost, near side", job.when_raised(near, lost(h1, far, options)) - began, bound
    )
    job.when_said([h0], lost(h1, far, options))
    job.when_said([h1], r"HostLost: (h0|node 0)")
    yield Measure("all gone", job.when_gone([h0, h1]) - began, options.dead_after + 6.0)
    job.assert_last_checkpoint_is_good()


def lost(host: Host, ranks: Sequence[int], options: argparse.Namespace) -> str:
    named = ", ".join(map(str, ranks))
    return rf"HostLost: {host.name} \(ranks? {named}\) silent for {options.dead_after:g} s"


def kill_rank(job: Job, options: argparse.Namespace) -> Iterator[Measure]:
    h0, h1 = job.machines
    victim = job.each  # the first rank on h1
    began = time.monotonic()
    os.kill(pid_of(job, h1, victim), signal.SIGKILL)
    said = rf"rank {victim} of {len(job.ranks)} was ended by signal 9 \(SIGKILL\), on h1"
    yield Measure("named with host and signal", job.when_said([h0], said) - began, 1.0)
    yield Measure("gone", job.when_gone([h0, h1]) - began, 5.0)


def kill_agent(job: Job, options: argparse.Namespace) -> Iterator[Measure]:
    h0, h1 = job.machines
    launcher = next(
        pid for pid in h1.pids() if "--node_rank=1" in words_of(pid) and "run" in words_of(pid)[:5]
    )
    began = time.monotonic()
    os.kill(launcher, signal.SIGKILL)
    yield Measure("named", job.when_said([h0], r"h1 .*ended") - began, 1.0)
    yield Measure("gone", job.when_gone([h0, h1]) - began, 5.0)


def kill_first_process(job: Job, options: argparse.Namespace) -> Iterator[Measure]:
    h0, h1 = job.machines
    began = time.monotonic()
    os.kill(h1.pid, signal.SIGKILL)
    yield Measure("named", job.when_said([h0], r"h1 .*ended") - began, 1.0)
    yield Measure("gone", job.when_gone([h0]) - began, 5.0)


def host_0_lost(job: Job, options: argparse.Namespace) -> Iterator[Measure]:
    h0, h1 = job.machines
    began = time.monotonic()
    h0.kill()
    survivors, gone = job.ranks[job.each :], job.ranks[: job.each]
    bound = options.dead_after + 1.0
    yield Measure("HostLost", job.when_raised(survivors, lost(h0, gone, options)) - began, bound)
    job.when_said([h1], r"HostLost: (h0|node 0)")
    yield Measure("all gone", job.when_gone([h1]) - began, options.dead_after + 6.0)


def stopped_rank(job: Job, options: argparse.Namespace) -> Iterator[Measure]:
    h0, h1 = job.machines
    victim = job.ranks[-1]
    pid = pid_of(job, h1, victim)
    began = time.monotonic()
    os.kill(pid, signal.SIGSTOP)
    yield Measure(
        "said, everywhere", job.when_said([h0, h1], rf"rank {victim} on h1 is stopped") - began, 7.0
    )
    time.sleep(max(0.0, began + options.dead_after + 2.0 - time.monotonic()))
    os.kill(pid, signal.SIGCONT)
    job.when_said([h0, h1], rf"rank {victim} on h1 continues")
    goes_on(job, STEPS)
    job.finish()
    job.assert_same_bits(UNDISTURBED)


def slow_rank(job: Job, options: argparse.Namespace) -> Iterator[Measure]:
    h0, _ = job.machines
    victim = job.ranks[-1]
    (job.folder / "slow").write_text(str(victim))
    began = len(job.steps(0))
    job.when_said([h0], rf"rank {victim} is slow")
    yield Measure("steps until named", len(job.steps(0)) - began, STEPS)
    job.finish()
    job.assert_same_bits(UNDISTURBED)


def slow_host(job: Job, options: argparse.Namespace) -> Iterator[Measure]:
    """A host whose programs get a core for only a third of the time."""
    h0, h1 = job.machines
    began = len(job.steps(0))
    with h1.slowed(2 / 3):
        job.when_said([h0], "|".join(rf"rank {victim} is slow" for victim in job.ranks[job.each :]))
        yield Measure("steps until named", len(job.steps(0)) - began, STEPS)
        time.sleep(options.dead_after)
    goes_on(job, 3)
    told = [
        text for *_, text in job.lines if re.search("silent|HostLost|is stopped|has ended", text)
    ]
    assert not told, told
    job.finish()
    job.assert_same_bits(UNDISTURBED)


def slow_link(job: Job, options: argparse.Namespace) -> Iterator[Measure]:
    h0, h1 = job.machines
    h1.limit("30mbit")
    began = len(job.steps(0))
    job.when_said([h0], LINK)
    yield Measure("steps until named", len(job.steps(0)) - began, STEPS)
    h1.limit(None)
    job.finish()
    job.assert_same_bits(UNDISTURBED)


def strangers(job: Job, options: argparse.Namespace) -> Iterator[Measure]:
    """Open incomplete connections and send garbage and a 1 GB length to every port of the job.

    Ports of gloo are left out because gloo does not authenticate connections.
    """
    h1 = job.machines[1]
    open_ports = [(host.address, port) for host in job.machines for _, port in host.ports()]
    places = [(host, port) for host, port in open_ports if port == PORT or port in PORTS]
    stranger = h1.run([sys.executable, "-m", "tests.faults", "--as-stranger", json.dumps(places)])
    out = stranger.communicate(timeout=END_SECONDS)[0]
    assert stranger.returncode == 0, out
    yield Measure("last one closed", float(out.split()[-1]), 5.5)
    job.finish()
    job.assert_same_bits(UNDISTURBED)
    for host in job.machines:
        said = [
            text
            for where, _, text in job.lines
            if where is host and "closed a connection from" in text
        ]
        assert len(said) <= 1 + job.each, said


def goes_on(job: Job, steps: int) -> float:
    """Wait for `steps` more steps of every rank; return the longest time between two steps of a
    rank.
    """
    first = {rank: len(job.steps(rank)) for rank in job.ranks}
    job.until(
        lambda: all(len(job.steps(rank)) >= first[rank] + steps for rank in job.ranks),
        2 * END_SECONDS,
        "steps",
    )
    ends = [[when for when, _ in job.steps(rank)[first[rank] - 1 :]] for rank in job.ranks]
    return max(after - before for each in ends for before, after in pairwise(each))


def undisturbed(job: Job, options: argparse.Namespace) -> Iterator[Measure]:
    """Nothing is injected for many steps, and no rank is reported as slow, silent or lost."""
    deadline = time.monotonic() + 5 * END_SECONDS
    while min(len(job.steps(rank)) for rank in job.ranks) < CALM_STEPS:
        assert time.monotonic() < deadline, f"no {CALM_STEPS} steps in {5 * END_SECONDS:g} s"
        time.sleep(1.0)  # Polling takes time from a rank's core.
    told = [text for *_, text in job.lines if re.search(FALSE_ALARMS, text)]
    yield Measure("lines that name somebody", len(told), 0)
    job.finish()
    job.assert_same_bits(UNDISTURBED)


def loss_of_packets(job: Job, options: argparse.Namespace) -> Iterator[Measure]:
    h1 = job.machines[1]
    with h1.disturbed(loss=0.01) as counts:
        yield Measure("longest step", goes_on(job, 40), 5.0)
        job.finish()
    assert counts["lost"] > 20, counts
    job.assert_same_bits(UNDISTURBED)
    assert not [text for *_, text in job.lines if "HostLost" in text]


def delay(job: Job, options: argparse.Namespace, loss: float = 0.0) -> Iterator[Measure]:
    h0, h1 = job.machines
    with h1.disturbed(delay=0.025, loss=loss) as counts:  # 50 ms round trip
        began = len(job.steps(0))
        job.when_said([h0], LINK)
        yield Measure("steps until named", len(job.steps(0)) - began, STEPS)
        job.finish()
    job.assert_same_bits(UNDISTURBED)
    assert (counts["lost"] > 0) == (loss > 0), counts
    for rank in job.ranks:
        assert re.search(LINK, (job.folder / f"{rank}.explained").read_text()), (
            f"rank {rank} explains no link"
        )


def loss_and_delay(job: Job, options: argparse.Namespace) -> Iterator[Measure]:
    yield from delay(job, options, loss=0.01)


def flipped_bits(job: Job, options: argparse.Namespace) -> Iterator[Measure]:
    """Bits flip that TCP's checksum does not detect.

    The checksums of the messages detect them, and the messages are sent again over a new
    connection.
    """
    h1 = job.machines[1]
    with h1.disturbed(flip_every=1500) as counts:
        yield Measure("longest step", goes_on(job, 40), 5.0)
        job.finish()
    found = [text for *_, text in job.lines if "is damaged" in text]
    assert counts["damaged"] >= 3 and found, (counts, found)
    yield Measure("damaged and not noticed", counts["damaged"] - len(found), 0)
    job.assert_same_bits(UNDISTURBED)


def clock_jumps(job: Job, options: argparse.Namespace) -> Iterator[Measure]:
    """The wall clock of one host jumps one hour ahead, then one hour back."""
    h1, far = job.machines[1], job.ranks[job.each]
    longest = 0.0
    for ahead in (3600, -3600):
        job.set_clock(h1, ahead)
        until = time.monotonic() + 6.0  # silence is reported after five seconds
        while time.monotonic() < until:
            longest = max(longest, goes_on(job, 10))
        seen = {rank: job.wall_clock(rank) for rank in (0, far)}
        assert abs(seen[far] - ahead) < 5.0 and abs(seen[0]) < 5.0, (
            f"clocks of ranks are ahead by {seen}, not {ahead}"
        )
    yield Measure("longest step", longest, 2.0)
    job.finish()
    job.assert_same_bits(UNDISTURBED)
    told = [text for *_, text in job.lines if re.search(FALSE_ALARMS, text)]
    assert not told, told


def cut_between(job: Job, options: argparse.Namespace) -> Iterator[Measure]:
    """Two hosts lose the connection to each other, and both still reach host 0.

    The errors of gloo contain neither the host nor the time.
    """
    h1, h2 = job.machines[1:]
    began = time.monotonic()
    h1.isolate()
    h2.isolate()
    bound = options.dead_after + (1.0 if options.transport == "tcp" else 5.0)
    said = (
        r"HostLost: h[12] \(ranks? [\d, ]+\) silent" if options.transport == "tcp" else "PeerError"
    )
    yield Measure("raised, both", job.when_raised(job.ranks[job.each :], said) - began, bound)
    yield Measure("all gone", job.when_gone(job.machines) - began, bound + 5.0)


def two_hosts_lost(*gone: int) -> Play:
    """Two of three hosts lose power at once; the third one names one of them and ends."""

    def two_lost(job: Job, options: argparse.Namespace) -> Iterator[Measure]:
        (survivor,) = (host for host in job.machines if host.number not in gone)
        ranks = job.ranks[survivor.number * job.each :][: job.each]
        began = time.monotonic()
        for number in gone:
            job.machines[number].kill()
        named = "|".join(f"h{number}" for number in gone)
        said = (
            rf"HostLost: (.* and )?({named}) \(ranks? [\d, ]+\) silent for {options.dead_after:g} s"
        )
        yield Measure("HostLost", job.when_raised(ranks, said) - began, options.dead_after + 1.0)
        job.when_said([survivor], rf"HostLost: ({named}|node 0)")
        yield Measure("all gone", job.when_gone([survivor]) - began, options.dead_after + 6.0)
        job.assert_last_checkpoint_is_good()

    return two_lost


def flipped_in(what: str, every: int) -> Play:
    """A bit flips in a rank's memory. every: steps between two integrity checks."""

    def flipped(job: Job, options: argparse.Namespace) -> Iterator[Measure]:
        victim = job.ranks[-1]
        (job.folder / "flip").write_text(f"{victim} {what}")
        began = job.until((job.folder / "flipped").exists, END_SECONDS, "a bit flips")
        job.when_raised(job.ranks, rf"IntegrityError: step \d+: .*{what}.* on rank {victim}")
        named = {
            int(text.split("step ")[1].split(":")[0])
            for rank in job.ranks
            for _, text in [job.error(rank) or (0, "")]
        }
        yield Measure(
            "steps until named, by all",
            max(named) - int((job.folder / "flipped").read_text()),
            every,
        )
        yield Measure("gone", job.when_gone(job.machines) - began, 5.0 + every * 0.1)

    return flipped


def integrity(stage: int, every: int) -> dict[str, Any]:
    """Return the configuration keys that make every rank check for flipped bits."""
    zero = {"stage": stage, "stage3_param_persistence_threshold": 0}
    return {"integrity": {"mode": "end", "every": every}, "zero_optimization": zero}


@dataclass(frozen=True)
class Row:
    """A row of the table.

    Attributes:
        hosts: Number of hosts.
        own_clocks: See `Job`.
        config: See `Job`.
    """

    play: Play
    hosts: int = 2
    own_clocks: bool = False
    config: Mapping[str, Any] = field(default_factory=dict)


ROWS = {
    "undisturbed": Row(undisturbed),
    "cut-healed": Row(cut_healed),
    "cut-lost": Row(cut_lost),
    "unplugged-healed": Row(partial(cut_healed, cut=Host.unplug, heal=Host.plug)),
    "unplugged-lost": Row(partial(cut_lost, cut=Host.unplug)),
    "kill-rank": Row(kill_rank),
    "kill-agent": Row(kill_agent),
    "kill-pid-1": Row(kill_first_process),
    "host-0-lost": Row(host_0_lost),
    "cut-between": Row(cut_between, hosts=3),
    "two-lost": Row(two_hosts_lost(1, 2), hosts=3),
    "two-lost-with-0": Row(two_hosts_lost(0, 1), hosts=3),
    "stopped-rank": Row(stopped_rank),
    "slow-rank": Row(slow_rank),
    "slow-host": Row(slow_host),
    "slow-link": Row(slow_link),
    "loss": Row(loss_of_packets),
    "delay": Row(delay),
    "loss-and-delay": Row(loss_and_delay),
    "flipped-bits": Row(flipped_bits),
    "flipped-weight": Row(flipped_in("weight", 10), config=integrity(0, 10)),
    "flipped-gradient": Row(flipped_in("gradient", 1), config=integrity(0, 1)),
    "flipped-moment": Row(flipped_in("exp_avg", 1), config=integrity(3, 1)),
    "clock-jumps": Row(clock_jumps, own_clocks=True),
    "strangers": Row(strangers),
}


def words_of(pid: int) -> list[str]:
    """Return the command line of a process; empty if it has ended."""
    with suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_text().split("\0")
    return []


def pid_of(job: Job, host: Host, rank: int) -> int:
    """Return the pid of a rank in the outer pid namespace."""
    for pid in host.pids():
        with suppress(OSError):
            variables = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
            if f"RANK={rank}".encode() in variables and "--as-rank" in words_of(pid):
                return pid
    raise AssertionError(f"rank {rank} does not run on {host.name}")


@contextmanager
def playing(row: Row, options: argparse.Namespace) -> Iterator[Job]:
    """Start a job that trains and remove everything it made in the end."""
    with tempfile.TemporaryDirectory(prefix="faults-") as folder, hosts(row.hosts) as machines:
        job = Job(machines, Path(folder), options.each, row.own_clocks, row.config)
        job.start(options)
        yield job


def play(row: str, options: argparse.Namespace) -> list[Measure]:
    """Run a row once.

    Raises AssertionError if a message is missing or something is left over.
    """
    with playing(ROWS[row], options) as job:
        found = list(ROWS[row].play(job, options))
        living = [host for host in job.machines if Path(f"/proc/{host.pid}").exists()]
        job.until(
            lambda: not job.leftovers(living), 5.0, f"nothing is left, but {job.leftovers(living)}"
        )
        return found


def begin(rank: int, options: argparse.Namespace) -> tuple[Any, Callable[[], Any]]:
    """Return an engine and a function that returns the rank's next batch."""
    import torch

    import deepseek_zero

    torch.manual_seed(1)
    model = torch.nn.Sequential(*[torch.nn.Linear(300, 300) for _ in range(4)])
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "steps_per_print": None,
        "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
        "transport": options.transport,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "checkpoint": {"keep_last": 2},
        **json.loads(options.config),
    }
    engine, *_ = deepseek_zero.initialize(model=model, config=config)
    batches = torch.Generator().manual_seed(2 + rank)
    return engine, lambda: torch.randn(4, 300, generator=batches)


def be_a_rank(options: argparse.Namespace) -> None:
    """Train as one rank, save checkpoints, and write every loss and the final error."""
    from deepseek_zero.base.errors import DeepSeekZeroError

    folder, rank = Path(options.as_rank), int(os.environ["RANK"])
    try:
        engine, next_batch = begin(rank, options)
        with open(folder / f"{rank}.steps", "w", buffering=1) as steps:
            last, step = sys.maxsize, 0
            while step < last:
                flip_if_asked(folder, rank, step, engine)
                loss = engine(next_batch()).square().mean()
                engine.backward(loss)
                engine.step()
                steps.write(f"{time.monotonic()} {loss.item().hex()} {time.time()}\n")
                if engine.global_steps % SAVED_EVERY == SAVED_AFTER:
                    engine.save_checkpoint(folder / "checkpoints")
                time.sleep(PAUSE_SECONDS)
                with suppress(OSError):
                    time.sleep(5 * PAUSE_SECONDS * ((folder / "slow").read_text() == str(rank)))
                with suppress(OSError):
                    last = int((folder / "last").read_text())
                step += 1
        (folder / f"{rank}.explained").write_text(engine.explain())
    except DeepSeekZeroError as error:
        part = folder / f"{rank}.part"
        part.write_text(json.dumps([time.monotonic(), f"{type(error).__name__}: {error}"]))
        part.rename(folder / f"{rank}.error")
        raise


def be_a_loader(options: argparse.Namespace) -> None:
    """Load the last checkpoint.

    Write its number of steps and the loss of rank 0 in the next step.
    """
    engine, next_batch = begin(0, options)
    engine.load_checkpoint(Path(options.as_loader) / "checkpoints")
    for _ in range(engine.global_steps):
        next_batch()  # the batches that the checkpoint has already seen
    loss = engine(next_batch()).square().mean()
    sys.stdout.write(json.dumps([engine.global_steps, loss.item().hex()]))


def flip_if_asked(folder: Path, rank: int, step: int, engine: Any) -> None:
    """Flip a bit of this rank's memory, unnoticed by torch, if the test has requested it."""
    with suppress(OSError):
        asked, what = (folder / "flip").read_text().split()
        if int(asked) != rank or (folder / "flipped").exists():
            return
        optimizer, runtime = engine.optimizer, engine.runtime
        if what == "weight":
            flip(next(engine.module.parameters()))
        elif what == "exp_avg":
            flip(next(iter(optimizer.inner.state.values()))[what])
        else:
            before_step = runtime.backward.before_step

            def damaged() -> None:
                before_step()
                flip(runtime.trained_groups[0].gradient.sum.reduced())
                del runtime.backward.before_step

            runtime.backward.before_step = damaged
        (folder / "flipped").write_text(str(step))


def flip(values: Any) -> None:
    import torch

    values.detach().reshape(-1).view(torch.uint8).numpy()[3] ^= 1 << 5


def be_a_stranger(places: Sequence[tuple[str, int]]) -> None:
    """Connect to every address without the secret; write how long the longest connection stayed
    open.
    """
    import socket

    longest = 0.0
    for host, port in places:
        lines = []
        for number in range(STRANGERS // len(places)):
            with suppress(OSError):
                lines.append((time.monotonic(), socket.create_connection((host, port), timeout=5)))
                lines[-1][1].sendall(SAID[number % len(SAID)])
        for since, line in lines:
            with suppress(ConnectionError):
                line.settimeout(30)
                while line.recv(1 << 12):
                    pass
            longest = max(longest, time.monotonic() - since)
            line.close()
    sys.stdout.write(f"{longest}\n")


def parsed(words: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse command-line arguments. words: None parses those of this process."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rows", nargs="*", choices=ROWS, default=list(ROWS))
    parser.add_argument("--repeat", type=int, default=1)
    parser.add_argument("--dead-after", type=float, default=10.0)
    parser.add_argument("--each", type=int, default=2, help="ranks on each host")
    parser.add_argument("--transport", choices=("gloo", "tcp"), default="tcp")
    parser.add_argument("--load", type=float, default=1.0, help="bounds are multiplied by it")
    parser.add_argument("--as-rank", help=argparse.SUPPRESS)
    parser.add_argument("--config", default="{}", help=argparse.SUPPRESS)
    parser.add_argument("--as-stranger", help=argparse.SUPPRESS)
    parser.add_argument("--as-loader", help=argparse.SUPPRESS)
    return parser.parse_args(words)


def main() -> int:
    options = parsed()
    if options.as_rank:
        be_a_rank(options)
        return 0
    if options.as_loader:
        be_a_loader(options)
        return 0
    if options.as_stranger:
        be_a_stranger(json.loads(options.as_stranger))
        return 0
    broken = 0
    words = f"{options.repeat} times each, {options.each} ranks on each host, {options.transport}"
    print(f"{words}, dead after {options.dead_after:g} s, bounds x {options.load:g}")  # noqa: T201
    print("| fault | promised | bound | median | worst | |\n|---|---|---|---|---|---|")  # noqa: T201
    for row in options.rows:
        found: dict[tuple[str, float], list[float]] = defaultdict(list)
        faults = []
        for _ in range(options.repeat):
            try:
                for each in play(row, options):
                    found[each.what, each.bound].append(each.took)
            except AssertionError as error:
                faults.append(str(error))
        for (what, bound), took in found.items():
            is_met = max(took) <= bound * options.load
            broken += not is_met
            numbers = f"{bound:g} | {statistics.median(took):.2f} | {max(took):.2f}"
            print(f"| {row} | {what} | {numbers} | {'' if is_met else 'MISSED'} |", flush=True)  # noqa: T201
        for fault in faults:
            broken += 1
            print(f"| {row} | FAILED: {fault}", flush=True)  # noqa: T201
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
