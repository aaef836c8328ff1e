"""Hosts on one machine, each with a separate network, host name, processes, /dev/shm and IPC, on
one switch.

    with hosts(2, rate="1gbit") as (h0, h1):
        ranks = [h0.run(command, env), h1.run(command, env)]

They are made from namespaces, which requires root. The first process of a host reads a pipe of this
process until the pipe closes. A host therefore ends with the process that made it, even after a
crash, and its processes, mounts and network end with it. Hosts share the kernel, the clock and all
file systems except /dev/shm.
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
LISTENS = "0A"  # the state "LISTEN" in /proc/net/tcp
# Below the ephemeral ports and the ports that tests use by number.
FREE_PORTS = range(20_000, 29_000)
END_SECONDS = 60.0
# The first process of the pid namespace. It reaps orphans, as bash does while it reads.
HOST = """
hostname "$1" && mount -t tmpfs -o size=4g,mode=1777 shm /dev/shm \\
    && printf %s "$2" > /dev/shm/hosts && mount --bind /dev/shm/hosts /etc/hosts \\
    && rm /dev/shm/hosts && ip link set lo up && echo ready && read -r _
"""
SWITCH = "ip link add br0 type bridge && ip link set br0 up && echo ready && read -r _"


class Process(subprocess.Popen[str]):
    """A program on a host.

    Signals reach the program itself. It ends no later than the process of this handle.
    """

    def send_signal(self, sig: int) -> None:
        inside = _children(self.pid) if self.poll() is None else []
        for pid in inside:
            os.kill(pid, sig)
        # nsenter stops together with its child and has to be continued separately.
        if not inside or sig == signal.SIGCONT:
            super().send_signal(sig)


class Host:
    """One host.

    Attributes:
        name: "h0", "h1", ...
        address: IP address on the switch.
        pid: Its first process, in the outer pid namespace.
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
        """Start a program in the current folder, with this process's environment and `env`.

        options: arguments of Popen; by default stdout and stderr are one text pipe.
        """
        options = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True, **options}
        inside = [*self._start.enter, f"--wdns={options.pop('cwd', os.getcwd())}"]
        # The program ends with the handle's process, because killing the handle does not reach it.
        inside += ["setpriv", "--pdeathsig", "KILL", "--", *command]
        process = Process(inside, env={**os.environ, **(env or {})}, **options)
        self._running.append(process)
        return process

    def cut(self) -> None:
        """Drop every packet to and from this host; the link stays up and no error is visible."""
        self._switch.ip(f"link set {self._port} nomaster")

    def heal(self) -> None:
        """Undo `cut`."""
        self._switch.ip(f"link set {self._port} master br0")

    def unplug(self) -> None:
        """Take the carrier from the link, which the host's kernel notices immediately."""
        self._switch.ip(f"link set {self._port} down")

    def plug(self) -> None:
        """Undo `unplug`."""
        self._switch.ip(f"link set {self._port} up")

    def isolate(self) -> None:
        """Drop every packet between this host and other isolated hosts without a visible error."""
        self._switch.ip(f"link set {self._port} type bridge_slave isolated on")

    @contextmanager
    def disturbed(
        self, *, loss: float = 0.0, delay: float = 0.0, flip_every: int = 0
    ) -> Iterator[dict[str, int]]:
        """Lose, delay or damage frames to and from this host within a block (relay.py).

        Args:
            loss: Share of lost frames, in each direction.
            delay: Delay in seconds, in each direction.
            flip_every: Number of large frames for each damaged one; 0 damages none.

        Yields a dict that has the counts of passed, lost and damaged frames after the block.
        """
        counts: dict[str, int] = {}
        # The second device of the relay, and its peer at the switch.
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
        """Limit the link in each direction to a rate of tc ("100mbit"); None removes the limit."""
        for namespace, device in ((self._start, DEVICE), (self._switch, self._port)):
            if rate is None:
                namespace.call("tc", "qdisc", "del", "dev", device, "root")
                continue
            burst = max(LEAST_BURST, int(bits_per_second(rate) / 8 * BURST_SECONDS))
            words = f"qdisc replace dev {device} root tbf rate {rate} burst {burst} latency {QUEUE}"
            namespace.call("tc", *words.split())

    @contextmanager
    def slowed(self, stopped: float, period: float = 0.1) -> Iterator[None]:
        """Stop every process of this host for a part of each period within a block.

        The kernel of the host continues to run.

        Args:
            stopped: The part, between 0 and 1.
            period: Mean length in seconds. The lengths vary, because a fixed one could coincide
                with the rhythm of the programs and stop them only while they wait.
        """
        over = threading.Event()

        def send(sig: signal.Signals, pids: Sequence[int]) -> None:
            for pid in pids:
                with suppress(ProcessLookupError):
                    os.kill(pid, sig)

        def go_on() -> None:
            # nsenter stops together with its program
            send(signal.SIGCONT, [*self.pids(), *handles])

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
        """End the host like a loss of power: no packet reports that its programs have ended."""
        self.cut()
        self._start.end()

    def sent_bytes(self) -> int:
        """Return the bytes that its interface has sent, including headers."""
        return self._counter(SENT)

    def received_bytes(self) -> int:
        """Return the bytes that its interface has received, including headers."""
        return self._counter(RECEIVED)

    def ports(self) -> set[tuple[str, int]]:
        """Return the addresses and ports on which its programs listen for TCP.

        "::" and "0.0.0.0" mean all addresses.
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
        """Return all its processes except the first, in the outer pid namespace."""
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
    """The namespaces of a host or of the switch, and the process that keeps them.

    Attributes:
        enter: Prefix of a command that runs inside.
        first: The process, in the outer pid namespace.
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
        """Run subcommands of `ip` inside."""
        self.call("ip", "-batch", "-", text="\n".join(commands))

    def call(self, *command: str, text: str = "") -> None:
        """Run a program inside and wait for it; raise OSError with its stderr if it fails."""
        done = subprocess.run([*self.enter, *command], input=text, capture_output=True, text=True)
        if done.returncode:
            raise OSError(f"{' '.join(command)} {text!r}: {done.stderr.strip()}")

    def end(self) -> None:
        """Kill every process inside if the pid namespace is separate; later calls do nothing."""
        if self._process.returncode is not None:
            return
        with suppress(ProcessLookupError):
            # The kernel kills all processes of a pid namespace when the first one ends.
            os.kill(self.first, signal.SIGKILL)
        self._process.wait(END_SECONDS)
        for pipe in (self._process.stdin, self._process.stdout, self._process.stderr):
            assert pipe is not None
            pipe.close()


def free_port() -> int:
    """Return a free port of this machine.

    The port is outside the ephemeral range, so the kernel does not assign it to another program's
    connection before it is used.
    """
    while True:
        port = secrets.choice(FREE_PORTS)  # `random` has the same seed in every test and worker
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


@contextmanager
def hosts(count: int, rate: str | None = None, own: str | None = None) -> Iterator[list[Host]]:
    """Make `count` hosts on one switch, which end with the block.

    Skips the test without root or the required programs.

    Args:
        count: Number of hosts.
        rate: Rate of every link and direction for tc ("100mbit", "1gbit"); None: no limit.
        own: Address to which a host resolves its own name ("127.0.1.1" on Debian); None: the same
            as on the other hosts.
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
    """Run a module of this folder as the ranks of one world; return the output of rank 0.

    Args:
        module: Name of the module.
        pair: The hosts.
        port: Port of the rendezvous on the first host.
        arguments: Arguments after `--as-rank`.
        each: Ranks per host.
        timeout: Seconds for all ranks.

    Raises SystemExit with all output if a rank fails.
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
    """Move this process into the network, host name and IPC namespaces of a host.

    It keeps its pid and mount namespaces. pid: the first process of the host.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    for kind in ("net", "uts", "ipc"):
        with open(f"/proc/{pid}/ns/{kind}") as namespace:
            if libc.setns(namespace.fileno(), 0):
                raise OSError(ctypes.get_errno(), f"cannot enter {namespace.name}")


def sent_from_here() -> int:
    """Return the bytes that this process's host has sent, including headers."""
    return _counters("/proc/self/net/dev")[SENT]


def bits_per_second(rate: str) -> int:
    """Convert a rate in tc's notation to a number."""
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
    except OSError:  # the process has ended
        return []


def _pids() -> list[int]:
    return [int(name) for name in os.listdir("/proc") if name.isdecimal()]


def _link(pid: int, kind: str) -> str:
    try:
        return os.readlink(f"/proc/{pid}/ns/{kind}")
    except OSError:  # the process has ended
        return ""


def _address(text: str, nbytes: int) -> str:
    """Parse an address of /proc/net/tcp, which has four-byte words in the byte order of the
    machine.
    """
    words = [bytes.fromhex(text[start : start + 8])[::-1] for start in range(0, 2 * nbytes, 8)]
    return str(ipaddress.ip_address(b"".join(words)))
