"""Simulated hosts in Linux namespaces: isolation, link faults and cleanup."""

from __future__ import annotations

import ast
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests import hosts as module
from tests.hosts import Host, hosts

# Sends to a host and prints its answers.
SEND = """
import socket, sys
connection = socket.create_connection((sys.argv[1], 7000), timeout=60)
for line in sys.stdin:
    connection.sendall(line.encode() * int(sys.argv[2]))
    print(connection.recv(1, socket.MSG_WAITALL), flush=True)
"""
ECHO = """
import socket, sys
server = socket.create_server((sys.argv[1], 7000))
print("listens", flush=True)
connection, _ = server.accept()
while data := connection.recv(1 << 16):
    if data.endswith(b"\\n"):
        connection.sendall(b"!")
"""


# Answers each message with the number of its bytes that are not "x".
COUNT = """
import socket, sys
server = socket.create_server((sys.argv[1], 7000))
print("listens", flush=True)
connection, _ = server.accept()
wrong = 0
while data := connection.recv(1 << 16):
    wrong += len(data) - data.count(b"x")
    if data.endswith(b"\\n"):
        connection.sendall(bytes([wrong - 1]))
        wrong = 0
"""


def python(program: str, *arguments: str) -> list[str]:
    return [sys.executable, "-S", "-c", program, *arguments]


def output(host: Host, *command: str) -> str:
    return host.run(command).communicate(timeout=60)[0]


def listening(host: Host, program: str) -> subprocess.Popen[str]:
    """Start a program on the host and wait until it listens."""
    process = host.run(python(program, host.name))
    assert process.stdout is not None and process.stdout.readline() == "listens\n"
    return process


def test_hosts_have_names_addresses_and_memory_of_their_own_and_reach_each_other() -> None:
    with hosts(2) as (h0, h1):
        assert (output(h0, "hostname"), output(h1, "hostname")) == ("h0\n", "h1\n")
        output(h0, "touch", "/dev/shm/here")
        assert output(h0, "ls", "/dev/shm") == "here\n"
        assert output(h1, "ls", "/dev/shm") == ""
        assert output(h0, "sh", "-c", "echo $$ $ASKED").split()[0] != str(os.getpid())
        assert (
            h0.run(["sh", "-c", "echo $ASKED; pwd"], {"ASKED": "said"}).communicate()[0]
            == f"said\n{os.getcwd()}\n"
        )
        echo = listening(h1, ECHO)
        assert h1.ports() == {(h1.address, 7000)}
        assert h0.ports() == set()
        before = h0.sent_bytes(), h1.received_bytes()
        send = h0.run(python(SEND, "h1", "10000"), stdin=subprocess.PIPE)
        assert send.communicate("0123456789\n" * 10, timeout=60)[0] == "b'!'\n" * 10
        sent, received = h0.sent_bytes() - before[0], h1.received_bytes() - before[1]
        assert 1_100_000 < sent < 1_200_000
        assert abs(received - sent) < 2000
        assert echo.wait(60) == 0


def test_a_cut_is_silent_and_can_be_healed() -> None:
    with hosts(2) as (h0, h1):
        echo = listening(h1, ECHO)
        send = h0.run(python(SEND, "h1", "1000"), stdin=subprocess.PIPE)
        assert send.stdin is not None and send.stdout is not None
        send.stdin.write("a\n")
        send.stdin.flush()
        assert send.stdout.readline() == "b'!'\n"
        h1.cut()
        received = h1.received_bytes()
        send.stdin.write("b\n")
        send.stdin.flush()
        time.sleep(0.1)
        assert send.poll() is None and echo.poll() is None
        assert (
            h1.received_bytes() < received + 500
        )  # none of the message; a packet of the kernel may still arrive
        h1.heal()
        assert send.stdout.readline() == "b'!'\n"


def test_a_bandwidth_limit_applies_in_both_directions() -> None:
    with hosts(2, rate="100mbit") as (h0, h1):
        listening(h1, ECHO)
        send, began = h0.run(python(SEND, "h1", "1"), stdin=subprocess.PIPE), time.monotonic()
        assert send.communicate("x" * 2_500_000 + "\n", timeout=60)[0] == "b'!'\n"
        assert (
            0.18 < time.monotonic() - began < 10.0
        )  # 0.2 s minus a burst, plus the start of Python on a busy machine
        h0.limit(None)
        h0.limit("1gbit")


def test_frames_are_lost_late_or_damaged_on_their_way_and_counted() -> None:
    with hosts(2) as (h0, h1):
        listening(h1, COUNT)
        send = h0.run(python(SEND, "h1", "1"), stdin=subprocess.PIPE)
        assert send.stdin is not None and send.stdout is not None

        def wrong_bytes(length: int) -> int:
            assert send.stdin is not None and send.stdout is not None
            send.stdin.write("x" * length + "\n")
            send.stdin.flush()
            return ast.literal_eval(send.stdout.readline())[0]

        with h1.disturbed(loss=0.02) as counts:
            assert wrong_bytes(1_000_000) == 0, "what is lost is sent again"
        assert counts["lost"] > 5 and counts["passed"] > 600 and counts["damaged"] == 0
        with h1.disturbed(delay=0.1):
            began = time.monotonic()
            assert wrong_bytes(10) == 0 and time.monotonic() - began > 0.2
        with h1.disturbed(flip_every=100) as counts:
            assert 3 <= wrong_bytes(1_000_000) <= 10, "no checksum of TCP's sees it"
        assert counts["damaged"] >= 3 and counts["lost"] == 0
        assert wrong_bytes(1_000_000) == 0


def test_a_program_receives_signals_and_ends_with_its_host() -> None:
    with hosts(2) as (h0, h1):
        sleeper = h0.run(["sleep", "60"])
        until = time.monotonic() + 60
        while not h0.pids() and time.monotonic() < until:
            time.sleep(0.01)
        (inside,) = h0.pids()
        sleeper.send_signal(signal.SIGSTOP)
        sleeper.send_signal(signal.SIGCONT)
        sleeper.terminate()
        assert sleeper.wait(60) == -signal.SIGTERM
        left = h1.run(["sh", "-c", "sleep 60 & sleep 60"])
        h1.kill()
        assert left.wait(60) == -signal.SIGKILL
        assert not Path(f"/proc/{inside}").exists()


def test_simulated_hosts_are_removed_after_every_failure() -> None:
    with pytest.raises(ZeroDivisionError), hosts(2) as made:
        found = [host.pid for host in made] + [made[0].run(["sleep", "60"]).pid]
        raise ZeroDivisionError
    assert not [pid for pid in found if Path(f"/proc/{pid}").exists()]
    program = f"""
import sys, time
sys.path.insert(0, {str(Path(module.__file__).parents[1])!r})
from tests.hosts import hosts
with hosts(2) as made:
    made[1].run(["sh", "-c", "sleep 60 & sleep 60"])
    while len(made[1].pids()) < 3:
        time.sleep(0.01)
    print(*made[1].pids(), *(host.pid for host in made), flush=True)
    time.sleep(60)
"""
    killed = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    assert killed.stdout is not None
    pids = [int(pid) for pid in killed.stdout.readline().split()]
    assert len(pids) == 5
    killed.kill()
    killed.communicate()
    until = time.monotonic() + 60
    while (
        left := [pid for pid in pids if Path(f"/proc/{pid}").exists()]
    ) and time.monotonic() < until:
        time.sleep(0.01)
    assert not left
