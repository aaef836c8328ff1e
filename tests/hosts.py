"""Hosts on one machine, each with its own network, host name, processes, /dev/shm and IPC, on one
switch.

    with hosts(2, rate="1gbit") as (h0, h1):
        ranks = [h0.run(command, env), h1.run(command, env)]

Root makes them, from namespaces.  The first process of a host reads a pipe of ours until it ends,
so that a host ends with the process that made it, however that one ends, and takes its processes,
mounts and network along: nothing has a name that could be left behind.  What hosts share is the
kernel, the clock and the file systems but /dev/shm.
"""

from __future__ import annotations

import ctypes
import ipaddress
import json
import os
import random
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

from tests.needs import need

DEVICE = "v0"  # the network interface of every host
NETWORK = ipaddress.ip_network("10.77.0.0/24")
PROGRAMS = ("ip", "tc", "unshare", "nsenter", "setpriv")
BURST_SECONDS, LEAST_BURST, QUEUE = 2e-3, 1 << 16, "20ms"  # of a limited link
RELAY = str(Path(__file__).with_name("relay.py"))
UNITS = {"kbit": 10**3, "mbit": 10**6, "gbit": 10**9}
RECEIVED, SENT = 0, 8  # columns of bytes in /proc/net/dev
LISTENS = "0A"  # the kernel's word in /proc/net/tcp
# Below those that systems give to connections, and those that tests name
FREE_PORTS = range(20_000, 29_000)
END_SECONDS = 60.0
# The first process of its namespace: it takes in orphans that have ended, as bash does while it
# reads.
HOST = """
hostname "$1" && mount -t tmpfs -o size=4g,mode=1777 shm /dev/shm \\
    && printf %s "$2" > /dev/shm/hosts && mount --bind /dev/shm/hosts /etc/hosts \\
    && rm /dev/shm/hosts && ip link set lo up && echo ready && read -r _
"""
SWITCH = "ip link add br0 type bridge && ip link set br0 up && echo ready && read -r _"


class Process(subprocess.Popen[str]):
    """A program on a host.  Signals reach the program itself; it ends with this handle's process at
    the latest.
    """

    def send_signal(self, sig: int) -> None:
        inside = _children(self.pid) if self.poll() is None else []
        for pid in inside:
            os.kill(pid, sig)
        # Nsenter stops with its child, and waits to be continued itself
        if not inside or sig == signal.SIGCONT:
            super().send_signal(sig)


class Host:
    """One host.  name: "h0", "h1", ...; address: on the switch; pid: of its first process, as seen
    from outside.
    """

    def __init__(self, number: int, switch: Namespace, start: Namespace) -> None:
        self.number, self.name, self.address = number, f"h{number}", str(NETWORK[number + 1])
        self._switch, self._start, self._port = switch, start, f"p{number}"
        self.pid = start.first
        self._running: list[Process] = []
        switch.ip(
            f"link add {self._port} type veth peer name {DEVICE} netns {self.pid}",
            f"link set {self._port} master br0 up",
        )
        start.ip(
            f"addr add {self.address}/{NETWORK.prefixlen} dev {DEVICE}", f"link set {DEVICE} up"
        )

    def run(
        self, command: Sequence[str], env: Mapping[str, str] | None = None, **options: Any
    ) -> Process:
        """Start a program in this folder, with this process's environment and `env`.

        options: Popen's; without them both outputs come through one pipe, as text.
        """
        options = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True, **options}
        inside = [*self._start.enter, f"--wdns={options.pop('cwd', os.getcwd())}"]
        # With the handle's process it ends, too: a kill of that one would reach nobody else.
        inside += ["setpriv", "--pdeathsig", "KILL", "--", *command]
        process = Process(inside, env={**os.environ, **(env or {})}, **options)
        self._running.append(process)
        return process

    def cut(self) -> None:
        """Lose every packet to and from this host from now on; nobody is told, and its link stays
        up.
        """
        self._switch.ip(f"link set {self._port} nomaster")

    def heal(self) -> None:
        """End a cut."""
        self._switch.ip(f"link set {self._port} master br0")

    def unplug(self) -> None:
        """Take the carrier from the link: its host's kernel knows at once that nothing leaves any
        more.
        """
        self._switch.ip(f"link set {self._port} down")

    def plug(self) -> None:
        """End that."""
        self._switch.ip(f"link set {self._port} up")

    def isolate(self) -> None:
        """Lose every packet between this host and others that are isolated, too; nobody is told."""
        self._switch.ip(f"link set {self._port} type bridge_slave isolated on")

    @contextmanager
    def disturbed(
        self, *, loss: float = 0.0, delay: float = 0.0, flip_every: int = 0
    ) -> Iterator[dict[str, int]]:
        """Lose, delay or damage frames to and from this host within a block (relay.py); at its end
        they are counted.

        loss: the share of frames, each way.  delay: in seconds, each way.  flip_every: frames with
        much data from one damaged one to the next; 0: none is.  Yields a dict that has the counts
        of frames passed, lost and damaged after the block.
        """
        counts: dict[str, int] = {}
        # The relay's second device, and its other end at the switch
        near, far = (f"q{self.number}", f"r{self.number}")
        whole_frames = [sys.executable, "-S", RELAY]
        self._start.call(*whole_frames, DEVICE)
        self._switch.ip(f"link add {near} type veth peer name {far}", f"link set {near} up")
        self._switch.call(*whole_frames, far)
        self._switch.ip(f"link set {far} master br0 up", f"link set {self._port} nomaster")
        words = [f"--loss={loss}", f"--delay={delay}", f"--flip-every={flip_every}"]
        command = [*self._switch.enter, *whole_frames, self._port, near, *words]
        with subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        ) as relay:
            assert relay.stdin is not None and relay.stdout is not None
            try:
                assert relay.stdout.readline() == "ready\n"
                yield counts
            finally:
                relay.stdin.close()
                counts.update(json.loads(relay.stdout.read() or "{}"))
                if Path(f"/proc/{self.pid}").exists():
                    self._switch.ip(f"link del {near}", f"link set {self._port} master br0")

    def limit(self, rate: str | None) -> None:
        """Limit the link to what tc calls a rate ("100mbit"), each way; None: no limit."""
        for namespace, device in ((self._start, DEVICE), (self._switch, self._port)):
            if rate is None:
                namespace.call("tc", "qdisc", "del", "dev", device, "root")
                continue
            burst = max(LEAST_BURST, int(bits_per_second(rate) / 8 * BURST_SECONDS))
            words = f"qdisc replace dev {device} root tbf rate {rate} burst {burst} latency {QUEUE}"
            namespace.call("tc", *words.split())

    @contextmanager
    def slowed(self, stopped: float, period: float = 0.1) -> Iterator[None]:
        """Stop every process of this host for a part of each period, within a block; its kernel
        goes on.

        stopped: that part. period: in seconds, the mean of many lengths: of one length they may
        fall in step with what runs there, and stop it only while it waits.
        """
        over = threading.Event()

        def send(sig: signal.Signals, pids: Sequence[int]) -> None:
            for pid in pids:
                with suppress(ProcessLookupError):
                    os.kill(pid, sig)

        def go_on() -> None:
            send(signal.SIGCONT, [*self.pids(), *handles])  # nsenter stops where its program does

        def take_turns() -> None:
            lengths = random.Random(0)
            while not over.is_set():
                length = lengths.uniform(0.5 * period, 1.5 * period)
                send(signal.SIGSTOP, self.pids())
                time.sleep(stopped * length)
                go_on()
                time.sleep((1 - stopped) * length)
            go_on()  # nsenter may have stopped since

        handles = [process.pid for process in self._running if process.poll() is None]
        turns = threading.Thread(target=take_turns, daemon=True)
        turns.start()
        try:
            yield
        finally:
            over.set()
            turns.join()

    def kill(self) -> None:
        """End the host as a loss of power does: no packet says that its programs are gone."""
        self.cut()
        self._start.end()

    def sent_bytes(self) -> int:
        """Return the bytes that have left its interface, headers included."""
        return self._counter(SENT)

    def received_bytes(self) -> int:
        """Return the bytes that have come in."""
        return self._counter(RECEIVED)

    def ports(self) -> set[tuple[str, int]]:
        """Return where its programs listen for TCP: addresses and ports; "::" and "0.0.0.0" mean
        all addresses.
        """
        found = set()
        for table, is_little in (("tcp", 4), ("tcp6", 16)):
            for line in Path(f"/proc/{self.pid}/net/{table}").read_text().splitlines()[1:]:
                place, state = line.split()[1], line.split()[3]
                if state == LISTENS:
                    address, port = place.split(":")
                    found.add((_address(address, is_little), int(port, 16)))
        return found

    def pids(self) -> list[int]:
        """Return its processes but the first, as seen from outside."""
        mine = os.readlink(f"/proc/{self.pid}/ns/pid")
        return [pid for pid in _pids() if pid != self.pid and _link(pid, "pid") == mine]

    def close(self) -> None:
        self._start.end()
        for process in self._running:
            process.kill()
            process.wait(END_SECONDS)
            for pipe in (process.stdin, process.stdout, process.stderr):
                if pipe is not None:
                    pipe.close()

    def _counter(self, column: int) -> int:
        return _counters(f"/proc/{self.pid}/net/dev")[column]


class Namespace:
    """The namespaces of a host or of the switch, and the process in them that keeps them.

    enter: the words before a command that is to run inside.  first: that process, as seen from
    outside.
    """

    def __init__(self, script: str, *arguments: str, kinds: Sequence[str]) -> None:
        flags = [f"--{kind}" for kind in kinds]
        own_pids = ["--fork", "--mount-proc"] if "pid" in kinds else []
        self._process = subprocess.Popen(
            ["unshare", *flags, *own_pids, "bash", "-c", script, "bash", *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        assert self._process.stdout is not None and self._process.stderr is not None
        self.first = self._process.pid
        try:
            if self._process.stdout.readline() != "ready\n":
                raise OSError(f"no namespace: {self._process.stderr.read().strip()}")
            if own_pids:
                (self.first,) = _children(self._process.pid)
        except BaseException:
            self.end()
            raise
        self.enter = ["nsenter", f"--target={self.first}", *flags]

    def ip(self, *commands: str) -> None:
        """Run commands of ip's inside."""
        self.call("ip", "-batch", "-", text="\n".join(commands))

    def call(self, *command: str, text: str = "") -> None:
        """Run a program inside and wait for it; OSError with its own words if it fails."""
        done = subprocess.run([*self.enter, *command], input=text, capture_output=True, text=True)
        if done.returncode:
            raise OSError(f"{' '.join(command)} {text!r}: {done.stderr.strip()}")

    def end(self) -> None:
        """End every process inside at once, as far as they have pids of their own; calls after the
        first do nothing.
        """
        if self._process.returncode is not None:
            return
        with suppress(ProcessLookupError):
            # Without its first process the kernel ends all others
            os.kill(self.first, signal.SIGKILL)
        self._process.wait(END_SECONDS)
        for pipe in (self._process.stdin, self._process.stdout, self._process.stderr):
            assert pipe is not None
            pipe.close()


def free_port() -> int:
    """Return a port of this machine that nobody has taken.

    Between this and its use no connection of another program is given it, as one bound to port 0
    may be.
    """
    while True:
        port = secrets.choice(FREE_PORTS)  # `random` begins every test, of every worker, alike
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


@contextmanager
def hosts(count: int, rate: str | None = None, own: str | None = None) -> Iterator[list[Host]]:
    """Make so many hosts on one switch; they end with the block.  Skips the test without root or
    the programs.

    rate: of every link, each way, in tc's words ("100mbit", "1gbit"); None: as fast as the machine.
    own: what a host's name means on itself ("127.0.1.1", as Debian writes); None: what it means on
    the others.
    """
    need(os.geteuid() == 0, "root, to make hosts of namespaces")
    need(all(map(shutil.which, PROGRAMS)), f"{', '.join(PROGRAMS)} (iproute2 and util-linux)")
    need(
        subprocess.run(["unshare", "--net", "true"], capture_output=True).returncode == 0,
        "leave to make namespaces",
    )
    with ExitStack() as stack:
        switch = Namespace(SWITCH, kinds=("net",))
        stack.callback(switch.end)
        found = []
        for number in range(count):
            kinds = ("net", "uts", "mount", "ipc", "pid")
            meant = {f"h{each}": NETWORK[each + 1] for each in range(count)} | (
                {f"h{number}": own} if own else {}
            )
            names = "".join(
                f"{address} {name}\n"
                for name, address in {"localhost": "127.0.0.1", **meant}.items()
            )
            start = Namespace(HOST, f"h{number}", names, kinds=kinds)
            stack.callback(start.end)
            found.append(Host(number, switch, start))
            stack.callback(found[-1].close)
            if rate is not None:
                found[-1].limit(rate)
        yield found


def run_ranks(
    module: str,
    pair: Sequence[Host],
    port: int,
    arguments: Sequence[object] = (),
    *,
    each: int = 1,
    timeout: float | None = None,
) -> str:
    """Run a module of this folder as the ranks of one world, `each` of them on a host; return what
    rank 0 wrote.

    arguments: behind `--as-rank`.  SystemExit with everything that was written where a rank failed.
    """
    world = {
        "WORLD_SIZE": str(each * len(pair)),
        "MASTER_ADDR": pair[0].address,
        "MASTER_PORT": str(port),
    }
    command = [sys.executable, "-m", module, "--as-rank", *map(str, arguments)]
    running = []
    for number, host in enumerate(pair):
        for place in range(each):
            here = {"RANK": number * each + place, "LOCAL_RANK": place, "LOCAL_WORLD_SIZE": each}
            running.append(
                host.run(command, {**world, **{name: str(value) for name, value in here.items()}})
            )
    said = [rank.communicate(timeout=timeout)[0] for rank in running]
    if any(rank.returncode for rank in running):
        raise SystemExit("\n".join(said))
    return said[0]


def enter_host(pid: int) -> None:
    """Move this process into the network, name and IPC of a host; it keeps its place among
    processes and its mounts.

    pid: of the host's first process.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    for kind in ("net", "uts", "ipc"):
        with open(f"/proc/{pid}/ns/{kind}") as namespace:
            if libc.setns(namespace.fileno(), 0):
                raise OSError(ctypes.get_errno(), f"cannot enter {namespace.name}")


def sent_from_here() -> int:
    """Return the bytes that have left this process's host, headers included."""
    return _counters("/proc/self/net/dev")[SENT]


def bits_per_second(rate: str) -> int:
    """Return a rate in tc's words as a number."""
    unit = next(unit for unit in UNITS if rate.endswith(unit))
    return int(float(rate.removesuffix(unit)) * UNITS[unit])


def _counters(path: str) -> list[int]:
    lines = Path(path).read_text().splitlines()
    mine = next(line.split(":", 1)[1] for line in lines if line.strip().startswith(f"{DEVICE}:"))
    return [int(counter) for counter in mine.split()]


def _children(pid: int) -> list[int]:
    try:
        return [
            int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        ]
    except OSError:  # it has ended
        return []


def _pids() -> list[int]:
    return [int(name) for name in os.listdir("/proc") if name.isdecimal()]


def _link(pid: int, kind: str) -> str:
    try:
        return os.readlink(f"/proc/{pid}/ns/{kind}")
    except OSError:  # it has ended
        return ""


def _address(text: str, nbytes: int) -> str:
    """An address out of /proc/net/tcp: words of four bytes, each in the machine's order."""
    words = [bytes.fromhex(text[start : start + 8])[::-1] for start in range(0, 2 * nbytes, 8)]
    return str(ipaddress.ip_address(b"".join(words)))
