"""Pass frames between two network devices, and lose, delay or damage some of them.

    python tests/relay.py p1 q1 --loss 0.01 --delay 0.025 --flip-every 2000

Many kernels have no netem. A damaged frame gets a correct TCP checksum, as if the memory of a
switch had flipped a bit, so no network layer notices. Only frames with much data are damaged,
because short control messages have no other checksum than TCP's. The relay ends when its standard
input closes and then writes the counts of passed, lost and damaged frames. It is run by path, uses
only the standard library, and needs root and frames with checksums (`without_offload`).
"""

from __future__ import annotations

import argparse
import ctypes
import fcntl
import json
import random
import select
import socket
import struct
import sys
import time
from collections import Counter, deque

ALL_FRAMES, LARGEST = 0x0003, 1 << 16  # ETH_P_ALL
SOL_PACKET, PACKET_IGNORE_OUTGOING = 263, 23
SO_RCVBUFFORCE, SO_SNDBUFFORCE, ROOM = 33, 32, 1 << 23
SIOCETHTOOL, ETHTOOL_STXCSUM = 0x8946, 0x17
AT_ONCE = 64  # frames of one device before the other device gets its turn
ETHERNET, IPV4, TCP = 14, 0x0800, 6
MUCH_DATA = 1000  # least number of bytes of a frame that may be damaged
WORD = struct.Struct("!H")


def without_offload(device: str) -> None:
    """Disable the device's offloads: the kernel sends complete segments with checksums."""
    value = ctypes.create_string_buffer(struct.pack("II", ETHTOOL_STXCSUM, 0))
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        fcntl.ioctl(
            any_socket, SIOCETHTOOL, struct.pack("16sP", device.encode(), ctypes.addressof(value))
        )


def damaged(frame: bytes, chance: random.Random) -> bytes | None:
    """Return the frame with one flipped bit and a matching checksum.

    Returns None if the frame has little data or is not TCP.
    """
    changed = bytearray(frame)
    if (
        len(frame) < MUCH_DATA
        or WORD.unpack_from(frame, ETHERNET - 2)[0] != IPV4
        or frame[ETHERNET + 9] != TCP
    ):
        return None
    tcp = ETHERNET + 4 * (frame[ETHERNET] & 15)
    data, end = (
        tcp + 4 * (frame[tcp + 12] >> 4),
        ETHERNET + WORD.unpack_from(frame, ETHERNET + 2)[0],
    )
    if end - data < MUCH_DATA:
        return None
    place = chance.randrange(data, end - 1)
    word = place - (place - tcp) % 2
    (before,) = WORD.unpack_from(changed, word)
    changed[place] ^= 1 << chance.randrange(8)
    (after,) = WORD.unpack_from(changed, word)
    (check,) = WORD.unpack_from(changed, tcp + 16)
    total = (~check & 0xFFFF) + (~before & 0xFFFF) + after
    while total >> 16:
        total = (total & 0xFFFF) + (total >> 16)
    WORD.pack_into(changed, tcp + 16, ~total & 0xFFFF)
    return bytes(changed)


def open_device(name: str) -> socket.socket:
    found = socket.socket(socket.AF_PACKET, socket.SOCK_RAW)
    found.setsockopt(socket.SOL_SOCKET, SO_RCVBUFFORCE, ROOM)
    found.setsockopt(socket.SOL_SOCKET, SO_SNDBUFFORCE, ROOM)
    found.setsockopt(SOL_PACKET, PACKET_IGNORE_OUTGOING, 1)
    found.bind((name, ALL_FRAMES))
    found.setblocking(False)
    return found


def relay(names: list[str], loss: float, delay: float, flip_every: int, seed: int) -> Counter[str]:
    """Pass frames until standard input ends; return how many were passed, lost and damaged."""
    chance, counts = random.Random(seed), Counter(passed=0, lost=0, damaged=0)
    devices = [open_device(name) for name in names]
    # for each device, the due times and frames
    waiting: list[deque[tuple[float, bytes]]] = [deque(), deque()]
    data_frames = 0
    say("ready")
    while True:
        now = time.monotonic()
        due = min((queue[0][0] for queue in waiting if queue), default=now + 1.0)
        came, _, _ = select.select([sys.stdin, *devices], [], [], max(0.0, due - now))
        if sys.stdin in came:
            return counts
        now = time.monotonic()
        for number, device in enumerate(devices):
            for _ in range(AT_ONCE if device in came else 0):
                try:
                    frame = device.recv(LARGEST)
                except BlockingIOError:
                    break
                if chance.random() < loss:
                    counts["lost"] += 1
                    continue
                data_frames += len(frame) > MUCH_DATA
                if (
                    flip_every
                    and data_frames >= flip_every
                    and (other := damaged(frame, chance)) is not None
                ):
                    frame, data_frames = other, 0
                    counts["damaged"] += 1
                waiting[1 - number].append((now + delay, frame))
        now = time.monotonic()
        for device, queue in zip(devices, waiting, strict=True):
            while queue and queue[0][0] <= now:
                try:
                    device.send(queue.popleft()[1])
                    counts["passed"] += 1
                except OSError:  # the queue is full, and the frame is lost
                    counts["lost"] += 1


def say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument(
        "devices", nargs="+", help="two; or one, that is to send whole frames from now on"
    )
    parser.add_argument("--loss", type=float, default=0.0, help="the share of frames, each way")
    parser.add_argument("--delay", type=float, default=0.0, help="seconds, each way")
    parser.add_argument(
        "--flip-every",
        type=int,
        default=0,
        help="frames with much data from one damaged one to the next",
    )
    parser.add_argument("--seed", type=int, default=1)
    given = parser.parse_args()
    if len(given.devices) == 1:
        without_offload(given.devices[0])
        return
    say(json.dumps(relay(given.devices, given.loss, given.delay, given.flip_every, given.seed)))


if __name__ == "__main__":
    main()
